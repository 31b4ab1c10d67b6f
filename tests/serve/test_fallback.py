"""A policy on the client's disk decides while no server answers; each decision is logged once."""

import asyncio
import errno
import fcntl
import json
import math
import os
import socket
import subprocess
import sys
import textwrap
import threading
from contextlib import closing

import numpy as np
import pytest

import replaylake as rl
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import (
    ConfigInvalidError,
    EpisodeInvalidError,
    NotFoundError,
    SpaceUnsupportedError,
    StorageError,
)
from replaylake.datastore.feedback.join import join_feedback
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.serve.app import create_app
from replaylake.serve.client import (
    AsyncPolicyClient,
    ClientClosedError,
    PolicyClient,
    RequestFailedError,
    ServerUnreachableError,
)
from replaylake.serve.fallback import FallbackPolicy
from replaylake.serve.spool import Spool

OBSERVATION = [0.0, 0.5, -0.25, 1.0]
_LENGTH = b"Content-Length:"
NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def make_fallback(package, tmp_path):
    def make(folder="spool", **options):
        options = {"policy": "local", "version": 4, "after_s": 0.05, "probe_s": 0.05, **options}
        return FallbackPolicy(package, tmp_path / folder, **options)

    return make


@pytest.fixture
def patient_client():
    """Makes clients that do not take a slow server for one that is away: it refuses connections."""

    def make(url, fallback):
        client = PolicyClient(url, fallback=fallback)
        client._urgent._timeout_s = 60.0
        return client

    return make


def is_back(client):
    """Whether all that was spooled is sent, and the server acts again."""
    return client.num_spooled == 0 and not client._sender.is_down


def read_steps(kit, lake, num):
    """Join until so many steps are there: rows get into the tables within a second."""
    found = []

    def has_all():
        join_feedback(lake, "d", window_s=3600)
        text = "select * from d.steps order by source_episode_id, step"
        found[:] = lake.sql(text).to_pylist()
        return len(found) >= num

    kit.wait_until(has_all)
    assert len(found) == num, found
    return found


def test_without_a_server_the_package_decides(make_fallback):
    with PolicyClient(NOBODY, fallback=make_fallback(explore="epsilon=0.5")) as client:
        actions = [client.act(OBSERVATION, episode_id="e", step=step) for step in range(40)]
        assert {(one.policy, one.version) for one in actions} == {("local", 4)}
        assert all(one.decision_id == f"local:{one.request_id}" for one in actions)
        # epsilon-greedy over two actions: the mode has 1 - 0.5 + 0.25, the other 0.25.
        found = {(one.action, round(math.exp(one.log_prob), 6)) for one in actions}
        mode = client.act(OBSERVATION, deterministic=True)
        assert found == {(mode.action, 0.75), (1 - mode.action, 0.25)}
        assert mode.log_prob == 0
        for one in actions[:3]:
            client.feedback(1.0, decision_id=one.decision_id)
        client.feedback_batch([{"reward": 2.0, "decision_id": actions[3].decision_id}])
        assert client.num_spooled == 41 + 4


def test_a_fallback_draws_and_masks_as_the_server_does(app_client, kit, policy, make_fallback):
    fallback = make_fallback()
    ways = [
        {},
        {"deterministic": True},
        {"deterministic": False},
        {"temperature": 2.0},
        {"temperature": 0.0},
        {"epsilon": 0.3},
        {"epsilon": 0.3, "temperature": 0.7},
        {"temperature": 1.0, "action_mask": [False, True]},
    ]
    with app_client(create_app(lambda: kit.make_serving(policy))) as server:
        for way in ways:
            for seed in range(8):
                body = {"observation": OBSERVATION, "seed": seed, **way}
                theirs = server.post("/act", json=body).json()
                ours = fallback.act(OBSERVATION, request_id="r", seed=seed, **way)
                assert ours["action"] == theirs["action"], way
                assert ours["log_prob"] == pytest.approx(theirs["log_prob"], abs=1e-6), way
    fallback.spool.close()


