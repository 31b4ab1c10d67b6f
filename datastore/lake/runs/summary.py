"""Summaries of runs: what came of each, from its record and, while it goes on, its metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from replaylake.datastore.errors import NotFoundError
from replaylake.datastore.lake.policies.registry import Registry
from replaylake.datastore.lake.runs.lease import is_active
from replaylake.datastore.lake.runs.metrics import Curve, read_curves
from replaylake.datastore.storage.storage import Storage

ONLINE: Final = "train online"
STATUSES: Final = ("running", "killed", "interrupted", "failed", "done")
# Metrics that a policy is chosen by are called so, the measure's name after it.
SELECTION: Final = "selection/"
# The mean return of the closing evaluation, of the policy that is registered.
EVALUATION: Final = "evaluation/return"
# Of these, less is better.
_LOSSES: Final = ("loss",)


@dataclass(frozen=True)
class RunSummary:
    """One run.

    status: one of STATUSES; `killed` is a run whose record says running, with nobody at work on it.
    datasets: `NAME@VERSION`. update: how far it came, of `updates`. measure, best, best_update: by
    what its policy is chosen, the best value so far and its update; None without a measure.
    policy: `NAME:VERSION` once it is registered. duration_s: from its start to its end, or to now.

    Of a run that collects too, else None: env, env_steps (how many it took, of `steps`),
    mean_return (of its last episodes, as they were collected), staleness (mean number of versions
    that sampled steps were behind).
    """

    run_id: str
    kind: str | None
    status: str
    algorithm: str | None
    datasets: tuple[str, ...]
    seed: int | None
    update: int | None
    updates: int | None
    measure: str | None
    best: float | None
    best_update: int | None
    policy: str | None
    started_ms: int | None
    duration_s: float | None
    env: str | None = None
    env_steps: int | None = None
    steps: int | None = None
    mean_return: float | None = None
    staleness: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "datasets": list(self.datasets)}


def summarize(storage: Storage, record: Mapping[str, Any]) -> RunSummary:
    """Sum up a run's record. Cost: of a run that is not done, it reads its metrics in `storage`."""
    status = str(record.get("status"))
    if status == "running" and not is_active(storage, record["run_id"]):
        status = "killed"
    curves: Mapping[str, Curve] = {}
    if status != "done":
        curves = read_curves(storage, record["run_id"])
    measure, best, best_update = _best(record, curves)
    policy, version = record.get("policy"), record.get("policy_version")
    config = record.get("config") or {}
    return RunSummary(
        run_id=record["run_id"],
        kind=record.get("kind"),
        status=status,
        algorithm=record.get("algorithm"),
        datasets=dataset_texts(record),
        seed=record.get("seed", config.get("seed")),
        update=_last_update(record, curves),
        updates=config.get("updates"),
        measure=measure,
        best=best,
        best_update=best_update,
        policy=None if version is None else f"{policy}:{version}",
        started_ms=record.get("started_ms"),
        duration_s=_duration(record, status),
        **(_collect_progress(record, curves) if record.get("kind") == ONLINE else {}),
    )


def find_run(registry: Registry, text: str) -> Mapping[str, Any]:
    """Return the record of the run whose id begins with `text`, or that trained a policy.

    text: a beginning of an id; or a policy as `Registry.resolve` takes it: `name:version`,
    `name@alias`, `name`. Raises: NotFoundError for none or several; InvalidNameError.
    """
    runs = registry.runs()
    if ":" not in text and "@" not in text:
        by_id = [run for run in runs if run["run_id"].startswith(text)]
        by_id = [run for run in by_id if run["run_id"] == text] or by_id
        if len(by_id) == 1 and text:
            return by_id[0]
        # The latest are those that people look for.
        near = ", ".join(run["run_id"] for run in list(by_id or runs)[-3:])
        if by_id:
            raise NotFoundError(
                f"run {text!r}: found {len(by_id)} runs that begin so, the latest {near}, expected "
                "one. Give more of its id."
            )
        if not any(run.get("policy") == text for run in runs):
            raise NotFoundError(
                f"run {text!r}: found no run or policy of that name in this lake, whose latest "
                f"runs are {near or 'none'}. `replaylake runs list` names them."
            )
    policy = registry.resolve(text)
    for run in reversed(runs):
        if (run.get("policy"), run.get("policy_version")) == (policy.name, policy.version):
            return run
    raise NotFoundError(
        f"run {text!r}: found no run that trained {policy.name}:{policy.version}, which was "
        "registered without one. `replaylake policies show` has its lineage."
    )


