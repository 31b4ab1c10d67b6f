"""Faults of online runs, end to end: the real command, in processes that are really killed.

Each run collects in an environment whose every number is checkable, so that SQL tells afterwards
whether what was acknowledged, which is what was committed, is there once and unchanged.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import pytest

from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.runs.checkpoints import Checkpoints
from replaylake.datastore.lake.runs.metrics import read_curves

_ENVIRONMENTS: Final = Path(__file__).parent / "environments"
_COMMAND: Final = (sys.executable, "-m", "replaylake.cli.main")
# Worker kills of the long form; each takes a few seconds.
_NUM_KILLS: Final = max(10, int(os.environ.get("REPLAYLAKE_KILLS", "500")) // 25)
# Machines that run other tests beside this one are slow.
_PATIENCE_S: Final = 240

_SETS: Final = {
    "hidden_sizes": "[16]",
    "batch_size": 16,
    "min_size": 200,
    "log_steps": 200,
    "evaluate_steps": 500,
    "selection_episodes": 2,
    "evaluation_episodes": 2,
}


def begin(
    steps: int,
    *more: str,
    step_s: float = 0.002,
    broken_seed: int | None = None,
    hold: Path | None = None,
    hold_after: int = 0,
    **sets: Any,
) -> list[str]:
    """Return the arguments of a new run; `more` win, and `sets` over those above.

    hold: while it is there, each environment takes `hold_after` steps and no more.
    """
    named = [
        *("--env", "replaylake_faults:Walk", "--algorithm", "dqn", "--dataset", "walk"),
        *("--policy", "walker", "--workers", "2", "--envs-per-worker", "4", "--steps", str(steps)),
    ]
    named += ["--env-arg", f"step_s={step_s}"]
    if broken_seed is not None:
        named += ["--env-arg", f"broken_seed={broken_seed}"]
    if hold is not None:
        named += ["--env-arg", f"hold={hold}", "--env-arg", f"hold_after={hold_after}"]
    for key, value in {**_SETS, **sets}.items():
        named += ["--set", f"{key}={value}"]
    return [*named, *more]


class Life:
    """A process of a run, in a group of its own as a terminal's is; stderr goes to a file."""

    begun: ClassVar[list[Life]] = []
    # The fixture of this name.
    fork_command: ClassVar[Callable[..., Any]]

    def __init__(
        self, lake: Path | str, folder: Path, *arguments: str, inside: tuple[str, ...] = ()
    ) -> None:
        """inside: what runs the command."""
        Life.begun.append(self)
        self._said, self._answered = folder / "said", folder / "answered"
        command = ["train", "online", *arguments, "--lake", str(lake), "--json"]
        with self._said.open("w") as said, self._answered.open("w") as answered:
            if not inside:
                self.process = self.fork_command(command, answered, said)
                return
            paths = [str(_ENVIRONMENTS), os.environ.get("PYTHONPATH", "")]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
            self.process = subprocess.Popen(
                [*inside, *_COMMAND, *command],
                stdout=answered,
                stderr=said,
                env={**environment, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self._said.read_text()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until it says something, and return that."""
        until = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until:
            has_ended = self.process.poll() is not None
            if match := re.search(pattern, self.said):
                return match
            assert not has_ended, f"it ended: {self.said}"
            time.sleep(0.02)
        raise AssertionError(self.said)

    def wait_for_steps(self, num_steps: int, more_than: int = 0) -> None:
        """Wait until it says that it has so many steps more."""
        until = time.monotonic() + _PATIENCE_S
        while self.num_steps < more_than + num_steps:
            assert self.process.poll() is None, f"it ended: {self.said}"
            assert time.monotonic() < until, self.said
            time.sleep(0.02)

    @property
    def notes(self) -> list[str]:
        return [line for line in self.said.splitlines() if line.startswith("note: ")]

    @property
    def num_steps(self) -> int:
        """As it said last."""
        said = re.findall(r"^step ([\d,]+)/", self.said, re.MULTILINE)
        return int(said[-1].replace(",", "")) if said else 0

    def run_id(self) -> str:
        return self.wait_for(r"^(?:.*\n)*?run (\w{26})").group(1)

    def family(self) -> dict[int, str]:
        """Return the process and all below it, with how their commands begin."""
        parents = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        found = {self.process.pid}
        while new := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= new
        return {pid: _command(pid) for pid in found}

    def workers(self) -> list[int]:
        return [pid for pid, command in self.family().items() if "NodeWorker" in command]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self, code: int = 0) -> dict[str, Any]:
        """Wait for the end, and return what it answered."""
        found = self.process.wait(timeout=_PATIENCE_S)
        assert found == code, self.said
        assert "Traceback" not in self.said
        text = self._answered.read_text()
        return dict(json.loads(text)) if text else {}


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
    return ""


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_gone(family: dict[int, str], timeout_s: float) -> None:
    """Wait until no process of a family is left."""
    until = time.monotonic() + timeout_s
    while left := {pid: command for pid, command in family.items() if _is_alive(pid)}:
        assert time.monotonic() < until, left
        time.sleep(0.1)


@dataclass(frozen=True)
class Account:
    """What a dataset holds against what was acknowledged; faults must be 0."""

    acknowledged: int
    rows: int
    doubled: int
    gaps: int
    changed: int
    num_complete: int
    # Ids of episodes without an end, and those that commits name.
    left_open: frozenset[str]
    named: frozenset[str]

    def check(self) -> None:
        assert self.rows == self.acknowledged > 0
        assert (self.doubled, self.gaps, self.changed) == (0, 0, 0)
        assert self.left_open == self.named


def account(lake: Lake, run_id: str) -> Account:
    dataset = lake.dataset("walk")
    own = [c for c in dataset.history() if str(c.get("producer")).startswith(f"online/{run_id}")]
    named = [episode for c in own for episode in c.get("abandoned_episodes", ())]
    assert len(set(named)) == len(named)

    def one(query: str) -> int:
        ((value,),) = (row.values() for row in lake.sql(query).to_pylist())
        return int(value)

    keys = "count(distinct (episode_id, agent_id, step))"
    by_episode = "from walk.steps group by episode_id, agent_id"
    odd_ends = "bool_or(terminated or truncated) != arg_max(terminated or truncated, step)"
    left = lake.sql("select episode_id from walk.episodes where not complete")
    return Account(
        acknowledged=sum(c.get("num_steps", 0) for c in own),
        rows=one("select count(*) from walk.steps"),
        doubled=one(f"select count(*) - {keys} from walk.steps"),
        gaps=one(
            f"select count(*) from (select 1 {by_episode} "
            f"having min(step) != 0 or max(step) + 1 != count(*) or {odd_ends})"
        ),
        changed=one(
            "select count(*) from walk.steps where observation[1] != step or reward != step "
            "or observation[2] != seed % 1000 "
            "or (terminated or truncated) != (step + 1 = 5 + seed % 20)"
        ),
        num_complete=one("select count(*) from walk.episodes where complete"),
        left_open=frozenset(left["episode_id"].to_pylist()),
        named=frozenset(named),
    )


def status(lake: Lake, run_id: str) -> dict[str, Any]:
    (row,) = lake.sql(f"select * from runs where run_id = '{run_id}'").to_pylist()
    return dict(row)


@pytest.fixture
def folder(
    tmp_path: Path, fork_command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """Where a test's lake is; what it started is ended with it."""
    monkeypatch.setattr(Life, "fork_command", staticmethod(fork_command), raising=False)
    yield tmp_path
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if str(tmp_path).encode() in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)
    while Life.begun:
        Life.begun.pop().kill()


def kill_a_worker(life: Life, rng: random.Random, hold: Path) -> None:
    """Kill one of the workers that there are, and wait until steps have come again.

    Its environments wait meanwhile, so that the others do not take all steps of the run.
    """
    until = time.monotonic() + _PATIENCE_S
    hold.touch()
    while len(workers := life.workers()) < 2:
        assert time.monotonic() < until, life.said
        time.sleep(0.1)
    said = life.said.count("was lost and replaced")
    os.kill(rng.choice(workers), signal.SIGKILL)
    while life.said.count("was lost and replaced") == said and life.process.poll() is None:
        assert time.monotonic() < until, life.said
        time.sleep(0.05)
    hold.unlink()
    life.wait_for_steps(1, more_than=life.num_steps)


@pytest.mark.slow
def test_workers_and_the_driver_are_killed_and_nothing_is_lost_or_doubled(folder: Path) -> None:
    rng, hold = random.Random(7), folder / "hold"
    hold.touch()
    life = Life(folder / "lake", folder, *begin(6000, hold=hold, hold_after=150))
    run_id = life.run_id()
    life.wait_for_steps(1000)
    kill_a_worker(life, rng, hold)
    family = life.family()
    life.kill()
    # Ray's two agents look for it for a minute more.
    assert_gone({p: c for p, c in family.items() if "Agent" not in c}, 120)
    lake = open_lake(folder / "lake")
    before = account(lake, run_id)
    assert before.rows == before.acknowledged > 500
    hold.touch()
    life = Life(folder / "lake", folder, "--resume", run_id[:20])
    life.wait_for(f"run {run_id} goes on after update [1-9]")
    kill_a_worker(life, rng, hold)
    answer = life.end()
    # All environments of a worker are stepped together.
    assert 6000 <= answer["num_steps"] < 6008
    assert answer["num_updates"] >= 6000 - 200
    found = account(lake, run_id)
    found.check()
    assert found.rows == answer["num_steps"]
    assert found.named >= before.left_open - before.named
    assert answer["num_episodes"] == found.num_complete


@pytest.mark.slow
def test_interrupts_save_a_checkpoint_and_leave_no_process(folder: Path) -> None:
    life = Life(folder / "lake", folder, *begin(100_000))
    run_id = life.run_id()
    lake = open_lake(folder / "lake")
    life.wait_for(r"update [1-9]")
    # As Ctrl-C in a terminal: to every process of the group, Ray's too.
    family = life.family()
    os.killpg(life.process.pid, signal.SIGINT)
    life.end(code=130)
    update = check_saved(lake, life, run_id)
    # Ray's agents that nobody ends look for it for a minute.
    assert_gone(family, 120)
    account(lake, run_id).check()

    life = Life(folder / "lake", folder, "--resume", run_id)
    life.wait_for(f"run {run_id} goes on after update {update:,}")
    life.wait_for(r"\nstep [1-9].*\nstep [1-9]")
    family = life.family()
    life.process.terminate()
    life.end(code=130)
    assert check_saved(lake, life, run_id) >= update
    # Ray's agents that nobody ends look for it for a minute.
    assert_gone(family, 120)
    account(lake, run_id).check()


def check_saved(lake: Lake, life: Life, run_id: str) -> int:
    """Return the update of the newest checkpoint, which the last lines name."""
    (*_, told, interrupted) = life.said.splitlines()
    update = Checkpoints(lake.storage, run_id).updates()[-1]
    assert told == f"`replaylake train online --resume {run_id}` goes on after update {update:,}"
    assert interrupted == "interrupted"
    assert status(lake, run_id)["status"] == "interrupted"
    return update


@pytest.mark.slow
def test_a_second_interrupt_ends_at_once(folder: Path) -> None:
    # A worker is in the middle of steps that do not end when the first one comes.
    hold = folder / "hold"
    hold.touch()
    arguments = begin(100_000, "--workers", "1", hold=hold, hold_after=100)
    life = Life(folder / "lake", folder, *arguments)
    run_id = life.run_id()
    until = time.monotonic() + _PATIENCE_S
    while not hold.with_suffix(".waits").exists():
        assert time.monotonic() < until, life.said
        time.sleep(0.02)
    family = life.family()
    life.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert life.process.poll() is None
    life.process.send_signal(signal.SIGINT)
    # A worker that does not answer is waited for ten minutes.
    life.end(code=130)
    assert f"--resume {run_id}` goes on from what was collected" in life.said
    # Ray's agents that nobody ends look for it for a minute.
    assert_gone(family, 120)
    assert status(open_lake(folder / "lake"), run_id)["status"] == "interrupted"


# SIGTERM is the one that Ray handles itself while it starts.
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, marks=pytest.mark.chaos),
    ],
)
def test_an_interrupt_while_the_workers_start(folder: Path, number: signal.Signals) -> None:
    life = Life(folder / "lake", folder, *begin(100_000))
    until = time.monotonic() + _PATIENCE_S
    while not any("raylet" in command for command in life.family().values()):
        assert time.monotonic() < until, life.said
        time.sleep(0.05)
    family = life.family()
    life.process.send_signal(number)
    life.end(code=130)
    lake = open_lake(folder / "lake")
    (run,) = lake.sql("select * from runs").to_pylist()
    assert run["status"] == "interrupted"
    assert f"--resume {run['run_id']}` goes on from what was collected" in life.said
    assert_gone(family, 90)


