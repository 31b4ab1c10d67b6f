"""Tags: names for versions of datasets, entries of the lake's own log beside policies and aliases.

An entry is `tag/<dataset>/<tag>` and a JSON text. Vacuum keeps the files of tagged versions.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Final

from replaylake.datastore.errors import AlreadyExistsError, NotFoundError, ReplayLakeError
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.names import check_dataset_name, check_tag_name, new_ulid
from replaylake.datastore.storage.log.commit_file import Intent
from replaylake.datastore.storage.log.commit_log import CommitLog
from replaylake.datastore.storage.log.purges import list_purges
from replaylake.datastore.storage.log.state import LogState
from replaylake.datastore.storage.table.presence import check_shards_present

_PREFIX: Final = "tag"


@dataclass(frozen=True)
class Tag:
    """A name for one version of a dataset; not `reproducible` where a purge broke that version."""

    dataset: str
    name: str
    version: int
    created_ms: int
    reproducible: bool = True


class Tags:
    """The tags of all datasets of one lake."""

    def __init__(self, log: CommitLog) -> None:
        self._log = log

    def set(self, dataset: str, name: str, version: int, *, replace: bool = False) -> int | None:
        """Point a tag at a version; return where it pointed before, None if it is new.

        The caller sees to it that the version exists. Raises: InvalidNameError; AlreadyExistsError
        where it points at another version and `replace` is false.
        """
        key = _key(dataset, name)
        body = json.dumps({"version": version, "created_ms": time.time_ns() // 1_000_000})
        producer = f"tag/{new_ulid()}"
        previous: int | None = None

        def build(state: LogState) -> Intent:
            nonlocal previous
            text = state.entries.get(key)
            previous = None if text is None else int(json.loads(text)["version"])
            if previous not in (None, version) and not replace:
                raise AlreadyExistsError(
                    f"tag {dataset}@{name}: points at version {previous}, found {version} to tag. "
                    "Move it with `replace`, or choose another name."
                )
            return Intent(producer, 0, "SET TAG", entries={key: body})

        self._log.commit(build)
        return previous

    def remove(self, dataset: str, name: str) -> None:
        """Remove a tag. Raises: NotFoundError."""
        key = _key(dataset, name)
        producer = f"tag/{new_ulid()}"

        def build(state: LogState) -> Intent:
            intent = Intent(producer, 0, "REMOVE TAG", entries={key: None})
            if key not in state.entries and intent.transaction not in state.transactions:
                raise self._unknown_tag_error(dataset, name)
            return intent

        self._log.commit(build)

    def version(self, dataset: str, name: str) -> int:
        """Return the version that a tag points at. Raises: NotFoundError, InvalidNameError."""
        text = self._log.newest().entries.get(_key(dataset, name))
        if text is None:
            raise self._unknown_tag_error(dataset, name)
        return int(json.loads(text)["version"])

    def list(self, dataset: str | None = None) -> list[Tag]:
        """Return the tags of a dataset, or of all, by dataset and name."""
        tags = []
        state = self._log.newest()
        purges = list_purges(state, dataset)
        for key, text in state.entries.items():
            kind, _, rest = key.partition("/")
            if kind == _PREFIX:
                owner, _, name = rest.partition("/")
                body = json.loads(text)
                version = int(body["version"])
                broken = any(p.dataset == owner and p.has_broken(version) for p in purges)
                tags.append(Tag(owner, name, version, int(body["created_ms"]), not broken))
        matches = [tag for tag in tags if dataset in (None, tag.dataset)]
        return sorted(matches, key=lambda tag: (tag.dataset, tag.name))

    def _unknown_tag_error(self, dataset: str, name: str) -> NotFoundError:
        known = [tag.name for tag in self.list(dataset)]
        return NotFoundError(
            f"tag {dataset}@{name}: found none of that name, expected "
            f"{'one of ' + ', '.join(known) if known else 'a tag, and the dataset has none'}. "
            "`replaylake datasets tag` sets one."
        )


def tag_snapshot(tags: Tags, snapshot: Snapshot, name: str, *, replace: bool = False) -> int | None:
    """Point a tag at a snapshot's version; return where it pointed before, None if it is new.

    Raises: NotFoundError or ShardCorruptError if that version or shards of it are gone, and the tag
    is then as it was; AlreadyExistsError where it points at another version and `replace` is false;
    InvalidNameError.
    """
    previous = tags.set(snapshot.dataset, name, snapshot.version, replace=replace)
    try:
        # Only now: a vacuum or expiry that looked before may be at work; a later one keeps them.
        check_shards_present(snapshot.table)
        CommitLog(snapshot.table.storage, snapshot.table.root).at(snapshot.version)
    except ReplayLakeError:
        if previous is None:
            tags.remove(snapshot.dataset, name)
        else:
            tags.set(snapshot.dataset, name, previous, replace=True)
        raise
    return previous


def _key(dataset: str, name: str) -> str:
    return f"{_PREFIX}/{check_dataset_name(dataset)}/{check_tag_name(name)}"
