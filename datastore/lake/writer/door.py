"""Door: the check of each episode as it is written, against spaces that may still be unknown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replaylake.datastore.episodes.episode import Episode, checked
from replaylake.datastore.episodes.inference import infer_spec, widest
from replaylake.datastore.episodes.rows import check_encodable
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.errors import EpisodeInvalid, SchemaMismatch
from replaylake.datastore.lake.writer.refusal import named

if TYPE_CHECKING:
    from replaylake.datastore.lake.dataset import Dataset


class Door:
    """Knows the spaces of a dataset, or before it exists those of the episodes so far."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._spec: DatasetSpec | None = None
        self._is_stated = False

    def checked(self, episode: Episode) -> Episode:
        """Return the episode as it is stored. Raises: EpisodeInvalid, SchemaMismatch."""
        if not self._is_stated and self._dataset.exists():
            # Spaces are fixed at creation, so those read once hold for the writer's life.
            self._spec, self._is_stated = self._dataset.spec, True
        spec = self._spec
        if spec is None or not self._is_stated:
            own = infer_spec([episode])
            try:
                spec = own if spec is None else widest([spec, own])
            except EpisodeInvalid as error:
                raise named(error, episode) from error
        episode = checked(
            episode,
            spec.observation_space,
            spec.action_space,
            rewards_optional=spec.rewards_optional,
        )
        try:
            check_encodable(episode, spec)
        except (EpisodeInvalid, SchemaMismatch) as error:
            raise named(error, episode) from error
        self._spec = spec
        return episode