class Disk:
    """A small disk of its own: seen at `path` by what runs `inside`, and at `root` by the test."""

    def __init__(self, path: Path, megabytes: int) -> None:
        mount = 'mount -t tmpfs -o size="$2"m tmpfs "$1" && echo ready && exec sleep 3600'
        command = ["unshare", "--mount", "--map-root-user", "sh", "-c", mount, "sh", str(path)]
        if not all(map(shutil.which, ("unshare", "nsenter"))):
            pytest.skip(
                "not run: unshare or nsenter is not installed, so no small disk can be made"
            )
        self._holder = subprocess.Popen(
            [*command, str(megabytes)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "ready\n":
            _, error = self._holder.communicate()
            pytest.skip(f"not run: no small disk may be mounted here: {error.strip()[-200:]}")
        self.path = path
        self.root = Path(f"/proc/{self._holder.pid}/root{path}")
        namespaces = ("-t", str(self._holder.pid), "-U", "-m", "--preserve-credentials")
        self.inside = ("nsenter", *namespaces)

    def fill(self) -> None:
        """Leave no byte."""
        with (self.root / "filler").open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
        with (self.root / "filler").open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 8))

    def make_room(self) -> None:
        (self.root / "filler").unlink()

    def close(self) -> None:
        for stream in (self._holder.stdout, self._holder.stderr):
            assert stream is not None
            stream.close()
        self._holder.kill()
        self._holder.wait()


