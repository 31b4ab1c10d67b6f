"""LoggedEpisodes: what off-policy evaluation knows of a log and of the policy under question."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import EpisodeInvalidError

# Rounding: published tables of probabilities have five digits or so, and some dozens of columns.
_PROBABILITY_SLACK: Final = 1e-3


@dataclass(frozen=True, eq=False)
class LoggedEpisodes:
    """E logged episodes of M steps in all, and what the target policy thinks of each step.

    Rows offsets[e] .. offsets[e + 1] are episode e's steps, in order. A one-step log (a contextual
    bandit's) has one row an episode. Checked when made; not copied.

    offsets                 int64 [E + 1], from 0 to M, rising: no episode is empty
    rewards                 float64 [M], in the environment's units
    discount                gamma, 0 < gamma <= 1
    behavior_probs          float64 [M], probability (Box: density) of the logged action under the
                            behavior policy; NaN where unknown; None: unknown everywhere
    target_probs            float64 [M], the same under the target policy; None: it has no density
    q_logged                float64 [M], a model's value of the logged action, the target policy
                            acting from then on
    v_target                float64 [M], that model's value of the state: the mean of its q over the
                            target policy's actions. Fitted on other episodes (held out or
                            cross-fitted), else estimates that use it believe it too much
    actions                 int64 [M], logged actions; Discrete only
    behavior_distribution   float64 [M, A]; Discrete only
    target_distribution     float64 or float32 [M, A]; Discrete only
    reward_range            bounds that a reward cannot pass; None: unknown
    clusters                int64 [E], numbers from 0 on, the same for episodes that are not
                            independent: the agents of one. Intervals draw whole clusters. None:
                            all are independent
    behavior_fitted         behavior_probs are a fit, not what was logged: estimates say so
    no_density              why target_probs is None: "the head 'sampled' has no density"
    no_model                why q_logged and v_target are None

    Raises: EpisodeInvalidError.
    """

    offsets: Array
    rewards: Array
    discount: float = 1.0
    behavior_probs: Array | None = None
    target_probs: Array | None = None
    q_logged: Array | None = None
    v_target: Array | None = None
    actions: Array | None = None
    behavior_distribution: Array | None = None
    target_distribution: Array | None = None
    reward_range: tuple[float, float] | None = None
    clusters: Array | None = None
    behavior_fitted: bool = False
    no_density: str = ""
    no_model: str = ""

    def __post_init__(self) -> None:
        _check_offsets(self.offsets, len(self.rewards))
        if not 0 < self.discount <= 1:
            raise _invalid_column_error("discount", f"{self.discount}", "a number in (0, 1]")
        _check_column("rewards", self.rewards, len(self.rewards))
        for name in ("q_logged", "v_target"):
            _check_column(name, getattr(self, name), len(self.rewards))
        for name in ("behavior_probs", "target_probs"):
            _check_probs(name, getattr(self, name), len(self.rewards))
        for name in ("behavior_distribution", "target_distribution"):
            _check_distribution(name, getattr(self, name), len(self.rewards))
        _check_actions(self)
        _check_reward_range(self)

    @property
    def num_episodes(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_steps(self) -> int:
        return len(self.rewards)

    @cached_property
    def lengths(self) -> Array:
        """Steps of each episode, int64 [E]."""
        lengths: Array = np.diff(self.offsets)
        return lengths

    @cached_property
    def is_one_step(self) -> bool:
        """Every episode is one decision, as a contextual bandit's log has it."""
        return self.num_steps == self.num_episodes

    @cached_property
    def steps(self) -> Array:
        """Each row's step within its episode, int64 [M]."""
        firsts = np.repeat(self.offsets[:-1], self.lengths)
        steps: Array = np.arange(self.num_steps) - firsts
        return steps

    @cached_property
    def discounts(self) -> Array:
        """gamma^t of each row, float64 [M]."""
        powers: Array = np.power(self.discount, self.steps, dtype=np.float64)
        return powers

    @cached_property
    def returns(self) -> Array:
        """Discounted return of each episode, float64 [E]."""
        return self.sum_by_episode(self.discounts * self.rewards)

    def value_range(self) -> tuple[float, float]:
        """Return between which values that of any policy lies, if no reward passes reward_range.

        Without reward_range it is what was logged. A one-step episode earns one reward; a longer
        one earns at least its first if none is below 0, and at most its first if none is above 0,
        and is else unbounded, as it may take more steps than those that were logged. Unbounded
        where all rewards are equal: such a log says nothing about others.
        """
        low, high = self.reward_range or (float(self.rewards.min()), float(self.rewards.max()))
        if not self.is_one_step:
            low, high = low if low >= 0 else -math.inf, high if high <= 0 else math.inf
        return (low, high) if low < high else (-math.inf, math.inf)

    def sum_by_episode(self, values: Array) -> Array:
        """Sum values [M] within each episode: float64 [E]."""
        if self.is_one_step:
            return np.asarray(values, np.float64)
        sums: Array = np.add.reduceat(values, self.offsets[:-1])
        return sums


