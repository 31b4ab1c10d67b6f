"""Estimates from uniform logs of FrozenLake, whose policies' values follow from its own table."""

import json

import gymnasium
import numpy as np
import pytest

from replaylake.offline.evaluation.ope.diagnostics import diagnose
from replaylake.offline.evaluation.ope.estimate import estimate
from replaylake.offline.evaluation.ope.logged_episodes import LoggedEpisodes
from replaylake.offline.evaluation.ope.verdict import verdict

HORIZON = 100
UNIFORM = np.full((16, 4), 0.25)


@pytest.fixture(scope="module")
def lake():
    """Successor probabilities [16, 4, 16], which successors end it, mean rewards [16, 4]."""
    env = gymnasium.make("FrozenLake-v1")
    moves, ends, rewards = np.zeros((16, 4, 16)), np.zeros(16, bool), np.zeros((16, 4))
    for state, choices in env.unwrapped.P.items():
        for action, outcomes in choices.items():
            for probability, successor, reward, terminated in outcomes:
                moves[state, action, successor] += probability
                rewards[state, action] += probability * reward
                ends[successor] |= terminated
    env.close()
    return moves, ends, rewards


def exact_value(lake, policy, discount):
    moves, ends, rewards = lake
    values = np.zeros(16)
    for _ in range(HORIZON):
        values = (policy * (rewards + discount * moves @ (values * ~ends))).sum(1)
    return values[0]


def greedy_policy(lake):
    moves, ends, rewards = lake
    values = np.zeros(16)
    for _ in range(2000):
        q = rewards + 0.99 * moves @ (values * ~ends)
        values = q.max(1)
    return np.eye(4)[q.argmax(1)]


@pytest.fixture(scope="module")
def uniform_log(lake):
    """States, actions, rewards and offsets of 5,000 episodes with uniform actions."""
    moves, ends, rewards = lake
    rng = np.random.default_rng(0)
    states, running = np.zeros(5000, int), np.ones(5000, bool)
    columns = []
    for _ in range(HORIZON):
        actions = rng.integers(0, 4, 5000)
        cumulative = moves[states, actions].cumsum(1)
        successors = (rng.random(5000)[:, None] > cumulative).sum(1).clip(0, 15)
        columns.append((running, states, actions, (successors == 15).astype(float)))
        running = running & ~ends[successors]
        states = successors
    logged, states, actions, rewards = (
        np.stack(column, 1) for column in zip(*columns, strict=True)
    )
    offsets = np.append(0, logged.sum(1).cumsum())
    return states[logged], actions[logged], rewards[logged], offsets


def logged_for(uniform_log, policy, discount):
    states, actions, rewards, offsets = uniform_log
    return LoggedEpisodes(
        offsets,
        rewards,
        discount,
        behavior_probs=UNIFORM[states, actions],
        target_probs=policy[states, actions],
        actions=actions,
        behavior_distribution=UNIFORM[states],
        target_distribution=policy[states],
    )


def test_exact_values_are_the_published_ones(lake, shared_data):
    known = json.loads((shared_data / "gym_exact_values.json").read_text())["FrozenLake-v1"]
    greedy = greedy_policy(lake)
    policies = {
        "uniform_random": UNIFORM,
        "optimal(0.99)": greedy,
        "half_half": (UNIFORM + greedy) / 2,
    }
    for name, policy in policies.items():
        for discount in (1.0, 0.99):
            expected = known[name][f"gamma{discount}_H100"]
            assert exact_value(lake, policy, discount) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("discount", [1.0, 0.99])
@pytest.mark.parametrize("share", [0.0, 0.05])
def test_a_policy_near_the_logger_is_known(lake, uniform_log, share, discount):
    policy = (1 - share) * UNIFORM + share * greedy_policy(lake)
    truth = exact_value(lake, policy, discount)
    log = logged_for(uniform_log, policy, discount)
    found = estimate(log)
    assert {one.estimator for one in found.estimates} == {
        "is",
        "wis",
        "clipped_is",
        "pdis",
        "wpdis",
    }
    for one in found.estimates:
        assert one.ci_low <= truth <= one.ci_high
        behavior = exact_value(lake, UNIFORM, discount)
        assert one.difference_low <= truth - behavior + 1e-15
        assert truth - behavior - 1e-15 <= one.difference_high
    assert verdict(found, diagnose(log)).verdict == "supported"


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_policy_far_from_the_logger_is_not_supported(lake, uniform_log, share):
    policy = (1 - share) * UNIFORM + share * greedy_policy(lake)
    log = logged_for(uniform_log, policy, 0.99)
    found = verdict(estimate(log), diagnose(log))
    assert found.verdict == "not_supported"
    assert "of 5,000 episodes" in found.reason
