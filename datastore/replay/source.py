"""SampleSource: what samplers draw from, be it a fixed view or one that follows a dataset."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.replay.items.transitions import Transitions
from replaylake.datastore.replay.protocols import Assembler, Candidates, Item, Selector
from replaylake.datastore.replay.sampler import Sampler
from replaylake.datastore.replay.selectors.in_order import InOrderSampler
from replaylake.datastore.replay.selectors.priorities import Priorities
from replaylake.datastore.replay.selectors.prioritized import (
    PrioritizedSampler,
    PrioritizedSelector,
)
from replaylake.datastore.replay.selectors.recent import (
    PolicyVersion,
    RecentSampler,
    RecentSelector,
)
from replaylake.datastore.replay.selectors.saved_priorities import PriorityFolder
from replaylake.datastore.replay.selectors.shuffled import ShuffledSampler, ShuffledSelector
from replaylake.datastore.replay.selectors.uniform import UniformSelector

TRANSITIONS: Final = Transitions()


class SampleSource(ABC):
    """Every selector over every item, given which items there are and what copies them."""

    @abstractmethod
    def candidates(self, item: Item) -> Candidates:
        """Return the items that may be selected. Raises: EmptyReplayError if there can be none."""

    def find_finished_candidates(self, item: Item) -> Candidates:
        """Return the items to which no step is added any more: all, where none is."""
        return self.candidates(item)

    @abstractmethod
    def assembler(self, item: Item) -> Assembler:
        """Return what copies selected items out of the records."""

    def uniform(self, batch_size: int, item: Item = TRANSITIONS, *, seed: int) -> Sampler:
        """Return a sampler that draws uniformly with replacement.

        `item` is what each row is: by default a transition, discounted by 0.99.
        Raises: EmptyReplayError.
        """
        return self._sampler(batch_size, item, UniformSelector(seed=seed))

    def shuffled(
        self,
        batch_size: int,
        item: Item = TRANSITIONS,
        *,
        seed: int,
        rank: int = 0,
        num_ranks: int = 1,
        drop_last: bool = False,
    ) -> ShuffledSampler:
        """Return a sampler that draws every item once an epoch, in a new order each epoch.

        Of `num_ranks` processes that learn together, with the same seed, each draws another part of
        the epoch, in as many batches as the others. An epoch's last batch is smaller, or left out
        with drop_last. Raises: EmptyReplayError; ConfigInvalidError where there is too little for
        an epoch.
        """
        selector = ShuffledSelector(
            batch_size, seed=seed, rank=rank, num_ranks=num_ranks, drop_last=drop_last
        )
        candidates, assembler = self.items(item)
        return ShuffledSampler(candidates, selector, assembler, batch_size)

    def in_order(
        self,
        batch_size: int,
        item: Item = TRANSITIONS,
        *,
        after: NDArray[np.uint64] | None = None,
    ) -> InOrderSampler:
        """Return a sampler that draws every item once, in the order of the records.

        Of a live view, in that of arrival; sequences come when they have all their steps, or their
        episode ended. after: the row key [2] of the last one that was consumed before,
        `sampler.last_key`.
        Raises: EmptyReplayError; NotFoundError if no item has that key.
        """
        _check_item(item)
        return InOrderSampler(
            self.find_finished_candidates(item), self.assembler(item), batch_size, after
        )

    def prioritized(
        self,
        batch_size: int,
        item: Item = TRANSITIONS,
        *,
        seed: int,
        alpha: float = 0.6,
        beta: float = 0.4,
        beta_updates: int | None = None,
        uniform_fraction: float = 0.0,
        initial_priority: float = 1.0,
        restore: str | None = None,
    ) -> PrioritizedSampler:
        """Return a sampler that draws by priorities, which the learner gives to update_priorities.

        See PrioritizedSelector for alpha, beta, beta_updates and uniform_fraction. What has no
        priority yet has the highest that there was, at first `initial_priority`. `restore` names
        priorities that save_priorities kept. Raises: EmptyReplayError, ConfigInvalidError;
        NotFoundError where none were kept. Memory: 9.2 bytes a candidate.
        """
        candidates, assembler = self.items(item)
        selector = PrioritizedSelector(
            Priorities(candidates.capacity, alpha=alpha, initial=initial_priority),
            seed=seed,
            beta=beta,
            beta_updates=beta_updates,
            uniform_fraction=uniform_fraction,
        )
        sampler = PrioritizedSampler(
            candidates, selector, assembler, batch_size, self.priority_folder()
        )
        if restore is not None:
            sampler.restore_priorities(restore)
        return sampler

    def recent(
        self,
        batch_size: int,
        item: Item = TRANSITIONS,
        *,
        max_staleness: int,
        seed: int,
        policy_version: PolicyVersion | None = None,
    ) -> RecentSampler:
        """Return a sampler that draws uniformly what is at most `max_staleness` versions old.

        That is, steps with policy_version >= the learner's - max_staleness. The learner's is
        `policy_version`, a number (see also set_policy_version) or a function that returns it, by
        default the newest that was seen. Needs a view with columns=("policy_version",).
        Raises: EmptyReplayError, ConfigInvalidError.
        """
        candidates, assembler = self.items(item)
        selector = RecentSelector(
            assembler.records,
            max_staleness=max_staleness,
            seed=seed,
            policy_version=policy_version,
        )
        return RecentSampler(candidates, selector, assembler, batch_size)

    def priority_folder(self) -> PriorityFolder | None:
        """Return where priorities are saved; None where there is no one place for them."""
        return None

    def _sampler(self, batch_size: int, item: Item, selector: Selector) -> Sampler:
        candidates, assembler = self.items(item)
        return Sampler(candidates, selector, assembler, batch_size)

    def items(self, item: Item) -> tuple[Candidates, Assembler]:
        """Return which items there are and what copies them.

        Raises: EmptyReplayError, ConfigInvalidError.
        """
        _check_item(item)
        return self.candidates(item), self.assembler(item)


def _check_item(item: Item) -> None:
    if isinstance(item, type) or not isinstance(item, Item):
        raise ConfigInvalidError(
            f"replay: found item {item!r}, expected the kind of a sample: Transitions(0.99), "
            "Sequences(80), Episodes() or Hindsight(...). Omit it for transitions."
        )
