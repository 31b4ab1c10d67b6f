"""Comparison: policies on the same seeds, and how far their returns differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.lake.policies.policy import Policy
from replaylake.offline.callbacks import Callbacks, EpisodeProgress
from replaylake.offline.evaluation.evaluate import Evaluation, EvaluationConfig, evaluate
from replaylake.offline.evaluation.intervals import student_t_interval


@dataclass(frozen=True)
class PolicyComparison:
    """One policy of a comparison.

    difference is its mean return less that of the first policy; ci_low and ci_high bound that at
    95% (Student t over the episodes' differences, seed by seed); None for the first policy, the
    bounds also for one episode. share_better, share_equal: of the episodes, against the first.
    """

    policy: str
    evaluation: Evaluation
    difference: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    share_better: float | None = None
    share_equal: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "evaluation": self.evaluation.to_json()}


def compare(
    policies: Mapping[str, Policy],
    config: EvaluationConfig | str,
    *,
    callbacks: Callbacks | None = None,
) -> list[PolicyComparison]:
    """Evaluate policies, by name, on the same seeds, and compare each with the first.

    Episode i of each begins in the same state, so that differences are taken episode by episode:
    what only the start decides cancels out, and the interval is narrower than of two means.
    callbacks: on_progress (EpisodeProgress), of the episodes of all policies.
    Raises: ConfigInvalidError for fewer than two policies; as evaluate.
    """
    config = EvaluationConfig(config) if isinstance(config, str) else config
    on_progress = None if callbacks is None else callbacks.on_progress
    if len(policies) < 2:
        raise ConfigInvalidError(
            f"compare: found {len(policies)} policies, expected two or more of different names."
        )
    compared: list[PolicyComparison] = []
    for number, (name, policy) in enumerate(policies.items()):
        report = None
        if on_progress is not None:
            before, total = number * config.episodes, len(policies) * config.episodes
            report = _offset(on_progress, before, total)
        evaluation = evaluate(policy, config, callbacks=Callbacks(on_progress=report))
        first = compared[0].evaluation if compared else None
        compared.append(_compare_with_first(name, evaluation, first))
    return compared


def _compare_with_first(
    name: str, evaluation: Evaluation, first: Evaluation | None
) -> PolicyComparison:
    if first is None:
        return PolicyComparison(name, evaluation)
    differences = np.asarray(evaluation.returns) - np.asarray(first.returns)
    mean, low, high = student_t_interval(differences.tolist())
    return PolicyComparison(
        policy=name,
        evaluation=evaluation,
        difference=mean,
        ci_low=low,
        ci_high=high,
        share_better=float((differences > 0).mean()),
        share_equal=float((differences == 0).mean()),
    )


def _offset(
    on_progress: Callable[[EpisodeProgress], None], before: int, total: int
) -> Callable[[EpisodeProgress], None]:
    return lambda done: on_progress(EpisodeProgress(before + done.num_episodes, total))
