"""TD3+BC: TD3 whose actor is also pulled to the logged actions.

Fujimoto & Gu 2021, "A Minimalist Approach to Offline Reinforcement Learning". The paper normalizes
observations too, which is an option of training, not of the algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from replaylake.datastore.episodes.spaces import Space
from replaylake.offline.algorithms.td3 import TD3Config, td3_algorithm
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.learning.algorithm import Algorithm
from replaylake.offline.learning.options import expect
from replaylake.offline.losses.actor_critic import behavior_regularized_value
from replaylake.offline.losses.likelihood import squared_error
from replaylake.offline.networks.actors import NO_STATISTICS


@dataclass(frozen=True)
class TD3PlusBCConfig(TD3Config):
    """Options of `td3_plus_bc`: TD3's, and alpha; defaults as in the paper and d3rlpy 2.8.1."""

    # What a mean |q| counts against a squared error of 1 in a normalized action; 0 only clones.
    alpha: float = 2.5

    def __post_init__(self) -> None:
        self._check("td3_plus_bc")
        expect(self.alpha >= 0, "td3_plus_bc: alpha", self.alpha, "0 or more")


def td3_plus_bc(
    observation_space: Space,
    action_space: Space,
    config: TD3PlusBCConfig,
    facts: DatasetStatistics = NO_STATISTICS,
) -> Algorithm:
    """Return TD3+BC for float Box actions.

    Args:
        observation_space: any that networks take.
        action_space: a float Box.
        config: its options.
        facts: what actions and observations are normalized by.

    Raises: SpaceUnsupportedError for other action spaces.
    """

    def actor_loss(q: torch.Tensor, a: torch.Tensor, logged_a: torch.Tensor) -> torch.Tensor:
        # -lambda q(s, pi(s)) + (pi(s) - a)^2
        return behavior_regularized_value(q, config.alpha) + squared_error(a, logged_a)

    return td3_algorithm("td3_plus_bc", observation_space, action_space, config, facts, actor_loss)
