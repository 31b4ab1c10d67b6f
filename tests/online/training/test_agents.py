"""Runs in games: one policy for all agents, and a policy for each."""

from dataclasses import replace

import pytest

from replaylake.datastore.errors import ConfigInvalidError, InvalidNameError
from replaylake.datastore.lake.policies.package import load_policy
from replaylake.offline.callbacks import Callbacks
from replaylake.offline.evaluation.evaluate import EvaluationConfig, evaluate
from replaylake.offline.running.training.interruption import RunInterrupted
from replaylake.online.train import resume_online, train_online
from replaylake.online.training.agent_packages import register_packages
from replaylake.online.training.agents import agent_steps_condition, policy_names
from replaylake.online.training.config import OnlineConfig

OPPOSITES = "replaylake_crowds:Opposites"
STAKES = "replaylake_crowds:Stakes"
NOUGHTS = "pettingzoo:classic/tictactoe-v3"

# An action is paid at once: nothing is to be known of what follows.
DQN = OnlineConfig(
    "dqn",
    env_runner="local",
    steps=1600,
    min_size=200,
    batch_size=32,
    samples_per_insert=16,
    discount=0.0,
    log_steps=800,
    evaluate_steps=800,
    selection_episodes=3,
    evaluation_episodes=5,
    envs_per_worker=4,
    round_steps=400,
    options={"hidden_sizes": [16], "learning_rate": 0.01},
)
PPO = replace(
    DQN,
    algorithm="ppo",
    steps=2560,
    evaluate_steps=1280,
    options={
        "hidden_sizes": [16],
        "learning_rate": 0.02,
        "length": 8,
        "num_sequences": 8,
        "epochs": 5,
        "minibatches": 2,
    },
)
CONFIGS = {"dqn": DQN, "ppo": PPO}

pytestmark = pytest.mark.usefixtures("toys")


def request(env_id=OPPOSITES, config=DQN, **changes):
    env_args = changes.pop("env_args", {})
    return replace(config, **changes, env=env_id, policy="learned", env_args=env_args)


def rows(lake, query):
    return lake.sql(query).to_pylist()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["dqn", "ppo"])
def test_a_shared_policy_learns_from_all_agents_steps(lake, algorithm):
    points = {}
    result = train_online(
        lake,
        "live",
        request(config=CONFIGS[algorithm], env_args={"is_told": True}),
        callbacks=Callbacks(on_metrics=lambda _, values: points.update(values)),
    )
    assert result.evaluation.agent_returns == {"ann": 8.0, "bob": 8.0}
    assert result.policies == {}
    assert result.policy.name == "learned"
    # Steps are those of agents, and `return` is a game's sum.
    found = rows(lake, "select agent_id, count(*) n from live.steps group by 1 order by 1")
    assert sum(row["n"] for row in found) == result.num_steps
    assert [row["agent_id"] for row in found] == ["ann", "bob"]
    assert points["return"] == pytest.approx(points["return/ann"] + points["return/bob"])
    assert points["return"] == result.mean_return > 8


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["dqn", "ppo"])
def test_agents_that_see_the_same_learn_to_do_opposites(lake, algorithm):
    points = {}
    result = train_online(
        lake,
        "live",
        request(config=CONFIGS[algorithm], agents="each"),
        callbacks=Callbacks(on_metrics=lambda _, values: points.update(values)),
    )
    assert result.evaluation.agent_returns == {"ann": 8.0, "bob": 8.0}
    assert {a: str(ref) for a, ref in result.policies.items()} == {
        "ann": "learned_ann:1",
        "bob": "learned_bob:1",
    }
    assert result.policy == result.policies["bob"]
    loss = "q_loss" if algorithm == "dqn" else "policy_loss"
    assert {f"agent/ann/{loss}", f"agent/bob/{loss}", "return/ann", "return/bob"} <= set(points)
    (run,) = lake.registry.runs()
    assert (run["status"], run["policy"], run["policy_version"]) == ("done", "learned_bob", 1)
    # What was registered plays so: each for its own agent, and not for the other.
    policies = {agent: load_policy(ref.path) for agent, ref in result.policies.items()}
    assert evaluate(policies, EvaluationConfig(OPPOSITES, seed=7)).mean_return == 16.0
    swapped = {"ann": policies["bob"], "bob": policies["ann"]}
    assert evaluate(swapped, EvaluationConfig(OPPOSITES, seed=7)).mean_return == 0.0
    (own,) = policies["ann"].manifest.body["datasets"]
    assert own["where_steps"] == "agent_id = 'ann'"
    # Asked again it says the same.
    again = resume_online(lake, result.run_id)
    assert again.already_finished
    assert again.policies == result.policies


