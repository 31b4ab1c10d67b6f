"""Split: several new datasets of one, whole episodes each, the same for the same snapshot."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes.schema import AGENT_ID, EPISODE_ID
from replaylake.datastore.errors import ConfigInvalidError, EmptyReplayError
from replaylake.datastore.lake.commit import DropCounts, commit_counts
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.maintenance.copy.shard_copier import ShardCopier
from replaylake.datastore.maintenance.merge import create_empty
from replaylake.datastore.maintenance.removal import find_deleted_episodes
from replaylake.datastore.query.expressions import canonical_condition, select_episode_keys
from replaylake.datastore.query.statements import literal
from replaylake.datastore.storage.table.table import WrittenRows

# Of md5's 32 hex digits: 52 bits, which a float64 holds exactly.
_DIGITS: Final = 13


@dataclass(frozen=True)
class SplitPart:
    """One of the datasets that a split made. version: None if it was made before."""

    dataset: str
    version: int | None
    num_episodes: int
    num_steps: int


@dataclass(frozen=True)
class SplitReceipt:
    """What a split made of a snapshot."""

    source: str
    parts: tuple[SplitPart, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def split_by_fraction(
    lake: Lake, name: str, fractions: Mapping[str, float], *, seed: int = 0
) -> SplitReceipt:
    """Split a snapshot into datasets that have about the given fractions of its episodes.

    An episode is assigned by a hash of the seed and its id: with the same seed and fractions it is
    in the same part in every version.

    Args:
        lake: the lake.
        name: NAME, NAME@VERSION or NAME@TAG.
        fractions: by the name of each dataset to make its fraction; their sum is 1.
        seed: of the hash.

    What the source has deleted is left out, and refused by the parts, too. A killed split is
    continued by the same call. Raises: ConfigInvalidError; NotFoundError;
    AlreadyExistsError if one of the datasets holds other steps; EmptyReplayError, before anything
    is written, if a part would have no episode; ShardCorruptError; StorageError.
    """
    _check_parts(list(fractions))
    values = list(fractions.values())
    if not all(0 < value < 1 for value in values) or not math.isclose(sum(values), 1):
        raise ConfigInvalidError(
            f"split: found fractions {', '.join(f'{v:g}' for v in values)}, whose sum is "
            f"{sum(values):g}, expected numbers above 0 whose sum is 1.",
            parameter="into",
        )
    hashed = f"substr(md5(concat({literal(f'{seed}:')}, {EPISODE_ID})), 1, {_DIGITS})"
    conditions, low, total = [], "", 0.0
    for number, value in enumerate(values):
        total += value
        # As text of equal length, digits compare as the numbers that they are.
        high = f"{round(total * 16**_DIGITS):0{_DIGITS}x}"
        above = f"{hashed} >= {literal(low)}"
        below = f"{hashed} < {literal(high)}" if number < len(values) - 1 else "true"
        conditions.append(f"{above} AND {below}")
        low = high
    rule = {"seed": seed, "fractions": dict(fractions)}
    return _split(lake, lake.snapshot(name), list(fractions), conditions, rule)


def split_by_condition(lake: Lake, name: str, where: str, into: Sequence[str]) -> SplitReceipt:
    """Split a snapshot into the episodes that a condition selects, and the others.

    An episode of which one agent is selected is selected as a whole.

    Args:
        lake: the lake.
        name: NAME, NAME@VERSION or NAME@TAG.
        where: SQL condition over episodes, as for Snapshot.replay.
        into: the names of two datasets to make: of those selected, and of the others.

    Raises: as split_by_fraction; QueryError, QueryRefusedError.
    """
    _check_parts(into)
    if len(into) != 2:
        raise ConfigInvalidError(
            f"split: found {len(into)} datasets, expected two with `where`: the first for the "
            "episodes that it selects, the second for the others.",
            parameter="into",
        )
    condition = canonical_condition(where)
    return _split(lake, lake.snapshot(name), into, [condition, "true"], {"where": condition})


def _split(
    lake: Lake,
    snapshot: Snapshot,
    names: Sequence[str],
    conditions: Sequence[str],
    rule: Mapping[str, Any],
) -> SplitReceipt:
    source = f"{snapshot.dataset}@{snapshot.version}"
    tombstones = lake.dataset(snapshot.dataset).tombstones
    # Of an older version; as a part of no dataset they go to none.
    gone = find_deleted_episodes(tombstones, snapshot.table)
    episodes: list[pa.Array] = []
    for condition in conditions:
        ids = select_episode_keys(snapshot.table, canonical_condition(condition))[EPISODE_ID]
        mine = ids.combine_chunks().unique()
        for others in (gone, *episodes):
            mine = mine.filter(pc.invert(pc.is_in(mine, value_set=others)))
        episodes.append(mine)
    if empty := [name for name, ids in zip(names, episodes, strict=True) if not len(ids)]:
        raise EmptyReplayError(
            f"split {source}: found no episode for {', '.join(empty)}, expected some in each "
            "dataset. Change the condition, the fractions or the seed."
        )
    metadata = lake.dataset(snapshot.dataset).table.log.newest().metadata
    about = [None if metadata is None else metadata.id, snapshot.version, names, rule]
    producer = f"split/{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]}"
    targets = [lake.dataset(name) for name in names]
    for target in targets:
        if target.find_commit(producer, 0) is None:
            create_empty(target, snapshot.spec, snapshot.table.schema, "split")
            target.tombstones.copy_from(tombstones)
    parts = []
    for name, ids in zip(names, episodes, strict=True):
        info = {"split": {"dataset": snapshot.dataset, "version": snapshot.version, **rule}}
        parts.append(_write_part(lake, snapshot, name, ids, producer, info))
    return SplitReceipt(source, tuple(parts))


def _write_part(
    lake: Lake,
    snapshot: Snapshot,
    name: str,
    episodes: pa.Array,
    producer: str,
    info: Mapping[str, Any],
) -> SplitPart:
    table = lake.dataset(name).table
    if table.find_commit(producer, 0) is not None:
        return SplitPart(name, None, 0, 0)
    copier = ShardCopier(snapshot.table, table)
    written: list[WrittenRows] = []
    keys = set()
    for entry in snapshot.files:
        rows = copier.read(entry)
        mine = rows.filter(pc.is_in(rows[EPISODE_ID], value_set=episodes))
        if not mine.num_rows:
            continue
        distinct = mine.select([EPISODE_ID, AGENT_ID]).group_by([EPISODE_ID, AGENT_ID])
        keys |= {tuple(row.values()) for row in distinct.aggregate([]).to_pylist()}
        is_whole = mine.num_rows == rows.num_rows
        written.append(copier.copy_whole(entry) if is_whole else table.write(mine))
    num_steps = sum(part.num_rows for part in written)
    commit = table.commit(
        written,
        producer=producer,
        sequence=0,
        operation="SPLIT",
        info={**commit_counts(len(keys), num_steps, DropCounts()), **info},
    )
    return SplitPart(name, commit.version, len(keys), num_steps)


def _check_parts(names: Sequence[str]) -> None:
    if len(names) < 2 or len(set(names)) < len(names):
        raise ConfigInvalidError(
            f"split: found {', '.join(names) or 'no dataset'}, expected two or more different "
            "datasets to make.",
            parameter="into",
        )
