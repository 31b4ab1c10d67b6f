"""What the store's tests share: a lake in a temporary folder, and episodes of known numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episode import Episode
from replaylake.datastore.lake import Lake, open_lake
from replaylake.datastore.policies.manifest import GRAPH, LEARNER, MANIFEST, manifest_bytes
from replaylake.datastore.policies.policy import PolicySpec
from replaylake.datastore.spaces import Box, Discrete
from replaylake.datastore.storage import LocalStorage


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "store")


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


def _make_episode(name: str = "e", num_steps: int = 3, **fields: Any) -> Episode:
    """Step t of an episode has observation [t, -t], action t % 2 and reward t + 1."""
    first = fields.get("first_step", 0)
    steps = np.arange(first, first + num_steps)
    given = {
        "episode_id": name,
        "observations": np.stack([steps, -steps], axis=1).astype(np.float32),
        "actions": steps % 2,
        "rewards": steps + 1.0,
        "final_observation": np.array([first + num_steps, -first - num_steps], np.float32),
    }
    return Episode(**(given | fields))


@pytest.fixture
def make_episode() -> Callable[..., Episode]:
    return _make_episode


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A policy package that passes every check but loading: its graph is no ONNX."""
    folder = tmp_path / "package"
    folder.mkdir()
    files = {GRAPH: b"graph", LEARNER: b"weights"}
    spec = PolicySpec(Box((2,)), Discrete(2), "categorical")
    for name, data in {**files, MANIFEST: manifest_bytes(spec, {"seed": 7}, files)}.items():
        (folder / name).write_bytes(data)
    return folder
