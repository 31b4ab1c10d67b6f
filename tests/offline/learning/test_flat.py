import torch
from torch import nn

from replaylake.offline.learning.flat import FlatGroup, flatten_parameters
from replaylake.offline.networks.mlp import MLP


class Mixed(nn.Module):
    """A perceptron, whose gradients go to a sink, beside layers that autograd differentiates."""

    def __init__(self):
        super().__init__()
        self.before = nn.Linear(3, 4)
        self.body = MLP([4, 8, 2])
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, features):
        return self.body(self.before(features).tanh())


def test_gradients_lie_side_by_side_in_the_order_of_the_parameters():
    torch.manual_seed(0)
    module = Mixed()
    features = torch.randn(6, 3)
    expected = torch.autograd.grad(
        module(features).square().sum(), list(module.parameters()), allow_unused=True
    )
    expected = [
        torch.zeros_like(p) if g is None else g
        for p, g in zip(module.parameters(), expected, strict=True)
    ]
    groups, memory = flatten_parameters({"first": nn.Linear(2, 2), "mixed": module})
    memory.fill_(9.0)
    groups["mixed"].differentiate(module(features).square().sum(), retain_graph=False)
    assert (memory[:6] == 9).all()
    torch.testing.assert_close(memory[6:], torch.cat([g.reshape(-1) for g in expected]))
    # What a loss does not depend on has a gradient of 0, not that of the loss before.
    groups["mixed"].differentiate(module.unused.sum(), retain_graph=False)
    torch.testing.assert_close(memory[6:].sum(), torch.tensor(5.0))


def test_what_changes_the_flat_parameters_changes_the_module():
    module = MLP([2, 3])
    group = FlatGroup(module)
    group.flat.data.fill_(2.0)
    assert (module.layers[0].weight == 2).all()
    # What is saved is the module's own.
    assert list(module.state_dict()) == ["layers.0.weight", "layers.0.bias"]
    module.load_state_dict({"layers.0.weight": torch.zeros(3, 2), "layers.0.bias": torch.ones(3)})
    assert sorted(set(group.flat.tolist())) == [0.0, 1.0]
