"""Doubly robust bandit: a reward model's policy, corrected by what the log's rewards really were.

Dudik, Langford & Li 2011, "Doubly Robust Policy Evaluation and Learning". The value of a
policy is estimated without bias if either the propensities or the reward model are right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.spaces import Space
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.offline.algorithms.discrete_actions import (
    action_indices,
    discrete,
    log_softmax,
)
from replaylake.offline.algorithms.network_options import check_network
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.learning.adam import adam_with_decay
from replaylake.offline.learning.algorithm import (
    Algorithm,
    Losses,
    Networks,
    tensor,
    weighted_mean,
)
from replaylake.offline.learning.options import expect, to_options
from replaylake.offline.losses.bandit import doubly_robust_values, importance_weights
from replaylake.offline.losses.q_learning import gather_values
from replaylake.offline.networks.actors import NO_STATISTICS, CategoricalNetwork
from replaylake.offline.networks.critics import QNetworks


@dataclass(frozen=True)
class DRBanditConfig:
    """Options of `dr_bandit`."""

    hidden_sizes: Sequence[int] = (256, 256)
    learning_rate: float = 1e-3
    # Greatest pi / mu of the correction; a row beyond it no longer moves the policy.
    max_weight: float = 100.0
    # Decoupled, of all weights of the policy and of the reward models.
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        check_network("dr_bandit", self)
        expect(self.max_weight > 0, "dr_bandit: max_weight", self.max_weight, "more than 0")
        expect(self.weight_decay >= 0, "dr_bandit: weight_decay", self.weight_decay, "0 or more")


def dr_bandit(
    observation_space: Space,
    action_space: Space,
    config: DRBanditConfig,
    facts: DatasetStatistics = NO_STATISTICS,
) -> Algorithm:
    """Return doubly robust policy learning for one-step logs with known propensities.

    Two reward models each learn from half of the rows, by their keys, and judge the other half
    (cross-fitting): a row's own reward would otherwise be in the model that it is compared with.
    Discrete actions, honoring action masks. Raises: SpaceUnsupportedError for others.
    """
    space = discrete("dr_bandit", action_space)

    def losses(networks: Networks, targets: Networks, batch: Batch, *_: Any) -> Losses:
        a, r = action_indices(batch, space), tensor(batch.rewards)
        q_both = networks["reward"](batch.observations)  # [2, B, A]
        taken_first, taken_second = gather_values(q_both, a.expand(2, -1))
        in_first = _in_first_half(batch, a.device)
        # Model 0 learns from the first half, model 1 from the second.
        learned = torch.where(in_first, taken_first, taken_second)
        q = torch.where(in_first[:, None], q_both[1], q_both[0]).detach()
        q_taken = torch.where(in_first, taken_second, taken_first).detach()
        log_pi = log_softmax(networks["policy"](batch.observations), batch.action_masks)
        weights = importance_weights(
            gather_values(log_pi, a), tensor(batch.behavior_log_probs), config.max_weight
        )
        # V(pi) = mean( sum_a pi(a|x) q(x, a) + w (r - q(x, a)) )
        v_pi = (log_pi.exp() * q).sum(dim=-1)
        values = doubly_robust_values(r, weights, q_taken, v_pi)
        return Losses(
            {
                "policy": -weighted_mean(values, batch),
                "reward": weighted_mean((learned - r).square(), batch),
            },
            metrics={"weight_mean": weights.mean(), "model_value": v_pi.mean()},
        )

    def networks() -> Networks:
        sizes = config.hidden_sizes
        return Networks(
            {
                "policy": CategoricalNetwork(observation_space, space.n, sizes, facts),
                "reward": QNetworks(observation_space, space.n, sizes, facts, num=2),
            }
        )

    return Algorithm(
        spec=PolicySpec(observation_space, space, "categorical"),
        losses=losses,
        networks=networks,
        optimizer=adam_with_decay(config.learning_rate, config.weight_decay),
        needs_bootstrap=False,
        needs_propensities=True,
        config=to_options(config),
    )


def _in_first_half(batch: Batch, device: torch.device) -> torch.Tensor:
    """Return which half each row is of, bool [B]: the same one whenever it is drawn."""
    # Keys are hashes, so that one bit of them is a fair coin.
    return torch.from_numpy((batch.keys[:, 0] & 1).astype(bool)).to(device)
