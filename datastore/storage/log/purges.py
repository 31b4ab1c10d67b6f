"""Purges: what was purged from datasets, as entries of the lake's own log: counts, never ids.

An entry is `purge/<dataset>/<ulid>` and a JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from replaylake.datastore.names import check_dataset_name, new_ulid
from replaylake.datastore.storage.log.commit_file import Intent
from replaylake.datastore.storage.log.commit_log import CommitLog
from replaylake.datastore.storage.log.state import LogState

_PREFIX: Final = "purge"
RUNNING: Final = "running"
DONE: Final = "done"


@dataclass(frozen=True)
class Purge:
    """One purge of a dataset.

    status: running until a scan has shown that nothing is left, then done. version: of its commit.
    paths: the files that were deleted; their names say nothing of what was in them.
    versions: ranges, both ends in, of those that can no longer be read, for their shards are gone.
    tags: those that point at one of them. policies: those trained on purged episodes, as
    `name:version`, and on how many; None where its version could not be read any more.
    """

    dataset: str
    id: str
    status: str
    started_ms: int
    ended_ms: int | None
    version: int
    num_episodes: int
    num_decisions: int
    paths: tuple[str, ...]
    versions: tuple[tuple[int, int], ...]
    tags: tuple[str, ...]
    policies: Mapping[str, int | None]

    @property
    def num_files(self) -> int:
        return len(self.paths)

    def has_broken(self, version: int) -> bool:
        """Whether a version of the dataset cannot be read any more because of this purge."""
        return any(first <= version <= last for first, last in self.versions)


class Purges:
    """The purges of all datasets of one lake."""

    def __init__(self, log: CommitLog) -> None:
        self._log = log

    def record(self, purge: Purge) -> None:
        """Write a purge's entry, or replace it."""
        key = f"{_PREFIX}/{check_dataset_name(purge.dataset)}/{purge.id}"
        entries = {key: json.dumps(asdict(purge))}
        producer = f"purge/{new_ulid()}"
        self._log.commit(lambda state: Intent(producer, 0, "RECORD PURGE", entries=entries))

    def list(self, dataset: str | None = None) -> list[Purge]:
        """Return the purges of a dataset, or of all, oldest first."""
        if not self._log.exists():
            return []
        return list_purges(self._log.newest(), dataset)

    def find_breaking(self, dataset: str, version: int) -> Purge | None:
        """Return the first purge that made a version unreadable; None if none did."""
        return next((purge for purge in self.list(dataset) if purge.has_broken(version)), None)


def list_purges(state: LogState, dataset: str | None = None) -> list[Purge]:
    """Return the purges that a state of the lake's log names, oldest first."""
    purges = []
    for key, text in state.entries.items():
        kind, _, rest = key.partition("/")
        if kind == _PREFIX and dataset in (None, rest.partition("/")[0]):
            purges.append(_parse_purge(json.loads(text)))
    return sorted(purges, key=lambda purge: purge.id)


def _parse_purge(body: Mapping[str, Any]) -> Purge:
    versions = tuple((int(first), int(last)) for first, last in body["versions"])
    texts = {name: tuple(body[name]) for name in ("paths", "tags")}
    return Purge(**{**body, **texts, "versions": versions})
