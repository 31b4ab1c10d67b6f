"""Prioritized selection: rows that surprised the learner more are drawn more often.

Proportional prioritization, Schaul et al. 2016 (arXiv:1511.05952), section 3.3, with a share of
uniform draws as dqn_zoo has it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from replaylake.datastore.errors import ConfigInvalidError, EmptyReplayError
from replaylake.datastore.replay.arguments import check_fraction, check_int
from replaylake.datastore.replay.layout import KEY
from replaylake.datastore.replay.protocols import Assembler, Candidates, SelectedItems
from replaylake.datastore.replay.randomness import random_stream
from replaylake.datastore.replay.sampler import Sampler
from replaylake.datastore.replay.saved_state import restore_generator
from replaylake.datastore.replay.selectors.candidate_values import read_values
from replaylake.datastore.replay.selectors.priorities import Priorities, to_priority_arrays
from replaylake.datastore.replay.selectors.saved_priorities import PriorityFolder, SavedPriorities

# Draws in place of candidates that are gone, before it is left to the sampler.
_ROUNDS: Final = 16


class PrioritizedSelector:
    """Draws candidate i with P(i) = (1 - u) p_i^alpha / sum_k p_k^alpha + u / N.

    u is `uniform_fraction`. Where all priorities are 0, u counts as 1. Each row's weight is
    (N P(i))^-beta, divided by the largest one of its batch (section 3.4), so that updates only get
    smaller. beta rises in equal steps from the one given to 1 over `beta_updates` updates of
    priorities; without those it stays.

    Draws are stratified, as in the paper (appendix B.2.1): the k-th of B rows is drawn from the
    k-th of B equal shares of probability. Every candidate is still drawn B P(i) times a batch on
    average, with less variance than B independent draws have; and rows come in the order of the
    records, whose copies then share cache lines. So a batch is used as one: its parts are not
    samples of the whole.
    """

    can_prefetch = False

    def __init__(
        self,
        priorities: Priorities,
        *,
        seed: int,
        beta: float = 0.4,
        beta_updates: int | None = None,
        uniform_fraction: float = 0.0,
    ) -> None:
        """Raises: ConfigInvalidError for an option out of range."""
        if beta_updates is not None:
            beta_updates = check_int(
                "prioritized sampler: beta_updates",
                beta_updates,
                minimum=1,
                advice="Leave it out for a beta that stays.",
            )
        self.priorities = priorities
        self.num_updates = 0
        self._first_beta = check_fraction("prioritized sampler: beta", beta)
        self._beta_updates = beta_updates
        self._uniform_fraction = check_fraction(
            "prioritized sampler: uniform_fraction", uniform_fraction
        )
        self._rng = random_stream(seed, "prioritized sampler")
        self._strata: NDArray[np.float64] = np.zeros(0)

    @property
    def beta(self) -> float:
        """How much of the bias the weights correct now: 1 is all of it."""
        if self._beta_updates is None:
            return self._first_beta
        progress = min(1.0, self.num_updates / self._beta_updates)
        return self._first_beta + (1.0 - self._first_beta) * progress

    def select(self, candidates: Candidates, num: int) -> SelectedItems:
        """Draw `num` with replacement. Raises: EmptyReplayError."""
        low, high = candidates.bounds()
        if low == high:
            raise EmptyReplayError(
                "prioritized sampler: found nothing to sample, expected at least one item. "
                "Wait for steps, or widen the selection."
            )
        self.priorities.follow(low, high)
        if len(self._strata) != num:
            self._strata = np.arange(num, dtype=np.float64)
        shares = self._rng.random(num)
        shares += self._strata
        shares /= num
        numbers = self._draw_numbers(shares, low, high)
        if not candidates.is_fixed:
            self._replace_gone(candidates, numbers, low, high)
        chances = self._probabilities(numbers, low, high)
        # N and the sum cancel out: the largest weight is that of the row least likely to be drawn.
        weights = (chances.min() / chances) ** self.beta
        return SelectedItems(numbers, weights.astype(np.float32))

    def _draw_numbers(self, shares: NDArray[np.float64], low: int, high: int) -> NDArray[np.int64]:
        """Return the candidates at ascending shares of all probability."""
        total = self.priorities.tree.total
        uniform = self._uniform_fraction if total else 1.0
        if not uniform:
            return self._find_numbers(shares * total, total)
        # The last share may be 1, as it is rounded, and is then none of the priorities'.
        cut = int(np.searchsorted(shares, uniform)) if uniform < 1.0 else len(shares)
        numbers = np.minimum(shares * ((high - low) / uniform), high - low - 1).astype(np.int64)
        numbers += low
        if cut < len(shares):
            targets = (shares[cut:] - uniform) * (total / (1.0 - uniform))
            numbers[cut:] = self._find_numbers(targets, total)
        return numbers

    def _find_numbers(self, targets: NDArray[np.float64], total: float) -> NDArray[np.int64]:
        if targets[-1] >= total:
            # The last share was rounded up to 1, and perhaps others with it.
            targets = np.minimum(targets, math.nextafter(total, 0.0))
        return self.priorities.numbers(self.priorities.tree.find(targets))

    def _probabilities(
        self, numbers: NDArray[np.int64], low: int, high: int
    ) -> NDArray[np.float64]:
        """Return P of candidates, up to a factor that is the same for all."""
        total = self.priorities.tree.total
        if not total:
            return np.ones(len(numbers))
        chances = self.priorities.tree.get(self.priorities.leaves(numbers))
        if self._uniform_fraction:
            chances *= (1.0 - self._uniform_fraction) / total
            chances += self._uniform_fraction / (high - low)
        return chances

    def _replace_gone(
        self, candidates: Candidates, numbers: NDArray[np.int64], low: int, high: int
    ) -> None:
        """Draw others in place of those that are gone: here, as their weights depend on all rows.

        What goes just after this the sampler draws anew, and it then has its weight from few rows.
        """
        for _ in range(_ROUNDS):
            rows = np.flatnonzero(candidates.positions(numbers) < 0)
            if not len(rows):
                return
            self.priorities.remove(numbers[rows])
            numbers[rows] = self._draw_numbers(np.sort(self._rng.random(len(rows))), low, high)

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state and how far beta has come; the sampler has the rest."""
        return {"rng": self._rng.bit_generator.state, "num_updates": self.num_updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        rng, num_updates = restore_generator(state["rng"]), int(state["num_updates"])
        self._rng, self.num_updates = rng, num_updates

    def describe(self) -> dict[str, Any]:
        """Return what was asked for, JSON-able: enough to make it again."""
        return {
            "selector": "prioritized",
            "alpha": self.priorities.alpha,
            "beta": self._first_beta,
            "beta_updates": self._beta_updates,
            "uniform_fraction": self._uniform_fraction,
        }


class PrioritizedSampler(Sampler):
    """Draws by priorities that the learner gives back; they can be kept for another run."""

    def __init__(
        self,
        candidates: Candidates,
        selector: PrioritizedSelector,
        assembler: Assembler,
        batch_size: int,
        folder: PriorityFolder | None = None,
    ) -> None:
        """Take also where priorities are saved, if they can be. Raises: ConfigInvalidError."""
        super().__init__(candidates, selector, assembler, batch_size)
        self._prioritized = selector
        self._priorities = selector.priorities
        self._folder = folder
        self._priorities.follow(*candidates.bounds())

    @property
    def beta(self) -> float:
        """How much of the bias the weights of the next batch correct: 1 is all of it."""
        return self._prioritized.beta

    def update_priorities(self, indices: ArrayLike, priorities: ArrayLike) -> None:
        """Set the priorities of rows: of `batch.indices` [B], to numbers [B] of at least 0.

        Such as |TD error| + 1e-6: what has 0 is drawn no more, but for the uniform share. Rows that
        left a view meanwhile are passed over; of the same row twice, the last counts. Counts as one
        update for beta. Raises, changing nothing: ConfigInvalidError for numbers that are negative
        or not finite, or indices of no batch. Cost: 9 us for 256 of a million (2 cores,
        2026-11-21).
        """
        self._priorities.update(*to_priority_arrays(indices, priorities))
        self._prioritized.num_updates += 1

    def check_indices(self, indices: NDArray[np.int64]) -> None:
        """Raises: ConfigInvalidError for indices [M] that update_priorities would refuse."""
        self._priorities.check(indices)

    def save_priorities(self, name: str = "last") -> None:
        """Keep all priorities under a name, by row key: `view.prioritized(restore=name)`.

        They are found again by another view of the dataset, at any version, also after compaction.
        Replaces earlier ones of that name; a crash leaves either. Raises: ConfigInvalidError where
        there is no place for them, InvalidNameError, StorageError. Cost: 24 bytes a candidate, in
        memory and on disk.
        """
        numbers, keys = self._keys()
        powered = self._priorities.tree.get(self._priorities.leaves(numbers))
        saved = SavedPriorities(keys, powered, self._priorities.alpha, self._priorities.highest)
        self._require_folder().write(name, saved)

    def restore_priorities(self, name: str = "last") -> int:
        """Take over what was saved under a name, and return of how many rows it was known.

        All others get the highest priority that was saved. Raises: NotFoundError where nothing was;
        ConfigInvalidError, InvalidNameError, StorageError.
        """
        saved = self._require_folder().read(name)
        numbers, keys = self._keys()
        powered, known = saved.look_up(keys, self._priorities.alpha)
        self._priorities.restore(numbers[known], powered, highest=saved.highest)
        return int(known.sum())

    def _keys(self) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """Return the candidates that are there, int64 [N], and their row keys [N, 2]."""
        low, high = self._candidates.bounds()
        self._priorities.follow(low, high)
        numbers = np.arange(low, high)
        return read_values(self._candidates, self._assembler.records, numbers, KEY)

    def _require_folder(self) -> PriorityFolder:
        if self._folder is None:
            raise ConfigInvalidError(
                "priorities: found a view of several datasets, or one that another process made, "
                "expected one of a dataset, whose folder keeps them. Keep state_dict() instead, or "
                "sample from each dataset and mix the batches."
            )
        return self._folder

    def state_dict(self) -> dict[str, Any]:
        """Return the position with all priorities: 8 bytes a candidate."""
        return {**super().state_dict(), "priorities": self._priorities.state_dict()}

    def _load(self, state: Mapping[str, Any]) -> None:
        low, high = self._candidates.bounds()
        saved = state["priorities"]
        if saved["low"] > low or saved["high"] > high:
            raise ConfigInvalidError(
                f"prioritized sampler: found the state of candidates {saved['low']} to "
                f"{saved['high']}, expected none beyond those that are there, {low} to {high}. "
                "save_priorities keeps priorities for another view of the data."
            )
        before = self._priorities.state_dict()
        self._priorities.load_state_dict(saved)
        try:
            super()._load(state)
        except BaseException:
            self._priorities.load_state_dict(before)
            raise
