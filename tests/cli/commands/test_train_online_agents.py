"""`train online` in a game of several agents; tests/online has what they learn."""

from typing import Any

import pytest

ONLINE = (
    *("train", "online", "--env", "pettingzoo:classic/tictactoe-v3", "--algorithm", "dqn"),
    *("--dataset", "noughts", "--policy", "champion", "--env-runner", "local", "--steps", "400"),
    *("--set", "min_size=100", "--set", "hidden_sizes=[8]", "--set", "batch_size=8"),
    *("--set", "evaluate_steps=400", "--set", "selection_episodes=2", "--set", "round_steps=200"),
)


@pytest.mark.slow
@pytest.mark.parametrize("agents", ["shared", "each"])
def test_whose_policies_are_saved_is_said(run: Any, agents: str) -> None:
    ran = run(*ONLINE, "--agents", agents, "--seed", "3")
    saved = [line for line in ran.out.splitlines() if line.startswith("saved policy")]
    assert (
        saved
        == {
            "shared": ["saved policy champion:1"],
            "each": [
                "saved policy champion_player_1:1, which acts for player_1",
                "saved policy champion_player_2:1, which acts for player_2",
            ],
        }[agents]
    )
    assert "by agent: player_1 " in ran.out
    assert "what an agent gains another loses" in ran.err
    run_id = next(line for line in ran.err.splitlines() if line.startswith("run ")).split()[1]
    body = run("train", "online", "--resume", run_id, "--json").json
    assert body["was_done"]
    policy = {"shared": "champion", "each": "champion_player_1"}[agents]
    lines = run("lineage", "--policy", policy).out.splitlines()
    (came,) = [line for line in lines if f"from online/{run_id}" in line]
    # Each commit counts the pieces that it has: more than there are episodes.
    assert " episode pieces, " in came
    assert [one["policy"] for one in body["policies"].values()] == {
        "shared": [],
        "each": ["champion_player_1", "champion_player_2"],
    }[agents]


def test_each_wants_several(run: Any) -> None:
    options = [word if "tictactoe" not in word else "CartPole-v1" for word in ONLINE]
    run(*options, "--agents", "each").failed("agents each", "CartPole-v1", "Leave --agents out")
