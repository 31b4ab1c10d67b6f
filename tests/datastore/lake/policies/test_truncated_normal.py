"""Draws and normalizers of a truncated normal, against its distribution function and integrals."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from replaylake.datastore.lake.policies.truncated_normal import draw, log_mass

INTERVALS = [
    (-1.0, 1.0),
    (-math.inf, math.inf),
    (0.5, math.inf),
    (-math.inf, -0.5),
    (2.0, 2.5),
    (6.0, 7.0),
    (-9.0, -8.0),
    (30.0, 31.0),
    (-4000.0, -3999.0),
    (50.0, math.inf),
    (1e-9, 2e-9),
    (30.0, 30.0 + 1e-8),
]


def integral(low: float, high: float) -> float:
    """ln of the integral of the density, by the trapezoidal rule around its greatest value."""
    peak = min(max(low, 0.0), high)
    scale = 1.0 if abs(peak) < 1 else 1 / abs(peak)
    start, end = max(low, peak - 40 * scale), min(high, peak + 40 * scale)
    grid = np.linspace(start, end, 400_001)
    values = -0.5 * (grid**2 + math.log(2 * math.pi))
    return float(values.max() + np.log(np.trapezoid(np.exp(values - values.max()), grid)))


@pytest.mark.parametrize(("low", "high"), INTERVALS)
def test_the_mass_is_the_integral_of_the_density(low: float, high: float) -> None:
    assert log_mass(np.array(low), np.array(high)) == pytest.approx(integral(low, high), abs=1e-6)


def test_the_mass_by_the_distribution_function() -> None:
    cdf = NormalDist().cdf
    low, high = np.array([[-3.0, -0.2], [0.1, 1.0]]), np.array([[-1.0, 0.3], [0.2, 4.0]])
    expected = [
        [math.log(cdf(b) - cdf(a)) for a, b in zip(*pair, strict=True)]
        for pair in zip(low, high, strict=True)
    ]
    np.testing.assert_allclose(log_mass(low, high), expected, rtol=1e-12)


@pytest.mark.parametrize(("low", "high"), INTERVALS)
def test_draws_follow_their_distribution(low: float, high: float) -> None:
    num = 4000
    found = np.sort(draw(np.full(num, low), np.full(num, high), np.random.default_rng(3)))
    assert ((found >= low) & (found <= high)).all()
    # P(Z < x) of the truncated normal; Kolmogorov's bound holds with probability 1 - 2e-6.
    below = np.array([log_mass(np.array(low), np.array(x)) if x > low else -np.inf for x in found])
    chance = np.exp(below - log_mass(np.array(low), np.array(high)))
    assert np.abs(chance - (np.arange(num) + 0.5) / num).max() < 2.64 / math.sqrt(num)


def test_each_element_has_its_own_interval() -> None:
    low = np.array([[-1.0, 6.0], [30.0, -3.0]])
    found = draw(low, low + 1, np.random.default_rng(0))
    assert found.shape == (2, 2)
    assert ((found >= low) & (found <= low + 1)).all()
