"""rename.py MAP...: rename symbols over the whole repository, with types from mypy for attributes.

Lines: `path.py:Qual.name newname`. Positions are all found first, then edited together.
"""

import ast
import collections
import io
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path


def tracked(*g):
    return [
        f
        for f in subprocess.run(
            ["git", "ls-files", *g], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        if Path(f).exists() and not Path(f).is_symlink()
    ]


STAGES = ("datastore", "offline", "online", "serve", "cli")


def module(f):
    if f.split("/")[0] in STAGES:
        m = "replaylake." + f.removesuffix(".py").replace("/", ".")
        return m.removesuffix(".__init__")
    if f == "src/replaylake/__init__.py":
        return "replaylake"
    if f.startswith("benchmarks/"):
        return f.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    return "x_" + re.sub(r"\W", "_", f.removesuffix(".py"))


top = collections.defaultdict(dict)  # module -> {old: new}
attr = collections.defaultdict(dict)  # attr -> {class fullname: new}
for p in sys.argv[1:]:
    for n, line in enumerate(Path(p).read_text().splitlines(), 1):
        line = line.split("#")[0].strip()
        if not line:
            continue
        try:
            left, new = line.split()
            f, q = left.split(":")
        except ValueError:
            print("bad line", p, n, line)
            continue
        if not Path(f).exists():
            print("no file", f, q)
            continue
        parts = q.split(".")
        if not re.fullmatch(r"[A-Za-z_]\w*", new.split(".")[-1]):
            print("bad name", line)
            continue
        new = new.split(".")[-1]
        if parts[-1] == new:
            continue
        if len(parts) == 1:
            top[module(f)][q] = new
        elif len(parts) == 2:
            attr[parts[1]][module(f) + "." + parts[0]] = new
        else:
            print("too deep", line)

pyfiles = [f for f in tracked("*.py") if not f.startswith("tests/fixtures")]
trees, texts = {}, {}
for f in pyfiles:
    texts[f] = Path(f).read_text()
    trees[f] = ast.parse(texts[f])
mod_of = {f: module(f) for f in pyfiles}
file_of = {m: f for f, m in mod_of.items()}
edits = collections.defaultdict(dict)  # file -> {(line, col): (old, new)}
line_bytes = {}


def L(f):
    if f not in line_bytes:
        line_bytes[f] = [l.encode() for l in texts[f].splitlines(keepends=True)]
    return line_bytes[f]


def add(f, line, col, old, new):
    if L(f)[line - 1][col : col + len(old)].decode(errors="replace") != old:
        # search forward on the line
        m = re.compile(rb"\b%s\b" % old.encode()).search(L(f)[line - 1], col)
        if not m:
            print("?? position", f, line, col, old)
            return
        col = m.start()
    edits[f][(line, col)] = (old, new)


def toplevel_defs(tree):
    out = {}

    def visit(body):
        for s in body:
            if isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                out.setdefault(s.name, []).append(s)
            elif isinstance(s, ast.Assign):
                for t in s.targets:
                    for x in ast.walk(t):
                        if isinstance(x, ast.Name):
                            out.setdefault(x.id, []).append(x)
            elif isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name):
                out.setdefault(s.target.id, []).append(s.target)
            elif isinstance(s, (ast.If, ast.Try, ast.With)):
                visit(s.body)
                visit(getattr(s, "orelse", []))
                for h in getattr(s, "handlers", []):
                    visit(h.body)

    visit(tree.body)
    return out


