"""Received steps get into the dataset once each, whatever order and however often they came."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import EpisodeInvalidError, NotFoundError
from replaylake.datastore.feedback.decisions import ensure_feedback_tables
from replaylake.datastore.feedback.join import join_feedback
from replaylake.datastore.feedback.journal import Journal, JournalConfig
from replaylake.datastore.feedback.received_steps import move_received
from replaylake.datastore.feedback.received_table import (
    encode_received,
    ensure_received_table,
    make_received_piece,
    recover_received,
)
from replaylake.datastore.feedback.segments import frame_records, journal_folder
from replaylake.datastore.feedback.waits import Wait
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.maintenance.compact import compact
from replaylake.datastore.maintenance.delete import delete
from replaylake.datastore.maintenance.fsck.fsck import fsck
from replaylake.datastore.maintenance.purge.purge import purge
from replaylake.datastore.maintenance.trim import trim

NOW_S = 1_800_000_000.0
HOUR_S = 3600.0


def piece(episode, steps, *, end=False, final=None, first=None, **changes):
    """Steps whose observation, action and reward say which they are."""
    steps = np.asarray(steps)
    fields = {
        "observations": np.stack([steps, steps + 0.5], 1).astype(np.float32),
        "actions": steps % 3,
        "rewards": steps * 1.5,
        "terminated": end,
        "final_observation": final,
        "first_step": int(steps[0]) if first is None else first,
        "behavior_log_probs": np.full(len(steps), -0.5),
    }
    return Episode(episode, **{**fields, **changes})


class Sink:
    """Receives pieces as servers do, at times of the test's choosing."""

    def __init__(self, path):
        self.lake = open_lake(path, create=True)
        self.dataset = self.lake.dataset("d")
        ensure_feedback_tables(self.dataset, Box((2,)), Discrete(3))
        ensure_received_table(self.dataset)
        self.sequence = 0

    def receive(self, *pieces, second=0.0):
        at = int((NOW_S + second) * 1e6)
        records = [make_received_piece(p, self.dataset.spec, at).record for p in pieces]
        self.sequence += 1
        rows = encode_received([_parsed(record) for record in records])
        self.dataset.received.append(rows, producer="test", sequence=self.sequence)

    def run(self, second=10.0, window_s=HOUR_S):
        return move_received(self.dataset, now_s=NOW_S + second, window_s=window_s)

    def rows(self, columns="episode_id, step, reward", view="steps"):
        text = f"select {columns} from d.{view} order by episode_id, step"
        return [tuple(row.values()) for row in self.lake.sql(text).to_pylist()]

    def numbers(self, episode="e"):
        return [step for name, step, _ in self.rows() if name == f"received/{episode}"]


def _parsed(record):
    return json.loads(record)


@pytest.fixture
def sink(tmp_path):
    return Sink(tmp_path / "lake")


def test_a_whole_episode_is_moved_as_it_came(sink):
    sink.receive(
        piece(
            "e",
            range(3),
            end=True,
            final=[9, 9],
            policies=np.array(["robot"] * 3, object),
            policy_versions=np.array([7] * 3),
            timestamps=np.array([5, 6, 7]),
            action_masks=np.array([[1, 1, 1]] * 2 + [[0, 0, 1]], bool),
        )
    )
    moved = sink.run()
    assert (moved.episodes, moved.steps, moved.waiting, moved.conflicting) == (1, 3, 0, 0)
    columns = (
        "episode_id, source_episode_id, step, observation, action, reward, terminated, "
        "final_observation, behavior_log_prob, policy, policy_version, epoch_us(timestamp), "
        "action_mask"
    )
    last = sink.rows(columns)[-1]
    assert last == (
        *("received/e", "e", 2, [2.0, 2.5], 2, 3.0, True, [9.0, 9.0]),
        *(-0.5, "robot", 7, 7, [False, False, True]),
    )
    assert sink.rows("step, terminated, final_observation")[0] == (0, False, None)
    version = sink.dataset.snapshot().version
    assert moved.version == version
    assert sink.run().steps == 0
    assert sink.dataset.snapshot().version == version


def test_what_is_not_known_stays_unknown(sink):
    plain = piece("e", range(2), behavior_log_probs=None)
    dated = piece("e", [2, 3], behavior_log_probs=None, policy_versions=np.array([1, 1]))
    sink.receive(plain, dated)
    assert sink.run().steps == 4
    assert sink.rows("step, policy_version") == [(0, None), (1, None), (2, 1), (3, 1)]
    assert {row[0] for row in sink.rows("behavior_log_prob")} == {None}
    assert {row[0] for row in sink.rows("timestamp")} == {None}


