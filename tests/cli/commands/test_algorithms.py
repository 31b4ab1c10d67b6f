"""`replaylake algorithms`: the list, one algorithm's options, and what suits a dataset."""

from dataclasses import replace

import numpy as np
import pytest

from replaylake.cli.options import name_options
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Dict, Discrete, Text
from replaylake.datastore.lake.lake import open_lake
from replaylake.offline.running.train import TrainConfig, train


@pytest.fixture
def logged(lake):
    """Writes a dataset of two-step, two-action episodes, changed by keyword."""

    def write(name, num_steps=2, **changes):
        fields = {
            "observations": np.zeros((num_steps, 3), np.float32),
            "actions": np.arange(num_steps) % 2,
            "rewards": np.ones(num_steps),
            "terminated": True,
        }
        opened = open_lake(lake, create=True)
        opened.dataset(name).append(
            [Episode(f"{name}/{i}", **{**fields, **changes}) for i in range(3)]
        )
        return opened

    return write


def named(body, key="algorithms"):
    return {row["name"] for row in body[key]}


def test_the_list_has_a_row_an_algorithm_and_names_that_train_takes(run):
    body = run("algorithms", "--json").json
    rows = {(row["name"], row["actions"]): row for row in body["algorithms"]}
    assert len(rows) == len(body["algorithms"])
    assert rows["bc", "discrete"]["needs"] == []
    assert rows["iql", "continuous"]["needs"] == ["rewards", "next_observations"]
    assert rows["marwil", "discrete"]["needs"] == ["rewards", "returns"]
    assert rows["ips_bandit", "discrete"]["needs"] == ["rewards", "propensities"]
    assert rows["rebrac", "continuous"]["needs"][-1] == "next_actions"
    # A namesake of ours is asked for with its provider, for the actions that ours takes.
    assert rows["d3rlpy:sac", "continuous"]["provider"] == "d3rlpy"
    assert rows["d3rlpy:sac", "discrete"]["provider"] == "d3rlpy"
    assert rows["sac", "continuous"]["provider"] == "replaylake"


def test_the_table_is_aligned(run):
    header, *lines = run("algorithms").out.splitlines()
    start = header.index("head ")
    assert {line[start - 1] for line in lines} == {" "}
    assert "rewards, next observations" in "".join(lines)


def test_options_of_ours_are_those_that_train_takes(run, logged):
    opened = logged("d", num_steps=4)
    rows = run("algorithms", "cql", "--json").json["algorithms"]
    assert {row["actions"] for row in rows} == {"discrete", "continuous"}
    (discrete,) = (row for row in rows if row["actions"] == "discrete")
    options = {one["name"]: one for one in discrete["options"]}
    assert options["loss"]["type"] == '"huber" or "squared"'
    assert options["hidden_sizes"] == {
        "name": "hidden_sizes",
        "type": "list of int",
        "default": [256, 256],
    }
    given = {name: one["default"] for name, one in options.items()} | {"hidden_sizes": [4]}
    config = TrainConfig(algorithm="cql", updates=1, options=given)
    assert train(opened, ["d"], replace(config, policy="p")).policy.version == 1
    assert "double                true" in run("algorithms", "cql").out


@pytest.mark.slow
def test_options_of_d3rlpys_are_those_that_train_takes(run, logged):
    opened = logged("d", num_steps=4)
    (row,) = run("algorithms", "d3rlpy:dqn", "--json").json["algorithms"]
    options = {one["name"]: one["default"] for one in row["options"]}
    assert options["target_update_interval"] == 8000
    assert "gamma" not in options
    assert options["optim_factory"]["type"] == "adam"
    given = options | {"hidden_sizes": [4]}
    config = TrainConfig(algorithm="d3rlpy:dqn", updates=1, options=given)
    assert train(opened, ["d"], replace(config, policy="p")).policy.version == 1
    assert 'optim_factory           {type = "adam"' in run("algorithms", "d3rlpy:dqn").out
    both = run("algorithms", "sac", "--json").json["algorithms"]
    assert {(row["provider"], row["actions"]) for row in both} == {
        ("replaylake", "continuous"),
        ("replaylake", "discrete"),
    }


def test_an_unknown_name_gets_near_matches(run):
    run("algorithms", "iqll").failed("algorithm 'iqll': not known, expected iql")
    run("algorithms", "d3rlpy:marwil").failed("not known")


