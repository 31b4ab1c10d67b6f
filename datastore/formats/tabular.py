"""Tabular readings: tables of one row a step, block by block, into episodes.

Small sources are one block. In larger ones the rows of episodes that go on in later blocks are
carried along, so memory holds one block and the open episodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episode import Episode
from replaylake.datastore.errors import SourceInvalid
from replaylake.datastore.formats.arrays import flags, names_of, stored
from replaylake.datastore.formats.fields import Layout, lay_out
from replaylake.datastore.formats.format import ReadOptions, Rejected
from replaylake.datastore.formats.grouping import Census, Groups, group
from replaylake.datastore.formats.steps import decode_steps
from replaylake.datastore.formats.tables import ORIGIN, Kept, Tables, survey, uniform_chunks
from replaylake.datastore.spaces import Array

_BLOCK_BYTES: Final = 16 << 20


class TabularReading:
    """A columnar source as episodes. Raises: SourceInvalid on opening and on iteration."""

    def __init__(
        self,
        tables: Tables,
        options: ReadOptions,
        where: str = "source",
        *,
        block_bytes: int = _BLOCK_BYTES,
    ) -> None:
        self._tables = tables if isinstance(tables, Kept) else Kept(tables)
        self._options = options
        self._block_bytes = block_bytes
        self._seen = survey(self._tables)
        if self._seen.num_rows == 0:
            raise SourceInvalid(f"{where}: found no rows, expected at least one step.")
        layout = lay_out(self._seen.schema.names, options.mapping, where)
        self._refuse_partial(layout)
        layout = self._without_lone_agent(layout)
        kinds = {n: stored(pa.array([], self._seen.schema.field(n).type), n) for n in layout.extras}
        self._dropped = [name for name, kind in kinds.items() if kind is None]
        kept = {n: ours for n, ours in layout.extras.items() if kinds[n] is not None}
        self._layout = replace(layout, extras=kept)
        self._extras = {kept[n]: kind.type for n, kind in kinds.items() if kind is not None}
        if not (self._by_id or self._layout.done or self._layout.one("terminated")):
            raise SourceInvalid(
                f"{where}: found no column that tells episodes apart, expected an episode id, or "
                "terminated flags in rows that are in order. Name it with --map episode_id=COLUMN."
            )
        self._head_widths: set[int] = set()
        self._census = Census()
        self._last_rows: dict[str, int] | None = None

    @property
    def renames(self) -> Mapping[str, str]:
        return {n: ours for n, ours in self._layout.renames.items() if n in self._layout.extras}

    @property
    def extras(self) -> Mapping[str, pa.DataType]:
        return self._extras

    @property
    def num_actions(self) -> int | None:
        return next(iter(self._head_widths)) if len(self._head_widths) == 1 else None

    @property
    def notes(self) -> Sequence[str]:
        notes = []
        if self._dropped:
            notes.append(f"columns that hold nothing, left out: {', '.join(self._dropped)}")
        layout, limit = self._layout, self._options.time_limit
        if layout.done and layout.one("truncated") is None:
            notes.append(
                f"{layout.done} used as terminated: the log has no truncated flags, so a time "
                "limit in it counts as a termination unless --time-limit names it"
            )
        elif layout.done:
            notes.append(f"terminated is {layout.done} and not {layout.one('truncated')}")
        if self._census.num_open:
            notes.append(
                f"{self._census.num_open} episodes have no end in the log: kept as open, neither "
                "terminated nor truncated"
            )
        if self._census.num_longer:
            notes.append(
                f"{self._census.num_longer} episodes are longer than the time limit {limit}"
            )
        return [*notes, *self._likely_limit()]

    def __iter__(self) -> Iterator[Episode | Rejected]:
        self._census, self._head_widths = Census(), set()
        yield from self._by_ids() if self._by_id else self._by_flags()

    @property
    def _by_id(self) -> bool:
        return self._layout.one("episode_id") is not None

    def _by_ids(self) -> Iterator[Episode | Rejected]:
        name = str(self._layout.one("episode_id"))
        in_memory = self._tables.fill()
        if not in_memory and self._last_rows is None:
            self._last_rows = self._find_last_rows(name)
        carried: pa.Table | None = None
        for block in self._blocks(whole=in_memory):
            table = block if carried is None else pa.concat_tables([carried, block])
            last = block.column(ORIGIN)[-1].as_py()
            if self._last_rows is not None:
                is_whole = self._is_whole(table, name, last)
                carried = table.filter(pa.array(~is_whole))
                table = table.filter(pa.array(is_whole))
            if table.num_rows:
                yield from self._episodes(table, self._groups(table, name))

    def _by_flags(self) -> Iterator[Episode | Rejected]:
        if self._layout.one("agent_id") is not None:
            raise SourceInvalid(
                f"column {self._layout.one('agent_id')!r}: found several agents and no episode id, "
                "expected one. Name it with --map episode_id=COLUMN."
            )
        carried: pa.Table | None = None
        num_before = 0
        blocks = self._blocks(whole=self._tables.fill())
        block = next(blocks, None)
        while block is not None:
            following = next(blocks, None)
            table = block if carried is None else pa.concat_tables([carried, block])
            ended = self._ended(table)
            # What comes after the last end goes on in the next block, if there is one.
            ends = np.flatnonzero(ended)
            num_whole = table.num_rows
            if following is not None:
                num_whole = int(ends[-1]) + 1 if len(ends) else 0
            carried, table = table.slice(num_whole), table.slice(0, num_whole)
            if num_whole:
                codes = np.cumsum(np.append(0, ended[: num_whole - 1]))
                ids = [str(num_before + i) for i in range(int(codes[-1]) + 1)]
                num_before += len(ids)
                yield from self._episodes(table, Groups(codes, ids))
            block = following

    def _episodes(self, table: pa.Table, groups: Groups) -> Iterator[Episode | Rejected]:
        steps = decode_steps(table, self._layout, self._seen)
        self._head_widths |= steps.head_widths
        yield from group(steps, groups, self._seen, self._options.time_limit, self._census)

    def _ended(self, table: pa.Table) -> Array:
        names = [self._layout.one("terminated"), self._layout.one("truncated"), self._layout.done]
        ended = np.zeros(table.num_rows, bool)
        for name in names:
            if name is not None:
                # What is no flag ends nothing here; decoding marks its row.
                ended |= flags(_joined(table, name)).values
        return ended

    def _groups(self, table: pa.Table, name: str) -> Groups:
        ids = names_of(_joined(table, name), name).fill_null("null").dictionary_encode()
        codes = np.asarray(ids.indices).astype(np.int64)
        labels = ids.dictionary.to_pylist()
        if (agent := self._layout.one("agent_id")) is None:
            return Groups(codes, labels)
        agents = names_of(_joined(table, agent), agent).fill_null("null").dictionary_encode()
        pairs = codes * len(agents.dictionary) + np.asarray(agents.indices)
        distinct, codes = np.unique(pairs, return_inverse=True)
        episode, one = np.divmod(distinct, len(agents.dictionary))
        who = agents.dictionary.to_pylist()
        return Groups(codes, [labels[i] for i in episode], [who[i] for i in one])

    def _blocks(self, *, whole: bool) -> Iterator[pa.Table]:
        held: list[pa.Table] = []
        num_bytes = 0
        for table in uniform_chunks(self._tables, self._seen):
            held.append(table)
            num_bytes += table.nbytes
            if num_bytes >= self._block_bytes and not whole:
                yield pa.concat_tables(held)
                held, num_bytes = [], 0
        if any(table.num_rows for table in held):
            yield pa.concat_tables(held)

    def _find_last_rows(self, name: str) -> dict[str, int]:
        """Return each episode's last row, as a number in the whole source."""
        last_rows: dict[str, int] = {}
        for table in uniform_chunks(self._tables, self._seen, [name]):
            ids = names_of(_joined(table, name), name).fill_null("null").dictionary_encode()
            last = np.zeros(len(ids.dictionary), np.int64)
            np.maximum.at(last, np.asarray(ids.indices), np.asarray(table.column(ORIGIN)))
            last_rows.update(zip(ids.dictionary.to_pylist(), last.tolist(), strict=True))
        return last_rows

    def _is_whole(self, table: pa.Table, name: str, last: int) -> Array:
        ids = names_of(_joined(table, name), name).fill_null("null").dictionary_encode()
        rows = self._last_rows or {}
        known = np.asarray([rows[label] <= last for label in ids.dictionary.to_pylist()])
        return np.asarray(known[np.asarray(ids.indices)])

    def _refuse_partial(self, layout: Layout) -> None:
        for name in layout.columns():
            if (file := self._seen.incomplete.get(name)) is not None:
                raise SourceInvalid(
                    f"{file.name}: found no column {name!r}, expected it as in the other files. "
                    "Ingest files of different columns one kind at a time."
                )

    def _without_lone_agent(self, layout: Layout) -> Layout:
        """RLlib numbers the one agent of a single-agent log too; it stays as a further column."""
        name = layout.one("agent_id")
        if name != "agent_index" or "agent_id" in self._options.mapping:
            return layout
        found: set[Any] = set()
        for table in uniform_chunks(self._tables, self._seen, [name]):
            found |= set(pc.unique(table.column(name)).to_pylist())
            if len(found) > 1:
                return layout
        fields = {ours: theirs for ours, theirs in layout.fields.items() if ours != "agent_id"}
        return replace(layout, fields=fields, extras={**layout.extras, name: name})

    def _likely_limit(self) -> list[str]:
        lengths = self._census.terminated_lengths or {}
        longest = max(lengths, default=0)
        count = lengths.get(longest, 0)
        # Two of ten ends at the greatest length are rare by chance. One-step logs have no limit.
        if longest < 2 or count < 2 or count < 0.2 * sum(lengths.values()):
            return []
        return [
            f"{count} of {sum(lengths.values())} terminated episodes have the greatest length, "
            f"{longest}: if that is a time limit, they were truncated; ingest into a new dataset "
            f"with --time-limit {longest}"
        ]


def _joined(table: pa.Table, name: str) -> pa.Array:
    return table.column(name).combine_chunks()
