"""Journal segments: the files in which records wait for their commit, and their recovery.

<table>/_journal/<worker>.lock         held (flock) while the worker lives
<table>/_journal/<worker>-<k>.jsonl    segment k: lines of `crc32 JSON`, the newest still growing
<table>/_journal/<worker>-<k>.damaged  a segment of which some records could not be committed, kept
                                       for a person to look at; nothing reads it

A worker that another process ended (`end_worker`) can commit nothing more, on any machine: its
segments are retained under that name as well.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes.schema import EPISODE_ID, SOURCE_EPISODE_ID, STEP
from replaylake.datastore.errors import (
    EpisodeInvalidError,
    ProducerEndedError,
    SchemaMismatchError,
    StorageError,
)
from replaylake.datastore.feedback.row_encoder import Encode, RowEncoder
from replaylake.datastore.lake.commit import DropCounts, commit_counts
from replaylake.datastore.lake.tombstones import open_tombstones
from replaylake.datastore.storage.table.table import Table

SUFFIX: Final = ".jsonl"
DAMAGED: Final = ".damaged"
_CRC_DIGITS: Final = 8
# What a record that no row can hold makes its encoder raise; Arrow's own errors are among them. Not
# OSError nor StorageError: what a full disk or memory refuses now is taken another time.
_UNENCODABLE: Final = (
    EpisodeInvalidError,
    SchemaMismatchError,
    ArithmeticError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RecursionError,
    TypeError,
    ValueError,
)
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recovered:
    """What became of segments: how many there were, and of their lines how many ...

    num_rows: are rows of the table. num_torn: are the last and have no end, so that nobody was
    answered for them. num_damaged: cannot be read or encoded; their segment is kept. num_ended:
    belong to a worker that was ended, and are not committed; their segment is kept.
    """

    num_segments: int
    num_rows: int
    num_torn: int
    num_damaged: int
    num_ended: int = 0

    def __add__(self, other: Recovered) -> Recovered:
        return Recovered(
            self.num_segments + other.num_segments,
            self.num_rows + other.num_rows,
            self.num_torn + other.num_torn,
            self.num_damaged + other.num_damaged,
            self.num_ended + other.num_ended,
        )


NOTHING_RECOVERED: Final = Recovered(0, 0, 0, 0)


@dataclass
class Segment:
    """A segment's file; fd is -1 once it is only read.

    records: what was written into it, while whoever wrote it has that at hand.
    """

    sequence: int
    path: Path
    fd: int = -1
    num_bytes: int = 0
    num_rows: int = 0
    opened_s: float = 0.0
    records: list[bytes] | None = None


def frame_records(records: Iterable[bytes]) -> list[bytes]:
    """Return one line a record, each one JSON object without newlines."""
    return [b"%08x %b\n" % (zlib.crc32(record), record) for record in records]


def journal_folder(table: Table) -> Path:
    """Return where a table's journals are; it exists once a worker has begun one.

    A remote lake's are on the machine that serves, which is where they are recovered.
    """
    return table.storage.state_folder(f"{table.root}/_journal")


def producer_name(worker: str) -> str:
    """Return the producer under which a worker's segments are committed."""
    return f"journal:{worker}"


def end_worker(table: Table, worker: str) -> None:
    """Prevent further commits of a worker's journal, on any machine; committed rows stay.

    Raises: StorageError.
    """
    table.end_producer(producer_name(worker))


def recover(table: Table, encode: Encode) -> Recovered:
    """Commit the segments of dead workers, in order; those of live ones are left alone.

    A last line without its end is dropped and counted: nobody was answered for it. Safe to run at
    any time, by several processes at once. Raises: ReplayLakeError if a commit fails.
    """
    total = NOTHING_RECOVERED
    folder = journal_folder(table)
    for worker in sorted({worker for worker, _, _ in list_segments(folder)}):
        try:
            lock_path, lock_fd = take_lock(folder, worker, wait=False)
        except BlockingIOError:
            continue
        try:
            mine = sorted((k, path) for name, k, path in list_segments(folder) if name == worker)
            for sequence, path in mine:
                total += commit_segment(
                    table, encode, producer_name(worker), Segment(sequence, path)
                )
            lock_path.unlink(missing_ok=True)
        finally:
            os.close(lock_fd)
    return total


def commit_segment(table: Table, encode: Encode, producer: str, segment: Segment) -> Recovered:
    """Append a segment's records to the table and remove its file.

    A record that cannot be read back or encoded does not hold up the others: the file is then kept
    under another name, and logged. So is that of a worker that was ended, none of whose records is
    committed. Raises: ReplayLakeError if the commit fails; nothing is removed.
    """
    # Its own writer need not read it back: each checksum would hold up the event loop beside it.
    num_records = segment.records
    lines, num_torn, faults = (
        read_segment(segment.path) if num_records is None else (num_records, 0, [])
    )
    quick = encode.try_parse(lines) if isinstance(encode, RowEncoder) and not faults else None
    if quick is not None:
        tables = [quick] if quick.num_rows else []
    else:
        records, unread = _records(lines)
        tables, errors = _encode_valid(encode, records)
        faults += unread + errors
    if tables:
        rows = _without_deleted(table, pa.concat_tables(tables))
        if rows.num_rows:
            is_of_steps = "/" not in table.root and {EPISODE_ID, STEP} <= {*rows.column_names}
            info = _count_steps(rows) if is_of_steps else None
            if isinstance(encode, RowEncoder):
                rows = encode.prepare_commit(rows)
            try:
                table.append(rows, producer=producer, sequence=segment.sequence, info=info)
            except ProducerEndedError as error:
                _set_aside(segment.path, len(lines), str(error))
                return Recovered(1, 0, num_torn, 0, len(lines))
            if isinstance(encode, RowEncoder):
                encode.note_commit(rows)
    if faults:
        _set_aside(segment.path, len(faults), faults[0])
    else:
        try:
            segment.path.unlink()
        except OSError as error:
            raise commit_failed_error(segment.path, error) from error
    return Recovered(1, sum(part.num_rows for part in tables), num_torn, len(faults))


