"""Alignment self-test: sampled transitions, replayed through the environment they claim to be of.

The usual mistakes in logs are silent: actions one row off, in other units, or counted from one,
normalised observations, rewards of the step before. Each of them is tried where rows disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.interchange.ingest.alignment import Alignment
from replaylake.offline.environments.games import Game
from replaylake.offline.environments.ids import make_any
from replaylake.offline.environments.spaces import Environment
from replaylake.offline.evaluation.env_states import state_setter
from replaylake.offline.evaluation.logged_rows import (
    TOLERANCE,
    LoggedRows,
    Replay,
    collect_rows,
    make_replay,
    step_all,
)

# A cause is named if most rows agree under it that did not before.
_CAUSE_SHARE: Final = 0.9
_PASS_SHARE: Final = 0.99


@dataclass(frozen=True)
class _Cause:
    """A usual mistake: its name, what to do, and the rows as they are once it is undone."""

    text: str
    advice: str
    rows: LoggedRows


def check_alignment(
    env_id: str, episodes: Sequence[Episode], *, env_args: Mapping[str, Any] | None = None
) -> Alignment | None:
    """Replay every step of `episodes` that has a next observation through the environment.

    Returns None where the environment's state cannot be set from an observation, it is one of
    several agents, or no row can be checked. An environment joins by `set_state_from_observation`
    (see env_states). Actions that it does not take, and what it raises on them, count as rows that
    disagree. Cost: a step of the environment a row, and eight more where rows disagree.

    env_args: what the environment is made with.

    Raises: NotFoundError, ExtraMissingError, ConfigInvalidError as `make`.
    """
    env = make_any(env_id, env_args)
    try:
        if isinstance(env, Game):
            return None
        replay = make_replay(env)
        rows = collect_rows(episodes)
        if replay is None or rows is None:
            return None
        return _check_rows(env_id, env, rows, replay)
    finally:
        env.close()


def _check_rows(env_id: str, env: Environment, rows: LoggedRows, replay: Replay) -> Alignment:
    found = replay(rows)
    answer = Alignment(
        environment=env_id,
        num_checked=len(rows),
        num_agree=int(found.states.sum()),
        num_rewards_agree=int(found.rewards.sum()),
        num_ends_agree=int(found.ends.sum()),
    )
    if found.share < _PASS_SHARE:
        return _find_cause(answer, env, rows, replay)
    if found.rewards.mean() < _PASS_SHARE:
        return _find_reward_cause(answer, rows, replay)
    return answer


def _find_cause(answer: Alignment, env: Environment, rows: LoggedRows, replay: Replay) -> Alignment:
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
            cause="observations look normalised: in each dim their mean is near 0 and their "
            "standard deviation near 1",
            advice="undo the normalisation with the statistics it was made with",
        )
    return replace(
        answer, advice="no usual cause explains it: check that the log is of this environment"
    )


def _causes(env: Environment, rows: LoggedRows) -> Iterator[_Cause]:
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
    if np.isfinite([low, high]).all() and np.abs(rows.observations).max() <= 1 + TOLERANCE:
        scaled = low + (rows.observations + 1) / 2 * (high - low)
        following = low + (rows.next_observations + 1) / 2 * (high - low)
        yield _Cause(
            "observations are normalised to [-1, 1] by the space's bounds",
            "undo the normalisation before ingesting",
            replace(rows, observations=scaled, next_observations=following),
        )


def _unit_causes(env: Environment, rows: LoggedRows) -> Iterator[_Cause]:
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
            "actions are normalised to [-1, 1]",
            f"ingest into a new dataset with `action_range` {low.min():g} to {high.max():g}",
            replace(rows, actions=low + (rows.actions + 1) / 2 * (high - low)),
        )


def _count_causes(env: Environment, rows: LoggedRows) -> Iterator[_Cause]:
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


def _fit_action_scale(env: Environment, rows: LoggedRows) -> float | None:
    """Return the factor on actions under which the dynamics, taken as linear in them, fit best."""
    setter = state_setter(env)
    if setter is None:
        return None
    # Small actions: an environment clips those beyond its bounds, which would look like no effect.
    high = np.asarray(getattr(env.action_space, "high", np.inf), np.float64)
    small = min(1.0, float(0.5 * high.min() / max(1e-9, float(np.abs(rows.actions).max()))))
    still = step_all(env, setter, rows.observations, np.zeros_like(rows.actions))[0]
    moved = step_all(env, setter, rows.observations, rows.actions * small)[0]
    effect, needed = (moved - still) / small, rows.next_observations - still
    ends = (~np.isnan(effect) & ~np.isnan(needed)).reshape(len(rows), -1).all(axis=1)
    effect, needed = (a.reshape(len(rows), -1)[ends] for a in (effect, needed))
    power = (effect**2).sum(axis=1)
    strong = power > np.median(power) if len(power) else power > 0
    if not strong.any():
        return None
    return float(np.median((effect * needed).sum(axis=1)[strong] / power[strong]))


def _find_reward_cause(answer: Alignment, rows: LoggedRows, replay: Replay) -> Alignment:
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
    found = [(replay(moved).rewards, text, advice) for text, advice, moved in causes if len(moved)]
    best = max(found, key=lambda item: float(item[0].mean()), default=None)
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


def _looks_normalized(observations: Array) -> bool:
    flat = observations.reshape(len(observations), -1)
    if len(flat) < 200 or observations.dtype.kind != "f":
        return False
    means, deviations = flat.mean(axis=0), flat.std(axis=0)
    return bool((np.abs(means) < 0.25).all() and (np.abs(deviations - 1) < 0.25).all())
