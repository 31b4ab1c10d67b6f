"""Served: decisions with their reports as the lake has them, those alone that may change anything.

Most decisions are steps already and nothing new was said of them. SQL finds the client episodes
that have a report which may count, and only their rows become Python objects.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from replaylake.datastore.episodes.schema import (
    TIMESTAMP,
)
from replaylake.datastore.feedback.decisions import (
    SUM,
)
from replaylake.datastore.feedback.joining import ACTIVE_REPORTS_SQL, ACTIVE_SQL, JOIN_SQL, LEFT_SQL
from replaylake.datastore.feedback.logged_tables import (
    read_decisions,
    read_rewards,
    read_written,
)
from replaylake.datastore.feedback.reports import Outcome, Report, Reward, folded
from replaylake.datastore.feedback.segments import first_pending, has_live_worker
from replaylake.datastore.feedback.timeline import Decision, Timeline, has_steps
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.query.table_files import arrow_of, rows_of, scanning
from replaylake.datastore.storage.table.table import TableSnapshot

# Far longer than a decision takes from its timestamp to its journal.
_IN_FLIGHT_US: Final = 100_000
# Far longer than a record waits in the journal of a server on another machine, which we cannot see,
# and than the clocks of two servers differ.
ELSEWHERE_US: Final = 60_000_000


@dataclass(frozen=True, slots=True)
class Written:
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
class Named:
    """A report that names its decision by the client's own names."""

    report: Report
    request_id: str | None
    step: int | None


@dataclass(slots=True)
class ClientEpisode:
    """Decisions under one episode_id of a client, None for a single one, and what names them."""

    source: str | None
    decisions: list[Decision] = field(default_factory=list)
    named: list[Named] = field(default_factory=list)


@dataclass
class Logged:
    """What was served, at pinned versions.

    clients are those episodes that have a report which may count. rewards and written are of their
    decisions. file_of says in which file of the decisions table a decision is. All decisions before
    horizon (us) are here. waiting, unrewarded and repeated are decisions of the other episodes.
    num_early are reports too new to be looked at, unknown the ids that no decision has, unmatched
    the reports by other names that came before the window and have no decision. set_aside: by
    decision, why it cannot be a step as it is, or, of one that is a step, have the reward reported.
    """

    decisions: TableSnapshot
    horizon: int
    final_observations: pa.ChunkedArray
    clients: dict[str, ClientEpisode] = field(default_factory=dict)
    reports: dict[str, list[Report]] = field(default_factory=dict)
    rewards: dict[str, Reward] = field(default_factory=dict)
    written: dict[str, Written] = field(default_factory=dict)
    file_of: dict[str, int] = field(default_factory=dict)
    num_decisions: int = 0
    num_rewards: int = 0
    num_written: int = 0
    waiting: int = 0
    unrewarded: int = 0
    repeated: int = 0
    num_early: int = 0
    unknown: list[str] = field(default_factory=list)
    unmatched: int = 0
    set_aside: dict[str, str] = field(default_factory=dict)

    def late(self) -> dict[str, Reward]:
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

    def ends(self, key: str) -> bool:
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
            _, terminated, truncated = settled(reward, outcome, is_last=step.is_last)
            return terminated or truncated
        return outcome[1] or outcome[2]

    def rank(self, key: str) -> int:
        """Return which of several decisions of one request is its step: written, named, other."""
        return 2 if key in self.written else int(key in self.reports)

    def report(self, key: str, report: Report) -> None:
        """Add a report of a decision."""
        # A list of its own: a report by another name does not make the decision a named one.
        known = self._all.setdefault(key, list(self.reports.get(key, ())))
        known.append(report)
        self.rewards[key] = folded(known)

    def forget_reports(self) -> None:
        """Let go of the reports, once it is known what they come to, but not of whose they are."""
        self._all.clear()
        for reports in self.reports.values():
            reports.clear()
        for client in self.clients.values():
            client.named.clear()

    def __post_init__(self) -> None:
        self._all: dict[str, list[Report]] = {}


def is_late(reward: Reward, outcome: Outcome, since: int | None, reported: str | None) -> bool:
    """Whether a reward came after the outcome that a step has, and differs.

    A sum also differs if a part of it is older, and was found only now.
    """
    if reported is not None and reward.reported != reported and reward.has_sums:
        return True
    return reward.outcome != outcome and (since is None or reward.timestamp > since)


def settled(reward: Reward, outcome: Outcome, *, is_last: bool) -> Outcome:
    """Return the outcome of a step after a late reward.

    An end that comes late counts where no step follows. One that was written stays one: the client
    may have begun another episode under the same id since.
    """
    has_ended = outcome[1] or outcome[2]
    if reward.ends and (has_ended or is_last):
        return reward.outcome
    return reward.reward, outcome[1], outcome[2]


