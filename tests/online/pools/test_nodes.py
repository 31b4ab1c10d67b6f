"""Which nodes see the lake: one that does, one whose lake is another, and a real second node.

The second node is a raylet in a mount namespace of its own, where an empty file system lies over
the lake's folder: the path is there, on what might be another machine's disk. It has its own
working folder. Its Ray is a real cluster of two nodes, to which a driver connects by address.
"""

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.lake.lake import open_lake
from replaylake.online.pools.nodes import _check_lake_visible, _nonce_path

_NONCE = b"0123456789abcdef"
_FOLDER = "_lake/nodes/run"


@pytest.fixture(params=["folder", "s3"])
def shared(request, tmp_path):
    """A lake with a dataset at version 0 and a nonce."""
    place = tmp_path / "lake"
    if request.param == "s3":
        place = f"s3://{request.getfixturevalue('bucket')}/lake"
    lake = open_lake(place, create=True)
    lake.dataset("toys").create(Box((2,)), Discrete(3))
    lake.storage.put(_nonce_path(_FOLDER), _NONCE)
    return lake


def look(lake, version=0):
    return _check_lake_visible(lake, "toys", _FOLDER, _NONCE, version, "here").missing


def test_a_node_that_sees_the_lake_answers_in_it(shared):
    assert look(shared.url) is None
    assert shared.storage.get(f"{_FOLDER}/here") == _NONCE


def test_a_node_that_is_behind_does_not_see_it(shared):
    assert look(shared.url, version=3) == "found toys@0, behind toys@3"


def test_a_lake_of_the_same_name_elsewhere_is_not_written_to(tmp_path, shared):
    for elsewhere in (open_lake(tmp_path / "other", create=True).url, str(tmp_path / "nothing")):
        before = sorted(tmp_path.rglob("*"))
        assert look(elsewhere) == "found nothing of this run there"
        assert sorted(tmp_path.rglob("*")) == before


def test_a_lake_that_cannot_be_opened_is_not_seen():
    assert look("s3://").startswith("found ConfigInvalidError: ")


_DRIVER = '''
import json, os, signal, sys, time
from contextlib import suppress
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.online.collecting.behavior_policy import BehaviorPolicy
from replaylake.online.pools.nodes import current_node, pin_to_node
from replaylake.online.pools.pool import WorkerLost
from replaylake.online.pools.ray_pool import RayPool
from replaylake.online.collecting.rollout_batch import WorkerSpec
from replaylake.online.collecting.worker import RolloutConfig

place, address, package, second = sys.argv[1:]
lake = open_lake(place)
config = RolloutConfig("my_env:make", envs_per_worker=2, env_args={"goal": 1})
orders = [
    WorkerSpec(lake.url, "toys", "p", worker, range(worker, 120, 2), BehaviorPolicy(), config)
    for worker in (0, 1)
]
pool = RayPool(orders, interval_s=5.0, address=address)
pool.broadcast(BehaviorPolicy("die", 2, __import__("pathlib").Path(package)))
def of_machine(pid):
    """All processes in the mount namespace of one: those that Ray started there, too."""
    for other in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            space = os.readlink(f"/proc/{other}/ns/mnt")
            is_ours = space == os.readlink("/proc/self/ns/mnt")
            if space == os.readlink(f"/proc/{pid}/ns/mnt") and not is_ours:
                yield int(other)

def node_of(seat):
    return pool._ray.get(seat.actor.__ray_call__.remote(lambda self: current_node()))

(blind,) = pool._cluster.nodes.without_lake
(far,) = [worker for worker, seat in enumerate(pool._workers) if node_of(seat) == blind]
lost, ends, written, working, there, num_far = [], [], [], {0, 1}, None, 0
for worker in working:
    pool.request_steps(worker, 10)
until = time.monotonic() + 240
while working:
    assert time.monotonic() < until, (lost, len(ends), working)
    if (answer := pool.receive(1.0)) is None:
        continue
    if isinstance(answer, WorkerLost):
        lost.append([answer.worker, answer.reason])
    else:
        assert not answer.pieces
        ends += [end.number for end in answer.ends]
        written += [answer.written] if answer.written is not None else []
        if answer.exhausted:
            working.discard(answer.worker)
            continue
    num_far += answer.worker == far
    if num_far == 3 and answer.worker == far:
        pool._ray.kill(pool._writer)
    if num_far == 6 and there is None:
        task = pool._ray.remote(num_cpus=0)(lambda folder: os.listdir(folder))
        there = pool._ray.get(task.options(scheduling_strategy=pin_to_node(blind)).remote(place))
        for pid in list(of_machine(int(second))):
            os.kill(pid, signal.SIGKILL)
    pool.request_steps(answer.worker, 10)
lake.dataset("toys").commit(written, producer="p", sequence=0)
left = pool._cluster.nodes.num_cpus()
remarks = pool.remarks
names = ("far", "remarks", "lost", "ends", "there", "left")
print(json.dumps({name: globals()[name] for name in names}))
pool.close()
'''
_ENVIRONMENT = """
from my_rules import Countdown

def make(goal):
    assert goal == 1
    return Countdown()
"""
_START = [
    "--num-cpus=1",
    "--object-store-memory=100000000",
    "--min-worker-port=0",
    "--max-worker-port=0",
    "--dashboard-agent-listen-port=0",
    "--block",
]


