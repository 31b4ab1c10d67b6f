"""The spaces that a TFDS dataset's features.json states."""

from __future__ import annotations

import math

from replaylake.datastore.episodes.spaces import Box, Dict, Discrete, MultiDiscrete, Space, Text
from replaylake.datastore.interchange.formats.rlds.features import EpisodeSpec, Leaf, Spec


def spaces_of(spec: EpisodeSpec) -> tuple[Space, Space] | None:
    """Return the observation and the action space; None where features.json leaves one open.

    Integers that are no class labels are open as actions: nothing says how many there are.
    """
    observation, action = spec.steps.get("observation"), spec.steps.get("action")
    if observation is None or action is None:
        return None
    spaces = _space(observation, is_action=False), _space(action, is_action=True)
    observation_space, action_space = (_vector(space) for space in spaces)
    if observation_space is None or action_space is None:
        return None
    return observation_space, action_space


def _space(spec: Spec, *, is_action: bool) -> Space | None:
    if isinstance(spec, dict):
        parts = {name: _space(one, is_action=is_action) for name, one in spec.items()}
        known = {name: one for name, one in parts.items() if one is not None}
        return Dict(known) if len(known) == len(parts) else None
    if (
        not isinstance(spec, Leaf)
        or spec.is_ragged
        or (spec.encoding == "image" and not spec.shape)
    ):
        return None
    if spec.dtype == "string":
        return None if spec.shape else Text()
    if spec.encoding == "image" and spec.dtype == "uint8":
        return Box(spec.shape, "uint8", 0, 255)
    if is_action and not spec.dtype.startswith("float"):
        return _countable(spec)
    return Box(spec.shape, "float32" if spec.dtype == "float16" else spec.dtype)


def _countable(spec: Leaf) -> Space | None:
    num = 2 if spec.dtype == "bool" else spec.num_classes
    if num is None:
        return None
    return MultiDiscrete((num,) * math.prod(spec.shape)) if spec.shape else Discrete(num)


def _vector(space: Space | None) -> Space | None:
    """Give a lone float a dim of 1, as its values get one."""
    if isinstance(space, Box) and not space.shape and space.dtype.startswith("float"):
        return Box((1,), space.dtype)
    return space
