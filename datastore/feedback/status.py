"""Status: what became of what was served: how much of it was rewarded, and how soon."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Final

import pyarrow as pa

from replaylake.datastore.episodes.schema import EPISODE_ID, POLICY, POLICY_VERSION, TIMESTAMP
from replaylake.datastore.errors import NotFoundError
from replaylake.datastore.feedback.decision_id import read_unverified
from replaylake.datastore.feedback.decisions import (
    DECISION_ID,
    DEFAULT_WINDOW_S,
    REQUEST_ID,
    REWARD_LATE,
    REWARDED_AT,
)
from replaylake.datastore.feedback.logged_feedback import LoggedFeedback, read_logged_feedback
from replaylake.datastore.feedback.set_aside import STEP_CHECK, join_producer, read_set_aside
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.query.table_files import query_rows, scan_connection

# Columns of the table of decisions by what the query below calls them.
_DECISION_COLUMNS: Final = {
    "key": DECISION_ID,
    "episode": EPISODE_ID,
    "request": REQUEST_ID,
    "ts": TIMESTAMP,
    "policy": POLICY,
    "version": POLICY_VERSION,
}

# A decision is joined if it is a step, or has a report; of several of one request one is. One whose
# reports come to nothing that a step can have is set aside, whether it is a step already or not;
# one that a join found to be no step is, until a later join makes one of it.
_COUNTS: Final = """
WITH known AS (
    SELECT d.policy, d.version, d.ts, d.key IN (SELECT key FROM aside) AS is_aside,
        d.key NOT IN (SELECT key FROM aside) AND (d.key IN (SELECT key FROM said)
            OR w.key IS NOT NULL) AS joined, coalesce(w.late, false) AS late,
        coalesce(w.since, s.ts) - epoch_us(d.ts) AS lag, d.episode, d.request
    FROM decisions d LEFT JOIN written w ON w.key = d.key
    LEFT JOIN said s ON s.key = d.key
), asked AS (
    SELECT DISTINCT episode, request, true AS was_joined FROM known
    WHERE joined AND request IS NOT NULL AND episode IS NOT NULL
), counted AS (
    SELECT k.*, coalesce(a.was_joined, false) AND NOT (joined OR is_aside) AS repeated,
        NOT (joined OR is_aside) AND epoch_us(ts) >= {closing} AS is_open
    FROM known k LEFT JOIN asked a USING (episode, request)
)
SELECT policy, version, count(*), count(*) FILTER (joined),
    count(*) FILTER (is_open AND NOT repeated),
    count(*) FILTER (NOT joined AND NOT is_open AND NOT repeated AND NOT is_aside),
    count(*) FILTER (repeated), count(*) FILTER (is_aside), count(*) FILTER (late),
    quantile_cont(lag, 0.5) / 1e6, quantile_cont(lag, 0.95) / 1e6
