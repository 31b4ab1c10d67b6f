"""Watch: report a run's metrics to TensorBoard and, if configured, to W&B and MLflow.

The lake has them too (datastore/lake/runs/metrics.py). What is here are tools to look on with, so
that no failure of theirs ends a run once it goes on: it is said, and that tool hears no more.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from replaylake.cli.output.command_output import CommandOutput
from replaylake.cli.output.mlflow_run import MlflowRun
from replaylake.datastore.errors import ConfigInvalidError, ExtraMissingError
from replaylake.datastore.interchange.formats.rlds.tfrecord import mask_crc
from replaylake.datastore.lake.runs.metrics import RUNS
from replaylake.serve.package.mlflow_api import MlflowError

if TYPE_CHECKING:
    from replaylake.datastore.lake.lake import Lake

# Called with (update, metrics by name).
OnMetrics = Callable[[int, Mapping[str, float]], None]
# Fields of the messages, each as its tag: number << 3 | wire type.
_WALL_TIME: Final = bytes([1 << 3 | 1])
_STEP: Final = bytes([2 << 3])
_FILE_VERSION: Final = bytes([3 << 3 | 2])
_SUMMARY: Final = bytes([5 << 3 | 2])
_SESSION_LOG: Final = bytes([7 << 3 | 2])
_VALUE: Final = bytes([1 << 3 | 2])  # of Summary
_TAG: Final = bytes([1 << 3 | 2])  # of Summary.Value
_SIMPLE_VALUE: Final = bytes([2 << 3 | 5])
_STARTED: Final = bytes([1 << 3, 1])  # SessionLog with status START
_POLYNOMIAL: Final = 0x82F63B78  # Castagnoli's, reflected


class Watchers:
    """What `watchers` returns: `begin` it with the run, then call it with each point."""

    def __init__(
        self,
        report: CommandOutput,
        lake: Lake,
        wandb_project: str | None,
        mlflow_experiment: str | None = None,
    ) -> None:
        self._report = report
        self._lake = lake
        self._wandb_project = wandb_project
        self._listeners: dict[str, OnMetrics] = {}
        self._closing: dict[str, Callable[[], None]] = {}
        # Before anything is read or learned: a library that is not there is no reason to lose that.
        self._wandb: Any = None if wandb_project is None else _wandb()
        self._status = "FINISHED"
        self._mlflow: MlflowRun | None = None
        if mlflow_experiment is not None:
            self._mlflow = MlflowRun(mlflow_experiment, lambda reason: self._say("MLflow", reason))

    def __enter__(self) -> Watchers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._status = "FAILED" if isinstance(error, Exception) else "KILLED"
        for name, close in self._closing.items():
            self._attempt(name, close)

    def begin(self, run_id: str, *, resumed_after: int | None = None) -> None:
        """Say which run it is, once it is in the registry and before its first point.

        Args:
            run_id: as the registry has it.
            resumed_after: the update of the checkpoint that a resumed run goes on from.

        Raises: ConfigInvalidError where W&B or MLflow refuses the run.
        """
        folder = self._lake.storage.state_folder(f"{RUNS}/{run_id}")
        if not self._lake.storage.shares_state:
            self._report.print_message(f"event files in {folder / 'tensorboard'}")
        if self._wandb is not None:
            self._begin_wandb(folder, run_id)
        if self._mlflow is not None:
            self._begin_mlflow(self._mlflow, run_id)
        self._attempt("TensorBoard", lambda: self._begin_tensorboard(folder, resumed_after))

    def __call__(self, update: int, values: Mapping[str, float]) -> None:
        """Hand on one point: the metrics of an update, by name."""
        for name, tell in list(self._listeners.items()):
            if not self._attempt(name, lambda tell=tell: tell(update, values)):  # type: ignore[misc]
                del self._listeners[name]

    def _begin_tensorboard(self, folder: Path, resumed_after: int | None) -> None:
        events = EventFile(folder / "tensorboard", resumed_after=resumed_after)
        self._listeners["TensorBoard"] = events.add
        self._closing["TensorBoard"] = events.close

    def _begin_mlflow(self, mlflow: MlflowRun, run_id: str) -> None:
        try:
            mlflow.begin(run_id, self._find_record(run_id))
        except MlflowError as error:
            raise ConfigInvalidError(
                f"MLflow: {str(error).rstrip('.')}, expected to start run {run_id}. Check "
                "MLFLOW_TRACKING_URI and its credentials, or leave out --mlflow: TensorBoard's "
                "event files are written in any case."
            ) from error
        self._report.print_message(f"at MLflow: {mlflow.url}")
        self._listeners["MLflow"] = mlflow.log
        self._closing["MLflow"] = lambda: mlflow.close(self._status)

    def _find_record(self, run_id: str) -> Mapping[str, Any]:
        records = (run for run in self._lake.registry.runs() if run["run_id"] == run_id)
        return next(records, {})

    def _begin_wandb(self, folder: Path, run_id: str) -> None:
        wandb = self._wandb
        folder.mkdir(parents=True, exist_ok=True)
        try:
            run = wandb.init(
                project=self._wandb_project,
                id=run_id,
                dir=str(folder),
                config=dict(self._find_record(run_id)),
                resume="allow",
                # Its own talk would stand between our lines, and our output is no part of the run.
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.Error as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise ConfigInvalidError(
                f"Weights & Biases: {reason}, expected to begin run {run_id} of project "
                f"{self._wandb_project!r}. Run `wandb login`, set WANDB_MODE=offline, or leave out "
                "--wandb: TensorBoard's event files are written either way."
            ) from error
        if not run.offline:
            self._report.print_message(f"at Weights & Biases: {run.url}")
        self._listeners["Weights & Biases"] = _make_wandb_logger(run)
        self._closing["Weights & Biases"] = run.finish

    def _attempt(self, name: str, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:
            self._say(name, " ".join(str(error).split()) or type(error).__name__)
            return False
        return True

    def _say(self, name: str, reason: str) -> None:
        self._report.print_message(
            f"{name}: {reason}; the run goes on, and its metrics are in the lake"
        )


def watchers(
    report: CommandOutput,
    lake: Lake,
    *,
    wandb_project: str | None = None,
    mlflow_experiment: str | None = None,
) -> Watchers:
    """Return a context manager that shows a run while it goes on.

    TensorBoard's event files are always written: into the run's folder, `_lake/runs/<run_id>/
    tensorboard`, or where the lake is remote into its folder on this machine (docs/STORAGE.md),
    which is said on stderr. Steps are updates.

        with watchers(report, lake, wandb_project=project) as watch:
            watch.begin(run_id)
            ...  # watch(update, metrics) as they come

    Raises: ExtraMissingError for a W&B project where the library is not installed;
    ConfigInvalidError for an MLflow experiment without a tracking server.
    """
    return Watchers(report, lake, wandb_project, mlflow_experiment)


def _make_wandb_logger(run: Any) -> OnMetrics:
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
        raise ExtraMissingError(
            "--wandb: found no wandb, expected it to report the run. "
            "Run: pip install 'replaylake[wandb]'; "
            "TensorBoard's event files are written without it."
        ) from error
    return wandb


class EventFile:
    """One process's event file in a folder, which may have others; TensorBoard reads them all."""

    def __init__(self, folder: Path, *, resumed_after: int | None = None) -> None:
        """Begin a file. With `resumed_after`, TensorBoard forgets what others say of later updates.

        Raises: OSError.
        """
        folder.mkdir(parents=True, exist_ok=True)
        # The name that TensorBoard looks for; it reads a folder's files in order of their names.
        name = f"events.out.tfevents.{time.time_ns() // 10**9}.{socket.gethostname()}.{os.getpid()}"
        self.path = folder / name
        self._file = self.path.open("ab")
        self._write(_FILE_VERSION + _prefix_length(b"brain.Event:2"))
        if resumed_after is not None:
            self._write(
                _STEP + _varint(resumed_after + 1) + _SESSION_LOG + _prefix_length(_STARTED)
            )

    def __enter__(self) -> EventFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Append scalars, float32 in the file; TensorBoard sees them at once. Raises: OSError."""
        summary = b"".join(_VALUE + _prefix_length(_scalar(name, values[name])) for name in values)
        self._write(_STEP + _varint(step) + _SUMMARY + _prefix_length(summary))

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._file.close()

    def _write(self, body: bytes) -> None:
        event = _WALL_TIME + struct.pack("<d", time.time()) + body
        length = struct.pack("<Q", len(event))
        self._file.write(length + _crc(length) + event + _crc(event))
        self._file.flush()


def _scalar(name: str, value: float) -> bytes:
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        packed = struct.pack("<f", math.copysign(math.inf, value))
    return _TAG + _prefix_length(name.encode()) + _SIMPLE_VALUE + packed


def _prefix_length(data: bytes) -> bytes:
    return _varint(len(data)) + data


def _varint(value: int) -> bytes:
    """Return an integer of 0 or more: seven bits a byte, the lowest first."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _crc(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return struct.pack("<I", mask_crc(crc ^ 0xFFFFFFFF))


def _crc_table() -> Iterator[int]:
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        yield value


_CRC_TABLE: Final = tuple(_crc_table())
