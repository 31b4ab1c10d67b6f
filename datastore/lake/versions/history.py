"""Versions: what each version of a dataset did, newest first."""

from __future__ import annotations

from dataclasses import dataclass

from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.versions.tags import Tags
from replaylake.datastore.storage.log.state import Change


@dataclass(frozen=True)
class Version:
    """One commit. Episodes and steps are what its writer counted; None where it counts none."""

    version: int
    committed_ms: int | None
    operation: str | None
    producer: str | None
    num_episodes: int | None
    num_steps: int | None
    shards_added: int
    shards_removed: int
    tags: tuple[str, ...]


@dataclass(frozen=True)
class History:
    """A dataset's versions from the newest down, and how many older ones there are."""

    dataset: str
    versions: tuple[Version, ...]
    num_older: int


def read_history(dataset: Dataset, tags: Tags, *, limit: int | None = None) -> History:
    """Return the versions of a dataset, the newest `limit` of them, with their names in `tags`.

    Those that were dropped from the log are neither there nor counted. Cost: one file a version.
    Raises: NotFoundError, LogCorruptError.
    """
    newest = dataset.snapshot().version
    names: dict[int, list[str]] = {}
    for tag in tags.list(dataset.name):
        names.setdefault(tag.version, []).append(tag.name)
    log = dataset.table.log
    history: list[Version] = []
    # Other engines drop the commit of a checkpoint, too.
    oldest = max([log.oldest(), *log.folder.listing().commits[:1]])
    for version in range(newest, oldest - 1, -1):
        if limit is not None and len(history) == limit:
            break
        history.append(_version(log.read_change(version), tuple(names.get(version, ()))))
    return History(dataset.name, tuple(history), newest + 1 - oldest - len(history))


def _version(change: Change, tags: tuple[str, ...]) -> Version:
    info = change.info
    return Version(
        version=change.version,
        committed_ms=info.get("timestamp"),
        operation=change.operation,
        producer=info.get("producer"),
        num_episodes=info.get("num_episodes"),
        num_steps=info.get("num_steps"),
        shards_added=len(change.added),
        shards_removed=len(change.removed),
        tags=tags,
    )
