"""`replaylake maintain run`: each dataset's retention applied, once or again and again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from replaylake.cli.options import (
    DEFAULT_LAKE,
    DatasetsArgument,
    DebugOption,
    JsonOption,
    LakeOption,
    parse_duration,
)
from replaylake.cli.output.command_output import CommandOutput, result_stream, size, table_lines
from replaylake.cli.stop_signals import stop_on_signals

if TYPE_CHECKING:
    from replaylake.datastore.maintenance.maintain import MaintainReceipt

_COLUMNS = ("dataset", "version", "trimmed", "compacted", "dropped", "vacuumed", "freed")
_INTERVAL_S = 2.0


def maintain(
    datasets: DatasetsArgument = None,
    every: Annotated[
        str | None,
        typer.Option(
            "--every",
            metavar="TIME",
            show_default=False,
            help="Repeat at this interval, for example 1h, until SIGINT or SIGTERM.",
        ),
    ] = None,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Trim, compact and vacuum by each dataset's retention.

    An error in one dataset does not stop the others. Safe while others read and write.

    Example:
      replaylake maintain run
      replaylake maintain run cartpole --every 1h
    """
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.datastore.maintenance.maintain import maintain as run
    from replaylake.datastore.maintenance.maintain import maintain_every

    report = CommandOutput(as_json)
    every_s = None if every is None else parse_duration(every, "--every")
    if every_s is not None and every_s < 1:
        raise typer.BadParameter(f"found {every!r}, expected at least 1s.", param_hint="--every")
    store = open_lake(lake)
    failed = False

    on_step = _Steps(report)

    def on_round(receipts: list[MaintainReceipt]) -> None:
        nonlocal failed
        failed = any(one.error for one in receipts)
        _answer(report, receipts)

    with stop_on_signals(report) as stop:
        if every_s is None:
            on_round(run(store, datasets or (), stop=stop, on_step=on_step))
        else:
            maintain_every(
                store, every_s, datasets or (), stop=stop, on_round=on_round, on_step=on_step
            )
    if failed:
        raise typer.Exit(1)


class _Steps:
    """Says what is being done, no more often than every two seconds."""

    def __init__(self, report: CommandOutput) -> None:
        self._report = report
        self._printed_at = time.monotonic()

    def __call__(self, dataset: str, what: str) -> None:
        if time.monotonic() - self._printed_at >= _INTERVAL_S:
            self._printed_at = time.monotonic()
            self._report.print_message(f"{dataset or 'lake'}: {what}")


def _answer(report: CommandOutput, receipts: Sequence[MaintainReceipt]) -> None:
    for one in receipts:
        if one.error:
            report.print_message(f"error: {one.dataset or 'lake'}: {one.error}")
    rows = [
        {
            **one.to_json(),
            "dataset": one.dataset or "(lake)",
            "freed": size(one.vacuumed_bytes),
        }
        for one in receipts
    ]
    body = {"datasets": [one.to_json() for one in receipts]}
    report.print_result(body, table_lines(rows, _COLUMNS) if rows else [])
    # The next round may be hours away.
    result_stream().flush()
