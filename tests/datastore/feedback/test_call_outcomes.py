"""Reports of recorded calls: which steps they are of by other clocks, and how their cost grows."""

import json
import time

import pytest

from replaylake.datastore.feedback.call_outcomes import (
    _decide,
    apply_outcomes,
    ensure_outcomes_table,
)
from replaylake.datastore.feedback.decisions import rewards_encoder
from replaylake.datastore.feedback.journal import Journal
from replaylake.datastore.feedback.recorded_calls import calls_encoder, ensure_calls_dataset
from replaylake.datastore.interchange.formats.generations.rows import EXTRAS
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.names import new_ulid


@pytest.fixture
def dataset(tmp_path):
    """A dataset with a table of reports."""
    lake = open_lake(tmp_path / "lake", create=True)
    ensure_calls_dataset(lake.dataset("agents"), EXTRAS)
    ensure_outcomes_table(lake.dataset("agents"))
    return lake.dataset("agents")


def write(table, encoder, rows):
    journal = Journal(table, encoder, worker=new_ulid())
    journal.append([json.dumps(row).encode() for row in rows])
    journal.close()


def write_steps(dataset, *steps, at):
    """Write steps of the episode `e`, at a time in us."""
    text = {"observation": "user: q", "action": "a", "agent_id": "", "episode_id": "e"}
    flags = {"reward": None, "terminated": False, "truncated": False}
    rows = [{**text, **flags, "step": n, "env_step": n, "timestamp": at + n} for n in steps]
    write(dataset.table, calls_encoder(dataset, EXTRAS), rows)


def report(dataset, at, **fields):
    row = {"episode_id": "e", "terminated": False, "truncated": False, "timestamp": at, **fields}
    write(dataset.rewards, rewards_encoder(dataset), [row])


def read_rewards(dataset):
    rows = dataset.table.snapshot().read().sort_by("step")
    return rows.column("reward").to_pylist()


def test_a_report_of_a_step_is_applied_whatever_the_time_of_the_step(dataset):
    report(dataset, 10, step=1, reward=2.0)
    write_steps(dataset, 0, 1, at=1000)
    assert apply_outcomes(dataset).num_unmatched == 0
    assert read_rewards(dataset) == [None, 2]


def test_a_report_of_an_episode_is_of_no_later_step_by_the_same_clock(dataset):
    report(dataset, 10, reward=2.0)
    write_steps(dataset, 0, 1, at=1000)
    done = apply_outcomes(dataset)
    assert (done.version, done.num_unmatched) == (None, 1)
    assert read_rewards(dataset) == [None, None]


def test_a_report_of_an_episode_stays_with_the_step_of_another_clock(dataset):
    write_steps(dataset, 0, 1, at=1000)
    report(dataset, 10, reward=2.0)
    assert apply_outcomes(dataset, other_clocks=True).num_steps == 2
    assert read_rewards(dataset) == [0, 2]
    write_steps(dataset, 2, 3, at=1000)
    assert apply_outcomes(dataset, other_clocks=True).version is None
    assert read_rewards(dataset) == [0, 2, None, None]
    report(dataset, 1002, reward=5.0)  # the last step before it is the one of 1002
    assert apply_outcomes(dataset, other_clocks=True).num_steps == 1
    assert read_rewards(dataset) == [0, 2, 5, None]


def measure(num):
    """Return the processor seconds of `num` reports, each of an episode of its own with 2 steps."""
    targets, rows = [], []
    for number in range(num):
        episode = f"episode {number}"
        for step in (0, 1):
            rows.append((0, 2 * number + step, episode, "", step, None, False, False, None, 1))
        target = (0, 2 * number + 1, episode, True, 2, 0, number, 1.0, True, False, False, None)
        targets.append((*target, None))
    begun = time.thread_time()
    changes = _decide(targets, rows)
    seconds = time.thread_time() - begun
    assert len(changes) == 2 * num
    assert changes[0, 0].reward == 0.0
    assert changes[0, 1].reward == 1.0
    return seconds


def test_reports_of_many_episodes_cost_in_proportion():
    few = min(measure(500) for _ in range(3))
    many = min(measure(5000) for _ in range(3))
    assert many < 30 * few  # by comparing all pairs it was about 100 times as much
