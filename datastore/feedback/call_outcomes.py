"""Call outcomes: reported rewards and ends of recorded calls, applied to their steps.

Reports are rows of `<dataset>/_rewards`. One names a step by the id of its answer or of a span that
it is within (`decision_id`), or an episode by its own or the client's id or by that of a trace,
with or without a step. Rules:
    - A report of a step gives that step its reward, and its end, whenever the step came.
    - A report of an episode gives the reward to the last step recorded before the report, as a
      score of a whole dialogue is the reward of its last turn (transcripts). Earlier steps whose
      reward is unknown get 0, so that the return is the reported one. An end applies to every
      agent.
    - Where the times of steps are by other clocks, and by them no step is before the report, it is
      of the last step there is, and stays with that one when later steps come.
    - reports.py combines several reports of one step. The result is applied once: a label that is
      set later by `annotate` stays, until a newer report comes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from replaylake.datastore.episodes.schema import (
    AGENT_ID,
    ENV_STEP,
    EPISODE_ID,
    REWARD,
    SOURCE_EPISODE_ID,
    SPAN_IDS,
    STEP,
    TERMINATED,
    TIMESTAMP,
    TIMESTAMP_TYPE,
    TRACE_ID,
    TRUNCATED,
)
from replaylake.datastore.errors import AlreadyExistsError
from replaylake.datastore.feedback.decisions import (
    DECISION_ID,
    FEEDBACK_ID,
    MODE,
    REWARDED_AT,
    SUM,
    rewards_encoder,
    rewards_schema,
)
from replaylake.datastore.feedback.recorded_calls import COMPLETION_ID, SAMPLE_INDEX
from replaylake.datastore.feedback.reports import FeedbackReport, Reward, fold_reports
from replaylake.datastore.feedback.segments import journal_folder, recover
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

_OPERATION: Final = "CALL OUTCOMES"
# Each report with its step: by the answer's id the first of its samples; by the id of a span the
# step of that span, else the last one within it; by an episode's name the last step then recorded
# of the newest episode of that name. Later steps are only taken where there is no other: of them
# the one to which the report was applied already.
_TARGETS: Final = f"""
WITH reports AS (
    SELECT file_index AS report_file, file_row_number AS report_row,
           {DECISION_ID} IS NOT NULL AS is_step, coalesce({DECISION_ID}, {EPISODE_ID}) AS name,
           CASE WHEN {DECISION_ID} IS NOT NULL THEN {EPISODE_ID} END AS within,
           {STEP} AS wanted, {FEEDBACK_ID} AS feedback_id,
           coalesce({MODE}, '') = '{SUM}' AS is_sum, epoch_us({TIMESTAMP}) AS at,
           {REWARD} AS reward, {TERMINATED} AS terminated, {TRUNCATED} AS truncated
    FROM {{reports}}
), steps AS (
    SELECT file_index, file_row_number, {EPISODE_ID} AS episode_id,
           {SOURCE_EPISODE_ID} AS source_id, CAST({AGENT_ID} AS VARCHAR) AS agent, {STEP} AS step,
           {ENV_STEP} AS env_step, {{{COMPLETION_ID}}} AS answer,
           coalesce({{{SAMPLE_INDEX}}}, 0) AS sample_index, {{{SPAN_IDS}}} AS span_ids,
           {{{TRACE_ID}}} AS trace, epoch_us({TIMESTAMP}) AS at, {{{REWARDED_AT}}} AS rewarded_at
    FROM {{steps}}
), named AS (
    SELECT *, true AS is_step, answer AS name, 0 AS distance FROM steps WHERE answer IS NOT NULL
    UNION ALL
    SELECT *, true, unnest(span_ids), unnest(range(len(span_ids))) FROM steps
    UNION ALL SELECT *, false, episode_id, 0 FROM steps
    UNION ALL SELECT *, false, source_id, 0 FROM steps WHERE source_id != episode_id
    UNION ALL SELECT *, false, trace, 0 FROM steps WHERE trace != source_id
)
SELECT s.file_index, s.file_row_number, s.episode_id, NOT r.is_step AND r.wanted IS NULL,
       r.at, r.report_file, r.report_row, r.reward, r.terminated, r.truncated, r.is_sum,
       r.feedback_id, s.rewarded_at
FROM reports AS r
JOIN named AS s ON s.name = r.name AND s.is_step = r.is_step
WHERE (r.is_step OR r.wanted IS NOT NULL OR s.at IS NULL OR s.at <= r.at OR {{other_clocks}})
  AND (r.within IS NULL OR r.within IN (s.trace, s.source_id, s.episode_id))
  AND (r.is_step OR r.wanted IS NULL OR (s.step = r.wanted AND s.agent = ''))
