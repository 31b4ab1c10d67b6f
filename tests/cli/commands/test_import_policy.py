"""`policies import`: what it prints, and how it refuses."""

from pathlib import Path

import numpy as np
import pytest

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
