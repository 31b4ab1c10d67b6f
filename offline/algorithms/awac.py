"""AWAC: critics of the current policy, and a clone of logged actions weighted by their advantage.

Nair, Gupta, Dalal & Levine 2020, "AWAC: Accelerating Online Reinforcement Learning with Offline
Datasets", algorithm 1.
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
    critics_of,
    gaussian_graph,
    policy_of,
    q_of_many,
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
from replaylake.offline.losses.actor_critic import (
    clipped_double_target,
    normalized_advantage_weights,
    sample_squashed,
)
from replaylake.offline.losses.likelihood import gaussian_nll
from replaylake.offline.networks.actors import NO_STATISTICS
from replaylake.offline.networks.critics import Critics

# Of ln std, in units of a normalized action; as in d3rlpy 2.8.1. It begins at -3.
_LOG_STD_RANGE: Final = (-6.0, 0.0)


@dataclass(frozen=True)
class AWACConfig:
    """Options of `awac`; all defaults but `temperature` as in d3rlpy 2.8.1.

    d3rlpy and the paper draw batches of 1,024.
    """

    hidden_sizes: Sequence[int] = (256, 256)
    actor_learning_rate: float = 3e-4
    critic_learning_rate: float = 3e-4
    tau: float = 0.005  # share of the critics that their targets take over each update
    num_critics: int = 2
    # In units of reward: an action's weight is exp(advantage / lam), so that smaller is greedier.
    lam: float = 1.0
    num_action_samples: int = 1  # of the policy, whose mean value is the state's
    # Reward per nat of entropy in the critics' targets. The paper has none. d3rlpy 2.8.1 adds it at
    # 1, by a temperature that its SAC learns and its AWAC leaves where it begins.
    temperature: float = 0.0
    n_step: int = 1  # steps whose rewards are summed before the critics are asked

    def __post_init__(self) -> None:
        check_actor_critic("awac", self)
        expect(self.lam > 0, "awac: lam", self.lam, "more than 0")
        samples = self.num_action_samples
        expect(samples >= 1, "awac: num_action_samples", samples, "1 or more")
        expect(self.temperature >= 0, "awac: temperature", self.temperature, "0 or more")


def awac(
    observation_space: Space,
    action_space: Space,
    config: AWACConfig,
    facts: DatasetStatistics = NO_STATISTICS,
) -> Algorithm:
    """Return AWAC for float Box actions.

    As in d3rlpy, the critics' targets take actions of the gaussian around the policy's mean before
    its bound, squashed by a tanh; advantages, those of the policy, clipped to the bounds.

    Args:
        observation_space: any that networks take.
        action_space: a float Box.
        config: its options.
        facts: what actions and observations are normalized by.

    Raises: SpaceUnsupportedError for other action spaces.
    """
    box, scaling = box_scaling("awac", action_space, facts)
    spec = PolicySpec(observation_space, box, "gaussian")

    def losses(
        networks: Networks,
        targets: Networks,
        batch: Batch,
        rng: torch.Generator,
        due: frozenset[str],
    ) -> Losses:
        a_tm1 = scaling.normalize(tensor(batch.actions))
        means_tm1, log_stds = policy_of(networks, batch.observations)
        shape = (1 + config.num_action_samples, *a_tm1.shape)
        noise = torch.randn(shape, generator=rng, device=a_tm1.device)
        with torch.no_grad():
            target_tm1 = _target(networks, targets, batch, noise[0], config.temperature)
            # The policy's value: the mean over its actions of the least of the critics.
            a = torch.addcmul(means_tm1, torch.exp(log_stds), noise[1:]).clamp_(-1, 1)
            sampled_q_tm1 = q_of_many(critics_of(networks), batch.observations, a.transpose(0, 1))
            v_tm1 = sampled_q_tm1.amin(dim=0).mean(dim=-1)
        q_tm1 = networks["critics"](batch.observations, a_tm1)
        critics_loss, priorities = critic_losses(q_tm1, target_tm1, batch)
        # Eq. 13: -exp(A / lambda) / Z ln pi(a|s)
        advantages_tm1 = q_tm1.detach().amin(dim=0) - v_tm1
        weights_tm1 = normalized_advantage_weights(advantages_tm1, config.lam)
        nll_tm1 = gaussian_nll(means_tm1, log_stds, a_tm1)
        groups = {"critics": critics_loss, "policy": weighted_mean(weights_tm1 * nll_tm1, batch)}
        return with_metrics(groups, priorities, q_tm1)

    def networks() -> Networks:
        size = len(scaling.center)
        sizes = config.hidden_sizes
        return Networks(
            {
                "policy": BoundedMeanNetwork(observation_space, size, sizes, facts, _LOG_STD_RANGE),
                "critics": Critics(observation_space, size, sizes, facts, config.num_critics),
            }
        )

    return Algorithm(
        spec=spec,
        losses=losses,
        networks=networks,
        optimizer=adam_by_group(
            {"policy": config.actor_learning_rate, "critics": config.critic_learning_rate}
        ),
        targets={"critics": Target(config.tau)},
        policy=lambda nets: gaussian_graph(nets["policy"], spec, scaling),
        n_step=config.n_step,
        config=to_options(config),
        normalization={"actions": scaling.to_json()},
    )


def _target(
    networks: Networks, targets: Networks, batch: Batch, noise: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return r + gamma (min_i q_i(s', a') - temperature ln pi(a'|s')), [B]."""
    policy = networks["policy"]
    assert isinstance(policy, BoundedMeanNetwork)
    unbounded, log_stds = policy.compute_pre_tanh(batch.next_observations)
    a_t, log_probs_t = sample_squashed(unbounded, log_stds, noise)
    q_t = targets["critics"](batch.next_observations, a_t)
    return clipped_double_target(
        tensor(batch.rewards), tensor(batch.discounts), q_t, temperature * log_probs_t
    )