def dataset_texts(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Return `NAME@VERSION` of each dataset that a run learns from; an online run's own first.

    That one grows as it is learned from: it has no version until the run has ended.
    """
    own = record.get("dataset")
    others = [dataset_text(one) for one in record.get("datasets") or ()]
    if own is None or own in (text.partition("@")[0] for text in others):
        return tuple(others)
    return (str(own), *others)


def dataset_text(dataset: Mapping[str, Any]) -> str:
    """Return `NAME@VERSION` of an entry of a record's datasets."""
    version = dataset.get("version")
    return str(dataset.get("dataset")) + ("" if version is None else f"@{version}")


def find_differences(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return what the runs were asked for differently: by dotted name, a value a run.

    None where a run has no such option.
    """
    return compare_fields([_requested_options(record) for record in records])


def compare_fields(bodies: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the fields in which nested objects differ: by dotted name, a value each.

    None where an object has no such field.
    """
    flat = [_flat(body) for body in bodies]
    names = list(dict.fromkeys(name for one in flat for name in one))
    values = {name: [one.get(name) for one in flat] for name in names}
    return {name: row for name, row in values.items() if any(one != row[0] for one in row)}


def is_loss(name: str) -> bool:
    """Whether less of a metric is better, by its name."""
    return name.rpartition("/")[2].endswith(_LOSSES)


def best_point(curve: Curve, *, higher_is_better: bool) -> tuple[int, float] | None:
    """Return (update, value) of the first best value; None where all are NaN."""
    if np.isnan(curve.values).all():
        return None
    at = int(np.nanargmax(curve.values) if higher_is_better else np.nanargmin(curve.values))
    return int(curve.updates[at]), float(curve.values[at])


def _best(
    record: Mapping[str, Any], curves: Mapping[str, Curve]
) -> tuple[str | None, float | None, int | None]:
    if (selection := record.get("selection")) and selection.get("value") is not None:
        return selection["measure"], selection["value"], selection["update"]
    for name, curve in curves.items():
        if name.startswith(SELECTION):
            best = best_point(curve, higher_is_better=not is_loss(name))
            update, value = best or (None, None)
            return name.removeprefix(SELECTION), value, update
    if (evaluation := record.get("evaluation")) is not None:
        return "evaluation", evaluation["mean_return"], record.get("update")
    return None, None, None


def _last_update(record: Mapping[str, Any], curves: Mapping[str, Curve]) -> int | None:
    if curves:
        return max(int(curve.updates[-1]) for curve in curves.values())
    if (num_updates := record.get("num_updates")) is not None:
        return int(num_updates)
    if history := (record.get("selection") or {}).get("history"):
        return int(history[-1]["update"])
    is_done = record.get("status") == "done"
    return (record.get("config") or {}).get("updates") if is_done else None


def _collect_progress(record: Mapping[str, Any], curves: Mapping[str, Curve]) -> dict[str, Any]:
    """Return what a run has collected, by its record once it has ended, else by its metrics."""

    def newest(name: str, recorded: Any) -> Any:
        return float(curves[name].values[-1]) if name in curves else recorded

    config = record.get("config") or {}
    env_steps = newest("env_steps", record.get("num_steps"))
    return {
        "env": record.get("env_id"),
        "env_steps": None if env_steps is None else int(env_steps),
        "steps": config.get("steps"),
        "mean_return": newest("return", record.get("mean_return")),
        "staleness": newest("staleness", record.get("staleness")),
    }


def _duration(record: Mapping[str, Any], status: str) -> float | None:
    started_ms, ended_ms = record.get("started_ms"), record.get("ended_ms")
    if started_ms is None:
        return None
    if ended_ms is None and status != "running":
        return None
    until_ms = time.time() * 1000 if ended_ms is None else ended_ms
    return max(0.0, float(until_ms - started_ms) / 1000)


def _requested_options(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a record says that a run was asked for, and on which data."""
    datasets = [
        {key: one.get(key) for key in ("where", "where_steps", "reward")}
        | {"dataset": dataset_text(one)}
        for one in record.get("datasets") or ()
    ]
    names = ("algorithm", "env_id", "env_args", "dataset", "seed", "holdout")
    options = {key: record.get(key) for key in names}
    return {**options, **dict(record.get("config") or {}), "datasets": datasets}


def _flat(body: Any, name: str = "") -> dict[str, Any]:
    if isinstance(body, Mapping):
        items = [(str(key), value) for key, value in body.items()]
    elif isinstance(body, list) and any(isinstance(one, Mapping) for one in body):
        items = [(str(number), value) for number, value in enumerate(body)]
    else:
        return {} if body is None else {name: body}
    flat: dict[str, Any] = {}
    for key, value in items:
        flat |= _flat(value, f"{name}.{key}" if name else key)
    return flat
