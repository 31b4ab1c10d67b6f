"""Exploration: how a policy acts where it is not to take the mode, as `--explore` says it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from replaylake.datastore.errors import ConfigInvalidError

# Heads whose actions are random whatever is requested, and heads without a density to draw from.
ALWAYS_DRAWN: Final = ("uniform", "sampled")
WITHOUT_DENSITY: Final = ("deterministic", "sampled")


@dataclass(frozen=True, slots=True)
class ActingMode:
    """How actions are chosen. is_mode: nothing is left to chance, and that is logged."""

    deterministic: bool
    temperature: float
    epsilon: float
    is_mode: bool


@dataclass(frozen=True)
class Exploration:
    """How to act: at 0 or None the mode.

    epsilon: the mode, but with this probability an allowed action at random. temperature: drawn
    from the head at this temperature.
    """

    epsilon: float = 0.0
    temperature: float | None = None

    @property
    def is_on(self) -> bool:
        """Whether anything is explored."""
        return self.epsilon > 0 or bool(self.temperature)

    def resolve(
        self,
        head: str,
        deterministic: bool | None = None,
        temperature: float | None = None,
        epsilon: float | None = None,
    ) -> ActingMode:
        """Return how a policy with this head acts for a request; None: it does not say.

        A request that names a temperature or an epsilon gets those alone; one that says only
        `deterministic: false` gets this exploration, or a draw at temperature 1.
        """
        mode = deterministic
        if temperature is None and epsilon is None:
            if mode is None:
                mode = not self.is_on
            if not mode:
                epsilon = self.epsilon
                mode = epsilon > 0
        elif mode is None:
            mode = not temperature
        if temperature is None:
            temperature = 1.0 if self.temperature is None else self.temperature
        is_certain = mode or temperature == 0 or head == "deterministic"
        is_mode = is_certain and not epsilon and head not in ALWAYS_DRAWN
        return ActingMode(mode, temperature, epsilon or 0.0, is_mode)


def parse_exploration(text: str | None) -> Exploration:
    """Read `epsilon=0.05` or `temperature=1`; None is no exploration.

    Raises: ConfigInvalidError.
    """
    if text is None:
        return Exploration()
    name, _, number = text.partition("=")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if name == "epsilon" and 0 <= value <= 1:
        return Exploration(epsilon=value)
    if name == "temperature" and 0 <= value < math.inf:
        return Exploration(temperature=value)
    raise ConfigInvalidError(
        f"explore: found {text!r}, expected epsilon=E with E from 0 to 1, or temperature=T with "
        "T of 0 or more.",
        parameter="explore",
    )
