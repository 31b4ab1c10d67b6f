"""CleanRL: convert the state_dict of a script's acting network.

A script is one file that is meant to be changed, and what it saves are tensors alone. Which network
it is, the tensors' names say; the activations are those of the scripts, unless others are stated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from replaylake.datastore.episodes.spaces import Discrete, Space, describe, num_elements
from replaylake.datastore.errors import SourceInvalidError, SpaceUnsupportedError
from replaylake.offline.importing.networks import (
    CategoricalOutputs,
    Conversion,
    DeterministicOutputs,
    FlatFeatures,
    GaussianOutputs,
    NatureFeatures,
    PolicyModule,
    QValueOutputs,
    StateDependentOutputs,
    bound_actions,
    build_perceptron,
    check_num_actions,
    choose_discrete_head,
    convert_graph,
    count_outputs,
    find_activation,
    make_graph,
)
from replaylake.offline.importing.weights import Layer, Weights, load_tensors
from replaylake.offline.networks.graph import PolicyGraph

# C51 saves the weights under this key, beside the arguments of its script.
_MODEL_WEIGHTS: Final = "model_weights"
_LOG_STD_RANGE: Final = (-5.0, 2.0)
_PIXELS: Final = 255.0
_NORMALIZED: Final = (
    "The file does not say whether observations were normalized, as PPO and RPO for continuous "
    "actions do (NormalizeObservation): state the statistics if they were."
)
_CLIPPED: Final = (
    "Sampled actions are truncated to the bounds, where CleanRL clips them: best actions are the "
    "same, sampled ones are distributed differently at the bounds."
)


def convert_state_dict(
    data: bytes,
    what: str,
    observations: Space,
    actions: Space,
    *,
    activation_name: str | None = None,
    num_frames: int = 1,
) -> Conversion:
    """Convert a file that a script of CleanRL saved, for the spaces of a dataset.

    observations: of stacks where num_frames is more than 1. activation_name: of the perceptron, one
    of `networks.ACTIVATIONS`; by default the script's own.
    Raises: SourceInvalidError if it is damaged or no network of the scripts; SpaceUnsupportedError
    if the spaces are not those of the policy; ConfigInvalidError.
    """
    weights = Weights(_choose_actor(load_tensors(data, what)), what)
    source = _Source(weights, what, observations, actions, activation_name, num_frames)
    if weights.has("lstm."):
        raise SourceInvalidError(
            f"{what}: found a recurrent network, which is not converted. Export it to ONNX, without"
            " its state."
        )
    for prefix, build in _BUILDERS:
        if weights.has(prefix):
            name, graph, notes = build(source)
            weights.ignore("critic.")
            weights.check_all_taken()
            facts = {"library": "cleanrl"}
            return convert_graph(graph, f"cleanrl:{name}", facts, notes, num_frames)
    raise SourceInvalidError(
        f"{what}: found the tensors {', '.join(list(weights)[:6])}, expected those of a script of "
        "CleanRL: dqn, c51, ppo, rpo, ddpg, td3 or sac. Export the policy to ONNX."
    )


def _choose_actor(tensors: Any) -> Any:
    """Return the state_dict of the acting network; TD3 and DDPG save it before their critics."""
    if isinstance(tensors, Mapping) and _MODEL_WEIGHTS in tensors:
        return tensors[_MODEL_WEIGHTS]
    if isinstance(tensors, tuple | list) and tensors:
        return tensors[0]
    return tensors


class _Source:
    """The parts that the scripts' networks share."""

    def __init__(
        self,
        weights: Weights,
        what: str,
        observations: Space,
        actions: Space,
        activation_name: str | None,
        num_frames: int,
    ) -> None:
        self.weights, self.what = weights, what
        self.observations, self.actions = observations, actions
        self._activation_name = activation_name
        self._num_frames = num_frames

    def find_activation(self, default: str) -> type[nn.Module]:
        """Return the stated activation function, else the script's."""
        return find_activation(self._activation_name or default)

    def build_flat_features(self) -> FlatFeatures:
        """Return observations as vectors."""
        return FlatFeatures(self.observations)

    def build_image_features(self, layers: Sequence[Layer]) -> NatureFeatures:
        """Return observations through the first three convolutions and linear layers of these."""
        convolutions = [layer for layer in layers if layer.is_convolution]
        linears = [layer for layer in layers if not layer.is_convolution]
        return NatureFeatures(self.observations, convolutions, linears, _PIXELS, self._num_frames)

    def build_graph(
        self, features: nn.Module, trunk: nn.Module, head: nn.Module, actions: Space, name: str
    ) -> PolicyGraph:
        """Return the whole graph."""
        return make_graph(PolicyModule(features, trunk, head), self.observations, actions, name)


_Built = tuple[str, PolicyGraph, Sequence[str]]


