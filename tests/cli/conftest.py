"""Runs commands in this process, as `replaylake ...` would, and keeps what they print apart."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from replaylake.cli.main import main


@dataclass(frozen=True)
class Ran:
    """An exit code and the two streams."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What stdout holds, which has to be one JSON object and nothing else."""
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value

    def failed(self, *said: str) -> None:
        """Check that it was one clear line and exit code 1."""
        assert self.code == 1, self
        (line,) = self.err.splitlines()
        assert line.startswith("error: ")
        assert "fault in ReplayLake" not in line
        for text in said:
            assert text in line, (text, line)


Run = Callable[..., Ran]


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return tmp_path / "lake"


@pytest.fixture
def run(
    lake: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> Run:
    monkeypatch.setenv("REPLAYLAKE_LAKE", str(lake))

    def call(*arguments: object) -> Ran:
        capfdbinary.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capfdbinary.readouterr()
        return Ran(code, captured.out.decode(errors="surrogateescape"), captured.err.decode())

    return call


@pytest.fixture
def tree(lake: Path) -> Callable[[], dict[str, bytes]]:
    """Returns every file of the lake, to show that a command changed nothing."""
    return lambda: {
        str(path.relative_to(lake)): path.read_bytes()
        for path in sorted(lake.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="session")
def cartpole() -> Path:
    """The RLlib log that ships with the project."""
    return Path(__file__).parents[2] / "examples" / "data" / "rllib_cartpole"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Two hand-made episodes: returns 3 and 10, the first terminated, the second truncated."""
    rows = [
        "episode_id,step,x,y,action,reward,terminated,truncated",
        "a,0,0.5,1.0,0,1.0,false,false",
        "a,1,1.5,2.0,1,2.0,true,false",
        "b,0,2.5,3.0,1,10.0,false,true",
    ]
    path = tmp_path / "log.csv"
    path.write_text("\n".join(rows) + "\n")
    return path
