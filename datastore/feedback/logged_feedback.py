"""Served: decisions with their reports as the lake has them, those alone that may change anything.

Most decisions are steps already and nothing new was said of them. SQL finds the client episodes
that have a report which may count, and only their rows become Python objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes.schema import (
    EPISODE_ID,
    FINAL_OBSERVATION,
    REWARD,
    STEP,
    TERMINATED,
    TIMESTAMP,
    TRUNCATED,
)
from replaylake.datastore.feedback.decisions import (
    DECIDED_BY_CLIENT,
    DECISION_ID,
    FEEDBACK_ID,
    MODE,
    REPORTED,
    REQUEST_ID,
    REWARDED_AT,
    SUM,
)
from replaylake.datastore.feedback.reports import FeedbackReport, Outcome, Reward, fold_reports
from replaylake.datastore.feedback.segments import first_pending, has_live_worker
from replaylake.datastore.feedback.timeline import Decision, Timeline, has_steps
from replaylake.datastore.feedback.waits import JOURNAL, Waits
from replaylake.datastore.feedback.waits import REWARD as MISSING_REWARD
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.query.table_files import query_arrow, query_rows, scan_connection
from replaylake.datastore.storage.table.table import TableSnapshot

# Far longer than a decision takes from its timestamp to its journal.
_IN_FLIGHT_US: Final = 100_000
# Far longer than a record waits in the journal of a server on another machine, which we cannot see,
# and than the clocks of two servers differ.
OTHER_SERVER_LAG_US: Final = 60_000_000
# What the SQL below calls columns of the tables of decisions and of rewards, and of served steps.
_FEEDBACK_NAMES: Final = {
    DECISION_ID: "key",
    EPISODE_ID: "source",
    REQUEST_ID: "request",
    STEP: "step",
    TIMESTAMP: "ts",
    DECIDED_BY_CLIENT: "by_client",
    FEEDBACK_ID: "feedback",
    MODE: "mode",
    REWARD: "reward",
    TERMINATED: "terminated",
    TRUNCATED: "truncated",
}
_WRITTEN_NAMES: Final = {
    DECISION_ID: "key",
    EPISODE_ID: "episode",
    STEP: "number",
    REWARD: "reward",
    TERMINATED: "terminated",
    TRUNCATED: "truncated",
    REPORTED: "reported",
}
# superseded: where a client took a decision itself, the other decisions of its request. A server
# that hung logs its own answer, which nobody received, at any later time. What is a step or was
# named by its id stays. decision: each other decision, with its step if it is one, and until when
# what was said of it is there; that is not known of a sum, as a part of one may be found later.
# meant: of reports by other names the client's episode, and the decision as far as it can be told
# here; it may be another where one came after it that is no step yet. report: each report with the
# client's episode that it is of. changing: those in which a report may count.
JOIN_SQL: Final = """
CREATE TEMP TABLE named AS SELECT DISTINCT key FROM rewards WHERE key IS NOT NULL;
CREATE TEMP TABLE superseded AS
SELECT key FROM (
    SELECT d.key, w.key IS NOT NULL OR n.key IS NOT NULL AS stays, row_number() OVER (
        PARTITION BY d.request, d.source, d.step
        ORDER BY w.key IS NOT NULL DESC, n.key IS NOT NULL DESC, d.by_client DESC, d.key DESC
    ) AS place
    FROM decisions d
    SEMI JOIN (SELECT request, source, step FROM decisions WHERE by_client) c
        ON c.request = d.request AND c.source IS NOT DISTINCT FROM d.source
        AND c.step IS NOT DISTINCT FROM d.step
    LEFT JOIN written w ON w.key = d.key
    LEFT JOIN named n ON n.key = d.key
) WHERE place > 1 AND NOT stays;
CREATE TEMP TABLE decision AS
SELECT d.key, d.source, d.request, d.step, d.ts, d.file,
    coalesce('e' || d.source, 'd' || d.key) AS client, w.key IS NULL AS open, w.number, w.episode,
    w.reward, w.terminated, w.truncated, w.since, w.reported, w.number = last.number AS is_last,
    CASE WHEN w.reported IS NULL THEN w.since END AS until
FROM decisions d ANTI JOIN superseded s ON s.key = d.key LEFT JOIN written w ON w.key = d.key
LEFT JOIN (SELECT episode, max(number) AS number FROM written GROUP BY episode) last
    ON last.episode = w.episode;
