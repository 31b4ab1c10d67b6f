"""Policies on the same seeds, against numbers worked out by hand."""

import gymnasium
import numpy as np
import pytest

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.lake.policies.policy import Act, PolicySpec
from replaylake.offline.callbacks import Callbacks
from replaylake.offline.environments.ids import spaces_of
from replaylake.offline.evaluation.comparison import compare
from replaylake.offline.evaluation.evaluate import EvaluationConfig


class Bonus(gymnasium.Env):
    """One step: the reward is the seed and, for action 1, a little more on even seeds."""

    observation_space = gymnasium.spaces.Box(0, 9, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self._seed = seed
        return np.zeros(1, np.float32), {}

    def step(self, action):
        bonus = (0.5 if self._seed % 2 == 0 else 0.0) * action
        return np.zeros(1, np.float32), 100.0 * self._seed + bonus, True, False, {}


class Always:
    def __init__(self, env_id, action):
        self.spec = PolicySpec(*spaces_of(env_id), "categorical")
        self._action = action

    def initial_state(self, n):
        return None

    def act(self, observations, state=None, **_):
        return Act(np.full(len(observations), self._action), None)

    def observe(self, state, rewards):
        return state


@pytest.fixture
def env_id():
    env_id = "replaylake-test/Bonus-v0"
    gymnasium.register(env_id, entry_point=Bonus)
    yield env_id
    del gymnasium.registry[env_id]


def test_differences_are_taken_seed_by_seed(env_id):
    policies = {"zero": Always(env_id, 0), "one": Always(env_id, 1), "again": Always(env_id, 0)}
    first, second, third = compare(policies, EvaluationConfig(env_id, episodes=4, seed=10))
    assert first.evaluation.returns == (1000.0, 1100.0, 1200.0, 1300.0)
    assert first.difference is None
    # Differences 0.5, 0, 0.5, 0: mean 0.25, standard deviation sqrt(1/12), t(0.975, 3) = 3.182446.
    half = 3.182446305284263 * np.sqrt(1 / 12) / 2
    assert second.difference == 0.25
    assert (second.ci_low, second.ci_high) == pytest.approx((0.25 - half, 0.25 + half))
    assert (second.share_better, second.share_equal) == (0.5, 0.5)
    # Beside the means' own intervals, hundreds wide.
    assert second.evaluation.ci_high - second.evaluation.ci_low > 400
    assert (third.difference, third.ci_low, third.ci_high) == (0.0, 0.0, 0.0)
    assert (third.share_better, third.share_equal) == (0.0, 1.0)
    assert second.to_json()["evaluation"]["returns"] == list(second.evaluation.returns)


def test_one_episode_has_a_difference_without_interval(env_id):
    policies = {"zero": Always(env_id, 0), "one": Always(env_id, 1)}
    _, second = compare(policies, EvaluationConfig(env_id, episodes=1))
    assert (second.difference, second.ci_low, second.ci_high) == (0.5, None, None)


def test_progress_counts_all_episodes(env_id):
    seen = []
    policies = {"zero": Always(env_id, 0), "one": Always(env_id, 1)}
    compare(
        policies,
        EvaluationConfig(env_id, episodes=2),
        callbacks=Callbacks(
            on_progress=lambda done: seen.append((done.num_episodes, done.episodes))
        ),
    )
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_lone_policy_is_no_comparison(env_id):
    with pytest.raises(ConfigInvalidError, match="found 1 policies, expected two"):
        compare({"zero": Always(env_id, 0)}, env_id)
