"""Sampler: a selector that chooses items and an item that becomes rows of a batch.

Several batches are drawn at once where nothing that happens between them matters: at B = 32 most of
a batch's cost is that of calling numpy, not of copying records.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import EmptyReplayError
from replaylake.datastore.replay.arguments import check_batch_size
from replaylake.datastore.replay.layout import RecordLayout
from replaylake.datastore.replay.protocols import (
    Assembler,
    Candidates,
    Output,
    OverwrittenError,
    RandomAssembler,
    SelectedItems,
    Selector,
)
from replaylake.datastore.replay.saved_state import KIND, read_state

# Rows drawn at once, for which several small batches are put together: so many that a block has 8
# batches of 256, whose tensors to_torch.py then makes at once; more would only add memory.
_BLOCK_ROWS: Final = 2048
# Larger blocks of large records would leave the processor's cache.
_BLOCK_BYTES: Final = 1 << 20


class FixedCandidates:
    """The items of a view that does not change: number i starts at starts[i]."""

    def __init__(self, starts: NDArray[np.int64]) -> None:
        self._starts = starts

    @property
    def capacity(self) -> int:
        """How many there are."""
        return len(self._starts)

    @property
    def is_fixed(self) -> bool:
        return True

    def bounds(self) -> tuple[int, int]:
        """Return 0 and how many there are."""
        return 0, len(self._starts)

    def positions(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where they start."""
        return self._starts.take(numbers)


