"""Charts: small SVG pictures, their texts in HTML around them, so that these keep their size.

The colors are classes of page.css, which has them for light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from replaylake.serve.pages.markup import Child, Markup, tag
from replaylake.serve.pages.texts import number_text

if TYPE_CHECKING:
    from replaylake.datastore.lake.profile.column_statistics import Histogram

# Width of one bar, and height of the picture, in the units of its viewBox.
_BAR: Final = 10
_HEIGHT: Final = 100
# So few whole numbers are bars of their own, each with its value below.
_MAX_LABELED: Final = 12
_NUM_COLORS: Final = 8
_GRAY: Final = 7
# Height of a box of a flow chart with its margin, and width between two stages, in CSS pixels.
_NODE: Final = 56
_GAP: Final = 48
# Width of an axis of parallel coordinates, in the units of their viewBox.
_COLUMN: Final = 100


def column_chart(
    values: Sequence[float],
    titles: Sequence[str],
    *,
    label: str,
    axis: Sequence[str],
    links: Sequence[str] | None = None,
) -> Markup:
    """Draw a column for each value, lowest 0.

    titles: the text of each column, shown under the pointer. label: what the chart is of. axis: the
    texts below it, spread over its width. links: where each column leads.
    """
    top = max(values, default=0) or 1
    gap = 1.5 if len(values) <= _MAX_LABELED else 0.5
    # A few columns are no wider than a tenth of the picture.
    gap = max(gap, (_BAR - len(values)) / 2)
    bars: list[Markup] = []
    for place, (value, title) in enumerate(zip(values, titles, strict=True)):
        # One that is there is seen, however low.
        height = max(1.0, value / top * _HEIGHT) if value > 0 else 0
        bar = tag(
            "rect",
            x=place * _BAR + gap,
            y=_round(_HEIGHT - height),
            width=_BAR - 2 * gap,
            height=_round(height),
            class_="bar",
        )
        if links is None:
            bars.append(tag("g", tag("title", title), bar))
            continue
        area = tag("rect", x=place * _BAR, y=0, width=_BAR, height=_HEIGHT, class_="hit")
        bars.append(tag("a", tag("title", title), area, bar, href=links[place], aria_label=title))
    picture = tag(
        "svg",
        bars,
        viewBox=f"0 0 {max(1, len(values)) * _BAR} {_HEIGHT}",
        preserveAspectRatio="none",
        role="img" if links is None else "group",
        aria_label=label,
    )
    is_labeled = len(axis) == len(values)
    places = "axis each" if is_labeled else "axis"
    return tag(
        "figure",
        tag("figcaption", label, tag("span", f"max {number_text(top)}", class_="quiet")),
        picture,
        tag("div", [tag("span", text) for text in axis], class_=places),
        class_="chart",
    )


def sparkline(counts: Sequence[int], *, label: str) -> Markup:
    """Draw a histogram of a line's height, for a cell of a table. label: what it is of."""
    top = max(counts, default=0) or 1
    bars = []
    for place, num in enumerate(counts):
        if num:
            height = max(8.0, num / top * _HEIGHT)
            y = _round(_HEIGHT - height)
            shape = {"x": place * _BAR + 0.5, "y": y, "width": _BAR - 1, "height": _round(height)}
            bars.append(tag("rect", **shape, class_="bar"))
    return tag(
        "svg",
        tag("title", label),
        bars,
        viewBox=f"0 0 {max(1, len(counts)) * _BAR} {_HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        class_="spark",
    )


