"""FQEConfig: how fitted Q evaluation fits its model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from replaylake.offline.learning.options import expect

# Called with (updates done, updates) now and then.
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class FQEConfig:
    """How the model is fitted."""

    updates: int = 5000
    batch_size: int = 256
    # Falls to 0 over the updates: what is left of the noise of single batches is averaged out.
    learning_rate: float = 1e-3
    hidden_sizes: Sequence[int] = (128, 128)
    # How far q' follows q in each update.
    target_tau: float = 0.01
    # Actions drawn from a policy of a Box that draws, for each next observation.
    action_samples: int = 4
    # 0 makes all updates. Else it ends once the mean value of the first observations has moved by
    # less than this share of the returns' standard deviation over the last tenth of the updates.
    tolerance: float = 0.0
    # Discrete observations and actions of at most so many pairs are solved for exactly, without
    # updates; 0 never does. 4,096 take 0.4 s (1 core, 2026-11).
    table_cells: int = 4096

    def __post_init__(self) -> None:
        for name in ("updates", "batch_size", "action_samples"):
            expect(getattr(self, name) >= 1, f"fqe: {name}", getattr(self, name), "1 or more")
        rate = self.learning_rate
        expect(rate > 0, "fqe: learning_rate", rate, "more than 0")
        expect(0 < self.target_tau <= 1, "fqe: target_tau", self.target_tau, "above 0, at most 1")
        expect(self.tolerance >= 0, "fqe: tolerance", self.tolerance, "0 or more")
        expect(self.table_cells >= 0, "fqe: table_cells", self.table_cells, "0 or more")
        positive = all(size > 0 for size in self.hidden_sizes)
        expect(positive, "fqe: hidden_sizes", self.hidden_sizes, "positive sizes")
