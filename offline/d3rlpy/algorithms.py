"""Table: the d3rlpy 2.8.1 algorithms that learn here, named without importing d3rlpy (3.4 s).

All of its Q-learning and imitation algorithms. Left out, with the reason: RandomPolicy and
DiscreteRandomPolicy learn nothing; DecisionTransformer, DiscreteDecisionTransformer and TACR act on
the steps before, which no head here takes yet.

Some learn nothing of rewards for a while by default: plas and plas_with_perturbation in their first
500,000 updates (warmup_steps), and bear's actor only imitates in its first 40,000.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Actions = Literal["discrete", "continuous"]
Kind = Literal["imitation", "offline", "off-policy"]
# Beyond what every batch has: the logged action that follows, Monte-Carlo returns, and all of the
# data before the first update, among which neighbors are looked up.
Needs = Literal["", "next_actions", "returns", "neighbors"]


@dataclass(frozen=True)
class D3rlpyAlgorithm:
    """One class of d3rlpy. graph names the module of graphs.py that acts as its greedy action."""

    name: str
    actions: Actions
    config_class: str
    head: str
    graph: str
    kind: Kind
    paper: str
    needs: Needs = ""

    @property
    def bootstraps(self) -> bool:
        """Whether it looks at next observations: all but cloning do."""
        return self.kind != "imitation"

    @property
    def takes_images(self) -> bool:
        """Whether it takes images; a search for nearest neighbors needs flat vectors."""
        return self.needs != "neighbors"


def _discrete(
    name: str, config: str, head: str, graph: str, kind: Kind, paper: str
) -> D3rlpyAlgorithm:
    return D3rlpyAlgorithm(name, "discrete", f"{config}Config", head, graph, kind, paper)


def _continuous(
    name: str, config: str, head: str, graph: str, paper: str, needs: Needs = ""
) -> D3rlpyAlgorithm:
    return D3rlpyAlgorithm(
        name, "continuous", f"{config}Config", head, graph, "offline", paper, needs
    )


def _off_policy(name: str, config: str, head: str, graph: str, paper: str) -> D3rlpyAlgorithm:
    return D3rlpyAlgorithm(name, "continuous", f"{config}Config", head, graph, "off-policy", paper)


D3RLPY_ALGORITHMS: Final = (
    _discrete("bc", "DiscreteBC", "categorical", "logits", "imitation", "Pomerleau 1989"),
    _discrete("bcq", "DiscreteBCQ", "q_values", "likely_q_values", "offline", "Fujimoto 2019b"),
    _discrete("cql", "DiscreteCQL", "q_values", "q_values", "offline", "Kumar et al. 2020"),
    _discrete("dqn", "DQN", "q_values", "q_values", "off-policy", "Mnih et al. 2015"),
    _discrete("double_dqn", "DoubleDQN", "q_values", "q_values", "off-policy", "van Hasselt 2016"),
    _discrete("nfq", "NFQ", "q_values", "q_values", "off-policy", "Riedmiller 2005"),
    _discrete("sac", "DiscreteSAC", "categorical", "logits", "off-policy", "Christodoulou 2019"),
    D3rlpyAlgorithm(
        "bc",
        "continuous",
        "BCConfig",
        "deterministic",
        "deterministic",
        "imitation",
        "Pomerleau 1989",
    ),
    _continuous("awac", "AWAC", "gaussian", "gaussian", "Nair et al. 2020"),
    _continuous("bcq", "BCQ", "sampled", "bcq", "Fujimoto et al. 2019"),
    _continuous("bear", "BEAR", "sampled", "bear", "Kumar et al. 2019"),
    _continuous(
        "cal_ql", "CalQL", "squashed_gaussian", "gaussian", "Nakamoto et al. 2023", "returns"
    ),
    _continuous("cql", "CQL", "squashed_gaussian", "gaussian", "Kumar et al. 2020"),
    _continuous("crr", "CRR", "sampled", "crr", "Wang et al. 2020"),
    _continuous("iql", "IQL", "gaussian", "gaussian", "Kostrikov et al. 2021"),
    _continuous("plas", "PLAS", "deterministic", "plas", "Zhou et al. 2020"),
    _continuous(
        "plas_with_perturbation",
        "PLASWithPerturbation",
        "deterministic",
        "plas",
        "Zhou et al. 2020",
    ),
    _continuous("prdc", "PRDC", "deterministic", "deterministic", "Ran et al. 2023", "neighbors"),
    _continuous(
        "rebrac",
        "ReBRAC",
        "deterministic",
        "deterministic",
        "Tarasov et al. 2023",
        "next_actions",
    ),
    _continuous("td3_plus_bc", "TD3PlusBC", "deterministic", "deterministic", "Fujimoto & Gu 2021"),
    _off_policy("ddpg", "DDPG", "deterministic", "deterministic", "Lillicrap 2016"),
    _off_policy("sac", "SAC", "squashed_gaussian", "gaussian", "Haarnoja 2018"),
    _off_policy("td3", "TD3", "deterministic", "deterministic", "Fujimoto et al. 2018"),
)
