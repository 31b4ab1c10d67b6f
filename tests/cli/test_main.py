"""The frame of every command: help, options, exit codes, streams, start-up time."""

import inspect
import json
import math
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer

import replaylake.cli.commands.datasets
from replaylake.cli.main import GROUPS, SHORT_FORMS, _build_commands, app
from replaylake.cli.main import run as run_command
from replaylake.datastore.errors import NotFoundError
from replaylake.datastore.version import VERSION

DOCS = (Path(__file__).parents[2] / "docs" / "CLI.md").read_text(encoding="utf-8")
COMMANDS = [
    "ingest",
    "quarantine list",
    "quarantine show",
    "quarantine clear",
    "rollout",
    "gateway",
    "feedback join",
    "feedback status",
    "annotate",
    "score",
    "datasets list",
    "datasets show",
    "datasets history",
    "datasets diff",
    "datasets tag",
    "datasets copy",
    "datasets merge",
    "datasets split",
    "datasets rename-column",
    "datasets drop-column",
    "datasets set-reference",
    "datasets delete",
    "sql",
    "lineage",
    "explore",
    "export",
    "formats",
    "train language",
    "train offline",
    "train online",
    "tune",
    "algorithms",
    "runs list",
    "runs show",
    "runs diff",
    "runs profile",
    "evaluate",
    "ope",
    "replay-decisions",
    "policies list",
    "policies show",
    "policies history",
    "policies diff",
    "policies promote",
    "policies rollback",
    "policies note",
    "policies protect",
    "policies unprotect",
    "policies delete",
    "policies import",
    "policies register",
    "policies package",
    "serve",
    "engine",
    "webhooks add",
    "webhooks list",
    "webhooks remove",
    "webhooks test",
    "webhooks deliver",
    "maintain run",
    "maintain compact",
    "maintain trim",
    "maintain vacuum",
    "maintain retention",
    "fsck",
    "doctor",
    "completion",
]
SHORT = {
    "list": "datasets list",
    "show": "datasets show",
    "history": "datasets history",
    "diff": "datasets diff",
    "promote": "policies promote",
    "rollback": "policies rollback",
}
HEAVY = {
    "bentoml",
    "d3rlpy",
    "duckdb",
    "gymnasium",
    "numpy",
    "onnxruntime",
    "pyarrow",
    "ray",
    "rich",
    "starlette",
    "torch",
}


