from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest

from replaylake.datastore.errors import (
    AlreadyExistsError,
    CommitConflictError,
    LogCorruptError,
    NotFoundError,
    StorageError,
)
from replaylake.datastore.storage.log import folder as folder_module
from replaylake.datastore.storage.log.commit_file import Intent
from replaylake.datastore.storage.log.commit_log import CHECKPOINT_INTERVAL, Checkpointer, CommitLog
from replaylake.datastore.storage.log.folder import LogFolder
from replaylake.datastore.storage.log.state import FileEntry, LogState
from replaylake.datastore.storage.storage import LocalStorage
from replaylake.datastore.storage.table.table_schema import new_metadata

METADATA = new_metadata(
    pa.schema([pa.field("x", pa.int64(), True, {b"PARQUET:field_id": b"1"})]), {}, has_entries=True
)


def entry(name: str) -> FileEntry:
    return FileEntry(f"shards/{name}.parquet", 10, 1, "ab" * 32, 5)


def created(storage: LocalStorage, root: str = "t") -> CommitLog:
    log = CommitLog(storage, root)
    log.commit(lambda _: Intent("create", 0, "CREATE TABLE", metadata=METADATA))
    return log


def add(log: CommitLog, producer: str, sequence: int, **fields: Any) -> Any:
    name = f"{producer}-{sequence}"
    fields = {"add": (entry(name),)} | fields
    return log.commit(lambda _: Intent(producer, sequence, "WRITE", **fields))


def wait_for_checkpoint() -> None:
    for thread in threading.enumerate():
        if thread.name == "replaylake-checkpoint":
            thread.join()


def commit_path(storage: LocalStorage, version: int) -> Path:
    return storage.local(f"t/_delta_log/{version:020d}.json")


def checkpoint_path(storage: LocalStorage, version: int) -> Path:
    return storage.local(f"t/_delta_log/{version:020d}.checkpoint.parquet")


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    storage = LocalStorage(tmp_path_factory.mktemp("long"))
    log = created(storage)
    for sequence in range(1, 206):
        add(log, "p", sequence)
    wait_for_checkpoint()
    return storage.root


@pytest.fixture
def long_log(storage: LocalStorage, long_folder: Path) -> CommitLog:
    """Versions 0..205: checkpoints at 100 and 200."""
    shutil.copytree(long_folder, storage.root)
    return CommitLog(storage, "t")


def test_versions_count_from_zero_and_hold_their_files(storage: LocalStorage) -> None:
    log = created(storage)
    assert add(log, "p", 0).version == 1
    assert add(log, "p", 1).version == 2
    assert list(log.newest().files) == ["shards/p-0.parquet", "shards/p-1.parquet"]
    assert list(log.at(1).files) == ["shards/p-0.parquet"]
    assert log.at(0).files == {}


def test_a_log_that_is_not_there(storage: LocalStorage) -> None:
    log = CommitLog(storage, "t")
    assert not log.exists()
    with pytest.raises(NotFoundError, match="expected a table"):
        log.newest()
    with pytest.raises(NotFoundError, match="expected one to commit to"):
        add(log, "p", 0)
    assert storage.names("t/_delta_log") == []


def test_the_same_producer_and_sequence_is_committed_once(storage: LocalStorage) -> None:
    log = created(storage)
    first = add(log, "p", 7)
    for again in (add(log, "p", 7), add(CommitLog(storage, "t"), "p", 7)):
        assert (again.version, again.already_present) == (first.version, True)
    assert not add(log, "p", 3).already_present, "an earlier sequence that was never committed"
    assert not add(log, "q", 7).already_present
    assert log.newest().version == 3


def test_a_repeated_commit_is_recognised_before_any_conflict_rule(storage: LocalStorage) -> None:
    log = created(storage)
    add(log, "p", 0)
    removal = Intent("c", 0, "COMPACT", remove=("shards/p-0.parquet",), data_change=False)
    first = log.commit(lambda _: removal)
    again = log.commit(lambda _: removal)
    assert (again.version, again.already_present) == (first.version, True)


def test_commits_that_no_longer_apply_are_refused(storage: LocalStorage) -> None:
    log = created(storage)
    add(log, "p", 0)
    with pytest.raises(CommitConflictError, match=r"p-0\.parquet is already in the table"):
        add(log, "p", 1, add=(entry("p-0"),))
    with pytest.raises(CommitConflictError, match=r"gone\.parquet is no longer live at version 1"):
        log.commit(lambda _: Intent("c", 0, "COMPACT", remove=("shards/gone.parquet",)))
    assert log.newest().version == 1


