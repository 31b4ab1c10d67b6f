"""Quarantine rows: what a dataset's quarantine holds, to be listed, read and removed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final

import duckdb
import numpy as np
import pyarrow as pa

from replaylake.datastore.errors import ConfigInvalidError, NotFoundError
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.unique_keys import CHECK as CONFLICT
from replaylake.datastore.names import new_ulid
from replaylake.datastore.query.statements import literal
from replaylake.datastore.query.table_files import (
    fetch_files,
    from_clause,
    query_arrow,
    scan_connection,
)
from replaylake.datastore.storage.table.rewrite import ChangeRows, RewritePlan, rewrite
from replaylake.datastore.storage.table.table import Table, TableSnapshot

POSITION: Final = "position"
# What tells one row from another; what else there is follows from these.
_KEY: Final = ("producer", "episode_id", "agent_id", "row_number", "file", "file_row", "row")
_ORDER: Final = ", ".join(f'"{name}"' for name in _KEY)
_EPISODE: Final = "producer, episode_id, agent_id"
_MAX_NAMED: Final = 20


@dataclass(frozen=True)
class QuarantineSelection:
    """Which quarantined episodes are meant: all, or those for which each condition holds.

    reasons: the episode failed one of these checks. files: one of its rows is of one of these
    files. episodes: its id is one of these, with or without the prefix of its source.
    """

    reasons: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    episodes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasons or self.files or self.episodes)

    def condition(self) -> str:
        """Return it as SQL over the columns of the quarantine."""
        parts = []
        if self.reasons:
            parts.append(f"list_has_any(checks, [{_literals(self.reasons)}])")
        if self.files:
            parts.append(f"file IN ({_literals(self.files)})")
        if self.episodes:
            names = _literals(self.episodes)
            parts.append(f"(source_episode_id IN ({names}) OR episode_id IN ({names}))")
        return " AND ".join(parts) or "true"


@dataclass(frozen=True)
class QuarantineReason:
    """One reason for which episodes of one source are in quarantine.

    source: the first of its files, empty where the rows are of no file; row: the first such row in
    it, counted from 0. example: what was found there.
    """

    reason: str
    source: str
    num_files: int
    num_episodes: int
    num_rows: int
    row: int | None
    example: str
    ingested_at: str
    producer: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class QuarantinedRow:
    """One row in quarantine: where it is from, why it is here, and what the log has there.

    row: the log's columns and values, as JSON has them; None where the row could not be read.
    """

    episode_id: str
    source_episode_id: str
    agent_id: str
    file: str | None
    file_row: int | None
    reasons: tuple[str, ...]
    row: dict[str, Any] | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class QuarantineContents:
    """What a quarantine holds; an episode that failed two checks counts for both reasons."""

    dataset: str
    num_episodes: int
    num_rows: int
    reasons: tuple[QuarantineReason, ...]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "reasons": [one.to_json() for one in self.reasons]}


@dataclass(frozen=True)
class ClearReceipt:
    """What was removed from a quarantine, or would be, and how many rows are left."""

    dataset: str
    dry_run: bool
    num_episodes: int
    num_rows: int
    num_left: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def list_quarantine(
    dataset: Dataset, selection: QuarantineSelection | None = None
) -> QuarantineContents:
    """Count the quarantined episodes and rows, by reason and source, the most frequent first.

    Raises: NotFoundError if the dataset does not exist.
    """
    snapshot = _pin(dataset)
    if snapshot is None:
        return QuarantineContents(dataset.name, 0, 0, ())
    chosen = _condition(selection)
    with _rows_of(snapshot) as connection:
        (total,) = query_arrow(
            connection,
            f"SELECT count(*) AS num_rows, count(DISTINCT ({_EPISODE})) AS num_episodes "
            f"FROM rows WHERE {chosen}",
        ).to_pylist()
        reasons = query_arrow(
            connection,
            "SELECT reason, coalesce(first(file ORDER BY file, file_row), '') AS source, "
            f"count(DISTINCT file) AS num_files, count(DISTINCT ({_EPISODE})) AS num_episodes, "
            "count(*) AS num_rows, first(file_row ORDER BY file, file_row) AS row, "
            "first(example ORDER BY file, file_row) AS example, "
            "strftime(min(ingested_at), '%Y-%m-%dT%H:%M:%SZ') AS ingested_at, producer "
            "FROM (SELECT *, unnest(checks) AS reason, unnest(list_resize(reasons, len(checks), "
            f"reasons[1])) AS example FROM rows WHERE {chosen}) "
            "GROUP BY reason, producer ORDER BY num_episodes DESC, reason, producer",
        ).to_pylist()
    found = tuple(QuarantineReason(**one) for one in reasons)
    return QuarantineContents(dataset.name, total["num_episodes"], total["num_rows"], found)


def read_quarantine(
    dataset: Dataset, selection: QuarantineSelection | None = None, *, limit: int | None = None
) -> list[QuarantinedRow]:
    """Return quarantined rows in the order of their episodes, at most `limit`.

    Raises: NotFoundError if the dataset does not exist; ConfigInvalidError if a selection selects
    nothing.
    """
    if (snapshot := _pin(dataset)) is None:
        return []
    _check_selected(dataset, snapshot, selection)
    end = "" if limit is None else f" LIMIT {int(limit)}"
    with _rows_of(snapshot) as connection:
        rows = query_arrow(
            connection,
            "SELECT episode_id, source_episode_id, agent_id, file, file_row, reasons, row "
            f"FROM rows WHERE {_condition(selection)} ORDER BY {_ORDER}{end}",
        ).to_pylist()
    return [
        QuarantinedRow(
            **{
                **one,
                "reasons": tuple(one["reasons"]),
                "row": None if one["row"] is None else json.loads(one["row"]),
            }
        )
        for one in rows
    ]


def clear_quarantine(
    dataset: Dataset, selection: QuarantineSelection | None = None, *, dry_run: bool = True
) -> ClearReceipt:
    """Remove quarantined episodes in one commit; earlier versions keep them until vacuum.

    Nothing brings them back: the same files ingested again are already present. Rows that come in
    meanwhile stay. Raises: NotFoundError if the dataset does not exist; ConfigInvalidError if a
    selection selects nothing.
    """
    snapshot = _pin(dataset)
    if snapshot is None:
        return ClearReceipt(dataset.name, dry_run, 0, 0, 0)
    _check_selected(dataset, snapshot, selection)
    rows = select_rows(snapshot, selection or QuarantineSelection())
    if rows.num_rows and not dry_run:
        producer = f"clear/{new_ulid()}"
        remove_rows(dataset.rejected, digest_rows(rows), producer=producer, operation="CLEAR")
    keys = zip(*(rows.column(name).to_pylist() for name in _KEY[:3]), strict=True)
    left = sum(entry.num_rows for entry in snapshot.files) - rows.num_rows
    return ClearReceipt(dataset.name, dry_run, len(set(keys)), rows.num_rows, left)


def select_rows(
    snapshot: TableSnapshot, selection: QuarantineSelection, span: tuple[int, int] | None = None
) -> pa.Table:
    """Return the rows of whole selected episodes, with their `position` in the quarantine.

    Positions count the rows of this version from 0, in the order of their episodes. `span` leaves
    only those from its first up to its second.
    """
    part = "" if span is None else f" AND {POSITION} >= {span[0]} AND {POSITION} < {span[1]}"
    with _rows_of(snapshot) as connection:
        return query_arrow(
            connection,
            f"SELECT * FROM (SELECT *, row_number() OVER (ORDER BY {_ORDER}) - 1 AS {POSITION} "
            f"FROM rows) WHERE {_condition(selection)}{part} ORDER BY {POSITION}",
        )


def measure_rows(snapshot: TableSnapshot, selection: QuarantineSelection) -> pa.Table:
    """Return of the same rows their `position`, producer, ids and `num_characters`.

    `is_conflict` says which are there because the dataset has other rows of their keys.
    """
    with _rows_of(snapshot) as connection:
        return query_arrow(
            connection,
            f"SELECT {POSITION}, {_EPISODE}, coalesce(len(row), 0) AS num_characters, "
            f"list_contains(checks, {literal(CONFLICT)}) AS is_conflict FROM "
            f"(SELECT *, row_number() OVER (ORDER BY {_ORDER}) - 1 AS {POSITION} FROM rows) "
            f"WHERE {_condition(selection)} ORDER BY {POSITION}",
        )


def digest_rows(rows: pa.Table) -> set[bytes]:
    """Return what tells these rows of a quarantine from others, 16 bytes each."""
    return set(_iter_digests(rows))


def remove_rows(table: Table, digests: Set[bytes], *, producer: str, operation: str) -> None:
    """Remove the rows of these digests in one commit, as sequence 0 of a producer.

    The same producer again changes nothing. Memory: one shard. Raises: ShardCorruptError.
    """

    def plan(snapshot: TableSnapshot) -> RewritePlan:
        changes: dict[Any, ChangeRows] = {}
        num_removed = 0
        for entry in snapshot.files:
            keys = replace(snapshot, files=(entry,)).read(_KEY)
            kept = np.asarray([one not in digests for one in _iter_digests(keys)], np.bool_)
            if not kept.all():
                num_removed += int((~kept).sum())
                changes[entry] = partial(_filter, pa.array(kept))
        return RewritePlan(changes, {"num_removed_rows": num_removed})

    rewrite(table, plan, producer=producer, sequence=0, operation=operation)


def _filter(kept: pa.Array, rows: pa.Table) -> pa.Table:
    return rows.filter(kept)


def _iter_digests(rows: pa.Table) -> Iterator[bytes]:
    for key in zip(*(rows.column(name).to_pylist() for name in _KEY), strict=True):
        yield hashlib.sha256(repr(key).encode("utf-8", "surrogatepass")).digest()[:16]


def _pin(dataset: Dataset) -> TableSnapshot | None:
    """Return the newest version of a quarantine, or None if it is empty."""
    dataset.snapshot()  # a dataset that is not there has no quarantine
    if not dataset.rejected.exists():
        return None
    snapshot = dataset.rejected.snapshot()
    return snapshot if snapshot.files else None


@contextmanager
def _rows_of(snapshot: TableSnapshot) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a connection to a version's rows, as the view `rows`."""
    with fetch_files(snapshot, snapshot.files) as paths, scan_connection() as connection:
        connection.execute(f"CREATE VIEW rows AS SELECT * FROM {from_clause(snapshot, paths)}")
        yield connection


