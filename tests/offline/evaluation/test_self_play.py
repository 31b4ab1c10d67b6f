from math import sqrt

import numpy as np
import pytest

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import ConfigInvalidError, SchemaMismatchError
from replaylake.datastore.lake.policies.policy import Act, PolicySpec
from replaylake.datastore.lake.policies.uniform import UniformPolicy
from replaylake.offline.callbacks import Callbacks
from replaylake.offline.environments.ids import spaces_of
from replaylake.offline.evaluation.evaluate import EvaluationConfig, evaluate

NOUGHTS = "pettingzoo:classic/tictactoe-v3"


class FirstFree:
    """Takes the first field that is free; remembers what it was paid."""

    def __init__(self):
        self.spec = PolicySpec(*spaces_of(NOUGHTS), "categorical", state_size=1)
        self.told = []

    def initial_state(self, n):
        return np.zeros((n, 1), np.float32)

    def act(self, observations, state=None, *, action_mask=None, **_):
        return Act(action_mask.argmax(axis=1), None, state)

    def observe(self, state, rewards):
        self.told += rewards.tolist()
        return state + rewards[:, None]


def test_a_policy_plays_for_all_agents():
    policy = FirstFree()
    found = evaluate(policy, EvaluationConfig(NOUGHTS, episodes=3))
    # Fields are filled in order: 0, 2, 4, 6 and 1, 3, 5: a diagonal after 7 moves.
    assert found.lengths == (7, 7, 7)
    assert found.agent_returns == {"player_1": 1.0, "player_2": -1.0}
    assert found.returns == (0, 0, 0)
    assert found.to_json()["agent_returns"] == {"player_1": 1.0, "player_2": -1.0}
    assert sorted(policy.told) == [-1] * 3 + [0] * 15 + [1] * 3


def test_what_two_at_random_return_does_not_depend_on_num_envs():
    policy = UniformPolicy(*spaces_of(NOUGHTS))
    alone = evaluate(policy, EvaluationConfig(NOUGHTS, episodes=200, num_envs=1))
    assert evaluate(policy, EvaluationConfig(NOUGHTS, episodes=200, num_envs=7)) == alone
    win, lose = 737 / 1260, 121 / 420
    deviation = sqrt((win + lose - (win - lose) ** 2) / 200)
    assert abs(alone.agent_returns["player_1"] - (win - lose)) < 4 * deviation


def test_agents_at_once_share_the_clock():
    env_id = "pettingzoo:classic/rps-v2"
    policy = UniformPolicy(*spaces_of(env_id))
    found = evaluate(policy, EvaluationConfig(env_id, env_args={"max_cycles": 4}, episodes=5))
    assert found.lengths == (4,) * 5
    assert found.env_args == {"max_cycles": 4}
    assert found.mean_return == 0


def test_what_does_not_go_together_is_refused():
    policy = UniformPolicy(Box((4,)), Discrete(9))
    with pytest.raises(SchemaMismatchError, match="observation space"):
        evaluate(policy, EvaluationConfig(NOUGHTS, episodes=1))
    with pytest.raises(ConfigInvalidError, match="several agents"):
        evaluate(
            FirstFree(),
            EvaluationConfig(NOUGHTS, episodes=1),
            callbacks=Callbacks(on_frame=lambda *_: None),
        )


def test_policies_play_for_the_agents_that_they_are_named_for():
    first, uniform = FirstFree(), UniformPolicy(*spaces_of(NOUGHTS))
    alone = evaluate(
        {"player_1": first, "player_2": uniform}, EvaluationConfig(NOUGHTS, episodes=50, num_envs=1)
    )
    found = evaluate(
        {"player_1": first, "player_2": uniform}, EvaluationConfig(NOUGHTS, episodes=50, num_envs=8)
    )
    assert found == alone
    # It is told of its own rewards alone: of the last of each game.
    assert sum(first.told) == 2 * 50 * found.agent_returns["player_1"]
    both = evaluate({"player_1": first, "player_2": first}, EvaluationConfig(NOUGHTS, episodes=3))
    assert both == evaluate(first, EvaluationConfig(NOUGHTS, episodes=3))


@pytest.mark.parametrize(
    ("env_id", "names", "text"),
    [
        (NOUGHTS, ["player_1"], "policies for player_1, expected one for each of player_1, pl"),
        (NOUGHTS, [], "policies for nobody, expected one for each"),
        ("CartPole-v1", ["me"], "policies for me, expected one policy"),
    ],
)
def test_policies_of_other_agents_are_refused(env_id, names, text):
    with pytest.raises(ConfigInvalidError, match=text):
        evaluate(dict.fromkeys(names, FirstFree()), EvaluationConfig(env_id, episodes=1))
