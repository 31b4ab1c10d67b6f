"""What an environment is made with, from the request to the package."""

import importlib
import sys
from dataclasses import replace

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.package import check_package
from replaylake.offline.running.train import train
from replaylake.offline.running.training.config import TrainConfig, TrainRequest

MODULE = """
import gymnasium
import numpy as np

class Walk(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 99, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length):
        self._length = length

    def reset(self, *, seed=None, options=None):
        self._at = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self._at += 1
        observation = np.array([self._at, 0], np.float32)
        return observation, 1.0, self._at == self._length, False, {}
"""


@pytest.fixture
def lake(tmp_path, monkeypatch):
    """A lake beside the module of the environment, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_walks.py").write_text(MODULE)
    lake = open_lake(tmp_path / "lake", create=True)
    observations = np.random.default_rng(0).random((40, 2)).astype(np.float32)
    episode = Episode("a/1", observations, np.arange(40) % 2, np.ones(40), terminated=True)
    lake.dataset("walks").append([episode])
    yield lake
    sys.modules.pop("my_walks", None)
    importlib.invalidate_caches()


def test_they_reach_selection_evaluation_record_and_package(lake):
    config = TrainConfig("bc", updates=4, selection_episodes=2, evaluation_episodes=3)
    result = train(
        lake,
        ["walks"],
        replace(config, policy="walker", env="my_walks:Walk", env_args={"length": 7}),
    )
    # As long as the argument says, at each measurement and at the end.
    assert result.evaluation.lengths == (7, 7, 7)
    assert {value for _, value in _history(result)} == {7.0}
    manifest = check_package(result.policy.path).body
    assert manifest["evaluation"]["env_id"] == "my_walks:Walk"
    assert manifest["evaluation"]["env_args"] == {"length": 7}
    (run,) = lake.registry.runs()
    assert TrainRequest.from_json(run["request"]).config.env_args == {"length": 7}


def _history(result):
    return [(entry["update"], entry["value"]) for entry in result.selection["history"]]


def test_a_record_from_before_has_none():
    request = TrainRequest(("walks@1",), TrainConfig("bc", policy="walker", env="CartPole-v1"))
    body = request.to_json()
    assert body.pop("env_args") == {}
    assert TrainRequest.from_json(body) == request


def test_they_need_an_environment():
    with pytest.raises(ConfigInvalidError, match=r"arguments of an environment \(length\) and no"):
        TrainConfig("bc", policy="walker", env_args={"length": 3})
