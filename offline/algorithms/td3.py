"""TD3: deterministic policy gradients with two critics, smoothed targets and a delayed actor.

Fujimoto, van Hoof & Meger 2018, "Addressing Function Approximation Error in Actor-Critic Methods",
algorithm 1. It explores to learn; from a log alone it overrates actions that nobody took
(td3_plus_bc keeps to the log).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.spaces import Space
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.offline.algorithms.box_actions import (
    box_scaling,
    check_actor_critic,
    critic_losses,
    critics_of,
    deterministic_graph,
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
from replaylake.offline.losses.actor_critic import clipped_double_target, smooth_actions
from replaylake.offline.networks.actors import NO_STATISTICS, DeterministicNetwork
from replaylake.offline.networks.critics import Critics

# What the actor minimizes, [B]: of the first critic's q [B] at its actions, those actions [B, D],
# and the logged ones [B, D].
ActorLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class TD3Config:
    """Options of `td3`; defaults as in the paper and in d3rlpy 2.8.1."""

    hidden_sizes: Sequence[int] = (256, 256)
    actor_learning_rate: float = 3e-4
    critic_learning_rate: float = 3e-4
    tau: float = 0.005  # share of a network that its target takes over each time
    num_critics: int = 2
    target_smoothing_sigma: float = 0.2  # of a normalized action, which spans 2
    target_smoothing_clip: float = 0.5  # likewise
    update_actor_interval: int = 2  # updates of the critics to one of the actor and the targets
    n_step: int = 1  # steps whose rewards are summed before the critics are asked

    def __post_init__(self) -> None:
        self._check("td3")

    def _check(self, name: str) -> None:
        check_actor_critic(name, self)
        for option in ("target_smoothing_sigma", "target_smoothing_clip"):
            value = getattr(self, option)
            expect(value >= 0, f"{name}: {option}", value, "0 or more")
        interval = self.update_actor_interval
        expect(interval >= 1, f"{name}: update_actor_interval", interval, "1 or more")


def td3(
    observation_space: Space,
    action_space: Space,
    config: TD3Config,
    facts: DatasetStatistics = NO_STATISTICS,
) -> Algorithm:
    """Return TD3 for float Box actions.

    Args:
        observation_space: any that networks take.
        action_space: a float Box.
        config: its options.
        facts: what actions and observations are normalized by.

    Raises: SpaceUnsupportedError for other action spaces.
    """

    def actor_loss(q: torch.Tensor, a: torch.Tensor, logged_a: torch.Tensor) -> torch.Tensor:
        return -q  # algorithm 1: up the first critic's gradient

    return td3_algorithm("td3", observation_space, action_space, config, facts, actor_loss)


def td3_algorithm(
    name: str,
    observation_space: Space,
    action_space: Space,
    config: TD3Config,
    facts: DatasetStatistics,
    actor_loss: ActorLoss,
) -> Algorithm:
    """Return TD3 with this loss of the actor. Raises: SpaceUnsupportedError."""
    box, scaling = box_scaling(name, action_space, facts)
    spec = PolicySpec(observation_space, box, "deterministic")

    def losses(
        networks: Networks,
        targets: Networks,
        batch: Batch,
        rng: torch.Generator,
        due: frozenset[str],
    ) -> Losses:
        a_tm1 = scaling.normalize(tensor(batch.actions))
        with torch.no_grad():
            target_tm1 = _target(targets, batch, rng, config)
        q_tm1 = networks["critics"](batch.observations, a_tm1)
        critics_loss, priorities = critic_losses(q_tm1, target_tm1, batch)
        groups = {"critics": critics_loss}
        if "policy" in due:
            a = networks["policy"](batch.observations)
            q = critics_of(networks).forward_frozen(batch.observations, a, num=1)[0]
            groups["policy"] = weighted_mean(actor_loss(q, a, a_tm1), batch)
        return with_metrics(groups, priorities, q_tm1)

    def networks() -> Networks:
        size = len(scaling.center)
        sizes = config.hidden_sizes
        return Networks(
            {
                "policy": DeterministicNetwork(observation_space, size, sizes, facts),
                "critics": Critics(observation_space, size, sizes, facts, config.num_critics),
            }
        )

    target = Target(config.tau, config.update_actor_interval)
    return Algorithm(
        spec=spec,
        losses=losses,
        networks=networks,
        optimizer=adam_by_group(
            {"policy": config.actor_learning_rate, "critics": config.critic_learning_rate}
        ),
        targets={"policy": target, "critics": target},
        update_periods={"policy": config.update_actor_interval},
        policy=lambda nets: deterministic_graph(nets["policy"], spec, scaling),
        n_step=config.n_step,
        config=to_options(config),
        normalization={"actions": scaling.to_json()},
    )


def _target(
    targets: Networks, batch: Batch, rng: torch.Generator, config: TD3Config
) -> torch.Tensor:
    """Return r + gamma min_i q_i(s', pi(s') + clipped noise), [B]."""
    a_t = targets["policy"](batch.next_observations)
    noise = torch.randn(a_t.shape, generator=rng, device=a_t.device)
    a_t = smooth_actions(a_t, noise, config.target_smoothing_sigma, config.target_smoothing_clip)
    q_t = targets["critics"](batch.next_observations, a_t)
    return clipped_double_target(tensor(batch.rewards), tensor(batch.discounts), q_t)
