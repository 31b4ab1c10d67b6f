"""Video: frames that an environment drew, as an animated GIF or PNG, or as MP4."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import ConfigInvalidError, ExtraMissingError
from replaylake.datastore.storage.storage import atomic_write

SUFFIXES: Final = (".gif", ".png", ".mp4")
# Longer sides are halved, thirded, ... to this; shorter ones than the least are repeated.
_MAX_SIDE: Final = 480
_MIN_SIDE: Final = 160
# Browsers show a GIF's frame for a tenth of a second where it asks for less than 20 ms.
_MAX_GIF_RATE: Final = 50.0


class Video:
    """Collects frames, then writes them.

    They are kept compressed: 500 frames of CartPole, 360 MB of pixels, take 1 MB.
    """

    def __init__(self, path: Path, frames_per_second: float) -> None:
        """Check that the file can be written. Raises: ConfigInvalidError, ExtraMissingError."""
        self.path = Path(path)
        self._rate = frames_per_second
        self._frames: dict[int, list[tuple[bytes, tuple[int, ...]]]] = {}
        self._skipped: dict[int, int] = {}
        suffix = self.path.suffix.lower()
        if suffix not in SUFFIXES:
            raise ConfigInvalidError(
                f"video {self.path}: found {suffix or 'no suffix'}, expected {', '.join(SUFFIXES)}."
            )
        if not self.path.absolute().parent.is_dir():
            raise ConfigInvalidError(
                f"video {self.path}: found no folder {self.path.absolute().parent}, expected one."
            )
        self._every = 1
        if suffix == ".gif":
            self._every = max(1, int(np.ceil(frames_per_second / _MAX_GIF_RATE)))
        self._library: Any = _av() if suffix == ".mp4" else _pillow()

    @property
    def num_frames(self) -> int:
        """Frames that are kept so far."""
        return sum(map(len, self._frames.values()))

    def add(self, episode: int, frame: Array) -> None:
        """Add a frame, uint8 [height, width, 3]; episodes may come mixed, each in its order."""
        number = self._skipped.get(episode, 0)
        self._skipped[episode] = number + 1
        if number % self._every == 0:
            small = _resize_frame(frame)
            packed = zlib.compress(small.tobytes(), 1)
            self._frames.setdefault(episode, []).append((packed, small.shape))

    def save(self) -> None:
        """Write the file: whole, or not at all. Raises: ConfigInvalidError, StorageError."""
        shapes = {shape for frames in self._frames.values() for _, shape in frames}
        if len(shapes) != 1:
            raise ConfigInvalidError(
                f"video {self.path}: found frames of the sizes {sorted(shapes)}, expected one size."
            )
        with atomic_write(self.path) as stream:
            if self.path.suffix.lower() == ".mp4":
                self._encode(stream, shapes.pop())
            else:
                self._animate(stream)

    def _pixels(self) -> Iterator[Array]:
        for _, frames in sorted(self._frames.items()):
            for packed, shape in frames:
                yield np.frombuffer(zlib.decompress(packed), np.uint8).reshape(shape)

    def _animate(self, stream: BinaryIO) -> None:
        first = self._library.fromarray(next(self._pixels()))
        first.save(
            stream,
            format=self.path.suffix[1:].upper(),
            save_all=True,
            append_images=_RemainingFrames(self._library, self._pixels),
            duration=1000 * self._every / self._rate,
            loop=0,
        )

    def _encode(self, stream: BinaryIO, shape: tuple[int, ...]) -> None:
        av = self._library
        # Seekable, and MP4's index is written last, to its front.
        with av.open(stream, "w", format="mp4", options={"movflags": "faststart"}) as container:
            track = container.add_stream("libx264", rate=Fraction(self._rate).limit_denominator())
            # Colors are kept for every second pixel: sides have to be even.
            track.height, track.width = (side - side % 2 for side in shape[:2])
            track.pix_fmt = "yuv420p"
            for pixels in self._pixels():
                even = np.ascontiguousarray(pixels[: track.height, : track.width])
                for packet in track.encode(av.VideoFrame.from_ndarray(even, format="rgb24")):
                    container.mux(packet)
            for packet in track.encode():
                container.mux(packet)


class _RemainingFrames:
    """The images after the first, unpacked one by one: Pillow may go through them twice."""

    def __init__(self, pillow: Any, pixels: Callable[[], Iterator[Array]]) -> None:
        self._pillow = pillow
        self._pixels = pixels

    def __iter__(self) -> Iterator[Any]:
        return (self._pillow.fromarray(pixels) for pixels in islice(self._pixels(), 1, None))


def _resize_frame(frame: Array) -> Array:
    """Return a frame at a size to be watched: shrunk by means, enlarged by repeating."""
    longest = max(frame.shape[:2])
    if longest <= 0:
        return frame
    if longest < _MIN_SIDE:
        times = -(-_MIN_SIDE // longest)
        larger: Array = frame.repeat(times, axis=0).repeat(times, axis=1)
        return larger
    by = -(-longest // _MAX_SIDE)
    if by == 1:
        return frame
    height, width = (side // by * by for side in frame.shape[:2])
    total = np.full((height // by, width // by, 3), by * by // 2, np.uint32)
    for row in range(by):
        for column in range(by):
            total += frame[row:height:by, column:width:by]
    means: Array = (total // (by * by)).astype(np.uint8)
    return means


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ExtraMissingError(
            "video: found no Pillow, expected it to write GIF and PNG. "
            "Run: pip install 'replaylake[formats]'."
        ) from error
    return Image


def _av() -> Any:
    try:
        import av
    except ImportError as error:
        raise ExtraMissingError(
            "video: found no PyAV, expected it to write MP4. "
            "Run: pip install 'replaylake[video]', or name a "
            ".gif or .png."
        ) from error
    return av
