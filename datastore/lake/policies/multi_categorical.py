"""Multi categorical: one categorical for each element of a MultiDiscrete or MultiBinary action.

Elements are independent given the observation, so the log-probability of an action is the sum of
theirs.
"""

from __future__ import annotations

import numpy as np

from replaylake.datastore.episodes.spaces import Array, MultiBinary, MultiDiscrete
from replaylake.datastore.errors import EpisodeInvalidError


def element_sizes(space: MultiDiscrete | MultiBinary) -> tuple[int, ...]:
    """Return how many values each element [K] has; of MultiBinary two."""
    return space.nvec if isinstance(space, MultiDiscrete) else (2,) * space.n


def draw(
    space: MultiDiscrete | MultiBinary,
    logits: Array,
    uniforms: Array | None,
    *,
    temperature: float = 1.0,
    epsilon: float = 0.0,
) -> Array:
    """Choose an action int64 [N, K] for each row of logits [N, sum of sizes].

    At temperature 0 the likeliest values. uniforms float64 [N, 1 + K] in 0..1 say, where there are
    any, whether a row is drawn uniformly instead (with probability `epsilon`), and what is drawn.
    """
    columns = []
    for k, probs in enumerate(_probs(space, logits, temperature)):
        values = probs.argmax(axis=1)
        if uniforms is not None:
            if temperature > 0:
                cumulative = probs.cumsum(axis=1)
                # Scaled by the total, because float sums end at 1 - 1e-16.
                at = uniforms[:, 1 + k, None] * cumulative[:, -1:]
                values = (cumulative > at).argmax(axis=1)
            size = probs.shape[1]
            anything = np.minimum((uniforms[:, 1 + k] * size).astype(np.int64), size - 1)
            values = np.where(uniforms[:, 0] < epsilon, anything, values)
        columns.append(values)
    return np.stack(columns, axis=1).astype(np.int64)


def log_probs(
    space: MultiDiscrete | MultiBinary,
    logits: Array,
    actions: Array,
    *,
    temperature: float = 1.0,
    epsilon: float = 0.0,
) -> Array:
    """Return ln of the probability that `draw` chooses each of actions [N, K]: float64 [N].

    -inf where it never does.
    """
    with np.errstate(divide="ignore"):
        total = np.zeros(len(logits))
        for k, probs in enumerate(_probs(space, logits, temperature)):
            total += np.log(probs[np.arange(len(probs)), actions[:, k]])
        uniform = -float(np.log(element_sizes(space)).sum())
        mixed: Array = np.logaddexp(np.log1p(-epsilon) + total, np.log(epsilon) + uniform)
    return mixed if epsilon else total


def _probs(space: MultiDiscrete | MultiBinary, logits: Array, temperature: float) -> list[Array]:
    """Return the probabilities float64 [N, n] of each element's values."""
    if temperature < 0:
        raise EpisodeInvalidError(f"temperature: found {temperature}, expected 0 or more.")
    logits = np.asarray(logits, np.float64)
    each = np.split(logits, np.cumsum(element_sizes(space))[:-1], axis=1)
    if temperature == 0:
        return [np.eye(part.shape[1])[part.argmax(axis=1)] for part in each]
    parts = []
    for part in each:
        scaled = part / temperature
        probs = np.exp(scaled - scaled.max(axis=1, keepdims=True))
        parts.append(probs / probs.sum(axis=1, keepdims=True))
    return parts