def test_pieces_come_in_any_order(sink):
    sink.receive(piece("e", [4, 5], end=True))
    assert (sink.run().steps, sink.run().waiting) == (0, 2)
    sink.receive(piece("e", [2, 3]))
    assert sink.run().waiting == 4
    sink.receive(piece("e", [0, 1]))
    assert (sink.run().steps, sink.numbers()) == (6, list(range(6)))


def test_an_open_episode_is_continued_at_once(sink):
    sink.receive(piece("e", [0, 1]))
    assert sink.run().steps == 2
    sink.receive(piece("e", [2, 3], end=True))
    assert sink.run().steps == 2
    followed = sink.rows("step, next_observation", "transitions")
    assert followed[1] == (1, [2.0, 2.5])


def test_a_gap_waits_for_the_window_and_stays_one(sink):
    sink.receive(piece("e", [0, 1], final=[2, 2.5]), piece("e", [3, 4], end=True, final=[5, 5]))
    assert (sink.run().steps, sink.run().waiting) == (2, 2)
    until = "2027-01-15T09:00:00Z"  # an hour after NOW_S
    assert sink.run(HOUR_S - 1).waits == [Wait("gap", 2, until, until)]
    assert sink.run(HOUR_S + 1).steps == 2
    assert sink.numbers() == [0, 1, 3, 4]
    followed = dict(sink.rows("step, next_observation", "transitions"))
    assert followed[1] == [2.0, 2.5]  # what its piece ended with, and not step 3's
    sink.receive(piece("e", [2]), second=2 * HOUR_S)
    assert sink.run(2 * HOUR_S).steps == 1
    assert sink.numbers() == [0, 1, 2, 3, 4]


def test_a_piece_sent_again_adds_nothing(sink):
    for _ in range(3):
        sink.receive(piece("e", range(4)))
    sink.receive(piece("e", [2, 3, 4]))
    assert sink.run().steps == 5
    sink.receive(piece("e", range(5)))
    again = sink.run()
    assert (again.steps, again.conflicting) == (0, 0)


def test_the_first_of_different_steps_counts(sink):
    sink.receive(piece("e", range(3), rewards=[7.0, 7.0, 7.0]), second=2)
    sink.receive(piece("e", range(2)), second=1)
    moved = sink.run()
    assert (moved.steps, moved.conflicting) == (3, 2)
    assert sink.rows() == [("received/e", 0, 0.0), ("received/e", 1, 1.5), ("received/e", 2, 7.0)]
    assert sink.run().conflicting == 2  # it stays so, and is told again


def test_nothing_comes_after_an_end(sink):
    sink.receive(piece("e", range(3), end=True), piece("e", [3, 4]))
    moved = sink.run()
    assert (moved.steps, moved.conflicting) == (3, 2)
    sink.receive(piece("f", range(3)))
    sink.run()
    sink.receive(piece("f", [5, 6]), second=-2 * HOUR_S)
    assert sink.run().steps == 2
    sink.receive(piece("f", [3], end=True))  # though step 5 is there
    moved = sink.run()
    assert (moved.steps, moved.conflicting) == (0, 3)
    assert fsck(sink.lake).is_clean


def test_agents_are_apart(sink):
    both = [piece("e", range(2), agent_id=agent) for agent in ("a", "b")]
    sink.receive(*both)
    assert sink.run().steps == 4
    assert sorted(sink.rows("agent_id, step")) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


def test_two_runs_at_once_write_each_step_once(sink):
    sink.receive(*[piece(f"e{i}", range(4), end=True) for i in range(5)])
    with ThreadPoolExecutor(4) as pool:
        moved = list(pool.map(lambda _: sink.run(), range(4)))
    assert sum(one.steps for one in moved) == 20
    counted = sink.lake.sql("select count(*) n, count(distinct (episode_id, step)) m from d.steps")
    assert counted.to_pylist() == [{"n": 20, "m": 20}]


STEPS = 6
CUTS = st.lists(
    st.tuples(st.integers(0, STEPS - 1), st.integers(1, STEPS), st.booleans()), max_size=8
)


