import dataclasses
import re

import numpy as np
import pytest

from replaylake.offline.evaluation.ope.diagnostics import diagnose
from replaylake.offline.evaluation.ope.estimate import estimate
from replaylake.offline.evaluation.ope.logged_episodes import LoggedEpisodes, one_step_episodes
from replaylake.offline.evaluation.ope.verdict import verdict


def bandit(num_rows=4000, num_actions=10, greedy=0.0, rate=0.3, seed=0, **changes):
    """A log of uniform actions; the policy: greedy on action 0 with probability `greedy`."""
    rng = np.random.default_rng(seed)
    actions = rng.integers(0, num_actions, num_rows)
    rewards = (rng.random(num_rows) < rate).astype(float)
    target = np.full((num_rows, num_actions), (1 - greedy) / num_actions)
    target[:, 0] += greedy
    behavior = np.full((num_rows, num_actions), 1 / num_actions)
    log = one_step_episodes(
        rewards,
        actions=actions,
        behavior_probs=behavior[np.arange(num_rows), actions],
        target_probs=target[np.arange(num_rows), actions],
        behavior_distribution=behavior,
        target_distribution=target,
    )
    return dataclasses.replace(log, **changes)


def judged(log, names=None, **options):
    return verdict(estimate(log, names), diagnose(log), **options)


def test_a_near_policy_is_supported_with_its_numbers():
    found = judged(bandit(greedy=0.1))
    assert found.verdict == "supported"
    assert "of 4,000 episodes" in found.reason
    assert "the estimators agree" in found.reason
    fitted = judged(bandit(greedy=0.1, behavior_fitted=True)).reason
    assert "fitted, not logged: this holds only if nothing that is not in the log" in fitted


def test_training_episodes_are_never_supported():
    found = judged(bandit(greedy=0.1), trained_on=7)
    assert found.verdict == "not_supported"
    assert "7 of the 4,000 evaluated episodes" in found.reason


def test_a_greedy_policy_on_rare_clicks_is_weak():
    """34 actions, 10,000 rows, 0.46% clicks: about 294 rows match, and 1.4 of them are clicks."""
    log = bandit(10_000, 34, greedy=1.0, rate=0.0046)
    found = judged(log)
    assert diagnose(log).weights.effective_sample_size == pytest.approx(294, abs=50)
    assert found.verdict == "weak"
    assert "rests on an effective" in found.reason


def test_no_or_little_overlap_is_not_supported():
    found = judged(bandit(200, greedy=1.0))
    assert found.verdict == "not_supported"
    assert "(30 needed)" in found.reason
    assert re.search(
        r"effective (1\d|2\d)\.\d of 200 .* About \d{3} such episodes would do", found.reason
    )
    nothing = judged(bandit(200, target_probs=np.zeros(200), target_distribution=None))
    assert nothing.verdict == "not_supported"
    assert "effective 0.0 of 200" in nothing.reason
    assert "such episodes" not in nothing.reason


def test_few_effective_episodes_are_weak():
    found = judged(bandit(600, greedy=1.0))
    assert found.verdict == "weak"
    assert "(100 needed)" in found.reason
    assert "the policy could have taken the logged action in " in found.reason


@pytest.mark.parametrize(("mass", "expected"), [(0.05, "weak"), (0.2, "not_supported")])
def test_actions_that_were_never_logged(mass, expected):
    log = bandit()
    behavior = np.c_[log.behavior_distribution, np.zeros(4000)]
    target = np.c_[log.target_distribution * (1 - mass), np.full(4000, mass)]
    log = dataclasses.replace(
        log,
        behavior_distribution=behavior,
        target_distribution=target,
        target_probs=target[np.arange(4000), log.actions],
    )
    found = judged(log)
    assert found.verdict == expected
    assert f"{mass:.1%} of the policy's probability" in found.reason


