"""Episodes whose every number says whose it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake


def _make_told(number: int, num_steps: int = 10, first_step: int = 0, **fields: Any) -> Episode:
    """Step t of episode n: observation [n, t], action (n + t) % 5, reward n + t / 1000."""
    steps = np.arange(first_step, first_step + num_steps)
    given: dict[str, Any] = {
        "episode_id": f"e{number}",
        "first_step": first_step,
        "observations": np.stack([np.full(num_steps, number), steps], 1).astype(np.float32),
        "actions": (number + steps) % 5,
        "rewards": number + steps / 1000,
        "final_observation": np.array([number, first_step + num_steps], np.float32),
    }
    return Episode(**(given | fields))


def _check_told(batch: Any, *, n_step: int = 1) -> None:
    """Every row is of one episode and step, and so is what follows it."""
    number, step = batch.observations[:, 0], batch.observations[:, 1]
    assert (batch.actions == (number + step).astype(int) % 5).all()
    if n_step == 1:
        expected = number.astype(np.float64) + step.astype(np.float64) / 1000
        assert np.abs(batch.rewards - expected).max() < 1e-3 * max(1.0, number.max() / 1000)
    assert (batch.next_observations[:, 0] == number).all()
    ahead = batch.next_observations[:, 1] - step
    assert ((ahead >= 1) & (ahead <= n_step)).all()


@pytest.fixture
def make_told() -> Callable[..., Episode]:
    return _make_told


@pytest.fixture
def check_told() -> Callable[..., None]:
    return _check_told


@pytest.fixture
def dataset(lake: Lake) -> Dataset:
    made = lake.dataset("d")
    made.create(Box((2,)), Discrete(5))
    return made
