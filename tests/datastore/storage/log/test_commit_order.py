"""Commits that come twice, late or out of order, at once, or while the clock is wrong."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from types import SimpleNamespace

import deltalake
import pyarrow as pa
import pytest

from replaylake.datastore.errors import CommitConflictError
from replaylake.datastore.storage.log import commit_log as log_module
from replaylake.datastore.storage.log.commit_file import Intent
from replaylake.datastore.storage.log.commit_log import CommitLog
from replaylake.datastore.storage.log.expiry import expire
from replaylake.datastore.storage.storage import LocalStorage
from replaylake.datastore.storage.table.table import Table, TableCommit, WrittenRows

DAY_MS = 86_400_000
SCHEMA = pa.schema([("x", pa.int64())])


def rows(*values: int) -> pa.Table:
    return pa.table({"x": list(values)}, schema=SCHEMA)


def values(table: Table) -> Counter[int]:
    return Counter(Table(table.storage, table.root).snapshot().read().column("x").to_pylist())


@pytest.fixture
def table(storage: LocalStorage) -> Table:
    table = Table(storage, "t")
    table.create(SCHEMA)
    return table


def test_pieces_delivered_twice_and_in_any_order_are_there_once(table: Table) -> None:
    pieces = {sequence: table.write(rows(sequence)) for sequence in range(30)}
    deliveries = [*pieces, *pieces, *pieces]
    random.Random(3).shuffle(deliveries)
    versions: dict[int, set[int]] = {}
    for count, sequence in enumerate(deliveries):
        # Now and then by another process, after a checkpoint, and after old commits were dropped.
        if count % 7 == 0:
            table = Table(table.storage, "t")
        if count in (20, 50):
            newest = table.log.newest().version
            table.log.checkpoint(newest)
            expire(table.log, newest - 3)
        done = table.commit([pieces[sequence]], producer="p", sequence=sequence)
        assert done.already_present == (sequence in versions)
        versions.setdefault(sequence, set()).add(done.version)
    assert values(table) == Counter(range(30))
    assert all(len(found) == 1 for found in versions.values()), "always the original version"
    assert table.log.newest().version == 30


def test_one_piece_delivered_by_many_at_the_same_time_is_there_once(table: Table) -> None:
    for sequence in range(10):
        piece = table.write(rows(sequence))
        handles = [Table(table.storage, "t") for _ in range(4)]
        gate = threading.Barrier(4)
        done: list[TableCommit] = []
        threads = [
            threading.Thread(target=_deliver, args=(handle, piece, sequence, gate, done))
            for handle in handles
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(commit.already_present for commit in done) == [False, True, True, True]
        assert {commit.version for commit in done} == {sequence + 1}
    assert values(table) == Counter(range(10))


def _deliver(
    table: Table,
    piece: WrittenRows,
    sequence: int,
    gate: threading.Barrier,
    done: list[TableCommit],
) -> None:
    gate.wait()
    done.append(table.commit([piece], producer="p", sequence=sequence))


def test_two_compactors_that_replace_the_same_shards(table: Table) -> None:
    for sequence in range(4):
        table.append(rows(sequence, sequence), producer="p", sequence=sequence)
    first, second = (Table(table.storage, "t") for _ in range(2))
    replaced = [entry.path for entry in first.snapshot().files]
    merged = [handle.write(handle.snapshot().read()) for handle in (first, second)]
    fields = {"operation": "COMPACT", "removed": replaced, "data_change": False}
    done = first.commit([merged[0]], producer="compact/a", sequence=0, **fields)
    table.append(rows(9), producer="p", sequence=4)
    with pytest.raises(
        CommitConflictError, match=r"COMPACT: shards/\S+ is no longer live at version 6"
    ):
        second.commit([merged[1]], producer="compact/b", sequence=0, **fields)
    # One of them overlaps in a single shard.
    with pytest.raises(CommitConflictError, match="no longer live"):
        second.commit(
            [merged[1]],
            producer="compact/c",
            sequence=0,
            **{**fields, "removed": [replaced[0], second.snapshot().files[-1].path]},
        )
    for handle in (first, second, table):
        again = handle.commit([merged[0]], producer="compact/a", sequence=0, **fields)
        assert (again.version, again.already_present) == (done.version, True), (
            "known before it is seen that what it removes is gone"
        )
    assert values(table) == Counter([0, 0, 1, 1, 2, 2, 3, 3, 9])


def test_compactors_beside_writers_keep_every_row(table: Table) -> None:
    """Two compactors replace all shards again and again while two writers append."""

    def write(name: int) -> None:
        handle = Table(table.storage, "t")
        for sequence in range(15):
            handle.append(rows(100 * name + sequence), producer=f"w{name}", sequence=sequence)

    def compact(name: str, won: list[int]) -> None:
        handle = Table(table.storage, "t")
        for sequence in range(15):
            snapshot = handle.snapshot()
            removed = [entry.path for entry in snapshot.files]
            merged = [handle.write(snapshot.read())] if removed else []
            try:
                handle.commit(merged, producer=name, sequence=sequence, removed=removed)
            except CommitConflictError:
                continue
            won.append(sequence)

    won: list[int] = []
    threads = [threading.Thread(target=write, args=(name,)) for name in (1, 2)]
    threads += [threading.Thread(target=compact, args=(name, won)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won
    assert values(table) == Counter([100 * name + i for name in (1, 2) for i in range(15)])


def _append_at(log: CommitLog, sequence: int) -> None:
    log.commit(lambda _: Intent("p", sequence, "WRITE", info={"sequence": sequence}))


@pytest.mark.parametrize("shift_ms", [DAY_MS, -DAY_MS])
@pytest.mark.parametrize("is_reopened", [False, True])
@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_times_never_go_back_when_the_clock_is_moved_by_a_day(
    table: Table,
    monkeypatch: pytest.MonkeyPatch,
    shift_ms: int,
    is_reopened: bool,
    has_checkpoint: bool,
) -> None:
    now_ms = time.time_ns() // 1_000_000

    def set_clock(moved_ms: int) -> None:
        clock = SimpleNamespace(time_ns=lambda: (now_ms + moved_ms) * 1_000_000)
        monkeypatch.setattr(log_module, "time", clock)

    log = table.log
    for sequence, moved_ms in enumerate([0, 1000, shift_ms, shift_ms + 1000, 2000, 3000]):
        set_clock(moved_ms)
        if is_reopened:
            log = CommitLog(table.storage, "t")
        _append_at(log, sequence)
        if has_checkpoint:
            log.checkpoint(log.newest().version)
    times = [commit["timestamp"] for commit in log.history()]
    assert times == sorted(set(times))
    # Forward: the highest counts on by milliseconds. Back: each is one after the last good one.
    expected = {
        DAY_MS: [0, 1000, DAY_MS, DAY_MS + 1000, DAY_MS + 1001, DAY_MS + 1002],
        -DAY_MS: [0, 1000, 1001, 1002, 2000, 3000],
    }[shift_ms]
    assert [moment - now_ms for moment in times[1:]] == [
        max(offset, times[0] - now_ms + 1) for offset in expected
    ]
    assert log.newest().timestamp_ms == times[-1]
    assert CommitLog(table.storage, "t").newest().timestamp_ms == times[-1]


def test_the_time_is_known_after_a_checkpoint_of_another_engine(table: Table) -> None:
    _append_at(table.log, 0)
    deltalake.DeltaTable(str(table.storage.local("t"))).create_checkpoint()
    assert table.log.folder.read_pointer() == 1
    reopened = CommitLog(table.storage, "t")
    assert reopened.newest().timestamp_ms == table.log.newest().timestamp_ms > 0
    assert reopened.newest() == table.log.newest()
