"""Stable-Baselines3 and sb3-contrib: convert the zip archives that `model.save` writes.

The archive has `data`, a JSON object, and `policy.pth`, the weights. Objects of Python are in
`data` as pickles in base64 beside texts that describe them; only the texts are read. The class of
the algorithm is not named in it: the names of the weights tell which network acts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Final

from torch import nn

from replaylake.datastore.episodes.spaces import (
    Box,
    Dict,
    Discrete,
    Space,
    describe,
)
from replaylake.datastore.errors import SourceInvalidError, SpaceUnsupportedError
from replaylake.offline.importing.networks import (
    ACTIVATIONS,
    CategoricalOutputs,
    Conversion,
    DeterministicOutputs,
    ExplorationMatrixOutputs,
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
    make_graph,
    parse_number,
    refuse_nested,
)
from replaylake.offline.importing.weights import Layer, Weights, load_tensors, read_entry
from replaylake.offline.networks.graph import PolicyGraph

_DATA: Final = "data"
_POLICY: Final = "policy.pth"
_VERSION: Final = "_stable_baselines3_version"
_MAX_DATA_BYTES: Final = 256 << 20  # the last observations are in it too
_MAX_TEXT: Final = 100
_MAX_CLASS_TEXT: Final = 1000
_NUMBER: Final = re.compile(r"[-+]?(?:inf|nan|\d+\.?\d*(?:e[-+]?\d+)?|\.\d+(?:e[-+]?\d+)?)")
_EXTRACTORS: Final = ("FlattenExtractor", "NatureCNN", "CombinedExtractor")
# SAC and TQC clip log_std to this range.
_LOG_STD_RANGE: Final = (-20.0, 2.0)
_NOT_ACTING: Final = (
    "actor_target.",
    "critic.",
    "critic_target.",
    "mlp_extractor.value_net.",
    "q_net_target.",
    "quantile_net_target.",
    "value_net.",
    "vf_features_extractor.",
)
_NORMALIZATION: Final = (
    "The archive does not say whether observations were normalized (VecNormalize): state its "
    "statistics if they were."
)
_CLIPPED: Final = (
    "Sampled actions are truncated to the bounds, where Stable-Baselines3 clips them: best actions "
    "are the same, sampled ones are distributed differently at the bounds."
)
_ZERO_FRAMES: Final = (
    "Before an episode's first observation the frame stack repeats it, where VecFrameStack has "
    "zeros: the first actions of an episode may differ."
)


def convert_archive(
    data: bytes, what: str, observations: Space, actions: Space, num_frames: int = 1
) -> Conversion:
    """Convert an archive of `model.save` for the spaces of a dataset.

    observations: of stacks where num_frames is more than 1.
    Raises: SourceInvalidError if the archive is damaged or has a network other than the standard
    ones; SpaceUnsupportedError if the spaces are not those of the policy.
    """
    archive = _Archive(data, what, observations, actions, num_frames)
    for prefix, build in _BUILDERS:
        if archive.weights.has(prefix):
            algorithm, graph, notes = build(archive)
            archive.weights.ignore(*_NOT_ACTING)
            archive.weights.check_all_taken()
            if num_frames > 1:
                notes = (*notes, _ZERO_FRAMES)
            notes = (_NORMALIZATION, *notes)
            return convert_graph(graph, f"sb3:{algorithm}", archive.facts, notes, num_frames)
    raise SourceInvalidError(
        f"{what}: found the tensors {', '.join(list(archive.weights)[:6])}, expected those of PPO, "
        "A2C, TRPO, DQN, QR-DQN, SAC, TQC, TD3 or DDPG. Export the policy to ONNX."
    )


class _Archive:
    """The options and weights of an archive, and the parts that all networks share."""

    def __init__(
        self, data: bytes, what: str, observations: Space, actions: Space, num_frames: int
    ) -> None:
        self.what = what
        self.observations, self.actions = observations, actions
        self._num_frames = num_frames
        text = read_entry(data, _DATA, what, max_bytes=_MAX_DATA_BYTES)
        weights = read_entry(data, _POLICY, what)
        if text is None or weights is None:
            raise SourceInvalidError(
                f"{what}: found no {_DATA if text is None else _POLICY} in the archive, expected "
                "one that `model.save` of Stable-Baselines3 wrote."
            )
        self.values = _parse_data(text, what)
        self.weights = Weights(load_tensors(weights, f"{what}: {_POLICY}"), f"{what}: {_POLICY}")
        self.options = _parse_mapping(self.values.get("policy_kwargs"))
        version = read_entry(data, _VERSION, what, max_bytes=1000)
        module = str(_parse_mapping(self.values.get("policy_class")).get("__module__", ""))
        self.facts = {
            "library": "stable-baselines3",
            "library_version": None if version is None else version.decode("ascii", "replace"),
            "policy_module": module[:_MAX_TEXT],
            "num_timesteps": parse_number(self.values.get("num_timesteps")),
            "gamma": parse_number(self.values.get("gamma")),
        }
        self._check_standard()

    def _check_standard(self) -> None:
        extractor = self.options.get("features_extractor_class", _EXTRACTORS[0])
        name = _parse_class_name(extractor)
        if name not in _EXTRACTORS:
            raise SourceInvalidError(
                f"{self.what}: found the features extractor {name!r}, expected one of "
                f"{', '.join(_EXTRACTORS)}: the code of another is not in the archive. Export the "
                "policy to ONNX."
            )
        for option in ("use_expln", "squash_output"):
            if self.options.get(option) in (True, "True"):
                raise SourceInvalidError(
                    f"{self.what}: found a policy with {option}=True, which is not converted. "
                    "Export the policy to ONNX."
                )

    def find_activation(self, default: type[nn.Module]) -> type[nn.Module]:
        """Return the activation of the perceptrons. Raises: SourceInvalidError."""
        text = self.options.get("activation_fn")
        if text is None:
            return default
        name = _parse_class_name(text)
        kinds = {kind.__name__: kind for kind in ACTIVATIONS.values()}
        if name not in kinds:
            raise SourceInvalidError(
                f"{self.what}: found the activation {name!r}, expected one of "
                f"{', '.join(sorted(kinds))}. Export the policy to ONNX."
            )
        return kinds[name]

    def build_features(self, *prefixes: str) -> tuple[nn.Module, int]:
        """Return the features extractor that acts, of these prefixes, and how many it makes."""
        for prefix in prefixes:
            if self.weights.has(f"{prefix}extractors."):
                raise SourceInvalidError(
                    f"{self.what}: found a CombinedExtractor with convolutions, which is not "
                    "converted. Export the policy to ONNX."
                )
            if self.weights.has(f"{prefix}cnn."):
                layers = self.weights.take_layers(f"{prefix}cnn")
                linears = self.weights.take_layers(f"{prefix}linear")
                is_raw = self.options.get("normalize_images") in (False, "False")
                is_scaled = isinstance(self.observations, Box) and self.observations.is_image
                scale = 255.0 if is_scaled and not is_raw else 1.0
                # A features extractor is also saved under the names of those that share it.
                self.weights.ignore(*prefixes)
                images = NatureFeatures(self.observations, layers, linears, scale, self._num_frames)
                return images, images.size
        flat = FlatFeatures(self.observations, self._order_keys())
        return flat, flat.size

    def _order_keys(self) -> list[str] | None:
        """Return the order in which the policy joins the parts of a Dict; None of other spaces."""
        refuse_nested(self.observations)
        if not isinstance(self.observations, Dict):
            return None
        text = str(_parse_mapping(self.values.get("observation_space")).get("spaces", ""))
        places = {key: text.find(f"'{key}':") for key in self.observations.spaces}
        if min(places.values()) < 0:
            raise SpaceUnsupportedError(
                f"observations: found {describe(self.observations)} in the dataset, expected the "
                f"keys of the policy's: {text[:200] or 'none, it takes one array'}. Name the "
                "dataset that the policy is for."
            )
        return sorted(places, key=lambda key: places[key])

    def bound_actions(self, *, is_scaled: bool) -> Box:
        """Return the actions' space with the bounds of the training; see networks.bound_actions."""
        stated = _parse_mapping(self.values.get("action_space"))
        low, high = (_parse_numbers(stated.get(name)) for name in ("low", "high"))
        size = prod(self.actions.shape) if isinstance(self.actions, Box) else 0
        # numpy writes an array of more than 1,000 numbers with dots in it.
        is_known = low is not None and high is not None and "..." not in str(stated.get("low"))
        found = (low, high) if is_known else None
        if found is not None and size and len(found[0] or ()) != len(found[1] or ()):
            found = None
        return bound_actions(self.actions, found, is_scaled=is_scaled)


