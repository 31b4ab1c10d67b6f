"""Track: what one environment went through, episode after episode, until it is taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.episode_columns import EpisodeColumns
from replaylake.datastore.episodes.spaces import Array, as_batch, concatenate, take
from replaylake.datastore.names import new_ulids

# Further columns of each step: which worker collected it, what its episode's reset was given, and
# what the policy remembered before it (zeros if it remembers nothing).
WORKER: Final = "worker"
SEED: Final = "seed"
POLICY_STATE: Final = "policy_state"


class EpisodeEnd(NamedTuple):
    """An episode that ended: its number, what its reset was given, its undiscounted return."""

    number: int
    seed: int
    episode_return: float
    num_steps: int
    agent_id: str = ""


@dataclass
class _EpisodePiece:
    """The last steps of an episode, or all of them: those that were not taken yet."""

    episode: RolloutEpisode
    num_steps: int
    final_observation: Any
    terminated: bool = False
    truncated: bool = False


@dataclass
class RolloutEpisode:
    """An episode that goes on.

    num_steps: until now; num_taken of them were taken, under `episode_id`. episode_return: the sum
    of rewards. began: Unix time (s).
    """

    number: int
    seed: int
    began: float
    num_steps: int = 0
    num_taken: int = 0
    episode_id: str = ""
    episode_return: float = 0.0


@dataclass
class StepBuffer:
    """Steps of one environment, all in order: those of `ended` and then those of `open`.

    parts: columns by name, as StepBlock.sealed returns them. open is None once the environment is
    closed.
    """

    open: RolloutEpisode | None
    parts: list[dict[str, Any]] = field(default_factory=list)
    ended: list[_EpisodePiece] = field(default_factory=list)

    def end(self, final_observation: Any, *, terminated: bool, truncated: bool) -> EpisodeEnd:
        """End the open episode; final_observation is kept as it is."""
        episode, self.open = self.open, None
        assert episode is not None  # steps are of an episode
        num = episode.num_steps - episode.num_taken
        self.ended.append(_EpisodePiece(episode, num, final_observation, terminated, truncated))
        return EpisodeEnd(episode.number, episode.seed, episode.episode_return, episode.num_steps)


def take_steps(
    tracks: Sequence[tuple[StepBuffer, Any]],
    actors: Sequence[tuple[str, int]],
    *,
    producer: str,
    worker: int,
    with_open: bool,
) -> Sequence[Episode]:
    """Take the episodes that ended, by track; with_open: and what there is of open ones.

    Args:
        tracks: each with what its open episode observed last.
        actors: (policy, version) by the numbers in the column `actors`.
        producer: what new ids of episodes begin with.
        worker: for the column of that name.
        with_open: steps of open episodes are taken as pieces; else they wait.
    """
    pieces: list[_EpisodePiece] = []
    parts: list[dict[str, Any]] = []
    for track, last_seen in tracks:
        own, track.ended = track.ended, []
        episode = track.open
        if with_open and episode is not None and episode.num_steps > episode.num_taken:
            own.append(_EpisodePiece(episode, episode.num_steps - episode.num_taken, last_seen))
        parts += _take_first_steps(track, sum(piece.num_steps for piece in own))
        pieces += own
    return _episodes(pieces, _join_parts(parts), actors, producer, worker) if pieces else ()


def _take_first_steps(track: StepBuffer, num_steps: int) -> list[dict[str, Any]]:
    """Take the first steps of a track; what is left is copied, once.

    As it came it is a view of what all environments did, which would stay in memory for it.
    """
    columns: list[dict[str, Any]] = []
    parts, track.parts = track.parts, []
    for part in parts:
        num = len(part["rewards"])
        now = min(max(num_steps, 0), num)
        num_steps -= now
        if now:
            columns.append(take(part, slice(now)))
        if now < num:
            rest = take(part, slice(now, num)) if now else part
            track.parts.append(rest if rest["rewards"].base is None else _copy_values(rest))
    return columns


def _join_parts(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Join parts; a state that some lack is zeros there."""
    sizes = {part["states"].shape[1] for part in parts if "states" in part}
    if sizes and any("states" not in part for part in parts):
        size = max(sizes)
        parts = [
            {"states": np.zeros((len(part["rewards"]), size), np.float32), **part} for part in parts
        ]
    joined: Any = parts[0] if len(parts) == 1 else concatenate([*parts])
    return dict(joined)


def _episodes(
    pieces: Sequence[_EpisodePiece],
    columns: dict[str, Any],
    actors: Sequence[tuple[str, int]],
    producer: str,
    worker: int,
) -> EpisodeColumns:
    lengths = np.array([piece.num_steps for piece in pieces])
    first_steps = np.array([piece.episode.num_taken for piece in pieces])
    fresh = [piece.episode for piece in pieces if not piece.episode.episode_id]
    for episode, ulid in zip(fresh, new_ulids(len(fresh)), strict=True):
        episode.episode_id = f"{producer}/{ulid}"
    for piece in pieces:
        piece.episode.num_taken += piece.num_steps
    log_probs: Array = columns["log_probs"]
    extras: dict[str, Array] = {
        WORKER: np.full(len(log_probs), worker, np.int32),
        SEED: np.repeat([piece.episode.seed for piece in pieces], lengths),
    }
    if "states" in columns:
        extras[POLICY_STATE] = columns["states"]
    names = np.array([name for name, _ in actors], dtype=object)
    versions = np.array([version for _, version in actors], np.int64)
    steps = Episode(
        episode_id="",
        observations=columns["observations"],
        actions=columns["actions"],
        rewards=columns["rewards"],
        behavior_log_probs=None if np.isnan(log_probs).all() else log_probs,
        policies=names[columns["actors"]],
        policy_versions=versions[columns["actors"]],
        action_masks=columns.get("masks"),
        extras=extras,
    )
    return EpisodeColumns(
        steps,
        [piece.episode.episode_id for piece in pieces],
        lengths,
        first_steps,
        np.array([piece.terminated for piece in pieces]),
        np.array([piece.truncated for piece in pieces]),
        concatenate([as_batch(piece.final_observation) for piece in pieces]),
    )


def _copy_values(values: Any) -> Any:
    if isinstance(values, Mapping):
        return {key: _copy_values(sub) for key, sub in values.items()}
    return values.copy()
