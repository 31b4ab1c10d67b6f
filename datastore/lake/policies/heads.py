"""Heads: from the parameters that a policy's graph gives to actions and their log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from replaylake.datastore.episodes.spaces import (
    Array,
    Box,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    describe,
)
from replaylake.datastore.errors import EpisodeInvalidError, SpaceUnsupportedError
from replaylake.datastore.lake.policies import multi_categorical, truncated_normal
from replaylake.datastore.lake.policies.policy import DISCRETE_HEADS, Act, PolicySpec

LOG_2PI: Final = float(np.log(2 * np.pi))
# What a discrete head's graph gives.
_SCORES: Final[Mapping[str, str]] = {"categorical": "logits", "q_values": "q_values"}
_FEW_ACTIONS: Final = 64


def act_from_head(
    spec: PolicySpec,
    parameters: Mapping[str, Array],
    rng: np.random.Generator | None = None,
    *,
    deterministic: bool = True,
    temperature: float = 1.0,
    epsilon: float = 0.0,
    mask: Array | None = None,
) -> Act:
    """Turn the graph's outputs into actions and log-probabilities; see Policy.act.

    Raises: EpisodeInvalidError too if an output is not finite: an action made of it would be
    certain of nothing, and say that it is of itself.
    """
    if spec.head in DISCRETE_HEADS and mask is None and (deterministic or temperature == 0):
        act = _act_single(spec, parameters, rng, epsilon)
        if act is not None:
            return act
    check_finite(spec, parameters)
    if spec.head in DISCRETE_HEADS:
        return _act_discrete(spec, parameters, rng, deterministic, temperature, epsilon, mask)
    check_head_takes(spec, epsilon=epsilon, mask=mask)
    if spec.head == "multi_categorical":
        temperature = 0.0 if deterministic else temperature
        return _act_multi(spec, parameters, rng, temperature, epsilon)
    if spec.head == "uniform":
        raise SpaceUnsupportedError(
            "head uniform: has no graph, but was given the outputs of one. Use another head."
        )
    if spec.head in ("deterministic", "sampled"):
        return Act(_to_box(spec.action_space, parameters["actions"]), None)
    return _act_gaussian(spec, parameters, rng, deterministic, temperature)


def check_head_takes(spec: PolicySpec, *, epsilon: float, mask: Array | None) -> None:
    """Refuse an epsilon or mask of actions that have none. Raises: SpaceUnsupportedError."""
    if mask is not None and not isinstance(spec.action_space, Discrete):
        raise SpaceUnsupportedError(
            f"head {spec.head}: found an action mask, which only Discrete actions have. Leave it "
            "out."
        )
    if epsilon and isinstance(spec.action_space, Box):
        raise SpaceUnsupportedError(
            f"head {spec.head}: found epsilon > 0, which only countable actions have. Leave it "
            "out, or explore with temperature."
        )


def _act_multi(
    spec: PolicySpec,
    parameters: Mapping[str, Array],
    rng: np.random.Generator | None,
    temperature: float,
    epsilon: float,
) -> Act:
    space, logits = spec.action_space, parameters["logits"]
    assert isinstance(space, MultiDiscrete | MultiBinary)  # the spec saw to it
    uniforms = None
    if temperature or epsilon:
        num_elements = len(multi_categorical.element_sizes(space))
        uniforms = or_default_rng(rng).random((len(logits), 1 + num_elements))
    options = {"temperature": temperature, "epsilon": epsilon}
    actions = multi_categorical.draw(space, logits, uniforms, **options)
    log_probs = multi_categorical.log_probs(space, logits, actions, **options)
    return Act(actions, log_probs.astype(np.float32))


def _act_single(
    spec: PolicySpec,
    parameters: Mapping[str, Array],
    rng: np.random.Generator | None,
    epsilon: float,
) -> Act | None:
    """Act as `_act_discrete` does, by its mode or epsilon, for one observation with few actions.

    The same numbers in the same order without numpy, whose dozen calls take 15 us for two actions;
    this takes 4. None for everything else, what is not finite too.
    """
    scores = parameters[_SCORES[spec.head]]
    if scores.shape[0] != 1 or scores.shape[1] > _FEW_ACTIONS:
        return None
    row = scores[0].tolist()
    if not math.isfinite(sum(row)):
        return None
    choice = row.index(max(row))
    log_prob = 0.0
    if epsilon:
        other, best = epsilon / len(row), (1 - epsilon) + epsilon / len(row)
        total, sums = 0.0, []
        for action in range(len(row)):
            total += best if action == choice else other
            sums.append(total)
        threshold, mode = float(or_default_rng(rng).random((1, 1))[0, 0]) * total, choice
        choice = next((i for i, upto in enumerate(sums) if upto > threshold), 0)
        log_prob = np.log(best if choice == mode else other)
    q_values = np.asarray(scores, np.float32) if spec.head == "q_values" else None
    start = spec.action_space.start  # type: ignore[union-attr]
    return Act(np.array([choice + start]), np.array([log_prob], np.float32), None, q_values)


def _act_discrete(
    spec: PolicySpec,
    parameters: Mapping[str, Array],
    rng: np.random.Generator | None,
    deterministic: bool,
    temperature: float,
    epsilon: float,
    mask: Array | None,
) -> Act:
    if (deterministic or temperature == 0) and not epsilon:
        # The mode is certain: nothing is drawn, and no probability worked out (a third of the time
        # for one observation).
        choices = _scores(spec, parameters, mask).argmax(axis=1)
        log_probs = np.zeros(len(choices), np.float32)
    else:
        probs = discrete_probs(
            spec,
            parameters,
            deterministic=deterministic,
            temperature=temperature,
            epsilon=epsilon,
            mask=mask,
        )
        num = len(probs)
        uniforms = or_default_rng(rng).random((num, 1))
        cumulative = np.add.accumulate(probs, axis=1)
        # Scaled by the total, because float sums end at 1 - 1e-16 and argmax of all-False is 0.
        choices = (cumulative > uniforms * cumulative[:, -1:]).argmax(axis=1)
        rows: Any = np.arange(num) if num > 1 else 0
        log_probs = np.log(probs[rows, choices]).astype(np.float32)
    q_values = None
    if spec.head == "q_values":
        q_values = np.asarray(parameters["q_values"], np.float32)
    start = spec.action_space.start  # type: ignore[union-attr]
    return Act(choices.astype(np.int64) + start, log_probs, None, q_values)


def discrete_probs(
    spec: PolicySpec,
    parameters: Mapping[str, Array],
    *,
    deterministic: bool = True,
    temperature: float = 1.0,
    epsilon: float = 0.0,
    mask: Array | None = None,
) -> Array:
    """Return the probabilities float64 [N, A] that a categorical or q_values head draws from.

    Raises: EpisodeInvalidError for a temperature below 0, or a mask that does not fit.
    """
    scores = _scores(spec, parameters, mask)
    num, num_actions = scores.shape
    if deterministic or temperature == 0:
        probs = np.zeros_like(scores)
        probs[np.arange(num), scores.argmax(axis=1)] = 1.0
    else:
        if temperature < 0:
            raise EpisodeInvalidError(f"temperature: found {temperature}, expected 0 or more.")
        logits = scores / temperature
        # The ufuncs themselves: for one observation the arrays' methods cost more than the sums.
        logits -= np.maximum.reduce(logits, axis=1, keepdims=True)
        probs = np.exp(logits, out=logits)
        probs /= np.add.reduce(probs, axis=1, keepdims=True)
    if epsilon:
        if mask is None:
            uniform: Any = epsilon / num_actions
        else:
            allowed = np.asarray(mask)
            uniform = epsilon * allowed / allowed.sum(axis=1, keepdims=True)
        probs = (1 - epsilon) * probs + uniform
    return probs


def _scores(spec: PolicySpec, parameters: Mapping[str, Array], mask: Array | None) -> Array:
    """Return a head's scores float64 [N, A], -inf where the mask forbids an action."""
    scores = np.asarray(parameters[_SCORES[spec.head]], dtype=np.float64)
    if mask is None:
        return scores
    return np.where(_check_mask(mask, *scores.shape), scores, -np.inf)