def histogram_chart(
    histogram: Histogram | None,
    label: str,
    unit: str = "episodes",
    link: Callable[[float, float, bool], str] | None = None,
) -> Markup | None:
    """Draw a histogram; None where there is nothing to draw.

    link: the address of the values from one edge up to another; its third argument is whether the
    bin is the last one, which includes its upper edge.
    """
    if histogram is None:
        return None
    edges, counts = histogram.edges, histogram.counts
    is_whole = len(counts) <= _MAX_LABELED and all(_is_half(edge) for edge in edges)
    if is_whole:
        names = [f"{edge + 0.5:,.0f}" for edge in edges[:-1]]
    elif len(counts) == 1:
        names = [number_text(float(edges[0]))]
    else:
        names = [
            f"{number_text(float(low))} to {number_text(float(high))}"
            for low, high in pairwise(edges)
        ]
    if is_whole or len(counts) == 1:
        axis = names
    else:
        middle = (edges[0] + edges[-1]) / 2
        axis = [number_text(float(f"{edge:.4g}")) for edge in (edges[0], middle, edges[-1])]
    titles = [f"{name}: {num:,} {unit}" for name, num in zip(names, counts, strict=True)]
    links = None
    if link is not None:
        last = len(counts) - 1
        links = [link(edges[i], edges[i + 1], i == last) for i in range(len(counts))]
    return column_chart(counts, titles, label=label, axis=axis, links=links)


def bar_list(
    rows: Sequence[tuple[str, float, str]],
    *,
    label: str,
    links: Sequence[str] | None = None,
    top: float = 0.0,
) -> Markup:
    """Draw a bar for each (name, value, text) with its name before and its text after it.

    top: the value of a bar of the whole width, where that is larger than all values.
    """
    top = max(top, max((value for _, value, _ in rows), default=0)) or 1
    items = []
    for place, (name, value, text) in enumerate(rows):
        width = max(0.6, value / top * _HEIGHT) if value > 0 else 0
        bar = tag(
            "svg",
            tag("rect", x=0, y=0, width=_round(width), height=10, class_="bar"),
            viewBox=f"0 0 {_HEIGHT} 10",
            preserveAspectRatio="none",
            aria_hidden="true",
        )
        shown = name or "(empty)"
        named = tag("span", shown, class_="name", title=shown)
        if links is not None:
            named = tag("a", shown, href=links[place], class_="name", title=shown)
        items.append(tag("li", named, bar, tag("span", text, class_="number")))
    return tag("ul", items, class_="bars", aria_label=label)


@dataclass(frozen=True)
class Interval:
    """A value with its interval; without one, low and high are None. text: the numbers."""

    name: str
    value: float
    low: float | None
    high: float | None
    text: str


def interval_chart(
    rows: Sequence[Interval], *, label: str, reference: tuple[str, float] | None = None
) -> Markup:
    """Draw intervals below each other on one axis (a forest plot), each with its numbers.

    reference: the name and the value of a line through all rows. Values have to be finite.
    """
    ends = [end for row in rows for end in (row.value, row.low, row.high) if end is not None]
    if reference is not None:
        ends.append(reference[1])
    low, high = min(ends, default=0.0), max(ends, default=0.0)
    # Halves first: the difference of two finite numbers may overflow.
    span = (high / 2 - low / 2) or 0.5

    def place(value: float) -> str:
        return f"{_round(4 + 92 * ((value / 2 - low / 2) / span))}%"

    items = []
    for row in rows:
        shapes = []
        if reference is not None:
            x = place(reference[1])
            shapes.append(tag("line", x1=x, x2=x, y1=0, y2="100%", class_="reference"))
        if row.low is not None and row.high is not None:
            x1, x2 = place(row.low), place(row.high)
            shapes.append(tag("line", x1=x1, x2=x2, y1="50%", y2="50%", class_="interval"))
            shapes += [tag("line", x1=x, x2=x, y1="30%", y2="70%", class_="end") for x in (x1, x2)]
        shapes.append(tag("circle", cx=place(row.value), cy="50%", r=4, class_="bar"))
        name = tag("span", row.name, class_="name", title=row.name)
        picture = tag("svg", shapes, aria_hidden="true")
        items.append(tag("li", name, picture, tag("span", row.text, class_="number")))
    caption: list[Markup] = []
    if reference is not None:
        text = f"line: {reference[0]}, {number_text(reference[1])}"
        caption.append(tag("span", text, class_="quiet"))
    return tag(
        "figure",
        tag("figcaption", label, caption),
        tag("ul", items, class_="bars forest", aria_label=label),
        class_="chart",
    )


