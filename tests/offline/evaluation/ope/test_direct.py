"""Cross-fitted models of values against known ones."""

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.logged_steps import read_logged_steps
from replaylake.datastore.lake.policies.exploration import Exploration
from replaylake.offline.evaluation.ope.direct import predict_rewards, predict_values
from replaylake.offline.evaluation.ope.fqe_config import FQEConfig
from replaylake.offline.evaluation.ope.target_policy import TargetPolicy

QUICK = FQEConfig(updates=250, hidden_sizes=(32,), learning_rate=1e-2)


@pytest.fixture
def lake(tmp_path):
    return open_lake(tmp_path / "lake", create=True)


def bandit(lake, xs, actions, rewards, num_actions=3):
    lake.dataset("log").create(Box((1,)), Discrete(num_actions))
    lake.dataset("log").append(
        Episode(
            f"e/{i:05d}",
            observations=xs[i : i + 1],
            actions=actions[i : i + 1],
            rewards=rewards[i : i + 1],
            terminated=True,
        )
        for i in range(len(xs))
    )
    return read_logged_steps(lake.snapshot("log"))


@pytest.mark.slow
def test_rewards_of_a_bandit(lake):
    rng = np.random.default_rng(0)
    xs = rng.uniform(-1, 1, (1000, 1)).astype(np.float32)
    actions = rng.integers(0, 3, 1000)
    means = np.stack([xs[:, 0], -xs[:, 0], np.full(1000, 0.5)], axis=1)
    rewards = means[np.arange(1000), actions] + 0.1 * rng.standard_normal(1000)
    steps = bandit(lake, xs, actions, rewards)
    probs = np.tile([0.2, 0.3, 0.5], (1000, 1))
    found = predict_rewards(steps, probs, config=QUICK)
    assert np.abs(found.q_logged - means[np.arange(1000), actions]).mean() < 0.06
    assert np.abs(found.v_target - (probs * means).sum(axis=1)).mean() < 0.06
    assert "5 folds" in found.model
    again = predict_rewards(steps, probs, config=QUICK)
    np.testing.assert_array_equal(again.q_logged, found.q_logged)


@pytest.mark.slow
def test_a_reward_that_nothing_tells_of_is_its_mean(lake):
    rng = np.random.default_rng(1)
    xs = rng.uniform(-1, 1, (500, 1)).astype(np.float32)
    rewards = (rng.random(500) < 0.02).astype(float)
    steps = bandit(lake, xs, rng.integers(0, 3, 500), rewards)
    found = predict_rewards(steps, np.full((500, 3), 1 / 3), config=QUICK)
    assert "better than the mean" in found.model
    assert np.abs(found.v_target - rewards.mean()).max() < 0.02
    # An episode's own reward is not in what is said of it.
    ones, others = found.q_logged[rewards == 1], found.q_logged[rewards == 0]
    assert ones.mean() <= others.mean() + 1e-3


@pytest.mark.slow
def test_values_of_longer_episodes(lake, frozen_lake, table_policy):
    lake.dataset("frozen").create(Discrete(16), Discrete(4))
    lake.dataset("frozen").append(frozen_lake.uniform_episodes(2000))
    steps = read_logged_steps(lake.snapshot("frozen"))
    best = frozen_lake.optimal()
    target = TargetPolicy(table_policy(best), Exploration(epsilon=0.95))
    found = predict_values(steps, target, 1.0)
    assert "solved exactly" in found.model
    assert "2 folds" in found.model
    probs = np.eye(4)[best.argmax(1)] * 0.05 + 0.95 / 4
    first = found.v_target[steps.offsets[:-1]]
    # Two models, one a fold: two values for the one state that all begin in.
    assert len(np.unique(first)) == 2
    assert first.mean() == pytest.approx(frozen_lake.value(probs, 1.0), rel=0.5)
    np.testing.assert_allclose(found.v_target.shape, (steps.num_steps,))
