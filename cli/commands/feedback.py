"""`replaylake feedback`: decisions and rewards joined into episodes, and counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from replaylake.cli.name_completion import complete_datasets
from replaylake.cli.options import (
    DEFAULT_LAKE,
    DebugOption,
    JsonOption,
    LakeOption,
    parse_duration,
)
from replaylake.cli.output.command_output import CommandOutput, count, result_stream, table_lines
from replaylake.cli.stop_signals import stop_on_signals

if TYPE_CHECKING:
    from replaylake.datastore.feedback.join import JoinReceipt
    from replaylake.datastore.feedback.status import FeedbackCounts, FeedbackStatus
    from replaylake.datastore.feedback.waits import Wait

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


def join_feedback(
    dataset: Annotated[
        str,
        typer.Argument(
            metavar="DATASET",
            autocompletion=complete_datasets,
            show_default=False,
            help="Dataset that `serve --log-to` logs to.",
        ),
    ],
    every: Annotated[
        str | None,
        typer.Option(
            "--every",
            metavar="TIME",
            show_default=False,
            help="Repeat at this interval, for example 60s, until SIGINT or SIGTERM.",
        ),
    ] = None,
    window: Annotated[
        str,
        typer.Option(
            "--window", metavar="TIME", help="Time that decisions wait for their rewards."
        ),
    ] = "1d",
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Join served decisions with their rewards.

    Appends the resulting episodes to the dataset. Safe to repeat at any time: each decision is
    written once.

    Example:
      replaylake feedback join live
      replaylake feedback join live --every 60s
    """
    from replaylake.datastore.feedback.join import join_feedback as run
    from replaylake.datastore.lake.lake import open_lake

    report = CommandOutput(as_json)
    window_s = parse_duration(window, "--window")
    if every is not None:
        _run_every(report, lake, dataset, parse_duration(every, "--every"), window_s)
        return
    with report.progress("built", "episodes") as progress:
        receipt = run(open_lake(lake), dataset, window_s=window_s, on_progress=progress)
    report.print_result(receipt.to_json(), _join_lines(receipt))


def status(
    dataset: Annotated[
        str,
        typer.Argument(
            metavar="DATASET",
            autocompletion=complete_datasets,
            show_default=False,
            help="Dataset that `serve --log-to` logs to.",
        ),
    ],
    window: Annotated[
        str,
        typer.Option(
            "--window", metavar="TIME", help="Time that decisions wait for their rewards."
        ),
    ] = "1d",
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Count decisions and their rewards by policy version.

    Example:
      replaylake feedback status live
    """
    from replaylake.datastore.feedback.status import feedback_status
    from replaylake.datastore.lake.lake import open_lake

    report = CommandOutput(as_json)
    window_s = parse_duration(window, "--window")
    result = feedback_status(open_lake(lake), dataset, window_s=window_s)
    report.print_result(result.to_json(), _status_lines(result))


def _run_every(
    report: CommandOutput, lake: str, dataset: str, every_s: float, window_s: float
) -> None:
    from replaylake.datastore.feedback.joiner import FeedbackJoiner, join_every
    from replaylake.datastore.lake.lake import open_lake

    if every_s <= 0:
        raise typer.BadParameter("found 0s, expected more.", param_hint="--every")
    rounds = FeedbackJoiner(open_lake(lake), dataset, window_s=window_s)
    failed = False

    def on_round(receipt: JoinReceipt) -> None:
        nonlocal failed
        failed = False
        if receipt.has_changed:
            report.print_result(receipt.to_json(), [receipt.to_line()])
            result_stream().flush()

    def on_failure(error: Exception) -> None:
        nonlocal failed
        failed = True
        report.print_message(f"error: {error}; the next round tries again")

    with stop_on_signals(report) as stop:
        join_every(rounds, every_s, stop=stop, on_round=on_round, on_failure=on_failure)
    if failed:
        raise typer.Exit(1)


def _join_lines(receipt: JoinReceipt) -> Iterator[str]:
    yield (
        f"{receipt.dataset}@{receipt.version}: {count(receipt.episodes, 'episode')}, "
        f"{count(receipt.steps, 'step')} added"
    )
    yield (
        f"  {count(receipt.decisions, 'decision')}, {count(receipt.rewards, 'reward')}; "
        f"{receipt.joined:,} joined, {receipt.waiting:,} waiting"
    )
    yield from (f"  {_wait_text(wait)}" for wait in (*receipt.waits, *receipt.received.waits))
    if any(asdict(received := receipt.received).values()):
        yield (
            f"  received: {count(received.episodes, 'episode')}, {count(received.steps, 'step')} "
            f"added; {received.waiting:,} waiting, {received.conflicting:,} conflicting"
        )
    rest = {
        "unrewarded": receipt.unrewarded,
        "repeated": receipt.repeated,
        "late": receipt.late,
        "orphaned": receipt.orphaned,
        "recovered from killed servers": receipt.recovered,
        "damaged and kept in the journal": receipt.damaged,
        f"set aside (select * from {receipt.dataset}.quarantine)": receipt.set_aside
        + receipt.received.set_aside,
    }
    parts = [f"{number:,} {what}" for what, number in rest.items() if number]
    if parts:
        yield f"  {', '.join(parts)}"


# What each reason of a wait is.
_WAITS_FOR: Final = {
    "end": ("decision", "the report that ends the episode"),
    "gap": ("received step", "the steps before"),
    "journal": ("decision", "the journal of a running server"),
    "reward": ("decision", "a reward of the episode"),
}


def _wait_text(wait: Wait) -> str:
    noun, what = _WAITS_FOR[wait.reason]
    until = "the next join"
    if wait.last_until is not None:
        is_one = wait.first_until == wait.last_until
        until = wait.last_until if is_one else f"{wait.first_until} to {wait.last_until}"
    verb = "waits" if wait.num == 1 else "wait"
    return f"{count(wait.num, noun)} {verb} for {what}, until {until}"


def _status_lines(status: FeedbackStatus) -> Iterator[str]:
    num = status.total.decisions
    yield (
        f"{status.dataset}@{status.version}: {count(num, 'decision')}, "
        f"{count(status.rewards, 'reward')}"
    )
    rows = [_row(counts) for counts in status.by_version]
    yield from table_lines([*rows, {**_row(status.total), "policy": "(all)"}], _COLUMNS)


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
