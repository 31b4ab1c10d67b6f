"""Files that scripts of CleanRL save: each network acts as in its script."""

import io
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import (
    ConfigInvalidError,
    SourceInvalidError,
    SpaceUnsupportedError,
)
from replaylake.datastore.lake.policies.package import graph_policy
from replaylake.offline.importing.cleanrl import convert_state_dict

_VECTOR, _ACTIONS = Box((4,), "float32"), Discrete(3)
_TORQUE = Box((2,), "float32", (-1.0, -2.0), (1.0, 6.0))


def _save(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _convert(value, observations=_VECTOR, actions=_ACTIONS, **options):
    conversion = convert_state_dict(_save(value), "dqn.pt", observations, actions, **options)
    return conversion, graph_policy(conversion.onnx, conversion.spec)


def _perceptron(activation, *sizes):
    torch.manual_seed(0)
    layers = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers[:-1])


def _name(prefix, module):
    return {f"{prefix}.{key}": value for key, value in module.state_dict().items()}


def _observations(*shape):
    return torch.from_numpy(np.random.default_rng(0).standard_normal((6, *shape))).float()


def test_dqn_and_c51_give_values():
    network, observations = _perceptron(nn.ReLU, 4, 8, 6, 3), _observations(4)
    conversion, policy = _convert(_name("network", network))
    assert conversion.algorithm == "cleanrl:dqn"
    found = policy.act(observations.numpy()).q_values
    np.testing.assert_allclose(found, network(observations).detach(), rtol=1e-5, atol=1e-6)

    atoms = torch.linspace(-5, 5, 7)
    network = _perceptron(nn.ReLU, 4, 8, 3 * 7)
    saved = {
        "model_weights": {"atoms": atoms, **_name("network", network)},
        "args": {"n_atoms": 7, "env_id": "CartPole-v1"},
    }
    conversion, policy = _convert(saved)
    assert conversion.algorithm == "cleanrl:c51"
    # As in the script: the mean of each action's distribution over the atoms.
    pmfs = torch.softmax(network(observations).view(6, 3, 7), dim=2)
    expected = (pmfs * atoms).sum(2).detach()
    np.testing.assert_allclose(
        policy.act(observations.numpy()).q_values, expected, rtol=1e-4, atol=1e-6
    )


def test_ppo_gives_logits_with_tanh_unless_stated_otherwise():
    observations = _observations(4)
    for kind, options in ((nn.Tanh, {}), (nn.ReLU, {"activation_name": "relu"})):
        actor = _perceptron(kind, 4, 5, 3)
        weights = {**_name("actor", actor), **_name("critic", _perceptron(kind, 4, 5, 1))}
        _, policy = _convert(weights, **options)
        expected = torch.softmax(actor(observations), 1).detach()
        found = policy.action_probs(observations.numpy(), deterministic=False)
        np.testing.assert_allclose(found, expected, atol=1e-6)
    with pytest.raises(ConfigInvalidError, match="found 'swish'"):
        _convert(weights, activation_name="swish")


def test_continuous_ppo_gives_a_gaussian():
    mean, log_std = _perceptron(nn.Tanh, 4, 5, 2), torch.tensor([[0.5, -1.0]])
    weights = {"actor_logstd": log_std, **_name("actor_mean", mean)}
    conversion, policy = _convert(weights, actions=Box((2,), "float32"))
    observations = _observations(4)
    outputs = policy._run({"observations": observations.numpy()})
    np.testing.assert_allclose(outputs["means"], mean(observations).detach(), atol=1e-6)
    np.testing.assert_array_equal(outputs["log_stds"], np.repeat(log_std.numpy(), 6, axis=0))
    assert any("NormalizeObservation" in note for note in conversion.not_carried)


def _actor(*heads):
    torch.manual_seed(0)
    layers = {"fc1": nn.Linear(4, 5), "fc2": nn.Linear(5, 6)}
    layers |= {name: nn.Linear(6, 2) for name in heads}
    weights = {"action_scale": torch.tensor([1.0, 4.0]), "action_bias": torch.tensor([0.0, 2.0])}
    for name, layer in layers.items():
        weights |= _name(name, layer)
    hidden = torch.relu(layers["fc2"](torch.relu(layers["fc1"](_observations(4)))))
    return weights, [layers[name](hidden).detach() for name in heads]


