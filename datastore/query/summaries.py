"""Summaries: the pieces of episodes in one derived file, so that `episodes` need not read steps.

A piece is the rows of one episode and agent in one shard. Shards never change, so a row of the file
holds for every version that has its shard. A reader that finds many shards not in the file writes
one that has them; so does maintenance. Nothing depends on it: what the file lacks is made from the
steps, and the file may be deleted at any time. Training selects from the steps alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from replaylake.datastore.episodes import schema
from replaylake.datastore.errors import QueryError
from replaylake.datastore.query.connections import session
from replaylake.datastore.query.episode_views import FROM_ROWS, PIECE_COLUMNS
from replaylake.datastore.query.scan import scan_files
from replaylake.datastore.query.statements import execute
from replaylake.datastore.storage.log.state import FileEntry
from replaylake.datastore.storage.storage import Storage
from replaylake.datastore.storage.table.derived_file import DerivedFile
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
# Steps of one query that summarizes: of 100M at once, it took 700 MiB.
_GROUP_STEPS: Final = 4_000_000
_MAX_CHUNKS: Final = 64
_GROUP_PIECES: Final = 131_072
# Columns with at most this many distinct values are dictionary-encoded in memory, 1 byte a value.
_MAX_DISTINCT: Final = 127
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Summary:
    """Pieces of the shards that it covers; column `shard` is a shard's place among these.

    `is_distinct` says that no episode has two of them; where it is not said, it may still be so.
    """

    pieces: pa.Table
    shards: tuple[str, ...]
    is_distinct: bool

    @property
    def num_bytes(self) -> int:
        return int(self.pieces.nbytes)

    def select_shards(self, places: Sequence[int]) -> Summary:
        kept = pa.array(places, pa.int32())
        pieces = self.pieces.filter(pc.is_in(self.pieces[_SHARD], kept))
        place = pc.index_in(pieces[_SHARD], kept)
        shards = tuple(self.shards[place] for place in places)
        return Summary(pieces.set_column(0, _SHARD, place), shards, self.is_distinct)


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
    summary = _FILE.load(snapshot.storage, snapshot.root)
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


def refresh(snapshot: TableSnapshot, on_progress: OnProgress | None = None) -> bool:
    """Write the summary of all shards that it lacks; whether there was something to write.

    on_progress: called with (steps summarized, steps). What was made before it raises is kept.
    """
    summary = _FILE.load(snapshot.storage, snapshot.root)
    rest = _find_uncovered(snapshot, summary)
    if not rest or not _has_episodes(snapshot, rest):
        return False
    _extend(snapshot, summary, rest, on_progress)
    return True


def needs_refresh(snapshot: TableSnapshot) -> bool:
    """Whether a query of a version's episodes would first write the summary of many shards."""
    summary = _FILE.load(snapshot.storage, snapshot.root)
    rest = _find_uncovered(snapshot, summary)
    return _is_worthwhile(rest, 0 if summary is None else summary.pieces.num_rows)


def delete_summaries(storage: Storage, root: str) -> None:
    """Delete a table's summaries, here and in this process's memory. Raises: StorageError."""
    _FILE.delete(storage, root)


def forget_gone(storage: Storage, root: str) -> None:
    """Delete a table's summaries where one may tell of shards that are gone.

    Raises: StorageError.
    """
    _FILE.delete_gone(storage, root)


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


def _extend(
    snapshot: TableSnapshot,
    summary: Summary | None,
    rest: Sequence[FileEntry],
    on_progress: OnProgress | None = None,
) -> Summary:
    """Add the pieces of these files, and write the whole where that is allowed."""
    parts = [] if summary is None else [_expand(summary.pieces)]
    shards = [] if summary is None else list(summary.shards)
    num_left = sum(entry.num_rows for entry in rest)
    try:
        for group in _split(rest):
            added = _pieces(replace(snapshot, files=group))
            place = pc.add(added[_SHARD], pa.scalar(len(shards), pa.int32()))
            parts.append(added.set_column(0, _SHARD, place))
            shards += [entry.path for entry in group]
            num_left -= sum(entry.num_rows for entry in group)
            if on_progress is not None:
                on_progress(snapshot.num_rows - num_left, snapshot.num_rows)
    finally:
        if parts and len(shards) > (0 if summary is None else len(summary.shards)):
            pieces = _compact(_join(parts))
            parts.clear()
            summary = Summary(pieces, tuple(shards), _are_distinct(pieces))
            _FILE.save(snapshot.storage, snapshot.root, summary)
    assert summary is not None  # there is a file
    return summary


