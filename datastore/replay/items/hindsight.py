"""Hindsight: transitions towards goals that were reached, in place of those that were asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.spaces import Array, Box, Dict, Space
from replaylake.datastore.errors import ConfigInvalidError, SpaceUnsupportedError
from replaylake.datastore.replay.arguments import check_discount, check_fraction
from replaylake.datastore.replay.items.transitions import (
    TransitionAssembler,
    TransitionOutput,
    Transitions,
)
from replaylake.datastore.replay.layout import BOOTSTRAPPABLE
from replaylake.datastore.replay.protocols import SelectedItems
from replaylake.datastore.replay.randomness import random_stream
from replaylake.datastore.replay.records import Packed, Records

# achieved_goal [B, *goal], desired_goal [B, *goal], info {} to rewards [B], as in gymnasium.
ComputeReward = Callable[[Array, Array, dict[str, Any]], Array]
_ACHIEVED: Final = f"{schema.OBSERVATION}.achieved_goal"
_DESIRED: Final = f"{schema.OBSERVATION}.desired_goal"
_STRATEGIES: Final = ("future", "final", "episode")


@dataclass(frozen=True, kw_only=True)
class Hindsight:
    """An item: one row is a transition, whose goal is replaced with the probability `fraction`.

    The new goal is one that the same episode achieved after one of its steps, drawn uniformly: from
    this step on (strategy "future"), at the last step ("final"), or at any step ("episode"; not in
    a live view). This is section 4.5 of Andrychowicz et al. 2017; a fraction of 0.8 is their k = 4.
    The new goal is set in observations and next_observations, and the reward is
    compute_reward(achieved_goal [B, *goal] of the next observations, desired_goal [B, *goal], {}),
    which is called once per batch with all replaced rows. All other fields, including discounts,
    remain as logged. Goals are taken only from the part of the episode before the next gap.

    Observations are a Dict with observation, achieved_goal and desired_goal (gymnasium's GoalEnv).
    seed: the state of these random draws is part of the sampler's saved state.
    """

    compute_reward: ComputeReward
    seed: int
    fraction: float = 0.8
    strategy: Literal["future", "final", "episode"] = "future"
    discount: float = 0.99

    def __post_init__(self) -> None:
        if not callable(self.compute_reward):
            raise ConfigInvalidError(
                f"hindsight: found compute_reward {self.compute_reward!r}, expected a function "
                "(achieved_goal, desired_goal, info) -> rewards. Pass the environment's own."
            )
        check_fraction("hindsight: fraction", self.fraction)
        if self.strategy not in _STRATEGIES:
            raise ConfigInvalidError(
                f"hindsight: found strategy {self.strategy!r}, expected {' or '.join(_STRATEGIES)}."
                ' Leave it out for "future".'
            )
        check_discount("hindsight", self.discount)

    def starts(self, packed: Packed) -> NDArray[np.int64]:
        """Return the steps that have a successor, or terminated."""
        return packed.bootstrappable

    def assembler(self, records: Records) -> HindsightAssembler:
        """Return the object that copies the transitions and replaces their goals.

        Raises: SpaceUnsupportedError if observations have no goals; ConfigInvalidError for the
        strategy "episode" in a live view.
        """
        _check_goals(records.layout.spec.observation_space)
        if self.strategy == "episode" and records.runs is None:
            raise ConfigInvalidError(
                'hindsight: found strategy "episode" in a view that grows, expected "future" or '
                '"final": there an episode\'s earlier steps may be gone. Use "future".'
            )
        return HindsightAssembler(records, self)


class HindsightAssembler:
    """Copies transitions and replaces goals in the copies."""

    def __init__(self, records: Records, item: Hindsight) -> None:
        self.records = records
        self._item = item
        self._rng = random_stream(item.seed, "hindsight")
        self._transitions = TransitionAssembler(records, Transitions(item.discount))
        self.row_bytes = self._transitions.row_bytes
        # Where each chain begins, by run: of the strategy "episode" only.
        self._heads: NDArray[np.int64] | None = None
        if item.strategy == "episode" and records.runs is not None:
            runs = records.runs
            heads = runs.chain_heads()
            self._heads = np.repeat(runs.starts[heads], runs.chain_ends() - heads + 1)

    def assemble(
        self,
        positions: NDArray[np.int64],
        selected: SelectedItems,
        out: TransitionOutput | None = None,
    ) -> TransitionOutput:
        """Copy the steps at `positions` and their successors, and relabel some of them.

        Cost: beside the copies and compute_reward, some reads for each piece of an episode.
        Raises: ConfigInvalidError if compute_reward returns another shape than [B].
        """
        out = self._transitions.assemble(positions, selected, out)
        drawn = self._rng.random((2, len(positions)))
        replaced = np.flatnonzero(drawn[0] < self._item.fraction)
        if not len(replaced):
            return out
        goals = self._goals(positions[replaced], drawn[1, replaced])
        rows: Any = out.rows
        rows[_DESIRED][replaced] = goals[:, None]
        rewards = np.asarray(self._item.compute_reward(rows[_ACHIEVED][replaced, 1], goals, {}))
        if rewards.shape != (len(replaced),):
            raise ConfigInvalidError(
                f"hindsight: compute_reward returned shape {rewards.shape}, expected "
                f"({len(replaced)},): one reward a row. Let it compute all rows at once."
            )
        rows[schema.REWARD][replaced, 0] = rewards
        return out

    def _goals(self, positions: NDArray[np.int64], drawn: NDArray[np.float64]) -> Array:
        """Return what was achieved later: a goal for each of positions [M]."""
        while True:
            moment = self.records.moment()
            goals = self.records.take(_ACHIEVED, self._goal_positions(positions, drawn))
            # A run that grew meanwhile has a step where its end was, whose key is no link.
            if self.records.moment() == moment:
                return goals

    def _goal_positions(
        self, positions: NDArray[np.int64], drawn: NDArray[np.float64]
    ) -> NDArray[np.int64]:
        """Return where the observations lie whose achieved goals are to be asked for.

        drawn [M], in 0..1, chooses among the steps whose successor is known.
        """
        first = positions
        if self._heads is not None and self.records.runs is not None:
            run = np.searchsorted(self.records.runs.starts, positions, side="right") - 1
            first = self._heads[run]
        num = self.records.num_steps_left(first)
        last_step = self.records.after(first, num) - 1
        num -= ~self.records.take(BOOTSTRAPPABLE, last_step)
        if self._item.strategy == "final":
            return self.records.after(first, num)
        return self.records.after(first, 1 + (drawn * num).astype(np.int64))

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rng.bit_generator.state = state["rng"]


def _check_goals(space: Space) -> None:
    """Refuse observations without an achieved and a desired goal of one shape and dtype."""
    parts = space.spaces if isinstance(space, Dict) else {}
    achieved, desired = parts.get("achieved_goal"), parts.get("desired_goal")
    if (
        isinstance(achieved, Box)
        and isinstance(desired, Box)
        and (achieved.shape, achieved.dtype) == (desired.shape, desired.dtype)
    ):
        return
    found = ", ".join(parts) or type(space).__name__
    raise SpaceUnsupportedError(
        f"hindsight: found observations of {found}, expected a Dict with achieved_goal and "
        "desired_goal, Boxes of one shape and dtype, as gymnasium's GoalEnv has them."
    )
