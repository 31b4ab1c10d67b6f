"""Policy: numpy observations in, numpy actions out. Rollout, evaluation and serving all use this.

A policy is a graph and a head. The graph maps observations to the head's parameters; the head, in
numpy (heads.py), masks, samples and gives the log-probability of what it returned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Final, Protocol

import numpy as np

from replaylake.datastore.episodes.encoding import Encoding
from replaylake.datastore.episodes.spaces import (
    Array,
    Box,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    Values,
    describe,
)
from replaylake.datastore.errors import SpaceUnsupportedError

# The outputs that a policy's graph has for each head, in order.
HEAD_OUTPUTS: Final[Mapping[str, tuple[str, ...]]] = {
    "categorical": ("logits",),
    "multi_categorical": ("logits",),
    "q_values": ("q_values",),
    "gaussian": ("means", "log_stds"),
    "squashed_gaussian": ("means", "log_stds"),
    "deterministic": ("actions",),
    "sampled": ("actions",),
    "uniform": (),
}
HEADS: Final = tuple(HEAD_OUTPUTS)
# What a policy with a state has beside those: an input after the observations, and the last output.
STATE: Final = "state"
NEXT_STATE: Final = "next_state"
DISCRETE_HEADS: Final = ("categorical", "q_values")


@dataclass(frozen=True)
class PolicySpec:
    """What a policy takes and how its graph's outputs become actions.

    head, and the graph's outputs for it (leading dim [N]):
        categorical         logits [N, A]
        multi_categorical   logits [N, sum of nvec], one categorical after another; of MultiBinary
                            actions two for each element: of 0 and of 1
        q_values            q_values [N, A]; greedy, or a softmax of them at temperature > 0
        gaussian            means [N, D], log_stds [N, D]; truncated to the action bounds
        squashed_gaussian   means [N, D], log_stds [N, D]; tanh, then scaled to the action bounds
        deterministic       actions [N, D] in the environment's units
        sampled             actions [N, D]; the graph's second input is noise [N, noise_size]
        uniform             none, and no graph: any action, with its density; cannot be exported

    encoding says what the elements of an observation are and what actions are called, as the
    dataset had it that the policy learned from; None where nothing was encoded.

    state_size: how many numbers the policy remembers of an episode, zeros at its start; 0 where it
    acts on the observation alone. The graph then takes `state` float32 [N, state_size] after the
    observations, and gives `next_state`, of the same shape, as its last output. frame_stack: it
    sees the last so many observations, which are a Box; those before this one are the end of its
    state (see offline/networks/frame_stack.py).
    """

    observation_space: Space
    action_space: Space
    head: str
    noise_size: int = 0
    encoding: Encoding | None = None
    state_size: int = 0
    frame_stack: int = 1

    def __post_init__(self) -> None:
        if self.head not in HEADS:
            raise SpaceUnsupportedError(
                f"policy head: found {self.head!r}, expected one of {list(HEADS)}."
            )
        if self.state_size < 0 or (self.state_size and self.head == "uniform"):
            raise SpaceUnsupportedError(
                f"policy head {self.head}: found a state of {self.state_size} numbers, expected 0 "
                "or more, and none of a uniform policy."
            )
        self._check_frame_stack()
        if self.head == "uniform":
            return
        expected: tuple[type, ...] = (Box,)
        if self.head in DISCRETE_HEADS:
            expected = (Discrete,)
        elif self.head == "multi_categorical":
            expected = (MultiDiscrete, MultiBinary)
        if not isinstance(self.action_space, expected):
            raise SpaceUnsupportedError(
                f"policy head {self.head}: found action space {describe(self.action_space)}, "
                f"expected a {' or '.join(kind.__name__ for kind in expected)}."
            )

    @property
    def recorded_state_size(self) -> int:
        """How many numbers at the state's beginning a rollout records with each step.

        The frames after them are there already, as the observations of the steps before.
        """
        return self.state_size - self._num_of_frames()

    def _num_of_frames(self) -> int:
        space = self.observation_space
        if self.frame_stack == 1 or not isinstance(space, Box):
            return 0
        return (self.frame_stack - 1) * prod(space.shape) + 1

    def _check_frame_stack(self) -> None:
        num = self._num_of_frames()
        if self.frame_stack < 1 or self.state_size < num or (self.frame_stack > 1 and not num):
            raise SpaceUnsupportedError(
                f"policy frame_stack: found {self.frame_stack} over "
                f"{describe(self.observation_space)} and a state of {self.state_size} numbers, "
                "expected 1, or more of a Box with a state that holds those before the last, and "
                "one number that says whether there are any."
            )


@dataclass(frozen=True)
class Act:
    """One decision for each of N observations.

    actions int64 [N], [N, K] of K elements, or the Box's dtype [N, *act]; log_probs float32 [N], or
    None where the head has no density; state float32 [N, S], what to pass to the next call (None
    if stateless); q_values float32 [N, A] of a q_values head, else None.
    """

    actions: Array
    log_probs: Array | None
    state: Array | None = None
    q_values: Array | None = None


class Policy(Protocol):
    """Acts on numpy arrays; holds no environment, clock or global randomness."""

    @property
    def spec(self) -> PolicySpec:
        """Spaces and head."""
        ...

    def initial_state(self, n: int) -> Array | None:
        """Return the state for n fresh episodes, float32 [n, S]; None if it is stateless."""
        ...

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
        """Choose an action for each observation [N, *obs].

        state float32 [N, S] is what the last call returned for the same episodes, initial_state for
        those that begin; a policy with a state refuses to go without, so none forgets unnoticed.
        `deterministic` takes the mode; otherwise the head is sampled at `temperature`. rng is what
        is drawn from, a new generator of the system's entropy by default; policies with noise in
        the graph (bcq, bear, crr) draw also when deterministic. With probability `epsilon` a
        countable action is drawn uniformly from the allowed ones instead, all its elements at once,
        also when deterministic. log_probs are those of the whole mixture. action_mask is bool
        [N, A], true where allowed. Raises: EpisodeInvalidError on arrays that do not fit the spec,
        SpaceUnsupportedError where the head cannot do what is asked.
        """
        ...

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
        """Return the probability that `act` chooses each Discrete action, float64 [N, A].

        Options as of `act`. Raises: SpaceUnsupportedError where actions cannot be listed,
        EpisodeInvalidError.
        """
        ...

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
        """Return ln of the probability (density) that `act` gives these actions, float64 [N].

        actions [N, *act] are anybody's; options as of `act`. -inf where it never chooses one, NaN
        where the density there is not known. Raises: SpaceUnsupportedError naming the head where it
        has no density, EpisodeInvalidError.
        """
        ...

    def observe(self, state: Array | None, rewards: Array) -> Array | None:
        """Tell a stateful policy the rewards [N] of its last actions; returns the new state."""
        ...
