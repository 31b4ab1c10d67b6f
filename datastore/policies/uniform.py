"""UniformPolicy: the reserved policy `random`, which has no graph and learns nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from replaylake.datastore.errors import SpaceUnsupported
from replaylake.datastore.policies.policy import Act, PolicySpec, act_from_head, box_bounds, needed
from replaylake.datastore.spaces import Array, Box, Discrete, Space, Values, describe, num_values


class UniformPolicy:
    """Draws every action uniformly. Raises: SpaceUnsupported if there is no uniform draw."""

    def __init__(self, observation_space: Space, action_space: Space) -> None:
        self._spec = PolicySpec(observation_space, action_space, "uniform")
        if isinstance(action_space, Discrete):
            self._logits = PolicySpec(observation_space, action_space, "categorical")
        elif not isinstance(action_space, Box) or not np.isfinite(box_bounds(action_space)).all():
            raise SpaceUnsupported(
                f"random policy: found action space {describe(action_space)}, "
                "expected Discrete or a bounded Box."
            )

    @property
    def spec(self) -> PolicySpec:
        """Spaces and head."""
        return self._spec

    def initial_state(self, n: int) -> Any:
        """Return None: stateless."""
        return None

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
        """Draw uniformly; `deterministic`, `temperature` and `epsilon` change nothing.

        log_probs are those of a probability in an integer Box, of a density in a float one. An
        element whose bounds are equal is certain, and adds nothing to either.
        """
        num = num_values(observations)
        space = self._spec.action_space
        if isinstance(space, Discrete):
            parameters = {"logits": np.zeros((num, space.n), np.float32)}
            return act_from_head(
                self._logits, parameters, rng, deterministic=False, mask=action_mask
            )
        if action_mask is not None:
            raise SpaceUnsupported(
                "random policy: found an action mask, which only Discrete actions have. Leave it "
                "out."
            )
        assert isinstance(space, Box)  # the constructor saw to it
        actions, log_prob = _draw(space, num, needed(rng))
        return Act(actions, np.full(num, log_prob, np.float32))

    def observe(self, state: Any, rewards: Array) -> Any:
        """Return the state unchanged."""
        return state


def _draw(space: Box, num: int, rng: np.random.Generator) -> tuple[Array, float]:
    """Return N draws from a bounded Box, and the log-probability that each has."""
    low, high = box_bounds(space)
    shape = (num, *space.shape)
    dtype = np.dtype(space.dtype)
    if dtype.kind == "f":
        widths = np.where(high > low, high - low, 1.0)
        return rng.uniform(low, high, shape).astype(dtype), -float(np.log(widths).sum())
    low, high = np.ceil(low), np.floor(high)
    if dtype.kind != "b":
        # The greatest int64 is no float64: as one it is the next above, which no int64 holds.
        high = np.minimum(high, np.nextafter(float(np.iinfo(dtype).max) + 1, 0))
    sizes = high - low + 1
    # Not rng.integers: rollouts draw each row from its episode's stream, by `random` alone.
    drawn = np.minimum(low + np.floor(sizes * rng.random(shape)), high)
    return drawn.astype(dtype), -float(np.log(sizes).sum())
