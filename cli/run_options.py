"""Run options: what `train offline`, `train online` and `rollout` ask and tell alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replaylake.cli.output.command_output import CommandOutput

if TYPE_CHECKING:
    from replaylake.cli.output.watch import Watchers
    from replaylake.offline.callbacks import RunStart

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE.toml",
        help="TOML file with options; --set and command-line options override it.",
    ),
]
AssignmentsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Option to set, as a TOML value or a bare word. Repeatable.",
    ),
]
ResumeOption = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="RUN",
        help="Resume a killed or interrupted run, by its id or a unique prefix. Its record has the "
        "options, so others are refused.",
    ),
]


class EnvRunner(StrEnum):
    """Where environments are stepped."""

    ray = "ray"
    local = "local"


def check_no_other_options(*beside: object) -> None:
    """Refuse options of the run beside --resume. Raises: typer.BadParameter."""
    if any(value is not None and value != [] for value in beside):
        raise typer.BadParameter(
            "found other options beside it, expected none: what the run does is in its record. "
            "Leave them out, or train anew without --resume.",
            param_hint="--resume",
        )


def check_project(wandb: str | None, mlflow: str | None = None) -> None:
    """Refuse an empty name. Raises: typer.BadParameter."""
    if wandb is not None and not wandb.strip():
        raise typer.BadParameter("found an empty one, expected a project.", param_hint="--wandb")
    if mlflow is not None and not mlflow.strip():
        raise typer.BadParameter(
            "found an empty one, expected an experiment.", param_hint="--mlflow"
        )


@contextmanager
def print_resume_hint(report: CommandOutput, command: str, *, without: str) -> Iterator[None]:
    """Where the run in the block is interrupted, say what goes on with it.

    without: from what it does where no checkpoint was saved.
    """
    from replaylake.offline.running.training.interruption import RunInterrupted

    try:
        yield
    except RunInterrupted as interrupted:
        update = interrupted.update
        at = without if update is None else f"after update {update:,}"
        report.print_message(f"`replaylake {command} --resume {interrupted.run_id}` goes on {at}")
        raise


def announce_start(report: CommandOutput, watch: Watchers, start: RunStart) -> None:
    """Say which run it is, and let those that watch it begin."""
    at = f" goes on after update {start.update:,}" if start.update else ""
    report.print_message(f"run {start.run_id}{at}")
    for remark in start.remarks:
        report.print_message(f"note: {remark}")
    watch.begin(start.run_id, resumed_after=start.update if start.resumed else None)
