"""Decisions and rewards become episodes: once, in order, and with nothing invented."""

import json

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Dict, Discrete
from replaylake.datastore.errors import NotFoundError, SchemaMismatchError
from replaylake.datastore.feedback import logged_feedback as served
from replaylake.datastore.feedback.decision_id import DecisionSigner, read_unverified
from replaylake.datastore.feedback.decisions import (
    decisions_encoder,
    ensure_feedback_tables,
    rewards_encoder,
)
from replaylake.datastore.feedback.join import join_feedback
from replaylake.datastore.feedback.journal import Journal, JournalConfig
from replaylake.datastore.feedback.segments import frame_records, journal_folder
from replaylake.datastore.feedback.waits import Wait
from replaylake.datastore.lake.lake import open_lake

OBSERVATION, ACTION = Box((2,)), Discrete(3)
NOW_S = 1_800_000_000.0
HOUR_S = 3600.0


class Log:
    """Writes decisions and rewards as a server does, at times of the test's choosing."""

    def __init__(self, path, observation=OBSERVATION, action=ACTION):
        self.lake = open_lake(path, create=True)
        self.dataset = self.lake.dataset("d")
        ensure_feedback_tables(self.dataset, observation, action)
        self.signer = DecisionSigner(self.lake.signing_key(), "d", "00" * 6)
        self.sequence = 0

    def decision(self, second, value, episode="e", request=None, **more):
        timestamp = int((NOW_S + second) * 1e6)
        (key,) = self.signer.issue("bc", 4, timestamp)
        record = {
            "decision_id": key,
            "request_id": request,
            "episode_id": episode,
            "timestamp": timestamp,
            "policy": "bc",
            "policy_version": 4,
            "observation": [value, 0.5],
            "action": 1,
            "log_prob": -0.25,
            "deterministic": False,
            **more,
        }
        self._append(self.dataset.decisions, decisions_encoder(self.dataset), record)
        return key

    def reward(self, key, reward, second=0.0, terminated=False, truncated=False, final=None):
        record = {
            "decision_id": key,
            "timestamp": int((NOW_S + second) * 1e6),
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
            "final_observation": final,
        }
        self._append(self.dataset.rewards, rewards_encoder(self.dataset), record)

    def run(self, second=10.0, window_s=HOUR_S):
        return join_feedback(self.lake, "d", window_s=window_s, now_s=NOW_S + second)

    def steps(self, columns="*"):
        text = f"select {columns} from d.steps order by episode_id, step"
        return self.lake.sql(text).to_pylist()

    def _append(self, table, encode, record):
        self.sequence += 1
        table.append(encode([record]), producer="test", sequence=self.sequence)


@pytest.fixture
def log(tmp_path):
    return Log(tmp_path / "lake")


def test_an_ended_episode_is_written_whole(log):
    keys = [log.decision(i, i, request=f"r{i}") for i in range(3)]
    log.reward(keys[1], 2.0)
    log.reward(keys[0], 1.0)
    log.reward(keys[2], 3.0, terminated=True, final=[9.0, 9.5])
    receipt = log.run()
    assert (receipt.episodes, receipt.steps, receipt.joined, receipt.waiting) == (1, 3, 3, 0)
    assert receipt.to_json()["version"] == log.dataset.snapshot().version
    columns = (
        "step, observation, action, reward, terminated, truncated, final_observation, policy, "
        "policy_version, source_episode_id, decision_id, request_id, epoch_us(timestamp) as us"
    )
    rows = log.steps(columns)
    assert [row["observation"] for row in rows] == [[0.0, 0.5], [1.0, 0.5], [2.0, 0.5]]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [row["reward"] for row in rows] == [1.0, 2.0, 3.0]
    assert [row["terminated"] for row in rows] == [False, False, True]
    assert [row["final_observation"] for row in rows] == [None, None, [9.0, 9.5]]
    assert [row["decision_id"] for row in rows] == keys
    assert [row["request_id"] for row in rows] == ["r0", "r1", "r2"]
    assert [row["us"] for row in rows] == [int((NOW_S + i) * 1e6) for i in range(3)]
    assert {(row["policy"], row["policy_version"], row["source_episode_id"]) for row in rows} == {
        ("bc", 4, "e")
    }
    assert {row["behavior_log_prob"] for row in log.steps("behavior_log_prob")} == {-0.25}
    assert {row["episode_id"] for row in log.steps("episode_id")} == {f"served/{keys[0]}"}