@pytest.fixture
def cluster(tmp_path):
    """A head and a second node that has another disk where the lake is.

    Gives the address, the second node's process group and the variables that a driver needs.
    """
    lake = tmp_path / "lake"
    hide = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none "{lake}" && exec "$@"', "sh"]
    lake.mkdir()
    if subprocess.run([*hide, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system of its own")
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment = {**kept, **token, "RAY_USAGE_STATS_ENABLED": "0"}
    ray = str(Path(sys.executable).with_name("ray"))
    # Its sockets' paths have to be short.
    temporary = tempfile.mkdtemp(prefix="rl-")
    head = ["--head", "--port=0", "--include-dashboard=false", f"--temp-dir={temporary}"]
    nodes, address = [], ""
    try:
        for name, wrapper in (("head", []), ("second", hide)):
            options = [f"--address={address}"] if address else head
            folder = tmp_path / name
            folder.mkdir()
            command = [*wrapper, ray, "start", *options, *_START]
            with (folder / "log").open("w") as log:
                nodes.append(
                    subprocess.Popen(
                        command, cwd=folder, env=environment, stdout=log, stderr=log,
                        start_new_session=True,
                    )
                )  # fmt: skip
            _wait_for(folder / "log", "Ray runtime started")
            if not address:
                said = (folder / "log").read_text()
                port = re.search(r"ray start --address='[\d.]+:(\d+)'", said)
                assert port is not None, said
                address = f"127.0.0.1:{port[1]}"
        yield address, nodes[1].pid, environment
    finally:
        for node in nodes:
            with suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
            node.wait(30)
        shutil.rmtree(temporary)


def _wait_for(log, line):
    until = time.monotonic() + 240
    while line not in log.read_text():
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.1)


@pytest.mark.slow
def test_a_node_that_does_not_see_the_lake_sends_what_it_collects_and_may_be_lost(
    tmp_path, cluster, loaded_die
):
    address, second, environment = cluster
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("toys").create(Box((2,)), Discrete(3))
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "my_env.py").write_text(_ENVIRONMENT)
    toys = Path(__file__).parents[1] / "environments" / "replaylake_toys.py"
    shutil.copy(toys, folder / "my_rules.py")
    done = subprocess.run(
        [sys.executable, "-c", _DRIVER, lake.url, address, str(loaded_die), str(second)],
        cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (remark,) = found["remarks"]
    assert "does not see the lake" in remark
    assert "found nothing of this run there: its workers send what they collect" in remark
    assert found["there"] == []
    assert [worker for worker, _ in found["lost"]] == [found["far"]]
    assert found["left"] == 1
    assert sorted(found["ends"]) == list(range(120))
    query = """select count(*) as n, count(distinct seed) as seeds, min(policy_version) as v
               from toys.steps where step = 0"""
    assert lake.sql(query).to_pylist() == [{"n": 120, "seeds": 120, "v": 2}]
    assert list(lake.storage.files("_lake/nodes")) == []
