"""Conservative Q-learning of discrete actions: what the log did not do is not thought well of.

Kumar et al. 2020, "Conservative Q-Learning for Offline Reinforcement Learning", CQL(H), eq. 4: the
TD loss of double DQN, plus alpha times how far the softmax of Q exceeds the logged action's value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.spaces import Space
from replaylake.offline.algorithms.discrete_actions import discrete
from replaylake.offline.algorithms.dqn import (
    DQNConfig,
    compute_q_learning_terms,
    q_algorithm,
    td_loss,
)
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.learning.algorithm import (
    Algorithm,
    Losses,
    Networks,
    weighted_mean,
)
from replaylake.offline.learning.options import expect
from replaylake.offline.losses.q_learning import conservative_gap


@dataclass(frozen=True)
class DiscreteCQLConfig(DQNConfig):
    """Options of `cql` for Discrete actions: those of `dqn`, and alpha; d3rlpy's defaults."""

    _algorithm = "cql"

    double: bool = True
    # Weight of the conservative term; 0 is double DQN. Large ones clone the log.
    alpha: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(self.alpha >= 0, "cql: alpha", self.alpha, "0 or more")


def discrete_cql(
    observation_space: Space,
    action_space: Space,
    config: DiscreteCQLConfig,
    facts: DatasetStatistics,
) -> Algorithm:
    """Return CQL for Discrete actions, honoring action masks.

    Raises: SpaceUnsupportedError for other actions.
    """
    space = discrete("cql", action_space)

    def losses(networks: Networks, targets: Networks, batch: Batch, *_: Any) -> Losses:
        q_tm1, a_tm1, td_tm1 = compute_q_learning_terms(networks, targets, batch, space, config)
        # L = L_TD + alpha E[ln sum_a exp Q(s, a) - Q(s, logged a)]        (eq. 4)
        gap_tm1 = conservative_gap(q_tm1, a_tm1, batch.action_masks)
        loss_tm1 = td_loss(td_tm1, config) + config.alpha * gap_tm1
        return Losses(
            {"q": weighted_mean(loss_tm1, batch)},
            td_tm1.detach().abs(),
            {"conservative_gap": gap_tm1.mean()},
        )

    return q_algorithm(observation_space, space, config, facts, losses)
