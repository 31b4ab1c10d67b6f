"""Open episodes: rows of some are still to come, others wait for their turn; on disk if many."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.errors import StorageFailed
from replaylake.datastore.interchange.export.block import Block
from replaylake.datastore.names import new_ulid

_KEPT_BYTES: Final = 128 << 20


@dataclass(frozen=True)
class Piece:
    """Rows start..end of a block, all of one episode and agent."""

    block: Block
    start: int
    end: int


@dataclass
class OpenEpisode:
    """What has come of one episode and agent. `last_row` is where the snapshot has its last one.

    Without it the episode is whole once it has every step from 0 to an end.
    """

    episode_id: str
    agent_id: str
    last_row: int | None
    pieces: list[Piece] = field(default_factory=list)
    num_rows: int = 0
    seen_row: int = -1
    end_step: int = -1

    def add(self, piece: Piece, last_row: int) -> None:
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


class OpenEpisodes:
    """Episodes in the order of their first rows; beyond 128 MiB their rows go to disk.

    `folder` is where: the files there have no name any more once they are written, so that a
    process that is killed leaves none.
    """

    def __init__(self, spec: DatasetSpec, folder: Path, kept_bytes: int = _KEPT_BYTES) -> None:
        self._spec = spec
        self._folder = folder
        self._kept_bytes = kept_bytes
        self._open: dict[tuple[str, str], OpenEpisode] = {}
        self._in_memory: list[Block] = []
        self._num_bytes = 0
        self.num_spilled_bytes = 0

    def of(self, episode_id: str, agent_id: str, last_row: int | None) -> OpenEpisode:
        """Return what is there of an episode, which may be nothing yet."""
        key = (episode_id, agent_id)
        if (found := self._open.get(key)) is None:
            found = self._open[key] = OpenEpisode(episode_id, agent_id, last_row)
        return found

    def take_whole(self) -> Iterator[OpenEpisode]:
        """Take those that are whole, as far as none before them is not."""
        while self._open:
            key = next(iter(self._open))
            if not self._open[key].is_whole:
                return
            yield self._open.pop(key)

    def take_all(self) -> Iterator[OpenEpisode]:
        """Take what is left."""
        while self._open:
            yield self._open.pop(next(iter(self._open)))

    def keep(self, block: Block, episodes: Iterable[OpenEpisode]) -> None:
        """Copy what these episodes have of a block where they still wait, so that it can go."""
        waiting = [e for e in episodes if (e.episode_id, e.agent_id) in self._open]
        if not waiting:
            return
        spans = [(e.pieces[-1].start, e.pieces[-1].end) for e in waiting]
        rows = np.concatenate([np.arange(start, end) for start, end in spans])
        kept = Block(block.table.take(pa.array(rows)), self._spec)
        start = 0
        for episode, (first, end) in zip(waiting, spans, strict=True):
            episode.pieces[-1] = Piece(kept, start, start + end - first)
            start += end - first
        self._in_memory.append(kept)
        self._num_bytes += kept.table.nbytes
        if self._num_bytes > self._kept_bytes:
            self._make_room()

    def _make_room(self) -> None:
        """Let go what nobody waits for any more; if that is little, write the rest to disk."""
        needed = {id(piece.block) for e in self._open.values() for piece in e.pieces}
        self._in_memory = [block for block in self._in_memory if id(block) in needed]
        self._num_bytes = sum(block.table.nbytes for block in self._in_memory)
        if self._num_bytes <= self._kept_bytes // 2:
            return
        path = self._folder / new_ulid()
        try:
            self._write(path)
        except OSError as error:
            raise StorageFailed(
                f"{path}: {error.strerror or error}, expected room for rows of episodes that are "
                "not whole yet. Make room beside the target, or export to another disk."
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
                block.put_away(partial(handle.read, start, len(data)))
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


def merged(pieces: list[Piece], spec: DatasetSpec) -> Block:
    """Return all rows of one episode in the order of their steps."""
    table = pa.concat_tables(
        piece.block.rows(piece.start, piece.end) for piece in pieces
    ).unify_dictionaries()
    steps = table.column(schema.STEP).to_numpy()
    if (np.diff(steps) < 0).any():
        table = table.take(pa.array(np.argsort(steps, kind="stable")))
    return Block(table.combine_chunks(), spec)
