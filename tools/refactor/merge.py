"""merge.py LIST: fold modules into their only importer. Lines: `A B` (dotted, without replaylake.)."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path


def path(m):
    return m.replace(".", "/") + ".py"


def tracked(*g):
    return subprocess.run(
        ["git", "ls-files", *g], capture_output=True, text=True, check=True
    ).stdout.splitlines()


def parts(text):
    """docstring, list of import segments (source, node), TYPE_CHECKING segments, body text."""
    tree = ast.parse(text)
    lines = text.splitlines(keepends=True)
    doc = ast.get_docstring(tree, clean=False)
    nodes = tree.body
    i = 1 if doc is not None else 0
    imports, tc = [], []
    last = nodes[i - 1].end_lineno if i else 0
    while i < len(nodes):
        n = nodes[i]
        if isinstance(n, (ast.Import, ast.ImportFrom)):
            imports.append(n)
        elif (
            isinstance(n, ast.If)
            and isinstance(n.test, ast.Name)
            and n.test.id == "TYPE_CHECKING"
            and not n.orelse
        ):
            tc += n.body
        else:
            break
        last = n.end_lineno
        i += 1
    # trailing part of line of last import (comments) is dropped with it
    body = "".join(lines[last:])
    doc_end = nodes[0].end_lineno if doc is not None else 0
    head = "".join(lines[:doc_end])
    return head, imports, tc, body.strip("\n")


def seg(text, n):
    return ast.get_source_segment(text, n)


def import_time_names(tree):
    names = set()

    def expr(e):
        if e is not None:
            for x in ast.walk(e):
                if isinstance(x, ast.Name):
                    names.add(x.id)

    def stmt(s):
        if isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for d in s.decorator_list:
                expr(d)
            for d in [*s.args.defaults, *s.args.kw_defaults]:
                expr(d)
        elif isinstance(s, ast.ClassDef):
            for d in [*s.decorator_list, *s.bases, *[k.value for k in s.keywords]]:
                expr(d)
            for b in s.body:
                stmt(b)
        elif isinstance(s, ast.AnnAssign):
            expr(s.value)
        elif isinstance(s, (ast.Import, ast.ImportFrom)):
            pass
        elif isinstance(s, (ast.If, ast.With, ast.Try, ast.For)):
            for x in ast.walk(s):
                if isinstance(x, ast.Name):
                    names.add(x.id)
        else:
            expr(s)

    for s in tree.body:
        stmt(s)
    return names


def defined(tree):
    out = set()
    for s in tree.body:
        if isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            out.add(s.name)
        elif isinstance(s, ast.Assign):
            for t in s.targets:
                for x in ast.walk(t):
                    if isinstance(x, ast.Name):
                        out.add(x.id)
        elif isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name):
            out.add(s.target.id)
        elif isinstance(s, ast.If):
            for x in s.body:
                if isinstance(x, (ast.FunctionDef, ast.ClassDef)):
                    out.add(x.name)
                if isinstance(x, ast.Assign):
                    out |= {y.id for t in x.targets for y in ast.walk(t) if isinstance(y, ast.Name)}
        elif isinstance(s, ast.TypeAlias if hasattr(ast, "TypeAlias") else ()):
            out.add(s.name.id)
    return out


def imported(tree):
    out = {}
    for n in ast.walk(tree):
        if isinstance(n, ast.ImportFrom):
            for a in n.names:
                out[a.asname or a.name] = (n.module, a.name)
        elif isinstance(n, ast.Import):
            for a in n.names:
                out[a.asname or a.name.split(".")[0]] = ("", a.name)
    return out


def words(text):
    return set(re.findall(r"\b[A-Za-z_]\w*\b", text))


def rename(text, old, new):
    # by tokens: not attribute names, keyword arguments or strings
    import io
    import tokenize

    toks = list(tokenize.generate_tokens(io.StringIO(text).readline))
    lines = text.splitlines(keepends=True)
    edits = []
    for i, t in enumerate(toks):
        if t.type == tokenize.NAME and t.string == old:
            prev = toks[i - 1].string if i else ""
            nxt = toks[i + 1].string if i + 1 < len(toks) else ""
            if prev == ".":
                continue
            if nxt == "=" and prev in ("(", ","):
                continue
            edits.append(t.start)
    for r, c in sorted(edits, reverse=True):
        l = lines[r - 1]
        lines[r - 1] = l[:c] + new + l[c + len(old) :]
    return "".join(lines)


def merge(A, B):
    pa, pb = path(A), path(B)
    fa, fb = Path(pa), Path(pb)
    ta, tb = fa.read_text(), fb.read_text()
    mod_a, mod_b = "replaylake." + A, "replaylake." + B
    tree_a, tree_b = ast.parse(ta), ast.parse(tb)
    # how does B import A?
    from_a = {}
    imp_b = []
    as_module = None
    for n in ast.walk(tree_b):
        if isinstance(n, ast.ImportFrom) and n.module == mod_a:
            for a in n.names:
                from_a[a.name] = a.asname or a.name
        if isinstance(n, ast.ImportFrom) and n.module == mod_a.rpartition(".")[0]:
            for a in n.names:
                if a.name == A.rpartition(".")[2]:
                    as_module = a.asname or a.name
    lazy = [
        n
        for n in ast.walk(tree_b)
        if isinstance(n, ast.ImportFrom)
        and n.module == mod_a
        and n.col_offset
        and n not in tree_b.body
    ]
    def_a, def_b = defined(tree_a), defined(tree_b)
    clash = def_a & (
        def_b | set(imported(tree_b)) - {k for k, v in imported(tree_b).items() if v[0] == mod_a}
    )
    stem = A.rpartition(".")[2]
    head_a, imps_a, tc_a, body_a = parts(ta)
    for name in sorted(clash):
        if imported(tree_b).get(name, (None,))[0] == mod_a:
            continue
        if name.startswith("_"):
            new = f"_{stem}{name}"
            if name.isupper():
                new = f"_{stem.upper()}{name}"
            body_a = rename(body_a, name, new)
            print(f"   {A}: {name} -> {new} (clash)")
        else:
            print(f"!! {A} -> {B}: public clash {name}")
            return False
    # names imported in A that clash with definitions in B
    ia = imported(tree_a)
    for k, v in ia.items():
        if k in def_b:
            print(f"!! {A} -> {B}: {A} imports {k} which {B} defines")
            return False
        ib = imported(tree_b).get(k)
        if ib and ib != v and v[0] != mod_b:
            print(f"!! {A} -> {B}: import clash {k} {v} {ib}")
            return False
    # B's text without the import of A
    lines = tb.encode().splitlines(keepends=True)
    starts = [0]
    for l in lines:
        starts.append(starts[-1] + len(l))
    data = tb.encode()
    edits = []
    for n in ast.walk(tree_b):
        if isinstance(n, ast.ImportFrom):
            if n.module == mod_a:
                s, e = starts[n.lineno - 1], starts[n.end_lineno]
                edits.append((s, e, b""))
            elif (
                as_module
                and n.module == mod_a.rpartition(".")[0]
                and any((a.asname or a.name) == as_module for a in n.names)
            ):
                rest = [a for a in n.names if (a.asname or a.name) != as_module]
                s, e = (
                    starts[n.lineno - 1] + n.col_offset,
                    starts[n.end_lineno - 1] + n.end_col_offset,
                )
                edits.append(
                    (
                        s,
                        e,
                        (
                            f"from {n.module} import "
                            + ", ".join(
                                a.name + (f" as {a.asname}" if a.asname else "") for a in rest
                            )
                        ).encode()
                        if rest
                        else b"",
                    )
                )
        if (
            as_module
            and isinstance(n, ast.Attribute)
            and isinstance(n.value, ast.Name)
            and n.value.id == as_module
        ):
            s = starts[n.lineno - 1] + n.col_offset
            e = starts[n.end_lineno - 1] + n.end_col_offset
            edits.append((s, e, n.attr.encode()))
    if as_module:
        used = {
            n.attr
            for n in ast.walk(tree_b)
            if isinstance(n, ast.Attribute)
            and isinstance(n.value, ast.Name)
            and n.value.id == as_module
        }
        if used & (def_b | set(imported(tree_b))):
            print(f"!! {A} -> {B}: module attribute clash {used & (def_b | set(imported(tree_b)))}")
            return False
        # locals shadowing
        for f in ast.walk(tree_b):
            if isinstance(f, (ast.FunctionDef, ast.Lambda)):
                argn = {a.arg for a in [*f.args.args, *f.args.kwonlyargs]} | {
                    x.id
                    for x in ast.walk(f)
                    if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)
                }
                u = {
                    n.attr
                    for n in ast.walk(f)
                    if isinstance(n, ast.Attribute)
                    and isinstance(n.value, ast.Name)
                    and n.value.id == as_module
                }
                if argn & u:
                    print(f"!! {A} -> {B}: shadow {argn & u}")
                    return False
    for s, e, new in sorted(edits, reverse=True):
        data = data[:s] + new + data[e:]
    tb2 = data.decode()
    for name, asname in from_a.items():
        if asname != name:
            tb2 = rename(tb2, asname, name)
    head_b, imps_b, tc_b, body_b = parts(tb2)
    at_import = import_time_names(ast.parse(tb2))
    use_a_first = bool(at_import & def_a)
    imp_lines = []
    for text, ns in ((tb2, imps_b), (ta, imps_a)):
        for n in ns:
            if isinstance(n, ast.ImportFrom) and n.module == mod_b:
                continue
            s = seg(text, n)
            tail = (
                text.splitlines()[n.end_lineno - 1][n.end_col_offset :]
                if n.lineno == n.end_lineno
                else ""
            )
            if s + tail not in imp_lines:
                imp_lines.append(s + tail)
    tcl = []
    for text, ns in ((tb2, tc_b), (ta, tc_a)):
        for n in ns:
            if isinstance(n, ast.ImportFrom) and n.module in (mod_a, mod_b):
                continue
            s = seg(text, n)
            if s not in tcl:
                tcl.append(s)
    future = "from __future__ import annotations"
    rest = [l for l in imp_lines if l.strip() != future]
    new = (
        head_b.rstrip("\n")
        + "\n\n"
        + (future + "\n\n" if future in imp_lines else "")
        + "\n".join(rest)
        + "\n"
    )
    if tcl:
        new += (
            "\nif TYPE_CHECKING:\n"
            + "\n".join(
                "    " + l.replace("\n", "\n    ") if "(" not in l else "    " + l for l in tcl
            )
            + "\n"
        )
    note = ""
    bodies = [body_a, body_b] if use_a_first else [body_b, body_a]
    new += "\n" + bodies[0] + "\n\n\n" + bodies[1] + "\n"
    fb.write_text(new)
    subprocess.run(["git", "rm", "-q", "--cached", pa], check=True)
    fa.unlink()
    # everyone else: tests, benchmarks, lazies, docs
    for f in tracked("*.py", "*.md", "*.toml", ".ci/*"):
        p = Path(f)
        if (
            not p.exists()
            or f in ("CHANGELOG.md", "docs/LOG.md", "benchmarks/RESULTS.md")
            or f.startswith("tests/fixtures")
        ):
            continue
        t = o = p.read_text()
        t = re.sub(re.escape(mod_a) + r"\b(?=[ .\"'`)\n,]|$)", mod_b, t)
        pk, st = mod_a.rpartition(".")[::2]
        pkb, stb = mod_b.rpartition(".")[::2]
        if f.endswith(".py"):
            t = re.sub(
                rf"^(\s*)from {re.escape(pk)} import {st} as (\w+)$",
                rf"\1from {pkb} import {stb} as \2",
                t,
                flags=re.M,
            )
            t = re.sub(
                rf"^(\s*)from {re.escape(pk)} import {st}$",
                rf"\1from {pkb} import {stb} as {st}",
                t,
                flags=re.M,
            )
            if re.search(rf"from {re.escape(pk)} import [^\n]*\b{st}\b", t) and pk != mod_b:
                print(f"   look: {f} imports {st} from {pk}")
        if f == "src/replaylake/__init__.py":
            t = t.replace(f'"{A}"', f'"{B}"')
        t = re.sub(rf"(?<![\w/]){re.escape(pa)}", pb, t)
        if t != o:
            p.write_text(t)
    # package left empty
    d = os.path.dirname(pa)
    left = [x for x in os.listdir(d) if x not in ("__pycache__", "__init__.py")]
    if not left:
        subprocess.run(["git", "rm", "-q", "-f", d + "/__init__.py"])
        subprocess.run(["rm", "-rf", d])
    print(f"ok {A} -> {B}" + (" (first)" if use_a_first else ""))
    return True


for line in Path(sys.argv[1]).read_text().splitlines():
    line = line.split("#")[0].strip()
    if line:
        merge(*line.split())
