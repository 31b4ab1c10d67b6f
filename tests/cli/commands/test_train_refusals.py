"""What cannot be learned from, or be evaluated: one clear line each, and nothing registered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete, Space
from replaylake.datastore.lake.lake import Lake, open_lake

SMALL = ("--set", "hidden_sizes=[8]", "--set", "batch_size=16")
Write = Callable[..., None]


@pytest.fixture
def opened(lake: Path) -> Lake:
    return open_lake(lake, create=True)


@pytest.fixture
def write(opened: Lake) -> Write:
    """Writes a dataset of terminated episodes of random play, changed by keyword."""

    def call(
        name: str,
        num_episodes: int = 8,
        num_steps: int = 5,
        size: int = 3,
        action_space: Space | None = None,
        **changes: Any,
    ) -> None:
        rng = np.random.default_rng(0)
        dataset = opened.dataset(name)
        if action_space is not None:
            dataset.create(Box((size,), "float32"), action_space)
        is_box = isinstance(action_space, Box)
        dataset.append(
            [
                Episode(
                    f"{name}/{i}",
                    **{
                        "observations": rng.standard_normal((num_steps, size)).astype(np.float32),
                        "actions": rng.uniform(-1, 1, (num_steps, 1)).astype(np.float32)
                        if is_box
                        else np.arange(num_steps) % 2,
                        "rewards": np.ones(num_steps),
                        "terminated": True,
                        **changes,
                    },
                )
                for i in range(num_episodes)
            ]
        )

    return call


def train(run: Any, algorithm: str, *more: str, dataset: str = "d", updates: int = 4) -> Any:
    return run(
        "train", "offline", dataset, "--algorithm", algorithm, "--policy", "p",
        "--updates", str(updates), *SMALL, *more,
    )  # fmt: skip


def check_one_line(ran: Any, *said: str) -> str:
    """Check that it failed in one line but for what it had said of the data before."""
    assert ran.code == 1, ran
    assert ran.out == ""
    talk = ("snapshot ", "run ", "note: ", "read ", "reading ", "update ")
    (line,) = (line for line in ran.err.splitlines() if not line.startswith(talk))
    assert line.startswith("error: ")
    assert "fault in ReplayLake" not in line
    for text in said:
        assert text in line, (text, line)
    return str(line)


def check_nothing_registered(opened: Lake, num_runs: int = 0) -> None:
    assert opened.registry.list() == []
    assert len(opened.registry.runs()) == num_runs


def test_an_unknown_algorithm(run: Any, write: Write, opened: Lake) -> None:
    write("d")
    check_one_line(train(run, "cqll"), "algorithm 'cqll'", "expected cql", "There are: ")
    check_nothing_registered(opened)


def test_an_algorithm_for_other_actions(run: Any, write: Write, opened: Lake) -> None:
    write("d")
    check_one_line(train(run, "iql"), "Discrete(2)", "expected a float Box", "dqn")
    write("box", action_space=Box((1,), "float32", -1, 1))
    check_one_line(train(run, "dr_bandit", dataset="box"), "expected Discrete", "td3_plus_bc")
    check_nothing_registered(opened)


@pytest.mark.parametrize(
    ("algorithm", "option", "near"),
    [
        ("cql", "alfa=2.0", "alpha"),
        ("dqn", "target_update_perod=5", "target_update_period"),
        ("bc", "updats=5", "updates"),
        ("ips_bandit", "self_normalised=true", "self_normalized"),
    ],
)
def test_an_unknown_option(
    run: Any, write: Write, opened: Lake, algorithm: str, option: str, near: str
) -> None:
    write("d")
    name = option.partition("=")[0]
    check_one_line(
        train(run, algorithm, "--set", option), f"option '{name}'", f"expected {near}", "Correct"
    )
    check_nothing_registered(opened)


@pytest.mark.slow
def test_an_unknown_option_of_d3rlpys(run: Any, write: Write, opened: Lake) -> None:
    write("d")
    check_one_line(train(run, "d3rlpy:cql", "--set", "alfa=2.0"), "'alfa'", "expected alpha")
    check_nothing_registered(opened)


def test_an_option_out_of_range(run: Any, write: Write, opened: Lake) -> None:
    write("d")
    check_one_line(train(run, "cql", "--set", "alpha=-1.0"), "alpha: found -1.0", "0 or more")
    check_nothing_registered(opened)


@pytest.mark.parametrize("where", ["return > 1e9", "false"])
def test_a_selection_of_nothing(run: Any, write: Write, opened: Lake, where: str) -> None:
    write("d")
    check_one_line(train(run, "bc", "--where", where), where)
    check_one_line(train(run, "bc", "--where-steps", "reward > 5"), "reward > 5")
    check_nothing_registered(opened)


def test_an_empty_condition(run: Any, write: Write, opened: Lake) -> None:
    write("d")
    check_one_line(train(run, "bc", "--where", ""), "where: ", "found an empty one")
    check_nothing_registered(opened)


def test_one_episode_cannot_be_split(run: Any, write: Write, opened: Lake) -> None:
    write("d", num_episodes=1)
    check_one_line(train(run, "bc", "--holdout", "0.5"), "of 1 episode")
    check_nothing_registered(opened)
    assert train(run, "bc").code == 0


def test_without_terminations_it_says_what_values_mean(
    run: Any, write: Write, opened: Lake
) -> None:
    endless = {"terminated": False, "truncated": True}
    write("d", final_observation=np.zeros(3, np.float32), **endless)
    ran = train(run, "cql")
    assert ran.code == 0
    assert ran.err.count("note: no step terminates") == 1
    assert "note:" not in train(run, "bc").err


def test_without_terminations_or_successors_there_is_nothing_to_bootstrap(
    run: Any, write: Write, opened: Lake
) -> None:
    write("d", num_steps=1, terminated=False, truncated=True)
    check_one_line(train(run, "cql"), "expected")
    check_nothing_registered(opened)
    assert train(run, "bc").code == 0


def test_a_loss_that_is_not_finite(run: Any, write: Write, opened: Lake) -> None:
    write("d")
    ran = train(run, "cql", "--set", "learning_rate=1e30", updates=50)
    check_one_line(ran, "update ", "q_loss", "rows", "checkpoint", "Lower the learning rate")
    check_nothing_registered(opened, num_runs=1)
    (listed,) = run("runs", "list", "--json").json["runs"]
    assert listed["status"] == "failed"


def test_a_bandit_learner_wants_propensities(run: Any, write: Write, opened: Lake) -> None:
    write("d", num_steps=1)
    for name in ("ips_bandit", "dr_bandit"):
        check_one_line(train(run, name), "8 of 8 steps have no behavior_log_prob", "--map")
    check_nothing_registered(opened)


def test_a_bandit_learner_wants_decisions_of_one_step(run: Any, write: Write, opened: Lake) -> None:
    write("d", behavior_log_probs=np.log(np.full(5, 0.5)))
    for name in ("ips_bandit", "dr_bandit"):
        check_one_line(train(run, name), "32 of 40 steps are not terminated", "one step each")
    check_nothing_registered(opened)


def test_masks_are_refused_by_those_that_ignore_them(run: Any, write: Write, opened: Lake) -> None:
    masks = np.array([[True, True], [False, True]] * 2 + [[True, True]])
    write("d", action_masks=masks)
    for name in ("d3rlpy:cql", "nfq"):
        check_one_line(train(run, name), "masks", "Algorithms that honor masks: bc, cql")
    check_nothing_registered(opened)
    assert train(run, "cql").code == 0


def test_rewards_that_are_unknown(run: Any, opened: Lake) -> None:
    dataset = opened.dataset("d")
    unknown = Episode(
        "d/0", np.zeros((2, 3), np.float32), np.array([0, 1]), np.array([1.0, np.nan]),
        terminated=True,
    )  # fmt: skip
    dataset.create(Box((3,), "float32"), Discrete(2), rewards_optional=True)
    dataset.append([unknown])
    check_one_line(train(run, "cql"), "1 of 2 steps have no reward", "bc", "annotate", "--reward")
    check_nothing_registered(opened)


def test_a_policy_of_other_spaces_is_not_evaluated(run: Any, write: Write, opened: Lake) -> None:
    write("d")
    write("wide", size=4)
    assert train(run, "bc").code == 0
    check_one_line(run("ope", "wide", "--policy", "p"), "float32[3]", "float32[4]")
    check_one_line(run("evaluate", "p", "--env", "CartPole-v1"), "float32[3]")


def test_an_environment_of_other_spaces(run: Any, write: Write, opened: Lake) -> None:
    write("d")
    check_one_line(train(run, "bc", "--env", "CartPole-v1"), "CartPole-v1", "float32[3]")
    check_nothing_registered(opened)