def test_entries_are_compared_and_set(storage: LocalStorage) -> None:
    log = created(storage)

    def put(sequence: int, text: str | None, expected: dict[str, str | None]) -> Any:
        intent = Intent("p", sequence, "PUT", entries={"key": text}, expected=expected)
        return log.commit(lambda _: intent)

    put(0, "one", {"key": None})
    put(1, "two", {"key": "one"})
    with pytest.raises(CommitConflictError, match="found two, expected one"):
        put(2, "three", {"key": "one"})
    assert log.newest().entries == {"key": "two"}
    put(3, None, {"key": "two"})
    assert log.newest().entries == {}
    assert log.at(1).entries == {"key": "one"}


def test_a_removed_file_is_gone_from_then_on(storage: LocalStorage) -> None:
    log = created(storage)
    add(log, "p", 0)
    log.commit(
        lambda _: Intent("c", 0, "COMPACT", remove=("shards/p-0.parquet",), add=(entry("big"),))
    )
    assert list(log.newest().files) == ["shards/big.parquet"]
    assert list(log.at(1).files) == ["shards/p-0.parquet"]


def test_the_loser_of_a_race_builds_again(storage: LocalStorage) -> None:
    one, other = created(storage), CommitLog(storage, "t")
    seen: list[int] = []

    def build(state: LogState) -> Intent:
        seen.append(state.version)
        if state.version == 0:
            add(one, "first", 0)
        return Intent("second", 0, "WRITE", add=(entry("second"),))

    assert other.commit(build).version == 2
    assert seen == [0, 1]
    assert set(one.newest().files) == {"shards/first-0.parquet", "shards/second.parquet"}


