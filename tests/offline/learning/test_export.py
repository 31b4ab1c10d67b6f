import warnings

import numpy as np
import pytest
import torch
from torch import nn

from replaylake.datastore.episodes.spaces import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Tuple,
)
from replaylake.datastore.errors import PackageInvalidError
from replaylake.datastore.lake.policies.package import GraphSession
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.offline.learning.algorithm import PolicyModule
from replaylake.offline.learning.export import export_onnx
from replaylake.offline.networks.actors import CategoricalNetwork, GaussianNetwork
from replaylake.offline.networks.graph import PolicyGraph, run_graph


def graph_for(observation_space):
    spec = PolicySpec(observation_space, Discrete(3), "categorical")
    return PolicyGraph(PolicyModule(CategoricalNetwork(observation_space, 3, (8,)), spec), spec)


@pytest.mark.parametrize("num", [1, 2, 7, 300])
def test_the_leading_dim_is_free(num):
    graph = graph_for(Box((4,)))
    session = GraphSession(export_onnx(graph), graph.spec)
    inputs = {"observations": np.random.default_rng(0).standard_normal((num, 4), np.float32)}
    found, expected = session.run(inputs), run_graph(graph, inputs)
    assert found["logits"].shape == (num, 3)
    np.testing.assert_allclose(found["logits"], expected["logits"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "space",
    [
        Box((2, 3), "float64"),
        Box((), "float32"),
        Box((3,), "int16", 0, 5),
        Discrete(5, 2),
        MultiDiscrete((2, 3)),
        MultiBinary(3),
        Dict({"a": Box((2,)), "b": Tuple((Discrete(2), Box((1,), "uint8", 0, 9)))}),
    ],
)
def test_every_space_that_trains_exports(space):
    export_onnx(graph_for(space))


def test_two_outputs_keep_their_order():
    space = Box((4,))
    spec = PolicySpec(space, Box((2,)), "gaussian")
    graph = PolicyGraph(PolicyModule(GaussianNetwork(space, 2, (8,)), spec), spec)
    session = GraphSession(export_onnx(graph), spec)
    inputs = {"observations": np.ones((1, 4), np.float32)}
    for name, array in run_graph(graph, inputs).items():
        np.testing.assert_allclose(session.run(inputs)[name], array, rtol=1e-5, atol=1e-6)


def test_it_warns_of_nothing_and_leaves_the_learners_module_in_training():
    graph = graph_for(Box((4,)))
    graph.module.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export_onnx(graph)
    assert graph.module.training


def test_a_parameter_that_is_not_finite_is_found():
    graph = graph_for(Box((4,)))
    with torch.no_grad():
        next(graph.module.parameters()).fill_(float("nan"))
    with pytest.raises(PackageInvalidError, match=r"logits.*differs"):
        export_onnx(graph)


class Drifting(nn.Module):
    """Gives other outputs at every call, so that no export can equal it."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, observations):
        self.calls += 1
        return (observations[:, :3] + self.calls,)


def test_an_export_that_differs_is_refused():
    spec = PolicySpec(Box((4,)), Discrete(3), "categorical")
    with pytest.raises(PackageInvalidError, match=r"logits \[64, 3\] differs"):
        export_onnx(PolicyGraph(Drifting(), spec))


class Complex(nn.Module):
    """Uses an operation that ONNX does not have."""

    def forward(self, observations):
        return (torch.linalg.eigvals(observations[:, :4].reshape(-1, 2, 2)).real,)


def test_an_operation_that_does_not_export_is_named():
    spec = PolicySpec(Box((4,)), Discrete(2), "categorical")
    with pytest.raises(PackageInvalidError, match="cannot export"):
        export_onnx(PolicyGraph(Complex(), spec))
