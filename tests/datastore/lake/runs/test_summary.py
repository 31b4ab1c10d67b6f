"""Summaries of runs, from records as training writes them."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.errors import NotFoundError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.runs.lease import RunLease
from replaylake.datastore.lake.runs.metrics import Curve, MetricsLog
from replaylake.datastore.lake.runs.summary import (
    best_point,
    dataset_texts,
    find_differences,
    find_run,
    is_loss,
    summarize,
)

RECORD: dict[str, Any] = {
    "kind": "train offline",
    "status": "running",
    "algorithm": "iql",
    "seed": 3,
    "policy": "pend",
    "started_ms": 1_000_000,
    "datasets": [{"dataset": "pendulum", "version": 2}, {"dataset": "more", "version": 7}],
    "config": {"updates": 5000},
}


def record(lake: Lake, run_id: str = "r1", **fields: Any) -> dict[str, Any]:
    lake.registry.record_run(run_id, {**RECORD, **fields})
    return next(run for run in lake.registry.runs() if run["run_id"] == run_id)


def test_a_done_run(lake: Lake) -> None:
    history = [{"update": 1000, "value": -5.0}, {"update": 2000, "value": -6.0}]
    selection = {"measure": "environment", "update": 1000, "value": -5.0, "history": history}
    found = summarize(
        lake.storage,
        record(
            lake,
            status="done",
            ended_ms=1_061_500,
            policy_version=4,
            selection=selection,
            update=1000,
        ),
    )
    assert found.status == "done"
    assert found.datasets == ("pendulum@2", "more@7")
    assert (found.update, found.updates) == (2000, 5000)
    assert (found.measure, found.best, found.best_update) == ("environment", -5.0, 1000)
    assert (found.policy, found.duration_s) == ("pend:4", 61.5)
    assert found.to_json()["datasets"] == ["pendulum@2", "more@7"]


@pytest.mark.parametrize(
    ("metric", "best", "at"), [("selection/environment", 9.0, 200), ("selection/loss", 1.0, 300)]
)
def test_a_run_that_goes_on_is_as_far_as_its_metrics(
    lake: Lake, metric: str, best: float, at: int
) -> None:
    written = record(lake)
    with RunLease(lake.storage, "r1"), MetricsLog(lake.storage, "r1") as log:
        for update, value in ((100, 4.0), (200, 9.0), (300, 1.0)):
            log.add(update, {metric: value}, 0.0)
        log.add(400, {"critic_loss": 0.5}, 0.0)
        log.flush()
        found = summarize(lake.storage, written)
    assert (found.status, found.update, found.policy) == ("running", 400, None)
    assert (found.measure, found.best, found.best_update) == (metric.split("/")[1], best, at)
    assert found.duration_s is not None
    assert found.duration_s > 1e6


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # from Python 3.12 on
def test_a_run_that_nobody_is_at_work_on_was_killed(lake: Lake) -> None:
    written = record(lake)
    child = os.fork()
    if child == 0:
        RunLease(lake.storage, "r1").__enter__()
        os._exit(0)
    os.waitpid(child, 0)
    found = summarize(lake.storage, written)
    assert (found.status, found.duration_s, found.best) == ("killed", None, None)


def test_a_record_of_another_kind_has_what_it_has(lake: Lake) -> None:
    lake.registry.record_run("x", {"kind": "import", "status": "done"})
    (only,) = lake.registry.runs()
    found = summarize(lake.storage, only)
    assert (found.status, found.datasets, found.algorithm, found.update) == ("done", (), None, None)


def test_a_run_that_collects_is_as_far_as_its_metrics_until_it_is_done(lake: Lake) -> None:
    fields = {"kind": "train online", "env_id": "E-v1", "dataset": "live", "datasets": None}
    fields |= {"config": {"steps": 500, "seed": 9}, "seed": None}
    written = record(lake, **fields)
    assert summarize(lake.storage, written).env_steps is None
    with MetricsLog(lake.storage, "r1") as log:
        log.add(7, {"env_steps": 100.0, "return": 2.0, "staleness": 0.5}, 0.0)
        log.add(9, {"env_steps": 120.0, "selection/environment": 3.0}, 0.0)
    found = summarize(lake.storage, written)
    assert (found.env, found.datasets, found.steps, found.update) == ("E-v1", ("live",), 500, 9)
    assert (found.env_steps, found.mean_return, found.staleness) == (120, 2.0, 0.5)
    assert (found.measure, found.best, found.best_update) == ("environment", 3.0, 9)
    ended = {"status": "done", "ended_ms": 1_002_000, "num_steps": 500, "num_updates": 450}
    found = summarize(lake.storage, {**written, **ended, "mean_return": 4.0, "staleness": 0.25})
    assert (found.env_steps, found.mean_return, found.staleness) == (500, 4.0, 0.25)
    assert (found.update, found.updates) == (450, None)


def test_an_online_run_s_own_dataset_comes_first_and_once() -> None:
    mixed = [{"dataset": "old", "version": 3}]
    assert dataset_texts({"dataset": "live", "datasets": mixed}) == ("live", "old@3")
    own = [{"dataset": "live", "version": 8}, *mixed]
    assert dataset_texts({"dataset": "live", "datasets": own}) == ("live@8", "old@3")
    assert dataset_texts({"datasets": mixed}) == ("old@3",)
    assert dataset_texts({}) == ()


def test_runs_are_found_by_how_their_ids_begin(lake: Lake) -> None:
    with pytest.raises(NotFoundError, match="latest runs are none"):
        find_run(lake.registry, "x")
    for run_id in ("01ab", "01ac", "01"):
        record(lake, run_id)
    assert find_run(lake.registry, "01ab")["run_id"] == "01ab"
    assert find_run(lake.registry, "01ac")["run_id"] == "01ac"
    # A whole id is itself, whatever others begin with it.
    assert find_run(lake.registry, "01")["run_id"] == "01"
    with pytest.raises(NotFoundError, match="found 2 runs that begin so, the latest 01ab, 01ac"):
        find_run(lake.registry, "01a")
    with pytest.raises(NotFoundError, match="latest runs are 01, 01ab, 01ac"):
        find_run(lake.registry, "02")
    with pytest.raises(NotFoundError, match="found 3 runs"):
        find_run(lake.registry, "")


def test_what_differs_is_told_by_dotted_name() -> None:
    first = {**RECORD, "config": {"updates": 5000, "options": {"tau": 0.5, "hidden": [8, 8]}}}
    second = {
        **RECORD,
        "seed": 4,
        "datasets": [{"dataset": "pendulum", "version": 3, "where": "complete"}],
        "config": {"updates": 5000, "options": {"tau": 0.7, "hidden": [8, 8], "alpha": 1.0}},
    }
    assert find_differences([first, second]) == {
        "seed": [3, 4],
        "options.tau": [0.5, 0.7],
        "datasets.0.dataset": ["pendulum@2", "pendulum@3"],
        "datasets.1.dataset": ["more@7", None],
        "datasets.0.where": [None, "complete"],
        "options.alpha": [None, 1.0],
    }
    assert find_differences([first, first, first]) == {}


def test_the_best_point() -> None:
    curve = Curve(np.array([1, 2, 3, 4]), np.array([np.nan, 2.0, 5.0, 5.0]))
    assert best_point(curve, higher_is_better=True) == (3, 5.0)
    assert best_point(curve, higher_is_better=False) == (2, 2.0)
    nothing = Curve(np.array([1]), np.array([np.nan]))
    assert best_point(nothing, higher_is_better=True) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [("critic_loss", True), ("selection/loss", True), ("q_mean", False), ("selection/fqe", False)],
)
def test_losses_are_told_by_their_names(name: str, expected: bool) -> None:
    assert is_loss(name) is expected