def local_names(fn):
    """Names bound in this function's own scope (not nested functions)."""
    names = set()
    a = fn.args
    for x in [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]:
        if x is not None:
            names.add(x.arg)
    globs = set()

    def walk(n):
        for c in ast.iter_child_nodes(n):
            if isinstance(c, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(c.name)
                continue
            if isinstance(c, ast.Lambda):
                continue
            if isinstance(c, ast.Global):
                globs.update(c.names)
            if isinstance(c, ast.Name) and isinstance(c.ctx, (ast.Store, ast.Del)):
                names.add(c.id)
            if isinstance(c, (ast.Import, ast.ImportFrom)):
                for al in c.names:
                    names.add(al.asname or al.name.split(".")[0])
            if isinstance(c, ast.ExceptHandler) and c.name:
                names.add(c.name)
            if isinstance(c, (ast.MatchAs, ast.MatchStar)) and c.name:
                names.add(c.name)
            walk(c)

    body = fn.body if isinstance(fn.body, list) else [fn.body]
    for s in body:
        if isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(s.name)
        elif isinstance(s, ast.Name) and isinstance(s.ctx, ast.Store):
            names.add(s.id)
        if isinstance(s, (ast.Import, ast.ImportFrom)):
            for al in s.names:
                names.add(al.asname or al.name.split(".")[0])
        if isinstance(s, ast.Global):
            globs.update(s.names)
        if not isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            walk(s)
    return names - globs


_index = {}


def index(f):
    """Name id -> [(node, chain of (function, its local names))]."""
    if f in _index:
        return _index[f]
    out = collections.defaultdict(list)

    def visit(n, chain):
        for c in ast.iter_child_nodes(n):
            if isinstance(c, ast.Name):
                out[c.id].append((c, chain))
            if isinstance(c, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                visit(c, (*chain, (c, local_names(c))))
            else:
                visit(c, chain)

    visit(trees[f], ())
    _index[f] = out
    return out


def uses(f, old, new, is_import=False):
    """Rename global uses of a name in a file; report capture."""
    for c, chain in index(f).get(old, ()):
        if any(old in ln and not (is_import and imports_locally(fn, old)) for fn, ln in chain):
            continue
        if any(new in ln for fn, ln in chain):
            print(f"!! capture: {f}:{c.lineno} {old} -> {new} shadows a local")
        add(f, c.lineno, c.col_offset, old, new)


def imports_locally(fn, old):
    for c in ast.walk(fn):
        if isinstance(c, ast.ImportFrom):
            for al in c.names:
                if (al.asname or al.name) == old:
                    return True
    return False


used_in = collections.defaultdict(set)
for m, names in top.items():
    f = file_of[m]
    defs = toplevel_defs(trees[f])
    imported_here = {
        al.asname or al.name
        for n in ast.walk(trees[f])
        if isinstance(n, ast.ImportFrom)
        for al in n.names
    }
    for old, new in names.items():
        if old not in defs:
            print("no such name", f, old)
            continue
        if (new in defs and new not in names) or new in imported_here:
            print(f"!! clash in {f}: {old} -> {new}")
            continue
        for d in defs[old]:
            if isinstance(d, ast.Name):
                continue
            kw = {"FunctionDef": "def ", "AsyncFunctionDef": "async def ", "ClassDef": "class "}[
                type(d).__name__
            ]
            add(f, d.lineno, d.col_offset + len(kw), old, new)
        uses(f, old, new)

import_nodes = {
    g: [n for n in ast.walk(trees[g]) if isinstance(n, (ast.ImportFrom, ast.Import))]
    for g in pyfiles
}
attr_nodes = {
    g: [
        n
        for n in ast.walk(trees[g])
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)
    ]
    for g in pyfiles
}
call_nodes = {
    g: [
        n
        for n in ast.walk(trees[g])
        if isinstance(n, ast.Call)
        and len(n.args) >= 2
        and isinstance(n.args[0], ast.Name)
        and isinstance(n.args[1], ast.Constant)
    ]
    for g in pyfiles
}
str_nodes = {
    g: [
        n
        for n in ast.walk(trees[g])
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and "replaylake." in n.value
    ]
    for g in pyfiles
}
defs_of = {g: set(toplevel_defs(trees[g])) for g in pyfiles}
mentions = collections.defaultdict(list)
for g in pyfiles:
    for m in set(re.findall(r"replaylake(?:\.\w+)+", texts[g])) | {
        f"{n.module}.{al.name}"
        for n in import_nodes[g]
        if isinstance(n, ast.ImportFrom) and n.module
        for al in n.names
    }:
        mentions[m].append(g)
        for p_ in range(1, m.count(".") + 1):
            mentions[m.rsplit(".", p_)[0]].append(g)
for m, names in top.items():
    f = file_of[m]
    for g in sorted(set(mentions[m])):
        tree = trees[g]
        aliases = set()
        pkg, _, stem = m.rpartition(".")
        for n in import_nodes[g]:
            if isinstance(n, ast.ImportFrom) and n.module == m:
                for al in n.names:
                    if al.name in names:
                        old, new = al.name, names[al.name]
                        gdefs = defs_of[g]
                        others = {
                            a2.asname or a2.name
                            for n2 in import_nodes[g]
                            if isinstance(n2, ast.ImportFrom)
                            for a2 in n2.names
                        } | set(gdefs)
                        if al.asname is None and new in others and g != f:
                            print(f"!! clash in importer {g}: {old} -> {new}")
                        add(g, al.lineno, al.col_offset, old, new)
                        if al.asname is None:
                            uses(g, old, new, True)
                        elif al.asname == new:
                            pass
            elif isinstance(n, ast.ImportFrom) and n.module == pkg:
                for al in n.names:
                    if al.name == stem:
                        aliases.add(al.asname or al.name)
            elif isinstance(n, ast.Import):
                for al in n.names:
                    if al.name == m and al.asname:
                        aliases.add(al.asname)
        if aliases:
            for n in [*attr_nodes[g], *call_nodes[g]]:
                if (
                    isinstance(n, ast.Attribute)
                    and isinstance(n.value, ast.Name)
                    and n.value.id in aliases
                    and n.attr in names
                ):
                    add(g, n.end_lineno, n.end_col_offset - len(n.attr), n.attr, names[n.attr])
                if (
                    isinstance(n, ast.Call)
                    and len(n.args) >= 2
                    and isinstance(n.args[0], ast.Name)
                    and n.args[0].id in aliases
                    and isinstance(n.args[1], ast.Constant)
                    and n.args[1].value in names
                ):
                    c = n.args[1]
                    add(g, c.lineno, c.col_offset + 1, c.value, names[c.value])
        # strings: "replaylake.x.name" and code that imports it
        for n in str_nodes[g]:
            if isinstance(n, ast.Constant) and isinstance(n.value, str) and m in n.value:
                seg = "\n".join(texts[g].splitlines()[n.lineno - 1 : n.end_lineno])
                for old, new in names.items():
                    code = re.search(
                        rf"from {re.escape(m)} import [^\n]*\b{old}\b|from {re.escape(m)} import \([^)]*\b{old}\b",
                        n.value,
                    )
                    for i in range(n.lineno, n.end_lineno + 1):
                        raw = L(g)[i - 1]
                        pat = (
                            rb"(?<![\w.])%s\b(?!\s*=[^=])" % old.encode()
                            if code
                            else rb"(?<=%s[.:])%s\b" % (m.encode(), old.encode())
                        )
                        for mm in re.finditer(pat, raw):
                            edits[g][(i, mm.start())] = (old, new)

# attributes, by mypy
if attr:
    from mypy import build, nodes
    from mypy import options as mopt
    from mypy.config_parser import parse_config_file
    from mypy.types import (
        AnyType,
        CallableType,
        FunctionLike,
        Instance,
        LiteralType,
        Overloaded,
        TupleType,
        TypeType,
        TypeVarType,
        UnionType,
        get_proper_type,
    )

    o = mopt.Options()
    parse_config_file(o, lambda: None, "pyproject.toml", sys.stderr, sys.stderr)
    o.export_types = True
    o.preserve_asts = True
    o.incremental = False
    o.check_untyped_defs = True
    o.python_executable = sys.executable
    o.ignore_errors = True
    o.strict_optional = True
    o.files = []
    o.packages = []
    o.modules = []
    from mypy.modulefinder import BuildSource

    srcs = []
    for f in pyfiles:
        if f.split("/")[0] in STAGES or f == "src/replaylake/__init__.py":
            srcs.append(
                BuildSource(
                    "src/replaylake/" + f if f.split("/")[0] in STAGES else f, mod_of[f], None
                )
            )
        else:
            srcs.append(BuildSource(f, mod_of[f], None))
    os.environ["MYPYPATH"] = "src"
    o.mypy_path = ["src"]
    res = build.build(srcs, o)
    types = res.types
    infos = {}

    def collect(tab):
        for s in tab.values():
            if isinstance(s.node, nodes.TypeInfo) and s.node.fullname not in infos:
                infos[s.node.fullname] = s.node
                collect(s.node.names)

    for m in set(mod_of.values()):
        if m in res.files:
            collect(res.files[m].names)
    # class families: for each attribute every class concerned and its new name
    targets = {}
    definers = collections.defaultdict(set)
    for fn, info in infos.items():
        if info.module_name in file_of:
            for a in info.names:
                definers[a].add(fn)
    for a, classes in attr.items():
        t = {}
        for c, new in classes.items():
            if c not in infos:
                print("no class", c, a)
                continue
            if a not in infos[c].names:
                print("no attribute", c, a)
                continue
            t[c] = new
        for fn, info in infos.items():
            for c, new in list(t.items()):
                if fn not in t and any(b.fullname == c for b in info.mro):
                    t[fn] = new
            # up: bases that define it too
        for c, new in list(t.items()):
            for b in infos[c].mro[1:]:
                if a in b.names and b.fullname not in t and b.module_name in file_of:
                    print(f"base {b.fullname}.{a} renamed too")
                    t[b.fullname] = new
        # protocols: implementers
        for c, new in list(t.items()):
            if infos[c].is_protocol:
                members = {
                    k
                    for b in infos[c].mro
                    if b.is_protocol
                    for k in b.names
                    if not k.startswith("__")
                }
                for fn, info in infos.items():
                    if (
                        fn not in t
                        and info.module_name in file_of
                        and not info.is_protocol
                        and all(info.has_readable_member(k) for k in members)
                    ):
                        t[fn] = new
            else:
                for fn, info in infos.items():
                    if (
                        fn not in t
                        and info.is_protocol
                        and a in info.names
                        and info.module_name in file_of
                    ):
                        members = {
                            k
                            for b in info.mro
                            if b.is_protocol
                            for k in b.names
                            if not k.startswith("__")
                        }
                        if all(infos[c].has_readable_member(k) for k in members):
                            print(f"!! protocol {fn} has {a} that {c} implements: rename it too")
        targets[a] = t

    def classes_of(t):
        t = get_proper_type(t)
        if isinstance(t, Instance):
            return [t.type]
        if isinstance(t, UnionType):
            return [x for i in t.items for x in classes_of(i)]
        if isinstance(t, TypeVarType):
            return classes_of(t.upper_bound)
        if isinstance(t, TupleType):
            return classes_of(t.partial_fallback)
        if isinstance(t, TypeType):
            return classes_of(t.item)
        if isinstance(t, LiteralType):
            return classes_of(t.fallback)
        if isinstance(t, FunctionLike) and t.is_type_obj():
            return [t.type_object()]
        return []

    def new_for(a, cls):
        for b in cls.mro:
            if b.fullname in targets[a]:
                return targets[a][b.fullname]
        return None

    path_of = {}
    for f in pyfiles:
        path_of[mod_of[f]] = f
    unknown = collections.defaultdict(list)
    SKIP = {
        "node",
        "info",
        "type",
        "unanalyzed_type",
        "names",
        "def_var",
        "_fullname",
        "fullname",
        "line",
        "column",
        "end_line",
        "end_column",
        "__match_args__",
        "kind",
        "original_def",
        "expanded",
        "metadata",
        "type_guard",
        "type_is",
        "analyzed_target",
        "alias_deps",
        "plugin_deps",
        "future_import_flags",
        "imports",
        "path",
        "definition",
        "decorators",
        "removed_statements",
        "partial_fallback",
        "ignored_lines",
        "skipped_lines",
        "type_vars",
        "original_first_arg",
        "dataclass_transform_spec",
        "deprecated",
        "method_type",
        "right_always",
        "right_unreachable",
        "left_type",
    }

    class V:
        def visit_all(self, root):
            stack, seen = [root], set()
            while stack:
                n = stack.pop()
                if isinstance(n, (list, tuple)):
                    stack.extend(n)
                    continue
                if (
                    not isinstance(n, (nodes.Node,))
                    or isinstance(n, (nodes.TypeInfo, nodes.Var))
                    and n is not root
                ):
                    continue
                if id(n) in seen:
                    continue
                seen.add(id(n))
                if isinstance(n, nodes.MypyFile) and n is not root:
                    continue
                if isinstance(n, nodes.MemberExpr):
                    self.visit_member_expr(n)
                elif isinstance(n, nodes.SuperExpr):
                    self.visit_super_expr(n)
                elif isinstance(n, nodes.ClassDef):
                    self.visit_class_def(n)
                elif isinstance(n, nodes.CallExpr):
                    self.visit_call_expr(n)
                for k in type(n).__mypyc_attrs__:
                    if k in SKIP and not (k == "decorators" and isinstance(n, nodes.ClassDef)):
                        continue
                    try:
                        v = getattr(n, k)
                    except AttributeError:
                        continue
                    if isinstance(v, (list, tuple, nodes.Node)):
                        stack.append(v)

        def __init__(self, f):
            self.f = f

        def visit_member_expr(self, e):
            if e.name in targets and e.end_column is not None:
                a = e.name
                if isinstance(e.expr, nodes.RefExpr) and isinstance(e.expr.node, nodes.MypyFile):
                    return
                t = types.get(e.expr)
                cl = classes_of(t) if t is not None else []
                if isinstance(e.expr, nodes.RefExpr) and isinstance(e.expr.node, nodes.TypeInfo):
                    cl = [e.expr.node]
                news = {new_for(a, c) for c in cl}
                if news - {None}:
                    add(
                        self.f, e.end_line, e.end_column - len(a.encode()), a, (news - {None}).pop()
                    )
                elif not cl:
                    unknown[a].append((self.f, e.end_line, e.end_column - len(a)))

        def visit_super_expr(self, e):
            if e.name in targets and e.info and e.end_column is not None:
                n = new_for(e.name, e.info)
                if n:
                    add(self.f, e.end_line, e.end_column - len(e.name), e.name, n)

        def visit_class_def(self, c):
            for a in list(targets):
                if a in c.info.names:
                    n = new_for(a, c.info)
                    if n:
                        node = c.info.names[a].node
                        # definition found by ast below
                        defs_todo.add((self.f, c.fullname if False else c.name, c.line, a, n))

        def visit_call_expr(self, e):
            for an, arg in zip(e.arg_names, e.args):
                if an in targets:
                    cal = e.callee
                    cls = None
                    if isinstance(cal, nodes.RefExpr) and isinstance(cal.node, nodes.TypeInfo):
                        cls = cal.node
                    elif (
                        isinstance(cal, nodes.RefExpr)
                        and cal.fullname in ("dataclasses.replace", "copy.replace")
                        and e.args
                    ):
                        cc = (
                            classes_of(types.get(e.args[0]))
                            if types.get(e.args[0]) is not None
                            else []
                        )
                        cls = cc[0] if cc else None
                    elif isinstance(cal, nodes.MemberExpr) and cal.name == "_replace":
                        cc = (
                            classes_of(types.get(cal.expr))
                            if types.get(cal.expr) is not None
                            else []
                        )
                        cls = cc[0] if cc else None
                    if cls is not None:
                        n = new_for(an, cls)
                        if n:
                            kw_todo.add((self.f, arg.line, arg.column, an, n))

    defs_todo, kw_todo = set(), set()
    for m, f in path_of.items():
        if m in res.files:
            V(f).visit_all(res.files[m])
    for f, cname, line, a, n in defs_todo:
        for c in ast.walk(trees[f]):
            if (
                isinstance(c, ast.ClassDef)
                and c.name == cname
                and (c.lineno == line or any(d.lineno == line for d in c.decorator_list))
            ):
                for s in c.body:
                    if isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef)) and s.name == a:
                        add(
                            f,
                            s.lineno,
                            s.col_offset + (4 if isinstance(s, ast.FunctionDef) else 10),
                            a,
                            n,
                        )
                        continue
                    tg = (
                        [s.target]
                        if isinstance(s, ast.AnnAssign)
                        else (s.targets if isinstance(s, ast.Assign) else [])
                    )
                    for x in tg:
                        if isinstance(x, ast.Name) and x.id == a:
                            add(f, x.lineno, x.col_offset, a, n)
                    # uses of the name in the class body (aliases)
                    if isinstance(s, (ast.Assign, ast.AnnAssign)) and s.value is not None:
                        for x in ast.walk(s.value):
                            if isinstance(x, ast.Name) and x.id == a:
                                add(f, x.lineno, x.col_offset, a, n)
                    if isinstance(s, ast.FunctionDef):
                        for d in s.decorator_list:
                            for x in ast.walk(d):
                                if isinstance(x, ast.Name) and x.id == a:
                                    add(f, x.lineno, x.col_offset, a, n)
    for f, line, col, a, n in kw_todo:
        for c in ast.walk(trees[f]):
            if (
                isinstance(c, ast.keyword)
                and c.arg == a
                and (c.value.lineno, c.value.col_offset) == (line, col)
            ):
                add(f, c.lineno, c.col_offset, a, n)
    for a, places in unknown.items():
        t = targets[a]
        others = {d for d in definers[a] if new_for(a, infos[d]) is None}
        news = set(t.values())
        if not others and len(news) == 1 and len(a) > 4:
            for f, line, col in places:
                add(f, line, col, a, next(iter(news)))
            print(f"untyped: {a} renamed at {len(places)} places: {places[:4]}")
        else:
            print(f"?? untyped {a}: {places[:8]} others {sorted(others)[:4]}")

