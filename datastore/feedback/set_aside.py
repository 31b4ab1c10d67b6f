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
import pyarrow.compute as pc

from replaylake.datastore.errors import AlreadyExistsError, EpisodeInvalidError
from replaylake.datastore.lake.dataset import REJECTED_SCHEMA, Dataset

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


def record_set_aside(dataset: Dataset, found: Sequence[SetAside], *, producer: str) -> int:
    """Put steps that were set aside into quarantine, each once; return how many are new there.

    Raises: StorageError, ShardCorruptError. Cost: a scan of the quarantine where anything was
    found.
    """
    if not found:
        return 0
    table = dataset.rejected
    if not table.exists():
        with suppress(AlreadyExistsError):  # another run, or an ingest, was first
            table.create(REJECTED_SCHEMA)
    # First: of two runs at once the later finds its sequence taken, and adds nothing.
    sequence = table.next_sequence(producer)
    known: set[tuple[str, str]] = set()
    for batch in table.snapshot().batches(["producer", "checks", "row"]):
        ours = batch.filter(pc.equal(batch.column("producer"), producer))
        checks, rows = ours.column("checks").to_pylist(), ours.column("row").to_pylist()
        known.update((names[0], row) for names, row in zip(checks, rows, strict=True))
    fresh = [one for one in found if (one.check, one.row) not in known]
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
