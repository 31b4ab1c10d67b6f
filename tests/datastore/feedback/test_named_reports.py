"""Reports by the client's own names find their decisions, in whatever order all of it arrives."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import strategies as st

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.feedback.decision_id import DecisionSigner
from replaylake.datastore.feedback.decisions import (
    DECISION_ID,
    decisions_encoder,
    decisions_schema,
    ensure_feedback_tables,
    rewards_encoder,
    rewards_schema,
)
from replaylake.datastore.feedback.join import join_feedback
from replaylake.datastore.feedback.joiner import FeedbackJoiner
from replaylake.datastore.feedback.journal import Journal, JournalConfig
from replaylake.datastore.feedback.status import feedback_status
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.maintenance.compact import compact
from replaylake.datastore.maintenance.delete import delete
from replaylake.datastore.maintenance.fsck.fsck import fsck
from replaylake.datastore.maintenance.labels.annotate import annotate

NOW_S = 1_800_000_000.0
HOUR_S = 3600.0


class Log:
    """Decisions and reports, as servers log them, at times of the test's choosing."""

    def __init__(self, path: Path) -> None:
        self.lake = open_lake(path, create=True)
        self.dataset = self.lake.dataset("d")
        ensure_feedback_tables(self.dataset, Box((2,)), Discrete(3))
        self.signer = DecisionSigner(self.lake.signing_key(), "d", "00" * 6)
        self.sequence = itertools.count()

    def decide(self, second: float, episode: str | None = "e", **more: Any) -> str:
        key, record = self.decision(second, episode, **more)
        self.write_decisions([record])
        return key

    def decision(self, second: float, episode: str | None, **more: Any) -> tuple[str, Any]:
        timestamp = int((NOW_S + second) * 1e6)
        (key,) = self.signer.issue("bc", 1, timestamp)
        record = {"decision_id": key, "request_id": None, "episode_id": episode,
                  "timestamp": timestamp, "policy": "bc", "policy_version": 1,
                  "observation": [second, 0.5], "action": 1, "log_prob": -0.25,
                  "deterministic": False}  # fmt: skip
        return key, record | more

    def report(self, second: float, reward: float, **more: Any) -> None:
        self.write_reports([reported(second, reward, **more)])

    def write_decisions(self, records: list[Any]) -> None:
        encode = decisions_encoder(self.dataset)
        self.dataset.decisions.append(
            encode(records), producer="test", sequence=next(self.sequence)
        )

    def write_reports(self, records: list[Any]) -> None:
        encode = rewards_encoder(self.dataset)
        self.dataset.rewards.append(encode(records), producer="test", sequence=next(self.sequence))

    def run(self, second: float) -> Any:
        return join_feedback(self.lake, "d", now_s=NOW_S + second, window_s=HOUR_S)

    def steps(self, columns: str) -> list[tuple[Any, ...]]:
        if DECISION_ID not in self.dataset.spec.extras:
            return []
        rows = self.lake.sql(f"select {columns} from d.steps order by timestamp").to_pylist()
        return [tuple(row.values()) for row in rows]


def reported(second: float, reward: float, **more: Any) -> dict[str, Any]:
    return {"timestamp": int((NOW_S + second) * 1e6), "reward": reward, "terminated": False,
            "truncated": False, "mode": "last"} | more  # fmt: skip


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "lake")


def test_by_request_and_by_step(log: Log) -> None:
    log.decide(0, request_id="q0")
    log.decide(1, request_id="q1")
    log.decide(2, request_id="q2")
    log.report(3, 1.0, request_id="q0")
    log.report(3, 2.0, episode_id="e", step=1)
    log.report(3, 3.0, request_id="q2", terminated=True, final_observation=[7.0, 7.0])
    receipt = log.run(10)
    assert (receipt.episodes, receipt.steps, receipt.joined, receipt.orphaned) == (1, 3, 3, 0)
    assert log.steps("step, reward, terminated, final_observation") == [
        (0, 1.0, False, None),
        (1, 2.0, False, None),
        (2, 3.0, True, [7.0, 7.0]),
    ]
    assert (log.run(20).steps, log.run(20).late) == (0, 0)
    log.report(30, 9.0, episode_id="e", step=0)
    assert log.run(40).late == 1
    assert log.steps("reward, reward_late") == [(9.0, True), (2.0, False), (3.0, False)]
    assert fsck(log.lake).is_clean