@pytest.fixture
def disk(folder: Path) -> Iterator[Disk]:
    path = folder / "disk"
    path.mkdir()
    disk = Disk(path, 64)
    yield disk
    disk.close()


_WAITS = "note: the run waits, and goes on by itself. .*: No space left on device"
_GOES_ON = "note: the store takes what is written again: the run goes on"


def fill(disk: Disk, life: Life, hold: Path | None = None) -> None:
    """Fill the disk until the run waits: what half of a file took is free again at first.

    hold: of its environments, which go on once the disk is full.
    """
    until, num_notes = time.monotonic() + _PATIENCE_S, len(life.notes)
    for _ in range(4):
        disk.fill()
        time.sleep(0.4)
    if hold is not None:
        hold.unlink()
    while len(life.notes) == num_notes or not re.match(_WAITS, life.notes[-1]):
        assert time.monotonic() < until, life.said
        assert life.process.poll() is None, life.said
        disk.fill()
        time.sleep(0.4)


# With Ray the workers write their shards, and the driver all else; in one process one writes all.
@pytest.mark.parametrize(
    ("runner", "num_fills"),
    [
        pytest.param("ray", 1, marks=pytest.mark.slow),
        pytest.param("ray", 2, marks=pytest.mark.chaos),
        pytest.param("local", 2, marks=pytest.mark.chaos),
    ],
)
def test_a_run_waits_while_the_disk_is_full(
    folder: Path, disk: Disk, runner: str, num_fills: int
) -> None:
    # Metrics and checkpoints are written all the time, to be refused too.
    often = {"log_steps": 50, "checkpoint_steps": 50}
    step_s = 0.002 if runner == "ray" else 0.0005
    # The closing evaluation takes some seconds, and is held while the disk is filled once more.
    often["evaluation_episodes"] = 250
    hold = folder / "hold"
    num_steps = 4000 * num_fills
    arguments = begin(num_steps, "--env-runner", runner, step_s=step_s, hold=hold, **often)
    life = Life(disk.path / "lake", folder, *arguments, inside=disk.inside)
    run_id = life.run_id()
    for _ in range(num_fills):
        life.wait_for_steps(300, more_than=life.num_steps)
        fill(disk, life)
        notes = life.notes
        time.sleep(2)
        # Once, and not every time that it is tried.
        assert life.notes == notes
        assert life.process.poll() is None
        waited_at = life.num_steps
        disk.make_room()
        life.wait_for(rf"(?s)(note: .*){{{len(notes)}}}{_GOES_ON}")
        life.wait_for_steps(1, more_than=waited_at)
    lake = open_lake(disk.root / "lake")
    checkpoints = Checkpoints(lake.storage, run_id)
    while checkpoints.updates()[-1] < num_steps - 200:
        assert life.process.poll() is None, life.said
        time.sleep(0.01)
    hold.touch()
    until = time.monotonic() + _PATIENCE_S
    while not hold.with_suffix(".waits").exists():
        assert life.process.poll() is None, life.said
        assert time.monotonic() < until, life.said
        time.sleep(0.01)
    fill(disk, life, hold)
    disk.make_room()
    answer = life.end()
    found = account(lake, run_id)
    found.check()
    assert found.rows == answer["num_steps"] >= num_steps
    # What could not be written was taken back.
    assert len(list((lake.path / "_lake/policies/walker").iterdir())) == 1