@pytest.mark.slow
def test_decisions_of_an_outage_are_logged_once_when_the_server_is_back(
    kit, package, tmp_path, held_port, make_fallback, patient_client
):
    lake = open_lake(tmp_path / "lake", create=True)
    options = {"package": package, "policy": "p", "version": 3, "lake": lake.path, "log_to": "d"}
    options |= {"port": held_port, "server": "uvicorn"}
    server = kit.start_server(**options)
    fallback = make_fallback(explore="temperature=1")
    taken = []

    def act(client, number):
        names = {"episode_id": f"e{number // 2}", "step": number % 2}
        one = client.act(OBSERVATION, **names)
        is_end = number % 2 == 1
        client.feedback(float(number), decision_id=one.decision_id, terminated=is_end)
        taken.append(one)

    with patient_client(server.url, fallback) as client:
        for number in range(3):
            act(client, number)
        server.kill()
        for number in range(3, 9):
            act(client, number)
        pending = client.act(OBSERVATION, episode_id="late", step=0)
        server = kit.start_server(**options)
        try:
            kit.wait_until(lambda: is_back(client))
            for number in range(9, 12):
                act(client, number)
            # A report that comes after its decision was sent.
            client.feedback(99.0, decision_id=pending.decision_id, terminated=True)
            steps = read_steps(kit, lake, 13)
        finally:
            server.stop()
    assert [one.policy for one in taken] == ["p"] * 3 + ["local"] * 6 + ["p"] * 3
    by_request = {step["request_id"]: step for step in steps}
    for number, one in enumerate(taken):
        step = by_request[one.request_id]
        assert (step["policy"], step["policy_version"]) == (one.policy, one.version)
        assert step["behavior_log_prob"] == pytest.approx(one.log_prob)
        assert (step["action"], step["reward"]) == (one.action, number)
        assert step["step"] == number % 2
    assert len({step["episode_id"] for step in steps}) == 7
    assert by_request[pending.request_id]["reward"] == 99.0
    assert not list((tmp_path / "spool").iterdir())