def test_again_adds_nothing(log):
    log.reward(log.decision(0, 1), 1.0, terminated=True)
    assert log.run().steps == 1
    version = log.dataset.snapshot().version
    again = log.run()
    assert (again.steps, again.episodes, again.version) == (0, 0, version)
    assert log.dataset.snapshot().version == version


def test_an_open_episode_waits_and_then_keeps_its_end_open(log):
    first, second = log.decision(0, 0), log.decision(1, 1)
    log.reward(first, 1.0)
    log.reward(second, 1.0)
    waiting = log.run(second=10)
    assert (waiting.steps, waiting.waiting) == (0, 2)
    assert log.run(second=HOUR_S + 10).steps == 2
    assert [(r["terminated"], r["truncated"]) for r in log.steps()] == [(False, False)] * 2
    # The client comes back: its later steps follow on, in the same episode.
    third = log.decision(HOUR_S + 20, 2)
    log.reward(third, 5.0, terminated=True)
    assert log.run(second=HOUR_S + 30).steps == 1
    assert [(r["step"], r["reward"], r["terminated"]) for r in log.steps()] == [
        (0, 1.0, False),
        (1, 1.0, False),
        (2, 5.0, True),
    ]


def test_the_receipt_states_why_decisions_wait_and_until_when(log):
    """Two wait for an end, three for rewards, of which one episode has a part."""
    for second in (0, 1):
        log.reward(log.decision(second, second, episode="open"), 1.0)
    log.reward(log.decision(2, 0, episode="part"), 1.0)
    log.decision(3, 1, episode="part")
    log.decision(5, 0, episode="none")
    receipt = log.run(second=10)
    until = {s: f"2027-01-15T09:00:{s:02d}Z" for s in (1, 3, 5)}  # an hour after NOW_S + s
    assert receipt.waits == [
        Wait("end", 2, until[1], until[1]),
        Wait("reward", 3, until[3], until[5]),
    ]
    assert receipt.waiting == 5
    assert receipt.to_json()["waits"][0] == {
        "reason": "end", "num": 2, "first_until": until[1], "last_until": until[1],
    }  # fmt: skip
    # They are settled a moment after that, and not before.
    assert log.run(second=HOUR_S + 1).waiting == 5
    assert log.run(second=HOUR_S + 2).waiting == 3
    assert log.run(second=HOUR_S + 6).waits == []


def test_an_episode_that_was_joined_before_waits_for_nothing(log):
    log.reward(log.decision(0, 0, episode="whole"), 1.0, terminated=True)
    assert log.run(second=5).joined == 1
    log.decision(10, 0, episode="none")
    until = "2027-01-15T09:00:10Z"  # an hour after the second decision
    assert log.run(second=20).waits == [Wait("reward", 1, until, until)]


def test_a_window_that_is_longer_than_dates_go_is_one(log):
    log.decision(0, 0)
    receipt = join_feedback(log.lake, "d", now_s=NOW_S + 10, window_s=1e12)
    assert receipt.waits == [Wait("reward", 1, "9999-12-31T23:59:59Z", "9999-12-31T23:59:59Z")]