@pytest.mark.slow
def test_an_interrupt_ends_a_run_that_waits_for_the_disk(folder: Path, disk: Disk) -> None:
    arguments = begin(100_000, "--env-runner", "local", step_s=0.0005)
    life = Life(disk.path / "lake", folder, *arguments, inside=disk.inside)
    run_id = life.run_id()
    life.wait_for_steps(700)
    fill(disk, life)
    life.process.send_signal(signal.SIGINT)
    life.end(code=130)
    assert f"--resume {run_id}` goes on after update" in life.said
    lake = open_lake(disk.root / "lake")
    disk.make_room()
    before = account(lake, run_id)
    assert before.rows == before.acknowledged > 0
    life = Life(disk.path / "lake", folder, "--resume", run_id, inside=disk.inside)
    life.wait_for_steps(1, more_than=before.rows)
    life.process.terminate()
    life.end(code=130)
    account(lake, run_id).check()


# How a worker's error comes to the driver, test_rollout.py shows.
@pytest.mark.parametrize(
    "runner",
    [
        pytest.param("local", marks=pytest.mark.slow),
        pytest.param("ray", marks=pytest.mark.chaos),
    ],
)
def test_an_environment_that_raises_ends_the_run_and_it_can_go_on(
    folder: Path, runner: str
) -> None:
    life = Life(folder / "lake", folder, *begin(1500, "--env-runner", runner, broken_seed=30))
    run_id = life.run_id()
    life.end(code=1)
    (said,) = [line for line in life.said.splitlines() if line.startswith("error: ")]
    assert re.fullmatch(
        r"error: rollout worker \d: step of replaylake_faults:Walk raised ValueError: the gripper "
        r"is stuck, at step 2 of the episode reset with seed 30; .*",
        said,
    )
    lake = open_lake(folder / "lake")
    (run,) = lake.registry.runs()
    assert (run["status"], "seed 30" in run["error"]) == ("failed", True)
    before = account(lake, run_id)
    assert before.rows == before.acknowledged > 0
    life = Life(folder / "lake", folder, "--resume", run_id)
    answer = life.end()
    found = account(lake, run_id)
    found.check()
    assert found.rows == answer["num_steps"] >= 1500
    assert status(lake, run_id)["status"] == "done"


