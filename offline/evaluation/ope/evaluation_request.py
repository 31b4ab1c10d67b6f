"""Question: what off-policy evaluation is asked, who listens, and the report that answers it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

import numpy as np

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.score_reference import ScoreReference
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.lake.holdout import Holdout
from replaylake.datastore.lake.policies.exploration import Exploration
from replaylake.offline.evaluation.ope.behavior import BehaviorConfig
from replaylake.offline.evaluation.ope.diagnostics import Diagnostics
from replaylake.offline.evaluation.ope.direct import REWARD_CONFIG
from replaylake.offline.evaluation.ope.estimate import Estimate, Estimates
from replaylake.offline.evaluation.ope.estimators import ESTIMATORS
from replaylake.offline.evaluation.ope.fqe_config import FQEConfig
from replaylake.offline.evaluation.ope.verdict import Verdict
from replaylake.offline.learning.options import near_matches

OnProgress = Callable[[int, int], None]

ASKED: Final = "asked"
TRAINING: Final = "training"
STORED: Final = "stored"
_WEIGHT_BINS: Final = 40


@dataclass(frozen=True)
class EvaluationRequest:
    """Which policy is to be evaluated on which episodes, and how.

    dataset: `NAME`, `NAME@VERSION` or `NAME@TAG`. policy: a registered one, or `random`; or
    target_prob: SQL over `steps` for the target policy's probability of the logged action, or for a
    list of the probabilities of all Discrete actions. behavior_prob: SQL of the same kind for the
    behavior policy, in place of exp(behavior_log_prob). where: condition over `episodes`. reward:
    SQL over `steps`; None: the one that the policy was trained with, or else the stored one
    (`reward` asks for that). discount: gamma; at 1 the value is the mean return, as `evaluate` has
    it, whatever the policy was trained with.
    holdout: which episodes to evaluate on; by default those that the policy's training held out,
    or else those that it was not trained on. exploration: how the policy acts; by default it takes
    its mode, as `serve` and `evaluate` do. estimators: by name; None takes all that suit. clip: the
    largest weight of clipped estimators. with_incomplete: also episodes that were not seen to end.
    ignore_masks: the policy may take actions that the log's action masks forbid, too.
    unseen: the asker's word that the policy learned from none of these episodes, for where lineage
    does not say: without it such an answer is `weak` at best; what lineage does say stands.
    fqe, reward_model, behavior: how models are fitted where they are needed.
    """

    dataset: str
    policy: str | None = None
    target_prob: str | None = None
    behavior_prob: str | None = None
    where: str | None = None
    reward: str | None = None
    discount: float = 1.0
    holdout: Holdout | None = None
    exploration: Exploration = field(default_factory=Exploration)
    estimators: tuple[str, ...] | None = None
    clip: float | None = None
    with_incomplete: bool = False
    ignore_masks: bool = False
    unseen: bool = False
    level: float = 0.95
    seed: int = 0
    fqe: FQEConfig = field(default_factory=FQEConfig)
    reward_model: FQEConfig = REWARD_CONFIG
    behavior: BehaviorConfig = field(default_factory=BehaviorConfig)

    def __post_init__(self) -> None:
        if (self.policy is None) == (self.target_prob is None):
            found = "a policy and also" if self.policy is not None else "neither a policy nor"
            raise ConfigInvalidError(
                f"off-policy evaluation: found {found} `target_prob`, the SQL expression of its "
                "probabilities, expected exactly one of the two."
            )
        if self.target_prob is not None and self.exploration.is_on:
            raise ConfigInvalidError(
                "off-policy evaluation: found exploration together with `target_prob`, whose "
                "probabilities already have to include it. Leave out `explore`."
            )
        if not 0 < self.discount <= 1:
            raise ConfigInvalidError(
                f"off-policy evaluation: found discount {self.discount}, expected more than 0 and "
                "at most 1."
            )
        if self.seed < 0:
            raise ConfigInvalidError(
                f"off-policy evaluation: found seed {self.seed}, expected 0 or more."
            )
        for name in self.estimators or ():
            if name not in ESTIMATORS:
                raise ConfigInvalidError(
                    f"estimator: found {name!r}, expected {near_matches(name, ESTIMATORS)}."
                )


@dataclass(frozen=True)
class EvaluatedReward:
    """Which reward the returns of an evaluation are of, and why that one.

    expression: SQL over `steps`, `reward` being the stored one. source: the question, the policy's
    training, or neither of them. training: what the policy was trained with, None where that is
    not known.
    """

    expression: str
    source: Literal["asked", "training", "stored"]
    training: str | None

    @property
    def is_stored(self) -> bool:
        """Whether it is the column `reward` as it is."""
        return self.expression == schema.REWARD


@dataclass(frozen=True)
class ProgressCallbacks:
    """Who is told how far it is: of each stage by its name, and of what is counted in it."""

    stage: Callable[[str], None] = lambda what: None
    progress: OnProgress = lambda done, total: None


@dataclass(frozen=True)
class PolicyReport:
    """What a log says of a policy.

    policy: name, version, what chose it and how it acts; or the SQL of its probabilities. reward:
    what its returns are of. training_discount: gamma of its training, None if unknown. It was
    evaluated on num_episodes episodes and num_steps steps; left_out: how many more were selected,
    by the reason why they do not count. trained_on: how many of those evaluated were in its
    training set.
    propensities: where behavior probabilities are from, and of fitted ones how well they fit.
    model: what predicted values, or why nothing did. weights float64 [num_episodes], or None.
    score_reference: the dataset's, if the values are undiscounted sums of the stored reward.
    """

    dataset: str
    version: int
    policy: Mapping[str, Any]
    request: EvaluationRequest
    reward: EvaluatedReward
    training_discount: float | None
    holdout: Mapping[str, Any] | None
    num_episodes: int
    num_steps: int
    left_out: Mapping[str, int]
    trained_on: int
    propensities: Mapping[str, Any]
    model: str
    notes: tuple[str, ...]
    estimates: Estimates
    diagnostics: Diagnostics
    assessment: Verdict
    weights: Array | None = field(default=None, repr=False)
    score_reference: ScoreReference | None = None

    @property
    def verdict(self) -> str:
        """`supported`, `weak` or `not supported`."""
        return self.assessment.verdict.replace("_", " ")

    def count_weights(self) -> dict[str, Any] | None:
        """Return a histogram of the episodes' weights, in 40 bins of equal width of log10.

        `num_zero` of them are 0, and in no bin; `edges` has one more than `counts`, and both are
        empty where all are 0. None where there are no weights.
        """
        if self.weights is None:
            return None
        positive = self.weights[self.weights > 0]
        edges, counts = np.zeros(0), np.zeros(0, np.int64)
        if len(positive):
            low, high = np.log10(positive.min()), np.log10(positive.max())
            edges = np.logspace(low - 0.05, high + 0.05, _WEIGHT_BINS + 1)
            counts, _ = np.histogram(positive, bins=edges)
        return {
            "num_zero": int(len(self.weights) - len(positive)),
            "edges": [float(f"{edge:.6g}") for edge in edges],
            "counts": counts.tolist(),
        }

    def normalized(self) -> dict[str, float] | None:
        """Return the log's mean and the value of each estimator, normalized; None if not known."""
        if self.score_reference is None:
            return None
        values = {one.estimator: one.value for one in self.estimates.estimates}
        values = {"log": self.estimates.log_mean, **values}
        return {
            name: self.score_reference.normalize(value)
            for name, value in values.items()
            if value is not None and math.isfinite(value)
        }

    def to_json(self) -> dict[str, Any]:
        log = self.estimates.log_interval
        request = self.request
        return {
            "dataset": self.dataset,
            "version": self.version,
            **self.policy,
            "where": request.where,
            "reward": self.reward.expression,
            "reward_source": self.reward.source,
            "training_reward": self.reward.training,
            "gamma": request.discount,
            "training_gamma": self.training_discount,
            "holdout": self.holdout,
            "seed": request.seed,
            "num_episodes": self.num_episodes,
            "num_steps": self.num_steps,
            "left_out": dict(self.left_out),
            "trained_on": self.trained_on,
            "unseen": request.unseen,
            "ignore_masks": request.ignore_masks,
            "log_mean": self.estimates.log_mean,
            "log_mean_low": log.low,
            "log_mean_high": log.high,
            "score_reference": None
            if self.score_reference is None
            else self.score_reference.to_json(),
            "normalized": self.normalized(),
            "verdict": self.verdict,
            "reason": self.assessment.reason,
            "estimates": [_estimate(estimate) for estimate in self.estimates.estimates],
            "refused": dict(self.estimates.refused),
            "propensities": dict(self.propensities),
            "model": self.model,
            "diagnostics": asdict(self.diagnostics),
            "weights": self.count_weights(),
            "notes": list(self.notes),
        }


def _estimate(estimate: Estimate) -> dict[str, Any]:
    body = asdict(estimate)
    return {key: None if _is_unbounded(value) else value for key, value in body.items()}


def _is_unbounded(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
