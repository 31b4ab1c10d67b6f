"""The journal: nothing acknowledged is lost, nothing is committed twice, whatever dies when."""

import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pyarrow as pa
import pytest

from replaylake.datastore.errors import StorageFailed
from replaylake.datastore.sessions.journal import Journal, JournalConfig
from replaylake.datastore.sessions.segments import (
    first_pending,
    framed,
    journal_folder,
    producer_of,
    recover,
)
from replaylake.datastore.storage import LocalStorage
from replaylake.datastore.table import Table

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


def line(record: bytes) -> bytes:
    return framed([record])[0]


def test_records_reach_the_table_in_the_background(tmp_path):
    table = make_table(tmp_path)
    journal = Journal(table, encode, worker="w", config=JournalConfig(flush_interval_s=0.05))
    journal.append([b'{"x":1}', b'{"x":2}'])
    deadline = time.monotonic() + 10
    while rows(table) != [1, 2]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    journal.close()
    assert list(journal_folder(table).iterdir()) == []


def test_a_full_segment_is_committed_at_once(tmp_path):
    table = make_table(tmp_path)
    config = JournalConfig(flush_interval_s=3600, segment_bytes=100)
    journal = Journal(table, encode, worker="w", config=config)
    for x in range(20):
        journal.append([b'{"x":%d}' % x])
    deadline = time.monotonic() + 10
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
    with pytest.raises(StorageFailed, match="closed"):
        journal.append([b'{"x":8}'])


def test_recover_commits_a_dead_workers_segments_once_and_drops_a_torn_line(tmp_path):
    table = make_table(tmp_path)
    folder = journal_folder(table)
    folder.mkdir()
    (folder / "dead-0.jsonl").write_bytes(line(b'{"x":1}') + line(b'{"x":2}'))
    (folder / "dead-1.jsonl").write_bytes(line(b'{"x":3}') + line(b'{"x":4}')[:-3])
    recovered = recover(table, encode)
    assert (recovered.num_segments, recovered.num_rows, recovered.num_torn) == (2, 3, 1)
    assert rows(table) == [1, 2, 3]
    assert list(folder.iterdir()) == []
    assert recover(table, encode).num_segments == 0


def test_a_segment_committed_before_the_crash_is_not_committed_again(tmp_path):
    table = make_table(tmp_path)
    table.append(encode([{"x": 1}]), producer=producer_of("dead"), sequence=0)
    folder = journal_folder(table)
    folder.mkdir()
    (folder / "dead-0.jsonl").write_bytes(line(b'{"x":1}'))
    recover(table, encode)
    assert rows(table) == [1]
    assert list(folder.iterdir()) == []


def test_altered_bytes_are_not_rows(tmp_path):
    table = make_table(tmp_path)
    folder = journal_folder(table)
    folder.mkdir()
    good, bad = line(b'{"x":1}'), line(b'{"x":2}').replace(b"2}", b"9}")
    (folder / "dead-0.jsonl").write_bytes(bad + good)
    assert recover(table, encode).num_torn == 1
    assert rows(table) == [1]


def test_a_live_workers_segments_are_left_alone(tmp_path):
    table = make_table(tmp_path)
    journal = Journal(table, encode, worker="live", config=NEVER)
    journal.append([b'{"x":1,"timestamp":5}', b'{"x":2,"timestamp":6}'])
    assert recover(table, encode).num_segments == 0
    assert first_pending(table) == [{"x": 1, "timestamp": 5}]
    journal.flush()
    assert rows(table) == [1, 2]
    assert first_pending(table) == []
    journal.close()


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
    with pytest.raises(StorageFailed, match="No space left"):
        journal.append([b'{"x":2}'])
    monkeypatch.undo()
    journal.append([b'{"x":3}'])
    journal.close()
    assert rows(table) == [1, 3]


def test_a_failed_commit_is_tried_again(tmp_path):
    table = make_table(tmp_path)
    failures = [StorageFailed("full"), None]

    def encode_later(records):
        if error := failures.pop(0):
            raise error
        return encode(records)

    journal = Journal(table, encode_later, worker="w", config=NEVER)
    journal.append([b'{"x":1}'])
    with pytest.raises(StorageFailed):
        journal.flush()
    assert journal.num_pending == 1
    journal.close()
    assert rows(table) == [1]


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
