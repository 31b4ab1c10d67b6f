"""Match: which steps of a snapshot the keys of labels name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes.schema import AGENT_ID, EPISODE_ID, STEP, TERMINATED, TRUNCATED
from replaylake.datastore.maintenance.labels.labels import MAX_EXAMPLES, Key, Labels
from replaylake.datastore.query.table_files import arrow_of, fetched, located, scanning
from replaylake.datastore.storage.table.table import TableSnapshot

_HITS: Final = pa.schema(
    [
        ("file", pa.int64()),
        ("row", pa.int64()),
        ("label", pa.int64()),
        ("is_target", pa.bool_()),
    ]
)


@dataclass(frozen=True)
class Match:
    """Which labels name what.

    hits: one row a matched step, by `file` (its place in the snapshot) and `row`: `label`, the row
    of the label, and `is_target`, whether it is the step that a reward goes to. num_open: matched
    labels of episodes that have not ended.
    """

    hits: pa.Table
    num_matched: int
    num_unmatched: int
    num_ambiguous: int
    num_open: int
    unmatched_keys: tuple[tuple[Any, ...], ...]
    ambiguous_keys: tuple[tuple[Any, ...], ...]

    def of_file(self, index: int) -> pa.Table:
        """Return the hits in one file, by row."""
        files = self.hits.column("file").to_numpy()
        begin, end = np.searchsorted(files, [index, index + 1])
        return self.hits.slice(begin, end - begin)


def match(snapshot: TableSnapshot, key: Key, labels: Labels, *, only_last: bool) -> Match:
    """Find the steps of labels.

    `only_last` says that a label of an episode is for its last step, which has to be one: an
    episode of several agents has several. Raises: ShardCorrupt.
    """
    num = labels.keys.num_rows
    if not snapshot.files or not num:
        hits = _HITS.empty_table()
        return Match(hits, 0, num, 0, 0, _examples(labels, np.arange(num)), ())
    keyed = labels.keys.append_column("label", pa.array(np.arange(num)))
    same = " AND ".join(f's."{name}" = l."{name}"' for name in key.columns)
    with fetched(snapshot, snapshot.files) as paths, scanning({"labels": keyed}) as connection:
        pairs = f"labels l JOIN {located(snapshot, paths)} s ON {same}"
        groups = arrow_of(
            connection,
            f"SELECT l.label, {_is_good(key, only_last)} AS is_good, max(s.{STEP}) AS last, "
            f"bool_or(s.{TERMINATED} OR s.{TRUNCATED}) AS has_ended "
            f"FROM {pairs} GROUP BY l.label ORDER BY l.label",
        )
        good = groups.filter(groups.column("is_good"))
        connection.register("good", good)
        is_target = f"s.{STEP} = good.last" if only_last and not key.names_steps else "true"
        hits = arrow_of(
            connection,
            f"SELECT s.file_index::BIGINT AS file, s.file_row_number::BIGINT AS row, l.label, "
            f"{is_target} AS is_target "
            f"FROM {pairs} JOIN good ON good.label = l.label ORDER BY file, row",
        )
    bad = groups.filter(pc.invert(groups.column("is_good"))).column("label").to_numpy()
    unmatched = np.setdiff1d(np.arange(num), groups.column("label").to_numpy())
    num_ended = pc.sum(good.column("has_ended")).as_py() or 0
    return Match(
        hits=hits,
        num_matched=good.num_rows,
        num_unmatched=len(unmatched),
        num_ambiguous=len(bad),
        num_open=0 if key.names_steps else good.num_rows - num_ended,
        unmatched_keys=_examples(labels, unmatched),
        ambiguous_keys=_examples(labels, bad),
    )


def _is_good(key: Key, only_last: bool) -> str:
    """Return an aggregate that is true where a label names one step, or one episode."""
    if key.names_steps:
        return "count(*) = 1"
    one = f"min(s.{EPISODE_ID}) = max(s.{EPISODE_ID})"
    return f"{one} AND min(s.{AGENT_ID}) = max(s.{AGENT_ID})" if only_last else one


def _examples(labels: Labels, rows: np.ndarray[Any, Any]) -> tuple[tuple[Any, ...], ...]:
    chosen = labels.keys.take(pa.array(rows[:MAX_EXAMPLES], pa.int64()))
    return tuple(tuple(row.values()) for row in chosen.to_pylist())
