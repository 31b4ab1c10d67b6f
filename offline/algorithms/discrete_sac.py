"""SAC of discrete actions: every expectation over the policy is a sum over its actions.

Christodoulou 2019, "Soft Actor-Critic for Discrete Action Settings", algorithm 1. No action is
drawn: the critics value all of them at once, and the policy says how likely each is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.spaces import Space
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.offline.algorithms.box_actions import critic_losses, get_scalar
from replaylake.offline.algorithms.discrete_actions import action_indices, discrete, log_softmax
from replaylake.offline.algorithms.sac import SACConfig
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.learning.adam import adam_by_group
from replaylake.offline.learning.algorithm import (
    Algorithm,
    Losses,
    Networks,
    Target,
    tensor,
    weighted_mean,
)
from replaylake.offline.learning.options import expect, to_options
from replaylake.offline.losses.actor_critic import soft_values, temperature_loss
from replaylake.offline.losses.q_learning import gather_values
from replaylake.offline.networks.actors import NO_STATISTICS, CategoricalNetwork
from replaylake.offline.networks.critics import QNetworks, Scalar


@dataclass(frozen=True)
class DiscreteSACConfig(SACConfig):
    """Options of `sac` for Discrete actions: those of the continuous one, and target_entropy."""

    # Of the entropy of a uniform choice among the actions allowed, ln A; the paper's.
    target_entropy: float = 0.98

    def __post_init__(self) -> None:
        super().__post_init__()
        value = self.target_entropy
        expect(0 <= value <= 1, "sac: target_entropy", value, "0 to 1, a share of ln A")


def discrete_sac(
    observation_space: Space,
    action_space: Space,
    config: DiscreteSACConfig,
    facts: DatasetStatistics = NO_STATISTICS,
) -> Algorithm:
    """Return SAC for Discrete actions, honoring action masks.

    Raises: SpaceUnsupportedError for other actions.
    """
    space = discrete("sac", action_space)

    def losses(networks: Networks, targets: Networks, batch: Batch, *_: Any) -> Losses:
        log_temperature = get_scalar(networks, "temperature")
        temperature = torch.exp(log_temperature.detach())
        # Eq. 4 and 10: (r + gamma sum_a' pi(a'|s') (q_target(s', a') - temperature ln pi(a'|s'))
        #                - q(s, a))^2
        with torch.no_grad():
            log_probs_t = log_softmax(
                networks["policy"](batch.next_observations), batch.next_action_masks
            )
            v_t = soft_values(targets["critics"](batch.next_observations), log_probs_t, temperature)
            target_tm1 = torch.addcmul(tensor(batch.rewards), tensor(batch.discounts), v_t)
        q = networks["critics"](batch.observations)
        q_tm1 = gather_values(q, action_indices(batch, space).expand(len(q), -1))
        critics_loss, priorities = critic_losses(q_tm1, target_tm1, batch)
        # Eq. 12: sum_a pi(a|s) (temperature ln pi(a|s) - q(s, a))
        log_probs = log_softmax(networks["policy"](batch.observations), batch.action_masks)
        values = soft_values(q.detach(), log_probs, temperature)
        groups = {"critics": critics_loss, "policy": weighted_mean(-values, batch)}
        entropies = _entropies(log_probs.detach())
        if config.temperature_learning_rate > 0:
            # Eq. 11, against what can be had where not every action is allowed.
            excess = config.target_entropy * _greatest_entropies(log_probs, batch) - entropies
            groups["temperature"] = weighted_mean(
                temperature_loss(log_temperature, excess, 0.0), batch
            )
        metrics = {"q_mean": q_tm1.detach().mean(), "entropy": entropies.mean()}
        return Losses(groups, priorities, metrics)

    def networks() -> Networks:
        sizes = config.hidden_sizes
        return Networks(
            {
                "policy": CategoricalNetwork(observation_space, space.n, sizes, facts),
                "critics": QNetworks(observation_space, space.n, sizes, facts, config.num_critics),
                "temperature": Scalar(math.log(config.initial_temperature)),
            }
        )

    return Algorithm(
        spec=PolicySpec(observation_space, space, "categorical"),
        losses=losses,
        networks=networks,
        optimizer=adam_by_group(
            {
                "policy": config.actor_learning_rate,
                "critics": config.critic_learning_rate,
                "temperature": config.temperature_learning_rate,
            }
        ),
        targets={"critics": Target(config.tau)},
        n_step=config.n_step,
        config=to_options(config),
    )


def _entropies(log_probs: torch.Tensor) -> torch.Tensor:
    """Return -sum_a pi ln pi, [B] nats, of ln pi [B, A]."""
    return -(torch.exp(log_probs) * log_probs).sum(dim=-1)


def _greatest_entropies(log_probs: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the entropy of a uniform choice among the actions allowed: [B], or [] for all."""
    if batch.action_masks is None:
        return log_probs.new_tensor(math.log(log_probs.shape[-1]))
    return torch.log(tensor(batch.action_masks).sum(dim=-1))
