"""Table: the d3rlpy 2.8.1 algorithms that learn here, named without importing d3rlpy (3.4 s).

Left out, with the reason: bcq, bear, crr, plas (their greedy action draws noise: head `sampled`),
rebrac (wants the next action), prdc (wants its own `fit`), cal_ql (wants returns-to-go), the
transformers (head `sequence`), and the two random policies, which learn nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal


@dataclass(frozen=True)
class D3rlpyAlgorithm:
    """One class of d3rlpy. policy names the attribute of its modules that acts."""

    name: str
    actions: Literal["discrete", "continuous"]
    config_class: str
    head: str
    policy: Literal["imitator", "policy", "q_funcs", "bcq"]
    kind: Literal["imitation", "offline", "off-policy"]
    paper: str


_ROWS: Final = (
    ("bc", "continuous", "BCConfig", "deterministic", "imitator", "imitation", "Pomerleau 1989"),
    (
        "bc",
        "discrete",
        "DiscreteBCConfig",
        "categorical",
        "imitator",
        "imitation",
        "Pomerleau 1989",
    ),
    (
        "cql",
        "continuous",
        "CQLConfig",
        "squashed_gaussian",
        "policy",
        "offline",
        "Kumar et al. 2020",
    ),
    ("cql", "discrete", "DiscreteCQLConfig", "q_values", "q_funcs", "offline", "Kumar et al. 2020"),
    ("bcq", "discrete", "DiscreteBCQConfig", "q_values", "bcq", "offline", "Fujimoto et al. 2019"),
    ("iql", "continuous", "IQLConfig", "gaussian", "policy", "offline", "Kostrikov et al. 2021"),
    ("awac", "continuous", "AWACConfig", "gaussian", "policy", "offline", "Nair et al. 2020"),
    (
        "td3_plus_bc",
        "continuous",
        "TD3PlusBCConfig",
        "deterministic",
        "policy",
        "offline",
        "Fujimoto & Gu 2021",
    ),
    (
        "sac",
        "continuous",
        "SACConfig",
        "squashed_gaussian",
        "policy",
        "off-policy",
        "Haarnoja 2018",
    ),
    (
        "sac",
        "discrete",
        "DiscreteSACConfig",
        "categorical",
        "policy",
        "off-policy",
        "Christodoulou 2019",
    ),
    (
        "td3",
        "continuous",
        "TD3Config",
        "deterministic",
        "policy",
        "off-policy",
        "Fujimoto et al. 2018",
    ),
    ("ddpg", "continuous", "DDPGConfig", "deterministic", "policy", "off-policy", "Lillicrap 2016"),
    ("dqn", "discrete", "DQNConfig", "q_values", "q_funcs", "off-policy", "Mnih et al. 2015"),
    (
        "double_dqn",
        "discrete",
        "DoubleDQNConfig",
        "q_values",
        "q_funcs",
        "off-policy",
        "van Hasselt 2016",
    ),
    ("nfq", "discrete", "NFQConfig", "q_values", "q_funcs", "off-policy", "Riedmiller 2005"),
)
TABLE: Final = tuple(D3rlpyAlgorithm(*row) for row in _ROWS)
