"""One decision, or one received step, that cannot be a step holds up no other."""

import base64
import json
import math
import time

import numpy as np
import pyarrow as pa
import pytest

from replaylake.datastore.episodes.episode import MAX_STEP, Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.feedback.decision_id import DecisionSigner
from replaylake.datastore.feedback.decisions import (
    decisions_encoder,
    ensure_feedback_tables,
    rewards_encoder,
)
from replaylake.datastore.feedback.join import join_feedback
from replaylake.datastore.feedback.received_table import (
    encode_received,
    ensure_received_table,
    make_received_piece,
)
from replaylake.datastore.feedback.reports import MAX_REWARD
from replaylake.datastore.feedback.segments import frame_records, journal_folder
from replaylake.datastore.feedback.status import feedback_status
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.maintenance.fsck.fsck import fsck
from replaylake.datastore.maintenance.purge.purge import purge
from replaylake.datastore.maintenance.trim import trim

NOW_S = 1_800_000_000.0
HOUR_S = 3600.0
WORKER = "cd" * 6


class Log:
    """Decisions, reports and received steps, as servers log them."""

    def __init__(self, path):
        self.lake = open_lake(path, create=True)
        self.dataset = self.lake.dataset("d")
        ensure_feedback_tables(self.dataset, Box((2,)), Discrete(3))
        ensure_received_table(self.dataset)
        self.signer = DecisionSigner(self.lake.signing_key(), "d", "00" * 6)
        self.sequence = 0

    def decide(self, second, episode="e", **changes):
        timestamp = int((NOW_S + second) * 1e6)
        (key,) = self.signer.issue("bc", 1, timestamp)
        record = {"decision_id": key, "request_id": None, "episode_id": episode,
                  "timestamp": timestamp, "policy": "bc", "policy_version": 1,
                  "observation": [second, 0.5], "action": 1, "log_prob": -0.25,
                  "deterministic": False}  # fmt: skip
        rows = decisions_encoder(self.dataset)([record | changes])
        self._append(self.dataset.decisions, rows)
        return key

    def report(self, key, second, reward, mode="sum", ends=False):
        record = {"decision_id": key, "timestamp": int((NOW_S + second) * 1e6), "reward": reward,
                  "terminated": ends, "truncated": False, "mode": mode,
                  "feedback_id": f"{second}"}  # fmt: skip
        self._append(self.dataset.rewards, rewards_encoder(self.dataset)([record]))

    def receive(self, *rows):
        self._append(self.dataset.received, pa.concat_tables(rows))

    def run(self, second=10.0):
        return join_feedback(self.lake, "d", now_s=NOW_S + second, window_s=HOUR_S)

    def status(self, second=10.0):
        found = feedback_status(self.lake, "d", now_s=NOW_S + second, window_s=HOUR_S).total
        parts = (found.joined, found.waiting, found.unrewarded, found.repeated, found.set_aside)
        assert sum(parts) == found.decisions
        return found

    def rows(self, columns, view="steps"):
        order = "step" if view == "steps" else "all"
        by = f"episode_id, {order}" if view == "steps" else order
        rows = self.lake.sql(f"select {columns} from d.{view} order by {by}").to_pylist()
        return [tuple(row.values()) for row in rows]

    def _append(self, table, rows):
        self.sequence += 1
        table.append(rows, producer="test", sequence=self.sequence)


@pytest.fixture
def log(tmp_path):
    return Log(tmp_path / "lake")


def steps_of(log, episode, steps, **changes):
    """Return rows of the received table."""
    steps = np.asarray(steps)
    fields = {
        "observations": np.stack([steps, steps], 1).astype(np.float32),
        "actions": steps % 3,
        "rewards": np.ones(len(steps)),
        "first_step": int(steps[0]),
    }
    piece = make_received_piece(Episode(episode, **{**fields, **changes}), log.dataset.spec, 0)
    return encode_received([json.loads(piece.record)])


def with_value(rows, name, row, value):
    values = rows.column(name).to_pylist()
    values[row] = value
    at = rows.schema.get_field_index(name)
    return rows.set_column(at, rows.field(at), pa.array(values, rows.field(at).type))