def test_files_of_a_commit_are_encoded_once_for_all_attempts(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one with thousands would be late at each attempt, beside a writer of small ones."""
    encoded = Counter[str]()
    real = FileEntry.to_action

    def to_action(self: FileEntry, **options: Any) -> dict[str, Any]:
        encoded[self.path] += 1
        return real(self, **options)

    monkeypatch.setattr(FileEntry, "to_action", to_action)
    log, other = created(storage), CommitLog(storage, "t")
    files = (entry("large-0"), entry("large-1"))

    def build(state: LogState) -> Intent:
        if state.version < 4:
            add(other, "small", state.version)
        return Intent("large", 0, "WRITE", add=files)

    assert log.commit(build).version == 5
    found = CommitLog(storage, "t").newest()
    assert encoded == Counter(found.files.keys())
    assert found == log.newest()


def test_an_error_of_build_commits_nothing(storage: LocalStorage) -> None:
    log = created(storage)

    def build(state: LogState) -> Intent:
        raise AlreadyExistsError(f"at {state.version}")

    with pytest.raises(AlreadyExistsError, match="at 0"):
        log.commit(build)
    assert log.newest().version == 0


def test_checkpoints_every_hundred_versions(storage: LocalStorage, long_log: CommitLog) -> None:
    assert CHECKPOINT_INTERVAL == 100
    assert checkpoint_path(storage, 100).exists()
    assert checkpoint_path(storage, 200).exists()
    pointer = json.loads(storage.get("t/_delta_log/_last_checkpoint") or b"{}")
    # 200 files, 201 transactions, protocol and metaData.
    assert pointer == {"version": 200, "size": 403}


def test_large_checkpoints_are_as_much_rarer(storage: LocalStorage) -> None:
    """Else all of them together would grow with the square of the number of commits."""
    state = created(storage).newest()
    version = 20_498
    transactions = {f"p#{number}": number for number in range(version)}
    large = replace(state, version=version, transactions=transactions)
    CommitLog(storage, "large").folder.write_checkpoint(large)
    log = CommitLog(storage, "large")
    for sequence in range(version, version + 103):
        add(log, "p", sequence)
    wait_for_checkpoint()
    assert log.folder.listing().checkpoints == [version, 20_600]


@pytest.mark.parametrize("version", [0, 1, 99, 100, 101, 199, 200, 204, 205])
def test_every_version_reads_the_same_with_and_without_checkpoints(
    storage: LocalStorage, long_log: CommitLog, version: int
) -> None:
    with_checkpoints = CommitLog(storage, "t").at(version)
    for kept in (100, 200):
        checkpoint_path(storage, kept).unlink()
    without = CommitLog(storage, "t").at(version)
    assert with_checkpoints == without
    assert list(with_checkpoints.files) == list(without.files)
    assert len(without.files) == version
    for outside in (-1, 206):
        with pytest.raises(NotFoundError, match=r"has 0\.\.205"):
            long_log.at(outside)


def test_commits_are_recognised_across_a_checkpoint(
    storage: LocalStorage, long_log: CommitLog
) -> None:
    for log in (long_log, CommitLog(storage, "t")):
        again = add(log, "p", 42)
        assert (again.version, again.already_present) == (42, True)


def test_entries_survive_a_checkpoint(storage: LocalStorage) -> None:
    log = created(storage)
    log.commit(lambda _: Intent("p", 0, "PUT", entries={"a": "1", "b": "2"}))
    log.commit(lambda _: Intent("p", 1, "PUT", entries={"a": None, "b": "é"}))
    log.checkpoint(2)
    for version in (0, 1, 2):
        commit_path(storage, version).unlink()
    state = CommitLog(storage, "t").newest()
    assert state.entries == {"b": "é"}
    assert state.metadata is not None
    assert state.metadata.configuration == METADATA.configuration


def test_a_damaged_checkpoint_costs_only_time(storage: LocalStorage, long_log: CommitLog) -> None:
    expected = long_log.newest()
    good = checkpoint_path(storage, 200).read_bytes()
    for damaged in (b"", b"PAR1", good[:-10], good[: len(good) // 2], b"\0" * len(good)):
        checkpoint_path(storage, 200).write_bytes(damaged)
        assert CommitLog(storage, "t").newest() == expected
    checkpoint_path(storage, 100).write_bytes(b"")
    assert CommitLog(storage, "t").newest() == expected


@pytest.mark.parametrize("pointer", [b"", b"{", b"[]", b'{"version": 900}', b'{"version": 150}'])
def test_last_checkpoint_may_point_anywhere(
    storage: LocalStorage, long_log: CommitLog, pointer: bytes
) -> None:
    storage.put("t/_delta_log/_last_checkpoint", pointer)
    assert CommitLog(storage, "t").newest() == long_log.newest()


def test_a_damaged_checkpoint_without_its_commits_is_named(
    storage: LocalStorage, long_log: CommitLog
) -> None:
    for version in range(150):
        commit_path(storage, version).unlink()
    log = CommitLog(storage, "t")
    assert log.exists()
    assert log.newest().version == 205, "another engine may drop commits below a checkpoint"
    checkpoint_path(storage, 200).write_bytes(b"PAR1")
    checkpoint_path(storage, 100).unlink()
    with pytest.raises(
        LogCorruptError, match=r"0200\.checkpoint\.parquet: .*expected a Delta check"
    ):
        CommitLog(storage, "t").newest()


def test_a_missing_commit_is_a_hole_and_is_never_filled(
    storage: LocalStorage, long_log: CommitLog
) -> None:
    long_log.newest()
    commit_path(storage, 203).unlink()
    for log in (CommitLog(storage, "t"), CommitLog(storage, "t")):
        with pytest.raises(
            LogCorruptError, match=r"0203\.json: missing, expected every version up to"
        ):
            log.newest()
        with pytest.raises(LogCorruptError, match=r"0203\.json: missing"):
            add(log, "q", 0)
    assert not commit_path(storage, 203).exists()
    with pytest.raises(LogCorruptError, match=r"0203\.json: missing"):
        long_log.history()


def test_every_damage_to_a_commit_is_reported(storage: LocalStorage) -> None:
    log = created(storage)
    add(log, "p", 0)
    path = commit_path(storage, 1)
    good = path.read_bytes()
    damages = [good[:cut] for cut in range(0, len(good), 7)]
    damages += [good.replace(b'"size":10', b'"size":11'), good.replace(b"p-0", b"p-1"), b"[]\n"]
    # The last line alone missing: every line that is left still parses.
    damages.append(b"\n".join(good.splitlines()[:-1]) + b"\n")
    for damaged in damages:
        path.write_bytes(damaged)
        with pytest.raises(LogCorruptError, match=r"0001\.json: .*expected one JSON action a line"):
            CommitLog(storage, "t").newest()
    path.write_bytes(good)
    assert CommitLog(storage, "t").newest() == log.newest()


def test_an_action_without_what_delta_requires_is_reported(storage: LocalStorage) -> None:
    created(storage)
    commit_path(storage, 1).write_text('{"add": {"partitionValues": {}}}\n')
    with pytest.raises(LogCorruptError, match=r"0001\.json: holds an action without"):
        CommitLog(storage, "t").newest()


def test_commit_times_never_go_back(storage: LocalStorage) -> None:
    log = created(storage)
    assert log.folder.is_empty() is False
    assert CommitLog(storage, "other").folder.is_empty() is True
    for sequence, modified_s in enumerate((20, 10, 30)):
        add(log, "p", sequence)
        os.utime(commit_path(storage, sequence + 1), (modified_s, modified_s))
    os.utime(commit_path(storage, 0), (5, 5))
    log.checkpoint(2)
    assert log.folder.read_commit_times() == {0: 5_000, 1: 20_000, 2: 20_000, 3: 30_000}


def test_a_commit_of_another_engine_is_read(storage: LocalStorage) -> None:
    created(storage)
    action = {"add": {"path": "x.parquet", "partitionValues": {}, "size": 3, "dataChange": True}}
    commit_path(storage, 1).write_text(json.dumps(action) + "\n")
    log = CommitLog(storage, "t")
    assert log.newest().files == {"x.parquet": FileEntry("x.parquet", 3, 0, "")}
    assert log.history()[1] == {"version": 1}


def test_history_says_who_and_what(storage: LocalStorage) -> None:
    log = created(storage)
    add(log, "p", 4, info={"num_steps": 9, "producer": "somebody else"})
    first, second = log.history()
    assert (first["version"], first["operation"]) == (0, "CREATE TABLE")
    assert second["producer"] == "p"
    assert (second["sequence"], second["num_steps"], second["version"]) == (4, 9, 1)
    assert log.history(since=1) == [second]


def test_a_checkpoint_that_fails_fails_no_commit(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(state: LogState) -> memoryview:
        raise StorageError(f"no room at {state.version}")

    monkeypatch.setattr(folder_module, "write_checkpoint", failing)
    log = created(storage)
    for sequence in range(1, 102):
        add(log, "p", sequence)
    wait_for_checkpoint()  # pytest turns an exception in a thread into an error
    assert CommitLog(storage, "t").newest().version == 101
    assert not checkpoint_path(storage, 100).exists()


def test_checkpoints_on_a_slow_disk_are_one_at_a_time_and_end_with_the_newest(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on, written = threading.Event(), threading.Event(), []

    def slow(folder: LogFolder, state: LogState) -> None:
        written.append(state.version)
        writing.set()
        assert go_on.wait(60)

    monkeypatch.setattr(LogFolder, "write_checkpoint", slow)
    wait_for_checkpoint()  # of a test before this one
    checkpointer = Checkpointer(LogFolder(storage, "t"))
    checkpointer.start(LogState(100))
    assert writing.wait(60)
    for version in (200, 300, 400):
        checkpointer.start(LogState(version))
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("replaylake-checkpoint") == 1
    go_on.set()
    wait_for_checkpoint()
    assert written == [100, 400]


def test_a_short_process_writes_its_checkpoint(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[2]); import test_commit_log as t\n"
        "from replaylake.datastore.storage.storage import LocalStorage\n"
        "log = t.created(LocalStorage(t.Path(sys.argv[1])))\n"
        "[t.add(log, 'p', i) for i in range(1, 101)]\n"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "store"), str(Path(__file__).parent)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert checkpoint_path(LocalStorage(tmp_path / "store"), 100).exists()


def _append_many(root: Path, name: str, num: int) -> None:
    log = CommitLog(LocalStorage(root), "t")
    for sequence in range(num):
        add(log, name, sequence)
        add(log, name, sequence)  # delivered twice


@pytest.mark.slow
def test_four_processes_lose_nothing(storage: LocalStorage) -> None:
    created(storage)
    context = multiprocessing.get_context("spawn")
    names = [f"w{i}" for i in range(4)]
    processes = [
        context.Process(target=_append_many, args=(storage.root, name, 50)) for name in names
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    state = CommitLog(storage, "t").newest()
    assert state.version == 200
    assert set(state.files) == {f"shards/{name}-{i}.parquet" for name in names for i in range(50)}
    versions = [state.transactions[f"{name}#{i}"] for name in names for i in range(50)]
    assert sorted(versions) == list(range(1, 201))


def test_threads_share_one_log(storage: LocalStorage) -> None:
    log = created(storage)
    threads = [
        threading.Thread(target=lambda n=name: [add(log, n, i) for i in range(20)])
        for name in ("a", "b", "c", "d")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.newest() == CommitLog(storage, "t").newest()
    assert len(log.newest().files) == 80


def test_a_reader_beside_a_writer_sees_whole_versions_only(storage: LocalStorage) -> None:
    log, reader = created(storage), CommitLog(storage, "t")
    writer = threading.Thread(target=lambda: [add(log, "p", i) for i in range(1, 151)])
    writer.start()
    seen = [reader.newest()]
    while writer.is_alive():
        seen.append(reader.newest())
    writer.join()
    wait_for_checkpoint()
    assert all(len(state.files) == state.version for state in seen)
    assert [state.version for state in seen] == sorted(state.version for state in seen)


def test_delta_rs_reads_the_log(storage: LocalStorage, long_log: CommitLog) -> None:
    uri = str(storage.local("t"))
    table = deltalake.DeltaTable(uri)
    assert table.version() == 205
    assert len(table.file_uris()) == 205
    assert table.transaction_version("p#42") == 42
    assert len(deltalake.DeltaTable(uri, version=150).file_uris()) == 150
