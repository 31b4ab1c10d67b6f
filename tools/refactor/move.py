"""move.py MAPFILE: git mv product files and their tests, and rewrite every import and mention.

MAPFILE lines: `old/path.py new/path.py` (relative to the root). Packages follow where all their files go to one place.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

DOCSTRINGS = {
    "datastore/storage": "Durable storage: blobs in a directory or object store, the commit log, and tables over it.",
    "datastore/episodes": "The data model: spaces, columns, episodes and batches, and their encoding as rows.",
    "datastore/lake": "Lake, dataset, snapshot and writers; the catalog, policies and runs.",
    "datastore/interchange": "Ingest and export: sources, foreign formats, and the conversions between them and episodes.",
    "offline/learning": "Algorithm and Learner: losses, optimizers and the export of a learned policy.",
    "offline/running": "Training and tuning runs, in one process or several.",
    "offline/evaluation": "Evaluation of policies: in an environment, and off-policy from logged episodes.",
    "cli/commands": "The commands, one file each.",
    "cli/output": "Output of the commands: tables, progress, plots and pages.",
}
ROOT = Path.cwd()
STAGES = ("datastore", "offline", "online", "serve", "cli")
pairs = [
    l.split()
    for l in Path(sys.argv[1]).read_text().splitlines()
    if l.strip() and not l.startswith("#")
]
pairs = [(a, b) for a, b in pairs if a != b]
for a, b in pairs:
    if not (ROOT / a).exists():
        sys.exit(f"no such file: {a}")


def tracked(*globs):
    return subprocess.run(
        ["git", "ls-files", *globs], capture_output=True, text=True, check=True
    ).stdout.splitlines()


def module(path):
    parts = path.removesuffix(".py").split("/")
    if parts[-1] == "__init__":
        parts = parts[:-1]
    return "replaylake." + ".".join(parts)


product = [p for p in tracked("*.py") if p.split("/")[0] in STAGES]
new_of = dict(pairs)
# __init__ of a folder whose every file moves to one folder moves with it
folders = {}
for p in product:
    folders.setdefault(os.path.dirname(p), []).append(p)
for f, files in folders.items():
    init = f + "/__init__.py"
    rest = [p for p in files if p != init]
    if init in files and init not in new_of and rest and all(p in new_of for p in rest):
        targets = {os.path.dirname(new_of[p]) for p in rest}
        subfolders = [g for g in folders if g.startswith(f + "/")]
        if (
            len(targets) == 1
            and not subfolders
            or (
                len(targets) == 1
                and all(
                    all(p in new_of for p in folders[g] if not p.endswith("__init__.py"))
                    for g in subfolders
                )
            )
        ):
            t = targets.pop()
            if t + "/__init__.py" not in set(product) and t + "/__init__.py" not in set(
                new_of.values()
            ):
                new_of[init] = t + "/__init__.py"
            elif t != f:
                print("left __init__", init, "->", t, "exists")
old_modules = {module(p) for p in product}
map_mod = {module(a): module(b) for a, b in new_of.items()}


# packages moved: prefix map used for mentions
def map_dotted(d):
    """Longest prefix of d that is an old module; mapped. Return d mapped."""
    parts = d.split(".")
    for i in range(len(parts), 1, -1):
        head = ".".join(parts[:i])
        if head in map_mod:
            return ".".join([map_mod[head], *parts[i:]])
        if head in old_modules:
            return d
    return d


def rewrite_imports(text, path):
    tree = ast.parse(text)
    lines = text.splitlines(keepends=True)
    starts = [0]
    for l in lines:
        starts.append(starts[-1] + len(l.encode()))
    data = text.encode()
    edits = []
    for node in ast.walk(tree):
        if (
            not isinstance(node, ast.ImportFrom)
            or node.level
            or not (node.module or "").startswith("replaylake")
        ):
            continue
        groups = {}
        for a in node.names:
            full = f"{node.module}.{a.name}"
            if full in map_mod:
                new = map_mod[full]
                parent, leaf = new.rsplit(".", 1)
                asname = a.asname or (a.name if leaf != a.name else None)
                if a.asname and leaf == a.asname:
                    asname = a.asname if a.asname else None
                groups.setdefault(parent, []).append((leaf, asname))
            elif full in old_modules:
                groups.setdefault(node.module, []).append((a.name, a.asname))
            else:
                groups.setdefault(map_mod.get(node.module, node.module), []).append(
                    (a.name, a.asname)
                )
        if (
            list(groups) == [node.module]
            and [(a.name, a.asname) for a in node.names] == groups[node.module]
        ):
            continue
        s = starts[node.lineno - 1] + node.col_offset
        e = starts[node.end_lineno - 1] + node.end_col_offset
        if len(groups) == 1 and [(a.name, a.asname) for a in node.names] == next(
            iter(groups.values())
        ):
            old = data[s:e].decode()
            new = old.replace(f"from {node.module} ", f"from {next(iter(groups))} ", 1)
            assert new != old, (path, old)
        else:
            indent = " " * node.col_offset
            new = f"\n{indent}".join(
                f"from {m} import "
                + ", ".join(n + (f" as {s_}" if s_ else "") for n, s_ in sorted(names))
                for m, names in sorted(groups.items())
            )
        edits.append((s, e, new.encode()))
    for s, e, new in sorted(edits, reverse=True):
        data = data[:s] + new + data[e:]
    return data.decode()


def text_import(m):
    lead, mod, names = m.groups()
    if names.startswith("(") and "#" in names:
        return m.group(0)
    tail = ""
    plain = names
    if not names.startswith("("):
        k = re.match(r"[\w, ]*\w", names)
        if not k:
            return m.group(0)
        plain, tail = k.group(0), names[k.end() :]
    items = [n.strip() for n in plain.strip("()").replace("\n", " ").split(",") if n.strip()]
    groups = {}
    for item in items:
        name = item.split()[0]
        full = f"{mod}.{name}"
        if full in map_mod:
            target = map_mod[full].rsplit(".", 1)[0]
        elif full in old_modules:
            target = mod
        else:
            target = map_mod.get(mod, mod)
        groups.setdefault(target, []).append(item)
    if list(groups) == [mod]:
        return m.group(0)
    if len(groups) == 1:
        return f"{lead}from {next(iter(groups))} import {names}"
    pad = re.match(r"[ \t]*", lead).group(0)
    return (
        lead + f"\n{pad}".join(f"from {t} import {', '.join(i)}" for t, i in groups.items()) + tail
    )


MD = re.compile(r"(?<!from )\breplaylake(?:\.[A-Za-z_][A-Za-z_0-9]*)+")
DOTTED = re.compile(r"\breplaylake(?:\.[A-Za-z_][A-Za-z_0-9]*)+")
path_map = dict(new_of)
dir_map = {}
for a, b in new_of.items():
    if a.endswith("/__init__.py"):
        dir_map[os.path.dirname(a)] = os.path.dirname(b)
PATH = re.compile(r"(?<![\w/.])(?:%s)/[A-Za-z0-9_/]*(?:\.py)?" % "|".join(STAGES))


def map_path(m):
    s = m.group(0)
    if s in path_map:
        return path_map[s]
    t = s.rstrip("/")
    parts = t.split("/")
    if t + ".py" in path_map and not t.endswith(".py") and t not in dir_map:
        return path_map[t + ".py"].removesuffix(".py")
    for i in range(len(parts), 0, -1):
        h = "/".join(parts[:i])
        if h in dir_map:
            return dir_map[h] + s[len(h) :]
    return s


# tests
tests = tracked("tests/*")
test_moves = {}
test_dirs = {}
for a, b in new_of.items():
    da, db = os.path.dirname(a), os.path.dirname(b)
    stem = os.path.basename(a).removesuffix(".py")
    stem_b = os.path.basename(b).removesuffix(".py")
    if stem == "__init__":
        continue
    if "/" in a:
        old_t = f"tests/{da}/test_{stem}.py"
        if old_t in tests:
            test_moves[old_t] = f"tests/{db}/test_{stem_b}.py"
    test_dirs.setdefault(da, {}).setdefault(db, 0)
    test_dirs[da][db] += 1
# everything else in tests of a moved folder goes with the folder
for t in tests:
    if t in test_moves:
        continue
    d = os.path.dirname(t).removeprefix("tests/")
    while d:
        if d in dir_map:
            tail = t.removeprefix(f"tests/{d}")
            test_moves[t] = f"tests/{dir_map[d]}{tail}"
            break
        d = os.path.dirname(d)
test_moves = {a: b for a, b in test_moves.items() if a != b}

# test modules imported by others (tests are imported how? by path) are reported
files = [
    f
    for f in tracked()
    if f.endswith((".py", ".toml", ".md", ".cfg", ".yaml", ".yml", ".json", ".sh", ".txt"))
    or f in ("Makefile", ".ci/run", ".ci/newer-gymnasium")
]
keep = {"CHANGELOG.md", "docs/LOG.md", "benchmarks/RESULTS.md"}
changed = 0
tpath = dict(test_moves)
TP = re.compile(r"tests/[A-Za-z0-9_/]+\.py")
for f in files:
    p = ROOT / f
    if p.is_symlink() or f.startswith("tests/fixtures/"):
        continue
    try:
        text = p.read_text()
    except UnicodeDecodeError:
        continue
    new = text
    if f in test_moves:
        old_n, new_n = f.count("/") + 1, test_moves[f].count("/") + 1
        new = re.sub(
            r"Path\(__file__\)\.parents\[(\d+)\]",
            lambda m: (
                f"Path(__file__).parents[{int(m.group(1)) + (new_n - old_n if int(m.group(1)) >= old_n - 2 else 0)}]"
            ),
            new,
        )
    if f.endswith(".py"):
        new = rewrite_imports(new, f)
        lines_ = new.splitlines(keepends=True)
        offs = [0]
        for l in lines_:
            offs.append(offs[-1] + len(l))
        real = {n.lineno for n in ast.walk(ast.parse(new)) if isinstance(n, ast.ImportFrom)}
        out, pos = [], 0
        imports = re.compile(
            r"^([ \t]*[\"']*)from (replaylake[\w.]*) import (\([^)]*\)|[^\n]*)", re.M
        )
        for m in imports.finditer(new):
            out.append(DOTTED.sub(lambda x: map_dotted(x.group(0)), new[pos : m.start()]))
            line = new.count("\n", 0, m.start()) + 1
            out.append(m.group(0) if line in real else text_import(m))
            pos = m.end()
        out.append(DOTTED.sub(lambda x: map_dotted(x.group(0)), new[pos:]))
        new = "".join(out)
    else:
        new = (
            re.compile(
                r"^([ \t]*[\"'`>$ ]*)from (replaylake[\w.]*) import (\([^)]*\)|[^\n]*)", re.M
            ).sub(text_import, new)
            if f.endswith(".md")
            else new
        )
        new = (
            DOTTED.sub(lambda x: map_dotted(x.group(0)), new)
            if not f.endswith(".md")
            else MD.sub(lambda x: map_dotted(x.group(0)), new)
        )
    if f == "src/replaylake/__init__.py":
        new = re.sub(
            r'"((?:datastore|offline|online|serve|cli)(?:\.\w+)+)"',
            lambda m: (
                '"' + map_dotted("replaylake." + m.group(1)).removeprefix("replaylake.") + '"'
            ),
            new,
        )
    if f not in keep:
        new = PATH.sub(map_path, new)
        new = TP.sub(lambda m: tpath.get(m.group(0), m.group(0)), new)
    if new != text:
        p.write_text(new)
        changed += 1


# git mv through temporary names where a file becomes a folder of that name
def mv(a, b):
    os.makedirs(os.path.dirname(b) or ".", exist_ok=True)
    subprocess.run(["git", "mv", a, b], check=True)


allmoves = {**new_of, **test_moves}
conflict = {
    a
    for a in allmoves
    if any(b.startswith(a.removesuffix(".py") + "/") for b in allmoves.values()) and False
}
for a, b in sorted(allmoves.items()):
    mv(a, b)
for a, b in sorted(allmoves.items()):
    d = os.path.dirname(b)
    while d and d.split("/")[0] in STAGES:
        i = Path(d) / "__init__.py"
        if not i.exists():
            i.write_text(f'"""{DOCSTRINGS[d]}"""\n')
            subprocess.run(["git", "add", str(i)], check=True)
        d = os.path.dirname(d)
for d, _, fs in os.walk(".", topdown=False):
    if d.startswith(("./.git", "./.venv", "./.bench")):
        continue
    real = [x for x in os.listdir(d) if x != "__pycache__"]
    if not real and d != ".":
        subprocess.run(["rm", "-rf", d])
print(f"{len(new_of)} product files, {len(test_moves)} test files moved; {changed} files rewritten")