CREATE TEMP TABLE client AS
SELECT client, max(ts) FILTER (open) AS last_open FROM decision GROUP BY client;
CREATE TEMP TABLE asked AS
SELECT request, ts, row FROM rewards WHERE key IS NULL AND request IS NOT NULL;
CREATE TEMP TABLE meant AS
SELECT a.row, d.ts, d.until,
    coalesce(d.client, CASE WHEN n.ts - a.ts <= {elsewhere} THEN n.client END) AS client
FROM asked a
ASOF LEFT JOIN (SELECT request, ts, client, until FROM decision WHERE request IS NOT NULL) d
    ON d.request = a.request AND a.ts >= d.ts
ASOF LEFT JOIN (SELECT request, ts, client FROM decision WHERE request IS NOT NULL) n
    ON n.request = a.request AND a.ts <= n.ts;
CREATE TEMP TABLE numbered AS
SELECT 'e' || source AS client, step, ts, row FROM rewards
WHERE key IS NULL AND request IS NULL;
INSERT INTO meant
SELECT n.row, d.ts, d.until, c.client FROM numbered n
LEFT JOIN client c ON c.client = n.client
ASOF LEFT JOIN (SELECT client, number, ts, until FROM decision WHERE number IS NOT NULL) d
    ON d.client = n.client AND d.number = n.step AND n.ts >= d.ts;
CREATE TEMP TABLE report AS
SELECT r.key, r.request, r.step, r.ts, r.row, r.reward, r.terminated, r.truncated, r.mode,
    r.feedback, r.final_row, coalesce(d.client, m.client) AS client,
    coalesce(d.until, m.until) AS until, m.ts AS meant_ts
FROM rewards r LEFT JOIN decision d ON d.key = r.key LEFT JOIN meant m ON m.row = r.row;
CREATE TEMP TABLE changing AS
SELECT DISTINCT r.client FROM report r JOIN client c ON c.client = r.client
WHERE (r.until IS NULL OR r.ts > r.until OR c.last_open > r.meant_ts)
    AND (r.key IS NOT NULL OR r.ts < {horizon})
"""
# The decisions of client episodes in which a report may count, and all reports on them.
ACTIVE_SQL: Final = """
SELECT client, source, key, ts, request, step, file,
    reward, terminated, truncated, episode, number, is_last, since, reported
FROM decision SEMI JOIN changing USING (client) ORDER BY key
"""
ACTIVE_REPORTS_SQL: Final = """
SELECT key, CASE WHEN key IS NULL THEN client END, request, step, mode, ts, row,
    reward, terminated, truncated, feedback, final_row
FROM report SEMI JOIN changing USING (client)
WHERE key IS NOT NULL OR ts < {horizon} ORDER BY ts, row
"""
# Of the other episodes: decisions that wait for a report, that none came for, and that were asked
# for again; then the steps of all, and reports by other names whose decision never came.
REMAINDER_SQL: Final = """
WITH left_over AS (
    SELECT * FROM decision ANTI JOIN changing USING (client)
), idle AS (
    SELECT client, count(*) FILTER (open) AS num, max(ts) AS ts FROM left_over GROUP BY client
), again AS (
    SELECT o.client, count(*) AS num FROM left_over o
    JOIN (SELECT DISTINCT client, request FROM left_over WHERE NOT open) s
        ON s.client = o.client AND s.request = o.request
    WHERE o.open GROUP BY o.client
), counted AS (
    SELECT i.num - coalesce(a.num, 0) AS num, coalesce(a.num, 0) AS again,
        i.ts >= {closing} OR i.ts >= {horizon} AS waits, i.ts >= {horizon} AS is_recent,
        CASE WHEN i.num > coalesce(a.num, 0) THEN i.ts END AS ts
    FROM idle i LEFT JOIN again a USING (client)
)
SELECT [coalesce(sum(num) FILTER (is_recent), 0)::BIGINT, min(ts) FILTER (is_recent),
        max(ts) FILTER (is_recent)],
    [coalesce(sum(num) FILTER (waits AND NOT is_recent), 0)::BIGINT,
        min(ts) FILTER (waits AND NOT is_recent), max(ts) FILTER (waits AND NOT is_recent)],
    coalesce(sum(num) FILTER (NOT waits), 0)::BIGINT, 
    coalesce(sum(again), 0)::BIGINT + (SELECT count(*) FROM superseded),
    (SELECT count(*) FROM decision WHERE NOT open),
    (SELECT count(*) FROM report WHERE key IS NULL AND client IS NULL AND ts < {closing}),
    (SELECT count(*) FROM report WHERE key IS NULL AND ts >= {horizon})
