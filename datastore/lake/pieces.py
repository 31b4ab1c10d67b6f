"""Pieces: contiguous parts of episodes, cut out of them, and written in their order."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from replaylake.datastore.episodes.episode import PER_STEP, Episode
from replaylake.datastore.episodes.schema import AGENT_ID, EPISODE_ID, STEP
from replaylake.datastore.episodes.spaces import Array, take
from replaylake.datastore.errors import EpisodeInvalidError
from replaylake.datastore.lake.snapshot import Snapshot

# Episodes that a writer remembers: about 20 MB. Of one written longer ago, a step that comes twice
# is for `fsck` to find.
_MAX_TRACKED: Final = 131_072
_ENDED: Final = -1


def cut_piece(episode: Episode, start: int, stop: int) -> Episode:
    """Return rows start..stop of a checked episode as a piece.

    Where it stops short, its final observation is that of the row after it, and neither flag is
    set.
    """
    num = len(episode)
    rows = slice(start, stop)
    arrays: dict[str, Any] = {
        name: array[rows] for name in PER_STEP if (array := getattr(episode, name)) is not None
    }
    is_last = stop == num
    return replace(
        episode,
        observations=take(episode.observations, rows),
        actions=take(episode.actions, rows),
        rewards=episode.rewards[rows],
        first_step=episode.first_step + start,
        terminated=episode.terminated and is_last,
        truncated=episode.truncated and is_last,
        final_observation=(
            episode.final_observation if is_last else take(episode.observations, stop)
        ),
        extras={name: array[rows] for name, array in episode.extras.items()},
        **arrays,
    )


class PieceOrder:
    """Remembers how far each episode and agent has been written, by one writer.

    The pieces of an episode have to follow one another: a step that was written before, one after
    the end, or a piece that leaves steps out is refused. The first piece that is seen of an episode
    may begin anywhere, for another writer may have written what comes before it.
    """

    def __init__(self, num_remembered: int = _MAX_TRACKED) -> None:
        self._num_remembered = num_remembered
        # By a hash: ids may be long. The step that has to follow, or _ENDED.
        self._following: OrderedDict[bytes, int] = OrderedDict()

    def add(self, episode: Episode) -> None:
        """Take the next piece.

        Raises: EpisodeInvalidError if it does not follow what was written.
        """
        key = _key(episode)
        following = self._following.get(key)
        first = episode.first_step
        if following is not None and first != following:
            raise EpisodeInvalidError(
                f"episode {_name(episode)}: {_describe_gap(first, following)}"
            )
        ended = episode.terminated or episode.truncated
        self._following[key] = _ENDED if ended else first + len(episode)
        self._following.move_to_end(key)
        if len(self._following) > self._num_remembered:
            self._following.popitem(last=False)

    def remove(self, episode: Episode) -> None:
        """Forget a piece that was refused after all: what follows it would leave a gap."""
        if _key(episode) in self._following:
            self._following[_key(episode)] = episode.first_step


def _describe_gap(first: int, following: int) -> str:
    if following == _ENDED:
        return (
            f"found step {first} after its end, expected none: this writer wrote a step that "
            "terminated or truncated it. Give a new episode an id of its own."
        )
    if first < following:
        return (
            f"found step {first} again, expected step {following}: this writer wrote those before "
            "it. Write each step once, and give a new episode an id of its own."
        )
    return (
        f"found step {first}, expected step {following} as the next: steps {following}.."
        f"{first - 1} are missing. Write the pieces of an episode in order."
    )


def iter_absent_pieces(
    snapshot: Snapshot, episodes: Sequence[Episode]
) -> Iterator[tuple[Episode, list[Episode]]]:
    """Yield each episode with the pieces of it that are not in the snapshot yet.

    That is the episode itself where none of its steps is there. Cost: one scan of the ids, and
    memory for the steps of these episodes.
    """
    ids = list(dict.fromkeys(episode.episode_id for episode in episodes))
    rows = snapshot.sql(
        f"SELECT {EPISODE_ID} AS e, CAST({AGENT_ID} AS VARCHAR) AS a, list({STEP}) AS s FROM steps "
        f"WHERE {EPISODE_ID} IN (SELECT unnest($ids)) GROUP BY ALL",
        {"ids": ids},
    )
    present = {
        (episode_id, agent_id): np.asarray(steps)
        for episode_id, agent_id, steps in zip(
            *(rows.column(name).to_pylist() for name in "eas"), strict=True
        )
    }
    for episode in episodes:
        steps = present.get((episode.episode_id, episode.agent_id))
        yield episode, [episode] if steps is None else list(_absent_pieces(episode, steps))


def _absent_pieces(episode: Episode, present: Array) -> Iterator[Episode]:
    own = np.arange(episode.first_step, episode.first_step + len(episode))
    absent = ~np.isin(own, present)
    if absent.all():
        yield episode
        return
    edges = np.flatnonzero(np.diff(np.concatenate([[0], absent.astype(np.int8), [0]])))
    for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        yield cut_piece(episode, start, stop)


def _key(episode: Episode) -> bytes:
    text = f"{episode.episode_id}\0{episode.agent_id}"
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def _name(episode: Episode) -> str:
    return episode.source_episode_id or episode.episode_id
