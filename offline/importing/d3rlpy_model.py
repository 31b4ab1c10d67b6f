"""d3rlpy: convert the `.d3` files that `save` writes.

Such a file is a pickle of a dictionary: the configuration as JSON, the weights as torch.save wrote
them, and the version of d3rlpy. d3rlpy itself would unpickle it; here its opcodes are read, and
whatever is not a text or bytes is refused.
"""

from __future__ import annotations

import json
import pickletools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from replaylake.datastore.episodes.spaces import (
    Array,
    Box,
    Discrete,
    Space,
    describe,
    num_elements,
)
from replaylake.datastore.errors import SourceInvalidError, SpaceUnsupportedError
from replaylake.offline.d3rlpy.algorithms import D3RLPY_ALGORITHMS, D3rlpyAlgorithm
from replaylake.offline.d3rlpy.graphs import policy_graph
from replaylake.offline.d3rlpy.library import load_d3rlpy
from replaylake.offline.importing.networks import (
    Conversion,
    FlatFeatures,
    check_num_actions,
    convert_graph,
    parse_number,
)
from replaylake.offline.importing.weights import Weights, load_tensors
from replaylake.offline.learning.action_scaling import ActionScaling

# The opcodes of a pickled dictionary of texts and bytes. None of them calls or imports anything.
_STRUCTURE: Final = (
    "PROTO",
    "FRAME",
    "EMPTY_DICT",
    "MEMOIZE",
    "BINPUT",
    "MARK",
    "SETITEMS",
    "STOP",
)
_VALUES: Final = ("SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8")
_KEYS: Final = {"torch", "config", "version"}
# Sizes in a configuration that memory is allocated by; each is also a size of some weight.
_SIZES: Final = ("hidden_units", "feature_size", "n_quantiles", "embed_size")
_MAX_COUNT: Final = 1000
_MAX_TEXT: Final = 100


def is_model(data: bytes) -> bool:
    """Whether a file looks like a `.d3`: a pickle that begins with a dictionary."""
    return data[:1] == b"\x80" and b"torch" in data[:64]


def convert_model(data: bytes, what: str, observations: Space, actions: Space) -> Conversion:
    """Convert a `.d3` file for the spaces of a dataset.

    Raises: SourceInvalidError if it is damaged, or of an algorithm that is not known;
    SpaceUnsupportedError if the spaces are not those of the policy; ExtraMissingError.
    """
    parts = _read_dictionary(data, what)
    config = _parse_config(parts["config"], what)
    tensors = load_tensors(bytes(parts["torch"]), what)
    if not isinstance(tensors, Mapping):
        raise SourceInvalidError(
            f"{what}: found no weights by module, expected those of d3rlpy. The file is damaged."
        )
    networks = {
        str(name): Weights(state, f"{what}: {name}")
        for name, state in tensors.items()
        if isinstance(state, Mapping) and state and not _is_optimizer(state)
    }
    _check_sizes(config, networks, what)
    encoded = _build_features(observations, config, what)
    _check_actions(actions, config, what)
    algorithm, algo = _create(parts["config"], config, what)
    impl = algo.impl
    _load_weights(impl, networks, what)
    features = _Features(encoded, algo.config.observation_scaler, what)
    scaling, space = _find_scaling(algo.config.action_scaler, actions, what)
    if scaling is not None and algorithm.head == "squashed_gaussian" and isinstance(space, Box):
        space = scaling.bound_space(space)
    graph = policy_graph(algorithm, impl, features, observations, space, scaling)  # type: ignore[arg-type]
    graph.module.eval()
    facts = {
        "library": "d3rlpy",
        "library_version": str(parts["version"])[:_MAX_TEXT],
        "gamma": parse_number(config["config"].get("params", {}).get("gamma")),
    }
    notes = (
        () if scaling is None else _describe_scaling(scaling, algo.config.action_scaler, actions)
    )
    return convert_graph(graph, f"d3rlpy:{algorithm.name}", facts, notes)


def _is_optimizer(state: Mapping[Any, Any]) -> bool:
    return not all(isinstance(value, torch.Tensor) for value in state.values())


