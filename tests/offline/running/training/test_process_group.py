"""Teams of threads: what learners do together, without the processes that they are at work in."""

import threading
from contextlib import suppress

import numpy as np
import pytest

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import ConfigInvalidError, TrainingError
from replaylake.offline.algorithms.catalog import make_learner
from replaylake.offline.learning.process_group import SINGLE_PROCESS
from replaylake.offline.running.training.policy_selection import PolicySelection
from replaylake.offline.running.training.process_group import (
    DataParallelLearner,
    LeaderMeasure,
    batch_part,
    make_gradient_average,
    sync_stop,
)

LOW_HIGH = Box((2,), low=-2.0, high=2.0)


def learner(name, space, team=SINGLE_PROCESS, **options):
    options = {"hidden_sizes": [8], **options}
    made = make_learner(
        name, Box((4,)), space, options=options, seed=3, reduce=make_gradient_average(team)
    )
    return made if team.size == 1 else DataParallelLearner(made, team)


def states(together, name, space, batches, **options):
    """The states after some updates: of one learner, and of each of a team's."""
    alone = learner(name, space, **options)
    for batch in batches:
        alone.update(batch)
    # Made one after another: initial weights are drawn under the process's random state.
    lock = threading.Lock()

    def work(member):
        with lock:
            mine = learner(name, space, member, **options)
        for batch in batches:
            mine.update(batch)
        return mine.state_dict()

    return alone.state_dict(), together(work)


@pytest.mark.parametrize(
    ("name", "space", "options"),
    [
        ("bc", Discrete(3), {}),
        ("bc", LOW_HIGH, {}),
        ("dqn", Discrete(3), {"double": True, "target_update_period": 2, "learning_rate": 1e-2}),
        ("cql", Discrete(3), {"learning_rate": 1e-2}),
        ("iql", LOW_HIGH, {"critic_learning_rate": 1e-2}),
    ],
)
def test_a_team_has_the_weights_of_one_learner_with_the_whole_batch(
    batch, together, name, space, options
):
    kind = "discrete" if isinstance(space, Discrete) else "continuous"
    weights = np.linspace(0.1, 1, 32, dtype=np.float32)
    batches = [batch(kind, seed=seed, weights=weights) for seed in range(12)]
    alone, members = states(together, name, space, batches, **options)
    first = learner(name, space, **options).state_dict()
    moved = 0
    for key, array in alone.items():
        if array.dtype.kind != "f":
            continue
        if key.startswith("state.networks"):
            moved += np.abs(array - first[key]).max() > 1e-3
        for found in members:
            np.testing.assert_allclose(found[key], array, atol=1e-5, rtol=0, err_msg=key)
    assert moved
    for key in alone:
        assert members[0][key].tobytes() == members[1][key].tobytes(), key


def test_metrics_and_priorities_are_those_of_the_whole_batch(batch, together):
    whole = batch(size=8, weights=np.linspace(0.1, 1, 8, dtype=np.float32))
    expected = learner("dqn", Discrete(3)).update(whole)
    lock = threading.Lock()

    def work(member):
        with lock:
            mine = learner("dqn", Discrete(3), member)
        return mine.update(whole)

    for found in together(work):
        assert found.metrics.keys() == expected.metrics.keys()
        for name, value in expected.metrics.items():
            assert float(found.metrics[name]) == pytest.approx(float(value), abs=1e-6), name
        assert found.priorities == pytest.approx(expected.priorities, abs=1e-6)


def test_a_batch_that_cannot_be_divided(batch, together):
    lock = threading.Lock()

    def work(member):
        with lock:
            mine = learner("bc", Discrete(3), member)
        mine.update(batch(size=7))

    with pytest.raises(ConfigInvalidError, match="batch of 7 rows for 2 learners"):
        together(work)


def test_all_end_after_the_update_in_which_the_leader_was_asked(batch, together):
    lock = threading.Lock()

    def work(member):
        with lock:
            mine = learner("bc", Discrete(3), member)
        num = 0
        # Only the leader's answer counts.
        ends = sync_stop(mine, lambda: num == 3 if member.rank == 0 else num == 1)
        while not ends() and num < 10:
            mine.update(batch())
            num += 1
        return num

    assert together(work) == [4, 4]


def test_the_leader_measures_and_all_choose_alike(together):
    class Counted:
        name, higher_is_better, num = "environment", True, 0

        def __call__(self, policy):
            Counted.num += 1
            return {1: 5.0, 2: float("nan")}.get(Counted.num, 1 / 3)

    def work(member):
        measure, selection = (
            LeaderMeasure(Counted(), member),
            PolicySelection("environment", patience=2),
        )
        for update in range(1, 9):
            selection.add(update, measure(None), {})
            if selection.is_exhausted:
                break
        return selection.state_dict()

    found = together(work)
    assert found[0] == found[1]
    assert found[0]["history"] == [[1, 5.0], [2, None], [3, 1 / 3]]
    assert Counted.num == 3


def test_nobody_waits_for_one_that_failed(batch, together):
    lock, ended = threading.Lock(), []

    def work(member):
        with lock:
            mine = learner("bc", Discrete(3), member)
        with suppress(TrainingError):
            for num in range(10):
                if member.rank == 1 and num == 4:
                    raise ValueError("mine alone")
                mine.update(batch())
        ended.append(member.rank)

    with pytest.raises(ValueError, match="mine alone"):
        together(work)
    assert ended == [0]


def test_a_part_of_a_batch_has_its_rows_of_each_field(batch):
    whole = batch(size=6, observations={"a": np.arange(6), "b": {"c": np.arange(12).reshape(6, 2)}})
    part = batch_part(whole, slice(2, 4))
    assert part.observations["a"].tolist() == [2, 3]
    assert part.observations["b"]["c"].tolist() == [[4, 5], [6, 7]]
    assert (len(part), part.actions.tolist()) == (2, whole.actions[2:4].tolist())
    assert part.action_masks is None


def test_d3rlpys_gradients_cannot_be_averaged():
    with pytest.raises(ConfigInvalidError, match=r"algorithm d3rlpy:bc: found d3rlpy's.*: bc, "):
        make_learner(
            "d3rlpy:bc", Box((4,)), Discrete(3), options={}, seed=0, reduce=lambda gradients: None
        )
