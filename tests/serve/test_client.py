"""The client against a real server: every call, and what it does when the server is away."""

import http.server
import json
import subprocess
import sys
import textwrap
import threading
import time
from typing import ClassVar

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.feedback.join import join_feedback
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.serve.client import Action, Client, RequestFailedError, ServerUnreachableError

GOOD = [0.1, 0.2, 0.3, 0.4]


@pytest.fixture(scope="module")
def lake(tmp_path_factory):
    return open_lake(tmp_path_factory.mktemp("client") / "lake", create=True)


@pytest.fixture(scope="module")
def server(kit, package, lake):
    running = kit.start_server(
        package=package, policy="p", version=3, lake=lake.path, log_to="d", workers=2
    )
    yield running
    running.stop()


@pytest.fixture(scope="module")
def client(server):
    with Client(server.url) as client:
        yield client


def joined(lake, num_steps, timeout_s=60.0):
    """Join until so many steps are there: rows get into the tables within a second."""
    until = time.monotonic() + timeout_s
    while True:
        receipt = join_feedback(lake, "d")
        steps = lake.sql("select * from d.steps").to_pylist()
        if len(steps) >= num_steps:
            return receipt, steps
        assert time.monotonic() < until, (receipt, len(steps))
        time.sleep(0.1)


@pytest.mark.slow
def test_act_and_every_way_to_report(client, lake):
    first = client.act(GOOD, episode_id="c1", step=0)
    assert isinstance(first, Action)
    assert (first.policy, first.version, first.log_prob, first.state) == ("p", 3, 0.0, None)
    assert first.action in (0, 1)
    second = client.act(np.asarray(GOOD), episode_id="c1", step=1, temperature=1.0, seed=7)
    assert second.log_prob < 0
    again = client.act(GOOD, episode_id="other", temperature=1.0, seed=7)
    assert (again.action, again.log_prob) == (second.action, second.log_prob)
    third = client.act(GOOD, episode_id="c1", step=2, action_mask=np.array([False, True]))
    assert third.action == 1
    client.feedback(1.0, decision_id=first.decision_id)
    client.feedback(2.0, request_id=second.request_id)
    client.feedback(1.5, episode_id="c1", step=2, mode="sum")
    client.feedback(
        1.5, episode_id="c1", step=2, mode="sum", terminated=True, final_observation=np.zeros(4)
    )
    client.feedback_batch([{"reward": 9.0, "decision_id": again.decision_id, "truncated": True}])
    _, steps = joined(lake, 4)
    mine = {step["step"]: step for step in steps if step["source_episode_id"] == "c1"}
    assert [mine[i]["reward"] for i in range(3)] == [1.0, 2.0, 3.0]
    assert [mine[i]["request_id"] for i in range(2)] == [first.request_id, second.request_id]
    assert (mine[2]["terminated"], mine[2]["final_observation"]) == (True, [0.0] * 4)


@pytest.mark.parametrize("num", [3, 40])  # as JSON, as bytes
def test_act_batch(client, num):
    observations = np.random.default_rng(0).normal(size=(num, 4)).astype(np.float32)
    many = client.act_batch(observations)
    assert len(many) == num
    assert many.actions.shape == (num,)
    assert many.log_probs.tolist() == [0.0] * num
    assert (many.policies, many.versions) == (["p"] * num, [3] * num)
    assert many.request_ids[1] == f"{many.request_ids[0][:-2]}/1"
    assert many.actions.tolist() == client.act_batch(observations.tolist()).actions.tolist()
    drawn = client.act_batch(observations, temperature=2.0, seed=1)
    assert (drawn.log_probs < 0).all()
    named = client.act_batch(
        observations,
        episode_ids=[f"b{i}" for i in range(num)],
        steps=[0] * num,
        action_masks=np.tile([True, False], (num, 1)),
    )
    assert set(named.actions.tolist()) == {0}


