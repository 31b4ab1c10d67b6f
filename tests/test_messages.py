"""What the library says names parameters; only cli knows flags, and it words them."""

import ast
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from replaylake.cli.options import name_options, to_usage_error
from replaylake.datastore.errors import ConfigInvalidError, ReplayLakeError

_ROOT = Path(__file__).parents[1]
# A command to run may be named whole, in backticks.
_COMMAND = re.compile(r"`(?:replaylake |ray |ingest )[^`]*(?:`|$)")
_FLAG = re.compile(r"(?<![\w-])--[a-z]")
# What a process is started with: a flag alone.
_ARGUMENT = re.compile(r"--[a-z-]+")


# What it writes is read by those who start a container, and names commands.
_WRITES_COMMANDS = ("serve/package/dockerfile.py",)


def _texts(modules: list[Path]) -> Iterator[tuple[str, str]]:
    """Yield (place, text) of each string that is no docstring, those of an f-string joined."""
    for path in modules:
        source = path.read_text()
        # Parsing all modules takes seconds, and few have the dashes of a flag.
        if path.relative_to(_ROOT).as_posix() in _WRITES_COMMANDS or "--" not in source:
            continue
        tree = ast.parse(source)
        docstrings = {
            node.body[0].value
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        parts: set[ast.expr] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts |= set(node.values)
                words = [one.value if isinstance(one, ast.Constant) else "x" for one in node.values]
                yield f"{path}:{node.lineno}", "".join(map(str, words))
            elif (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and node not in parts
                and node not in docstrings
            ):
                yield f"{path}:{node.lineno}", node.value


@pytest.mark.parametrize("folder", ["datastore", "offline", "online", "serve"])
def test_the_library_names_no_flag(folder: str) -> None:
    modules = sorted((_ROOT / folder).rglob("*.py"))
    texts = list(_texts(modules))
    assert len(modules) > 40
    assert texts
    messages = [(place, text) for place, text in texts if not _ARGUMENT.fullmatch(text)]
    assert [place for place, text in messages if _FLAG.search(_COMMAND.sub("", text))] == []


def test_an_error_carries_its_parameter_between_processes() -> None:
    error = ConfigInvalidError("timezone: found 'x', expected a zone.", parameter="timezone")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.parameter) == (
        ConfigInvalidError,
        "timezone: found 'x', expected a zone.",
        "timezone",
    )
    assert ReplayLakeError("x").parameter is None


def test_the_command_line_words_a_parameter_as_its_option() -> None:
    assert name_options("Name it with `mapping` reward=COLUMN, or see `replaylake formats`.") == (
        "Name it with --map reward=COLUMN, or see `replaylake formats`."
    )
    assert name_options("leave `action_range` out") == "leave --action-low and --action-high out"
    assert name_options("the column `score`") == "the column `score`"


def test_a_refused_option_is_wrong_usage_where_the_command_has_it() -> None:
    error = ConfigInvalidError("format: found 'x', see `mapping`.", parameter="format")
    usage = to_usage_error(error, {"--to", "--out"})
    assert usage is not None
    assert (usage.param_hint, usage.message) == ("--to", "found 'x', see --map.")
    assert to_usage_error(error, {"--lake"}) is None
    assert to_usage_error(ConfigInvalidError("found 3"), {"--to"}) is None
