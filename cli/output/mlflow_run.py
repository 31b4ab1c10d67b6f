"""MLflow: send a run's parameters and metrics to a tracking server through its REST API.

A thread sends them, so that training never waits for the network. They go to the server that
MLFLOW_TRACKING_URI names, with the credentials of MLflow's own variables.
"""

from __future__ import annotations

import json
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from replaylake.serve.package.mlflow_api import RUN_TAG, MlflowError, MlflowServer

# How long the end of a run waits for metrics that are not sent yet.
_CLOSE_TIMEOUT_S: Final = 15.0
_ROUND_S: Final = 1.0
# Limits of the API for one request, and for one value.
_MAX_METRICS: Final = 1000
_MAX_PARAMS: Final = 100
_MAX_PARAM_CHARS: Final = 6000
# Statuses that are retried; others are permanent.
_TRANSIENT: Final = frozenset((408, 429, 500, 502, 503, 504))
# Fields of a run's record that change while it runs, or are no parameters.
_NO_PARAMETERS: Final = frozenset(
    ("run_id", "status", "started_ms", "ended_ms", "policy_version", "metrics", "evaluation")
)


class MlflowRun:
    """One run at a tracking server; a thread sends the metrics that `log` gets."""

    def __init__(self, experiment: str, on_failure: Callable[[str], None]) -> None:
        """Read the environment. on_failure: called once with the reason if sending stops.

        Raises: ConfigInvalidError if MLFLOW_TRACKING_URI is not an http or https URL.
        """
        self._server = MlflowServer.from_environment()
        self._experiment, self._on_failure = experiment, on_failure
        self._points: queue.Queue[tuple[int, int, Mapping[str, float]] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._is_closing, self._num_unsent = threading.Event(), 0
        self.run_id: str | None = None
        self.url: str | None = None

    def begin(self, run_id: str, record: Mapping[str, Any]) -> None:
        """Create the run, or continue the one that was created for this run id.

        record: the run's record in the registry; its fields become parameters. Raises: MlflowError.
        """
        experiment_id = self._server.find_experiment(self._experiment)
        known = self._find_run(experiment_id, run_id)
        if known is None:
            tags = {
                RUN_TAG: run_id,
                "mlflow.source.name": "replaylake",
                "mlflow.source.type": "LOCAL",
            }
            body = {
                "experiment_id": experiment_id,
                "run_name": run_id,
                "start_time": _now_ms(),
                "tags": [{"key": key, "value": value} for key, value in tags.items()],
            }
            answer = self._server.request("runs/create", body)
            self.run_id = self._server.read_text(answer, "run", "info", "run_id")
            self._log_parameters(record)
        else:
            self.run_id = known
            self._server.request("runs/update", {"run_id": known, "status": "RUNNING"})
        self.url = f"{self._server.url}/#/experiments/{experiment_id}/runs/{self.run_id}"
        self._thread = threading.Thread(target=self._run, name="mlflow", daemon=True)
        self._thread.start()

    def log(self, update: int, values: Mapping[str, float]) -> None:
        """Queue the metrics of an update for sending."""
        self._points.put((update, _now_ms(), dict(values)))

    def close(self, status: str = "FINISHED") -> None:
        """Send the remaining metrics, and end the run as FINISHED, FAILED or KILLED.

        Raises: MlflowError if that does not succeed within 15 s.
        """
        if self._thread is None:
            return
        self._is_closing.set()
        self._points.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)
        num = self._num_unsent + self._points.qsize()
        if self._thread.is_alive() or num:
            raise MlflowError(f"{self._server.url}: {num:,} points of metrics were not sent")
        body = {"run_id": self.run_id, "status": status, "end_time": _now_ms()}
        self._server.request("runs/update", body)

    def _run(self) -> None:
        pending: list[dict[str, Any]] = []
        is_last = False
        deadline = math.inf
        while not (is_last and not pending):
            is_last = self._collect(pending) or is_last
            if is_last and deadline == math.inf:
                deadline = time.monotonic() + _CLOSE_TIMEOUT_S
            try:
                while pending:
                    body = {"run_id": self.run_id, "metrics": pending[:_MAX_METRICS]}
                    self._server.request("runs/log-batch", body)
                    del pending[:_MAX_METRICS]
            except MlflowError as error:
                self._num_unsent = len(pending)
                if error.status is not None and error.status not in _TRANSIENT:
                    self._on_failure(str(error))
                    return
                if time.monotonic() > deadline:
                    return
                self._is_closing.wait(_ROUND_S)
            self._num_unsent = len(pending)

    def _collect(self, pending: list[dict[str, Any]]) -> bool:
        """Add the queued points, waiting for the first; return whether they are the last."""
        try:
            point = self._points.get(timeout=_ROUND_S)
            while point is not None:
                update, at_ms, values = point
                pending += [
                    {
                        "key": _clean_key(name),
                        "value": _to_number(value),
                        "timestamp": at_ms,
                        "step": update,
                    }
                    for name, value in values.items()
                ]
                point = self._points.get_nowait()
        except queue.Empty:
            return False
        return True

    def _find_run(self, experiment_id: str, run_id: str) -> str | None:
        body = {
            "experiment_ids": [experiment_id],
            "filter": f"tags.`{RUN_TAG}` = '{run_id}'",
            "max_results": 1,
        }
        runs = self._server.read_objects(self._server.request("runs/search", body), "runs")
        return self._server.read_text(runs[0], "info", "run_id") if runs else None

    def _log_parameters(self, record: Mapping[str, Any]) -> None:
        fields = {key: value for key, value in record.items() if key not in _NO_PARAMETERS}
        found = [
            {"key": _clean_key(name), "value": text[:_MAX_PARAM_CHARS]}
            for name, text in _flatten(fields)
        ]
        for begin in range(0, len(found), _MAX_PARAMS):
            body = {"run_id": self.run_id, "params": found[begin : begin + _MAX_PARAMS]}
            self._server.request("runs/log-batch", body)


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the leaves of a run's record, by names such as `config.batch_size`."""
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            yield from _flatten(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, str):
        yield name, value
    else:
        yield name, json.dumps(value, default=str)


def _clean_key(name: str) -> str:
    """Return a name with `_` in place of each character that MLflow refuses in one."""
    return "".join(
        letter if letter.isascii() and (letter.isalnum() or letter in "_-. /") else "_"
        for letter in name
    )[:250]


def _to_number(value: float) -> float | str:
    """Return a number in protobuf's JSON encoding, which MLflow reads."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return float(value)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
