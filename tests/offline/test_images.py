"""Frames, alone and beside vectors: every algorithm of ours learns from them and exports."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.spaces import Array, Box, Dict, Discrete, MultiDiscrete, Space
from replaylake.datastore.lake.policies.graph_policy import graph_inputs
from replaylake.datastore.lake.policies.package import GraphSession
from replaylake.offline.algorithms.builtin import BUILTIN, BuiltinAlgorithm
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.learning.export import export_onnx
from replaylake.offline.learning.learner import GradientLearner
from replaylake.offline.networks.graph import run_graph

NUM = 8
OBSERVATIONS: dict[str, Space] = {
    "image": Box((12, 12), "uint8", 0, 255),
    "nature": Box((36, 36, 3), "uint8", 0, 255),
    "beside a vector": Dict({"camera": Box((2, 9, 9), "uint8", 0, 255), "arm": Box((3,))}),
}
ACTIONS: dict[str, Space] = {
    "discrete": Discrete(3),
    "continuous": Box((2,), "float32", -1, 1),
    "multi_discrete": MultiDiscrete((2, 3)),
}


def values(space: Space, rng: np.random.Generator) -> Any:
    if isinstance(space, Dict):
        return {key: values(sub, rng) for key, sub in space.spaces.items()}
    if isinstance(space, Discrete):
        return rng.integers(space.n, size=NUM)
    if isinstance(space, MultiDiscrete):
        return rng.integers(space.nvec, size=(NUM, len(space.nvec)))
    assert isinstance(space, Box)
    if space.is_image:
        return rng.integers(0, 256, (NUM, *space.shape), np.uint8)
    return rng.uniform(-1, 1, (NUM, *space.shape)).astype(np.float32)


def make_batch(observation_space: Space, action_space: Space) -> Batch[Array]:
    rng = np.random.default_rng(0)
    return Batch(
        observations=values(observation_space, rng),
        actions=values(action_space, rng),
        rewards=rng.random(NUM).astype(np.float32),
        discounts=np.full(NUM, 0.9, np.float32),
        next_observations=values(observation_space, rng),
        behavior_log_probs=np.full(NUM, -1, np.float32),
        weights=np.ones(NUM, np.float32),
        keys=np.arange(2 * NUM, dtype=np.uint64).reshape(NUM, 2),
        returns=rng.random(NUM).astype(np.float32),
        next_actions=values(action_space, rng),
    )


def as_sequences(batch: Batch[Array]) -> Batch[Array]:
    """The rows, taken for steps of two sequences."""

    def shaped(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shaped(sub) for key, sub in value.items()}
        return value if value is None else value.reshape(2, NUM // 2, *value.shape[1:])

    fields = {name: shaped(value) for name, value in vars(batch).items()}
    mask = np.ones((2, NUM // 2), np.bool_)
    return Batch(**{**fields, "weights": batch.weights[:2], "mask": mask})


# Which encoder it is depends on the observations alone: here all algorithms have the one of most
# parts, and one algorithm the others; the slow tests have every pair.
@pytest.mark.parametrize(
    ("row", "kind"),
    [
        pytest.param(
            row,
            kind,
            marks=[] if kind == "beside a vector" or row is BUILTIN[0] else [pytest.mark.slow],
            id=f"{row.name}-{row.actions}-{kind}",
        )
        for row in BUILTIN
        for kind in OBSERVATIONS
    ],
)
def test_every_algorithm_learns_from_frames(row: BuiltinAlgorithm, kind: str) -> None:
    observation_space, action_space = OBSERVATIONS[kind], ACTIONS[row.actions]
    config = row.config_class(hidden_sizes=(16,))
    algorithm = row.function(observation_space, action_space, config, DatasetStatistics())
    learner = GradientLearner(algorithm, seed=0)
    rows = make_batch(observation_space, action_space)
    batch = rows if learner.on_policy is None else as_sequences(rows)
    before = encoder_weights(learner)
    assert before
    for _ in range(2):
        metrics = learner.update(batch).metrics
        assert all(np.isfinite(float(value)) for value in metrics.values())
    after = encoder_weights(learner)
    # Each network has convolutions of its own, and each loss moves its network's.
    assert before.keys() == after.keys()
    moved = [not np.array_equal(before[name], after[name]) for name in before]
    assert all(moved), [name for name, is_moved in zip(before, moved, strict=True) if not is_moved]
    graph = learner.policy()
    onnx = export_onnx(graph)
    inputs = graph_inputs(graph.spec, rows.observations)
    found = GraphSession(onnx, graph.spec).run(inputs)
    for name, expected in run_graph(graph, inputs).items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-3, atol=1e-4)


def encoder_weights(learner: GradientLearner) -> dict[str, Array]:
    """The convolutions' weights of all networks, without those of target copies."""
    return {
        name: array.copy()
        for name, array in learner.state_dict().items()
        if "_convolutions" in name and "weight" in name and "target" not in name
    }