FROM counted GROUP BY GROUPING SETS ((policy, version), ())
ORDER BY policy NULLS LAST, version
"""

_COLUMNS: Final = (
    "policy",
    "version",
    "decisions",
    "joined",
    "waiting",
    "unrewarded",
    "repeated",
    "set_aside",
    "late",
    "lag_p50_s",
    "lag_p95_s",
)


@dataclass(frozen=True)
class FeedbackCounts:
    """Decisions of one policy version, or of all.

    joined: those with a reward. waiting: those without whose window is open. unrewarded: those
    whose window has passed. repeated: those without whose request was asked again and rewarded.
    set_aside: those whose reports come to no finite reward, of which one that is a step keeps what
    it has, and those that the last join found to be no valid step. The five add up to decisions.
    late: steps whose reward came, or changed, after they were written. orphaned: rewarded decisions
    that are not there, and reports by a client's own names for which none came within the window;
    of those the policy is not known. join_rate: joined of all that no longer wait nor were
    repeated. lag_p50_s and lag_p95_s: from a decision to the report that its reward is from.
    """

    policy: str | None
    version: int | None
    decisions: int = 0
    joined: int = 0
    waiting: int = 0
    unrewarded: int = 0
    repeated: int = 0
    set_aside: int = 0
    late: int = 0
    orphaned: int = 0
    lag_p50_s: float | None = None
    lag_p95_s: float | None = None

    @property
    def join_rate(self) -> float | None:
        """The share of settled decisions that have a reward; None where there are none."""
        settled = self.joined + self.unrewarded
        return self.joined / settled if settled else None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "join_rate": self.join_rate}


@dataclass(frozen=True)
class FeedbackStatus:
    """What became of the decisions of a dataset, by policy version and in total."""

    dataset: str
    version: int
    rewards: int
    total: FeedbackCounts
    by_version: list[FeedbackCounts]

    def to_json(self) -> dict[str, Any]:
        return {
            "dataset": self.dataset,
            "version": self.version,
            "rewards": self.rewards,
            "total": self.total.to_json(),
            "by_version": [counts.to_json() for counts in self.by_version],
        }


def feedback_status(
    lake: Lake, dataset: str, *, window_s: float = DEFAULT_WINDOW_S, now_s: float | None = None
) -> FeedbackStatus:
    """Count what was served into a dataset and fed back, as it is in the lake now.

    What a running server wrote within about a second is not there yet. `window_s` and `now_s` are
    as for join_feedback. Raises: NotFoundError if nothing was ever served into it. Cost: as
    join_feedback.
    """
    handle = lake.dataset(dataset)
    if not (handle.exists() and handle.decisions.exists() and handle.rewards.exists()):
        raise NotFoundError(
            f"feedback {dataset}: found no decisions, expected some from a served policy. "
            f"`replaylake serve POLICY --log-to {dataset}` logs them."
        )
    now = time.time_ns() // 1000 if now_s is None else int(now_s * 1e6)
    closing = now - int(window_s * 1e6)
    snapshot = handle.snapshot()
    logged = read_logged_feedback(handle, snapshot, now, int(window_s * 1e6))
    orphans = Counter(
        (token.policy, token.policy_version)
        for key in logged.unknown
        if (token := read_unverified(key)) is not None and token.timestamp < logged.horizon
    )
    rows: list[FeedbackCounts] = []
    with scan_connection(_tables(handle, snapshot, logged)) as connection:
        for row in query_rows(connection, _COUNTS.format(closing=closing)):
            counts = dict(zip(_COLUMNS, row, strict=True))
            orphaned = orphans.pop((counts["policy"], counts["version"]), 0)
            rows.append(FeedbackCounts(**counts, orphaned=orphaned))
    *by_version, total = rows
    by_version += [
        FeedbackCounts(policy, version, orphaned=num)
        for (policy, version), num in sorted(orphans.items())
    ]
    num_orphaned = sum(counts.orphaned for counts in by_version) + logged.unmatched
    total = FeedbackCounts(**{**asdict(total), "orphaned": num_orphaned})
    return FeedbackStatus(dataset, snapshot.version, logged.num_rewards, total, by_version)


def _tables(handle: Dataset, snapshot: Snapshot, logged: LoggedFeedback) -> dict[str, pa.Table]:
    decisions = logged.decisions.read(list(_DECISION_COLUMNS.values()))
    there = [n for n in (DECISION_ID, REWARDED_AT, REWARD_LATE) if n in snapshot.spec.extras]
    written = {DECISION_ID: pa.array([], pa.string())}
    if DECISION_ID in there:
        rows = snapshot.table.read(there)
        written = {name: rows.column(name) for name in there}
    num = len(written[DECISION_ID])
    since = written.get(REWARDED_AT, pa.nulls(num, pa.int64())).cast(pa.int64())
    late = written.get(REWARD_LATE, pa.nulls(num, pa.bool_()))
    aside = {*logged.set_aside}
    invalid = read_set_aside(handle, STEP_CHECK, producer=join_producer(handle.name))
    if invalid:
        aside |= invalid - {*written[DECISION_ID].to_pylist()}
    rewards = logged.rewards
    tables = {
        "key": pa.array(list(rewards), pa.string()),
        "ts": pa.array([reward.timestamp for reward in rewards.values()], pa.int64()),
    }
    return {
        "decisions": pa.table(
            {ours: decisions.column(name) for ours, name in _DECISION_COLUMNS.items()}
        ),
        "written": pa.table({"key": written[DECISION_ID], "since": since, "late": late}),
        "said": pa.table(tables),
        "aside": pa.table({"key": pa.array(sorted(aside), pa.string())}),
    }
