"""Several agents and environments of the user's, by the rollout verb, as SQL finds them."""

import json
from dataclasses import replace
from math import sqrt

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from replaylake.cli.main import main
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import ConfigInvalidError, SchemaMismatchError
from replaylake.datastore.lake.policies.package import save_package
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.online.collecting.worker import RolloutConfig
from replaylake.online.rollout import rollout


@pytest.fixture
def games(toys):
    return "replaylake_games"


@pytest.fixture
def coin(tmp_path):
    """A package that takes either action of the toy games, whatever it sees."""
    observations = helper.make_tensor_value_info("observations", TensorProto.FLOAT, ["N", 3])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 2])
    weights = numpy_helper.from_array(np.zeros((3, 2), np.float32), "weights")
    nodes = [helper.make_node("MatMul", ["observations", "weights"], ["logits"])]
    graph = helper.make_graph(nodes, "coin", [observations], [logits], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    save_package(
        tmp_path / "coin",
        onnx=model.SerializeToString(),
        spec=PolicySpec(Box((3,)), Discrete(2), "categorical"),
        manifest={"algorithm": "test"},
        learner_weights=None,
    )
    return tmp_path / "coin"


def _rollout(env, dataset, episodes):
    where = ["--env", env, "--dataset", dataset]
    return ["rollout", *where, "--episodes", str(episodes), "--seed", "1"]


def test_games_are_recorded_agent_by_agent(lake, games):
    config = RolloutConfig(f"{games}:Ping", envs_per_worker=4, seed=3)
    receipt = rollout(lake, "pings", "random", replace(config, episodes=30))
    assert (receipt.num_games, receipt.num_episodes, receipt.num_steps) == (30, 60, 150)
    assert lake.sql(
        "select count(*) as games, sum(num_agents) as agents, sum(num_steps) as steps, "
        "max(num_env_steps) as ticks, bool_and(complete and terminated) as ended, "
        'avg("return") as mean from pings.games'
    ).to_pylist() == [
        {
            "games": 30,
            "agents": 60,
            "steps": 150,
            "ticks": 5,
            "ended": True,
            "mean": pytest.approx(receipt.mean_return),
        }
    ]
    by_agent = lake.sql(
        'select agent_id, avg("return") as mean from pings.episodes group by 1 order by 1'
    ).to_pylist()
    assert {row["agent_id"]: row["mean"] for row in by_agent} == pytest.approx(
        dict(receipt.agent_returns)
    )
    # Whoever acts, 11 is paid for each action 1.
    paid = lake.sql(
        'select g."return" as paid, actions from pings.games g join '
        "(select episode_id, sum(action) as actions from pings.steps group by 1) "
        "using (episode_id)"
    ).to_pylist()
    assert all(row["paid"] == 11 * row["actions"] for row in paid)
    transitions = lake.sql(
        "select agent_id, env_step, next_observation[1] as after from pings.transitions "
        "order by episode_id, env_step limit 5"
    ).to_pylist()
    assert [(t["agent_id"], t["env_step"], t["after"]) for t in transitions] == [
        ("ann", 0, 2),
        ("bob", 1, 3),
        ("ann", 2, 4),
        ("bob", 3, 5),
        ("ann", 4, 5),
    ]


def test_masks_reach_the_dataset(lake, games):
    config = RolloutConfig(f"{games}:Ping", envs_per_worker=2, env_args={"masked": True})
    rollout(lake, "pings", "random", replace(config, episodes=4))
    assert lake.dataset("pings").spec.mask_size == 2
    forbidden = "select count(*) as n from pings.steps where not action_mask[action + 1]"
    assert lake.sql(forbidden).to_pylist() == [{"n": 0}]


def test_agents_have_policies_of_their_own(lake, games, coin):
    lake.registry.register("coin", coin, run_id="test", lineage={})
    config = RolloutConfig(f"{games}:Ping", envs_per_worker=2)
    receipt = rollout(
        lake, "pings", "random", replace(config, episodes=5, agent_policies={"bob": "coin"})
    )
    assert (receipt.policy, receipt.policy_version) == ("ann=random:0, bob=coin:1", None)
    acted = "select distinct agent_id, policy, policy_version from pings.steps order by 1"
    assert lake.sql(acted).to_pylist() == [
        {"agent_id": "ann", "policy": "random", "policy_version": 0},
        {"agent_id": "bob", "policy": "coin", "policy_version": 1},
    ]
    with pytest.raises(ConfigInvalidError, match="zoe"):
        rollout(
            lake, "pings", "random", replace(config, episodes=1, agent_policies={"zoe": "coin"})
        )
    alone = RolloutConfig("CartPole-v1")
    with pytest.raises(ConfigInvalidError, match="environment has one agent"):
        rollout(lake, "poles", "random", replace(alone, episodes=1, agent_policies={"bob": "coin"}))


def test_agents_that_differ_are_refused_before_anything_is_written(lake, games):
    config = RolloutConfig(f"{games}:Race", env_args={"wide": "bob"})
    with pytest.raises(SchemaMismatchError, match="Pad them to one"):
        rollout(lake, "races", "random", replace(config, episodes=1))
    assert lake.datasets() == []


def test_noughts_and_crosses_at_random_is_as_it_is_known_to_be(lake):
    config = RolloutConfig("pettingzoo:classic/tictactoe-v3", envs_per_worker=16, seed=11)
    receipt = rollout(lake, "noughts", "random", replace(config, episodes=600))
    # Of two that play at random the first wins 737/1260 and loses 121/420 of the games.
    win, lose = 737 / 1260, 121 / 420
    deviation = sqrt((win + lose - (win - lose) ** 2) / 600)
    assert abs(receipt.agent_returns["player_1"] - (win - lose)) < 4 * deviation
    assert receipt.agent_returns["player_2"] == -receipt.agent_returns["player_1"]
    assert receipt.mean_return == 0


@pytest.mark.slow
def test_a_random_policy_returns_what_the_frozen_lake_gives_it(lake, shared_data):
    exact = json.loads((shared_data / "gym_exact_values.json").read_text())
    expected = exact["FrozenLake-v1"]["uniform_random"]["gamma1.0_H100"]
    config = RolloutConfig("FrozenLake-v1", envs_per_worker=32, seed=0)
    receipt = rollout(lake, "frozen", "random", replace(config, episodes=5000))
    (row,) = lake.sql(
        'select count(*) as n, avg("return") as mean, stddev_samp("return") as deviation '
        "from frozen.episodes where complete"
    ).to_pylist()
    assert row["n"] == 5000
    assert row["mean"] == pytest.approx(receipt.mean_return)
    assert abs(row["mean"] - expected) < 4 * row["deviation"] / sqrt(5000)
    assert receipt.mean_return > 0


def test_a_users_environment_and_its_arguments_by_the_verb(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_frozen_lakes.py").write_text(
        "import gymnasium\n"
        "def make_lake(size, is_slippery=True):\n"
        "    assert is_slippery is False\n"
        "    return gymnasium.make('FrozenLake-v1', map_name=size, is_slippery=is_slippery)\n"
    )
    given = ["--env-arg", "size=8x8", "--env-arg", "is_slippery=False"]
    code = main([*_rollout("my_frozen_lakes:make_lake", "frozen", 3), *given, "--json"])
    assert code == 0
    receipt = json.loads(capsys.readouterr().out)
    assert receipt["num_games"] == receipt["num_episodes"] == 3
    assert receipt["agent_returns"] == {}


def test_the_verb_tells_what_each_agent_returned(tmp_path, monkeypatch, capsys, games):
    monkeypatch.chdir(tmp_path)
    arguments = _rollout("replaylake_games:Race", "races", 4)
    assert main([*arguments, "--agent-policy", "ann=random"]) == 0
    out = capsys.readouterr().out
    assert "8 episodes, 24 steps" in out
    assert "ann=random:0, bob=random:0 in replaylake_games:Race" in out
    assert "4 games; mean returns: ann " in out
    assert main([*arguments, "--agent-policy", "ann"]) == 2
    assert "expected AGENT=POLICY" in capsys.readouterr().err


@pytest.mark.slow
def test_workers_of_another_process_play_games_too(lake, games):
    config = RolloutConfig(f"{games}:Ping", envs_per_worker=2, seed=3)
    alone = rollout(lake, "here", "random", replace(config, episodes=8))
    both = rollout(lake, "there", "random", replace(config, episodes=8, workers=2))
    assert both.agent_returns == alone.agent_returns
    numbers = "select seed, agent_id, env_step, action, reward from {}.steps order by 1, 2, 3"
    here, there = (lake.sql(numbers.format(name)).to_pylist() for name in ("here", "there"))
    assert here == there
    assert np.unique([row["seed"] for row in here]).tolist() == list(range(3, 11))
