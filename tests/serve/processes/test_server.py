"""A real server on a real socket: same actions as in process, and nothing acknowledged is lost."""

import json
import signal
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import (
    ConfigInvalidError,
    SchemaMismatchError,
    ServeError,
    SpaceUnsupportedError,
)
from replaylake.datastore.feedback.join import join_feedback
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.package import load_policy
from replaylake.serve.config import ServeConfig
from replaylake.serve.loading import check_servable
from replaylake.serve.processes.server import serve
from replaylake.serve.safety.limits import Safety


@pytest.mark.slow
def test_a_thousand_observations_get_the_actions_of_the_package(client, package):
    observations = np.random.default_rng(0).normal(size=(1000, 4)).astype(np.float32)
    expected = load_policy(package).act(observations).actions.tolist()
    rows = observations.tolist()
    singly = [client.post("/act", json={"observation": row}).json()["action"] for row in rows]
    assert singly == expected
    batches = [
        client.post("/act", json={"observations": rows[i : i + 250]}).json()["actions"]
        for i in range(0, 1000, 250)
    ]
    assert [action for batch in batches for action in batch] == expected


def test_the_server_says_what_it_is(client, server):
    said = client.get("/policy").json()
    assert (said["policy"], said["version"], said["log_to"]) == ("by_hand", 3, "served")
    assert said["reference"] == "by_hand@champion"
    assert said["manifest"]["algorithm"] == "by_hand"
    assert client.get("/livez").status_code == client.get("/readyz").status_code == 200
    assert "replaylake_requests_total" in client.get("/metrics").text
    assert client.post("/act", json={"observation": "x"}).json()["error"]["field"] == "observation"
    assert len([line for line in server.lines if "ready after" in line]) == 1


def test_it_runs_on_uvloop_and_without_training_code(server):
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in server.processes()]
    assert any("uvloop" in text and "httptools" in text for text in maps)
    for text in maps:
        for package in ("torch", "ray", "d3rlpy", "gymnasium", "scipy"):
            assert f"/site-packages/{package}/" not in text


def test_served_episodes_come_back_by_sql(client, lake):
    for number in range(3):
        for step in range(4):
            answer = client.post(
                "/act",
                json={
                    "observation": [number, step, 0, 1],
                    "episode_id": f"episode-{number}",
                    "request_id": f"{number}-{step}",
                    "deterministic": False,
                },
            ).json()
            body = {
                "decision_id": answer["decision_id"],
                "reward": step + 0.5,
                "terminated": step == 3,
            }
            for _ in range(2):
                assert client.post("/feedback", json=body).status_code == 200
    where = "source_episode_id like 'episode-%'"
    deadline = time.monotonic() + 60
    while join_feedback(lake, "served") and _count(lake, where) < 12:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    rows = lake.sql(
        "select source_episode_id as episode, step, observation, reward, terminated, policy, "
        f"policy_version, behavior_log_prob, request_id from served.steps where {where} "
        "order by source_episode_id, step"
    ).to_pylist()
    assert [(row["episode"], row["step"], row["request_id"]) for row in rows] == [
        (f"episode-{n}", step, f"{n}-{step}") for n in range(3) for step in range(4)
    ]
    assert [row["reward"] for row in rows] == [0.5, 1.5, 2.5, 3.5] * 3
    assert [row["terminated"] for row in rows] == [False, False, False, True] * 3
    assert {(row["policy"], row["policy_version"]) for row in rows} == {("by_hand", 3)}
    assert all(row["behavior_log_prob"] < 0 for row in rows)
    assert rows[5]["observation"] == [1.0, 1.0, 0.0, 1.0]
    before = _count(lake, "true")
    assert join_feedback(lake, "served").steps == 0
    assert _count(lake, "true") == before


def _count(lake, where):
    if not lake.dataset("served").snapshot().spec.extras:
        return 0
    return lake.sql(f"select count(*) as n from served.steps where {where}").to_pylist()[0]["n"]


@pytest.mark.slow
def test_a_port_in_use_is_one_clear_line(server, package):
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(ServeError, match=rf"port {port} on 127.0.0.1: in use"):
        serve(ServeConfig(package=package, policy="p", version=1, port=port))


