"""No refusal of an algorithm recommends one that is refused in turn."""

import re

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete, MultiDiscrete
from replaylake.datastore.errors import ReplayLakeError
from replaylake.datastore.lake.lake import open_lake
from replaylake.offline.algorithms.catalog import algorithms, reference
from replaylake.offline.running.training.config import TrainConfig, TrainRequest
from replaylake.offline.running.training.data import open_data

_NAMES = re.compile(r": ([a-z0-9_:]+(?:, [a-z0-9_:]+)*)\.$|with ([a-z0-9_:]+(?:, [a-z0-9_:]+)*)\.$")
_SPACES = {
    "discrete": (Discrete(2), np.array([0, 1, 0, 1])),
    "continuous": (Box((1,), "float32", -1, 1), np.zeros((4, 1), np.float32)),
    "multi": (MultiDiscrete((2, 3)), np.array([[0, 1]] * 4)),
}
_FEATURES = {
    "plain": {},
    "prioritized": {"prioritized": True},
    "learners": {"learners": 2},
    "both": {"prioritized": True, "learners": 2},
}


def _advised(error: ReplayLakeError) -> list[str]:
    match = _NAMES.search(str(error))
    return [] if match is None else (match[1] or match[2]).split(", ")


@pytest.fixture
def lake(tmp_path):
    return open_lake(tmp_path / "lake", create=True)


# Only discrete actions have masks.
@pytest.mark.parametrize(
    ("actions", "what"),
    [
        *((actions, what) for actions in _SPACES for what in ("complete", "unknown rewards")),
        ("discrete", "masks"),
        ("discrete", "masks, unknown rewards"),
    ],
)
def test_offline(lake, actions, what):
    space, values = _SPACES[actions]
    has_masks = "masks" in what
    dataset = lake.dataset("d")
    dataset.create(
        Box((3,), "float32"),
        space,
        mask_size=2 if has_masks else None,
        rewards_optional="unknown" in what,
    )
    rewards = np.array([1.0, np.nan if "unknown" in what else 1.0, 1.0, 1.0])
    masks = {"action_masks": np.array([[True, True], [False, True]] * 2)} if has_masks else {}
    observations = np.zeros((4, 3), np.float32)
    dataset.append([Episode("a", observations, values, rewards, terminated=True, **masks)])

    def refusal(algorithm, features):
        config = TrainConfig(algorithm=algorithm, policy="p", batch_size=2, **features)
        try:
            open_data(lake, TrainRequest(("d@1",), config))
        except ReplayLakeError as error:
            return error
        return None

    advised = set()
    for features in _FEATURES.values():
        for info in algorithms():
            if (error := refusal(reference(info), features)) is not None:
                names = _advised(error)
                assert names or "No algorithm" in str(error) or info.kind == "bandit", error
                advised |= {(name, tuple(features.items())) for name in names}
    refused = {(n, f): str(e) for n, f in advised if (e := refusal(n, dict(f))) is not None}
    assert refused == {}
    if what == "complete":
        assert advised