_Built = tuple[str, PolicyGraph, Sequence[str]]


def _build_actor_critic(archive: _Archive) -> _Built:
    """PPO, A2C, TRPO and MaskablePPO, which share a policy class."""
    weights = archive.weights
    if weights.has("lstm_actor."):
        raise SourceInvalidError(
            f"{archive.what}: found a recurrent policy (RecurrentPPO), which is not converted: "
            "no graph of it has been compared with the original yet."
        )
    features, size = archive.build_features("pi_features_extractor.", "features_extractor.")
    layers = weights.take_layers("mlp_extractor.policy_net")
    trunk = build_perceptron(layers, size, archive.find_activation(nn.Tanh), is_last_linear=False)
    action_net = weights.take_layer("action_net")
    outputs = _check_action_net(archive, action_net, count_outputs(layers, size))
    num = int(action_net.weight.shape[0])
    if "log_std" not in weights:
        head, expected = choose_discrete_head(archive.actions)
        check_num_actions(num, expected, archive.actions)
        module: nn.Module = CategoricalOutputs(outputs, archive.actions)
        graph = _make_graph(archive, features, trunk, module, archive.actions, head)
        return "actor-critic", graph, ()
    space = archive.bound_actions(is_scaled=False)
    check_num_actions(num, prod(space.shape), space)
    log_stds = weights.take("log_std")
    module = (
        ExplorationMatrixOutputs(outputs, log_stds)
        if log_stds.dim() == 2
        else GaussianOutputs(outputs, log_stds)
    )
    graph = _make_graph(archive, features, trunk, module, space, "gaussian")
    return "actor-critic", graph, (_CLIPPED,)


