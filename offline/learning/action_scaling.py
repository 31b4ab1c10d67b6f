"""ActionScaling: Box actions to and from [-1, 1], where networks and d3rlpy's policies live."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from replaylake.datastore.episodes.spaces import Array, Box, Space, bounds, describe, value_dtype
from replaylake.datastore.errors import SpaceUnsupportedError


@dataclass(frozen=True)
class ActionScaling:
    """Normalized action = (action - center) / scale, with actions flattened to D numbers.

    center and scale float32 [D]; source says where they are from: `space` (its bounds) or `dataset`
    (the least and greatest logged action), element by element.
    """

    center: Array
    scale: Array
    source: tuple[str, ...]

    def normalize(self, actions: torch.Tensor) -> torch.Tensor:
        """Map actions [B, *act] in the environment's units to [B, D] in [-1, 1]."""
        flat = actions.reshape(len(actions), -1).float()
        return (flat - torch.from_numpy(self.center).to(flat)) / torch.from_numpy(self.scale).to(
            flat
        )

    def bound_space(self, space: Box) -> Box:
        """Return the space with the bounds of normalized actions, which a tanh head needs."""
        low, high = self.center - self.scale, self.center + self.scale
        return replace(
            space, low=low.reshape(space.shape).tolist(), high=high.reshape(space.shape).tolist()
        )

    def to_json(self) -> dict[str, Any]:
        """Return what a manifest says of it."""
        return {
            "center": self.center.tolist(),
            "scale": self.scale.tolist(),
            "source": list(self.source),
        }


class ActionUnscaler(nn.Module):
    """Maps a normalized mean (and its log_std) [N, D] to the environment's units."""

    center: torch.Tensor
    scale: torch.Tensor
    log_scale: torch.Tensor

    def __init__(self, scaling: ActionScaling) -> None:
        super().__init__()
        scale = torch.from_numpy(scaling.scale)
        self.register_buffer("center", torch.from_numpy(scaling.center), persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("log_scale", torch.log(scale), persistent=False)

    def forward(self, means: torch.Tensor) -> torch.Tensor:
        return self.center + self.scale * means

    def log_stds(self, log_stds: torch.Tensor) -> torch.Tensor:
        """Return ln(std) in the environment's units."""
        return log_stds + self.log_scale


def action_scaling(space: Space, logged: tuple[Array, Array] | None) -> ActionScaling:
    """Fit the scaling to a Box's bounds, or where one is infinite to the logged range.

    Args:
        space: a float Box.
        logged: least and greatest logged action, each [*act], or None if unknown.

    Raises: SpaceUnsupportedError if the space is no float Box, or unbounded with no logged range.
    """
    if not isinstance(space, Box) or value_dtype(space).kind != "f":
        raise SpaceUnsupportedError(f"actions: found {describe(space)}, expected a float Box.")
    low, high = (np.broadcast_to(bound, space.shape).reshape(-1) for bound in bounds(space))
    finite = np.isfinite(low) & np.isfinite(high)
    if not finite.all():
        if logged is None:
            raise SpaceUnsupportedError(
                f"actions: found {describe(space)} without finite bounds, expected bounds or a "
                "logged range to normalize with. Ingest with `env`, or give the space bounds."
            )
        logged_low, logged_high = (np.asarray(bound, np.float64).reshape(-1) for bound in logged)
        low, high = np.where(finite, low, logged_low), np.where(finite, high, logged_high)
    scale = (high - low) / 2
    return ActionScaling(
        center=((high + low) / 2).astype(np.float32),
        # An action that never varies would divide by zero; it is only centered.
        scale=np.where(scale > 0, scale, 1.0).astype(np.float32),
        source=tuple("space" if known else "dataset" for known in finite),
    )
