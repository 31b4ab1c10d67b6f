"""Normalization: what a learner's observations, rewards and actions are scaled by, fitted by SQL.

Over the training episodes alone: what is held out to evaluate a policy tells it nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Final, Literal, get_args

import numpy as np

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.spaces import Array, Box, Space, leaves
from replaylake.datastore.errors import ConfigInvalidError, EmptyReplayError, SchemaMismatchError
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.query.moments import (
    ElementMoments,
    Elements,
    measure_returns,
    measure_steps,
)
from replaylake.datastore.replay.view_query import ViewQuery
from replaylake.offline.dataset_statistics import DatasetStatistics, Moments, RewardScaling

RewardNormalization = Literal["none", "std", "mean_std", "return_range"]
REWARD_NORMALIZATIONS: Final[tuple[str, ...]] = get_args(RewardNormalization)
# As TD3+BC adds to it (Fujimoto and Gu 2021, section 5): what hardly varies is not blown up.
_MIN_STD: Final = 1e-3
# Rewards so scaled add up to at most this, from the best episode to the worst (Kostrikov et al.
# 2021, IQL, appendix B).
_RETURN_RANGE: Final = 1000.0
_REWARD: Final = "reward"


def fit_statistics(
    snapshots: Sequence[Snapshot],
    where: str | None = None,
    where_steps: str | None = None,
    reward: str | None = None,
    *,
    observations: bool = False,
    rewards: RewardNormalization = "none",
    actions: bool = True,
) -> DatasetStatistics:
    """Measure the steps that a learner is to learn from.

    Args:
        snapshots: of compatible spaces; their steps count together, as those of one dataset.
        where: which episodes, as in Snapshot.replay.
        where_steps: which of their steps, but for "return_range", which takes whole episodes.
        reward: SQL expression in place of the logged reward.
        observations: measure each element of each Box leaf of numbers, also within Dict and Tuple.
            Images, flags and discrete leaves stay as they are. Its std is at least 0.001, and 1 of
            an element that never varies.
        rewards: "none"; "std", which divides them by their standard deviation; "mean_std", which
            takes off their mean too, and so rewards long episodes otherwise than short ones;
            "return_range", which makes the best and the worst episode 1,000 apart.
        actions: measure the least and greatest of each element of a Box.

    The same snapshots and SQL give the same bits. Cost: a pass over the columns measured, about
    40 ns an element, and one over the rewards for "return_range".
    Raises: ConfigInvalidError, QueryError, QueryRefusedError; EmptyReplayError where no step is
    selected; SchemaMismatchError where what is measured is not finite.
    """
    if rewards not in REWARD_NORMALIZATIONS:
        raise ConfigInvalidError(
            f"normalization: found rewards {rewards!r}, expected one of "
            f"{', '.join(REWARD_NORMALIZATIONS)}. Leave it out for none."
        )
    query = ViewQuery(where, where_steps, reward).canonical()
    spec, names = snapshots[0].spec, ", ".join(f"{s.dataset}@{s.version}" for s in snapshots)
    columns = dict(_boxes(spec.observation_space, schema.OBSERVATION)) if observations else {}
    if actions and isinstance(spec.action_space, Box):
        columns |= dict(_boxes(spec.action_space, schema.ACTION))
    elements = {name: _elements(name, box) for name, box in columns.items()}
    if rewards in ("std", "mean_std"):
        elements[_REWARD] = Elements(query.reward or schema.REWARD)
    measures = {
        name: _check_measure(name, measure, names)
        for name, measure in _measure_elements(snapshots, elements, query).items()
    }
    return DatasetStatistics(
        action_range=_range(columns, measures),
        observations={
            name.partition(".")[2]: _moments(measures[name], box.shape)
            for name, box in columns.items()
            if name != schema.ACTION
        },
        rewards=_scaling(snapshots, query, rewards, measures.get(_REWARD), names),
    )


def _boxes(space: Space, column: str) -> Iterator[tuple[str, Box]]:
    """Yield the leaves whose elements are measured, by their path in the table."""
    for name, leaf in leaves(space, column):
        if isinstance(leaf, Box) and not leaf.is_image and leaf.dtype != "bool":
            yield name, leaf


def _elements(name: str, box: Box) -> Elements:
    path = ".".join(f'"{part}"' for part in name.split("."))
    return Elements(path, math.prod(box.shape), is_list=bool(box.shape))


def _measure_elements(
    snapshots: Sequence[Snapshot], elements: Mapping[str, Elements], query: ViewQuery
) -> dict[str, ElementMoments]:
    if not elements:
        return {}
    each = [
        measure_steps(snapshot.table, elements, where=query.where, where_steps=query.where_steps)
        for snapshot in snapshots
    ]
    return {name: reduce(ElementMoments.merge, [one[name] for one in each]) for name in elements}


def _check_measure(name: str, measure: ElementMoments, names: str) -> ElementMoments:
    if not measure.num.any():
        raise EmptyReplayError(
            f"normalization of {names}: found no {name} in the selected steps, expected at least "
            "one. Check what `where` selects."
        )
    if not all(np.isfinite(values).all() for values in vars(measure).values()):
        raise SchemaMismatchError(
            f"normalization of {names}: found a {name} that is not finite, or too large to be "
            "squared, expected numbers. Leave such episodes out with `where`, or scale the "
            "reward's expression."
        )
    return measure


def _range(
    columns: Mapping[str, Box], measures: Mapping[str, ElementMoments]
) -> tuple[Array, Array] | None:
    if (box := columns.get(schema.ACTION)) is None:
        return None
    measure = measures[schema.ACTION]
    dtype = np.dtype(box.dtype if box.dtype != "float64" else np.float32)
    lowest, greatest = (
        bound.reshape(box.shape).astype(dtype) for bound in (measure.least, measure.greatest)
    )
    return lowest, greatest


def _moments(measure: ElementMoments, shape: tuple[int, ...]) -> Moments:
    std = measure.std
    # Beside rounding: a mean is exact to 16 digits.
    is_constant = std <= 1e-12 * np.abs(measure.mean)
    std = np.where(is_constant, 1.0, np.maximum(std, _MIN_STD))
    mean, std = (values.reshape(shape).astype(np.float32) for values in (measure.mean, std))
    return Moments(mean, std)


def _scaling(
    snapshots: Sequence[Snapshot],
    query: ViewQuery,
    kind: RewardNormalization,
    measure: ElementMoments | None,
    names: str,
) -> RewardScaling:
    if measure is not None:
        std = float(measure.std[0])
        # Of rewards that are all alike nothing is learned, but nothing is divided by zero either.
        scale = std if std > 1e-12 * abs(float(measure.mean[0])) else 1.0
        return RewardScaling(float(measure.mean[0]) if kind == "mean_std" else 0.0, scale)
    if kind == "none":
        return RewardScaling()
    expression = query.reward or schema.REWARD
    each = [measure_returns(s.table, expression, where=query.where) for s in snapshots]
    returns = _check_measure("return", reduce(ElementMoments.merge, each), names)
    width = float(returns.greatest[0] - returns.least[0])
    return RewardScaling(0.0, width / _RETURN_RANGE if width > 0 else 1.0)
