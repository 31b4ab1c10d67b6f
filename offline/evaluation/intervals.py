"""Intervals: how far a mean of few numbers can be trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np


def student_t_interval(
    values: Sequence[float], level: float = 0.95
) -> tuple[float, float | None, float | None]:
    """Return (mean, low, high): mean -+ t * s / sqrt(n), with n - 1 degrees of freedom.

    low and high are None for a single value, which says nothing of its spread.
    Source: Student 1908, "The Probable Error of a Mean".
    """
    array = np.asarray(values, dtype=np.float64)
    mean = float(array.mean())
    if len(array) < 2:
        return mean, None, None
    half = student_t_quantile((1 + level) / 2, len(array) - 1)
    half *= float(array.std(ddof=1)) / math.sqrt(len(array))
    return mean, mean - half, mean + half


@cache
def student_t_quantile(probability: float, degrees: int) -> float:
    """Return t with P(T <= t) = probability, for 0.5 <= probability < 1, to about 1e-10.

    By bisection of the distribution function, whose tail is I_x(degrees / 2, 1 / 2) / 2 at
    x = degrees / (degrees + t^2) (Abramowitz & Stegun 26.7.1).
    """
    low, high = 0.0, 1.0
    while 1 - _tail(high, degrees) < probability:
        high *= 2
    while high - low > 1e-11 * high:
        middle = (low + high) / 2
        if 1 - _tail(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _tail(t: float, degrees: int) -> float:
    return _incomplete_beta(degrees / (degrees + t * t), degrees / 2, 0.5) / 2


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """Return the regularized incomplete beta function I_x(a, b), by its continued fraction.

    Abramowitz & Stegun 26.5.8, from the end inwards; where it converges slowly, 26.5.2 mirrors it.
    """
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(1 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    log_front += a * math.log(x) + b * math.log1p(-x)
    fraction = 1.0
    for m in range(100, 0, -1):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        fraction = 1 + even / (1 + odd / fraction)
    first = -(a + b) * x / (a + 1)
    return math.exp(log_front) / a / (1 + first / fraction)
