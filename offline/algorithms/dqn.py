"""DQN: Q-learning of discrete actions with a target network.

Mnih et al. 2015, "Human-level control through deep reinforcement learning", algorithm 1. Options:
double (van Hasselt et al. 2016, "Deep Reinforcement Learning with Double Q-learning"), dueling
(Wang et al. 2016, "Dueling Network Architectures for Deep Reinforcement Learning"), n steps
(Sutton 1988, "Learning to Predict by the Methods of Temporal Differences").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.spaces import Discrete, Space
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.offline.algorithms.discrete_actions import action_indices, discrete
from replaylake.offline.algorithms.network_options import check_network
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.learning.adam import adam
from replaylake.offline.learning.algorithm import (
    Algorithm,
    Losses,
    LossFunction,
    Networks,
    PolicyModule,
    Target,
    weighted_mean,
)
from replaylake.offline.learning.options import expect, to_options
from replaylake.offline.losses.q_learning import greedy_values, huber, td_errors
from replaylake.offline.networks.actors import CategoricalNetwork, DuelingNetwork
from replaylake.offline.networks.graph import PolicyGraph


@dataclass(frozen=True)
class DQNConfig:
    """Options of `dqn`; the defaults are d3rlpy 2.8.1's, which are those of Atari."""

    # What errors call it; no option, as it has no type.
    _algorithm = "dqn"

    hidden_sizes: Sequence[int] = (256, 256)
    # Small logs are learned faster with ten times as much.
    learning_rate: float = 6.25e-5
    # The online network chooses the next action and the target network values it.
    double: bool = False
    # Values and advantages apart; they share all but the last layer.
    dueling: bool = False
    # Rewards summed before bootstrapping. More is faster, and biased where the log is not greedy.
    n_step: int = 1
    # Every so many updates the target moves by tau towards the network: (500, 1.0) copies now and
    # then, (1, 0.005) averages. d3rlpy's 8,000 is for millions of updates. CartPole from 20,000
    # random steps, 3,000 updates: 321 and 386 at 500, 356 and 267 at 100, 14 to 38 at 8,000 (2
    # seeds, 2026-11-22).
    target_update_period: int = 500
    tau: float = 1.0
    # Of a TD error: `huber` is linear beyond 1, `squared` half of its square.
    loss: Literal["huber", "squared"] = "huber"

    def __post_init__(self) -> None:
        what = self._algorithm
        check_network(what, self)
        expect(1 <= self.n_step <= 1023, f"{what}: n_step", self.n_step, "1 to 1023")
        expect(0 < self.tau <= 1, f"{what}: tau", self.tau, "more than 0, at most 1")
        period = self.target_update_period
        expect(period >= 1, f"{what}: target_update_period", period, "1 or more")


def dqn(
    observation_space: Space, action_space: Space, config: DQNConfig, facts: DatasetStatistics
) -> Algorithm:
    """Return DQN for Discrete actions, honoring action masks.

    Raises: SpaceUnsupportedError for other actions.
    """
    space = discrete("dqn", action_space)

    def losses(networks: Networks, targets: Networks, batch: Batch, *_: Any) -> Losses:
        td_tm1 = compute_q_learning_terms(networks, targets, batch, space, config).td_tm1
        loss_tm1 = td_loss(td_tm1, config)
        return Losses({"q": weighted_mean(loss_tm1, batch)}, td_tm1.detach().abs())

    return q_algorithm(observation_space, space, config, facts, losses)


class QLearningTerms(NamedTuple):
    """What Q-learning says of a batch.

    q_tm1: float [B, A]. a_tm1: int64 [B], what was taken. td_tm1: float [B], the TD errors.
    """

    q_tm1: torch.Tensor
    a_tm1: torch.Tensor
    td_tm1: torch.Tensor


def compute_q_learning_terms(
    networks: Networks, targets: Networks, batch: Batch, space: Discrete, config: DQNConfig
) -> QLearningTerms:
    """Return values and TD errors of network `q` against its target copy."""
    with torch.no_grad():
        q_t = targets["q"](batch.next_observations)
        # Its own pass: one for s and s' together would be differentiated for both.
        selector = networks["q"](batch.next_observations) if config.double else None
        # Double: Q'(s', argmax_a Q(s', a)); else max_a Q'(s', a).
        v_t = greedy_values(q_t, batch.next_action_masks, selector)
    q_tm1 = networks["q"](batch.observations)
    a_tm1 = action_indices(batch, space)
    # delta = r + gamma v(s') - Q(s, a); the discount is 0 where s' is terminal.
    return QLearningTerms(
        q_tm1, a_tm1, td_errors(q_tm1, a_tm1, batch.rewards, batch.discounts, v_t)
    )


def td_loss(td_tm1: torch.Tensor, config: DQNConfig) -> torch.Tensor:
    """Return what the TD errors [B] cost, [B]."""
    return huber(td_tm1) if config.loss == "huber" else 0.5 * td_tm1**2


def q_algorithm(
    observation_space: Space,
    action_space: Discrete,
    config: DQNConfig,
    facts: DatasetStatistics,
    losses: LossFunction,
) -> Algorithm:
    """Return the Algorithm that learns one network `q` by these losses, and acts greedily by it."""
    spec = PolicySpec(observation_space, action_space, "q_values")
    kind = DuelingNetwork if config.dueling else CategoricalNetwork

    def networks() -> Networks:
        return Networks({"q": kind(observation_space, action_space.n, config.hidden_sizes, facts)})

    return Algorithm(
        spec=spec,
        losses=losses,
        networks=networks,
        optimizer=adam(config.learning_rate),
        targets={"q": Target(config.tau, config.target_update_period)},
        policy=lambda nets: PolicyGraph(PolicyModule(nets["q"], spec), spec),
        n_step=config.n_step,
        config=to_options(config),
    )
