"""Policies that remember, learned online: what they remembered comes with the steps."""

import pytest

from replaylake.datastore.errors import SchemaMismatchError
from replaylake.online.collecting.worker import RolloutConfig
from replaylake.online.rollout import rollout
from replaylake.online.train import train_online
from replaylake.online.training.config import OnlineConfig

SMALL = {"hidden_sizes": [8], "num_sequences": 4, "length": 8, "recurrent": True}


def request(algorithm, **options):
    return OnlineConfig(
        algorithm,
        env="CartPole-v1",
        policy="rec",
        steps=400,
        env_runner="local",
        envs_per_worker=4,
        round_steps=100,
        selection_episodes=1,
        evaluation_episodes=1,
        evaluate_steps=400,
        options=SMALL | options,
    )


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ppo", "impala"])
def test_one_is_learned_into_a_dataset_that_is_new(lake, algorithm):
    done = train_online(lake, "pole", request(algorithm))
    assert done.num_updates >= 2
    (row,) = lake.sql(
        "select count(*) as n, count(policy_state) as states from pole.steps"
    ).to_pylist()
    assert row["n"] == row["states"] == 400


@pytest.mark.slow
def test_one_is_learned_into_a_dataset_of_those_that_remember_nothing(lake):
    rollout(lake, "pole", "random", RolloutConfig("CartPole-v1", episodes=3))
    train_online(lake, "pole", request("ppo"))
    (row,) = lake.sql(
        "select count(policy_state) as states from pole.steps where starts_with(policy, 'run:')"
    ).to_pylist()
    assert row["states"] == 400


@pytest.mark.slow
def test_one_that_remembers_more_than_the_dataset_keeps_is_refused(lake):
    train_online(lake, "pole", request("ppo"))
    version = lake.dataset("pole").snapshot().version
    with pytest.raises(SchemaMismatchError, match="policy_state"):
        train_online(lake, "pole", request("ppo", hidden_sizes=[16]))
    assert lake.dataset("pole").snapshot().version == version
