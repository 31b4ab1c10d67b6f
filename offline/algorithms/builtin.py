"""Table: the algorithms of our own, each with its function, options and where it is from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from replaylake.datastore.episodes.spaces import Space
from replaylake.offline.algorithms.awac import AWACConfig, awac
from replaylake.offline.algorithms.bc import BCConfig, bc
from replaylake.offline.algorithms.cql import CQLConfig, cql
from replaylake.offline.algorithms.discrete_cql import DiscreteCQLConfig, discrete_cql
from replaylake.offline.algorithms.discrete_sac import DiscreteSACConfig, discrete_sac
from replaylake.offline.algorithms.dqn import DQNConfig, dqn
from replaylake.offline.algorithms.dr_bandit import DRBanditConfig, dr_bandit
from replaylake.offline.algorithms.impala import IMPALAConfig, impala
from replaylake.offline.algorithms.ips_bandit import IPSBanditConfig, ips_bandit
from replaylake.offline.algorithms.iql import IQLConfig, iql
from replaylake.offline.algorithms.marwil import MARWILConfig, marwil
from replaylake.offline.algorithms.ppo import PPOConfig, ppo
from replaylake.offline.algorithms.sac import SACConfig, sac
from replaylake.offline.algorithms.td3 import TD3Config, td3
from replaylake.offline.algorithms.td3_plus_bc import TD3PlusBCConfig, td3_plus_bc
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.learning.algorithm import Algorithm

Actions = Literal["discrete", "continuous", "multi_discrete"]
Kind = Literal["imitation", "offline", "off-policy", "on-policy", "bandit"]


class AlgorithmFunction(Protocol):
    """A function of this folder: spaces, options and facts to an Algorithm."""

    def __call__(
        self,
        observation_space: Space,
        action_space: Space,
        config: Any,
        facts: DatasetStatistics,
    ) -> Algorithm:
        """Return the algorithm. Raises: SpaceUnsupportedError."""
        ...


@dataclass(frozen=True)
class BuiltinAlgorithm:
    """One algorithm for one kind of actions; the same name may stand once for each kind."""

    name: str
    actions: Actions
    head: str
    kind: Kind
    paper: str
    function: AlgorithmFunction
    config_class: type


def _for_all_actions(
    name: str, paper: str, function: AlgorithmFunction, config_class: type
) -> tuple[BuiltinAlgorithm, ...]:
    """Return the rows of an on-policy algorithm."""
    heads: tuple[tuple[Actions, str], ...] = (
        ("discrete", "categorical"),
        ("continuous", "squashed_gaussian"),
        ("multi_discrete", "multi_categorical"),
    )
    return tuple(
        BuiltinAlgorithm(name, actions, head, "on-policy", paper, function, config_class)
        for actions, head in heads
    )


BUILTIN: Final = (
    BuiltinAlgorithm("bc", "discrete", "categorical", "imitation", "Pomerleau 1989", bc, BCConfig),
    BuiltinAlgorithm(
        "bc", "continuous", "gaussian", "imitation", "Seitzer et al. 2022", bc, BCConfig
    ),
    BuiltinAlgorithm(
        "bc", "multi_discrete", "multi_categorical", "imitation", "Pomerleau 1989", bc, BCConfig
    ),
    BuiltinAlgorithm(
        "iql", "continuous", "gaussian", "offline", "Kostrikov et al. 2021", iql, IQLConfig
    ),
    BuiltinAlgorithm(
        "td3_plus_bc",
        "continuous",
        "deterministic",
        "offline",
        "Fujimoto & Gu 2021",
        td3_plus_bc,
        TD3PlusBCConfig,
    ),
    BuiltinAlgorithm(
        "awac", "continuous", "gaussian", "offline", "Nair et al. 2020", awac, AWACConfig
    ),
    BuiltinAlgorithm(
        "cql", "continuous", "squashed_gaussian", "offline", "Kumar et al. 2020", cql, CQLConfig
    ),
    BuiltinAlgorithm(
        "sac", "continuous", "squashed_gaussian", "off-policy", "Haarnoja 2018", sac, SACConfig
    ),
    BuiltinAlgorithm(
        "td3", "continuous", "deterministic", "off-policy", "Fujimoto et al. 2018", td3, TD3Config
    ),
    BuiltinAlgorithm(
        "cql",
        "discrete",
        "q_values",
        "offline",
        "Kumar et al. 2020",
        discrete_cql,
        DiscreteCQLConfig,
    ),
    BuiltinAlgorithm(
        "sac",
        "discrete",
        "categorical",
        "off-policy",
        "Christodoulou 2019",
        discrete_sac,
        DiscreteSACConfig,
    ),
    BuiltinAlgorithm(
        "dqn", "discrete", "q_values", "off-policy", "Mnih et al. 2015", dqn, DQNConfig
    ),
    BuiltinAlgorithm(
        "marwil", "discrete", "categorical", "offline", "Wang et al. 2018", marwil, MARWILConfig
    ),
    BuiltinAlgorithm(
        "marwil", "continuous", "gaussian", "offline", "Wang et al. 2018", marwil, MARWILConfig
    ),
    *_for_all_actions("impala", "Espeholt et al. 2018", impala, IMPALAConfig),
    *_for_all_actions("ppo", "Schulman et al. 2017", ppo, PPOConfig),
    BuiltinAlgorithm(
        "ips_bandit",
        "discrete",
        "categorical",
        "bandit",
        "Swaminathan & Joachims 2015",
        ips_bandit,
        IPSBanditConfig,
    ),
    BuiltinAlgorithm(
        "dr_bandit",
        "discrete",
        "categorical",
        "bandit",
        "Dudik et al. 2011",
        dr_bandit,
        DRBanditConfig,
    ),
)
