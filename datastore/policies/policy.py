"""Policy: numpy observations in, numpy actions out. Rollout, evaluation and serving all use this.

A policy is a graph and a head. The graph maps observations to the head's parameters; the head, in
numpy here, masks, samples and gives the log-probability of what it returned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from replaylake.datastore.encoding import Encoding
from replaylake.datastore.errors import EpisodeInvalid, SpaceUnsupported
from replaylake.datastore.spaces import Array, Box, Discrete, Space, Values, describe

# The outputs that a policy's graph has for each head, in order.
HEAD_OUTPUTS: Final[Mapping[str, tuple[str, ...]]] = {
    "categorical": ("logits",),
    "q_values": ("q_values",),
    "gaussian": ("means", "log_stds"),
    "squashed_gaussian": ("means", "log_stds"),
    "deterministic": ("actions",),
    "sampled": ("actions",),
    "uniform": (),
}
HEADS: Final = tuple(HEAD_OUTPUTS)
_DISCRETE_HEADS: Final = ("categorical", "q_values")
_LOG_2PI: Final = float(np.log(2 * np.pi))


@dataclass(frozen=True)
class PolicySpec:
    """What a policy takes and how its graph's outputs become actions.

    head, and the graph's outputs for it (leading dim [N]):
        categorical         logits [N, A]
        q_values            q_values [N, A]; greedy, or a softmax of them at temperature > 0
        gaussian            means [N, D], log_stds [N, D]; clipped to the action bounds
        squashed_gaussian   means [N, D], log_stds [N, D]; tanh, then scaled to the action bounds
        deterministic       actions [N, D] in the environment's units
        sampled             actions [N, D]; the graph's second input is noise [N, noise_size]
        uniform             none, and no graph: any action, with its density; cannot be exported

    encoding says what the elements of an observation are and what actions are called, as the
    dataset had it that the policy learned from; None where nothing was encoded.
    """

    observation_space: Space
    action_space: Space
    head: str
    noise_size: int = 0
    encoding: Encoding | None = None

    def __post_init__(self) -> None:
        if self.head not in HEADS:
            raise SpaceUnsupported(
                f"policy head: found {self.head!r}, expected one of {list(HEADS)}."
            )
        if self.head == "uniform":
            return
        expected = Discrete if self.head in _DISCRETE_HEADS else Box
        if not isinstance(self.action_space, expected):
            raise SpaceUnsupported(
                f"policy head {self.head}: found action space {describe(self.action_space)}, "
                f"expected a {expected.__name__}."
            )


@dataclass(frozen=True)
class Act:
    """One decision for each of N observations.

    actions int64 [N] or the Box's dtype [N, *act]; log_probs float32 [N], or None where the head
    has no density; state, what to pass to the next call (None if stateless); q_values float32
    [N, A] of a q_values head, else None.
    """

    actions: Array
    log_probs: Array | None
    state: Any = None
    q_values: Array | None = None


class Policy(Protocol):
    """Acts on numpy arrays; holds no environment, clock or global randomness."""

    @property
    def spec(self) -> PolicySpec:
        """Spaces and head."""
        ...

    def initial_state(self, n: int) -> Any:
        """Return the state for n fresh episodes; None if the policy is stateless."""
        ...

    def act(
        self,
        observations: Values,
        state: Any = None,
        *,
        rng: np.random.Generator | None = None,
        deterministic: bool = True,
        temperature: float = 1.0,
        epsilon: float = 0.0,
        action_mask: Array | None = None,
    ) -> Act:
        """Choose an action for each observation [N, *obs].

        `deterministic` takes the mode; otherwise rng is required and the head is sampled at
        `temperature`. With probability `epsilon` a Discrete action is drawn uniformly from the
        allowed ones instead, also when deterministic. log_probs are those of the whole mixture.
        action_mask is bool [N, A], true where allowed. Raises: EpisodeInvalid on arrays that do
        not fit the spec, SpaceUnsupported where the head cannot do what is asked.
        """
        ...

    def observe(self, state: Any, rewards: Array) -> Any:
        """Tell a stateful policy the rewards [N] of its last actions; returns the new state."""
        ...


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

    Raises: EpisodeInvalid too if an output is not finite: an action made of it would be certain of
    nothing, and say that it is of itself.
    """
    _check_finite(spec, parameters)
    if spec.head in _DISCRETE_HEADS:
        return _act_discrete(spec, parameters, rng, deterministic, temperature, epsilon, mask)
    if mask is not None or epsilon:
        raise SpaceUnsupported(
            f"head {spec.head}: found {'an action mask' if mask is not None else 'epsilon > 0'}, "
            "which only Discrete actions have. Leave it out, or explore with temperature."
        )
    if spec.head == "uniform":
        raise SpaceUnsupported(
            "head uniform: found it given to a graph, expected one of the others: it has no graph."
        )
    if spec.head in ("deterministic", "sampled"):
        return Act(_to_box(spec.action_space, parameters["actions"]), None)
    return _act_gaussian(spec, parameters, rng, deterministic, temperature)


