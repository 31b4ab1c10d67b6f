"""SAC: rewards and the policy's own entropy, whose price is learned.

Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications", algorithm 1. It explores to
learn; from a log alone it overrates actions that nobody took (cql keeps to the log).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.spaces import Space
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.offline.algorithms.box_actions import (
    box_scaling,
    check_actor_critic,
    check_temperature,
    critic_losses,
    critics_of,
    get_scalar,
    policy_of,
    tanh_gaussian_graph,
    with_metrics,
)
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
from replaylake.offline.learning.options import to_options
from replaylake.offline.losses.actor_critic import (
    clipped_double_target,
    sample_squashed,
    temperature_loss,
)
from replaylake.offline.networks.actors import NO_STATISTICS, GaussianNetwork
from replaylake.offline.networks.critics import Critics, Scalar

# Of ln std before the tanh; as in d3rlpy 2.8.1 and the paper's code.
LOG_STD_RANGE: Final = (-20.0, 2.0)


@dataclass(frozen=True)
class SACConfig:
    """Options of `sac`; defaults as in the paper and in d3rlpy 2.8.1."""

    hidden_sizes: Sequence[int] = (256, 256)
    actor_learning_rate: float = 3e-4
    critic_learning_rate: float = 3e-4
    temperature_learning_rate: float = 3e-4  # 0 keeps the temperature as it begins
    initial_temperature: float = 1.0  # reward per nat of entropy
    tau: float = 0.005  # share of the critics that their targets take over each update
    num_critics: int = 2
    n_step: int = 1  # steps whose rewards are summed before the critics are asked

    def __post_init__(self) -> None:
        check_actor_critic("sac", self)
        check_temperature("sac", self)


def sac(
    observation_space: Space,
    action_space: Space,
    config: SACConfig,
    facts: DatasetStatistics = NO_STATISTICS,
) -> Algorithm:
    """Return SAC for float Box actions, its target entropy -D nats for actions of D elements.

    Args:
        observation_space: any that networks take.
        action_space: a float Box.
        config: its options.
        facts: what actions and observations are normalized by.

    Raises: SpaceUnsupportedError for other action spaces.
    """
    box, scaling = box_scaling("sac", action_space, facts)
    size = len(scaling.center)
    spec = PolicySpec(observation_space, scaling.bound_space(box), "squashed_gaussian")

    def losses(
        networks: Networks,
        targets: Networks,
        batch: Batch,
        rng: torch.Generator,
        due: frozenset[str],
    ) -> Losses:
        a_tm1 = scaling.normalize(tensor(batch.actions))
        log_temperature = get_scalar(networks, "temperature")
        temperature = torch.exp(log_temperature.detach())
        noise = torch.randn((2, *a_tm1.shape), generator=rng, device=a_tm1.device)
        # Eq. 5 and 6: (r + gamma (q_target(s', a') - temperature ln pi(a'|s')) - q(s, a))^2
        with torch.no_grad():
            a_t, log_probs_t = sample_squashed(
                *policy_of(networks, batch.next_observations), noise[0]
            )
            target_tm1 = clipped_double_target(
                tensor(batch.rewards),
                tensor(batch.discounts),
                targets["critics"](batch.next_observations, a_t),
                temperature * log_probs_t,
            )
        q_tm1 = networks["critics"](batch.observations, a_tm1)
        critics_loss, priorities = critic_losses(q_tm1, target_tm1, batch)
        # Eq. 9: temperature ln pi(a|s) - q(s, a)
        a, log_probs = sample_squashed(*policy_of(networks, batch.observations), noise[1])
        q = critics_of(networks).forward_frozen(batch.observations, a).amin(dim=0)
        groups = {
            "critics": critics_loss,
            "policy": weighted_mean(torch.addcmul(-q, temperature, log_probs), batch),
        }
        if config.temperature_learning_rate > 0:
            loss = temperature_loss(log_temperature, log_probs, -size)
            groups["temperature"] = weighted_mean(loss, batch)
        return with_metrics(groups, priorities, q_tm1)

    def networks() -> Networks:
        sizes = config.hidden_sizes
        return Networks(
            {
                "policy": GaussianNetwork(observation_space, size, sizes, facts, LOG_STD_RANGE),
                "critics": Critics(observation_space, size, sizes, facts, config.num_critics),
                "temperature": Scalar(math.log(config.initial_temperature)),
            }
        )

    return Algorithm(
        spec=spec,
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
        policy=lambda nets: tanh_gaussian_graph(nets["policy"], spec),
        n_step=config.n_step,
        config=to_options(config),
        normalization={"actions": scaling.to_json()},
    )
