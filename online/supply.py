"""Supply: what a learner's batches come from while the dataset grows.

Replayed: drawn at random, again and again, from the newest steps and, by ratio, other datasets.
Taken once: consecutive sequences, each handed out one time, in the order in which they came, for
algorithms that correct for the policy that acted; those that are too old are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from replaylake.datastore.batch import Batch
from replaylake.datastore.errors import ConfigInvalid, NotFound, ReplayLakeError
from replaylake.datastore.replay.live.live_view import LiveView
from replaylake.datastore.replay.mixture import mixture
from replaylake.datastore.replay.sampler import Sampler
from replaylake.datastore.replay.to_torch import TorchSampler, to_torch
from replaylake.datastore.replay.view import ReplayView
from replaylake.datastore.schema import POLICY_VERSION
from replaylake.offline.learner import Learner, Update
from replaylake.online.config import OnlineConfig

# A learner is done with a batch when it asks for the next.
_REUSE = 2


class AnySupply(Protocol):
    """Where a trainer's batches come from; see Supply for what each of these does.

    takes_once: whether each step is. version: the newest that acts. num_rows: that a batch counts
    for the rate limiter before it is drawn, num_taken: the last one, after it was.
    """

    version: int

    @property
    def takes_once(self) -> bool: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def num_taken(self) -> int: ...
    @property
    def is_ready(self) -> bool: ...
    def sample(self) -> Batch | None: ...
    def give_back(self, batch: Batch, result: Update) -> None: ...
    def taken_metrics(self) -> dict[str, float]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Supply:
    """Replayed transitions."""

    takes_once = False
    version = 0

    def __init__(
        self,
        view: LiveView,
        learner: Learner,
        config: OnlineConfig,
        batch_size: int,
        mixed: Mapping[str, ReplayView],
    ) -> None:
        """mixed: views of other datasets, by what `config.mix` calls them."""
        self._view = view
        self.num_rows = self.num_taken = batch_size
        self._own = _own_sampler(view, learner, config, batch_size)
        source: Any = self._own
        if mixed:
            others = [v.uniform(batch_size, learner.item, seed=config.seed) for v in mixed.values()]
            shares = [config.mix[name] for name in mixed]
            source = mixture(
                [self._own, *others],
                [1 - sum(shares), *shares],
                batch_size=batch_size,
                seed=config.seed,
            )
        # A mixture has no memory to draw into again.
        self._sampler = TorchSampler(source, config.device, reuse=0 if mixed else _REUSE)

    @property
    def is_ready(self) -> bool:
        """Whether there is anything to draw."""
        return self._view.num_transitions > 0

    def sample(self) -> Batch | None:
        """Draw a batch of tensors."""
        return self._sampler.sample()

    def give_back(self, batch: Batch, result: Update) -> None:
        """Set the priorities of a batch. Raises: ConfigInvalid where the learner gives none."""
        if result.priorities is None:
            raise ConfigInvalid(
                "online: prioritized: found an algorithm without priorities, expected one that "
                "gives them, such as dqn. Leave prioritized out."
            )
        self._sampler.update_priorities(batch.indices, result.priorities)

    def taken_metrics(self) -> dict[str, float]:
        """Return what is worth watching since the last call."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's position."""
        return {"sampler": self._sampler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from it as well as what is there now allows."""
        try:
            self._sampler.load_state_dict(state["sampler"])
        except ReplayLakeError:
            # The steps came in another order, or more of them: another draw is as good.
            return


class OnceSupply:
    """Sequences taken once, in order."""

    takes_once = True

    def __init__(self, view: LiveView, learner: Learner, config: OnlineConfig) -> None:
        """Raises: ConfigInvalid for an algorithm whose batches are replayed."""
        if learner.on_policy is None:
            raise ConfigInvalid("online: found an algorithm that does not take steps once.")
        plan = learner.on_policy
        self.version = 0
        self.num_rows = 1
        self.num_taken = 0
        self._num_sequences = plan.num_sequences
        self._max_staleness = config.max_staleness
        self._device = config.device
        self._view, self._item = view, learner.item
        self._sampler = view.in_order(plan.num_sequences, learner.item)
        self._num_left_out = 0
        self._staleness: list[float] = []

    @property
    def is_ready(self) -> bool:
        """Whether a whole batch has come that nobody has had."""
        return self._sampler.num_available >= self._num_sequences

    def sample(self) -> Batch | None:
        """Take the next batch; None where all of it was too old."""
        batch = self._sampler.sample()
        mask: Any = batch.mask
        self.num_taken = int(mask.sum())
        staleness = self.version - np.asarray((batch.columns or {})[POLICY_VERSION])
        self._staleness.append(float(staleness[mask].mean()))
        if self._max_staleness is not None:
            is_old = (staleness > self._max_staleness) & mask
            self._num_left_out += int(is_old.sum())
            mask &= ~is_old
            if not mask.any():
                return None
            batch = replace(batch, mask=mask)
        return to_torch(batch, self._device)

    def give_back(self, batch: Batch, result: Update) -> None:
        """Raises: ConfigInvalid: nothing is drawn by priorities."""
        raise ConfigInvalid(
            "online: prioritized: found an algorithm that takes each step once, expected one that "
            "replays, such as dqn. Leave prioritized out."
        )

    def taken_metrics(self) -> dict[str, float]:
        """Return the mean staleness in versions, and how many steps were left out as too old."""
        staleness, self._staleness = self._staleness, []
        said = {"steps_too_old": float(self._num_left_out)}
        return said | ({"staleness": float(np.mean(staleness))} if staleness else {})

    def state_dict(self) -> dict[str, Any]:
        """Return how far it came."""
        return {"sampler": self._sampler.state_dict(), "num_left_out": self._num_left_out}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the last sequence that was taken; where that is gone, with what there is.

        Pieces that were recorded together come in another order than they were taken in: a few
        sequences around that one are then taken again, or never (4% of the first 3,000 steps of a
        run in one process, which records once a second).
        """
        self._num_left_out = state["num_left_out"]
        sampler = state["sampler"]
        try:
            self._sampler.load_state_dict(sampler)
        except NotFound:
            # It fell out as too old, and so did all before it.
            return
        except ConfigInvalid:
            last = np.frombuffer(bytes.fromhex(sampler["last_key"]), np.uint64)
            self._sampler = self._view.in_order(self._num_sequences, self._item, after=last)


def _own_sampler(
    view: LiveView, learner: Learner, config: OnlineConfig, batch_size: int
) -> Sampler:
    if config.prioritized:
        return view.prioritized(
            batch_size,
            learner.item,
            seed=config.seed,
            alpha=config.priority_alpha,
            beta=config.priority_beta,
            beta_updates=config.steps,
        )
    return view.uniform(batch_size, learner.item, seed=config.seed)
