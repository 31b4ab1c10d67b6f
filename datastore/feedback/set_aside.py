"""Set aside: what was served or received and cannot be a step, so that it holds up nothing else.

Each is kept once in the dataset's quarantine (`<dataset>/_rejected`), with its reason. It is looked
at again in every run: where a later report gives a decision another reward, it becomes a step after
all, and its row in quarantine stays until its episode or the row's age takes it out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, TypeVar

import pyarrow as pa

from replaylake.datastore.errors import AlreadyExistsError, EpisodeInvalidError
from replaylake.datastore.feedback.decisions import DECISION_ID
from replaylake.datastore.lake.dataset import REJECTED_SCHEMA, Dataset
from replaylake.datastore.query.statements import literal
from replaylake.datastore.query.table_files import (
    fetch_files,
    from_clause,
    query_rows,
    scan_connection,
)

# The names of the checks, as `checks` has them.
REWARD_CHECK: Final = "reward_sum"
STEP_CHECK: Final = "step"

# What one value that no episode can hold makes the writer raise. Nothing wider: a fault of ours
# would put the whole log into quarantine.
UNWRITABLE: Final = (EpisodeInvalidError, ArithmeticError, ValueError)
_OPERATION: Final = "SET ASIDE"
_T = TypeVar("_T")


class SetAside(NamedTuple):
    """A step that cannot be written. about: what names it, the same in every run."""

    episode_id: str
    agent_id: str
    source_episode_id: str
    check: str
    reason: str
    about: Mapping[str, Any]

    @property
    def row(self) -> str:
        """`about` as the quarantine has it."""
        return json.dumps(self.about)


def join_producer(dataset: str) -> str:
    """Return the producer under which the join of a dataset commits."""
    return f"sessionise:{dataset}"


def find_unwritable(
    items: Sequence[_T], check: Callable[[Sequence[_T]], object]
) -> list[tuple[_T, str]]:
    """Return those that `check` raises for, with what it said; halves around what is fine."""
    try:
        check(items)
        return []
    except UNWRITABLE as error:
        if len(items) == 1:
            return [(items[0], str(error))]
    middle = len(items) // 2
    return find_unwritable(items[:middle], check) + find_unwritable(items[middle:], check)


def record_set_aside(dataset: Dataset, items: Sequence[SetAside], *, producer: str) -> int:
    """Put steps that were set aside into quarantine, each once; return how many are new there.

    Raises: StorageError, QueryError. Cost: where anything was found, a scan of the quarantine's
    producers, and of the rows of this one.
    """
    if not items:
        return 0
    table = dataset.rejected
    if not table.exists():
        with suppress(AlreadyExistsError):  # another run, or an ingest, was first
            table.create(REJECTED_SCHEMA)
    # First: of two runs at once the later finds its sequence taken, and adds nothing.
    sequence = table.next_sequence(producer)
    keys = pa.table({"about": pa.array([one.row for one in items], pa.string())})
    known = _query(
        dataset,
        f'SELECT checks[1], "row" FROM {{source}} WHERE producer = {literal(producer)} '
        'AND "row" IN (SELECT about FROM wanted)',
        {"wanted": keys},
    )
    fresh = [one for one in items if (one.check, one.row) not in known]
    if not fresh:
        return 0
    num = len(fresh)
    columns: dict[str, Sequence[Any]] = {
        "episode_id": [one.episode_id for one in fresh],
        "agent_id": [one.agent_id for one in fresh],
        "source_episode_id": [one.source_episode_id for one in fresh],
        "row_number": [0] * num,
        "file": [None] * num,
        "file_row": [None] * num,
        "checks": [[one.check] for one in fresh],
        "reasons": [[one.reason] for one in fresh],
        "row": [one.row for one in fresh],
        "mapping": [None] * num,
        "producer": [producer] * num,
        "ingested_at": [datetime.now(UTC)] * num,
    }
    arrays = [pa.array(columns[field.name], field.type) for field in REJECTED_SCHEMA]
    rows = pa.Table.from_arrays(arrays, schema=REJECTED_SCHEMA)
    done = table.append(rows, producer=producer, sequence=sequence, operation=_OPERATION)
    return 0 if done.already_present else num


def read_set_aside(dataset: Dataset, check: str, *, producer: str) -> set[str]:
    """Return the ids of decisions that a check ever set aside; some may be steps since.

    Raises: QueryError. Cost: a scan of the quarantine's producers.
    """
    rows = _query(
        dataset,
        f"SELECT json_extract_string(\"row\", '$.{DECISION_ID}') AS key FROM {{source}} "
        f"WHERE producer = {literal(producer)} AND checks[1] = {literal(check)} "
        "AND key IS NOT NULL",
    )
    return {key for (key,) in rows}


def _query(
    dataset: Dataset, text: str, tables: Mapping[str, pa.Table] | None = None
) -> set[tuple[Any, ...]]:
    """Return the distinct rows of a query over the quarantine, of which `{source}` is the name.

    Parquet's statistics spare DuckDB the row groups of other producers, such as an ingest.
    """
    if not dataset.rejected.exists():
        return set()
    snapshot = dataset.rejected.snapshot()
    if not snapshot.files:
        return set()
    with fetch_files(snapshot, snapshot.files) as paths, scan_connection(tables) as connection:
        return set(query_rows(connection, text.format(source=from_clause(snapshot, paths))))
