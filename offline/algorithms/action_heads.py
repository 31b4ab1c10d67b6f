"""Action heads: what a network's outputs say of the actions that were taken, for each kind.

They give the densities that the policy logs when it acts (datastore/lake/policies/heads.py): where
the policy that learns is the one that acted, the ratio of the two is 1.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.spaces import (
    Box,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    describe,
)
from replaylake.datastore.errors import SpaceUnsupportedError
from replaylake.datastore.lake.policies.log_probs import UNIT_LIMIT
from replaylake.datastore.lake.policies.multi_categorical import element_sizes
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.offline.algorithms.box_actions import box_scaling
from replaylake.offline.algorithms.discrete_actions import action_indices, log_softmax
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.learning.action_scaling import ActionScaling
from replaylake.offline.learning.algorithm import tensor
from replaylake.offline.losses.actor_critic import sample_squashed
from replaylake.offline.losses.likelihood import gaussian_nll

Parameters = tuple[torch.Tensor, ...]


class EncodedActions(NamedTuple):
    """The actions of M steps as a head takes them, and ln mu float [M] of those who took them."""

    actions: torch.Tensor
    log_probs: torch.Tensor


class Distribution(Protocol):
    """A policy's distribution of actions at M observations."""

    def log_probs(self, actions: torch.Tensor) -> torch.Tensor:
        """Return ln pi(a|s) of one action each, float [M]."""
        ...

    def entropies(self, rng: torch.Generator) -> torch.Tensor:
        """Return the entropy in nats, float [M]; an estimate of it where it has no closed form."""
        ...


class ActionHead(Protocol):
    """What is done with one kind of actions; num_outputs of a network, and num_stds beside it."""

    spec: PolicySpec
    num_outputs: int
    num_stds: int

    def encode_actions(self, batch: Batch) -> EncodedActions:
        """Return the actions of a batch of M steps."""
        ...

    def distribution(self, parameters: Parameters, masks: torch.Tensor | None) -> Distribution:
        """Return what a network's outputs stand for. masks: bool [M, A], of Discrete actions."""
        ...


def action_head(
    name: str, observation_space: Space, action_space: Space, facts: DatasetStatistics
) -> ActionHead:
    """Return the head for an action space. Raises: SpaceUnsupportedError."""
    if isinstance(action_space, Discrete):
        return CategoricalHead(observation_space, action_space)
    if isinstance(action_space, MultiDiscrete | MultiBinary):
        return MultiCategoricalHead(observation_space, action_space)
    if isinstance(action_space, Box):
        space, scaling = box_scaling(name, action_space, facts)
        return SquashedGaussianHead(observation_space, space, scaling)
    raise SpaceUnsupportedError(
        f"{name}: found action space {describe(action_space)}, expected Discrete, MultiDiscrete, "
        "MultiBinary or a float Box."
    )


class Categoricals:
    """One categorical for each element of an action; independent given the observation."""

    def __init__(self, each: list[torch.Tensor]) -> None:
        """Take ln pi(.|s) of each element, float [M, n]."""
        self._each = each

    def log_probs(self, actions: torch.Tensor) -> torch.Tensor:
        """Return the sum of the elements'. actions: int64 [M, K]."""
        logs = [of_all.gather(1, actions[:, k, None])[:, 0] for k, of_all in enumerate(self._each)]
        return _sum(logs)

    def entropies(self, rng: torch.Generator) -> torch.Tensor:
        """Return the sum of the elements'."""
        return _sum([-(of_all.exp() * of_all).sum(dim=1) for of_all in self._each])


class CategoricalHead:
    """Discrete actions; those that the mask forbids have no probability."""

    num_stds = 0

    def __init__(self, observation_space: Space, space: Discrete) -> None:
        self.spec = PolicySpec(observation_space, space, "categorical")
        self.num_outputs = space.n
        self._space = space

    def encode_actions(self, batch: Batch) -> EncodedActions:
        """Return int64 [M, 1]."""
        actions = action_indices(batch, self._space)[:, None]
        return EncodedActions(actions, tensor(batch.behavior_log_probs))

    def distribution(self, parameters: Parameters, masks: torch.Tensor | None) -> Distribution:
        """Return that of logits [M, A]."""
        return Categoricals([log_softmax(parameters[0], masks)])


class MultiCategoricalHead:
    """MultiDiscrete and MultiBinary actions."""

    num_stds = 0

    def __init__(self, observation_space: Space, space: MultiDiscrete | MultiBinary) -> None:
        self.spec = PolicySpec(observation_space, space, "multi_categorical")
        self._sizes = list(element_sizes(space))
        self.num_outputs = sum(self._sizes)

    def encode_actions(self, batch: Batch) -> EncodedActions:
        """Return int64 [M, K]."""
        return EncodedActions(tensor(batch.actions).long(), tensor(batch.behavior_log_probs))

    def distribution(self, parameters: Parameters, masks: torch.Tensor | None) -> Distribution:
        """Return that of logits [M, sum of sizes]."""
        each = torch.split(parameters[0], self._sizes, dim=1)
        return Categoricals([log_softmax(logits, None) for logits in each])


class SquashedGaussian:
    """A gaussian through a tanh, [M, D]; actions are those before the tanh."""

    def __init__(self, means: torch.Tensor, log_stds: torch.Tensor) -> None:
        self._means, self._log_stds = means, log_stds

    def log_probs(self, actions: torch.Tensor) -> torch.Tensor:
        """Return the density before the tanh."""
        return -gaussian_nll(self._means, self._log_stds, actions)

    def entropies(self, rng: torch.Generator) -> torch.Tensor:
        """Return -ln of the squashed density of an action that it draws, unbiased."""
        noise = torch.randn(self._means.shape, generator=rng, device=self._means.device)
        return -sample_squashed(self._means, self._log_stds, noise)[1]


class SquashedGaussianHead:
    """Box actions.

    Not a gaussian that is clipped to the bounds: of an action on a bound nobody could say later how
    likely it was, as what was drawn beyond is not recorded. A squashed one always has a density.
    """

    def __init__(self, observation_space: Space, space: Box, scaling: ActionScaling) -> None:
        self.spec = PolicySpec(observation_space, scaling.bound_space(space), "squashed_gaussian")
        self.num_outputs = self.num_stds = len(scaling.center)
        self.scaling = scaling

    def encode_actions(self, batch: Batch) -> EncodedActions:
        """Return the actions before the tanh, [M, D], and their densities there.

        Those of the squashed ones differ by a factor that is the same for all policies.
        """
        # In float64: near a bound the action is told from the bound by its last bits.
        actions = tensor(batch.actions).reshape(len(batch.actions), -1).double()
        center, scale = (
            torch.from_numpy(array).to(actions)
            for array in (self.scaling.center, self.scaling.scale)
        )
        units = ((actions - center) / scale).clamp(-UNIT_LIMIT, UNIT_LIMIT)
        raw = torch.atanh(units)
        # ln(1 - tanh(x)^2), in the form that does not cancel.
        log_jacobian = 2 * (math.log(2) - raw - F.softplus(-2 * raw)).sum(dim=1)
        log_probs = tensor(batch.behavior_log_probs) + log_jacobian + scale.log().sum()
        return EncodedActions(raw.float(), log_probs.float())

    def distribution(self, parameters: Parameters, masks: torch.Tensor | None) -> Distribution:
        """Return that of means and log_stds [M, D]."""
        return SquashedGaussian(*parameters)


def _sum(each: list[torch.Tensor]) -> torch.Tensor:
    return each[0] if len(each) == 1 else torch.stack(each).sum(dim=0)
