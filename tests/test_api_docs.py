"""docs/API.md shows every public name; test_documented_blocks.py runs its program."""

import inspect
import re
from pathlib import Path

import pytest

import replaylake as rl

_DOCS = (Path(__file__).parents[1] / "docs" / "API.md").read_text()
_PROGRAM = re.findall(r"```python\n(.*?)```", _DOCS, re.DOTALL)


def test_every_public_name_has_an_example() -> None:
    shown = set(re.findall(r"\brl\.(\w+)", "\n".join(_PROGRAM)))
    assert shown == set(rl.__all__)


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