def read_logged(dataset: Dataset, snapshot: Snapshot, now: int, window: int) -> Logged:
    """Read the two tables' newest versions, and which decisions the snapshot has as steps.

    `now` (us) is the time, taken before, and `window` (us) how long decisions wait. An episode
    whose last decision is at or after the horizon may have an earlier one that is not in the tables
    read: written without it, it would have a false successor, and that one's step number twice when
    it comes. What is in a journal yet is no older than its first record; what gets into one after
    we looked was decided after `now`, but for the moment between taking its time and writing it,
    which a live worker may be in. Of a remote lake other machines may have journals too: what was
    decided within a minute waits. For the same reason a report by other names than decision_id is
    looked at once it is older than the horizon: then the decision that it means is known.
    """
    looked = now - _IN_FLIGHT_US if has_live_worker(dataset.decisions) else now
    if dataset.table.storage.is_remote:
        looked = now - ELSEWHERE_US
    horizon = min([looked, *first_pending(dataset.decisions, TIMESTAMP)])
    rewards, finals = read_rewards(dataset.rewards.snapshot())
    decisions = dataset.decisions.snapshot()
    logged = Logged(decisions, horizon, finals, num_rewards=rewards.num_rows)
    narrow = read_decisions(decisions)
    logged.num_decisions = narrow.num_rows
    tables = {"decisions": narrow, "rewards": rewards, "written": read_written(snapshot)}
    with scanning(tables) as connection:
        # Views are too slow here: each is asked several times.
        for statement in JOIN_SQL.format(horizon=horizon, elsewhere=ELSEWHERE_US).split(";"):
            rows_of(connection, statement)
        counts = LEFT_SQL.format(horizon=horizon, closing=now - window)
        ((logged.waiting, logged.unrewarded, logged.repeated, logged.num_written,
          logged.unmatched, logged.num_early),) = rows_of(connection, counts)  # fmt: skip
        unknown = "SELECT DISTINCT key FROM report WHERE key IS NOT NULL AND client IS NULL"
        logged.unknown = [key for (key,) in rows_of(connection, unknown)]
        active = arrow_of(connection, ACTIVE_SQL)
        reports = arrow_of(connection, ACTIVE_REPORTS_SQL.format(horizon=horizon))
    # Before all of it becomes objects, which take the most memory.
    del tables, narrow, rewards
    _take_decisions(logged, active)
    del active
    _take_reports(logged, reports)
    del reports
    for client in logged.clients.values():
        if client.named:
            logged.unmatched += _name(logged, client, now - window)
    logged.forget_reports()
    logged.set_aside = {
        key: f"reward: found {reward.reward}, which its reports come to, expected a finite number. "
        "A report of mode last replaces them."
        for key, reward in logged.rewards.items()
        if not reward.is_finite
    }
    return logged


def _take_decisions(logged: Logged, active: pa.Table) -> None:
    """Make objects of the decisions of client episodes in which something may change."""
    clients: dict[str, ClientEpisode] = {}
    for name, source, key, us, request, step, file, *written in _rows(active):
        client = clients.get(name)
        if client is None:
            client = clients[name] = ClientEpisode(source)
        client.decisions.append(Decision(key, us, request, step))
        logged.file_of[key] = file
        reward, terminated, truncated, episode, number, is_last, since, said = written
        if number is not None:
            outcome = reward, terminated, truncated
            logged.written[key] = Written(outcome, episode, number, is_last, since, said)
    logged.clients = clients


def _take_reports(logged: Logged, reports: pa.Table) -> None:
    for key, name, request, step, mode, us, row, *outcome, feedback, final in _rows(reports):
        reward, terminated, truncated = outcome
        report = Report(us, row, reward, terminated, truncated, mode == SUM, feedback, final)
        if key is not None:
            logged.reports.setdefault(key, []).append(report)
        else:
            logged.clients[name].named.append(Named(report, request, step))
    logged.rewards = {key: folded(said) for key, said in logged.reports.items()}


def _rows(table: pa.Table) -> Iterator[tuple[Any, ...]]:
    for batch in table.to_batches(max_chunksize=65_536):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _name(logged: Logged, client: ClientEpisode, closing: int) -> int:
    """Give the reports that name a request or a step their decisions; return how many are orphaned.

    A report means the newest decision under its name that was taken before it came; if there is
    none, the first within a minute after, since the clocks of two servers differ.
    """
    timeline = Timeline(has_steps(client.decisions), logged.ends, logged.rank)
    decisions = iter(client.decisions)
    following = next(decisions, None)
    early = []
    for named in client.named:
        while following is not None and following.timestamp <= named.report.timestamp:
            timeline.take(following)
            following = next(decisions, None)
        if (decision := _meant(timeline, named)) is None:
            early.append(named)
            continue
        _say(logged, timeline, decision, named.report)
    while following is not None:
        timeline.take(following)
        following = next(decisions, None)
    orphaned = 0
    for named in early:
        decision = _meant(timeline, named, oldest=True)
        ahead = 0 if decision is None else decision.timestamp - named.report.timestamp
        if decision is not None and 0 < ahead <= ELSEWHERE_US:
            _say(logged, timeline, decision, named.report)
        else:
            orphaned += named.report.timestamp < closing
    return orphaned


def _meant(timeline: Timeline, named: Named, *, oldest: bool = False) -> Decision | None:
    if named.request_id is not None:
        return timeline.asked(named.request_id)
    return None if named.step is None else timeline.at(named.step, oldest=oldest)


def _say(logged: Logged, timeline: Timeline, decision: Decision, report: Report) -> None:
    ended = logged.ends(decision.key)
    logged.report(decision.key, report)
    if logged.ends(decision.key) != ended:
        timeline.cut_again(decision.key)
