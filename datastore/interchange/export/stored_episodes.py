"""Stored episodes: the rows of a snapshot put together again, one episode after the other.

They come in the order of their first rows. An episode whose steps lie in several shards is held
until the last of them was read; those that came after it wait. Memory holds a batch and 128 MiB of
what is held, the rest of which is on disk.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.message_media import (
    MESSAGE_MEDIA,
    is_media_column,
    restore_media,
)
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import StorageError
from replaylake.datastore.interchange.export.export_selection import ExportSelection
from replaylake.datastore.interchange.export.row_block import ROW, SELECTED, Mask, RowBlock
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.names import new_ulid
from replaylake.datastore.storage.arrow_values import combine_chunks, numbers
from replaylake.datastore.storage.table.shard import row_group_batches
from replaylake.datastore.storage.table.table_schema import conform
from replaylake.datastore.storage.table.table_snapshot import TableSnapshot

_BATCH_BYTES: Final = 16 << 20
_MAX_ROWS: Final = 65_536
_KEY: Final = (schema.EPISODE_ID, schema.AGENT_ID)
_NAMES: Final = (*_KEY, schema.POLICY, schema.SOURCE_EPISODE_ID)

# Called with the rows read so far.
OnRows = Callable[[int], None]
_MAX_MEMORY_BYTES: Final = 128 << 20


def iter_stored_episodes(
    snapshot: Snapshot,
    selection: ExportSelection,
    scratch: Path,
    on_rows: OnRows | None = None,
    *,
    batch_bytes: int = _BATCH_BYTES,
) -> Iterator[Episode]:
    """Yield a snapshot's episodes with all that is known of them, in the order of their first rows.

    An episode whose steps are not consecutive comes as several, each with its first_step. Their
    episode_id is the store's. Media are in their messages, as they were written.

    Args:
        snapshot: where from.
        selection: which episodes, and which of their steps.
        scratch: a folder for what memory cannot hold.
        on_rows: called after each batch.
        batch_bytes: decoded at a time, about.

    Cost: the ids and flags of all rows are read once, then all columns once.
    Raises: ShardCorruptError, before any row of a shard whose sha256 is another, and for media
    whose bytes are lost; StorageError.
    """
    media = _EpisodeMedia(snapshot)
    last_rows = _last_rows(snapshot.table, selection)
    pending = PendingEpisodes(snapshot.spec, scratch)
    num_read = 0
    for table in _batches(snapshot.table, batch_bytes):
        rows = np.arange(num_read, num_read + table.num_rows)
        num_read += table.num_rows
        block, spans = _group_rows(table, rows, selection, snapshot)
        touched = []
        for span in spans:
            key = (span.episode_id, span.agent_id)
            touched.append(pending.get_or_add(*key, last_rows.get(key)))
            touched[-1].add(StoredPiece(block, span.start, span.end), span.last_row)
        for episode in pending.take_whole():
            yield from map(media.restore, _assemble(episode, snapshot))
        pending.copy_pending(block, touched)
        if on_rows is not None:
            on_rows(num_read)
    for episode in pending.take_all():
        yield from map(media.restore, _assemble(episode, snapshot))


class _EpisodeMedia:
    """Puts the media of messages back into them.

    An agent's messages may refer to bytes that another agent's step has, or one that was not
    selected: then those of the episode are read.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._has_media = any(is_media_column(*one) for one in snapshot.spec.extras.items())
        self._loaded: tuple[str, dict[str, bytes]] = ("", {})

    def restore(self, episode: Episode) -> Episode:
        """Return an episode whose messages have their media."""
        if not self._has_media or MESSAGE_MEDIA not in episode.extras:
            return episode
        load, where = partial(self._load, episode.episode_id), f"episode {episode.episode_id}"
        return replace(episode, extras=restore_media(episode.extras, load, where))

    def _load(self, episode_id: str) -> dict[str, bytes]:
        if self._loaded[0] != episode_id:
            rows = self._snapshot.sql(
                f"SELECT m.sha256 AS digest, m.bytes AS bytes FROM (SELECT unnest({MESSAGE_MEDIA}) "
                f"AS m FROM steps WHERE {schema.EPISODE_ID} = $id) WHERE m.bytes IS NOT NULL",
                {"id": episode_id},
            )
            pairs = zip(rows["digest"].to_pylist(), rows["bytes"].to_pylist(), strict=True)
            # SQL does not verify what it reads.
            known = {one: data for one, data in pairs if hashlib.sha256(data).hexdigest() == one}
            self._loaded = (episode_id, known)
        return self._loaded[1]


