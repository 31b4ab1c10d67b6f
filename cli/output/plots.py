"""Plots: a profile as pictures, each an SVG that stands in the page itself.

Matplotlib is imported here and in curves.py, which draws runs and returns in the same style.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from replaylake.datastore.errors import ExtraMissingError

if TYPE_CHECKING:
    from replaylake.datastore.lake.profile.column_statistics import Dimension, Histogram
    from replaylake.datastore.lake.profile.profile import PolicyShare
    from replaylake.datastore.lake.profile.vectors import ValueCounts

try:
    import matplotlib as mpl
    from matplotlib.figure import Figure
except ModuleNotFoundError as _error:
    raise ExtraMissingError(
        "pictures: found no matplotlib, expected it to draw them. "
        "Run: pip install 'replaylake[plot]'."
    ) from _error

_INK: Final = "#1f3a5f"
_FILL: Final = "#5b8db8"
_LIMIT: Final = "#b5482f"
_GRID: Final = "#e3e6ea"
_COLUMNS: Final = 4
# Characters of names that fit beside one another under a picture.
_MAX_LEVEL: Final = 44
# So few whole numbers are bars of their own, each with its count.
_MAX_WHOLE: Final = 12
# Texts stay texts, and the same data gives the same bytes. Any: matplotlib's stubs want literals.
STYLE: Final[Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "replaylake",
    "font.family": "sans-serif",
    "font.size": 8.5,
    "axes.edgecolor": "#9aa3ad",
    "axes.labelcolor": "#333",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": "#555",
    "ytick.color": "#555",
}


def distribution(histogram: Histogram | None, label: str, unit: str = "episodes") -> str | None:
    """Draw one histogram; None where there is nothing to draw."""
    if histogram is None:
        return None
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.6, 2.3), layout="constrained")
        axes = figure.add_subplot()
        _bars(axes, histogram, is_labeled=True)
        axes.set_xlabel(label)
        axes.set_ylabel(unit)
        return _svg(figure)


def dimensions(each: Sequence[Dimension]) -> str | None:
    """Draw a histogram of each number, with its bounds in the space as dashed lines."""
    numeric = [one for one in each if one.histogram is not None]
    if not numeric:
        return None
    num_rows = -(-len(numeric) // _COLUMNS)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.4, 1.75 * num_rows), layout="constrained")
        grid = figure.subplots(num_rows, _COLUMNS, squeeze=False).ravel()
        for axes, one in zip(grid, numeric, strict=False):
            assert one.histogram is not None
            _bars(axes, one.histogram)
            axes.set_title(shorten_name(one.name), fontsize=8.5, loc="left", color="#222")
            axes.set_yticks([])
            for bound in (one.low, one.high):
                if bound is not None and _is_near(bound, one):
                    axes.axvline(bound, color=_LIMIT, linestyle="--", linewidth=1)
            if len(one.histogram.counts) > _MAX_WHOLE:
                axes.locator_params(axis="x", nbins=4)
        for axes in grid[len(numeric) :]:
            axes.set_visible(False)
        return _svg(figure)


def counts(values: ValueCounts) -> str:
    """Draw how often each value of a discrete space occurs, at most 60 of them one by one."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.6, 2.3), layout="constrained")
        axes = figure.add_subplot()
        places = range(values.start, values.start + len(values.counts))
        axes.bar(places, values.counts, width=0.8 if len(values.counts) <= 60 else 1.0, color=_FILL)
        if len(values.names) and len(values.counts) <= 20:
            axes.set_xticks(list(places), [shorten_name(name, 16) for name in values.names])
            if max(map(len, values.names)) * len(values.names) > _MAX_LEVEL:
                axes.tick_params(axis="x", labelrotation=60)
        elif len(values.counts) <= 20:
            axes.set_xticks(list(places))
        axes.set_xlabel(shorten_name(values.name))
        axes.set_ylabel("steps")
        simplify_axes(axes)
        return _svg(figure)


