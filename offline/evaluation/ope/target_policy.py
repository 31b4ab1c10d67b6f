"""TargetPolicy: a policy and how it acts, asked of many logged observations at once.

One that remembers is asked along whole episodes, step by step: its state is what it made of the
observations before, whoever took the actions between them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.episodes.spaces import (
    Array,
    Discrete,
    Values,
    concatenate,
    num_values,
    take,
)
from replaylake.datastore.errors import SpaceUnsupportedError
from replaylake.datastore.lake.policies.exploration import Exploration
from replaylake.datastore.lake.policies.log_probs import check_has_density
from replaylake.datastore.lake.policies.policy import Policy

# Observations given to a policy's graph at once: the outputs of 256 hidden units take 8 MB, and the
# graph's runtime never returns the memory of its largest input. Larger batches are not faster.
_ROWS_AT_ONCE: Final = 1 << 13
# Episodes along which a policy with a state is evaluated at once.
_EPISODES_AT_ONCE: Final = 1 << 16
# What the states of episodes followed side by side may take: those of a frame stack are large.
_STATE_BYTES: Final = 256 << 20


@dataclass(frozen=True)
class TargetPolicy:
    """The policy whose value is asked for; by default it takes its mode, as a server does."""

    policy: Policy
    exploration: Exploration = field(default_factory=Exploration)

    @property
    def is_stateful(self) -> bool:
        """Whether what it does depends on earlier observations of the episode, too."""
        return self.policy.initial_state(1) is not None

    def check_stateless(self) -> None:
        """Refuse a policy that is not the same at each visit of an observation.

        Raises: SpaceUnsupportedError.
        """
        if self.is_stateful:
            raise SpaceUnsupportedError(
                f"head {self.policy.spec.head}: found a policy with a state, expected one whose "
                "action depends on the observation alone. Importance sampling along whole episodes "
                "(`replaylake ope`) can evaluate it, and so can an environment."
            )

    @property
    def is_discrete(self) -> bool:
        """Whether the probabilities of all of its actions can be listed."""
        return isinstance(self.policy.spec.action_space, Discrete)

    @property
    def is_deterministic(self) -> bool:
        """Whether it does the same each time that it sees the same."""
        head = self.policy.spec.head
        return not self.exploration.is_on and head not in ("uniform", "sampled")

    @property
    def no_density(self) -> str:
        """Why its actions have no probability or density; empty where they have."""
        try:
            check_has_density(self.policy.spec, **self._mode)
        except SpaceUnsupportedError as error:
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
        """Return the probability of each Discrete action, float64 [N, A], of one that forgets."""
        self.check_stateless()

        def compute(some: slice) -> Array:
            return self.policy.action_probs(
                take(observations, some),
                epsilon=self.exploration.epsilon,
                action_mask=None if masks is None else masks[some],
                **self._mode,
            )

        return _join_chunks(num_values(observations), compute)

    def logged_action_probs(
        self,
        observations: Values,
        actions: NDArray[np.int64],
        masks: NDArray[np.bool_] | None = None,
    ) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
        """Return the probability of each logged Discrete action, and those of all actions.

        Computed as in `action_probs`; actions are numbered from 0. Shapes: float64 [N] and
        float32 [N, A], which is as exact as the scores of a policy's graph.
        """
        num, space = num_values(observations), self.policy.spec.action_space
        assert isinstance(space, Discrete), "callers check is_discrete"
        logged, every = np.empty(num), np.empty((num, space.n), np.float32)
        for some in _split_rows(num):
            masks_now = None if masks is None else masks[some]
            probs = self.action_probs(take(observations, some), masks_now)
            logged[some] = probs[np.arange(len(probs)), actions[some]]
            every[some] = probs
        return logged, every

    def log_probs(
        self,
        observations: Values,
        actions: Values,
        masks: NDArray[np.bool_] | None = None,
    ) -> NDArray[np.float64]:
        """Return ln of the probability (density) of actions [N, *act], float64 [N].

        Of one that forgets, as action_probs.
        """
        self.check_stateless()

        def compute(some: slice) -> Array:
            return self.policy.log_probs(
                take(observations, some),
                take(actions, some),
                epsilon=self.exploration.epsilon,
                action_mask=None if masks is None else masks[some],
                **self._mode,
            )

        return _join_chunks(num_values(observations), compute)

    def actions(
        self,
        observations: Values,
        rng: np.random.Generator,
        masks: NDArray[np.bool_] | None = None,
    ) -> Any:
        """Return an action for each observation, [N, *act], of one that forgets."""
        self.check_stateless()

        def compute(some: slice) -> Any:
            act = self.policy.act(
                take(observations, some),
                rng=rng,
                epsilon=self.exploration.epsilon,
                action_mask=None if masks is None else masks[some],
                **self._mode,
            )
            return act.actions

        return concatenate(_map_chunks(num_values(observations), compute))

    def action_probs_along(
        self,
        offsets: NDArray[np.int64],
        observations: Values,
        masks: NDArray[np.bool_] | None = None,
    ) -> NDArray[np.float64]:
        """Return the probability of each Discrete action along episodes, float64 [M, A].

        offsets int64 [E + 1]: rows offsets[e] .. offsets[e + 1] are an episode's, from its first
        step on. As a server does, it tells the policy no rewards. Cost: the graph is run twice a
        step, of all episodes at once. Memory: states of 256 MB two or three times over.
        """

        def compute(rows: NDArray[np.int64], part: Values, **now: Any) -> Array:
            return self.policy.action_probs(
                part, epsilon=self.exploration.epsilon, **now, **self._mode
            )

        return self._along(offsets, observations, masks, compute)

    def log_probs_along(
        self,
        offsets: NDArray[np.int64],
        observations: Values,
        actions: Values,
        masks: NDArray[np.bool_] | None = None,
    ) -> NDArray[np.float64]:
        """Return ln of the probability (density) of actions along episodes, float64 [M].

        offsets as of action_probs_along.
        """

        def compute(rows: NDArray[np.int64], part: Values, **now: Any) -> Array:
            return self.policy.log_probs(
                part, take(actions, rows), epsilon=self.exploration.epsilon, **now, **self._mode
            )

        return self._along(offsets, observations, masks, compute)

    def _along(
        self,
        offsets: NDArray[np.int64],
        observations: Values,
        masks: NDArray[np.bool_] | None,
        compute: Callable[..., Array],
    ) -> NDArray[np.float64]:
        """Ask of step after step, many episodes at once, with the states that they have by then.

        compute: from row numbers [N], their observations, `state` and `action_mask` to [N, ...].
        """
        lengths = np.diff(offsets)
        # The longest first: those that go on are at the front, and leave from the back.
        order = np.argsort(-lengths, kind="stable")
        size = self.policy.spec.state_size * np.dtype(np.float32).itemsize
        num_at_once = max(1, min(_EPISODES_AT_ONCE, _STATE_BYTES // max(1, size)))
        result: NDArray[np.float64] | None = None
        for first in range(0, len(order), num_at_once):
            episodes = order[first : first + num_at_once]
            num, state = len(episodes), self.policy.initial_state(len(episodes))
            for step in range(int(lengths[episodes[0]])):
                going = offsets[episodes[:num]] + step
                state = None if state is None else state[:num]
                mask = None if masks is None else masks[going]
                part = take(observations, going)
                answer = compute(going, part, state=state, action_mask=mask)
                if result is None:
                    result = np.empty((int(offsets[-1]), *answer.shape[1:]))
                result[going] = answer
                num = int(np.searchsorted(-lengths[episodes], -step - 1))
                if num:
                    state = self.policy.act(part, state, action_mask=mask).state
        return np.empty(0) if result is None else result

    @property
    def _mode(self) -> dict[str, Any]:
        temperature = self.exploration.temperature
        return {"deterministic": not temperature, "temperature": temperature or 1.0}


def _join_chunks(num: int, compute: Callable[[slice], Array]) -> NDArray[np.float64]:
    """Join the results of `compute` for slices of num rows, without holding them twice."""
    slices = iter(_split_rows(num))
    first = compute(next(slices))
    result = np.empty((num, *first.shape[1:]))
    result[: len(first)] = first
    for some in slices:
        result[some] = compute(some)
    return result


def _map_chunks(num: int, compute: Callable[[slice], Any]) -> list[Any]:
    return [compute(some) for some in _split_rows(num)]


def _split_rows(num: int) -> list[slice]:
    """Return slices of num rows; one empty slice if there are none."""
    starts = range(0, max(1, num), _ROWS_AT_ONCE)
    return [slice(start, min(num, start + _ROWS_AT_ONCE)) for start in starts]
