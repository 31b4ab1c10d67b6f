"""Networks: the standard architectures of other libraries as modules, filled with their weights."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from replaylake.datastore.episodes.spaces import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    Text,
    Tuple,
    bounds,
    describe,
    leaves,
    value_dtype,
)
from replaylake.datastore.errors import (
    ConfigInvalidError,
    PackageInvalidError,
    SourceInvalidError,
    SpaceUnsupportedError,
)
from replaylake.datastore.lake.policies.package import GraphSession
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.offline.importing.weights import Layer
from replaylake.offline.learning.export import copy_to_cpu, random_inputs, trace_onnx
from replaylake.offline.networks.features import ObservationFeatures
from replaylake.offline.networks.frame_stack import wrap_frame_stack
from replaylake.offline.networks.graph import PolicyGraph, run_graph

ACTIVATIONS: Final[Mapping[str, type[nn.Module]]] = {
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "leaky_relu": nn.LeakyReLU,
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
    "tanh": nn.Tanh,
}
# Mnih et al. 2015: kernels of 8, 4 and 3.
_STRIDES: Final = (4, 2, 1)
_KERNELS: Final = (8, 4, 3)
_EXPORT_TOLERANCE: Final = 1e-5


@dataclass(frozen=True)
class Conversion:
    """A policy of another library as the graph of a package.

    onnx: with the inputs and outputs that `spec` asks for. algorithm: such as `sb3:actor-critic`.
    facts: what the file says of its origin, in JSON. not_carried: sentences on what the package
    does not have, but the policy may have had.
    """

    onnx: bytes
    spec: PolicySpec
    algorithm: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    not_carried: Sequence[str] = ()


def convert_graph(
    graph: PolicyGraph,
    algorithm: str,
    facts: Mapping[str, Any],
    not_carried: Sequence[str],
    num_frames: int = 1,
) -> Conversion:
    """Export a graph, compared with torch; of stacks of num_frames, one of single observations.

    Raises: SourceInvalidError if the export differs; SpaceUnsupportedError as wrap_frame_stack.
    """
    if num_frames > 1:
        graph = wrap_frame_stack(graph, num_frames)
    graph = copy_to_cpu(graph)
    try:
        onnx = trace_onnx(graph)
        _check_export(graph, onnx)
    except PackageInvalidError as error:
        raise SourceInvalidError(
            f"imported policy: its tensors do not fit each other ({error}). The file is damaged."
        ) from error
    return Conversion(onnx, graph.spec, algorithm, facts, tuple(not_carried))


def _check_export(graph: PolicyGraph, onnx: bytes) -> None:
    """Compare with torch by the size of the outputs: weights of others may have any scale.

    Exports of our own learners are compared by the size of each number; here a number near zero
    beside large ones would fail that.
    """
    session = GraphSession(onnx, graph.spec, "imported policy")
    for num in (64, 1):
        inputs = random_inputs(graph, num)
        outputs = session.run(inputs)
        for name, array in run_graph(graph, inputs).items():
            allowed = _EXPORT_TOLERANCE * (1 + float(np.abs(array).max()))
            # It chooses among draws: of two that are worth the same either may be taken.
            is_choice = graph.spec.head == "sampled"
            if not is_choice and not np.allclose(outputs[name], array, rtol=0, atol=allowed):
                raise SourceInvalidError(
                    f"imported policy: its {name} in ONNX differ from torch's by more than "
                    f"{allowed:.1e} on {num} random observations. Export it to ONNX yourself."
                )


def parse_number(value: Any) -> int | float | None:
    """Return a number that a file states; None for what is none, or is not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # JSON may have integers that no float holds.
    return value if abs(value) <= sys.float_info.max else None