def stacked_chart(
    parts: Sequence[tuple[str, Sequence[int], str]],
    *,
    label: str,
    axis: Sequence[str],
    unknown: str | None = None,
) -> Markup:
    """Draw columns of several parts, each (name, its value in every column, text), and a legend.

    unknown: the name of a part that is drawn in gray, as what is not known.
    """
    colors = {name: number for number, name in enumerate(n for n, _, _ in parts if n != unknown)}
    num = len(parts[0][1]) if parts else 0
    totals = [sum(values[i] for _, values, _ in parts) for i in range(num)]
    top = max(totals, default=0) or 1
    rects = []
    for i in range(num):
        below = 0.0
        for name, values, _ in parts:
            if not values[i]:
                continue
            height = values[i] / top * _HEIGHT
            rects.append(
                tag(
                    "rect",
                    tag("title", f"{name}: {values[i]:,}"),
                    x=i * _BAR,
                    y=_round(_HEIGHT - below - height),
                    width=_BAR,
                    height=_round(height),
                    class_=_color(colors.get(name, _GRAY)),
                )
            )
            below += height
    picture = tag(
        "svg",
        rects,
        viewBox=f"0 0 {max(1, num) * _BAR} {_HEIGHT}",
        preserveAspectRatio="none",
        shape_rendering="crispEdges",
        role="img",
        aria_label=label,
    )
    legend = [
        tag(
            "li",
            swatch(colors.get(name, _GRAY)),
            tag("span", name, class_="name"),
            tag("span", text),
        )
        for name, _, text in parts
    ]
    return tag(
        "figure",
        tag("figcaption", label, tag("span", f"max {number_text(top)}", class_="quiet")),
        picture,
        tag("div", [tag("span", text) for text in axis], class_="axis"),
        tag("ul", legend, class_="legend"),
        class_="chart wide",
    )


@dataclass(frozen=True)
class ParallelAxis:
    """An axis of parallel coordinates: what it is of, and what is at its two ends."""

    name: str
    top: str
    bottom: str


@dataclass(frozen=True)
class ParallelLine:
    """A line through all axes: its height on each, from 0 to 1, or None where it ends before.

    strength: from 0 to 1, how clearly it is seen beside others.
    """

    heights: Sequence[float | None]
    title: str
    link: str
    strength: float
    is_best: bool = False


