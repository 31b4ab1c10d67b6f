"""Text plots: curves in a terminal, in Braille where one is alone and in letters where several are.

What cannot show Braille or blocks (an output that is no UTF-8) gets plain characters.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from replaylake.cli.output.command_output import number_text, result_stream

Points = tuple[NDArray[Any], NDArray[Any]]
"""Places on the x axis, growing, and values: [n] each; what is not finite is left out."""

_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_PLAIN_BLOCKS: Final = "_.-~=+*#"
_BRAILLE: Final = 0x2800
# The bit of each dot of a Braille cell, by row from the top, then column.
_DOTS: Final = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_SEVERAL: Final = "*"


def curve_letters(num: int) -> list[str]:
    """Return what several curves are drawn with: A, B, ..., then numbers and small letters."""
    marks = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789abcdefghijklmnopqrstuvwxyz"
    return [marks[number % len(marks)] for number in range(num)]


def sparkline(values: NDArray[Any], width: int = 24) -> str:
    """Return a line of at most `width` bars, each the mean of its part; blank where none is finite.

    Its scale is from the least to the greatest of these means.
    """
    parts = np.array_split(np.asarray(values, float), min(width, max(1, len(values))))
    means = np.array([_mean(part) for part in parts])
    finite = means[np.isfinite(means)]
    if not len(finite):
        return ""
    low, spread = finite.min(), np.ptp(finite)
    blocks = _BLOCKS if _is_unicode() else _PLAIN_BLOCKS
    return "".join(
        " " if not np.isfinite(mean) else blocks[_level(mean, low, spread, len(blocks))]
        for mean in means
    )


def text_plot(
    curves: Mapping[str, Points],
    *,
    is_lone: bool = True,
    width: int = 72,
    height: int = 10,
    mark: int | None = None,
) -> list[str]:
    """Draw curves over each other on one scale; return the lines, with axes.

    Args:
        curves: by the character that stands for each.
        is_lone: whether there is one alone, which is drawn in dots.
        width: of the drawing, in characters, without the axes.
        height: likewise, in lines.
        mark: a place on the x axis that is pointed at.
    """
    finite = {name: _finite(points) for name, points in curves.items()}
    finite = {name: points for name, points in finite.items() if len(points[0])}
    if not finite:
        return ["no finite values"]
    left = min(xs[0] for xs, _ in finite.values())
    right = max(xs[-1] for xs, _ in finite.values())
    low = min(ys.min() for _, ys in finite.values())
    high = max(ys.max() for _, ys in finite.values())
    scale = _Scale(float(left), float(right), float(low), float(high))
    if is_lone and _is_unicode():
        (points,) = finite.values()
        cells = _draw_dots(points, scale, width, height)
    else:
        cells = _draw_letters(finite, scale, width, height)
    return _add_axes(cells, scale, width, mark)


class _Scale:
    """Where values lie in a drawing."""

    def __init__(self, left: float, right: float, low: float, high: float) -> None:
        self.left, self.right, self.low, self.high = left, right, low, high

    def columns(self, num: int) -> NDArray[np.float64]:
        """Return the edges of so many columns: [num + 1]."""
        if self.right <= self.left:
            return np.array([self.left - 0.5, *[self.left + 0.5] * num])
        return np.linspace(self.left, self.right, num + 1)

    def rows(self, values: NDArray[Any], num: int) -> NDArray[np.int64]:
        """Return the row of each value, 0 at the top."""
        if self.high <= self.low:
            return np.full(len(values), num // 2)
        share = (self.high - values) / (self.high - self.low)
        return np.clip((share * num).astype(np.int64), 0, num - 1)

    def column(self, place: float, num: int) -> int:
        """Return the column of a place."""
        if self.right <= self.left:
            return 0
        return min(num - 1, int((place - self.left) / (self.right - self.left) * num))


def _draw_dots(points: Points, scale: _Scale, width: int, height: int) -> list[list[str]]:
    bits = np.zeros((height, width), np.int64)
    for column, (top, bottom) in enumerate(_spans(points, scale, width * 2, height * 4)):
        for row in range(top, bottom + 1):
            bits[row // 4, column // 2] |= _DOTS[row % 4][column % 2]
    return [[chr(_BRAILLE + cell) if cell else " " for cell in row] for row in bits.tolist()]


def _draw_letters(
    curves: Mapping[str, Points], scale: _Scale, width: int, height: int
) -> list[list[str]]:
    cells = [[" "] * width for _ in range(height)]
    for name, points in curves.items():
        for column, (top, bottom) in enumerate(_spans(points, scale, width, height)):
            # One character a column, or curves that are not smooth would hide each other.
            if top <= bottom:
                row = cells[(top + bottom) // 2]
                row[column] = name if row[column] == " " else _SEVERAL
    return cells


def _spans(points: Points, scale: _Scale, width: int, height: int) -> list[tuple[int, int]]:
    """Return the rows from the top to the bottom of a curve in each column; (1, 0) without it."""
    xs, ys = points
    edges = scale.columns(width)
    spans = []
    for start, end in pairwise(edges):
        inside = ys[(xs >= start) & (xs <= end)]
        # Where the curve enters and leaves the column, so that it does not break.
        ends = [edge for edge in (start, end) if xs[0] <= edge <= xs[-1]]
        heights = np.concatenate([inside, np.interp(ends, xs, ys)])
        rows = scale.rows(heights, height)
        spans.append((int(rows.min()), int(rows.max())) if len(rows) else (1, 0))
    return spans


def _add_axes(cells: list[list[str]], scale: _Scale, width: int, mark: int | None) -> list[str]:
    bar, corner, line, pointer = ("│", "└", "─", "▲") if _is_unicode() else ("|", "+", "-", "^")
    high, low = number_text(scale.high), number_text(scale.low)
    gutter = max(len(high), len(low))
    labels = {0: high, len(cells) - 1: low}
    if scale.high <= scale.low:
        labels = {len(cells) // 2: high}
    lines = [
        f"{labels.get(number, '').rjust(gutter)} {bar}{''.join(row)}".rstrip()
        for number, row in enumerate(cells)
    ]
    axis = [line] * width
    if mark is not None and scale.left <= mark <= scale.right:
        axis[scale.column(mark, width)] = pointer
    lines.append(f"{'':{gutter}} {corner}{''.join(axis)}")
    first, last = f"{scale.left:,.0f}", f"{scale.right:,.0f}"
    lines.append(f"{'':{gutter}}  {first}{last.rjust(width - len(first))}")
    return lines


def _finite(points: Points) -> Points:
    xs, ys = (np.asarray(one, float) for one in points)
    is_finite = np.isfinite(ys)
    return xs[is_finite], ys[is_finite]


def _mean(part: NDArray[Any]) -> float:
    finite = part[np.isfinite(part)]
    return float(finite.mean()) if len(finite) else float("nan")


def _level(value: float, low: float, spread: float, num: int) -> int:
    return num // 2 if spread <= 0 else min(num - 1, int((value - low) / spread * num))


def _is_unicode() -> bool:
    try:
        (_BLOCKS + chr(_BRAILLE)).encode(getattr(result_stream(), "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