@pytest.mark.slow
def test_what_a_killed_process_spooled_the_next_one_sends(kit, package, tmp_path, make_fallback):
    code = f"""
        import os
        from replaylake import FallbackPolicy, PolicyClient
        fallback = FallbackPolicy({str(package)!r}, {str(tmp_path / "spool")!r},
            policy="local", version=4, after_s=0.05)
        client = PolicyClient({NOBODY!r}, fallback=fallback)
        one = client.act({OBSERVATION}, request_id="killed")
        client.feedback(5.0, decision_id=one.decision_id, terminated=True)
        os.kill(os.getpid(), 9)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)]).returncode == -9
    lake = open_lake(tmp_path / "lake", create=True)
    server = kit.start_server(
        package=package, policy="p", version=3, lake=lake.path, log_to="d", server="uvicorn"
    )
    try:
        with PolicyClient(server.url, fallback=make_fallback()) as client:
            kit.wait_until(lambda: client.num_spooled == 0)
        (step,) = read_steps(kit, lake, 1)
    finally:
        server.stop()
    assert (step["request_id"], step["reward"], step["policy"]) == ("killed", 5.0, "local")


class Answers:
    """A server on loopback that gives the same answer to whatever comes, or none."""

    def __init__(self, answer):
        self.answer, self.requests = answer, []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._held = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self):
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self._held.append(connection)
            data = connection.recv(65536)
            head, _, body = data.partition(b"\r\n\r\n")
            size = next((int(line[15:]) for line in head.split(b"\r\n") if line[:15] == _LENGTH), 0)
            while len(body) < size and (part := connection.recv(65536)):
                data, body = data + part, body + part
            self.requests.append(data)
            if self.answer is not None:
                body = json.dumps(self.answer(data)[1]).encode()
                head = f"HTTP/1.1 {self.answer(data)[0]} X\r\nConnection: close\r\n"
                connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                connection.close()

    def close(self):
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for one in self._held:
            one.close()
        self._thread.join()


def test_a_server_that_hangs_or_fails_is_not_waited_for(kit, make_fallback):
    fault = {"error": {"field": "server", "message": "x"}}
    for spool, answer in (("hangs", None), ("fails", lambda data: (500, fault))):
        server = Answers(answer)
        fallback = make_fallback(spool, probe_s=60)
        with PolicyClient(server.url, timeout_s=0.2, fallback=fallback) as client:
            assert client.act(OBSERVATION).policy == "local"
            requests = server.requests
            kit.wait_until(lambda r=requests: any(b"POST /act" in one for one in r))
            count = len(requests)
            assert client.act(OBSERVATION).policy == "local"
            # While it is down, only the thread that probes asks it.
            asked = [one for one in requests[count:] if b"/readyz" not in one]
            assert asked == []
        server.close()


def test_a_request_that_is_wrong_is_refused_as_without_a_fallback(make_fallback, patient_client):
    error = {"error": {"field": "observation", "message": "wrong"}}
    server = Answers(lambda data: (422, error))
    with patient_client(server.url, make_fallback()) as client:
        with pytest.raises(RequestFailedError, match="observation: wrong"):
            client.act([1.0])
        assert client.num_spooled == 0
    server.close()


def test_what_the_server_refuses_for_good_is_kept_aside(kit, make_fallback, tmp_path):
    def answer(data):
        if b"/readyz" in data:
            return 200, {}
        if b'"bad"' in data:
            return 422, {"error": {"field": "decisions[0]", "message": "not ours"}}
        return 200, {"decision_ids": ["d1"] * data.count(b"request_id")}

    with PolicyClient(NOBODY, fallback=make_fallback()) as client:
        for request_id in ("good", "bad", "fine"):
            client.act(OBSERVATION, request_id=request_id)
    server = Answers(answer)
    with PolicyClient(server.url, fallback=make_fallback()) as client:
        kit.wait_until(lambda: client.num_spooled == 0)
    server.close()
    (path,) = (tmp_path / "spool").glob("*.refused")
    (line,) = path.read_text().splitlines()
    kept = json.loads(line[9:])
    assert kept["item"]["request_id"] == "bad"
    assert "not ours" in kept["reason"]


def test_a_batch_falls_back_row_by_row(make_fallback):
    with PolicyClient(NOBODY, fallback=make_fallback()) as client:
        rows = np.array([OBSERVATION, OBSERVATION])
        found = client.act_batch(rows, request_id="b", episode_ids=["x", "y"], steps=[0, 1])
        assert found.request_ids == ["b/0", "b/1"]
        assert found.decision_ids == ["local:b/0", "local:b/1"]
        assert (found.policies, found.versions) == (["local"] * 2, [4, 4])
        assert found.actions.shape == found.log_probs.shape == (2,)


def test_faults_of_a_fallback_are_named(make_fallback, kit, package, tmp_path):
    with pytest.raises(ConfigInvalidError, match="Give `policy` and `version`"):
        FallbackPolicy(package, tmp_path / "spool")
    with pytest.raises(NotFoundError):
        FallbackPolicy(tmp_path / "absent", tmp_path / "spool", policy="p", version=1)
    spec = PolicySpec(Box((2,)), Discrete(2), "categorical", state_size=3)
    stateful = kit.save_policy(tmp_path / "stateful", spec, kit.stateful_graph(2, 3))
    with pytest.raises(SpaceUnsupportedError, match="policy with a state"):
        FallbackPolicy(stateful, tmp_path / "spool", policy="p", version=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="expected a directory"):
        FallbackPolicy(package, tmp_path / "file", policy="p", version=1)
    with PolicyClient(NOBODY, fallback=make_fallback()) as client:
        with pytest.raises(EpisodeInvalidError, match="observation"):
            client.act([1.0])
        with pytest.raises(ServerUnreachableError, match="`state`"):
            client.act(OBSERVATION, state="signed")
        assert client.num_spooled == 0


def test_a_spool_keeps_what_is_whole_and_not_sent(tmp_path):
    spool = Spool(tmp_path)
    for number in range(5):
        spool.append({"n": number})
    spool.drop(2)
    (path,) = tmp_path.glob("*.jsonl")
    # Another process leaves it alone as long as this one lives.
    other = Spool(tmp_path)
    assert other.num_pending == 0
    other.close()
    data = path.read_bytes()
    spool.close()
    lines = data.split(b"\n")
    lines[3] = lines[3].replace(b"3", b"7", 1)  # no longer what its checksum says
    path.write_bytes(b"\n".join([*lines[:-1], b'00000000 {"n":9']))
    again = Spool(tmp_path)
    assert again.peek(9) == [{"n": 2}, {"n": 4}]
    again.drop(1)
    again.append({"n": 5})
    assert again.peek(9) == [{"n": 4}, {"n": 5}]
    again.drop(2)
    assert again.num_pending == 0
    again.close()
    assert list(tmp_path.iterdir()) == []


def test_spools_that_open_at_once_leave_each_other_alone(tmp_path, monkeypatch):
    """Another process looks for dead ones' files between the creation and the lock of this one."""
    lock, others = fcntl.flock, []

    def lock_late(fd, how):
        if not others:
            others.append(None)
            others[0] = Spool(tmp_path)
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    spool = Spool(tmp_path)
    spool.append({"n": 1})
    # As another process finds them once both are killed.
    for one in (spool, *others):
        os.close(one._fd)
        one._fd = -1
    with closing(Spool(tmp_path)) as heir:
        assert heir.peek(9) == [{"n": 1}]
        heir.drop(1)


