"""EpisodeColumns: many episodes with their steps joined, one array a column, as they are collected.

Whoever takes episodes takes them, one by one; the door check and the encoder take all at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

import numpy as np

from replaylake.datastore.episodes.episode import MAX_STEP, PER_STEP, Episode, validate
from replaylake.datastore.episodes.spaces import Array, Space, Values, as_values, num_values, take
from replaylake.datastore.errors import EpisodeInvalidError


@dataclass(frozen=True)
class EpisodeColumns(Sequence[Episode]):
    """E episodes, or pieces, of T steps together; nothing is copied to look at one of them.

    steps: those of all episodes, one episode after the other, as those of one without a name: its
    arrays are [T, ...]. final_observations [E, *obs]: after each one's last step. lengths and
    first_steps int64 [E]; terminated and truncated bool [E]; agent_ids: None if all are "".

    Raises: EpisodeInvalidError where these do not go together.
    """

    steps: Episode
    episode_ids: Sequence[str]
    lengths: Array
    first_steps: Array
    terminated: Array
    truncated: Array
    final_observations: Values
    agent_ids: Sequence[str] | None = None

    def __post_init__(self) -> None:
        num = len(self.lengths)
        nums = [len(self.episode_ids), len(self.first_steps)]
        nums += [len(self.terminated), len(self.truncated), num_values(self.final_observations)]
        if self.agent_ids is not None:
            nums.append(len(self.agent_ids))
        if any(count != num for count in nums) or int(self.lengths.sum()) != len(self.steps):
            raise EpisodeInvalidError(
                f"episodes: found {nums} ids, first steps, ends and final observations of "
                f"{num} episodes with {int(self.lengths.sum())} steps in {len(self.steps)} rows, "
                "expected one of each an episode and a row a step."
            )

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Episode: ...
    @overload
    def __getitem__(self, index: slice) -> list[Episode]: ...
    def __getitem__(self, index: int | slice) -> Episode | list[Episode]:
        numbers = range(len(self))[index]
        if isinstance(numbers, range):
            return [self._episode(number) for number in numbers]
        return self._episode(numbers)

    @property
    def num_steps(self) -> int:
        return len(self.steps)

    def validate(
        self, observation_space: Space, action_space: Space, *, rewards_optional: bool = False
    ) -> EpisodeColumns:
        """Return them as `episode.checked` returns each.

        Raises: EpisodeInvalidError where one does not fit, which does not tell which.
        """
        if not len(self) or self.lengths.min() < 1 or self.first_steps.min() < 0:
            raise EpisodeInvalidError("episodes: found one without steps or before step 0.")
        if int((self.first_steps + self.lengths).max()) > MAX_STEP + 1:
            raise EpisodeInvalidError(f"episodes: found a step above {MAX_STEP}.")
        return replace(
            self,
            steps=validate(
                self.steps, observation_space, action_space, rewards_optional=rewards_optional
            ),
            final_observations=as_values(
                observation_space, self.final_observations, "final_observation", len(self)
            ),
        )

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *np.cumsum(self.lengths).tolist()]

    def _episode(self, number: int) -> Episode:
        rows = slice(self._starts[number], self._starts[number + 1])
        steps = self.steps
        known = {name: getattr(steps, name) for name in PER_STEP}
        return Episode(
            episode_id=self.episode_ids[number],
            observations=take(steps.observations, rows),
            actions=take(steps.actions, rows),
            rewards=steps.rewards[rows],
            terminated=bool(self.terminated[number]),
            truncated=bool(self.truncated[number]),
            final_observation=take(self.final_observations, number),
            agent_id="" if self.agent_ids is None else self.agent_ids[number],
            first_step=int(self.first_steps[number]),
            extras={name: column[rows] for name, column in steps.extras.items()},
            **{name: None if column is None else column[rows] for name, column in known.items()},
        )