def test_a_step_without_a_reward_leaves_a_gap_but_no_false_successor(log):
    keys = [log.decision(i, i) for i in range(4)]
    log.reward(keys[0], 1.0)
    log.reward(keys[2], 3.0)
    log.reward(keys[3], 4.0, truncated=True)
    assert log.run(second=10).waiting == 4
    receipt = log.run(second=HOUR_S + 10)
    assert (receipt.episodes, receipt.steps, receipt.unrewarded) == (2, 3, 1)
    rows = log.steps()
    assert [row["step"] for row in rows] == [0, 2, 3]
    assert rows[0]["final_observation"] == [1.0, 0.5]
    assert [row["truncated"] for row in rows] == [False, False, True]
    following = log.lake.sql("select next_observation from d.transitions order by step").to_pylist()
    assert [row["next_observation"] for row in following] == [[1.0, 0.5], [3.0, 0.5], None]
    # Its reward, should it come after all, fills the gap.
    log.reward(keys[1], 2.0, second=HOUR_S + 20)
    assert log.run(second=HOUR_S + 30).steps == 1
    assert [(row["step"], row["reward"]) for row in log.steps()] == [
        (0, 1.0), (1, 2.0), (2, 3.0), (3, 4.0)
    ]  # fmt: skip


def test_the_last_of_several_rewards_counts_and_a_later_one_is_late(log):
    key = log.decision(0, 0, episode=None)
    log.reward(key, 2.0, second=2, terminated=True)
    log.reward(key, 1.0, second=1, terminated=True)
    log.reward(key, 2.0, second=2, terminated=True)
    receipt = log.run()
    assert (receipt.rewards, receipt.joined, receipt.steps, receipt.late) == (3, 1, 1, 0)
    assert [row["reward"] for row in log.steps()] == [2.0]
    log.reward(key, 7.0, second=20, terminated=True)
    later = log.run(second=30)
    assert (later.late, later.steps) == (1, 0)
    assert [row["reward"] for row in log.steps()] == [7.0]


def test_decisions_without_an_episode_are_episodes_of_one_step(log):
    rewarded, waiting = log.decision(0, 0, episode=None), log.decision(1, 1, episode=None)
    log.reward(rewarded, 1.0, terminated=True)
    receipt = log.run()
    assert (receipt.episodes, receipt.steps, receipt.waiting) == (1, 1, 1)
    assert log.run(second=HOUR_S + 10).unrewarded == 1
    assert [row["decision_id"] for row in log.steps()] == [rewarded]
    assert waiting not in {row["decision_id"] for row in log.steps()}


def test_an_episode_id_used_again_begins_another_episode(log):
    for start in (0, 10):
        first, second = log.decision(start, 0), log.decision(start + 1, 1)
        log.reward(first, 1.0)
        log.reward(second, 1.0, terminated=True)
    assert log.run(second=20).episodes == 2
    assert [row["step"] for row in log.steps()] == [0, 1, 0, 1]


def test_a_request_sent_again_counts_once(log):
    log.decision(0, 0, request="a")  # its answer never arrived
    again = log.decision(1, 0, request="a")
    last = log.decision(2, 1, request="b")
    log.reward(again, 1.0)
    log.reward(last, 1.0, terminated=True)
    receipt = log.run()
    assert (receipt.steps, receipt.repeated, receipt.waiting) == (2, 1, 0)
    assert [row["decision_id"] for row in log.steps()] == [again, last]


def test_a_request_sent_again_after_its_window_moves_no_step(log):
    first, gap = log.decision(0, 0), log.decision(1, 1, request="q")
    third = log.decision(2, 2)
    log.reward(first, 1.0)
    log.reward(third, 3.0)
    assert log.run(HOUR_S + 10).steps == 2
    again = log.decision(HOUR_S + 20, 3, request="q")
    log.reward(again, 4.0, second=HOUR_S + 21, terminated=True)
    log.run(2 * HOUR_S + 30)
    rows = [(row["decision_id"], row["step"]) for row in log.steps()]
    assert rows == [(first, 0), (third, 2), (again, 3)]
    assert gap not in dict(rows)


def test_orphaned_rewards_are_counted(log):
    (stranger,) = log.signer.issue("bc", 4, int(NOW_S * 1e6))
    log.reward(stranger, 1.0)
    assert log.run().orphaned == 1