def commands(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        full = f"{path} {name}".strip()
        if hasattr(command, "commands"):
            yield from commands(command, full)
        else:
            yield full, command


TREE = dict(commands(typer.main.get_command(app)))


def started(*arguments: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "replaylake.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **kwargs)


def test_the_commands_are_those_that_were_promised() -> None:
    assert sorted(TREE) == sorted([*COMMANDS, *SHORT])


def test_the_named_command_alone_is_built_where_there_is_one() -> None:
    assert list(_build_commands("show").commands) == ["show"]
    assert "join" in _build_commands("feedback").commands["feedback"].commands
    every = list(_build_commands("").commands)
    assert "datasets" in every
    for name in ("--help", "unknown"):
        assert list(_build_commands(name).commands) == every


def test_a_short_form_is_the_command_itself(run: Any) -> None:
    assert SHORT_FORMS == SHORT
    for short, full in SHORT.items():
        assert inspect.unwrap(TREE[short].callback) is inspect.unwrap(TREE[full].callback)
        out = run(short, "--help").out
        assert out == run(*full.split(), "--help").out.replace(
            f"replaylake {full} ", f"replaylake {short} "
        )


def test_help_lists_every_command_once_under_a_heading(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted({name.split()[0] for name in COMMANDS})
    out = run("--help").out
    assert re.findall(r"^  ([a-z][a-z-]+) +[A-Z].*\.$", out, re.M) == grouped
    headings = [*GROUPS, "Short forms"]
    assert [line[:-1] for line in out.splitlines() if line[:-1] in headings] == headings
    short = re.findall(r"^  ([a-z]+) +([a-z]+ [a-z]+)$", out.partition("Short forms:")[2], re.M)
    assert dict(short) == SHORT


@pytest.mark.parametrize("path", ["", *sorted({n.split()[0] for n in COMMANDS if " " in n})])
def test_no_summary_is_cut_at_80_columns(
    run: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = run(*path.split(), "--help").out
    assert "..." not in out.partition("\n")[2]
    listed = re.findall(r"^  ([a-z][a-z-]+) +[A-Z].*\.$", out, re.M)
    names = {name.split()[0] for name in COMMANDS}
    assert set(listed) == ({n.split()[1] for n in COMMANDS if n.startswith(f"{path} ")} or names)


def test_a_group_has_several_commands() -> None:
    groups = [name.split()[0] for name in COMMANDS if " " in name]
    assert all(groups.count(group) > 1 for group in groups)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_takes_lake_json_and_debug(name: str) -> None:
    options = {option for parameter in TREE[name].params for option in parameter.opts}
    assert {"--lake", "--json", "--debug"} <= options
    (lake,) = [p for p in TREE[name].params if "--lake" in p.opts]
    assert (str(lake.default), lake.envvar) == ("lake", "REPLAYLAKE_LAKE")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_one_line_and_an_example(run: Any, name: str) -> None:
    ran = run(*name.split(), "--help")
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0].startswith(f"Usage: replaylake {name} ")
    assert re.fullmatch(r"  [A-Z].*\.", lines[2]), lines[2]
    example = lines[lines.index("  Example:") + 1 :]
    daily = {full: short for short, full in SHORT.items()}.get(name, name)
    assert example[0].startswith(f"    replaylake {daily} ".rstrip())


@pytest.mark.parametrize("name", COMMANDS)
def test_help_begins_with_its_own_options_and_ends_with_the_common_ones(
    run: Any, name: str
) -> None:
    out = run(*name.split(), "--help").out
    sections = dict(re.findall(r"^([A-Z][\w ]*):\n((?:  .*\n)+)", out, re.M))
    shown = {
        heading: re.findall(r"^  (?:-h, )?(--[\w-]+)", text, re.M)
        for heading, text in sections.items()
    }
    headings = [heading for heading in sections if heading != "Arguments"]
    assert headings[-1] == "Common options"
    assert shown["Common options"] == ["--lake", "--json", "--debug", "--help"]
    own = [p for p in TREE[name].params if p.opts[0] not in shown["Common options"]]
    options = [p for p in own if p.param_type_name == "option"]
    for option in options:
        assert option.opts[0] in shown[option.rich_help_panel or "Options"]
    if options:
        assert headings[0] == "Options"
    assert "<" not in sections.get("Arguments", ""), "a Python type"
    required = [option.opts[0] for option in options if option.required]
    assert sorted(shown.get("Options", [])[: len(required)]) == sorted(required)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_text_of_help_makes_sense_by_itself(name: str) -> None:
    summary = TREE[name].help.partition("\n")[0]
    for text in (summary, *(parameter.help for parameter in TREE[name].params)):
        assert re.match("[A-Z].*[.]$", text), text
        assert not re.match("(Of|What|Who|Whose|Which|Where|How|So|Such|By)\\b", text), text
        assert "such as" not in text, text


def test_each_text_of_the_docs_makes_sense_by_itself() -> None:
    texts = re.findall(r"^\| `[^|]*` \| (.*) \|$", DOCS.replace("\\|", "/"), re.M)
    assert len(texts) > 200
    for text in texts:
        assert not re.match("(Of|What|Who|Whose|Which|Where|How|So|Such|By)\\b", text), text
        assert "such as" not in text, text


def test_help_says_when_to_evaluate_how(run: Any) -> None:
    sentence = (
        "Use `evaluate` where there is an environment, `ope` to estimate the value from logged "
        "episodes alone, and `replay-decisions` to see where a policy decides differently from "
        "the log."
    )
    for name in ("evaluate", "ope", "replay-decisions"):
        assert sentence in " ".join(run(name, "--help").out.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_and_argument_is_explained_and_documented(name: str) -> None:
    section = re.search(rf"^## `replaylake {name}`\n(.*?)(?=^## |\Z)", DOCS, re.M | re.S)
    assert section is not None, f"docs/CLI.md has no section for {name}"
    shared = DOCS[: DOCS.index("\n## `")]
    for parameter in TREE[name].params:
        said = parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.metavar
        if said == "--help":
            continue
        assert parameter.help, said
        text = shared if said in ("--lake", "--json", "--debug") else section.group(1)
        assert re.search(rf"`{re.escape(said)}(?![\w-])", text), f"docs/CLI.md, {name}: no {said}"


def test_the_docs_describe_no_option_that_is_not_there() -> None:
    known = {option for command in TREE.values() for p in command.params for option in p.opts}
    described = re.findall(r"^\| `(--[a-z0-9-]+)", DOCS, re.M)
    assert set(described) <= known | {"--version", "--help"}


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['replaylake', '--help']\n"
        "from replaylake.cli.main import main\n"
        "code = main()\n"
        "print(*sys.modules, file=sys.stderr); sys.exit(code)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0
    assert "feedback" in ran.stdout
    modules = ran.stderr.split()
    assert not {name.partition(".")[0] for name in modules} & HEAVY
    # 240 of them, 140 of which Typer brings.
    assert len(modules) < 300
    # Nor is anything worked out at import: beside Typer's own import, three to four times its
    # processor time was seen on fast and slow machines.
    spent = {"help": math.inf, "typer": math.inf}
    for _ in range(3):
        for what, arguments in (
            ("help", ["-m", "replaylake.cli.main", "--help"]),
            ("typer", ["-c", "import typer"]),
        ):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(
                [sys.executable, *arguments], capture_output=True, check=True, timeout=60
            )
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            spent[what] = min(spent[what], seconds)
    assert spent["help"] < 8 * spent["typer"]


def test_the_console_script_runs_main_and_ends() -> None:
    (script,) = [
        e for e in metadata.entry_points(name="replaylake") if e.group == "console_scripts"
    ]
    assert script.load() is run_command


def test_version(run: Any) -> None:
    ran = run("--version")
    assert ran.code == 0
    first, python, packages, extras, *_ = ran.out.splitlines()
    assert first == f"replaylake {VERSION}"
    assert python.startswith(f"Python {platform.python_version()}, ")
    assert f"duckdb {metadata.version('duckdb')}, " in packages
    assert extras.startswith("extras: ")
    assert "serve" in extras


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("list", "--nonsense"),
        ("list", "--nonsense", "--json"),
        ("sql",),
        ("sql", "select 1", "--file", "x.sql"),
        ("sql", "select 1", "--param", "n"),
        ("sql", "select 1", "--format", "xml"),
        ("sql", "select 1", "--json", "--format", "csv"),
        ("ingest", "a.csv"),
        ("ingest", "a.csv", "--dataset", "d", "--map", "reward"),
        ("ingest", "a.csv", "--dataset", "d", "--on-invalid", "ignore"),
        ("train", "offline", "d", "--policy", "p", "--set", "updates"),
        ("train", "offline", "d", "--policy", "p", "--set", "updates=[1"),
        ("evaluate", "random", "--env", "CartPole-v1", "--episodes", "0"),
        ("serve", "p", "--port", "70000"),
        ("lineage",),
        ("lineage", "--policy", "p", "--dataset", "d"),
        ("lineage", "--policy", "p", "--episode", "e"),
        ("promote", "p:1"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_no_result_on_stdout(
    run: Any, lake: Path, arguments: tuple[str, ...]
) -> None:
    ran = run(*arguments)
    assert ran.code == 2
    if "--json" in arguments:
        assert ran.json["error"]["kind"] == "UsageError"
    else:
        assert ran.out == ""
    assert "Usage: replaylake" in ran.err
    assert "Traceback" not in ran.err
    assert not lake.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("list",),
        ("show", "cartpole"),
        ("sql", "select 1"),
        ("history", "cartpole"),
        ("diff", "cartpole@1", "cartpole@2"),
        ("datasets", "tag", "cartpole@1", "golden"),
        ("datasets", "tag", "--list"),
        ("datasets", "tag", "--remove", "cartpole@golden"),
        ("maintain", "compact", "cartpole"),
        ("maintain", "vacuum"),
        ("maintain", "trim", "cartpole", "--max-steps", "1"),
        ("maintain", "retention", "cartpole"),
        ("maintain", "run"),
        ("train", "offline", "cartpole", "--algorithm", "bc", "--policy", "clone"),
        ("evaluate", "clone", "--env", "CartPole-v1"),
        ("policies", "list"),
        ("policies", "show", "clone"),
        ("policies", "history", "clone"),
        ("policies", "diff", "clone:1", "clone:2"),
        ("policies", "note", "clone:1", "text"),
        ("policies", "protect", "clone:1"),
        ("policies", "unprotect", "clone:1"),
        ("policies", "delete", "clone:1", "--yes"),
        ("promote", "clone:1", "--to", "champion"),
        ("rollback", "clone"),
        ("replay-decisions", "clone:1", "live"),
        ("policies", "package", "clone", "--output", "out"),
        ("serve", "clone"),
        ("feedback", "join", "cartpole"),
        ("lineage", "--policy", "clone"),
    ],
)
def test_only_ingest_makes_a_lake(run: Any, lake: Path, arguments: tuple[str, ...]) -> None:
    run(*arguments).failed(str(lake), "replaylake ingest", "--lake")
    assert not lake.exists()


def test_json_says_an_error_on_stdout_too(run: Any, lake: Path) -> None:
    ran = run("list", "--json")
    ran.failed("found none there")
    message = ran.err.removeprefix("error: ").removesuffix("\n")
    assert ran.json["error"] == {"kind": "NotFoundError", "message": message, "parameter": None}


def test_what_a_library_prints_is_talk(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Chatty(replaylake.cli.commands.datasets.CommandOutput):
        def __init__(self, as_json: bool) -> None:
            super().__init__(as_json)
            print("Hello from the library")

    monkeypatch.setattr(replaylake.cli.commands.datasets, "CommandOutput", Chatty)
    ran = run("list", "--json")
    assert ran.json["error"]["kind"] == "NotFoundError"
    assert ran.err.startswith("Hello from the library\nerror: lake ")


def test_a_lake_that_is_a_file(run: Any, tmp_path: Path, log: Path) -> None:
    file = tmp_path / "file"
    file.write_text("text")
    run("list", "--lake", file).failed(str(file))
    ran = run("ingest", log, "--dataset", "d", "--map", "observation=x,y", "--lake", file)
    ran.failed(str(file))
    assert file.read_text() == "text"


def test_debug_adds_the_traceback(run: Any) -> None:
    ran = run("list", "--debug")
    assert ran.code == 1
    assert ran.err.startswith("Traceback")
    assert ran.err.splitlines()[-1].startswith("error: lake ")


def test_a_lake_is_named_by_option_before_environment(run: Any, lake: Path) -> None:
    run("list", "--lake", lake / "other").failed(f"{lake / 'other'}")


def test_a_message_of_several_lines_becomes_one(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(as_json: bool) -> None:
        raise NotFoundError("first line\n   second line\n")

    monkeypatch.setattr(replaylake.cli.commands.datasets, "CommandOutput", fail)
    ran = run("list")
    assert ran.err == "error: first line second line\n"


def test_what_nobody_foresaw_is_one_line_too(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(as_json: bool) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(replaylake.cli.commands.datasets, "CommandOutput", fail)
    ran = run("list", "--json")
    assert ran.code == 1
    (line,) = ran.err.splitlines()
    assert line.startswith("error: ZeroDivisionError: division by zero.")
    assert "--debug" in line
    assert ran.json["error"]["kind"] == "ZeroDivisionError"
    assert ran.json["error"]["parameter"] is None


def test_interrupting_is_exit_code_130(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(as_json: bool) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(replaylake.cli.commands.datasets, "CommandOutput", interrupt)
    ran = run("list")
    assert (ran.code, ran.err) == (130, "interrupted\n")


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("bentoml", "serve"),
        ("torch", "learn"),
        ("gymnasium", "gym"),
        ("prometheus_client", "serve"),
    ],
)
def test_a_missing_dependency_names_its_extra(
    run: Any, monkeypatch: pytest.MonkeyPatch, module: str, extra: str
) -> None:
    def fail(as_json: bool) -> None:
        raise ModuleNotFoundError(f"No module named '{module}.sub'", name=f"{module}.sub")

    monkeypatch.setattr(replaylake.cli.commands.datasets, "CommandOutput", fail)
    ran = run("list", "--json")
    ran.failed(module, f"pip install 'replaylake[{extra}]'")
    assert ran.json["error"]["kind"] == "ExtraMissingError"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "arguments", "extra"),
    [
        ("torch", ("train", "offline", "d", "--algorithm", "bc", "--policy", "p"), "learn"),
        ("gymnasium", ("evaluate", "random", "--env", "CartPole-v1"), "gym"),
    ],
)
def test_a_command_without_its_extra(
    tmp_path: Path, module: str, arguments: tuple[str, ...], extra: str
) -> None:
    code = (
        f"import sys; sys.modules[{module!r}] = None\n"
        "from replaylake.cli.main import main\n"
        "sys.exit(main())"
    )
    command = [sys.executable, "-c", code, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert ran.returncode == 1
    (line,) = ran.stderr.splitlines()
    assert line.startswith("error: ")
    assert module in line
    assert f"replaylake[{extra}]" in line


@pytest.mark.slow
def test_as_a_process_the_streams_stay_apart(tmp_path: Path) -> None:
    environment = {**os.environ, "REPLAYLAKE_LAKE": str(tmp_path / "none")}
    ran = started("list", "--json", env=environment, cwd=tmp_path)
    assert ran.returncode == 1
    assert json.loads(ran.stdout)["error"]["kind"] == "NotFoundError"
    assert ran.stderr.count("\n") == 1
    ran = started("list", "--nonsense", cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (2, "")


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_error(tmp_path: Path, log: Path) -> None:
    lake = str(tmp_path / "lake")
    ran = started("ingest", str(log), "--dataset", "d", "--map", "observation=x,y", "--lake", lake)
    assert ran.returncode == 0, ran.stderr
    query = "select * from d.steps, range(100000)"
    command = [sys.executable, "-m", "replaylake.cli.main", "sql", query, "--format", "jsonl"]
    with subprocess.Popen(
        [*command, "--lake", lake], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["episode_id"]
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_nothing_is_colored_off_a_terminal(run: Any) -> None:
    for ran in (run("--help"), run("list"), run("list", "--nonsense")):
        assert "\x1b" not in ran.out + ran.err
