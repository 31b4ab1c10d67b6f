"""The access log: one line of JSON a request, without bodies, queries or tokens."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import orjson

from replaylake.datastore.errors import ConfigInvalidError

_logger = logging.getLogger(__name__)
STDOUT: Final = "-"
_FLUSH_S: Final = 0.5
_FLUSH_BYTES: Final = 1 << 16
# W3C Trace Context, version 00; a later version may have more at its end.
_TRACEPARENT: Final = re.compile(
    rb"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?"
)
_NO_TRACE: Final = b"0" * 32


class AccessLog:
    """Appends to a file that several workers may share: what is written at once is whole lines.

    Lines are kept for up to half a second; a killed worker loses those.
    """

    def __init__(self, target: str) -> None:
        """Open the file, or stdout for "-".

        Raises: ConfigInvalidError if it cannot be written to.
        """
        self._fd = sys.stdout.fileno() if target == STDOUT else _open(Path(target))
        self._is_ours = target != STDOUT
        self._lines: list[bytes] = []
        self._num_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._worker = os.getpid()
        self._num_lost = 0

    def write(self, **fields: Any) -> None:
        """Add a line: `time` (UTC), `worker` (its process) and the fields."""
        now = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds")
        line = orjson.dumps({"time": now, "worker": self._worker, **fields})
        self._lines.append(line)
        self._num_bytes += len(line) + 1
        if self._num_bytes >= _FLUSH_BYTES:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_FLUSH_S, self.flush)

    def flush(self) -> None:
        """Write what is kept. A disk that refuses costs lines, not answers."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._lines:
            return
        lines, self._lines, self._num_bytes = self._lines, [], 0
        try:
            _write_all(self._fd, b"\n".join(lines) + b"\n")
        except OSError as error:
            if not self._num_lost:
                _logger.error("access log: %s; its lines are lost until it can be written", error)
            self._num_lost += len(lines)
        else:
            self._num_lost = 0

    def close(self) -> None:
        """Write what is kept, and close the file."""
        self.flush()
        if self._is_ours:
            os.close(self._fd)


def read_trace_id(traceparent: bytes | None) -> str | None:
    """Return the trace id of a W3C `traceparent`, 32 hexadecimal digits; None if it has none."""
    found = None if traceparent is None else _TRACEPARENT.fullmatch(traceparent.strip())
    return None if found is None or found[1] == _NO_TRACE else found[1].decode()


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise ConfigInvalidError(
            f"serve: access_log: {path}: {error.strerror}, expected a file that can be appended "
            "to, or - for stdout.",
            parameter="access_log",
        ) from error


def _write_all(fd: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