words = {}
for f, es in edits.items():
    for (line, col), (old, new) in es.items():
        words.setdefault(f, {})[old] = new
for f, es in edits.items():
    ls = list(L(f))
    for (line, col), (old, new) in sorted(es.items(), reverse=True):
        raw = ls[line - 1]
        ls[line - 1] = raw[:col] + new.encode() + raw[col + len(old.encode()) :]
    Path(f).write_bytes(b"".join(ls))
# mentions in comments, docstrings and docs: distinctive names only
glob = {}
for m, names in top.items():
    for o_, n_ in names.items():
        glob.setdefault(o_, set()).add(n_)
for a, cl in attr.items():
    for n_ in cl.values():
        glob.setdefault(a, set()).add(n_)
glob = {
    o_: next(iter(n_))
    for o_, n_ in glob.items()
    if len(n_) == 1
    and not o_.startswith("_")
    and ("_" in o_.strip("_") or (o_[0].isupper() and re.search("[a-z][A-Z]", o_)))
}
for f in [*pyfiles, *tracked("*.md")]:
    if f in ("CHANGELOG.md", "docs/LOG.md", "benchmarks/RESULTS.md") or f.startswith(
        "tests/fixtures"
    ):
        continue
    t = o_ = Path(f).read_text()
    if f.endswith(".py"):
        out = []
        try:
            toks = list(tokenize.generate_tokens(io.StringIO(t).readline))
        except Exception as e:
            print("tokenize", f, e)
            continue
        ls = t.splitlines(keepends=True)
        for k in reversed(toks):
            is_doc = k.type == tokenize.STRING and k.string.startswith(('"""', "'''", 'r"""'))
            if k.type == tokenize.COMMENT or is_doc:
                s = (
                    re.sub(
                        r"(?<![\w/\"'-])([A-Za-z]\w*)(?![\w\"'-])",
                        lambda x: glob.get(x.group(1), x.group(1)),
                        k.string,
                    )
                    if glob
                    else k.string
                )
                if s != k.string:
                    (r1, c1), (r2, c2) = k.start, k.end
                    text = "".join(ls[r1 - 1 : r2])
                    tail = ls[r2 - 1][c2:]
                    ls[r1 - 1 : r2] = [ls[r1 - 1][:c1] + s + tail]
                    ls = "".join(ls).splitlines(keepends=True)
        t = "".join(ls)
    else:
        t = (
            re.sub(
                r"(?<![\w/\"'-])([A-Za-z]\w*)(?![\w\"'-])",
                lambda x: glob.get(x.group(1), x.group(1)),
                t,
            )
            if glob
            else t
        )
    if t != o_:
        Path(f).write_text(t)
print(f"{sum(map(len, edits.values()))} places in {len(edits)} files")
