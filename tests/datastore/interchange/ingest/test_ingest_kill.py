"""Kill -9 at any moment of an ingest: what was acknowledged is there, once, in whole commits."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from replaylake.datastore.errors import NotFoundError
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import Lake, open_lake

_NUM_EPISODES = 60
_LENGTH = 20
_TOTAL = _NUM_EPISODES * _LENGTH
_NUM_REJECTED = 6
# One commit is two episodes.
_COMMIT_STEPS = 2 * _LENGTH

_INGEST = f"""
import sys
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import open_lake

def acknowledge(progress):
    print(progress.stage, progress.num_steps, flush=True)

print("start", 0, flush=True)
lake = open_lake(sys.argv[1])
ingest(lake, [sys.argv[2]], "log", commit_steps={_COMMIT_STEPS}, on_progress=acknowledge)
print("end", 0, flush=True)
"""


def _source(folder: Path) -> Path:
    lines = ["episode_id,step,observation,action,reward,terminated"]
    for episode in range(_NUM_EPISODES):
        if episode % 10 == 5:
            # One that is rejected: into quarantine, once.
            lines += [f"bad{episode},{step},0.5,0,nan,0" for step in range(_LENGTH)]
        for step in range(_LENGTH):
            end = int(step == _LENGTH - 1)
            lines.append(f"e{episode},{step},{episode}.5,{step % 3},{step}.25,{end}")
    (folder / "log.csv").write_text("\n".join(lines) + "\n")
    return folder / "log.csv"


def _killed_ingest(lake: Lake, source: Path, rng: random.Random) -> int:
    """Start an ingest, kill it at a random moment, return the steps that it had acknowledged."""
    command = [sys.executable, "-c", _INGEST, str(lake.path), str(source)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines_before_kill = rng.randint(1, 12)
        acknowledged = 0
        for number, line in enumerate(process.stdout, 1):
            if not line.endswith("\n"):
                # Killed while it printed, and even the number may be cut: not an acknowledgement.
                assert number > lines_before_kill
                break
            stage, steps = line.split()
            acknowledged = int(steps) if stage == "commit" else acknowledged
            _check_readable(lake)
            if number == lines_before_kill:
                # Some kills come between commits, some within one.
                time.sleep(rng.random() * 0.01)
                process.kill()
        # What was printed before the kill arrived counts too.
        return acknowledged


def _check_readable(lake: Lake) -> int:
    """Read as any reader does, at any moment; return the steps."""
    try:
        snapshot = lake.dataset("log").snapshot()
    except NotFoundError:
        return 0
    assert snapshot.num_steps % _COMMIT_STEPS == 0
    assert snapshot.table.read(["episode_id", "step"]).num_rows == snapshot.num_steps
    return snapshot.num_steps


def _num_quarantined(lake: Lake) -> int:
    """Return the rows in quarantine: all of them once, or none."""
    if not lake.dataset("log").exists():
        return 0
    columns = "count(*) as n, count(distinct (episode_id, row_number)) as d"
    (found,) = lake.sql(f"select {columns} from log.quarantine").to_pylist()
    assert found["n"] == found["d"]
    assert found["n"] in (0, _NUM_REJECTED * _LENGTH)
    return int(found["n"])


def _check_once_and_whole(lake: Lake) -> None:
    if not lake.dataset("log").exists():
        return
    found = lake.sql(
        "select count(*) as episodes, coalesce(min(n), 20) as least, coalesce(max(n), 20) as most, "
        "coalesce(sum(n), 0) as steps, coalesce(sum(d), 0) as distinct_steps from "
        "(select count(*) as n, count(distinct step) as d from log.steps group by episode_id)"
    ).to_pylist()[0]
    assert found["least"] == found["most"] == _LENGTH
    assert found["steps"] == found["distinct_steps"] == found["episodes"] * _LENGTH


def _kill_and_complete(folder: Path, num_kills: int, seed: int) -> None:
    rng = random.Random(seed)
    lake = open_lake(folder / "lake", create=True)
    source = _source(folder)
    for _ in range(num_kills):
        acknowledged = _killed_ingest(lake, source, rng)
        stored = _check_readable(lake)
        assert stored >= acknowledged
        # The last commit comes after the quarantine.
        assert stored < _TOTAL or _num_quarantined(lake)
        _check_once_and_whole(lake)
    present = _check_readable(lake)
    receipt = ingest(lake, [source], "log", commit_steps=_COMMIT_STEPS)
    assert receipt.steps.read == _TOTAL + _NUM_REJECTED * _LENGTH
    assert _num_quarantined(lake) == receipt.steps.rejected == _NUM_REJECTED * _LENGTH
    assert receipt.steps.already_present == present
    assert receipt.steps.committed == _TOTAL - present
    assert _check_readable(lake) == _TOTAL
    _check_once_and_whole(lake)
    again = ingest(lake, [source], "log")
    assert (again.steps.already_present, again.num_quarantined) == (_TOTAL, 0)


@pytest.mark.slow
def test_killed_ingests_lose_and_double_nothing(tmp_path: Path) -> None:
    _kill_and_complete(tmp_path, num_kills=3, seed=0)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(1, 5))
def test_many_killed_ingests_lose_and_double_nothing(tmp_path: Path, seed: int) -> None:
    _kill_and_complete(tmp_path, num_kills=8, seed=seed)


@pytest.mark.slow
def test_two_ingests_of_one_source_at_once_commit_it_once(tmp_path: Path) -> None:
    lake = open_lake(tmp_path / "lake", create=True)
    command = [sys.executable, "-c", _INGEST, str(lake.path), str(_source(tmp_path))]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in running:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert output.endswith("end 0\n")
    assert _num_quarantined(lake) == _NUM_REJECTED * _LENGTH
    assert _check_readable(lake) == _TOTAL
    _check_once_and_whole(lake)
