"""Metrics of runs: written in pieces, cut back, read by run and in SQL, killed or whole."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replaylake.datastore.errors import StorageError
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.runs import metrics
from replaylake.datastore.lake.runs.metrics import (
    LoggedMetrics,
    MetricsLog,
    find_damaged_pieces,
    read_curves,
    read_logged_metrics,
    read_metrics,
)
from replaylake.datastore.names import new_ulid
from replaylake.datastore.storage.storage import LocalStorage

NOW_S = 1_800_000_000.25


def curves(storage: Any, run_id: str = "r") -> dict[str, tuple[list[int], list[float]]]:
    found = read_curves(storage, run_id)
    return {name: (one.updates.tolist(), one.values.tolist()) for name, one in found.items()}


def pieces(storage: LocalStorage, run_id: str = "r") -> list[str]:
    return storage.names(f"_lake/runs/{run_id}/metrics")


def test_rows_come_back_as_they_were_added(storage: LocalStorage) -> None:
    with MetricsLog(storage, "r") as log:
        log.add(10, {"critic_loss": 0.1, "updates_per_s": 1e300}, NOW_S)
        log.add(20, {"critic_loss": math.inf}, NOW_S + 1)
        log.add(20, {"evaluation/return": -7.5}, NOW_S + 1)
        log.add(30, {}, NOW_S)
    table = read_metrics(storage)
    assert table.column_names == ["run_id", "update", "name", "value", "measured_at"]
    rows = [(r["run_id"], r["update"], r["name"], r["value"]) for r in table.to_pylist()]
    assert rows == [
        ("r", 10, "critic_loss", 0.1),
        ("r", 10, "updates_per_s", 1e300),
        ("r", 20, "critic_loss", math.inf),
        ("r", 20, "evaluation/return", -7.5),
    ]
    assert table["measured_at"][0].as_py().timestamp() == NOW_S
    assert curves(storage) == {
        "critic_loss": ([10, 20], [0.1, math.inf]),
        "updates_per_s": ([10], [1e300]),
        "evaluation/return": ([20], [-7.5]),
    }


def test_what_was_logged_time_by_time(storage: LocalStorage) -> None:
    with MetricsLog(storage, "r") as log:
        log.add(10, {"a/x": 1.0, "b": 2.0}, NOW_S)
        log.add(10, {"a/y": 3.0, "a/x": 4.0}, NOW_S + 1)
        log.add(20, {"b": 5.0}, NOW_S + 2)
        # Of the same moment, but another update; and of a clock that was set back.
        log.add(30, {"a/x": 6.0}, NOW_S + 1)
        log.add(40, {"a/x": 7.0}, NOW_S - 9)
    assert read_logged_metrics(storage, "r", "a/") == [
        LoggedMetrics(10, NOW_S, {"a/x": 1.0}),
        LoggedMetrics(10, NOW_S + 1, {"a/y": 3.0, "a/x": 4.0}),
        LoggedMetrics(30, NOW_S + 1, {"a/x": 6.0}),
        LoggedMetrics(40, NOW_S - 9, {"a/x": 7.0}),
    ]
    assert len(read_logged_metrics(storage, "r", "")) == 5
    assert (
        read_logged_metrics(storage, "r", "c") == read_logged_metrics(storage, "other", "a/") == []
    )


def test_nan_stays_nan(storage: LocalStorage) -> None:
    with MetricsLog(storage, "r") as log:
        log.add(1, {"loss": math.nan}, NOW_S)
    assert math.isnan(read_curves(storage, "r")["loss"].values[0])


def test_a_run_without_metrics_has_none(storage: LocalStorage) -> None:
    MetricsLog(storage, "r").close()
    assert read_metrics(storage).num_rows == 0
    assert read_metrics(storage, ["r", "s"]).num_rows == 0
    assert read_curves(storage, "r") == {}
    assert pieces(storage) == []


def test_of_the_same_update_the_last_counts_and_updates_grow(storage: LocalStorage) -> None:
    with MetricsLog(storage, "r") as log:
        for update, value in ((5, 1.0), (3, 2.0), (5, 3.0)):
            log.add(update, {"loss": value}, NOW_S)
    assert curves(storage) == {"loss": ([3, 5], [2.0, 3.0])}


def test_a_piece_is_written_again_until_it_is_full(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "PIECE_ROWS", 4)
    log = MetricsLog(storage, "r")
    for update in range(9):
        log.add(update, {"loss": float(update)}, NOW_S)
        log.flush()
    assert pieces(storage) == ["000000.parquet", "000001.parquet", "000002.parquet"]
    # Another process goes on in the piece that has room.
    again = MetricsLog(storage, "r")
    again.add(9, {"loss": 9.0}, NOW_S)
    again.close()
    assert len(pieces(storage)) == 3
    assert curves(storage)["loss"][0] == list(range(10))


def test_a_slow_store_is_written_to_more_rarely(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, clock, num_puts = storage.put, [0.0], 0

    def slow(path: str, data: bytes | memoryview) -> None:
        nonlocal num_puts
        num_puts += 1
        clock[0] += 1.0
        put(path, data)

    monkeypatch.setattr(storage, "put", slow)
    monkeypatch.setattr(metrics.time, "monotonic", lambda: clock[0])
    log = MetricsLog(storage, "r")
    for update in range(600):
        clock[0] += 1.0
        log.add(update, {"loss": 0.0}, NOW_S)
    # One second in five would be 120 of them.
    assert 10 <= num_puts <= 14


def test_what_was_not_flushed_is_not_there_yet(storage: LocalStorage) -> None:
    log = MetricsLog(storage, "r", flush_interval_s=3600)
    log.add(1, {"loss": 1.0}, NOW_S)
    log.flush()
    log.add(2, {"loss": 2.0}, NOW_S)
    assert curves(storage) == {"loss": ([1], [1.0])}
    log.close()
    log.close()
    assert curves(storage) == {"loss": ([1, 2], [1.0, 2.0])}


def test_a_resumed_run_forgets_what_came_after_its_checkpoint(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "PIECE_ROWS", 3)
    with MetricsLog(storage, "r") as log:
        for update in range(1, 9):
            log.add(update, {"loss": float(update)}, NOW_S)
    resumed = MetricsLog(storage, "r")
    resumed.truncate_after(4)
    assert curves(storage)["loss"][0] == [1, 2, 3, 4]
    resumed.add(5, {"loss": -5.0}, NOW_S)
    resumed.close()
    assert curves(storage) == {"loss": ([1, 2, 3, 4, 5], [1.0, 2.0, 3.0, 4.0, -5.0])}
    assert pieces(storage) == ["000000.parquet", "000001.parquet"]
    resumed.truncate_after(0)
    assert pieces(storage) == []


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(1, 5)),
            st.tuples(st.just("flush"), st.just(0)),
            st.tuples(st.just("resume"), st.integers(0, 30)),
        ),
        max_size=25,
    )
)
def test_it_is_what_a_list_would_be(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    """Property: adding, flushing and resuming at any update, in small pieces."""
    storage = LocalStorage(tmp_path_factory.mktemp("runs"))
    expected: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "PIECE_ROWS", 4)
        log = MetricsLog(storage, "r")
        update = 0
        for kind, number in steps:
            if kind == "add":
                for _ in range(number):
                    update += 1
                    log.add(update, {"loss": 0.0}, NOW_S)
                    expected.append(update)
            elif kind == "flush":
                log.flush()
            else:
                # The process ends without `close`, after a flush as before a checkpoint.
                log.flush()
                update = min(update, number)
                log = MetricsLog(storage, "r")
                log.truncate_after(update)
                expected = [one for one in expected if one <= update]
        log.close()
        assert read_metrics(storage)["update"].to_pylist() == expected
        assert len(pieces(storage)) <= len(expected) // 4 + 1


def test_a_killed_run_keeps_all_that_it_flushed(tmp_path: Path) -> None:
    program = """
        import itertools, sys
        from replaylake.datastore.storage.storage import LocalStorage
        from pathlib import Path
        from replaylake.datastore.lake.runs.metrics import MetricsLog
        log = MetricsLog(LocalStorage(Path(sys.argv[1])), "r", flush_interval_s=3600)
        for update in itertools.count(1):
            log.add(update, {"a": update, "b": -update}, 0.0)
            if update % 7 == 0:
                log.flush()
                print(update, flush=True)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout as lines:
        for _ in range(40):
            said = int(next(lines))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        said = max([said, *(int(line) for line in lines if line.endswith("\n"))])
    found = curves(LocalStorage(tmp_path))
    last = len(found["a"][0])
    # What it said was flushed is there, and nothing of the flush after it is there in part.
    assert last >= said
    assert last % 7 == 0
    assert found == {
        "a": (list(range(1, last + 1)), [float(n) for n in range(1, last + 1)]),
        "b": (list(range(1, last + 1)), [float(-n) for n in range(1, last + 1)]),
    }


