"""Quarantine: what fsck takes out of a dataset is copied to `<dataset>/_quarantine` first.

Beside each copy lies a record of where it was and why. Nothing reads the folder; vacuum leaves it,
purge looks into it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from replaylake.datastore.episodes.schema import AGENT_ID, EPISODE_ID
from replaylake.datastore.errors import CommitConflictError, ReplayLakeError
from replaylake.datastore.names import new_ulid
from replaylake.datastore.storage.log.state import FileEntry
from replaylake.datastore.storage.table.table import Table, TableSnapshot, WrittenRows

FOLDER: Final = "_quarantine"


@dataclass(frozen=True)
class Damage:
    """A live shard that cannot be trusted, and why."""

    entry: FileEntry
    why: str


@dataclass(frozen=True)
class Orphan:
    """A file of no version, by its path below the lake, and why it is one."""

    path: str
    why: str


@dataclass(frozen=True)
class Repair:
    """One thing that was done: a file quarantined, rows taken out, a checkpoint rewritten.

    `to` is the copy, "" where there was nothing to copy; the counts are what the newest version no
    longer has, num_episodes those that had rows there, None if nothing says how many.
    """

    kind: str
    dataset: str
    path: str
    to: str
    version: int | None
    num_steps: int
    num_episodes: int | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def quarantine_damage(
    table: Table,
    dataset: str,
    damages: Sequence[Damage],
    doubled: Mapping[str, Sequence[int]],
) -> list[Repair]:
    """Quarantine damaged shards and rows that are there twice, in one commit.

    Of a shard with doubled rows all of it is copied, and the rest of it stays in the dataset. A
    shard that another writer replaced in the meantime is passed over: fsck has to look again.

    Raises: StorageError, ShardCorruptError; then nothing was taken out.
    """
    producer, copies = f"fsck/{new_ulid()}", dict[str, str]()
    whole = {damage.entry.path: damage for damage in damages}
    while True:
        snapshot = table.snapshot()
        lost = [e for e in snapshot.files if e.path in whole]
        thinned = [e for e in snapshot.files if e.path in doubled and e.path not in whole]
        if not lost and not thinned:
            return []
        for entry in (*lost, *thinned):
            if entry.path not in copies:
                why = whole[entry.path].why if entry.path in whole else "rows that are there twice"
                copies[entry.path] = _copy_with_record(table, entry.path, why, entry)
        written, repairs = [], []
        for entry in lost:
            path, to = f"{table.root}/{entry.path}", copies[entry.path]
            num_episodes = _num_episodes(table, entry, to)
            repairs.append(
                Repair("quarantined", dataset, path, to, None, entry.num_rows, num_episodes)
            )
        for entry in thinned:
            rows = _without(snapshot, entry, doubled[entry.path])
            if rows.num_rows:
                written.append(table.write(rows, since=entry.since))
            path, num = f"{table.root}/{entry.path}", entry.num_rows - rows.num_rows
            repairs.append(Repair("doubled rows", dataset, path, copies[entry.path], None, num, 0))
        try:
            version = _commit(table, producer, repairs, written, [*lost, *thinned])
        except CommitConflictError:
            continue
        return [_with_version(repair, version) for repair in repairs]


def quarantine_orphans(table: Table, dataset: str, orphans: Sequence[Orphan]) -> list[Repair]:
    """Move files that no version names into the quarantine. Raises: StorageError."""
    repairs = []
    for orphan in orphans:
        path = orphan.path.removeprefix(f"{table.root}/")
        if path in table.log.newest().files:
            continue  # its writer was slow, and has committed it now
        to = _copy_with_record(table, path, orphan.why, None)
        table.storage.delete([orphan.path])
        repairs.append(Repair("orphan", dataset, orphan.path, to, None, 0, 0))
    return repairs


def _commit(
    table: Table,
    producer: str,
    repairs: Sequence[Repair],
    written: Sequence[WrittenRows],
    removed: Sequence[FileEntry],
) -> int:
    info = {
        "num_lost_steps": sum(repair.num_steps for repair in repairs),
        "quarantined": [{"path": r.path, "to": r.to, "num_steps": r.num_steps} for r in repairs],
    }
    return table.commit(
        written,
        producer=producer,
        sequence=0,
        operation="REPAIR",
        info=info,
        removed=[entry.path for entry in removed],
    ).version


def _copy_with_record(table: Table, path: str, why: str, entry: FileEntry | None) -> str:
    """Copy a file and its record, durably; return where, "" if there is no file."""
    data = table.storage.get(f"{table.root}/{path}")
    to = f"{table.root}/{FOLDER}/{path.rpartition('/')[2]}"
    record = {
        "path": f"{table.root}/{path}",
        "why": why,
        "quarantined_ms": time.time_ns() // 1_000_000,
        "entry": None if entry is None else asdict(entry),
    }
    table.storage.put(f"{to}.json", json.dumps(record, indent=2).encode())
    if data is None:
        return ""
    table.storage.put(to, data)
    return to


def _without(snapshot: TableSnapshot, entry: FileEntry, rows: Sequence[int]) -> pa.Table:
    mask = np.ones(entry.num_rows, dtype=bool)
    mask[np.asarray(rows)] = False
    return replace(snapshot, files=(entry,)).read().filter(pa.array(mask))


def _num_episodes(table: Table, entry: FileEntry, copy: str) -> int | None:
    """Return how many episodes had rows in a shard that is lost; None if nothing says so."""
    with suppress(ReplayLakeError):
        info = table.commit_info(entry.since)
        if info.get("num_steps") == entry.num_rows and "num_episodes" in info:
            return int(info["num_episodes"])
    data = table.storage.get(copy) if copy else None
    if data is None or EPISODE_ID not in table.snapshot().schema.names:
        return None
    try:
        # Unverified: a count for people, of ids that nothing else is done with.
        rows = pq.read_table(pa.BufferReader(data), columns=[EPISODE_ID, AGENT_ID])
        return int(rows.group_by([EPISODE_ID, AGENT_ID]).aggregate([]).num_rows)
    except (pa.ArrowException, OSError, ValueError):
        return None


def _with_version(repair: Repair, version: int) -> Repair:
    return Repair(**{**asdict(repair), "version": version})
