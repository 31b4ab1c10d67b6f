import dataclasses
import json
from dataclasses import replace

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box
from replaylake.datastore.errors import (
    ConfigInvalidError,
    EmptyReplayError,
    InvalidNameError,
    NotFoundError,
    QueryRefusedError,
    SchemaMismatchError,
    SpaceUnsupportedError,
    TrainingError,
)
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.package import (
    check_package,
    load_learner_weights,
    load_policy,
)
from replaylake.offline.algorithms.catalog import make_learner
from replaylake.offline.callbacks import Callbacks
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.environments.ids import make
from replaylake.offline.evaluation.evaluate import evaluate
from replaylake.offline.networks.graph import TorchPolicy
from replaylake.offline.running.train import TrainConfig, train

SMALL = {"hidden_sizes": [16]}


def quick(**changes):
    return TrainConfig(**{"updates": 20, "batch_size": 16, "options": SMALL, **changes})


@pytest.fixture
def lake(tmp_path, line_world):
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("line").append(line_world())
    return lake


def registered(lake):
    return [(row["policy"], row["version"]) for row in lake.registry.list()]


def test_a_tag_stays_in_the_lineage_beside_the_version_that_it_meant(lake):
    lake.tag("line@1", "golden")
    result = train(lake, ["line@golden"], quick(policy="tagged"))
    lake.tags.set("line", "golden", 0, replace=True)
    (dataset,) = lake.registry.show(result.policy)["lineage"]["datasets"]
    assert (dataset["version"], dataset["named"]) == (1, "line@golden")


def test_a_run_leaves_a_policy_a_lineage_and_a_record(lake):
    result = train(
        lake, ["line@1"], quick(policy="first", where="num_steps > 5", reward="reward * 2")
    )
    assert registered(lake) == [("first", 1)]
    assert (result.num_steps, result.num_episodes) == (40, 4)
    manifest = check_package(result.policy.path)
    (dataset,) = manifest.body["datasets"]
    assert (dataset["dataset"], dataset["version"], dataset["num_steps"]) == ("line", 1, 40)
    assert "num_steps > 5" in dataset["where"]
    assert "reward * 2" in dataset["reward"]
    assert len(dataset["content_hash"]) == 64
    assert manifest.body["config"]["options"]["hidden_sizes"] == [16]
    assert manifest.body["config"]["options"]["head"] == "categorical"
    assert manifest.body["run_id"] == result.run_id
    shown = lake.registry.show(result.policy)
    assert shown["run_id"] == result.run_id
    assert shown["lineage"]["datasets"] == [dataset]
    (run,) = lake.registry.runs()
    assert (run["policy"], run["policy_version"], run["algorithm"]) == ("first", 1, "bc")
    assert run["status"] == "done"
    assert run["metrics"]["policy_loss"] == result.metrics["policy_loss"]
    json.dumps(run, allow_nan=False)


@pytest.mark.slow
def test_steps_are_chosen_and_weighted_by_sql(lake):
    result = train(
        lake, ["line@1"], quick(policy="p", where_steps="step < 4", weight="step + num_steps")
    )
    body = check_package(result.policy.path).body
    assert body["datasets"][0]["where_steps"] == "(step < 4)"
    assert body["sampling"] == {
        "selector": "weighted",
        "weight": "(step + num_steps)",
        "correct": False,
    }
    with pytest.raises(EmptyReplayError, match="step > 99"):
        train(lake, ["line@1"], quick(policy="p", where_steps="step > 99"))
    with pytest.raises(QueryRefusedError, match="random"):
        train(lake, ["line@1"], quick(policy="p", weight="random()"))
    assert registered(lake) == [("p", 1)]


def test_every_run_makes_a_new_version(lake):
    first = train(lake, ["line"], quick(policy="p")).policy
    second = train(lake, ["line"], quick(policy="p")).policy
    assert (first.version, second.version) == (1, 2)
    assert first.path != second.path


