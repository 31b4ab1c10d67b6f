from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.lake.lake import open_lake

_COMMAND = Path(sys.executable).parent / "replaylake"


@pytest.fixture
def names(lake: Path) -> Path:
    store = open_lake(lake, create=True)
    episode = Episode("a", np.zeros((2, 1), np.float32), np.zeros(2, np.int64), np.ones(2))
    for name in ("walk", "walk_more", "jump"):
        store.dataset(name).create(Box((1,)), Discrete(2))
        store.dataset(name).append([episode])
    return lake


def offered(lake: Path, line: str, shell: str) -> list[str]:
    """Ask as the script of a shell does, for the last word of a line."""
    words = shlex.split(line) + ([""] if line.endswith(" ") else [])
    variables = {
        "bash": {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
        "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    done = subprocess.run(
        [_COMMAND],
        env={
            **os.environ,
            **variables,
            "REPLAYLAKE_LAKE": str(lake),
            "_REPLAYLAKE_COMPLETE": f"complete_{shell}",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes_with_the_script(run: Any, names: Path) -> None:
    script = run("completion", "bash").out
    shell = shutil.which("bash")
    assert shell is not None
    ask = (
        f"{script}\nPATH={_COMMAND.parent}:$PATH\nCOMP_WORDS=(replaylake show wal)\nCOMP_CWORD=2\n"
        '_replaylake_completion replaylake; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        [shell, "--norc", "-c", ask],
        env={**os.environ, "REPLAYLAKE_LAKE": str(names)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["walk", "walk_more"]


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_is_offered_commands_options_and_names(names: Path, shell: str) -> None:
    assert "fsck" in " ".join(offered(names, "replaylake fs", shell))
    assert "--older-than" in " ".join(offered(names, "replaylake maintain vacuum --old", shell))
    found = " ".join(offered(names, "replaylake datasets delete ju", shell))
    assert ("jump" in found, "walk" in found) == (True, False)


@pytest.mark.slow
def test_names_of_policies_and_runs(run: Any, names: Path) -> None:
    # Those of a lake named on the line, not of REPLAYLAKE_LAKE.
    assert offered(names / "none", f"replaylake show --lake {names} ju", "bash") == ["jump"]
    assert offered(names / "none", "replaylake show ", "bash") == []


def test_an_unknown_shell_is_wrong_usage(run: Any) -> None:
    ran = run("completion", "tcsh")
    assert ran.code == 2
    assert "bash" in ran.err