class PolicyModule(nn.Module):
    """Features of the observations, layers between, and the outputs of a head."""

    def __init__(self, features: nn.Module, trunk: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self._features = features
        self._trunk = trunk
        self._head = head

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs: tuple[torch.Tensor, ...] = self._head(self._trunk(self._features(*inputs)))
        return outputs


class FlatFeatures(nn.Module):
    """Observations without images as vectors: flattened, one-hot, joined in the given order."""

    def __init__(self, space: Space, keys: Sequence[str] | None = None) -> None:
        super().__init__()
        for name, leaf in leaves(space):
            if isinstance(leaf, Text) or (isinstance(leaf, Box) and leaf.is_image):
                raise SpaceUnsupportedError(
                    f"observation{'.' + name if name else ''}: found {describe(leaf)}, expected "
                    "numbers: the network has no convolutions. Name the dataset that the policy "
                    "is for."
                )
        if isinstance(space, Dict) and keys is not None:
            order = list(space.spaces)
            self._order: list[int] | None = [order.index(key) for key in keys]
            parts = [space.spaces[key] for key in keys]
        else:
            self._order, parts = None, [space]
        self._parts = nn.ModuleList(ObservationFeatures(part) for part in parts)
        self.size = sum(part.num_features for part in self._parts)  # type: ignore[misc]

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        if self._order is None:
            (part,) = self._parts
            features: torch.Tensor = part(part.nest(inputs))  # type: ignore[operator]
            return features
        ordered = (inputs[number] for number in self._order)
        pairs = zip(self._parts, ordered, strict=True)
        return torch.cat([part(tensor) for part, tensor in pairs], dim=1)


class NatureFeatures(nn.Module):
    """Images [N, H, W, C], [N, C, H, W] or [N, H, W] through convolutions to vectors.

    The three convolutions of Mnih et al. 2015, each with ReLU, flattened, then linear layers with
    ReLU. scale: what the pixels are divided by. num_frames: with more than one, the images are
    stacks [N, num_frames, ...], whose channels follow one another, the oldest first.
    """

    def __init__(
        self,
        space: Space,
        convolutions: Sequence[Layer],
        linears: Sequence[Layer],
        scale: float,
        num_frames: int = 1,
    ) -> None:
        super().__init__()
        kernels = [tuple(layer.weight.shape[2:]) for layer in convolutions]
        if kernels != [(size, size) for size in _KERNELS] or not linears:
            raise SourceInvalidError(
                f"convolutions: found kernels of {[list(kernel) for kernel in kernels]} before "
                f"{len(linears)} linear layers, expected {list(_KERNELS)} with strides of 4, 2 and "
                "1 before one or more. Export the policy to ONNX."
            )
        check_num_inputs(linears, int(linears[0].weight.shape[1]))
        channels = int(convolutions[0].weight.shape[1])
        self._num_frames = num_frames
        self._axes = _find_channel_axes(space, channels, num_frames)
        self._scale = scale
        layers: list[nn.Module] = []
        for layer, stride in zip(convolutions, _STRIDES, strict=True):
            layers += [layer.to_convolution(stride), nn.ReLU()]
        layers.append(nn.Flatten())
        for layer in linears:
            layers += [layer.to_linear(), nn.ReLU()]
        self._layers = nn.Sequential(*layers)
        self.size = int(linears[-1].weight.shape[0])
        _check_flattened(self, space, linears[0])

    def flatten_convolutions(self, observations: torch.Tensor) -> torch.Tensor:
        """Return what the first linear layer takes."""
        convolutions = self._layers[: 2 * len(_STRIDES) + 1]
        flat: torch.Tensor = convolutions(self._to_channels_first(observations))
        return flat

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self._layers(self._to_channels_first(observations))
        return features

    def _to_channels_first(self, observations: torch.Tensor) -> torch.Tensor:
        images = observations.float() / self._scale
        if self._num_frames > 1:
            images = images.flatten(0, 1)
        if images.dim() == 3:
            images = images[:, None]
        if self._axes:
            images = images.permute(0, *self._axes)
        if self._num_frames > 1:
            _, channels, height, width = images.shape
            images = images.reshape(-1, self._num_frames * channels, height, width)
        return images


def _find_channel_axes(space: Space, channels: int, num_frames: int) -> tuple[int, ...]:
    """Return the permutation of an image's axes to channels first; () if they are first."""
    shape = space.shape if isinstance(space, Box) else ()
    image = shape[1:] if num_frames > 1 else shape
    own, rest = divmod(channels, num_frames)
    if not rest and len(image) == 2 and own == 1:
        return ()
    if not rest and len(image) == 3:
        first, last = image[0] == own, image[2] == own
        if first and not last:
            return ()
        if last and not first:
            return (3, 1, 2)
    found = f"found observations {describe(space)} for a network of images with {channels} channels"
    sizes = {*image[:1], *image[2:]} if len(image) == 3 else {1}
    frames = [channels // size for size in sizes if size and channels % size == 0]
    if len(image) in (2, 3) and num_frames == 1 and max(frames, default=1) > 1:
        raise SpaceUnsupportedError(
            f"frame_stack: {found}: it was trained on {max(frames)} frames, one after another. "
            "State their number, or record stacked observations.",
            parameter="frame_stack",
        )
    raise SpaceUnsupportedError(f"{found}. Name the dataset that the policy is for.")


def _check_flattened(features: NatureFeatures, space: Space, linear: Layer) -> None:
    assert isinstance(space, Box)  # _channel_axes saw to it
    try:
        flat = features.flatten_convolutions(torch.zeros(1, *space.shape))
    except RuntimeError as error:
        raise SpaceUnsupportedError(
            f"found observations {describe(space)}, which are too small for convolutions of 8, 4 "
            "and 3 pixels. Name the dataset that the policy is for."
        ) from error
    if flat.shape[1] != linear.weight.shape[1]:
        raise SpaceUnsupportedError(
            f"found observations {describe(space)}, of which the convolutions make "
            f"{flat.shape[1]:,} features; the network takes {linear.weight.shape[1]:,}. Resize the "
            "images as in its training, or name the dataset that the policy is for."
        )


def find_activation(name: str) -> type[nn.Module]:
    """Return an activation by its name. Raises: ConfigInvalidError."""
    if name not in ACTIVATIONS:
        raise ConfigInvalidError(
            f"activation: found {name!r}, expected one of {', '.join(ACTIVATIONS)}.",
            parameter="activation",
        )
    return ACTIVATIONS[name]


def build_perceptron(
    layers: Sequence[Layer], num_inputs: int, kind: type[nn.Module], *, is_last_linear: bool
) -> nn.Module:
    """Return linear layers with an activation after each; of the last only if it is not linear.

    Raises: SpaceUnsupportedError if the first takes another number of inputs, SourceInvalidError if
    a layer does not fit the one before it.
    """
    modules: list[nn.Module] = []
    check_num_inputs(layers, num_inputs)
    for layer in layers:
        modules += [layer.to_linear(), kind()]
    return nn.Sequential(*(modules[:-1] if is_last_linear else modules))


def check_num_inputs(layers: Sequence[Layer], num_inputs: int) -> None:
    """Refuse layers that cannot follow each other; raises as `build_perceptron`."""
    for layer in layers:
        if layer.is_convolution:
            raise SourceInvalidError(
                f"{layer.name}: found a convolution, expected a Linear. Export the policy to ONNX."
            )
    if layers and (found := int(layers[0].weight.shape[1])) != num_inputs:
        raise SpaceUnsupportedError(
            f"observations: found {num_inputs:,} numbers in those of the dataset, expected the "
            f"{found:,} that {layers[0].name!r} takes. Name the dataset that the policy is for."
        )
    for before, after in pairwise(layers):
        if before.weight.shape[0] != after.weight.shape[1]:
            raise SourceInvalidError(
                f"{after.name}: found {after.weight.shape[1]:,} inputs, expected the "
                f"{before.weight.shape[0]:,} outputs of {before.name}. The file is damaged."
            )


def count_outputs(layers: Sequence[Layer], fallback: int) -> int:
    """Return how many outputs the last layer has; without layers, the number of inputs."""
    return int(layers[-1].weight.shape[0]) if layers else fallback


class CategoricalOutputs(nn.Module):
    """Logits of a Discrete or MultiDiscrete; of MultiBinary each element's 0 and 1."""

    def __init__(self, layer: nn.Module, space: Space) -> None:
        super().__init__()
        self._layer = layer
        self._is_binary = isinstance(space, MultiBinary)

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = self._layer(features)
        if self._is_binary:
            logits = torch.stack([torch.zeros_like(logits), logits], dim=2).flatten(start_dim=1)
        return (logits,)


class QValueOutputs(nn.Module):
    """Values of actions; of a distribution over values, their means.

    The layer gives [N, A] values, or [N, Q * A] quantiles of QR-DQN, or [N, A * K] logits of C51
    over K atoms.
    """

    atoms: torch.Tensor | None

    def __init__(
        self,
        layer: nn.Module,
        num_actions: int,
        *,
        quantiles: int = 0,
        atoms: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self._layer = layer
        self._num_actions = num_actions
        self._quantiles = quantiles
        self._num_atoms = 0 if atoms is None else len(atoms)
        self.register_buffer("atoms", atoms, persistent=False)

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = self._layer(features)
        if self._quantiles:
            values = values.reshape(-1, self._quantiles, self._num_actions).mean(dim=1)
        if self.atoms is not None:
            logits = values.reshape(-1, self._num_actions, self._num_atoms)
            values = (torch.softmax(logits, dim=2) * self.atoms).sum(dim=2)
        return (values,)


class GaussianOutputs(nn.Module):
    """A mean, and a log_std that is constant."""

    log_stds: torch.Tensor

    def __init__(self, means: nn.Module, log_stds: torch.Tensor) -> None:
        super().__init__()
        self._means = means
        self.register_buffer("log_stds", log_stds.reshape(1, -1), persistent=False)

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, ...]:
        means = self._means(features)
        return means, self.log_stds + torch.zeros_like(means)


class StateDependentOutputs(nn.Module):
    """A mean, and a log_std that a layer makes of the features.

    bounds: what log_std is clipped to, or None; with `is_scaled` it is tanh that maps it there, as
    in CleanRL's SAC.
    """

    def __init__(
        self, means: nn.Module, log_stds: nn.Module, low: float, high: float, *, is_scaled: bool
    ) -> None:
        super().__init__()
        self._means = means
        self._log_stds = log_stds
        self._low, self._high, self._is_scaled = low, high, is_scaled

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, ...]:
        log_stds = self._log_stds(features)
        if self._is_scaled:
            log_stds = self._low + 0.5 * (self._high - self._low) * (torch.tanh(log_stds) + 1)
        return self._means(features), log_stds.clamp(self._low, self._high)


class ExplorationMatrixOutputs(nn.Module):
    """A mean, and the log_std of generalized state-dependent exploration (Raffin et al. 2020).

    log_stds [features, actions] are those of the exploration matrix: given the features, the noise
    is a Gaussian of variance features^2 @ std^2. The 1e-6 is Stable-Baselines3's.
    """

    stds: torch.Tensor

    def __init__(self, means: nn.Module, log_stds: torch.Tensor) -> None:
        super().__init__()
        self._means = means
        self.register_buffer("stds", log_stds.exp(), persistent=False)

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, ...]:
        means = self._means(features)
        variances = features.square() @ self.stds.square() + 1e-6
        return means, 0.5 * torch.log(variances) + torch.zeros_like(means)