@pytest.mark.parametrize(
    ("runner", "gone"),
    [
        pytest.param("ray", "lake", marks=pytest.mark.slow),
        pytest.param("local", "lake/walk", marks=pytest.mark.slow),
        pytest.param("ray", "lake/walk", marks=pytest.mark.chaos),
        pytest.param("local", "lake", marks=pytest.mark.chaos),
    ],
)
def test_what_is_removed_under_a_run_ends_it(folder: Path, runner: str, gone: str) -> None:
    life = Life(folder / "lake", folder, *begin(100_000, "--env-runner", runner))
    life.run_id()
    life.wait_for_steps(500)
    (folder / gone).rename(folder / "elsewhere")
    life.end(code=1)
    (said,) = [line for line in life.said.splitlines() if line.startswith("error: ")]
    assert re.fullmatch(r"error: dataset 'walk': gone from \S+ while the run collects .*", said)


@pytest.mark.slow
def test_a_lake_that_becomes_read_only_ends_the_run(folder: Path, disk: Disk) -> None:
    arguments = begin(100_000, "--env-runner", "local")
    life = Life(disk.path / "lake", folder, *arguments, inside=disk.inside)
    run_id = life.run_id()
    life.wait_for_steps(500)
    again = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0"'
    subprocess.run([*disk.inside, "sh", "-c", again, disk.path / "lake"], check=True)
    life.end(code=1)
    (said,) = [line for line in life.said.splitlines() if line.startswith("error: ")]
    assert "Read-only file system, expected to read or write it. Mount the file system" in said
    found = account(open_lake(disk.root / "lake"), run_id)
    assert found.rows == found.acknowledged > 0


