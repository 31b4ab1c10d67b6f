"""Expiry: old versions go, the newest state stays, whatever dies or sleeps in between."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest

from replaylake.datastore.errors import LogCorruptError, NotFoundError, StorageError
from replaylake.datastore.storage.log.commit_file import Intent
from replaylake.datastore.storage.log.commit_log import CommitLog
from replaylake.datastore.storage.log.expiry import expire
from replaylake.datastore.storage.log.state import FileEntry, LogState
from replaylake.datastore.storage.storage import LocalStorage
from replaylake.datastore.storage.table.table_schema import new_metadata

METADATA = new_metadata(
    pa.schema([pa.field("x", pa.int64(), True, {b"PARQUET:field_id": b"1"})]), {}
)
NEWEST = 12


def intent(producer: str, sequence: int, **fields: Any) -> Intent:
    name = f"shards/{producer}-{sequence}.parquet"
    entry = FileEntry(name, 10, 1, "ab" * 32, 5)
    return Intent(producer, sequence, "WRITE", **({"add": (entry,)} | fields))


def add(log: CommitLog, producer: str, sequence: int, **fields: Any) -> Any:
    return log.commit(lambda _: intent(producer, sequence, **fields))


@pytest.fixture
def log(storage: LocalStorage) -> CommitLog:
    """Versions 0..12, of which 5 takes a file away; checkpoints at 3 and 8."""
    log = CommitLog(storage, "t")
    log.commit(lambda _: Intent("create", 0, "CREATE TABLE", metadata=METADATA))
    for sequence in range(1, NEWEST + 1):
        removed = {"remove": ("shards/p-1.parquet",)} if sequence == 5 else {}
        add(log, "p", sequence, **removed)
    log.checkpoint(3)
    log.checkpoint(8)
    return log


def names(storage: LocalStorage) -> list[str]:
    return [name.lstrip("0") for name in storage.names("t/_delta_log")]


def check_kept(storage: LocalStorage, states: dict[int, LogState], oldest: int) -> None:
    for log in (CommitLog(storage, "t"),):
        assert log.exists()
        assert log.newest() == states[NEWEST]
        assert log.oldest() == oldest
        for version in range(oldest, NEWEST + 1):
            assert log.at(version) == states[version]
            since = [entry.since for entry in log.at(version).files.values()]
            assert since == [entry.since for entry in states[version].files.values()]
        for version in range(oldest):
            with pytest.raises(NotFoundError, match=rf"version {version}: not in .*{oldest}\.\.12"):
                log.at(version)
        again = add(log, "p", 2)
        assert (again.version, again.already_present) == (2, True), "known after its commit is gone"


@pytest.mark.parametrize("oldest", [1, 3, 5, 8, 9, 12])
def test_versions_before_the_oldest_are_gone_and_no_others(
    storage: LocalStorage, log: CommitLog, oldest: int
) -> None:
    states = {version: log.at(version) for version in range(NEWEST + 1)}
    planned = expire(log, oldest, dry_run=True)
    assert log.oldest() == 0, "a dry run drops nothing"
    done = expire(log, oldest)
    assert done == planned
    assert not any(storage.local(path).exists() for path in done.paths)
    check_kept(storage, states, oldest)
    left = names(storage)
    assert [name for name in left if name.endswith(".json")] == [
        f"{version}.json" for version in range(oldest, NEWEST + 1)
    ]
    table = deltalake.DeltaTable(str(storage.local("t")))
    assert table.version() == NEWEST
    assert len(table.file_uris()) == NEWEST - 1
    assert expire(log, oldest).paths == ()


def test_history_goes_on_from_the_oldest_version(storage: LocalStorage, log: CommitLog) -> None:
    before = log.history()
    expire(log, 5)
    for reader in (log, CommitLog(storage, "t")):
        assert reader.history() == before[5:]
        assert reader.history(since=2) == before[5:]
        assert reader.info(5) == before[5]
        for gone in (reader.info, reader.read_change):
            with pytest.raises(NotFoundError, match=r"has 5\.\.12; those before were dropped"):
                gone(4)


def test_what_an_ingest_said_of_its_source_outlives_its_commit(
    storage: LocalStorage, log: CommitLog
) -> None:
    add(log, "ingest", 0, info={"source": "ab", "source_files": ["cd"]})
    add(log, "ingest", 1, info={"source": "ab"})
    for sequence in range(13, 20):
        add(log, "p", sequence)
    said = [log.info(version) for version in (13, 14)]
    expire(log, 14, dry_run=True)
    assert log.newest().version == 21
    expire(log, 14)
    assert log.newest().version == 22
    for oldest in (14, 16, 22, 24):
        if oldest > 14:
            expire(log, oldest)
            expire(log, oldest)
        for reader in (log, CommitLog(storage, "t")):
            history = reader.history()
            assert [info for info in history if info.get("producer") == "ingest"] == said
            versions = [info["version"] for info in history if info["version"] >= oldest]
            assert versions == list(range(oldest, reader.newest().version + 1))
            assert not any("earlier" in info for info in history)
        assert log.history(since=oldest)[0]["version"] == oldest
        add(log, "q", oldest)


def test_a_version_that_is_not_there_drops_nothing(log: CommitLog) -> None:
    for version in (-1, 13):
        with pytest.raises(NotFoundError, match=r"has 0\.\.12"):
            expire(log, version)
    expire(log, 6)
    with pytest.raises(NotFoundError, match=r"has 6\.\.12"):
        expire(log, 4)


class _Stopped(Exception):
    pass


class _StopsAt(LocalStorage):
    """Dies before its k-th change."""

    def __init__(self, root: Path, changes: int) -> None:
        super().__init__(root)
        self.changes = changes

    def put(self, path: str, data: bytes | memoryview) -> None:
        self._step()
        super().put(path, data)

    def delete(self, paths: Iterable[str]) -> None:
        self._step()
        super().delete(paths)

    def _step(self) -> None:
        self.changes -= 1
        if self.changes < 0:
            raise _Stopped


@pytest.mark.slow
def test_a_crash_at_any_step_leaves_a_log_that_opens_the_same(
    storage: LocalStorage, log: CommitLog, tmp_path: Path
) -> None:
    states = {version: log.at(version) for version in range(NEWEST + 1)}
    readable = set()
    for step in range(30):
        copy = LocalStorage(tmp_path / f"copy-{step}")
        shutil.copytree(storage.root, copy.root)
        try:
            expire(CommitLog(_StopsAt(copy.root, step), "t"), 10)
        except _Stopped:
            pass
        else:
            break
        assert deltalake.DeltaTable(str(copy.local("t"))).version() == NEWEST
        reader = CommitLog(copy, "t")
        oldest = reader.oldest()
        readable.add(oldest)
        assert len(reader.history()) == NEWEST + 1 - max(
            oldest, min(int(n[:20]) for n in copy.names("t/_delta_log") if n.endswith(".json"))
        )
        check_kept(copy, states, oldest)
        expire(reader, 10)
        check_kept(copy, states, 10)
    else:
        pytest.fail("expected fewer than 30 changes")
    assert readable == {0, 3, 8, 10}


def test_a_handle_from_before_the_expiry_follows_on(storage: LocalStorage, log: CommitLog) -> None:
    """The names after its version are free again, which must not read as nothing new."""
    old = {version: CommitLog(storage, "t") for version in (2, 8, 9)}
    for version, handle in old.items():
        handle._newest = log.at(version)
    add(log, "p", 13)
    expire(log, 11)
    for handle in old.values():
        assert handle.newest() == log.newest()
    writer = CommitLog(storage, "t")
    writer._newest = LogState()
    assert writer.newest() == log.newest()


def test_a_writer_that_slept_over_the_expiry_takes_no_old_name(
    storage: LocalStorage, log: CommitLog
) -> None:
    """It looks at version 12, sleeps, and would write 13, which is free: 13 and 14 expired."""
    slow = CommitLog(storage, "t")
    seen: list[int] = []

    def build(state: LogState) -> Intent:
        seen.append(state.version)
        if len(seen) == 1:
            for sequence in range(13, 17):
                add(log, "p", sequence)
            expire(log, 15)
        return intent("slow", 0)

    done = slow.commit(build)
    assert (done.version, seen) == (17, [12, 16])
    assert names(storage)[-5:-1] == [
        "15.checkpoint.parquet",
        "15.json",
        "16.json",
        "17.json",
    ], "the commit under an expired name is taken away again"
    newest = CommitLog(storage, "t").newest()
    assert {"shards/p-16.parquet", "shards/slow-0.parquet"} <= set(newest.files)


def test_what_a_slow_checkpointer_leaves_below_is_passed_over(
    storage: LocalStorage, log: CommitLog
) -> None:
    states = {version: log.at(version) for version in range(NEWEST + 1)}
    expire(log, 10)
    log.folder.write_checkpoint(states[4])
    assert log.folder.read_pointer() == 10, "an older one never takes the pointer"
    check_kept(storage, states, 10)
    with pytest.raises(NotFoundError, match=r"has 10\.\.12"):
        log.at(4)
    assert len(expire(log, 10).paths) == 1


def test_nothing_is_dropped_over_a_checkpoint_that_reads_differently(
    storage: LocalStorage, log: CommitLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = LocalStorage.put

    def damaging(self: LocalStorage, path: str, data: bytes | memoryview) -> None:
        put(self, path, bytes(data)[:-1])

    monkeypatch.setattr(LocalStorage, "put", damaging)
    with pytest.raises(LogCorruptError, match=r"0010\.checkpoint\.parquet: .*Nothing was dropped"):
        expire(log, 10)
    assert log.oldest() == 0


def test_a_damaged_checkpoint_at_the_oldest_version_is_written_again_first(
    storage: LocalStorage, log: CommitLog
) -> None:
    path = log.folder.checkpoint_path(8)
    good = storage.local(path).read_bytes()
    storage.local(path).write_bytes(good[:-20])
    expire(CommitLog(storage, "t"), 8)
    assert storage.local(path).read_bytes() == good
    assert CommitLog(storage, "t").newest() == log.newest()


def test_a_wrong_pointer_is_put_right(storage: LocalStorage, log: CommitLog) -> None:
    storage.put("t/_delta_log/_last_checkpoint", b'{"version": 3, "size": 1}')
    expire(log, 10)
    assert log.folder.read_pointer() == 10
    storage.put("t/_delta_log/_last_checkpoint", b'{"version": 900, "size": 1}')
    assert CommitLog(storage, "t").newest() == log.newest()
    expire(log, 11)
    assert log.folder.read_pointer() == 11


def test_without_its_checkpoint_an_expired_log_is_refused(
    storage: LocalStorage, log: CommitLog
) -> None:
    expire(log, 10)
    storage.local(log.folder.checkpoint_path(10)).write_bytes(b"PAR1")
    with pytest.raises(LogCorruptError, match=r"0010\.checkpoint\.parquet"):
        CommitLog(storage, "t").newest()
    with pytest.raises(LogCorruptError, match=r"0010\.checkpoint\.parquet"):
        add(CommitLog(storage, "t"), "q", 0)
    assert "1.json" not in names(storage)


def test_a_storage_that_fails_is_said(
    storage: LocalStorage, log: CommitLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: LocalStorage, paths: Iterable[str]) -> None:
        raise StorageError(str(list(paths)))

    monkeypatch.setattr(LocalStorage, "delete", failing)
    with pytest.raises(StorageError, match=r"000\.json"):
        expire(log, 10)
