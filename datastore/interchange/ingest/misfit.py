"""Misfit: which check an episode fails that does not fit the spaces, and in how many rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import (
    Dict,
    Space,
    Text,
    Tuple,
    Values,
    as_batch,
    as_values,
    bounds,
    children,
    num_values,
    value_shape,
)
from replaylake.datastore.errors import EpisodeInvalid
from replaylake.datastore.interchange.formats.tabular.arrays import Mask


def misfit(episode: Episode, spaces: tuple[Space, Space]) -> tuple[str, int]:
    """Return the name of the check that an episode fails which `checked` refused, and its rows."""
    parts = [(spaces[0], episode.observations), (spaces[1], episode.actions)]
    if episode.final_observation is not None:
        parts.append((spaces[0], as_batch(episode.final_observation)))
    for space, values in parts:
        if (check := _form_check(space, values)) is not None:
            return check, min(len(episode), max(1, _num_rows(check, values, len(episode))))
    if not np.isfinite(np.asarray(episode.rewards, np.float64)).all():
        return "not_finite", int((~np.isfinite(episode.rewards)).sum())
    outside = [_outside(space, values) for space, values in parts[:2]]
    if num := int((outside[0] | outside[1]).sum()):
        return "space", num
    log_probs = episode.behavior_log_probs
    if log_probs is not None and (num := int((~(log_probs <= 0) & ~np.isnan(log_probs)).sum())):
        return "propensity", num
    return ("space", 1) if episode.action_masks is None else ("action_mask", 1)


def form(episode: Episode) -> Hashable:
    """Return what episodes of one dataset have in common: the shapes and kinds of their values."""
    return _form(episode.observations), _form(episode.actions)


def most_common_form(episodes: Sequence[Episode]) -> Hashable:
    """Return the form that most of these steps have."""
    counts: Counter[Hashable] = Counter()
    for episode in episodes:
        counts[form(episode)] += len(episode)
    return counts.most_common(1)[0][0]


def _form(values: Values) -> Hashable:
    if isinstance(values, Mapping):
        return tuple(sorted((key, _form(sub)) for key, sub in values.items()))
    kind = values.dtype.kind
    return values.shape[1:], {"O": "text", "U": "text", "f": "float"}.get(kind, "whole")


def _form_check(space: Space, values: Any) -> str | None:
    if isinstance(space, Dict | Tuple):
        names = children(space)
        if not isinstance(values, Mapping) or set(values) != set(names):
            return "shape"
        found = (_form_check(sub, values[key]) for key, sub in names.items())
        return next((check for check in found if check is not None), None)
    if isinstance(values, Mapping):
        return "shape"
    if not isinstance(space, Text) and np.shape(values)[1:] != value_shape(space):
        return "shape"
    if not _finite(values).all():
        return "not_finite"
    try:
        as_values(space, values, "value")
    except EpisodeInvalid:
        return "dtype"
    return None


def _num_rows(check: str, values: Values, num: int) -> int:
    return int((~_finite(values)).sum()) if check == "not_finite" else num


def _finite(values: Values) -> Mask:
    """Return which rows are all finite."""
    if isinstance(values, Mapping):
        return np.asarray(np.all([_finite(sub) for sub in values.values()], axis=0))
    if values.dtype.kind != "f":
        return np.ones(len(values), dtype=np.bool_)
    return np.asarray(np.isfinite(values).reshape(len(values), -1).all(axis=1))


def _outside(space: Space, values: Values) -> Mask:
    """Return which rows are outside of a space whose form they have."""
    if isinstance(space, Dict | Tuple):
        parts: Any = values
        found = [_outside(sub, parts[key]) for key, sub in children(space).items()]
        return np.asarray(np.any(found, axis=0))
    if isinstance(space, Text) or isinstance(values, Mapping):
        return np.zeros(num_values(values), dtype=np.bool_)
    low, high = bounds(space)
    with np.errstate(invalid="ignore"):
        outside = (values < low) | (values > high)
    return np.asarray(outside.reshape(len(values), -1).any(axis=1))
