"""Batches of a learner while the dataset grows.

Replayed (ReplayBatches): drawn at random, again and again, from the newest steps and, by ratio,
other datasets. Consumed once (on_policy_batches.py): each sequence handed out one time, in order.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.errors import ConfigInvalidError, ReplayLakeError
from replaylake.datastore.lake.runs.timings import Timings
from replaylake.datastore.replay.batch_source import BatchSource
from replaylake.datastore.replay.live.live_view import LiveView
from replaylake.datastore.replay.mixture import mixture
from replaylake.datastore.replay.sampler import Sampler
from replaylake.datastore.replay.to_torch import TorchSampler, to_torch
from replaylake.datastore.replay.view import ReplayView
from replaylake.offline.learning.learner import Learner, Update
from replaylake.online.training.config import OnlineConfig

# A learner is done with a batch when it asks for the next.
_REUSE = 2


class LearnerBatches(Protocol):
    """Where a trainer's batches come from; see Supply for what each of these does.

    samples_once: whether each step is. version: the newest that acts. num_rows: that a batch counts
    for the rate limiter before it is drawn, num_taken: the last one, after it was.
    """

    version: int

    @property
    def samples_once(self) -> bool: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def num_taken(self) -> int: ...
    @property
    def is_ready(self) -> bool: ...
    def sample(self) -> Batch | None: ...
    def update_priorities(self, batch: Batch, result: Update) -> None: ...
    def take_metrics(self) -> dict[str, float]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class ReplayBatches:
    """Replayed transitions."""

    samples_once = False
    version = 0

    def __init__(
        self,
        view: LiveView,
        learner: Learner,
        config: OnlineConfig,
        batch_size: int,
        mixed: Mapping[str, ReplayView],
        timings: Timings,
    ) -> None:
        """mixed: views of other datasets, by what `config.mix` calls them."""
        self._view, self._timings = view, timings
        self.num_rows = self.num_taken = batch_size
        source: Any = _make_sampler(view, learner, config, batch_size)
        if mixed:
            others = [v.uniform(batch_size, learner.item, seed=config.seed) for v in mixed.values()]
            shares = [config.mix[name] for name in mixed]
            source = mixture(
                [source, *others],
                [1 - sum(shares), *shares],
                batch_size=batch_size,
                seed=config.seed,
            )
        self._device = config.device
        self._sampler: Any = source
        if is_shared(config.device):
            # A mixture has no memory to draw into again.
            self._sampler = TorchSampler(source, config.device, reuse=0 if mixed else _REUSE)

    @property
    def is_ready(self) -> bool:
        """Whether there is anything to draw."""
        return self._view.num_transitions > 0

    def sample(self) -> Batch | None:
        """Draw a batch of tensors."""
        return move_batch(draw_batch(self._sampler, self._timings), self._device, self._timings)

    def update_priorities(self, batch: Batch, result: Update) -> None:
        """Set the priorities of a batch.

        Raises: ConfigInvalidError where the learner gives none.
        """
        priorities: Any = result.priorities
        if priorities is None:
            raise ConfigInvalidError(
                "online: prioritized: found an algorithm without priorities, expected one that "
                "returns them. Leave prioritized out."
            )
        if isinstance(priorities, torch.Tensor):
            priorities = priorities.detach().cpu().numpy()
        self._sampler.update_priorities(batch.indices, priorities)

    def take_metrics(self) -> dict[str, float]:
        """Return what is worth watching since the last call."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"sampler": self._sampler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from it as well as what is there now allows."""
        try:
            self._sampler.load_state_dict(state["sampler"])
        except ReplayLakeError:
            # The steps came in another order, or more of them: another draw is as good.
            return


def is_shared(device: str) -> bool:
    """Whether tensors of that device lie where samplers draw to: nothing is copied then."""
    return torch.device(device).type == "cpu"


def draw_batch(sampler: BatchSource | TorchSampler, timings: Timings) -> Batch:
    """Draw a batch; its time and bytes are the link `sample`'s."""
    started = time.perf_counter()
    batch: Batch = sampler.sample()
    timings.add("sample", time.perf_counter() - started, 1, batch.num_bytes)
    return batch


def move_batch(batch: Batch, device: str, timings: Timings) -> Batch:
    """Return a batch of tensors on a device; what is copied there is the link `to_device`'s.

    Its time is until the copy was begun, which goes on beside the program.
    """
    if isinstance(batch.rewards, torch.Tensor):
        return batch
    if is_shared(device):
        return to_torch(batch, device)
    started = time.perf_counter()
    moved = to_torch(batch, device)
    timings.add("to_device", time.perf_counter() - started, 1, batch.num_bytes)
    return moved


def _make_sampler(
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