def ends(terminated: int, truncated: int, still_open: int) -> str:
    """Draw how episodes end, as one bar each."""
    names = ["terminated", "truncated", "open"]
    values = [terminated, truncated, still_open]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.6, 1.5), layout="constrained")
        axes = figure.add_subplot()
        bars = axes.barh(names, values, color=[_INK, _FILL, "#c9d3dd"], height=0.62)
        axes.bar_label(bars, [f"{value:,}" for value in values], padding=4, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel("episodes")
        axes.margins(x=0.16)
        simplify_axes(axes)
        return _svg(figure)


def observation_map(grid: Sequence[Sequence[int]]) -> str:
    """Draw where observations lie, on the two axes along which they vary most; darker is more."""
    import numpy as np

    cells = np.asarray(grid, dtype=float).T
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(3.4, 3.1), layout="constrained")
        axes = figure.add_subplot()
        image = np.ma.masked_equal(np.log1p(cells), 0)
        axes.imshow(image, origin="lower", cmap="Blues", vmin=-0.8, interpolation="nearest")
        axes.set_xlabel("first principal component")
        axes.set_ylabel("second")
        axes.set_xticks([])
        axes.set_yticks([])
        return _svg(figure)


def policies(parts: Sequence[PolicyShare], by_timestamp: bool) -> str:
    """Draw which policy version wrote how much, over time or over the order of rows."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.4, 2.4), layout="constrained")
        axes = figure.add_subplot()
        colors = mpl.colormaps["viridis"].resampled(max(2, len(parts)))
        for number, one in enumerate(parts):
            below = [sum(p.by_period[i] for p in parts[:number]) for i in range(len(one.by_period))]
            axes.bar(
                range(len(one.by_period)),
                one.by_period,
                bottom=below,
                width=1.0,
                linewidth=0,
                antialiased=False,
                color=colors(number),
                label=shorten_name(policy_name(one), 34),
            )
        axes.set_xlabel("time" if by_timestamp else "rows, in the order they were committed")
        axes.set_ylabel("steps")
        axes.set_xticks([])
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
        simplify_axes(axes)
        return _svg(figure)


def policy_name(one: PolicyShare) -> str:
    """Return how a policy version is called on the page."""
    if one.policy is None:
        return "not recorded"
    return one.policy if one.version is None else f"{one.policy}:{one.version}"


def _bars(axes: Any, histogram: Histogram, *, is_labeled: bool = False) -> None:
    if len(histogram.counts) == 1:
        # A lone value: a bar as wide as its bin would be all there is, or nothing at all.
        middle = (histogram.edges[0] + histogram.edges[1]) / 2
        axes.bar([f"{middle:g}"], histogram.counts, width=0.2, color=_FILL)
        axes.set_xlim(-1, 1)
    elif len(histogram.counts) <= _MAX_WHOLE and all(_is_half(edge) for edge in histogram.edges):
        places = [round(edge + 0.5) for edge in histogram.edges[:-1]]
        bars = axes.bar(places, histogram.counts, width=0.8, color=_FILL)
        axes.set_xticks(places)
        if is_labeled:
            axes.bar_label(bars, [f"{n:,}" for n in histogram.counts], padding=2, fontsize=8)
            axes.margins(y=0.12)
    else:
        widths = [b - a for a, b in zip(histogram.edges[:-1], histogram.edges[1:], strict=True)]
        axes.bar(histogram.edges[:-1], histogram.counts, width=widths, align="edge", color=_FILL)
    simplify_axes(axes)


def simplify_axes(axes: Any) -> None:
    """Leave of an axis what helps reading."""
    axes.grid(axis="y", color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=2)


def _is_half(edge: float) -> bool:
    """Whether a bin edge is a whole number plus one half, as where the bins hold whole numbers."""
    return abs(edge) < 1e15 and (edge - 0.5).is_integer()


def _is_near(bound: float, one: Dimension) -> bool:
    """Whether a bound can be drawn without pressing the data into a corner."""
    width = max(one.maximum - one.minimum, 1e-12)
    return one.minimum - 2 * width <= bound <= one.maximum + 2 * width


def shorten_name(name: str, num: int = 28) -> str:
    """Return a name as matplotlib can show it, cut to so many characters."""
    # Matplotlib reads $...$ as mathematics, and a name may hold anything.
    text = "".join(c if c.isprintable() else "?" for c in name).replace("$", r"\$")
    return text if len(text) <= num else text[: num - 3] + "..."


def _svg(figure: Figure) -> str:
    sink = io.StringIO()
    figure.savefig(sink, format="svg", metadata={"Date": None, "Creator": None})
    text = sink.getvalue()
    # What comes before is for a file of its own.
    return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', "", text[text.index("<svg") :], count=1)