def _build_squashed(archive: _Archive) -> _Built:
    """SAC and TQC."""
    weights = archive.weights
    features, size = archive.build_features("actor.features_extractor.")
    layers = weights.take_layers("actor.latent_pi")
    trunk = build_perceptron(layers, size, archive.find_activation(nn.ReLU), is_last_linear=False)
    num = count_outputs(layers, size)
    space = archive.bound_actions(is_scaled=True)
    module: nn.Module
    if "actor.log_std" in weights:
        # With state-dependent exploration the mean is clipped, before its tanh.
        is_clipped = weights.has("actor.mu.0.")
        layer = weights.take_layer("actor.mu.0" if is_clipped else "actor.mu")
        mean = _check_action_net(archive, layer, num)
        if is_clipped:
            limit = parse_number(archive.options.get("clip_mean", 2.0))
            if limit is None or limit <= 0:
                raise SourceInvalidError(
                    f"{archive.what}: found clip_mean {archive.options['clip_mean']!r}, expected a "
                    "number above 0. The archive is damaged."
                )
            mean = nn.Sequential(mean, nn.Hardtanh(-limit, limit))
        module = ExplorationMatrixOutputs(mean, weights.take("actor.log_std"))
    else:
        layer = weights.take_layer("actor.mu")
        mean = _check_action_net(archive, layer, num)
        log_stds = _check_action_net(archive, weights.take_layer("actor.log_std"), num)
        module = StateDependentOutputs(mean, log_stds, *_LOG_STD_RANGE, is_scaled=False)
    check_num_actions(int(layer.weight.shape[0]), prod(space.shape), space)
    graph = _make_graph(archive, features, trunk, module, space, "squashed_gaussian")
    return "sac", graph, ()


