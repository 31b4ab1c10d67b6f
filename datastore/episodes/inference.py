"""Inference: the narrowest spaces that hold some episodes, where nobody stated any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import (
    Array,
    Box,
    Dict,
    Discrete,
    MultiDiscrete,
    Space,
    Text,
    Tuple,
    describe,
)
from replaylake.datastore.errors import EpisodeInvalidError, SchemaMismatchError


def infer_spec(episodes: Sequence[Episode]) -> DatasetSpec:
    """Return the narrowest spaces that hold these episodes; bounds of a Box are left open.

    Integer actions without a shape become Discrete(max + 1). Raises: EpisodeInvalidError if the
    episodes differ in shape or kind.
    """
    shapes = {np.shape(e.action_masks) for e in episodes if e.action_masks is not None}
    sizes = {shape[1] if len(shape) == 2 else -1 for shape in shapes}
    if len(sizes) > 1 or -1 in sizes:
        raise EpisodeInvalidError(
            f"action_mask: found shapes {sorted(shapes)}, expected [T, A] with one A."
        )
    mask_size = sizes.pop() if sizes else None
    spaces = dict.fromkeys(map(_infer_spaces, episodes))
    return widest_spec([DatasetSpec(*pair, mask_size) for pair in spaces])


def widest_spec(specs: Sequence[DatasetSpec]) -> DatasetSpec:
    """Return the narrowest spec that holds what each of these does.

    Raises: EpisodeInvalidError if there is none.
    """
    observation = _common_space([spec.observation_space for spec in specs], "observation")
    action = _common_space([spec.action_space for spec in specs], "action")
    sizes = {spec.mask_size for spec in specs} - {None}
    if len(sizes) > 1:
        raise EpisodeInvalidError(
            f"action_mask: found {sizes} actions, expected one number of them."
        )
    mask_size = sizes.pop() if sizes else None
    if mask_size is not None and isinstance(action, Discrete):
        if mask_size < action.n:
            raise EpisodeInvalidError(
                f"action_mask: found {mask_size} actions, expected {action.n} or more, as action "
                f"{action.n - 1} was taken. Check that mask and action belong together."
            )
        action = replace(action, n=mask_size)
    return DatasetSpec(observation, action, mask_size)


def _infer_spaces(episode: Episode) -> tuple[Space, Space]:
    name = episode.source_episode_id or episode.episode_id
    try:
        if not len(episode):
            raise EpisodeInvalidError(
                "found no steps, expected at least one. Leave empty episodes out."
            )
        return (
            _infer_space(episode.observations, "observation"),
            _infer_space(episode.actions, "action", is_action=True),
        )
    except (EpisodeInvalidError, SchemaMismatchError) as error:
        raise EpisodeInvalidError(f"episode {name}: {error}") from error


def _infer_space(values: Any, what: str, *, is_action: bool = False) -> Space:
    if isinstance(values, Mapping):
        kinds = {k: _infer_space(v, f"{what}.{k}", is_action=is_action) for k, v in values.items()}
        return Dict(kinds)
    if isinstance(values, tuple):
        parts = enumerate(values)
        return Tuple(tuple(_infer_space(v, f"{what}._{i}", is_action=is_action) for i, v in parts))
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise EpisodeInvalidError(
            f"{what}: found rows of unequal length, expected one shape at every step. "
            "Pad or drop the uneven rows."
        ) from error
    if array.ndim == 0 or not array.size:
        raise EpisodeInvalidError(
            f"{what}: found {array.shape}, expected at least one value per step."
        )
    kind = array.dtype.kind
    if kind in "OU":
        return Text()
    if kind not in "fiub":
        raise EpisodeInvalidError(f"{what}: found {array.dtype}, expected numbers or strings.")
    if is_action and kind in "iub":
        return _infer_countable(array, what)
    dtype = "float32" if array.dtype == np.float16 else array.dtype.name
    if dtype == "uint8" and array.ndim >= 3:
        return Box(array.shape[1:], dtype, 0, 255)
    return Box(array.shape[1:], dtype)


def _infer_countable(actions: Array, what: str) -> Space:
    if actions.min() < 0:
        raise EpisodeInvalidError(
            f"{what}: found {actions.min()}, expected integers from 0. "
            "State the space when creating the dataset."
        )
    if actions.ndim == 1:
        return Discrete(int(actions.max()) + 1)
    if actions.ndim > 2:
        raise EpisodeInvalidError(
            f"{what}: found integers of shape {list(actions.shape[1:])} a step, expected one or a "
            "vector. State the space when creating the dataset."
        )
    return MultiDiscrete(tuple(int(n) + 1 for n in actions.max(axis=0)))


def _common_space(spaces: list[Space], what: str) -> Space:
    first = spaces[0]
    if all(isinstance(space, Discrete) for space in spaces):
        return Discrete(max(space.n for space in spaces if isinstance(space, Discrete)))
    if isinstance(first, MultiDiscrete):
        vectors = [space.nvec for space in spaces if isinstance(space, MultiDiscrete)]
        if len({len(v) for v in vectors}) == 1 and len(vectors) == len(spaces):
            return MultiDiscrete(tuple(int(n) for n in np.max(vectors, axis=0)))
    dicts = [space for space in spaces if isinstance(space, Dict)]
    if (
        dicts
        and len(dicts) == len(spaces)
        and all(d.spaces.keys() == dicts[0].spaces.keys() for d in dicts)
    ):
        return Dict(
            {k: _common_space([d.spaces[k] for d in dicts], f"{what}.{k}") for k in dicts[0].spaces}
        )
    for space in spaces:
        if space != first:
            raise EpisodeInvalidError(
                f"{what}: found {describe(first)} and {describe(space)}, expected one space. "
                "State the space when creating the dataset."
            )
    return first
