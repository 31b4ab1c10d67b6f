"""EpisodeColumns: many episodes with their steps joined, one array a column, as they are collected.

Whoever takes episodes takes them, one by one; the door check and the encoder take all at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes.episode import MAX_STEP, PER_STEP, Episode, validate
from replaylake.datastore.episodes.spaces import (
    Array,
    Space,
    Values,
    as_values,
    concatenate,
    num_bytes,
    num_values,
    take,
)
from replaylake.datastore.episodes.tokenizer import Tokenizer
from replaylake.datastore.errors import EpisodeInvalidError


class TextColumn(Sequence[str]):
    """Texts as Arrow holds them: a million ids take a tenth of what they take as objects."""

    def __init__(self, array: pa.Array) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> TextColumn: ...
    def __getitem__(self, index: int | slice) -> str | TextColumn:
        if isinstance(index, slice):
            return TextColumn(self.array[index])
        return str(self.array[index].as_py())

    def take(self, index: Array) -> TextColumn:
        """Return those at these places."""
        return TextColumn(self.array.take(pa.array(index)))

    def add_prefix(self, prefix: str) -> TextColumn:
        """Return each with a text before it."""
        return TextColumn(pc.binary_join_element_wise(prefix, self.array, ""))


def as_text_array(texts: Sequence[str | None]) -> pa.Array:
    """Return texts as an Arrow array of strings, without copying a TextColumn."""
    return texts.array if isinstance(texts, TextColumn) else pa.array(texts, pa.string())


@dataclass(frozen=True)
class EpisodeColumns(Sequence[Episode]):
    """E episodes, or pieces, of T steps together; nothing is copied to look at one of them.

    steps: those of all episodes, one episode after the other, as those of one without a name: its
    arrays are [T, ...]. final_observations [F, *obs]: after the last step of each episode that has
    one, None if none has. lengths and first_steps int64 [E]; terminated and truncated bool [E];
    agent_ids: None if all are "". source_ids: None if they have none. has_final bool [E]: which
    episodes have a final observation, None if all do, or none does. absent: for fields of PER_STEP
    that only some episodes have, which lack it, bool [E]; their rows hold what passes every check.

    Raises: EpisodeInvalidError where these do not go together.
    """

    steps: Episode
    episode_ids: Sequence[str]
    lengths: Array
    first_steps: Array
    terminated: Array
    truncated: Array
    final_observations: Values | None
    agent_ids: Sequence[str] | None = None
    source_ids: Sequence[str] | None = None
    has_final: Array | None = None
    absent: Mapping[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        num = len(self.lengths)
        nums = [len(self.episode_ids), len(self.first_steps)]
        nums += [len(self.terminated), len(self.truncated)]
        known = (self.agent_ids, self.source_ids, self.has_final, *self.absent.values())
        nums += [len(values) for values in known if values is not None]
        if self.final_observations is not None:
            num_finals = num if self.has_final is None else int(self.has_final.sum())
            nums.append(num + num_values(self.final_observations) - num_finals)
        if any(count != num for count in nums) or int(self.lengths.sum()) != len(self.steps):
            raise EpisodeInvalidError(
                f"episodes: found {nums} ids, first steps, ends and final observations of "
                f"{num} episodes with {int(self.lengths.sum())} steps in {len(self.steps)} rows, "
                "expected one of each per episode, and one row per step."
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

    @property
    def having_final(self) -> Array:
        """The numbers of the episodes with a final observation, in order."""
        if self.final_observations is None:
            return np.zeros(0, np.int64)
        return np.arange(len(self)) if self.has_final is None else np.flatnonzero(self.has_final)

    def lacks(self, name: str) -> Array | None:
        """Return which steps are of episodes without a field of PER_STEP, bool [T]."""
        absent = self.absent.get(name)
        return None if absent is None else np.repeat(absent, self.lengths)

    def part(self, start: int, end: int) -> Self:
        """Return the episodes from start up to end; nothing is copied."""
        rows = slice(int(self._starts[start]), int(self._starts[end]))
        return replace(self, **self._pick_fields(slice(start, end), rows))

    def select(self, which: Array) -> Self:
        """Return the episodes that a mask bool [E] names, copied."""
        return replace(self, **self._pick_fields(which, np.repeat(which, self.lengths)))

    def concatenate(self, others: Sequence[Self]) -> Self:
        """Return these and, behind them, those of others, with equal shapes and columns.

        Numbers of several dtypes become numbers of the one that holds them all. Raises: ValueError,
        KeyError, TypeError or pa.ArrowException if they cannot be joined.
        """
        return self if not others else replace(self, **self._join_fields([self, *others]))

    def _join_fields(self, parts: Sequence[Self]) -> dict[str, Any]:
        steps = [part.steps for part in parts]
        nums = [len(part) for part in parts]
        columns: dict[str, Any] = {}
        absent: dict[str, Array] = {}
        for name in PER_STEP:
            arrays = [getattr(one, name) for one in steps]
            if all(array is None for array in arrays):
                continue
            like = next(array for array in arrays if array is not None)
            if any(array is None for array in arrays) or any(name in p.absent for p in parts):
                lacking = [
                    np.full(num, array is None) if name not in part.absent else part.absent[name]
                    for part, array, num in zip(parts, arrays, nums, strict=True)
                ]
                absent[name] = np.concatenate(lacking)
            columns[name] = np.concatenate(
                [
                    _filler(name, like, len(one)) if array is None else array
                    for array, one in zip(arrays, steps, strict=True)
                ]
            )
        names = {*steps[0].extras}
        if any({*one.extras} != names for one in steps):
            raise ValueError("episodes: found different further columns, expected the same.")
        finals = [p.final_observations for p in parts if p.final_observations is not None]
        has_final = None
        if finals and (len(finals) < len(parts) or any(p.has_final is not None for p in parts)):
            has_final = np.zeros(sum(nums), np.bool_)
            starts = np.cumsum(nums) - nums
            for part, start in zip(parts, starts.tolist(), strict=True):
                has_final[start + part.having_final] = True
        return {
            "steps": Episode(
                episode_id="",
                observations=concatenate([one.observations for one in steps]),
                actions=concatenate([one.actions for one in steps]),
                rewards=np.concatenate([one.rewards for one in steps]),
                extras={
                    name: _concatenate_column([one.extras[name] for one in steps])
                    for name in steps[0].extras
                },
                **columns,
            ),
            "episode_ids": _concatenate_texts([part.episode_ids for part in parts]),
            "source_ids": _concatenate_optional([part.source_ids for part in parts], nums),
            "agent_ids": _concatenate_optional([part.agent_ids for part in parts], nums),
            "lengths": np.concatenate([part.lengths for part in parts]),
            "first_steps": np.concatenate([part.first_steps for part in parts]),
            "terminated": np.concatenate([part.terminated for part in parts]),
            "truncated": np.concatenate([part.truncated for part in parts]),
            "final_observations": concatenate(finals) if finals else None,
            "has_final": has_final,
            "absent": absent,
        }

    def locate_rows(self, rows: Array) -> Sequence[tuple[str | None, int | None]]:
        """Return the file and its row of each of some steps, by number; None where not known."""
        return [(None, None)] * len(rows)

    def num_bytes_per_step(self) -> float:
        """Return the mean bytes of a step's observation, action, reward and further columns."""
        steps = self.steps
        total = num_bytes(steps.observations) + num_bytes(steps.actions) + steps.rewards.nbytes
        total += sum(int(column.nbytes) for column in steps.extras.values())
        return total / max(1, len(steps))

    def validate(
        self,
        observation_space: Space,
        action_space: Space,
        *,
        rewards_optional: bool = False,
        tokenizer: Tokenizer | None = None,
    ) -> EpisodeColumns:
        """Return them as `episode.checked` returns each.

        Raises: EpisodeInvalidError or SchemaMismatchError where one does not fit, which does not
        tell which.
        """
        if not len(self) or self.lengths.min() < 1 or self.first_steps.min() < 0:
            raise EpisodeInvalidError("episodes: found one without steps or before step 0.")
        if int((self.first_steps + self.lengths).max()) > MAX_STEP + 1:
            raise EpisodeInvalidError(f"episodes: found a step above {MAX_STEP}.")
        return replace(
            self,
            steps=validate(
                self.steps,
                observation_space,
                action_space,
                rewards_optional=rewards_optional,
                tokenizer=tokenizer,
            ),
            final_observations=None
            if self.final_observations is None
            else as_values(
                observation_space,
                self.final_observations,
                "final_observation",
                len(self.having_final),
            ),
        )

    def _pick_fields(self, episodes: Any, rows: Any) -> dict[str, Any]:
        """Return episodes and their rows, both as slices or both as masks."""
        steps, finals, has_final = self.steps, self.final_observations, self.has_final
        optional: dict[str, Any] = {
            name: None if (column := getattr(steps, name)) is None else column[rows]
            for name in PER_STEP
        }
        if finals is not None:
            with_final = np.ones(len(self), np.bool_) if has_final is None else has_final
            if isinstance(episodes, slice):
                before = int(with_final[: episodes.start].sum())
                finals = take(finals, slice(before, before + int(with_final[episodes].sum())))
            else:
                finals = take(finals, episodes[with_final])
        return {
            "steps": replace(
                steps,
                observations=take(steps.observations, rows),
                actions=take(steps.actions, rows),
                rewards=steps.rewards[rows],
                extras={name: _rows_of(column, rows) for name, column in steps.extras.items()},
                **optional,
            ),
            "episode_ids": _texts_of(self.episode_ids, episodes),
            "source_ids": None if self.source_ids is None else _texts_of(self.source_ids, episodes),
            "agent_ids": None if self.agent_ids is None else _texts_of(self.agent_ids, episodes),
            "lengths": self.lengths[episodes],
            "first_steps": self.first_steps[episodes],
            "terminated": self.terminated[episodes],
            "truncated": self.truncated[episodes],
            "final_observations": finals,
            "has_final": None if has_final is None else has_final[episodes],
            "absent": {name: lacking[episodes] for name, lacking in self.absent.items()},
        }

    @cached_property
    def _starts(self) -> Array:
        return np.append(0, np.cumsum(self.lengths))

    @cached_property
    def _final_rows(self) -> Array | None:
        """Positions in final_observations of each episode's final observation."""
        return None if self.has_final is None else np.cumsum(self.has_final) - 1

    def _final(self, number: int) -> Any:
        finals = self.final_observations
        if finals is None or (self.has_final is not None and not self.has_final[number]):
            return None
        return take(finals, number if self._final_rows is None else int(self._final_rows[number]))

    def _episode(self, number: int) -> Episode:
        rows = slice(int(self._starts[number]), int(self._starts[number + 1]))
        steps = self.steps
        known = {
            name: None
            if name in self.absent and self.absent[name][number]
            else getattr(steps, name)
            for name in PER_STEP
        }
        return Episode(
            episode_id=self.episode_ids[number],
            observations=take(steps.observations, rows),
            actions=take(steps.actions, rows),
            rewards=steps.rewards[rows],
            terminated=bool(self.terminated[number]),
            truncated=bool(self.truncated[number]),
            final_observation=self._final(number),
            agent_id="" if self.agent_ids is None else self.agent_ids[number],
            first_step=int(self.first_steps[number]),
            source_episode_id=None if self.source_ids is None else self.source_ids[number],
            extras={name: column[rows] for name, column in steps.extras.items()},
            **{name: None if column is None else column[rows] for name, column in known.items()},
        )