@pytest.mark.parametrize("algorithm", ["bc", "dqn", "cql"])
def test_the_same_seed_gives_the_same_weights(lake, algorithm):
    runs = [
        train(lake, ["line"], quick(algorithm=algorithm, seed=seed, policy="p"))
        for seed in (3, 3, 4)
    ]
    first, second, other = (load_learner_weights(run.policy.path) for run in runs)
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
    assert any((first[name] != other[name]).any() for name in first)
    assert runs[0].metrics == runs[1].metrics


@pytest.mark.parametrize(
    ("algorithm", "actions"),
    [
        ("bc", "discrete"),
        ("dqn", "discrete"),
        ("cql", "discrete"),
        ("bc", "continuous"),
        ("iql", "continuous"),
        ("td3_plus_bc", "continuous"),
        ("cql", "continuous"),
    ],
)
def test_the_package_acts_as_the_learner_that_was_trained(
    tmp_path, algorithm, actions, line_world, assert_chosen_alike
):
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("line").append(line_world(action_space=actions))
    config = quick(algorithm=algorithm, updates=5)
    result = train(lake, ["line"], replace(config, policy="p"))
    spec = lake.dataset("line").spec
    learner = make_learner(
        algorithm,
        spec.observation_space,
        spec.action_space,
        options=SMALL,
        seed=99,
        facts=DatasetStatistics(action_range=(np.full(1, -3.0), np.full(1, 3.0))),
    )
    learner.load_state_dict(load_learner_weights(result.policy.path))
    observations = np.random.default_rng(1).standard_normal((1000, 2)).astype(np.float32)
    packaged = load_policy(result.policy.path)
    if actions == "discrete":
        policy = TorchPolicy(learner.policy())
        assert_chosen_alike(
            packaged.act(observations).actions,
            policy.act(observations).actions,
            policy.action_probs(observations, deterministic=False),
        )
    else:
        # The learner made above has another scaling than the one fitted to the log: compare in
        # units of the half range.
        scale = check_package(result.policy.path).body["normalization"]["actions"]
        found = (packaged.act(observations).actions - scale["center"]) / scale["scale"]
        trained = TorchPolicy(learner.policy()).act(observations).actions / 3.0
        np.testing.assert_allclose(np.clip(found, -1, 1), np.clip(trained, -1, 1), atol=1e-5)


def test_several_datasets_train_together(lake, line_world):
    lake.dataset("more").append(line_world(num_episodes=2, seed=1))
    result = train(lake, ["line", "more@1"], quick(policy="p"))
    assert (result.num_steps, result.num_episodes) == (60, 6)
    assert [entry["dataset"] for entry in result.datasets] == ["line", "more"]


def test_datasets_of_other_spaces_do_not(lake, line_world):
    lake.dataset("other").append(line_world(action_space="continuous"))
    with pytest.raises(
        SchemaMismatchError,
        match=r"line and other: the action space is Discrete\(2\) and Box float32",
    ):
        train(lake, ["line", "other"], quick(policy="p"))


def test_a_log_trains_together_with_what_was_served(lake, line_world):
    """`serve --log-to live` makes a dataset with a mask, where the log has none."""
    spec = lake.dataset("line").spec
    live = lake.dataset("live")
    live.create(Box((2,), "float32", -5, 5), spec.action_space, mask_size=2)
    live.append(line_world(num_episodes=2, seed=1))
    for algorithm in ("bc", "dqn"):
        config = quick(algorithm=algorithm)
        result = train(lake, ["line", "live"], replace(config, policy=algorithm))
        assert (result.num_steps, result.num_episodes) == (60, 6)


@pytest.mark.needs_d3rlpy
def test_masked_actions_are_refused_by_what_ignores_masks(lake, line_world):
    masks = np.tile([True, False], (10, 1))
    episodes = [
        dataclasses.replace(e, actions=np.zeros(10, np.int64), action_masks=masks)
        for e in line_world()
    ]
    lake.dataset("masked").append(episodes)
    for algorithm in ("d3rlpy:dqn", "d3rlpy:bc"):
        with pytest.raises(
            SpaceUnsupportedError, match=r"masks that are not all true.*honor masks: .*\bbc\b"
        ):
            train(lake, ["masked"], quick(algorithm=algorithm, policy="p"))
    assert lake.registry.runs() == []
    train(lake, ["masked"], quick(algorithm="bc", policy="p"))


