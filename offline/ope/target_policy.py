"""TargetPolicy: a policy and how it acts, asked of many logged observations at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.errors import SpaceUnsupported
from replaylake.datastore.policies.exploration import Exploration
from replaylake.datastore.policies.log_probs import check_has_density
from replaylake.datastore.policies.policy import Policy
from replaylake.datastore.spaces import Array, Discrete, Values, concatenate, num_values, take

# Observations given to a policy's graph at once: what 256 hidden units make of them is 64 MB.
_ROWS_AT_ONCE: Final = 1 << 16


@dataclass(frozen=True)
class TargetPolicy:
    """The policy whose value is asked for; by default it takes its mode, as a server does.

    Stateless policies alone: one that remembers is not the same at each visit of an observation.
    """

    policy: Policy
    exploration: Exploration = field(default_factory=Exploration)

    def __post_init__(self) -> None:
        if self.policy.initial_state(1) is not None:
            raise SpaceUnsupported(
                f"head {self.policy.spec.head}: found a policy with a state, expected one whose "
                "action depends on the observation alone. Evaluate it in an environment."
            )

    @property
    def is_discrete(self) -> bool:
        """Whether the probabilities of all of its actions can be listed."""
        return isinstance(self.policy.spec.action_space, Discrete)

    @property
    def is_certain(self) -> bool:
        """Whether it does the same each time that it sees the same."""
        head = self.policy.spec.head
        return not self.exploration.is_on and head not in ("uniform", "sampled")

    @property
    def no_density(self) -> str:
        """Why its actions have no probability or density; empty where they have."""
        try:
            check_has_density(self.policy.spec, **self._mode)
        except SpaceUnsupported as error:
            return str(error)
        return ""

    def describe(self) -> str:
        """Return how it acts: `greedy`, `epsilon=0.05`, `temperature=1`, or `uniform`."""
        if self.policy.spec.head == "uniform":
            return "uniform"
        if self.exploration.epsilon:
            return f"epsilon={self.exploration.epsilon:g}"
        if self.exploration.temperature:
            return f"temperature={self.exploration.temperature:g}"
        return "greedy"

    def action_probs(
        self, observations: Values, masks: NDArray[np.bool_] | None = None
    ) -> NDArray[np.float64]:
        """Return the probability of each Discrete action, float64 [N, A]."""

        def ask(some: slice) -> Array:
            return self.policy.action_probs(
                take(observations, some),
                epsilon=self.exploration.epsilon,
                action_mask=None if masks is None else masks[some],
                **self._mode,
            )

        return np.concatenate(_in_parts(num_values(observations), ask))

    def log_probs(
        self,
        observations: Values,
        actions: Values,
        masks: NDArray[np.bool_] | None = None,
    ) -> NDArray[np.float64]:
        """Return ln of the probability (density) of actions [N, *act], float64 [N]."""

        def ask(some: slice) -> Array:
            return self.policy.log_probs(
                take(observations, some),
                take(actions, some),
                epsilon=self.exploration.epsilon,
                action_mask=None if masks is None else masks[some],
                **self._mode,
            )

        return np.concatenate(_in_parts(num_values(observations), ask))

    def actions(
        self,
        observations: Values,
        rng: np.random.Generator,
        masks: NDArray[np.bool_] | None = None,
    ) -> Any:
        """Return an action for each observation, [N, *act]."""

        def ask(some: slice) -> Any:
            act = self.policy.act(
                take(observations, some),
                rng=rng,
                epsilon=self.exploration.epsilon,
                action_mask=None if masks is None else masks[some],
                **self._mode,
            )
            return act.actions

        return concatenate(_in_parts(num_values(observations), ask))

    @property
    def _mode(self) -> dict[str, Any]:
        temperature = self.exploration.temperature
        return {"deterministic": not temperature, "temperature": temperature or 1.0}


def _in_parts(num: int, ask: Callable[[slice], Any]) -> list[Any]:
    return [
        ask(slice(start, min(num, start + _ROWS_AT_ONCE)))
        for start in range(0, max(1, num), _ROWS_AT_ONCE)
    ]
