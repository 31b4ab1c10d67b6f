"""Late rewards: those reported after their step was written, applied to it in one commit.

Which reward counts is `Logged.late`: what all reports come to, if that is newer than what the step
has, or if a part of a sum was found later. The step then says `reward_late`, and `rewarded_at` when
it was reported; earlier versions of the dataset keep what they had.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from replaylake.datastore.episodes.schema import (
    EPISODE_ID,
    FINAL_OBSERVATION,
    REWARD,
    STEP,
    TERMINATED,
    TIMESTAMP_TYPE,
    TRUNCATED,
)
from replaylake.datastore.feedback.decisions import (
    DECISION_ID,
    REPORTED,
    REWARD_LATE,
    REWARDED_AT,
)
from replaylake.datastore.feedback.logged_feedback import LoggedFeedback, is_late, settle_outcome
from replaylake.datastore.feedback.reports import Reward
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.query.table_files import (
    fetch_files,
    from_clause,
    query_rows,
    scan_connection,
)
from replaylake.datastore.storage.log.state import FileEntry
from replaylake.datastore.storage.table.rewrite import ChangeRows, RewritePlan, rewrite, with_values
from replaylake.datastore.storage.table.table import TableSnapshot

_OPERATION: Final = "LATE REWARDS"


@dataclass(frozen=True)
class LateResult:
    """What late rewards changed; `version` is None if nothing.

    num_ends_refused: steps whose late reward said that the episode ended there, though steps
    follow, or that it did not, though that was written. is_behind: another run was quicker, so that
    some may be left.
    """

    version: int | None = None
    num_steps: int = 0
    num_ends_refused: int = 0
    is_behind: bool = False


@dataclass(frozen=True)
class _OutcomeChange:
    """A step's new outcome; `has_final` says whether its final observation is another, too."""

    row: int
    outcome: tuple[float, bool, bool]
    reward: Reward
    has_final: bool


def apply_late(dataset: Dataset, logged: LoggedFeedback) -> LateResult:
    """Apply the late rewards among those that were logged. Raises: ShardCorruptError, StorageError.

    Two processes may do so at once: each looks again at the steps that it is about to change.
    """
    late = logged.find_late()
    if not late:
        return LateResult()
    planned = LateResult()

    def plan(snapshot: TableSnapshot) -> RewritePlan:
        nonlocal planned
        changes = _find_changes(snapshot, late)
        planned = LateResult(
            None,
            sum(map(len, changes.values())),
            sum(c.outcome != c.reward.outcome for group in changes.values() for c in group),
        )
        info = {"num_late": planned.num_steps}
        by_entry = {entry: _make_change(group, logged) for entry, group in changes.items()}
        return RewritePlan(by_entry, info)

    producer = f"late:{dataset.name}"
    sequence = dataset.next_sequence(producer)
    done = rewrite(dataset.table, plan, producer=producer, sequence=sequence, operation=_OPERATION)
    if done is None or done.already_present:
        # Another run was first, with the same rewards: what it left is for the next run.
        return LateResult(is_behind=True)
    return LateResult(done.version, planned.num_steps, planned.num_ends_refused)


def _find_changes(
    snapshot: TableSnapshot, late: Mapping[str, Reward]
) -> dict[FileEntry, list[_OutcomeChange]]:
    """Return what changes, looked up in the steps as they are now."""
    names = snapshot.schema.names
    since = f"epoch_us(s.{REWARDED_AT})" if REWARDED_AT in names else "NULL"
    reported = f"s.{REPORTED}" if REPORTED in names else "NULL"
    keys = {"late": pa.table({"key": pa.array(list(late), pa.string())})}
    with fetch_files(snapshot, snapshot.files) as paths, scan_connection(keys) as connection:
        source = from_clause(snapshot, paths)
        rows = query_rows(
            connection,
            f"SELECT s.file_index, s.file_row_number, s.{DECISION_ID}, s.{REWARD}, "
            f"s.{TERMINATED}, s.{TRUNCATED}, {since}, {reported}, "
            f"s.{STEP} = last.step "
            f"FROM {source} s JOIN late ON late.key = s.{DECISION_ID} "
            f"JOIN (SELECT {EPISODE_ID} AS episode, max({STEP}) AS step FROM {source} "
            f"GROUP BY episode) last ON last.episode = s.{EPISODE_ID} "
            "ORDER BY s.file_index, s.file_row_number",
        )
    by_entry: dict[FileEntry, list[_OutcomeChange]] = {}
    for index, row, key, *outcome, rewarded_at, reason, is_last in rows:
        reward, before = late[key], (outcome[0], outcome[1], outcome[2])
        if is_late(reward, before, rewarded_at, reason):
            after = settle_outcome(reward, before, is_last=is_last)
            has_ended = after[1] or after[2]
            has_final = has_ended and (reward.final_row is not None or not (before[1] or before[2]))
            change = _OutcomeChange(row, after, reward, has_final)
            by_entry.setdefault(snapshot.files[index], []).append(change)
    return by_entry


def _make_change(changes: list[_OutcomeChange], logged: LoggedFeedback) -> ChangeRows:
    def change(rows: pa.Table) -> pa.Table:
        at = np.array([change.row for change in changes])
        rewards, terminated, truncated = zip(*(change.outcome for change in changes), strict=True)
        times = [change.reward.timestamp for change in changes]
        columns: dict[str, pa.Array] = {
            REWARD: pa.array(rewards, pa.float64()),
            TERMINATED: pa.array(terminated),
            TRUNCATED: pa.array(truncated),
            REWARDED_AT: pa.array(times, TIMESTAMP_TYPE),
            REWARD_LATE: pa.array([True] * len(changes)),
        }
        sums = [change.reward.reported for change in changes]
        if REPORTED in rows.column_names or any(text is not None for text in sums):
            columns[REPORTED] = pa.array(sums, pa.string())
        for name, values in columns.items():
            rows = with_values(rows, name, at, values)
        finals = [change for change in changes if change.has_final]
        if not finals:
            return rows
        at = np.array([change.row for change in finals])
        return with_values(rows, FINAL_OBSERVATION, at, _final_observations(finals, logged, rows))

    return change


def _final_observations(
    finals: list[_OutcomeChange], logged: LoggedFeedback, rows: pa.Table
) -> Any:
    """Return what followed the ends; null where nobody said."""
    places = pa.array([change.reward.final_row for change in finals], pa.int64())
    values = logged.final_observations.take(places)
    return values.cast(rows.schema.field(FINAL_OBSERVATION).type).combine_chunks()