def test_td3_scales_its_actions_to_the_bounds_in_its_file():
    weights, (mu,) = _actor("fc_mu")
    critic = {"fc1.weight": torch.ones(2, 2)}
    expected = torch.tanh(mu) * weights["action_scale"] + weights["action_bias"]
    for space in (_TORQUE, Box((2,), "float32")):
        _, policy = _convert((weights, critic), actions=space)
        found = policy.act(_observations(4).numpy()).actions
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(SpaceUnsupportedError, match=r"bounds \[-1, 1\] of element 1"):
        _convert((weights, critic), actions=Box((2,), "float32", -1, 1))


def test_bounds_of_other_lengths_are_refused():
    weights, _ = _actor("fc_mu")
    weights["action_bias"] = torch.zeros(3)
    with pytest.raises(SourceInvalidError, match="action_scale of 2 numbers and action_bias of 3"):
        _convert(weights, actions=_TORQUE)


def test_tensors_that_do_not_fit_each_other_are_refused():
    mean = _perceptron(nn.Tanh, 4, 5, 2)
    weights = {"actor_logstd": torch.zeros(1, 3), **_name("actor_mean", mean)}
    with pytest.raises(SourceInvalidError, match="do not fit each other"):
        _convert(weights, actions=Box((2,), "float32"))
    convolutions = {
        f"network.{number}.weight": torch.ones(channels, 4, size, size)
        for number, channels, size in ((0, 4, 8), (2, 4, 4), (4, 4, 3))
    }
    images = Box((4, 36, 36), "uint8", 0, 255)
    with pytest.raises(SourceInvalidError, match="before 0 linear layers"):
        _convert({**convolutions, "network.9.weight": torch.ones(3, 5)}, images)


def test_sac_maps_its_log_std_by_tanh():
    weights, (mean, raw) = _actor("fc_mean", "fc_logstd")
    _, policy = _convert(weights, actions=_TORQUE)
    outputs = policy._run({"observations": _observations(4).numpy()})
    np.testing.assert_allclose(outputs["means"], mean, atol=1e-6)
    np.testing.assert_allclose(outputs["log_stds"], -5 + 3.5 * (torch.tanh(raw) + 1), atol=1e-5)


@pytest.mark.parametrize("is_ppo", [True, False])
def test_atari_networks_take_stacked_frames(is_ppo):
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(4, 4, 8, 4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 4, 2),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4, 5),
        nn.ReLU(),
        nn.Linear(5, 3),
    )
    weights = _name("network", network)
    if is_ppo:
        weights = {name.replace("network.9", "actor"): tensor for name, tensor in weights.items()}
    frames = np.random.default_rng(0).integers(0, 256, (3, 4, 36, 36)).astype(np.uint8)
    expected = network(torch.from_numpy(frames).float() / 255).detach().numpy()
    _, policy = _convert(weights, Box((4, 36, 36), "uint8", 0, 255))
    probs = policy.action_probs(frames, deterministic=False)
    exps = np.exp(expected)
    np.testing.assert_allclose(probs, exps / exps.sum(axis=1, keepdims=True), atol=1e-5)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"encoder.weight": torch.ones(2, 2)}, "expected those of a script of CleanRL"),
        ({"lstm.weight_ih_l0": torch.ones(2, 2)}, "recurrent network"),
        ({"actor.0.weight": torch.ones(3, 4), "norm.weight": torch.ones(3)}, "tensors norm"),
        ({"network.0.weight": torch.full((3, 4), torch.inf)}, "not finite"),
        ({"actor_mean.0.weight": torch.ones(2, 4)}, "found no tensor 'actor_logstd'"),
        ((), "expected a state_dict"),
        ([1, 2], "expected a state_dict"),
        ({"network.0.weight": 3}, "expected a dense tensor"),
        ({"network.0.weight": torch.ones(3, 4, device="meta")}, "float32 on meta, expected real"),
        ({"network.0.weight": torch.ones(3, 4, dtype=torch.complex64)}, "complex64 on cpu"),
        ({"network.0.weight": torch.ones(3, 4), "atoms": torch.tensor(1.0)}, r"found atoms \[\]"),
    ],
)
def test_other_files_are_refused(value, reason):
    actions = Box((2,), "float32") if "actor_mean" in str(value) else _ACTIONS
    with pytest.raises(SourceInvalidError, match=reason):
        _convert(value, actions=actions)
