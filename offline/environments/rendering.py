"""Pictures: what environments look like while they are stepped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import ConfigInvalidError, ExtraMissingError
from replaylake.offline.environments.ids import make
from replaylake.offline.environments.spaces import Environment, gymnasium


def make_rendering(env_id: str, env_args: Mapping[str, Any] | None = None) -> Environment:
    """Make an environment that draws itself for `rendered`.

    Raises: as make; ConfigInvalidError if it cannot draw into an array.
    """
    arguments = dict(env_args or {})
    env = make(env_id, **arguments)
    modes = [str(mode) for mode in env.metadata.get("render_modes") or []]
    env.close()  # type: ignore[no-untyped-call]
    if "rgb_array" not in modes:
        raise ConfigInvalidError(
            f"environment {env_id}: found render modes {modes}, expected rgb_array among them, "
            "without which it cannot be rendered to images. Leave the video out."
        )
    return make(env_id, **{**arguments, "render_mode": "rgb_array"})


def frames_per_second(env_id: str, env_args: Mapping[str, Any] | None = None) -> float:
    """Return at how many steps a second the environment is meant to be watched; 30 by default."""
    env = make(env_id, **(env_args or {}))
    env.close()  # type: ignore[no-untyped-call]
    return float(env.metadata.get("render_fps") or 30)


def render_frame(env: Environment) -> Array:
    """Return what an environment of `make_rendering` looks like now: uint8 [height, width, 3].

    Raises: ExtraMissingError without the library that it draws with, ConfigInvalidError for other
    pictures.
    """
    try:
        image: Any = env.render()
    except gymnasium.error.DependencyNotInstalled as error:
        raise ExtraMissingError(
            f"environment {env.spec.id if env.spec else env}: rendering failed: {error}."
        ) from error
    frame = np.asarray(image)
    if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
        raise ConfigInvalidError(
            f"environment {env.spec.id if env.spec else env}: its image is {frame.dtype} "
            f"{list(frame.shape)}, expected uint8 [height, width, 3]. Correct its render(), or "
            "leave the video out."
        )
    return frame
