"""Ingests into a dataset with a unique key: overlapping files, late rewards, conflicts, kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.errors import ConfigInvalidError, SchemaMismatchError
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.interchange.ingest.previous_ingests import DIGITS
from replaylake.datastore.interchange.ingest.quarantine_rows import (
    list_quarantine,
    read_quarantine,
)
from replaylake.datastore.interchange.ingest.receipt import IngestReceipt
from replaylake.datastore.interchange.ingest.repair import repair
from replaylake.datastore.interchange.ingest.stream.lines import LineReader
from replaylake.datastore.interchange.ingest.stream.stream import follow
from replaylake.datastore.interchange.sources.source import find_source
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.maintenance.delete import delete

Row = tuple[Any, ...]
OPTIONS = ReadOptions(mapping={"observation": "x"}, reward_unknown=True)


def _write(path: Path, rows: list[Row]) -> Path:
    """One decision a row: event_id, x, action, reward."""
    cells = [",".join("" if v is None else str(v) for v in row) for row in rows]
    lines = ["event_id,x,action,reward,terminated", *(f"{line},true" for line in cells)]
    path.write_text("\n".join(lines) + "\n")
    return path


def _ingest(lake: Lake, path: Path, **named: Any) -> IngestReceipt:
    given = {"unique": ["event_id"], "options": OPTIONS}
    return ingest(lake, [path], "d", **(given | named))


def _stored(lake: Lake) -> dict[int, Row]:
    names = ["event_id", "action", "reward"]
    rows = open_lake(lake.url).snapshot("d").table.read(names).to_pylist()
    found = {row["event_id"]: (row["action"], row["reward"]) for row in rows}
    assert len(found) == len(rows)
    return found


def _keys(receipt: IngestReceipt) -> tuple[int, int, int, int]:
    keys = receipt.keys
    return keys.duplicates, keys.late_values, keys.conflicts, keys.replaced


def test_cumulative_nightly_files(lake: Lake, tmp_path: Path) -> None:
    b1 = _write(tmp_path / "b1.csv", [(1, 0.5, 0, 1.0), (2, 0.5, 1, None)])
    b2 = _write(tmp_path / "b2.csv", [(3, 0.5, 0, 1.0)])
    # The second night has the first again, with a reward that came, and a row that differs.
    b12 = _write(
        tmp_path / "b12.csv",
        [(1, 0.5, 1, 1.0), (2, 0.5, 1, 4.0), (3, 0.5, 0, 1.0), (4, 0.5, 0, None), (4, 0.5, 0, 2.0)],
    )

    assert _keys(_ingest(lake, b1)) == (0, 0, 0, 0)
    both = ingest(lake, [b1, b2], "d", options=OPTIONS)  # remembered
    assert (_keys(both), both.notes) == ((2, 0, 0, 0), ())
    receipt = _ingest(lake, b12)

    assert _stored(lake) == {1: (0, 1.0), 2: (1, 4.0), 3: (0, 1.0), 4: (0, 2.0)}
    assert _keys(receipt) == (1, 2, 1, 0)
    steps = receipt.steps
    assert (steps.read, steps.committed, steps.rejected, steps.already_present) == (5, 1, 1, 3)
    assert receipt.episodes == steps
    (check,) = [check for check in receipt.checks if check.name == "conflict"]
    assert check.num_rows == 1
    (row,) = lake.dataset("d").rejected.snapshot().read().to_pylist()
    assert (Path(row["file"]).name, row["file_row"], row["checks"]) == ("b12.csv", 0, ["conflict"])
    # Again: the content is known. And the conflict replaced, from another file.
    assert _ingest(lake, b12).version is None
    b3 = _write(tmp_path / "b3.csv", [(1, 0.5, 1, 1.0), (2, 0.5, 1, 4.0)])
    replaced = _ingest(lake, b3, on_conflict="replace")
    assert (_keys(replaced), _stored(lake)[1]) == ((1, 0, 0, 1), (1, 1.0))
    assert replaced.version is not None


def test_conflicts_in_quarantine_are_listed_and_tried_again(lake: Lake, tmp_path: Path) -> None:
    dataset = lake.dataset("d")
    _ingest(lake, _write(tmp_path / "a.csv", [(n, 0.5, n // 3, 1.0) for n in range(4)]))
    log = _write(tmp_path / "b.csv", [(n, 0.5, 1, 1.0) for n in range(3)] + [(4, 0.5, 0, 1.0)])
    assert _ingest(lake, log).num_quarantined == 3
    (reason,) = list_quarantine(dataset).reasons
    assert (reason.reason, reason.num_rows, reason.row) == ("conflict", 3, 0)
    assert [one.file_row for one in read_quarantine(dataset)] == [0, 1, 2]

    done = repair(dataset)
    assert (done.num_failed_rows, done.num_left_rows, done.version) == (3, 3, None)
    assert "3 episodes have keys that the dataset has with other values" in done.notes[0]
    # One with another key is new, one with the stored values says nothing new, one stays.
    fix = (
        "SELECT * REPLACE (CASE event_id WHEN 0 THEN 50 ELSE event_id END AS event_id, "
        "CASE event_id WHEN 1 THEN 0 ELSE action END AS action) FROM quarantine"
    )
    assert repair(dataset, fix=fix, dry_run=True).num_repaired_rows == 2
    done = repair(dataset, fix=fix)
    assert (done.num_repaired_rows, done.num_failed_rows, done.num_left_rows) == (2, 1, 1)
    assert {key: row[0] for key, row in _stored(lake).items()} == {
        0: 0, 1: 0, 2: 0, 3: 1, 4: 0, 50: 1
    }  # fmt: skip
    assert read_quarantine(dataset)[0].file_row == 2


def test_deleted_before_and_keys_add_up(lake: Lake, tmp_path: Path) -> None:
    _ingest(lake, _write(tmp_path / "a.csv", [(n, 0.5, n // 3, None) for n in range(4)]))
    gone = lake.sql("select episode_id as e from d.steps where event_id = 0")["e"][0].as_py()
    delete(lake, "d", f"episode_id = '{gone}'")
    rows: list[Row] = [(1, 0.5, 0, None), (2, 0.5, 0, 2.0), (3, 0.5, 0, None), (9, 0.5, 0, 1.0)]
    log = _write(tmp_path / "b.csv", rows)
    digest = find_source([log], None).content_hash[:DIGITS]
    lake.dataset("d").tombstones.add({"episode_id": [f"{digest}/3"]})
    receipt = _ingest(lake, log, commit_steps=1)
    for counts in (receipt.episodes, receipt.steps):
        assert (counts.read, counts.committed, counts.rejected) == (4, 0, 1)
        assert (counts.already_present, counts.deleted_before) == (2, 1)
    assert _keys(receipt) == (1, 1, 1, 0)
    # It is complete, so the same again looks at no row; with `readmit` the one comes.
    assert _ingest(lake, log).steps.already_present == 4
    assert _ingest(lake, log, readmit=True).steps.committed == 1
    assert set(_stored(lake)) == {1, 2, 3, 9}


def test_null_keys_and_wrong_columns(lake: Lake, tmp_path: Path) -> None:
    path = _write(tmp_path / "a.csv", [(1, 0.5, 0, 1.0), (None, 0.5, 0, 1.0)])
    for names, match in (
        (["nosuch"], "found no column nosuch in the source"),
        (["episode_id"], "source_episode_id"),
        (["observation"], "say which event"),
    ):
        with pytest.raises(ConfigInvalidError, match=match):
            _ingest(lake, path, unique=names)
    with pytest.raises(ConfigInvalidError, match="late: requires `unique`"):
        _ingest(lake, path, unique=(), late=["score"])
    assert not lake.dataset("d").exists()

    receipt = _ingest(lake, path)

    assert (receipt.steps.committed, receipt.steps.rejected) == (1, 1)
    assert [check.name for check in receipt.checks if check.outcome == "rejected"] == ["key"]


def test_a_key_for_rows_that_are_there(lake: Lake, tmp_path: Path) -> None:
    twice = _write(tmp_path / "a.csv", [(1, 0.5, 0, 1.0), (1, 0.5, 0, 1.0)])
    ingest(lake, [twice], "d", options=OPTIONS)
    more = _write(tmp_path / "b.csv", [(1, 0.5, 0, 1.0), (2, 0.5, 0, 1.0)])
    with pytest.raises(SchemaMismatchError, match="event_id 1, expected each once"):
        _ingest(lake, more)
    assert lake.snapshot("d").table.num_rows == 2


def test_a_stream_keeps_to_the_key(lake: Lake, tmp_path: Path) -> None:
    text = "".join(
        f'{{"episode_id": "s{n}", "step": 0, "event": {e}, "observation": [1.0], "action": {a}, '
        f'"reward": 1.0, "terminated": true}}\n'
        for n, (e, a) in enumerate([(1, 0), (2, 0), (1, 0), (2, 1)])
    )
    path = tmp_path / "lines.jsonl"
    path.write_text(text)
    with path.open("rb") as lines:
        reader = LineReader(lines.fileno(), "lines")
        receipt = follow(lake, reader, "s", unique=["event"], flush_every_s=0.01)

    assert (receipt.keys.duplicates, receipt.keys.conflicts) == (1, 1)
    lines_read = receipt.lines
    assert (lines_read.committed, lines_read.rejected, lines_read.already_present) == (2, 1, 1)
    assert lake.dataset("s").spec.unique is not None


_RUN = """
import sys
from pathlib import Path
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import open_lake
options = ReadOptions(mapping={"observation": "x"}, reward_unknown=True)
ingest(
    open_lake(sys.argv[1]), [Path(sys.argv[2])], "d", options=options,
    unique=["event_id"], commit_steps=int(sys.argv[3]),
    on_progress=lambda now: print(now.stage, flush=True),
)
"""


def _start(lake: Lake, path: Path, commit_steps: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _RUN, lake.url, str(path), str(commit_steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
def test_killed_ingests_double_nothing(lake: Lake, tmp_path: Path) -> None:
    """Killed at any commit and run again: each key once, each conflict once in quarantine."""
    rng = np.random.default_rng(0)
    first: list[Row] = [(n, 0.5, int(rng.integers(2)), None) for n in range(300)]
    old = _write(tmp_path / "old.csv", first)
    _ingest(lake, old)
    # The actions are within the space of the first file: 0 and 1.
    actions = [1 - first[n][2] if n % 7 == 0 else first[n][2] for n in range(300)] + [1] * 300
    second: list[Row] = [(n, 0.5, actions[n], float(n % 3)) for n in range(600)]
    new = _write(tmp_path / "new.csv", second)
    for kill_at in (1, 2, 4, 6):
        process = _start(lake, new, 50)
        assert process.stdout is not None
        num = 0
        for line in process.stdout:
            num += line.startswith("commit")
            if num >= kill_at:
                time.sleep(float(rng.random()) * 0.03)
                process.send_signal(signal.SIGKILL)
                break
        process.wait()
        process.stdout.close()
    _ingest(lake, new, commit_steps=50)

    stored = _stored(lake)
    assert sorted(stored) == list(range(600))
    for n, (action, reward) in stored.items():
        conflict = n < 300 and n % 7 == 0
        assert action == (first[n][2] if n < 300 else 1)
        assert reward == (None if conflict else float(n % 3))
    rejected = lake.dataset("d").rejected.snapshot().read(["row", "checks"]).to_pylist()
    assert len(rejected) == len({row["row"] for row in rejected}) == len(range(0, 300, 7))


_CUT_OFF = """
import os, signal
from replaylake.datastore.storage.table.table import Table
Table.write = lambda *arguments, **named: os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.slow
def test_an_ingest_cut_off_before_its_first_commit_leaves_no_dataset(
    lake: Lake, tmp_path: Path
) -> None:
    """Cut off while it writes the first shard, where nearly all of its time goes."""
    path = _write(tmp_path / "a.csv", [(1, 0.5, 0, 1.0)])
    for script in (_RUN, _RUN.replace('["event_id"]', "()")):
        command = [sys.executable, "-c", _CUT_OFF + script, lake.url, str(path), "10"]
        done = subprocess.run(command, capture_output=True, check=False)
        assert done.returncode == -signal.SIGTERM, done.stderr
        assert not lake.dataset("d").exists()
        assert open_lake(lake.url).datasets() == []
    assert _ingest(lake, path).steps.committed == 1
