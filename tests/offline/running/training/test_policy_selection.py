import math

import numpy as np
import pytest

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.datastore.lake.policies.uniform import UniformPolicy
from replaylake.offline.environments.ids import spaces_of
from replaylake.offline.evaluation.evaluate import EvaluationConfig, evaluate
from replaylake.offline.running.training.config import TrainConfig, TrainRequest
from replaylake.offline.running.training.policy_selection import (
    FIRST_SEED,
    EnvironmentReturn,
    HeldOutLoss,
    PolicySelection,
    make_measure,
    measure_name,
)


def add_all(selection, values):
    return [selection.add(10 * i, value, {"loss": i}) for i, value in enumerate(values, 1)]


def test_the_best_is_the_earliest_of_the_highest():
    selection = PolicySelection("fqe")
    assert add_all(selection, [1.0, 3.0, 3.0, 2.0]) == [True, True, False, False]
    assert (selection.chosen.update, selection.chosen.value) == (20, 3.0)
    assert selection.num_worse == 2
    assert selection.to_json() == {
        "measure": "fqe",
        "update": 20,
        "value": 3.0,
        "higher_is_better": True,
        "stopped_early": False,
        "history": [
            {"update": 10, "value": 1.0},
            {"update": 20, "value": 3.0},
            {"update": 30, "value": 3.0},
            {"update": 40, "value": 2.0},
        ],
    }


def test_of_losses_the_lowest():
    selection = PolicySelection("loss", higher_is_better=False)
    assert add_all(selection, [1.0, 0.5, 0.7]) == [True, True, False]
    assert selection.chosen.update == 20


def test_what_is_not_finite_is_worse_than_any():
    selection = PolicySelection("fqe", patience=2)
    assert add_all(selection, [math.nan, -5.0, math.inf]) == [False, True, False]
    assert selection.chosen.update == 20
    assert [value for _, value in selection.history] == [None, -5.0, None]
    assert not selection.is_exhausted
    selection.add(40, math.nan, {})
    assert selection.is_exhausted


def test_without_a_value_the_last_is_taken():
    selection = PolicySelection("last")
    assert add_all(selection, [None, None]) == [False, False]
    assert (selection.chosen.update, selection.chosen.value) == (20, None)
    assert not selection.is_exhausted


def test_its_state_goes_on():
    selection, again = PolicySelection("fqe", patience=2), PolicySelection("fqe", patience=2)
    add_all(selection, [1.0, 3.0, 2.0])
    again.load_state_dict(selection.state_dict())
    assert again == selection
    again.add(40, 2.5, {})
    assert again.is_exhausted


def request(env_id=None, reward=None, **config):
    return TrainRequest(("line",), TrainConfig(policy="p", env=env_id, reward=reward, **config))


@pytest.mark.parametrize(
    ("asked", "uses_rewards", "name"),
    [
        (request(), True, "last"),
        (request(env_id="CartPole-v1", holdout=0.2), True, "environment"),
        (request(holdout=0.2), True, "fqe"),
        (request(holdout_after="2026-01-01"), False, "loss"),
        (request(env_id="CartPole-v1", select="last"), True, "last"),
        (request(holdout=0.2, select="loss"), True, "loss"),
        # The environment's reward is another one: a cost's best policy would be its worst.
        (request(env_id="CartPole-v1", reward="-reward", holdout=0.2), True, "fqe"),
        (request(env_id="CartPole-v1", reward="-reward"), True, "last"),
        (request(env_id="CartPole-v1", reward="-reward"), False, "environment"),
        (request(env_id="CartPole-v1", reward=" Reward "), True, "environment"),
        (request("CartPole-v1", "-reward", select="environment"), True, "environment"),
    ],
)
def test_the_measure_follows_from_what_is_there(asked, uses_rewards, name):
    assert measure_name(asked, uses_rewards) == name


@pytest.mark.parametrize(
    ("select", "message"),
    [("environment", "no environment"), ("fqe", "no held-out"), ("loss", "no held-out")],
)
def test_a_measure_that_lacks_something_is_refused(select, message):
    with pytest.raises(ConfigInvalidError, match=message):
        measure_name(request(select=select), True)


def test_the_selections_seeds_are_not_the_closing_evaluations():
    policy = UniformPolicy(*spaces_of("CartPole-v1"))
    asked = request(env_id="CartPole-v1", seed=3)
    measure = make_measure("environment", asked, None)
    assert isinstance(measure, EnvironmentReturn)
    found = evaluate(policy, EvaluationConfig("CartPole-v1", episodes=10, seed=FIRST_SEED + 3))
    assert measure(policy) == found.mean_return
    # Of no run's closing evaluation: their seeds are numbers of runs, and of episodes.
    assert min(found.seeds) > 1_000_000


def view_of(tmp_path, episodes):
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("d").append(episodes)
    return lake.snapshot("d").replay()


def test_the_loss_of_a_uniform_policy_is_the_log_of_its_choices(tmp_path, line_world):
    view = view_of(tmp_path, line_world())
    policy = UniformPolicy(view.spec.observation_space, Discrete(2))
    assert HeldOutLoss(view)(policy) == pytest.approx(math.log(2))


def test_the_loss_of_a_boxs_actions_is_the_mean_squared_error(tmp_path, line_world):
    episodes = line_world(action_space="continuous")
    view = view_of(tmp_path, episodes)
    spec = PolicySpec(view.spec.observation_space, Box((1,), "float32", -3, 3), "deterministic")

    class Zero:
        """Its action is 0 everywhere."""

        def act(self, observations, **given):
            return type("", (), {"actions": np.zeros((len(observations), 1), np.float32)})

    zero = Zero()
    zero.spec = spec
    expected = np.mean(np.concatenate([episode.actions for episode in episodes]) ** 2)
    assert HeldOutLoss(view)(zero) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("updates", "options", "interval", "each"),
    [
        (2_000, {}, 1_000, 1_000),
        (500, {}, 500, 500),
        (100_000, {}, 10_000, 1_000),
        (3_000, {"selection_fqe_updates": 100}, 300, 100),
        (2_000, {"evaluate_updates": 50}, 50, 1_000),
    ],
)
def test_fitted_q_evaluation_costs_no_more_updates_than_training(updates, options, interval, each):
    config = TrainConfig("dqn", "p", updates=updates, **options)
    assert (config.measure_interval_updates("fqe"), config.num_fqe_updates) == (interval, each)
    if "evaluate_updates" not in options:
        assert updates // interval * each <= updates
        assert config.measure_interval_updates("loss") == updates // 10
        assert config.save_interval_updates == updates // 10
