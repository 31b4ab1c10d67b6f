"""The log of what happened to a queue, beginning with its state: what a restore reads.

<folder>/log/<attempt>-<k>.state.json    the state at the beginning of part k, with its checksum
<folder>/log/<attempt>-<k>.events        part k: lines of `crc32 JSON`, one an event

The newest state and its events are all that counts; older parts go once a newer state is durable.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from replaylake.datastore.errors import FormatTooNewError, LogCorruptError, StorageError
from replaylake.datastore.feedback.segments import frame_records
from replaylake.datastore.storage.seals import read_json, seal_json
from replaylake.datastore.storage.storage import atomic_write, fsync_folder, make_folder
from replaylake.online.recorders.transferqueue.attempts import Appender, Attempt
from replaylake.online.recorders.transferqueue.plain_values import decode_plain, encode_plain

_logger = logging.getLogger(__name__)
FORMAT: Final = 1
PART_BYTES: Final = 64 << 20
_STATE: Final = ".state.json"
_EVENTS: Final = ".events"
_PART: Final = re.compile(r"(\d{8})-(\d{6})\.state\.json")


class EventLog:
    """The log of one attempt. For one thread at a time."""

    def __init__(self, attempt: Attempt, *, sync_every: bool) -> None:
        self._attempt = attempt
        self._folder = _log_folder(attempt.folder)
        self._num_parts = 0
        make_folder(self._folder)
        self._appender = Appender(attempt, sync_every=sync_every)

    @property
    def num_bytes(self) -> int:
        """The length of the newest part."""
        return self._appender.num_bytes

    def start_part(self, state: dict[str, Any]) -> None:
        """Make a state durable, from which the following events go on; then remove older parts.

        If it fails, the events go on in the part that they were in.
        Raises: StorageError, CommitConflictError.
        """
        name = f"{self._attempt.number:08d}-{self._num_parts:06d}"
        self._num_parts += 1  # also if it fails: it may leave a file of events without any
        path = self._folder / f"{name}{_STATE}"
        try:
            write_state(path, state)
            with _translate(self._folder):
                fsync_folder(self._folder)
            self._appender.start_file(self._folder / f"{name}{_EVENTS}")
        except BaseException:
            self._withdraw(path)
            raise
        self._remove_before(name)

    def append(self, *events: dict[str, Any]) -> None:
        """Append events, all or none. Raises: as `Appender.append`."""
        self._appender.append(frame_records(encode_event(event) for event in events))

    def close(self) -> None:
        self._appender.close()

    def _withdraw(self, state: Path) -> None:
        """Remove the state of a part that was not begun: a restore would read it as the newest."""
        try:
            if state.exists():
                state.unlink()
                fsync_folder(self._folder)
        except OSError as error:
            self._appender.refuse(f"{state} could not be removed: {error.strerror or error}")

    def _remove_before(self, name: str) -> None:
        for path in self._folder.iterdir():
            if path.name.split(".")[0] < name:
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:  # it is tried again with the next part
                    _logger.warning("%s: could not be removed: %s", path, error.strerror or error)


def encode_event(event: dict[str, Any]) -> bytes:
    """Return an event's JSON. Raises: EpisodeInvalidError for a value in it that has none."""
    return json.dumps(encode_plain(event, str(event.get("event")))).encode()


def read_log(folder: Path) -> tuple[dict[str, Any] | None, Iterator[dict[str, Any]]]:
    """Return the newest state, None if there is none, and what happened after it.

    An event without an end at the end of the log is left out: it was never acknowledged.
    Raises: LogCorruptError for damage, with the file and the line; FormatTooNewError.
    """
    log = _log_folder(folder)
    names = sorted(path.name for path in log.glob(f"*{_STATE}") if _PART.fullmatch(path.name))
    if not names:
        return None, iter(())
    path = log / names[-1]
    return read_state(path), _read_events(path.with_name(names[-1].removesuffix(_STATE) + _EVENTS))


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write a state file, whole or not at all. Raises: StorageError."""
    with atomic_write(path) as stream:
        stream.write(seal_json({"format": FORMAT, "state": encode_plain(state, "state")}))


def read_state(path: Path) -> dict[str, Any]:
    """Read a state file. Raises: LogCorruptError, FormatTooNewError, StorageError."""
    try:
        body = read_json(path.read_bytes())
        found = body["format"]
        state = decode_plain(body["state"])
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}, expected to read it.") from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise LogCorruptError(
            f"{path}: is not what was written: {error}. Load a checkpoint of the queue."
        ) from error
    if found > FORMAT:
        raise FormatTooNewError(f"{path}: has format {found}, expected {FORMAT} or older. Update.")
    return dict(state)


@contextmanager
def _translate(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}. Repair the disk.") from error


def _log_folder(folder: Path) -> Path:
    return folder / "log"


def _read_events(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}, expected to read it.") from error
    events = [_parse(line) for line in lines]
    num_whole = max((i + 1 for i, event in enumerate(events) if event is not None), default=0)
    for number, (line, event) in enumerate(zip(lines, events, strict=True), 1):
        if event is None:
            # The last one has no newline if it was cut short; a power cut leaves zeros of some.
            if number == len(lines) or (number > num_whole and bytes(8) in line):
                return
            raise LogCorruptError(
                f"{path}: line {number} is not what was written. Load a checkpoint of the queue."
            )
        yield event


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the event of a line, or None if it is not what was written."""
    if not line or next(iter(frame_records([line[9:]])))[:-1] != line:
        return None
    try:
        event = decode_plain(json.loads(line[9:]))
    except (ValueError, RecursionError, LogCorruptError):
        return None
    return event if isinstance(event, dict) else None
