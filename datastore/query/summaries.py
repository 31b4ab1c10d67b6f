"""Summaries: the pieces of episodes in one derived file, so that `episodes` need not read steps.

A piece is the rows of one episode and agent in one shard. Shards never change, so a row of the file
holds for every version that has its shard. A reader that finds many shards not in the file writes
one that has them; so does maintenance. Nothing depends on it: what the file lacks is made from the
steps, and the file may be deleted at any time. Training selects from the steps alone.

The file is `_derived/episodes/<ulid>-<sha256>.parquet`; the last by name counts. Purge removes the
shards first and these files (`forget`) afterwards: a reader that writes meanwhile looks at the
shards again once it has written.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from replaylake.datastore.episodes import schema
from replaylake.datastore.errors import QueryError, ReplayLakeError
from replaylake.datastore.names import new_ulid
from replaylake.datastore.query.connections import session
from replaylake.datastore.query.episode_views import FROM_ROWS, PIECE_COLUMNS
from replaylake.datastore.query.scan import scan_files
from replaylake.datastore.query.statements import execute
from replaylake.datastore.storage.log.state import FileEntry
from replaylake.datastore.storage.storage import Storage
from replaylake.datastore.storage.table.table import TableSnapshot

FOLDER: Final = "_derived/episodes"
_METADATA_KEY: Final = b"replaylake.summary"
_SHARD: Final = "shard"
# Below this many steps a piece, the summary would be about as large as the steps' own columns.
_MIN_STEPS: Final = 8
_PROBED_ROWS: Final = 16_384
# What it costs to read steps and files in place of their summary, and to write a summary: on 2
# cores, 2026-11, 44 ns a step with all columns, 80 us a file; 5 ms and 1 us a piece.
_STEP_US, _FILE_US, _WRITE_US, _PIECE_US = 0.02, 80.0, 5_000.0, 1.0
_WORTH: Final = 2.0
_CACHE_BYTES: Final = 256 << 20


@dataclass(frozen=True)
class Summary:
    """Pieces of the shards that it covers; column `shard` is a shard's place among these.

    `is_distinct` says that no episode has two of them; where it is not said, it may still be so.
    """

    pieces: pa.Table
    shards: tuple[str, ...]
    is_distinct: bool


@dataclass(frozen=True)
class SummaryCoverage:
    """What of a version is in the summary.

    `pieces` are those of its shards, without `shard`; `rest` are the files to be read instead.
    `is_distinct` says that no episode has two of the pieces.
    """

    pieces: pa.Table
    rest: tuple[FileEntry, ...]
    is_distinct: bool


def read_coverage(snapshot: TableSnapshot) -> SummaryCoverage | None:
    """Return what is known of a version's episodes without reading steps; None if nothing is.

    Writes the summary first where so much is missing from it that this soon pays.
    """
    summary = _load(snapshot.storage, snapshot.root)
    rest = _find_uncovered(snapshot, summary)
    if _is_worthwhile(rest, 0 if summary is None else summary.pieces.num_rows):
        # Where it cannot be made, the query itself says why.
        with suppress(QueryError):
            if _has_episodes(snapshot, rest):
                summary = _extend(snapshot, summary, rest)
                rest = _find_uncovered(snapshot, summary)
    if summary is None or len(rest) == len(snapshot.files):
        return None
    pieces = _select_pieces(snapshot, summary)
    is_distinct = summary.is_distinct or (
        pieces.num_rows < summary.pieces.num_rows and _are_distinct(pieces)
    )
    return SummaryCoverage(pieces, rest, is_distinct)


def refresh(snapshot: TableSnapshot) -> bool:
    """Write the summary of all shards that it lacks; whether there was something to write."""
    summary = _load(snapshot.storage, snapshot.root)
    rest = _find_uncovered(snapshot, summary)
    if not rest or not _has_episodes(snapshot, rest):
        return False
    _extend(snapshot, summary, rest)
    return True


def delete_summaries(storage: Storage, root: str) -> None:
    """Delete a table's summaries, here and in this process's memory. Raises: StorageError."""
    storage.delete([f"{root}/{FOLDER}/{name}" for name in storage.names(f"{root}/{FOLDER}")])
    _cache_summary(storage, root, None)


def forget_gone(storage: Storage, root: str) -> None:
    """Delete a table's summaries where one may tell of shards that are gone.

    They are made anew from what is there when that pays. Raises: StorageError.
    """
    names = storage.names(f"{root}/{FOLDER}")
    summary = _load(storage, root) if len(names) == 1 else None
    if summary is None or len(_filter_existing(storage, root, summary.shards)) < len(
        summary.shards
    ):
        delete_summaries(storage, root)


def _find_uncovered(snapshot: TableSnapshot, summary: Summary | None) -> tuple[FileEntry, ...]:
    known = set(summary.shards) if summary else set()
    return tuple(entry for entry in snapshot.files if entry.path not in known)


def _select_pieces(snapshot: TableSnapshot, summary: Summary) -> pa.Table:
    """Return the pieces of the snapshot's own shards."""
    live = {entry.path for entry in snapshot.files}
    places = [place for place, path in enumerate(summary.shards) if path in live]
    pieces = summary.pieces
    if len(places) < len(summary.shards):
        pieces = pieces.filter(pc.is_in(pieces[_SHARD], pa.array(places, pa.int32())))
    return pieces.drop_columns(_SHARD)


