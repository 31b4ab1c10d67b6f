"""Logged rows: sampled transitions as arrays, and which of them an environment confirms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Array
from replaylake.offline.environments.spaces import Environment
from replaylake.offline.evaluation.env_states import state_setter, transition_table

Mask = NDArray[np.bool_]

# Room for observations in float32 or with five digits; a wrong action moves them by far more.
TOLERANCE: Final = 1e-4


@dataclass(frozen=True)
class LoggedRows:
    """n sampled rows, with the logged actions and rewards of the rows around them (NaN: none)."""

    observations: Array
    actions: Array
    rewards: Array
    terminated: Mask
    next_observations: Array
    actions_before: Array
    actions_after: Array
    rewards_before: Array
    rewards_after: Array
    has_before: Mask
    has_after: Mask

    def __len__(self) -> int:
        return len(self.rewards)

    def where(self, rows: Mask) -> LoggedRows:
        return LoggedRows(**{name: array[rows] for name, array in vars(self).items()})


@dataclass(frozen=True)
class Agreement:
    """Which rows the environment confirms, bool [n] each."""

    states: Mask
    rewards: Mask
    ends: Mask

    @property
    def share(self) -> float:
        return float(self.states.mean()) if len(self.states) else 0.0


Replay = Callable[[LoggedRows], Agreement]


def collect_rows(episodes: Sequence[Episode]) -> LoggedRows | None:
    parts = [_rows_of(e) for e in episodes if isinstance(e.observations, np.ndarray)]
    known = [part for part in parts if part is not None]
    if not known:
        return None
    names = vars(known[0])
    return LoggedRows(**{n: np.concatenate([getattr(part, n) for part in known]) for n in names})


def _rows_of(episode: Episode) -> LoggedRows | None:
    observations, actions = np.asarray(episode.observations), np.asarray(episode.actions)
    num = len(episode) if episode.final_observation is not None else len(episode) - 1
    if num < 1 or observations.dtype.kind not in "fiu" or actions.dtype.kind not in "fiu":
        return None
    tail = [] if episode.final_observation is None else [np.asarray(episode.final_observation)]
    following = np.concatenate([observations[1:], *(part[None] for part in tail)])
    terminated = np.zeros(len(episode), dtype=np.bool_)
    terminated[-1] = episode.terminated
    has_before = np.arange(len(episode)) > 0
    rows = slice(num)
    return LoggedRows(
        observations=observations[rows],
        actions=actions[rows],
        rewards=episode.rewards[rows],
        terminated=terminated[rows],
        next_observations=following,
        actions_before=np.roll(actions, 1, axis=0)[rows],
        actions_after=np.roll(actions, -1, axis=0)[rows],
        rewards_before=np.roll(episode.rewards, 1)[rows],
        rewards_after=np.roll(episode.rewards, -1)[rows],
        has_before=has_before[rows],
        has_after=has_before[::-1][rows],
    )


def make_replay(env: Environment) -> Replay | None:
    table = transition_table(env)
    if table is not None:
        return lambda rows: _check_against_table(table, rows)
    setter = state_setter(env)
    if setter is None:
        return None

    def replay(rows: LoggedRows) -> Agreement:
        following, rewards, ends = step_all(env, setter, rows.observations, rows.actions)
        return Agreement(
            within_tolerance(following, rows.next_observations),
            within_tolerance(rewards[:, None], rows.rewards[:, None]),
            np.asarray(ends == rows.terminated),
        )

    return replay


def step_all(
    env: Environment, set_state: Any, observations: Array, actions: Array
) -> tuple[Array, Array, Array]:
    """Step once from each observation; NaN where the environment does not take it."""
    following = np.full(observations.shape, np.nan)
    rewards = np.full(len(observations), np.nan)
    ends = np.full(len(observations), np.nan)
    inner = env.unwrapped
    inner.reset(seed=0)
    for row, (observation, action) in enumerate(zip(observations, actions, strict=True)):
        try:
            set_state(env, observation)
            chosen = action.astype(env.action_space.dtype)
            if env.action_space.dtype is not None and chosen.dtype.kind in "iu":
                if not env.action_space.contains(chosen):
                    continue
                chosen = chosen if chosen.ndim else int(chosen)
            following[row], rewards[row], ends[row] = inner.step(chosen)[:3]
        except (AssertionError, ValueError, IndexError, TypeError, ArithmeticError):
            # What it says to a state or action that is none of its own: the row disagrees.
            continue
    return following, rewards, ends


def _check_against_table(table: Any, rows: LoggedRows) -> Agreement:
    agree = np.zeros((3, len(rows)), dtype=np.bool_)
    each = zip(rows.observations, rows.actions, rows.next_observations, rows.rewards, strict=True)
    for row, (state, action, following, reward) in enumerate(each):
        try:
            outcomes = table[int(state)][int(action)]
        except (KeyError, IndexError, TypeError):
            continue
        possible = [o for o in outcomes if o[0] > 0 and o[1] == int(following)]
        agree[0, row] = bool(possible)
        agree[1, row] = any(abs(o[2] - reward) <= TOLERANCE for o in possible)
        agree[2, row] = any(bool(o[3]) == bool(rows.terminated[row]) for o in possible)
    return Agreement(agree[0], agree[1], agree[2])


def within_tolerance(found: Array, expected: Array) -> Mask:
    with np.errstate(invalid="ignore"):
        near = np.abs(found - expected) <= TOLERANCE * (1 + np.abs(expected))
    return np.asarray(near.reshape(len(near), -1).all(axis=1))
