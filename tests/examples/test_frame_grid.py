"""The small environment of frames: what can be earned there, and that it is learned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frame_grid import (
    BAR,
    BEST_RETURN,
    MAX_STEPS,
    RANDOM_RETURN,
    best_action,
    frame,
    move_cell,
)

from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.offline.environments.ids import make, spaces_of
from replaylake.offline.environments.recording_wrapper import record
from replaylake.offline.environments.rendering import make_rendering, render_frame
from replaylake.offline.running.train import TrainConfig, train

ENV = "frame_grid:make_frame_grid"
CELLS = list(product(range(4), repeat=2))
Chances = Callable[[tuple[int, int], tuple[int, int]], list[tuple[int, Fraction]]]


def exact_return(policy: Chances) -> Fraction:
    """The mean return over all beginnings, by dynamic programming backwards from step 10."""
    total = Fraction(0)
    for goal in CELLS:
        values = dict.fromkeys(CELLS, Fraction(0))
        for _ in range(MAX_STEPS):
            values = {
                cell: sum(
                    (p * outcome(cell, action, goal, values) for action, p in policy(cell, goal)),
                    Fraction(0),
                )
                for cell in CELLS
            }
        total += sum((values[cell] for cell in CELLS if cell != goal), Fraction(0))
    return total / (16 * 15)


def outcome(
    cell: tuple[int, int], action: int, goal: tuple[int, int], values: dict[Any, Fraction]
) -> Fraction:
    to = move_cell(cell, action)
    return Fraction(1) if to == goal else Fraction(-1, 10) + values[to]


def test_the_best_and_the_random_return_are_exact() -> None:
    random = exact_return(lambda cell, goal: [(a, Fraction(1, 4)) for a in range(4)])
    assert random == Fraction(-52_929_547, 104_857_600)
    assert float(random) == RANDOM_RETURN
    best = exact_return(lambda cell, goal: [(best_action(cell, goal), Fraction(1))])
    # Two of 16 cells are 8 / 3 steps apart on average: the last one earns 1, the others cost 0.1.
    assert best == 1 - Fraction(1, 10) * (Fraction(8, 3) - 1) == Fraction(5, 6)
    assert float(best) == pytest.approx(BEST_RETURN)
    assert pytest.approx(RANDOM_RETURN + 0.8 * (BEST_RETURN - RANDOM_RETURN)) == BAR


def test_no_policy_earns_more_than_the_best() -> None:
    # Value iteration, with the best of the four actions in each cell and at each step.
    total = Fraction(0)
    for goal in CELLS:
        values = dict.fromkeys(CELLS, Fraction(0))
        for _ in range(MAX_STEPS):
            values = {
                cell: max(outcome(cell, action, goal, values) for action in range(4))
                for cell in CELLS
            }
        total += sum((values[cell] for cell in CELLS if cell != goal), Fraction(0))
    assert total / (16 * 15) == Fraction(5, 6)


def test_a_frame_shows_both_squares() -> None:
    found = frame((0, 1), (3, 2))
    assert (found.shape, found.dtype) == ((84, 84), np.uint8)
    assert (found[:21, 21:42] == 255).all()
    assert (found[63:, 42:63] == 128).all()
    assert found.sum(dtype=np.int64) == 21 * 21 * (255 + 128)


def test_an_episode_ends_at_the_goal_or_after_ten_steps() -> None:
    env = make(ENV)
    before, _ = env.reset(seed=3)
    again, _ = env.reset(seed=3)
    np.testing.assert_array_equal(before, again)
    ends = set()
    for seed in range(30):
        env.reset(seed=seed)
        steps, total, terminated, truncated = 0, 0.0, False, False
        rng = np.random.default_rng(seed)
        while not (terminated or truncated):
            observation, reward, terminated, truncated, _ = env.step(int(rng.integers(4)))
            steps, total = steps + 1, total + float(reward)
            assert env.observation_space.contains(observation)
            # The goal is gone from sight where the agent stands on it.
            assert terminated == bool((observation != 128).all())
        assert total == pytest.approx(1 - 0.1 * (steps - 1) if terminated else -0.1 * steps)
        assert steps == MAX_STEPS if truncated and not terminated else steps <= MAX_STEPS
        ends.add(terminated)
    assert ends == {True, False}
    env.close()  # type: ignore[no-untyped-call]
    observation_space, action_space = spaces_of(ENV)
    assert observation_space.is_image  # type: ignore[union-attr]
    assert action_space.n == 4  # type: ignore[union-attr]


def test_it_draws_itself() -> None:
    env = make_rendering(ENV)
    observation, _ = env.reset(seed=0)
    found = render_frame(env)
    assert found.shape == (84, 84, 3)
    assert (found == observation[:, :, None]).all()


def record_episodes(lake: Lake, num: int, *, best: bool) -> None:
    """Record episodes of the perfect or the uniform policy as dataset `grid`."""
    env = record(make(ENV), lake.dataset("grid"))
    rng = np.random.default_rng(0)
    for seed in range(num):
        observation, _ = env.reset(seed=seed)
        ended = False
        while not ended:
            action = best_action(*squares(observation)) if best else int(rng.integers(4))
            observation, _, terminated, truncated, _ = env.step(action)
            ended = terminated or truncated
    env.close()  # type: ignore[no-untyped-call]


def squares(observation: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    agent, goal = (np.argwhere(observation == value)[0] // 21 for value in (255, 128))
    return (int(agent[0]), int(agent[1])), (int(goal[0]), int(goal[1]))


def test_recorded_episodes_earn_what_is_expected(tmp_path: Path) -> None:
    lake = open_lake(tmp_path / "lake", create=True)
    record_episodes(lake, 150, best=True)
    found = lake.sql('select avg("return") as mean, stddev("return") as std from grid.episodes')
    mean, std = found["mean"][0].as_py(), found["std"][0].as_py()
    assert mean == pytest.approx(BEST_RETURN, abs=4 * std / 150**0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "num", "updates", "options"),
    [
        ("bc", 200, 300, {"learning_rate": 1e-3}),
        (
            "dqn",
            1500,
            1200,
            {"learning_rate": 1e-3, "target_update_period": 1, "tau": 0.05, "double": True},
        ),
    ],
)
def test_it_is_learned_from_recorded_episodes(
    tmp_path: Path, algorithm: str, num: int, updates: int, options: dict[str, Any]
) -> None:
    lake = open_lake(tmp_path / "lake", create=True)
    record_episodes(lake, num, best=algorithm == "bc")
    config = TrainConfig(
        algorithm=algorithm,
        updates=updates,
        batch_size=32,
        discount=0.95,
        evaluation_episodes=200,
        options={"hidden_sizes": [256], **options},
    )
    result = train(lake, ["grid"], replace(config, policy="walker", env=ENV))
    assert result.evaluation is not None
    assert result.evaluation.mean_return > BAR
