"""`replaylake feedback`: what became of what was served."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replaylake.cli.options import (
    DEFAULT_LAKE,
    DebugOption,
    JsonOption,
    LakeOption,
    parse_duration,
)
from replaylake.cli.output.command_output import CommandOutput, count, table_lines

if TYPE_CHECKING:
    from replaylake.datastore.feedback.status import FeedbackCounts, FeedbackStatus

_COLUMNS = (
    "policy",
    "version",
    "decisions",
    "joined",
    "waiting",
    "unrewarded",
    "repeated",
    "set aside",
    "late",
    "orphaned",
    "join rate",
    "lag p50",
    "lag p95",
)


def status(
    dataset: Annotated[
        str,
        typer.Argument(
            metavar="DATASET", show_default=False, help="What `serve --log-to` was given."
        ),
    ],
    window: Annotated[
        str, typer.Option("--window", metavar="TIME", help="How long decisions wait for rewards.")
    ] = "1d",
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Count decisions and what was fed back for them, by policy version.

    Example:
      replaylake feedback status live
    """
    from replaylake.datastore.feedback.status import feedback_status
    from replaylake.datastore.lake.lake import open_lake

    report = CommandOutput(as_json)
    window_s = parse_duration(window, "--window")
    found = feedback_status(open_lake(lake), dataset, window_s=window_s)
    report.print_result(found.to_json(), _lines(found))


def _lines(found: FeedbackStatus) -> Iterator[str]:
    num = found.total.decisions
    yield (
        f"{found.dataset}@{found.version}: {count(num, 'decision')}, "
        f"{count(found.rewards, 'reward')}"
    )
    rows = [_row(counts) for counts in found.by_version]
    yield from table_lines([*rows, {**_row(found.total), "policy": "(all)"}], _COLUMNS)


def _row(counts: FeedbackCounts) -> dict[str, Any]:
    row = counts.to_json()
    rate = row["join_rate"]
    lags = {f"lag {name}": row[f"lag_{name}_s"] for name in ("p50", "p95")}
    return {
        **row,
        "set aside": row["set_aside"],
        "join rate": None if rate is None else f"{rate:.1%}",
        **{name: None if lag is None else f"{lag:.3g} s" for name, lag in lags.items()},
    }