class Sampler:
    """Draws batches; its position can be saved and restored, and goes on bit for bit."""

    def __init__(
        self,
        candidates: Candidates,
        selector: Selector,
        assembler: Assembler,
        batch_size: int,
    ) -> None:
        """Take what to draw from, how to choose and how to copy. Raises: ConfigInvalidError."""
        batch_size = check_batch_size("sampler", batch_size)
        self.batch_size = batch_size
        self._candidates = candidates
        self._selector = selector
        self._assembler = assembler
        self._drawing = assembler if isinstance(assembler, RandomAssembler) else None
        rows = min(_BLOCK_ROWS, _BLOCK_BYTES // max(1, assembler.row_bytes))
        ahead = selector.can_prefetch and candidates.is_fixed
        self._num_ahead = max(1, rows // batch_size) if ahead else 1
        self._ready: deque[Batch[Array]] = deque()
        self._block_position: dict[str, Any] = {}
        # Batches of the last block that were handed on, and that still will be; and those that were
        # before a saved position, which the next block holds once more.
        self._num_taken = self._num_left = self._num_to_skip = 0

    @property
    def spec(self) -> DatasetSpec:
        """Spaces, mask width and further columns of what is drawn."""
        return self._assembler.records.layout.spec

    @property
    def layout(self) -> RecordLayout:
        """How the steps are packed that it draws from."""
        return self._assembler.records.layout

    @property
    def num_ahead(self) -> int:
        """Batches in a block, the last one of an epoch's or of what there is aside."""
        return self._num_ahead

    @property
    def num_taken(self) -> int:
        """Batches of the last block that were handed on; after a restored position, not 0."""
        return self._num_taken

    def describe(self) -> dict[str, Any]:
        """Return how items are chosen, JSON-able, for a policy's lineage."""
        return self._selector.describe()

    def sample(self) -> Batch[Array]:
        """Draw one batch; its arrays are its own. See Batch, and the item, for what is in it.

        Raises: EmptyReplayError.
        """
        if not self._ready:
            self._ready.extend(split(self.block().batch, self.batch_size)[self._num_taken :])
        batch = self._ready.popleft()
        self.mark_consumed()
        return batch

    def block(self, out: Output | None = None) -> Output:
        """Draw the rows of `num_ahead` batches at once, into `out` where that has as many rows.

        For those who split and convert them themselves: they pass over the first `num_taken`
        batches, and say of each other one that they hand on that it is `taken`.
        Raises: EmptyReplayError.
        """
        # Of a selector that does not look ahead the position may be large, and is not asked for.
        position = self._position() if self._num_ahead > 1 else {}
        output = self.draw(self.batch_size * self._num_ahead, out)
        self._block_position = position
        self._num_taken, self._num_to_skip = self._num_to_skip, 0
        self._num_left = -(-len(output.batch.keys) // self.batch_size) - self._num_taken
        return output

    def mark_consumed(self) -> None:
        """Say that one more batch of the last block was handed on."""
        self._num_taken += 1
        self._num_left -= 1

    def draw(self, num: int, out: Output | None = None) -> Output:
        """Draw `num` rows, or fewer where they run out, whatever the batch size is.

        Into `out` where that has as many rows. Not for use beside `sample`, which draws ahead.
        Raises: EmptyReplayError.
        """
        selected = self._selector.select(self._candidates, num)
        positions = self._candidates.positions(selected.numbers)
        while not self._candidates.is_fixed:
            lost = positions < 0
            if lost.any():
                selected = self._replace_gone(selected, lost)
            else:
                try:
                    return self._assemble(positions, selected, out)
                except OverwrittenError:
                    pass
            positions = self._candidates.positions(selected.numbers)
        return self._assemble(positions, selected, out)

    def _assemble(
        self, positions: NDArray[np.int64], selected: SelectedItems, out: Output | None
    ) -> Output:
        if out is not None and len(out.batch.keys) != len(positions):
            out = None
        return self._assembler.assemble(positions, selected, out)

    def _replace_gone(self, selected: SelectedItems, lost: NDArray[np.bool_]) -> SelectedItems:
        """Return the items that are not gone, and for each of the rest another, if there is one."""
        weights = selected.weights
        parts = [
            SelectedItems(selected.numbers[~lost], None if weights is None else weights[~lost])
        ]
        try:
            parts.append(self._selector.select(self._candidates, int(lost.sum())))
        except EmptyReplayError:
            if lost.all():
                raise
        known = [part.weights for part in parts if part.weights is not None]
        return SelectedItems(
            np.concatenate([part.numbers for part in parts]),
            np.concatenate(known) if known else None,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the position: that of the block begun, and how many of its batches were taken."""
        if self._num_left > 0 and self._num_ahead > 1:
            position, num_taken = self._block_position, self._num_taken
        else:
            position, num_taken = self._position(), self._num_to_skip
        return {
            KIND: self._kind,
            **position,
            "batch_size": self.batch_size,
            "num_ahead": self._num_ahead,
            "num_taken": num_taken,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position: the next batch is the one that was next.

        Raises, changing nothing: ConfigInvalidError for what no sampler made in this way saved.
        """
        with read_state(self._kind, state):
            self._load(state)

    def _load(self, state: Mapping[str, Any]) -> None:
        if state["batch_size"] != self.batch_size:
            raise ValueError(f"its batch size is {state['batch_size']}, not {self.batch_size}")
        num_ahead, num_taken = int(state["num_ahead"]), int(state["num_taken"])
        if not 0 <= num_taken < num_ahead:
            raise ValueError(f"num_taken is {num_taken} of {num_ahead}")
        self._load_position(state)
        self._ready.clear()
        self._num_ahead = num_ahead
        self._num_taken, self._num_left, self._num_to_skip = 0, 0, num_taken

    @property
    def _kind(self) -> str:
        kind: str = self.describe()["selector"]
        return kind

    def _position(self) -> dict[str, Any]:
        position: dict[str, Any] = {"selector": self._selector.state_dict()}
        if self._drawing is not None:
            position["item"] = self._drawing.state_dict()
        return position

    def _load_position(self, state: Mapping[str, Any]) -> None:
        before = self._selector.state_dict()
        self._selector.load_state_dict(state["selector"])
        try:
            if self._drawing is not None:
                self._drawing.load_state_dict(state["item"])
        except BaseException:
            self._selector.load_state_dict(before)
            raise

    def __iter__(self) -> Iterator[Batch[Array]]:
        while True:
            yield self.sample()


def split(batch: Batch[Array], size: int) -> list[Batch[Array]]:
    """Cut a batch along its first dimension into batches of `size`, the last one maybe smaller."""
    num = len(batch.keys)
    if num <= size:
        return [batch]
    return make_batches(
        {name: split_field(value, num, size) for name, value in vars(batch).items()}
    )


def make_batches(fields: Mapping[str, Sequence[Any]]) -> list[Batch[Any]]:
    """Return a batch of each field's first value, and so on; of all of Batch's fields."""
    batches = []
    for values in zip(*fields.values(), strict=True):
        # Without the constructor, which sets the fields of a frozen dataclass one by one: 0.6 us
        # instead of 1.6 (2 cores, 2026-11-21), of some 3 that a batch of 32 takes.
        batch: Batch[Any] = object.__new__(Batch)
        vars(batch).update(zip(fields, values, strict=True))
        batches.append(batch)
    return batches


def split_field(value: Any, num: int, size: int) -> Sequence[Any]:
    """Cut one of a batch's fields along its first dimension, of `num`, into views of `size`."""
    if value is None:
        return [None] * -(-num // size)
    if isinstance(value, np.ndarray):
        if num < 8 * size or num % size:
            return [value[start : start + size] for start in range(0, num, size)]
        # Iterating takes half of what slicing does; a view, as only the first dimension is divided.
        return list(value.reshape(-1, size, *value.shape[1:]))
    parts = zip(*(split_field(sub, num, size) for sub in value.values()), strict=True)
    return [dict(zip(value, part, strict=True)) for part in parts]
