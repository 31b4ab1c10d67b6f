"""`rollout`, in this process; tests/online has the workers and Ray."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROLLOUT = ("rollout", "--env", "CartPole-v1", "--policy", "random", "--dataset", "cartpole")


def test_the_answer_is_what_the_lake_then_has(run: Any) -> None:
    ran = run(*ROLLOUT, "--episodes", "12", "--seed", "5", "--json")
    body = ran.json
    assert (body["policy"], body["seed"], body["num_workers"]) == ("random", 5, 0)
    query = 'select count(*) as n, sum(num_steps)::int as steps, avg("return") as mean'
    found = run("sql", f"{query} from cartpole.episodes", "--format", "csv").out.splitlines()[1]
    numbers = [float(text) for text in found.split(",")]
    assert numbers == [12, body["num_steps"], pytest.approx(body["mean_return"])]
    assert run("sql", "select distinct seed from cartpole.steps", "--json").code == 0


def test_it_says_what_it_collected_and_the_seed(run: Any) -> None:
    ran = run(*ROLLOUT, "--episodes", "1", "--seed", "7", "--workers", "3", "--env-runner", "local")
    first, second = ran.out.splitlines()
    assert first.startswith("cartpole@1: 1 episode, ")
    assert second.startswith("  random in CartPole-v1: mean return ")
    assert second.endswith(" steps/s by this process; seed 7")


def test_without_a_seed_two_runs_differ(run: Any) -> None:
    seeds = {run(*ROLLOUT, "--episodes", "1", "--json").json["seed"] for _ in range(2)}
    assert len(seeds) == 2


def test_errors_change_nothing(run: Any, lake: Path, tree: Callable[[], dict[str, bytes]]) -> None:
    run("rollout", "--env", "CartPol-v1", "--dataset", "c").failed("CartPol-v1", "CartPole-v1")
    run("rollout", "--env", "CartPole-v1", "--dataset", "select").failed("select", "keyword")
    run("rollout", "--env", "CartPole-v1", "--dataset", "c", "--policy", "clone").failed(str(lake))
    assert not lake.exists()
    run(*ROLLOUT, "--episodes", "2")
    before = tree()
    run("rollout", "--env", "Pendulum-v1", "--dataset", "cartpole").failed("Box float32[3]")
    run(*ROLLOUT, "--policy", "clone").failed("clone")
    assert tree() == before


@pytest.mark.parametrize("explore", ["epsilon=2", "temperature=-1", "noise=1", "epsilon"])
def test_exploration_of_another_form_is_wrong_usage(run: Any, explore: str) -> None:
    ran = run(*ROLLOUT, "--explore", explore)
    assert ran.code == 2
    assert "--explore" in ran.err