def test_the_newest_decision_before_the_report_is_meant(log: Log) -> None:
    """An episode_id and its requests are used again."""
    for begin in (0, 100):
        for i in range(2):
            log.decide(begin + i, request_id=f"q{i}")
        log.report(begin + 5, 1.0 + begin, request_id="q0")
        log.report(begin + 6, 2.0 + begin, episode_id="e", step=1, terminated=True)
    log.report(50, 7.0, episode_id="e", step=0)
    assert log.run(200).episodes == 2
    assert log.steps("step, reward") == [(0, 7.0), (1, 2.0), (0, 101.0), (1, 102.0)]


def test_a_step_that_only_an_earlier_episode_has(log: Log) -> None:
    for i in range(3):
        log.decide(i, step=i)
    log.decide(10, step=0)  # a new episode, though nobody said that the other had ended
    log.report(11, 5.0, episode_id="e", step=2)
    log.report(12, 6.0, episode_id="e", step=0)
    log.run(2 * HOUR_S)
    assert log.steps("step, reward") == [(2, 5.0), (0, 6.0)]


def test_of_a_request_that_was_asked_again_the_step_is_rewarded(log: Log) -> None:
    log.decide(0, request_id="q")
    again = log.decide(1, request_id="q")
    log.report(2, 3.0, request_id="q", terminated=True)
    receipt = log.run(10)
    assert (receipt.steps, receipt.repeated) == (1, 1)
    assert log.steps("decision_id, step, reward") == [(again, 0, 3.0)]
    log.decide(20, request_id="q")  # once more, of a client that got no answer for long
    log.report(30, 4.0, request_id="q", terminated=True)
    log.run(40)
    assert log.steps("step, reward")[0] == (0, 3.0)


def test_a_lost_decision_leaves_a_gap_where_the_client_counts(log: Log) -> None:
    """A server that answers with a full disk loses decisions; no false successor is made."""
    for i in (0, 1, 3):
        log.decide(i, step=i)
        log.report(i + 0.5, float(i), episode_id="e", step=i, terminated=i == 3)
    assert log.run(10).steps == 3
    rows = log.steps("step, reward, final_observation")
    assert rows == [(0, 0.0, None), (1, 1.0, None), (3, 3.0, None)]
    following = log.lake.sql("select next_observation from d.transitions order by step").to_pylist()
    assert [row["next_observation"] for row in following] == [[1.0, 0.5], None, None]


def test_a_report_waits_while_a_decision_before_it_is_in_a_journal_yet(log: Log) -> None:
    """Else the first decision of the request would be the step, and the one acted on none."""
    log.decide(0, request_id="q")
    again, record = log.decision(1, "e", request_id="q")
    config = JournalConfig(flush_interval_s=3600)
    encode = decisions_encoder(log.dataset)
    journal = Journal(log.dataset.decisions, encode, worker="live", config=config)
    journal.append([json.dumps(record).encode()])
    log.report(2, 3.0, request_id="q", terminated=True)
    assert log.run(10).steps == 0
    journal.close()
    assert log.run(10).steps == 1
    assert log.steps("decision_id, reward") == [(again, 3.0)]


def test_a_new_episode_is_meant_though_an_older_report_is_known_of_the_old_one(log: Log) -> None:
    first = log.decide(0, step=0)
    log.report(50, 1.0, decision_id=first, terminated=True)
    assert log.run(60).steps == 1
    log.decide(20, step=0)  # both from a journal that was recovered late
    log.report(30, 2.0, episode_id="e", step=0, terminated=True)
    assert log.run(60).steps == 1
    assert log.steps("reward") == [(1.0,), (2.0,)]


def test_unmatched_reports_wait_then_are_orphaned_and_still_matched_later(log: Log) -> None:
    log.decide(0, request_id="there")
    log.report(1, 1.0, request_id="nobody")
    log.report(1, 1.0, episode_id="none", step=0)
    log.report(1, 1.0, episode_id="e", step=5)
    assert log.run(10).orphaned == 0
    assert log.run(HOUR_S + 10).orphaned == 3
    assert log.dataset.rewards.snapshot().num_rows == 3
    log.decide(0.5, None, request_id="nobody")  # from a journal that was recovered late
    receipt = log.run(HOUR_S + 20)
    assert (receipt.orphaned, receipt.steps) == (2, 1)


def test_a_report_a_little_before_its_decision_is_of_it(log: Log) -> None:
    """Clocks of two servers differ; an hour is no such difference."""
    log.decide(10, request_id="q")
    log.report(9, 1.0, request_id="q", terminated=True)
    log.decide(10, "f", request_id="p")
    log.report(9, 1.0, episode_id="f", step=0, terminated=True)
    log.decide(200, "g", request_id="x")
    log.report(9, 1.0, request_id="x", terminated=True)
    assert log.run(300).steps == 2


