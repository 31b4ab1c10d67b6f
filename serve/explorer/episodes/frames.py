"""Frames: an observation that is an image, as a PNG."""

from __future__ import annotations

import struct
import zlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

# By the number of channels: the color type of PNG (ISO/IEC 15948, table 11.1).
_COLOR_TYPES: Final = {1: 0, 3: 2, 4: 6}
_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"


def encode_png(frame: NDArray[np.uint8]) -> bytes:
    """Return a frame as a PNG: uint8 [H, W], [H, W, C] or [C, H, W] with 1, 3 or 4 channels.

    Of a stack of another number of frames, [H, W, K] or [K, H, W], the last one is drawn.
    """
    pixels = _arrange_channels(frame)
    height, width, channels = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOR_TYPES[channels], 0, 0, 0)
    lines = np.zeros((height, 1 + width * channels), np.uint8)  # each begins with filter 0: none
    lines[:, 1:] = pixels.reshape(height, -1)
    body = zlib.compress(lines.tobytes(), 1)
    return _SIGNATURE + b"".join(
        _chunk(kind, data) for kind, data in ((b"IHDR", header), (b"IDAT", body), (b"IEND", b""))
    )


def _arrange_channels(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return [H, W, C]."""
    if frame.ndim == 2:
        return frame[:, :, None]
    while frame.ndim > 3:  # a stack of frames with channels
        frame = frame[-1]
    # Channels are the smaller of the two outer dims: no frame is four pixels wide.
    if frame.shape[0] < frame.shape[2]:
        frame = np.moveaxis(frame, 0, 2)
    return frame if frame.shape[2] in _COLOR_TYPES else frame[:, :, -1:]


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