def _compact(pieces: pa.Table) -> pa.Table:
    """Return pieces with columns of few distinct values as dictionaries, in half of the memory.

    A million pieces take 52 MiB instead of 106 MiB. Queries see the same types.
    """
    for place, field in enumerate(pieces.schema):
        if field.name == _SHARD or not (
            pa.types.is_integer(field.type) or pa.types.is_string(field.type)
        ):
            continue
        # For most columns, the first rows have too many distinct values.
        head = pieces.column(place).slice(0, _PROBED_ROWS)
        if not 0 < len(head.unique().drop_null()) <= _MAX_DISTINCT:
            continue
        values = pieces.column(place).dictionary_encode().unify_dictionaries()
        if values.num_chunks == 0 or len(values.chunk(0).dictionary) > _MAX_DISTINCT:
            continue
        kind = pa.dictionary(pa.int8(), field.type)
        pieces = pieces.set_column(place, field.with_type(kind), values.cast(kind))
    return pieces


def _expand(pieces: pa.Table) -> pa.Table:
    """Return pieces without dictionaries."""
    for place, field in enumerate(pieces.schema):
        if pa.types.is_dictionary(field.type):
            kind = field.type.value_type
            pieces = pieces.set_column(
                place, field.with_type(kind), pieces.column(place).cast(kind)
            )
    return pieces


def _join(parts: Sequence[pa.Table]) -> pa.Table:
    """Return the rows of all parts, in one piece only where there are too many to go through."""
    joined = pa.concat_tables(parts)
    is_scattered = joined.num_columns and joined.column(0).num_chunks > _MAX_CHUNKS
    return joined.combine_chunks() if is_scattered else joined


def _split(entries: Sequence[FileEntry]) -> Iterator[tuple[FileEntry, ...]]:
    """Yield groups of neighboring files, each summarized in memory that does not grow with all."""
    group: list[FileEntry] = []
    for entry in entries:
        if group and sum(one.num_rows for one in (*group, entry)) > _GROUP_STEPS:
            yield tuple(group)
            group = []
        group.append(entry)
    if group:
        yield tuple(group)


def _pieces(snapshot: TableSnapshot) -> pa.Table:
    """Aggregate the steps of a snapshot by shard, episode and agent. Cost: one scan."""
    with session() as connection:
        table = execute(
            connection,
            f"SELECT CAST(file_index AS INTEGER) AS {_SHARD}, {FROM_ROWS} "
            f"FROM {scan_files(snapshot)} GROUP BY file_index, {schema.EPISODE_ID}, "
            f"{schema.AGENT_ID} ORDER BY file_index, first_step",
        )
    # A copy: otherwise, each column of DuckDB's result would retain the memory of all columns.
    return pa.concat_tables([table, table.slice(0, 0)]).combine_chunks()


def _are_distinct(pieces: pa.Table) -> bool:
    """Whether no episode and agent has two of the pieces; by mere chance it is not said.

    Of a million, 1 in 10^7 times: hashes take 8 bytes a piece, and a table of the keys ten times
    that.
    """
    with session() as connection:
        connection.register("pieces", pieces.select([schema.EPISODE_ID, schema.AGENT_ID]))
        found = execute(
            connection, f"SELECT hash({schema.EPISODE_ID}, {schema.AGENT_ID}) AS key FROM pieces"
        )
    keys = np.sort(found["key"].to_numpy())
    return not bool((keys[1:] == keys[:-1]).any())


def _encode(summary: Summary) -> bytes:
    about = {"shards": summary.shards, "is_distinct": summary.is_distinct}
    # The file has no dictionaries, like those of earlier releases. Small groups, written one after
    # the other and read by one thread, limit the temporary memory.
    schema_of_file = _expand(summary.pieces.slice(0, 0)).schema.with_metadata(
        {_METADATA_KEY: json.dumps(about)}
    )
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, schema_of_file, compression="zstd", compression_level=1) as writer:
        for start in range(0, max(1, summary.pieces.num_rows), _GROUP_PIECES):
            group = _expand(summary.pieces.slice(start, _GROUP_PIECES))
            writer.write_table(group.replace_schema_metadata(schema_of_file.metadata))
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _decode(content: bytes) -> Summary | None:
    with suppress(pa.ArrowException, KeyError):
        pieces = pq.read_table(pa.BufferReader(content), use_threads=False, pre_buffer=False)
        if pieces.column_names == [_SHARD, *PIECE_COLUMNS]:  # else another release wrote it
            about = json.loads(pieces.schema.metadata[_METADATA_KEY])
            return Summary(_compact(pieces), tuple(about["shards"]), about["is_distinct"])
    return None


_FILE: Final = DerivedFile(FOLDER, _encode, _decode, max_cached_bytes=_CACHE_BYTES)
