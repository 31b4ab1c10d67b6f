"""Watch: a run's metrics, as they come, for TensorBoard and, where asked for, Weights & Biases.

The lake has them too (datastore/lake/runs/metrics.py). What is here are tools to look on with, so
that no failure of theirs ends a run once it goes on: it is said, and that tool hears no more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from replaylake.cli.output.event_file import EventFile
from replaylake.cli.output.report import Report
from replaylake.datastore.errors import ConfigInvalid, ExtraMissing
from replaylake.datastore.lake.runs.metrics import RUNS

if TYPE_CHECKING:
    from replaylake.datastore.lake.lake import Lake

# Called with (update, metrics by name).
OnMetrics = Callable[[int, Mapping[str, float]], None]


class Watchers:
    """What `watchers` returns: `begin` it with the run, then call it with each point."""

    def __init__(self, report: Report, lake: Lake, wandb_project: str | None) -> None:
        self._report = report
        self._lake = lake
        self._wandb_project = wandb_project
        self._told: dict[str, OnMetrics] = {}
        self._closing: dict[str, Callable[[], None]] = {}
        # Before anything is read or learned: a library that is not there is no reason to lose that.
        self._wandb: Any = None if wandb_project is None else _wandb()

    def __enter__(self) -> Watchers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for name, close in self._closing.items():
            self._attempt(name, close)

    def begin(self, run_id: str, *, resumed_after: int | None = None) -> None:
        """Say which run it is, once it is in the registry and before its first point.

        Args:
            run_id: as the registry has it.
            resumed_after: the update of the checkpoint that a resumed run goes on from.

        Raises: ConfigInvalid where W&B refuses the run.
        """
        folder = self._lake.storage.state_folder(f"{RUNS}/{run_id}")
        if self._lake.storage.is_remote:
            self._report.say(f"event files in {folder / 'tensorboard'}")
        if self._wandb is not None:
            self._begin_wandb(folder, run_id)
        self._attempt("TensorBoard", lambda: self._begin_tensorboard(folder, resumed_after))

    def __call__(self, update: int, values: Mapping[str, float]) -> None:
        """Hand on one point: the metrics of an update, by name."""
        for name, tell in list(self._told.items()):
            if not self._attempt(name, lambda tell=tell: tell(update, values)):  # type: ignore[misc]
                del self._told[name]

    def _begin_tensorboard(self, folder: Path, resumed_after: int | None) -> None:
        events = EventFile(folder / "tensorboard", resumed_after=resumed_after)
        self._told["TensorBoard"] = events.add
        self._closing["TensorBoard"] = events.close

    def _begin_wandb(self, folder: Path, run_id: str) -> None:
        wandb = self._wandb
        records = [run for run in self._lake.registry.runs() if run["run_id"] == run_id]
        folder.mkdir(parents=True, exist_ok=True)
        try:
            run = wandb.init(
                project=self._wandb_project,
                id=run_id,
                dir=str(folder),
                config=records[0] if records else {},
                resume="allow",
                # Its own talk would stand between our lines, and our output is no part of the run.
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.Error as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise ConfigInvalid(
                f"Weights & Biases: {reason}, expected to begin run {run_id} of project "
                f"{self._wandb_project!r}. Run `wandb login`, set WANDB_MODE=offline, or leave out "
                "--wandb: TensorBoard's event files are written either way."
            ) from error
        if not run.offline:
            self._report.say(f"at Weights & Biases: {run.url}")
        self._told["Weights & Biases"] = _told_to_wandb(run)
        self._closing["Weights & Biases"] = run.finish

    def _attempt(self, name: str, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            self._report.say(f"{name}: {reason}; the run goes on, and its metrics are in the lake")
            return False
        return True


def watchers(report: Report, lake: Lake, *, wandb_project: str | None = None) -> Watchers:
    """Return a context manager that shows a run while it goes on.

    TensorBoard's event files are always written: into the run's folder, `_lake/runs/<run_id>/
    tensorboard`, or where the lake is remote into its folder on this machine (docs/STORAGE.md),
    which is said on stderr. Steps are updates.

        with watchers(report, lake, wandb_project=project) as watch:
            watch.begin(run_id)
            ...  # watch(update, metrics) as they come

    Raises: ExtraMissing for a W&B project where the library is not installed.
    """
    return Watchers(report, lake, wandb_project)


def _told_to_wandb(run: Any) -> OnMetrics:
    newest = 0

    def tell(update: int, values: Mapping[str, float]) -> None:
        nonlocal newest
        if update < newest:
            # W&B drops points of the past, such as the evaluation of the checkpoint that was best.
            run.summary.update(dict(values))
            return
        newest = update
        run.log(dict(values), step=update)

    return tell


def _wandb() -> Any:
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise ExtraMissing(
            "--wandb: found no wandb, expected it to report the run. Install replaylake[wandb]; "
            "TensorBoard's event files are written without it."
        ) from error
    return wandb