def test_what_suits_a_dataset_without_propensities(run, logged):
    logged("d")
    ran = run("algorithms", "--for", "d", "--json")
    body = ran.json
    assert {"bc", "cql", "dqn", "marwil", "d3rlpy:dqn", "bcq"} <= named(body)
    assert not {"iql", "ips_bandit", "dr_bandit"} & named(body)
    assert {"iql", "ips_bandit"} <= named(body, "refused")
    assert {row["actions"] for row in body["algorithms"]} == {"discrete"}
    # Why those of the same actions cannot is said; of others it goes without saying.
    assert "not ips_bandit: algorithm ips_bandit: 6 of 6 steps have no behavior_log_prob" in ran.err
    assert "not iql" not in ran.err


def test_a_log_of_decisions_with_propensities_suits_bandits(run, logged):
    logged("d", num_steps=1, behavior_log_probs=np.log([0.5]))
    assert {"ips_bandit", "dr_bandit"} <= named(run("algorithms", "--for", "d", "--json").json)


def test_masks_leave_d3rlpys_out(run, logged):
    masks = np.array([[True, False], [True, True]])
    logged("d", action_masks=masks)
    body = run("algorithms", "--for", "d", "--json").json
    assert {"bc", "cql", "dqn", "marwil", "sac"} == named(body)
    assert "masks" in next(row["why"] for row in body["refused"] if row["name"] == "d3rlpy:bc")


def test_without_rewards_there_is_cloning(run, lake, logged):
    unknown = np.full(2, np.nan)
    opened = open_lake(lake, create=True)
    opened.dataset("d").create(Box((3,), "float32"), Discrete(2), rewards_optional=True)
    logged("d", rewards=unknown)
    assert named(run("algorithms", "--for", "d", "--json").json) == {"bc", "d3rlpy:bc"}


def test_without_what_followed_nothing_bootstraps(run, logged):
    logged("d", num_steps=1, terminated=False, truncated=True)
    body = run("algorithms", "--for", "d", "--json").json
    assert named(body) == {"bc", "d3rlpy:bc", "marwil"}


def test_frames_beside_numbers_leave_d3rlpys_out(run, lake):
    space = Dict({"frame": Box((84, 84), "uint8", 0, 255), "speed": Box((1,))})
    seen = {"frame": np.zeros((2, 84, 84), np.uint8), "speed": np.zeros((2, 1), np.float32)}
    dataset = open_lake(lake, create=True).dataset("d")
    dataset.create(space, Discrete(2))
    dataset.append([Episode("d/0", seen, np.array([0, 1]), np.ones(2), terminated=True)])
    body = run("algorithms", "--for", "d", "--json").json
    assert {row["provider"] for row in body["algorithms"]} == {"replaylake"}
    assert {"bc", "dqn"} <= named(body)
    assert "image" in next(row["why"] for row in body["refused"] if row["name"] == "nfq")


def test_text_suits_none(run, lake):
    opened = open_lake(lake, create=True)
    opened.dataset("d").create(Text(), Text())
    opened.dataset("d").append([Episode("d/0", ["hello"], ["you"], np.ones(1), terminated=True)])
    assert run("algorithms", "--for", "d", "--json").json["algorithms"] == []


def test_each_that_suits_trains_and_each_refused_is_refused(run, logged):
    """Of our own: what the list says is what training does."""
    masks = np.array([[True, False], [True, True]])
    opened = logged("d", action_masks=masks)
    body = run("algorithms", "--for", "d", "--json").json
    for row in (row for row in body["algorithms"] if row["provider"] == "replaylake"):
        config = TrainConfig(algorithm=row["name"], updates=1, options={"hidden_sizes": [4]})
        train(opened, ["d"], replace(config, policy=row["name"]))
    for row in (row for row in body["refused"] if row["provider"] == "replaylake"):
        ran = run("train", "offline", "d", "--algorithm", row["name"], "--policy", "p")
        assert ran.code == 1
        assert name_options(row["why"]) in ran.err


def test_a_name_and_a_dataset_are_wrong_usage(run):
    assert run("algorithms", "bc", "--for", "d").code == 2


def test_an_unknown_dataset_is_refused(run, logged):
    logged("d")
    run("algorithms", "--for", "e").failed("dataset 'e'")
