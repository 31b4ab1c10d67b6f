import pytest
import torch
import torch.nn.functional as F

from replaylake.offline.networks import mlp
from replaylake.offline.networks.mlp import MLP, EnsembleMLP

# Large enough for oneDNN in the middle, small enough for MKL at the ends; and MKL alone.
SIZES = ([23, 256, 256, 5], [3, 8, 1], [2, 4])


def by_autograd(features, parameters):
    layers = list(zip(parameters[::2], parameters[1::2], strict=True))
    for weight, bias in layers[:-1]:
        features = F.relu(F.linear(features, weight, bias))
    return F.linear(features, *layers[-1])


def ensemble_by_autograd(features, ensemble):
    parameters = ensemble.sink_parameters()
    return torch.stack([by_autograd(features, [p[e] for p in parameters]) for e in range(2)])


def has_a_slope(features, network):
    """Whether no unit that a row [N, in] passes is within rounding of ReLU's kink: bool [N].

    There the gradient is all or nothing by how a library orders a sum, which differs by processor.
    """
    layers = list(zip(network.sink_parameters()[::2], network.sink_parameters()[1::2], strict=True))
    num = getattr(network, "num", None)
    smooth = torch.ones(len(features), dtype=torch.bool)
    for member in range(num or 1):
        inputs = features.double()
        for whole in layers[:-1]:
            weight, bias = (
                p.detach().double()[member] if num else p.detach().double() for p in whole
            )
            before = F.linear(inputs, weight, bias)
            # A sum of K products in float32 is off by K / 2^24 of their sizes' sum at most.
            bound = (F.linear(inputs.abs(), weight.abs(), bias.abs())) * weight.shape[1] / 2**24
            smooth &= (before.abs() > bound).all(dim=1)
            inputs = F.relu(before)
    return smooth


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", ["one", "several"])
@pytest.mark.parametrize("rows", [256, 1, 1025])  # 1,025 pass in three parts, the last of one row
def test_values_and_gradients_are_those_of_autograd(sizes, kind, rows):
    torch.manual_seed(0)
    network = MLP(sizes) if kind == "one" else EnsembleMLP(2, sizes)
    features = torch.randn(rows, sizes[0], requires_grad=True)
    smooth = has_a_slope(features.detach(), network)
    assert smooth.float().mean() > 0.9
    found = network(features)
    if kind == "one":
        expected = by_autograd(features, network.sink_parameters())
    else:
        expected = ensemble_by_autograd(features, network)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    weight = torch.randn_like(found) * smooth[:, None]
    wanted = [features, *network.sink_parameters()]
    found = torch.autograd.grad((found * weight).sum(), wanted)
    expected = torch.autograd.grad((expected * weight).sum(), wanted)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max()))


@pytest.mark.parametrize("network", [MLP([3, 8, 2]), EnsembleMLP(2, [3, 8, 2])])
def test_an_open_sink_sums_up_what_one_loss_gives_its_weights(network):
    parameters = network.sink_parameters()
    network.sink.views = [torch.full_like(p, 7.0) for p in parameters]
    features = torch.randn(16, 3)

    def loss():
        return network(features).square().sum() + network(2 * features).sum()

    expected = torch.autograd.grad(loss(), parameters)
    network.sink.open()
    told = torch.autograd.grad(loss(), parameters, allow_unused=True)
    assert network.sink.close()
    assert told == (None,) * len(parameters)
    for ours, theirs in zip(network.sink.views, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("network", [MLP([3, 8, 2]), EnsembleMLP(2, [3, 8, 2])])
def test_frozen_gives_the_features_gradients_and_the_weights_none(network):
    features = torch.randn(16, 3, requires_grad=True)
    torch.testing.assert_close(network.forward_frozen(features), network(features))
    of_frozen = torch.autograd.grad(network.forward_frozen(features).sum(), features)
    torch.testing.assert_close(of_frozen, torch.autograd.grad(network(features).sum(), features))
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(network.forward_frozen(features).sum(), network.sink_parameters())


def test_a_second_derivative_is_refused():
    features = torch.randn(4, 3, requires_grad=True)
    (slope,) = torch.autograd.grad(MLP([3, 8, 1])(features).sum(), features, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(slope.sum(), features)


def test_members_start_apart_within_the_bound_of_a_linear_layer():
    torch.manual_seed(0)
    first, *_ = EnsembleMLP(2, [16, 64, 1]).weights
    assert first.abs().max() <= 0.25
    assert not torch.equal(first[0], first[1])


def test_gradients_of_all_members_at_once_take_nothing_from_what_was_there():
    torch.manual_seed(0)
    network = EnsembleMLP(3, [5, 16, 2])
    features = torch.randn(8, 5)
    views = network.sink.views = [torch.full_like(p, torch.nan) for p in network.sink_parameters()]
    network.sink.open()
    outputs = mlp._BatchedMLP.apply(network.sink, features, *network.sink_parameters())
    outputs.sum().backward()
    assert network.sink.close()
    expected = torch.autograd.grad(network(features).sum(), network.sink_parameters())
    torch.testing.assert_close(views, list(expected))


def test_products_of_all_members_at_once_are_those_of_each():
    # What a GPU computes, here on the CPU.
    torch.manual_seed(0)
    network = EnsembleMLP(3, [5, 16, 2])
    features = torch.randn(8, 5, requires_grad=True)
    wanted = [features, *network.sink_parameters()]
    one_by_one = network(features)
    together = mlp._BatchedMLP.apply(network.sink, features, *network.sink_parameters())
    torch.testing.assert_close(together, one_by_one)
    weight = torch.randn_like(together)
    for found, expected in zip(
        torch.autograd.grad((together * weight).sum(), wanted),
        torch.autograd.grad((one_by_one * weight).sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)