def test_the_record_of_a_run_says_that_it_is_running(lake):
    seen = []
    train(
        lake,
        ["line"],
        quick(policy="p"),
        callbacks=Callbacks(on_progress=lambda _: seen.extend(lake.registry.runs())),
    )
    assert {(run["status"], run["policy"]) for run in seen} == {("running", "p")}
    (run,) = lake.registry.runs()
    assert (run["run_id"], run["status"]) == (seen[0]["run_id"], "done")


def test_reading_counts_the_shards_of_all_datasets(lake, line_world):
    lake.dataset("more").append(line_world(num_episodes=2, seed=1))
    lake.dataset("more").append(line_world(num_episodes=2, seed=2))
    seen = []
    train(
        lake,
        ["line", "more"],
        quick(updates=1, policy="p"),
        callbacks=Callbacks(on_reading=lambda done, total: seen.append((done, total))),
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize(
    ("algorithm", "option", "near"),
    [
        ("bc", "learning_rat", "learning_rate"),
        ("bc", "update", "updates"),
        ("dqn", "update", "updates"),
        ("dqn", "learning_rat", "learning_rate"),
        pytest.param(
            "d3rlpy:dqn",
            "gamma",
            "the training option discount",
            marks=pytest.mark.needs_d3rlpy,
        ),
    ],
)
def test_an_unknown_option_is_refused_with_what_is_near(lake, algorithm, option, near):
    config = quick(algorithm=algorithm, options={option: 1})
    with pytest.raises(ConfigInvalidError, match=rf"^algorithm .*'{option}', expected .*{near}"):
        train(lake, ["line"], replace(config, policy="p"))


def test_progress_ends_with_the_last_update(lake):
    seen = []
    train(lake, ["line"], quick(policy="p"), callbacks=Callbacks(on_progress=seen.append))
    assert (seen[-1].update, seen[-1].updates) == (20, 20)
    assert seen[-1].metrics["policy_loss"] > 0
    assert seen[-1].updates_per_s > 0


def test_a_loss_that_is_not_finite_stops_the_run_and_registers_nothing(lake):
    config = quick(updates=200, options={**SMALL, "learning_rate": 1e30})
    message = r"policy_loss is (inf|nan) at update [2-9]\b.*first keys [0-9a-f]{32}"
    with pytest.raises(TrainingError, match=message):
        train(lake, ["line"], replace(config, policy="p"))
    assert registered(lake) == []
    (run,) = lake.registry.runs()
    assert (run["status"], run["policy"], run["algorithm"]) == ("failed", "p", "bc")
    assert run["error"].startswith("NotFiniteError: training: policy_loss is ")
    assert len(run["failure"]["row_keys"]) == 16
    assert run["ended_ms"] >= run["started_ms"]
    assert run["config"]["updates"] == 200


def test_cloning_learns_from_steps_that_cannot_be_bootstrapped(tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    episodes = [
        Episode(f"w/{i}", np.zeros((1, 2), np.float32), np.array([1]), np.ones(1), truncated=True)
        for i in range(3)
    ]
    lake.dataset("ends").append(episodes)
    assert train(lake, ["ends"], quick(updates=2, policy="p")).num_steps == 3
    with pytest.raises(EmptyReplayError):
        train(lake, ["ends"], quick(algorithm="dqn", updates=2, policy="p"))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"datasets": ["nowhere"]}, NotFoundError, "nowhere"),
        ({"datasets": ["line@7"]}, NotFoundError, "7"),
        ({"datasets": ["line@best"]}, NotFoundError, "best"),
        ({"datasets": []}, ConfigInvalidError, "no dataset"),
        ({"policy": "run"}, InvalidNameError, "run"),
        ({"where": '"return" > 1e9'}, EmptyReplayError, "line@1"),
        ({"config": quick(algorithm="cqk")}, NotFoundError, "cql"),
        ({"config": quick(algorithm="iql")}, SpaceUnsupportedError, "iql"),
        ({"config": quick(options={"learning_rte": 1})}, ConfigInvalidError, "learning_rate"),
        ({"config": quick(algorithm="dqn", options={"lr": 1})}, ConfigInvalidError, "'lr'"),
        ({"env": "CartPole-v1"}, SchemaMismatchError, "CartPole-v1"),
        ({"env": "CartPool-v1"}, NotFoundError, "CartPole-v1"),
    ],
)
def test_what_cannot_be_trained_is_refused_and_registers_nothing(lake, arguments, error, message):
    given = {"datasets": ["line"], "config": quick(), "policy": "p", **arguments}
    with pytest.raises(error, match=message):
        train(lake, given.pop("datasets"), replace(given.pop("config"), **given))
    assert registered(lake) == []


