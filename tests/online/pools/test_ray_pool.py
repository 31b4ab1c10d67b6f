"""The pool of Ray actors: with a real Ray, whose processes are killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from replaylake.datastore.errors import ConfigInvalidError, ExtraMissingError, RolloutError
from replaylake.offline.environments.spaces import from_gymnasium
from replaylake.offline.running.local_ray import open_ray
from replaylake.online.collecting.behavior_policy import BehaviorPolicy
from replaylake.online.collecting.rollout_batch import EpisodeNumbers, RolloutBatch, WorkerSpec
from replaylake.online.collecting.worker import EpisodeEnd, RolloutConfig
from replaylake.online.pools.pool import WorkerLost
from replaylake.online.pools.ray_pool import RayPool, WorkerState, death_reason

# Ray 2.60 reads settings of its own that it has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")

_DEATH = """The actor died unexpectedly before finishing this task.
\tclass_name: A
\tactor_id: c28f
\tpid: 17268
\tnamespace: 4fb8
\tip: 127.0.0.1
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit \
detail: Worker unexpectedly exits with a connection error code 2. End of file. Some common causes \
include: (1) the process was killed by the OOM killer."""


def order(lake="lake", worker=0, episodes=range(4), env="any", **config):
    return WorkerSpec(
        str(lake), "toys", "p", worker, episodes, BehaviorPolicy(), RolloutConfig(env, **config)
    )


def ends(*numbers):
    return tuple(EpisodeEnd(number, number, 0.0, 1) for number in numbers)


def test_a_replacement_does_again_what_has_not_ended():
    seat = WorkerState(order(episodes=range(1, 12, 2)))
    seat.apply_batch(RolloutBatch(0, ends=ends(1, 5)))
    seat.apply_batch(RolloutBatch(0, ends=ends(3)))
    assert list(seat.remaining_spec().episodes) == [7, 9, 11]


def test_a_replacement_goes_on_with_numbers_that_nobody_has_begun():
    seat = WorkerState(order(episodes=EpisodeNumbers(1, 2), envs_per_worker=3))
    seat.apply_batch(RolloutBatch(0, ends=ends(1, 5, 3, 9), open_episodes=["p/a"]))
    assert seat.open_episodes == ("p/a",)
    seat.num_owed = 10
    # 4 ended, at most 10 in the steps that were not handed over, 3 + 3 open then and now: 0 .. 19.
    assert seat.remaining_spec().episodes == EpisodeNumbers(41, 2)


def test_a_death_is_said_in_a_line():
    found = death_reason(RuntimeError(_DEATH))
    assert found == (
        "pid 17268 ip 127.0.0.1: its worker process has died. Worker exit type: SYSTEM_ERROR "
        "Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file."
    )
    gone = "The actor 554f is unavailable: The actor is temporarily unavailable: RpcError: RPC e.."
    assert death_reason(RuntimeError(gone)) == "The actor is temporarily unavailable"
    assert death_reason(RuntimeError("one\ntwo")) == "one"
    assert death_reason(RuntimeError()) == "RuntimeError"


@pytest.mark.parametrize("cpus", [0, -1, 1.5, float("nan")])
def test_cpus_that_ray_does_not_give(cpus):
    with pytest.raises(ConfigInvalidError, match="worker_cpus: found"):
        RayPool([order()], interval_s=1.0, cpus_per_worker=cpus)


def test_without_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ExtraMissingError, match=r"replaylake\[online\]"):
        RayPool([order()], interval_s=1.0)


@pytest.fixture(scope="module")
def ray():
    """One Ray for the tests of the file: it takes seconds to start."""
    environments = str(Path(__file__).parents[1] / "environments")
    os.environ["PYTHONPATH"], before = environments, os.environ.get("PYTHONPATH")
    with open_ray("tests", 2) as ray:
        yield ray
    del os.environ["PYTHONPATH"]
    if before is not None:
        os.environ["PYTHONPATH"] = before


@pytest.fixture
def toys_lake(lake, toys):
    import replaylake_toys

    env = replaylake_toys.Countdown
    spaces = [from_gymnasium(space) for space in (env.observation_space, env.action_space)]
    lake.dataset("toys").create(*spaces)
    return lake


def toy_orders(lake, episodes, env="Countdown-v0", **config):
    return [
        order(lake.url, worker, numbers, f"replaylake_toys:{env}", envs_per_worker=2, **config)
        for worker, numbers in enumerate(episodes)
    ]


def pid_of(pool, worker):
    actor = pool._workers[worker].actor
    return pool._ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))


def collect(pool, num_steps, on_answer=lambda answer: None):
    """Ask until every order is done; return all answers."""
    answers, working = [], set(range(pool.size))
    for worker in working:
        pool.request_steps(worker, num_steps)
    until = time.monotonic() + 240
    while working:
        assert time.monotonic() < until
        if (answer := pool.receive(1.0)) is None:
            continue
        answers.append(answer)
        if isinstance(answer, RolloutBatch) and answer.exhausted:
            working.discard(answer.worker)
        else:
            pool.request_steps(answer.worker, num_steps)
        on_answer(answer)
    return answers


def commit(lake, answers):
    written = [a.written for a in answers if isinstance(a, RolloutBatch) and a.written is not None]
    lake.dataset("toys").commit(written, producer="p", sequence=0)


@pytest.mark.slow
def test_a_worker_that_is_killed_is_replaced_and_nothing_is_lost_or_doubled(toys_lake, ray, capfd):
    def kill_one(answer):
        if len(pids) == 1 and isinstance(answer, RolloutBatch) and answer.worker == 1:
            os.kill(pids[0], signal.SIGKILL)
            pids.append(pid_of(pool, 0))

    orders = toy_orders(toys_lake, [range(0, 200, 2), range(1, 200, 2)])
    with closing(RayPool(orders, interval_s=5.0)) as pool:
        pids = [pid_of(pool, 1)]
        answers = collect(pool, 20, kill_one)
        assert pid_of(pool, 1) != pids[0]
    (lost,) = [answer for answer in answers if isinstance(answer, WorkerLost)]
    assert lost.worker == 1
    assert f"pid {pids[0]}" in lost.reason
    assert lost.open_episodes == ()
    numbers = [end.number for a in answers if isinstance(a, RolloutBatch) for end in a.ends]
    assert sorted(numbers) == list(range(200))
    commit(toys_lake, answers)
    query = "select count(*) as n, count(distinct seed) as seeds from toys.steps where step = 0"
    assert toys_lake.sql(query).to_pylist() == [{"n": 200, "seeds": 200}]
    # stdout is data; Ray would tell of the death there.
    assert capfd.readouterr().out == ""


@pytest.mark.slow
def test_an_endless_worker_that_is_killed_leaves_open_episodes_and_begins_others(toys_lake, ray):
    (first,) = toy_orders(toys_lake, [EpisodeNumbers(5, 10)])
    with closing(RayPool([first], interval_s=60.0, with_open=True)) as pool:
        numbers, open_episodes = [], ()
        for _ in range(6):
            pool.request_steps(0, 3)
            shipment = pool.receive(240.0)
            numbers += [end.number for end in shipment.ends]
            open_episodes = tuple(shipment.open_episodes)
            if open_episodes:
                break
        assert open_episodes
        pid = pid_of(pool, 0)
        pool.request_steps(0, 10**9)
        time.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
        lost = pool.receive(240.0)
        assert isinstance(lost, WorkerLost)
        assert lost.open_episodes == open_episodes
        pool.request_steps(0, 40)
        after = [end.number for end in pool.receive(240.0).ends]
    assert min(after) > max(numbers)
    assert {number % 10 for number in numbers + after} == {5}


@pytest.mark.slow
def test_a_worker_that_dies_again_and_again_ends_the_run(toys_lake, ray):
    (deadly,) = toy_orders(toys_lake, [range(7, 8)], "Deadly-v0")
    with (
        closing(RayPool([deadly], interval_s=5.0)) as pool,
        pytest.raises(RolloutError) as caught,
    ):
        collect(pool, 100)
    assert re.search(r"worker 0: its process died 4 times in a row.*pid \d+", str(caught.value))


@pytest.mark.slow
def test_a_workers_own_error_arrives_whole(toys_lake, ray):
    (broken,) = toy_orders(toys_lake, [range(7, 8)], "Broken-v0")
    with closing(RayPool([broken], interval_s=5.0)) as pool:
        pool.request_steps(0, 10)
        with pytest.raises(RolloutError, match=r"^rollout worker 0: step of .* ValueError: the g"):
            pool.receive(240.0)


@pytest.mark.slow
def test_a_policy_is_stored_once_and_acts_in_what_is_asked_later(toys_lake, ray, loaded_die):
    orders = toy_orders(toys_lake, [EpisodeNumbers(0, 2), EpisodeNumbers(1, 2)])
    with closing(RayPool(orders, interval_s=60.0, cpus_per_worker=0.5)) as pool:
        answers = []
        for version in (0, 3, 4):
            if version:
                pool.broadcast(BehaviorPolicy("die", version, loaded_die))
            for _ in range(2):
                for worker in (0, 1):
                    pool.request_steps(worker, 12)
                answers += [pool.receive(240.0) for _ in (0, 1)]
        assert pool.receive(0.0) is None
        assert len({id(seat.behavior_policy) for seat in pool._workers}) == 1
    commit(toys_lake, answers)
    query = "select distinct policy, policy_version as v from toys.steps order by v"
    found = toys_lake.sql(query).to_pylist()
    assert [(row["policy"], row["v"]) for row in found] == [("random", 0), ("die", 3), ("die", 4)]


@pytest.mark.slow
def test_more_cpus_than_there_are(toys_lake, ray):
    orders = toy_orders(toys_lake, [range(1)] * 3)
    with pytest.raises(ConfigInvalidError, match="found 2 CPUs, expected 3 for 3 workers"):
        RayPool(orders, interval_s=1.0)


_OWN_RAY = """
import json, os, sys
from pathlib import Path
from replaylake.offline.running.local_ray import import_ray, open_ray