@pytest.mark.slow
def test_a_state_too_long_for_a_query_is_sent_all_the_same(kit, tmp_path):
    """As of a policy that sees the last frames; its state goes back as it came."""
    spec = PolicySpec(Box((4, 1000)), Discrete(2), "categorical", state_size=20_000)
    package = kit.save_policy(tmp_path / "package", spec, frames_graph(20_000))
    server = kit.start_server(package=package, policy="frames", version=1)
    try:
        with Client(server.url) as client:
            observation = np.ones((4, 1000), np.float32)
            first = client.act(observation, temperature=0.5, seed=1)
            assert len(first.state) > 100_000
            second = client.act(observation, state=first.state, temperature=0.5, seed=1)
            assert (second.action, second.state) == (first.action, first.state)
            assert second.log_prob == first.log_prob
    finally:
        server.stop()


def frames_graph(state_size):
    """Return logits of zeros, and the state as it came."""
    graph = helper.make_graph(
        [
            helper.make_node("Flatten", ["observations"], ["flat"]),
            helper.make_node("MatMul", ["flat", "zeros"], ["logits"]),
            helper.make_node("Identity", ["state"], ["next_state"]),
        ],
        "frames",
        [
            helper.make_tensor_value_info("observations", TensorProto.FLOAT, ["n", 4, 1000]),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, ["n", state_size]),
        ],
        [
            helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 2]),
            helper.make_tensor_value_info("next_state", TensorProto.FLOAT, ["n", state_size]),
        ],
        [numpy_helper.from_array(np.zeros((4000, 2), np.float32), "zeros")],
    )
    opset = helper.make_opsetid("", 17)
    return helper.make_model(graph, opset_imports=[opset], ir_version=8).SerializeToString()


def test_episodes(client, lake):
    episode = {
        "episode_id": "robot",
        "observations": np.zeros((3, 4), np.float32),
        "actions": np.array([0, 1, 1]),
        "rewards": np.array([1.0, 2.0, 3.0]),
        "log_probs": np.array([-0.5, np.nan, -0.25]),
        "terminated": True,
    }
    assert client.episodes([episode, {**episode, "episode_id": "robot 2"}]) == 6
    assert client.episodes([episode]) == 3
    until = time.monotonic() + 60
    while not (rows := _of(lake, "robot")):
        assert time.monotonic() < until
        join_feedback(lake, "d")
    assert [row["behavior_log_prob"] for row in rows] == [-0.5, None, -0.25]


def _of(lake, episode):
    text = "select * from d.steps where source_episode_id = $episode order by step"
    return lake.sql(text, {"episode": episode}).to_pylist()


def test_policy_and_ready(client):
    assert client.ready()
    about = client.policy()
    assert (about["policy"], about["version"], about["log_to"]) == ("p", 3, "d")


def test_refusals_say_what_was_wrong(client):
    with pytest.raises(
        RequestFailedError, match=r"HTTP 422: observation: found a list of 3"
    ) as caught:
        client.act([1, 2, 3])
    assert (caught.value.status, caught.value.field) == (422, "observation")
    assert caught.value.found == "a list of 3"
    with pytest.raises(RequestFailedError) as caught:
        client.feedback(1.0, decision_id="dnot-ours")
    assert (caught.value.status, caught.value.found) == (404, None)
    assert caught.value.message.startswith("unknown decision_id; ")
    with pytest.raises(ValueError, match="Out of range float"):
        client.act([float("nan"), 0, 0, 0])
    with pytest.raises(TypeError, match="found set"):
        client.act({1, 2})


def test_threads_share_a_client(server):
    with Client(server.url) as client:
        ids, errors = [], []

        def act_often():
            try:
                ids.extend(client.act(GOOD).decision_id for _ in range(20))
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=act_often) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert len(set(ids)) == 160
        assert len(client._transport._open) == 8