def find_agents(snapshot: Snapshot, selection: ExportSelection) -> dict[str, set[str]]:
    """Return the selected agents of the episodes that several agents share, by episode_id."""
    both = f"{schema.EPISODE_ID}, {schema.AGENT_ID}"
    rows = snapshot.sql(
        f"SELECT DISTINCT {both} FROM steps WHERE {schema.EPISODE_ID} IN (SELECT "
        f"{schema.EPISODE_ID} FROM steps GROUP BY 1 HAVING count(DISTINCT {schema.AGENT_ID}) > 1)"
    )
    labels = [(str(row[schema.EPISODE_ID]), str(row[schema.AGENT_ID])) for row in rows.to_pylist()]
    selected = selection.find_episodes(labels)
    agents: dict[str, set[str]] = {}
    for number, (episode_id, agent_id) in enumerate(labels):
        if selected is None or selected[number]:
            agents.setdefault(episode_id, set()).add(agent_id)
    return agents


def gather_agents(
    episodes: Iterable[Episode], agents: Mapping[str, set[str]]
) -> Iterator[list[Episode]]:
    """Yield the episodes of all agents of one episode_id together, once the last of them came.

    agents: from `find_agents`. Logs may interleave the steps of several episodes. Memory: those
    episodes of which an agent is missing.
    """
    pending: dict[str, list[Episode]] = {}
    missing: dict[str, set[str]] = {}
    for (episode_id, agent_id), pieces in groupby(episodes, lambda e: (e.episode_id, e.agent_id)):
        pending.setdefault(episode_id, []).extend(pieces)
        left = missing.setdefault(episode_id, {*agents.get(episode_id, ())})
        left.discard(agent_id)
        if not left:
            del missing[episode_id]
            yield pending.pop(episode_id)
    yield from pending.values()


@dataclass(frozen=True)
class _RowSpan:
    """Rows start..end of a block, of one episode and agent."""

    episode_id: str
    agent_id: str
    start: int
    end: int
    last_row: int


def _assemble(episode: PendingEpisode, snapshot: Snapshot) -> Iterator[Episode]:
    """Yield the runs of consecutive selected steps: nearly always one."""
    pieces = episode.pieces
    if len(pieces) == 1:
        block, start, end = pieces[0].block, pieces[0].start, pieces[0].end
    else:
        block = merge_pieces(pieces, snapshot.spec)
        start, end = 0, len(block)
    cuts = np.flatnonzero(block.breaks[start + 1 : end]) + start + 1
    for first, last in zip([start, *cuts.tolist()], [*cuts.tolist(), end], strict=True):
        if block.selected[first]:
            yield block.episode(episode.episode_id, episode.agent_id, first, last)


def _group_rows(
    table: pa.Table, rows: Array, selection: ExportSelection, snapshot: Snapshot
) -> tuple[RowBlock, list[_RowSpan]]:
    """Bring the rows of each episode together, in the order of their steps."""
    mask = selection.find_steps(rows)
    table = table.append_column(ROW, pa.array(rows)).append_column(SELECTED, pa.array(mask))
    codes, labels = _codes(table)
    if (episodes := selection.find_episodes(labels)) is not None:
        of_wanted = episodes[codes]
        table, codes = table.filter(pa.array(of_wanted)), codes[of_wanted]
    steps = numbers(combine_chunks(table.column(schema.STEP)))
    jumps = np.diff(codes)
    if ((jumps < 0) | ((jumps == 0) & (np.diff(steps) < 0))).any():
        order = np.lexsort((steps, codes))
        table, codes = table.take(pa.array(order)), codes[order]
    numbered = numbers(combine_chunks(table.column(ROW)))
    starts = np.flatnonzero(np.diff(codes, prepend=-1))
    ends = np.append(starts[1:], len(codes))[: len(starts)]
    spans = []
    if len(starts):
        lasts = np.maximum.reduceat(numbered, starts)
        firsts = np.minimum.reduceat(numbered, starts)
        for g in np.argsort(firsts).tolist():
            start = int(starts[g])
            names = labels[int(codes[start])]
            spans.append(_RowSpan(*names, start, int(ends[g]), int(lasts[g])))
    return RowBlock(table, snapshot.spec), spans


