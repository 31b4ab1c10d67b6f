"""Samples of any space lie in it, and what a policy answers to them is looked at."""

import numpy as np
import pytest

from replaylake.datastore.episodes.spaces import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Text,
    Tuple,
    as_values,
    check_bounds,
    take,
)
from replaylake.datastore.errors import PackageInvalidError, SchemaMismatchError
from replaylake.datastore.lake.policies.exploration import Exploration
from replaylake.datastore.lake.policies.policy import Act, PolicySpec
from replaylake.serve.versions.smoke_test import check_same_spaces, sample_values, smoke_test

SPACES = [
    Box((4,)),
    Box((), "float64", low=-1, high=1),
    Box((2, 3), low=0),
    Box((3,), low=5, high=7),
    Box((2,), "float32", low=-3e38, high=3e38),
    Box((8, 8, 3), "uint8", low=0, high=255),
    Box((4,), "int16", low=-2, high=9),
    Box((2,), "bool", low=0, high=1),
    Discrete(3, start=5),
    MultiDiscrete((2, 9)),
    MultiBinary(4),
    Text(),
    Dict({"a": Box((2,)), "b": Tuple((Discrete(2), Box((1,))))}),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_samples_lie_in_their_space(space):
    values = sample_values(space, 50, np.random.default_rng(0))
    checked = as_values(space, values, "samples", 50)
    if not isinstance(space, Text):
        check_bounds(space, checked, "samples")


def test_the_first_sample_is_zero_or_next_to_it():
    rng = np.random.default_rng(0)
    assert take(sample_values(Box((3,)), 4, rng), 0).tolist() == [0, 0, 0]
    assert take(sample_values(Box((1,), low=5, high=7), 4, rng), 0).tolist() == [5]
    assert take(sample_values(Discrete(3, start=5), 4, rng), 0) == 5
    spread = sample_values(Box((1,), low=0, high=100), 200, rng)
    assert spread.max() > 80


class Answers:
    """A policy that answers what it is told to."""

    spec = PolicySpec(Box((4,)), Box((1,), low=-1, high=1), "gaussian")

    def __init__(self, action=0.0, log_prob=0.0):
        self.action, self.log_prob, self.asked = action, log_prob, []

    def initial_state(self, n):
        return None

    def act(self, observations, state=None, *, rng=None, **how):
        num = len(observations)
        self.asked.append((num, how))
        log_probs = np.full(num, self.log_prob, np.float32)
        return Act(np.full((num, 1), self.action, np.float32), log_probs)


def test_it_acts_alone_and_together_as_it_is_to_explore():
    policy = Answers(log_prob=np.nan)  # a density that is not known is no fault
    assert smoke_test(policy, Exploration(temperature=0.5), "p") == 8
    drawn = {"deterministic": False, "temperature": 0.5}
    assert policy.asked == [
        (8, {"deterministic": True}), (8, drawn), (1, {"deterministic": True}), (1, drawn),
    ]  # fmt: skip


@pytest.mark.parametrize("wrong", [{"action": np.nan}, {"action": np.inf}, {"log_prob": -np.inf}])
def test_what_is_not_finite_is_refused(wrong):
    with pytest.raises(PackageInvalidError, match="expected finite numbers"):
        smoke_test(Answers(**wrong), Exploration(), "policy p:1")


def test_bounds_may_differ_and_nothing_else():
    def spec(observations, actions=None):
        return PolicySpec(observations, actions or Discrete(2), "categorical")

    served = spec(Box((4,), low=-1, high=1))
    check_same_spaces(spec(Box((4,))), served, "policy p:2")
    others = [spec(Box((5,))), spec(Box((4,), "float64")), spec(Box((4,)), Discrete(2, start=1))]
    for other in others:
        with pytest.raises(SchemaMismatchError, match="policy p:2: found the"):
            check_same_spaces(other, served, "policy p:2")