class DeterministicOutputs(nn.Module):
    """tanh of the layer's output, scaled to the bounds of the actions."""

    center: torch.Tensor
    scale: torch.Tensor

    def __init__(self, layer: nn.Module, space: Box) -> None:
        super().__init__()
        self._layer = layer
        low, high = (np.broadcast_to(b, space.shape).reshape(-1) for b in bounds(space))
        for name, values in (("center", (high + low) / 2), ("scale", (high - low) / 2)):
            tensor = torch.from_numpy(values.astype(np.float32))
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.center + self.scale * torch.tanh(self._layer(features)),)


def choose_discrete_head(space: Space) -> tuple[str, int]:
    """Return the head of countable actions and how many logits it has.

    Raises: SpaceUnsupportedError for other actions.
    """
    if isinstance(space, Discrete):
        return "categorical", space.n
    if isinstance(space, MultiDiscrete):
        return "multi_categorical", sum(space.nvec)
    if isinstance(space, MultiBinary):
        return "multi_categorical", space.n
    raise SpaceUnsupportedError(
        f"actions: found {describe(space)} in the dataset, but the policy has no standard "
        "deviations: expected Discrete, MultiDiscrete or MultiBinary. Name the dataset that the "
        "policy is for."
    )


def check_num_actions(found: int, expected: int, space: Space) -> None:
    """Refuse a network of another number of actions. Raises: SpaceUnsupportedError."""
    if found != expected:
        raise SpaceUnsupportedError(
            f"actions: found {describe(space)} in the dataset, which take {expected} outputs; the "
            f"policy has {found}. Name the dataset that the policy is for."
        )


