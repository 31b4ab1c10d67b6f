"""Named reports: feedback that calls its decision by the client's names, to leave with it."""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa

from replaylake.datastore.episodes.schema import EPISODE_ID, STEP, TIMESTAMP
from replaylake.datastore.feedback.decisions import DECISION_ID, REQUEST_ID
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.names import new_ulid
from replaylake.datastore.query.table_files import fetched, located, rows_of, scanning
from replaylake.datastore.storage.log.state import FileEntry
from replaylake.datastore.storage.table.rewrite import ChangeRows, Plan, rewrite
from replaylake.datastore.storage.table.table import TableSnapshot

# A report is of the newest decision of its name that was taken before it, else of the first after;
# of a step, of those that have the client's own number of it, where there is one.
_FOUND: Final = """
SELECT r.file_index, r.file_row_number FROM {rewards} r
ASOF LEFT JOIN named d ON d.name = r.{name} AND r.{time} >= d.{time}
ASOF LEFT JOIN named n ON n.name = r.{name} AND r.{time} <= n.{time}
ASOF LEFT JOIN numbered ds
    ON ds.name = r.{name} AND ds.{step} = r.{step} AND r.{time} >= ds.{time}
ASOF LEFT JOIN numbered ns
    ON ns.name = r.{name} AND ns.{step} = r.{step} AND r.{time} <= ns.{time}
WHERE r.{key} IS NULL AND {other}
    AND coalesce(ds.{key}, ns.{key}, d.{key}, n.{key}) IN (SELECT key FROM keys)
"""


def count_named(dataset: Dataset, keys: pa.Array) -> int:
    """Return how many reports `forget_named` would remove."""
    if not len(keys) or not _has_named(dataset):
        return 0
    return sum(map(len, _found(dataset, keys, dataset.rewards.snapshot()).values()))


def forget_named(dataset: Dataset, keys: pa.Array, operation: str) -> int:
    """Remove the reports that name decisions otherwise than by id; return how many.

    The decisions have to be there still: afterwards nothing tells whose they were.
    """
    if not len(keys) or not _has_named(dataset):
        return 0
    num_rows = 0

    def plan(snapshot: TableSnapshot) -> Plan:
        nonlocal num_rows
        found = _found(dataset, keys, snapshot)
        num_rows = sum(map(len, found.values()))
        return Plan({entry: _without(rows) for entry, rows in found.items()})

    producer = f"{operation.lower()}/{new_ulid()}"
    rewrite(dataset.rewards, plan, producer=producer, sequence=0, operation=operation)
    return num_rows


def _has_named(dataset: Dataset) -> bool:
    if not dataset.decisions.exists() or not dataset.rewards.exists():
        return False
    rewards = dataset.rewards.snapshot()
    return REQUEST_ID in rewards.schema.names and bool(rewards.files)


def _found(dataset: Dataset, keys: pa.Array, rewards: TableSnapshot) -> dict[FileEntry, list[int]]:
    """Return which rows of which files are such reports."""
    decisions = dataset.decisions.snapshot()
    has_step = STEP in decisions.schema.names  # not in a lake that no newer server has served
    names = [DECISION_ID, REQUEST_ID, EPISODE_ID, TIMESTAMP, *([STEP] if has_step else [])]
    tables = {"keys": pa.table({"key": keys}), "decisions": decisions.read(names)}
    found: dict[FileEntry, list[int]] = {}
    with fetched(rewards, rewards.files) as paths, scanning(tables) as connection:
        for name, other in ((REQUEST_ID, "true"), (EPISODE_ID, f"r.{REQUEST_ID} IS NULL")):
            rows_of(
                connection,
                f"CREATE OR REPLACE TEMP TABLE named AS SELECT {name} AS name, {DECISION_ID}, "
                f"{TIMESTAMP}, {STEP if has_step else 'NULL::INT'} AS {STEP} "
                f"FROM decisions WHERE {name} IS NOT NULL",
            )
            is_numbered = f"{STEP} IS NOT NULL" if name == EPISODE_ID else "false"
            rows_of(
                connection,
                f"CREATE OR REPLACE TEMP TABLE numbered AS SELECT * FROM named WHERE {is_numbered}",
            )
            source = located(rewards, paths)
            text = _FOUND.format(
                rewards=source, name=name, time=TIMESTAMP, key=DECISION_ID, other=other, step=STEP
            )
            for index, row in rows_of(connection, text):
                found.setdefault(rewards.files[index], []).append(row)
    return found


def _without(rows: list[int]) -> ChangeRows:
    def change(table: pa.Table) -> pa.Table:
        kept = np.ones(table.num_rows, bool)
        kept[rows] = False
        return table.filter(pa.array(kept))

    return change
