"""A run's dataset is compacted while it grows, by a process that ends with the run's."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.online.recording import background_compactor
from replaylake.online.recording.background_compactor import BackgroundCompactor, compact_and_vacuum


def piece(number: int, first: int = 0, *, ends: bool = True) -> Episode:
    return Episode(
        episode_id=f"e{number}",
        first_step=first,
        observations=np.full((5, 2), number, np.float32),
        actions=np.zeros(5, np.int64),
        rewards=np.arange(5.0),
        final_observation=np.zeros(2, np.float32),
        truncated=ends,
    )


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


@pytest.fixture
def dataset(lake: Lake) -> Dataset:
    made = lake.dataset("d")
    made.create(Box((2,)), Discrete(2))
    return made


def until(is_so: Callable[[], bool], timeout_s: float = 120.0) -> bool:
    end = time.monotonic() + timeout_s
    while not is_so() and time.monotonic() < end:
        time.sleep(0.02)
    return is_so()


def num_shards(dataset: Dataset) -> int:
    return len(dataset.snapshot().files)


def child(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


@pytest.mark.slow
def test_shards_become_fewer_while_others_come(lake: Lake, dataset: Dataset) -> None:
    dataset.append([piece(1000, ends=False)], producer="open", sequence=0)
    with (
        dataset.follow() as view,
        BackgroundCompactor(lake.url, dataset, new_shards=20, look_s=0.05) as keeper,
    ):
        for number in range(30):
            dataset.append([piece(number)])
        assert until(lambda: len(keeper.rounds) == 1)
        for number in range(30, 60):
            dataset.append([piece(number)])
        assert until(lambda: len(keeper.rounds) == 2)
        assert view.wait_for(dataset.snapshot().version)
        assert view.num_steps == dataset.snapshot().num_steps == 305
    first, second = keeper.rounds
    assert first.blocked_reason is second.blocked_reason is None
    # That of an open episode stays, and so does what came meanwhile.
    assert first.shards_after < first.shards_before
    assert num_shards(dataset) < 61
    assert dataset.snapshot().files[0].num_rows == 5
    # What was replaced a moment ago can still be read.
    assert second.vacuumed == 0
    assert dataset.snapshot(20).num_steps == 100


@pytest.mark.slow
def test_trouble_is_a_remark(
    lake: Lake, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(10):
        dataset.append([piece(number)])
    path = lake.path / "d" / dataset.snapshot().files[3].path
    path.write_bytes(b"no shard")
    remarks: list[str] = []
    with BackgroundCompactor(
        lake.url, dataset, new_shards=5, look_s=0.05, on_remark=remarks.append
    ) as keeper:
        assert until(lambda: bool(remarks))
        # Not again until as many more are there.
        time.sleep(0.3)
        assert len(keeper.rounds) == len(remarks) == 1
        assert remarks[0].startswith("housekeeping of 'd': QueryError: ")
        path.unlink()
        monkeypatch.setattr(
            background_compactor, "_start_process", lambda *_: child("raise SystemExit(1)")
        )
        for number in range(10, 20):
            dataset.append([piece(number)])
        assert until(lambda: len(remarks) == 2)
        assert "its process ended with 1, expected a report of it" in remarks[1]
    assert compact_and_vacuum(str(tmp_path / "none"), "d").blocked_reason is not None


def test_a_round_ends_with_the_run(
    lake: Lake, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        dataset.append([piece(number)])
    begun = threading.Event()

    def start_process(*_: object) -> subprocess.Popen[bytes]:
        begun.set()
        return child("import time; time.sleep(120)")

    monkeypatch.setattr(background_compactor, "_start_process", start_process)
    keeper = BackgroundCompactor(lake.url, dataset, new_shards=5, look_s=0.01)
    assert begun.wait(60)
    keeper.close()
    # One that had been waited for would have ended without a report.
    assert keeper.rounds == []


@pytest.mark.slow
def test_the_child_gives_way_and_ends_with_a_parent_that_is_killed() -> None:
    code = (
        "import os, time\n"
        "from replaylake.online.recording import background_compactor\n"
        "def slow(*_):\n"
        "    print(os.nice(0), flush=True)\n"
        "    time.sleep(60)\n"
        "background_compactor.compact_and_vacuum = slow\n"
        "background_compactor.main('x', 'd')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        # Its priority, which the parent does not share.
        assert int(process.stdout.readline()) == min(19, os.nice(0) + 10)
        # This closes with a parent, however that ends.
        process.stdin.close()
        assert process.wait(60) == 1
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
