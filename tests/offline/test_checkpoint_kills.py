"""Kill -9 of a training run at one system call after the other of the writing of a checkpoint.

A run is killed while it saves, resumed, killed some calls further on, and so on. strace counts the
calls: the process attaches it to itself when it is about to save, so that the count is that of the
checkpoint and of nothing else.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from replaylake.datastore.errors import NotFoundError
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.policies.package import load_learner_weights
from replaylake.datastore.lake.runs.checkpoints import Checkpoints
from replaylake.datastore.lake.runs.metrics import read_curves
from replaylake.datastore.maintenance.fsck.fsck import fsck

# A process that has imported everything forks a run for each line that it is given: importing torch
# takes longer than such a run. Its checkpoint number `at_save` is traced, and with `kill_at`, the
# name of a system call and a number n, the run is killed at the n-th call of that name.
_FORKING: Final = """
import ctypes, json, os, signal, subprocess, sys, threading
import replaylake.offline.running.train
from replaylake.cli.main import main
from replaylake.offline.running.training.lake_observer import LakeObserver

CALLS = "%file,%desc,%memory"
trace = sys.argv[1]

def attach(kill_at):
    # Lets any process trace this one, where the kernel restricts that to ancestors.
    ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)
    command = ["strace", "-o", trace, "-p", str(threading.get_native_id()), "-e", f"trace={CALLS}"]
    if kill_at:
        name, number = kill_at
        command += ["-e", f"inject={name}:signal=KILL:when={number}"]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    line = tracer.stderr.readline()
    assert "attached" in line, line
    return tracer

def run(arguments, at_save, kill_at):
    num_saves = 0
    save = LakeObserver.save

    def save_traced(self, update, state, *, best):
        nonlocal num_saves
        num_saves += 1
        if num_saves != at_save:
            return save(self, update, state, best=best)
        tracer = attach(kill_at)
        save(self, update, state, best=best)
        tracer.send_signal(signal.SIGINT)
        tracer.communicate()

    LakeObserver.save = save_traced
    return main(arguments)

for line in sys.stdin:
    asked = json.loads(line)
    if not (pid := os.fork()):
        output = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1), os.dup2(output, 2)
        os._exit(run(asked["arguments"], asked["at_save"], asked["kill_at"]))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Runs:
    """Runs `train offline`, one process after the other, and kills some in a checkpoint."""

    def __init__(self, lake: Lake, folder: Path) -> None:
        self.lake = lake
        self.output = folder / "output"
        self.trace = folder / "trace"
        self._process = subprocess.Popen(
            [sys.executable, "-c", _FORKING, str(self.trace)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def run(self, *arguments: str, at_save: int = 3, kill_at: tuple[str, int] | None = None) -> int:
        """Run until it ends or is killed; return its exit code, or minus the signal."""
        full = ["train", "offline", *arguments, "--lake", str(self.lake.path)]
        asked = {"arguments": full, "at_save": at_save, "kill_at": kill_at}
        asked["output"] = str(self.output)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        assert code in (0, -signal.SIGKILL), self.output.read_text()
        return code

    def train(self, policy: str, num_updates: int, kill_at: tuple[str, int] | None = None) -> str:
        """Start a run; return its id."""
        given = [f"updates={num_updates}", "checkpoint_updates=2", "keep_checkpoints=4"]
        given += ["log_updates=1", "hidden_sizes=[16]"]
        sets = [part for one in given for part in ("--set", one)]
        arguments = ["line", "--algorithm", "bc", "--policy", policy, *sets]
        # With as many checkpoints as are retained, a save makes the same calls each time.
        self.run(*arguments, at_save=6, kill_at=kill_at)
        found = re.search(r"run (\w{26})", self.output.read_text())
        assert found is not None
        return found.group(1)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=60)


@pytest.fixture
def runs(tmp_path, line_world) -> Iterator[Runs]:
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("not run: strace is not installed, so no system call can be chosen to kill at")
    probe = subprocess.run([strace, "-f", "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"not run: strace may not trace here: {probe.stderr.strip()[-200:]}")
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("line").append(line_world(num_episodes=4))
    runs = Runs(lake, tmp_path)
    yield runs
    runs.close()


def saved_update(lake: Lake, run_id: str) -> int:
    """Return the update that a run goes on from: 0 before the first checkpoint."""
    try:
        return Checkpoints(lake.storage, run_id).load().update
    except NotFoundError:
        return 0


def kill_in_checkpoints(runs: Runs, num_kills: int) -> None:
    num_updates = 6 * num_kills + 20
    whole_id = runs.train("whole", num_updates)
    calls = [line for line in runs.trace.read_text().splitlines() if "(" in line]
    # Whether the line is still read in which strace says that it is attached depends on timing.
    calls = [call for call in calls if "strace" not in call]
    names = [call.split("(")[0] for call in calls]
    assert {"fsync", "rename"} <= set(names), calls
    points = sorted({i * len(calls) // num_kills for i in range(num_kills)})
    killed_id = ""
    before = 6
    for point in points:
        call, kill_at = calls[point], (names[point], names[: point + 1].count(names[point]))
        if killed_id:
            code = runs.run("--resume", killed_id, kill_at=kill_at)
            assert code, f"{kill_at} is not in a checkpoint, expected {call}"
        else:
            killed_id = runs.train("killed", num_updates, kill_at)
        print(f"killed at call {point + 1} of {len(calls)}: {call[:150]}")
        # The second checkpoint since it was started or, where it was whole already, the third.
        after = saved_update(runs.lake, killed_id)
        assert after in (before + 4, before + 6), call
        report = fsck(open_lake(runs.lake.path))
        assert report.is_clean, (call, report.findings)
        before = after
    assert runs.run("--resume", killed_id) == 0
    records = {run["policy"]: run for run in runs.lake.registry.runs()}
    assert {name: run["status"] for name, run in records.items()} == {
        "whole": "done",
        "killed": "done",
    }
    # Each life went on from the checkpoint that the kill left.
    assert len(records["killed"]["resumed"]) == len(points)
    assert records["killed"]["resumed"][-1]["update"] == before
    expected, found = (
        load_learner_weights(runs.lake.registry.resolve(name).path) for name in ("whole", "killed")
    )
    assert [n for n, a in expected.items() if found[n].tobytes() != a.tobytes()] == []
    curves = [read_curves(runs.lake.storage, run_id) for run_id in (whole_id, killed_id)]
    for name, curve in curves[0].items():
        if not name.startswith("profile/"):
            assert curves[1][name].updates.tolist() == curve.updates.tolist(), name
            assert curves[1][name].values.tobytes() == curve.values.tobytes(), name
    assert runs.lake.storage.names(f"_lake/runs/{killed_id}/checkpoints") == []


@pytest.mark.slow
def test_a_run_killed_at_a_call_of_its_checkpoint_goes_on_to_the_same_weights(runs):
    kill_in_checkpoints(runs, 10)


@pytest.mark.chaos
def test_a_run_killed_at_each_call_of_its_checkpoint_goes_on_to_the_same_weights(runs):
    kill_in_checkpoints(runs, int(os.environ.get("REPLAYLAKE_TRAINING_KILLS", "100")))