def test_a_wrong_url_and_nobody_there():
    with pytest.raises(ConfigInvalidError, match="found the URL 'localhost:3000'"):
        Client("localhost:3000")
    client = Client("http://127.0.0.1:9", retry_s=0.2)
    assert not client.ready()
    with pytest.raises(
        ServerUnreachableError, match=r"http://127.0.0.1:9/policy: .*Check that the server"
    ):
        client.policy()


class _Flaky(http.server.BaseHTTPRequestHandler):
    """Answers by a script: a status, or None for a cut connection."""

    protocol_version = "HTTP/1.1"
    script: ClassVar[list] = []
    seen: ClassVar[list] = []

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.seen.append((self.path, json.loads(body), self.headers["Authorization"]))
        status = self.script.pop(0)
        if status is None:
            self.connection.close()
            self.close_connection = True
            return
        answer = {"action": 1, "log_prob": None, "decision_id": "d", "policy": "p", "version": 1}
        if status != 200:
            answer = {"error": {"field": "server", "message": "overloaded; retry in 1 s"}}
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if status == 503:
            self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def flaky():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Flaky)
    _Flaky.script, _Flaky.seen = [], []
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_what_is_lost_is_sent_again_under_the_same_name(flaky):
    _Flaky.script += [200, None, None, 503, 503, 200]
    with Client(flaky, token="secret-token-1234") as client:
        client.act(GOOD)
        action = client.act(GOOD, episode_id="e")
    assert (action.action, action.log_prob) == (1, None)
    sent = [body for _, body, _ in _Flaky.seen[1:]]
    assert len(sent) == 5
    assert all(body == sent[0] for body in sent)
    assert sent[0]["request_id"] == action.request_id != _Flaky.seen[0][1]["request_id"]
    assert {token for _, _, token in _Flaky.seen} == {"Bearer secret-token-1234"}


def test_a_sum_that_is_sent_again_has_one_name(flaky):
    _Flaky.script += [None, 200, 200]
    with Client(flaky) as client:
        client.feedback(1.0, decision_id="d", mode="sum")
        client.feedback(1.0, decision_id="d", mode="sum")
    names = [body["feedback_id"] for _, body, _ in _Flaky.seen]
    assert names[0] == names[1] != names[2]


def test_other_refusals_are_not_sent_again(flaky):
    _Flaky.script += [409, 503]
    with Client(flaky, retry_s=0) as client:
        for status in (409, 503):
            with pytest.raises(RequestFailedError) as caught:
                client.feedback(1.0, decision_id="d")
            assert caught.value.status == status
    assert len(_Flaky.seen) == 2


@pytest.mark.slow
def test_a_server_that_is_killed_and_comes_back_loses_nothing(kit, package, tmp_path, held_port):
    lake = open_lake(tmp_path / "lake", create=True)
    config = {"package": package, "policy": "p", "version": 1, "lake": lake.path, "log_to": "d"}
    config["port"] = held_port
    running = kit.start_server(**config)
    acted = []

    def play():
        for step in range(60):
            chosen = client.act(GOOD, episode_id="e", step=step)
            client.feedback(float(step), decision_id=chosen.decision_id, terminated=step == 59)
            acted.append(chosen)
            time.sleep(0.01)

    with Client(running.url, retry_s=60) as client:
        player = threading.Thread(target=play)
        player.start()
        kit.wait_until(lambda: len(acted) > 10)
        running.kill()
        running = kit.start_server(**config)
        player.join(60)
        assert len(acted) == 60
        running.stop()
    receipt = join_feedback(lake, "d")
    rows = lake.sql("select step, reward from d.steps order by step").to_pylist()
    assert [row["reward"] for row in rows] == [float(i) for i in range(60)], receipt


def test_it_needs_nothing_heavy():
    code = """
        import sys
        import replaylake.serve.client
        heavy = {"starlette", "bentoml", "onnxruntime", "duckdb", "pyarrow", "orjson", "msgpack",
                 "uvicorn", "httpx", "torch"}
        print(sorted(heavy & set(sys.modules)))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
