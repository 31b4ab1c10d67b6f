"""Stretches: rows that lie together in a shard and are consecutive steps of one episode and agent.

Only ids, step numbers and flags are read to find them. Work that follows is one for each stretch,
not for each row.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from replaylake.datastore.episodes import schema
from replaylake.datastore.replay.arrays import RowGroup, complete_columns
from replaylake.datastore.replay.packing.row_keys import pair_digests
from replaylake.datastore.storage.arrow_values import numbers, row_numbers, scalar
from replaylake.datastore.storage.table.shard import row_group_batches, smallest_leaf
from replaylake.datastore.storage.table.table import TableSnapshot

# Flags of a stretch: how its last step ended, and whether its run ends with it.
TERMINATED: Final = 1
TRUNCATED: Final = 2
FINAL: Final = 4
LAST: Final = 8

_KEYS: Final = (
    schema.EPISODE_ID,
    schema.AGENT_ID,
    schema.STEP,
    schema.TERMINATED,
    schema.TRUNCATED,
)
# Rows looked at together: their columns stay in the processor's cache. A stretch ends with them.
_ROWS_AT_ONCE: Final = 1 << 14


@dataclass(frozen=True)
class RowRanges:
    """Stretches in the order of their rows; arrays [num_stretches].

    rows: first row among all of the snapshot, int64. lengths, first_steps: int32. flags: uint8.
    pairs: number of the episode and agent, int64; they are numbered in the order in which episodes,
    then agents, first appear.
    """

    rows: NDArray[np.int64]
    lengths: NDArray[np.int32]
    first_steps: NDArray[np.int32]
    flags: NDArray[np.uint8]
    pairs: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, where: NDArray[np.int64] | NDArray[np.bool_]) -> RowRanges:
        """Return some of them, or all in another order."""
        return RowRanges(*(getattr(self, field.name)[where] for field in fields(self)))


@dataclass(frozen=True)
class PairNames:
    """What pairs stand for: a pair is the episode's number * num_agents + the agent's."""

    episodes: pa.LargeStringArray
    agents: pa.LargeStringArray

    def is_selected(self, pairs: NDArray[np.int64], selected: pa.Table) -> NDArray[np.bool_]:
        """Return which pairs [N] are among the episode_id and agent_id of a table: bool [N]."""
        unknown = scalar(-1, np.int32)
        places = [
            pc.index_in(selected[column].cast(pa.large_string()), value_set=known)
            for column, known in (
                (schema.EPISODE_ID, self.episodes),
                (schema.AGENT_ID, self.agents),
            )
        ]
        episodes, agents = (
            numbers(pc.fill_null(place, unknown)).astype(np.int64) for place in places
        )
        is_known = (episodes >= 0) & (agents >= 0)
        codes = (episodes * len(self.agents) + agents)[is_known]
        return np.isin(pairs, codes)

    def digests(self, pairs: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return what pairs [N] have in row keys: uint64 [N, 2]; see row_keys.py."""
        episodes, agents = np.divmod(pairs, max(1, len(self.agents)))
        return pair_digests(
            self.episodes.take(row_numbers(episodes)), self.agents.take(row_numbers(agents))
        )


@dataclass(frozen=True)
class _PartRanges:
    """The stretches of some rows; episodes and agents as dictionaries, one entry a stretch."""

    rows: NDArray[np.int64]
    lengths: NDArray[np.int32]
    first_steps: NDArray[np.int32]
    flags: NDArray[np.uint8]
    episodes: pa.DictionaryArray
    agents: pa.DictionaryArray