FROM counted
"""
# Which file of a table a row is in, and which row of all it is; of a report, its final observation.
FILE: Final = "file"
ROW: Final = "row"
_FINAL_ROW: Final = "final_row"
_ADDED_COLUMNS: Final[Mapping[str, pa.DataType]] = {
    REQUEST_ID: pa.string(),
    EPISODE_ID: pa.string(),
    STEP: pa.int32(),
    FEEDBACK_ID: pa.string(),
    MODE: pa.string(),
}


@dataclass(frozen=True, slots=True)
class WrittenStep:
    """A step that is there. is_last: its episode has no later one.

    rewarded_at (us) is when its outcome was reported, None if that is not known, and reported what
    the reports came to if a sum was among them.
    """

    outcome: Outcome
    episode_id: str
    step: int
    is_last: bool
    rewarded_at: int | None
    reported: str | None


@dataclass(frozen=True, slots=True)
class NamedReport:
    """A report that names its decision by the client's own names."""

    report: FeedbackReport
    request_id: str | None
    step: int | None


@dataclass(slots=True)
class ClientEpisode:
    """Decisions under one episode_id of a client, None for a single one, and what names them."""

    source: str | None
    decisions: list[Decision] = field(default_factory=list)
    named: list[NamedReport] = field(default_factory=list)


@dataclass
class LoggedFeedback:
    """What was served, at pinned versions.

    clients are those episodes that have a report which may count. rewards and written are of their
    decisions. file_of says in which file of the decisions table a decision is. All decisions before
    horizon (us) are here. waits, unrewarded and repeated are decisions of the other episodes.
    num_early are reports too new to be looked at, unknown the ids that no decision has, unmatched
    the reports by other names that came before the window and have no decision. set_aside: by
    decision, why it cannot be a step as it is, or, of one that is a step, have the reward reported.
    """

    decisions: TableSnapshot
    horizon: int
    final_observations: pa.ChunkedArray
    clients: dict[str, ClientEpisode] = field(default_factory=dict)
    reports: dict[str, list[FeedbackReport]] = field(default_factory=dict)
    rewards: dict[str, Reward] = field(default_factory=dict)
    written: dict[str, WrittenStep] = field(default_factory=dict)
    file_of: dict[str, int] = field(default_factory=dict)
    num_decisions: int = 0
    num_rewards: int = 0
    num_written: int = 0
    waits: Waits = field(default_factory=Waits)
    unrewarded: int = 0
    repeated: int = 0
    num_early: int = 0
    unknown: list[str] = field(default_factory=list)
    unmatched: int = 0
    set_aside: dict[str, str] = field(default_factory=dict)

    def find_late(self) -> dict[str, Reward]:
        """Return the rewards of written steps that were reported after the one that they have.

        What a label made of a step's reward since is not overruled by an older report.
        """
        return {
            key: reward
            for key, step in self.written.items()
            if self.has_reward(key)
            and is_late(reward := self.rewards[key], step.outcome, step.rewarded_at, step.reported)
        }

    def has_reward(self, key: str) -> bool:
        """Whether a decision has a reward that a step can have."""
        return key in self.rewards and key not in self.set_aside

    def is_episode_end(self, key: str) -> bool:
        """Whether the episode ends, or will end once late rewards are applied, with a decision."""
        reward = self.rewards.get(key)
        if (step := self.written.get(key)) is None:
            return reward is not None and reward.ends
        outcome = step.outcome
        if (
            reward is not None
            and reward.is_finite
            and is_late(reward, outcome, step.rewarded_at, step.reported)
        ):
            _, terminated, truncated = settle_outcome(reward, outcome, is_last=step.is_last)
            return terminated or truncated
        return outcome[1] or outcome[2]

    def rank(self, key: str) -> int:
        """Return which of several decisions of one request is its step: written, named, other."""
        return 2 if key in self.written else int(key in self.reports)

    def add_report(self, key: str, report: FeedbackReport) -> None:
        """Add a report of a decision."""
        # A list of its own: a report by another name does not make the decision a named one.
        known = self._all.setdefault(key, list(self.reports.get(key, ())))
        known.append(report)
        self.rewards[key] = fold_reports(known)

    def drop_reports(self) -> None:
        """Let go of the reports, once it is known what they come to, but not of whose they are."""
        self._all.clear()
        for reports in self.reports.values():
            reports.clear()
        for client in self.clients.values():
            client.named.clear()

    def __post_init__(self) -> None:
        self._all: dict[str, list[FeedbackReport]] = {}


