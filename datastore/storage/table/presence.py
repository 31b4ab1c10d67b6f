"""Presence: whether the shards that a version names are still there, and why they are not."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import PurePosixPath

from replaylake.datastore.errors import NotFoundError, ReplayLakeError, ShardCorruptError
from replaylake.datastore.names import LAKE_ROOT
from replaylake.datastore.storage.log.commit_log import CommitLog
from replaylake.datastore.storage.log.purges import Purges
from replaylake.datastore.storage.storage import Storage
from replaylake.datastore.storage.table.table import TableSnapshot


def check_shards_present(snapshot: TableSnapshot) -> None:
    """Refuse a version whose shards are not all there, before any of its rows is read.

    Cost: a look at each file; on an object store one listing.
    Raises: NotFoundError for a version whose shards were taken out by a later one and removed
    since, or purged, ShardCorruptError for a shard that should still be there, InvalidNameError
    where that leads out of the lake.
    """
    paths = [entry.path for entry in snapshot.files]
    missing = missing_files(snapshot.storage, snapshot.root, paths)
    if not missing:
        return
    log = CommitLog(snapshot.storage, snapshot.root)
    newest = log.newest()
    if damaged := [path for path in missing if path in newest.files]:
        # A folder that is linked from outside of the lake is refused as that.
        snapshot.storage.local_folder(f"{snapshot.root}/{damaged[0]}")
        raise ShardCorruptError(
            f"{snapshot.storage.url}/{snapshot.root}/{damaged[0]}: No such file or directory, "
            "expected the shard that the log names. Restore the file from a copy of the lake."
        )
    newest_name = f"Read the newest version, {snapshot.root}@{newest.version}"
    if (purge := _purges(snapshot).find_breaking(snapshot.root, snapshot.version)) is not None:
        at = datetime.fromtimestamp(purge.started_ms / 1000, UTC).isoformat(timespec="seconds")
        raise NotFoundError(
            f"{snapshot.root}@{snapshot.version}: purged at {at} by version {purge.version} "
            f"(purge {purge.id}): {len(missing)} of its {len(snapshot.files)} shards held rows of "
            f"{purge.num_episodes} episodes that had to go from every version, expected all of "
            f"them. {newest_name}."
        )
    found = f"{len(missing)} of its {len(snapshot.files)} shards are gone"
    raise NotFoundError(
        f"{snapshot.root}@{snapshot.version}: found that {found}, such as {missing[0]}, expected "
        f"all of them. {_explain_removal(log, snapshot.version, newest.version, missing)} "
        f"{newest_name}; a version that has a tag is kept."
    )


def missing_files(storage: Storage, root: str, paths: Sequence[str]) -> list[str]:
    """Return those of a table's files that are not there, of paths below the table.

    Cost: a look at each; on an object store one listing.
    """
    if (folder := storage.local_folder(root)) is not None:
        prefix = f"{folder}{os.sep}"
        return [path for path in paths if not os.path.exists(prefix + path)]
    folders = {str(PurePosixPath(path).parent) for path in paths}
    there = {
        str(PurePosixPath(folder, name))
        for folder in folders
        for name in storage.names(f"{root}/{folder}")
    }
    return [path for path in paths if path not in there]


def _purges(snapshot: TableSnapshot) -> Purges:
    return Purges(CommitLog(snapshot.storage, LAKE_ROOT))


def _explain_removal(log: CommitLog, version: int, newest: int, missing: list[str]) -> str:
    """Say which later version took the first of the missing shards out."""
    paths = set(missing)
    try:
        for later in range(version + 1, newest + 1):
            change = log.read_change(later)
            if not paths.isdisjoint(change.removed):
                return (
                    f"Version {later} ({change.operation or 'unknown'}) took them out, and vacuum "
                    "or purge has removed them since."
                )
    except ReplayLakeError:  # the log no longer reaches back so far
        pass
    return "A later version took them out, and vacuum or purge has removed them since."