def test_an_episode_that_reaches_into_a_live_journal_waits(log):
    first = log.decision(0, 0)
    last = log.decision(2, 2)
    log.reward(first, 1.0)
    log.reward(last, 1.0, terminated=True)
    journal = Journal(
        log.dataset.decisions,
        decisions_encoder(log.dataset),
        worker="live",
        config=JournalConfig(flush_interval_s=3600),
    )
    middle, at = log.signer.issue("bc", 4, int((NOW_S + 1) * 1e6))[0], int((NOW_S + 1) * 1e6)
    record = {"decision_id": middle, "episode_id": "e", "timestamp": at, "policy": "bc",
              "policy_version": 4, "observation": [1.0, 0.5], "action": 0, "log_prob": None,
              "deterministic": True}  # fmt: skip
    journal.append([json.dumps(record).encode()])
    assert (log.run().steps, log.run().waiting) == (0, 2)
    journal.close()
    log.reward(middle, 1.0)
    assert log.run().steps == 3
    assert [row["observation"][0] for row in log.steps()] == [0.0, 1.0, 2.0]


def test_a_dead_servers_journal_is_committed_first(log):
    (key,) = log.signer.issue("bc", 4, int(NOW_S * 1e6))
    record = json.dumps(
        {"decision_id": key, "timestamp": int(NOW_S * 1e6), "reward": 3.5, "terminated": True,
         "truncated": False, "final_observation": None}
    ).encode()  # fmt: skip
    decided = json.dumps(
        {"decision_id": key, "episode_id": None, "timestamp": int(NOW_S * 1e6), "policy": "bc",
         "policy_version": 4, "observation": [1, 2], "action": 2, "log_prob": None,
         "deterministic": True}
    ).encode()  # fmt: skip
    for table, data in ((log.dataset.decisions, decided), (log.dataset.rewards, record)):
        journal_folder(table).mkdir()
        (journal_folder(table) / "dead-0.jsonl").write_bytes(frame_records([data])[0])
    receipt = log.run()
    assert (receipt.recovered, receipt.steps) == (2, 1)
    assert [(r["reward"], r["action"], r["behavior_log_prob"]) for r in log.steps()] == [
        (3.5, 2, None)
    ]


def test_a_record_that_cannot_be_a_row_holds_nothing_up(log):
    folder = journal_folder(log.dataset.rewards)
    folder.mkdir()
    key = log.decision(0, 0, episode=None)
    reward = {"decision_id": key, "timestamp": int(NOW_S * 1e6), "reward": 2.0, "terminated": True,
              "truncated": False, "final_observation": None}  # fmt: skip
    poison = [
        {**reward, "reward": "much"},
        {**reward, "reward": None},
        {**reward, "timestamp": 2**63},
        {**reward, "final_observation": [1]},
        {**reward, "final_observation": {"x": 1}},
        {},
    ]
    records = [json.dumps(record).encode() for record in [*poison, reward]]
    (folder / "dead-0.jsonl").write_bytes(b"".join(frame_records(records)))
    receipt = log.run()
    assert (receipt.recovered, receipt.damaged, receipt.steps) == (1, 6, 1)
    assert [path.name for path in folder.iterdir()] == ["dead-0.damaged"]
    assert log.run().damaged == 0
    assert [row["reward"] for row in log.steps()] == [2.0]