class RowRangeReader:
    """Collects the stretches of row groups, which come in any order."""

    def __init__(self, snapshot: TableSnapshot) -> None:
        self._fields = snapshot.select_fields(_KEYS)
        self._parts: dict[int, list[_PartRanges]] = {}

    def read(self, group: RowGroup) -> None:
        """Find the stretches of a row group; several threads may. Raises: ShardCorruptError."""
        leaf, num_null = smallest_leaf(group.path, group.number, schema.FINAL_OBSERVATION)
        # Where all rows have one, or none has, their values need not be read for it.
        is_mixed = num_null not in (0, group.num_rows)
        batches = row_group_batches(
            group.path,
            group.number,
            [*_KEYS, leaf] if is_mixed else _KEYS,
            _ROWS_AT_ONCE,
            as_dictionaries=[schema.EPISODE_ID],
        )
        parts = []
        start = group.start
        for rows in batches:
            has_final = (
                numbers(pc.is_valid(rows[schema.FINAL_OBSERVATION]))
                if is_mixed
                else np.full(rows.num_rows, num_null == 0)
            )
            parts.append(_part(complete_columns(rows, self._fields), has_final, start))
            start += rows.num_rows
        self._parts[group.start] = parts

    def row_ranges(self) -> tuple[RowRanges, PairNames] | None:
        """Return all that were read, and forget them; None where there are no rows."""
        parts = [part for start in sorted(self._parts) for part in self._parts[start]]
        self._parts.clear()
        if not parts:
            return None
        episodes, episode_names = _number_names([part.episodes for part in parts])
        agents, agent_names = _number_names([part.agents for part in parts])
        stretches = RowRanges(
            rows=np.concatenate([part.rows for part in parts]),
            lengths=np.concatenate([part.lengths for part in parts]),
            first_steps=np.concatenate([part.first_steps for part in parts]),
            flags=np.concatenate([part.flags for part in parts]),
            pairs=episodes * len(agent_names) + agents,
        )
        return stretches, PairNames(episode_names, agent_names)


def _part(rows: pa.Table, has_final: NDArray[np.bool_], start: int) -> _PartRanges:
    episodes, agents = (_combine(rows[name]) for name in (schema.EPISODE_ID, schema.AGENT_ID))
    steps = numbers(rows[schema.STEP])
    terminated = numbers(rows[schema.TERMINATED])
    truncated = numbers(rows[schema.TRUNCATED])
    breaks = terminated[:-1] | truncated[:-1] | has_final[:-1]
    breaks |= np.diff(steps) != 1
    for names in (episodes, agents):
        breaks |= np.diff(numbers(names.indices)) != 0
    lasts = np.append(np.flatnonzero(breaks), len(steps) - 1)
    firsts = np.concatenate(([0], lasts[:-1] + 1))
    flags = terminated[lasts] * TERMINATED + truncated[lasts] * TRUNCATED + has_final[lasts] * FINAL
    return _PartRanges(
        rows=start + firsts,
        lengths=(lasts - firsts + 1).astype(np.int32),
        first_steps=steps[firsts],
        flags=flags.astype(np.uint8),
        episodes=_take_names(episodes, firsts),
        agents=_take_names(agents, firsts),
    )


def _combine(column: pa.ChunkedArray) -> pa.DictionaryArray:
    if column.num_chunks == 1:
        return column.chunk(0)
    return column.unify_dictionaries().combine_chunks()


def _take_names(names: pa.DictionaryArray, where: NDArray[np.int64]) -> pa.DictionaryArray:
    """Return the names of some rows with a dictionary of those alone, in order of appearance."""
    indices = names.indices.take(row_numbers(where))
    return names.dictionary.take(indices).dictionary_encode()


def _number_names(
    parts: list[pa.DictionaryArray],
) -> tuple[NDArray[np.int64], pa.LargeStringArray]:
    """Return the number of each entry, and the names so numbered, in order of appearance."""
    # The parts' dictionaries one after another, which together are numbered again. With 64-bit
    # offsets: the ids of 100M episodes pass 2 GiB.
    every = [part.dictionary.cast(pa.large_string()) for part in parts]
    encoded = pa.concat_arrays(every).dictionary_encode()
    codes = numbers(encoded.indices).astype(np.int64)
    offsets = np.cumsum([0, *(len(part.dictionary) for part in parts)])
    of_entries = [
        codes[offset + numbers(part.indices)] for part, offset in zip(parts, offsets, strict=False)
    ]
    return np.concatenate(of_entries), encoded.dictionary


NO_ROW_RANGES: Final = RowRanges(
    rows=np.zeros(0, np.int64),
    lengths=np.zeros(0, np.int32),
    first_steps=np.zeros(0, np.int32),
    flags=np.zeros(0, np.uint8),
    pairs=np.zeros(0, np.int64),
)
