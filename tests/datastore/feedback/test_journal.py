"""The journal: nothing acknowledged is lost, nothing is committed twice, whatever dies when."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest

from replaylake.datastore.errors import StorageError
from replaylake.datastore.feedback.journal import Journal, JournalConfig
from replaylake.datastore.feedback.segments import (
    NOTHING_RECOVERED,
    Recovered,
    end_worker,
    first_pending,
    frame_records,
    journal_folder,
    producer_name,
    recover,
)
from replaylake.datastore.storage.storage import LocalStorage
from replaylake.datastore.storage.table.table import Table

SCHEMA = pa.schema([pa.field("x", pa.int64(), nullable=False)])
NEVER = JournalConfig(flush_interval_s=3600)


def encode(records):
    return pa.Table.from_pylist(list(records), schema=SCHEMA)


def make_table(root: Path) -> Table:
    table = Table(LocalStorage(root), "t")
    if not table.exists():
        table.create(SCHEMA)
    return table


def rows(table: Table) -> list[int]:
    return sorted(table.snapshot().read().column("x").to_pylist())


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def count_open_files(folder: Path) -> int:
    """Return how many descriptors of this process are files of folder."""
    paths = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed since it was listed
            paths.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum(path.startswith(f"{folder}/") for path in paths)


def wait_for_rows(table: Table, expected: list[int]) -> None:
    wait_until(lambda: rows(table) == expected)


def line(record: bytes) -> bytes:
    return frame_records([record])[0]


def test_the_name_of_a_new_folder_is_durable_too(tmp_path, monkeypatch):
    table = make_table(tmp_path / "new" / "lake")
    synced, fsync = [], os.fsync

    def noted(fd):
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    journal = Journal(table, encode, worker="w", config=NEVER)
    assert synced == [journal_folder(table).parent, journal_folder(table)]
    journal.close()


def test_records_reach_the_table_in_the_background(tmp_path):
    table = make_table(tmp_path)
    journal = Journal(table, encode, worker="w", config=JournalConfig(flush_interval_s=0.05))
    journal.append([b'{"x":1}', b'{"x":2}'])
    wait_for_rows(table, [1, 2])
    journal.close()
    assert list(journal_folder(table).iterdir()) == []


def test_a_full_segment_is_committed_at_once(tmp_path):
    table = make_table(tmp_path)
    config = JournalConfig(flush_interval_s=3600, segment_bytes=100)
    journal = Journal(table, encode, worker="w", config=config)
    for x in range(20):
        journal.append([b'{"x":%d}' % x])
    deadline = time.monotonic() + 60
    while not rows(table):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    journal.close()
    assert rows(table) == list(range(20))


def test_close_commits_what_is_left_and_an_empty_journal_commits_nothing(tmp_path):
    table = make_table(tmp_path)
    journal = Journal(table, encode, worker="a", config=NEVER)
    journal.append([b'{"x":7}'])
    assert journal.num_pending == 1
    journal.close()
    assert rows(table) == [7]
    before = table.snapshot().version
    Journal(table, encode, worker="b", config=NEVER).close()
    assert table.snapshot().version == before
    with pytest.raises(StorageError, match="closed"):
        journal.append([b'{"x":8}'])


def test_recover_commits_a_dead_workers_segments_once_and_drops_a_torn_line(tmp_path):
    table = make_table(tmp_path)
    folder = journal_folder(table)
    folder.mkdir()
    (folder / "dead-0.jsonl").write_bytes(line(b'{"x":1}') + line(b'{"x":2}'))
    (folder / "dead-1.jsonl").write_bytes(line(b'{"x":3}') + line(b'{"x":4}')[:-3])
    recovered = recover(table, encode)
    assert recovered == Recovered(num_segments=2, num_rows=3, num_torn=1, num_damaged=0)
    assert rows(table) == [1, 2, 3]
    assert list(folder.iterdir()) == []
    assert recover(table, encode).num_segments == 0


def test_a_segment_committed_before_the_crash_is_not_committed_again(tmp_path):
    table = make_table(tmp_path)
    table.append(encode([{"x": 1}]), producer=producer_name("dead"), sequence=0)
    folder = journal_folder(table)
    folder.mkdir()
    (folder / "dead-0.jsonl").write_bytes(line(b'{"x":1}'))
    recover(table, encode)
    assert rows(table) == [1]
    assert list(folder.iterdir()) == []


GOOD = line(b'{"x":1}')
DAMAGED = {
    "a digit": line(b'{"x":2}').replace(b"2}", b"9}"),
    "the checksum": b"X" + line(b'{"x":2}')[1:],
    "a newline within": line(b'{"x":2}').replace(b":", b"\n"),
    "zeros": bytes(20) + b"\n",
    "no object": line(b"[2]"),
    "no JSON": line(b"x"),
    "of another type": line(b'{"x":"two"}'),
    "too large": line(b'{"x":9223372036854775808}'),
}


@pytest.mark.parametrize("bad", DAMAGED.values(), ids=DAMAGED)
@pytest.mark.parametrize("is_last", [False, True])
def test_what_cannot_be_a_row_is_kept_and_holds_nothing_up(tmp_path, caplog, bad, is_last):
    table = make_table(tmp_path)
    folder = journal_folder(table)
    folder.mkdir()
    data = GOOD + bad if is_last else bad + GOOD
    (folder / "dead-0.jsonl").write_bytes(data)
    (folder / "dead-1.jsonl").write_bytes(line(b'{"x":5}'))
    (folder / "other-0.jsonl").write_bytes(line(b'{"x":6}'))
    recovered = recover(table, encode)
    assert (recovered.num_segments, recovered.num_rows, recovered.num_torn) == (3, 3, 0)
    assert recovered.num_damaged == bad.count(b"\n")
    assert rows(table) == [1, 5, 6]
    assert [(path.name, path.read_bytes()) for path in folder.iterdir()] == [
        ("dead-0.damaged", data)
    ]
    assert "dead-0.damaged" in caplog.text
    assert recover(table, encode) == NOTHING_RECOVERED


def test_a_last_newline_that_was_altered_is_damage_and_no_torn_line(tmp_path):
    table = make_table(tmp_path)
    folder = journal_folder(table)
    folder.mkdir()
    (folder / "dead-0.jsonl").write_bytes(GOOD + line(b'{"x":2}')[:-1] + b"K")
    recovered = recover(table, encode)
    assert (recovered.num_torn, recovered.num_damaged) == (0, 1)
    assert (folder / "dead-0.damaged").exists()


def test_a_segment_of_which_no_record_can_be_a_row_is_kept(tmp_path):
    table = make_table(tmp_path)
    folder = journal_folder(table)
    folder.mkdir()
    (folder / "dead-0.jsonl").write_bytes(line(b'{"x":"a"}') * 3)
    assert (recover(table, encode).num_damaged, rows(table)) == (3, [])


def test_a_live_journal_goes_on_past_a_record_that_cannot_be_a_row(tmp_path, caplog):
    table = make_table(tmp_path)
    journal = Journal(table, encode, worker="live", config=NEVER)
    journal.append([b'{"x":"one","timestamp":5}', b'{"x":2,"timestamp":6}'])
    assert first_pending(table, "timestamp") == [5]
    journal.flush()
    assert (first_pending(table, "timestamp"), journal.num_pending) == ([], 0)
    journal.append([b'{"x":3,"timestamp":7}'])
    journal.close()
    assert rows(table) == [2, 3]
    assert [path.name for path in journal_folder(table).iterdir()] == ["live-0.damaged"]
    assert "live-0.damaged" in caplog.text


def test_an_unreadable_segment_is_one_of_our_errors(tmp_path):
    table = make_table(tmp_path)
    (journal_folder(table) / "dead-0.jsonl").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"dead-0\.jsonl: Is a directory"):
        recover(table, encode)
    with pytest.raises(StorageError, match=r"dead-0\.jsonl: Is a directory"):
        first_pending(table, "timestamp")


def test_a_failed_fsync_is_not_acknowledged(tmp_path, monkeypatch):
    table = make_table(tmp_path)
    config = JournalConfig(sync_every=True, flush_interval_s=3600)
    journal = Journal(table, encode, worker="w", config=config)
    journal.append([b'{"x":1}'])

    def broken(fd):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", broken)
    with pytest.raises(StorageError, match="could not be synced: Input/output error"):
        journal.append([b'{"x":2}'])
    monkeypatch.undo()
    with pytest.raises(StorageError, match="could not be synced"):
        journal.append([b'{"x":3}'])
    journal.close()
    assert set(rows(table)) - {2} == {1}


def test_commits_that_fail_use_up_neither_descriptors_nor_files(tmp_path):
    table = make_table(tmp_path)
    failures = [StorageError("full")] * 50

    def encode_later(records):
        if failures:
            raise failures.pop()
        return encode(records)

    config = JournalConfig(flush_interval_s=3600, segment_bytes=500)
    journal = Journal(table, encode_later, worker="w", config=config)
    # The background thread has its tries too, once a segment is full.
    while failures:
        journal.append([b'{"x":1}'])
        with suppress(StorageError):
            journal.flush()
    # The lock, the current segment, and its successor while the background thread changes over.
    assert count_open_files(journal_folder(table)) <= 3
    # At most 50 lines of 17 bytes; what waits is cut into segments that fit into memory.
    assert len(list(journal_folder(table).glob("*.jsonl"))) <= 4
    journal.close()
    assert list(journal_folder(table).iterdir()) == []


def test_a_live_workers_segments_are_left_alone(tmp_path):
    table = make_table(tmp_path)
    journal = Journal(table, encode, worker="live", config=NEVER)
    journal.append([b'{"x":1,"timestamp":5}', b'{"x":2,"timestamp":6}'])
    assert recover(table, encode).num_segments == 0
    assert first_pending(table, "timestamp") == [5]
    journal.flush()
    assert rows(table) == [1, 2]
    assert first_pending(table, "timestamp") == []
    journal.close()


def test_a_live_journal_commits_what_a_killed_worker_left(tmp_path):
    table = make_table(tmp_path)
    config = JournalConfig(flush_interval_s=0.05)
    journals = [Journal(table, encode, worker=name, config=config) for name in "ab"]
    (journal_folder(table) / "dead-0.jsonl").write_bytes(line(b'{"x":1}') + line(b'{"x":2}'))
    wait_for_rows(table, [1, 2])
    journals[0].append([b'{"x":3}'])
    wait_for_rows(table, [1, 2, 3])
    for journal in journals:
        journal.close()
    assert rows(table) == [1, 2, 3]
    assert list(journal_folder(table).iterdir()) == []


def test_a_refused_write_leaves_no_half_line(tmp_path, monkeypatch):
    table = make_table(tmp_path)
    journal = Journal(table, encode, worker="w", config=NEVER)
    journal.append([b'{"x":1}'])
    write = os.write

    def full_disk(fd, data):
        if len(data) > 5:
            return write(fd, data[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full_disk)
    with pytest.raises(StorageError, match="No space left"):
        journal.append([b'{"x":2}'])
    monkeypatch.undo()
    journal.append([b'{"x":3}'])
    journal.close()
    assert rows(table) == [1, 3]


def test_a_journal_whose_files_are_removed_acknowledges_nothing_more(tmp_path):
    table = make_table(tmp_path)
    journal = Journal(table, encode, worker="w", config=JournalConfig(flush_interval_s=0.05))
    shutil.rmtree(tmp_path / "t")
    # Without a request, too.
    wait_until(lambda: journal.failure is not None)
    assert "w-0.jsonl was removed while in use" in journal.failure
    wait_until(lambda: journal.commit_failure is not None)
    assert journal.num_commit_failures > 0
    with pytest.raises(StorageError, match="was removed while in use"):
        journal.append([b'{"x":1}'])
    with pytest.raises(StorageError, match=r"was removed while in use.*Restore the dataset"):
        journal.close()
    assert not (tmp_path / "t").exists()


def test_no_record_is_acknowledged_that_goes_into_a_removed_file(tmp_path):
    table = make_table(tmp_path)
    journal = Journal(table, encode, worker="w", config=NEVER)
    shutil.rmtree(tmp_path / "t")
    with pytest.raises(StorageError, match="was removed while in use"):
        journal.append([b'{"x":1}'])
    with pytest.raises(StorageError):
        journal.close()


def test_a_failed_commit_is_tried_again(tmp_path):
    table = make_table(tmp_path)
    failures = [StorageError("full"), None]

    def encode_later(records):
        if error := failures.pop(0):
            raise error
        return encode(records)

    journal = Journal(table, encode_later, worker="w", config=NEVER)
    journal.append([b'{"x":1}'])
    with pytest.raises(StorageError):
        journal.flush()
    assert journal.num_pending == 1
    journal.close()
    assert rows(table) == [1]


def test_its_writer_commits_what_it_wrote_without_reading_it_back(tmp_path):
    table = make_table(tmp_path)
    journal = Journal(table, encode, worker="w", config=NEVER)
    journal.append([b'{"x":1}', b'{"x":2}'])
    (path,) = journal_folder(table).glob("*.jsonl")
    path.write_bytes(b"whatever the disk made of it\n")
    journal.flush()
    assert rows(table) == [1, 2]
    journal.close()


def test_what_could_not_be_committed_is_read_from_disk_and_not_held(tmp_path):
    table = make_table(tmp_path)
    journal = Journal(table, encode, worker="w", config=NEVER)
    append, table.append = table.append, refusing
    for x in range(3):
        journal.append([b'{"x":%d}' % x])
        with pytest.raises(StorageError):
            journal.flush()
    assert [segment.records for segment in journal._pending] == [None]
    table.append = append
    journal.flush()
    assert rows(table) == [0, 1, 2]
    journal.close()


def refusing(*args, **options):
    raise StorageError("no room")


def test_kill_9_loses_no_acknowledged_record(tmp_path):
    code = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_journal import *
        journal = Journal(make_table(Path({str(tmp_path)!r})), encode, worker="w",
                          config=JournalConfig(flush_interval_s=0.03))
        x = 0
        while True:
            journal.append([b'{{"x":%d}}' % x])
            sys.stdout.write(f"{{x}}\\n")
            sys.stdout.flush()
            x += 1
    """
    make_table(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    acknowledged = -1
    assert process.stdout is not None
    for text in process.stdout:
        acknowledged = int(text)
        if acknowledged == 3000:
            process.send_signal(signal.SIGKILL)
    process.stdout.close()
    process.wait()
    table = make_table(tmp_path)
    recover(table, encode)
    found = rows(table)
    # One more than was seen may have been written: it was written and not yet printed.
    assert found == list(range(len(found)))
    assert len(found) - acknowledged in (1, 2)


def test_the_lock_is_free_once_the_journal_is_closed(tmp_path):
    table = make_table(tmp_path)
    journal = Journal(table, encode, worker="w", config=NEVER)
    fd = os.open(journal_folder(table) / "w.lock", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    journal.close()
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)


def test_a_journal_that_was_ended_refuses_records_and_keeps_those_it_has(tmp_path, caplog):
    table = make_table(tmp_path)
    journal = Journal(table, encode, worker="w", config=NEVER)
    journal.append([b'{"x": 1}'])
    journal.flush()
    journal.append([b'{"x": 2}', b'{"x": 3}'])
    end_worker(make_table(tmp_path), "w")  # as another machine does
    journal.flush()
    assert journal.is_ended
    with pytest.raises(StorageError, match="another process ended the journal w and took over"):
        journal.append([b'{"x": 4}'])
    journal.close()
    assert rows(table) == [1]
    (kept,) = journal_folder(table).glob("*.damaged")
    assert [line[9:] for line in kept.read_bytes().splitlines()] == [b'{"x": 2}', b'{"x": 3}']
    assert "2 records not committed, kept" in caplog.text


def test_what_a_dead_worker_left_is_kept_aside_if_it_was_ended(tmp_path):
    table = make_table(tmp_path)
    journal_folder(table).mkdir(parents=True, exist_ok=True)
    (path,) = [journal_folder(table) / "w-0.jsonl"]
    path.write_bytes(b"".join(frame_records([b'{"x": 1}'])))
    end_worker(table, "w")
    assert recover(table, encode) == Recovered(1, 0, 0, 0, 1)
    assert recover(table, encode) == NOTHING_RECOVERED
    assert path.with_suffix(".damaged").exists()
    assert not path.exists()
    assert rows(table) == []
