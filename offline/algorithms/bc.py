"""Behavior cloning: act as the log did. Maximum likelihood of the logged actions.

Pomerleau 1989, "ALVINN"; what it cannot do, drift away from the logged states, is bounded in Ross &
Bagnell 2010, "Efficient Reductions for Imitation Learning", theorem 2.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

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
from replaylake.datastore.lake.policies.multi_categorical import element_sizes
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.offline.algorithms.box_actions import deterministic_graph, gaussian_graph
from replaylake.offline.algorithms.discrete_actions import action_indices
from replaylake.offline.algorithms.network_options import check_network
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.learning.action_scaling import action_scaling
from replaylake.offline.learning.adam import adam
from replaylake.offline.learning.algorithm import Algorithm, Losses, Networks, tensor, weighted_mean
from replaylake.offline.learning.options import expect, to_options
from replaylake.offline.losses.likelihood import (
    categorical_nll,
    gaussian_nll,
    multi_categorical_nll,
    squared_error,
)
from replaylake.offline.networks.actors import (
    NO_STATISTICS,
    CategoricalNetwork,
    DeterministicNetwork,
    GaussianNetwork,
)


@dataclass(frozen=True)
class BCConfig:
    """Options of `bc`."""

    hidden_sizes: Sequence[int] = (256, 256)
    learning_rate: float = 1e-3
    # Of a Box action only. A gaussian has a density, which serving records and off-policy
    # evaluation needs; `deterministic` regresses the mean alone.
    head: Literal["gaussian", "deterministic"] = "gaussian"
    # Of the gaussian head, 0 to 1; see losses.gaussian_nll. Cloning a bang-bang Pendulum controller
    # of return -139 gave -860 and -833 at 0, -150 and -151 at 0.5, -163 and -150 at 1; RLlib's
    # smooth log -141 at each (2 seeds, 2,000 updates, 2026-11).
    beta: float = 0.5

    def __post_init__(self) -> None:
        check_network("bc", self)
        expect(0 <= self.beta <= 1, "bc: beta", self.beta, "0 to 1")


def bc(
    observation_space: Space,
    action_space: Space,
    config: BCConfig,
    facts: DatasetStatistics = NO_STATISTICS,
) -> Algorithm:
    """Return behavior cloning for any actions but text.

    Args:
        observation_space: any but text.
        action_space: Discrete: cross-entropy, honoring action masks. MultiDiscrete, MultiBinary:
            the sum of the elements' cross-entropies. Box: gaussian likelihood or squared error of
            normalized actions.
        config: its options.
        facts: what actions and observations are normalized by.

    Raises: SpaceUnsupportedError for other spaces.
    """
    if isinstance(action_space, Discrete):
        return _discrete(observation_space, action_space, config, facts)
    if isinstance(action_space, MultiDiscrete | MultiBinary):
        return _multi_discrete(observation_space, action_space, config, facts)
    if isinstance(action_space, Box):
        if config.head == "gaussian":
            return _gaussian(observation_space, action_space, config, facts)
        return _deterministic(observation_space, action_space, config, facts)
    raise SpaceUnsupportedError(
        f"bc: found action space {describe(action_space)}, expected Discrete, "
        "MultiDiscrete, MultiBinary or a float Box."
    )


def _discrete(
    observation_space: Space, action_space: Discrete, config: BCConfig, facts: DatasetStatistics
) -> Algorithm:
    def losses(networks: Networks, targets: Networks, batch: Batch, *_: Any) -> Losses:
        logits_tm1 = networks["policy"](batch.observations)
        a_tm1 = action_indices(batch, action_space)
        nll_tm1 = categorical_nll(logits_tm1, a_tm1, batch.action_masks)
        return _average_losses(nll_tm1, batch)

    def networks() -> Networks:
        return Networks(
            {
                "policy": CategoricalNetwork(
                    observation_space, action_space.n, config.hidden_sizes, facts
                )
            }
        )

    return Algorithm(
        spec=PolicySpec(observation_space, action_space, "categorical"),
        losses=losses,
        networks=networks,
        optimizer=adam(config.learning_rate),
        needs_bootstrap=False,
        config=_resolve_options(config, Discrete),
    )


def _multi_discrete(
    observation_space: Space,
    action_space: MultiDiscrete | MultiBinary,
    config: BCConfig,
    facts: DatasetStatistics,
) -> Algorithm:
    sizes = element_sizes(action_space)

    def losses(networks: Networks, targets: Networks, batch: Batch, *_: Any) -> Losses:
        logits_tm1 = networks["policy"](batch.observations)
        nll_tm1 = multi_categorical_nll(logits_tm1, tensor(batch.actions), sizes)
        return _average_losses(nll_tm1, batch)

    def networks() -> Networks:
        network = CategoricalNetwork(observation_space, sum(sizes), config.hidden_sizes, facts)
        return Networks({"policy": network})

    return Algorithm(
        spec=PolicySpec(observation_space, action_space, "multi_categorical"),
        losses=losses,
        networks=networks,
        optimizer=adam(config.learning_rate),
        needs_bootstrap=False,
        config={**to_options(config), "head": "multi_categorical"},
    )


def _gaussian(
    observation_space: Space, action_space: Box, config: BCConfig, facts: DatasetStatistics
) -> Algorithm:
    scaling = action_scaling(action_space, facts.action_range)
    spec = PolicySpec(observation_space, action_space, "gaussian")

    def losses(networks: Networks, targets: Networks, batch: Batch, *_: Any) -> Losses:
        means_tm1, log_stds_tm1 = networks["policy"](batch.observations)
        a_tm1 = scaling.normalize(tensor(batch.actions))
        return _average_losses(gaussian_nll(means_tm1, log_stds_tm1, a_tm1, config.beta), batch)

    def networks() -> Networks:
        size = len(scaling.center)
        return Networks(
            {"policy": GaussianNetwork(observation_space, size, config.hidden_sizes, facts)}
        )

    return Algorithm(
        spec=spec,
        losses=losses,
        networks=networks,
        optimizer=adam(config.learning_rate),
        policy=lambda nets: gaussian_graph(nets["policy"], spec, scaling),
        needs_bootstrap=False,
        config=_resolve_options(config, Box),
        normalization={"actions": scaling.to_json()},
    )


def _deterministic(
    observation_space: Space, action_space: Box, config: BCConfig, facts: DatasetStatistics
) -> Algorithm:
    scaling = action_scaling(action_space, facts.action_range)
    spec = PolicySpec(observation_space, action_space, "deterministic")

    def losses(networks: Networks, targets: Networks, batch: Batch, *_: Any) -> Losses:
        predicted_tm1 = networks["policy"](batch.observations)
        return _average_losses(
            squared_error(predicted_tm1, scaling.normalize(tensor(batch.actions))), batch
        )

    def networks() -> Networks:
        size = len(scaling.center)
        return Networks(
            {"policy": DeterministicNetwork(observation_space, size, config.hidden_sizes, facts)}
        )

    return Algorithm(
        spec=spec,
        losses=losses,
        networks=networks,
        optimizer=adam(config.learning_rate),
        policy=lambda nets: deterministic_graph(nets["policy"], spec, scaling),
        needs_bootstrap=False,
        config=_resolve_options(config, Box),
        normalization={"actions": scaling.to_json()},
    )


def _average_losses(loss_tm1: torch.Tensor, batch: Batch) -> Losses:
    """Average over the batch with the sampler's importance weights."""
    return Losses({"policy": weighted_mean(loss_tm1, batch)})


def _resolve_options(config: BCConfig, kind: type[Discrete | Box]) -> dict[str, Any]:
    options = to_options(config)
    if kind is Discrete:
        options["head"] = "categorical"
    return options