def _is_worthwhile(rest: Sequence[FileEntry], num_pieces: int) -> bool:
    reading = sum(entry.num_rows for entry in rest) * _STEP_US + len(rest) * _FILE_US
    return reading > _WORTH * (_WRITE_US + num_pieces * _PIECE_US)


def _has_episodes(snapshot: TableSnapshot, rest: Sequence[FileEntry]) -> bool:
    """Whether episodes are longer than in a one-step log, by the first rows of the largest file."""
    largest = max(rest, key=lambda entry: entry.num_rows)
    source = scan_files(replace(snapshot, files=(largest,)))
    with session() as connection:
        row = execute(
            connection,
            "SELECT count(*) AS steps, count(DISTINCT (episode_id, agent_id)) AS episodes FROM "
            f"(SELECT {schema.EPISODE_ID}, {schema.AGENT_ID} FROM {source} LIMIT {_PROBED_ROWS})",
        ).to_pylist()[0]
    return bool(row["steps"] >= _MIN_STEPS * row["episodes"])


def _extend(snapshot: TableSnapshot, summary: Summary | None, rest: Sequence[FileEntry]) -> Summary:
    """Add the pieces of these files, and write the whole where that is allowed."""
    added = _pieces(replace(snapshot, files=tuple(rest)))
    shards = tuple(entry.path for entry in rest)
    if summary is not None:
        place = pc.add(added[_SHARD], pa.scalar(len(summary.shards), pa.int32()))
        added = pa.concat_tables([summary.pieces, added.set_column(0, _SHARD, place)])
        shards = summary.shards + shards
    extended = Summary(added, shards, _are_distinct(added))
    storage, root = snapshot.storage, snapshot.root
    try:
        name = _write(storage, root, extended)
    except (ReplayLakeError, OSError):
        # A lake that we may only read, or a full disk: this process has it all the same.
        name = _last_name(storage, root)
    _cache_summary(storage, root, (name, extended))
    return extended


def _pieces(snapshot: TableSnapshot) -> pa.Table:
    """Aggregate the steps of a snapshot by shard, episode and agent. Cost: one scan."""
    with session() as connection:
        table = execute(
            connection,
            f"SELECT CAST(file_index AS INTEGER) AS {_SHARD}, {FROM_ROWS} "
            f"FROM {scan_files(snapshot)} GROUP BY file_index, {schema.EPISODE_ID}, "
            f"{schema.AGENT_ID} ORDER BY file_index, first_step",
        )
    return table.combine_chunks()


def _are_distinct(pieces: pa.Table) -> bool:
    keys = pieces.select([schema.EPISODE_ID, schema.AGENT_ID])
    return bool(keys.group_by(keys.column_names).aggregate([]).num_rows == keys.num_rows)