def test_what_cannot_be_served_is_refused_before_anything_starts(kit, package, tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("other").create(Box((7,)), Discrete(2))
    known = {"package": package, "policy": "p", "version": 1}
    with pytest.raises(SchemaMismatchError, match="Box float32\\[7\\]"):
        serve(ServeConfig(**known, lake=lake.path, log_to="other"))
    for explore in (
        "epsilon=2",
        "epsilon",
        "temperature=-1",
        "temperature=nan",
        "x=1",
    ):
        with pytest.raises(ConfigInvalidError, match="explore: found"):
            ServeConfig(**known, explore=explore)
    with pytest.raises(ConfigInvalidError, match=r"lake: found none beside log_to d"):
        ServeConfig(**known, log_to="d")
    spec = kit.PolicySpec(Box((4,)), Box((1,), low=-1, high=1), "deterministic")
    graph = kit.linear_graph(np.ones((4, 1), np.float32), "actions", 4)
    continuous = {**known, "package": kit.save_policy(tmp_path / "c", spec, graph)}
    for explore in ("epsilon=0.1", "temperature=1"):
        with pytest.raises(SpaceUnsupportedError, match="`explore`: found"):
            serve(ServeConfig(**continuous, explore=explore))
    with pytest.raises(ServeError, match="`host`: found no address"):
        serve(ServeConfig(**known, host="no-such-host.invalid"))


def test_config_survives_the_way_through_the_environment(tmp_path):
    config = ServeConfig(
        tmp_path,
        "p",
        4,
        str(tmp_path),
        "d",
        "epsilon=0.1",
        "::1",
        1,
        2,
        3.5,
        True,
        reference="p@best",
    )
    assert ServeConfig.from_environment(config.to_environment()) == config
    plain = ServeConfig(tmp_path, "p", 4)
    assert ServeConfig.from_environment(plain.to_environment()) == plain
    assert config.url == "http://[::1]:1"
    assert plain.url == "http://127.0.0.1:3000"
    with pytest.raises(ConfigInvalidError, match="REPLAYLAKE_SERVE_PACKAGE"):
        ServeConfig.from_environment({})


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [("PORT", "http", "an integer"), ("FOLLOW_S", "soon", "a number"), ("BODY_BYTES", "8M", "an")],
)
def test_a_number_in_the_environment_that_is_none_names_its_variable(name, text, expected):
    environment = {"REPLAYLAKE_SERVE_PACKAGE": "p", "REPLAYLAKE_SERVE_POLICY": "p"}
    with pytest.raises(ConfigInvalidError) as refused:
        ServeConfig.from_environment({**environment, f"REPLAYLAKE_SERVE_{name}": text})
    assert f"REPLAYLAKE_SERVE_{name}: found {text!r}, expected {expected}" in str(refused.value)
    assert refused.value.parameter == name.lower()


def test_an_access_log_that_cannot_be_written_is_refused_before_a_worker_starts(package, tmp_path):
    config = ServeConfig(package, "p", 1, safety=Safety(access_log=str(tmp_path)))
    with pytest.raises(ConfigInvalidError, match=r"access_log: .*Is a directory"):
        check_servable(config)


