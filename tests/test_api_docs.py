"""docs/API.md shows every public name in a program that runs."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import replaylake as rl

_DOCS = (Path(__file__).parents[1] / "docs" / "API.md").read_text()
_PROGRAM, _WITH_RAY = (
    re.findall(r"```python\n(.*?)```", part, re.DOTALL) for part in _DOCS.split("\n## With Ray")
)
# Ray has settings of its own that it has deprecated.
_WARNINGS = ("-W", "error", "-W", "ignore::DeprecationWarning:ray.data.context")


def _run(program: str, folder: Path) -> None:
    (folder / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, *_WARNINGS, "program.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr


def test_every_public_name_has_an_example() -> None:
    shown = set(re.findall(r"\brl\.(\w+)", "\n".join([*_PROGRAM, *_WITH_RAY])))
    assert shown == set(rl.__all__)


def test_the_examples_run(tmp_path: Path) -> None:
    _run("\n".join(_PROGRAM), tmp_path)


@pytest.mark.slow
def test_the_examples_with_ray_run(tmp_path: Path) -> None:
    _run("\n".join([*_PROGRAM, *_WITH_RAY]), tmp_path)


@pytest.mark.parametrize("name", sorted({*rl.__all__} - {"__version__"}))
def test_every_public_name_has_help(name: str) -> None:
    found = getattr(rl, name)
    text = inspect.getdoc(found) or ""
    # What a dataclass says of itself where nobody does.
    assert text
    assert not text.startswith(f"{found.__name__}(")


def test_what_runs_something_takes_the_same_arguments() -> None:
    def arguments(function: object) -> list[str]:
        assert callable(function)
        return list(inspect.signature(function).parameters)

    assert arguments(rl.train) == arguments(rl.tune) == ["lake", "datasets", "config", "callbacks"]
    assert arguments(rl.train_online) == ["lake", "dataset", "config", "callbacks"]
    assert arguments(rl.rollout) == ["lake", "dataset", "policy", "config", "callbacks"]
    assert arguments(rl.evaluate) == ["policy", "config", "callbacks"]
    for resume in (rl.resume, rl.resume_online, rl.resume_sweep):
        assert arguments(resume)[0::2] == ["lake", "callbacks"]