def is_late(reward: Reward, outcome: Outcome, since: int | None, reported: str | None) -> bool:
    """Whether a reward came after the outcome that a step has, and differs.

    A sum also differs if a part of it is older, and was found only now.
    """
    if reported is not None and reward.reported != reported and reward.has_sums:
        return True
    return reward.outcome != outcome and (since is None or reward.timestamp > since)


def settle_outcome(reward: Reward, outcome: Outcome, *, is_last: bool) -> Outcome:
    """Return the outcome of a step after a late reward.

    An end that comes late counts where no step follows. One that was written stays one: the client
    may have begun another episode under the same id since.
    """
    has_ended = outcome[1] or outcome[2]
    if reward.ends and (has_ended or is_last):
        return reward.outcome
    return reward.reward, outcome[1], outcome[2]


def read_logged_feedback(
    dataset: Dataset, snapshot: Snapshot, now: int, window: int
) -> LoggedFeedback:
    """Read the two tables' newest versions, and which decisions the snapshot has as steps.

    `now` (us) is the time, taken before, and `window` (us) how long decisions wait. An episode
    whose last decision is at or after the horizon may have an earlier one that is not in the tables
    read: written without it, it would have a false successor, and that one's step number twice when
    it comes. What is in a journal yet is no older than its first record; what gets into one after
    we looked was decided after `now`, but for the moment between taking its time and writing it,
    which a live worker may be in. Where journals are no part of the lake other machines may have
    some too: what was decided within a minute waits. For the same reason a report by other names
    than decision_id is looked at once it is older than the horizon: then the decision that it means
    is known.
    """
    read_at = now - _IN_FLIGHT_US if has_live_worker(dataset.decisions) else now
    if not dataset.table.storage.shares_state:
        read_at = now - OTHER_SERVER_LAG_US
    horizon = min([read_at, *first_pending(dataset.decisions, TIMESTAMP)])
    rewards, finals = read_rewards(dataset.rewards.snapshot())
    decisions = dataset.decisions.snapshot()
    logged = LoggedFeedback(decisions, horizon, finals, num_rewards=rewards.num_rows)
    narrow = read_decisions(decisions)
    logged.num_decisions = narrow.num_rows
    tables = {
        "decisions": _rename(narrow, _FEEDBACK_NAMES),
        "rewards": _rename(rewards, _FEEDBACK_NAMES),
        "written": _rename(read_written(snapshot), _WRITTEN_NAMES),
    }
    with scan_connection(tables) as connection:
        # Views are too slow here: each is asked several times.
        for statement in JOIN_SQL.format(horizon=horizon, elsewhere=OTHER_SERVER_LAG_US).split(";"):
            query_rows(connection, statement)
        counts = REMAINDER_SQL.format(horizon=horizon, closing=now - window)
        ((recent, unreported, logged.unrewarded, logged.repeated, logged.num_written,
          logged.unmatched, logged.num_early),) = query_rows(connection, counts)  # fmt: skip
        logged.waits.add(JOURNAL, *recent)
        logged.waits.add(MISSING_REWARD, *unreported)
        unknown = "SELECT DISTINCT key FROM report WHERE key IS NOT NULL AND client IS NULL"
        logged.unknown = [key for (key,) in query_rows(connection, unknown)]
        active = query_arrow(connection, ACTIVE_SQL)
        reports = query_arrow(connection, ACTIVE_REPORTS_SQL.format(horizon=horizon))
    # Before all of it becomes objects, which take the most memory.
    del tables, narrow, rewards
    _add_decisions(logged, active)
    del active
    _add_reports(logged, reports)
    del reports
    for client in logged.clients.values():
        if client.named:
            logged.unmatched += _match_reports(logged, client, now - window)
    logged.drop_reports()
    logged.set_aside = {
        key: f"reward: the sum of its reports is {reward.reward}, expected a finite number. "
        "A report of mode last replaces them."
        for key, reward in logged.rewards.items()
        if not reward.is_finite
    }
    return logged