QUALIFY row_number() OVER (
    PARTITION BY r.report_file, r.report_row
    ORDER BY CASE WHEN NOT r.is_step THEN coalesce(s.at > r.at, false) END,
             CASE WHEN NOT r.is_step AND s.at > r.at THEN s.rewarded_at IS DISTINCT FROM r.at END,
             CASE WHEN NOT r.is_step THEN s.episode_id END DESC, s.distance != 0,
             CASE WHEN r.is_step AND s.distance = 0 THEN s.sample_index ELSE -s.env_step END,
             s.env_step, s.at
) = 1
"""
# By column of the steps: what it is where a dataset does not have it.
_ABSENT: Final[Mapping[str, str]] = {
    COMPLETION_ID: "NULL::VARCHAR",
    SAMPLE_INDEX: "NULL::BIGINT",
    SPAN_IDS: "NULL::VARCHAR[]",
    TRACE_ID: "NULL::VARCHAR",
    REWARDED_AT: "NULL::BIGINT",
}
_ROWS: Final = f"""
SELECT file_index, file_row_number, {EPISODE_ID}, CAST({AGENT_ID} AS VARCHAR), {STEP},
       {REWARD}, {TERMINATED}, {TRUNCATED}, {{rewarded_at}}, coalesce(epoch_us({TIMESTAMP}), 0)
FROM {{steps}} SEMI JOIN episodes ON episodes.id = {EPISODE_ID}
"""


@dataclass(frozen=True)
class OutcomeResult:
    """The commit: `version` is None if nothing changed; num_steps is how many steps changed.

    num_unmatched: reports, of all that there are, whose step the dataset does not have.
    """

    version: int | None = None
    num_steps: int = 0
    num_unmatched: int = 0


@dataclass(slots=True)
class _Change:
    reward: float | None
    terminated: bool
    truncated: bool
    rewarded_at: int | None


def ensure_outcomes_table(dataset: Dataset) -> None:
    """Create the table of reports where it is absent; the dataset has to exist."""
    if not dataset.rewards.exists():
        with suppress(AlreadyExistsError):  # another gateway did, this moment
            dataset.rewards.create(rewards_schema(dataset.spec.observation_space))


def apply_outcomes(dataset: Dataset, *, other_clocks: bool = False) -> OutcomeResult:
    """Apply reports to the steps that do not have them yet, in one commit.

    other_clocks: whether the times of steps are by other clocks than those of reports: then they
    tell less of which steps a report of an episode is of.

    Two processes may do so at once. Raises: ShardCorruptError, StorageError. Cost: a scan of the
    short columns of reports and steps; the shards with steps that change are rewritten.
    """
    if not dataset.rewards.exists():
        return OutcomeResult()
    if journal_folder(dataset.rewards).is_dir():
        recover(dataset.rewards, rewards_encoder(dataset))
    num_steps = num_unmatched = 0

    def plan(snapshot: TableSnapshot) -> RewritePlan:
        nonlocal num_steps, num_unmatched
        reports = dataset.rewards.snapshot()
        targets = _read_targets(snapshot, reports, other_clocks)
        num_unmatched = reports.num_rows - len(targets)
        changes = _find_changes(snapshot, targets)
        num_steps = sum(map(len, changes.values()))
        by_entry = {entry: _make_change(group) for entry, group in changes.items()}
        return RewritePlan(by_entry, {"num_outcomes": num_steps})

    producer = f"outcomes:{dataset.name}"
    while True:
        # Two processes at once get the same sequence: the later finds it taken and looks again.
        done = rewrite(
            dataset.table,
            plan,
            producer=producer,
            sequence=dataset.next_sequence(producer),
            operation=_OPERATION,
        )
        if done is None:
            return OutcomeResult(num_unmatched=num_unmatched)
        if not done.already_present:
            return OutcomeResult(done.version, num_steps, num_unmatched)


def _find_changes(
    snapshot: TableSnapshot, targets: Sequence[tuple[Any, ...]]
) -> dict[FileEntry, dict[int, _Change]]:
    """Return the steps that change, by their shard and row."""
    targets = _with_news(targets)
    if not targets:
        return {}
    rows = _read_steps(snapshot, {row[2] for row in targets})
    changes: dict[FileEntry, dict[int, _Change]] = {}
    for (file, number), change in _decide(targets, rows).items():
        changes.setdefault(snapshot.files[file], {})[number] = change
    return changes


def find_corrected(
    dataset: Dataset, snapshot: TableSnapshot, episodes: Collection[str]
) -> set[tuple[FileEntry, int]]:
    """Return the shard and row of each step of episodes whose reports would not give it its reward.

    They gave it one, but it was changed afterwards, such as by a person, or they were purged. The
    times of steps are by other clocks than those of reports. Raises: ShardCorruptError,
    StorageError. Cost: as `apply_outcomes`.
    """
    if not snapshot.files or REWARDED_AT not in snapshot.schema.names:
        return set()
    by_step: dict[tuple[int, int], list[FeedbackReport]] = {}
    if dataset.rewards.exists():
        targets = _read_targets(snapshot, dataset.rewards.snapshot(), True)
        for number, target in enumerate(targets):
            if target[12] is not None and target[4] <= target[12]:
                group = by_step.setdefault((target[0], target[1]), [])
                group.append(_make_report(number, target))
    found = set()
    for row in _read_steps(snapshot, episodes):
        group = by_step.get((row[0], row[1]), [])
        if row[8] is not None and (not group or fold_reports(group).outcome != row[5:8]):
            found.add((snapshot.files[row[0]], row[1]))
    return found


def _read_targets(
    snapshot: TableSnapshot, reports: TableSnapshot, other_clocks: bool
) -> list[tuple[Any, ...]]:
    """Return each report whose step there is, with that step."""
    if not snapshot.files or not reports.files:
        return []
    with (
        fetch_files(snapshot, snapshot.files) as paths,
        fetch_files(reports, reports.files) as report_paths,
        scan_connection() as connection,
    ):
        return query_rows(
            connection,
            _TARGETS.format(
                steps=from_clause(snapshot, paths),
                reports=from_clause(reports, report_paths),
                other_clocks="true" if other_clocks else "false",
                **_find_columns(snapshot),
            ),
        )


def _read_steps(snapshot: TableSnapshot, episodes: Collection[str]) -> list[tuple[Any, ...]]:
    """Return the outcomes of the steps of episodes."""
    ids = {"episodes": pa.table({"id": pa.array(episodes, pa.string())})}
    rewarded_at = _find_columns(snapshot)[REWARDED_AT]
    with fetch_files(snapshot, snapshot.files) as paths, scan_connection(ids) as connection:
        steps = from_clause(snapshot, paths)
        return query_rows(connection, _ROWS.format(steps=steps, rewarded_at=rewarded_at))


def _find_columns(snapshot: TableSnapshot) -> dict[str, str]:
    """Return the columns that not every dataset has, as SQL."""
    names = {
        name: name if name in snapshot.schema.names else absent for name, absent in _ABSENT.items()
    }
    if REWARDED_AT in snapshot.schema.names:
        names[REWARDED_AT] = f"epoch_us({REWARDED_AT})"
    return names


def _with_news(targets: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return the reports of the steps that have one since their reward was applied."""
    news = {(row[0], row[1]) for row in targets if row[12] is None or row[12] < row[4]}
    return [row for row in targets if (row[0], row[1]) in news]


