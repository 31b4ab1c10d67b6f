"""Protocols: what a sampler is put together from: candidates, a selector, an item.

Item       says where items start (in a view: its Candidates), and makes the Assembler
Selector   chooses some of the Candidates: Selected
Assembler  copies what was Selected into an Output, which shows it as a Batch
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.replay.records import Packed, Records


class Candidates(Protocol):
    """What may be selected: items numbered from `low` up to `high`, of which some may be gone.

    A number keeps its meaning for good; in a view that follows a dataset both ends move up, never
    more than `capacity` apart.
    """

    @property
    def is_fixed(self) -> bool:
        """Whether they never change; only then are batches drawn ahead."""
        ...

    @property
    def capacity(self) -> int:
        """The most that can be there at once."""
        ...

    def bounds(self) -> tuple[int, int]:
        """Return low and high."""
        ...

    def positions(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the records where items start, int64 [M]; -1 for those that are gone."""
        ...


@dataclass(frozen=True)
class SelectedItems:
    """Items of one or several batches, one after another.

    numbers int64 [M]: which candidates (see Candidates). weights float32 [M], or None: all 1.
    """

    numbers: NDArray[np.int64]
    weights: NDArray[np.float32] | None = None


class Selector(Protocol):
    """Chooses items: seeded, and its position can be saved and restored."""

    @property
    def can_prefetch(self) -> bool:
        """Whether several batches may be drawn at once: nothing between them changes the draw."""
        ...

    def select(self, candidates: Candidates, num: int) -> SelectedItems:
        """Choose `num` items, or fewer where they run out.

        Raises: EmptyReplayError if none is left.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Return how it chooses, JSON-able: `selector`, its name, and what it was asked for."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position: JSON-able but for numpy arrays, restored by load_state_dict."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue bit for bit from a saved position."""
        ...


class OverwrittenError(Exception):
    """Records were overwritten while they were copied: `positions` says which items are gone."""


class Output(Protocol):
    """The arrays that some rows are put into, and the Batch that shows them."""

    @property
    def batch(self) -> Batch[Array]:
        """A Batch whose arrays are those, or views of them."""
        ...


class Assembler(Protocol):
    """Copies selected items out of the records."""

    @property
    def records(self) -> Records:
        """Where they are copied from."""
        ...

    @property
    def row_bytes(self) -> int:
        """About how much memory one row of the batch takes."""
        ...

    def assemble(
        self, positions: NDArray[np.int64], selected: SelectedItems, out: Any = None
    ) -> Output:
        """Return the rows; in `out`, an earlier Output for as many rows, where that is given.

        An item whose rows differ in shape from batch to batch may return another Output than `out`.
        Raises: Overwritten, in a view that follows a dataset.
        """
        ...


@runtime_checkable
class RandomAssembler(Protocol):
    """An Assembler that draws random numbers of its own: its position goes with the selector's."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position: JSON-able, restored by load_state_dict."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue bit for bit from a saved position."""
        ...


@runtime_checkable
class Item(Protocol):
    """What each row of a batch is: a transition, a sequence, an episode. A frozen dataclass."""

    def starts(self, packed: Packed) -> NDArray[np.int64]:
        """Return the positions at which items may start, ascending."""
        ...

    def assembler(self, records: Records) -> Assembler:
        """Return what copies them."""
        ...