ray, starts = import_ray("a test"), []
start = ray.init

def init(**options):
    # The first time as on a machine that is too busy: Ray is not up in 30 s.
    starts.append(options)
    if len(starts) == 1:
        raise Exception("The current node timed out during startup. This could happen because")
    return start(**options)

ray.init = init

def family():
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            pass
    found = {os.getpid()}
    while new := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= new
    return found

def listening():
    inodes = set()
    for pid in family():
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                inodes.add(os.readlink(link))
            except OSError:
                pass
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                yield fields[1].split(":")[0]

with open_ray("a test", 1) as ray:
    print(json.dumps({
        "starts": len(starts),
        "addresses": sorted(listening()),
        "mode": os.environ["RAY_AUTH_MODE"],
        "token": len(os.environ["RAY_AUTH_TOKEN"]),
        "in_file": Path.home().joinpath(".ray", "auth_token").exists(),
    }))
"""
# 127.0.0.1 as /proc/net/tcp writes it, and mapped into IPv6.
_LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}


@pytest.mark.slow
def test_a_ray_of_our_own_is_started_again_listens_on_loopback_alone_and_asks_for_a_token(tmp_path):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    environment = {**kept, "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _OWN_RAY], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["starts"] >= 2
    assert len(found["addresses"]) >= 3
    assert set(found["addresses"]) <= _LOOPBACK
    assert (found["mode"], found["token"], found["in_file"]) == ("token", 64, False)


@pytest.mark.parametrize(
    ("address", "kind", "found"),
    [
        (
            "ray://127.0.0.1:1",
            ConfigInvalidError,
            r"address: found ray://.*expected HOST:PORT or auto",
        ),
        ("127.0.0.1:1", RolloutError, r"Ray at 127.0.0.1:1: found .*refused"),
        ("127.0.0.1:port", RolloutError, r"found invalid literal .*expected a cluster"),
    ],
)
def test_an_address_at_which_there_is_no_cluster(address, kind, found):
    program = f"""
from replaylake.datastore.errors import {kind.__name__}
from replaylake.offline.running.local_ray import open_ray
from replaylake.datastore.errors import RolloutError
try:
    with open_ray("a test", 1, address={address!r}, failure=RolloutError):
        pass
except {kind.__name__} as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert re.search(found, done.stdout), done.stderr
