"""Compactors and writers at once, and killed at any moment: no row is lost or there twice."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import deltalake
import pytest

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.maintenance.compact import compact
from replaylake.datastore.maintenance.retention import set_retention

_WORKER = Path(__file__).with_name("worker.py")


def _start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(_WORKER), *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def _lines(process: subprocess.Popen[str]) -> list[list[str]]:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return [line.split() for line in out.splitlines()]


def _expected(producers: list[str], num_commits: int) -> Counter[tuple[str, int]]:
    rows: Counter[tuple[str, int]] = Counter()
    for producer in producers:
        for number in range(num_commits // 2):
            rows.update((f"{producer}/{number}", step) for step in range(5))
            rows[f"{producer}s/{number}", 0] += 1
    return rows


def _rows(lake: Lake, version: int | None = None) -> Counter[tuple[str, int]]:
    table = lake.dataset("d").table.snapshot(version).read(["episode_id", "step"])
    return Counter((row["episode_id"], row["step"]) for row in table.to_pylist())


def _check_history(lake: Lake) -> None:
    """No compaction changes how many rows there are, and every commit of a writer adds its own."""
    log = lake.dataset("d").table.log
    before = 0
    for version in range(1, log.newest().version + 1):
        num_rows = sum(entry.num_rows for entry in log.at(version).files.values())
        info = log.info(version)
        added = num_rows - before
        assert added == info.get("num_steps", 0), info
        before = num_rows


def _made(path: Path) -> Lake:
    lake = open_lake(path, create=True)
    lake.dataset("d").create(Box((2,)), Discrete(2))
    return lake


def _compact_beside_writers(path: Path, num_writers: int, num_commits: int) -> int:
    lake, stop = _made(path / "lake"), path / "stop"
    compactors = [_start("compact", lake.path, stop) for _ in range(2)]
    producers = [f"w{number}" for number in range(num_writers)]
    writers = [_start("write", lake.path, name, num_commits) for name in producers]
    for writer in writers:
        assert len(_lines(writer)) == num_commits
    until = time.monotonic() + 120
    while all(info["operation"] != "COMPACT" for info in lake.dataset("d").history()):
        assert time.monotonic() < until
        time.sleep(0.01)
    stop.touch()
    said = [line for compactor in compactors for line in _lines(compactor)]
    expected = _expected(producers, num_commits)
    assert _rows(lake) == expected
    _check_history(lake)
    compact(lake, "d", open_s=0.0)
    assert len(lake.dataset("d").table.snapshot().files) == 1
    assert _rows(open_lake(lake.path)) == expected
    theirs = deltalake.DeltaTable(str(lake.path / "d")).to_pyarrow_table(columns=["step"])
    assert theirs.num_rows == expected.total()
    return sum(int(line[1]) for line in said)


@pytest.mark.slow
def test_two_compactors_and_two_writers(tmp_path: Path) -> None:
    assert _compact_beside_writers(tmp_path, 2, 20) > 0


@pytest.mark.chaos
def test_two_compactors_and_four_writers_for_long(tmp_path: Path) -> None:
    assert _compact_beside_writers(tmp_path, 4, 400) > 0


def _kills(path: Path, role: str, num_kills: int, seed: int) -> int:
    """Kill a maintainer and a writer at any moment, start them again, and look at the rows.

    Returns the last sequence that was acknowledged; each life of the writer adds one or more.
    """
    rng = random.Random(seed)
    lake, stop = _made(path / "lake"), path / "stop"
    set_retention(lake, "d", {"keep_versions_s": 3600.0})
    acknowledged = -1
    for _ in range(num_kills):
        maintainer = _start(role, lake.path, stop)
        writer = _start("write", lake.path, "w", 10**9)
        assert writer.stdout is not None
        for sequence in range(acknowledged + rng.randint(2, 12)):
            assert writer.stdout.readline() == f"acknowledged {sequence}\n"
            acknowledged = max(acknowledged, sequence)
        time.sleep(rng.uniform(0.0, 0.1))
        for process in (maintainer, writer):
            process.kill()
        maintainer.communicate()
        said, _ = writer.communicate()
        acknowledged += said.count("\n")
        rows = _rows(open_lake(lake.path))
        assert set(rows.values()) <= {1}
        for sequence in range(acknowledged + 1):
            step = 0 if sequence % 2 == 0 else 3
            assert rows[f"w/{sequence // 2}", step] == 1
    again = _start("write", lake.path, "w", acknowledged + 1 + acknowledged % 2)
    _lines(again)
    before = _rows(lake)
    compact(lake, "d", open_s=0.0)
    assert _rows(lake) == before
    if role == "compact":
        _check_history(lake)
    return acknowledged


@pytest.mark.slow
@pytest.mark.parametrize("role", ["compact", "maintain"])
def test_killed_in_the_middle(tmp_path: Path, role: str) -> None:
    assert _kills(tmp_path, role, 2, seed=1) >= 1


@pytest.mark.chaos
@pytest.mark.parametrize("role", ["compact", "maintain"])
def test_killed_in_the_middle_for_long(tmp_path: Path, role: str) -> None:
    assert _kills(tmp_path, role, 60, seed=2) >= 59