def test_a_damaged_piece_is_named(storage: LocalStorage) -> None:
    with MetricsLog(storage, "r") as log:
        log.add(1, {"loss": 1.0}, NOW_S)
    path = "_lake/runs/r/metrics/000000.parquet"
    data = storage.get(path)
    assert data is not None
    assert list(find_damaged_pieces(storage)) == []
    storage.put(path, data[:40])
    with pytest.raises(StorageError, match=r"r/metrics/000000.parquet: .*remove it"):
        read_metrics(storage)
    with pytest.raises(StorageError, match="cannot be read"):
        MetricsLog(storage, "r")
    ((found, reason),) = find_damaged_pieces(storage)
    assert found == path
    assert "expected metrics of a run" in reason


def test_other_files_of_a_run_are_no_metrics(storage: LocalStorage) -> None:
    with MetricsLog(storage, "r") as log:
        log.add(1, {"loss": 1.0}, NOW_S)
    storage.put("_lake/runs/r/metrics/notes.txt", b"mine")
    storage.put("_lake/runs/r/checkpoints/000000.parquet", b"no metrics")
    storage.put("_lake/runs/r/tensorboard/events.1", b"no metrics")
    assert read_metrics(storage).num_rows == 1
    assert MetricsLog(storage, "r")._piece == 0


