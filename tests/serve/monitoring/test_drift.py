"""How recent observations and actions are summed up: numbers worked out by hand."""

import math

import numpy as np
import pytest

from replaylake.datastore.episodes.encoding import Encoding, Field
from replaylake.datastore.episodes.spaces import Box, Dict, Discrete
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.datastore.lake.policies.uniform import UniformPolicy
from replaylake.serve.monitoring.drift import MAX_ELEMENTS, training_moments
from replaylake.serve.monitoring.recent_statistics import (
    TIME_CONSTANT_S,
    RecentMeans,
    RecentStatistics,
    merge_sums,
)
from replaylake.serve.monitoring.shared_counters import SharedCounters
from replaylake.serve.versions.router import ServedPolicy

SPEC = PolicySpec(Box((2,)), Discrete(3), "categorical")
ABOUT = {"normalization": {"observations": {"": {"mean": [10.0, -1.0], "std": [2.0, 0.5]}}}}


def recent(about=ABOUT, space=None, actions=None):
    policy = UniformPolicy(space or SPEC.observation_space, actions or SPEC.action_space)
    return RecentStatistics(SharedCounters(), ServedPolicy("p", 1, policy, "p", about))


def means(one, now_s=0.0):
    return RecentMeans(merge_sums([one._sums], now_s))


def likely(*probs):
    return np.log(np.asarray(probs, np.float32))


def test_moments_of_a_manifest():
    moments = training_moments(ABOUT, SPEC)
    assert moments.labels == ("0", "1")
    shifts = moments.standardize(np.asarray([[14, -1], [10, 0]], np.float32))
    assert shifts.tolist() == [[2.0, 0.0], [0.0, 2.0]]
    # What was measured for this comes before what the learner was scaled by.
    both = {**ABOUT, "observation_statistics": {"": {"mean": [0, 0], "std": [1, 1]}}}
    assert training_moments(both, SPEC).mean.tolist() == [0, 0]
    older = {"normalisation": ABOUT["normalization"]}
    assert training_moments(older, SPEC).mean.tolist() == [10, -1]


def test_elements_are_called_by_their_columns_or_leaves():
    encoding = Encoding((Field("age", "number"), Field("price", "number")))
    named = PolicySpec(Box((2,)), Discrete(3), "categorical", encoding=encoding)
    assert training_moments(ABOUT, named).labels == ("age", "price")
    space = Dict({"arm": Box((2,)), "speed": Box(()), "camera": Box((8, 8), "uint8")})
    about = {
        "observation_statistics": {
            "arm": {"mean": [1, 2], "std": [1, 1]},
            "speed": {"mean": 5, "std": 2},
        }
    }
    moments = training_moments(about, PolicySpec(space, Discrete(3), "categorical"))
    assert moments.labels == ("arm[0]", "arm[1]", "speed")
    seen = {"arm": np.ones((1, 2)), "speed": np.asarray([9.0]), "camera": np.zeros((1, 8, 8))}
    assert moments.standardize(seen).tolist() == [[0.0, -1.0, 2.0]]


def test_of_many_elements_some_are_taken_evenly():
    mean = np.arange(1000.0)
    about = {"observation_statistics": {"": {"mean": mean.tolist(), "std": [1.0] * 1000}}}
    moments = training_moments(about, PolicySpec(Box((1000,)), Discrete(2), "categorical"))
    assert len(moments.labels) == 250 <= MAX_ELEMENTS
    assert moments.labels[:3] == ("0", "4", "8")
    assert np.abs(moments.standardize(mean[None] + 3.0) - 3.0).max() == 0


@pytest.mark.parametrize(
    "about",
    [
        {},
        {"normalization": {}},
        {"normalization": None},
        {"observation_statistics": {"": {"mean": [1.0]}}},
        {"observation_statistics": {"": {"mean": [1.0], "std": [0.0]}}},
        {"observation_statistics": {"": {"mean": [1.0, 2.0], "std": [1.0]}}},
        {"observation_statistics": {"": {"mean": ["x"], "std": [1.0]}}},
        {"observation_statistics": [1, 2]},
    ],
)
def test_without_sense_there_is_no_drift(about):
    assert training_moments(about, SPEC) is None
    one = recent(about)
    one.add(np.zeros((1, 2), np.float32), likely(1.0), 1, False, 0.0)
    one.fold(0.0)
    assert means(one).shifts.size == 0
    assert means(one).num == 1


