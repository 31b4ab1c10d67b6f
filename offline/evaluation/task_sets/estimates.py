"""Estimates over a set of tasks: pass@k, means, and paired differences, with intervals.

Tasks are taken to be drawn independently, samples of one task are not: each task gives one number,
and intervals are of the mean of these. So that they hold the truth also for 20 tasks, and near 0
and 1, they are score intervals (as Wilson's) over an effective number of tasks. Decision 121 has
the reasons, benchmarks/task_set_coverage.py measures how often they contain the truth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.episodes.spaces import Array

# Effective tasks that bring all of the failures (or of the successes) at which the variance is
# taken to be half of what the tasks show and half of the largest that is possible. With 1 intervals
# covered 84% to 93% in 10 of 105 simulated sets of 20 tasks, with 2 in 4, with 4 they were wider
# than needed in half of them.
_FEW_TASKS: Final = 2.0


@dataclass(frozen=True)
class TaskEstimate:
    """A mean over tasks with its interval low .. high.

    num_carrying: the effective number of tasks that bring it: of those with successes, or with
    failures where these are fewer; of a difference, of those in which the policies differ.
    """

    value: float
    low: float
    high: float
    num_tasks: int
    num_carrying: float


def pass_at_k(num_samples: Array, num_passed: Array, k: int) -> NDArray[np.float64]:
    """Estimate for each task the probability that one of k samples passes, without bias.

    num_samples, num_passed: int [N], of each task. Returns float64 [N], NaN for tasks with fewer
    than k samples. Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code",
    eq. 1: 1 - C(n - c, k) / C(n, k).
    """
    pairs, places = np.unique(
        np.stack([num_samples, num_passed], axis=1), axis=0, return_inverse=True
    )
    values = [_pass_at_k(int(n), int(c), k) for n, c in pairs]
    result: NDArray[np.float64] = np.array(values, np.float64)[places.ravel()]
    return result


def _pass_at_k(n: int, c: int, k: int) -> float:
    if n < k:
        return math.nan
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def estimate_mean(
    values: Array, level: float = 0.95, *, low: float = 0.0, high: float = 1.0
) -> TaskEstimate:
    """Estimate the mean of a task's value, from those of N tasks, all between low and high.

    Wilson's interval of a share, where an effective number of tasks takes the place of N: as many
    tasks of 0 and 1 alone would have a mean that varies as much as this one. Sources: Wilson 1927,
    "Probable Inference, the Law of Succession, and Statistical Inference"; for the effective number
    Korn & Graubard 1998, "Confidence Intervals for Proportions with Small Expected Number of
    Positive Counts Estimated from Survey Data".
    """
    num, width = len(values), high - low
    shares = (np.asarray(values, np.float64) - low) / width
    mean = min(max(float(shares.mean()), 0.0), 1.0)
    carrying = _effective_number(shares if mean <= 0.5 else 1.0 - shares)
    most = mean * (1.0 - mean)
    # Of the largest variance that values in 0 .. 1 with this mean can have.
    spread = float(shares.var()) / most if most > 0 else 1.0
    spread = _widen_spread(min(spread, 1.0), carrying)
    effective = max(num - 1, 1) / spread
    z = NormalDist().inv_cdf((1 + level) / 2)
    center = (mean * effective + z * z / 2) / (effective + z * z)
    half = z * math.sqrt(effective) / (effective + z * z)
    half *= math.sqrt(most + z * z / (4 * effective))
    return TaskEstimate(
        low + width * mean,
        low + width * max(center - half, 0.0),
        low + width * min(center + half, 1.0),
        num,
        carrying,
    )


def estimate_difference(
    values: Array, others: Array, level: float = 0.95, *, width: float = 1.0
) -> TaskEstimate:
    """Estimate the mean of values - others, paired by task, which differ by at most `width`.

    The normal interval after two tasks are added, in which the policies differ by as much in either
    direction. Of binary outcomes this is Bonett & Price 2012, "Adjusted Wald Confidence Interval
    for a Difference of Binomial Proportions Based on Paired Data". The value is the plain mean.
    """
    differences = (np.asarray(values, np.float64) - np.asarray(others, np.float64)) / width
    num, size = len(differences), float(np.abs(differences).sum())
    squares = float(np.square(differences).sum())
    carrying = _effective_number(np.abs(differences))
    # The square of a typical difference, or of the largest possible where few tasks differ.
    typical = _widen_spread(min(squares / size, 1.0) ** 2 if size > 0 else 1.0, carrying)
    mean = float(differences.sum()) / (num + 2)
    variance = (squares + 2 * typical) / (num + 2) - mean**2
    half = NormalDist().inv_cdf((1 + level) / 2) * math.sqrt(variance / (num + 2))
    return TaskEstimate(
        width * float(differences.mean()),
        width * max(mean - half, -1.0),
        width * min(mean + half, 1.0),
        num,
        carrying,
    )


def _effective_number(values: NDArray[np.float64]) -> float:
    """Return (sum of values)^2 / sum of squares: how many equal ones would bring the sum."""
    squares = float(np.square(values).sum())
    return float(values.sum()) ** 2 / squares if squares > 0 else 0.0


def _widen_spread(spread: float, carrying: float) -> float:
    """Return a share of the largest spread, closer to 1 the fewer tasks show it.

    Where one task in twenty brings all failures, the next twenty may bring more or none.
    """
    doubt = 1.0 / (1.0 + (carrying / _FEW_TASKS) ** 2)
    return spread + doubt * (1.0 - spread)
