"""Duplicates: episodes of a source that hold the same observations, actions and rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.interchange.formats.checks import NOTED, Check, CheckCounts
from replaylake.datastore.interchange.formats.format import LoggedEpisode

# About 150 bytes each.
_MAX_EPISODES: Final = 1_000_000
_ADVICE: Final = (
    "kept: equal episodes may be real where the environment is deterministic; leave one of them "
    "out of the log if it was written twice"
)


class Duplicates:
    """Finds episodes that equal an earlier one bit by bit, under another id.

    Decisions of one step are left alone: two equal ones are common, and mean nothing. Beyond a
    million episodes no more are remembered. Cost: one pass over the bytes.
    """

    def __init__(self) -> None:
        self._first: dict[int, str] = {}
        self._counts = CheckCounts()

    def add(self, episodes: Sequence[Episode]) -> None:
        """Look at episodes."""
        for episode in episodes:
            if len(episode) < 2:
                continue
            name = episode.source_episode_id or episode.episode_id
            # Python's hash of bytes is 64 bits of SipHash: quick, and the same within a process.
            key = hash(tuple(_hashes(episode)))
            known = self._first.get(key)
            if known is not None and known != name:
                self._count(episode, name, known)
            elif known is None and len(self._first) < _MAX_EPISODES:
                self._first[key] = name

    def checks(self) -> tuple[Check, ...]:
        """Return what was found."""
        return self._counts.checks()

    def _count(self, episode: Episode, name: str, known: str) -> None:
        places = episode.places if isinstance(episode, LoggedEpisode) else None
        place = "" if places is None else places.text()
        where = place and f"{place}, "
        text = f"episode {name}: {where}the same {len(episode)} steps as episode {known}"
        self._counts.add(Check("duplicate", NOTED, 1, len(episode), text, _ADVICE, place))


def _hashes(episode: Episode) -> Iterator[Any]:
    for values in (episode.observations, episode.actions, episode.rewards):
        yield from _hashes_of(values)


def _hashes_of(values: Any) -> Iterator[Any]:
    if isinstance(values, Mapping):
        for key in sorted(values):
            yield key
            yield from _hashes_of(values[key])
    elif values.dtype == object:
        yield hash(tuple(values.tolist()))
    else:
        yield values.shape, values.dtype.str, hash(np.ascontiguousarray(values).tobytes())
