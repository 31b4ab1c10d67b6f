from dataclasses import replace

import pytest

from replaylake.datastore.lake.policies.package import load_policy
from replaylake.offline.running.train import train
from replaylake.offline.running.training.config import TrainConfig
from replaylake.online.train import train_online
from replaylake.online.training.config import OnlineConfig

NAME = "munchausen_dqn:munchausen_dqn"
SMALL = OnlineConfig(
    NAME,
    env_runner="local",
    steps=1000,
    min_size=200,
    batch_size=32,
    evaluation_episodes=3,
    selection_episodes=2,
    options={"hidden_sizes": [16], "temperature": 0.05},
)


@pytest.mark.slow
def test_an_algorithm_of_ones_own_learns_online_and_offline(lake):
    result = train_online(lake, "live", replace(SMALL, env="CartPole-v1", policy="own"))
    assert result.num_updates == 800
    body = load_policy(result.policy.path).manifest.body
    assert body["algorithm"] == NAME
    assert body["config"]["options"]["temperature"] == 0.05
    offline = train(lake, ["live"], TrainConfig(NAME, updates=50, policy="own"))
    assert offline.policy.version == 2


@pytest.mark.slow
def test_it_learns_cartpole(lake):
    config = replace(SMALL, steps=20_000, selection_episodes=5, until_return=200.0, options={})
    result = train_online(lake, "live", replace(config, env="CartPole-v1", policy="own"))
    # A random policy returns 22.
    assert result.converged
    assert result.selection["value"] >= 200
