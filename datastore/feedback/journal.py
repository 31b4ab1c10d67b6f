"""Journal: what a server must not lose between answering a request and committing its row.

Each worker appends its records to a file of its own, written with write(2) before the request is
answered and fsynced in groups; once a second the file becomes one commit of a table and goes. The
commit's producer is the journal and its sequence the segment, so a crash at any moment leaves a
segment that the next `recover` commits, or one that was committed already and only has to go. Every
live journal of the table on this machine recovers once a second, so that the records of a killed
worker are as soon in the table as others.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from replaylake.datastore.errors import ReplayLakeError, StorageError
from replaylake.datastore.feedback.row_encoder import Encode
from replaylake.datastore.feedback.segments import (
    DAMAGED,
    SUFFIX,
    Segment,
    commit_failed_error,
    commit_segment,
    frame_records,
    journal_folder,
    producer_name,
    recover,
    take_lock,
)
from replaylake.datastore.storage.storage import fsync_folder, make_folder
from replaylake.datastore.storage.table.table import Table

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JournalConfig:
    """How soon records are durable and visible.

    sync_interval_s: a killed process loses nothing acknowledged, a power cut at most this much.
    sync_every: fsync each append before returning (about 0.12 ms): a power cut loses nothing.
    flush_interval_s: how long a record waits before it is committed to the table, for SQL to see.
    segment_bytes: a segment that reaches this is committed at once, to bound memory at the commit.
    """

    sync_interval_s: float = 0.005
    sync_every: bool = False
    flush_interval_s: float = 1.0
    segment_bytes: int = 16 << 20


class Journal:
    """One worker's journal into one table. Safe for threads; close it to commit what is left."""

    def __init__(
        self, table: Table, encode: Encode, *, worker: str, config: JournalConfig | None = None
    ) -> None:
        """Start a journal named `worker`, which must be new: a random id, never reused."""
        self.config = config or JournalConfig()
        self.producer = producer_name(worker)
        self.worker = worker
        self.folder = journal_folder(table)
        self._table, self._encode = table, encode
        make_folder(self.folder)
        self._lock_path, self._lock_fd = take_lock(self.folder, worker, wait=True)
        self._write_lock = threading.Lock()  # the current segment, and whether it may be written
        self._sync_lock = threading.Lock()  # no descriptor is closed while it is being synced
        self._commit_lock = threading.Lock()
        self._pending: deque[Segment] = deque()
        self._failure: str | None = None
        self._write_failure: str | None = None
        self._commit_failure: str | None = None
        self._num_commit_failures = self._num_set_aside = 0
        self._closed = self._is_ended = False
        self._current = self._open_segment(0)
        self._written, self._full = threading.Event(), threading.Event()
        # Of two threads that sync, one would be told of an error and the other acknowledge.
        loops = [self._flush_loop]
        if not self.config.sync_every:
            loops.append(self._sync_loop)
        self._threads = [
            threading.Thread(target=loop, name=f"{loop.__name__}-{worker}", daemon=True)
            for loop in loops
        ]
        for thread in self._threads:
            thread.start()
        _journals.add(self)

    @property
    def num_pending(self) -> int:
        """Rows written and not yet committed."""
        return self._current.num_rows + sum(segment.num_rows for segment in list(self._pending))

    @property
    def failure(self) -> str | None:
        """Why nothing more can be written, or None."""
        return self._failure

    @property
    def is_ended(self) -> bool:
        """Whether another process ended the journal; its last records were not committed."""
        return self._is_ended

    @property
    def write_failure(self) -> str | None:
        """Why the last records were refused, or None; the next may be written."""
        return self._failure or self._write_failure

    @property
    def commit_failure(self) -> str | None:
        """Why the last attempt to commit failed, or None; the records wait on disk."""
        return self._commit_failure

    @property
    def num_commit_failures(self) -> int:
        """Attempts to commit in the background that failed."""
        return self._num_commit_failures

    @property
    def num_set_aside(self) -> int:
        """Records of this journal that could not be rows: they are in its files `*.damaged`."""
        return self._num_set_aside

    def append(self, records: Iterable[bytes]) -> None:
        """Write records, each one JSON object without newlines, with one write(2), all or none.

        Raises: StorageError if the disk refuses. Then nothing of it is kept, except where only
        the fsync of `sync_every` failed: what is kept then is unknown.
        """
        records = list(records)
        data = b"".join(frame_records(records))
        with self._write_lock:
            if self._closed or self._failure:
                raise StorageError(f"{self.folder}: {self._failure or 'the journal is closed'}.")
            segment = self._current
            self._check_linked(segment)
            self._write(segment, data)
            if segment.num_rows == 0:
                segment.opened_s = time.monotonic()
            segment.num_bytes += len(data)
            segment.num_rows += len(records)
            if segment.records is not None:
                segment.records += records
            self._write_failure = None
            if self.config.sync_every:
                self._sync(segment)
                if self._failure:
                    raise StorageError(f"{self._failure}. Repair the disk, then restart.")
        # Where it is set, the thread has yet to clear it, and syncs after that.
        if not self._written.is_set():
            self._written.set()
        if segment.num_bytes >= self.config.segment_bytes:
            self._full.set()

    def flush(self) -> None:
        """Commit every record written so far. Raises: ReplayLakeError; the records stay on disk."""
        with self._commit_lock:
            self._check_linked(self._current)
            # The old ones first: while they cannot be committed, a segment for each try would use
            # up the file descriptors and leave thousands of small files.
            try:
                self._commit_pending()
            except BaseException:
                if self._current.num_bytes >= self.config.segment_bytes:
                    self._rotate()
                raise
            self._rotate()
            self._commit_pending()

    def close(self) -> None:
        """Commit what is left and let go. Raises: ReplayLakeError; `recover` can then commit it."""
        with self._write_lock:
            if self._closed:
                return
            self._closed = True
        self._written.set()
        self._full.set()
        for thread in self._threads:
            thread.join()
        try:
            self.flush()
            self._current.path.unlink()
            self._lock_path.unlink()
        except OSError as error:
            raise commit_failed_error(self._current.path, error) from error
        finally:
            os.close(self._current.fd)
            os.close(self._lock_fd)

    def abandon(self) -> None:
        """Let go of the parent's journal in a forked child process, which must not write to it.

        The lock is of the open file, which parent and child share: while a child holds it, nobody
        recovers the journal of a parent that was killed.
        """
        if not self._closed:
            self._closed = True
            os.close(self._lock_fd)

    def _check_linked(self, segment: Segment) -> None:
        """Refuse to go on with a file that somebody removed: its records go when it is closed.

        Raises: StorageError. Cost: 0.5 us.
        """
        if os.fstat(segment.fd).st_nlink == 0:
            self._failure = f"{segment.path} was removed while in use, with the records in it"
            raise StorageError(f"{self._failure}. Restore the dataset, then restart.")

    def _write(self, segment: Segment, data: bytes) -> None:
        """Write all of data or leave the file as it was: half a line would spoil the next one."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(segment.fd, view) :]
        except OSError as error:
            self._write_failure = error.strerror or str(error)
            try:
                os.ftruncate(segment.fd, segment.num_bytes)
            except OSError as again:
                self._failure = f"could not undo a torn write: {again}"
            raise StorageError(
                f"{segment.path}: {error.strerror or error}, expected to write {len(data)} bytes. "
                "Free some space; the server then continues without a restart."
            ) from error

    def _sync(self, segment: Segment) -> None:
        try:
            os.fdatasync(segment.fd)
        except OSError as error:
            # After a failed fsync the kernel may drop the pages and report success the next time.
            self._failure = f"{segment.path} could not be synced: {error.strerror or error}"
            _logger.error("journal stopped: %s", self._failure)

    def _sync_loop(self) -> None:
        while not self._closed:
            self._written.wait()
            self._written.clear()
            with self._sync_lock:
                self._sync(self._current)
            time.sleep(self.config.sync_interval_s)

    def _flush_loop(self) -> None:
        while not self._closed:
            self._full.wait(self.config.flush_interval_s)
            self._full.clear()
            if not self._closed:
                errors = [self._attempt(self._flush_if_due), self._attempt(self._recover_others)]
                self._commit_failure = next((error for error in errors if error), None)

    def _attempt(self, commit: Callable[[], None]) -> str | None:
        """Commit, and return why it could not be done."""
        try:
            commit()
        except ReplayLakeError as error:
            _logger.error("journal not committed, will retry: %s", error)
            failure = str(error)
        except (
            Exception
        ) as error:  # a bug must not end the thread: the records are safe, the next try may work
            _logger.exception("journal not committed, will retry")
            failure = f"{type(error).__name__}: {error}"
        else:
            return None
        self._num_commit_failures += 1
        return failure

    def _flush_if_due(self) -> None:
        segment, interval_s = self._current, self.config.flush_interval_s
        with self._commit_lock:
            self._check_linked(self._current)
        is_due = segment.num_rows and time.monotonic() - segment.opened_s >= interval_s / 2
        if is_due or self._pending or segment.num_bytes >= self.config.segment_bytes:
            self.flush()

    def _recover_others(self) -> None:
        recover(self._table, self._encode)  # our own lock keeps it from our segments

    def _rotate(self) -> None:
        """Begin a new segment if the current one holds anything."""
        if self._current.num_rows == 0:
            return
        fresh = self._open_segment(self._current.sequence + 1)
        with self._write_lock:
            full, self._current = self._current, fresh
        with self._sync_lock:
            self._sync(full)
            os.close(full.fd)
            full.fd = -1
        self._pending.append(full)

    def _commit_pending(self) -> None:
        while self._pending:
            try:
                done = commit_segment(self._table, self._encode, self.producer, self._pending[0])
            except BaseException:
                # It may take long: what waits is on disk, and need not be in memory too.
                for segment in self._pending:
                    segment.records = None
                raise
            self._num_set_aside += done.num_damaged
            self._pending.popleft()
            if done.num_ended:
                self._is_ended = True
                self._failure = (
                    f"another process ended the journal {self.worker} and took over its producer. "
                    f"{done.num_ended} records were not committed, and are stored in "
                    f"{self.worker}-*{DAMAGED}"
                )
                _logger.error("journal stopped: %s", self._failure)

    def _open_segment(self, sequence: int) -> Segment:
        path = self.folder / f"{self.worker}-{sequence}{SUFFIX}"
        try:
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_RDWR, 0o644)
            fsync_folder(self.folder)
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror or error}.") from error
        return Segment(sequence, path, fd, records=[])


_journals: Final[weakref.WeakSet[Journal]] = weakref.WeakSet()


def _abandon_all() -> None:
    for journal in list(_journals):
        journal.abandon()


os.register_at_fork(after_in_child=_abandon_all)
