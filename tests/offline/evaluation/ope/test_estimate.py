import dataclasses
import time

import numpy as np
import pytest

from replaylake.datastore.errors import ConfigInvalidError, EmptyReplayError
from replaylake.offline.evaluation.ope.estimate import estimate, estimate_differences
from replaylake.offline.evaluation.ope.estimators import ESTIMATORS, default_estimators
from replaylake.offline.evaluation.ope.intervals import METHODS
from replaylake.offline.evaluation.ope.logged_episodes import LoggedEpisodes, one_step_episodes

ONE_STEP = {"ips", "snips", "clipped_ips", "switch_dr", "dr_os", "sndr", "dr", "dm"}
LONGER = {"is", "wis", "clipped_is", "pdis", "wpdis", "wdr", "dr", "fqe"}


def log_of(num_episodes=200, longest=1, seed=0, **changes):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, num_episodes)
    size = int(lengths.sum())
    log = LoggedEpisodes(
        np.append(0, lengths.cumsum()),
        rng.exponential(1, size),
        0.9,
        behavior_probs=rng.uniform(0.4, 0.6, size),
        target_probs=rng.uniform(0.4, 0.6, size),
        q_logged=rng.normal(1, 0.1, size),
        v_target=rng.normal(1, 0.1, size),
    )
    return dataclasses.replace(log, **changes)


def by_name(found):
    return {one.estimator: one for one in found.estimates}


@pytest.mark.parametrize(("longest", "names"), [(1, ONE_STEP), (5, LONGER)])
def test_all_that_suit_a_log(longest, names):
    log = log_of(longest=longest)
    found = estimate(log)
    assert set(by_name(found)) == names == set(default_estimators(longest == 1))
    assert found.refused == {}
    assert found.log_mean == log.returns.mean()
    alone = by_name(found)["dm" if longest == 1 else "fqe"]
    for one in found.estimates:
        assert one.difference == pytest.approx(one.value - found.log_mean)
        assert one.assumptions
        assert one.paper
        if one is not alone:
            assert one.ci_low < one.value < one.ci_high
            assert one.difference_low < one.difference < one.difference_high
            assert set(one.intervals) == set(METHODS)
            assert (one.interval, one.no_interval) == ("bootstrap", "")
            assert one.difference_interval == "wider"
            ends = [one.differences[name] for name in ("bootstrap", "student_t")]
            assert one.difference_low == min(end.low for end in ends)
            assert one.difference_high == max(end.high for end in ends)
    assert alone.max_weight is None
    assert alone.effective_sample_size == 200


@pytest.mark.parametrize("method", [None, "student_t", "empirical_bernstein"])
@pytest.mark.parametrize(("longest", "name"), [(1, "dm"), (5, "fqe")])
def test_a_model_alone_has_no_interval(longest, name, method):
    log = log_of(longest=longest)
    (one,) = estimate(log, [name], interval=method).estimates
    assert one.value == log.v_target[log.offsets[:-1]].mean()
    assert one.difference == one.value - log.returns.mean()
    ends = one.ci_low, one.ci_high, one.difference_low, one.difference_high, one.interval
    assert ends == (None,) * 5
    assert (one.intervals, one.differences) == ({}, {})
    assert "does not measure the error of their model" in one.no_interval
    ((paired,), _) = estimate_differences(log, log, [name])
    assert (paired.low, paired.high, paired.interval) == (None,) * 3
    assert paired.no_interval == one.no_interval


def test_an_estimator_of_the_other_kind_of_log_is_refused_with_its_twin():
    found = estimate(log_of(), ["wis", "ips"])
    assert list(by_name(found)) == ["ips"]
    assert found.refused["wis"] == (
        "for episodes of several steps, found one-step logs: use 'snips'"
    )
    found = estimate(log_of(longest=4), ["sndr", "is"])
    assert "use 'wdr'" in found.refused["sndr"]


def test_a_policy_without_a_density_leaves_the_direct_method():
    log = log_of(longest=3, target_probs=None, no_density="the head 'sampled' has no density")
    found = estimate(log)
    assert set(by_name(found)) == {"fqe"}
    assert set(found.refused) == LONGER - {"fqe"}
    assert set(found.refused.values()) == {"the head 'sampled' has no density"}


def test_without_a_model_importance_sampling_is_left():
    found = estimate(log_of(longest=3, q_logged=None))
    assert set(by_name(found)) == {"is", "wis", "clipped_is", "pdis", "wpdis"}
    assert "no model of values" in found.refused["fqe"]


def test_a_fitted_behavior_policy_is_said_of_every_number_it_is_in():
    found = by_name(estimate(log_of(behavior_fitted=True)))
    for name, one in found.items():
        assert ("fitted, not logged" in one.assumptions) == (name != "dm")


def test_on_policy_the_difference_is_nothing_but_rounding():
    probs = np.full(300, 0.25)
    log = log_of(300, behavior_probs=probs, target_probs=probs)
    found = by_name(estimate(log, ["ips", "snips", "clipped_ips"]))
    for one in found.values():
        assert one.difference == 0
        # 2^-24 (2 + 2 ln 4) of the mean return, and 1.968 of Student's t.
        assert -1e-6 < one.difference_low < 0 < one.difference_high < 1e-6
        assert one.value == log.returns.mean()


def test_pairing_narrows_the_difference():
    log = log_of(longest=4)
    one = by_name(estimate(log, ["pdis"]))["pdis"]
    assert one.difference_high - one.difference_low < 0.9 * (one.ci_high - one.ci_low)