def _add_decisions(logged: LoggedFeedback, active: pa.Table) -> None:
    """Make objects of the decisions of client episodes in which something may change."""
    clients: dict[str, ClientEpisode] = {}
    for name, source, key, us, request, step, file, *written in _rows(active):
        client = clients.get(name)
        if client is None:
            client = clients[name] = ClientEpisode(source)
        client.decisions.append(Decision(key, us, request, step))
        logged.file_of[key] = file
        reward, terminated, truncated, episode, number, is_last, since, reason = written
        if number is not None:
            outcome = reward, terminated, truncated
            logged.written[key] = WrittenStep(outcome, episode, number, is_last, since, reason)
    logged.clients = clients


def _add_reports(logged: LoggedFeedback, reports: pa.Table) -> None:
    for key, name, request, step, mode, us, row, *outcome, feedback, final in _rows(reports):
        reward, terminated, truncated = outcome
        report = FeedbackReport(
            us, row, reward, terminated, truncated, mode == SUM, feedback, final
        )
        if key is not None:
            logged.reports.setdefault(key, []).append(report)
        else:
            logged.clients[name].named.append(NamedReport(report, request, step))
    logged.rewards = {key: fold_reports(group) for key, group in logged.reports.items()}


def _rows(table: pa.Table) -> Iterator[tuple[Any, ...]]:
    for batch in table.to_batches(max_chunksize=65_536):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _match_reports(logged: LoggedFeedback, client: ClientEpisode, closing: int) -> int:
    """Give the reports that name a request or a step their decisions; return how many are orphaned.

    A report means the newest decision under its name that was taken before it came; if there is
    none, the first within a minute after, since the clocks of two servers differ.
    """
    timeline = Timeline(has_steps(client.decisions), logged.is_episode_end, logged.rank)
    decisions = iter(client.decisions)
    following = next(decisions, None)
    early = []
    for report in client.named:
        while following is not None and following.timestamp <= report.report.timestamp:
            timeline.take(following)
            following = next(decisions, None)
        if (decision := _resolve_report(timeline, report)) is None:
            early.append(report)
            continue
        _add_named_report(logged, timeline, decision, report.report)
    while following is not None:
        timeline.take(following)
        following = next(decisions, None)
    orphaned = 0
    for report in early:
        decision = _resolve_report(timeline, report, oldest=True)
        ahead = 0 if decision is None else decision.timestamp - report.report.timestamp
        if decision is not None and 0 < ahead <= OTHER_SERVER_LAG_US:
            _add_named_report(logged, timeline, decision, report.report)
        else:
            orphaned += report.report.timestamp < closing
    return orphaned


def _resolve_report(
    timeline: Timeline, report: NamedReport, *, oldest: bool = False
) -> Decision | None:
    if report.request_id is not None:
        return timeline.find_request(report.request_id)
    return None if report.step is None else timeline.find_step(report.step, oldest=oldest)


def _add_named_report(
    logged: LoggedFeedback, timeline: Timeline, decision: Decision, report: FeedbackReport
) -> None:
    ended = logged.is_episode_end(decision.key)
    logged.add_report(decision.key, report)
    if logged.is_episode_end(decision.key) != ended:
        timeline.recut(decision.key)


def _rename(table: pa.Table, names: Mapping[str, str]) -> pa.Table:
    return table.rename_columns([names.get(name, name) for name in table.column_names])


def read_decisions(decisions: TableSnapshot) -> pa.Table:
    """Return the names and times of decisions, and in which file each is."""
    added = {STEP: pa.int32(), DECIDED_BY_CLIENT: pa.bool_()}
    there = [name for name in added if name in decisions.schema.names]
    names = [DECISION_ID, EPISODE_ID, REQUEST_ID, TIMESTAMP, *there]
    parts = []
    for number, batch in enumerate(decisions.batches(names)):
        part = _as_integers(batch)
        for name, kind in added.items():
            if name not in there:
                part = part.append_column(name, pa.nulls(part.num_rows, kind))
        part = part.append_column(FILE, pa.array(np.full(part.num_rows, number, np.int32)))
        parts.append(part)
    if parts:
        return pa.concat_tables(parts)
    text = pa.string()
    return pa.schema(
        [(DECISION_ID, text), (EPISODE_ID, text), (REQUEST_ID, text), (TIMESTAMP, pa.int64()),
         *added.items(), (FILE, pa.int32())]
    ).empty_table()  # fmt: skip


