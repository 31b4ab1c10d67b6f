"""Importance weights: how much more often the target policy would have done what was logged."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from replaylake.datastore.episodes.spaces import Array
from replaylake.offline.evaluation.ope.logged_episodes import LoggedEpisodes

# Squares of weights, and sums of them over 1e50 episodes, still are finite float64.
MAX_WEIGHT: Final = 1e120
# A float32 is off by at most this share of the number that was rounded to it.
_UNIT_ROUNDOFF: Final = 2.0**-24


class NotEstimableError(Exception):
    """Why an estimator has nothing to say of a log: `estimate` reports it beside the estimates."""


@dataclass(frozen=True)
class WeightSummary:
    """How evenly weights are spread.

    effective_sample_size is (sum w)^2 / sum w^2: the number of equally weighted episodes whose mean
    would vary as much (Kish 1965, "Survey Sampling", section 11.7). 0 where all weights are 0.
    """

    effective_sample_size: float
    max_weight: float


@dataclass(frozen=True, eq=False)
class Weights:
    """Ratios of target to behavior probabilities, and their products along each episode.

    ratios float64 [M], pi(a_t | s_t) / mu(a_t | s_t); cumulative float64 [M], the product of an
    episode's ratios up to and with each step: rho_0:t.
    """

    episodes: LoggedEpisodes
    ratios: Array
    cumulative: Array

    @cached_property
    def final(self) -> Array:
        """Weight of each whole episode, float64 [E]."""
        last: Array = self.cumulative[self.episodes.offsets[1:] - 1]
        return last

    @cached_property
    def previous(self) -> Array:
        """rho_0:t-1 of each row, 1 at an episode's first step: float64 [M]."""
        previous = np.empty_like(self.cumulative)
        previous[1:] = self.cumulative[:-1]
        previous[self.episodes.offsets[:-1]] = 1.0
        return previous

    @cached_property
    def rounding(self) -> Array:
        """By what share float32 log-probs can have moved each cumulative weight, float64 [M].

        Rounding to float32 moves a number by at most u = 2^-24 of itself. Once for a probability
        computed in float32, which moves its logarithm by u, and once for that logarithm as it is
        stored, which moves it by u |ln p|; both for the log's and for the policy's:

            |error of ln rho_0:t| <= sum over the steps up to t of u (2 + |ln mu_t| + |ln pi_t|)

        The errors are added, not their squares: a policy that says the same again and again is
        rounded the same way each time. Source: Higham 2002, "Accuracy and Stability of Numerical
        Algorithms", sections 2.2 and 3.1.

        Assumes that both sides computed the same scores bit for bit. Scores summed in another order
        (another batch size, processor or library) differ by a few u |score|, and ln p by that over
        the temperature. No term of it is here: probabilities do not tell the scores, to which any
        constant may be added, and the log does not hold them.
        """
        behavior, target = self.episodes.behavior_probs, self.episodes.target_probs
        assert behavior is not None, "there are weights"
        assert target is not None
        # A weight of 0 stays one, however it was rounded.
        possible = np.where(target > 0, target, 1.0)
        errors = rounding_of(behavior) + rounding_of(possible)
        if self.episodes.is_one_step:
            return np.asarray(errors)
        sums = np.append(0.0, errors.cumsum())
        before = np.repeat(sums[self.episodes.offsets[:-1]], self.episodes.lengths)
        return np.asarray(sums[1:] - before)

    @cached_property
    def final_rounding(self) -> Array:
        """The rounding of each whole episode's weight, float64 [E]."""
        last: Array = self.rounding[self.episodes.offsets[1:] - 1]
        return last

    def check_any(self) -> None:
        """Raise NotEstimableError at a step without any weight, where the answer would be 0."""
        empty = np.flatnonzero(self.per_step <= 0)
        if len(empty):
            raise NotEstimableError(
                "no episode has any weight: the policy takes the logged actions of none of them"
                if self.episodes.is_one_step
                else f"from step {empty[0]} on no episode has any weight: the policy takes the "
                "logged actions of none of them"
            )

    @cached_property
    def whole_episodes(self) -> WeightSummary:
        return summary(self.final)

    @cached_property
    def per_step(self) -> Array:
        """Effective sample size at each step, float64 [T]; an ended episode keeps its weight."""
        sums = sum_by_step(self.episodes, self.cumulative)
        squares = sum_by_step(self.episodes, self.cumulative**2)
        sizes: Array = np.divide(sums**2, squares, out=np.zeros_like(sums), where=squares > 0)
        return sizes

    def at_step(self, step: int) -> Array:
        """Return each episode's weight up to a step, or up to its end: float64 [E]."""
        offsets, lengths = self.episodes.offsets, self.episodes.lengths
        weights: Array = self.cumulative[offsets[:-1] + np.minimum(lengths - 1, step)]
        return weights

    @cached_property
    def worst_step(self) -> WeightSummary:
        """The summary of the step at which fewest episodes count."""
        return WeightSummary(float(self.per_step.min()), float(self.cumulative.max()))