def _read_dictionary(data: bytes, what: str) -> dict[str, Any]:
    """Return the pickled dictionary without unpickling it. Raises: SourceInvalidError."""
    values: list[Any] = []
    try:
        for opcode, argument, position in pickletools.genops(data):
            if opcode.name in _VALUES:
                values.append(argument)
            elif opcode.name not in _STRUCTURE:
                raise SourceInvalidError(
                    f"{what}: found {opcode.name} at byte {position}, expected only strings "
                    "and bytes, as d3rlpy's `save` writes. Nothing in it was executed."
                )
    except (ValueError, UnicodeDecodeError, IndexError) as error:
        raise SourceInvalidError(
            f"{what}: is no complete `.d3` file ({error}). Copy it again."
        ) from error
    pairs = dict(zip(values[::2], values[1::2], strict=False))
    if set(pairs) != _KEYS or not isinstance(pairs["torch"], bytes | bytearray):
        raise SourceInvalidError(
            f"{what}: found a pickle of {sorted(map(str, pairs))[:6]}, expected "
            f"{sorted(_KEYS)}, as `save` of d3rlpy 2 writes. Use `save`, not `save_model`."
        )
    return pairs


def _parse_config(text: Any, what: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
        kind = config["config"]["type"]
        int(config["action_size"])
        shape = config["observation_shape"]
        if not isinstance(kind, str) or not all(isinstance(size, int) for size in shape):
            raise TypeError("observation_shape is no list of integers")
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise SourceInvalidError(
            f"{what}: its configuration cannot be read ({type(error).__name__}: {error}), expected "
            "that of an algorithm of d3rlpy 2 with one array as observation."
        ) from error
    return dict(config)


def _check_sizes(config: Mapping[str, Any], networks: Mapping[str, Weights], what: str) -> None:
    """Refuse a configuration of sizes that no weight has, before memory is allocated by them."""
    shapes = [t.shape for weights in networks.values() for t in map(weights.take, weights)]
    known = {size for shape in shapes for size in shape}
    for key, number in _iterate_integers(config, ""):
        is_size = key in _SIZES and number not in known
        is_count = key.startswith("n_") and key not in _SIZES and number > _MAX_COUNT
        if is_size or is_count:
            raise SourceInvalidError(
                f"{what}: found {key} {number:,} in its configuration, expected sizes that its "
                "weights have. The file is damaged."
            )


def _iterate_integers(value: Any, key: str) -> Iterator[tuple[str, int]]:
    """Yield the integers of a JSON value with the key that they are under."""
    if isinstance(value, Mapping):
        for name, sub in value.items():
            yield from _iterate_integers(sub, str(name))
    elif isinstance(value, list):
        for sub in value:
            yield from _iterate_integers(sub, key)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield key, value


def _build_features(space: Space, config: Mapping[str, Any], what: str) -> nn.Module:
    """Return the module that converts the dataset's observations to d3rlpy's."""
    shape = tuple(config["observation_shape"])
    if len(shape) == 3:
        if isinstance(space, Box) and len(space.shape) == 3:
            height_width = shape[1:]
            if space.shape == shape:
                return _Images(())
            if space.shape == (*height_width, shape[0]):
                return _Images((3, 1, 2))
        raise SpaceUnsupportedError(
            f"observations: found {describe(space)} in the dataset, expected images "
            f"{list(shape)} of the policy. Name the dataset that it is for."
        )
    flat = FlatFeatures(space)
    if (flat.size,) != shape:
        raise SpaceUnsupportedError(
            f"observations: found {flat.size:,} numbers in those of the dataset, expected "
            f"{list(shape)} of the policy. Name the dataset that it is for."
        )
    return flat


class _Images(nn.Module):
    def __init__(self, axes: tuple[int, ...]) -> None:
        super().__init__()
        self._axes = axes

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        images = observations.float()
        return images.permute(0, *self._axes) if self._axes else images


class _Features(nn.Module):
    """Observations as the encoders of the file take them: minus a shift, by a scale, times 2 - 1.

    Written out, since d3rlpy's scalers build their tensors and check shapes while they are traced.
    """

    shift: torch.Tensor
    scale: torch.Tensor

    def __init__(self, features: nn.Module, scaler: Any, what: str) -> None:
        super().__init__()
        self._parts = features
        kind = "none" if scaler is None else scaler.get_type()
        self._is_range = kind == "min_max"
        shift, scale = np.array(0.0), np.array(1.0)
        if kind == "standard":
            shift, std, eps = _read_statistics(scaler, ("mean", "std", "eps"), what)
            scale = std + eps
        elif kind == "min_max":
            shift, high = _read_statistics(scaler, ("minimum", "maximum"), what)
            scale = high - shift
        elif kind == "pixel":
            scale = np.array(255.0)
        elif kind != "none":
            raise SourceInvalidError(
                f"{what}: found the observation scaler {kind!r}, expected none, pixel, min_max or "
                "standard."
            )
        self.register_buffer("shift", torch.from_numpy(np.asarray(shift)).float(), persistent=False)
        self.register_buffer("scale", torch.from_numpy(np.asarray(scale)).float(), persistent=False)

    def nest(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Return the inputs as they are."""
        return inputs

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        features: torch.Tensor = (self._parts(*inputs) - self.shift) / self.scale
        return features * 2 - 1 if self._is_range else features


def _check_actions(space: Space, config: Mapping[str, Any], what: str) -> None:
    num = space.n if isinstance(space, Discrete) else 0
    if isinstance(space, Box):
        num = num_elements(space)
    check_num_actions(int(config["action_size"]), num, space)


def _create(text: str, config: Mapping[str, Any], what: str) -> tuple[D3rlpyAlgorithm, Any]:
    """Return the algorithm of the table, and d3rlpy's with networks of random weights."""
    library: Any = load_d3rlpy()
    with torch.random.fork_rng(devices=[]):
        try:
            algo = library.base.LearnableConfigWithShape.deserialize(text).create("cpu:0")
        except Exception as error:  # what its constructors raise, d3rlpy does not state
            raise SourceInvalidError(
                f"{what}: d3rlpy {library.__version__} cannot create its algorithm "
                f"{config['config']['type']!r} ({error}). Save it with this version of d3rlpy."
            ) from error
    name = type(algo.config).__name__
    for algorithm in D3RLPY_ALGORITHMS:
        if algorithm.config_class == name:
            return algorithm, algo
    raise SourceInvalidError(
        f"{what}: found a policy of {name}, expected one of d3rlpy's Q-learning or imitation "
        "algorithms: those that act on several steps are not converted."
    )


def _load_weights(impl: Any, networks: Mapping[str, Weights], what: str) -> None:
    modules = impl.modules.create_checkpointer("cpu:0").modules
    for name, module in modules.items():
        if not isinstance(module, nn.Module) or not module.state_dict():
            continue
        if name not in networks:
            raise SourceInvalidError(
                f"{what}: found no weights of {name!r}, expected those of "
                f"{sorted(modules)}. The file is damaged."
            )
        weights = networks[name]
        try:
            module.load_state_dict({key: weights.take(key) for key in weights})
        except RuntimeError as error:
            raise SourceInvalidError(
                f"{what}: the weights of {name!r} do not fit its configuration "
                f"({' '.join(str(error).split())[:300]}). The file is damaged."
            ) from error


def _read_statistics(scaler: Any, names: Sequence[str], what: str) -> list[Array]:
    """Return numbers of a scaler, float64 [D] or []; of several numbers all have one length.

    Raises: SourceInvalidError.
    """
    try:
        arrays = [np.asarray(getattr(scaler, name), np.float64) for name in names]
        np.broadcast_shapes(*(array.shape for array in arrays))
        is_finite = all(np.isfinite(array).all() for array in arrays)
    except (OverflowError, TypeError, ValueError) as error:
        raise SourceInvalidError(
            f"{what}: the {' and '.join(names)} of its scaler {scaler.get_type()!r} cannot be read "
            f"({error}). The file is damaged."
        ) from error
    if not is_finite:
        raise SourceInvalidError(
            f"{what}: found numbers that are not finite in the {' and '.join(names)} of its scaler "
            f"{scaler.get_type()!r}. The file is damaged."
        )
    return arrays


def _find_scaling(scaler: Any, space: Space, what: str) -> tuple[ActionScaling | None, Space]:
    if not isinstance(space, Box):
        return None, space
    size = num_elements(space)
    low, high = np.full(size, -1.0), np.full(size, 1.0)
    if scaler is not None:
        low, high = (
            bound.reshape(-1) for bound in _read_statistics(scaler, ("minimum", "maximum"), what)
        )
        check_num_actions(len(high), size, space)
        check_num_actions(len(low), size, space)
    center, scale = ((high + low) / 2).astype(np.float32), ((high - low) / 2).astype(np.float32)
    return ActionScaling(center, scale, ("file",) * size), space


def _describe_scaling(scaling: ActionScaling, scaler: Any, space: Space) -> tuple[str, ...]:
    assert isinstance(space, Box)  # others have no scaling
    low, high = (
        np.broadcast_to(np.asarray(bound, np.float64), space.shape).reshape(-1)
        for bound in (space.low, space.high)
    )
    ends = scaling.center - scaling.scale, scaling.center + scaling.scale
    if np.allclose(low, ends[0], rtol=1e-4, atol=1e-5) and np.allclose(high, ends[1], rtol=1e-4):
        return ()
    where = "of its action scaler" if scaler is not None else "[-1, 1], without an action scaler"
    return (
        f"Actions stay within the range {where}, which is not that of the dataset's space: check "
        "that both have the same units.",
    )
