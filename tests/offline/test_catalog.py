import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.spaces import Box, Discrete, MultiDiscrete, Text
from replaylake.datastore.errors import ConfigInvalidError, NotFoundError, SpaceUnsupportedError
from replaylake.offline.algorithms.catalog import algorithms, check_algorithm, make_learner
from replaylake.offline.d3rlpy.learner import D3rlpyLearner
from replaylake.offline.learning.learner import GradientLearner

OBSERVATION = Box((4,))


def make(name, space=None, **options):
    return make_learner(name, OBSERVATION, space or Discrete(2), options=options, seed=0)


def test_the_list_says_what_each_is():
    rows = algorithms()
    first = [(row.name, row.actions) for row in rows[:2]]
    assert first == [("bc", "discrete"), ("bc", "continuous")]
    names = {row.name for row in rows}
    assert {"bc", "cql", "iql", "td3_plus_bc", "awac", "sac", "td3", "ddpg", "dqn"} <= names
    keys = [(row.provider, row.name, row.actions) for row in rows]
    assert len(set(keys)) == len(keys)
    assert all(row.paper and row.head and row.kind for row in rows)


SPACES = {
    "discrete": Discrete(3),
    "continuous": Box((2,), "float32", -2, 2),
    "multi_discrete": MultiDiscrete((2, 2)),
}


def as_sequences(batch, num):
    """The rows of a batch, taken for steps of `num` sequences."""
    fields = {
        name: value if value is None else value.reshape(num, -1, *value.shape[1:])
        for name, value in vars(batch).items()
    }
    mask = np.ones(fields["rewards"].shape, bool)
    return Batch(**{**fields, "weights": batch.weights[:num], "mask": mask})


@pytest.mark.parametrize("info", algorithms(), ids=lambda i: f"{i.provider}-{i.name}-{i.actions}")
def test_the_list_says_what_gives_priorities(batch, info):
    if info.provider == "d3rlpy":
        assert not info.gives_priorities
        return
    drawn = batch(
        info.actions,
        returns=np.ones(32, np.float32),
        behavior_log_probs=np.full(32, -1, np.float32),
    )
    if info.actions == "multi_discrete":
        drawn = dataclasses.replace(drawn, actions=np.zeros((32, 2), np.int64))
    if info.consumes_once:
        drawn = as_sequences(drawn, 4)
    learner = make(info.name, SPACES[info.actions])
    assert (learner.update(drawn).priorities is not None) == info.gives_priorities


@pytest.mark.slow
@pytest.mark.needs_d3rlpy
def test_ours_comes_first_and_theirs_on_request():
    assert isinstance(make("bc"), GradientLearner)
    assert isinstance(make("d3rlpy:bc"), D3rlpyLearner)


def test_discrete_or_continuous_follows_from_the_space():
    assert make("cql").policy().spec.head == "q_values"
    box = Box((1,), "float32", -1, 1)
    assert make("bc", box).policy().spec.head == "gaussian"
    assert check_algorithm("cql", box).head == "squashed_gaussian"


@pytest.mark.parametrize("name", ["cqq", "d3rlpy:cqq"])
def test_an_unknown_algorithm_gets_near_matches_and_the_list(name):
    with pytest.raises(NotFoundError, match=rf"'{name}'.*cql.*There are: awac, bc"):
        check_algorithm(name, Discrete(2))


def test_an_algorithm_like_none_gets_the_list_once():
    with pytest.raises(NotFoundError, match="expected one of awac, bc, bcq") as caught:
        check_algorithm("zzzz", Discrete(2))
    assert str(caught.value).count("awac") == 1


def test_ours_alone_is_unknown_to_d3rlpy():
    with pytest.raises(NotFoundError, match="bcx"):
        check_algorithm("bcx", Discrete(2))


def test_a_space_it_cannot_take_names_those_that_can():
    with pytest.raises(
        SpaceUnsupportedError, match=r"iql.*Discrete\(2\).*float Box.*bc, bcq, cql, d"
    ):
        check_algorithm("iql", Discrete(2))
    with pytest.raises(
        SpaceUnsupportedError, match=r"dqn.*Box.*expected Discrete.*awac, bc, bcq, bear"
    ):
        check_algorithm("dqn", Box((1,)))


def test_a_space_that_none_can_take_says_so():
    with pytest.raises(SpaceUnsupportedError, match="No algorithm takes it"):
        check_algorithm("bc", Text())


def test_unknown_options_get_near_matches():
    with pytest.raises(ConfigInvalidError, match="algorithm bc: found option 'learning_rat'"):
        make("bc", learning_rat=1e-3)


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "fpga"])
def test_a_device_that_is_not_there_is_refused(device):
    with pytest.raises(ConfigInvalidError, match=f"device: found '{device}'"):
        make_learner("bc", OBSERVATION, Discrete(2), options={}, seed=0, device=device)


@pytest.mark.slow
def test_the_catalog_does_not_import_d3rlpy():
    code = (
        "import sys, replaylake.offline.algorithms.catalog as c; c.algorithms(); "
        "print('d3rlpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
