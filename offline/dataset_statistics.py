"""DatasetFacts: what an algorithm has to know of the data before it learns from any of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from replaylake.datastore.episodes.spaces import Array


class Moments(NamedTuple):
    """Mean and standard deviation of a leaf of the observation, float32 [*leaf] each; std > 0."""

    mean: Array
    std: Array


class RewardScaling(NamedTuple):
    """A learner sees (reward - shift) / scale; returns are reported unscaled."""

    shift: float = 0.0
    scale: float = 1.0


_UNSCALED: Final = RewardScaling()


@dataclass(frozen=True)
class DatasetStatistics:
    """What was measured on the training steps; by default nothing is known and nothing scaled.

    action_range: least and greatest logged action, each [*act], of a Box; normalizes an unbounded
    one. observations: by the leaf's dotted name ("" where the space is no Dict or Tuple), what its
    elements are normalized by; a leaf that is not named stays as it is. rewards: how they are
    scaled.
    """

    action_range: tuple[Array, Array] | None = None
    observations: Mapping[str, Moments] = field(default_factory=dict)
    rewards: RewardScaling = _UNSCALED

    def to_json(self) -> dict[str, Any]:
        """Return what a manifest says of the scaling; nothing of what is not scaled."""
        body: dict[str, Any] = {}
        if self.observations:
            body["observations"] = {
                name: {"mean": moments.mean.tolist(), "std": moments.std.tolist()}
                for name, moments in self.observations.items()
            }
        if self.rewards != _UNSCALED:
            body["rewards"] = self.rewards._asdict()
        return body
