"""Options: how one request asks to be acted for, over how the server explores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from replaylake.datastore.episodes.spaces import Box
from replaylake.datastore.lake.policies.exploration import (
    WITHOUT_DENSITY,
    ActingMode,
    Exploration,
)
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.serve.api.bodies import optional
from replaylake.serve.api.values import invalid_value_error
from replaylake.serve.messages import RequestRefusedError

# The fields, and what they are where they come in a query.
OPTIONS: Final[Mapping[str, type]] = {
    "deterministic": bool,
    "temperature": float,
    "epsilon": float,
    "seed": int,
    "q_values": bool,
}
_EXPLORING: Final = ("deterministic", "temperature", "epsilon", "seed")
# Beyond these a softmax is its mode or uniform, and float64 ends.
_TEMPERATURES: Final = (1e-6, 1e6)
_MAX_SEED: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class ActOptions:
    """What a request asked for; None where it left that to the server."""

    deterministic: bool | None = None
    temperature: float | None = None
    epsilon: float | None = None
    seed: int | None = None
    q_values: bool = False

    @property
    def exploring_field(self) -> str | None:
        """The first field by which the request says itself how to explore, if it does."""
        return next((name for name in _EXPLORING if getattr(self, name) is not None), None)


NO_OPTIONS: Final = ActOptions()


def read_options(fields: Mapping[str, Any]) -> ActOptions:
    """Read them. Raises: RequestRefusedError."""
    if fields.keys().isdisjoint(OPTIONS):
        return NO_OPTIONS
    deterministic = optional(fields, "deterministic", bool, "true or false")
    temperature = _number(fields, "temperature", 0.0, _TEMPERATURES[1])
    if temperature and temperature < _TEMPERATURES[0]:
        raise invalid_value_error("temperature", temperature, "0 (the mode), or 1e-6 to 1e6")
    if deterministic and temperature:
        raise invalid_value_error("temperature", temperature, "0 or none with deterministic: true")
    seed = optional(fields, "seed", int, "a whole number")
    if seed is not None and not 0 <= seed <= _MAX_SEED:
        raise invalid_value_error("seed", seed, f"a whole number from 0 to {_MAX_SEED}")
    return ActOptions(
        deterministic,
        temperature,
        _number(fields, "epsilon", 0.0, 1.0),
        seed,
        bool(optional(fields, "q_values", bool, "true or false")),
    )


def resolve_acting_mode(
    options: ActOptions, exploration: Exploration, spec: PolicySpec
) -> ActingMode:
    """Decide how to act. Raises: RequestRefusedError (422) for what the policy's head cannot do.

    A request that names a temperature or an epsilon gets those alone; one that says only
    `deterministic: false` gets the server's exploration, or a draw at temperature 1.
    """
    if options is NO_OPTIONS:
        return _default_acting_mode(exploration, spec.head)
    return _resolve_acting_mode(options, exploration, spec)


@lru_cache(maxsize=64)
def _default_acting_mode(exploration: Exploration, head: str) -> ActingMode:
    """Return how a request that says nothing is acted for: the same for all of them."""
    return exploration.resolve(head)


def _resolve_acting_mode(
    options: ActOptions, exploration: Exploration, spec: PolicySpec
) -> ActingMode:
    temperature, epsilon = options.temperature, options.epsilon
    if epsilon and isinstance(spec.action_space, Box):
        message = "epsilon applies to discrete actions, these are continuous; use temperature"
        raise RequestRefusedError(422, "epsilon", message)
    if temperature and spec.head in WITHOUT_DENSITY:
        message = f"head {spec.head} has no density to draw from; leave temperature out"
        raise RequestRefusedError(422, "temperature", message)
    if options.q_values and spec.head != "q_values":
        message = f"head {spec.head} has no q-values; leave q_values out"
        raise RequestRefusedError(422, "q_values", message)
    return exploration.resolve(spec.head, options.deterministic, temperature, epsilon)


def _number(fields: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not low <= value <= high or not math.isfinite(value):
        raise invalid_value_error(name, value, f"a number from {low:g} to {high:g}")
    return float(value)