def one_step_episodes(rewards: Array, **columns: object) -> LoggedEpisodes:
    """Return a one-step log of these rewards [M]; the other columns as LoggedEpisodes has them."""
    offsets = np.arange(len(rewards) + 1, dtype=np.int64)
    return LoggedEpisodes(offsets, np.asarray(rewards, np.float64), **columns)  # type: ignore[arg-type]


def _invalid_column_error(name: str, actual: str, expected: str) -> EpisodeInvalidError:
    return EpisodeInvalidError(f"logged episodes, {name}: found {actual}, expected {expected}.")


def _check_offsets(offsets: Array, num_steps: int) -> None:
    if offsets.ndim != 1 or len(offsets) < 2:
        raise _invalid_column_error(
            "offsets", f"shape {offsets.shape}", "[E + 1] with at least one episode"
        )
    if offsets[0] != 0 or offsets[-1] != num_steps:
        raise _invalid_column_error(
            "offsets", f"{offsets[0]} .. {offsets[-1]}", f"0 .. {num_steps} (rewards)"
        )
    empty = np.flatnonzero(np.diff(offsets) <= 0)
    if len(empty):
        raise _invalid_column_error(
            "offsets", f"episode {empty[0]} without a step", "one or more in each"
        )


def _check_column(name: str, values: Array | None, num_steps: int) -> None:
    if values is None:
        return
    if values.shape != (num_steps,):
        raise _invalid_column_error(name, f"shape {values.shape}", f"({num_steps},), one per step")
    wrong = np.flatnonzero(~np.isfinite(values))
    if len(wrong):
        raise _invalid_column_error(name, f"{values[wrong[0]]} in row {wrong[0]}", "finite numbers")


def _check_probs(name: str, probs: Array | None, num_steps: int) -> None:
    if probs is None:
        return
    if probs.shape != (num_steps,):
        raise _invalid_column_error(name, f"shape {probs.shape}", f"({num_steps},), one per step")
    may_be_unknown = name == "behavior_probs"
    wrong = np.flatnonzero((probs < 0) | np.isinf(probs) | (np.isnan(probs) & (not may_be_unknown)))
    if len(wrong):
        raise _invalid_column_error(
            name, f"{probs[wrong[0]]} in row {wrong[0]}", "finite, 0 or more"
        )


def _check_distribution(name: str, probs: Array | None, num_steps: int) -> None:
    if probs is None:
        return
    if probs.ndim != 2 or len(probs) != num_steps:
        raise _invalid_column_error(
            name, f"shape {probs.shape}", f"({num_steps}, A), a row per step"
        )
    sums = probs.sum(axis=1)
    wrong = np.flatnonzero(~(np.abs(sums - 1) <= _PROBABILITY_SLACK) | (probs < 0).any(axis=1))
    if len(wrong):
        actual = f"row {wrong[0]} with sum {sums[wrong[0]]:.6g}, least {probs[wrong[0]].min():.6g}"
        raise _invalid_column_error(name, actual, "probabilities that sum to 1")


def _check_actions(episodes: LoggedEpisodes) -> None:
    if episodes.actions is None:
        return
    if episodes.actions.shape != (episodes.num_steps,):
        raise _invalid_column_error(
            "actions", f"shape {episodes.actions.shape}", f"({episodes.num_steps},)"
        )
    for name in ("behavior_distribution", "target_distribution"):
        probs = getattr(episodes, name)
        if probs is None:
            continue
        lowest, greatest = episodes.actions.min(), episodes.actions.max()
        if lowest < 0 or greatest >= probs.shape[1]:
            expected = f"0 .. {probs.shape[1] - 1} as {name} has columns"
            raise _invalid_column_error("actions", f"{lowest} .. {greatest}", expected)
        _check_agreement(name, probs, episodes)


def _check_agreement(name: str, distribution: Array, episodes: LoggedEpisodes) -> None:
    """Check that a distribution and the logged action's probability are of the same policy."""
    probs_name = name.replace("distribution", "probs")
    probs = getattr(episodes, probs_name)
    if probs is None or episodes.actions is None:
        return
    theirs = distribution[np.arange(episodes.num_steps), episodes.actions]
    wrong = np.flatnonzero(np.abs(theirs - probs) > _PROBABILITY_SLACK)
    if len(wrong):
        row = wrong[0]
        expected = f"{theirs[row]:.6g} as {name} has for action {episodes.actions[row]}"
        raise _invalid_column_error(probs_name, f"{probs[row]:.6g} in row {row}", expected)


def _check_reward_range(episodes: LoggedEpisodes) -> None:
    if episodes.reward_range is None:
        return
    low, high = episodes.reward_range
    lowest, greatest = float(episodes.rewards.min()), float(episodes.rewards.max())
    if not (low <= lowest and greatest <= high):
        expected = f"rewards in the range {low} .. {high} that was given"
        raise _invalid_column_error("rewards", f"{lowest} .. {greatest}", expected)
