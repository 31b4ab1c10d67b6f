"""Curves: learning curves of runs, and returns of policies, as picture files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import matplotlib as mpl
from matplotlib.figure import Figure

from replaylake.cli.output.plots import STYLE, shorten_name, simplify_axes
from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.storage.storage import atomic_write

if TYPE_CHECKING:
    from replaylake.datastore.lake.runs.metrics import Curve

FORMATS: Final = (".png", ".svg", ".pdf")
# Told apart with any kind of color vision (Okabe & Ito 2008), then by dashes.
_COLORS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES: Final = ("-", "--", ":", "-.")
_COLUMNS: Final = 2
# Points so few are marked, or a measurement made ten times would show no dots.
_MAX_MARKED: Final = 40


def check_picture(path: Path) -> Path:
    """Return the path if a picture can go there. Raises: ConfigInvalidError."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigInvalidError(
            f"--plot {path}: found {path.suffix or 'no suffix'}, expected {', '.join(FORMATS)}. "
            "Give the file one of these endings."
        )
    if not path.absolute().parent.is_dir():
        raise ConfigInvalidError(
            f"--plot {path}: found no folder {path.absolute().parent}, expected one. Make it first."
        )
    return path


def draw_learning_curves(
    path: Path,
    curves: Mapping[str, Mapping[str, Curve]],
    names: Sequence[str],
    updates: Mapping[str, int | None],
) -> None:
    """Draw each metric of `names`, with a line a run, by update.

    Args:
        path: the picture's file.
        curves: by the run's label, its metrics by name.
        names: of the metrics, in the order in which they are drawn.
        updates: by label, the update whose policy was registered: a ring on its lines.

    Raises: ConfigInvalidError for another kind of file, StorageError.
    """
    num_rows = -(-len(names) // _COLUMNS)
    points = [one[name] for one in curves.values() for name in names if name in one]
    last = max(int(curve.updates[-1]) for curve in points)
    with mpl.rc_context({**STYLE, "font.size": 9}):
        figure = Figure(figsize=(9.4, 2.5 * num_rows + 0.4), layout="constrained", dpi=130)
        grid = figure.subplots(num_rows, min(_COLUMNS, len(names)), squeeze=False).ravel()
        for axes, name in zip(grid, names, strict=False):
            for number, (label, metrics) in enumerate(curves.items()):
                if name in metrics:
                    _line(axes, metrics[name], number, label, updates.get(label))
            axes.set_title(shorten_name(name, 60), fontsize=9, loc="left", color="#222")
            # All alike, so that a lone point stands where it was measured.
            axes.set_xlim(-0.02 * last, 1.03 * last or 1)
            axes.xaxis.set_major_formatter(lambda update, _: f"{update:,.0f}")
            axes.locator_params(axis="x", nbins=6)
            axes.set_xlabel("update")
            simplify_axes(axes)
        for axes in grid[len(names) :]:
            axes.set_visible(False)
        _legend(figure, list(grid[: len(names)]))
        _save(figure, path)


def draw_returns(path: Path, returns: Mapping[str, Sequence[float]], env_id: str) -> None:
    """Draw how the returns of episodes are spread, a histogram a policy over the same bins.

    Raises: ConfigInvalidError for another kind of file, StorageError.
    """
    import numpy as np

    edges = np.histogram_bin_edges(np.concatenate([np.asarray(v) for v in returns.values()]), 20)
    with mpl.rc_context({**STYLE, "font.size": 9}):
        num = len(returns)
        figure = Figure(figsize=(7.0, 1.0 + 1.5 * num), layout="constrained", dpi=130)
        grid = figure.subplots(num, 1, sharex=True, squeeze=False).ravel()
        for number, (axes, (label, values)) in enumerate(zip(grid, returns.items(), strict=True)):
            color = _COLORS[number % len(_COLORS)]
            axes.hist(values, bins=list(edges), color=color, alpha=0.75)
            mean = float(np.mean(values))
            axes.axvline(mean, color="#222", linewidth=1.2)
            axes.set_title(
                f"{shorten_name(label, 40)}: mean {mean:,.6g}", fontsize=9, loc="left", color="#222"
            )
            axes.set_ylabel("episodes")
            axes.yaxis.get_major_locator().set_params(integer=True)
            simplify_axes(axes)
        grid[-1].set_xlabel(f"return in {shorten_name(env_id, 60)}")
        _save(figure, path)


def _line(axes: Any, curve: Curve, number: int, label: str, mark: int | None) -> None:
    color = _COLORS[number % len(_COLORS)]
    axes.plot(
        curve.updates,
        curve.values,
        color=color,
        linestyle=_DASHES[number // len(_COLORS) % len(_DASHES)],
        linewidth=1.4,
        marker="." if len(curve.updates) <= _MAX_MARKED else None,
        label=shorten_name(label, 40),
    )
    for update, value in zip(curve.updates, curve.values, strict=True):
        if update == mark:
            axes.plot([update], [value], "o", color=color, markersize=9, fillstyle="none")


def _legend(figure: Figure, grid: Sequence[Any]) -> None:
    """Name the runs once, below all pictures; a lone run needs no legend."""
    lines: dict[str, Any] = {}
    for axes in grid:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            lines.setdefault(label, handle)
    if len(lines) > 1:
        figure.legend(
            list(lines.values()), list(lines), loc="outside lower center", ncols=3, frameon=False
        )


def _save(figure: Figure, path: Path) -> None:
    kind = path.suffix.lower().removeprefix(".")
    with atomic_write(path) as stream:
        figure.savefig(stream, format=kind)