def test_means_of_what_was_seen():
    one = recent()
    one.add(np.asarray([[12, -1]], np.float32), likely(1.0), 1, False, 0.0)
    one.add(np.asarray([[16, 0], [10, -1]], np.float32), likely(0.5, 0.25), 2, True, 0.0)
    one.fold(0.0)
    found = means(one)
    assert found.num == 3
    assert found.shifts == pytest.approx([(1 + 3 + 0) / 3, 2 / 3])
    assert found.log_prob == pytest.approx(math.log(0.125) / 3, rel=1e-6)
    # Two of three were drawn, of three actions: whether the best came out nobody can tell.
    assert found.exploration_rate == pytest.approx(2 / 3)


def test_exploration_is_what_the_probabilities_tell():
    one = recent()
    # epsilon = 0.3 of three actions: the best has 0.8, any other 0.1.
    one.add(np.zeros((4, 2)), likely(0.8, 0.1, 0.8, 0.8), 4, True, 0.3)
    one.fold(0.0)
    assert means(one).exploration_rate == pytest.approx(0.25)
    two = recent(actions=Discrete(2))
    two.add(np.zeros((3, 2)), likely(0.4, 0.6, 0.5), 3, True, 0.0)
    two.fold(0.0)
    assert means(two).exploration_rate == pytest.approx(1 / 3)
    mode = recent()
    mode.add(np.zeros((2, 2)), None, 2, False, 0.0)
    mode.fold(0.0)
    assert means(mode).exploration_rate == 0.0
    assert means(mode).log_prob is None


def test_densities_that_are_not_known_are_left_out():
    one = recent(actions=Box((1,), low=-1, high=1))
    one.add(np.zeros((2, 2)), np.asarray([np.nan, 0.5], np.float32), 2, True, 0.0)
    one.fold(0.0)
    assert means(one).log_prob == 0.5
    assert means(one).exploration_rate == 1.0


def test_what_is_older_counts_less_also_of_another_worker():
    first, second = recent(), recent()
    first.add(np.asarray([[12, -1]]), likely(1.0), 1, False, 0.0)
    first.fold(0.0)
    second.add(np.asarray([[10, -1]]), likely(1.0), 1, False, 0.0)
    second.fold(TIME_CONSTANT_S)
    both = RecentMeans(merge_sums([first._sums, second._sums], TIME_CONSTANT_S))
    share = math.exp(-1) / (1 + math.exp(-1))
    assert both.shifts[0] == pytest.approx(share)
    assert both.num == pytest.approx(1 + math.exp(-1))
    first.add(np.asarray([[10, -1]]), likely(1.0), 1, False, 0.0)
    first.fold(TIME_CONSTANT_S)
    assert means(first, TIME_CONSTANT_S).shifts[0] == pytest.approx(share)
    first.fold(1e9)
    assert means(first, TIME_CONSTANT_S).shifts[0] == pytest.approx(share)


def test_it_asks_to_be_added_up_when_there_is_enough_and_keeps_no_large_arrays():
    one = recent()
    asked = [one.add(np.zeros((1, 2)), likely(1.0), 1, False, 0.0) for _ in range(64)]
    assert asked == [False] * 63 + [True]
    one.fold(0.0)
    assert one.add(np.zeros((1000, 2)), likely(*[1.0] * 1000), 1000, False, 0.0)
    one.fold(0.0)
    assert means(one).num == 1064
    assert means(one).shifts[0] == pytest.approx(-5.0)
    frames = recent({}, Box((84, 84), "uint8"))
    frames.add(np.zeros((1, 84, 84), np.uint8), likely(1.0), 1, False, 0.0)
    assert not frames._single
    assert not frames._shifts