@pytest.mark.parametrize(
    "options", [{"updates": 0}, {"batch_size": 0}, {"discount": 1.5}, {"seed": -1}]
)
def test_a_config_out_of_range_is_refused(options):
    with pytest.raises(ConfigInvalidError, match=next(iter(options))):
        TrainConfig(**options)


@pytest.mark.slow
def test_cloning_the_cartpole_log_reaches_350(
    cartpole_lake, cartpole_observations, assert_chosen_alike
):
    result = train(cartpole_lake, ["cartpole"], TrainConfig(policy="cloned", env="CartPole-v1"))
    evaluation = result.evaluation
    assert len(evaluation.returns) == 20
    assert evaluation.mean_return >= 350
    body = check_package(result.policy.path).body
    assert body["evaluation"]["mean_return"] == evaluation.mean_return
    # Other tests of this process may have trained in the same lake.
    (run,) = (r for r in cartpole_lake.registry.runs() if r["run_id"] == result.run_id)
    assert run["evaluation"]["returns"] == list(evaluation.returns)
    packaged = load_policy(result.policy.path)
    assert evaluate(packaged, "CartPole-v1").returns == evaluation.returns
    # The trained learner's actions, on a thousand logged observations.
    spec = packaged.spec
    learner = make_learner("bc", spec.observation_space, spec.action_space, options={}, seed=1)
    learner.load_state_dict(load_learner_weights(result.policy.path))
    policy = TorchPolicy(learner.policy())
    assert_chosen_alike(
        packaged.act(cartpole_observations).actions,
        policy.act(cartpole_observations).actions,
        policy.action_probs(cartpole_observations, deterministic=False),
    )


def swing_up(observation):
    """A hand-made controller: pump energy until near the top, then a spring and a damper."""
    cosine, sine, speed = observation
    if cosine > 0.9:
        return np.clip(-16 * np.arctan2(sine, cosine) - 3 * speed, -2, 2)
    energy = speed**2 / 6 + 5 * (cosine - 1)
    return np.clip(-5 * speed * energy if abs(speed) > 1e-3 else 2.0, -2, 2)


def pendulum_log(num_episodes=20):
    """Episodes of the controller in Pendulum-v1, whose random policy returns about -1,200."""
    env = make("Pendulum-v1")
    episodes = []
    for seed in range(1000, 1000 + num_episodes):
        observation, _ = env.reset(seed=seed)
        observations, actions, rewards = [], [], []
        for _ in range(200):
            action = np.array([swing_up(observation)], np.float32)
            observations.append(observation)
            actions.append(action)
            observation, reward, *_ = env.step(action)
            rewards.append(reward)
        episodes.append(
            Episode(
                f"log/{seed}",
                np.stack(observations),
                np.stack(actions),
                np.array(rewards),
                truncated=True,
                final_observation=observation,
            )
        )
    env.close()
    return episodes


@pytest.mark.slow
@pytest.mark.parametrize("head", ["gaussian", "deterministic"])
def test_cloning_a_pendulum_controller_swings_it_up(tmp_path, head):
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("pendulum").append(pendulum_log())
    result = train(
        lake, ["pendulum"], TrainConfig(options={"head": head}, policy="p", env="Pendulum-v1")
    )
    # The controller itself has -150 or so; a random policy -1,200.
    assert result.evaluation.mean_return >= -250
