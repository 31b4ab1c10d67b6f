"""Draws: randomness for episodes that are acted for together, each from streams of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import SpaceUnsupportedError

# Drawn ahead of each stream: for this many calls, and at least so many numbers.
_CALLS: Final = 16
_NUMBERS: Final = 64


class EpisodeRandom:
    """Stands in for a numpy Generator in `Policy.act`: row i is drawn from episode i's own stream.

    So what an episode draws depends neither on which others share its batch nor on when they began.
    Numbers are drawn ahead, many of a stream at once: two calls for 8 episodes in place of 8. One
    stream gives uniforms, another normals, so that either can be drawn ahead.
    """

    def __init__(self) -> None:
        self._seeds: list[int] = []
        self._uniforms = _StreamBuffer(lambda stream, row: stream.random(out=row))
        self._normals = _StreamBuffer(lambda stream, row: stream.standard_normal(out=row))

    def restart(self, seeds: Sequence[int]) -> None:
        """Begin with these episodes, one a row."""
        self._seeds = list(seeds)
        self._uniforms.streams = [_stream(seed, 1) for seed in seeds]
        self._normals.streams = []

    def start(self, row: int, seed: int) -> None:
        """Begin another episode in a row."""
        self._seeds[row] = seed
        self._uniforms.replace(row, _stream(seed, 1))
        if self._normals.streams:
            self._normals.replace(row, _stream(seed, 2))

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone."""
        self._seeds = [self._seeds[row] for row in rows]
        self._uniforms.select_rows(rows)
        self._normals.select_rows(rows)

    def random(self, size: Any) -> Array:
        """Draw uniformly from [0, 1): float64 of shape `size`, whose first dim is the rows'."""
        return self._uniforms.take_numbers(self._shape(size))

    def standard_normal(self, size: Any) -> Array:
        """Draw from N(0, 1): float64 of shape `size`, whose first dim is the rows'."""
        shape = self._shape(size)
        if not self._normals.streams:
            self._normals.streams = [_stream(seed, 2) for seed in self._seeds]
        return self._normals.take_numbers(shape)

    def uniform(self, low: Any, high: Any, size: Any) -> Array:
        """Draw uniformly from [low, high): float64 of shape `size`."""
        scale: Array = np.asarray(high) - np.asarray(low)
        return low + scale * self.random(size)  # type: ignore[no-any-return]

    def _shape(self, size: Any) -> tuple[int, ...]:
        shape = (size,) if isinstance(size, int) else tuple(size)
        if not shape or shape[0] != len(self._seeds):
            raise SpaceUnsupportedError(
                f"act: found a random draw of shape {list(shape)}, expected {len(self._seeds)} "
                "rows, one per episode. Draw with the number of observations as the first dim."
            )
        return shape


def _stream(seed: int, kind: int) -> np.random.Generator:
    # Not default_rng(seed): environments seed theirs so, and actions would follow their draws.
    return np.random.default_rng([seed, kind])


class _StreamBuffer:
    """Numbers of N streams, drawn ahead; all are at one column, wherever each began."""

    def __init__(self, draw: Callable[[np.random.Generator, Array], object]) -> None:
        self._draw = draw
        self._streams: list[np.random.Generator] = []
        self._numbers = np.empty((0, _NUMBERS))
        self._at = 0

    @property
    def streams(self) -> list[np.random.Generator]:
        return self._streams

    @streams.setter
    def streams(self, streams: list[np.random.Generator]) -> None:
        """Begin anew, with nothing drawn yet."""
        self._streams = streams
        self._numbers = np.empty((len(streams), self._numbers.shape[1]))
        self._at = self._numbers.shape[1]

    def replace(self, row: int, stream: np.random.Generator) -> None:
        self._streams[row] = stream
        self._draw(stream, self._numbers[row, self._at :])

    def select_rows(self, rows: Sequence[int]) -> None:
        if self._streams:
            self._streams = [self._streams[row] for row in rows]
            self._numbers = self._numbers[list(rows)]

    def take_numbers(self, shape: tuple[int, ...]) -> Array:
        """Return the next numbers of each stream, in this shape."""
        num, width = self._numbers.shape
        count = 1
        for dim in shape[1:]:
            count *= dim
        if self._at + count > width:
            rest = self._numbers[:, self._at :]
            self._numbers = np.empty((num, max(_NUMBERS, _CALLS * count)))
            self._numbers[:, : rest.shape[1]] = rest
            for stream, row in zip(self._streams, self._numbers, strict=True):
                self._draw(stream, row[rest.shape[1] :])
            self._at = 0
        part = self._numbers[:, self._at : self._at + count]
        self._at += count
        return part.copy().reshape(shape)
