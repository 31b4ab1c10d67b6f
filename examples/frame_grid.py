"""FrameGrid: a small environment of pictures, to try learning from images on.

    replaylake train online --env frame_grid:make_frame_grid --dataset grid --policy walker
        --algorithm dqn --steps 30000

on one line, from this folder. A light square walks to a grey one on a grid of 4 x 4 cells, of which
the policy sees a frame of 84 x 84. What a random and a perfect policy earn is known exactly.
"""

from __future__ import annotations

from typing import Any, Final

import gymnasium
import numpy as np

from replaylake.datastore.episodes.spaces import Array

NUM_CELLS: Final = 4
CELL_PIXELS: Final = 21
MAX_STEPS: Final = 10
STEP_REWARD: Final = -0.1
GOAL_REWARD: Final = 1.0
# Over where both squares begin, all of them alike; by dynamic programming (test_frame_grid.py).
RANDOM_RETURN: Final = -52_929_547 / 104_857_600
BEST_RETURN: Final = 5 / 6
# Four fifths of the way from one to the other.
BAR: Final = RANDOM_RETURN + 0.8 * (BEST_RETURN - RANDOM_RETURN)

_AGENT: Final = 255
_GOAL: Final = 128
# Of the actions up, right, down and left: (row, column).
MOVES: Final = ((-1, 0), (0, 1), (1, 0), (0, -1))


class FrameGrid(gymnasium.Env[Array, int]):
    """Observations uint8 [84, 84]; actions 0 to 3 move up, right, down or left, or against a wall.

    The step that reaches the goal earns 1 and terminates; each other one costs 0.1. Both squares
    begin anywhere, in different cells.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None) -> None:
        side = NUM_CELLS * CELL_PIXELS
        self.observation_space = gymnasium.spaces.Box(0, 255, (side, side), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(len(MOVES))
        self.render_mode = render_mode
        self._agent = self._goal = (0, 0)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Put both squares into two different cells at random."""
        super().reset(seed=seed, options=options)
        cells = self.np_random.choice(NUM_CELLS**2, 2, replace=False)
        self._agent, self._goal = (divmod(int(cell), NUM_CELLS) for cell in cells)
        return frame(self._agent, self._goal), {}

    def step(self, action: int) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Move, if there is no wall."""
        self._agent = move_cell(self._agent, int(action))
        terminated = self._agent == self._goal
        reward = GOAL_REWARD if terminated else STEP_REWARD
        return frame(self._agent, self._goal), reward, terminated, False, {}

    def render(self) -> Array:
        """Return the frame as colors, uint8 [84, 84, 3]."""
        return np.repeat(frame(self._agent, self._goal)[:, :, None], 3, axis=2)


def make_frame_grid(render_mode: str | None = None) -> gymnasium.Env[Array, int]:
    """Make the environment, whose episodes are truncated after 10 steps."""
    return gymnasium.wrappers.TimeLimit(FrameGrid(render_mode), MAX_STEPS)


def move_cell(cell: tuple[int, int], action: int) -> tuple[int, int]:
    """Return the cell (row, column) that an action leads to."""
    row, column = (
        min(max(at + by, 0), NUM_CELLS - 1) for at, by in zip(cell, MOVES[action], strict=True)
    )
    return row, column


def frame(agent: tuple[int, int], goal: tuple[int, int]) -> Array:
    """Draw both squares, the agent's over the goal's: uint8 [84, 84]."""
    cells = np.zeros((NUM_CELLS, NUM_CELLS), np.uint8)
    cells[goal] = _GOAL
    cells[agent] = _AGENT
    return cells.repeat(CELL_PIXELS, axis=0).repeat(CELL_PIXELS, axis=1)


def best_action(agent: tuple[int, int], goal: tuple[int, int]) -> int:
    """Return an action that comes nearer to the goal: along the column first."""
    if agent[0] != goal[0]:
        return 0 if goal[0] < agent[0] else 2
    return 1 if goal[1] > agent[1] else 3