def test_sums_add_and_their_late_parts_too(log: Log) -> None:
    key = log.decide(0)
    log.report(1, 1.0, decision_id=key)
    log.report(5, 2.0, decision_id=key, mode="sum", feedback_id="b", terminated=True)
    log.run(10)
    assert log.steps("reward, terminated, reported") == [(3.0, True, "3.0 terminated")]
    version = log.dataset.snapshot().version
    # Older than what the step has, from another worker's journal: late, and once.
    log.report(4, 0.5, decision_id=key, mode="sum", feedback_id="a")
    log.report(6, 0.5, episode_id="e", step=0, mode="sum", feedback_id="a")
    assert log.run(20).late == 1
    assert log.steps("reward, reward_late, reported") == [(3.5, True, "3.5 terminated")]
    assert (log.run(30).late, log.dataset.snapshot().version) == (0, version + 1)


@pytest.mark.slow
def test_a_label_is_not_overruled_by_the_sum_that_it_replaced(log: Log) -> None:
    key = log.decide(0)
    log.report(1, 1.0, decision_id=key, mode="sum", feedback_id="a", terminated=True)
    log.run(10)
    labels = pa.table({"decision_id": [key], "r": [100.0]})
    annotate(log.lake, "d", labels, on=["decision_id"], set={"reward": "r"})
    log.report(20, 1.0, decision_id=key, mode="sum", feedback_id="a", terminated=True)
    assert log.run(30).late == 0
    assert log.steps("reward") == [(100.0,)]
    log.report(40, 1.0, decision_id=key, mode="sum", feedback_id="b")
    assert log.run(50).late == 1
    assert log.steps("reward") == [(2.0,)]


def test_rounds_read_nothing_while_nothing_is_new(log: Log) -> None:
    rounds = FeedbackJoiner(log.lake, "d", window_s=HOUR_S)
    key = log.decide(0)
    log.report(1, 1.0, decision_id=key)
    first = rounds.run(NOW_S + 10)
    assert first is not None
    assert (first.steps, first.waiting) == (0, 1)
    assert rounds.run(NOW_S + 20) is None
    done = rounds.run(NOW_S + HOUR_S + 1)  # its window has passed
    assert done is not None
    assert done.steps == 1
    assert rounds.run(NOW_S + 3 * HOUR_S) is None
    log.report(2, 5.0, episode_id="e", step=0)
    late = rounds.run(NOW_S + 3 * HOUR_S)
    assert late is not None
    assert late.late == 1


def test_status_counts_every_decision_once(log: Log) -> None:
    done = log.decide(0, "a")
    log.report(2, 1.0, decision_id=done, terminated=True)
    named = log.decide(0, "b", request_id="q")
    log.decide(1, "b", request_id="q")
    log.report(4, 1.0, decision_id=named)
    log.decide(5, None)
    log.decide(HOUR_S, None)
    log.report(1, 1.0, request_id="nobody")
    (stranger,) = log.signer.issue("old", 7, int(NOW_S * 1e6))
    log.report(1, 1.0, decision_id=stranger)
    log.run(HOUR_S + 10)
    log.report(HOUR_S, 8.0, decision_id=done, terminated=True)
    log.run(HOUR_S + 20)
    status = feedback_status(log.lake, "d", now_s=NOW_S + HOUR_S + 20, window_s=HOUR_S)
    total = status.total
    assert (total.decisions, total.joined, total.waiting) == (5, 2, 1)
    assert (total.unrewarded, total.repeated, total.late, total.orphaned) == (1, 1, 1, 2)
    assert total.join_rate == pytest.approx(2 / 3)
    assert [(c.policy, c.version, c.orphaned) for c in status.by_version] == [
        ("bc", 1, 0),
        ("old", 7, 1),
    ]
    assert (total.lag_p50_s, status.rewards) == ((HOUR_S + 4) / 2, 5)