@pytest.mark.slow
def test_what_can_be_resumed(folder: Path) -> None:
    """A run at work, one killed before its first checkpoint, one that is done, and none."""
    rare = {"checkpoint_steps": 10**6, "evaluate_steps": 10**6, "min_size": 700}
    hold = folder / "hold"
    hold.touch()
    held = {"hold": hold, "hold_after": 300}
    life = Life(folder / "lake", folder, *begin(5000, "--env-runner", "local", **held, **rare))
    run_id = life.run_id()
    life.wait_for_steps(500)
    (folder / "second").mkdir()
    second = Life(folder / "lake", folder / "second", "--resume", run_id)
    second.end(code=1)
    at_work = f"error: run {run_id}: found process {life.process.pid} of .* at work on it"
    assert re.search(at_work, second.said)
    life.kill()
    hold.unlink()
    lake = open_lake(folder / "lake")
    assert Checkpoints(lake.storage, run_id).updates() == []
    before = account(lake, run_id)
    assert before.rows == before.acknowledged > 0

    life = Life(folder / "lake", folder, "--resume", run_id)
    answer = life.end()
    assert f"run {run_id}\n" in life.said
    assert f"{len(before.left_open)} episodes were open when the run ended" in life.said
    assert answer["num_updates"] == answer["num_steps"] - 700
    found = account(lake, run_id)
    found.check()
    assert found.rows == answer["num_steps"]
    # A version names one policy: none acted again under a number of before.
    mixed = lake.sql(
        "select policy_version from walk.steps where policy like 'run:%' group by 1 "
        f"having count(distinct starts_with(episode_id, 'online/{run_id}/1')) > 1"
    )
    assert mixed.num_rows == 0

    life = Life(folder / "lake", folder, "--resume", run_id)
    again = life.end()
    assert (again["was_done"], again["version"]) == (True, answer["version"])
    assert account(lake, run_id) == found
    life = Life(folder / "lake", folder, "--resume", "01nothing")
    life.end(code=1)
    said = "error: run '01nothing': found no run or policy of that name in this lake, whose latest"
    assert f"{said} runs are {run_id}" in life.said


# In one process, after an interrupt: test_train.py.
@pytest.mark.parametrize(
    ("runner", "algorithm"),
    [
        pytest.param("ray", "impala", marks=pytest.mark.slow),
        pytest.param("local", "ppo", marks=pytest.mark.chaos),
        pytest.param("ray", "ppo", marks=pytest.mark.chaos),
        pytest.param("local", "impala", marks=pytest.mark.chaos),
    ],
)
def test_steps_that_are_taken_once_after_a_kill(folder: Path, algorithm: str, runner: str) -> None:
    often = {"checkpoint_steps": 500, "log_steps": 500, "num_sequences": 4, "length": 32}
    hold = folder / "hold"
    hold.touch()
    held = {"hold": hold, "hold_after": 250}
    arguments = begin(4000, "--env-runner", runner, "--algorithm", algorithm, **held, **often)
    life = Life(folder / "lake", folder, *arguments)
    run_id = life.run_id()
    life.wait_for_steps(1500)
    life.kill()
    hold.unlink()
    lake = open_lake(folder / "lake")
    life = Life(folder / "lake", folder, "--resume", run_id)
    life.wait_for(f"run {run_id} goes on after update [1-9]")
    answer = life.end()
    found = account(lake, run_id)
    found.check()
    assert found.rows == answer["num_steps"] >= 4000
    # Each once at most; what fills no sequence or no batch was not taken.
    curves = read_curves(lake.storage, run_id)
    assert 0.8 < curves["samples_per_insert"].values[-1] <= 1
    assert 0 <= curves["staleness"].values[-1] < 8


