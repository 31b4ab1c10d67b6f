"""Action units: logged actions brought to the environment's, and their densities with them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from replaylake.datastore.episodes.spaces import Array, Values
from replaylake.datastore.errors import ConfigInvalidError, SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.formats.tabular.arrays import Mask

# What float32 makes of a tanh of 1.
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class ActionUnits:
    """action = offset + scale * logged; `is_bounded`: logged actions have to be in [-1, 1]."""

    scale: float = 1.0
    offset: float = 0.0
    is_bounded: bool = False

    @property
    def changes(self) -> bool:
        """Whether actions are other numbers than those logged."""
        return self.scale != 1.0 or self.offset != 0.0 or self.is_bounded

    def convert(self, actions: Values, column: str) -> tuple[Array, Mask]:
        """Return float actions [n, ...] in their units, and the rows bool [n] that are outside.

        Raises: SourceInvalidError for actions that are no floats.
        """
        if isinstance(actions, Mapping) or actions.dtype.kind != "f":
            kind = "a struct" if isinstance(actions, Mapping) else str(actions.dtype)
            raise SourceInvalidError(
                f"column {column!r}: found actions of {kind}, expected floats, because only "
                "floats have units. Leave out `action_scale` and `action_range`."
            )
        outside: Mask = np.zeros(len(actions), dtype=np.bool_)
        if self.is_bounded:
            beyond = np.abs(actions) > 1 + _TOLERANCE
            outside = np.asarray(beyond.reshape(len(actions), -1).any(axis=1))
            actions = np.clip(actions, -1, 1)
        converted: Array = (self.offset + self.scale * actions).astype(actions.dtype)
        return converted, outside

    def log_density_shift(self, actions: Array) -> float:
        """Return what is added to a log-density of the logged action [n, *act].

        y = b + s x has the density p(x) / |s|^D, for D numbers an action.
        """
        return -math.prod(actions.shape[1:]) * math.log(abs(self.scale))

    def notes(self, *, has_densities: bool) -> list[str]:
        """Say what was done to the actions."""
        if not self.changes:
            return []
        what = f"actions are {self.offset:g} + {self.scale:g} times those logged"
        if not self.offset:
            what = f"actions are {self.scale:g} times those logged"
        if has_densities and abs(self.scale) != 1:
            what += (
                f"; their log-probabilities are densities, from which ln {abs(self.scale):g} was "
                "taken for each number of an action"
            )
        return [what]


def parse_units(options: ReadOptions) -> ActionUnits:
    """Return the units that were asked for. Raises: ConfigInvalidError."""
    scale, span = options.action_scale, options.action_range
    if scale is not None and span is not None:
        raise ConfigInvalidError(
            f"action_scale: found {scale} beside `action_range` {span[0]} to {span[1]}, expected "
            "one or the other.",
            parameter="action_scale",
        )
    if scale is not None:
        if scale == 0 or not math.isfinite(scale):
            raise ConfigInvalidError(
                f"action_scale: found {scale}, expected a number other than 0.",
                parameter="action_scale",
            )
        return ActionUnits(scale)
    if span is None:
        return ActionUnits()
    low, high = span
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigInvalidError(
            f"action_range: found {low} and {high}, expected two finite numbers, the lower first.",
            parameter="action_range",
        )
    return ActionUnits((high - low) / 2, (high + low) / 2, is_bounded=True)
