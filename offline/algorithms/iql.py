"""IQL: values of the logged actions only, an expectile of them as state value, a weighted clone.

Kostrikov, Nair & Levine 2021, "Offline Reinforcement Learning with Implicit Q-Learning". No action
that was not logged is ever valued.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.spaces import Space
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.offline.algorithms.box_actions import (
    BoundedMeanNetwork,
    box_scaling,
    check_actor_critic,
    critic_losses,
    gaussian_graph,
    policy_of,
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
from replaylake.offline.learning.options import expect, to_options
from replaylake.offline.losses.actor_critic import advantage_weights, expectile_loss
from replaylake.offline.losses.likelihood import gaussian_nll
from replaylake.offline.networks.actors import NO_STATISTICS
from replaylake.offline.networks.critics import Critics, ValueNetwork

# Of ln std, in units of a normalized action; as in d3rlpy 2.8.1. It begins at -1.5.
_LOG_STD_RANGE: Final = (-5.0, 2.0)


@dataclass(frozen=True)
class IQLConfig:
    """Options of `iql`; defaults as in the paper (MuJoCo) and in d3rlpy 2.8.1."""

    hidden_sizes: Sequence[int] = (256, 256)
    actor_learning_rate: float = 3e-4
    critic_learning_rate: float = 3e-4  # of the state value too
    tau: float = 0.005  # share of the critics that their targets take over each update
    num_critics: int = 2
    # 0.5 values the mean logged action, towards 1 the best one; the paper takes 0.9 where good
    # actions are rare.
    expectile: float = 0.7
    # Of exp(weight_temp * advantage), in 1 / reward: 0 clones all actions alike.
    weight_temp: float = 3.0
    max_weight: float = 100.0  # the most that one action counts
    n_step: int = 1  # steps whose rewards are summed before the state value is asked

    def __post_init__(self) -> None:
        check_actor_critic("iql", self)
        expect(0 < self.expectile < 1, "iql: expectile", self.expectile, "between 0 and 1")
        expect(self.weight_temp >= 0, "iql: weight_temp", self.weight_temp, "0 or more")
        expect(self.max_weight > 0, "iql: max_weight", self.max_weight, "more than 0")


def iql(
    observation_space: Space,
    action_space: Space,
    config: IQLConfig,
    facts: DatasetStatistics = NO_STATISTICS,
) -> Algorithm:
    """Return IQL for float Box actions.

    Args:
        observation_space: any that networks take.
        action_space: a float Box.
        config: its options.
        facts: what actions and observations are normalized by.

    Raises: SpaceUnsupportedError for other action spaces.
    """
    box, scaling = box_scaling("iql", action_space, facts)
    spec = PolicySpec(observation_space, box, "gaussian")

    def losses(
        networks: Networks,
        targets: Networks,
        batch: Batch,
        rng: torch.Generator,
        due: frozenset[str],
    ) -> Losses:
        a_tm1 = scaling.normalize(tensor(batch.actions))
        with torch.no_grad():
            v_t = networks["value"](batch.next_observations)
            target_tm1 = torch.addcmul(tensor(batch.rewards), tensor(batch.discounts), v_t)
            target_q_tm1 = targets["critics"](batch.observations, a_tm1).amin(dim=0)
        # Eq. 6: (r + gamma v(s') - q(s, a))^2
        q_tm1 = networks["critics"](batch.observations, a_tm1)
        critics_loss, priorities = critic_losses(q_tm1, target_tm1, batch)
        # Eq. 5: L^expectile(q_target(s, a) - v(s))
        advantages_tm1 = target_q_tm1 - networks["value"](batch.observations)
        value_loss_tm1 = expectile_loss(advantages_tm1, config.expectile)
        # Eq. 7: -exp(beta (q_target(s, a) - v(s))) ln pi(a|s)
        weights_tm1 = advantage_weights(
            advantages_tm1.detach(), config.weight_temp, config.max_weight
        )
        nll_tm1 = gaussian_nll(*policy_of(networks, batch.observations), a_tm1)
        groups = {
            "critics": critics_loss,
            "value": weighted_mean(value_loss_tm1, batch),
            "policy": weighted_mean(weights_tm1 * nll_tm1, batch),
        }
        return with_metrics(groups, priorities, q_tm1)

    def networks() -> Networks:
        size = len(scaling.center)
        sizes = config.hidden_sizes
        return Networks(
            {
                "policy": BoundedMeanNetwork(observation_space, size, sizes, facts, _LOG_STD_RANGE),
                "value": ValueNetwork(observation_space, sizes, facts),
                "critics": Critics(observation_space, size, sizes, facts, config.num_critics),
            }
        )

    return Algorithm(
        spec=spec,
        losses=losses,
        networks=networks,
        optimizer=adam_by_group(
            {
                "policy": config.actor_learning_rate,
                "value": config.critic_learning_rate,
                "critics": config.critic_learning_rate,
            }
        ),
        targets={"critics": Target(config.tau)},
        policy=lambda nets: gaussian_graph(nets["policy"], spec, scaling),
        n_step=config.n_step,
        config=to_options(config),
        normalization={"actions": scaling.to_json()},
    )