def _act_gaussian(
    spec: PolicySpec,
    parameters: Mapping[str, Array],
    rng: np.random.Generator | None,
    deterministic: bool,
    temperature: float,
) -> Act:
    """Sample N(mean, (temperature * std)^2), then squash, or sample it truncated to the bounds.

    The squashed density is that of Haarnoja et al. 2018, Appendix C, with the Jacobian of the
    scaling to the action bounds. A plain gaussian is truncated rather than clipped: draws clipped
    to a bound would have no density there, and so no propensity.
    """
    space = spec.action_space
    means = np.asarray(parameters["means"], np.float64)
    squashed = spec.head == "squashed_gaussian"
    low, high = (bound.reshape(-1) for bound in box_bounds(space))
    # Only the squashed head needs bounds; a plain gaussian's may be infinite.
    center, scale = ((low + high) / 2, (high - low) / 2) if squashed else (0.0, 1.0)
    if deterministic or temperature == 0:
        actions = center + scale * np.tanh(means) if squashed else means
        return Act(_to_box(space, actions), None)
    stds = np.exp(np.asarray(parameters["log_stds"], np.float64)) * temperature
    if not squashed:
        ends = (low - means) / stds, (high - means) / stds
        noise = truncated_normal.draw(*ends, or_default_rng(rng))
        log_probs = gaussian_log_density(noise, stds) - truncated_normal.log_mass(*ends)
        actions = _to_box(space, means + stds * noise)
        return Act(actions, log_probs.sum(axis=1).astype(np.float32))
    noise = or_default_rng(rng).standard_normal(means.shape)
    raw = means + stds * noise
    log_probs = gaussian_log_density(noise, stds).sum(axis=1)
    # log(1 - tanh(x)^2) in the form that does not cancel for large |x|.
    log_jacobian = 2 * (np.log(2) - raw - np.logaddexp(0, -2 * raw)) + np.log(scale)
    log_probs -= log_jacobian.sum(axis=1)
    return Act(_to_box(space, center + scale * np.tanh(raw)), log_probs.astype(np.float32))