def _condition(selection: QuarantineSelection | None) -> str:
    """Return the condition for the rows of whole episodes."""
    if not selection:
        return "true"
    return f"({_EPISODE}) IN (SELECT ({_EPISODE}) FROM rows WHERE {selection.condition()})"


def _check_selected(
    dataset: Dataset, snapshot: TableSnapshot, selection: QuarantineSelection | None
) -> None:
    """Refuse a selection that selects nothing, and name what there is."""
    if not selection or measure_rows(snapshot, selection).num_rows:
        return
    with _rows_of(snapshot) as connection:
        (known,) = query_arrow(
            connection,
            "SELECT (SELECT list(DISTINCT c) FROM (SELECT unnest(checks) AS c FROM rows)) AS "
            "reasons, list(DISTINCT file) AS files FROM rows",
        ).to_pylist()
    for parameter, given, there in (
        ("reasons", selection.reasons, known["reasons"]),
        ("files", selection.files, known["files"]),
    ):
        names = sorted(name for name in there or () if name is not None)
        if given and not {*given} & {*names}:
            raise ConfigInvalidError(
                f"{parameter}: found {', '.join(given)}, expected some of those in the quarantine "
                f"of {dataset.name!r}: {', '.join(names[:_MAX_NAMED])}.",
                parameter=parameter,
            )
    raise NotFoundError(
        f"the quarantine of {dataset.name!r} has no row of {_describe(selection)}. "
        f"`replaylake quarantine list {dataset.name}` lists what it has."
    )


def _describe(selection: QuarantineSelection) -> str:
    parts = [
        f"{name} {', '.join(map(repr, values[:_MAX_NAMED]))}"
        for name, values in asdict(selection).items()
        if values
    ]
    return " and ".join(parts)


def _literals(texts: Sequence[str]) -> str:
    return ", ".join(map(literal, texts))