def test_a_mean_weight_far_from_one_is_weak():
    log = bandit(target_distribution=None)
    log = dataclasses.replace(log, target_probs=log.target_probs * (1.1 + 0.2 * (log.actions % 2)))
    found = judged(log)
    assert found.verdict == "weak"
    assert "mean importance weight is 1.2" in found.reason


def test_propensities_that_do_not_fit_the_actions_are_weak():
    log = bandit(20_000)
    behavior = np.tile(np.append([0.13, 0.07], np.full(8, 0.1)), (20_000, 1))
    log = dataclasses.replace(
        log,
        behavior_distribution=behavior,
        behavior_probs=behavior[np.arange(20_000), log.actions],
        target_distribution=behavior,
        target_probs=behavior[np.arange(20_000), log.actions],
    )
    found = judged(log)
    assert found.verdict == "weak"
    assert "do not fit its actions" in found.reason


def test_weights_too_uneven_for_their_intervals_are_weak():
    """1,500 episodes, of which an effective 200 count: log-normal weights of variance ln 7.5."""
    rng = np.random.default_rng(4)
    behavior = np.full(3000, 0.01)
    ratios = np.exp(np.sqrt(np.log(7.5)) * rng.standard_normal(1500)) / np.sqrt(7.5)
    target = np.stack([behavior[::2], behavior[::2] * ratios], axis=1).ravel()
    log = LoggedEpisodes(
        np.arange(1501) * 2, rng.random(3000), behavior_probs=behavior, target_probs=target
    )
    found = judged(log)
    assert diagnose(log).weights.worst_step_size > 150
    assert found.verdict == "weak"
    assert found.reason.startswith("Intervals may contain the true value less often than stated: ")
    assert "of 1,500 episodes are so uneven at step 1 that their mean" in found.reason


def test_a_model_alone_is_weak():
    log = one_step_episodes(
        np.arange(100.0),
        q_logged=np.zeros(100),
        v_target=np.arange(100.0),
        no_density="the head 'deterministic' has no density",
    )
    found = judged(log)
    assert found.verdict == "weak"
    assert "only from a model of values" in found.reason
    assert "head 'deterministic' has no density" in found.reason


def test_nothing_to_go_by_is_not_supported():
    found = judged(
        one_step_episodes(np.arange(100.0), no_density="the head 'sampled' has no density")
    )
    assert found.verdict == "not_supported"
    assert "No estimator applies: the head 'sampled'" in found.reason


def test_estimators_that_disagree_are_weak():
    log = bandit(greedy=0.1)
    found = verdict(estimate(log, ["ips", "clipped_ips"], clip=0.5), diagnose(log))
    assert found.verdict == "weak"
    assert "Estimators disagree: ips gives" in found.reason


def test_a_model_alone_without_an_interval_does_not_disagree():
    log = bandit(greedy=0.1)
    log = dataclasses.replace(log, q_logged=np.full(4000, 0.9), v_target=np.full(4000, 0.9))
    assert judged(log, ["ips", "dm"]).verdict == "supported"
    assert "agree" not in judged(log, ["ips", "dm"]).reason
    assert "only from a model of values" in judged(log, ["dm"]).reason


def test_an_interval_as_wide_as_the_log_is_weak():
    """Rewards that vary little but are far from 0: ips alone varies with its weights."""
    log = bandit(1500, greedy=0.9, rate=0.5)
    log = dataclasses.replace(log, rewards=100 + 0.1 * log.rewards)
    found = judged(log, ["ips"])
    assert found.verdict == "weak"
    assert "narrowest interval, ips's" in found.reason
    assert judged(log).verdict == "supported", "snips does not"


def test_equal_returns_do_not_disagree_by_rounding():
    log = LoggedEpisodes(
        np.arange(0, 601, 3),
        np.full(600, 0.1),
        0.9,
        behavior_probs=np.full(600, 0.3),
        target_probs=np.full(600, 0.3),
    )
    assert judged(log).verdict == "supported"