def _filler(name: str, like: Array, num: int) -> Array:
    """Return what stands in the rows of episodes without a field: it passes every check."""
    shape = (num, *like.shape[1:])
    if name == "action_masks":
        return np.ones(shape, np.bool_)
    fill = {"behavior_log_probs": np.nan, "policies": None}.get(name, 0)
    return np.full(shape, fill, like.dtype)


def _rows_of(column: Any, rows: Any) -> Any:
    if isinstance(column, pa.Array) and not isinstance(rows, slice):
        return column.filter(pa.array(rows))
    return column[rows]


def _texts_of(texts: Sequence[str], which: Any) -> Sequence[str]:
    if isinstance(which, slice):
        return texts[which]
    if isinstance(texts, TextColumn):
        return TextColumn(texts.array.filter(pa.array(which)))
    return [text for text, is_in in zip(texts, which.tolist(), strict=True) if is_in]


def _concatenate_column(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], pa.Array):
        return pa.concat_arrays(parts)
    return np.concatenate(parts)


def _concatenate_texts(parts: Sequence[Sequence[str]]) -> Sequence[str]:
    if any(isinstance(part, TextColumn) for part in parts):
        return TextColumn(pa.concat_arrays([as_text_array(part) for part in parts]))
    return [text for part in parts for text in part]


def _concatenate_optional(
    parts: Sequence[Sequence[str] | None], nums: Sequence[int]
) -> Sequence[str] | None:
    if all(part is None for part in parts):
        return None
    return _concatenate_texts(
        [[""] * num if part is None else part for part, num in zip(parts, nums, strict=True)]
    )
