"""BatchSource: what gives batches, be it a sampler, a mixture of some, or one that draws ahead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from numpy.typing import ArrayLike

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.errors import ConfigInvalidError


@runtime_checkable
class BatchSource(Protocol):
    """Gives batches; its position can be saved and restored, and goes on bit for bit."""

    def sample(self) -> Batch[Any]:
        """Draw one batch."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch given."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position."""
        ...


def check_batch_source(who: str, source: object) -> None:
    """Raises: ConfigInvalidError for what gives no batches."""
    if isinstance(source, type) or not isinstance(source, BatchSource):
        raise ConfigInvalidError(
            f"{who}: found a {type(source).__name__}, expected a sampler. Make one of a view, as "
            "with view.uniform(256, seed=0)."
        )


@runtime_checkable
class PrioritizedSource(BatchSource, Protocol):
    """A BatchSource that draws by priorities, which the learner gives back."""

    def update_priorities(self, indices: ArrayLike, priorities: ArrayLike) -> None:
        """Set the priorities of rows: of `batch.indices` [B], to numbers [B] of at least 0."""
        ...
