"""Learner: one gradient step after another. GradientLearner runs any Algorithm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Protocol, SupportsFloat

import torch
from torch import nn

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import ConfigInvalidError, PackageInvalidError
from replaylake.datastore.replay.items.sequences import Sequences
from replaylake.datastore.replay.items.transitions import Transitions
from replaylake.datastore.replay.to_torch import to_torch
from replaylake.datastore.replay.view import ReplayView
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.learning.algorithm import Algorithm, Networks, OnPolicy
from replaylake.offline.learning.flat import FlatGroup, flatten_parameters
from replaylake.offline.learning.minibatches import minibatches
from replaylake.offline.learning.options import expect
from replaylake.offline.learning.state import pack_state, unpack_state
from replaylake.offline.networks.actors import NO_STATISTICS
from replaylake.offline.networks.graph import PolicyGraph


@dataclass(frozen=True)
class Update:
    """What one update says.

    metrics: scalars by name; those on a GPU are read only when float() is called, so that an update
    need not wait for the device. priorities: float32 [B] or None.
    """

    metrics: Mapping[str, SupportsFloat]
    priorities: Array | None = None


class Learner(Protocol):
    """Learns from batches; owns its parameters, optimizer state and randomness."""

    @property
    def discount(self) -> float:
        """Gamma, which the sampler puts into the batches' discounts."""
        ...

    @property
    def item(self) -> Transitions | Sequences:
        """What the rows of its batches are: how many steps, and with what of those beyond."""
        ...

    @property
    def on_policy(self) -> OnPolicy | None:
        """How it learns from what its own policy just did; None if it learns from any log."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """The resolved options, as JSON has them."""
        ...

    @property
    def normalization(self) -> Mapping[str, Any]:
        """What inputs and outputs are scaled by, as JSON has it; a part of the policy's graph."""
        ...

    def prepare(self, view: ReplayView) -> None:
        """Look at all of what batches will be drawn from, before the first update."""
        ...

    def update(self, batch: Batch) -> Update:
        """Learn from a batch, of numpy arrays or of tensors on its device.

        One gradient step; of an on-policy learner one for each minibatch of each epoch.
        """
        ...

    def policy(self) -> PolicyGraph:
        """Return the policy as it is now: a graph to act with or export."""
        ...

    def state_dict(self) -> dict[str, Array]:
        """Return everything that a later update depends on, as named arrays."""
        ...

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Continue from what state_dict returned."""
        ...


class GradientLearner:
    """Runs an Algorithm: float32, one optimizer over named parameter groups, its own generator."""

    def __init__(
        self,
        algorithm: Algorithm,
        *,
        seed: int,
        discount: float = 0.99,
        device: torch.device | str = "cpu",
        facts: DatasetStatistics = NO_STATISTICS,
        reduce: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """Make networks and optimizer under `seed`; the global random state is left as it was.

        facts: how rewards are scaled; what else it knows the networks were made with. reduce: is
        given all gradients, float32 [P], before they are stepped down, to change them in place:
        several learners average theirs.
        """
        if facts.rewards.shift and (algorithm.needs_returns or algorithm.n_step > 1):
            raise ConfigInvalidError(
                f"rewards: found a shift of {facts.rewards.shift:g}, expected none for an "
                "algorithm that learns from sums of rewards: the shift of a sum depends on the "
                "number of its rewards. Scale rewards without a shift: normalize_rewards = 'std'."
            )
        self._algorithm = algorithm
        self._facts = facts
        self._reduce = reduce
        self._item = _item(algorithm, discount)
        self._device = torch.device(device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._networks = algorithm.networks().to(self._device)
        _check_groups("targets", algorithm.targets, self._networks)
        _check_groups("update_periods", algorithm.update_periods, self._networks)
        for group, period in algorithm.update_periods.items():
            expect(period >= 1, f"update_periods: {group}", period, "1 or more")
        self._targets = Networks(
            {group: deepcopy(self._networks[group]) for group in algorithm.targets}
        ).requires_grad_(False)
        self._groups, self._gradients = flatten_parameters(dict(self._networks.items()))
        self._with_buffers = frozenset(
            group for group, module in self._targets.items() if any(True for _ in module.buffers())
        )
        self._target_groups = {group: FlatGroup(m) for group, m in self._targets.items()}
        self._optimizer = algorithm.optimizer(
            [{"name": name, "params": [group.flat]} for name, group in self._groups.items()]
        )
        self._rng = torch.Generator(self._device).manual_seed(seed)
        self._num_updates = 0

    @property
    def discount(self) -> float:
        return self._item.discount

    @property
    def item(self) -> Transitions | Sequences:
        """What the algorithm says that its batches hold."""
        return self._item

    @property
    def on_policy(self) -> OnPolicy | None:
        return self._algorithm.on_policy

    @property
    def config(self) -> Mapping[str, Any]:
        return self._algorithm.config

    @property
    def normalization(self) -> Mapping[str, Any]:
        """What actions, observations and rewards are scaled by."""
        return {**self._facts.to_json(), **self._algorithm.normalization}

    def prepare(self, view: ReplayView) -> None:
        """Do nothing: what is learned comes in batches."""

    def update(self, batch: Batch) -> Update:
        """Step each parameter group that is due down its own loss, then let the targets follow.

        An on-policy learner does so for each minibatch, and says the means of their metrics; there
        are none where a batch has no step to learn from.
        """
        tensors = self._scale_batch(batch)
        with torch.no_grad():
            tensors = self._algorithm.postprocess(self._networks, tensors)
        if (how := self.on_policy) is None:
            return self._step(tensors)
        parts = minibatches(tensors, self._rng, epochs=how.epochs, num=how.minibatches)
        return _mean([self._step(part).metrics for part in parts])

    def _step(self, tensors: Batch) -> Update:
        """Take one step of the optimizer."""
        self._num_updates += 1
        due = self._due_groups()
        losses = self._algorithm.losses(self._networks, self._targets, tensors, self._rng, due)
        self._set_gradients(losses.groups, due)
        self._optimizer.step()
        self._update_targets()
        metrics = {f"{group}_loss": loss.detach() for group, loss in losses.groups.items()}
        metrics |= {name: value.detach() for name, value in losses.metrics.items()}
        priorities = losses.priorities
        return Update(metrics, None if priorities is None else priorities.detach().cpu().numpy())

    def policy(self) -> PolicyGraph:
        """Return the algorithm's policy graph over the current networks."""
        return self._algorithm.policy_graph(self._networks)

    def state_dict(self) -> dict[str, Array]:
        """Return networks, targets, optimizer, generator and the number of updates."""
        return pack_state(
            {
                "networks": self._networks.state_dict(),
                "targets": self._targets.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "rng": self._rng.get_state(),
                "num_updates": self._num_updates,
            }
        )

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Continue bit for bit (on the CPU) where state_dict was called.

        Raises: PackageInvalidError, with nothing changed, if it is the state of other networks.
        """
        tree = unpack_state(state)
        _check_shapes("networks", tree, self._networks)
        _check_shapes("targets", tree, self._targets)
        self._networks.load_state_dict(tree["networks"])
        self._targets.load_state_dict(tree["targets"])
        self._optimizer.load_state_dict(tree["optimizer"])
        self._rng.set_state(tree["rng"])
        self._num_updates = tree["num_updates"]

    def _scale_batch(self, batch: Batch) -> Batch:
        """Return the batch as tensors on the device, its rewards scaled."""
        tensors = batch
        if not isinstance(batch.rewards, torch.Tensor):
            tensors = to_torch(batch, self._device)
        shift, scale = self._facts.rewards
        if (shift, scale) == (0.0, 1.0):
            return tensors
        returns = None if tensors.returns is None else tensors.returns / scale
        return replace(tensors, rewards=(tensors.rewards - shift) / scale, returns=returns)

    def _due_groups(self) -> frozenset[str]:
        """Return the groups that step in this update."""
        periods = self._algorithm.update_periods
        return frozenset(
            group for group in self._networks if self._num_updates % periods.get(group, 1) == 0
        )

    def _set_gradients(self, losses: Mapping[str, torch.Tensor], due: frozenset[str]) -> None:
        """Differentiate each loss by its own group's parameters.

        A group without a loss, or whose update is not due, gets no gradient: it is not stepped.
        """
        _check_groups("losses", losses, self._networks)
        names = [name for name in losses if name in due]
        for name, group in self._groups.items():
            group.flat.grad = group.gradients if name in names else None
        for name in names:
            self._groups[name].differentiate(losses[name], retain_graph=name != names[-1])
        if self._reduce is not None:
            self._reduce(self._gradients)

    def _update_targets(self) -> None:
        with torch.no_grad():
            for group, target in self._algorithm.targets.items():
                if self._num_updates % target.period == 0:
                    ours, theirs = self._target_groups[group].flat, self._groups[group].flat
                    ours.data.lerp_(theirs.data, target.tau)
                    if group in self._with_buffers:
                        _copy_buffers(self._targets[group], self._networks[group])


def _item(algorithm: Algorithm, discount: float) -> Transitions | Sequences:
    if algorithm.on_policy is not None:
        return Sequences(algorithm.on_policy.length, discount=discount)
    return Transitions(
        discount,
        n_step=algorithm.n_step,
        only_bootstrappable=algorithm.needs_bootstrap,
        returns=algorithm.needs_returns,
        next_actions=algorithm.needs_next_actions,
    )


def _mean(each: Sequence[Mapping[str, Any]]) -> Update:
    """Return the means of some steps' metrics, without waiting for the device."""
    if not each:
        return Update({})
    return Update({name: torch.stack([one[name] for one in each]).mean() for name in each[0]})