def _act_discrete(
    spec: PolicySpec,
    parameters: Mapping[str, Array],
    rng: np.random.Generator | None,
    deterministic: bool,
    temperature: float,
    epsilon: float,
    mask: Array | None,
) -> Act:
    name = "logits" if spec.head == "categorical" else "q_values"
    scores = np.asarray(parameters[name], dtype=np.float64)
    num, num_actions = scores.shape
    allowed = _checked_mask(mask, num, num_actions)
    scores = np.where(allowed, scores, -np.inf)
    if deterministic or temperature == 0:
        probs = np.zeros_like(scores)
        probs[np.arange(num), scores.argmax(axis=1)] = 1.0
    else:
        if temperature < 0:
            raise EpisodeInvalid(f"temperature: found {temperature}, expected 0 or more.")
        logits = scores / temperature
        logits -= logits.max(axis=1, keepdims=True)
        probs = np.exp(logits)
        probs /= probs.sum(axis=1, keepdims=True)
    if epsilon:
        probs = (1 - epsilon) * probs + epsilon * allowed / allowed.sum(axis=1, keepdims=True)
    if epsilon or not (deterministic or temperature == 0):
        uniforms = needed(rng).random((num, 1))
        cumulative = probs.cumsum(axis=1)
        # Scaled by the total, because float sums end at 1 - 1e-16 and argmax of all-False is 0.
        choices = (cumulative > uniforms * cumulative[:, -1:]).argmax(axis=1)
    else:
        choices = probs.argmax(axis=1)
    log_probs = np.log(probs[np.arange(num), choices]).astype(np.float32)
    q_values = np.asarray(parameters[name], np.float32) if spec.head == "q_values" else None
    start = spec.action_space.start  # type: ignore[union-attr]
    return Act(choices.astype(np.int64) + start, log_probs, None, q_values)


def _act_gaussian(
    spec: PolicySpec,
    parameters: Mapping[str, Array],
    rng: np.random.Generator | None,
    deterministic: bool,
    temperature: float,
) -> Act:
    """Sample N(mean, (temperature * std)^2), then squash.

    The squashed density is that of Haarnoja et al. 2018, Appendix C, with the Jacobian of the
    scaling to the action bounds. A clipped plain gaussian keeps the density of the unclipped draw
    only where nothing was clipped; elsewhere the log-probability is NaN (unknown).
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
    noise = needed(rng).standard_normal(means.shape)
    raw = means + stds * noise
    log_probs = (-0.5 * (noise**2 + _LOG_2PI) - np.log(stds)).sum(axis=1)
    if not squashed:
        clipped = ((raw < low) | (raw > high)).any(axis=1)
        return Act(_to_box(space, raw), np.where(clipped, np.nan, log_probs).astype(np.float32))
    # log(1 - tanh(x)^2) in the form that does not cancel for large |x|.
    log_jacobian = 2 * (np.log(2) - raw - np.logaddexp(0, -2 * raw)) + np.log(scale)
    log_probs -= log_jacobian.sum(axis=1)
    return Act(_to_box(space, center + scale * np.tanh(raw)), log_probs.astype(np.float32))


def _to_box(space: Space, actions: Array) -> Array:
    """Clip float actions [N, D] to the bounds and give them the space's dtype and shape."""
    low, high = (bound.reshape(-1) for bound in box_bounds(space))
    flat = np.clip(np.asarray(actions), low, high)
    actions = flat.astype(space.dtype)  # type: ignore[union-attr]
    return actions.reshape(len(flat), *space.shape)  # type: ignore[union-attr]


def box_bounds(space: Space) -> Array:
    """Return a Box's bounds, float64 [2, *shape]. Raises: SpaceUnsupported for another space."""
    if not isinstance(space, Box):
        raise SpaceUnsupported(f"found action space {describe(space)}, expected a Box.")
    return np.stack(
        [
            np.broadcast_to(np.asarray(bound, np.float64), space.shape)
            for bound in (space.low, space.high)
        ]
    )


def _check_finite(spec: PolicySpec, parameters: Mapping[str, Array]) -> None:
    for name, array in parameters.items():
        is_finite = np.isfinite(array)
        if not is_finite.all():
            row = int((~is_finite).reshape(len(is_finite), -1).any(axis=1).argmax())
            raise EpisodeInvalid(
                f"head {spec.head}: found {name} that are not finite for observation {row}, "
                "expected numbers. The policy's graph cannot take this observation; look at its "
                "scale, or train the policy again."
            )


def _checked_mask(mask: Array | None, num: int, num_actions: int) -> Array:
    if mask is None:
        return np.ones((num, num_actions), dtype=bool)
    mask = np.asarray(mask)
    if mask.shape != (num, num_actions) or mask.dtype != np.bool_:
        raise EpisodeInvalid(
            f"action_mask: found {mask.dtype} {list(mask.shape)}, "
            f"expected bool [{num}, {num_actions}]."
        )
    if not mask.any(axis=1).all():
        row = int((~mask.any(axis=1)).argmax())
        raise EpisodeInvalid(
            f"action_mask row {row}: found no allowed action, expected at least one."
        )
    return mask


def needed(rng: np.random.Generator | None) -> np.random.Generator:
    """Return the generator. Raises: EpisodeInvalid if there is none."""
    if rng is None:
        raise EpisodeInvalid(
            "act: found no rng, expected a numpy Generator, because this action is drawn at random."
        )
    return rng