_TWICE: Final = """
import json, os, sys, threading
from pathlib import Path
from replaylake.datastore.lake.lake import open_lake
from replaylake.online.training.config import OnlineConfig
from replaylake.online.train import train_online

def children():
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            parents[int(path.parent.name)] = (int(fields[1]), fields[0])
        except OSError:
            pass
    return [pid for pid, (parent, state) in parents.items() if parent == os.getpid()]

lake, found = open_lake(sys.argv[1], create=True), []
for algorithm in ("dqn", "ppo"):
    options = {"hidden_sizes": [16]}
    config = OnlineConfig(
        algorithm, env="CartPole-v1", policy="p", env_runner=sys.argv[2], steps=1500,
        min_size=200, envs_per_worker=4,
        evaluate_steps=700, selection_episodes=1, evaluation_episodes=1, options=options,
    )
    result = train_online(lake, "live", config)
    found.append({
        "num_steps": result.num_steps,
        "threads": [thread.name for thread in threading.enumerate()],
        "children": children(),
        "files": len(os.listdir("/proc/self/fd")),
    })
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    "runner",
    [
        pytest.param("ray", marks=pytest.mark.slow),
        pytest.param("local", marks=pytest.mark.chaos),
    ],
)
def test_a_run_leaves_no_thread_and_no_process_and_another_can_follow(
    folder: Path, runner: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", _TWICE, folder / "lake", runner],
        capture_output=True,
        text=True,
        check=False,
        timeout=_PATIENCE_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout.splitlines()[-1])
    print(first, second)
    for found in (first, second):
        assert found["num_steps"] >= 1500
        assert found["threads"] == ["MainThread"]
        assert found["children"] == []
    assert second["files"] <= first["files"] + 2


@pytest.mark.chaos
def test_a_random_worker_is_killed_again_and_again_and_the_driver_in_between(folder: Path) -> None:
    seed = int(os.environ.get("REPLAYLAKE_SEED", random.randrange(10**6)))
    rng = random.Random(seed)
    print(f"seed {seed}, {_NUM_KILLS} workers and {_NUM_KILLS // 5} drivers are killed")
    lake, num_drivers = None, 0
    hold = folder / "hold"
    often = {"checkpoint_steps": 300, "evaluate_steps": 1000, "log_steps": 100}
    arguments = begin(10**9, hold=hold, **often)
    life = Life(folder / "lake", folder, *arguments)
    run_id = life.run_id()
    for number in range(_NUM_KILLS):
        life.wait_for_steps(1, more_than=life.num_steps)
        time.sleep(rng.random() * 3)
        kill_a_worker(life, rng, hold)
        if number % 5 == 4:
            family = life.family()
            life.kill()
            num_drivers += 1
            lake = open_lake(folder / "lake")
            found = account(lake, run_id)
            print(f"{number + 1} kills: {found.rows:,} steps, {found.num_complete:,} episodes")
            assert found.rows == found.acknowledged
            assert (found.doubled, found.gaps, found.changed) == (0, 0, 0)
            assert found.named <= found.left_open
            assert_gone(family, 120)
            life = Life(folder / "lake", folder, "--resume", run_id[:16])
    life.wait_for_steps(1, more_than=life.num_steps)
    life.process.terminate()
    life.end(code=130)
    assert lake is not None
    found = account(lake, run_id)
    print(f"at the end: {found.rows:,} steps, {len(found.left_open):,} episodes marked")
    found.check()
