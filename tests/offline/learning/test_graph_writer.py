import numpy as np
import pytest
import torch
from torch import nn

from replaylake.datastore.episodes.spaces import Box, Discrete, MultiDiscrete
from replaylake.datastore.errors import PackageInvalidError
from replaylake.datastore.lake.policies.package import graph_policy
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.offline.algorithms.builtin import BUILTIN
from replaylake.offline.algorithms.catalog import make_learner
from replaylake.offline.dataset_statistics import DatasetStatistics, Moments
from replaylake.offline.learning.algorithm import PolicyModule
from replaylake.offline.learning.export import export_onnx, random_inputs
from replaylake.offline.learning.graph_writer import GraphWriter
from replaylake.offline.networks.actors import CategoricalNetwork
from replaylake.offline.networks.graph import PolicyGraph, TorchPolicy, run_graph

OBSERVATIONS = Box((4,))
ACTIONS = {
    "discrete": Discrete(3),
    "continuous": Box((2,), "float32", -2, 2),
    "multi_discrete": MultiDiscrete((2, 3)),
}
FACTS = DatasetStatistics(
    observations={"": Moments(np.full(4, 0.5, np.float32), np.full(4, 2.0, np.float32))}
)


def check_writes(writer, graph):
    """What is written acts as the graph does now, on 64 observations."""
    inputs = random_inputs(graph, 64)
    found = graph_policy(writer.onnx(), graph.spec)._run(inputs)
    for name, expected in run_graph(graph, inputs).items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-5)


def moved(graph):
    """Move all weights, as a learner's updates would."""
    with torch.no_grad():
        for parameter in graph.module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))


@pytest.mark.parametrize("row", BUILTIN, ids=lambda row: f"{row.name}-{row.actions}")
def test_every_algorithms_graph_follows_the_weights(row):
    learner = make_learner(
        row.name, OBSERVATIONS, ACTIONS[row.actions], options={}, seed=0, facts=FACTS
    )
    writer = GraphWriter(learner.policy())
    assert writer.is_fast
    check_writes(writer, learner.policy())
    moved(learner.policy())
    check_writes(writer, learner.policy())


@pytest.mark.parametrize("kind", ["discrete", "continuous"])
def test_after_updates_it_gives_the_learners_actions(kind, batch):
    action_space = ACTIONS[kind]
    name = "dqn" if kind == "discrete" else "sac"
    learner = make_learner(name, OBSERVATIONS, action_space, options={}, seed=0)
    writer = GraphWriter(learner.policy())
    observations = np.random.default_rng(1).standard_normal((256, 4)).astype(np.float32)
    before = TorchPolicy(learner.policy()).act(observations).actions
    for seed in range(5):
        learner.update(batch(kind, seed=seed))
    written = graph_policy(writer.onnx(), learner.policy().spec).act(observations).actions
    expected = TorchPolicy(learner.policy()).act(observations).actions
    np.testing.assert_allclose(written, expected, atol=1e-5)
    assert not np.array_equal(expected, before)


def graph_of(module, num_actions=3):
    spec = PolicySpec(OBSERVATIONS, Discrete(num_actions), "q_values")
    return PolicyGraph(module, spec)


class Layer(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.linear = make()

    def forward(self, observations):
        return (self.linear(observations),)


def zeros():
    """A layer whose weights are all alike, and like those of a second one."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    for parameter in (*first.parameters(), *second.parameters()):
        nn.init.zeros_(parameter)
    return nn.Sequential(first, nn.Tanh(), second)


def tied():
    first = nn.Linear(4, 4)
    return nn.Sequential(first, nn.ReLU(), first)


@pytest.mark.parametrize("make", [zeros, tied])
def test_weights_that_are_alike_are_told_apart(make):
    graph = graph_of(Layer(make), 4)
    writer = GraphWriter(graph)
    assert writer.is_fast
    moved(graph)
    check_writes(writer, graph)


class Unused(Layer):
    """Has weights that its outputs do not depend on."""

    def __init__(self):
        super().__init__(lambda: nn.Linear(4, 3))
        self.unused = nn.Linear(5, 5)


def test_weights_that_are_not_used_are_left_out():
    graph = graph_of(Unused())
    writer = GraphWriter(graph)
    assert writer.is_fast
    moved(graph)
    check_writes(writer, graph)


class Normalized(nn.Module):
    """Scales by a buffer that has to stay above 0."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(1, 2, 3)
        self.normalization = nn.BatchNorm1d(2)

    def forward(self, observations):
        return (self.normalization(self.convolution(observations[:, None])).flatten(1),)


def test_buffers_are_written_too():
    graph = graph_of(Normalized(), 4)
    writer = GraphWriter(graph)
    assert writer.is_fast
    moved(graph)
    graph.module.normalization.running_var.mul_(3)
    check_writes(writer, graph)


class Folded(nn.Module):
    """Scales by a number that is computed from a weight, which tracing takes for a constant."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, observations):
        return (self.linear(observations) * self.scale.exp().item(),)


@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python number")
def test_a_graph_with_a_weight_that_became_a_constant_is_exported_each_time():
    graph = graph_of(Folded())
    writer = GraphWriter(graph)
    assert not writer.is_fast
    moved(graph)
    check_writes(writer, graph)


def test_what_cannot_be_exported_says_so():
    class Complex(nn.Module):
        def forward(self, observations):
            return (torch.linalg.eigvals(observations.reshape(-1, 2, 2)).real,)

    writer = GraphWriter(graph_of(Complex(), 2))
    with pytest.raises(PackageInvalidError, match="cannot export"):
        writer.onnx()


def test_the_file_is_as_large_as_an_exported_one_and_the_graph_is_left_as_it_was():
    network = CategoricalNetwork(OBSERVATIONS, 3, (16, 16), FACTS)
    spec = PolicySpec(OBSERVATIONS, Discrete(3), "q_values")
    graph = PolicyGraph(PolicyModule(network, spec), spec)
    graph.module.train()
    before = [tensor.clone() for tensor in graph.module.state_dict().values()]
    written, exported = GraphWriter(graph).onnx(), export_onnx(graph)
    assert abs(len(written) - len(exported)) < 1000
    assert graph.module.training
    for tensor, was in zip(graph.module.state_dict().values(), before, strict=True):
        assert torch.equal(tensor, was)
