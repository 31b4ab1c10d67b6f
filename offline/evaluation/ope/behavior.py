"""The behavior policy, fitted where a log does not say with what probabilities it acted.

By behavior cloning, cross-fitted: the probability of an episode's actions comes from a model that
was fitted on other episodes, or it would be as sure of them as it had learned them by heart.
Source: Hanna, Niekum & Stone 2019, "Importance Sampling Policy Evaluation with an Estimated
Behavior Policy"; Chernozhukov et al. 2018, definition 3.1, for the cross-fitting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.spaces import Array, Box, Discrete, Values, take
from replaylake.datastore.lake.logged_steps import LoggedSteps
from replaylake.datastore.lake.policies.exploration import Exploration
from replaylake.offline.algorithms.catalog import make_learner
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.evaluation.ope.calibration import calibration_error, reliability
from replaylake.offline.evaluation.ope.folds import each_fold, episode_folds
from replaylake.offline.evaluation.ope.moments import observation_moments
from replaylake.offline.evaluation.ope.target_policy import TargetPolicy
from replaylake.offline.learning.learner import Learner
from replaylake.offline.learning.options import expect
from replaylake.offline.networks.graph import TorchPolicy

_CHECK_UPDATES: Final = 50
# Of the episodes that a fold is fitted on, those that say when to stop.
_VALIDATION_SHARE: Final = 0.1
_MAX_VALIDATION_STEPS: Final = 1 << 14
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class BehaviorConfig:
    """How the behavior policy is fitted."""

    # Most of them; it stops where the likelihood of other episodes has not risen for `patience`
    # checks, 50 updates apart.
    updates: int = 2000
    patience: int = 5
    batch_size: int = 256
    hidden_sizes: tuple[int, ...] = (64, 64)
    learning_rate: float = 2e-3
    folds: int = 5

    def __post_init__(self) -> None:
        for name in ("updates", "patience", "batch_size"):
            expect(getattr(self, name) >= 1, f"behavior: {name}", getattr(self, name), "1 or more")
        expect(self.folds >= 2, "behavior: folds", self.folds, "2 or more")


@dataclass(frozen=True, eq=False)
class FittedBehavior:
    """What a fitted behavior policy gives to each logged step, and how well it fits.

    probs float64 [M], probability (density) of the logged action, NaN where a Box's density is not
    known; distribution float64 [M, A] of Discrete actions. log_likelihood is the mean ln
    probability of a logged action, marginal_log_likelihood that of a model that does not look at
    observations: what looking at them gained. calibration_error: see calibration.py, None for other
    actions. All of them cross-fitted.
    """

    probs: NDArray[np.float64]
    distribution: NDArray[np.float64] | None
    log_likelihood: float
    marginal_log_likelihood: float | None
    calibration_error: float | None
    num_folds: int

    def to_json(self) -> dict[str, Any]:
        """Return what a report says of it."""
        return {
            "log_likelihood": self.log_likelihood,
            "marginal_log_likelihood": self.marginal_log_likelihood,
            "calibration_error": self.calibration_error,
            "folds": self.num_folds,
        }


def fit_behavior(
    steps: LoggedSteps,
    config: BehaviorConfig | None = None,
    *,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> FittedBehavior:
    """Fit the policy that took the logged actions, by folds of the episodes.

    Deterministic on the CPU. Raises: SpaceUnsupportedError for spaces that behavior cloning does
    not take. on_progress is called with (folds done, folds).
    """
    config = config or BehaviorConfig()
    assert steps.observations is not None
    space = steps.spec.action_space
    folds = episode_folds(steps.num_episodes, config.folds, seed)
    num_folds = int(folds.max()) + 1
    log_probs = np.empty(steps.num_steps)
    marginal = np.empty(steps.num_steps)
    distribution = None
    if isinstance(space, Discrete):
        distribution = np.empty((steps.num_steps, space.n))
    for number, inside in each_fold(folds):
        rows = np.flatnonzero(inside[steps.episode_of])
        fitted_on = inside if num_folds == 1 else ~inside
        model = _fit_policy(steps, fitted_on, config, seed + number)
        masks = None if steps.action_masks is None else steps.action_masks[rows]
        observations = take(steps.observations, rows)
        log_probs[rows] = model.log_probs(observations, take(steps.actions, rows), masks)
        if distribution is not None:
            distribution[rows] = model.action_probs(observations, masks)
            marginal[rows] = _marginal(steps, fitted_on, rows)
        if on_progress is not None:
            on_progress(number + 1, num_folds)
    error = None
    if distribution is not None:
        error = calibration_error(reliability(distribution, steps.action_numbers))
    return FittedBehavior(
        probs=np.exp(log_probs),
        distribution=distribution,
        log_likelihood=float(np.nanmean(log_probs)) if np.isfinite(log_probs).any() else np.nan,
        marginal_log_likelihood=None if distribution is None else float(marginal.mean()),
        calibration_error=error,
        num_folds=num_folds,
    )


def _fit_policy(
    steps: LoggedSteps, episodes: NDArray[np.bool_], config: BehaviorConfig, seed: int
) -> TargetPolicy:
    """Clone the actions of some episodes, as long as it helps with a tenth of them left out."""
    rng = np.random.default_rng([seed, 8])
    order = rng.permutation(np.flatnonzero(episodes))
    num_left_out = min(len(order) - 1, int(np.ceil(_VALIDATION_SHARE * len(order))))
    is_left_out = np.zeros(steps.num_episodes, np.bool_)
    is_left_out[order[:num_left_out]] = True
    rows = np.flatnonzero((episodes & ~is_left_out)[steps.episode_of])
    validation = np.flatnonzero(is_left_out[steps.episode_of])[:_MAX_VALIDATION_STEPS]
    learner = _learner(steps, rows, config, seed)
    policy = TargetPolicy(TorchPolicy(learner.policy()), Exploration(temperature=1.0))
    best, weights, num_worse = -np.inf, learner.state_dict(), 0
    for update in range(1, config.updates + 1):
        learner.update(_batch(steps, rng.choice(rows, config.batch_size)))
        if not len(validation) or update % _CHECK_UPDATES:
            continue
        likelihood = _likelihood(policy, steps, validation)
        num_worse = 0 if likelihood > best else num_worse + 1
        if likelihood > best:
            best, weights = likelihood, learner.state_dict()
        if num_worse >= config.patience:
            break
    if len(validation):
        learner.load_state_dict(weights)
    return TargetPolicy(TorchPolicy(learner.policy()), Exploration(temperature=1.0))


def _learner(
    steps: LoggedSteps, rows: NDArray[np.int64], config: BehaviorConfig, seed: int
) -> Learner:
    space = steps.spec.action_space
    options: dict[str, Any] = {
        "hidden_sizes": list(config.hidden_sizes),
        "learning_rate": config.learning_rate,
    }
    logged = None
    if isinstance(space, Box):
        array: Array = np.asarray(steps.actions)[rows]
        logged = (array.min(axis=0), array.max(axis=0))
        # The likelihood itself: probabilities are what is asked for.
        options["beta"] = 0.0
    assert steps.observations is not None
    moments = observation_moments(steps.spec.observation_space, take(steps.observations, rows))
    return make_learner(
        "bc",
        steps.spec.observation_space,
        space,
        options=options,
        seed=seed,
        facts=DatasetStatistics(action_range=logged, observations=moments),
    )


def _batch(steps: LoggedSteps, rows: NDArray[np.int64]) -> Batch[Array]:
    """Return some steps as what a learner takes; of what cloning does not look at, nothing."""
    num = len(rows)
    assert steps.observations is not None
    observations = _as_float32(take(steps.observations, rows))
    masks = None if steps.action_masks is None else steps.action_masks[rows]
    return Batch(
        observations=observations,
        actions=take(steps.actions, rows),
        rewards=np.zeros(num, np.float32),
        discounts=np.zeros(num, np.float32),
        next_observations=observations,
        behavior_log_probs=np.full(num, np.nan, np.float32),
        weights=np.ones(num, np.float32),
        keys=np.zeros((num, 2), np.uint64),
        action_masks=masks,
        next_action_masks=masks,
    )


def _as_float32(values: Any) -> Any:
    """Return values as replay decodes them."""
    if isinstance(values, dict):
        return {key: _as_float32(sub) for key, sub in values.items()}
    return values.astype(np.float32) if values.dtype == np.float64 else values


def _likelihood(policy: TargetPolicy, steps: LoggedSteps, rows: NDArray[np.int64]) -> float:
    assert steps.observations is not None
    masks = None if steps.action_masks is None else steps.action_masks[rows]
    observations: Values = take(steps.observations, rows)
    log_probs = policy.log_probs(observations, take(steps.actions, rows), masks)
    known = log_probs[np.isfinite(log_probs)]
    return float(known.mean()) if len(known) else -np.inf


def _marginal(
    steps: LoggedSteps, episodes: NDArray[np.bool_], rows: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return ln of how often others took each action, one more each than they did (Laplace)."""
    space = steps.spec.action_space
    assert isinstance(space, Discrete)
    numbers = steps.action_numbers
    counts = np.bincount(numbers[episodes[steps.episode_of]], minlength=space.n) + 1.0
    log_shares: NDArray[np.float64] = np.log(counts / counts.sum())[numbers[rows]]
    return log_shares