def bound_actions(space: Space, found: tuple[Any, Any] | None, *, is_scaled: bool) -> Box:
    """Return a Box of actions with the bounds that the policy was trained with.

    found: the bounds that its file states, each [D], or None. is_scaled: whether its outputs are
    scaled to them. Raises: SpaceUnsupportedError if they differ from those of the dataset, if the
    dataset has none and they are needed, and for another space.
    """
    if not isinstance(space, Box) or value_dtype(space).kind != "f":
        raise SpaceUnsupportedError(
            f"actions: found {describe(space)} in the dataset, expected a float Box: the policy "
            "has continuous actions. Name the dataset that it is for."
        )
    own = np.stack([np.broadcast_to(bound, space.shape).reshape(-1) for bound in bounds(space)])
    is_finite = np.isfinite(own)
    if found is not None:
        theirs = np.stack([np.asarray(bound, np.float64).reshape(-1) for bound in found])
        check_num_actions(theirs.shape[1], prod(space.shape), space)
        agrees = ~is_finite | ~np.isfinite(theirs) | np.isclose(own, theirs, rtol=1e-5, atol=1e-6)
        if not agrees.all():
            row = int((~agrees).any(axis=0).argmax())
            raise SpaceUnsupportedError(
                f"actions: found bounds [{own[0, row]:g}, {own[1, row]:g}] of element {row} in the "
                f"dataset, and [{theirs[0, row]:g}, {theirs[1, row]:g}] in the policy, which scales"
                " or clips its actions to them. Record actions in the units of its environment."
            )
        own = np.where(is_finite, own, theirs)
    if is_scaled and not np.isfinite(own).all():
        raise SpaceUnsupportedError(
            f"actions: found {describe(space)} without finite bounds in the dataset, and none in "
            "the file: the policy scales its actions to them. Create the dataset with the bounds "
            "of the environment."
        )
    low, high = own.reshape(2, *space.shape)
    return replace(space, low=low.tolist(), high=high.tolist())


def make_graph(
    module: nn.Module, observations: Space, actions: Space, head: str, **fields: Any
) -> PolicyGraph:
    """Return a module with its spec; fields: further ones of PolicySpec."""
    return PolicyGraph(module.eval(), PolicySpec(observations, actions, head, **fields))


def refuse_nested(space: Space) -> None:
    """Refuse what no standard network takes: a Tuple, or a Dict in a Dict."""
    subs = space.spaces.values() if isinstance(space, Dict) else ()
    if isinstance(space, Tuple) or any(isinstance(sub, Dict | Tuple) for sub in subs):
        raise SpaceUnsupportedError(
            f"observations: found {describe(space)}, expected a Dict without further ones in it, "
            "or one array. Export the policy to ONNX."
        )