def _last_rows(table: TableSnapshot, selection: ExportSelection) -> dict[tuple[str, str], int]:
    """Return the last row of each episode that no single shard has from step 0 to its end."""
    names = [*_KEY, schema.STEP, schema.TERMINATED, schema.TRUNCATED]
    last: dict[tuple[str, str], int] = {}
    start = 0
    for rows in table.batches(names):
        if not rows.num_rows:
            continue
        codes, labels = _codes(rows)
        num = len(labels)
        steps = numbers(rows.column(schema.STEP)).astype(np.int64)
        ended: Mask = numbers(rows.column(schema.TERMINATED)) | numbers(
            rows.column(schema.TRUNCATED)
        )
        last_rows = np.zeros(num, np.int64)
        np.maximum.at(last_rows, codes, np.arange(len(codes)))
        end_steps = np.full(num, -1)
        np.maximum.at(end_steps, codes[ended], steps[ended])
        counts = np.bincount(codes, minlength=num)
        episodes = selection.find_episodes(labels)
        for code in np.flatnonzero(end_steps + 1 != counts).tolist():
            if episodes is None or episodes[code]:
                last[labels[code]] = start + int(last_rows[code])
        start += rows.num_rows
    return last


def _codes(rows: pa.Table) -> tuple[Array, list[tuple[str, str]]]:
    """Number the episodes and agents of some rows; return the numbers [n] and who they are."""
    parts = []
    for name in _KEY:
        column = combine_chunks(rows.column(name))
        coded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
        parts.append((coded.indices.to_numpy().astype(np.int64), coded.dictionary.to_pylist()))
    (episodes, ids), (agents, who) = parts
    # Numbered by first row, so that rows which are in order stay as they are.
    pairs = episodes * max(1, len(who)) + agents
    distinct, first, inverse = np.unique(pairs, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    episode, agent = np.divmod(distinct[order], max(1, len(who)))
    labels = [(ids[e], who[a]) for e, a in zip(episode.tolist(), agent.tolist(), strict=True)]
    return rank[inverse], labels


def _batches(table: TableSnapshot, batch_bytes: int) -> Iterator[pa.Table]:
    """Read all columns, a part of a row group at a time, names as dictionaries."""
    fields = pa.schema(
        [f.with_type(schema.NAMES_TYPE) if f.name in _NAMES else f for f in table.schema]
    )
    for path in table.iter_verified():
        metadata = pq.read_metadata(path)
        for group in range(metadata.num_row_groups):
            info = metadata.row_group(group)
            width = max(1, info.total_byte_size // max(1, info.num_rows))
            num_rows = int(np.clip(batch_bytes // width, 1, _MAX_ROWS))
            batches = row_group_batches(path, group, fields.names, num_rows, as_dictionaries=_NAMES)
            for batch in batches:
                yield _combine_chunks(conform(batch, fields))


def _combine_chunks(table: pa.Table) -> pa.Table:
    """Join the chunks of each column, whose dictionaries may differ."""
    if all(column.num_chunks == 1 for column in table.columns):
        return table
    return table.unify_dictionaries().combine_chunks()


@dataclass(frozen=True)
class StoredPiece:
    """Rows start..end of a block, all of one episode and agent."""

    block: RowBlock
    start: int
    end: int


@dataclass
class PendingEpisode:
    """What has come of one episode and agent. `last_row` is where the snapshot has its last one.

    Without it the episode is whole once it has every step from 0 to an end.
    """

    episode_id: str
    agent_id: str
    last_row: int | None
    pieces: list[StoredPiece] = field(default_factory=list)
    num_rows: int = 0
    seen_row: int = -1
    end_step: int = -1

    def add(self, piece: StoredPiece, last_row: int) -> None:
        """Take further rows, of which the last is number `last_row` of the snapshot."""
        self.pieces.append(piece)
        self.num_rows += piece.end - piece.start
        self.seen_row = max(self.seen_row, last_row)
        last = piece.end - 1
        if piece.block.ended[last]:
            self.end_step = max(self.end_step, int(piece.block.steps[last]))

    @property
    def is_whole(self) -> bool:
        """Whether no row is missing any more."""
        if self.last_row is not None:
            return self.seen_row >= self.last_row
        return self.end_step + 1 == self.num_rows


class PendingEpisodes:
    """Episodes in the order of their first rows; beyond 128 MiB their rows go to disk.

    `folder` is where: the files there have no name any more once they are written, so that a
    process that is killed leaves none.
    """

    def __init__(
        self, spec: DatasetSpec, folder: Path, kept_bytes: int = _MAX_MEMORY_BYTES
    ) -> None:
        self._spec = spec
        self._folder = folder
        self._memory_bytes = kept_bytes
        self._open: dict[tuple[str, str], PendingEpisode] = {}
        self._in_memory: list[RowBlock] = []
        self._num_bytes = 0
        self.num_spilled_bytes = 0

    def get_or_add(self, episode_id: str, agent_id: str, last_row: int | None) -> PendingEpisode:
        """Return what is there of an episode, which may be nothing yet."""
        key = (episode_id, agent_id)
        if (episode := self._open.get(key)) is None:
            episode = self._open[key] = PendingEpisode(episode_id, agent_id, last_row)
        return episode

    def take_whole(self) -> Iterator[PendingEpisode]:
        """Take those that are whole, as far as none before them is not."""
        while self._open:
            key = next(iter(self._open))
            if not self._open[key].is_whole:
                return
            yield self._open.pop(key)

    def take_all(self) -> Iterator[PendingEpisode]:
        """Take what is left."""
        while self._open:
            yield self._open.pop(next(iter(self._open)))

    def copy_pending(self, block: RowBlock, episodes: Iterable[PendingEpisode]) -> None:
        """Copy what these episodes have of a block where they still wait, so that it can go."""
        waiting = [e for e in episodes if (e.episode_id, e.agent_id) in self._open]
        if not waiting:
            return
        spans = [(e.pieces[-1].start, e.pieces[-1].end) for e in waiting]
        rows = np.concatenate([np.arange(start, end) for start, end in spans])
        copy = RowBlock(block.table.take(pa.array(rows)), self._spec)
        start = 0
        for episode, (first, end) in zip(waiting, spans, strict=True):
            episode.pieces[-1] = StoredPiece(copy, start, start + end - first)
            start += end - first
        self._in_memory.append(copy)
        self._num_bytes += copy.table.nbytes
        if self._num_bytes > self._memory_bytes:
            self._make_room()

    def _make_room(self) -> None:
        """Let go what nobody waits for any more; if that is little, write the rest to disk."""
        needed = {id(piece.block) for e in self._open.values() for piece in e.pieces}
        self._in_memory = [block for block in self._in_memory if id(block) in needed]
        self._num_bytes = sum(block.table.nbytes for block in self._in_memory)
        if self._num_bytes <= self._memory_bytes // 2:
            return
        path = self._folder / new_ulid()
        try:
            self._write(path)
        except OSError as error:
            raise StorageError(
                f"{path}: {error.strerror or error}, expected space for rows of incomplete "
                "episodes. Free disk space beside the target, or export to another disk."
            ) from error
        self._in_memory, self._num_bytes = [], 0

    def _write(self, path: Path) -> None:
        """Put the blocks away in a file, which loses its name at once."""
        with path.open("x+b") as file:
            path.unlink()
            handle = _Handle(os.dup(file.fileno()))
            start = 0
            for block in self._in_memory:
                sink = pa.BufferOutputStream()
                # A stream each: dictionaries differ from block to block.
                with pa.ipc.new_stream(sink, block.table.schema) as writer:
                    writer.write_table(block.table)
                data = memoryview(sink.getvalue())
                file.write(data)
                block.spill(partial(handle.read, start, len(data)))
                start += len(data)
            file.flush()
            self.num_spilled_bytes += start


class _Handle:
    """A file without a name, which the system removes once nobody reads from it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def read(self, start: int, num_bytes: int) -> pa.Table:
        # Not mapped: its pages would count as this process's memory.
        data = os.pread(self._descriptor, num_bytes, start)
        return pa.ipc.open_stream(data).read_all()


def merge_pieces(pieces: list[StoredPiece], spec: DatasetSpec) -> RowBlock:
    """Return all rows of one episode in the order of their steps."""
    table = pa.concat_tables(
        piece.block.rows(piece.start, piece.end) for piece in pieces
    ).unify_dictionaries()
    steps = table.column(schema.STEP).to_numpy()
    if (np.diff(steps) < 0).any():
        table = table.take(pa.array(np.argsort(steps, kind="stable")))
    return RowBlock(table.combine_chunks(), spec)
