"""The lake as SQL sees it: the files behind each view of a dataset, and the lake-wide relations.

The relations are `commits`, `datasets`, `evaluations`, `metrics`, `policies`, `promotions`, `runs`
and `shards`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Final

import pyarrow as pa

from replaylake.datastore.errors import NotFoundError, QueryRefusedError
from replaylake.datastore.lake.dataset import REJECTED_SCHEMA, Dataset
from replaylake.datastore.lake.policies.registry import Registry
from replaylake.datastore.lake.roles import Grant
from replaylake.datastore.lake.runs.metrics import read_metrics
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.lake.versions.tags import Tags
from replaylake.datastore.storage.storage import Storage
from replaylake.datastore.storage.table.delta_schema import with_field_ids
from replaylake.datastore.storage.table.table import Table, TableSnapshot

_logger = logging.getLogger(__name__)
_TIMESTAMP: Final = pa.timestamp("us", tz="UTC")
_COMMITS: Final = pa.schema(
    [
        ("dataset", pa.string()),
        ("version", pa.int64()),
        ("committed_at", _TIMESTAMP),
        ("operation", pa.string()),
        ("producer", pa.string()),
        ("sequence", pa.int64()),
        ("num_episodes", pa.int64()),
        ("num_steps", pa.int64()),
        ("num_produced", pa.int64()),
        ("num_rejected", pa.int64()),
        ("num_already_present", pa.int64()),
    ]
)
_DATASETS: Final = pa.schema(
    [
        ("dataset", pa.string()),
        ("version", pa.int64()),
        ("num_steps", pa.int64()),
        ("num_shards", pa.int64()),
        ("num_bytes", pa.int64()),
        ("tags", pa.map_(pa.string(), pa.int64())),
    ]
)
_SHARDS: Final = pa.schema(
    [
        ("dataset", pa.string()),
        ("path", pa.string()),
        ("num_rows", pa.int64()),
        ("num_bytes", pa.int64()),
        ("sha256", pa.string()),
        ("since", pa.int64()),
        ("modified_at", _TIMESTAMP),
    ]
)
_POLICIES: Final = pa.schema(
    [
        ("policy", pa.string()),
        ("version", pa.int64()),
        ("aliases", pa.list_(pa.string())),
        ("algorithm", pa.string()),
        ("run_id", pa.string()),
        ("path", pa.string()),
        ("created_at", _TIMESTAMP),
        ("lineage", pa.string()),
    ]
)
_PROMOTIONS: Final = pa.schema(
    [
        ("policy", pa.string()),
        ("alias", pa.string()),
        ("from_version", pa.int64()),
        ("to_version", pa.int64()),
        ("kind", pa.string()),
        ("moved_at", _TIMESTAMP),
        ("moved_by", pa.string()),
        ("passed", pa.bool_()),
        ("forced", pa.bool_()),
        ("note", pa.string()),
        ("gate", pa.string()),
    ]
)
_EVALUATIONS: Final = pa.schema(
    [
        ("evaluation_id", pa.string()),
        ("kind", pa.string()),
        ("policy", pa.string()),
        ("policy_version", pa.int64()),
        ("dataset", pa.string()),
        ("dataset_version", pa.int64()),
        ("verdict", pa.string()),
        ("evaluated_at", _TIMESTAMP),
        ("evaluated_by", pa.string()),
        ("replaylake_version", pa.string()),
        ("report", pa.string()),
    ]
)
_RUNS: Final = pa.schema(
    [
        ("run_id", pa.string()),
        ("kind", pa.string()),
        ("status", pa.string()),
        ("started_at", _TIMESTAMP),
        ("ended_at", _TIMESTAMP),
        ("record", pa.string()),
    ]
)


# Relations with a column `dataset`: a reader of some datasets sees their rows alone.
_OF_DATASETS: Final = ("commits", "datasets", "shards")


class LakeCatalog:
    """A lake's datasets and relations, by name, for query.run.

    A dataset named in `pinned` is read at that snapshot, and others at their newest version. A name
    in `pinned` that is no dataset's own is an additional one, so that a query can compare versions.
    For a reader with a grant, there are only the datasets and columns that it names, and relations
    without datasets (`policies` and others) only if it names no limit.
    """

    def __init__(
        self,
        storage: Storage,
        registry: Registry,
        tags: Tags,
        handles: Callable[[], Mapping[str, Dataset]],
        dataset: Callable[[str], Dataset],
        pinned: Mapping[str, Snapshot],
        reader: Grant | None = None,
    ) -> None:
        self._storage = storage
        self._registry = registry
        self._tags = tags
        self._handles = handles
        self._dataset = dataset
        self._pinned = pinned
        self._reader = reader

    def datasets(self) -> list[str]:
        """Return the names of all datasets, and the additional ones."""
        return sorted({*self._readable(), *self._pinned})

    def table(self, dataset: str, view: str) -> TableSnapshot | None:
        """Return the files behind a view.

        Raises: NotFoundError; QueryRefusedError where it has no version.

        Decisions, rewards, received steps and the quarantine are tables of their own, so that they
        have none of the versions at which a dataset can be pinned.
        """
        check_readable(self._reader, self._name(dataset))
        if (pinned := self._pinned.get(dataset)) is not None:
            if view in ("decisions", "rewards", "received", "quarantine"):
                raise QueryRefusedError(
                    f"{dataset}.{view}: found {dataset} pinned at version {pinned.version}, which "
                    "is one of its steps: decisions, rewards, received and quarantine are tables "
                    f"of their own and have other versions. Leave {dataset} out of `at`, or "
                    "ask for the two apart."
                )
            return pinned.table
        handle = self._dataset(dataset)
        logs = {
            "decisions": handle.decisions,
            "rewards": handle.rewards,
            "received": handle.received,
        }
        if (log := logs.get(view)) is not None:
            if not log.exists():
                raise NotFoundError(
                    f"{dataset}.{view}: nothing was served into dataset {dataset!r} yet. "
                    f"`replaylake serve POLICY --log-to {dataset}` does."
                )
            return log.snapshot()
        steps = handle.snapshot().table
        return _snapshot_rejected(handle.rejected) if view == "quarantine" else steps

    def relation(self, name: str) -> pa.Table | None:
        """Return a lake-wide relation; `datasets` and `shards` show what is pinned."""
        is_limited = self._reader is not None and not self._reader.can_read_all()
        if is_limited and name not in _OF_DATASETS:
            return None
        if name == "policies":
            return policies(self._registry)
        if name == "promotions":
            return promotions(self._registry)
        if name == "evaluations":
            return evaluations(self._registry)
        if name == "runs":
            return runs(self._registry)
        if name == "metrics":
            return read_metrics(self._storage)
        if name == "commits":
            return commits(self._readable().values())
        if name not in ("datasets", "shards"):
            return None
        snapshots = {
            dataset: self._pinned.get(dataset) or self._dataset(dataset).snapshot()
            for dataset in self.datasets()
        }
        return datasets(snapshots, self._tags) if name == "datasets" else shards(snapshots)

    def columns(self, dataset: str) -> frozenset[str] | None:
        """Return the only columns of a dataset that the reader may read; None for all."""
        return None if self._reader is None else self._reader.readable_columns(self._name(dataset))

    def _name(self, dataset: str) -> str:
        """Return the dataset's own name."""
        pinned = self._pinned.get(dataset)
        return dataset if pinned is None else pinned.dataset

    def _readable(self) -> dict[str, Dataset]:
        return {
            name: handle
            for name, handle in self._handles().items()
            if self._reader is None or self._reader.can_read(name)
        }