def _build_deterministic(archive: _Archive) -> _Built:
    """TD3 and DDPG."""
    weights = archive.weights
    features, size = archive.build_features("actor.features_extractor.")
    layers = weights.take_layers("actor.mu")
    mean = build_perceptron(layers, size, archive.find_activation(nn.ReLU), is_last_linear=True)
    space = archive.bound_actions(is_scaled=True)
    check_num_actions(count_outputs(layers, size), prod(space.shape), space)
    module = DeterministicOutputs(mean, space)
    graph = _make_graph(archive, features, nn.Identity(), module, space, "deterministic")
    return "td3", graph, ("The noise of its exploration is not in the package.",)


def _build_q_network(archive: _Archive, name: str = "q_net") -> _Built:
    """DQN and QR-DQN."""
    weights = archive.weights
    features, size = archive.build_features(f"{name}.features_extractor.")
    layers = weights.take_layers(f"{name}.{name}")
    values = build_perceptron(layers, size, archive.find_activation(nn.ReLU), is_last_linear=True)
    if not isinstance(archive.actions, Discrete):
        raise SpaceUnsupportedError(
            f"actions: found {describe(archive.actions)} in the dataset, expected a Discrete: the "
            "policy has a value for each action. Name the dataset that it is for."
        )
    num, found = archive.actions.n, count_outputs(layers, size)
    is_quantiles = name == "quantile_net"
    quantiles = _read_num_quantiles(archive, found) if is_quantiles else 0
    check_num_actions(found // max(1, quantiles), num, archive.actions)
    module = QValueOutputs(values, num, quantiles=quantiles)
    graph = _make_graph(archive, features, nn.Identity(), module, archive.actions, "q_values")
    rate = parse_number(archive.values.get("exploration_rate"))
    stated = "" if rate is None else f" (epsilon {rate:g} at the end of training)"
    note = f"Its exploration{stated} is not in the package."
    return "qr-dqn" if is_quantiles else "dqn", graph, (note,)


def _read_num_quantiles(archive: _Archive, found: int) -> int:
    stated = archive.values.get("n_quantiles", archive.options.get("n_quantiles"))
    if not isinstance(stated, int) or stated < 1 or found % stated:
        raise SourceInvalidError(
            f"{archive.what}: found n_quantiles {stated!r} for {found} outputs, expected a divisor "
            "of these. The archive is damaged."
        )
    return stated


_BUILDERS: Final[Sequence[tuple[str, Callable[[_Archive], _Built]]]] = (
    ("action_net.", _build_actor_critic),
    ("actor.latent_pi.", _build_squashed),
    ("actor.mu.", _build_deterministic),
    ("q_net.", _build_q_network),
    ("quantile_net.", lambda archive: _build_q_network(archive, "quantile_net")),
)


def _make_graph(
    archive: _Archive,
    features: nn.Module,
    trunk: nn.Module,
    head: nn.Module,
    actions: Space,
    name: str,
) -> PolicyGraph:
    return make_graph(PolicyModule(features, trunk, head), archive.observations, actions, name)


def _check_action_net(archive: _Archive, layer: Layer, num_inputs: int) -> nn.Module:
    if layer.is_convolution or layer.weight.shape[1] != num_inputs:
        raise SourceInvalidError(
            f"{archive.what}: found {layer.name!r} with a weight {list(layer.weight.shape)}, "
            f"expected one for {num_inputs} features. The archive is damaged."
        )
    return layer.to_linear()


def _parse_data(text: bytes, what: str) -> Mapping[str, Any]:
    try:
        values = json.loads(text)
    except (RecursionError, ValueError) as error:
        raise SourceInvalidError(
            f"{what}: its entry {_DATA} is no JSON ({error}): the archive is damaged."
        ) from error
    if not isinstance(values, dict):
        raise SourceInvalidError(
            f"{what}: its entry {_DATA} is no JSON object. The archive is damaged."
        )
    return values


def _parse_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _parse_class_name(text: Any) -> str:
    """Return the name in a text such as `<class 'torch.nn.modules.activation.Tanh'>`."""
    words = re.sub(r"[^\w.]", " ", str(text)[:_MAX_CLASS_TEXT]).split()
    return words[-1].rpartition(".")[2] if words else ""


def _parse_numbers(text: Any) -> list[float] | None:
    """Return the numbers that numpy wrote in a text; None where there is no text."""
    if not isinstance(text, str):
        return None
    return [float(number) for number in _NUMBER.findall(text)]
