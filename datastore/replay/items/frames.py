"""Stacks of frames: each frame is packed once, and seen in every stack that it belongs to."""

from __future__ import annotations

from typing import Any

import numpy as np

from replaylake.datastore.episodes.spaces import Array, Values
from replaylake.datastore.replay.layout import RecordLayout


def stacks(frames: Array, num: int) -> Array:
    """Return the `num` frames that end at each: [B, T + num - 1, ...] to [B, T, num, ...].

    A view: stacks that overlap share their frames' memory, so what is written to a frame of one of
    them shows in the others. Cost: no copy.
    """
    shape = (frames.shape[0], frames.shape[1] - num + 1, num, *frames.shape[2:])
    strides = (frames.strides[0], frames.strides[1], *frames.strides[1:])
    return np.lib.stride_tricks.as_strided(frames, shape, strides)


def consecutive_observations(layout: RecordLayout, rows: Any) -> tuple[Values, Values]:
    """Return what is observed at all but the last step of windows [B, T + frame_stack], and after.

    Each [B, T, *obs], of stacked frames [B, T, frame_stack, *obs]. Views: the observation after one
    step and that of the next one are the same memory.
    """
    if layout.frame_stack == 1:
        return layout.observations(rows[:, :-1]), layout.observations(rows[:, 1:])
    frames: Any = layout.observations(rows)
    stacked = stacks(frames, layout.frame_stack)
    return stacked[:, :-1], stacked[:, 1:]
