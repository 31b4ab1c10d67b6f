"""UniformPolicy: the reserved policy `random`, which has no graph and learns nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from replaylake.datastore.episodes.spaces import (
    Array,
    Box,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    Values,
    as_values,
    check_bounds,
    describe,
    num_values,
)
from replaylake.datastore.errors import SpaceUnsupportedError
from replaylake.datastore.lake.policies.heads import (
    act_from_head,
    box_bounds,
    discrete_probs,
    or_default_rng,
)
from replaylake.datastore.lake.policies.log_probs import gather_log_probs
from replaylake.datastore.lake.policies.multi_categorical import element_sizes
from replaylake.datastore.lake.policies.policy import Act, PolicySpec


class UniformPolicy:
    """Draws every action uniformly. Raises: SpaceUnsupportedError if there is no uniform draw."""

    def __init__(self, observation_space: Space, action_space: Space) -> None:
        self._spec = PolicySpec(observation_space, action_space, "uniform")
        if isinstance(action_space, Discrete):
            # What a categorical head of equal logits draws by, made once: a rollout asks for little
            # else (8 rows in 6 us in place of 40; 1 core, 2026-11).
            probs = np.full(action_space.n, 1 / action_space.n)
            self._cumulative = probs.cumsum()
            self._log_prob = np.log(probs[0]).astype(np.float32)
            self._logits = PolicySpec(observation_space, action_space, "categorical")
        elif isinstance(action_space, MultiDiscrete | MultiBinary):
            self._logits = PolicySpec(observation_space, action_space, "multi_categorical")
        elif not isinstance(action_space, Box) or not np.isfinite(box_bounds(action_space)).all():
            raise SpaceUnsupportedError(
                f"random policy: found action space {describe(action_space)}, "
                "expected Discrete, MultiDiscrete, MultiBinary or a bounded Box."
            )

    @property
    def spec(self) -> PolicySpec:
        return self._spec

    def initial_state(self, n: int) -> None:
        """Return None: stateless."""

    def act(
        self,
        observations: Values,
        state: Array | None = None,
        *,
        rng: np.random.Generator | None = None,
        deterministic: bool = True,
        temperature: float = 1.0,
        epsilon: float = 0.0,
        action_mask: Array | None = None,
    ) -> Act:
        """Draw uniformly; `deterministic`, `temperature` and `epsilon` change nothing.

        log_probs are those of a probability in an integer Box, of a density in a float one. An
        element whose bounds are equal is certain, and adds nothing to either.
        """
        num = num_values(observations)
        space = self._spec.action_space
        if isinstance(space, Discrete) and action_mask is None:
            scaled = or_default_rng(rng).random((num, 1))[:, 0] * self._cumulative[-1]
            choices = self._cumulative[:-1].searchsorted(scaled, side="right")
            return Act(choices + space.start, np.full(num, self._log_prob, np.float32))
        if not isinstance(space, Box):
            parameters = {"logits": np.zeros((num, _num_logits(space)), np.float32)}
            return act_from_head(
                self._logits, parameters, rng, deterministic=False, mask=action_mask
            )
        if action_mask is not None:
            raise SpaceUnsupportedError(
                "random policy: found an action mask, which only Discrete actions have. Leave it "
                "out."
            )
        actions, log_prob = _draw(space, num, or_default_rng(rng))
        return Act(actions, np.full(num, log_prob, np.float32))

    def action_probs(
        self,
        observations: Values,
        state: Array | None = None,
        *,
        deterministic: bool = True,
        temperature: float = 1.0,
        epsilon: float = 0.0,
        action_mask: Array | None = None,
    ) -> Array:
        """Return 1 / the number of allowed actions for each of them; see Policy.action_probs."""
        space = self._spec.action_space
        if not isinstance(space, Discrete):
            raise SpaceUnsupportedError(
                f"random policy: found probabilities of every action of {describe(space)} asked "
                "for, which only Discrete actions have. Ask for log_probs of given actions."
            )
        parameters = {"logits": np.zeros((num_values(observations), space.n))}
        return discrete_probs(self._logits, parameters, deterministic=False, mask=action_mask)

    def log_probs(
        self,
        observations: Values,
        actions: Values,
        state: Array | None = None,
        *,
        deterministic: bool = True,
        temperature: float = 1.0,
        epsilon: float = 0.0,
        action_mask: Array | None = None,
    ) -> Array:
        """Return ln of the same probability or density for each action; see Policy.log_probs."""
        space = self._spec.action_space
        if isinstance(space, Discrete):
            values: Any = as_values(space, actions, "action")
            check_bounds(space, values, "action")
            return gather_log_probs(
                self.action_probs(observations, action_mask=action_mask), values, space
            )
        if isinstance(space, MultiDiscrete | MultiBinary):
            as_values(space, actions, "action")
            return np.full(num_values(observations), -float(np.log(element_sizes(space)).sum()))
        assert isinstance(space, Box)  # the constructor saw to it
        return np.full(num_values(observations), _log_density(space))

    def observe(self, state: Array | None, rewards: Array) -> Array | None:
        """Return the state unchanged."""
        return state


def _num_logits(space: Space) -> int:
    if isinstance(space, Discrete):
        return space.n
    assert isinstance(space, MultiDiscrete | MultiBinary)  # the constructor saw to it
    return sum(element_sizes(space))


def _draw(space: Box, num: int, rng: np.random.Generator) -> tuple[Array, float]:
    """Return N draws from a bounded Box, and the log-probability that each has."""
    low, high = box_bounds(space)
    shape = (num, *space.shape)
    dtype = np.dtype(space.dtype)
    if dtype.kind == "f":
        return rng.uniform(low, high, shape).astype(dtype), _log_density(space)
    low, high = _whole_bounds(space)
    # Not rng.integers: rollouts draw each row from its episode's stream, by `random` alone.
    drawn = np.minimum(low + np.floor((high - low + 1) * rng.random(shape)), high)
    return drawn.astype(dtype), _log_density(space)


def _log_density(space: Box) -> float:
    low, high = box_bounds(space)
    if np.dtype(space.dtype).kind == "f":
        return -float(np.log(np.where(high > low, high - low, 1.0)).sum())
    low, high = _whole_bounds(space)
    return -float(np.log(high - low + 1).sum())


def _whole_bounds(space: Box) -> tuple[Array, Array]:
    low, high = box_bounds(space)
    low, high = np.ceil(low), np.floor(high)
    if np.dtype(space.dtype).kind != "b":
        # The greatest int64 is no float64: as one it is the next above, which no int64 holds.
        high = np.minimum(high, np.nextafter(float(np.iinfo(space.dtype).max) + 1, 0))
    return low, high
