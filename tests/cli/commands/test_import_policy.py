"""`policies import`: what it prints, and how it refuses."""

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.lake.lake import open_lake

pytest.importorskip("torch")
POLICIES = Path(__file__).parents[3] / "examples" / "data" / "policies"
FILE, EXPECT = POLICIES / "sb3_cartpole.zip", POLICIES / "sb3_cartpole.expect.npy"


@pytest.fixture
def log(lake):
    """The observations of the policy in a dataset, with the actions that it takes itself."""
    dataset = open_lake(lake, create=True).dataset("log")
    dataset.create(Box((4,), "float32"), Discrete(2))
    observations = np.load(POLICIES / "sb3_cartpole.observations.npy")
    dataset.append(
        [
            Episode(
                episode_id=f"log/{number:03}",
                observations=observations[number : number + 1],
                actions=np.load(EXPECT)[number : number + 1],
                rewards=np.ones(1),
                terminated=True,
                behavior_log_probs=np.zeros(1, np.float32),
            )
            for number in range(200)
        ]
    )
    return dataset


def _import(run, *arguments):
    return run("policies", "import", FILE, "--policy", "ppo", "--dataset", "log", *arguments)


def test_an_import_says_what_was_checked(run, log):
    ran = _import(run, "--expect", EXPECT)
    assert ran.code == 0, ran
    lines = ran.out.splitlines()
    assert lines[0] == "imported ppo:1 (sb3:actor-critic), head categorical"
    assert "its best action is the logged one in 100.0% of them" in lines[1]
    assert lines[2] == "compared with 200 expected actions: the same"
    assert "VecNormalize" in ran.out
    body = _import(run, "--json").json
    assert (body["policy"], body["version"], body["num_compared"]) == ("ppo", 2, 0)
    assert body["agreement"] == 1.0
    assert "compared with no expected actions" in _import(run).out


def test_an_imported_policy_is_evaluated_promoted_and_checked_for_serving(run, log):
    assert _import(run).code == 0
    ran = run("ope", "log", "--policy", "ppo", "--unseen", "--estimator", "snips", "--json")
    assert ran.code in (0, 3), ran
    (estimate,) = ran.json["estimates"]
    assert estimate["value"] == pytest.approx(1.0)
    assert run("promote", "ppo:1", "--to", "champion").code == 0
    assert run("serve", "ppo@champion", "--check").code == 0


def test_refusals_name_the_option_or_the_action(run, log, tmp_path):
    np.save(tmp_path / "other.npy", 1 - np.load(EXPECT))
    _import(run, "--expect", tmp_path / "other.npy").failed("200 of 200 differ")
    ran = _import(run, "--format", "keras")
    assert ran.code == 2
    assert "--format" in ran.err
    ran = _import(run, "--observations", POLICIES / "sb3_cartpole.observations.npy")
    assert ran.code == 2
    assert "--observations" in ran.err
    assert open_lake(log.path.parent).registry.list() == []


def test_one_expected_action_shows_little(run, log, tmp_path):
    np.save(tmp_path / "one.npy", np.load(EXPECT)[:1])
    assert "all of them are the same action" in _import(run, "--expect", tmp_path / "one.npy").out


def test_the_gate_compares_imported_policies(run, lake, tmp_path):
    """It promotes SB3's policy over an ONNX model that repeats one action, not the reverse."""
    log_two_actions(lake, np.load(POLICIES / "sb3_cartpole.observations.npy"), np.load(EXPECT))
    write_constant_model(tmp_path / "constant.onnx")
    log = ("--dataset", "log", "--policy", "ppo")
    imported = run("policies", "import", tmp_path / "constant.onnx", *log, "--head", "q_values")
    assert imported.code == 0, imported
    assert run("promote", "ppo:1", "--to", "champion").code == 0
    assert run("policies", "import", FILE, *log).code == 0
    gate = ("--gate", "--dataset", "log", "--explore", "epsilon=0.1", "--estimator", "snips")
    ran = run("promote", "ppo:2", "--to", "champion", *gate)
    # What it learned from is not known, so its verdict is weak until the user states it.
    assert ran.code == 3, ran
    assert "weak of the candidate, ppo:2" in ran.out
    assert "use --force" in ran.out
    ran = run("promote", "ppo:2", "--to", "champion", *gate, "--unseen", "--json")
    assert ran.code == 0, ran
    (snips,) = ran.json["gate"]["comparisons"]
    # The policies take the rewarded action at 95 of 100 steps, and the constant one at about half.
    assert snips["candidate"] == pytest.approx(0.95, abs=0.03)
    assert snips["low"] > 0.3
    assert ran.json["gate"]["candidate"]["training_reward"] is None
    ran = run("promote", "ppo:1", "--to", "champion", *gate, "--unseen")
    assert ran.code == 3, ran
    assert "ppo:1 is not promoted" in ran.out


def log_two_actions(lake, observations, best):
    """A log of one-step episodes: each action half of the time, of which the best one earns 1."""
    dataset = open_lake(lake, create=True).dataset("log")
    dataset.create(Box((4,), "float32"), Discrete(2))
    actions = np.random.default_rng(0).integers(0, 2, 4 * len(observations))
    dataset.append(
        [
            Episode(
                episode_id=f"log/{number:04}",
                observations=observations[(row := number % len(best)) :][:1],
                actions=actions[number : number + 1],
                rewards=np.array([float(action == best[row])]),
                terminated=True,
                behavior_log_probs=np.log([0.5]).astype(np.float32),
            )
            for number, action in enumerate(actions)
        ]
    )


def write_constant_model(path):
    """Write an ONNX model that always prefers action 0."""
    weights = numpy_helper.from_array(np.zeros((4, 2), np.float32), "w")
    bias = numpy_helper.from_array(np.array([1.0, 0.0], np.float32), "b")
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["obs", "w", "b"], ["values"])],
        "constant",
        [helper.make_tensor_value_info("obs", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("values", TensorProto.FLOAT, ["n", 2])],
        [weights, bias],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())