def make_runs(lake: Lake) -> None:
    for run_id, seed in (("r1", 1), ("r2", 2)):
        lake.registry.record_run(
            run_id,
            {
                "kind": "train offline",
                "status": "done",
                "started_ms": 1_800_000_000_000,
                "policy": "clone",
                "policy_version": seed,
                "seed": seed,
                "datasets": [{"dataset": "cartpole", "version": 1}],
            },
        )
        with MetricsLog(lake.storage, run_id) as log:
            for update in (100, 200):
                values = {"policy_loss": 1 / update, "evaluation/return": seed * float(update)}
                log.add(update, values, NOW_S)


JOINED = """
    select r.run_id, d.dataset, d.num_steps, m.update, m.value, m.measured_at
    from metrics m
    join runs r using (run_id)
    join datasets d on d.dataset = r.record->>'$.datasets[0].dataset'
    where m.name = 'evaluation/return' order by all
"""


@pytest.mark.parametrize("where", ["local", "memory", "s3"])
def test_sql_joins_metrics_with_runs_and_datasets(
    request: pytest.FixtureRequest, tmp_path: Path, make_episode: Any, where: str
) -> None:
    places = {"local": str(tmp_path / "lake"), "memory": f"memory://{new_ulid()}"}
    url = places.get(where) or f"s3://{request.getfixturevalue('bucket')}/lake"
    lake = open_lake(url, create=True)
    lake.dataset("cartpole").append([make_episode("e")])
    make_runs(lake)
    lake = open_lake(url)
    rows = lake.sql(JOINED).to_pylist()
    found = [(row["run_id"], row["dataset"], row["update"], row["value"]) for row in rows]
    assert found == [
        ("r1", "cartpole", 100, 100.0),
        ("r1", "cartpole", 200, 200.0),
        ("r2", "cartpole", 100, 200.0),
        ("r2", "cartpole", 200, 400.0),
    ]
    assert rows[0]["num_steps"] == 3
    assert rows[0]["measured_at"].timestamp() == NOW_S
    assert lake.sql("select distinct name from metrics order by 1")["name"].to_pylist() == [
        "evaluation/return",
        "policy_loss",
    ]
    resumed = MetricsLog(lake.storage, "r2")
    resumed.truncate_after(100)
    assert lake.sql("select count(*) as n from metrics")["n"].to_pylist() == [6]


def test_sql_from_others_sees_the_same_metrics(lake: Lake) -> None:
    make_runs(lake)
    query = "select update, name, value, measured_at, run_id from metrics order by all"
    assert lake.sql_untrusted(query).rows.to_pylist() == lake.sql(query).to_pylist()
    assert lake.sql(query).num_rows == 8


def test_metrics_are_read_only_by_a_query_that_names_them(lake: Lake) -> None:
    make_runs(lake)
    lake.storage.put("_lake/runs/r1/metrics/000000.parquet", b"damaged")
    assert lake.sql("select count(*) as n from runs")["n"].to_pylist() == [2]
    with pytest.raises(StorageError, match="000000"):
        lake.sql("select * from metrics")


def test_each_bit_of_a_piece_counts(storage: LocalStorage) -> None:
    """Parquet's own checksums are of its pages: a bit of the footer could rename a column."""
    with MetricsLog(storage, "r") as log:
        log.add(1, {"loss": 1.0}, NOW_S)
    path = "_lake/runs/r/metrics/000000.parquet"
    whole = storage.get(path)
    assert whole is not None
    for place in range(0, 8 * len(whole), 7):
        data = bytearray(whole)
        data[place // 8] ^= 1 << place % 8
        storage.put(path, bytes(data))
        with pytest.raises(StorageError, match="cannot be read"):
            read_metrics(storage)


def test_a_piece_of_an_earlier_release_is_read(storage: LocalStorage) -> None:
    columns: dict[str, list[object]] = {"update": [1], "name": ["loss"], "value": [2.0]}
    rows = pa.table(columns).append_column(
        "measured_at", pa.array([0], pa.timestamp("us", tz="UTC"))
    )
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink)
    storage.put("_lake/runs/r/metrics/000000.parquet", sink.getvalue().to_pybytes())
    assert read_metrics(storage)["value"].to_pylist() == [2.0]
    assert list(find_damaged_pieces(storage)) == []
