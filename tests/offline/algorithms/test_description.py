"""What is told of an algorithm is what it is made with."""

import subprocess
import sys

import pytest

from replaylake.datastore.episodes.spaces import Box, Discrete, MultiDiscrete
from replaylake.datastore.replay.items.sequences import Sequences
from replaylake.offline.algorithms.catalog import (
    algorithms,
    builtin_row,
    check_algorithm,
    find_algorithms,
    make_learner,
    reference,
)
from replaylake.offline.algorithms.description import needs, options
from replaylake.offline.learning.options import from_options

SPACES = {
    "discrete": Discrete(3),
    "continuous": Box((2,), "float32", -1.0, 1.0),
    "multi_discrete": MultiDiscrete((2, 3)),
}
OURS = [info for info in algorithms() if info.provider == "replaylake"]


def name(info):
    return f"{info.provider}-{info.name}-{info.actions}"


@pytest.mark.parametrize("info", algorithms(), ids=name)
def test_the_reference_means_the_algorithm(info):
    assert check_algorithm(reference(info), SPACES[info.actions]) == info
    assert info in find_algorithms(reference(info))


@pytest.mark.parametrize("info", OURS, ids=name)
def test_needs_are_the_learners(info):
    learner = make_learner(
        reference(info), Box((4,)), SPACES[info.actions], options={"hidden_sizes": [4]}, seed=0
    )
    item, found = learner.item, needs(info)
    assert ("sequences" in found) == info.consumes_once == (learner.on_policy is not None)
    if info.consumes_once:
        assert item == Sequences(learner.on_policy.length, discount=learner.discount)
        assert found == ("rewards", "next_observations", "propensities", "sequences")
        return
    assert ("next_observations" in found) == item.only_bootstrappable
    assert ("returns" in found) == item.returns
    assert ("next_actions" in found) == item.next_actions
    assert ("rewards" in found) == (info.kind != "imitation")


@pytest.mark.parametrize("info", OURS, ids=name)
def test_defaults_make_the_default_config(info):
    config = builtin_row(info).config_class
    given = {one.name: one.default for one in options(info)}
    assert from_options(config, given, "test") == config()


@pytest.mark.slow
@pytest.mark.parametrize("info", [i for i in algorithms() if i not in OURS], ids=name)
def test_d3rlpys_defaults_are_taken_as_options(info):
    given = {one.name: one.default for one in options(info)} | {"hidden_sizes": [4]}
    learner = make_learner(reference(info), Box((4,)), SPACES[info.actions], options=given, seed=0)
    found = needs(info)
    assert ("next_observations" in found) == learner.item.only_bootstrappable
    assert ("returns" in found) == learner.item.returns
    assert ("next_actions" in found) == learner.item.next_actions
    changed = {key for key in given if learner.config.get(key, given[key]) != given[key]}
    assert all(key.endswith("encoder_factory") for key in changed)


@pytest.mark.slow
def test_needs_do_not_import_d3rlpy():
    code = (
        "import sys\n"
        "from replaylake.offline.algorithms.catalog import algorithms\n"
        "from replaylake.offline.algorithms.description import needs\n"
        "assert all(isinstance(needs(info), tuple) for info in algorithms())\n"
        "print('d3rlpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
