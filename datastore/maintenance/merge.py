"""Merge: one new dataset of several, in one commit that names its sources."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes.compatibility import (
    find_spec_mismatch,
    find_unique_mismatch,
    join_specs,
)
from replaylake.datastore.episodes.schema import (
    AGENT_ID,
    EPISODE_ID,
    STANDARD_COLUMNS,
    DatasetSpec,
    arrow_schema,
)
from replaylake.datastore.errors import (
    AlreadyExistsError,
    ConfigInvalidError,
    SchemaMismatchError,
)
from replaylake.datastore.lake.commit import DropCounts, commit_counts
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.maintenance.copy.copy import PresentRows
from replaylake.datastore.maintenance.copy.shard_copier import ShardCopier
from replaylake.datastore.maintenance.removal import find_deleted_episodes
from replaylake.datastore.storage.table.table import WrittenRows
from replaylake.datastore.storage.table.table_schema import conform, merge_schemas


@dataclass(frozen=True)
class MergedSource:
    """What one source gave: its snapshot, episodes and steps, and the steps that others had.

    num_deleted_before_steps: left out, as they are of what one of the sources has deleted.
    """

    source: str
    num_episodes: int
    num_steps: int
    num_already_present_steps: int
    num_deleted_before_steps: int = 0


@dataclass(frozen=True)
class MergeReceipt:
    """What a merge made. version: of the new dataset; None if the merge was done before."""

    dataset: str
    version: int | None
    num_episodes: int
    num_steps: int
    num_shards: int
    num_bytes: int
    sources: tuple[MergedSource, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def merge(lake: Lake, names: Sequence[str], into: str) -> MergeReceipt:
    """Make a dataset of the steps of several snapshots, in one commit.

    It has all of their columns. A step that several of them have, by its episode, agent and number,
    is taken from the first. The same merge again adds nothing. Datasets with a unique key need to
    have the same one, which the new dataset gets: a row that an earlier source has is left out, and
    one that differs from it goes to quarantine. What one of the sources has deleted is left
    out, and the new dataset refuses it, too.

    Args:
        lake: the lake.
        names: two or more of NAME, NAME@VERSION or NAME@TAG.
        into: the dataset to make.

    Raises: NotFoundError; ConfigInvalidError for fewer than two sources, or one named twice;
    AlreadyExistsError if `into` holds steps; SchemaMismatchError, before anything is written, if
    the spaces, encodings or types of columns differ; ShardCorruptError; StorageError.
    """
    snapshots = [lake.snapshot(name) for name in names]
    sources = [f"{one.dataset}@{one.version}" for one in snapshots]
    if len(sources) < 2 or len({one.dataset for one in snapshots}) < len(sources):
        raise ConfigInvalidError(
            f"merge: found {', '.join(sources) or 'no source'}, expected two or more different "
            "datasets.",
            parameter="names",
        )
    spec, schema = _joined(snapshots)
    target = lake.dataset(into)
    producer = f"merge/{_fingerprint(lake, snapshots)}"
    if target.find_commit(producer, 0) is not None:
        return MergeReceipt(into, None, 0, 0, 0, 0, ())
    create_empty(target, spec, schema, "merge")
    for one in snapshots:
        target.tombstones.copy_from(lake.dataset(one.dataset).tombstones)
    written: list[WrittenRows] = []
    merged: list[MergedSource] = []
    for place, snapshot in enumerate(snapshots):
        parts, source = _write_source(snapshot, snapshots[:place], target)
        written += parts
        merged.append(source)
    num_episodes = sum(source.num_episodes for source in merged)
    num_steps = sum(source.num_steps for source in merged)
    drops = DropCounts(
        num_already_present_steps=sum(source.num_already_present_steps for source in merged)
    )
    info = {
        **commit_counts(num_episodes, num_steps, drops),
        "sources": [
            {"dataset": one.dataset, "version": one.version, **_counts(source)}
            for one, source in zip(snapshots, merged, strict=True)
        ],
    }
    if spec.unique is not None and written:
        # What two sources have under one key is there once; what differs is in quarantine.
        kept = target.commit_shards(
            written,
            num_episodes,
            producer=producer,
            sequence=0,
            operation="MERGE",
            info=info,
            drops=drops,
        )
        return MergeReceipt(
            into,
            kept.version,
            kept.num_episodes,
            kept.num_steps,
            kept.num_shards,
            kept.num_bytes,
            tuple(merged),
        )
    commit = target.table.commit(
        written, producer=producer, sequence=0, operation="MERGE", info=info
    )
    return MergeReceipt(
        into,
        commit.version,
        num_episodes,
        num_steps,
        commit.num_shards,
        commit.num_bytes,
        tuple(merged),
    )


def create_empty(dataset: Dataset, spec: DatasetSpec, schema: pa.Schema, operation: str) -> None:
    """Create a dataset, or take one that holds no step and fits: a killed attempt left it.

    Raises: AlreadyExistsError.
    """
    if not dataset.exists():
        with suppress(AlreadyExistsError):  # another attempt was first: the same check as below
            dataset.create_table(schema, spec.configuration())
            return
    there = dataset.snapshot()
    if there.num_steps or find_spec_mismatch(there.spec, spec) is not None:
        raise AlreadyExistsError(
            f"{operation} into {dataset.name}: found a dataset of {there.num_steps:,} steps, "
            "expected a name that is not used. Choose another name, or add to it with `copy`."
        )


def _joined(snapshots: Sequence[Snapshot]) -> tuple[DatasetSpec, pa.Schema]:
    """Return the spec and the columns of all together. Raises: SchemaMismatchError."""
    first = snapshots[0]
    for other in snapshots[1:]:
        between = f"merge {first.dataset}@{first.version} and {other.dataset}@{other.version}"
        for find in (find_spec_mismatch, find_unique_mismatch):
            if mismatch := find(first.spec, other.spec):
                raise SchemaMismatchError(f"{between}: {mismatch}, expected one.")
        try:
            merge_schemas(_further(first), _further(other))
        except SchemaMismatchError as error:
            raise SchemaMismatchError(f"{between}: {error}") from error
    spec = reduce(join_specs, (one.spec for one in snapshots))
    further = reduce(merge_schemas, map(_further, snapshots))
    return spec, merge_schemas(
        arrow_schema(replace(spec, extras={})), pa.schema([f.remove_metadata() for f in further])
    )


def _further(snapshot: Snapshot) -> pa.Schema:
    fields = [f for f in snapshot.table.schema if f.name not in STANDARD_COLUMNS]
    return pa.schema([field.remove_metadata() for field in fields])


def _write_source(
    snapshot: Snapshot, earlier: Sequence[Snapshot], target: Dataset
) -> tuple[list[WrittenRows], MergedSource]:
    """Write what no earlier source has. Shards of the same columns are copied as they are."""
    table = target.table
    present: dict[str, set[int]] = {}
    for other in earlier:
        with PresentRows(snapshot.table, other.table, None) as known:
            for path, rows in known.find_present(snapshot.files).items():
                present.setdefault(path, set()).update(rows)
    schema = table.snapshot().schema
    is_same = all(f.type.equals(schema.field(f.name).type) for f in snapshot.table.schema)
    copier = ShardCopier(snapshot.table, table)
    gone = find_deleted_episodes(target.tombstones, snapshot.table)
    deleted = _find_rows(snapshot, gone)
    written = []
    for entry in snapshot.files:
        taken = present.get(entry.path, set()) | deleted.get(entry.path, set())
        if not taken and is_same:
            written.append(copier.copy_whole(entry))
            continue
        if is_same:
            if part := copier.copy_missing(entry, sorted(taken)):
                written.append(part[1])
            continue
        rows = copier.read(entry)
        mask = np.ones(rows.num_rows, bool)
        mask[list(taken)] = False
        rows = rows.filter(pa.array(mask))
        if rows.num_rows:
            fields = [schema.field(name) for name in rows.column_names]
            written.append(table.write(conform(rows, pa.schema(fields))))
    num_present = sum(map(len, present.values()))
    num_steps = sum(part.num_rows for part in written)
    with PresentRows(snapshot.table, snapshot.table, None) as known:
        num_episodes = known.num_episodes(snapshot.files)
    if deleted:
        keys = snapshot.table.read([EPISODE_ID, AGENT_ID])
        mine = keys.filter(pc.is_in(keys[EPISODE_ID], value_set=gone))
        num_episodes -= mine.group_by([EPISODE_ID, AGENT_ID]).aggregate([]).num_rows
    num_deleted = sum(len(rows - present.get(path, set())) for path, rows in deleted.items())
    name = f"{snapshot.dataset}@{snapshot.version}"
    return written, MergedSource(name, num_episodes, num_steps, num_present, num_deleted)


def _find_rows(snapshot: Snapshot, episodes: pa.Array) -> dict[str, set[int]]:
    """Return by shard the numbers of the rows of some episodes."""
    found = {}
    for entry in snapshot.files if len(episodes) else ():
        ids = replace(snapshot.table, files=(entry,)).read([EPISODE_ID])[EPISODE_ID]
        mask = pc.is_in(ids, value_set=episodes)
        if rows := set(np.flatnonzero(mask).tolist()):
            found[entry.path] = rows
    return found


def _counts(source: MergedSource) -> dict[str, int]:
    return {name: value for name, value in asdict(source).items() if name != "source"}


def _fingerprint(lake: Lake, snapshots: Sequence[Snapshot]) -> str:
    """Return a hash of the tables and versions: the names of datasets may be used again."""
    tables = [
        (lake.dataset(one.dataset).table.log.newest().metadata, one.version) for one in snapshots
    ]
    ids = [(None if metadata is None else metadata.id, version) for metadata, version in tables]
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:32]
