"""What shows a run while it goes on: event files always, Weights & Biases where asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from replaylake.cli.output.command_output import CommandOutput
from replaylake.cli.output.watch import EventFile, Watchers, watchers
from replaylake.datastore.errors import ExtraMissingError
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.runs.timings import Timings


@pytest.fixture
def here(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


def _watched(lake: Lake, **options: Any) -> Watchers:
    return watchers(CommandOutput(as_json=False), lake, **options)


def test_event_files_are_in_the_run_s_folder(
    events_of: Any, here: Lake, capfd: pytest.CaptureFixture[str]
) -> None:
    with _watched(here) as watch:
        watch.begin("01abc")
        watch(100, {"critic_loss": 0.5, "updates_per_s": 300.0})
        watch(200, {"critic_loss": 0.25})
    (path,) = (here.path / "_lake" / "runs" / "01abc" / "tensorboard").iterdir()
    assert events_of.scalars(events_of.read(path)) == [
        (100, {"critic_loss": 0.5, "updates_per_s": 300.0}),
        (200, {"critic_loss": 0.25}),
    ]
    assert capfd.readouterr() == ("", "")


def test_event_files_take_an_online_run_s_metrics_under_the_same_names(
    events_of: Any, here: Lake
) -> None:
    timings = Timings("workers")
    timings.add("env_step", 1.5, 3000, 4096)
    points = [
        (0, {"env_steps": 1000.0, "episodes": 40.0, "return": 22.5, "steps_per_s": 900.0}),
        (800, {"staleness": 1.25, "samples_per_insert": 31.5, "latency_ms": 80.0}),
        (800, {**timings.to_metrics(), "profile/seconds": 2.5}),
        (800, {"selection/environment": 187.5}),
        (400, {"evaluation/return": 190.0}),
    ]
    with _watched(here) as watch:
        watch.begin("01abc")
        for update, values in points:
            watch(update, values)
    (path,) = (here.path / "_lake" / "runs" / "01abc" / "tensorboard").iterdir()
    assert events_of.scalars(events_of.read(path)) == points
    assert points[2][1] == {
        "profile/seconds": points[2][1]["profile/seconds"],
        "profile/workers/env_step/seconds": 1.5,
        "profile/workers/env_step/items": 3000.0,
        "profile/workers/env_step/bytes": 4096.0,
        "profile/workers/env_step/calls": 1.0,
    }


def test_of_a_remote_lake_they_are_on_this_machine_and_it_says_where(
    events_of: Any, bucket: str, capfd: pytest.CaptureFixture[str]
) -> None:
    lake = open_lake(f"s3://{bucket}/lake", create=True)
    with _watched(lake) as watch:
        watch.begin("01abc")
        watch(1, {"loss": 1.0})
    said = capfd.readouterr().err.strip()
    folder = Path(said.removeprefix("event files in "))
    (path,) = folder.iterdir()
    assert events_of.scalars(events_of.read(path)) == [(1, {"loss": 1.0})]
    assert [file.path for file in lake.storage.files("_lake/runs")] == []


def test_nothing_is_made_before_the_run_begins(here: Lake) -> None:
    with _watched(here):
        pass
    assert not (here.path / "_lake" / "runs").exists()


def test_a_full_disk_is_said_once_and_ends_no_run(
    here: Lake, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(self: EventFile, step: int, values: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(EventFile, "add", full)
    with _watched(here) as watch:
        watch.begin("01abc")
        for update in range(3):
            watch(update, {"loss": 1.0})
    assert capfd.readouterr().err == (
        "TensorBoard: [Errno 28] No space left on device; the run goes on, and its metrics are in "
        "the lake\n"
    )


def test_a_folder_that_cannot_be_made_ends_no_run(
    here: Lake, capfd: pytest.CaptureFixture[str]
) -> None:
    here.storage.put("_lake/runs/01abc", b"a file in its place")
    with _watched(here) as watch:
        watch.begin("01abc")
        watch(1, {"loss": 1.0})
    assert capfd.readouterr().err.startswith("TensorBoard: [Errno ")


def test_without_wandb_the_extra_is_named_before_anything_runs(
    here: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ExtraMissingError, match=r"replaylake\[wandb\]"):
        _watched(here, wandb_project="p")


# In a process of its own: wandb remembers the first run's mode for good, and its files are whole
# when the process has ended.
_PROGRAM = """
import sys
from replaylake.cli.output.command_output import CommandOutput
from replaylake.cli.output.watch import watchers
from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.lake.lake import open_lake
lake = open_lake(sys.argv[1])
lake.registry.record_run("01abc", {"algorithm": "bc", "config": {"hidden_sizes": [8]}})
with watchers(CommandOutput(False), lake, wandb_project="cartpole") as watch:
    try:
        watch.begin("01abc")
        watch(100, {"critic_loss": 0.5})
        watch(200, {"critic_loss": 0.25})
        watch(100, {"evaluation/return": 187.5})
    except ConfigInvalidError as error:
        print(error)
"""


def _with_wandb(lake: Lake, home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    own = {name: v for name, v in os.environ.items() if not name.startswith("WANDB_")}
    return subprocess.run(
        [sys.executable, "-c", _PROGRAM, lake.url],
        env={**own, "HOME": str(home), **variables},
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.mark.slow
def test_wandb_is_told_too(here: Lake, tmp_path: Path) -> None:
    done = _with_wandb(here, tmp_path, WANDB_MODE="offline")
    assert (done.stdout, done.stderr) == ("", "")
    folder = here.path / "_lake" / "runs" / "01abc"
    (path,) = folder.glob("wandb/offline-run-*/run-01abc.wandb")
    data = path.read_bytes()
    for text in (
        b"cartpole",
        b"hidden_sizes",
        b"critic_loss",
        b"0.25",
        b"200",
        b"evaluation/return",
        b"187.5",
    ):
        assert text in data
    assert len(list((folder / "tensorboard").iterdir())) == 1


@pytest.mark.slow
def test_a_run_that_wandb_refuses_is_one_error(here: Lake, tmp_path: Path) -> None:
    done = _with_wandb(here, tmp_path)
    assert done.stdout.startswith("Weights & Biases: ")
    assert "or leave out --wandb" in done.stdout