def parallel_chart(
    axes: Sequence[ParallelAxis], lines: Sequence[ParallelLine], *, label: str
) -> Markup:
    """Draw parallel coordinates; each line leads somewhere, and says what it is."""
    drawn = []
    # The best ones last, and so above the others.
    for line in sorted(lines, key=lambda one: (one.is_best, one.strength)):
        points = " ".join(
            f"{_COLUMN * place + _COLUMN // 2},{_round(4 + 92 * (1 - height))}"
            for place, height in enumerate(line.heights)
            if height is not None
        )
        opacity = _round(0.4 + 0.5 * line.strength)
        shapes = [
            tag("polyline", points=points, class_="hit-line"),
            tag(
                "polyline",
                points=points,
                class_="line best" if line.is_best else "line",
                stroke_opacity=1 if line.is_best else opacity,
            ),
        ]
        drawn.append(
            tag("a", tag("title", line.title), shapes, href=line.link, aria_label=line.title)
        )
    rules = [
        tag("line", x1=x, x2=x, y1=4, y2=96, class_="reference")
        for x in range(_COLUMN // 2, _COLUMN * len(axes), _COLUMN)
    ]
    picture = tag(
        "svg",
        rules,
        drawn,
        viewBox=f"0 0 {_COLUMN * max(1, len(axes))} {_HEIGHT}",
        preserveAspectRatio="none",
        role="group",
        aria_label=label,
    )
    tops = [tag("span", tag("b", axis.name), tag("br"), axis.top) for axis in axes]
    bottoms = [tag("span", axis.bottom) for axis in axes]
    return tag(
        "figure",
        tag("div", tops, class_="axis each"),
        picture,
        tag("div", bottoms, class_="axis each"),
        class_="chart parallel",
    )


@dataclass(frozen=True)
class FlowNode:
    """A box of a flow chart: its name, a line below it, and where it leads.

    is_id: whether the name is an id, which is written in letters of one width.
    """

    name: str
    detail: str = ""
    link: str | None = None
    is_id: bool = False


def flow_chart(
    stages: Sequence[tuple[str, Mapping[str, FlowNode]]],
    links: Sequence[tuple[int, str, str]],
    *,
    label: str,
) -> Markup:
    """Draw stages beside each other, each a title and boxes by key, and lines between them.

    links: (place of a stage, key of a box in it, key of a box in the next one). explorer.css gives
    boxes the height of _NODE, so that the lines meet them. Each box
    also names in words what leads to it, for who does not see the lines.
    """
    rows = [{key: row for row, key in enumerate(nodes)} for _, nodes in stages]
    height = _NODE * max((len(nodes) for _, nodes in stages), default=0)
    parts: list[Markup] = []
    for place, (title, nodes) in enumerate(stages):
        boxes = []
        for key, node in nodes.items():
            sources = [
                stages[at][1][start] for at, start, end in links if (at + 1, end) == (place, key)
            ]
            from_names = ", ".join(f"{one.name} {one.detail}".strip() for one in sources)
            origin = tag("span", f"from {from_names}", class_="from") if sources else None
            name: Child = node.name or "(empty)"
            if node.link is not None:
                name = tag("a", name, href=node.link)
            detail = tag("div", node.detail, class_="quiet") if node.detail else None
            whole = f"{node.name} {node.detail}".strip()
            named = tag("div", name, class_="mono" if node.is_id else None)
            boxes.append(tag("li", named, detail, origin, title=whole))
        parts.append(
            tag("div", tag("h3", title), tag("ul", boxes, aria_label=title), class_="stage")
        )
        if place + 1 < len(stages):
            lines = [
                tag(
                    "path",
                    d=_curve(rows[place][start], rows[place + 1][end]),
                    class_="flow-line",
                )
                for at, start, end in links
                if at == place
            ]
            picture = tag(
                "svg",
                lines,
                width=_GAP,
                height=height,
                viewBox=f"0 0 {_GAP} {height}",
                aria_hidden="true",
            )
            parts.append(picture)
    return tag(
        "div",
        tag("div", parts, class_="flow"),
        class_="scroll",
        role="region",
        tabindex=0,
        aria_label=label,
    )


def _curve(start: int, end: int) -> str:
    """Return a line from the middle of one row to that of another, level at both ends."""
    y1, y2 = (_NODE * row + _NODE // 2 for row in (start, end))
    half = _GAP // 2
    return f"M0 {y1} C{half} {y1} {half} {y2} {_GAP} {y2}"


def density_map(grid: Sequence[Sequence[int]], *, label: str) -> Markup:
    """Draw counts of a grid, [column][row from below]; darker is more, nothing is left empty."""
    top = math.log1p(max((max(column, default=0) for column in grid), default=0)) or 1
    cells = []
    for x, column in enumerate(grid):
        for y, num in enumerate(column):
            if num:
                opacity = 0.15 + 0.85 * math.log1p(num) / top
                cells.append(
                    tag(
                        "rect",
                        x=x,
                        y=len(column) - 1 - y,
                        width=1,
                        height=1,
                        fill_opacity=_round(opacity),
                    )
                )
    side = max(1, len(grid))
    picture = tag("svg", cells, viewBox=f"0 0 {side} {side}", role="img", aria_label=label)
    return tag("figure", tag("figcaption", label), picture, class_="chart map")


def swatch(number: int) -> Markup:
    """Draw the color of a part or a line by its number, for a legend."""
    square = tag("rect", x=0, y=0, width=10, height=10, class_=_color(number))
    return tag("svg", square, viewBox="0 0 10 10", class_="swatch", aria_hidden="true")


def _color(number: int) -> str:
    return f"c{number % _NUM_COLORS}"


def _round(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")


def _is_half(edge: float) -> bool:
    """Whether a bin edge is a whole number plus one half, as where the bins hold whole numbers."""
    return abs(edge) < 1e15 and (edge - 0.5).is_integer()