def _build_actor(source: _Source) -> _Built:
    """PPO with discrete actions: a perceptron, or behind convolutions one linear layer."""
    head, num = choose_discrete_head(source.actions)
    features: nn.Module
    if "actor.weight" in source.weights:
        images = source.build_image_features(source.weights.take_layers("network"))
        layers = [source.weights.take_layer("actor")]
        features, size = images, images.size
    else:
        flat = source.build_flat_features()
        layers = source.weights.take_layers("actor")
        features, size = flat, flat.size
    logits = build_perceptron(layers, size, source.find_activation("tanh"), is_last_linear=True)
    check_num_actions(count_outputs(layers, size), num, source.actions)
    module = CategoricalOutputs(logits, source.actions)
    return "ppo", source.build_graph(features, nn.Identity(), module, source.actions, head), ()


def _build_gaussian(source: _Source) -> _Built:
    """PPO and RPO with continuous actions."""
    features = source.build_flat_features()
    layers = source.weights.take_layers("actor_mean")
    means = build_perceptron(
        layers, features.size, source.find_activation("tanh"), is_last_linear=True
    )
    space = bound_actions(source.actions, None, is_scaled=False)
    check_num_actions(count_outputs(layers, features.size), num_elements(space), space)
    module = GaussianOutputs(means, source.weights.take("actor_logstd"))
    graph = source.build_graph(features, nn.Identity(), module, space, "gaussian")
    return "ppo", graph, (_NORMALIZED, _CLIPPED)


def _build_q_network(source: _Source) -> _Built:
    """DQN and C51, of vectors or of images."""
    if not isinstance(source.actions, Discrete):
        raise SpaceUnsupportedError(
            f"actions: found {describe(source.actions)} in the dataset, expected a Discrete: the "
            "policy has a value for each action. Name the dataset that it is for."
        )
    layers = source.weights.take_layers("network")
    features: nn.Module
    if layers and layers[0].is_convolution:
        images = source.build_image_features(layers[:-1])
        features, size, layers = images, images.size, layers[-1:]
    else:
        flat = source.build_flat_features()
        features, size = flat, flat.size
    values = build_perceptron(layers, size, source.find_activation("relu"), is_last_linear=True)
    num = source.actions.n
    atoms = source.weights.take("atoms") if "atoms" in source.weights else None
    if atoms is not None and atoms.dim() != 1:
        raise SourceInvalidError(
            f"{source.what}: found atoms {list(atoms.shape)}, expected one row of them. The file "
            "is damaged."
        )
    expected = num if atoms is None else num * len(atoms)
    check_num_actions(count_outputs(layers, size), expected, source.actions)
    module = QValueOutputs(values, num, atoms=atoms)
    graph = source.build_graph(features, nn.Identity(), module, source.actions, "q_values")
    notes = ("The exploration of its training is not in the package.",)
    return "dqn" if atoms is None else "c51", graph, notes


def _build_actor_network(source: _Source) -> _Built:
    """TD3 and DDPG (fc_mu), SAC (fc_mean and fc_logstd)."""
    weights = source.weights
    features = source.build_flat_features()
    layers = [weights.take_layer("fc1"), weights.take_layer("fc2")]
    kind = source.find_activation("relu")
    trunk = build_perceptron(layers, features.size, kind, is_last_linear=False)
    size = count_outputs(layers, features.size)
    space = bound_actions(source.actions, _compute_bounds(weights, source.what), is_scaled=True)
    is_deterministic = weights.has("fc_mu.")
    layer = weights.take_layer("fc_mu" if is_deterministic else "fc_mean")
    mean = build_perceptron([layer], size, kind, is_last_linear=True)
    check_num_actions(count_outputs([layer], size), num_elements(space), space)
    if is_deterministic:
        graph = source.build_graph(
            features, trunk, DeterministicOutputs(mean, space), space, "deterministic"
        )
        return "td3", graph, ("The noise of its exploration is not in the package.",)
    log_stds = build_perceptron([weights.take_layer("fc_logstd")], size, kind, is_last_linear=True)
    module = StateDependentOutputs(mean, log_stds, *_LOG_STD_RANGE, is_scaled=True)
    return "sac", source.build_graph(features, trunk, module, space, "squashed_gaussian"), ()


def _compute_bounds(weights: Weights, what: str) -> tuple[torch.Tensor, torch.Tensor]:
    scale, bias = (weights.take(f"action_{name}").reshape(-1) for name in ("scale", "bias"))
    if scale.shape != bias.shape:
        raise SourceInvalidError(
            f"{what}: found action_scale of {len(scale)} numbers and action_bias of {len(bias)}, "
            "expected one of each for each element of an action. The file is damaged."
        )
    return bias - scale, bias + scale


_BUILDERS: Final[Sequence[tuple[str, Callable[[_Source], _Built]]]] = (
    ("actor_mean.", _build_gaussian),
    ("actor.", _build_actor),
    ("fc_mu.", _build_actor_network),
    ("fc_mean.", _build_actor_network),
    ("network.", _build_q_network),
)
