"""Alignment self-test: sampled transitions, replayed through the environment they claim to be of.

The usual mistakes in logs are silent: actions one row off, in other units, or counted from one,
normalized observations, rewards of the step before. Each of them is tried where rows disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.interchange.ingest.alignment import Alignment
from replaylake.offline.environments.games import Game
from replaylake.offline.environments.ids import make_any
from replaylake.offline.environments.spaces import Environment
from replaylake.offline.evaluation.env_states import state_setter, transition_table

_Mask = NDArray[np.bool_]

# Room for observations in float32 or with five digits; a wrong action moves them by far more.
_TOLERANCE: Final = 1e-4
# A cause is named if most rows agree under it that did not before.
_CAUSE_SHARE: Final = 0.9
_PASS_SHARE: Final = 0.99


@dataclass(frozen=True)
class _LoggedRows:
    """n sampled rows, with the logged actions and rewards of the rows around them (NaN: none)."""

    observations: Array
    actions: Array
    rewards: Array
    terminated: _Mask
    next_observations: Array
    actions_before: Array
    actions_after: Array
    rewards_before: Array
    rewards_after: Array
    has_before: _Mask
    has_after: _Mask

    def __len__(self) -> int:
        return len(self.rewards)

    def where(self, rows: _Mask) -> _LoggedRows:
        return _LoggedRows(**{name: array[rows] for name, array in vars(self).items()})


@dataclass(frozen=True)
class _Agreement:
    """Which rows the environment confirms, bool [n] each.

    given_rewards: what it gives for each row, float64 [n]; NaN where it gives none or several.
    """

    states: _Mask
    rewards: _Mask
    ends: _Mask
    given_rewards: Array

    @property
    def share(self) -> float:
        return float(self.states.mean()) if len(self.states) else 0.0


_Replay = Callable[[_LoggedRows], _Agreement]


@dataclass(frozen=True)
class _Cause:
    """A usual mistake: its name, what to do, and the rows as they are once it is undone."""

    text: str
    advice: str
    rows: _LoggedRows


def check_alignment(
    env_id: str, episodes: Sequence[Episode], *, env_args: Mapping[str, Any] | None = None
) -> Alignment | str:
    """Replay every step of `episodes` that has a next observation through the environment.

    Returns a text with the reason if nothing can be checked: the environment has several agents,
    its state cannot be set from an observation, or no row is suitable. An environment supports the
    check by a method `set_state_from_observation` (see env_states). A row whose action it refuses,
    or on which it raises, counts as disagreeing. Cost: one environment step per row, and eight more
    per row if rows disagree.

    env_args: what the environment is made with.

    Raises: NotFoundError, ExtraMissingError, ConfigInvalidError as `make`.
    """
    env = make_any(env_id, env_args)
    try:
        if isinstance(env, Game):
            return f"{env_id} has several agents"
        replay = _make_replay(env)
        if replay is None:
            return f"the state of {env_id} cannot be set from an observation"
        rows = _collect_rows(episodes)
        if rows is None:
            return "no step has a numeric observation, a numeric action and a next observation"
        return _check_rows(env_id, env, rows, replay)
    finally:
        env.close()


def _check_rows(env_id: str, env: Environment, rows: _LoggedRows, replay: _Replay) -> Alignment:
    outcome = replay(rows)
    answer = Alignment(
        environment=env_id,
        num_checked=len(rows),
        num_agree=int(outcome.states.sum()),
        num_rewards_agree=int(outcome.rewards.sum()),
        num_ends_agree=int(outcome.ends.sum()),
    )
    if outcome.share < _PASS_SHARE:
        return _find_cause(answer, env, rows, replay)
    if outcome.rewards.mean() < _PASS_SHARE:
        return _find_reward_cause(answer, rows, replay, outcome.given_rewards)
    return replace(answer, advice=_advise_on_ends(rows.terminated, outcome.ends))


def _advise_on_ends(terminated: _Mask, agree: _Mask) -> str | None:
    """Say what to do where the log ends episodes elsewhere than the environment."""
    num_early, num_late = int((terminated & ~agree).sum()), int((~terminated & ~agree).sum())
    parts = []
    if num_early:
        parts.append(
            f"{num_early:,} of {int(terminated.sum()):,} terminated rows do not end in the "
            "environment: if a time limit ended them, ingest into a new dataset with `time_limit`"
        )
    if num_late:
        parts.append(
            f"{num_late:,} rows end in the environment and are not terminated in the log: map the "
            "log's column of ends to terminated"
        )
    return "; ".join(parts) or None


def _find_cause(
    answer: Alignment, env: Environment, rows: _LoggedRows, replay: _Replay
) -> Alignment:
    before = answer.num_agree / answer.num_checked
    best: tuple[float, _Cause, int] | None = None
    for cause in _causes(env, rows):
        if not len(cause.rows):
            continue
        agreement = replay(cause.rows)
        if best is None or agreement.share > best[0]:
            best = agreement.share, cause, int(agreement.states.sum())
    if best is not None and best[0] >= max(_CAUSE_SHARE, before + 0.05):
        _, cause, num = best
        return replace(
            answer,
            cause=cause.text,
            advice=cause.advice,
            num_explained=num,
            num_checked_explained=len(cause.rows),
        )
    if _looks_normalized(rows.observations):
        return replace(
            answer,
            cause="observations look normalized: in each dim their mean is near 0 and their "
            "standard deviation near 1",
            advice="undo the normalization with the statistics it was made with",
        )
    return replace(
        answer, advice="no usual cause explains it: check that the log is of this environment"
    )


def _causes(env: Environment, rows: _LoggedRows) -> Iterator[_Cause]:
    later, earlier = rows.where(rows.has_after), rows.where(rows.has_before)
    yield _Cause(
        "actions are shifted by one step: a row has the action of the row before it",
        "move the action column up by one row within each episode",
        replace(later, actions=later.actions_after),
    )
    yield _Cause(
        "actions are shifted by one step: a row has the action of the row after it",
        "move the action column down by one row within each episode",
        replace(earlier, actions=earlier.actions_before),
    )
    if rows.actions.dtype.kind == "f":
        yield from _unit_causes(env, rows)
    else:
        yield from _count_causes(env, rows)
    low, high = (np.asarray(getattr(env.observation_space, n, np.inf)) for n in ("low", "high"))
    if np.isfinite([low, high]).all() and np.abs(rows.observations).max() <= 1 + _TOLERANCE:
        scaled = low + (rows.observations + 1) / 2 * (high - low)
        following = low + (rows.next_observations + 1) / 2 * (high - low)
        yield _Cause(
            "observations are normalized to [-1, 1] by the space's bounds",
            "undo the normalization before ingesting",
            replace(rows, observations=scaled, next_observations=following),
        )


def _unit_causes(env: Environment, rows: _LoggedRows) -> Iterator[_Cause]:
    low, high = (np.asarray(getattr(env.action_space, name)) for name in ("low", "high"))
    scale = _fit_action_scale(env, rows)
    tried = [scale, *np.unique(high[np.isfinite(high) & (high != 0)]).tolist(), -1.0]
    for factor in dict.fromkeys(round(f, 3) for f in tried if f is not None and round(f, 3)):
        if factor == 1:
            continue
        yield _Cause(
            f"actions are in other units: they are {1 / factor:.3g} times the environment's",
            f"ingest into a new dataset with `action_scale` {factor:g}",
            replace(rows, actions=rows.actions * factor),
        )
    if np.isfinite([low, high]).all() and (low != -high).any():
        yield _Cause(
            "actions are normalized to [-1, 1]",
            f"ingest into a new dataset with `action_range` {low.min():g} to {high.max():g}",
            replace(rows, actions=low + (rows.actions + 1) / 2 * (high - low)),
        )


def _count_causes(env: Environment, rows: _LoggedRows) -> Iterator[_Cause]:
    start = int(getattr(env.action_space, "start", 0))
    num = int(getattr(env.action_space, "n", 0))
    if rows.actions.ndim == 1 and num:
        yield _Cause(
            "actions are counted from one more than the environment counts from",
            "subtract 1 from the action column",
            replace(rows, actions=rows.actions - 1),
        )
        yield _Cause(
            "actions are numbered in the opposite order",
            "number the actions as the environment does",
            replace(rows, actions=2 * start + num - 1 - rows.actions),
        )


def _fit_action_scale(env: Environment, rows: _LoggedRows) -> float | None:
    """Return the factor on actions under which the dynamics, taken as linear in them, fit best."""
    setter = state_setter(env)
    if setter is None:
        return None
    # Small actions: an environment clips those beyond its bounds, which would look like no effect.
    high = np.asarray(getattr(env.action_space, "high", np.inf), np.float64)
    small = min(1.0, float(0.5 * high.min() / max(1e-9, float(np.abs(rows.actions).max()))))
    still = _step_all(env, setter, rows.observations, np.zeros_like(rows.actions))[0]
    moved = _step_all(env, setter, rows.observations, rows.actions * small)[0]
    effect, needed = (moved - still) / small, rows.next_observations - still
    ends = (~np.isnan(effect) & ~np.isnan(needed)).reshape(len(rows), -1).all(axis=1)
    effect, needed = (a.reshape(len(rows), -1)[ends] for a in (effect, needed))
    power = (effect**2).sum(axis=1)
    strong = power > np.median(power) if len(power) else power > 0
    if not strong.any():
        return None
    return float(np.median((effect * needed).sum(axis=1)[strong] / power[strong]))


def _find_reward_cause(
    answer: Alignment, rows: _LoggedRows, replay: _Replay, given: Array
) -> Alignment:
    causes = [
        (
            "rewards are shifted by one step: a row has the reward of the row before it",
            "move the reward column up by one row within each episode",
            replace(rows, rewards=rows.rewards_after).where(rows.has_after),
        ),
        (
            "rewards are shifted by one step: a row has the reward of the row after it",
            "move the reward column down by one row within each episode",
            replace(rows, rewards=rows.rewards_before).where(rows.has_before),
        ),
    ]
    if (factor := _fit_reward_scale(rows.rewards, given)) is not None:
        scaled = (
            f"rewards are in other units: they are {1 / factor:.3g} times the environment's",
            f"ingest into a new dataset with `reward_scale` {factor:g}",
            replace(rows, rewards=rows.rewards * factor),
        )
        causes.append(scaled)
    items = [(replay(moved).rewards, text, advice) for text, advice, moved in causes if len(moved)]
    best = max(items, key=lambda item: float(item[0].mean()), default=None)
    if best is None or best[0].mean() < _CAUSE_SHARE:
        return replace(
            answer, advice="next observations agree and rewards do not: were they scaled or shaped?"
        )
    return replace(
        answer,
        cause=best[1],
        advice=best[2],
        num_explained=int(best[0].sum()),
        num_checked_explained=len(best[0]),
    )


def _fit_reward_scale(logged: Array, given: Array) -> float | None:
    """Return the factor on logged rewards that makes most of them those of the environment."""
    there = np.isfinite(given) & np.isfinite(logged) & (logged != 0) & (given != 0)
    if not there.any():
        return None
    factor = float(f"{np.median(given[there] / logged[there]):.4g}")
    return factor if factor not in (0.0, 1.0) and np.isfinite(factor) else None


def _looks_normalized(observations: Array) -> bool:
    flat = observations.reshape(len(observations), -1)
    if len(flat) < 200 or observations.dtype.kind != "f":
        return False
    means, deviations = flat.mean(axis=0), flat.std(axis=0)
    return bool((np.abs(means) < 0.25).all() and (np.abs(deviations - 1) < 0.25).all())


def _collect_rows(episodes: Sequence[Episode]) -> _LoggedRows | None:
    parts = [_rows_of(e) for e in episodes if isinstance(e.observations, np.ndarray)]
    known = [part for part in parts if part is not None]
    if not known:
        return None
    names = vars(known[0])
    return _LoggedRows(**{n: np.concatenate([getattr(part, n) for part in known]) for n in names})


def _rows_of(episode: Episode) -> _LoggedRows | None:
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
    return _LoggedRows(
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


def _make_replay(env: Environment) -> _Replay | None:
    table = transition_table(env)
    if table is not None:
        return lambda rows: _check_against_table(table, rows)
    setter = state_setter(env)
    if setter is None:
        return None

    def replay(rows: _LoggedRows) -> _Agreement:
        following, rewards, ends = _step_all(env, setter, rows.observations, rows.actions)
        return _Agreement(
            _within_tolerance(following, rows.next_observations),
            _within_tolerance(rewards[:, None], rows.rewards[:, None]),
            np.asarray(ends == rows.terminated),
            rewards,
        )

    return replay


def _step_all(
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
            value = action.astype(env.action_space.dtype)
            if env.action_space.dtype is not None and value.dtype.kind in "iu":
                if not env.action_space.contains(value):
                    continue
                value = value if value.ndim else int(value)
            following[row], rewards[row], ends[row] = inner.step(value)[:3]
        except (AssertionError, ValueError, IndexError, TypeError, ArithmeticError):
            # What it says to a state or action that is none of its own: the row disagrees.
            continue
    return following, rewards, ends


def _check_against_table(table: Any, rows: _LoggedRows) -> _Agreement:
    agree = np.zeros((3, len(rows)), dtype=np.bool_)
    given = np.full(len(rows), np.nan)
    each = zip(rows.observations, rows.actions, rows.next_observations, rows.rewards, strict=True)
    for row, (state, action, following, reward) in enumerate(each):
        try:
            outcomes = table[int(state)][int(action)]
        except (KeyError, IndexError, TypeError):
            continue
        possible = [o for o in outcomes if o[0] > 0 and o[1] == int(following)]
        agree[0, row] = bool(possible)
        if len({o[2] for o in possible}) == 1:
            given[row] = possible[0][2]
        agree[1, row] = any(abs(o[2] - reward) <= _TOLERANCE for o in possible)
        agree[2, row] = any(bool(o[3]) == bool(rows.terminated[row]) for o in possible)
    return _Agreement(agree[0], agree[1], agree[2], given)


def _within_tolerance(actual: Array, expected: Array) -> _Mask:
    with np.errstate(invalid="ignore"):
        near = np.abs(actual - expected) <= _TOLERANCE * (1 + np.abs(expected))
    return np.asarray(near.reshape(len(near), -1).all(axis=1))
