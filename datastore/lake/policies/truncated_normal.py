"""The standard normal distribution truncated to an interval: draws from it, and its normalizer.

Accurate in the tails too, where cdf(b) - cdf(a) is 0 in floating point: a policy may put its mean
far outside of the action bounds. Written for single numbers, as numpy has no erfc: about 1 us each.
"""

from __future__ import annotations

import math
import sys
from statistics import NormalDist
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_LOG_2PI: Final = math.log(2 * math.pi)
# Beyond it the logarithm of a tail is its asymptotic series, whose error is below 1e-9 there.
_FAR: Final = 25.0
# From there on draws are made by rejection.
_TAIL: Final = 5.0
# An interval over which the density changes by less than this has the density of its middle.
_NARROW: Final = 1e-5
_inverse_cdf: Final = NormalDist().inv_cdf


def log_mass(low: Array, high: Array) -> Array:
    """Return ln P(low < Z < high) of a standard normal Z, float64 of the bounds' shape.

    low < high; either may be infinite.
    """
    return np.asarray(_log_masses(low, high), np.float64)


def draw(low: Array, high: Array, rng: np.random.Generator) -> Array:
    """Draw from a standard normal given that it lies in [low, high], float64 of that shape.

    By inversion; in the tails by rejection from a truncated exponential (Robert 1995, "Simulation
    of truncated normal variables", section 2.2). low < high; either may be infinite.
    """
    low, high = np.broadcast_arrays(low, high)
    uniforms = rng.random(low.shape)
    found = [
        _draw(a, b, uniform, rng)
        for a, b, uniform in zip(
            low.ravel().tolist(), high.ravel().tolist(), uniforms.ravel().tolist(), strict=True
        )
    ]
    return np.array(found, np.float64).reshape(low.shape)


def _log_mass(low: float, high: float) -> float:
    if high < 0:
        low, high = -high, -low
    width = high - low
    if width * max(1.0, high) < _NARROW:
        return -0.5 * ((low + width / 2) ** 2 + _LOG_2PI) + math.log(width)
    if low > 0:
        # P(Z > low) - P(Z > high), without the cancellation of two numbers near 1.
        lower = _log_tail(low)
        return lower + math.log1p(-math.exp(_log_tail(high) - lower))
    return math.log1p(-(_tail(-low) + _tail(high)))


_log_masses: Final = np.frompyfunc(_log_mass, 2, 1)


def _draw(low: float, high: float, uniform: float, rng: np.random.Generator) -> float:
    if high < 0:
        return -_draw(-high, -low, uniform, rng)
    found = low
    if low <= _TAIL:
        upper, lower = _tail(high), _tail(low)
        # inv_cdf takes no 0 and no 1: what rounds to one is at the end of the interval.
        chance = lower - uniform * (lower - upper)
        found = -_inverse_cdf(min(max(chance, sys.float_info.min), 1 - sys.float_info.epsilon / 2))
    else:
        span = -math.expm1(-low * (high - low))
        is_accepted = False
        while not is_accepted:
            found = low - math.log1p(-uniform * span) / low
            is_accepted = rng.random() < math.exp(-0.5 * (found - low) ** 2)
            uniform = rng.random()
    # Rounding may have led over an end.
    return min(max(found, low), high)


def _tail(value: float) -> float:
    """Return P(Z > value)."""
    return 0.5 * math.erfc(value / math.sqrt(2))


def _log_tail(value: float) -> float:
    """Return ln P(Z > value)."""
    if value <= _FAR:
        return math.log(_tail(value))
    square = value * value
    series = math.log1p((-1 + (3 - 15 / square) / square) / square)
    return -0.5 * (square + _LOG_2PI) - math.log(value) + series
