"""Validation of episodes before they are written: one by one, and many at once."""

from __future__ import annotations

from collections.abc import Sequence

from replaylake.datastore.episodes.episode import Episode, validate
from replaylake.datastore.episodes.inference import infer_spec, widest_spec
from replaylake.datastore.episodes.rows import check_encodable
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.errors import EpisodeInvalidError, ReplayLakeError, SchemaMismatchError
from replaylake.datastore.lake.commit import Appendable


class EpisodeValidator:
    """Validates episodes against a dataset's spaces, or before it exists against those so far."""

    def __init__(self, dataset: Appendable) -> None:
        self._dataset = dataset
        self._spec: DatasetSpec | None = None
        self._is_stated = False

    def validate(self, episode: Episode) -> Episode:
        """Return the episode as it is stored. Raises: EpisodeInvalidError, SchemaMismatchError."""
        if not self._is_stated and self._dataset.exists():
            # Spaces are fixed at creation, so those read once hold for the writer's life.
            self._spec, self._is_stated = self._dataset.spec, True
        spec = self._spec
        if spec is None or not self._is_stated:
            own = infer_spec([episode])
            try:
                spec = own if spec is None else widest_spec([spec, own])
            except EpisodeInvalidError as error:
                raise _with_episode_id(error, episode) from error
        episode = validate(
            episode,
            spec.observation_space,
            spec.action_space,
            rewards_optional=spec.rewards_optional,
            tokenizer=spec.tokenizer,
        )
        try:
            check_encodable(episode, spec)
        except (EpisodeInvalidError, SchemaMismatchError) as error:
            raise _with_episode_id(error, episode) from error
        self._spec = spec
        return episode


def partition_valid(
    dataset: Appendable, episodes: Sequence[Episode]
) -> tuple[list[Episode], list[tuple[Episode, ReplayLakeError]]]:
    """Part episodes into those that can be appended together and those that cannot, with why."""
    good: list[Episode] = []
    failures: list[tuple[Episode, ReplayLakeError]] = []
    parts = [list(episodes)]
    while parts:
        part = parts.pop()
        try:
            dataset.check([*good, *part])
            good += part
        except (EpisodeInvalidError, SchemaMismatchError) as error:
            if len(part) == 1:
                failures.append((part[0], _with_episode_id(error, part[0])))
            else:
                middle = len(part) // 2
                parts += [part[middle:], part[:middle]]
    return good, failures


def _with_episode_id(error: ReplayLakeError, episode: Episode) -> ReplayLakeError:
    """Return the error with the episode's name in front, if it does not say it yet."""
    name = episode.source_episode_id or episode.episode_id
    return error if f"episode {name}" in str(error) else type(error)(f"episode {name}: {error}")