@contextmanager
def torch_threads(num: int) -> Iterator[None]:
    """Let torch use `num` CPU threads inside the block, and as many as before after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check_groups(what: str, groups: Iterable[str], networks: Networks) -> None:
    """Refuse what is not a parameter group. Raises: ConfigInvalidError."""
    for group in groups:
        if group not in networks:
            raise ConfigInvalidError(
                f"{what}: found parameter group {group!r}, expected one of {sorted(networks)}. "
                f"Name each after the network that it trains."
            )


def _check_shapes(what: str, tree: Any, networks: Networks) -> None:
    """Refuse weights of another architecture. Raises: PackageInvalidError."""
    saved = tree.get(what, {}) if isinstance(tree, Mapping) else {}
    shapes = {name: list(value.shape) for name, value in saved.items()}
    expected = {name: list(value.shape) for name, value in networks.state_dict().items()}
    for name in [*expected, *shapes]:
        if shapes.get(name) != expected.get(name):
            raise PackageInvalidError(
                f"learner state: {what}.{name}: found {shapes.get(name, 'none')}, expected "
                f"{expected.get(name, 'none')}. It was saved by another algorithm, with other "
                "options or for other spaces: create the learner with those."
            )


def _copy_buffers(target: nn.Module, network: nn.Module) -> None:
    for ours, theirs in zip(target.buffers(), network.buffers(), strict=True):
        ours.copy_(theirs)