def _decide(
    targets: Sequence[tuple[Any, ...]], rows: Sequence[tuple[Any, ...]]
) -> dict[tuple[int, int], _Change]:
    by_step: dict[tuple[int, int], list[FeedbackReport]] = {}
    of_episodes: dict[tuple[int, int], int] = {}  # when the last report of a whole episode came
    for number, target in enumerate(targets):
        place, is_episode, at = (target[0], target[1]), target[3], target[4]
        by_step.setdefault(place, []).append(_make_report(number, target))
        if is_episode:
            of_episodes[place] = max(at, of_episodes.get(place, 0))
    stored = {(row[0], row[1]): row for row in rows}
    by_episode: dict[str, list[tuple[Any, ...]]] = {}
    for row in rows:
        by_episode.setdefault(row[2], []).append(row)
    changes: dict[tuple[int, int], _Change] = {}
    for place, reports in by_step.items():
        row, reward = stored[place], fold_reports(reports)
        if row[8] is not None and row[8] >= reward.timestamp:
            continue
        changes[place] = _Change(
            reward.reward, reward.terminated, reward.truncated, reward.timestamp
        )
        if (at := of_episodes.get(place)) is not None:
            # A step that is later by another clock was there when the report was applied to it.
            _spread(changes, place, by_episode[row[2]], reward, max(at, row[9]))
    return changes


def _make_report(number: int, target: tuple[Any, ...]) -> FeedbackReport:
    reward, terminated, truncated, is_sum, feedback_id = target[7:12]
    return FeedbackReport(target[4], number, reward, terminated, truncated, is_sum, feedback_id)


def _spread(
    changes: dict[tuple[int, int], _Change],
    place: tuple[int, int],
    rows: Sequence[tuple[Any, ...]],
    reward: Reward,
    at: int,
) -> None:
    """Give an episode's other steps 0 where their reward is unknown, and its agents their end."""
    own = [row for row in rows if row[9] <= at]
    lasts: dict[str, tuple[Any, ...]] = {}
    for row in own:
        if row[3] not in lasts or lasts[row[3]][4] < row[4]:
            lasts[row[3]] = row
    for row in own:
        other = (row[0], row[1])
        if other == place or other in changes:
            continue
        ends = reward.ends and lasts[row[3]] is row and not (row[6] or row[7])
        if row[5] is None or ends:
            changes[other] = _Change(
                0.0 if row[5] is None else row[5],
                reward.terminated if ends else row[6],
                reward.truncated if ends else row[7],
                row[8],
            )


def _make_change(changes: Mapping[int, _Change]) -> ChangeRows:
    def change(rows: pa.Table) -> pa.Table:
        at = np.array(list(changes))
        values = list(changes.values())
        columns = {
            REWARD: pa.array([one.reward for one in values], pa.float64()),
            TERMINATED: pa.array([one.terminated for one in values]),
            TRUNCATED: pa.array([one.truncated for one in values]),
            REWARDED_AT: pa.array([one.rewarded_at for one in values], TIMESTAMP_TYPE),
        }
        for name, array in columns.items():
            rows = with_values(rows, name, at, array)
        return rows

    return change
