"""Journal segments: the files in which records wait for their commit, and their recovery.

<table>/_journal/<worker>.lock         held (flock) while the worker lives
<table>/_journal/<worker>-<k>.jsonl    segment k: lines of `crc32 JSON`, the newest still growing
"""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from replaylake.datastore.table import Table

Encode = Callable[[Sequence[dict[str, Any]]], pa.Table]
"""Turns records into rows of the table."""

SUFFIX: Final = ".jsonl"
_CRC_DIGITS: Final = 8


@dataclass(frozen=True)
class Recovered:
    """What `recover` did: segments and rows committed, and torn lines, which nobody relied on."""

    num_segments: int
    num_rows: int
    num_torn: int

    def __add__(self, other: Recovered) -> Recovered:
        return Recovered(
            self.num_segments + other.num_segments,
            self.num_rows + other.num_rows,
            self.num_torn + other.num_torn,
        )


@dataclass
class Segment:
    """A segment's file; fd is -1 where it is only read."""

    sequence: int
    path: Path
    fd: int
    num_bytes: int = 0
    num_rows: int = 0
    opened_s: float = 0.0


def framed(records: Iterable[bytes]) -> list[bytes]:
    """Return one line a record, each one JSON object without newlines."""
    return [b"%08x %b\n" % (zlib.crc32(record), record) for record in records]


def journal_folder(table: Table) -> Path:
    """Return where a table's journals are; it exists once a worker has begun one."""
    return table.storage.local(f"{table.root}/_journal")


def producer_of(worker: str) -> str:
    """Return the producer under which a worker's segments are committed."""
    return f"journal:{worker}"


def recover(table: Table, encode: Encode) -> Recovered:
    """Commit the segments of dead workers, in order; those of live ones are left alone.

    A last line without its end is dropped and counted: nobody was answered for it. Safe to run at
    any time, by several processes at once. Raises: ReplayLakeError if a commit fails.
    """
    total = Recovered(0, 0, 0)
    folder = journal_folder(table)
    for worker in sorted({worker for worker, _, _ in _segments(folder)}):
        try:
            lock_path, lock_fd = take_lock(folder, worker, wait=False)
        except BlockingIOError:
            continue
        try:
            mine = sorted((k, path) for name, k, path in _segments(folder) if name == worker)
            for sequence, path in mine:
                segment = Segment(sequence, path, fd=-1)
                num_torn = commit_segment(table, encode, producer_of(worker), segment)
                total += Recovered(1, segment.num_rows, num_torn)
                path.unlink()
            lock_path.unlink(missing_ok=True)
        finally:
            os.close(lock_fd)
    return total


def first_pending(table: Table) -> list[dict[str, Any]]:
    """Return the first record of every segment that is not committed yet, live workers' too."""
    firsts = []
    for _, _, path in _segments(journal_folder(table)):
        with suppress(FileNotFoundError), path.open("rb") as file:
            record = _parsed(file.readline())
            if record is not None:
                firsts.append(record)
    return firsts


def commit_segment(table: Table, encode: Encode, producer: str, segment: Segment) -> int:
    """Append a segment's records; returns how many lines were torn."""
    with segment.path.open("rb") as file:
        parsed = [_parsed(line) for line in file]
    records = [record for record in parsed if record is not None]
    segment.num_rows = len(records)
    if records:
        table.append(encode(records), producer=producer, sequence=segment.sequence)
    return len(parsed) - len(records)


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return a line's record, or None if it was cut short or is not what was written."""
    body = line[_CRC_DIGITS + 1 : -1]
    if not line.endswith(b"\n") or line[:_CRC_DIGITS] != b"%08x" % zlib.crc32(body):
        return None
    record: dict[str, Any] = json.loads(body)
    return record


def _segments(folder: Path) -> Iterator[tuple[str, int, Path]]:
    """Yield (worker, sequence, path) of what lies in the folder."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        worker, _, sequence = path.name.removesuffix(SUFFIX).rpartition("-")
        if path.name.endswith(SUFFIX) and worker and sequence.isdecimal():
            yield worker, int(sequence), path


def take_lock(folder: Path, worker: str, *, wait: bool) -> tuple[Path, int]:
    """Lock a worker's name. Raises: BlockingIOError if it is held and `wait` is false."""
    path = folder / f"{worker}.lock"
    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(fd)
        raise
    return path, fd


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
