"""Filling: the rows of a row group written as whole records, each to its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.spaces import leaves
from replaylake.datastore.replay.arrays import RowGroup, complete_columns
from replaylake.datastore.replay.layout import BOOTSTRAPPABLE, KEY, STEPS_LEFT, RecordLayout
from replaylake.datastore.replay.packing.fields import put, put_column, put_masks, put_space
from replaylake.datastore.replay.packing.row_keys import keys_of_steps
from replaylake.datastore.replay.packing.row_ranges import FINAL, LAST, TERMINATED
from replaylake.datastore.replay.packing.run_table import RunTable
from replaylake.datastore.storage.arrow_values import numbers, row_numbers
from replaylake.datastore.storage.table.shard import row_group_batches
from replaylake.datastore.storage.table.table import TableSnapshot

# Records decoded together: they and their columns stay in the processor's cache.
_BYTES_AT_ONCE: Final = 1 << 20
_ROWS_AT_ONCE: Final = 1 << 13
# The column of rewards that replace the logged ones: no dataset has one of that name.
_REPLACED: Final = pa.field("replaced reward", pa.float64())


@dataclass(frozen=True)
class _Segments:
    """The stretches, or parts of them, that lie in some rows; arrays [num_segments].

    sizes: rows of each. before: rows of those before it. first_rows: where in the rows it begins.
    flags: of its last row. The others are of its first row.
    """

    sizes: NDArray[np.int64]
    before: NDArray[np.int64]
    first_rows: NDArray[np.int64]
    positions: NDArray[np.int64]
    steps: NDArray[np.int64]
    steps_left: NDArray[np.int64]
    pairs: NDArray[np.int64]
    flags: NDArray[np.uint8]

    @property
    def num_rows(self) -> int:
        return int(self.before[-1] + self.sizes[-1])

    def spread(self, firsts: NDArray[np.int64], step: int = 1) -> NDArray[np.int64]:
        """Return a value for each row, which rises by `step` from row to row of a segment."""
        values: NDArray[np.int64] = np.repeat(firsts - step * self.before, self.sizes)
        values += np.arange(0, step * self.num_rows, step)
        return values


class RecordFiller:
    """Writes the rows of row groups into records; several threads may, each other ones."""

    def __init__(
        self,
        snapshot: TableSnapshot,
        layout: RecordLayout,
        table: RunTable,
        rewards: pa.ChunkedArray | None,
        words: NDArray[np.uint64],
    ) -> None:
        names = [
            schema.OBSERVATION,
            schema.ACTION,
            schema.BEHAVIOR_LOG_PROB,
            *([schema.REWARD] if rewards is None else []),
            *([schema.ACTION_MASK] if layout.spec.mask_size is not None else []),
            *layout.columns,
        ]
        self._fields = snapshot.select_fields(list(dict.fromkeys(names)))
        with_final = dict.fromkeys([*names, schema.FINAL_OBSERVATION])
        self._fields_with_final = snapshot.select_fields(list(with_final))
        self._layout = layout
        self._table = table
        self._rewards = rewards
        self._rows = layout.rows(words)[:, 0]
        # Whole records are copied as such: twice as fast as their words, or their fields.
        self._whole = words.view(f"V{layout.dtype.itemsize}")[:, 0]

    def fill(self, group: RowGroup) -> None:
        """Decode one row group and write its selected rows, and the tails that follow them.

        Memory: two blocks of at most 1 MiB or one record, and what `row_group_batches` takes.
        Raises: ShardCorruptError; SchemaMismatchError, SpaceUnsupportedError for values that a
        record cannot hold.
        """
        rows = self._table.ranges.rows
        low, high = np.searchsorted(rows, [group.start, group.start + group.num_rows])
        if low == high:
            return
        has_final = (self._table.ranges.flags[low:high] & FINAL).any()
        fields = self._fields_with_final if has_final else self._fields
        block_rows = max(1, min(_ROWS_AT_ONCE, _BYTES_AT_ONCE // self._layout.dtype.itemsize))
        block = np.zeros(block_rows, self._layout.dtype)
        start = group.start
        batches = row_group_batches(group.path, group.number, fields.names, block_rows)
        for batch in batches:
            segments = self._segments(int(low), int(high), start, batch.num_rows)
            if segments is not None:
                self._write(
                    self._select_rows(complete_columns(batch, fields), segments, start),
                    segments,
                    block,
                )
            start += batch.num_rows

    def _segments(self, low: int, high: int, start: int, num_rows: int) -> _Segments | None:
        """Return what lies in rows [start, start + num_rows) of stretches [low, high)."""
        table, stretches = self._table, self._table.ranges
        end = start + num_rows
        first = low + int(np.searchsorted(stretches.rows[low:high], start, "right")) - 1
        first = max(first, low)
        last = low + int(np.searchsorted(stretches.rows[low:high], end, "left"))
        if first < last and stretches.rows[first] + stretches.lengths[first] <= start:
            first += 1
        if first >= last:
            return None
        some = slice(first, last)
        ends = stretches.rows[some] + stretches.lengths[some]
        skipped = np.maximum(start - stretches.rows[some], 0)
        first_rows = stretches.rows[some] + skipped
        sizes = np.minimum(ends, end) - first_rows
        return _Segments(
            sizes=sizes,
            before=np.cumsum(sizes) - sizes,
            first_rows=first_rows - start,
            positions=table.positions[some] + skipped,
            steps=stretches.first_steps[some].astype(np.int64) + skipped,
            steps_left=table.steps_left[some].astype(np.int64) - skipped,
            pairs=stretches.pairs[some],
            flags=np.where(ends <= end, stretches.flags[some], 0).astype(np.uint8),
        )

    def _select_rows(self, batch: pa.Table, segments: _Segments, start: int) -> pa.Table:
        """Return the rows of the segments, with the rewards that replace the logged ones."""
        if self._rewards is not None:
            rewards = self._rewards.slice(start, batch.num_rows)
            batch = batch.append_column(_REPLACED, rewards)
        if segments.num_rows < batch.num_rows:
            batch = batch.take(row_numbers(segments.spread(segments.first_rows)))
        return batch

    def _write(self, batch: pa.Table, segments: _Segments, block: NDArray[np.void]) -> None:
        num = batch.num_rows
        is_contiguous = len(segments.sizes) == 1
        place = slice(segments.positions[0], segments.positions[0] + num)
        target = self._rows[place] if is_contiguous else block[:num]
        self._put_bookkeeping(target, segments)
        self._put_values(target, batch)
        if not is_contiguous:
            self._whole[segments.spread(segments.positions)] = block[:num].view(self._whole.dtype)
        self._write_tails(target, batch, segments)

    def _put_bookkeeping(self, target: NDArray[np.void], segments: _Segments) -> None:
        digests = self._table.digests[segments.pairs]
        if len(digests) > 1:
            digests = np.repeat(digests, segments.sizes, axis=0)
        target[KEY] = keys_of_steps(digests, segments.spread(segments.steps))
        target[STEPS_LEFT] = segments.spread(segments.steps_left, step=-1)
        lasts = segments.before + segments.sizes - 1
        flags = segments.flags
        target[schema.TERMINATED] = False
        target[schema.TERMINATED][lasts] = (flags & TERMINATED) > 0
        target[BOOTSTRAPPABLE] = True
        target[BOOTSTRAPPABLE][lasts[(flags & (LAST | FINAL | TERMINATED)) == LAST]] = False

    def _put_values(self, target: NDArray[np.void], batch: pa.Table) -> None:
        layout, spec = self._layout, self._layout.spec
        for name, space in (
            (schema.OBSERVATION, spec.observation_space),
            (schema.ACTION, spec.action_space),
        ):
            put_space(layout, target, name, space, batch[name])
        reward = schema.REWARD if self._rewards is None else _REPLACED.name
        put(layout, target, schema.REWARD, numbers(batch[reward]))
        target[schema.BEHAVIOR_LOG_PROB] = numbers(batch[schema.BEHAVIOR_LOG_PROB])
        if spec.mask_size is not None:
            put_masks(target, batch[schema.ACTION_MASK])
        for name in layout.columns:
            put_column(layout, target, name, batch[name])

    def _write_tails(self, target: NDArray[np.void], batch: pa.Table, segments: _Segments) -> None:
        """Write the record after each run that ends here: its final observation.

        Where there is none, for a termination the last one stands in: its discount is 0, so the
        value is never used, but it has to be finite.
        """
        ends = np.flatnonzero(segments.flags & LAST)
        if not len(ends):
            return
        layout, space = self._layout, self._layout.spec.observation_space
        names = [name for name, _ in leaves(space, schema.OBSERVATION)]
        tails = np.zeros(len(ends), layout.dtype)
        lasts = (segments.before + segments.sizes - 1)[ends]
        for name in names:
            tails[name] = target[name][lasts]
        has_final = (segments.flags[ends] & FINAL) > 0
        if has_final.any():
            finals = batch[schema.FINAL_OBSERVATION].drop_null()
            known = tails if has_final.all() else np.zeros(len(finals), layout.dtype)
            put_space(layout, known, schema.OBSERVATION, space, finals)
            for name in names if known is not tails else []:
                tails[name][has_final] = known[name]
        if layout.spec.mask_size is not None:
            tails[schema.ACTION_MASK] = True
        places = (segments.positions + segments.sizes)[ends]
        self._whole[places] = tails.view(self._whole.dtype)
