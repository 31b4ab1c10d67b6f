"""Each command that a page shows is one that the command line takes, with those options."""

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from replaylake.cli.main import app

_ROOT = Path(__file__).parents[2]
# Typer has its own copy of click, and of its errors exports none but the heirs of this one.
(_UsageError,) = typer.BadParameter.__bases__
_COMMANDS: Any = typer.main.get_command(app)
_PAGES = (
    "README.md",
    "docs/ALGORITHMS.md",
    "docs/BACKUP.md",
    "docs/BANDITS.md",
    "docs/CLI.md",
    "docs/CLUSTER.md",
    "docs/COLLECT.md",
    "docs/DELETION.md",
    "docs/ENGINES.md",
    "docs/ENVIRONMENTS.md",
    "docs/FORMATS.md",
    "docs/GATEWAY.md",
    "docs/HTTP.md",
    "docs/IMPORT.md",
    "docs/LABELS.md",
    "docs/LANGUAGE.md",
    "docs/LANGUAGE_SERVING.md",
    "docs/LANGUAGE_TRAINING.md",
    "docs/MAINTENANCE.md",
    "docs/NIGHTLY.md",
    "docs/ONLINE.md",
    "docs/OPE.md",
    "docs/OPERATIONS.md",
    "docs/SERVING.md",
    "docs/STORAGE.md",
    "docs/TRAINING.md",
    "docs/TUNING.md",
    "docs/TUTORIAL.md",
    "docs/WEBHOOKS.md",
)
# What ends a command in a shell.
_ENDS = {"|", ">", ">>", "<", "&", "&&"}


def _shown(page: str) -> Iterator[list[str]]:
    """Yield the words of each command; one that leaves some out ("...") is not looked at."""
    text = (_ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
    for line in re.findall(r"^(?:\$ )?(replaylake (?!-).*)", text, re.MULTILINE):
        without_placeholders = re.sub(r"<(\w+)>", r"\1", line)
        tokens = shlex.shlex(without_placeholders, posix=True, punctuation_chars=True)
        tokens.whitespace_split = True
        try:
            words = list(itertools.takewhile(lambda word: word not in _ENDS, tokens))
        except ValueError as error:
            pytest.fail(f"{page}: {line}: {error}")
        if "..." not in words:
            yield words


def _parse(words: list[str]) -> None:
    """Raises: a UsageError where the command line would refuse them. Runs nothing."""
    command: Any = _COMMANDS
    _, *rest = words
    while rest and isinstance(command, typer.core.TyperGroup):
        _, command, rest = command.resolve_command(typer.Context(command), rest)
    command.make_context("replaylake", rest)


@pytest.mark.parametrize("page", _PAGES)
def test_the_command_line_takes_what_a_page_shows(page: str) -> None:
    commands = list(_shown(page))
    assert commands
    for words in commands:
        try:
            _parse(words)
        except _UsageError as error:
            pytest.fail(f"{page}: {shlex.join(words)}: {error}")


@pytest.mark.parametrize("line", ["replaylake lst", "replaylake list --sorted", "replaylake show"])
def test_what_it_would_refuse_is_noticed(line: str) -> None:
    with pytest.raises(_UsageError):
        _parse(line.split())
