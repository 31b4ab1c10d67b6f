"""Refusal: which of many episodes cannot be appended together with the others, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import EpisodeInvalid, ReplayLakeError, SchemaMismatch

if TYPE_CHECKING:
    from replaylake.datastore.lake.dataset import Dataset


def sorted_out(
    dataset: Dataset, episodes: Sequence[Episode]
) -> tuple[list[Episode], list[tuple[Episode, ReplayLakeError]]]:
    """Part episodes into those that can be appended together and those that cannot, with why."""
    good: list[Episode] = []
    refused: list[tuple[Episode, ReplayLakeError]] = []
    parts = [list(episodes)]
    while parts:
        part = parts.pop()
        try:
            dataset.check([*good, *part])
            good += part
        except (EpisodeInvalid, SchemaMismatch) as error:
            if len(part) == 1:
                refused.append((part[0], named(error, part[0])))
            else:
                middle = len(part) // 2
                parts += [part[middle:], part[:middle]]
    return good, refused


def named(error: ReplayLakeError, episode: Episode) -> ReplayLakeError:
    """Return the error with the episode's name in front, if it does not say it yet."""
    name = episode.source_episode_id or episode.episode_id
    return error if f"episode {name}" in str(error) else type(error)(f"episode {name}: {error}")