@pytest.fixture
def default_signals():
    """Children take every signal as a terminal's do; under nohup they would ignore SIGHUP."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        # Only what is ignored is inherited; Python's own handlers are not.
        if handler is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.slow
@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize(
    "sig", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=["term", "int", "hup"]
)
def test_a_signal_ends_it_with_everything_committed_and_no_process_left(
    kit, package, tmp_path, sig
):
    lake = open_lake(tmp_path / "lake", create=True)
    server = kit.start_server(
        package=package, policy="p", version=1, lake=lake.path, log_to="d", workers=2
    )
    key = httpx.post(f"{server.url}/act", json={"observation": [1, 2, 3, 4]}).json()["decision_id"]
    with httpx.Client(base_url=server.url) as idle:
        idle.get("/policy")  # an open connection must not hold it up
        processes = server.processes()
        assert len(processes) == 3
        server.stop(sig)
    assert server.process.returncode == 0
    assert not any(kit.is_running(pid) for pid in processes)
    ids = lake.sql("select decision_id from d.decisions").column(0).to_pylist()
    assert ids == [key]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/livez")


@pytest.mark.slow
def test_a_signal_during_the_start_ends_it_too(kit, package):
    process = kit.spawn_server(package=package, policy="p", version=1)
    kit.wait_until(lambda: len(kit.process_tree(process.pid)) == 2)  # its worker is just beginning
    worker = kit.process_tree(process.pid)[1]
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert not kit.is_running(worker)


def _act(url: str) -> str:
    response = httpx.post(f"{url}/act", json={"observation": [1, 2, 3, 4]})
    return response.json()["decision_id"]


@pytest.mark.slow
def test_two_workers_share_ids_and_metrics(kit, package, tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    server = kit.start_server(
        package=package, policy="p", version=1, lake=lake.path, log_to="d", workers=2
    )
    try:
        keys = []
        _, *pids = server.processes()
        assert len(pids) == 2
        for pid in pids:  # stopped in turn: whom the kernel prefers must not decide who answers
            with kit.stopped(pid):
                for _ in range(30):
                    keys.append(_act(server.url))
            body = {"reward": 1, "terminated": True}
            for key in keys[-30:]:
                answer = httpx.post(f"{server.url}/feedback", json={"decision_id": key, **body})
                assert answer.status_code == 200
        text = httpx.get(f"{server.url}/metrics").text
        assert (
            'replaylake_decisions_total{deterministic="true",policy="p",version="1"} 60.0' in text
        )
    finally:
        server.stop()
    receipt = join_feedback(lake, "d")
    assert (receipt.decisions, receipt.joined, receipt.steps) == (60, 60, 60)
    workers = {kit.read_unverified(key).worker for key in keys}
    assert len(workers) == 2


def test_other_machines_are_not_served_without_tokens(package, monkeypatch):
    for role in ("ACT", "FEEDBACK", "ADMIN"):
        monkeypatch.delenv(f"REPLAYLAKE_{role}_TOKEN", raising=False)
    config = ServeConfig(package=package, policy="p", version=1, host="0.0.0.0", port=0)
    with pytest.raises(ConfigInvalidError, match="`insecure`"):
        serve(config)
    with pytest.raises(ConfigInvalidError, match="expected one of bentoml, uvicorn"):
        ServeConfig(package=package, policy="p", version=1, server="gunicorn")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bentoml", "uvicorn"])
def test_tokens_and_the_access_log_of_a_running_server(kit, package, tmp_path, name):
    act, admin, log = "act-token-" * 3, "admin-token-" * 3, tmp_path / "access.log"
    for role, token in (("act", act), ("admin", admin)):
        (tmp_path / role).write_text(token)
    safety = Safety(
        act_token_file=tmp_path / "act",
        admin_token_file=tmp_path / "admin",
        access_log=str(log),
        body_bytes=1000,
    )
    server = kit.start_server(
        package=package, policy="p", version=1, workers=2, server=name, safety=safety
    )
    try:
        with httpx.Client(base_url=server.url) as client:
            statuses, request_id = _ask_with_tokens(client, act, admin)
        assert statuses == [200, 401, 200, 403, 200, 413]
        for pid in server.processes():
            known = [Path(f"/proc/{pid}/{what}").read_bytes() for what in ("cmdline", "environ")]
            assert act.encode() not in b"".join(known)
    finally:
        server.stop()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    ours = [line for line in lines if line["request_id"] == request_id]
    assert [(line["route"], line["status"]) for line in ours] == [("/act", 200)]
    assert {401, 200, 403, 413} <= {line["status"] for line in lines}
    assert act not in log.read_text() + "".join(server.lines)


def _ask_with_tokens(client, act, admin):
    """Return six statuses, and the id of the request that got an action."""
    body = {"observation": [1, 2, 3, 4]}
    as_actor, as_admin = ({"authorization": f"Bearer {token}"} for token in (act, admin))
    answers = [
        client.get("/readyz"),
        client.post("/act", json=body),
        client.post("/act", json=body, headers=as_actor),
        client.get("/policy", headers=as_actor),
        client.get("/policy", headers=as_admin),
        client.post("/act", content=b" " * 1001, headers=as_actor),
    ]
    return [answer.status_code for answer in answers], answers[2].headers["x-request-id"]
