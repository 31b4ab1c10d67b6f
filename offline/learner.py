"""Learner: one gradient step after another. GradientLearner runs any Algorithm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol, SupportsFloat

import torch
from torch import nn

from replaylake.datastore.batch import Batch
from replaylake.datastore.errors import ConfigInvalid
from replaylake.datastore.replay.to_torch import to_torch
from replaylake.datastore.spaces import Array
from replaylake.offline.algorithm import Algorithm, Networks
from replaylake.offline.graph import PolicyGraph
from replaylake.offline.options import expect
from replaylake.offline.state import pack_state, unpack_state


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
    def needs_bootstrap(self) -> bool:
        """Whether batches have to leave out the steps that have no next observation."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """The resolved options, as JSON has them."""
        ...

    @property
    def normalisation(self) -> Mapping[str, Any]:
        """What inputs and outputs are scaled by, as JSON has it; a part of the policy's graph."""
        ...

    def update(self, batch: Batch) -> Update:
        """Take one gradient step on a batch of numpy arrays."""
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
    ) -> None:
        """Make networks and optimizer under `seed`; the global random state is left as it was."""
        self._algorithm = algorithm
        self._discount = discount
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
        self._parameters = {
            group: list(module.parameters()) for group, module in self._networks.items()
        }
        self._optimizer = algorithm.optimizer(
            [{"name": group, "params": params} for group, params in self._parameters.items()]
        )
        self._rng = torch.Generator(self._device).manual_seed(seed)
        self._num_updates = 0

    @property
    def discount(self) -> float:
        """Gamma."""
        return self._discount

    @property
    def needs_bootstrap(self) -> bool:
        """Whether the algorithm looks at next observations."""
        return self._algorithm.needs_bootstrap

    @property
    def config(self) -> Mapping[str, Any]:
        """The algorithm's resolved options."""
        return self._algorithm.config

    @property
    def normalisation(self) -> Mapping[str, Any]:
        """What actions are scaled by."""
        return self._algorithm.normalisation

    def update(self, batch: Batch) -> Update:
        """Step each parameter group that is due down its own loss, then let the targets follow."""
        tensors = to_torch(batch, self._device)
        with torch.no_grad():
            tensors = self._algorithm.postprocess(self._networks, tensors)
        losses = self._algorithm.losses(self._networks, self._targets, tensors, self._rng)
        self._num_updates += 1
        self._set_gradients(losses.groups)
        self._optimizer.step()
        self._follow()
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
        """Continue bit for bit (on the CPU) where state_dict was called."""
        tree = unpack_state(state)
        self._networks.load_state_dict(tree["networks"])
        self._targets.load_state_dict(tree["targets"])
        self._optimizer.load_state_dict(tree["optimizer"])
        self._rng.set_state(tree["rng"])
        self._num_updates = tree["num_updates"]

    def _set_gradients(self, losses: Mapping[str, torch.Tensor]) -> None:
        """Differentiate each loss by its own group's parameters.

        A group without a loss, or whose update is not due, gets no gradient: it is not stepped.
        """
        self._optimizer.zero_grad(set_to_none=True)
        _check_groups("losses", losses, self._networks)
        periods = self._algorithm.update_periods
        due = [group for group in losses if self._num_updates % periods.get(group, 1) == 0]
        for group in due:
            parameters = self._parameters[group]
            gradients = torch.autograd.grad(
                losses[group], parameters, retain_graph=group != due[-1], allow_unused=True
            )
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient

    def _follow(self) -> None:
        with torch.no_grad():
            for group, target in self._algorithm.targets.items():
                if self._num_updates % target.period == 0:
                    _lerp(self._targets[group], self._networks[group], target.tau)


@contextmanager
def torch_threads(num: int) -> Iterator[None]:
    """Let torch use `num` CPU threads inside the block, and as many as before after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check_groups(what: str, named: Iterable[str], networks: Networks) -> None:
    """Refuse what is not a parameter group. Raises: ConfigInvalid."""
    for group in named:
        if group not in networks:
            raise ConfigInvalid(
                f"{what}: found parameter group {group!r}, expected one of {sorted(networks)}. "
                f"Name each after the network that it trains."
            )


def _lerp(target: nn.Module, network: nn.Module, tau: float) -> None:
    ours = [*target.parameters(), *target.buffers()]
    theirs = [*network.parameters(), *network.buffers()]
    for target_tensor, tensor in zip(ours, theirs, strict=True):
        if target_tensor.is_floating_point():
            target_tensor.lerp_(tensor, tau)
        else:
            target_tensor.copy_(tensor)