def test_a_file_that_another_process_took_over_is_passed_over(tmp_path, monkeypatch):
    with closing(Spool(tmp_path)) as dead:
        dead.append({"n": 1})
    (path,) = tmp_path.glob("*.jsonl")
    real_open, first = os.open, []

    def open_late(name, *args, **options):
        if str(name) == str(path) and not first:
            first.append(None)
            first[0] = Spool(tmp_path)
        return real_open(name, *args, **options)

    monkeypatch.setattr(os, "open", open_late)
    with closing(Spool(tmp_path)) as second:
        assert (first[0].peek(9), second.peek(9)) == ([{"n": 1}], [])
    first[0].drop(1)
    first[0].close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("can_cut", [True, False])
def test_an_item_that_a_full_disk_cut_spoils_no_other(tmp_path, monkeypatch, can_cut):
    spool = Spool(tmp_path)
    spool.append({"n": 1})
    write, cut = os.write, os.ftruncate
    sizes = iter([12])

    def write_part(fd, data):
        if (size := next(sizes, None)) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[:size])

    def refuse(fd, size):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_part)
        patch.setattr(os, "ftruncate", cut if can_cut else refuse)
        with pytest.raises(StorageError, match="No space left"):
            spool.append({"n": "refused"})
    spool.append({"n": 2})
    assert spool.peek(9) == [{"n": 1}, {"n": 2}]
    spool.close()
    with closing(Spool(tmp_path)) as heir:
        assert heir.peek(9) == [{"n": 1}, {"n": 2}]
        heir.drop(2)


def test_a_fork_does_not_use_the_spool_of_its_parent(tmp_path):
    spool = Spool(tmp_path)
    spool.append({"n": 1})
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            spool.append({"n": "of the child"})
        except StorageError as error:
            os.write(writer, str(error).encode())
        spool.close()
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    assert b"in each process, after the fork" in os.read(reader, 4096)
    os.close(reader)
    assert spool.peek(9) == [{"n": 1}]
    spool.close()
    with closing(Spool(tmp_path)) as heir:
        assert heir.peek(9) == [{"n": 1}]
        heir.drop(1)
    with pytest.raises(StorageError, match="closed"):
        spool.append({"n": 2})


def make_answer(decisions):
    """Return answers of a server that can act; `decisions`: its answer to POST /decisions."""

    def answer(data):
        if b"POST /decisions" in data:
            return decisions(data)
        if b"POST /act" in data:
            action = {"action": 0, "log_prob": 0.0, "decision_id": "d1"}
            return 200, {"policy": "server", "version": 1, **action}
        return 200, {}

    return answer


def take_decisions(data):
    return 200, {"decision_ids": ["d1"] * data.count(b'"request_id"')}


