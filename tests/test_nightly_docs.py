"""docs/NIGHTLY.md: its commands print what it shows, and its deleted person is in no byte left."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from replaylake.cli.main import main

_TEXT = (Path(__file__).parents[1] / "docs" / "NIGHTLY.md").read_text(encoding="utf-8")
_PERSON = "user-8842"
# Of night 6, in which they are refused, and of their own file nothing is kept either.
_ROWS = ("e3", "e5", "e9")


def _commands() -> Iterator[tuple[str, str]]:
    """Yield each command of the page, and what it shows below it."""
    for block in re.findall(r"```console\n(.*?)```", _TEXT, re.DOTALL):
        lines = block.splitlines()
        starts = [number for number, line in enumerate(lines) if line.startswith("$ ")]
        for start, end in itertools.pairwise([*starts, len(lines)]):
            yield lines[start][2:], "\n".join(lines[start + 1 : end]).strip("\n")


def _without_chance(text: str) -> str:
    """Replace sizes, which depend on the compression, and ids of purges; strip ends of lines."""
    text = re.sub(r"\d+\.\d kB|\(purge \w+\)|\b\d+ files scanned", "...", text)
    return "\n".join(line.rstrip() for line in text.splitlines())


def _stored_texts(lake: Path) -> Iterator[tuple[Path, str]]:
    """Yield every file of a lake: its bytes and, of Parquet, all values and statistics."""
    for path in sorted(path for path in lake.rglob("*") if path.is_file()):
        yield path, path.read_bytes().decode(errors="replace")
        if path.suffix == ".parquet":
            file = pq.ParquetFile(path)
            yield path, json.dumps(file.read().to_pylist(), default=str)
            yield (
                path,
                str([file.metadata.row_group(i).to_dict() for i in range(file.num_row_groups)]),
            )


@pytest.mark.slow
def test_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REPLAYLAKE_LAKE", str(tmp_path / "lake"))
    num_nights = 0
    for command, shown in _commands():
        words = shlex.split(command)
        if words[0] == "cat":
            Path(words[1]).write_text(shown + "\n")
            continue
        num_nights += words[1] == "ingest"
        was_there = any(_PERSON in text for _, text in _stored_texts(tmp_path / "lake"))
        assert main(words[1:]) == 0
        assert _without_chance(capsys.readouterr().out.strip("\n")) == _without_chance(shown)
        if "--purge" in words:
            assert was_there
    assert num_nights == 8
    for path, text in _stored_texts(tmp_path / "lake"):
        assert _PERSON not in text, path
        assert not re.search(rf'"({"|".join(_ROWS)})"', text), path