@pytest.mark.slow
def test_tables_of_an_earlier_release_take_reports_by_name(tmp_path: Path) -> None:
    log = Log.__new__(Log)
    log.lake = open_lake(tmp_path / "lake", create=True)
    log.dataset = log.lake.dataset("d")
    log.signer = DecisionSigner(log.lake.signing_key(), "d", "00" * 6)
    log.sequence = itertools.count()
    log.dataset.create(Box((2,)), Discrete(3), mask_size=3)
    spec = log.dataset.spec
    later = {"step", "request_id", "episode_id", "feedback_id", "mode"}
    decisions = decisions_schema(spec.observation_space, spec.action_space)
    log.dataset.decisions.create(pa.schema([f for f in decisions if f.name != "step"]))
    rewards = [f for f in rewards_schema(spec.observation_space) if f.name not in later]
    rewards[0] = rewards[0].with_nullable(False)
    log.dataset.rewards.create(pa.schema(rewards))
    key, record = log.decision(0, "e")
    old = decisions_encoder(log.dataset)([record]).drop_columns(["step"])
    log.dataset.decisions.append(old, producer="old", sequence=0)
    said = rewards_encoder(log.dataset)([reported(1, 1.0, decision_id=key)])
    kept = [name for name in said.column_names if name not in later]
    log.dataset.rewards.append(said.select(kept), producer="old", sequence=0)
    assert (log.run(10).waiting, log.run(10).joined) == (1, 1)
    assert feedback_status(log.lake, "d", now_s=NOW_S + 10).total.joined == 1
    for _ in range(2):
        ensure_feedback_tables(log.dataset, Box((2,)), Discrete(3))
    assert log.dataset.rewards.snapshot().version == 2  # extended once
    log.decide(2, request_id="q", step=1)
    log.report(3, 2.0, request_id="q", terminated=True)
    assert log.run(10).steps == 2
    assert log.steps("step, reward, terminated") == [(0, 1.0, False), (1, 2.0, True)]
    compact(log.lake, "d", open_s=0.0)
    assert fsck(log.lake, all_versions=True).is_clean
    rows = DeltaTable(f"{log.lake.path}/d/_rewards").to_pyarrow_table().to_pylist()
    assert [row["decision_id"] for row in rows] == [key, None]


