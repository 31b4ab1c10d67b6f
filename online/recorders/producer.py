"""Producer: a name under which only one recorder at a time records, on any machine.

On one machine, a file lock (flock) refuses a second recorder; it ends with its process. Machines
that share a lake on an object store coordinate through the lake:

    <dataset>/_recorders/<hash of the name>/<number>.json   the holder of the name: host, process,
                                                            journal, and time of its heartbeat

A recorder takes a name by creating the next number, which only one recorder can do. It is refused
while the previous holder has recent heartbeats. Otherwise, the previous journal is ended
(`end_worker`) before the new recorder reads what was recorded: what the previous one acknowledged
and has not committed stays on its machine, and can no longer be committed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from replaylake.datastore.errors import ConfigInvalidError, StorageError
from replaylake.datastore.feedback.call_outcomes import ensure_outcomes_table
from replaylake.datastore.feedback.recorded_calls import recover_calls
from replaylake.datastore.feedback.row_encoder import RowEncoder
from replaylake.datastore.feedback.segments import end_worker, has_segments, journal_folder
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.names import new_ulid
from replaylake.datastore.storage.seals import read_json, seal_json
from replaylake.datastore.storage.storage import Storage, make_folder

HEARTBEAT_S: Final = 10.0
# Several heartbeats, and more than synchronized clocks differ by. If a live holder is taken for
# dead, its later commits are refused, so nothing is recorded twice.
STALE_AFTER_S: Final = 40.0
NUMBER_DIGITS: Final = 18
_RECOVERY_TIMEOUT_S: Final = 60.0
_WORKER_CHARS: Final = len(new_ulid())
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class _Holder:
    """The holder of a name. lock: id of its lock file; at_ms: last heartbeat, 0 once closed."""

    producer: str
    worker: str
    host: str
    pid: int
    lock: str
    at_ms: int

    def describe(self) -> str:
        age_s = max(0.0, time.time() - self.at_ms / 1000)
        return f"process {self.pid} of {self.host}, last heard of {age_s:.0f} s ago"


class Producer:
    """The right of this process to a name, for the recorder whose journal is `worker`."""

    def __init__(
        self, dataset: Dataset, name: str, worker: str, *, heartbeat_s: float = HEARTBEAT_S
    ) -> None:
        """Take the name on this machine, and in a lake that machines share.

        Raises: ConfigInvalidError while another recorder has it; StorageError.
        """
        self.name, self._worker, self._dataset = name, worker, dataset
        self._heartbeat_s = heartbeat_s
        storage = dataset.table.storage
        digest = hashlib.sha256(name.encode()).hexdigest()[:32]
        self._folder = f"{dataset.table.root}/_recorders/{digest}"
        self._lock_fd: int | None = self._lock(digest)
        self._holder: _Holder | None = None
        self._number = 0
        self._taken_by: _Holder | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if storage.shares_state:
            return  # every process that opens the lake sees the same lock
        try:
            self._take(storage)
        except BaseException:
            self.abandon()
            raise
        self._thread = threading.Thread(
            target=self._beat, args=(storage,), name=f"producer {name}", daemon=True
        )
        self._thread.start()

    def recover(self, encoder: RowEncoder) -> int:
        """Wait until the journal of the name's last recorder on this machine is committed.

        Returns the number of the next rollout, which is stored in the lock file. Another process
        may be committing that journal, as open journals do for those of killed processes; until it
        has ended, the dataset lacks acknowledged rollouts. Raises: StorageError after a minute.
        """
        assert self._lock_fd is not None
        last, _, number = os.pread(self._lock_fd, 100, 0).decode().partition(" ")
        until_s = time.monotonic() + _RECOVERY_TIMEOUT_S
        while last and has_segments(self._dataset.table, last):
            if time.monotonic() > until_s:
                raise StorageError(
                    f"{journal_folder(self._dataset.table)}: found the journal {last} of an "
                    "earlier recorder of this producer held by another process for "
                    f"{_RECOVERY_TIMEOUT_S:g} s, expected it to be committed. End that process, "
                    "then try again."
                )
            time.sleep(0.02)
            recover_calls(self._dataset, encoder)
        os.pwrite(self._lock_fd, self._worker.encode(), 0)  # all have the same length
        os.fsync(self._lock_fd)
        return int(number or 0)

    def note_number(self, number: int) -> None:
        """Store the number of the producer's next rollout behind its journal's name.

        Not synced: after a power failure, the number is found in the dataset, except for rollouts
        that were deleted.
        """
        assert self._lock_fd is not None
        os.pwrite(self._lock_fd, f" {number:0{NUMBER_DIGITS + 1}d}".encode(), _WORKER_CHARS)

    def check(self) -> None:
        """Check the right to the name. Raises: ConfigInvalidError if another recorder took over."""
        if self._taken_by is not None:
            raise ConfigInvalidError(
                f"producer: found that {self._taken_by.describe()}, has taken over "
                f"{self.name!r}, expected this recorder alone: it had no heartbeat for more than "
                f"{STALE_AFTER_S:.0f} s. What it had not committed stays in its journal. Record "
                "under another name here.",
                parameter="producer",
            )

    def release(self, *, is_committed: bool) -> None:
        """Release the name. is_committed: whether the whole journal is committed."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            with suppress(StorageError):
                if is_committed and self._is_mine(self._dataset.table.storage):
                    self._put(self._dataset.table.storage, 0)
        self.abandon()

    def abandon(self) -> None:
        """Release only the lock, for example in a forked child process."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _lock(self, digest: str) -> int:
        folder = journal_folder(self._dataset.table)
        make_folder(folder)
        lock_fd = os.open(folder / f"recorder-{digest}.lock", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock_fd)
            raise self._in_use_error("another recorder", "Close it") from error
        return lock_fd

    def _in_use_error(self, who: str, cure: str) -> ConfigInvalidError:
        return ConfigInvalidError(
            f"producer: found {self.name!r}, which {who} of dataset {self._dataset.name} uses, "
            f"expected one recorder at a time. {cure}, or give each a name of its own.",
            parameter="producer",
        )

    def _take(self, storage: Storage) -> None:
        assert self._lock_fd is not None
        lock = _identify_lock(self._lock_fd)
        known = self._read_all(storage)
        number, last = max(known.items(), default=(0, None))
        # With the same file locked, the last holder was a process of this machine that is dead.
        if last is not None and last.lock != lock and self._is_alive(storage, number, last):
            cure = f"Close it, or wait: a killed one counts as dead after {STALE_AFTER_S:.0f} s"
            raise self._in_use_error(f"another recorder ({last.describe()})", cure)
        self._number = number + 1
        self._holder = _Holder(
            self.name, self._worker, socket.gethostname(), os.getpid(), lock, _now_ms()
        )
        if not storage.put_if_absent(self._path(self._number), seal_json(asdict(self._holder))):
            raise self._in_use_error("another recorder, which opens at this moment,", "Close it")
        for holder in known.values():
            if holder.at_ms and holder.lock != lock:
                end_worker(self._dataset.table, holder.worker)
                ensure_outcomes_table(self._dataset)
                end_worker(self._dataset.rewards, holder.worker)
        storage.delete(map(self._path, known))

    def _is_alive(self, storage: Storage, number: int, holder: _Holder) -> bool:
        """Whether the last holder has a recent heartbeat, by its clock or by the storage's."""
        if not holder.at_ms:
            return False
        stored = [
            f.modified_ms for f in storage.files(self._folder) if f.path == self._path(number)
        ]
        return _now_ms() - max(holder.at_ms, *stored) < STALE_AFTER_S * 1000

    def _read_all(self, storage: Storage) -> dict[int, _Holder]:
        """Return the holders recorded in the lake, by number. Raises: StorageError."""
        names = storage.names(self._folder)
        numbers = [int(stem) for name in names if (stem := name.removesuffix(".json")).isdecimal()]
        found = {}
        for number, data in zip(
            numbers, storage.get_many(list(map(self._path, numbers))), strict=True
        ):
            if data is not None:
                found[number] = _decode(data, self._path(number))
        return found

    def _beat(self, storage: Storage) -> None:
        while not self._closed.wait(self._heartbeat_s):
            # A store that cannot be reached for a moment must not end a recorder.
            with suppress(StorageError):
                if not self._is_mine(storage):
                    return
                self._put(storage, _now_ms())

    def _is_mine(self, storage: Storage) -> bool:
        later = {
            number: one for number, one in self._read_all(storage).items() if number > self._number
        }
        if later:
            self._taken_by = later[max(later)]
        return not later

    def _put(self, storage: Storage, at_ms: int) -> None:
        assert self._holder is not None
        body = asdict(self._holder) | {"at_ms": at_ms}
        storage.put(self._path(self._number), seal_json(body))

    def _path(self, number: int) -> str:
        return f"{self._folder}/{number:010d}.json"


def _decode(data: bytes, path: str) -> _Holder:
    try:
        body: Any = read_json(data)
        return _Holder(**{one.name: body[one.name] for one in fields(_Holder)})
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise StorageError(
            f"{path}: {error!r}, expected the holder of a producer's name. A running recorder "
            f"rewrites it within {HEARTBEAT_S:.0f} s; if none is running, remove the file."
        ) from error


def _identify_lock(lock_fd: int) -> str:
    """Return an id of a lock file that is unique among machines."""
    stat = os.fstat(lock_fd)
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:
        boot = socket.gethostname()
    return f"{boot}/{stat.st_dev}/{stat.st_ino}"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
