import numpy as np
import pytest
import torch
from torch import nn

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import ConfigInvalidError, EpisodeInvalidError
from replaylake.datastore.lake.policies.package import graph_policy
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.offline.learning.export import export_onnx
from replaylake.offline.learning.flat import FlatGroup
from replaylake.offline.learning.graph_writer import GraphWriter
from replaylake.offline.networks.graph import PolicyGraph, TorchPolicy
from replaylake.offline.networks.recurrent import GRUCore, LSTMCore, make_core

each_kind = pytest.mark.parametrize("kind", ["gru", "lstm"])


class Remembering(nn.Module):
    """Logits of a core over the observations."""

    def __init__(self, kind):
        super().__init__()
        self.core = make_core(kind, 3, 5)
        self.head = nn.Linear(5, 2)

    def forward(self, observations, state):
        outputs, state = self.core.step(observations, state)
        return self.head(outputs), state


def graph_of(kind):
    module = Remembering(kind)
    spec = PolicySpec(Box((3,)), Discrete(2), "categorical", state_size=module.core.state_size)
    return PolicyGraph(module, spec)


def test_a_gru_of_one_unit_by_hand():
    core = GRUCore(1, 1)
    with torch.no_grad():
        for parameter in core.parameters():
            parameter.fill_(0)
        # Of the gates reset, update and new: update is a half, new = tanh(x + 0.5 * h).
        core._layer.weight_ih_l0[2] = 1
        core._layer.weight_hh_l0[2] = 1
    outputs, state = core.step(torch.tensor([[0.3]]), torch.tensor([[0.8]]))
    expected = 0.5 * np.tanh(0.3 + 0.5 * 0.8) + 0.5 * 0.8
    assert outputs.item() == pytest.approx(expected)
    assert state.item() == pytest.approx(expected)


def test_an_lstm_of_one_unit_by_hand():
    core = LSTMCore(1, 1)
    with torch.no_grad():
        for parameter in core.parameters():
            parameter.fill_(0)
        # Of the gates enter, forget, new and output: the first two and the last are a half.
        core._layer.weight_ih_l0[2] = 1
    outputs, state = core.step(torch.tensor([[0.3]]), torch.tensor([[0.8, 0.4]]))
    cell = 0.5 * 0.4 + 0.5 * np.tanh(0.3)
    assert outputs.item() == pytest.approx(0.5 * np.tanh(cell))
    np.testing.assert_allclose(state.detach(), [[0.5 * np.tanh(cell), cell]], rtol=1e-6)


@each_kind
def test_steps_one_by_one_are_the_sequence(kind):
    torch.manual_seed(0)
    core = make_core(kind, 3, 4)
    features, state = torch.randn(6, 7, 3), torch.rand(6, core.state_size)
    outputs, after = core(features, state)
    assert outputs.shape == (6, 7, core.num_outputs)
    for t in range(7):
        stepped, state = core.step(features[:, t], state)
        torch.testing.assert_close(stepped, outputs[:, t])
    torch.testing.assert_close(state, after)


@each_kind
def test_a_sequence_that_begins_an_episode_begins_at_zero(kind):
    torch.manual_seed(0)
    core = make_core(kind, 3, 4)
    features, state = torch.randn(2, 5, 3), torch.rand(2, core.state_size)
    starts = torch.zeros(2, 5, dtype=torch.bool)
    starts[1, 0] = True
    outputs, _ = core(features, state, starts)
    torch.testing.assert_close(outputs[0], core(features, state)[0][0])
    torch.testing.assert_close(outputs[1], core(features, torch.zeros_like(state))[0][1])


@each_kind
def test_what_comes_after_changes_nothing_before(kind):
    core = make_core(kind, 3, 4)
    features, state = torch.randn(2, 5, 3), torch.zeros(2, core.state_size)
    outputs = core(features, state)[0][:, :3]
    features[:, 3:] = 9.0
    torch.testing.assert_close(core(features, state)[0][:, :3], outputs)


@each_kind
def test_its_gradients_flow_through_flat_weights(kind):
    core = make_core(kind, 3, 4)
    expected = [p.detach().clone() for p in core.parameters()]
    group = FlatGroup(core, torch.zeros(sum(p.numel() for p in core.parameters())))
    for found, before in zip(core.parameters(), expected, strict=True):
        torch.testing.assert_close(found.detach(), before)
    features, state = torch.randn(2, 5, 3), torch.zeros(2, core.state_size)
    before = core(features, state)[0].detach()
    group.differentiate(core(features, state)[0].sum(), retain_graph=False)
    assert torch.isfinite(group.gradients).all()
    assert (group.gradients != 0).float().mean() > 0.5
    with torch.no_grad():
        group.flat.add_(group.gradients, alpha=-0.1)
    assert not torch.equal(core(features, state)[0], before)


@each_kind
@pytest.mark.parametrize("write", [export_onnx, lambda graph: GraphWriter(graph).onnx()])
def test_exported_it_acts_through_an_episode_as_torch_does(kind, write, assert_chosen_alike):
    torch.manual_seed(0)
    graph = graph_of(kind)
    ours, theirs = graph_policy(write(graph), graph.spec), TorchPolicy(graph)
    rng = np.random.default_rng(0)
    state, other = ours.initial_state(4), theirs.initial_state(4)
    assert state.shape == (4, graph.spec.state_size)
    assert state.dtype == np.float32
    assert not state.any()
    for _ in range(6):
        observations = rng.standard_normal((4, 3)).astype(np.float32)
        probs = ours.action_probs(observations, state, deterministic=False)
        np.testing.assert_allclose(
            probs, theirs.action_probs(observations, other, deterministic=False), atol=1e-6
        )
        actions = np.array([0, 1, 0, 1])
        np.testing.assert_allclose(
            np.exp(ours.log_probs(observations, actions, state, deterministic=False)),
            probs[np.arange(4), actions],
        )
        act = ours.act(observations, state)
        expected = theirs.act(observations, other)
        assert_chosen_alike(act.actions, expected.actions, probs)
        np.testing.assert_allclose(act.state, expected.state, atol=1e-6)
        assert not np.array_equal(act.state, state)
        state, other = act.state, expected.state


def test_the_writer_puts_a_cores_weights_into_the_file_as_they_are():
    assert GraphWriter(graph_of("gru")).is_fast
    assert GraphWriter(graph_of("lstm")).is_fast


@pytest.mark.parametrize("state", [None, np.zeros((3, 5), np.float32), np.zeros((2, 5))])
def test_without_its_state_it_does_not_act(state):
    policy = TorchPolicy(graph_of("gru"))
    with pytest.raises(EpisodeInvalidError, match=r"found state .*expected float32 \[2, 5\]"):
        policy.act(np.zeros((2, 3), np.float32), state)


def test_another_kind_is_refused():
    with pytest.raises(ConfigInvalidError, match="found 'rnn', expected one of gru, lstm"):
        make_core("rnn", 1, 1)
