"""`replaylake tune`: many runs, over seeds and options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replaylake.cli.config import read_options
from replaylake.cli.options import DEFAULT_LAKE, DebugOption, JsonOption, LakeOption
from replaylake.cli.output.command_output import (
    CommandOutput,
    cell_text,
    count,
    interval_text,
    number_text,
    table_lines,
)

if TYPE_CHECKING:
    from replaylake.offline.running.tune import SweepStart, TrialProgress
    from replaylake.offline.running.tuning.results import Combination, SweepResult


def tune(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG.toml",
            show_default=False,
            help="TOML file with the training options and the values to vary; required unless "
            "--resume is given.",
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="SWEEP",
            help="Resume a killed or interrupted sweep, by its id; takes no file.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            help="File to plot the means and differences to: a .png, .svg or .pdf.",
        ),
    ] = None,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Train under several seeds and options, and compare.

    Each trial is a run in a separate process (see `runs list`) and registers a policy version.
    The table has a row for each combination of options: the mean over the seeds with its 95%
    interval. docs/TUNING.md describes the file.

    Example:
      replaylake tune sweep.toml
      replaylake tune --resume 01m7xx37q2a1tjwqb8trpt4zek
    """
    if (config is None) == (resume is None):
        what = "neither" if config is None else "both"
        raise typer.BadParameter(
            f"found {what}, expected CONFIG.toml, or --resume SWEEP alone: what it does is in its "
            "record.",
            param_hint="CONFIG.toml",
        )
    options = read_options(config, [])
    if plot is not None:
        from replaylake.cli.output.curves import check_picture

        check_picture(plot)

    # After the options are parsed: torch takes a second to import.
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.offline.callbacks import Callbacks
    from replaylake.offline.running.training.interruption import RunInterrupted
    from replaylake.offline.running.tune import resume_sweep
    from replaylake.offline.running.tune import tune as run_sweep
    from replaylake.offline.running.tuning.config import tune_config

    report = CommandOutput(as_json)
    store = open_lake(lake)

    def tell_start(start: SweepStart) -> None:
        report.print_message("\n".join(_start_lines(start)))

    def tell(progress: TrialProgress) -> None:
        report.print_message(_trial_line(progress))

    callbacks = Callbacks(on_start=tell_start, on_progress=tell)
    try:
        if resume is not None:
            result = resume_sweep(store, resume, callbacks=callbacks)
        else:
            result = run_sweep(store, *tune_config(options), callbacks=callbacks)
    except RunInterrupted as interrupted:
        report.print_message(f"`replaylake tune --resume {interrupted.run_id}` goes on")
        raise
    if plot is not None:
        from replaylake.cli.output.forest import draw_combinations

        draw_combinations(plot, result)
        report.print_message(f"drew {plot}")
    report.print_result(result.to_json(), _lines(result))


def _start_lines(start: SweepStart) -> Iterator[str]:
    over = f", {start.num_finished} of them over" if start.num_finished else ""
    yield (
        f"sweep {start.sweep_id}: {count(start.num_combinations, 'combination')} of options under "
        f"{count(start.num_seeds, 'seed')}: {count(start.num_trials, 'trial')}{over}, "
        f"{start.concurrency} at once, by {start.measure}"
    )
    for remark in start.remarks:
        yield f"note: {remark}"


def _trial_line(progress: TrialProgress) -> str:
    trial = progress.trial
    options = _options_text({**trial.options, "seed": trial.seed})
    line = f"trial {trial.number}  {options}  "
    at = "" if trial.update is None else f"  update {trial.update:,}/{progress.updates:,}"
    value = "" if trial.value is None else f"  {number_text(trial.value)}"
    if trial.status == "running":
        return f"{line}{at.strip()}{value}"
    texts = {"done": f"  saved policy {trial.policy}", "failed": f"  {trial.error}"}
    return f"{line}{trial.status}{at}{value}{texts.get(trial.status, '')}"


def _lines(result: SweepResult) -> Iterator[str]:
    names = list(result.combinations[0].options)
    columns = (*names, "mean", "ci_low", "ci_high", "difference", "seeds", "policy")
    rows = [_row(combination) for combination in result.combinations]
    yield f"{result.value}, {'more' if result.mode == 'max' else 'less'} is better:"
    yield from table_lines(rows, columns)
    for status in ("failed", "stopped"):
        if number := sum(trial.status == status for trial in result.trials):
            yield f"{count(number, 'trial')} {status}"
    best = result.best
    if best is None or best.mean is None:
        yield "best: none, as no combination is done under every seed"
        return
    options = f"{_options_text(best.options)}  " if best.options else ""
    yield (
        f"best: {options}mean {number_text(best.mean)}"
        f"{interval_text(best.ci_low, best.ci_high)}; its best seed is {best.seed}: "
        f"policy {best.policy}"
    )


def _row(combination: Combination) -> dict[str, Any]:
    return {
        **combination.options,
        "mean": combination.mean,
        "ci_low": combination.ci_low,
        "ci_high": combination.ci_high,
        "difference": combination.difference,
        "seeds": f"{combination.num_done}/{combination.num_seeds}",
        "policy": combination.policy,
    }


def _options_text(options: Mapping[str, Any]) -> str:
    return "  ".join(f"{name}={cell_text(value)}" for name, value in options.items())