def check_readable(reader: Grant | None, dataset: str) -> None:
    """Refuse a dataset that a reader may not read, as one that is not there.

    Raises: NotFoundError.
    """
    if reader is not None and not reader.can_read(dataset):
        raise NotFoundError(
            f"dataset {dataset!r}: not in this lake, or not one that token {reader.name!r} may "
            "read. `select dataset from datasets` lists those that it may read."
        )


def commits(handles: Iterable[Dataset]) -> pa.Table:
    """Return one row per version of each dataset. Cost: reads every commit's file."""
    rows = [
        {
            "dataset": handle.name,
            "committed_at": _time(commit.get("timestamp")),
            **{key: commit[key] for key in _COMMITS.names if key in commit},
        }
        for handle in handles
        for commit in handle.history()
    ]
    return pa.Table.from_pylist(rows, schema=_COMMITS)


def datasets(snapshots: Mapping[str, Snapshot], tags: Tags) -> pa.Table:
    """Return one row per dataset, at the version of its snapshot."""
    pins: dict[str, list[tuple[str, int]]] = {}
    for tag in tags.list():
        pins.setdefault(tag.dataset, []).append((tag.name, tag.version))
    rows = [
        {
            "dataset": name,
            "version": snapshot.version,
            "num_steps": snapshot.num_steps,
            "num_shards": len(snapshot.files),
            "num_bytes": sum(entry.size_bytes for entry in snapshot.files),
            "tags": pins.get(snapshot.dataset, []),
        }
        for name, snapshot in snapshots.items()
    ]
    return pa.Table.from_pylist(rows, schema=_DATASETS)