def test_a_decision_written_while_the_tables_are_read_gets_no_false_successor(log, monkeypatch):
    # Two workers share an episode. The second's step is not yet in its journal when that is looked
    # at, and the first's later step, which ends the episode, is committed before the tables are
    # read.
    log.reward(log.decision(0, 0), 1.0)
    config = JournalConfig(flush_interval_s=3600)
    encoder = decisions_encoder(log.dataset)
    journal = Journal(log.dataset.decisions, encoder, worker="live", config=config)
    (middle,) = log.signer.issue("bc", 4, int((NOW_S + 5) * 1e6))
    record = {"decision_id": middle, "episode_id": "e", "timestamp": int((NOW_S + 5) * 1e6),
              "policy": "bc", "policy_version": 4, "observation": [1.0, 0.5], "action": 0,
              "log_prob": None, "deterministic": True}  # fmt: skip
    look = served.first_pending

    def look_and_lose_the_race(*args):
        found = look(*args)
        if not journal.num_pending:
            journal.append([json.dumps(record).encode()])
            log.reward(log.decision(6, 2), 3.0, terminated=True)
        return found

    monkeypatch.setattr(served, "first_pending", look_and_lose_the_race)
    receipt = log.run(second=4)
    assert (receipt.steps, receipt.waiting) == (0, 2)
    monkeypatch.undo()
    waiting = log.run(second=10)  # it is in the journal yet
    assert waiting.waits == [Wait("journal", 2, None, None)]
    journal.close()
    log.reward(middle, 2.0)
    assert log.run(second=10).steps == 3
    assert [(row["step"], row["reward"]) for row in log.steps()] == [(0, 1.0), (1, 2.0), (2, 3.0)]


def test_masks_travel_and_their_absence_means_every_action(log):
    first = log.decision(0, 0, action_mask=[True, True, False])
    last = log.decision(1, 1)
    log.reward(first, 1.0)
    log.reward(last, 1.0, terminated=True)
    log.run()
    assert [row["action_mask"] for row in log.steps("action_mask")] == [
        [True, True, False],
        [True, True, True],
    ]


def test_served_steps_join_a_dataset_that_was_ingested(tmp_path):
    lake = open_lake(tmp_path, create=True)
    lake.dataset("d").append(
        [Episode("log/1", np.zeros((2, 2), np.float32), np.asarray([0, 2]), np.ones(2), True)]
    )
    log = Log(tmp_path)
    log.reward(log.decision(0, 1), 1.0, terminated=True)
    log.run()
    rows = log.steps("episode_id, decision_id")
    assert [row["decision_id"] is None for row in rows] == [True, True, False]


def test_spaces_that_differ_are_refused(tmp_path):
    lake = open_lake(tmp_path, create=True)
    lake.dataset("d").create(OBSERVATION, Discrete(2))
    with pytest.raises(SchemaMismatchError, match=r"Discrete\(3\), the dataset's is Discrete\(2\)"):
        ensure_feedback_tables(lake.dataset("d"), OBSERVATION, ACTION)
    with pytest.raises(SchemaMismatchError, match=r"Box float32\[3\]"):
        ensure_feedback_tables(lake.dataset("d"), Box((3,)), Discrete(2))
    # Bounds may differ: a log's are often unknown.
    ensure_feedback_tables(lake.dataset("d"), Box((2,), low=-1, high=1), Discrete(2))


def test_structured_observations_travel(tmp_path):
    space = Dict({"position": Box((2,)), "gear": Discrete(4)})
    log = Log(tmp_path, observation=space)
    key = log.decision(0, 0, observation={"position": [1, 2.5], "gear": 3})
    log.reward(key, 1.0, terminated=True, final={"position": [0, 0], "gear": 0})
    log.run()
    (row,) = log.steps()
    assert row["observation"] == {"position": [1.0, 2.5], "gear": 3}
    assert row["final_observation"] == {"position": [0.0, 0.0], "gear": 0}


def test_nothing_served_is_a_clear_error(tmp_path):
    lake = open_lake(tmp_path, create=True)
    with pytest.raises(NotFoundError, match="--log-to d"):
        join_feedback(lake, "d")


def test_a_worker_may_issue_more_decisions_than_32_bits_count(monkeypatch):
    signer = DecisionSigner(b"k" * 32, "d")
    monkeypatch.setattr(signer, "_counter", 2**32 - 1)
    ids = signer.issue("bc", 1, 5, 3)
    assert ids == sorted(ids)
    said = [signer.read(key) for key in ids]
    assert [one.counter for one in said if one] == [2**32 - 1, 2**32, 2**32 + 1]


