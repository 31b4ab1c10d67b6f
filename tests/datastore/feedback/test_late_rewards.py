"""A reward that is reported after its step was written changes it, once and in one commit."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.feedback.decision_id import DecisionSigner
from replaylake.datastore.feedback.decisions import (
    decisions_encoder,
    ensure_feedback_tables,
    rewards_encoder,
)
from replaylake.datastore.feedback.join import join_feedback
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.maintenance.compact import compact
from replaylake.datastore.maintenance.labels.annotate import annotate

NOW_S = 1_800_000_000.0
HOUR_S = 3600.0


class Log:
    """Decisions and rewards, as servers log them."""

    def __init__(self, path: Path) -> None:
        self.lake = open_lake(path, create=True)
        self.dataset = self.lake.dataset("d")
        ensure_feedback_tables(self.dataset, Box((2,)), Discrete(3))
        self.signer = DecisionSigner(self.lake.signing_key(), "d", "00" * 6)
        self.sequence = 0

    def decide(self, second: float, client: str | None = "e") -> str:
        timestamp = int((NOW_S + second) * 1e6)
        (key,) = self.signer.issue("bc", 1, timestamp)
        record = {"decision_id": key, "request_id": None, "episode_id": client,
                  "timestamp": timestamp, "policy": "bc", "policy_version": 1,
                  "observation": [second, 0.5], "action": 1, "log_prob": -0.25,
                  "deterministic": False}  # fmt: skip
        self._append(self.dataset.decisions, decisions_encoder(self.dataset), record)
        return key

    def reward(self, key: str, second: float, reward: float, **more: Any) -> None:
        record = {"decision_id": key, "timestamp": int((NOW_S + second) * 1e6), "reward": reward,
                  "terminated": False, "truncated": False, "final_observation": None}  # fmt: skip
        encode = rewards_encoder(self.dataset)
        self._append(self.dataset.rewards, encode, record | more)

    def run(self, second: float, window_s: float = HOUR_S) -> Any:
        return join_feedback(self.lake, "d", now_s=NOW_S + second, window_s=window_s)

    def steps(self, columns: str) -> list[tuple[Any, ...]]:
        rows = self.lake.sql(f"select {columns} from d.steps order by timestamp").to_pylist()
        return [tuple(row.values()) for row in rows]

    def _append(self, table: Any, encode: Any, record: dict[str, Any]) -> None:
        self.sequence += 1
        table.append(encode([record]), producer="test", sequence=self.sequence)


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "lake")


def test_it_changes_the_step_in_one_commit_and_says_so(log: Log) -> None:
    keys = [log.decide(0), log.decide(1)]
    log.reward(keys[0], 2, 1.0)
    log.reward(keys[1], 2, 1.0, terminated=True)
    assert log.run(10).late == 0
    assert log.steps("reward, reward_late, epoch(rewarded_at)") == [
        (1.0, False, NOW_S + 2),
        (1.0, False, NOW_S + 2),
    ]
    before = log.dataset.snapshot()
    log.reward(keys[0], 20, 5.0)
    receipt = log.run(30)
    assert (receipt.late, receipt.ends_refused, receipt.steps) == (1, 0, 0)
    assert receipt.version == before.version + 1 == log.dataset.snapshot().version
    assert log.dataset.commit_info(receipt.version)["operation"] == "LATE REWARDS"
    assert log.steps("reward, reward_late, epoch(rewarded_at), terminated") == [
        (5.0, True, NOW_S + 20, False),
        (1.0, False, NOW_S + 2, True),
    ]
    assert before.table.read().column("reward").to_pylist() == [1.0, 1.0]
    assert (log.run(40).late, log.dataset.snapshot().version) == (0, receipt.version)
    oracle = DeltaTable(str(log.dataset.path)).to_pyarrow_table()
    assert sorted(oracle["reward"].to_pylist()) == [1.0, 5.0]


def test_the_last_by_time_counts_whatever_arrives_last(log: Log) -> None:
    key = log.decide(0, None)
    log.reward(key, 5, 2.0, terminated=True)
    log.run(10)
    log.reward(key, 3, 9.0, terminated=True)  # from a journal that was recovered later
    assert log.run(20).late == 0
    log.reward(key, 8, 4.0, terminated=True)
    log.reward(key, 7, 3.0, terminated=True)
    assert log.run(30).late == 1
    assert log.steps("reward") == [(4.0,)]


def test_a_report_that_is_repeated_does_not_undo_a_label(log: Log) -> None:
    key = log.decide(0, None)
    log.reward(key, 1, 1.0, terminated=True)
    log.run(10)
    labels = pa.table({"decision_id": [key], "r": [100.0]})
    annotate(log.lake, "d", labels, on=["decision_id"], set={"reward": "r"})
    log.reward(key, 20, 1.0, terminated=True)  # the client sends it again
    assert log.run(30).late == 0
    assert log.steps("reward") == [(100.0,)]
    log.reward(key, 40, 2.0, terminated=True)  # and then something new
    assert log.run(50).late == 1
    assert log.steps("reward, reward_late") == [(2.0, True)]


def test_an_end_that_comes_late_ends_the_last_step(log: Log) -> None:
    keys = [log.decide(0), log.decide(1)]
    for key in keys:
        log.reward(key, 2, 1.0)
    assert log.run(HOUR_S + 10).steps == 2
    later = log.decide(HOUR_S + 20)
    log.reward(keys[1], HOUR_S + 30, 1.0, truncated=True, final_observation=[7.0, 7.5])
    log.reward(later, HOUR_S + 40, 3.0, terminated=True)
    receipt = log.run(HOUR_S + 50)
    assert (receipt.late, receipt.ends_refused, receipt.steps) == (1, 0, 1)
    columns = "step, reward, terminated, truncated, final_observation, reward_late"
    assert log.steps(columns) == [
        (0, 1.0, False, False, None, False),
        (1, 1.0, False, True, [7.0, 7.5], True),
        (0, 3.0, True, False, None, False),  # what came after the end is another episode
    ]


def test_an_end_where_steps_follow_is_refused_and_its_reward_taken(log: Log) -> None:
    keys = [log.decide(0), log.decide(1)]
    log.reward(keys[0], 2, 1.0)
    log.reward(keys[1], 2, 1.0, terminated=True)
    log.run(10)
    log.reward(keys[0], 20, 5.0, terminated=True)
    log.reward(keys[1], 20, 6.0)  # no longer terminated
    receipt = log.run(30)
    assert (receipt.late, receipt.ends_refused) == (2, 2)
    assert log.steps("reward, terminated, step") == [(5.0, False, 0), (6.0, True, 1)]
    assert log.run(40).late == 0


def test_the_kind_of_an_end_can_change(log: Log) -> None:
    key = log.decide(0)
    log.reward(key, 1, 1.0, terminated=True)
    log.run(10)
    log.reward(key, 20, 1.0, truncated=True, final_observation=[1.0, 2.0])
    assert log.run(30).late == 1
    assert log.steps("terminated, truncated, final_observation") == [(False, True, [1.0, 2.0])]


def test_late_and_new_in_one_run(log: Log) -> None:
    first = log.decide(0, None)
    log.reward(first, 1, 1.0, terminated=True)
    log.run(10)
    second = log.decide(20, None)
    log.reward(second, 21, 2.0, terminated=True)
    log.reward(first, 22, 3.0, terminated=True)
    receipt = log.run(30)
    assert (receipt.late, receipt.steps) == (1, 1)
    assert log.steps("reward, reward_late") == [(3.0, True), (2.0, False)]


@pytest.mark.slow
def test_beside_a_compactor_and_another_run(log: Log) -> None:
    keys = []
    for number in range(6):
        keys.append(log.decide(number, None))
        log.reward(keys[-1], number, 1.0, terminated=True)
        log.run(number + 1)
    for number, key in enumerate(keys):
        log.reward(key, 20, 10.0 + number, terminated=True)
    failures: list[BaseException] = []
    late: list[int] = []

    def work(index: int) -> None:
        try:
            lake = open_lake(log.lake.path)
            if index == 0:
                for _ in range(3):
                    compact(lake, "d")
            else:
                late.append(join_feedback(lake, "d", now_s=NOW_S + 30).late)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    late.append(log.run(40).late)
    assert sum(late) == 6
    assert log.steps("reward") == [(10.0 + number,) for number in range(6)]
