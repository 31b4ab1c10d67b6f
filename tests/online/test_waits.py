"""What online training waits for: each wait ends by a signal, or by a limit that says what is."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from replaylake.datastore.errors import ConfigInvalidError, RolloutError, StorageError
from replaylake.datastore.lake.lake import open_lake
from replaylake.offline.environments.spaces import from_gymnasium
from replaylake.offline.running.local_ray import open_ray
from replaylake.online.collecting.behavior_policy import BehaviorPolicy
from replaylake.online.collecting.rollout_batch import EpisodeNumbers, WorkerSpec
from replaylake.online.collecting.worker import RolloutConfig
from replaylake.online.pools.pool import WorkerLost
from replaylake.online.pools.ray_pool import RayPool
from replaylake.online.recording.episode_committer import EpisodeCommitter
from replaylake.online.train import train_online
from replaylake.online.training.config import OnlineConfig

_ENVIRONMENTS = Path(__file__).parent / "environments"
# Machines that run other tests beside this one are slow.
_PATIENCE_S = 240
_PROMPT_S = 120
_SETS = (
    *("hidden_sizes=[16]", "batch_size=16", "min_size=200", "log_steps=200", "evaluate_steps=500"),
    *("selection_episodes=2", "evaluation_episodes=2"),
)


@dataclass
class Command:
    """`replaylake train online`, with what it says."""

    process: subprocess.Popen[bytes]
    said_at: Path

    @property
    def said(self) -> str:
        return self.said_at.read_text()

    def wait_for(self, pattern: str) -> re.Match[str]:
        until = time.monotonic() + _PATIENCE_S
        while (match := re.search(pattern, self.said)) is None:
            assert self.process.poll() is None, self.said
            assert time.monotonic() < until, self.said
            time.sleep(0.05)
        return match

    def end(self, timeout_s: float = _PATIENCE_S) -> int:
        code = self.process.wait(timeout=timeout_s)
        assert "Traceback" not in self.said
        return code


# The command, with shorter limits of what is waited for after a signal, and before a wait is told.
# Neither can pass early on a slow machine: a learner that is stopped stays silent, and one without
# a GPU stays without.
_COMMAND = """
import sys
from replaylake.online import train
train._SILENT_S, train._PATIENT_S = 2.0, 1.0
from replaylake.cli.main import main
sys.exit(main())
"""


def start(folder: Path, variables: dict[str, str], arguments: list[str]) -> Command:
    """Start the command in an environment of Ray's variables; its lake is in the folder."""
    folder.mkdir()
    with (folder / "said").open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, "train", "online", *arguments,
             "--lake", str(folder / "lake")],
            stdout=file, stderr=file, start_new_session=True, cwd=folder,
            env={**variables, "PYTHONPATH": str(_ENVIRONMENTS), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    return Command(process, folder / "said")


def new_run(address: str, *more: str, steps: int = 100_000) -> list[str]:
    sets = [word for one in _SETS for word in ("--set", one)]
    return [
        *("--env", "replaylake_faults:Walk", "--env-arg", "step_s=0.01", "--algorithm", "dqn"),
        *("--dataset", "walk", "--policy", "walker", "--workers", "1", "--steps", str(steps)),
        *("--address", address, *sets, *more),
    ]


@contextmanager
def node(tmp_path: Path, *options: str) -> Iterator[tuple[str, dict[str, str], int]]:
    """A cluster of one node: its address, the variables that a driver needs, and its process."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    path = os.pathsep.join([str(_ENVIRONMENTS), kept.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    variables = {**kept, **token, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": path}
    # Its sockets' paths have to be short.
    temporary = tempfile.mkdtemp(prefix="rl-")
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--head", "--port=0",
        "--include-dashboard=false", f"--temp-dir={temporary}", "--node-ip-address=127.0.0.1",
        "--object-store-memory=100000000", "--block", *options,
    ]  # fmt: skip
    log = tmp_path / "node"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=variables, stdout=file, stderr=file, start_new_session=True
        )
    try:
        until = time.monotonic() + _PATIENCE_S
        while "Ray runtime started" not in log.read_text():
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.1)
        found = re.search(r"ray start --address='[\d.]+:(\d+)'", log.read_text())
        assert found is not None, log.read_text()
        yield f"127.0.0.1:{found[1]}", variables, process.pid
    finally:
        _kill(process)
        shutil.rmtree(temporary, ignore_errors=True)


# Holds a resource of the cluster until it is killed.
_HOLDER = """
import sys, time, ray
ray.init(address=sys.argv[1], log_to_driver=False)
@ray.remote(num_gpus=1)
class Holder:
    def here(self): return True
holder = Holder.remote()
ray.get(holder.here.remote())
print("held", flush=True)
time.sleep(3600)
"""


@dataclass
class Begun:
    """A cluster of 4 CPUs whose one GPU is held, and commands on it that have been started.

    refused: asks for two GPUs. short, long: wait for the one, 30 s and an hour. learning: learns in
    an actor of the node.
    """

    address: str
    node: int
    refused: Command
    short: Command
    long: Command
    learning: Command


def _begin(folder: Path, stack: ExitStack) -> Begun:
    address, variables, node_id = stack.enter_context(node(folder, "--num-cpus=4", "--num-gpus=1"))
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, address],
        env=variables, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    stack.callback(_kill, holder)
    assert holder.stdout is not None
    with holder.stdout as said:
        assert said.readline() == b"held\n"

    def begin(name: str, *more: str) -> Command:
        command = start(folder / name, variables, new_run(address, *more))
        stack.callback(_kill, command.process)
        return command

    waiting = ("--learner-gpus", "1")
    return Begun(
        address,
        node_id,
        begin("refused", "--learner-gpus", "2"),
        begin("short", *waiting, "--set", "start_timeout_s=30"),
        begin("long", *waiting, "--set", "start_timeout_s=3600"),
        begin("learning", "--set", "learner=ray"),
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Future[Begun]]:
    """Begun while the first tests run: starting and waiting take nearly all of the time."""
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        future = pool.submit(_begin, tmp_path_factory.mktemp("waits"), stack)
        yield future
        future.exception()


@pytest.mark.slow
def test_more_gpus_than_this_machine_has_are_refused_at_once(lake):
    asked = torch.cuda.device_count() + 1
    config = OnlineConfig("dqn", env="CartPole-v1", policy="learned", learner_gpus=asked)
    message = f"learner_gpus: found {asked - 1} GPUs on this machine, expected {asked} or more"
    with pytest.raises(ConfigInvalidError, match=message):
        train_online(lake, "live", config)


@pytest.fixture(scope="module")
def ray(begun: Future[Begun]) -> Iterator[object]:
    """One Ray of two CPUs for the tests of the pool, while the others begin."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(_ENVIRONMENTS))
        with open_ray("tests", 2) as ray:
            yield ray


@pytest.mark.slow
def test_too_few_cpus_for_the_learner_beside_its_workers_are_refused_at_once(lake, ray):
    config = OnlineConfig("dqn", env="CartPole-v1", policy="learned", learner="ray", workers=2)
    with pytest.raises(ConfigInvalidError, match="Ray: found 2 CPUs, expected 3: one for the lea"):
        train_online(lake, "live", config)


def walk_orders(lake, num, **env_args):
    sys.path.insert(0, str(_ENVIRONMENTS))
    try:
        from replaylake_faults import Walk
    finally:
        sys.path.pop(0)
    spaces = (from_gymnasium(Walk.observation_space), from_gymnasium(Walk.action_space))
    if not lake.dataset("walk").exists():
        lake.dataset("walk").create(*spaces)
    config = RolloutConfig("replaylake_faults:Walk", envs_per_worker=1, env_args=env_args)
    return [
        WorkerSpec(
            lake.url, "walk", "p", worker, EpisodeNumbers(worker, num), BehaviorPolicy(), config
        )
        for worker in range(num)
    ]


def receive(pool):
    until = time.monotonic() + _PATIENCE_S
    while (answer := pool.receive(0.2)) is None:
        assert time.monotonic() < until
    return answer


@pytest.mark.slow
def test_a_worker_that_hangs_is_replaced_and_in_the_end_ends_the_run(lake, toys, ray):
    orders = walk_orders(lake, 1, step_s=600.0)
    with closing(RayPool(orders, interval_s=0.1, answer_timeout_s=2.0)) as pool:
        for _ in range(3):
            pool.request_steps(0, 10)
            lost = receive(pool)
            assert isinstance(lost, WorkerLost)
            assert "no answer in 2 s (answer_timeout_s)" in lost.reason
        pool.request_steps(0, 10)
        with pytest.raises(RolloutError, match=r"worker 0: .* no answer in 2 s"):
            receive(pool)


@pytest.mark.slow
def test_a_worker_that_finds_no_cpu_ends_the_run_and_a_replacement_shares_one(lake, toys, ray):
    orders = walk_orders(lake, 2)

    @ray.remote(num_cpus=1)
    class Holder:
        def here(self):
            return True

    holder = Holder.remote()
    ray.get(holder.here.remote(), timeout=_PATIENCE_S)
    with closing(RayPool(orders, interval_s=0.1)) as pool:
        for worker in (0, 1):
            pool.request_steps(worker, 10)
        first = receive(pool)
        # Only now, as this machine may take long to start the first.
        pool._start_timeout_s = 1.0
        with pytest.raises(RolloutError, match=r"found no process in 1 s; it needs 1 CPUs, of"):
            receive(pool)
    # As after a node was lost: another takes the CPU while its worker starts again.
    with closing(RayPool(orders[:1], interval_s=0.1)) as pool:
        pool.request_steps(0, 10)
        assert receive(pool).num_steps
        ray.kill(pool._workers[0].actor)
        second = Holder.remote()
        ray.get(second.here.remote(), timeout=_PATIENCE_S)
        pool.request_steps(0, 10)
        assert isinstance(receive(pool), WorkerLost)
        pool._start_timeout_s = 1.0
        pool.request_steps(0, 10)
        until = time.monotonic() + _PATIENCE_S
        while pool._workers[0].num_cpus:
            assert pool.receive(0.2) is None
            assert time.monotonic() < until
        pool._start_timeout_s = _PATIENCE_S
        assert receive(pool).num_steps
        ray.kill(second)
    ray.kill(holder)
    assert first.num_steps


_CONNECT = """
import signal, sys
from replaylake.datastore.errors import ReplayLakeError
from replaylake.offline.running.local_ray import open_ray
from replaylake.offline.running.training.interruption import interrupt_on_sigterm
print("connecting", flush=True)
try:
    with (
        interrupt_on_sigterm(),
        open_ray("a test", 1, address=sys.argv[1], start_timeout_s=float(sys.argv[2])),
    ):
        print("connected")
except ReplayLakeError as error:
    print(error)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_interrupted", [False, True])
def test_what_listens_and_is_silent_is_no_cluster(is_interrupted):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        timeout_s = _PATIENCE_S if is_interrupted else 3
        process = subprocess.Popen(
            [sys.executable, "-c", _CONNECT, address, str(timeout_s)],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, "RAY_AUTH_MODE": "disabled"},
        )  # fmt: skip
        assert process.stdout.readline() == "connecting\n"
        silent.settimeout(_PROMPT_S)
        connection, _ = silent.accept()
        if is_interrupted:
            process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=_PROMPT_S)
        connection.close()
    assert process.returncode == 0
    if is_interrupted:
        assert said == "interrupted\n"
    else:
        assert f"Ray at {address}: found no answer in 3 s" in said


@pytest.mark.slow
def test_a_gpu_that_no_node_has_is_refused_at_once(begun):
    refused = begun.result().refused
    assert refused.end() == 1
    where = f"Ray at {begun.result().address}"
    assert f"{where}: found 1 GPUs on 1 nodes, 1 on one at most; expected 2" in refused.said
    assert "ray start --num-gpus" in refused.said
    # Not after a wait: nothing was said of one.
    assert "waits" not in refused.said
    assert open_lake(refused.said_at.parent / "lake").registry.runs() == []


@pytest.mark.slow
def test_a_gpu_that_others_hold_is_waited_for_so_long_and_not_through_a_signal(begun):
    short, long = begun.result().short, begun.result().long
    long.wait_for("note: the learner waits for a process")
    long.process.send_signal(signal.SIGTERM)
    assert long.end(_PROMPT_S) == 130
    assert short.end() == 1
    assert "learner: found no process in 30 s, expected 1 CPU" in short.said
    assert "1 GPU of which Ray has 0 free" in short.said
    assert "raise start_timeout_s" in short.said
    assert long.said.rstrip().endswith("interrupted")


@pytest.mark.slow
def test_a_learner_that_is_stopped_does_not_hold_up_an_interrupt(begun):
    """SIGSTOP is as a machine that is out of reach: it neither answers nor is found dead."""
    run = begun.result().learning
    run_id = run.wait_for(r"run (\w{26})").group(1)
    run.wait_for(r"update [1-9]")
    (learner,) = find_processes("ray::TrainerActor", below=begun.result().node)
    os.kill(learner, signal.SIGSTOP)
    try:
        run.process.send_signal(signal.SIGTERM)
        # What is not answered for 2 s is not waited for.
        assert run.end(2 + _PROMPT_S) == 130
    finally:
        with suppress(ProcessLookupError):
            os.kill(learner, signal.SIGKILL)
    assert f"`replaylake train online --resume {run_id}` goes on" in run.said


def find_processes(command: str, below: int) -> list[int]:
    """Return the processes of a command among the descendants of another."""
    parents, found = {}, []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            stat = (path / "stat").read_text().rpartition(")")[2].split()
            parents[int(path.name)] = int(stat[1])
            if (path / "cmdline").read_bytes().startswith(command.encode()):
                found.append(int(path.name))

    def is_below(pid: int) -> bool:
        while pid in parents:
            if (pid := parents[pid]) == below:
                return True
        return False

    return [pid for pid in found if is_below(pid)]


def test_a_store_that_hangs_is_not_waited_for(lake, monkeypatch):
    dataset = lake.dataset("d")
    gone_on = threading.Event()

    def commit(*parts, **options):
        gone_on.wait(_PATIENCE_S)
        raise StorageError("it hung")

    monkeypatch.setattr(dataset, "account", commit)
    recorder = EpisodeCommitter(dataset, "p", interval_s=0.01, answer_timeout_s=0.3)
    try:
        recorder.abandon(["e"])
        with pytest.raises(StorageError, match=r"found no answer of the store .* in 0.3 s"):
            recorder.flush()
        with pytest.raises(StorageError, match="raise answer_timeout_s"):
            assert recorder.is_behind
        recorder.close()
    finally:
        gone_on.set()
