"""Retained answers: what requests with an idempotency key were answered, for who sends them again.

In memory are the newest 64 MiB. The same answers are in files, so that a request that is sent again
after a restart gets its answer, and is not a second step:

<dataset>/_answers/<worker>.lock       held (flock) while the gateway lives
<dataset>/_answers/<worker>-<k>.jsonl  lines of `crc32 JSON`, the newest still growing

An answer is written before its call is recorded, and read back only if the dataset has the call:
whenever a gateway is killed, an answer that is found is that of a recorded call.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Final

import orjson

from replaylake.datastore.errors import StorageError
from replaylake.datastore.feedback.segments import (
    SUFFIX,
    frame_records,
    list_segments,
    read_segment,
    take_lock,
)
from replaylake.datastore.storage.storage import make_folder

_MAX_BYTES: Final = 64 << 20
# Clients retry within minutes; what people wrote is not to lie here for long.
RETAINED_S: Final = 3600.0
# So the files exceed the limits by an eighth, or a sixth.
_FILE_BYTES: Final = _MAX_BYTES // 8
_FILE_S: Final = RETAINED_S / 6
_logger = logging.getLogger(__name__)

CallKey = tuple[str, str | None]
"""The idempotency key of a call and the id of its answer."""


@dataclass(slots=True)
class RetainedAnswer:
    """An answer to a request with an idempotency key, in progress or complete.

    digest: of everything that makes another request the same. headers: without those that each
    connection sets itself. done: set once nobody has to wait for it any more.
    """

    digest: bytes
    done: asyncio.Event = field(default_factory=asyncio.Event)
    is_whole: bool = False
    status: int = 0
    headers: Sequence[tuple[bytes, bytes]] = ()
    parts: list[bytes] = field(default_factory=list)
    body: bytes = b""


@dataclass(slots=True)
class _File:
    path: Path
    opened_s: float
    num_bytes: int = 0


class RetainedAnswers:
    """The answers of one gateway; for the event loop's thread."""

    def __init__(
        self, folder: Path, worker: str, key: bytes, recorded: Collection[CallKey] | None
    ) -> None:
        """Read the answers of gateways that have ended, and remove their files.

        worker: a new name of this process. key: of the digests, the same after a restart. recorded:
        the calls that the dataset has; with None, no answer is read from files or written to them.
        Raises: StorageError.
        """
        self._folder, self._worker, self._key = folder, worker, key
        self._in_progress: dict[bytes, RetainedAnswer] = {}
        self._answers: OrderedDict[bytes, RetainedAnswer] = OrderedDict()  # the oldest first
        self._num_bytes = 0
        self._files: list[_File] = []
        self._num_files = 0
        self._fd = self._lock_fd = -1
        self._is_written = recorded is not None
        if recorded is not None:
            for name in sorted({name for name, _, _ in list_segments(folder)}):
                self._take_over(name, frozenset(recorded))

    def __len__(self) -> int:
        return len(self._answers)

    def hash_request(self, parts: Iterable[bytes]) -> bytes:
        """Return the digest of a request; the parts are kept apart. Cost: 1 ms for 1 MiB."""
        digest = blake2b(key=self._key, digest_size=16, person=b"request")
        for part in parts:
            digest.update(len(part).to_bytes(8, "big") + part)
        return digest.digest()

    def find(self, digest: bytes) -> RetainedAnswer | None:
        """Return the complete answer to a request, if it is retained."""
        return self._answers.get(digest)

    def find_in_progress(self, digest: bytes) -> RetainedAnswer | None:
        """Return the answer to a request that is being answered; `done` says when to look again."""
        return self._in_progress.get(digest)

    def begin(self, digest: bytes) -> RetainedAnswer:
        """Begin an answer, which `settle` ends."""
        answer = self._in_progress[digest] = RetainedAnswer(digest)
        return answer

    def settle(self, answer: RetainedAnswer) -> None:
        """Retain an answer if it is complete and no refusal, and wake those who wait for it."""
        del self._in_progress[answer.digest]
        if answer.is_whole and 200 <= answer.status < 300:
            answer.body = b"".join(answer.parts)
            self._retain(answer)
        answer.parts.clear()
        answer.done.set()

    def write(self, answers: Iterable[tuple[CallKey, RetainedAnswer]]) -> None:
        """Write answers to a file, before their calls are recorded.

        Where that fails it is logged: a request that is sent again after a restart is then another
        call.
        """
        if not self._is_written:
            return
        records = [
            orjson.dumps(
                {
                    "digest": answer.digest.hex(),
                    "call": call,
                    "time": time.time(),
                    "status": answer.status,
                    "headers": [
                        [name.decode("latin-1"), value.decode("latin-1")]
                        for name, value in answer.headers
                    ],
                    "body": answer.body.decode("latin-1"),
                }
            )
            for call, answer in answers
        ]
        try:
            self._append(b"".join(frame_records(records)))
        except OSError as error:
            _logger.error("%s: answer not retained for a restart: %s", self._folder, error)

    def close(self) -> None:
        """Close the files; the next gateway reads them."""
        for descriptor in (self._fd, self._lock_fd):
            if descriptor >= 0:
                os.close(descriptor)
        self._fd = self._lock_fd = -1

    def _retain(self, answer: RetainedAnswer) -> None:
        before = self._answers.pop(answer.digest, None)
        self._num_bytes += len(answer.body) - (len(before.body) if before is not None else 0)
        self._answers[answer.digest] = answer
        while self._num_bytes > _MAX_BYTES:
            _, oldest = self._answers.popitem(last=False)
            self._num_bytes -= len(oldest.body)

    def _append(self, data: bytes) -> None:
        now_s = time.monotonic()
        newest = self._files[-1] if self._files else None
        is_full = newest is not None and (
            newest.num_bytes >= _FILE_BYTES or now_s - newest.opened_s >= _FILE_S
        )
        if newest is None or is_full:
            newest = self._open_file(now_s)
        newest.num_bytes += len(data)
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]

    def _open_file(self, now_s: float) -> _File:
        if self._lock_fd < 0:
            make_folder(self._folder)
            _, self._lock_fd = take_lock(self._folder, self._worker, wait=True)
        path = self._folder / f"{self._worker}-{self._num_files}{SUFFIX}"
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_WRONLY, 0o600)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd
        self._num_files += 1
        self._files.append(_File(path, now_s))
        total = sum(file.num_bytes for file in self._files)
        while len(self._files) > 1:
            oldest, following = self._files[:2]
            if total <= _MAX_BYTES and now_s - following.opened_s < RETAINED_S:
                break
            total -= oldest.num_bytes
            self._files.pop(0)
            oldest.path.unlink(missing_ok=True)
        return self._files[-1]

    def _take_over(self, worker: str, recorded: Collection[CallKey]) -> None:
        """Read the answers of a gateway that has ended, and remove its files."""
        try:
            lock_path, lock_fd = take_lock(self._folder, worker, wait=False)
        except BlockingIOError:
            return
        try:
            mine = [(k, path) for name, k, path in list_segments(self._folder) if name == worker]
            for _, path in sorted(mine):
                self._read_file(path, recorded)
                path.unlink()
            lock_path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"{self._folder}: {error.strerror or error}.") from error
        finally:
            os.close(lock_fd)

    def _read_file(self, path: Path, recorded: Collection[CallKey]) -> None:
        records, _, faults = read_segment(path)
        if faults:
            _logger.error("%s: %d answers not read: %s", path, len(faults), faults[0])
        since_s = time.time() - RETAINED_S
        for record in records:
            # A record has its checksum, so it is as it was written, if by another version.
            with suppress(orjson.JSONDecodeError, AttributeError, LookupError, TypeError):
                fields = orjson.loads(record)
                key, completion_id = fields["call"]
                if (key, completion_id) not in recorded or fields["time"] < since_s:
                    continue
                answer = RetainedAnswer(
                    bytes.fromhex(fields["digest"]),
                    is_whole=True,
                    status=fields["status"],
                    headers=[
                        (name.encode("latin-1"), value.encode("latin-1"))
                        for name, value in fields["headers"]
                    ],
                    body=fields["body"].encode("latin-1"),
                )
                self._retain(answer)
                self._append(b"".join(frame_records([record])))
