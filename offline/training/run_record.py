"""Run record: what the registry says of a run while it goes on, and of one that failed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from replaylake.datastore.errors import ReplayLakeError
from replaylake.datastore.policies.registry import Registry
from replaylake.datastore.replay.view import ReplayView


@contextmanager
def recorded_run(
    registry: Registry, manifest: Mapping[str, Any], view: ReplayView
) -> Iterator[dict[str, Any]]:
    """Record a run as `running`, and as `failed` with its error where the block raises.

    Yields the record, which the block completes and registers together with its policy.
    """
    record = {
        "kind": "train offline",
        "status": "running",
        "policy": manifest["name"],
        "started_ms": round(time.time() * 1000),
        "num_steps": view.num_steps,
        "num_episodes": view.num_episodes,
        **{key: manifest[key] for key in ("algorithm", "seed", "config", "datasets")},
    }
    running = dict(record)
    registry.record_run(manifest["run_id"], running)
    try:
        yield record
    except BaseException as error:
        ended = {"status": "failed", "ended_ms": round(time.time() * 1000)}
        reason = {"error": f"{type(error).__name__}: {error}"}
        # What ended the run says more than that the record of it could not be written. Only a run
        # that still runs can fail: its policy and `done` may have been committed just before.
        with suppress(ReplayLakeError):
            failed = {**running, **ended, **reason}
            registry.record_run(manifest["run_id"], failed, replaces=running)
        raise
