"""Frames of every layout, and what convolutions make of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from replaylake.datastore.episodes.spaces import Box, Dict, Discrete, Space
from replaylake.datastore.errors import SpaceUnsupportedError
from replaylake.datastore.lake.policies.graph_policy import graph_inputs
from replaylake.datastore.lake.policies.package import GraphSession
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.offline.dataset_statistics import DatasetStatistics, Moments
from replaylake.offline.learning.algorithm import PolicyModule
from replaylake.offline.learning.export import export_onnx
from replaylake.offline.networks.actors import CategoricalNetwork
from replaylake.offline.networks.critics import Critics
from replaylake.offline.networks.encoders import FrameEncoder, Frames
from replaylake.offline.networks.features import ObservationFeatures
from replaylake.offline.networks.graph import PolicyGraph, run_graph


def image(*shape: int) -> Box:
    return Box(shape, "uint8", 0, 255)


# The shape as channels come first; and one of the channels, with where its row 3 and column 4 are.
LAYOUTS: dict[tuple[int, ...], tuple[tuple[int, ...], int, tuple[int, ...]]] = {
    (7, 8): ((1, 7, 8), 0, (3, 4)),
    (3, 7, 8): ((3, 7, 8), 2, (2, 3, 4)),
    (7, 8, 3): ((3, 7, 8), 2, (3, 4, 2)),
    (4, 84, 84): ((4, 84, 84), 2, (2, 3, 4)),
    (84, 84, 4): ((4, 84, 84), 2, (3, 4, 2)),
    (10, 10, 7): ((7, 10, 10), 5, (3, 4, 5)),
    # The second frame's channel 2 is the sixth of all.
    (2, 7, 8, 3): ((6, 7, 8), 5, (1, 3, 4, 2)),
    (2, 3, 7, 8): ((6, 7, 8), 5, (1, 2, 3, 4)),
}


@pytest.mark.parametrize("shape", LAYOUTS, ids=str)
def test_channels_come_first_and_numbers_are_shares_of_255(shape: tuple[int, ...]) -> None:
    expected, channel, place = LAYOUTS[shape]
    frames = Frames(image(*shape))
    assert frames.shape == expected
    x = torch.randint(0, 256, (5, *shape), dtype=torch.uint8)
    found = frames(x)
    assert found.shape == (5, *expected)
    torch.testing.assert_close(found[:, channel, 3, 4], x[(slice(None), *place)].float() / 255)


@pytest.mark.parametrize(
    "space", [image(2, 2, 2, 2, 2), image(4, 0), Box((8, 8)), image(8)], ids=str
)
def test_what_is_no_frame_is_refused(space: Box) -> None:
    with pytest.raises(
        SpaceUnsupportedError, match=r"observation\.camera: found Box .* frames of 2 or"
    ):
        Frames(space, "observation.camera")


@pytest.mark.parametrize(
    ("shape", "num_features", "num_flat"),
    [
        # (84 - 8) / 4 + 1 = 20, (20 - 4) / 2 + 1 = 9, 9 - 2 = 7.
        ((84, 84), 512, 64 * 7 * 7),
        ((4, 84, 84), 512, 64 * 7 * 7),
        ((36, 36), 512, 64),
        # Halved twice: 18, 9; once: 10, 5; 1 stays 1.
        ((35, 35), 256, 64 * 9 * 9),
        ((10, 10, 4), 256, 64 * 5 * 5),
        ((1, 3), 256, 64 * 1 * 2),
    ],
)
def test_sizes(shape: tuple[int, ...], num_features: int, num_flat: int) -> None:
    encoder = FrameEncoder(image(*shape))
    assert encoder.num_features == num_features
    assert encoder._linear.in_features == num_flat
    features = encoder(torch.randint(0, 256, (2, *shape), dtype=torch.uint8))
    assert features.shape == (2, num_features)
    assert (features >= 0).all()


def test_images_and_vectors_are_joined_and_vectors_alone_are_normalized() -> None:
    space = Dict({"arm": Box((2,)), "camera": image(12, 12), "gear": Discrete(3)})
    moments = {"arm": Moments(np.float32([1, 2]), np.float32([2, 4]))}
    features = ObservationFeatures(space, moments)
    assert features.num_features == 2 + 256 + 3
    observations = {
        "arm": torch.tensor([[3.0, 6.0]]),
        "camera": torch.zeros(1, 12, 12, dtype=torch.uint8),
        "gear": torch.tensor([1]),
    }
    found = features(observations)
    assert found.shape == (1, 261)
    assert found[0, :2].tolist() == [1, 1]
    assert found[0, -3:].tolist() == [0, 1, 0]


SPACES: list[Space] = [
    image(84, 84),
    image(9, 9, 2),
    image(3, 12, 12, 3),
    Dict({"camera": image(40, 36, 3), "arm": Box((2,)), "map": image(5, 5)}),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_onnx_takes_bytes(space: Space) -> None:
    spec = PolicySpec(space, Discrete(3), "categorical")
    network = CategoricalNetwork(space, 3, (16,), DatasetStatistics())
    graph = PolicyGraph(PolicyModule(network, spec), spec)
    onnx = export_onnx(graph)
    inputs = graph_inputs(spec, _random(space, 7))
    found = GraphSession(onnx, spec).run(inputs)["logits"]
    np.testing.assert_allclose(found, run_graph(graph, inputs)["logits"], rtol=1e-4, atol=1e-5)
    images = [a for name, a in inputs.items() if a.ndim > 2]
    assert all(array.dtype == np.uint8 for array in images)


def _random(space: Space, num: int) -> Any:
    rng = np.random.default_rng(0)
    if isinstance(space, Dict):
        return {key: _random(sub, num) for key, sub in space.spaces.items()}
    assert isinstance(space, Box)
    if space.is_image:
        return rng.integers(0, 256, (num, *space.shape), np.uint8)
    return rng.standard_normal((num, *space.shape)).astype(np.float32)


def test_frozen_critics_move_actions_alone() -> None:
    space = image(12, 12)
    critics = Critics(space, 2, (8,))
    observations = torch.randint(0, 256, (4, 12, 12), dtype=torch.uint8)
    actions = torch.randn(4, 2, requires_grad=True)
    frozen = critics.forward_frozen(observations, actions)
    torch.testing.assert_close(frozen, critics(observations, actions))
    frozen.sum().backward()
    assert actions.grad is not None
    assert actions.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in critics.parameters())
    critics(observations, actions).sum().backward()
    encoder = critics.features._encoders["0"]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in encoder.parameters())
