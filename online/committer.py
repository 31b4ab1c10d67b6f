"""Committer: the one writer to the log of a run, for what its workers have written."""

from __future__ import annotations

import time

from replaylake.datastore.dataset import Commit, Dataset, WrittenEpisodes


class Committer:
    """Commits groups of written episodes as (producer, 0), (producer, 1), ...

    A group is one version: readers see all of its episodes or none. What was added is acknowledged
    when the group is committed; after an error the group is kept, and committed at the next try
    under the same sequence, so that a reply that was lost doubles nothing.
    """

    def __init__(self, dataset: Dataset, producer: str, *, interval_s: float = 0.1) -> None:
        self._dataset = dataset
        self._producer = producer
        self._interval_s = interval_s
        self._group: list[WrittenEpisodes] = []
        self._due = time.monotonic()
        self.commits: list[Commit] = []

    @property
    def is_behind(self) -> bool:
        """Whether something was added and is not committed yet."""
        return bool(self._group)

    def add(self, written: WrittenEpisodes) -> None:
        """Take episodes for the next group, and commit it if the interval has passed."""
        self._group.append(written)
        self.commit_if_due()

    def commit_if_due(self) -> None:
        """Commit the group if the interval since the last one has passed. Raises: StorageFailed."""
        if time.monotonic() >= self._due:
            self.flush()

    def flush(self) -> None:
        """Commit the group now, if there is any. Raises: StorageFailed, SchemaMismatch."""
        if not self._group:
            return
        commit = self._dataset.commit(
            self._group, producer=self._producer, sequence=len(self.commits)
        )
        self.commits.append(commit)
        self._group = []
        self._due = time.monotonic() + self._interval_s