def read_rewards(rewards: TableSnapshot) -> tuple[pa.Table, pa.ChunkedArray]:
    """Return the reports, and apart from them the final observations that there are."""
    later = [name for name in _ADDED_COLUMNS if name in rewards.schema.names]
    names = [DECISION_ID, TIMESTAMP, REWARD, TERMINATED, TRUNCATED, FINAL_OBSERVATION, *later]
    parts, finals, num_rows, num_finals = [], [], 0, 0
    kind = rewards.schema.field(FINAL_OBSERVATION).type
    for batch in rewards.batches(names):
        column = batch.column(FINAL_OBSERVATION)
        there = pc.is_valid(column).to_numpy()
        finals += column.filter(pa.array(there)).chunks
        place = pa.array(np.cumsum(there) - 1 + num_finals, mask=~there)
        num_finals += int(there.sum())
        part = _as_integers(batch.drop_columns([FINAL_OBSERVATION]))
        for name, absent in _ADDED_COLUMNS.items():
            if name not in later:
                part = part.append_column(name, pa.nulls(part.num_rows, absent))
        part = part.append_column(_FINAL_ROW, place)
        part = part.append_column(ROW, pa.array(np.arange(part.num_rows) + num_rows))
        num_rows += part.num_rows
        parts.append(part)
    if not parts:
        first = [(DECISION_ID, pa.string()), (TIMESTAMP, pa.int64()), (REWARD, pa.float64()),
                 (TERMINATED, pa.bool_()), (TRUNCATED, pa.bool_())]  # fmt: skip
        last = [(_FINAL_ROW, pa.int64()), (ROW, pa.int64())]
        parts = [pa.schema([*first, *_ADDED_COLUMNS.items(), *last]).empty_table()]
    columns = [
        DECISION_ID,
        TIMESTAMP,
        REWARD,
        TERMINATED,
        TRUNCATED,
        *_ADDED_COLUMNS,
        _FINAL_ROW,
        ROW,
    ]
    joined = pa.concat_tables([part.select(columns).cast(parts[0].select(columns).schema)
                               for part in parts])  # fmt: skip
    return joined, pa.chunked_array(finals, kind)


def read_written(snapshot: Snapshot) -> pa.Table:
    """Return the served steps."""
    kinds = {
        DECISION_ID: pa.string(), REWARD: pa.float64(), TERMINATED: pa.bool_(),
        TRUNCATED: pa.bool_(), EPISODE_ID: pa.string(), STEP: pa.int64(), "since": pa.int64(),
        REPORTED: pa.string(),
    }  # fmt: skip
    schema = pa.schema(list(kinds.items()))
    extras = snapshot.spec.extras
    if DECISION_ID not in extras:
        return schema.empty_table()
    names = [DECISION_ID, REWARD, TERMINATED, TRUNCATED, EPISODE_ID, STEP]
    there = [name for name in (REWARDED_AT, REPORTED) if name in extras]
    parts = []
    for batch in snapshot.table.batches([*names, *there]):
        served = batch.filter(pc.is_valid(batch.column(DECISION_ID)))
        columns = {name: served.column(name) for name in served.column_names}
        columns["since"] = columns.pop(REWARDED_AT, pa.nulls(served.num_rows, pa.int64()))
        columns.setdefault(REPORTED, pa.nulls(served.num_rows, pa.string()))
        cells = [pc.cast(columns[name], kind) for name, kind in kinds.items()]
        parts.append(pa.Table.from_arrays(cells, schema=schema))
    return pa.concat_tables(parts) if parts else schema.empty_table()


def _as_integers(batch: pa.Table) -> pa.Table:
    at = batch.schema.get_field_index(TIMESTAMP)
    return batch.set_column(at, TIMESTAMP, batch.column(TIMESTAMP).cast(pa.int64()))