def shards(snapshots: Mapping[str, Snapshot]) -> pa.Table:
    """Return one row per live shard of each dataset, at the version of its snapshot."""
    rows = [
        {
            "dataset": name,
            "path": entry.path,
            "num_rows": entry.num_rows,
            "num_bytes": entry.size_bytes,
            "sha256": entry.sha256,
            "since": entry.since,
            "modified_at": _time(entry.modified_ms),
        }
        for name, snapshot in snapshots.items()
        for entry in snapshot.files
    ]
    return pa.Table.from_pylist(rows, schema=_SHARDS)


def policies(registry: Registry) -> pa.Table:
    """Return one row per version of each policy."""
    rows = []
    lineages = registry.lineages()
    for row in registry.list():
        # One that came or went between the two looks comes the next time.
        lineage = lineages.get((row["policy"], row["version"]), {})
        rows.append(
            {
                **{key: row[key] for key in ("policy", "version", "aliases", "run_id", "path")},
                "created_at": _time(row["created_ms"]),
                "algorithm": lineage.get("algorithm"),
                "lineage": json.dumps(lineage),
            }
        )
    return pa.Table.from_pylist(rows, schema=_POLICIES)


def promotions(registry: Registry) -> pa.Table:
    """Return one row per move of a policy's alias, as they came."""
    rows = [
        {
            **{key: getattr(move, key) for key in _PROMOTIONS.names if hasattr(move, key)},
            "moved_at": _time(move.at_ms),
            "moved_by": move.by,
            "passed": None if move.gate is None else move.gate["passed"],
            "gate": None if move.gate is None else json.dumps(move.gate),
        }
        for move in registry.alias_history()
    ]
    return pa.Table.from_pylist(rows, schema=_PROMOTIONS)


def evaluations(registry: Registry) -> pa.Table:
    """Return one row per saved evaluation, as they came; one that cannot be read is logged.

    Cost: reads every report.
    """
    rows = [
        {
            **{key: getattr(one, key) for key in _EVALUATIONS.names if key != "report"},
            "report": json.dumps(one.report),
        }
        for one in registry.evaluations.list(on_unreadable=_log_unreadable)
    ]
    return pa.Table.from_pylist(rows, schema=_EVALUATIONS)


def _log_unreadable(error: Exception) -> None:
    _logger.warning("view evaluations: left out: %s", error)


def runs(registry: Registry) -> pa.Table:
    """Return one row per training run."""
    rows = [
        {
            "run_id": run["run_id"],
            "kind": run.get("kind"),
            "status": run.get("status"),
            "started_at": _time(run.get("started_ms")),
            "ended_at": _time(run.get("ended_ms")),
            "record": json.dumps(run),
        }
        for run in registry.runs()
    ]
    return pa.Table.from_pylist(rows, schema=_RUNS)


def _time(milliseconds: int | None) -> datetime | None:
    return None if milliseconds is None else datetime.fromtimestamp(milliseconds / 1000, UTC)


def _snapshot_rejected(table: Table) -> TableSnapshot:
    """Return a dataset's newest rejected rows: none where nothing was ever rejected."""
    if table.exists():
        return table.snapshot()
    return TableSnapshot(0, with_field_ids(REJECTED_SCHEMA), (), {}, table.storage, table.root)
