"""Description: what is known of an algorithm before there are data: its needs and its options."""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from replaylake.datastore.episodes.spaces import Box, Discrete, MultiDiscrete, Space
from replaylake.offline.algorithms.catalog import builtin_row, d3rlpy_row
from replaylake.offline.algorithms.info import AlgorithmInfo
from replaylake.offline.d3rlpy.options import list_options
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.learning.options import to_options

# A space of each kind of actions, to make an algorithm for; its networks are not made.
_ACTIONS: dict[str, Space] = {
    "discrete": Discrete(2),
    "continuous": Box((1,), "float32", -1.0, 1.0),
    "multi_discrete": MultiDiscrete((2,)),
}


@dataclass(frozen=True)
class OptionInfo:
    """One option. default: as TOML has it, or None where the option may be left without a value."""

    name: str
    type: str
    default: Any


def needs(info: AlgorithmInfo) -> tuple[str, ...]:
    """Return what it has to find in the data beyond observations and actions, by default options.

    Of: rewards; next_observations, where steps without one are left out; returns, summed over what
    is logged of an episode; next_actions, those that were logged; propensities, the logged actions'
    probabilities; sequences, of consecutive steps that its own policy took; neighbors, all data
    before the first update. One of the user's own says so itself, once it is made for a dataset's
    spaces.
    """
    if info.kind == "own":
        return ("what it asks for",)
    needed = ["rewards"] if info.uses_rewards else []
    if info.provider == "d3rlpy":
        row = d3rlpy_row(info)
        needed += ["next_observations"] if row.bootstraps else []
        return (*needed, row.needs) if row.needs else tuple(needed)
    ours = builtin_row(info)
    algorithm = ours.function(
        Box((1,)), _ACTIONS[info.actions], ours.config_class(), DatasetStatistics()
    )
    options = {
        "next_observations": algorithm.needs_bootstrap,
        "returns": algorithm.needs_returns,
        "next_actions": algorithm.needs_next_actions,
        "propensities": algorithm.needs_propensities,
        "sequences": algorithm.on_policy is not None,
    }
    return (*needed, *(name for name, is_needed in options.items() if is_needed))


def options(info: AlgorithmInfo) -> list[OptionInfo]:
    """Return its own options, in the order in which its config has them.

    Imports d3rlpy for one of its algorithms: seconds. Raises: ExtraMissingError.
    """
    if info.provider == "d3rlpy":
        known = list_options(d3rlpy_row(info))
        return [OptionInfo(key, _text(kind), default) for key, (kind, default) in known.items()]
    config = builtin_row(info).config_class
    hints, defaults = get_type_hints(config), to_options(config())
    return [OptionInfo(f.name, _text(hints[f.name]), defaults[f.name]) for f in fields(config)]


def _text(kind: Any) -> str:
    """Return how a person says a type: `list of int`, `"huber" or "squared"`, `float`."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(f'"{part}"' for part in parts)
    if origin in (Union, types.UnionType):
        return " or ".join("none" if part is type(None) else _text(part) for part in parts)
    if origin in (tuple, list, Sequence):
        return f"list of {_text(parts[0])}"
    if origin is dict or kind is dict:
        return "table"
    if kind in (int, float, bool, str):
        return str(kind.__name__)
    # What d3rlpy makes of {type = ..., params = {...}}.
    return "table of type and params"
