"""Plots: the style of all pictures that matplotlib draws, and names as it can show them.

Matplotlib is imported here, in curves.py, which draws runs and returns, and in forest.py.
"""

from __future__ import annotations

from typing import Any, Final

from replaylake.datastore.errors import ExtraMissingError

try:
    import matplotlib  # noqa: F401  (so that its absence is told here, once)
except ModuleNotFoundError as _error:
    raise ExtraMissingError(
        "pictures: found no matplotlib, expected it to draw them. "
        "Run: pip install 'replaylake[plot]'."
    ) from _error

_GRID: Final = "#e3e6ea"
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


def simplify_axes(axes: Any) -> None:
    """Leave of an axis what helps reading."""
    axes.grid(axis="y", color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=2)


def shorten_name(name: str, num: int = 28) -> str:
    """Return a name as matplotlib can show it, cut to so many characters."""
    # Matplotlib reads $...$ as mathematics, and a name may hold anything.
    text = "".join(c if c.isprintable() else "?" for c in name).replace("$", r"\$")
    return text if len(text) <= num else text[: num - 3] + "..."
