"""`replaylake ingest`: receipts, and bad input that gives one line and changes nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MAP = ("--map", "observation=x,y")
Tree = Callable[[], dict[str, bytes]]


def test_a_log_becomes_a_dataset(run: Any, log: Path) -> None:
    ran = run("ingest", log, "--dataset", "d", *MAP)
    assert ran.code == 0, ran.err
    first, second, *_ = ran.out.splitlines()
    assert first.startswith("d@1: 2 episodes, 3 steps committed in 1 shard, ")
    assert second == (
        "  read 1 file (csv): 2 episodes, 3 steps; rejected 0 and 0; already present 0 and 0"
    )
    rows = run("sql", 'select "return" as r from d.episodes order by r', "--json").json["rows"]
    assert rows == [{"r": 3.0}, {"r": 10.0}]


def test_the_receipt_adds_up_and_a_repeat_adds_nothing(run: Any, log: Path, tree: Tree) -> None:
    arguments = ("ingest", log, "--dataset", "d", *MAP, "--json")
    receipt = run(*arguments).json
    assert receipt["dataset"] == "d"
    assert receipt["version"] == 1
    counts = {"read": 2, "committed": 2, "rejected": 0, "already_present": 0}
    assert receipt["episodes"] == counts
    assert receipt["steps"] == {**counts, "read": 3, "committed": 3}
    assert receipt["shards"] == 1
    assert receipt["bytes"] > 0
    before = tree()
    again = run(*arguments).json
    assert again["version"] is None
    assert again["steps"] == {"read": 3, "committed": 0, "rejected": 0, "already_present": 3}
    assert tree() == before


def test_the_rllib_log_that_ships(run: Any, cartpole: Path) -> None:
    source = cartpole / "cartpole-v1_large"
    receipt = run("ingest", source, "--dataset", "cartpole", "--env", "CartPole-v1", "--json").json
    assert receipt["episodes"]["committed"] == 21
    assert receipt["steps"]["committed"] == 4137
    assert receipt["source"]["num_files"] == 200
    shown = run("show", "cartpole", "--json").json
    assert (shown["num_episodes"], shown["num_steps"], shown["mean_return"]) == (21, 4137, 197.0)


def test_an_invalid_episode_can_be_left_out(run: Any, log: Path) -> None:
    log.write_text(log.read_text().replace(",10.0,", ",nan,"))
    ran = run("ingest", log, "--dataset", "d", *MAP, "--on-invalid", "reject", "--json")
    receipt = ran.json
    assert receipt["episodes"] == {"read": 2, "committed": 1, "rejected": 1, "already_present": 0}
    (rejection,) = receipt["rejections"]
    assert rejection["num_episodes"] == 1
    said = run("ingest", log, "--dataset", "e", *MAP, "--on-invalid", "reject").out
    assert "rejected 1 episode for " in said
    assert "rejected 1 and 1" in said


def test_a_time_limit_is_a_truncation(run: Any, log: Path) -> None:
    run("ingest", log, "--dataset", "d", *MAP, "--time-limit", "2")
    shown = run("show", "d", "--json").json
    assert (shown["num_terminated"], shown["num_truncated"]) == (0, 2)


@pytest.fixture(params=["in a new lake", "beside a dataset", "into a dataset"])
def target(request: pytest.FixtureRequest, run: Any, log: Path) -> str:
    """A dataset name to ingest into: the lake, and the dataset, may be there or not."""
    if request.param == "in a new lake":
        return "new"
    assert run("ingest", log, "--dataset", "old", *MAP).code == 0
    return "old" if request.param == "into a dataset" else "new"


def refused(run: Any, tree: Tree, lake: Path, *arguments: object) -> Any:
    before, existed = tree(), lake.exists()
    ran = run("ingest", *arguments)
    assert tree() == before
    assert lake.exists() == existed
    return ran


def test_a_source_that_is_not_there(run: Any, tree: Tree, lake: Path, target: str) -> None:
    refused(run, tree, lake, "none.csv", "--dataset", target).failed("none.csv", "no such file")


def test_a_torn_parquet_file(
    run: Any, tree: Tree, lake: Path, target: str, cartpole: Path, tmp_path: Path
) -> None:
    whole = (cartpole / "cartpole-v1_large" / "1_000000_000000.parquet").read_bytes()
    torn = tmp_path / "torn.parquet"
    torn.write_bytes(whole[: len(whole) // 2])
    refused(run, tree, lake, torn, "--dataset", target).failed("torn.parquet", "torn")


def test_a_csv_without_the_mapped_column(
    run: Any, tree: Tree, lake: Path, target: str, log: Path
) -> None:
    ran = refused(run, tree, lake, log, "--dataset", target, "--map", "observation=x,why")
    ran.failed("log.csv", "'why'", "'y'", "--map")


@pytest.mark.parametrize("reward", ["nan", "inf", ""])
def test_a_reward_that_is_no_number(
    run: Any, tree: Tree, lake: Path, target: str, log: Path, reward: str
) -> None:
    bad = log.with_name("bad.csv")
    bad.write_text(log.read_text().replace(",2.0,", f",{reward},"))
    refused(run, tree, lake, bad, "--dataset", target, *MAP).failed("reward")


def test_a_value_outside_the_environment(
    run: Any, tree: Tree, lake: Path, target: str, log: Path
) -> None:
    ran = refused(run, tree, lake, log, "--dataset", target, *MAP, "--env", "CartPole-v1")
    assert ran.code == 1
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--dataset", "Bad-Name"), "Bad-Name"),
        (("--dataset", "new", "--format", "xlsx"), "xlsx"),
        (("--dataset", "new", "--env", "CartPoll-v1"), "CartPole-v1"),
    ],
)
def test_names_that_are_not_known(
    run: Any, tree: Tree, lake: Path, log: Path, arguments: tuple[str, ...], said: str
) -> None:
    refused(run, tree, lake, log, *arguments).failed(said)