def gaussian_log_density(noise: Array, stds: Array) -> Array:
    """Return the log-density of mean + std * noise under N(mean, std^2), elementwise."""
    found: Array = -0.5 * (noise**2 + LOG_2PI) - np.log(stds)
    return found


def _to_box(space: Space, actions: Array) -> Array:
    """Clip float actions [N, D] to the bounds and give them the space's dtype and shape."""
    low, high = (bound.reshape(-1) for bound in box_bounds(space))
    flat = np.clip(np.asarray(actions), low, high)
    actions = flat.astype(space.dtype)  # type: ignore[union-attr]
    return actions.reshape(len(flat), *space.shape)  # type: ignore[union-attr]


def box_bounds(space: Space) -> Array:
    """Return a Box's bounds, float64 [2, *shape].

    Raises: SpaceUnsupportedError for another space.
    """
    if not isinstance(space, Box):
        raise SpaceUnsupportedError(f"found action space {describe(space)}, expected a Box.")
    return np.stack(
        [
            np.broadcast_to(np.asarray(bound, np.float64), space.shape)
            for bound in (space.low, space.high)
        ]
    )


def check_finite(spec: PolicySpec, parameters: Mapping[str, Array]) -> None:
    """Refuse a graph's outputs that are not finite. Raises: EpisodeInvalidError."""
    for name, array in parameters.items():
        is_finite = np.isfinite(array)
        if not np.logical_and.reduce(is_finite, axis=None):
            row = int((~is_finite).reshape(len(is_finite), -1).any(axis=1).argmax())
            raise EpisodeInvalidError(
                f"head {spec.head}: found {name} that are not finite for observation {row}, "
                "expected numbers. The policy's graph cannot take this observation; look at its "
                "scale, or train the policy again."
            )


def _check_mask(mask: Array, num: int, num_actions: int) -> Array:
    mask = np.asarray(mask)
    if mask.shape != (num, num_actions) or mask.dtype != np.bool_:
        raise EpisodeInvalidError(
            f"action_mask: found {mask.dtype} {list(mask.shape)}, "
            f"expected bool [{num}, {num_actions}]."
        )
    if not mask.any(axis=1).all():
        row = int((~mask.any(axis=1)).argmax())
        raise EpisodeInvalidError(
            f"action_mask row {row}: found no allowed action, expected at least one."
        )
    return mask


def or_default_rng(rng: np.random.Generator | None) -> np.random.Generator:
    """Return the generator, or a new one of the operating system's entropy."""
    return np.random.default_rng() if rng is None else rng