def _write(storage: Storage, root: str, summary: Summary) -> str:
    """Write a summary in the place of older ones, and return its name."""
    older = storage.names(f"{root}/{FOLDER}")
    there = _filter_existing(storage, root, summary.shards)
    places = [place for place, path in enumerate(summary.shards) if path in there]
    pieces = summary.pieces
    if len(places) < len(summary.shards):
        # Of shards that are gone nothing is kept: they may have been purged.
        pieces = pieces.filter(pc.is_in(pieces[_SHARD], pa.array(places, pa.int32())))
        place = pc.index_in(pieces[_SHARD], pa.array(places, pa.int32()))
        pieces = pieces.set_column(0, _SHARD, place)
    shards = [summary.shards[place] for place in places]
    sink = pa.BufferOutputStream()
    about = {"shards": shards, "is_distinct": summary.is_distinct}
    table = pieces.replace_schema_metadata({_METADATA_KEY: json.dumps(about)})
    pq.write_table(table, sink, compression="zstd", compression_level=1)
    data = sink.getvalue().to_pybytes()
    # The last name counts: after those that are there, even if the clock was set back since.
    last = max(older, default="")
    name = f"{new_ulid(after=last)}-{hashlib.sha256(data).hexdigest()}.parquet"
    storage.put(f"{root}/{FOLDER}/{name}", data)
    if not there.issuperset(shards) or len(_filter_existing(storage, root, shards)) < len(shards):
        storage.delete([f"{root}/{FOLDER}/{name}"])
        return _last_name(storage, root)
    storage.delete([f"{root}/{FOLDER}/{old}" for old in older if old < name])
    return name


def _filter_existing(storage: Storage, root: str, shards: Sequence[str]) -> set[str]:
    """Return those of the shards whose files are there."""
    folders = {str(PurePosixPath(path).parent) for path in shards}
    there = {
        str(PurePosixPath(folder, name))
        for folder in folders
        for name in storage.names(f"{root}/{folder}")
    }
    return there.intersection(shards)


def _last_name(storage: Storage, root: str) -> str:
    names = storage.names(f"{root}/{FOLDER}")
    return names[-1] if names else ""


def _load(storage: Storage, root: str) -> Summary | None:
    """Return the newest summary that can be read; from memory where it was read before."""
    names = storage.names(f"{root}/{FOLDER}")
    last = names[-1] if names else ""
    with _lock:
        known = _cache.get((storage.url, root))
        if known is not None and known[0] == last:
            _cache.move_to_end((storage.url, root))
            return known[1]
    for name in reversed(names):
        # Deleted meanwhile, or damaged: it is derived, and the one before may do.
        if (summary := _read(storage.get(f"{root}/{FOLDER}/{name}"), name)) is not None:
            _cache_summary(storage, root, (last, summary))
            return summary
    return None


def _read(data: bytes | None, name: str) -> Summary | None:
    if data is None or hashlib.sha256(data).hexdigest() not in name:
        return None
    with suppress(pa.ArrowException, KeyError):
        pieces = pq.read_table(pa.BufferReader(data))
        if pieces.column_names == [_SHARD, *PIECE_COLUMNS]:  # else another release wrote it
            about = json.loads(pieces.schema.metadata[_METADATA_KEY])
            return Summary(pieces.combine_chunks(), tuple(about["shards"]), about["is_distinct"])
    return None


_lock = threading.Lock()
# By the lake's URL and the table's root: the name of the last file when it was read, and what it
# held, with what could not be written.
_cache: OrderedDict[tuple[str, str], tuple[str, Summary]] = OrderedDict()


def _cache_summary(storage: Storage, root: str, known: tuple[str, Summary] | None) -> None:
    """Keep a table's summary in memory, within a bound for all tables."""
    with _lock:
        _cache.pop((storage.url, root), None)
        if known is not None:
            _cache[storage.url, root] = known
        while _cache and sum(s.pieces.nbytes for _, s in _cache.values()) > _CACHE_BYTES:
            _cache.popitem(last=False)
