"""No refusal of an algorithm recommends one that is refused in turn."""

import re

import pytest

from replaylake.datastore.errors import ReplayLakeError
from replaylake.online.collecting.worker import RolloutConfig
from replaylake.online.rollout import rollout
from replaylake.online.training.config import OnlineConfig, OnlineRequest
from replaylake.online.training.job import prepare

_NAMES = re.compile(r": ([a-z0-9_:]+(?:, [a-z0-9_:]+)*)\.$")


@pytest.mark.parametrize("features", [{}, {"prioritized": True}, {"mix": {"d": 0.5}}])
def test_advised_algorithms_are_accepted(lake, features):
    rollout(lake, "d", "random", RolloutConfig("CartPole-v1", episodes=1))

    def refusal(algorithm):
        config = OnlineConfig(algorithm, "CartPole-v1", policy="p", env_runner="local", **features)
        try:
            prepare(lake, OnlineRequest("o", config))
        except ReplayLakeError as error:
            return error
        return None

    advised = set()
    for name in ("bc", "td3", "ppo", "d3rlpy:dqn"):
        match = _NAMES.search(str(refusal(name)))
        advised |= {*match[1].split(", ")} if match else set()
    refused = {name: str(error) for name in advised if (error := refusal(name)) is not None}
    assert refused == {}
    assert "dqn" in advised