def test_no_reward_among_the_few_that_count_is_no_certainty():
    rewards = np.append(np.zeros(400), np.ones(100))
    target = np.append(np.ones(100), np.zeros(400))
    log = one_step_episodes(rewards, behavior_probs=np.full(500, 0.2), target_probs=target)
    for one in estimate(log, ["ips", "snips"]).estimates:
        assert (one.value, one.ci_low, one.interval) == (0, 0, "empirical_bernstein")
        assert one.ci_high > 0.05
        assert one.difference_high - one.difference > 0.1


def test_intervals_stay_within_the_rewards_that_were_seen():
    """A click or none: without bounds, a model that is off puts click rates below 0."""
    rng = np.random.default_rng(2)
    clicks = (rng.random(120) < 0.05).astype(float)
    log = one_step_episodes(
        clicks,
        behavior_probs=np.full(120, 0.1),
        target_probs=rng.choice([0.01, 0.6], 120, p=[0.85, 0.15]),
        q_logged=np.full(120, 0.3),
        v_target=np.full(120, 0.3),
    )
    found = by_name(estimate(log, ["ips", "snips", "dr"]))
    assert found["dr"].value - (found["dr"].ci_high - found["dr"].value) < 0
    for one in found.values():
        assert all(0 <= end.low <= end.high <= 1 for end in one.intervals.values())
        assert all(-1 <= end.low <= end.high <= 1 for end in one.differences.values())
    assert estimate(log, ["snips"]).log_interval.low >= 0


def test_two_rewards_give_a_finite_interval():
    rewards = np.zeros(1000)
    rewards[:2] = 1
    probs = np.random.default_rng(0).uniform(0.4, 0.6, 1000)
    log = one_step_episodes(rewards, behavior_probs=probs, target_probs=np.full(1000, 0.5))
    (one,) = estimate(log, ["ips"]).estimates
    assert one.interval == "empirical_bernstein"
    assert np.isfinite([one.ci_low, one.ci_high, one.difference_low, one.difference_high]).all()


def test_the_level_widens_and_the_seed_decides():
    log = log_of()
    narrow, wide = estimate(log, ["snips"], level=0.8), estimate(log, ["snips"], level=0.99)
    assert narrow.estimates[0].ci_low > wide.estimates[0].ci_low
    assert narrow.estimates[0].ci_high < wide.estimates[0].ci_high
    assert estimate(log, ["snips"]).estimates == estimate(log, ["snips"]).estimates
    assert estimate(log, ["snips"], seed=1).estimates != estimate(log, ["snips"]).estimates


def test_an_interval_and_a_clip_can_be_asked_for():
    log = log_of()
    (one,) = estimate(log, ["clipped_ips"], clip=1.1, interval="student_t").estimates
    assert one.interval == "student_t"
    assert one.max_weight == 1.1
    assert estimate(log, ["clipped_ips"]).estimates[0].max_weight > 1.1


WRONG = [
    ({"names": ["snisp"]}, "found 'snisp', expected snips"),
    ({"names": []}, "estimator: found none"),
    ({"level": 1.0}, "level: found 1.0"),
    ({"clip": 0.0}, "clip: found 0.0"),
    ({"interval": "bca"}, "interval: found 'bca', expected one of .'bootstrap'"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_options_that_there_are_not(options, message):
    with pytest.raises(ConfigInvalidError, match=message):
        estimate(log_of(), **options)


def test_a_single_episode_ends_in_one_line():
    with pytest.raises(EmptyReplayError, match="found 1 episode, expected 2 or more"):
        estimate(log_of(1, longest=5))


def test_every_estimator_says_what_it_assumes_and_its_twin_exists():
    for name, estimator in ESTIMATORS.items():
        assert estimator.name == name
        assert estimator.assumptions
        assert any(ch.isdigit() for ch in estimator.paper)
        assert not estimator.counterpart or estimator.counterpart in ESTIMATORS


@pytest.mark.slow
def test_a_million_rows_take_seconds():
    log = log_of(1_000_000)
    start = time.thread_time()
    estimate(log)
    assert time.thread_time() - start < 20


@pytest.mark.parametrize("longest", [1, 4])
def test_agents_of_one_episode_are_not_independent(longest):
    log = log_of(longest=longest)
    # Each episode twice, as two agents that lived through the same.
    num, steps = log.num_episodes, log.num_steps
    both = {
        name: np.concatenate([getattr(log, name)] * 2)
        for name in ("rewards", "behavior_probs", "target_probs", "q_logged", "v_target")
    }
    offsets = np.append(log.offsets, log.offsets[1:] + steps)
    twice = LoggedEpisodes(offsets, discount=log.discount, **both)
    once, naive = by_name(estimate(log)), by_name(estimate(twice))
    clusters = np.tile(np.arange(num), 2)
    held = by_name(estimate(dataclasses.replace(twice, clusters=clusters)))
    for name in ("snips", "ips", "dr") if longest == 1 else ("wis", "pdis", "dr"):
        widths = [one[name].ci_high - one[name].ci_low for one in (once, naive, held)]
        assert widths[1] < 0.8 * widths[0]
        assert widths[2] == pytest.approx(widths[0], rel=0.1)
        assert held[name].value == pytest.approx(once[name].value)
    with pytest.raises(EmptyReplayError, match="1 episode"):
        estimate(dataclasses.replace(twice, clusters=np.zeros(2 * num, np.int64)))
