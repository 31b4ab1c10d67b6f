"""Options: d3rlpy's own by key, from TOML or `--set`, as arguments of an algorithm's config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, Final, get_type_hints

import torch

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.offline.d3rlpy.algorithms import D3rlpyAlgorithm
from replaylake.offline.d3rlpy.library import load_d3rlpy
from replaylake.offline.learning.options import cast, check_keys

# d3rlpy's names for what is stated once for all algorithms, and where to say it instead.
EXCLUDED_OPTIONS: Final = {
    "batch_size": "the training option batch_size",
    "gamma": "the training option discount",
    "observation_scaler": "the training option normalize_observations",
    "action_scaler": "nothing: actions are always normalized by their bounds or logged range",
    "reward_scaler": "the training options reward (SQL) and normalize_rewards",
}


def check_options(
    algorithm: D3rlpyAlgorithm, options: Mapping[str, Any], others: Iterable[str] = ()
) -> None:
    """Refuse options that the algorithm does not have.

    Raises: ConfigInvalidError with near matches.
    """
    _check_keys(_config_class(algorithm), options, algorithm_label(algorithm), others)


def list_options(algorithm: D3rlpyAlgorithm) -> dict[str, tuple[Any, Any]]:
    """Return each option's type and default, the latter as d3rlpy serializes it.

    Raises: ExtraMissingError.
    """
    config_class = _config_class(algorithm)
    hints, defaults = get_type_hints(config_class), config_class().serialize_to_dict()
    own = [field.name for field in fields(config_class) if field.name not in EXCLUDED_OPTIONS]
    known: dict[str, tuple[Any, Any]] = {key: (hints[key], defaults[key]) for key in own}
    return known | {"hidden_sizes": (tuple[int, ...], [256, 256])}


def make_config(
    algorithm: D3rlpyAlgorithm,
    options: Mapping[str, Any],
    *,
    discount: float,
    device: torch.device,
    with_frames: bool,
) -> Any:
    """Return d3rlpy's config.

    Numbers and words are taken as they are, factories from {type, params}, and `hidden_sizes` is
    given to every network at once. Raises: ConfigInvalidError.
    """
    what = algorithm_label(algorithm)
    config_class = _config_class(algorithm)
    _check_keys(config_class, options, what)
    known = {field.name: field for field in fields(config_class)}
    if options.get("compile_graph") and device.type != "cuda":
        raise ConfigInvalidError(
            f"{what}: found compile_graph on {device}, expected a CUDA device."
        )
    arguments: dict[str, Any] = {"gamma": discount}
    if "hidden_sizes" in options:
        if with_frames:
            raise ConfigInvalidError(
                f"{what}: found hidden_sizes with image observations, expected none, because they "
                "are for networks of vectors. Give encoder factories of type pixel, or leave "
                "them out."
            )
        sizes = cast(tuple[int, ...], options["hidden_sizes"], f"{what}: hidden_sizes")
        factory = load_d3rlpy().models.VectorEncoderFactory
        encoders = [name for name in known if name.endswith("encoder_factory")]
        arguments |= {name: factory(hidden_units=list(sizes)) for name in encoders}
    hints = get_type_hints(config_class)
    for key, value in options.items():
        if key == "hidden_sizes":
            continue
        decoder = known[key].metadata.get("dataclasses_json", {}).get("decoder")
        if decoder is None:
            arguments[key] = cast(hints[key], value, f"{what}: {key}")
        else:
            arguments[key] = decode_factory(decoder, value, f"{what}: {key}")
    return config_class(**arguments)


def algorithm_label(algorithm: D3rlpyAlgorithm) -> str:
    """Return how error messages call it."""
    return f"algorithm d3rlpy:{algorithm.name}"


def decode_factory(decoder: Any, value: Any, what: str) -> Any:
    """Return the factory that {type, params} means to d3rlpy. Raises: ConfigInvalidError."""
    try:
        return decoder({"params": {}, **value})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigInvalidError(
            f"{what}: found {value!r}, expected {{type = ..., params = {{...}}}} as d3rlpy "
            f"serializes it ({type(error).__name__}: {error})."
        ) from error


def _config_class(algorithm: D3rlpyAlgorithm) -> Any:
    return getattr(load_d3rlpy().algos, algorithm.config_class)


def _check_keys(
    config_class: Any, options: Mapping[str, Any], what: str, others: Iterable[str] = ()
) -> None:
    for key, instead in EXCLUDED_OPTIONS.items():
        if key in options:
            raise ConfigInvalidError(f"{what}: found option {key!r}, expected {instead}.")
    known = {field.name for field in fields(config_class)} - {*EXCLUDED_OPTIONS}
    check_keys(options, [*known, "hidden_sizes"], what, others)
