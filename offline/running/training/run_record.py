"""Run record: what the registry says of a run: running, interrupted, failed or done.

A killed process leaves it at `running`. Each change replaces what this process wrote before, so of
two that took a run for dead only one goes on with it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

from replaylake.datastore.errors import CommitConflictError, NotFoundError, ReplayLakeError
from replaylake.datastore.lake.policies.registry import Registry

KIND: Final = "train offline"
# Of an end that a run which goes on has not come to.
_END_FIELDS: Final = ("ended_ms", "error", "failure", "update")


class RunRecord:
    """The record of one run, which this process writes."""

    def __init__(
        self, registry: Registry, run_id: str, body: Mapping[str, Any], *, kind: str = KIND
    ) -> None:
        """Take the record as it is in the registry, or of a new run as it is to be."""
        self._kind = kind
        self.run_id = run_id
        self.body = {key: value for key, value in body.items() if key != "run_id"}
        self._registry = registry

    def record_start(self) -> None:
        """Write a new run down as running. Raises: StorageError."""
        self.body |= {"kind": self._kind, "status": "running", "started_ms": _now_ms()}
        self._registry.record_run(self.run_id, self.body)

    def record_resume(self, update: int) -> None:
        """Write down that the run goes on from an update.

        Raises: CommitConflictError if another process has changed the record since it was read.
        """
        body = {key: value for key, value in self.body.items() if key not in _END_FIELDS}
        again = [*body.get("resumed", ()), {"at_ms": _now_ms(), "update": update}]
        self._replace({**body, "status": "running", "resumed": again})

    @contextmanager
    def record_errors(self) -> Iterator[None]:
        """Write down how the block ends, if by an exception: interrupted, or failed and why."""
        try:
            yield
        except BaseException as error:
            self.record_error(error)
            raise

    def record_error(self, error: BaseException) -> None:
        """Write down what ended the run, if that can be written and is this process's to say."""
        if isinstance(error, CommitConflictError):
            # Another process has the run now, whether or not it has written so.
            return
        is_failure = isinstance(error, Exception)
        ended: dict[str, Any] = {
            "status": "failed" if is_failure else "interrupted",
            "ended_ms": _now_ms(),
        }
        if is_failure:
            ended["error"] = f"{type(error).__name__}: {error}"
        if details := getattr(error, "details", None):
            ended["failure"] = dict(details)
        # What ended the run says more than that the record of it could not be written. Only a run
        # that still runs can fail: its policy and `done` may have been committed before.
        with suppress(ReplayLakeError):
            self._replace({**self.body, **ended})

    def add_fields(self, **fields: Any) -> None:
        """Write more down. Raises: StorageError, CommitConflictError."""
        self._replace({**self.body, **fields})

    def to_finished(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the record of the run's end, to be committed together with its policy."""
        return {**self.body, "status": "done", "ended_ms": _now_ms(), **fields}

    def _replace(self, body: Mapping[str, Any]) -> None:
        self._registry.record_run(self.run_id, body, replaces=self.body)
        self.body = dict(body)


def find_run(registry: Registry, run_id: str, *, kind: str = KIND) -> dict[str, Any]:
    """Return the record of a run of this kind. Raises: NotFoundError with the latest ones."""
    runs = [run for run in registry.runs() if run.get("kind") == kind]
    for run in runs:
        if run["run_id"] == run_id:
            return run
    latest = ", ".join(f"{run['run_id']} ({run.get('status')})" for run in runs[-3:])
    what = "run" if kind == KIND else kind
    raise NotFoundError(
        f"{what} {run_id!r}: not in this lake, whose latest are {latest or 'none'}. "
        "`replaylake sql 'select * from runs'` has them all."
    )


def _now_ms() -> int:
    return round(time.time() * 1000)
