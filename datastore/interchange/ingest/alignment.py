"""Alignment: whether logged transitions are those of an environment; the answer, and its sample.

Whoever knows the environment gives `ingest` the check (offline/evaluation/alignment.py is one):
datastore knows no environments.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.episode_columns import EpisodeColumns
from replaylake.datastore.episodes.spaces import Values, take

# Runs of consecutive steps, as the usual mistakes show only beside the neighboring rows.
_WINDOW_STEPS: Final = 16
_NUM_WINDOWS: Final = 128
# One window for so many steps of an episode, so that a single long one is looked at all over.
_STEPS_PER_WINDOW: Final = 32


@dataclass(frozen=True)
class Alignment:
    """How many sampled rows the environment confirms, and what explains those that it does not.

    The counts are of `num_checked` rows: those whose next observation, reward and termination the
    environment gives too. `cause` names the usual mistake under which `num_explained` rows of
    `num_checked_explained` agree; None where all is well, or nothing explains it.
    """

    environment: str
    num_checked: int
    num_agree: int
    num_rewards_agree: int
    num_ends_agree: int
    cause: str | None = None
    advice: str | None = None
    num_explained: int = 0
    num_checked_explained: int = 0

    @property
    def is_aligned(self) -> bool:
        """Whether nothing was found to be wrong."""
        return self.cause is None and self.num_agree == self.num_checked

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "is_aligned": self.is_aligned}

    def lines(self) -> Iterator[str]:
        """Say it to a person."""
        yield (
            f"{self.environment} agrees with {self.num_agree:,} of {self.num_checked:,} sampled "
            f"next observations, {self.num_rewards_agree:,} rewards, {self.num_ends_agree:,} ends"
        )
        if self.cause is not None:
            yield (
                f"likely cause: {self.cause} ({self.num_explained:,} of "
                f"{self.num_checked_explained:,} agree then)"
            )
        if self.advice is not None:
            yield self.advice


# Returns why where nothing could be checked.
Align = Callable[[Sequence[Episode]], Alignment | str]


class SampledWindows:
    """A sample of runs of steps over a whole source, with a fixed seed; a few hundred kB."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)
        self._heap: list[tuple[float, int, Episode]] = []
        self._num_seen = 0

    def add(self, episodes: Sequence[Episode]) -> None:
        """Offer episodes; each run has the same chance to stay."""
        if isinstance(episodes, EpisodeColumns):
            lengths = episodes.lengths.tolist()
        else:
            lengths = [*map(len, episodes)]
        for number, length in enumerate(lengths):
            for _ in range(-(-length // _STEPS_PER_WINDOW)):
                key = float(self._rng.random())
                self._num_seen += 1
                if len(self._heap) >= _NUM_WINDOWS and key > -self._heap[0][0]:
                    continue
                episode = episodes[number]
                start = int(self._rng.integers(max(1, len(episode) - _WINDOW_STEPS + 1)))
                window = _window(episode, start, _WINDOW_STEPS)
                heapq.heappush(self._heap, (-key, self._num_seen, window))
                if len(self._heap) > _NUM_WINDOWS:
                    heapq.heappop(self._heap)

    def episodes(self) -> list[Episode]:
        """Return the runs; the last observation of each is its final observation, if known."""
        return [window for _, _, window in sorted(self._heap, key=lambda item: item[1])]


def _window(episode: Episode, start: int, num_steps: int) -> Episode:
    end = min(start + num_steps, len(episode))
    is_last = end == len(episode)
    rows = slice(start, end)
    return replace(
        episode,
        observations=_copy(take(episode.observations, rows)),
        actions=_copy(take(episode.actions, rows)),
        rewards=episode.rewards[rows].copy(),
        terminated=episode.terminated and is_last,
        truncated=episode.truncated and is_last,
        final_observation=episode.final_observation
        if is_last
        else _copy(take(episode.observations, end)),
        first_step=episode.first_step + start,
        behavior_log_probs=None,
        policies=None,
        policy_versions=None,
        action_masks=None,
        timestamps=None,
        env_steps=None,
        extras={},
    )


def _copy(values: Values) -> Any:
    """Copy, so that a window does not hold the block that it was read with."""
    if isinstance(values, Mapping):
        return {key: _copy(sub) for key, sub in values.items()}
    return np.array(values)