@dataclass(frozen=True, eq=False)
class EstimatorInputs:
    """What an estimator is given: the log, and the largest weight that clipped forms apply."""

    episodes: LoggedEpisodes
    clip: float

    @cached_property
    def weights(self) -> Weights:
        """The log's importance weights. Raises: NotEstimableError."""
        return importance_weights(self.episodes)

    @cached_property
    def model(self) -> tuple[Array, Array]:
        """(q_logged, v_target), float64 [M] each.

        Raises: NotEstimableError where there is no model.
        """
        q, v = self.episodes.q_logged, self.episodes.v_target
        if q is None or v is None:
            why = self.episodes.no_model
            raise NotEstimableError(
                f"no model of values: {why}"
                if why
                else "no model of values was fitted, and none given (q_logged and v_target)"
            )
        return q, v


def importance_weights(episodes: LoggedEpisodes) -> Weights:
    """Return the weights of episodes with both probabilities known.

    A ratio of two densities is a ratio of probabilities too. Raises: NotEstimableError where a
    weight cannot be formed: a probability is missing or 0, or a product overflows.
    """
    behavior, target = episodes.behavior_probs, episodes.target_probs
    if target is None:
        raise NotEstimableError(episodes.no_density or "the policy's probabilities are unknown")
    if behavior is None:
        raise NotEstimableError("the log has no behavior probabilities; fit the behavior policy")
    without = int((~(behavior > 0)).sum())
    if without:
        raise NotEstimableError(
            f"{without} of {len(behavior)} steps have no behavior probability above 0; leave their "
            "episodes out, or fit the behavior policy"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        ratios = target / behavior
        cumulative = ratios if episodes.is_one_step else _products(episodes, ratios)
    # A product that overflowed to infinity gives NaN when it meets a ratio of 0.
    if not (cumulative <= MAX_WEIGHT).all():
        raise NotEstimableError(
            f"a product of importance ratios over up to {episodes.lengths.max()} steps passes "
            f"{MAX_WEIGHT:.0e}"
        )
    return Weights(episodes, ratios, cumulative)


def rounding_of(probs: Array) -> Array:
    """Return u (1 + |ln p|) of probabilities above 0: by what share float32 can have moved each."""
    shares: Array = _UNIT_ROUNDOFF * (1 + np.abs(np.log(probs)))
    return shares


def _products(episodes: LoggedEpisodes, ratios: Array) -> Array:
    """Multiply ratios [M] along each episode, all episodes in step: T numpy calls, M products."""
    products = ratios.astype(np.float64)
    longest_first = np.argsort(-episodes.lengths, kind="stable")
    starts = episodes.offsets[:-1][longest_first]
    # How many episodes have a step t: lengths are falling along `starts`.
    running = np.searchsorted(
        -episodes.lengths[longest_first], -np.arange(episodes.lengths.max()), side="left"
    )
    for t, num in enumerate(running[1:], start=1):
        rows = starts[:num] + t
        products[rows] *= products[rows - 1]
    return products


def sum_by_step(episodes: LoggedEpisodes, values: Array) -> Array:
    """Sum values [M] over episodes at each step, ended ones by their last value: float64 [T].

    An ended episode counts as if it stayed in a state without reward, where both policies do the
    same: only so is the mean weight 1 at every step (Thomas & Brunskill 2016, section 2).
    """
    horizon = int(episodes.lengths.max())
    last = values[episodes.offsets[1:] - 1]
    ended = np.bincount(episodes.lengths, last, horizon + 1)[:horizon].cumsum()
    sums: Array = np.bincount(episodes.steps, values, horizon) + ended
    return sums


def summary(weights: Array) -> WeightSummary:
    """Summarize weights [E]."""
    squares = float(np.square(weights).sum())
    size = float(weights.sum()) ** 2 / squares if squares else 0.0
    return WeightSummary(size, float(weights.max()))


def largest_ratio(episodes: LoggedEpisodes) -> float | None:
    """Return the largest pi / mu over all actions of all logged states; None where unknown.

    For one-step logs only: along an episode ratios multiply.
    """
    behavior, target = episodes.behavior_distribution, episodes.target_distribution
    if behavior is None or target is None or not episodes.is_one_step:
        return None
    supported = behavior > 0
    return float(np.max(target[supported] / behavior[supported]))