def test_decision_ids_sort_by_time_and_cannot_be_forged():
    signer = DecisionSigner(b"k" * 32, "d")
    ids = [signer.issue("bc-1", 7, 1_000_000 + i)[0] for i in range(300)]
    ids += signer.issue("bc-1", 7, 2_000_000, 300)
    assert ids == sorted(ids)
    assert len(set(ids)) == 600
    said = signer.read(ids[5])
    assert said is not None
    assert (said.policy, said.policy_version, said.timestamp) == ("bc-1", 7, 1_000_005)
    assert (said.worker, said.counter) == (signer.worker, 5)
    assert read_unverified(ids[5]) == said
    assert all(key.startswith("d") for key in ids)  # and never with the `-` of an option
    other_dataset = DecisionSigner(b"k" * 32, "e", signer.worker)
    other_key = DecisionSigner(b"x" * 32, "d", signer.worker)
    assert other_dataset.read(ids[5]) is None
    assert other_key.read(ids[5]) is None
    swapped = [
        ids[0][:i] + ("A" if c != "A" else "B") + ids[0][i + 1 :] for i, c in enumerate(ids[0])
    ]
    assert all(signer.read(text) is None for text in swapped)
    for text in (
        "",
        "x",
        ids[0] + "A",
        ids[0] + "=",
        ids[0][:-1],
        " " + ids[0],
        "é" * 50,
        "\ud800",
    ):
        assert signer.read(text) is None
        assert read_unverified("") is None


BACK = -HOUR_S


def test_a_clock_that_is_set_back_loses_and_doubles_nothing(log):
    first = [log.decision(i, i, "before", request=f"b{i}") for i in range(2)]
    log.reward(first[0], 1.0, 2)
    log.reward(first[1], 2.0, 3, terminated=True)
    open_before = log.decision(4, 4, "across", step=0)
    assert log.run(5).steps == 2
    # Another process of the server, by a clock that is an hour behind from here on.
    later = log.decision(BACK + 6, 6, "across", step=1)
    log.reward(open_before, 3.0, BACK + 7)
    log.reward(later, 4.0, BACK + 8, terminated=True)
    alone = log.decision(BACK + 9, 9, None)
    log.reward(alone, 5.0, BACK + 10)
    known = set(first)
    for second in (BACK + 11, BACK + 12, 20, HOUR_S, 3 * HOUR_S):
        log.run(second)
        rows = log.steps("source_episode_id as episode, step, reward, terminated, decision_id")
        assert known <= {row["decision_id"] for row in rows}
        known = {row["decision_id"] for row in rows}
        assert len(known) == len(rows)
    assert known == {*first, open_before, later, alone}
    across = [row for row in rows if row["episode"] == "across"]
    assert [(row["step"], row["reward"], row["terminated"]) for row in across] == [
        (0, 3.0, False),
        (1, 4.0, True),
    ]


def test_late_rewards_by_a_clock_that_was_set_back_count_once(log):
    key = log.decision(0, 1)
    log.reward(key, 1.0, 1, terminated=True)
    assert log.run(2).steps == 1
    log.reward(key, 7.0, BACK + 3, terminated=True)
    for second in (BACK + 4, 10, 2 * HOUR_S):
        log.run(second)
    # By its time it came first, and the last one by time counts.
    assert log.steps("reward, reward_late") == [{"reward": 1.0, "reward_late": False}]


def test_a_report_by_name_that_seems_to_be_of_an_hour_before_is_counted(log):
    key = log.decision(0, 1, request="r")
    report = {"request_id": "r", "timestamp": int((NOW_S + BACK) * 1e6), "reward": 1.0,
              "terminated": True, "truncated": False, "final_observation": None}  # fmt: skip
    log._append(log.dataset.rewards, rewards_encoder(log.dataset), report)
    receipt = log.run(2 * HOUR_S)
    assert (receipt.steps, receipt.unrewarded, receipt.orphaned) == (0, 1, 1)
    log.reward(key, 1.0, 2 * HOUR_S, terminated=True)
    assert log.run(2 * HOUR_S + 1).steps == 1
