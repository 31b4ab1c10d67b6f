"""Kill -9 of writers, an ingest, a compactor and a maintainer, beside a reader.

All run at once on one dataset, and each is killed while it works and started again. What it said
stands in a file of its own, so the test knows what was acknowledged at any moment. Every version
that a reader meets holds whole commits, each row once, without a gap, and all that it saw before.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import deltalake
import pytest

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.maintenance.compact import compact
from replaylake.datastore.maintenance.fsck.fsck import fsck
from replaylake.datastore.maintenance.retention import set_retention
from replaylake.datastore.storage.table.table_snapshot import TableSnapshot

_WORKER: Final = Path(__file__).parent / "maintenance" / "worker.py"
_NUM_KILLS: Final = int(os.environ.get("REPLAYLAKE_KILLS", "500"))
# A new lake for as many: the test reads all rows after each kill.
_KILLS_A_LAKE: Final = 25
# Rows of one commit; see worker.py.
_COMMIT_ROWS: Final = {"w0": 3, "w1": 3, "ingest": 10}

_FAULTS: Final = ("lost", "doubled", "gaps", "partial", "changed")

# A commit: who made it, and its number from 0.
Unit = tuple[str, int]
Rows = Counter[tuple[str, int]]


@dataclass
class Tally:
    """What was seen; `faults` counts, by kind, what must not be."""

    num_kills: int = 0
    num_commits: int = 0
    num_rows: int = 0
    num_reads: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)

    def look(self, rows: Rows, expected: set[Unit]) -> set[Unit]:
        """Count the faults of what one version holds; return its commits."""
        sizes = Counter(_unit(*row) for row in rows)
        newest: dict[str, int] = {}
        for producer, number in sizes:
            newest[producer] = max(number, newest.get(producer, -1))
        self.num_reads += 1
        self.faults["doubled"] += rows.total() - len(rows)
        self.faults["partial"] += sum(n != _COMMIT_ROWS[who] for (who, _), n in sizes.items())
        self.faults["gaps"] += sum(last + 1 for last in newest.values()) - len(sizes)
        self.faults["lost"] += len(expected - set(sizes))
        return set(sizes)


def _unit(episode_id: str, step: int) -> Unit:
    producer, _, name = episode_id.partition("/")
    if name.startswith("i"):
        number, which = name[1:].split("e")
        return "ingest", 2 * int(number) + int(which) // 2
    if producer.endswith("s"):
        return producer[:-1], 2 * int(name) + 1
    return producer, 2 * int(name) + (step >= 3)


def _rows(snapshot: TableSnapshot) -> Rows:
    table = snapshot.read(["episode_id", "step"])
    return Counter(zip(table["episode_id"].to_pylist(), table["step"].to_pylist(), strict=True))


class Worker:
    """A process that is started again after each kill; `path` has what it said, all its lives."""

    def __init__(self, folder: Path, role: str, name: str) -> None:
        self.name = name
        self._role = role
        self._folder = folder
        self.path = folder / f"{name}.said"
        self.path.touch()
        self.start(redone=0)

    def start(self, redone: int) -> None:
        """Start it where it was, less `redone`: it then sends those a second time."""
        first = max(0, self.num_acknowledged() - redone)
        arguments = {
            "write": [self.name, 10**9, first],
            "ingest": [self._folder / "stop", self._folder, first],
        }.get(self._role, [self._folder / "stop"])
        command = [sys.executable, _WORKER, self._role, self._folder / "lake", *arguments]
        # More lines than `ready` and what is sent again.
        self._num_lines = self.path.read_text().count("\n") + 1 + redone
        with self.path.open("ab") as out, self.path.with_suffix(".err").open("ab") as err:
            self._process = subprocess.Popen(list(map(str, command)), stdout=out, stderr=err)

    def is_working(self) -> bool:
        """Whether it has done something new since it was started last."""
        err = self.path.with_suffix(".err").read_text()
        assert self._process.poll() is None, f"{self.name} ended by itself: {err}"
        return self.path.read_text().count("\n") > self._num_lines

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def num_acknowledged(self) -> int:
        """Return how many commits of a writer, or files of an ingest, it said were done."""
        last = [line.split() for line in self.path.read_text().split("\n")[:-1]][::-1]
        numbers = (int(words[1]) for words in last if words[0] in ("acknowledged", "ingested"))
        return next(numbers, -1) + 1

    def acknowledged(self) -> set[Unit]:
        """Return the commits that it said were done."""
        a_line = 2 if self._role == "ingest" else 1
        return {(self.name, number) for number in range(a_line * self.num_acknowledged())}


def _read_until(stop: threading.Event, lake: Lake) -> Tally:
    """Read the newest version again and again, and an older one that was opened before."""
    tally, before = Tally(), set[Unit]()
    held = lake.dataset("d").table.snapshot()
    held_rows = _rows(held)
    while not stop.is_set():
        again = lake if tally.num_reads % 2 else open_lake(lake.path)
        snapshot = again.dataset("d").table.snapshot()
        rows = _rows(snapshot)
        before = tally.look(rows, before)
        tally.faults["changed"] += _rows(held) != held_rows
        if tally.num_reads % 10 == 0:
            held, held_rows = snapshot, rows
        # It is not what is tried here: leave the cores to those that write.
        time.sleep(0.02)
    return tally


def _kill_and_look(lake: Lake, workers: list[Worker], num_kills: int, rng: random.Random) -> Tally:
    """Kill one worker after the other, and all at once in the end."""
    tally = Tally()

    def look() -> None:
        # First what was acknowledged, then the rows: those that work on only add.
        expected = set().union(*(worker.acknowledged() for worker in workers))
        tally.look(_rows(open_lake(lake.path).dataset("d").table.snapshot()), expected)

    for _ in range(num_kills - len(workers)):
        until = time.monotonic() + 120
        while not (working := [worker for worker in workers if worker.is_working()]):
            assert time.monotonic() < until, "nobody does anything"
            time.sleep(0.005)
        worker = rng.choice(working)
        time.sleep(rng.expovariate(1 / 0.15))
        worker.kill()
        tally.kills[worker.name] += 1
        look()
        worker.start(redone=rng.randint(0, 2))
    for worker in workers:
        worker.kill()
        tally.kills[worker.name] += 1
    look()
    return tally


def _one_lake(path: Path, num_kills: int, rng: random.Random) -> Tally:
    path.mkdir()
    lake = open_lake(path / "lake", create=True)
    lake.dataset("d").create(Box((2,)), Discrete(2))
    set_retention(lake, "d", {"keep_versions_s": 3600.0})
    roles = {"w0": "write", "w1": "write", "ingest": "ingest", "compact": "compact"}
    workers = [
        Worker(path, role, name) for name, role in (roles | {"maintain": "maintain"}).items()
    ]
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(_read_until, stop, open_lake(lake.path))
        try:
            tally = _kill_and_look(lake, workers, num_kills, rng)
        finally:
            stop.set()
            for worker in workers:
                worker.kill()
    read = reader.result()
    rows = _rows(open_lake(lake.path).dataset("d").table.snapshot())
    compact(lake, "d", open_s=0.0)
    tally.faults["changed"] += _rows(lake.dataset("d").table.snapshot()) != rows
    theirs = deltalake.DeltaTable(str(lake.path / "d")).to_pyarrow_table(columns=["step"])
    assert theirs.num_rows == rows.total()
    report = fsck(open_lake(lake.path))
    assert report.is_clean, report.findings
    tally.num_kills, tally.num_rows = tally.kills.total(), rows.total()
    tally.num_commits = len({_unit(*row) for row in rows})
    tally.num_reads += read.num_reads
    tally.faults += read.faults
    return tally


def _kill(path: Path, num_kills: int, seed: int) -> Tally:
    rng, whole = random.Random(seed), Tally()
    for first in range(0, num_kills, _KILLS_A_LAKE):
        one = _one_lake(path / str(first), min(_KILLS_A_LAKE, num_kills - first), rng)
        whole.num_kills += one.num_kills
        whole.num_commits += one.num_commits
        whole.num_rows += one.num_rows
        whole.num_reads += one.num_reads
        whole.kills += one.kills
        whole.faults += one.faults
    print(
        f"{whole.num_kills} kills {dict(whole.kills)}: {whole.num_commits} commits of "
        f"{whole.num_rows} rows, looked at {whole.num_reads} times; "
        + ", ".join(f"{kind} {whole.faults[kind]}" for kind in _FAULTS)
    )
    return whole


@pytest.mark.slow
def test_killed_at_any_moment_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    assert not _kill(tmp_path, 10, seed=0).faults.total()


@pytest.mark.chaos
def test_killed_at_any_moment_for_long(tmp_path: Path) -> None:
    tally = _kill(tmp_path, _NUM_KILLS, seed=1)
    assert tally.num_kills >= _NUM_KILLS
    assert not tally.faults.total()