@pytest.mark.slow
def test_one_shared_policy_cannot_do_both(lake):
    result = train_online(lake, "live", request(steps=800, evaluate_steps=None))
    assert result.evaluation.mean_return == 8.0


@pytest.mark.parametrize("algorithm", ["dqn", pytest.param("ppo", marks=pytest.mark.slow)])
@pytest.mark.parametrize("agents", ["shared", pytest.param("each", marks=pytest.mark.slow)])
def test_games_in_turns_with_masks(lake, algorithm, agents):
    result = train_online(
        lake, "live", request(NOUGHTS, CONFIGS[algorithm], steps=800, agents=agents)
    )
    assert result.num_updates > 0
    (row,) = rows(
        lake,
        "select count(*) n, count(*) filter (action_mask[action + 1]) allowed,"
        " count(distinct agent_id) agents from live.steps",
    )
    assert row["allowed"] == row["n"]
    assert row["agents"] == 2
    # Of the games that were open in the end the last move, whose reward is not known, is not there.
    assert result.num_steps - 4 <= row["n"] <= result.num_steps


@pytest.mark.slow
@pytest.mark.parametrize("agents", ["shared", "each"])
def test_where_sums_are_zero_the_last_policy_is_kept(lake, agents):
    remarks = []
    result = train_online(
        lake,
        "live",
        request(STAKES, agents=agents, patience=1),
        callbacks=Callbacks(on_remark=remarks.append),
    )
    assert len([text for text in remarks if "gains another loses" in text]) == 1
    # Patience would have ended it after the first two.
    assert result.num_steps >= 1600
    assert result.update == result.num_updates
    assert {point["value"] for point in result.selection["history"]} == {None}


@pytest.mark.slow
def test_a_run_of_many_policies_goes_on_where_it_was(lake):
    until = iter([False] * 150)
    with pytest.raises(RunInterrupted) as interrupted:
        train_online(
            lake,
            "live",
            request(agents="each"),
            callbacks=Callbacks(should_end=lambda: next(until, True)),
        )
    run_id = interrupted.value.run_id
    assert interrupted.value.update > 0
    result = resume_online(lake, run_id)
    assert result.evaluation.mean_return == 16.0
    assert result.num_updates > interrupted.value.update
    (row,) = rows(
        lake,
        "select count(*) n, count(distinct (episode_id, agent_id, step)) d from live.steps",
    )
    assert row["n"] == row["d"] == result.num_steps


@pytest.mark.slow
def test_a_policy_that_is_registered_already_is_not_again(lake, tmp_path):
    result = train_online(lake, "live", request(agents="each", steps=400, evaluate_steps=None))
    packages = {agent: ref.path for agent, ref in result.policies.items()}

    class Ended:
        run_id = result.run_id
        body = next(r for r in lake.registry.runs() if r["run_id"] == result.run_id)

        def to_finished(self, found):
            return {**self.body, **found}

    ref, done = register_packages(lake.registry, Ended(), packages, {})
    assert str(ref) == "learned_bob:2"
    assert done["policies"] == {"ann": "learned_ann:1", "bob": None}


@pytest.mark.parametrize(
    ("env_id", "changes", "text"),
    [
        ("CartPole-v1", {}, "an environment with one agent, expected several"),
        (OPPOSITES, {"mix": {"other": 0.5}}, "found mix, expected none"),
        (OPPOSITES, {"record": False}, "found record off, expected on"),
    ],
)
def test_each_is_refused_where_it_cannot_be(lake, env_id, changes, text):
    if "mix" in changes:
        train_online(lake, "other", request(steps=300, evaluate_steps=None))
    with pytest.raises(ConfigInvalidError, match=text):
        train_online(lake, "live", request(env_id, agents="each", **changes))
    assert "live" not in lake.datasets()


def test_agents_whose_names_no_policy_can_have_are_refused(lake):
    names = {"names": ["ann", "Bob 2"]}
    with pytest.raises(
        InvalidNameError, match=r"agent 'Bob 2', .* 'learned_Bob 2'.*`agents` shared"
    ):
        train_online(lake, "live", request(agents="each", env_args=names))
    assert policy_names("p", ["a_1", "b"]) == {"a_1": "p_a_1", "b": "p_b"}
    assert agent_steps_condition("o'neil") == "agent_id = 'o''neil'"


def test_the_config_knows_two_ways():
    with pytest.raises(
        ConfigInvalidError, match="agents: found 'both', expected one of shared, each"
    ):
        replace(DQN, agents="both")
