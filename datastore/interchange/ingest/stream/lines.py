"""Lines: what a pipe or a growing file delivers, line by line, without waiting for its end."""

from __future__ import annotations

import os
import select
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol

from replaylake.datastore.errors import NotFoundError, SourceInvalidError
from replaylake.datastore.interchange.sources.source_errors import unreadable_error

_READ_BYTES: Final = 1 << 20
# A line beyond it is no step: memory holds no more of what has no end.
MAX_LINE_BYTES: Final = 64 << 20
# How often a file that does not grow is looked at.
_POLL_S: Final = 0.1


@dataclass(frozen=True)
class Line:
    """A line without its end; `number` counts from 1. `is_cut`: it was longer than is read."""

    number: int
    text: bytes
    is_cut: bool = False


class Lines(Protocol):
    """Where lines come from."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def is_over(self) -> bool:
        """Whether no line will come any more."""

    def take(self, timeout_s: float) -> list[Line]:
        """Return the lines that came, waiting no longer than this. Raises: SourceInvalidError."""


class LineReader:
    """Lines of a pipe until its end, or of a file as it grows.

    A file that is cut short or replaced is read again from its start, as log rotation does it.
    """

    def __init__(self, descriptor: int, name: str, growing: Path | None = None) -> None:
        """Read from an open descriptor, which is closed with this only where it is `growing`."""
        self._descriptor = descriptor
        self._growing = growing
        self._name = name
        self._part = b""
        self._number = 0
        self._is_cut = False
        self._is_over = False

    @classmethod
    def from_path(cls, path: Path) -> LineReader:
        """Follow a file. Raises: NotFoundError, SourceInvalidError."""
        if not path.exists():
            raise NotFoundError(
                f"{path}: found no such file, expected a growing file. Check the path."
            )
        if not path.is_file():
            raise SourceInvalidError(f"{path}: found no file, expected a growing file.")
        return cls(_open(path), path.name, path)

    def __enter__(self) -> LineReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._growing is not None:
            os.close(self._descriptor)

    @property
    def name(self) -> str:
        return self._name

    @property
    def is_over(self) -> bool:
        return self._is_over

    def take(self, timeout_s: float) -> list[Line]:
        try:
            if self._growing is None:
                ready, _, _ = select.select([self._descriptor], [], [], max(timeout_s, 0))
                if not ready:
                    return []
            data = os.read(self._descriptor, _READ_BYTES)
            if data:
                return self._lines(data)
            if self._growing is None:
                self._is_over = True
                # A file's last line may still be growing; that of a pipe is all there is.
                return self._lines(b"\n") if self._part or self._is_cut else []
            if not self._has_restarted(self._growing):
                time.sleep(min(max(timeout_s, 0), _POLL_S))
        except OSError as error:
            raise unreadable_error(self._name, error) from error
        return []

    def _lines(self, data: bytes) -> list[Line]:
        *whole, self._part = (self._part + data).split(b"\n")
        lines = []
        for text in whole:
            self._number += 1
            lines.append(Line(self._number, b"" if self._is_cut else text, self._is_cut))
            self._is_cut = False
        if len(self._part) > MAX_LINE_BYTES:
            self._part, self._is_cut = b"", True
        return lines

    def _has_restarted(self, path: Path) -> bool:
        """Whether the file was cut short or replaced; then it is open at its start."""
        here = os.fstat(self._descriptor)
        try:
            there = path.stat()
        except FileNotFoundError:
            return False  # between the two steps of a rotation
        is_other = (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino)
        if not is_other and here.st_size >= os.lseek(self._descriptor, 0, os.SEEK_CUR):
            return False
        new = _open(path)
        os.close(self._descriptor)
        self._descriptor, self._part, self._is_cut = new, b"", False
        return True


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY)
    except OSError as error:
        raise unreadable_error(path.name, error) from error
