"""Coverage: how much of what could be seen and done a dataset has seen and done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.lake.profile.vectors import Leaves

# Cells a side of the map of observations, and bins of the range of one continuous action.
_MAP_CELLS: Final = 48
_RANGE_BINS: Final = 20


@dataclass(frozen=True)
class Coverage:
    """What a policy learned from the data can know about.

    action_share: of the actions of a Discrete space, the share that was ever taken; of continuous
    ones the mean share of 20 equal bins of each bounded number that were. action_entropy: of the
    actions taken, in nats, over its greatest possible value; None where actions are continuous.
    state_share: of a Discrete observation, the share of values that were ever seen.
    observation_map: counts on a grid [48, 48] over the first two principal components of the
    standardised observations, which hold `map_share` of their variance.
    """

    action_share: float | None
    action_entropy: float | None
    state_share: float | None
    observation_map: tuple[tuple[int, ...], ...] | None
    map_share: float | None


def coverage_of(observed: Array, actions: Leaves, observations: Leaves) -> Coverage:
    """Return the coverage; `observed` float64 [m, D] is a sample of observations' numbers."""
    counted = actions.counted()
    entropy = share = None
    if counted and len(counted) == actions.width:
        shares = [np.mean(np.asarray(one.counts) > 0) for one in counted]
        share = float(np.mean(shares))
        entropies = [_entropy(np.asarray(one.counts)) for one in counted]
        entropy = float(np.mean(entropies))
    elif bins := [_range_share(d.histogram, d.low, d.high) for d in actions.dimensions()]:
        known = [one for one in bins if one is not None]
        share = float(np.mean(known)) if known else None
    states = [np.mean(np.asarray(one.counts) > 0) for one in observations.counted()]
    grid, map_share = _map_of(observed)
    return Coverage(share, entropy, float(np.mean(states)) if states else None, grid, map_share)


def _entropy(counts: Array) -> float:
    if len(counts) < 2 or not counts.sum():
        return 1.0
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum() / np.log(len(counts)))


def _range_share(histogram: object, low: float | None, high: float | None) -> float | None:
    edges, counts = getattr(histogram, "edges", None), getattr(histogram, "counts", None)
    if edges is None or counts is None or low is None or high is None or low >= high:
        return None
    bounds = np.asarray(edges)
    middles = ((bounds[1:] + bounds[:-1]) / 2)[np.asarray(counts) > 0]
    bins = np.clip((middles - low) / (high - low) * _RANGE_BINS, 0, _RANGE_BINS - 1)
    return float(len(np.unique(bins.astype(int))) / _RANGE_BINS)


def _map_of(rows: Array) -> tuple[tuple[tuple[int, ...], ...] | None, float | None]:
    finite = rows[np.isfinite(rows).all(axis=1)] if rows.size else rows
    if len(finite) < 2:
        return None, None
    spread = finite.std(axis=0)
    varying = finite[:, spread > 0]
    if varying.shape[1] < 2:
        return None, None
    scaled = (varying - varying.mean(axis=0)) / varying.std(axis=0)
    variances, axes = np.linalg.eigh(np.cov(scaled, rowvar=False))
    # eigh sorts upwards. An axis may point either way: the largest part of each is made positive.
    first = axes[:, [-1, -2]]
    first = first * np.sign(first[np.abs(first).argmax(axis=0), [0, 1]])
    flat = scaled @ first
    counts, _, _ = np.histogram2d(flat[:, 0], flat[:, 1], bins=_MAP_CELLS)
    grid = tuple(tuple(int(n) for n in row) for row in counts)
    return grid, float(variances[-2:].sum() / variances.sum())
