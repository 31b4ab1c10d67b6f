"""ScoreReference: the two returns of an environment between which scores are normalized."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from replaylake.datastore.errors import ConfigInvalidError


@dataclass(frozen=True)
class ScoreReference:
    """The undiscounted returns that count as 0 and as 100.

    random: mean return of a random policy. expert: of an expert. source: where they are from, for
    whoever reads the score. Raises: ConfigInvalidError for numbers that are not finite, an expert
    that is not above random, or an empty source.
    """

    random: float
    expert: float
    source: str

    def __post_init__(self) -> None:
        for name in ("random", "expert"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value):
                raise ConfigInvalidError(
                    f"score reference: {name}: found {value!r}, expected a finite number.",
                    parameter=name,
                )
        if self.expert <= self.random:
            raise ConfigInvalidError(
                f"score reference: found expert {self.expert:g} and random {self.random:g}, "
                "expected an expert's return above a random policy's. Check their order.",
                parameter="expert",
            )
        if not isinstance(self.source, str) or not self.source.strip():
            raise ConfigInvalidError(
                f"score reference: source: found {self.source!r}, expected where the returns are "
                "from, such as 'D4RL' or a run.",
                parameter="source",
            )

    def normalize(self, score: float) -> float:
        """Return 100 * (score - random) / (expert - random) (Fu et al. 2020, D4RL, section 4)."""
        return 100 * (score - self.random) / (self.expert - self.random)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(body: Mapping[str, Any]) -> ScoreReference:
        """Return what to_json described. Raises: ConfigInvalidError."""
        return ScoreReference(body["random"], body["expert"], body["source"])
