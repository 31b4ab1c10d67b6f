"""`train offline`, `evaluate`, `policies` and `lineage` on the log that ships."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from replaylake.cli.commands import train as train_command
from replaylake.cli.main import main

TRAIN = ("train", "offline", "cartpole", "--algorithm", "bc", "--policy", "clone")
Tree = Callable[[], dict[str, bytes]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cartpole: Path) -> Path:
    """A lake with the 102 steps of small.json and a policy of a few updates."""
    path = tmp_path_factory.mktemp("trained") / "lake"
    source = str(cartpole / "small.json")
    assert main(["ingest", source, "--dataset", "cartpole", "--lake", str(path)]) == 0
    options = ["--updates", "20", "--set", "hidden_sizes=[8]", "--lake", str(path)]
    assert main([*TRAIN, *options]) == 0
    return path


@pytest.fixture(autouse=True)
def own_lake(trained: Path, lake: Path) -> None:
    # What is derived may still be written while it is copied, and is made again where it is absent.
    shutil.copytree(trained, lake, ignore=shutil.ignore_patterns("_derived"))


def test_training_says_what_it_learns_from_and_what_it_saved(run: Any) -> None:
    ran = run(*TRAIN, "--updates", "30", "--seed", "3", "--where", "num_steps > 0")
    assert ran.code == 0, ran.err
    # RLlib's log has the probabilities of its actions, and no name of the policy that took them.
    assert ran.err.splitlines()[0] == (
        "snapshot cartpole@1  1 shard  102 steps  behavior policy not named, propensities logged"
    )
    lines = ran.out.splitlines()
    assert lines[0] == "trained on 3 episodes, 102 steps"
    assert lines[1].startswith("30 updates  policy_loss ")
    assert " (means of the last 3)  " in lines[1]
    assert lines[-1] == "saved policy clone:2"


@pytest.mark.parametrize(
    ("probs", "said"),
    [
        ([], "behavior policy unknown"),
        ([0.5, 0.5, 0.5], "behavior policy not named, propensities of 75.0% of the steps logged"),
    ],
)
def test_training_says_what_is_known_of_who_acted(
    run: Any, tmp_path: Path, probs: list[float], said: str
) -> None:
    rows = [{"obs": [0.1 * i], "actions": i % 2, "rewards": 1.0, "t": i} for i in range(4)]
    for row, prob in zip(rows, probs, strict=False):
        row["action_prob"] = prob
    path = tmp_path / "steps.jsonl"
    path.write_text(
        "".join(
            json.dumps({"eps_id": 1, "terminateds": row["t"] == 3, **row}) + "\n" for row in rows
        )
    )
    assert run("ingest", path, "--dataset", "made").code == 0
    ran = run("train", "offline", "made", *TRAIN[3:], "--updates", "1", "--set", "hidden_sizes=[4]")
    assert ran.err.splitlines()[0] == f"snapshot made@1  1 shard  4 steps  {said}"


def test_the_log_s_own_return_is_beside_that_of_the_policy(run: Any) -> None:
    short = ("--updates", "1", "--env", "CartPole-v1", "--set", "evaluation_episodes=3",
             "--set", "select=last")  # fmt: skip
    ran = run(*TRAIN, *short)
    mean = run("sql", 'select avg("return") as r from cartpole.episodes', "--json").json["rows"]
    expected = f"the log: mean return {mean[0]['r']:g} over 3 complete episodes"
    assert ran.out.splitlines()[-2] == expected
    body = run(*TRAIN, *short, "--json")
    assert body.json["logged"] == {"mean_return": mean[0]["r"], "num_episodes": 3}
    is_worse = body.json["evaluation"]["ci_high"] < mean[0]["r"]
    assert ("below that of the episodes that it learned from" in body.err) == is_worse


@pytest.mark.parametrize(
    ("ci_high", "reward", "logged", "is_worse"),
    [
        (7.0, None, 8.0, True),
        (7.0, None, 6.0, False),
        (None, None, 6.0, True),
        # Of another reward than the environment's, the two cannot be compared.
        (7.0, "reward * 2", 8.0, False),
    ],
)
def test_a_policy_is_worse_than_its_log_beyond_its_interval(
    ci_high: float | None, reward: str | None, logged: float, is_worse: bool
) -> None:
    score = SimpleNamespace(mean_return=5.0, ci_high=ci_high)
    result: Any = SimpleNamespace(evaluation=score, datasets=[{"reward": reward}])
    assert train_command._is_worse(result, logged) == is_worse


@pytest.mark.slow
def test_training_as_json(run: Any, lake: Path) -> None:
    ran = run(*TRAIN, "--updates", "10", "--json", "--env", "CartPole-v1",
              "--set", "evaluation_episodes=2", "--reward", "reward * 2")  # fmt: skip
    body = ran.json
    assert (body["policy"], body["version"], body["updates"]) == ("clone", 2, 10)
    (dataset,) = body["datasets"]
    assert (dataset["dataset"], dataset["version"]) == ("cartpole", 1)
    assert "reward" in dataset["reward"]
    assert len(dataset["content_hash"]) == 64
    assert len(body["evaluation"]["returns"]) == 2
    assert body["metrics"]["policy_loss"] > 0


def test_flags_win_over_set_and_set_over_the_file(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "bc.toml"
    file.write_text('algorithm = "bc"\nupdates = 5\nseed = 7\nhidden_sizes = [4]\n')
    ran = run("train", "offline", "cartpole", "--policy", "other", "--config", file,
              "--set", "seed=8", "--set", "updates=6", "--updates", "7", "--json")  # fmt: skip
    body = ran.json
    assert (body["algorithm"], body["seed"], body["updates"]) == ("bc", 8, 7)
    config = run("policies", "show", "other", "--json").json["manifest"]["config"]
    assert config["options"]["hidden_sizes"] == [4]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("train", "offline", "absent", "--algorithm", "bc", "--policy", "p"), "absent"),
        (("train", "offline", "cartpole@9", "--algorithm", "bc", "--policy", "p"), "9"),
        (("train", "offline", "cartpole", "--algorithm", "bcc", "--policy", "p"), "bc"),
        (("train", "offline", "cartpole", "--algorithm", "bc", "--policy", "random"), "random"),
        (("train", "offline", "cartpole", "--algorithm", "td3", "--policy", "p"), "td3"),
        ((*TRAIN, "--set", "learning_rat=1"), "learning_rate"),
        ((*TRAIN, "--set", "update=1"), "updates"),
        ((*TRAIN, "--where", "nothing > 1"), "nothing"),
        ((*TRAIN, "--where", "num_steps > 1000"), "num_steps"),
        ((*TRAIN, "--where", "random() < 0.5"), "random"),
        ((*TRAIN, "--env", "CartPoll-v1"), "CartPole-v1"),
        ((*TRAIN, "--config", "none.toml"), "none.toml"),
        (("evaluate", "absent", "--env", "CartPole-v1"), "absent"),
        (("evaluate", "clone:9", "--env", "CartPole-v1"), "9"),
        (("evaluate", "clone@champion", "--env", "CartPole-v1"), "champion"),
        (("evaluate", "clone", "--env", "CartPoll-v1"), "CartPole-v1"),
        (("evaluate", "clone", "--env", "Pendulum-v1"), "Pendulum-v1"),
        (("evaluate", "random", "--env", "CartPoll-v1"), "CartPole-v1"),
        (("policies", "show", "absent"), "absent"),
        (("policies", "show", "Clone"), "Clone"),
        (("promote", "clone:9", "--to", "champion"), "9"),
        (("promote", "clone", "--to", "Champion!"), "Champion!"),
        (("policies", "package", "absent", "--output", "out"), "absent"),
        (("lineage", "--policy", "absent"), "absent"),
        (("lineage", "--dataset", "absent"), "absent"),
        (("lineage", "--decision", "-nonsense"), "-nonsense"),
        (("feedback", "join", "cartpole"), "--log-to cartpole"),
        (("feedback", "join", "absent"), "absent"),
    ],
)
def test_what_is_refused_changes_nothing(
    run: Any, lake: Path, arguments: tuple[str, ...], said: str
) -> None:
    def files() -> set[str]:
        made = {path.relative_to(lake).as_posix() for path in lake.rglob("*") if path.is_file()}
        return made - {"_lake/keys/signing"}  # made when first asked for

    before = files()
    ran = run(*arguments)
    assert "Traceback" not in ran.err
    talk = [line for line in ran.err.splitlines() if not line.startswith("snapshot ")]
    assert ran.code == 1, ran
    (line,) = talk
    assert line.startswith("error: ")
    assert "fault in ReplayLake" not in line
    assert said in line, line
    assert files() == before


@pytest.mark.parametrize(
    ("arguments", "said"), [(("--set", "updates=many"), "many"), (("--updates", "0"), "found 0")]
)
def test_a_value_that_an_option_refuses_is_wrong_usage(
    run: Any, arguments: tuple[str, ...], said: str
) -> None:
    ran = run(*TRAIN, *arguments)
    assert ran.code == 2
    assert "--updates" in ran.err
    assert said in ran.err


def test_no_algorithm_is_wrong_usage(run: Any) -> None:
    ran = run("train", "offline", "cartpole", "--policy", "p")
    assert ran.code == 2
    assert "--algorithm" in ran.err


def test_an_option_of_the_training_that_is_misspelled_is_one_message(run: Any) -> None:
    ran = run(*TRAIN, "--set", "update=1")
    assert ran.err.splitlines()[-1] == (
        "error: algorithm bc: found option 'update', expected updates or log_updates. Correct the "
        "spelling or leave it out."
    )


def test_evaluate(run: Any) -> None:
    arguments = ("evaluate", "clone", "--env", "CartPole-v1", "--episodes", "3", "--seed", "5")
    body = run(*arguments, "--json").json
    assert (body["policy"], body["version"], body["selected_by"]) == ("clone", 1, "newest")
    assert len(body["returns"]) == 3
    assert body["mean_return"] == pytest.approx(sum(body["returns"]) / 3)
    assert body["ci_low"] <= body["mean_return"] <= body["ci_high"]
    assert run(*arguments, "--json").json["returns"] == body["returns"]
    line = run(*arguments).out
    assert line.startswith("clone:1 (newest) in CartPole-v1: mean return ")
    assert "over 3 episodes, 95% interval" in line


def test_another_reward_than_the_environments_is_said(run: Any) -> None:
    """By default it chooses no policy in the environment, and returns there say whose they are."""
    ran = run("train", "offline", "cartpole", "--algorithm", "dqn", "--policy", "low",
              "--updates", "10", "--reward=-reward", "--env", "CartPole-v1",
              "--set", "evaluation_episodes=2", "--set", "hidden_sizes=[8]")  # fmt: skip
    assert ran.code == 0, ran.err
    assert (
        "learns from -reward, which CartPole-v1 does not reward: the last one is taken" in ran.err
    )
    assert ", of the environment's own reward: trained with (-(reward))" in ran.out
    assert (
        run("policies", "show", "low", "--json").json["manifest"]["selection"]["measure"] == "last"
    )
    arguments = ("--env", "CartPole-v1", "--episodes", "2")
    lines = run("evaluate", "low", *arguments).out.splitlines()
    assert lines[1] == (
        "note: low:1 (newest) was trained with the reward (-(reward)); returns here are of the "
        "environment's own"
    )
    both = run("evaluate", "low", "clone", "random", "--compare", *arguments, "--json").json
    said = [one["training_reward"] for one in both["policies"]]
    assert said == ["(-(reward))", "reward", None]
    assert "note: " not in run("evaluate", "clone", *arguments).out


def test_random_is_a_policy_without_a_lake(run: Any, tmp_path: Path) -> None:
    ran = run("evaluate", "random", "--env", "CartPole-v1", "--episodes", "20", "--json",
              "--lake", tmp_path / "none")  # fmt: skip
    body = ran.json
    assert (body["policy"], body["version"]) == ("random", None)
    # Uniform play lasts 22 steps on average.
    assert 12 < body["mean_return"] < 40


def test_policies(run: Any) -> None:
    (row,) = run("policies", "list", "--json").json["policies"]
    assert (row["policy"], row["version"], row["aliases"]) == ("clone", 1, [])
    assert run("policies", "list").out.splitlines()[1].split()[:2] == ["clone", "1"]
    assert run("promote", "clone:1", "--to", "champion").out == "clone@champion is clone:1\n"
    body = run("policies", "show", "clone", "--json").json
    assert body["selected_by"] == "alias champion"
    assert body["manifest"]["algorithm"] == "bc"
    assert body["lineage"]["datasets"][0]["dataset"] == "cartpole"
    out = run("policies", "show", "clone").out
    assert out.startswith("clone:1 (alias champion)\n  aliases  champion\n")
    again = run("policies", "promote", "clone:1", "--to", "champion", "--json").json
    assert (again["promoted"], again["version"], again["move"]) == (False, 1, None)


def test_a_name_means_its_champion_else_its_newest(run: Any) -> None:
    assert run(*TRAIN, "--updates", "5", "--set", "hidden_sizes=[8]").code == 0
    assert run("policies", "show", "clone", "--json").json["version"] == 2
    assert run("promote", "clone:1", "--to", "champion").code == 0
    assert run("policies", "show", "clone", "--json").json["version"] == 1
    one = run("policies", "show", "clone:2", "--json").json
    assert (one["selected_by"], "versions" in one) == ("version", False)
    versions = run("policies", "show", "clone", "--json").json["versions"]
    assert [(row["version"], row["aliases"]) for row in versions] == [(1, ["champion"]), (2, [])]
    *_, heading, names, first, second = run("policies", "show", "clone").out.splitlines()
    assert heading == "  versions (`replaylake policies show clone:VERSION` shows another one)"
    assert names.split() == ["version", "aliases", "run_id", "created_at"]
    assert (first.split()[:2], second.split()[0]) == (["1", "champion"], "2")
    assert "versions" not in run("policies", "show", "clone:2").out


def test_lineage_of_a_policy_ends_at_the_ingests(run: Any) -> None:
    body = run("lineage", "--policy", "clone", "--json").json
    assert body["policy"]["version"] == 1
    assert body["run"]["algorithm"] == "bc"
    assert body["run"]["config"]["updates"] == 20
    (dataset,) = body["datasets"]
    assert (dataset["dataset"], dataset["version"], dataset["num_steps"]) == ("cartpole", 1, 102)
    (ingest,) = dataset["ingests"]
    assert ingest["producer"].startswith("ingest/")
    assert (ingest["versions"], ingest["num_steps"]) == ([1], 102)
    out = run("lineage", "--policy", "clone").out
    assert dataset["content_hash"] in out
    assert ingest["source"] in out


def test_lineage_of_a_dataset_names_the_policies(run: Any) -> None:
    body = run("lineage", "--dataset", "cartpole", "--json").json
    assert body["dataset"]["num_steps"] == 102
    assert len(body["ingests"]) == 1
    (policy,) = body["policies"]
    assert (policy["policy"], policy["version"], policy["algorithm"]) == ("clone", 1, "bc")
    assert policy["trained_on"]["version"] == 1
    assert "policy clone:1, algorithm bc" in run("lineage", "--dataset", "cartpole").out


@pytest.mark.slow
def test_package(run: Any, tmp_path: Path) -> None:
    output = tmp_path / "bento"
    body = run("policies", "package", "clone", "--output", output, "--json").json
    assert (body["policy"], body["version"], body["output"]) == ("clone", 1, str(output))
    assert (output / "bento.yaml").is_file()
    again = run("policies", "package", "clone", "--output", output)
    assert again.code == 1
    assert again.err.splitlines()[-1].startswith(f"error: {output}: ")


def test_a_dataset_of_every_kind_of_commit(run: Any, tmp_path: Path) -> None:
    more = tmp_path / "more.jsonl"
    row = {"episode_id": "z", "step": 0, "observation": [0.0] * 4, "action": 1, "reward": 5.0}
    more.write_text(json.dumps({**row, "terminated": True, "truncated": False}) + "\n")
    ran = run("ingest", more, "--dataset", "cartpole")
    assert ran.code == 0, ran.err
    assert len(run("lineage", "--dataset", "cartpole", "--json").json["ingests"]) == 2
    # The policy was trained on version 1, before this ingest.
    (dataset,) = run("lineage", "--policy", "clone", "--json").json["datasets"]
    assert len(dataset["ingests"]) == 1
