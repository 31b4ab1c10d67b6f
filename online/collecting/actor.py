"""Actor: a policy that acts for environments side by side, exploring as its Acting says."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np

from replaylake.datastore.episodes.spaces import Array, Box, Values, describe
from replaylake.datastore.errors import SpaceUnsupportedError
from replaylake.datastore.lake.policies.heads import box_bounds
from replaylake.online.collecting.behavior_policy import BehaviorPolicy
from replaylake.online.collecting.episode_random import EpisodeRandom


class ActorOutput(NamedTuple):
    """Actions [N, *act]; ln of their probabilities [N] where they have one; what is remembered."""

    actions: Array
    log_probs: Array | None
    state: Array | None


class Actor:
    """Acts; of all randomness it has none of its own."""

    def __init__(self, policy: BehaviorPolicy, env: Any) -> None:
        """Load the policy. Raises: PackageInvalidError, SpaceUnsupportedError."""
        self.acting = policy
        self.policy = policy.load(env)
        self.first_state = self.policy.initial_state(1)
        self._noise: tuple[Array, Array, Array] | None = None
        if policy.noise:
            self._noise = _noise(policy.noise, self.policy.spec.action_space)

    @property
    def state_size(self) -> int:
        """How many numbers the policy remembers of an episode."""
        return 0 if self.first_state is None else self.first_state.shape[1]

    @property
    def recorded_state_size(self) -> int:
        """How many of them are kept with each step; the first ones."""
        return self.policy.spec.recorded_state_size

    def act(
        self, observations: Values, state: Array | None, masks: Array | None, draws: EpisodeRandom
    ) -> ActorOutput:
        """Choose an action for each of N observations. Raises: as Policy.act."""
        act = self.policy.act(
            observations,
            state,
            rng=cast(np.random.Generator, draws),
            deterministic=False,
            temperature=self.acting.temperature,
            epsilon=self.acting.epsilon,
            action_mask=masks,
        )
        if self._noise is None:
            return ActorOutput(act.actions, act.log_probs, act.state)
        low, high, scale = self._noise
        noisy = act.actions + scale * draws.standard_normal(act.actions.shape)
        return ActorOutput(np.clip(noisy, low, high).astype(act.actions.dtype), None, act.state)


def _noise(noise: float, space: Any) -> tuple[Array, Array, Array]:
    """Return the bounds of actions and the standard deviation in their units."""
    low, high = box_bounds(space) if isinstance(space, Box) else (np.array(np.inf),) * 2
    if np.dtype(getattr(space, "dtype", "int64")).kind != "f" or not np.isfinite(high - low).all():
        raise SpaceUnsupportedError(
            f"noise: found action space {describe(space)}, expected a Box of floats with bounds. "
            "Explore with epsilon or temperature."
        )
    return low, high, noise * (high - low) / 2
