"""Episodes: many of them checked at once. One step an episode is common, as in logged decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import numpy as np

from replaylake.datastore.episodes.episode import (
    MAX_STEP,
    PER_STEP,
    Episode,
    validate,
    with_valid_tokens,
)
from replaylake.datastore.episodes.episode_columns import EpisodeColumns
from replaylake.datastore.episodes.spaces import (
    Space,
    Values,
    as_batch,
    as_values,
    concatenate,
    take,
)
from replaylake.datastore.episodes.tokenizer import Tokenizer
from replaylake.datastore.episodes.tokens import has_tokens
from replaylake.datastore.errors import EpisodeInvalidError, SchemaMismatchError

# Mean steps above which a check of each costs little beside its steps, and a join would copy much.
_SHORT_STEPS: Final = 64


def validate_all(
    episodes: Sequence[Episode],
    observation_space: Space,
    action_space: Space,
    *,
    rewards_optional: bool = False,
    tokenizer: Tokenizer | None = None,
) -> Sequence[Episode]:
    """Return the episodes as `checked` returns each; EpisodeColumns stay such.

    Short ones are joined to one long pseudo-episode, checked and cut again: 60,000 episodes/s of
    one step where one by one gives 11,000 (1 core, 2026-11).

    Raises: EpisodeInvalidError with the first that does not fit.
    """
    if isinstance(episodes, EpisodeColumns):
        # Joined arrays do not tell which is at fault: one by one, below, it is named.
        with suppress(EpisodeInvalidError, SchemaMismatchError):
            return episodes.validate(
                observation_space,
                action_space,
                rewards_optional=rewards_optional,
                tokenizer=tokenizer,
            )
        episodes = episodes[:]
    num_steps = sum(map(len, episodes))
    if len(episodes) > 1 and num_steps <= _SHORT_STEPS * len(episodes):
        try:
            return _validate_together(
                episodes, observation_space, action_space, rewards_optional, tokenizer
            )
        except (
            EpisodeInvalidError,
            SchemaMismatchError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
        ):
            # Joined arrays do not tell which is at fault, or these cannot be joined.
            pass
    return [
        validate(
            episode,
            observation_space,
            action_space,
            rewards_optional=rewards_optional,
            tokenizer=tokenizer,
        )
        for episode in episodes
    ]


def validate_as_one(
    episodes: Sequence[Episode],
    observation_space: Space,
    action_space: Space,
    rewards_optional: bool,
    optional: Sequence[str] = PER_STEP,
) -> tuple[Episode, Values | None]:
    """Return the steps of all episodes, checked as those of one; further columns are left out.

    And the final observations of those that have one, [F, *obs]. optional: the fields that an
    episode may lack which are looked at, by default all. Raises: EpisodeInvalidError, ValueError,
    KeyError, TypeError or AttributeError where one does not fit or they cannot be joined, which
    does not tell which one is at fault.
    """
    if isinstance(episodes, EpisodeColumns):
        columns = episodes.validate(
            observation_space, action_space, rewards_optional=rewards_optional
        )
        return columns.steps, columns.final_observations
    lengths = [len(episode) for episode in episodes]
    firsts = np.asarray([episode.first_step for episode in episodes])
    if min(lengths) == 0 or firsts.min() < 0 or (firsts + lengths).max() > MAX_STEP + 1:
        raise EpisodeInvalidError("steps out of range")
    whole = validate(
        Episode(
            episode_id="",
            observations=_concatenate_parts([e.observations for e in episodes], lengths),
            actions=_concatenate_parts([e.actions for e in episodes], lengths),
            rewards=_concatenate_parts([e.rewards for e in episodes], lengths),
            **{name: _concatenate_optional(episodes, name, lengths) for name in optional},
        ),
        observation_space,
        action_space,
        rewards_optional=rewards_optional,
    )
    parts = [as_batch(e.final_observation) for e in episodes if e.final_observation is not None]
    if not parts:
        return whole, None
    finals = _concatenate_parts(parts, [1] * len(parts))
    return whole, as_values(observation_space, finals, "final_observation", len(parts))


def _validate_together(
    episodes: Sequence[Episode],
    observation_space: Space,
    action_space: Space,
    rewards_optional: bool,
    tokenizer: Tokenizer | None,
) -> list[Episode]:
    whole, finals = validate_as_one(episodes, observation_space, action_space, rewards_optional)
    names = [name for name in PER_STEP if getattr(whole, name) is not None]
    ready = []
    start = num_finals = 0
    for episode in episodes:
        num = len(episode)
        rows = slice(start, start + num)
        start += num
        if episode.extras and any(len(array) != num for array in episode.extras.values()):
            raise EpisodeInvalidError("a further column of another length")
        final = None
        if episode.final_observation is not None and finals is not None:
            final = take(finals, num_finals)
            num_finals += 1
        one = replace(
            episode,
            observations=take(whole.observations, rows),
            actions=take(whole.actions, rows),
            rewards=whole.rewards[rows],
            final_observation=final,
            **{name: getattr(whole, name)[rows] for name in names},
        )
        ready.append(with_valid_tokens(one, tokenizer) if has_tokens(one.extras) else one)
    return ready


def _concatenate_optional(episodes: Sequence[Episode], name: str, lengths: Sequence[int]) -> Any:
    parts = [getattr(episode, name) for episode in episodes]
    return None if all(part is None for part in parts) else _concatenate_parts(parts, lengths)


def _concatenate_parts(parts: list[Any], lengths: Sequence[int]) -> Any:
    """Join arrays of one dtype, each with as many rows as its episode has steps.

    Raises: EpisodeInvalidError, ValueError, KeyError or TypeError if they are not that: a join of
    two dtypes could round what each holds exactly.
    """
    first = parts[0]
    if isinstance(first, Mapping):
        if any(part.keys() != first.keys() for part in parts):
            raise EpisodeInvalidError("unequal keys")
        return {key: _concatenate_parts([part[key] for part in parts], lengths) for key in first}
    # A mapping or None becomes an array without a dimension, which has no length.
    arrays = [np.asarray(part) for part in parts]
    if len({array.dtype for array in arrays}) > 1 or [*map(len, arrays)] != [*lengths]:
        raise EpisodeInvalidError("unequal dtypes or lengths")
    return concatenate([*arrays])