def test_a_decision_of_the_last_moment_of_an_outage_is_sent(kit, make_fallback, patient_client):
    """It is spooled after the sender found that nothing is left, and nothing follows it."""
    fallback = make_fallback()
    fallback.act(OBSERVATION, request_id="first")
    peek, late = fallback.spool.peek, []

    def peek_before_the_last(num):
        found = peek(num)
        if not found and not late:
            late.append(fallback.act(OBSERVATION, request_id="last"))
        return found

    fallback.spool.peek = peek_before_the_last
    server = Answers(make_answer(take_decisions))
    with patient_client(server.url, fallback) as client:
        kit.wait_until(lambda: late and is_back(client))
        # By its request: the window of its id began with the decision, however long the outage.
        client.feedback(1.0, decision_id="local:first")
    server.close()
    (report,) = (data for data in server.requests if b"POST /feedback" in data)
    assert json.loads(report.split(b"\r\n\r\n")[1]) == {"request_id": "first", "reward": 1.0}
    assert sum(b'"last"' in data for data in server.requests) == 1


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_server_that_refuses_decisions_of_clients_acts_again(
    kit, make_fallback, patient_client, caplog, status
):
    error = {"error": {"field": "path", "message": "not here"}}
    server = Answers(make_answer(lambda data: (status, error)))
    fallback = make_fallback(probe_s=0.01)
    local = fallback.act(OBSERVATION, request_id="outage")
    with patient_client(server.url, fallback) as client:
        kit.wait_until(lambda: client.act(OBSERVATION).policy == "server")
        num = client.num_spooled
        served = client.act(OBSERVATION)
        # A report on a decision of the server's does not wait for what it refuses, others do.
        client.feedback(1.0, decision_id=served.decision_id)
        assert any(b"POST /feedback" in data for data in server.requests)
        assert client.num_spooled == num
        client.feedback(1.0, decision_id=local["decision_id"])
        assert client.num_spooled == num + 1
        refused = len([data for data in server.requests if b"POST /decisions" in data])
        kit.wait_until(
            lambda: len([x for x in server.requests if b"POST /decisions" in x]) > refused
        )
    server.close()
    assert sum("are not sent yet" in one.message for one in caplog.records) == 1


def test_the_public_names_are_these_and_cost_no_import_of_a_policy():
    assert (rl.PolicyClient, rl.FallbackPolicy) == (PolicyClient, FallbackPolicy)
    code = "import replaylake as rl, sys; rl.PolicyClient; print('onnxruntime' in sys.modules)"
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment)
    assert ran.strip() == "False"


def test_an_async_client_acts_beside_the_event_loop(make_fallback):
    async def run():
        async with AsyncPolicyClient(NOBODY, fallback=make_fallback()) as client:
            calls = (client.act(OBSERVATION, request_id=f"r{i}") for i in range(20))
            found = await asyncio.gather(*calls)
            await client.feedback(1.0, decision_id=found[0].decision_id)
            await client.feedback_batch([{"reward": 1.0, "decision_id": found[1].decision_id}])
            batch = await client.act_batch([OBSERVATION] * 2)
            assert not await client.ready()
            return found, batch, client.num_spooled

    found, batch, num = asyncio.run(run())
    assert [one.request_id for one in found] == [f"r{i}" for i in range(20)]
    assert len(batch) == 2
    assert num == 24


def test_a_closed_async_client_says_so(make_fallback):
    async def run():
        client = AsyncPolicyClient(NOBODY, fallback=make_fallback())
        await client.act(OBSERVATION)
        await client.close()
        await client.close()
        with pytest.raises(ClientClosedError, match=f"client of {NOBODY}: found a request after"):
            await client.act(OBSERVATION)

    asyncio.run(run())


@pytest.mark.slow
def test_an_async_client_and_a_real_server(kit, package, tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    server = kit.start_server(
        package=package, policy="p", version=3, lake=lake.path, log_to="d", server="uvicorn"
    )

    async def run():
        async with AsyncPolicyClient(server.url, max_connections=4) as client:
            assert await client.ready()
            assert (await client.policy())["policy"] == "p"
            found = await asyncio.gather(*(client.act(OBSERVATION) for _ in range(50)))
            reports = (
                client.feedback(1.0, decision_id=one.decision_id, terminated=True) for one in found
            )
            await asyncio.gather(*reports)
            with pytest.raises(RequestFailedError):
                await client.act([1.0])
            return found

    try:
        found = asyncio.run(run())
        assert len({one.decision_id for one in found}) == 50
        read_steps(kit, lake, 50)
    finally:
        server.stop()
