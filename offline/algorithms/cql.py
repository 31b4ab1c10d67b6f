"""CQL: SAC whose critics are also held down where the log has no actions.

Kumar, Zhou, Tucker & Levine 2020, "Conservative Q-Learning for Offline Reinforcement Learning": the
variant CQL(H), eq. 4, with the Lagrange multiplier of appendix F. Three quarters of an update are
the critics' passes over 3 n + 1 actions a row.
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
    Gaussian,
    box_scaling,
    check_actor_critic,
    check_temperature,
    critic_losses,
    critics_of,
    get_scalar,
    policy_of,
    q_of_many,
    tanh_gaussian_graph,
)
from replaylake.offline.algorithms.sac import LOG_STD_RANGE
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
    conservative_gap,
    sample_squashed,
    temperature_loss,
)
from replaylake.offline.networks.actors import NO_STATISTICS, GaussianNetwork
from replaylake.offline.networks.critics import Critics, Scalar

_MAX_ALPHA: Final = 1e6  # as in d3rlpy and the paper's code: beyond it the gap is all that counts
_LN_HALF: Final = math.log(0.5)  # a uniform density over a normalized element, which spans 2


@dataclass(frozen=True)
class CQLConfig:
    """Options of `cql`; defaults as in d3rlpy 2.8.1."""

    hidden_sizes: Sequence[int] = (256, 256)
    actor_learning_rate: float = 1e-4
    critic_learning_rate: float = 3e-4
    temperature_learning_rate: float = 1e-4  # 0 keeps the temperature as it begins
    initial_temperature: float = 1.0  # reward per nat of entropy
    # Of the Lagrange multiplier that holds the gap at alpha_threshold; 0 keeps initial_alpha.
    alpha_learning_rate: float = 1e-4
    initial_alpha: float = 1.0
    alpha_threshold: float = 10.0  # in units of reward, as the gap
    conservative_weight: float = 5.0  # of the gap against the TD error, beside alpha
    num_action_samples: int = 10  # of each: uniform, the policy here, the policy one step on
    # What the targets take: the policy's mode, or an action of it with its entropy if soft, or the
    # best of num_action_samples if max.
    soft_q_backup: bool = False
    max_q_backup: bool = False
    tau: float = 0.005  # share of the critics that their targets take over each update
    num_critics: int = 2
    n_step: int = 1  # steps whose rewards are summed before the critics are asked

    def __post_init__(self) -> None:
        check_actor_critic("cql", self)
        check_temperature("cql", self)
        for option in ("alpha_learning_rate", "conservative_weight"):
            value = getattr(self, option)
            expect(value >= 0, f"cql: {option}", value, "0 or more")
        expect(self.initial_alpha > 0, "cql: initial_alpha", self.initial_alpha, "more than 0")
        samples = self.num_action_samples
        expect(samples >= 1, "cql: num_action_samples", samples, "1 or more")
        both = self.soft_q_backup and self.max_q_backup
        expect(not both, "cql: soft_q_backup and max_q_backup", (True, True), "one of them at most")


def cql(
    observation_space: Space,
    action_space: Space,
    config: CQLConfig,
    facts: DatasetStatistics = NO_STATISTICS,
) -> Algorithm:
    """Return CQL for float Box actions.

    Args:
        observation_space: any that networks take.
        action_space: a float Box.
        config: its options.
        facts: what actions and observations are normalized by.

    Raises: SpaceUnsupportedError for other action spaces.
    """
    box, scaling = box_scaling("cql", action_space, facts)
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
        here = policy_of(networks, batch.observations)
        with torch.no_grad():
            ahead = policy_of(networks, batch.next_observations)
            target_tm1 = _target(networks, targets, batch, ahead, rng, config)
            actions, log_probs = _sample_actions(here, ahead, rng, config.num_action_samples)
        # One pass for all: the sampled actions, and last the logged one.
        pairs = torch.cat([actions, a_tm1[:, None]], dim=1)
        q = q_of_many(critics_of(networks), batch.observations, pairs)
        q_tm1 = q[..., -1]
        td_loss, priorities = critic_losses(q_tm1, target_tm1, batch)
        # Eq. 4: alpha (ln sum_a exp q(s, a) - q(s, logged a)), of each critic
        gap_tm1 = conservative_gap(q[..., :-1], log_probs, q_tm1)
        gaps = gap_tm1 @ tensor(batch.weights) / len(a_tm1)
        excess = config.conservative_weight * (gaps - config.alpha_threshold)
        alpha = torch.exp(get_scalar(networks, "alpha")).clamp(max=_MAX_ALPHA)
        noise = torch.randn(a_tm1.shape, generator=rng, device=a_tm1.device)
        groups = {
            "critics": td_loss + alpha.detach() * excess.sum(),
            **_actor_losses(networks, batch, here, noise, config),
        }
        if config.alpha_learning_rate > 0:
            groups["alpha"] = -alpha * excess.detach().mean()  # up: the multiplier maximizes
        metrics = {"q_mean": q_tm1.detach().mean(), "gap": gaps.detach().mean()}
        return Losses(groups, priorities, metrics)

    def networks() -> Networks:
        sizes = config.hidden_sizes
        return Networks(
            {
                "policy": GaussianNetwork(observation_space, size, sizes, facts, LOG_STD_RANGE),
                "critics": Critics(observation_space, size, sizes, facts, config.num_critics),
                "temperature": Scalar(math.log(config.initial_temperature)),
                "alpha": Scalar(math.log(config.initial_alpha)),
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
                "alpha": config.alpha_learning_rate,
            }
        ),
        targets={"critics": Target(config.tau)},
        policy=lambda nets: tanh_gaussian_graph(nets["policy"], spec),
        n_step=config.n_step,
        config=to_options(config),
        normalization={"actions": scaling.to_json()},
    )


def _target(
    networks: Networks,
    targets: Networks,
    batch: Batch,
    ahead: Gaussian,
    rng: torch.Generator,
    config: CQLConfig,
) -> torch.Tensor:
    """Return r + gamma times the value of the next state as the options say, [B]."""
    rewards, discounts = tensor(batch.rewards), tensor(batch.discounts)
    if config.max_q_backup:
        actions, _ = _sample_gaussians(ahead, rng, config.num_action_samples)
        q_t = q_of_many(critics_of(targets), batch.next_observations, actions)
        return torch.addcmul(rewards, discounts, q_t.amin(dim=0).amax(dim=-1))
    if config.soft_q_backup:
        noise = torch.randn(ahead[0].shape, generator=rng, device=rewards.device)
        a_t, log_probs_t = sample_squashed(*ahead, noise)
        cost_t = torch.exp(get_scalar(networks, "temperature")) * log_probs_t
        q_t = targets["critics"](batch.next_observations, a_t)
        return clipped_double_target(rewards, discounts, q_t, cost_t)
    q_t = targets["critics"](batch.next_observations, torch.tanh(ahead[0]))
    return clipped_double_target(rewards, discounts, q_t)


def _sample_actions(
    here: Gaussian, ahead: Gaussian, rng: torch.Generator, num: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return actions [B, 3 num, D] and the log of what they were drawn with [B, 3 num].

    Appendix F: of the policy at s and at s', and of the uniform distribution.
    """
    batch_size, size = here[0].shape
    policies = torch.stack([here[0], ahead[0]]), torch.stack([here[1], ahead[1]])
    samples, log_probs = _sample_gaussians(policies, rng, num)
    uniform = torch.empty((batch_size, num, size), device=samples.device)
    uniform.uniform_(-1, 1, generator=rng)
    uniform_log_probs = log_probs.new_full((batch_size, num), size * _LN_HALF)
    actions = torch.cat([samples[0], samples[1], uniform], dim=1)
    return actions, torch.cat([*log_probs, uniform_log_probs], dim=1)


def _sample_gaussians(
    policy: Gaussian, rng: torch.Generator, num: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw actions of gaussians [..., B, D]: [..., B, num, D], and log_probs [..., B, num]."""
    means, log_stds = policy
    *leading, batch_size, size = means.shape
    noise = torch.randn((*leading, num, batch_size, size), generator=rng, device=means.device)
    return sample_squashed(means[..., None, :], log_stds[..., None, :], noise.transpose(-3, -2))


def _actor_losses(
    networks: Networks, batch: Batch, here: Gaussian, noise: torch.Tensor, config: CQLConfig
) -> dict[str, torch.Tensor]:
    """Return SAC's losses of the policy and the temperature."""
    log_temperature = get_scalar(networks, "temperature")
    a, log_probs = sample_squashed(*here, noise)
    q = critics_of(networks).forward_frozen(batch.observations, a).amin(dim=0)
    policy_loss = torch.addcmul(-q, torch.exp(log_temperature.detach()), log_probs)
    groups = {"policy": weighted_mean(policy_loss, batch)}
    if config.temperature_learning_rate > 0:
        loss = temperature_loss(log_temperature, log_probs, -a.shape[1])
        groups["temperature"] = weighted_mean(loss, batch)
    return groups