def test_a_sum_beyond_float64_is_set_aside_and_the_others_go_on(log):
    bad, good = log.decide(0), log.decide(0, "f")
    log.report(bad, 1, 1e308, ends=True)
    log.report(bad, 2, 1e308)
    log.report(good, 1, 2.0, ends=True)
    receipt = log.run()
    assert (receipt.steps, receipt.joined, receipt.set_aside, receipt.quarantined) == (1, 1, 1, 1)
    assert receipt.waiting == receipt.unrewarded == 0
    assert "1 set aside" in receipt.to_line()
    assert log.rows("decision_id, reward") == [(good, 2.0)]
    counts = log.status()
    assert (counts.joined, counts.set_aside) == (1, 1)
    columns = "episode_id, source_episode_id, checks, reasons, row, producer"
    ((episode, source, checks, reasons, row, producer),) = log.rows(columns, "quarantine")
    assert (episode, source, checks) == (f"served/{bad}", "e", ["reward_sum"])
    assert reasons[0].startswith("reward: the sum of its reports is inf")
    named = {"decision_id": bad, "request_id": None, "step": None}
    assert json.loads(row) == named | {"policy": "bc", "policy_version": 1}
    assert producer == "sessionise:d"
    again = log.run()
    assert (again.steps, again.set_aside, again.quarantined) == (0, 1, 0)
    assert not again.has_changed
    assert len(log.rows("row", "quarantine")) == 1
    assert fsck(log.lake).is_clean


@pytest.mark.parametrize("pair", [(1e308, 1e308), (-1e308, -1e308), (math.inf, -math.inf)])
def test_a_report_of_mode_last_mends_it(log, pair):
    bad = log.decide(0)
    for second, reward in enumerate(pair, 1):
        log.report(bad, second, reward, ends=True)
    assert log.run().set_aside == 1
    log.report(bad, 20, 3.0, mode="last", ends=True)
    receipt = log.run(30)
    assert (receipt.steps, receipt.set_aside) == (1, 0)
    assert log.rows("reward, terminated") == [(3.0, True)]


def test_the_rest_of_its_episode_waits_for_the_window_and_keeps_its_numbers(log):
    keys = [log.decide(second) for second in range(4)]
    log.report(keys[0], 10, 1.0)
    log.report(keys[1], 10, 1e308)
    log.report(keys[1], 11, 1e308)
    log.report(keys[2], 12, 1.0, ends=True)
    log.report(keys[3], 13, 5.0, ends=True)  # under the same id: another episode
    receipt = log.run(20)
    assert (receipt.steps, receipt.waiting, receipt.set_aside) == (1, 2, 1)
    receipt = log.run(2 * HOUR_S)
    assert (receipt.steps, receipt.waiting, receipt.set_aside) == (2, 0, 1)
    rows = log.rows("episode_id, step, reward, terminated, final_observation")
    assert rows == [
        (f"served/{keys[0]}", 0, 1.0, False, [1.0, 0.5]),
        (f"served/{keys[0]}", 2, 1.0, True, None),
        (f"served/{keys[3]}", 0, 5.0, True, None),
    ]
    log.report(keys[1], 3 * HOUR_S, 7.0, mode="last")
    assert log.run(4 * HOUR_S).steps == 1
    assert [row[1:3] for row in log.rows("episode_id, step, reward")][:3] == [
        (0, 1.0), (1, 7.0), (2, 1.0)]  # fmt: skip


def test_an_end_that_was_reported_for_it_counts(log):
    keys = [log.decide(second) for second in range(2)]
    for second in (10, 11):
        log.report(keys[0], second, 1e308, ends=True)
    log.report(keys[1], 12, 5.0, ends=True)
    assert log.run(20).steps == 1
    assert log.rows("episode_id, step, reward") == [(f"served/{keys[1]}", 0, 5.0)]


def test_a_step_keeps_its_reward_where_a_late_part_of_the_sum_is_too_much(log):
    key, other = log.decide(0), log.decide(0, "f")
    log.report(key, 1, 1e308, ends=True)
    log.report(other, 1, 1.0, ends=True)
    assert log.run(5).steps == 2
    log.report(key, 6, 1e308)
    log.report(other, 6, 1.0)
    receipt = log.run(20)
    assert (receipt.late, receipt.set_aside, receipt.joined) == (1, 1, 1)
    assert sorted(log.rows("reward, reward_late")) == [(2.0, True), (1e308, False)]
    counts = log.status(20)
    assert (counts.joined, counts.set_aside, counts.late) == (1, 1, 1)


