"""A run at an MLflow server; `make compat-mlflow` runs the same against MLflow's own."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from replaylake.cli.output import mlflow_run
from replaylake.cli.output.command_output import CommandOutput
from replaylake.cli.output.watch import watchers
from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.lake.lake import Lake, open_lake


@pytest.fixture
def lake(tmp_path: Any) -> Lake:
    lake = open_lake(tmp_path / "lake", create=True)
    config = {"hidden_sizes": [8], "learning_rate": 0.001, "note": "x" * 7000, "empty": {}}
    options = {f"option_{number}": number for number in range(150)}
    record = {"algorithm": "bc", "status": "running", "config": config, "options": options}
    lake.registry.record_run("01abc", record)
    return lake


def watched(lake: Lake) -> Any:
    return watchers(CommandOutput(as_json=False), lake, mlflow_experiment="cart poles")


def test_a_run_has_its_parameters_and_metrics(
    tracking: Any, lake: Lake, capfd: pytest.CaptureFixture[str]
) -> None:
    with watched(lake) as watch:
        watch.begin("01abc")
        watch(100, {"critic_loss": 0.5, "q/mean[0]": 2.0})
        watch(200, {"critic_loss": float("nan")})
        watch(100, {"evaluation/return": float("-inf")})
    (run,) = tracking.runs.values()
    assert (run["status"], run["name"]) == ("FINISHED", "01abc")
    assert run["experiment"] == tracking.experiments["cart poles"]
    assert run["metrics"] == [
        (100, "critic_loss", 0.5),
        (100, "q/mean_0_", 2.0),
        (200, "critic_loss", "NaN"),
        (100, "evaluation/return", "-Infinity"),
    ]
    params = run["params"]
    assert len(params) == 155
    assert params["algorithm"] == "bc"
    assert params["config.hidden_sizes"] == "[8]"
    assert params["config.learning_rate"] == "0.001"
    assert params["config.note"] == "x" * 6000
    assert params["options.option_149"] == "149"
    assert "status" not in params
    assert run["tags"]["mlflow.source.name"] == "replaylake"
    assert f"at MLflow: {tracking.url}/#/experiments/1/runs/m0" in capfd.readouterr().err


def test_a_resumed_run_goes_on_in_the_same_one(tracking: Any, lake: Lake) -> None:
    with watched(lake) as watch:
        watch.begin("01abc")
        watch(1, {"loss": 1.0})
    with watched(lake) as watch:
        watch.begin("01abc", resumed_after=1)
        (run,) = tracking.runs.values()
        assert run["status"] == "RUNNING"
        watch(2, {"loss": 0.5})
    assert run["metrics"] == [(1, "loss", 1.0), (2, "loss", 0.5)]
    assert run["status"] == "FINISHED"


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("x"), "FAILED"), (KeyboardInterrupt(), "KILLED")]
)
def test_how_a_run_ended_is_reported(
    tracking: Any, lake: Lake, error: BaseException, status: str
) -> None:
    def run() -> None:
        with watched(lake) as watch:
            watch.begin("01abc")
            watch(1, {"loss": 1.0})
            raise error

    with pytest.raises(type(error)):
        run()
    (run,) = tracking.runs.values()
    assert (run["status"], len(run["metrics"])) == (status, 1)


def test_many_points_are_sent_in_batches(tracking: Any, lake: Lake) -> None:
    with watched(lake) as watch:
        watch.begin("01abc")
        for update in range(700):
            watch(update, {"a": 1.0, "b": 2.0, "c": 3.0})
    (run,) = tracking.runs.values()
    assert len(run["metrics"]) == 2100
    assert run["metrics"][-1] == (699, "c", 3.0)


def test_points_wait_for_a_server_that_is_away_for_a_while(
    tracking: Any, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_run, "_ROUND_S", 0.01)
    failed = []

    def fail(path: str) -> int | None:
        if path == "runs/log-batch" and len(failed) < 3:
            failed.append(path)
            return 503
        return None

    with watched(lake) as watch:
        watch.begin("01abc")
        tracking.fail = fail
        watch(1, {"loss": 1.0})
        watch(2, {"loss": 2.0})
    (run,) = tracking.runs.values()
    assert run["metrics"] == [(1, "loss", 1.0), (2, "loss", 2.0)]
    assert len(failed) == 3


def test_a_server_that_refuses_ends_no_run_and_is_said_once(
    tracking: Any, lake: Lake, capfd: pytest.CaptureFixture[str]
) -> None:
    with watched(lake) as watch:
        watch.begin("01abc")
        tracking.fail = lambda path: 400
        for update in range(3):
            watch(update, {"loss": 1.0})
    said = capfd.readouterr().err
    assert "MLflow: " in said
    assert "runs/log-batch: status 400, out of order; the run goes on" in said


def test_a_server_that_stays_away_is_said_with_what_is_lost(
    tracking: Any,
    lake: Lake,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(mlflow_run, "_ROUND_S", 0.01)
    monkeypatch.setattr(mlflow_run, "_CLOSE_TIMEOUT_S", 0.1)
    with watched(lake) as watch:
        watch.begin("01abc")
        tracking.fail = lambda path: 503
        watch(1, {"loss": 1.0})
    assert "points of metrics were not sent; the run goes on" in capfd.readouterr().err


def test_credentials_are_sent_as_mlflow_does(
    tracking: Any, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ada")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "word")
    with watched(lake) as watch:
        watch.begin("01abc")
    expected = f"Basic {base64.b64encode(b'ada:word').decode()}"
    assert {headers["Authorization"] for headers in tracking.headers} == {expected}
    tracking.headers.clear()
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "t0ken")
    with watched(lake) as watch:
        watch.begin("01abc")
    assert {headers["Authorization"] for headers in tracking.headers} == {"Bearer t0ken"}


@pytest.mark.parametrize("uri", ["", "sqlite:///mlflow.db", "file:///tmp/mlruns", "databricks"])
def test_a_server_is_required_before_anything_runs(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, uri: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(ConfigInvalidError, match="MLFLOW_TRACKING_URI: found"):
        watched(lake)


def test_a_run_that_mlflow_refuses_is_one_error(
    tracking: Any, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracking.fail = lambda path: 403
    with watched(lake) as watch, pytest.raises(ConfigInvalidError, match=r"status 403.*--mlflow"):
        watch.begin("01abc")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with watched(lake) as watch, pytest.raises(ConfigInvalidError, match="refused"):
        watch.begin("01abc")
