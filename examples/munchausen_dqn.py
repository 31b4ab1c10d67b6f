"""An algorithm of one's own: Munchausen-DQN in three functions.

    replaylake train online --env CartPole-v1 --dataset cartpole --policy munchausen
        --algorithm munchausen_dqn:munchausen_dqn

on one line, from this folder. `train offline` takes the same file.

Vieillard, Pietquin and Geist 2020, "Munchausen Reinforcement Learning": Q-learning of a softmax
policy, in which each reward gets a part of that policy's own log-probability added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.spaces import Discrete, Space
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.learning.adam import adam
from replaylake.offline.learning.algorithm import Algorithm, Losses, Networks, PolicyModule, Target
from replaylake.offline.learning.options import to_options
from replaylake.offline.networks.actors import CategoricalNetwork
from replaylake.offline.networks.graph import PolicyGraph


@dataclass(frozen=True)
class MunchausenConfig:
    """What --set and --config know of it; every field has a default."""

    hidden_sizes: Sequence[int] = (64, 64)
    learning_rate: float = 1e-3
    # Of the softmax policy: tau, and how much of its log-probability is added: alpha.
    temperature: float = 0.03
    weight: float = 0.9
    # Log-probabilities below this, times the temperature, count as this.
    least: float = -1.0
    target_update_period: int = 200


def munchausen_dqn(
    observation_space: Space,
    action_space: Space,
    config: MunchausenConfig,
    facts: DatasetStatistics,
) -> Algorithm:
    """Return the algorithm for one pair of spaces; options come checked, facts are measured."""
    if not isinstance(action_space, Discrete):
        raise TypeError(f"munchausen_dqn: found {action_space}, expected Discrete actions.")
    spec = PolicySpec(observation_space, action_space, "q_values")
    first, tau = action_space.start, config.temperature

    def postprocess(networks: Networks, batch: Batch) -> Batch:
        # On each batch of a replayed algorithm, as it was sampled; on each whole batch of sequences
        # of one that takes them once. Without gradients, and before the losses.
        return replace(batch, rewards=batch.rewards.clamp(-1.0, 1.0))

    def losses(
        networks: Networks,
        targets: Networks,
        batch: Batch,
        rng: torch.Generator,
        due: frozenset[str],
    ) -> Losses:
        a_tm1 = (batch.actions - first)[:, None]
        with torch.no_grad():
            logits_tm1 = targets["q"](batch.observations) / tau
            log_pi_tm1 = torch.log_softmax(logits_tm1, -1).gather(-1, a_tm1)[:, 0]
            q_t = targets["q"](batch.next_observations)
            log_pi_t = torch.log_softmax(q_t / tau, -1)
            v_t = (log_pi_t.exp() * (q_t - tau * log_pi_t)).sum(-1)
            bonus_tm1 = config.weight * (tau * log_pi_tm1).clamp(config.least, 0.0)
            # r + alpha tau ln pi(a|s) + gamma sum pi (Q - tau ln pi); discounts are 0 at the end.
            target_tm1 = batch.rewards + bonus_tm1 + batch.discounts * v_t
        td_tm1 = networks["q"](batch.observations).gather(-1, a_tm1)[:, 0] - target_tm1
        loss = (batch.weights * torch.nn.functional.huber_loss(
            td_tm1, torch.zeros_like(td_tm1), reduction="none"
        )).mean()  # fmt: skip
        # The priorities are for `prioritized = true`.
        return Losses({"q": loss}, td_tm1.detach().abs())

    def networks() -> Networks:
        return Networks(
            {"q": CategoricalNetwork(observation_space, action_space.n, config.hidden_sizes, facts)}
        )

    def policy(made: Networks) -> PolicyGraph:
        return PolicyGraph(PolicyModule(made["q"], spec), spec)

    return Algorithm(
        spec,
        losses,
        networks,
        optimizer=adam(config.learning_rate),
        postprocess=postprocess,
        targets={"q": Target(period=config.target_update_period)},
        policy=policy,
        config=to_options(config),
    )
