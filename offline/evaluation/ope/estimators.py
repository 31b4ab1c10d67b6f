"""Every estimator, by name: which logs it is for, what it assumes, who wrote it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from replaylake.offline.evaluation.ope import doubly_robust, importance
from replaylake.offline.evaluation.ope.statistic import Statistic
from replaylake.offline.evaluation.ope.weights import EstimatorInputs

_RATIOS: Final = (
    "behavior probabilities are right, and above 0 wherever the policy's are; nothing unlogged "
    "drove both action and reward"
)
_MODEL: Final = "the model of values is right"
# Resampling v(s_0) tells how first observations vary, not how far the model is off: at a nominal
# 95% it held the truth in 41% of 500 simulated logs.
_MODEL_ALONE: Final = (
    "no interval: resampling the episodes does not measure the error of their model"
)
_EITHER: Final = (
    "behavior probabilities are right (then any model will do), or the model is; and above 0 "
    "wherever the policy's are"
)
_TRUNCATED = f"{_RATIOS}; weights above the clip (sqrt of the number of episodes) matter little"
_SN = f"{_RATIOS}; episodes enough that a bias of about 1 / effective size does not matter"


@dataclass(frozen=True)
class Estimator:
    """How to estimate one way.

    one_step: for one-step logs (True), for longer episodes (False), for both (None). counterpart:
    its name on the other kind of log. uses_model: of values. no_interval: why its value has none;
    empty where it has one. function raises NotEstimableError where it has nothing to say.
    """

    name: str
    function: Callable[[EstimatorInputs], Statistic]
    one_step: bool | None
    assumptions: str
    paper: str
    counterpart: str = ""
    uses_weights: bool = True
    uses_model: bool = False
    no_interval: str = ""


_OneStep = partial(Estimator, one_step=True)
_Longer = partial(Estimator, one_step=False)
_Both = partial(Estimator, one_step=None)


ESTIMATORS: Final[dict[str, Estimator]] = {
    estimator.name: estimator
    for estimator in (
        _OneStep("ips", assumptions=_RATIOS, paper="Horvitz & Thompson 1952",
                 function=importance.importance_sampling, counterpart="is"),
        _OneStep("snips", assumptions=_SN, paper="Swaminathan & Joachims 2015",
                 function=importance.weighted_importance_sampling, counterpart="wis"),
        _OneStep("clipped_ips", assumptions=_TRUNCATED, paper="Ionides 2008",
                 function=importance.clipped_importance_sampling, counterpart="clipped_is"),
        _OneStep("switch_dr", assumptions=f"{_EITHER}; {_MODEL} where weights pass the clip",
                 paper="Wang, Agarwal & Dudik 2017", function=doubly_robust.switch_doubly_robust,
                 uses_model=True),
        _OneStep("dr_os", assumptions=f"{_EITHER}; shrinking weights near the clip matters little",
                 paper="Su et al. 2020", function=doubly_robust.optimistic_shrinkage,
                 uses_model=True),
        _OneStep("sndr", assumptions=_EITHER, paper="Dudik, Langford & Li 2011, self-normalized",
                 function=doubly_robust.weighted_doubly_robust, counterpart="wdr",
                 uses_model=True),
        _Longer("is", assumptions=_RATIOS, paper="Precup, Sutton & Singh 2000",
                function=importance.importance_sampling, counterpart="ips"),
        _Longer("wis", assumptions=_SN, paper="Precup, Sutton & Singh 2000",
                function=importance.weighted_importance_sampling, counterpart="snips"),
        _Longer("clipped_is", assumptions=_TRUNCATED, paper="Ionides 2008",
                function=importance.clipped_importance_sampling, counterpart="clipped_ips"),
        _Longer("pdis", assumptions=_RATIOS, paper="Precup, Sutton & Singh 2000",
                function=importance.per_decision_importance_sampling, counterpart="ips"),
        _Longer("wpdis", assumptions=_SN, paper="Thomas 2015",
                function=importance.weighted_per_decision_importance_sampling, counterpart="snips"),
        _Longer("wdr", assumptions=_EITHER, paper="Thomas & Brunskill 2016",
                function=doubly_robust.weighted_doubly_robust, counterpart="sndr",
                uses_model=True),
        _Both("dr", assumptions=_EITHER, paper="Dudik, Langford & Li 2011; Jiang & Li 2016",
              function=doubly_robust.doubly_robust, uses_model=True),
        _OneStep("dm", assumptions=_MODEL, paper="Dudik, Langford & Li 2011", counterpart="fqe",
                 function=doubly_robust.direct_method, uses_weights=False, uses_model=True,
                 no_interval=_MODEL_ALONE),
        _Longer("fqe", assumptions=_MODEL, paper="Le, Voloshin & Yue 2019", counterpart="dm",
                function=doubly_robust.direct_method, uses_weights=False, uses_model=True,
                no_interval=_MODEL_ALONE),
    )
}  # fmt: skip


def default_estimators(one_step: bool) -> list[str]:
    """Return the names of those that suit one-step logs, or longer episodes."""
    return [e.name for e in ESTIMATORS.values() if e.one_step in (None, one_step)]
