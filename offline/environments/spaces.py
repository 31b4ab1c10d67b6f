"""Spaces of environments: Gymnasium's as ours, and back; the masks that environments give.

Needs gymnasium alone: neither torch nor ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from replaylake.datastore.episodes.spaces import (
    Array,
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    Text,
    Tuple,
)
from replaylake.datastore.errors import ExtraMissingError, SpaceUnsupportedError

try:
    # Under its own name: the modules beside this one take it from here, so that what to install
    # where it is missing is said once.
    import gymnasium as gymnasium
except ModuleNotFoundError as _error:
    raise ExtraMissingError(
        "environments: found no gymnasium, expected it to step and record. "
        "Run: pip install 'replaylake[gym]'."
    ) from _error

Environment = gymnasium.Env[Any, Any]


def from_gymnasium(space: gymnasium.Space[Any]) -> Space:
    """Return the same space as ours.

    Raises: SpaceUnsupportedError for Graph, Sequence and OneOf.
    """
    kinds = gymnasium.spaces
    if isinstance(space, kinds.Box):
        dtype = np.dtype(space.dtype).name
        return Box(space.shape, dtype, space.low.tolist(), space.high.tolist())
    if isinstance(space, kinds.Discrete):
        return Discrete(int(space.n), int(space.start))
    if isinstance(space, kinds.MultiDiscrete) and space.nvec.ndim == 1 and not space.start.any():
        return MultiDiscrete(tuple(space.nvec.tolist()))
    if isinstance(space, kinds.MultiBinary) and len(space.shape) == 1:
        return MultiBinary(int(space.shape[0]))
    if isinstance(space, kinds.Text):
        return Text()
    if isinstance(space, kinds.Dict):
        return Dict({key: from_gymnasium(sub) for key, sub in space.spaces.items()})
    if isinstance(space, kinds.Tuple):
        return Tuple(tuple(from_gymnasium(sub) for sub in space.spaces))
    raise SpaceUnsupportedError(
        f"found Gymnasium space {space}, expected Box, Discrete, MultiDiscrete and MultiBinary "
        "with one dim and starting at 0, Text, Dict or Tuple. Wrap the environment so that it has "
        "one of these."
    )


def to_gymnasium(space: Space) -> gymnasium.Space[Any]:
    """Return the same space as Gymnasium's."""
    kinds = gymnasium.spaces
    if isinstance(space, Box):
        dtype = np.dtype(space.dtype)
        low, high = (_bound_array(bound, space) for bound in (space.low, space.high))
        return kinds.Box(low, high, space.shape, dtype.type)
    if isinstance(space, Discrete):
        return kinds.Discrete(space.n, start=space.start)
    if isinstance(space, MultiDiscrete):
        return kinds.MultiDiscrete(list(space.nvec))
    if isinstance(space, MultiBinary):
        return kinds.MultiBinary(space.n)
    if isinstance(space, Dict):
        return kinds.Dict({key: to_gymnasium(sub) for key, sub in space.spaces.items()})
    if isinstance(space, Tuple):
        return kinds.Tuple([to_gymnasium(sub) for sub in space.spaces])
    return kinds.Text(max_length=2**31 - 1)


def action_mask(info: Mapping[str, Any]) -> Array | None:
    """Return the mask bool [A] that an environment puts into info["action_mask"], if it does."""
    mask = info.get("action_mask")
    return None if mask is None else np.asarray(mask).astype(bool)


def _bound_array(bound: Any, space: Box) -> Array:
    return np.broadcast_to(np.asarray(bound), space.shape).astype(space.dtype)
