"""Smoke test: checks that a policy passes before it answers requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from replaylake.datastore.episodes.compatibility import find_encoding_mismatch, is_compatible
from replaylake.datastore.episodes.spaces import (
    Array,
    Box,
    Dict,
    Discrete,
    Leaf,
    MultiBinary,
    MultiDiscrete,
    Space,
    Text,
    Tuple,
    Values,
    bounds,
    children,
    describe,
    leaves,
    value_dtype,
    value_shape,
)
from replaylake.datastore.errors import (
    EpisodeInvalidError,
    PackageInvalidError,
    SchemaMismatchError,
)
from replaylake.datastore.lake.policies.exploration import Exploration
from replaylake.datastore.lake.policies.policy import Act, Policy, PolicySpec

# Zeros, and some at random. The first acts of a graph take longer than all after.
_NUM_SAMPLES: Final = 8


def smoke_test(policy: Policy, exploration: Exploration, what: str) -> int:
    """Act on samples of the observation space; return on how many. The graph is warm then.

    Alone and all at once, the mode and with what is explored: every action and log-probability has
    to be finite. Raises: PackageInvalidError naming what came out, SpaceUnsupportedError.
    """
    rng = np.random.default_rng(0)
    observations = sample_values(policy.spec.observation_space, _NUM_SAMPLES, rng)
    batches = [(observations, _NUM_SAMPLES), (_first(observations), 1)]
    hows: list[dict[str, Any]] = [{"deterministic": True}]
    if exploration.epsilon > 0:
        hows.append({"deterministic": True, "epsilon": exploration.epsilon})
    elif exploration.temperature:
        hows.append({"deterministic": False, "temperature": exploration.temperature})
    for batch, num in batches:
        for how in hows:
            try:
                act = policy.act(batch, policy.initial_state(num), rng=rng, **how)
            except EpisodeInvalidError as error:
                raise PackageInvalidError(
                    f"{what}: cannot act on samples of its own observation space: {error} "
                    "Train or package it again."
                ) from error
            _check_finite(act, what)
    return _NUM_SAMPLES


def check_same_spaces(spec: PolicySpec, served: PolicySpec, what: str) -> None:
    """Refuse a policy whose spaces or encoding differ from those of one served with it or before.

    Clients and the logged tables know one form of both. Bounds may differ, dtypes may not: a
    request is read before the version that answers it is chosen. Raises: SchemaMismatchError.
    """
    for name in ("observation_space", "action_space"):
        theirs, ours = getattr(spec, name), getattr(served, name)
        if not is_compatible(theirs, ours) or _dtypes(theirs) != _dtypes(ours):
            raise SchemaMismatchError(
                f"{what}: found the {name.replace('_', ' ')} {describe(theirs)}, expected "
                f"{describe(ours)} as in the served policy. Serve it on a separate server."
            )
    if (difference := find_encoding_mismatch(spec.encoding, served.encoding)) is not None:
        raise SchemaMismatchError(
            f"{what}: its encoding of observations differs from the served policy's: {difference}. "
            "Serve it on a separate server."
        )


def sample_values(space: Space, num: int, rng: np.random.Generator) -> Values:
    """Return `num` values of a space, [num, *shape] in its dtype; the first is all zeros.

    Where zero is not in the space it is the nearest number that is. Numbers without bounds are
    drawn from a standard normal, the others evenly.
    """
    if isinstance(space, Dict | Tuple):
        return {key: sample_values(sub, num, rng) for key, sub in children(space).items()}
    return _sample_leaf(space, num, rng)


def _sample_leaf(leaf: Leaf, num: int, rng: np.random.Generator) -> Array:
    dtype, shape = value_dtype(leaf), (num, *value_shape(leaf))
    if isinstance(leaf, Text):
        return np.full(shape, "", dtype)
    if isinstance(leaf, Discrete):
        values: Any = rng.integers(leaf.start, leaf.start + leaf.n, shape)
    elif isinstance(leaf, MultiDiscrete):
        values = rng.integers(0, np.asarray(leaf.nvec), shape)
    elif isinstance(leaf, MultiBinary) or dtype.kind == "b":
        values = rng.integers(0, 2, shape)
    else:
        values = _sample_box(leaf, shape, rng)
    low, high = bounds(leaf)
    values[0] = 0
    values[0] = np.clip(values[0], low, high)
    return np.asarray(values.astype(dtype))


def _sample_box(box: Box, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    low, high = (np.broadcast_to(np.asarray(b, np.float64), box.shape) for b in bounds(box))
    is_bounded = np.isfinite(low) & np.isfinite(high) & (high - low < 1e6)
    with np.errstate(invalid="ignore", over="ignore"):
        even = low + rng.random(shape) * (high - low)
    values = np.where(is_bounded, even, np.clip(rng.normal(size=shape), low, high))
    return values if np.dtype(box.dtype).kind == "f" else np.floor(values)


def _dtypes(space: Space) -> list[np.dtype[Any]]:
    return [value_dtype(leaf) for _, leaf in leaves(space)]


def _first(values: Values) -> Values:
    if isinstance(values, np.ndarray):
        return values[:1]
    return {key: _first(value) for key, value in values.items()}


def _arrays(act: Act) -> Iterator[tuple[str, Array]]:
    yield "action", act.actions
    if act.log_probs is not None:
        # NaN is a density that is not known, as of an action at its bound.
        yield "log-probability", act.log_probs[~np.isnan(act.log_probs)]
    if act.state is not None:
        yield "state", act.state


def _check_finite(act: Act, what: str) -> None:
    for name, array in _arrays(act):
        wrong = array[~np.isfinite(array)]
        if wrong.size:
            raise PackageInvalidError(
                f"{what}: found {name} {wrong.reshape(-1)[0]} for a sample of its observation "
                "space, expected finite numbers. Train or package it again."
            )