def test_a_reward_that_is_no_number_holds_up_no_other(log):
    folder = journal_folder(log.dataset.rewards)
    folder.mkdir(exist_ok=True)
    bad, good = log.decide(0), log.decide(0, "f")
    # As a server of an earlier release, or a faulty one, would have written it.
    lines = [
        b'{"decision_id":"%s","timestamp":%d,"reward":%s,"terminated":true,"truncated":false}'
        % (key.encode(), int(NOW_S * 1e6) + 1, reward)
        for key, reward in ((bad, b"NaN"), (good, b"1.0"))
    ]
    deep = b'{"decision_id":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    huge = b'{"timestamp":' + b"9" * 400 + b"}"
    (folder / f"{WORKER}-0.jsonl").write_bytes(b"".join(frame_records([deep, huge, *lines])))
    receipt = log.run(20)
    assert (receipt.steps, receipt.recovered, receipt.damaged, receipt.set_aside) == (1, 2, 2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"log_prob": 3.0}, {"log_prob": math.inf}, {"action": 7}])
def test_a_decision_that_is_no_step_holds_up_no_other(log, changes):
    keys = [log.decide(second, **(changes if second == 1 else {})) for second in range(4)]
    others = [log.decide(0, f"f{i}") for i in range(20)]
    for second, key in enumerate([*keys, *others]):
        log.report(key, 10 + second, 1.0, ends=key not in keys[:3])
    receipt = log.run(2 * HOUR_S)
    assert (receipt.steps, receipt.set_aside, receipt.quarantined) == (23, 1, 1)
    ((checks, row),) = log.rows("checks, row", "quarantine")
    assert checks == ["step"]
    assert json.loads(row)["decision_id"] == keys[1]
    counts = log.status(2 * HOUR_S)
    assert (counts.joined, counts.set_aside, counts.waiting) == (23, 1, 0)
    again = log.run(3 * HOUR_S)
    assert (again.steps, again.set_aside, again.quarantined) == (0, 1, 0)


def test_rows_of_an_ingest_in_quarantine_are_no_decisions(log, tmp_path):
    """Its rows may have a column decision_id, and another check of the same name."""
    key = log.decide(0)
    log.report(key, 1, 1.0, ends=True)
    log.report(log.decide(0, "f", action=7), 1, 1.0, ends=True)
    assert log.run().set_aside == 1
    rows = log.dataset.rejected.snapshot().read()
    row = rows.column("row").to_pylist()[0]
    about = json.dumps(json.loads(row) | {"decision_id": key})
    other = with_value(with_value(rows, "row", 0, about), "producer", 0, "ingest:log")
    log.dataset.rejected.append(other, producer="ingest:log", sequence=1)
    counts = log.status()
    assert (counts.joined, counts.set_aside) == (1, 1)
    assert log.run().quarantined == 0


def test_a_received_step_that_is_none_leaves_a_gap(log):
    bad = with_value(steps_of(log, "e", range(5), terminated=True), "reward", 2, math.inf)
    log.receive(bad, *(steps_of(log, f"f{i}", range(3), terminated=True) for i in range(10)))
    receipt = log.run()
    received = receipt.received
    assert (received.steps, received.set_aside, received.quarantined) == (34, 1, 1)
    assert (receipt.quarantined, receipt.has_changed) == (1, True)
    steps = [step for episode, step in log.rows("episode_id, step") if episode == "received/e"]
    assert steps == [0, 1, 3, 4]
    ((episode, row),) = log.rows("episode_id, row", "quarantine")
    assert (episode, json.loads(row)["step"]) == ("received/e", 2)
    again = log.run().received
    assert (again.steps, again.set_aside, again.quarantined) == (0, 1, 0)


def test_the_highest_step_number_is_one_like_others(log):
    log.receive(steps_of(log, "e", [MAX_STEP - 1, MAX_STEP]), steps_of(log, "e", [0]))
    assert log.run(2 * HOUR_S).received.steps == 3
    log.receive(steps_of(log, "e", [MAX_STEP - 2]), steps_of(log, "f", [0, 1]))
    assert log.run(2 * HOUR_S).received.steps == 3
    following = log.rows("step, next_observation is null", "transitions")
    assert (MAX_STEP - 1, False) in following
    assert (MAX_STEP, True) in following
    assert log.rows("num_env_steps", "games") == [(2,), (MAX_STEP + 1,)]


