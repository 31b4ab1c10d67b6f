"""Drift: how far observations are from those that a policy was trained on, element by element."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from replaylake.datastore.episodes.spaces import Array, Values
from replaylake.datastore.lake.policies.policy import PolicySpec

# Of longer observations elements are taken evenly: as many as tell whether the whole has moved.
MAX_ELEMENTS: Final = 256


@dataclass(frozen=True)
class TrainingMoments:
    """Mean and standard deviation of D elements of the observation, in the training steps.

    leaves: by each one's dotted name ("" where the space is no Dict or Tuple), which of its
    elements are among the D: every n-th. labels: what the D elements are called. mean and scale
    float64 [D]; scale is 1 / std.
    """

    leaves: tuple[tuple[str, int], ...]
    labels: tuple[str, ...]
    mean: Array
    scale: Array

    def standardize(self, observations: Values) -> Array:
        """Return (x - mean) / std of observations [B, *obs] as float64 [B, D]."""
        columns = []
        for name, every in self.leaves:
            leaf: Any = observations
            for key in filter(None, name.split(".")):
                leaf = leaf[key]
            columns.append(np.reshape(leaf, (len(leaf), -1))[:, ::every])
        joined = columns[0] if len(columns) == 1 else np.concatenate(columns, axis=1)
        result: Array = (joined - self.mean) * self.scale
        return result


def training_moments(about: Mapping[str, Any], spec: PolicySpec) -> TrainingMoments | None:
    """Return what a package's manifest says of its training observations; None if nothing.

    It says so under `observation_statistics`, or where the learner scaled its observations under
    `normalization`, as {leaf: {"mean": ..., "std": ...}}. What makes no sense there is not used:
    a policy serves as well without.
    """
    moments = about.get("observation_statistics")
    if not moments:
        # Packages from before the key was respelled are served too.
        normalization = about.get("normalization", about.get("normalisation"))
        moments = normalization.get("observations") if isinstance(normalization, Mapping) else None
    try:
        return _read(moments, spec) if moments else None
    except (TypeError, ValueError, KeyError, AttributeError):
        return None


def _read(body: Mapping[str, Any], spec: PolicySpec) -> TrainingMoments | None:
    moments = {
        str(name): (np.asarray(of["mean"], np.float64), np.asarray(of["std"], np.float64))
        for name, of in body.items()
    }
    total = sum(mean.size for mean, _ in moments.values())
    every = -(-total // MAX_ELEMENTS)
    leaves, labels, means, stds = [], [], [], []
    for name, (mean, std) in moments.items():
        if mean.shape != std.shape or not (np.isfinite(mean).all() and (std > 0).all()):
            return None
        columns = range(0, mean.size, every)
        leaves.append((name, every))
        labels += [_label(name, i, mean.size, spec) for i in columns]
        means.append(mean.reshape(-1)[::every])
        stds.append(std.reshape(-1)[::every])
    return TrainingMoments(
        tuple(leaves), tuple(labels), np.concatenate(means), 1.0 / np.concatenate(stds)
    )


def _label(leaf: str, element: int, size: int, spec: PolicySpec) -> str:
    """Return what an element is called: by its column's name, its leaf, or its number."""
    if not leaf:
        names = () if spec.encoding is None else spec.encoding.names()
        return names[element] if len(names) == size else str(element)
    return leaf if size == 1 else f"{leaf}[{element}]"