@pytest.mark.slow
@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(cuts=CUTS, seed=st.integers(0, 99))
def test_any_pieces_in_any_order_give_the_episode(tmp_path_factory, cuts, seed):
    sink = Sink(tmp_path_factory.mktemp("lake") / "lake")
    pieces = [(first, min(first + num, STEPS), run) for first, num, run in cuts]
    pieces += [(i, i + 1, False) for i in range(STEPS)]
    np.random.default_rng(seed).shuffle(pieces)
    for first, end, runs_now in pieces:
        sink.receive(piece("e", range(int(first), int(end)), end=int(end) == STEPS))
        if runs_now:
            sink.run()
    assert sink.run().conflicting == 0
    assert sink.rows("step, reward, terminated") == [
        (i, i * 1.5, i == STEPS - 1) for i in range(STEPS)
    ]


def test_the_journal_of_a_killed_server_is_committed_once(sink):
    config = JournalConfig(flush_interval_s=3600)
    journal = Journal(sink.dataset.received, encode_received, worker="ab" * 6, config=config)
    record = make_received_piece(piece("e", range(3), end=True), sink.dataset.spec, 0).record
    journal.append([record])
    journal.close()
    folder = journal_folder(sink.dataset.received)
    (folder / f"{'cd' * 6}-0.jsonl").write_bytes(
        b"".join(frame_records([record, record])) + b"deadbeef {torn"
    )
    assert recover_received(sink.dataset).num_rows == 6
    assert recover_received(sink.dataset).num_rows == 0
    assert (sink.run().steps, sink.numbers()) == (3, [0, 1, 2])


def test_a_damaged_record_holds_up_no_other(sink):
    record = make_received_piece(piece("e", range(3), end=True), sink.dataset.spec, 0).record
    folder = journal_folder(sink.dataset.received)
    folder.mkdir()
    bad = b'{"episode_id":"received/x","rows":"AAAA"}'
    (folder / f"{'cd' * 6}-0.jsonl").write_bytes(b"".join(frame_records([bad, record])))
    moved = sink.run()
    assert (moved.steps, moved.recovered, moved.damaged) == (3, 3, 1)


def test_the_join_reports_it(sink):
    sink.receive(piece("e", range(2), end=True), piece("f", [4]))
    receipt = join_feedback(sink.lake, "d", now_s=NOW_S + 10)
    assert (receipt.received.steps, receipt.received.waiting) == (2, 1)
    assert receipt.to_json()["received"]["episodes"] == 1
    assert receipt.version == receipt.received.version
    assert len(sink.rows("episode_id, step", "received")) == 3


def test_what_cannot_be_stored_is_refused(sink):
    spec = sink.dataset.spec
    with pytest.raises(EpisodeInvalidError, match=r"episode e: action at step 0: found 5"):
        make_received_piece(piece("e", [0], actions=np.array([5])), spec, 0)
    with pytest.raises(EpisodeInvalidError, match="behavior_log_prob at step 0"):
        make_received_piece(piece("e", [0], behavior_log_probs=[0.5]), spec, 0)


@pytest.mark.parametrize("how", ["delete", "trim", "purge"])
def test_removed_episodes_do_not_come_back(sink, how):
    sink.receive(piece("first", range(3), end=True))
    sink.run()
    sink.receive(piece("second", range(2), end=True), piece("waiting", [3]))
    sink.run()
    if how == "trim":
        done = trim(sink.lake, "d", max_steps=2, open_s=0)
        assert done.num_received == 3
    else:
        where = "source_episode_id in ('first', 'waiting')"
        if how == "delete":
            assert delete(sink.lake, "d", where, dry_run=True).num_received == 4
            assert delete(sink.lake, "d", where).num_received == 4
        else:
            assert purge(sink.lake, "d", where).is_proven
        assert {name for name, _ in sink.rows("episode_id, step", "received")} == {
            "received/second"
        }
    assert sink.run(2 * HOUR_S).steps == (1 if how == "trim" else 0)
    assert "received/first" not in {name for name, _, _ in sink.rows()}


def test_maintenance_knows_the_table(sink):
    for i in range(4):
        sink.receive(piece(f"e{i}", range(3), end=True))
    tables = {done.table for done in compact(sink.lake, "d", open_s=0)}
    assert "d/_received" in tables
    assert len(sink.dataset.received.snapshot().files) == 1
    assert sink.run().steps == 12
    assert fsck(sink.lake).is_clean
    (shard,) = sink.dataset.received.snapshot().paths()
    shard.write_bytes(shard.read_bytes()[:-9])
    assert not fsck(sink.lake).is_clean


def test_without_a_table_there_is_nothing(tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    dataset = lake.dataset("d")
    ensure_feedback_tables(dataset, Box((2,)), Discrete(3))
    assert move_received(dataset, now_s=NOW_S, window_s=1).steps == 0
    with pytest.raises(NotFoundError, match="received"):
        lake.sql("select * from d.received")