def test_records_that_are_no_steps_hold_up_no_other(log):
    whole = make_received_piece(
        Episode("e", np.zeros((2, 2), np.float32), np.zeros(2, int), np.ones(2)),
        log.dataset.spec,
        0,
    ).record
    stream = base64.b64decode(json.loads(whole)["rows"])
    sink = pa.BufferOutputStream()
    other = pa.table({"episode_id": pa.array([1, 2]), "reward": pa.array(["a", "b"])})
    with pa.ipc.new_stream(sink, other.schema) as writer:
        writer.write_table(other)
    streams = [stream[:-200], stream[: len(stream) // 2], sink.getvalue().to_pybytes(), b""]
    bad = [json.dumps({"rows": base64.b64encode(one).decode()}).encode() for one in streams]
    bad.append(b'{"rows":' + b"[" * 200_000 + b"]" * 200_000 + b"}")
    folder = journal_folder(log.dataset.received)
    folder.mkdir(exist_ok=True)
    (folder / f"{WORKER}-0.jsonl").write_bytes(b"".join(frame_records([*bad, whole])))
    received = log.run().received
    assert (received.steps, received.recovered, received.damaged) == (2, 2, len(bad))


def test_the_view_of_episodes_bears_any_rewards(log):
    log.receive(steps_of(log, "e", range(3), rewards=np.array([1e308, 1e308, 1.0])))
    log.receive(steps_of(log, "f", range(2), rewards=np.array([1.0, 2.0])))
    log.run()
    assert log.rows('"return"', "episodes") == [(3.0,), (math.inf,)]
    assert log.rows('"return"', "games") == [(3.0,), (math.inf,)]


def test_sums_of_what_a_server_takes_are_finite():
    assert math.isfinite(MAX_REWARD * 1e100)
    assert math.isfinite(MAX_REWARD * MAX_REWARD * 1e100)


@pytest.mark.slow
def test_a_purge_leaves_nothing_of_it(log):
    bad = log.decide(0)
    for second in (1, 2):
        log.report(bad, second, 1e308, ends=True)
    good = log.decide(0, "f")
    log.report(good, 1, 1.0, ends=True)
    log.run()
    purge(log.lake, "d", f"episode_id = 'served/{bad}'", dry_run=False)
    assert log.rows("row", "quarantine") == []
    assert log.rows("decision_id", "decisions") == [(good,)]
    assert log.run().set_aside == 0


@pytest.mark.slow
def test_a_purge_of_its_policy_leaves_nothing_of_it(log):
    bad = log.decide(0)
    for second in (1, 2):
        log.report(bad, second, 1e308, ends=True)
    log.report(log.decide(0, "f"), 1, 1.0, ends=True)
    for name, policy in (("e", "gone"), ("f", "kept")):
        policies = np.array([policy] * 5, dtype=object)
        rows = steps_of(log, name, range(5), terminated=True, policies=policies)
        log.receive(with_value(rows, "reward", 2, math.inf))
    log.run()
    assert len(log.rows("row", "quarantine")) == 3
    for policy, left in (("bc", 2), ("gone", 1)):
        receipt = purge(log.lake, "d", f"policy = '{policy}'", dry_run=False)
        assert receipt.is_proven
        assert receipt.num_undecided == 0
        assert len(log.rows("row", "quarantine")) == left
    assert log.rows("decision_id", "decisions") == []
    assert {episode for (episode,) in log.rows("episode_id")} == {"received/f"}
    assert log.run().quarantined == 0


@pytest.mark.slow
def test_trim_by_age_brings_nothing_of_it_back(log):
    bad = log.decide(0)
    for second in (1, 2):
        log.report(bad, second, 1e308, ends=True)
    log.receive(with_value(steps_of(log, "e", range(1)), "reward", 0, math.inf))
    other = with_value(steps_of(log, "f", range(2)), "reward", 1, math.inf)
    log.receive(other)
    assert log.run().quarantined == 3
    now_ms = int(time.time() * 1000) + 7_200_000
    counted = trim(log.lake, "d", older_than_s=3600.0, dry_run=True, open_s=1e9, now_ms=now_ms)
    receipt = trim(log.lake, "d", older_than_s=3600.0, open_s=1e9, now_ms=now_ms)
    counts = [(one.num_decisions, one.num_received, one.num_rejected) for one in (counted, receipt)]
    # Of `f` a step is in the dataset, as it may go on: what cannot be a step stays beside it.
    assert counts == [(1, 1, 2)] * 2
    assert log.rows("decision_id", "decisions") == []
    assert [episode for (episode,) in log.rows("episode_id", "quarantine")] == ["received/f"]
    assert log.run().quarantined == 0
