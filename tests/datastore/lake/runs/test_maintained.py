"""What the commands that keep a lake do with the folders of runs: old checkpoints go, no more."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.runs.checkpoints import Checkpoints
from replaylake.datastore.lake.runs.lease import RunLease
from replaylake.datastore.lake.runs.metrics import MetricsLog, read_metrics
from replaylake.datastore.maintenance.copy.copy import copy
from replaylake.datastore.maintenance.fsck.fsck import fsck
from replaylake.datastore.maintenance.maintain import maintain
from replaylake.datastore.maintenance.purge.purge import purge
from replaylake.datastore.maintenance.vacuum import vacuum
from replaylake.datastore.names import new_ulid

DAY_MS = 86_400_000
MONTH_MS = 30 * DAY_MS


def files_of(lake: Lake) -> dict[str, bytes]:
    return {
        file.path: (lake.path / file.path).read_bytes() for file in lake.storage.files("_lake/runs")
    }


def filled(lake: Lake, make_episode: Callable[..., Any]) -> dict[str, bytes]:
    """A dataset of two episodes; a run with metrics, a checkpoint and event files."""
    episodes = [make_episode(name, terminated=True) for name in ("first-episode", "other-episode")]
    lake.dataset("d").append(episodes)
    lake.registry.record_run("r", {"status": "running", "datasets": [{"dataset": "d"}]})
    with MetricsLog(lake.storage, "r") as log:
        log.add(1, {"loss": 1.0}, 0.0)
    lake.storage.put("_lake/runs/r/checkpoints/mine.safetensors", np.zeros(8).tobytes())
    lake.storage.put("_lake/runs/r/tensorboard/events.out.tfevents.1.r", b"events")
    return files_of(lake)


def in_days(days: float) -> int:
    return time.time_ns() // 1_000_000 + int(days * DAY_MS)


def recorded(lake: Lake, status: str, run_id: str = "r", **changes: Any) -> None:
    """A run that ended now, with metrics, two checkpoints and half of a third."""
    body = {"status": status, "started_ms": in_days(0), "ended_ms": in_days(0), **changes}
    lake.registry.record_run(run_id, body)
    with MetricsLog(lake.storage, run_id) as log:
        log.add(1, {"loss": 1.0}, 0.0)
    for update in (5, 10):
        Checkpoints(lake.storage, run_id).save(update, {"w": np.zeros(3)}, {})
    half = f"_lake/runs/{run_id}/checkpoints/{new_ulid()}.safetensors"
    lake.storage.put(half, b"half")


@pytest.mark.parametrize("status", ["running", "interrupted", "failed"])
def test_checkpoints_that_nobody_goes_on_with_go_after_a_month(lake: Lake, status: str) -> None:
    recorded(lake, status)
    before = files_of(lake)
    assert vacuum(lake, delete=True, now_ms=in_days(29)).garbage == ()
    found = vacuum(lake, now_ms=in_days(31))
    assert {one.kind for one in found.garbage} == {"checkpoint"}
    assert len(found.garbage) == 5
    assert files_of(lake) == before
    (done,) = maintain(lake, now_ms=in_days(31))
    assert done.vacuumed == 5
    assert list(files_of(lake)) == ["_lake/runs/r/metrics/000000.parquet"]


def test_checkpoints_of_a_run_that_is_alive_stay(lake: Lake) -> None:
    recorded(lake, "running", started_ms=0, ended_ms=None)
    with RunLease(lake.storage, "r"):
        assert vacuum(lake, delete=True, now_ms=in_days(90)).garbage == ()
        # Nor are they taken from whoever goes on with it in this moment.
        recorded(lake, "done", "s")
        with RunLease(lake.storage, "s"):
            assert vacuum(lake, delete=True).garbage == ()
    assert Checkpoints(lake.storage, "r").updates() == [5, 10]


def test_checkpoints_of_a_run_that_is_done_go_at_once(lake: Lake) -> None:
    recorded(lake, "done")
    assert len(vacuum(lake, delete=True).garbage) == 5
    assert Checkpoints(lake.storage, "r").updates() == []
    assert read_metrics(lake.storage).num_rows == 1


def test_checkpoints_of_no_run_are_not_ours(lake: Lake) -> None:
    Checkpoints(lake.storage, "unknown").save(1, {}, {})
    assert vacuum(lake, delete=True, now_ms=in_days(90)).garbage == ()


def test_vacuum_and_maintain_take_nothing_else_of_a_run(
    lake: Lake, make_episode: Callable[..., Any]
) -> None:
    before = filled(lake, make_episode)
    now_ms = 2_000_000_000_000 + MONTH_MS
    found = vacuum(lake, delete=True, now_ms=now_ms)
    assert [one.path for one in found.garbage if "/runs/" in one.path] == []
    for _ in maintain(lake, now_ms=now_ms):
        pass
    assert files_of(lake) == before
    assert len(before) == 3


def test_fsck_reads_metrics_and_finds_no_orphans(
    lake: Lake, make_episode: Callable[..., Any]
) -> None:
    filled(lake, make_episode)
    report = fsck(lake, now_ms=2_000_000_000_000 + MONTH_MS)
    assert report.is_clean
    assert [one for one in report.findings if "/runs/" in one.path] == []
    path = "_lake/runs/r/metrics/000000.parquet"
    data = lake.storage.get(path)
    assert data is not None
    # The first page's data: what only its checksum tells.
    place = data.index(b"\x28\xb5\x2f\xfd") + 8
    lake.storage.put(path, data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    report = fsck(lake)
    (finding,) = report.findings
    assert (finding.severity, finding.check, finding.path) == ("error", "metrics", path)
    assert "remove it" in finding.message


def test_a_purge_looks_into_them(lake: Lake, make_episode: Callable[..., Any]) -> None:
    before = filled(lake, make_episode)
    purge(lake, "d", "episode_id = 'first-episode'")
    assert files_of(lake) == before
    lake.storage.put("_lake/runs/r/checkpoints/state.json", b'{"last": "other-episode"}')
    done = purge(lake, "d", "episode_id = 'other-episode'")
    assert "_lake/runs/r/checkpoints/state.json" in done.named_in


def test_a_copy_is_of_a_dataset_and_leaves_runs(
    lake: Lake, make_episode: Callable[..., Any], tmp_path: Path
) -> None:
    filled(lake, make_episode)
    target = open_lake(tmp_path / "target", create=True)
    copy(lake, "d", target)
    assert read_metrics(target.storage).num_rows == 0
    assert target.registry.runs() == []