def _set_aside(path: Path, num_records: int, reason: str) -> None:
    """Rename a segment so that it is retained but not read. Raises: StorageError."""
    try:
        kept = path.rename(path.with_suffix(DAMAGED))
    except OSError as error:
        raise commit_failed_error(path, error) from error
    _logger.error("%s: %d records not committed, kept: %s", kept, num_records, reason)


def _count_steps(rows: pa.Table) -> dict[str, int]:
    """Return the counts of a commit of steps: an episode is counted where it begins."""
    begun = pc.filter(rows.column(EPISODE_ID), pc.equal(rows.column(STEP), 0))
    return commit_counts(len(pc.unique(begun)), rows.num_rows, DropCounts())


def _without_deleted(table: Table, rows: pa.Table) -> pa.Table:
    """Return the rows that are of nothing that was deleted from the dataset.

    They are left out here, and not later: what is in this table would be in the lake again.
    """
    dataset = table.root.partition("/")[0]
    # What the dataset calls the source's id is all the id that decisions and rewards have.
    is_theirs = SOURCE_EPISODE_ID not in rows.column_names
    names = {SOURCE_EPISODE_ID: EPISODE_ID} if is_theirs else {}
    deleted = open_tombstones(table.storage, dataset).find(rows, names)
    if not deleted.any():
        return rows
    _logger.warning(
        "%s: %d records left out, as they are of what was deleted", table.root, deleted.sum()
    )
    return rows.filter(pa.array(~deleted))


def has_live_worker(table: Table) -> bool:
    """Whether a journal is open: a live worker always has a segment, if only an empty one."""
    return any(True for _ in list_segments(journal_folder(table)))


def has_segments(table: Table, worker: str) -> bool:
    """Whether records of a worker wait for their commit, or are being committed by another."""
    return any(name == worker for name, _, _ in list_segments(journal_folder(table)))


def first_pending(table: Table, field: str) -> list[int]:
    """Return an integer field of each uncommitted segment's first record, live workers' too."""
    firsts: list[int] = []
    for _, _, path in list_segments(journal_folder(table)):
        try:
            with path.open("rb") as file:
                whole = (line[_CRC_DIGITS + 1 : -1] for line in file if _is_whole(line))
                values = ((_parse_record(text) or {}).get(field) for text in whole)
                firsts += islice((value for value in values if type(value) is int), 1)
        except FileNotFoundError:
            continue  # it has been committed
        except OSError as error:
            raise commit_failed_error(path, error) from error
    return firsts


def read_segment(path: Path) -> tuple[list[bytes], int, list[str]]:
    """Return a segment's records as text, how many were torn, and what is wrong with others.

    Raises: StorageError.
    """
    records, num_torn, faults = [], 0, []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n") and _is_whole(line):
                    records.append(line[_CRC_DIGITS + 1 : -1])
                elif _is_torn(line):
                    num_torn += 1
                else:
                    faults.append(f"line {number} is not what was written")
    except OSError as error:
        raise commit_failed_error(path, error) from error
    return records, num_torn, faults


def _records(lines: Sequence[bytes]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return records out of their text, and what is wrong with others."""
    records, faults = [], []
    for number, line in enumerate(lines, 1):
        record = _parse_record(line)
        if record is None:
            faults.append(f"record {number} is not what was written")
        else:
            records.append(record)
    return records, faults


def _encode_valid(
    encode: Encode, records: Sequence[dict[str, Any]]
) -> tuple[list[pa.Table], list[str]]:
    """Encode what can be, halving around what cannot; returns tables and what is wrong."""
    if not records:
        return [], []
    try:
        return [encode(records)], []
    except _UNENCODABLE as error:
        if len(records) == 1:
            return [], [f"a record cannot be a row: {error}"]
    middle = len(records) // 2
    tables, faults = _encode_valid(encode, records[:middle])
    more_tables, more_faults = _encode_valid(encode, records[middle:])
    return tables + more_tables, faults + more_faults


def _parse_record(text: bytes) -> dict[str, Any] | None:
    """Return a record, or None if it is none."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):  # the latter of brackets, thousands deep
        return None
    return record if type(record) is dict else None


def _is_torn(line: bytes) -> bool:
    """Whether a line that is no record was cut short by a crash: only the last one has no end."""
    # A whole record before another byte than the newline was acknowledged; that byte is damaged.
    return not line.endswith(b"\n") and not _is_whole(line)


def _is_whole(line: bytes) -> bool:
    return line[:_CRC_DIGITS] == b"%08x" % zlib.crc32(line[_CRC_DIGITS + 1 : -1])


def list_segments(folder: Path) -> Iterator[tuple[str, int, Path]]:
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


def commit_failed_error(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{path}: {error.strerror or error} while its records were committed. Repair the disk or "
        "correct the permission, then run it again; the records remain in the file."
    )