def test_a_run_that_is_killed_between_its_commits_is_made_good(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = log.decide(0, "a")
    log.report(1, 1.0, decision_id=first, mode="sum", feedback_id="x", terminated=True)
    log.run(10)
    log.report(2, 1.0, episode_id="a", step=0, mode="sum", feedback_id="y")
    log.decide(20, "b")
    log.report(21, 5.0, episode_id="b", step=0, terminated=True)

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("replaylake.datastore.feedback.join.apply_late", die)
    with pytest.raises(KeyboardInterrupt):
        log.run(30)
    monkeypatch.undo()
    receipt = log.run(30)
    assert (receipt.steps, receipt.late) == (0, 1)
    assert log.steps("reward, reward_late") == [(2.0, True), (5.0, False)]


@pytest.mark.slow
def test_what_is_deleted_takes_the_reports_that_name_it_along(log: Log) -> None:
    for begin, episode in ((0, "e"), (100, "e"), (200, "f")):
        log.decide(begin, episode, request_id="q")
        log.report(begin + 1, 1.0, request_id="q", terminated=True)
        log.report(begin + 2, 2.0, episode_id=episode, step=0, terminated=True)
    assert log.run(300).episodes == 3
    first, *_ = log.steps("episode_id")
    counted = delete(log.lake, "d", f"episode_id = '{first[0]}'", dry_run=True)
    done = delete(log.lake, "d", f"episode_id = '{first[0]}'")
    assert (done.num_decisions, done.num_rewards) == (1, 2)
    assert (counted.num_decisions, counted.num_rewards) == (1, 2)
    receipt = log.run(2 * HOUR_S)
    assert (receipt.steps, receipt.late, receipt.orphaned, receipt.rewards) == (0, 0, 0, 4)
    assert len(log.steps("episode_id")) == 2


@pytest.mark.slow
def test_a_report_of_a_step_leaves_with_the_episode_that_has_it(log: Log) -> None:
    """Two episodes under one id; the newest decision at the time is of the other one."""
    for begin, steps in ((0, (0, 1)), (10, (0,))):
        keys = [log.decide(begin + step, step=step) for step in steps]
        log.report(begin + 5, 1.0, decision_id=keys[-1], terminated=True)
    log.report(20, 4.0, episode_id="e", step=1, terminated=True)
    log.report(21, 5.0, episode_id="e", step=0, terminated=True)
    assert log.run(2 * HOUR_S).joined == 2
    episodes = [name for (name,) in log.steps("episode_id")]
    assert log.steps("reward") == [(4.0,), (5.0,)]
    done = delete(log.lake, "d", f"episode_id = '{episodes[0]}'")
    assert done.num_rewards == 2
    rows = log.lake.sql("select reward from d.rewards order by reward").to_pylist()
    assert [row["reward"] for row in rows] == [1.0, 5.0]
    assert log.run(3 * HOUR_S).late == 0
    assert log.steps("reward") == [(5.0,)]


@pytest.mark.parametrize("second_step", [0, 1])
def test_an_end_that_comes_after_what_followed_was_written(log: Log, second_step: int) -> None:
    """What looked like another try, or the next step, was another episode: the ids stay apart."""
    first = log.decide(0, step=0)
    second = log.decide(5, step=second_step)
    log.report(6, 2.0, decision_id=second, terminated=True)
    late_s = 10 if second_step == 0 else 2 * HOUR_S
    assert log.run(late_s).steps == 1
    log.report(late_s + 1, 1.0, decision_id=first, terminated=True)
    assert log.run(late_s + 10).steps == 1
    rows = log.steps("episode_id, decision_id, reward, terminated")
    assert [row[1:] for row in rows] == [(first, 1.0, True), (second, 2.0, True)]
    assert len({row[0] for row in rows}) == 2
    assert log.run(4 * HOUR_S).steps == 0
    assert fsck(log.lake).is_clean


# --- whatever is said of whatever, in whatever order and however often, the oracle says the same


@dataclass
class Step:
    """What is planned of a step; the oracle is `outcome`."""

    key: str = ""
    reports: list[dict[str, Any]] = field(default_factory=list)

    def outcome(self) -> tuple[float, bool, bool] | None:
        said, seen = None, set()
        for report in sorted(self.reports, key=lambda r: r["timestamp"]):
            name = report.get("feedback_id")
            if name is not None and name in seen:
                continue
            seen.add(name)
            now = report["reward"], report["terminated"], report["truncated"]
            if report["mode"] == "sum" and said is not None:
                now = now[0] + said[0], now[1] or said[1], now[2] or said[2]
            said = now
        return said


@st.composite
def plans(draw: Any) -> list[tuple[bool, int, list[list[list[tuple[str, str, int, int]]]]]]:
    """Return client episodes: by step?, and of each episode of each step its reports.

    A report is (named by, mode, reward, how often it is sent).
    """
    report = st.tuples(
        st.sampled_from(["decision", "request", "step"]),
        st.sampled_from(["last", "sum"]),
        st.integers(1, 9),
        st.integers(1, 2),
    )
    episode = st.lists(st.lists(report, max_size=3), min_size=1, max_size=4)
    clients = []
    for _ in range(draw(st.integers(1, 3))):
        by_step = draw(st.booleans())
        clients.append(
            (by_step, 0, draw(st.lists(episode, min_size=1, max_size=2 if by_step else 1)))
        )
    return clients


@pytest.mark.slow
@hypothesis.settings(deadline=None, max_examples=8)
@hypothesis.given(plan=plans(), data=st.data())
def test_it_is_what_the_oracle_says(
    plan: Any, data: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    log = Log(tmp_path_factory.mktemp("lake") / "lake")
    decisions, reports, steps = [], [], []
    for client, (by_step, _, episodes) in enumerate(plan):
        second = 0.0
        for number, episode in enumerate(episodes):
            planned = []
            for i, _ in enumerate(episode):
                names = {"request_id": f"{client}/{number}/{i}", "step": i if by_step else None}
                step = Step()
                step.key, record = log.decision(second + i, f"e{client}", **names)
                decisions.append(record)
                planned.append((step, names["request_id"], i))
                steps.append(step)
            second += len(episode)
            for (step, request, i), said in zip(planned, episode, strict=True):
                for nth, (by, mode, reward, times) in enumerate(said):
                    second += 1
                    name = {
                        "decision": {"decision_id": step.key},
                        "request": {"request_id": request},
                        "step": {"episode_id": f"e{client}", "step": i},
                    }[by]
                    more = {"mode": mode, "terminated": i == len(episode) - 1,
                            "feedback_id": f"f{nth}"}  # fmt: skip
                    sent = reported(second, float(reward), **more)
                    step.reports.append(sent)
                    reports += [sent | name | {"timestamp": sent["timestamp"] + k}
                                for k in range(times)]  # fmt: skip
            second += 1
    log.write_decisions(decisions)
    order = data.draw(st.permutations(reports))
    size = max(1, len(order) // 2)
    for begin in range(0, len(order), size):
        log.write_reports(order[begin : begin + size])
        log.run(1000)
    log.run(2 * HOUR_S)
    assert (again := log.run(3 * HOUR_S)).steps == 0
    assert again.late == 0
    found = {row[0]: row[1:] for row in log.steps("decision_id, reward, terminated, truncated")}
    expected = {step.key: outcome for step in steps if (outcome := step.outcome()) is not None}
    assert found == expected
    assert (again.joined, again.orphaned) == (len(expected), 0)
    assert len(set(log.steps("episode_id, step"))) == len(expected)
