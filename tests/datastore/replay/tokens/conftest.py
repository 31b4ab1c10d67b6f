"""What the tests of token sequences share: trees of random generations, and their rows in SQL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.lake.lake import Lake

Make = Callable[..., Episode]


def _random_extras(rng: np.random.Generator, num: int, group: str | None) -> dict[str, Any]:
    acted = [rng.integers(0, 6) for _ in range(num)]
    known = [bool(rng.random() < 0.8) for _ in range(num)]
    runs: list[Any] = []
    for count in acted:
        run = [{"start": 0, "version": int(rng.integers(9))}]
        if count > 2:
            run.append({"start": 2, "version": int(rng.integers(9))})
        runs.append(run if count and rng.random() < 0.5 else None)
    masks = [[bool(rng.random() < 0.7) for _ in range(count)] for count in acted]
    return {
        "observation_tokens": [rng.integers(0, 99, rng.integers(0, 5)).tolist() for _ in acted],
        "action_tokens": [rng.integers(100, 199, count).tolist() for count in acted],
        "action_log_probs": [
            (-rng.random(count)).astype(np.float32).tolist() if is_known else None
            for count, is_known in zip(acted, known, strict=True)
        ],
        "action_loss_mask": [m if rng.random() < 0.3 else None for m in masks],
        "action_versions": runs,
        "action_entropies": pa.array(
            [rng.random(count).tolist() if rng.random() < 0.6 else None for count in acted],
            pa.list_(pa.float64()),
        ),
        "is_trainable": [bool(rng.random() < 0.9) for _ in acted],
        "final_observation_tokens": [None] * (num - 1)
        + [rng.integers(0, 99, 3).tolist() if rng.random() < 0.4 else None],
        "group_id": [group] * num,
    }


def make_random_episodes(rng: np.random.Generator, make: Make, name: str) -> list[Episode]:
    """Return the episodes of a dialogue: plain, or with forks and rewritten contexts."""
    group = f"g{int(rng.integers(4))}" if rng.random() < 0.9 else None
    versions = int(rng.integers(1, 9)) if rng.random() < 0.8 else None

    def episode(agent: str, num: int, **extras: Any) -> Episode:
        return make(
            name,
            num,
            agent_id=agent,
            policy_versions=None if versions is None else [versions + t for t in range(num)],
            rewards=rng.random(num),
            extras=_random_extras(rng, num, group) | extras,
        )

    num = int(rng.integers(1, 5))
    kind = rng.integers(6)
    if kind < 3:
        return [episode("", num)]
    if kind == 3:
        is_next = [None, *(bool(rng.random() < 0.6) for _ in range(num - 1))]
        return [episode("x", num, is_continuation=is_next)]
    fork = {
        "parent_agent_id": ["x", *[None] * (num - 1)],
        "parent_step": [int(rng.integers(2)), *[None] * (num - 1)],
    }
    return [episode("x", 2), episode("x~1", num, **fork)]


@pytest.fixture
def fill_lake(lake: Lake, make_dialogue: Make) -> Callable[[int], Lake]:
    """Append 30 dialogues of a seed to the dataset `talks`, in three commits."""

    def fill(seed: int) -> Lake:
        rng = np.random.default_rng(seed)
        for commit in range(3):
            lake.dataset("talks").append(
                [
                    episode
                    for number in range(10)
                    for episode in make_random_episodes(rng, make_dialogue, f"e{commit}-{number}")
                ]
            )
        return lake

    return fill
