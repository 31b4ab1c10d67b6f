"""Log-probabilities of given actions: what off-policy evaluation asks a policy for.

`act` says how likely the action is that it returns; here somebody else chose the action. The same
head under the same options gives the same numbers in both (test_log_probs.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from replaylake.datastore.episodes.spaces import (
    Array,
    Box,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    as_values,
    check_bounds,
)
from replaylake.datastore.errors import SpaceUnsupportedError
from replaylake.datastore.lake.policies import multi_categorical, truncated_normal
from replaylake.datastore.lake.policies.heads import (
    box_bounds,
    check_finite,
    check_head_takes,
    discrete_probs,
    gaussian_log_density,
)
from replaylake.datastore.lake.policies.policy import PolicySpec

# Nearer to a bound float32 has no number below 1: a squashed action that was stored as the bound
# itself is taken for this one, whose density is finite.
UNIT_LIMIT: Final = 1 - 2.0**-24


def head_action_probs(
    spec: PolicySpec,
    parameters: Mapping[str, Array],
    *,
    deterministic: bool = True,
    temperature: float = 1.0,
    epsilon: float = 0.0,
    mask: Array | None = None,
) -> Array:
    """Return the probability of each Discrete action, float64 [N, A]; see Policy.action_probs.

    Raises: SpaceUnsupportedError for a head whose actions cannot be listed; EpisodeInvalidError.
    """
    if not isinstance(spec.action_space, Discrete):
        raise SpaceUnsupportedError(
            f"head {spec.head}: found probabilities of every action asked for, which only Discrete "
            "actions have. Ask for log_probs of given actions."
        )
    check_finite(spec, parameters)
    return discrete_probs(
        spec,
        parameters,
        deterministic=deterministic,
        temperature=temperature,
        epsilon=epsilon,
        mask=mask,
    )


def head_log_probs(
    spec: PolicySpec,
    parameters: Mapping[str, Array],
    actions: Any,
    *,
    deterministic: bool = True,
    temperature: float = 1.0,
    epsilon: float = 0.0,
    mask: Array | None = None,
) -> Array:
    """Return ln of the probability (density) of given actions [N, *act], float64 [N].

    -inf where the head never chooses the action. See Policy.log_probs. Raises:
    SpaceUnsupportedError naming the head if it has no density at all; EpisodeInvalidError for
    actions that are not of the space.
    """
    actions = as_values(spec.action_space, actions, "action")
    if not isinstance(spec.action_space, Box):
        # -1 would be looked up as the last one.
        check_bounds(spec.action_space, actions, "action")
    if isinstance(spec.action_space, Discrete):
        probs = head_action_probs(
            spec,
            parameters,
            deterministic=deterministic,
            temperature=temperature,
            epsilon=epsilon,
            mask=mask,
        )
        return gather_log_probs(probs, actions, spec.action_space)
    check_has_density(spec, deterministic=deterministic, temperature=temperature)
    check_head_takes(spec, epsilon=epsilon, mask=mask)
    check_finite(spec, parameters)
    if isinstance(spec.action_space, MultiDiscrete | MultiBinary):
        return multi_categorical.log_probs(
            spec.action_space,
            parameters["logits"],
            np.asarray(actions),
            temperature=0.0 if deterministic else temperature,
            epsilon=epsilon,
        )
    return _gaussian(spec, parameters, np.asarray(actions, np.float64), temperature)


def check_has_density(
    spec: PolicySpec, *, deterministic: bool = True, temperature: float = 1.0
) -> None:
    """Refuse a head that gives no action a probability. Raises: SpaceUnsupportedError naming it."""
    if not isinstance(spec.action_space, Box) or spec.head == "uniform":
        return
    if spec.head in ("deterministic", "sampled"):
        raise SpaceUnsupportedError(
            f"head {spec.head}: found log-probabilities asked for, expected a head with a density: "
            "gaussian, squashed_gaussian, or one of countable actions. Importance sampling cannot "
            "evaluate this policy; fitted Q evaluation can."
        )
    if deterministic or temperature == 0:
        raise SpaceUnsupportedError(
            f"head {spec.head}: found log-probabilities of its mode asked for, which has no "
            "density. Draw from it instead (temperature 1), or use fitted Q evaluation."
        )


def gather_log_probs(probs: Array, actions: Array, space: Discrete) -> Array:
    """Return ln of each row's probability of its action: probs [N, A], actions [N] to [N]."""
    with np.errstate(divide="ignore"):
        log_probs: Array = np.log(probs[np.arange(len(probs)), actions - space.start])
    return log_probs


def _gaussian(
    spec: PolicySpec, parameters: Mapping[str, Array], actions: Array, temperature: float
) -> Array:
    """The density that `_act_gaussian` says of its own draws; see there for sources."""
    means = np.asarray(parameters["means"], np.float64)
    stds = np.exp(np.asarray(parameters["log_stds"], np.float64)) * temperature
    low, high = (bound.reshape(-1) for bound in box_bounds(spec.action_space))
    flat = actions.reshape(means.shape)
    if spec.head == "gaussian":
        mass = truncated_normal.log_mass((low - means) / stds, (high - means) / stds)
        densities = gaussian_log_density((flat - means) / stds, stds) - mass
        # A bound that the actions' type does not hold is the nearest number that it holds.
        kind = spec.action_space.dtype  # type: ignore[union-attr]
        least, greatest = low.astype(kind), high.astype(kind)
        outside = ((flat < np.minimum(low, least)) | (flat > np.maximum(high, greatest))).any(
            axis=1
        )
        return np.where(outside, -np.inf, densities.sum(axis=1))
    unit = (flat - (low + high) / 2) / ((high - low) / 2)
    raw = np.arctanh(np.clip(unit, -UNIT_LIMIT, UNIT_LIMIT))
    log_jacobian = 2 * (np.log(2) - raw - np.logaddexp(0, -2 * raw)) + np.log((high - low) / 2)
    densities = gaussian_log_density((raw - means) / stds, stds) - log_jacobian
    log_probs: Array = densities.sum(axis=1)
    return log_probs
