"""Kills, failures and disconnects: what a client has to its end is recorded, once."""

import json
import os
import resource
import signal
import socket
import threading
from pathlib import Path

import httpx
import openai
import pytest

from replaylake.datastore.lake.lake import open_lake

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
URL = "/v1/chat/completions"


def post(gateway, text, stream=False, headers=None, **more):
    messages = [{"role": "user", "content": text}]
    body = {"model": "tiny", "messages": messages, "stream": stream, **more}
    return httpx.post(f"{gateway.url}{URL}", json=body, headers=headers, timeout=60)


@pytest.mark.slow
def test_a_gateway_killed_after_the_last_byte_loses_no_call(engines, kit, tmp_path):
    engine = engines("vllm")
    answered = 0
    for round_number, stream in enumerate([False, True]):
        gateway = kit.start_gateway(engine.url, tmp_path / "lake")
        for number in range(4):
            answer = post(gateway, f"{round_number} {number}", stream)
            assert answer.status_code == 200
            assert not stream or answer.text.endswith("data: [DONE]\n\n")
            answered += 1
        gateway.kill()  # at once: most calls are in the journal alone
        gateway.process.stderr.close()
    gateway = kit.start_gateway(engine.url, tmp_path / "lake")
    rows = gateway.steps("observation, episode_id, step")
    gateway.stop()
    gateway.process.stderr.close()
    assert len(rows) == answered == 8
    assert len({row["observation"] for row in rows}) == 8


@pytest.mark.slow
def test_a_kill_between_a_token_and_its_record_leaves_whole_calls_only(engines, kit, tmp_path):
    engine = engines("vllm")
    for num_events in (1, 12):
        gateway = kit.start_gateway(engine.url, tmp_path / "lake")
        text = f"hold after {num_events}"
        body = {**BODY, "messages": [{"role": "user", "content": text}], "stream": True}
        with httpx.stream("POST", f"{gateway.url}{URL}", json=body, timeout=60) as answer:
            events = (line for line in answer.iter_lines() if line)
            engine.release(text, num_events - 1)
            assert all("chunk" in next(events) for _ in range(num_events))
            gateway.kill()
            with pytest.raises(httpx.RemoteProtocolError):
                next(events)
        gateway.process.stderr.close()
    gateway = kit.start_gateway(engine.url, tmp_path / "lake")
    assert gateway.steps() == []
    gateway.stop()
    gateway.process.stderr.close()


@pytest.mark.slow
def test_a_restarted_gateway_continues_the_dialogues_of_its_dataset(engines, kit, tmp_path):
    engine, messages = engines("vllm"), []
    for number in range(3):
        gateway = kit.start_gateway(engine.url, tmp_path / "lake")
        client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none")
        named = openai.OpenAI(base_url=f"{gateway.url}/episode/e/v1", api_key="none")
        messages.append({"role": "user", "content": f"turn {number}"})
        answer = client.chat.completions.create(model="tiny", messages=messages)
        messages.append(answer.choices[0].message)
        question = [{"role": "user", "content": f"new {number}"}]
        named.chat.completions.create(model="tiny", messages=question)
        if number == 1:
            assert gateway.stop() == 0
        else:
            gateway.kill()
        gateway.process.stderr.close()
    gateway = kit.start_gateway(engine.url, tmp_path / "lake")
    rows = gateway.steps("*", "env_step")
    branches = gateway.lake.sql("select num_turns from agents.sequences").to_pylist()
    gateway.kill()
    gateway.process.stderr.close()
    followed = [row for row in rows if row["source_episode_id"] is None]
    assert len({row["episode_id"] for row in followed}) == 1
    agents = [row["agent_id"] for row in followed]
    # Each process continues in an agent of its own.
    assert (agents[0], len(set(agents)), {row["step"] for row in followed}) == ("", 3, {0})
    assert [row["parent_agent_id"] for row in followed] == [None, *agents[:2]]
    assert [row["is_continuation"] for row in followed] == [None, True, True]
    named = [row for row in rows if row["source_episode_id"] == "e"]
    assert len({row["episode_id"] for row in named}) == 1
    assert [row["agent_id"].partition("~")[0] for row in named] == [""] * 3
    assert len({row["agent_id"] for row in named}) == 3
    assert max(branch["num_turns"] for branch in branches) == 3


@pytest.mark.slow
def test_two_gateways_on_two_hosts_write_one_lake_on_s3(engines, gateways, bucket, kit, tmp_path):
    """Each is killed while both write; the other goes on, and nothing counts twice."""
    engine, lake = engines("vllm"), f"s3://{bucket}/lake"

    def start(host):
        own = {"REPLAYLAKE_STATE": tmp_path / host, "REPLAYLAKE_CACHE": tmp_path / f"{host}-cache"}
        return gateways(engine.url, lake, environment={k: str(v) for k, v in own.items()})

    class Writer(threading.Thread):
        def __init__(self, gateway, name):
            super().__init__(daemon=True)
            self.gateway, self.sent, self.is_stopped = gateway, [], False
            self.name = name
            self.start()

        def run(self):
            while not self.is_stopped:
                text = f"{self.name} {len(self.sent)}"
                try:
                    answer = post(self.gateway, text, stream=len(self.sent) % 2 == 1)
                except httpx.TransportError:
                    return  # it was killed meanwhile
                assert answer.status_code == 200
                self.sent.append(text)

        def wait_for(self, num):
            goal = len(self.sent) + num
            kit.wait_until(lambda: len(self.sent) >= goal)

    hosts = {name: start(name) for name in ("one", "two")}
    sent = []
    for round_number, victim in enumerate(("one", "two", "one")):
        writers = {name: Writer(hosts[name], f"{name} {round_number}") for name in hosts}
        for writer in writers.values():
            writer.wait_for(3)
        hosts[victim].kill()  # at any moment: its last calls are in its journal alone
        (other,) = (writer for name, writer in writers.items() if name != victim)
        other.wait_for(3)
        other.is_stopped = True
        for writer in writers.values():
            writer.join(60)
            sent += writer.sent
        hosts[victim] = start(victim)
    assert [gateway.stop() for gateway in hosts.values()] == [0, 0]
    rows = open_lake(lake).sql("select * from agents.steps").to_pylist()
    found = [row["observation"].removeprefix("user: ") for row in rows]
    # Of each killed gateway, one more may have been recorded, whose answer did not arrive.
    assert {*sent} <= {*found}
    assert len(found) == len({*found}) <= len(sent) + 3
    assert len({(row["episode_id"], row["agent_id"], row["step"]) for row in rows}) == len(rows)


def test_an_engine_that_fails_within_a_stream_is_seen_by_the_client_and_recorded(gateway, kit):
    with pytest.raises(httpx.RemoteProtocolError):
        post(gateway, "die in the stream", True)
    (row,) = kit.wait_for_rows(gateway, 1, "observation = 'user: die in the stream'")
    assert (row["call_status"], row["action"]) == ("failed", "DIE")
    assert row["is_trainable"] is False
    assert len(row["action_tokens"]) == len(row["action_log_probs"]) == 3


def test_an_engine_that_fails_within_a_body_is_an_error_of_the_gateway(gateway):
    answer = post(gateway, "die in the body")
    assert answer.status_code == 502
    assert answer.json()["error"]["field"] == "upstream"


def test_a_client_that_hangs_up_has_an_aborted_call(gateway, engines, kit):
    engine = engines("vllm")
    body = {**BODY, "messages": [{"role": "user", "content": "hold and leave"}], "stream": True}
    with httpx.stream("POST", f"{gateway.url}{URL}", json=body) as answer:
        events = (line for line in answer.iter_lines() if line)
        engine.release("hold and leave", 4)
        for _ in range(5):  # the first has no letter
            next(events)
    (row,) = kit.wait_for_rows(gateway, 1, "observation = 'user: hold and leave'")
    assert (row["call_status"], row["action"]) == ("aborted", "HOLD")
    assert row["is_trainable"] is False
    engine.requests()
    with socket.create_connection(gateway.url.removeprefix("http://").split(":")) as one:
        text = json.dumps({**BODY, "messages": [{"role": "user", "content": "hold and gone"}]})
        head = f"POST {URL} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(text)}\r\n\r\n"
        one.sendall((head + text).encode())
        kit.wait_until(engine.requests)
    (row,) = kit.wait_for_rows(gateway, 1, "observation = 'user: hold and gone'")
    assert (row["call_status"], row["action"], row["action_tokens"]) == ("aborted", "", None)


def test_requests_with_one_idempotency_key_are_one_step(gateway, engines, kit):
    engine = engines("vllm")
    headers = {"Idempotency-Key": "once"}
    first = post(gateway, "retry me", headers=headers)
    again = post(gateway, "retry me", headers=headers)
    assert first.text == again.text
    other = post(gateway, "retry me not", headers=headers)  # another call under the same key
    assert other.text != first.text
    # One that hung up is not aborted, and its retry gets the whole answer.
    body = {**BODY, "messages": [{"role": "user", "content": "slow retry"}], "stream": True}
    with httpx.stream("POST", f"{gateway.url}{URL}", json=body, headers=headers) as answer:
        next(answer.iter_lines())
    assert post(gateway, "slow retry", True, headers).text.endswith("data: [DONE]\n\n")
    rows = kit.wait_for_rows(gateway, 3, "idempotency_key = 'once'")
    assert [row["action"] for row in rows] == ["RETRY ME", "RETRY ME NOT", "SLOW RETRY"]
    assert {row["call_status"] for row in rows} == {"completed"}
    assert len(engine.requests()) == 3


@pytest.mark.slow
def test_a_retry_after_a_kill_is_the_same_step(engines, gateways, kit, tmp_path):
    engine = engines("vllm")
    calls = [(number, stream) for number in range(2) for stream in (False, True)]

    def ask(gateway):
        return [
            post(gateway, f"once more {number}", stream, {"Idempotency-Key": f"key-{number}"})
            for number, stream in calls
        ]

    gateway = gateways(engine.url, tmp_path / "lake")
    first = ask(gateway)
    assert len(engine.requests()) == len(calls)
    for _ in range(2):
        gateway.kill()
        gateway = gateways(engine.url, tmp_path / "lake")
        again = ask(gateway)
        assert [one.content for one in again] == [one.content for one in first]
        kinds = [[one.headers["content-type"] for one in texts] for texts in (first, again)]
        assert kinds[0] == kinds[1]
        assert engine.requests() == []
    other = post(gateway, "something else", headers={"Idempotency-Key": "key-0"})
    assert other.content != first[0].content
    rows = kit.wait_for_rows(gateway, 5, "idempotency_key is not null")
    assert len({row["episode_id"] for row in rows}) == 5


def test_a_large_request_is_told_by_its_key_from_another_one(gateway, engines, kit):
    engine = engines("vllm")
    headers = {"Idempotency-Key": "large"}
    image = "x" * (2 << 20)
    texts = [
        post(gateway, "look here", headers=headers, metadata={"image": image + end}).text
        for end in ("a", "a", "b")
    ]
    assert (texts[0] == texts[1], texts[0] == texts[2]) == (True, False)
    assert len(kit.wait_for_rows(gateway, 2, "idempotency_key = 'large'")) == 2
    assert len(engine.requests()) == 2


def test_one_idempotency_key_of_other_callers_or_episodes_is_another_call(gateway, engines):
    engine = engines("vllm")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "same body"}]}
    calls = [
        ("/episode/1", {}),
        ("/episode/2", {}),
        ("/episode/1", {"x-api-key": "sk-1"}),
        ("/episode/1", {"x-api-key": "sk-2"}),
        ("", {"X-ReplayLake-Episode": "1"}),
    ]
    texts = set()
    for path, headers in calls + calls:
        headers = {**headers, "Idempotency-Key": "shared"}
        texts.add(httpx.post(f"{gateway.url}{path}{URL}", json=body, headers=headers).text)
    assert len(texts) == len(engine.requests()) == len(calls)


def test_a_failed_call_does_not_hold_up_its_repetition(gateway):
    deep = "x"
    for _ in range(260):
        deep = [deep]
    headers = {"Idempotency-Key": "deep"}
    first, again = (post(gateway, "deep", headers=headers, metadata={"a": deep}) for _ in "ab")
    assert first.status_code == again.status_code != 500


def test_a_client_that_waits_for_a_repeated_call_can_hang_up(gateway, engines, kit):
    engine = engines("vllm")
    headers = {"Idempotency-Key": "patience"}
    first = threading.Thread(target=post, args=(gateway, "hold on", True, headers))
    first.start()
    kit.wait_until(engine.requests)
    body = {**BODY, "messages": [{"role": "user", "content": "hold on"}], "stream": True}
    line = 'replaylake_gateway_requests_total{api="openai-chat",status="499"}'

    def num_gone():
        lines = httpx.get(f"{gateway.url}/metrics").text.splitlines()
        return sum(float(one.split()[-1]) for one in lines if one.startswith(line))

    before = num_gone()
    patience = httpx.Timeout(60, read=0.2)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{gateway.url}{URL}", json=body, headers=headers, timeout=patience)
    kit.wait_until(lambda: num_gone() == before + 1)
    assert first.is_alive()
    engine.release("hold on", len("hold on"))
    first.join()


@pytest.mark.slow
def test_an_engine_that_starts_after_the_gateway_is_detected(kit, tmp_path):
    bound = kit.bind_port()
    upstream = f"http://127.0.0.1:{bound.getsockname()[1]}"
    gateway = kit.start_gateway(upstream, tmp_path / "lake")
    assert post(gateway, "too early").status_code == 502
    assert 'gateway_engine{engine="unknown"} 1.0' in httpx.get(f"{gateway.url}/metrics").text
    engine = kit.start_engine("vllm", bound)
    assert post(gateway, "in time").status_code == 200
    metrics = httpx.get(f"{gateway.url}/metrics").text
    (row,) = gateway.steps("action_tokens", num=1)
    gateway.stop()
    engine.stop()
    said = gateway.process.stderr.read()
    gateway.process.stderr.close()
    assert len(row["action_tokens"]) == len("in time") + 1
    assert 'gateway_engine{engine="vllm"} 1.0' in metrics
    assert 'engine="unknown"' not in metrics
    assert "engine unknown (/v1/models: " in said
    assert "calls are recorded with their texts, and without token ids" in said


@pytest.mark.slow
def test_sigterm_lets_calls_end_and_commits_them(engines, kit, tmp_path):
    engine = engines("vllm")
    gateway = kit.start_gateway(engine.url, tmp_path / "lake")
    texts = []
    reader = threading.Thread(target=lambda: texts.append(post(gateway, "hold it", True).text))
    reader.start()
    kit.wait_until(engine.requests)
    gateway.process.send_signal(signal.SIGTERM)
    kit.wait_until(lambda: not kit.is_listening(int(gateway.url.rpartition(":")[2])))
    engine.release("hold it", len("hold it"))
    assert gateway.process.wait(120) == 0
    reader.join()
    assert texts[0].endswith("data: [DONE]\n\n")
    (row,) = gateway.steps("call_status, observation")
    assert row["call_status"] == "completed"
    assert not list((tmp_path / "lake" / "agents" / "_journal").glob("*.jsonl"))
    gateway.process.stderr.close()


def limit_files():
    """Let the process write no file beyond 64 KiB: a disk that is full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, 64 << 10))


@pytest.mark.slow
@pytest.mark.parametrize("reaction", ["refuse", "pass"])
def test_a_call_that_cannot_be_recorded_is_refused_or_counted(engines, kit, tmp_path, reaction):
    gateway = kit.start_gateway(
        engines("vllm").url,
        tmp_path / "lake",
        "--on-record-failure",
        reaction,
        preexec=limit_files,
    )
    text = "x" * 6000  # with its ids, a record of more than the file may hold
    body = post(gateway, text)
    if reaction == "refuse":
        with pytest.raises(httpx.RemoteProtocolError):
            post(gateway, text, True)
    else:
        assert post(gateway, text, True).text.endswith("data: [DONE]\n\n")
    small = post(gateway, "small")
    metrics = httpx.get(f"{gateway.url}/metrics").text
    gateway.stop()
    gateway.process.stderr.close()
    if reaction == "refuse":
        assert (body.status_code, body.json()["error"]["field"]) == (503, "record")
        assert 'replaylake_gateway_not_recorded_total{result="refused"} 2.0' in metrics
    else:
        assert body.json()["choices"][0]["message"]["content"] == text.upper()
        assert 'replaylake_gateway_not_recorded_total{result="passed"} 2.0' in metrics
    assert small.status_code == 200
    assert [row["observation"] for row in gateway.steps()] == ["user: small"]


@pytest.mark.slow
def test_redact_changes_or_drops_a_call_before_it_is_written(engines, kit, tmp_path):
    gateway = kit.start_gateway(
        engines("vllm").url,
        tmp_path / "lake",
        "--redact",
        "redactors:hide_numbers",
        "--user-header",
        "X-User",
        environment={"PYTHONPATH": str(Path(__file__).parent)},
    )
    assert post(gateway, "my number is 4711", headers={"X-User": "ada"}).status_code == 200
    assert post(gateway, "nothing to hide").status_code == 200
    assert post(gateway, "drop this").status_code == 200
    assert post(gateway, "fail here").status_code == 503
    rows = gateway.steps("*", num=2)
    gateway.stop()
    gateway.process.stderr.close()
    assert [row["observation"] for row in rows] == [
        "user: my number is [number]",
        "user: nothing to hide",
    ]
    assert rows[0]["observation_tokens"] is rows[0]["action_tokens"] is None
    assert rows[1]["action_tokens"] is not None
    assert [row["user_id"] for row in rows] == ["ada", None]
    for path in (tmp_path / "lake").rglob("*"):
        assert not path.is_file() or b"number is 4711" not in path.read_bytes().lower(), path


@pytest.mark.slow
def test_other_machines_need_a_token_and_the_engine_gets_our_key(engines, kit, tmp_path):
    engine = engines("vllm")
    token = "t" * 20
    gateway = kit.start_gateway(
        engine.url,
        tmp_path / "lake",
        "--host",
        "0.0.0.0",
        "--upstream-key-env",
        "ENGINE_KEY",
        environment={"REPLAYLAKE_ACT_TOKEN": token, "ENGINE_KEY": "sk-ours"},
    )
    gateway.url = gateway.url.replace("0.0.0.0", "127.0.0.1")
    assert post(gateway, "no token").status_code == 401
    assert post(gateway, "wrong", headers={"X-ReplayLake-Token": "u" * 20}).status_code == 401
    assert post(gateway, "right", headers={"X-ReplayLake-Token": token}).status_code == 200
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=token)
    client.chat.completions.create(**BODY)
    # The key is for generating, not for the account that it belongs to.
    for method, path in [
        ("DELETE", "/v1/organization/users/1"),
        ("GET", "/v1/files"),
        ("POST", "/echo/x"),
        ("DELETE", "/v1/models/tiny"),
        ("GET", "/v1/models/..%2Ffiles"),
    ]:
        headers = {"X-ReplayLake-Token": token}
        answer = httpx.request(method, f"{gateway.url}{path}", headers=headers)
        assert answer.status_code in (400, 403), path
    assert [one.id for one in client.models.list()] == ["tiny"]
    assert httpx.get(f"{gateway.url}/metrics").status_code == 401
    assert httpx.get(f"{gateway.url}/readyz").status_code == 200
    seen = [one["headers"] for one in engine.requests() if "messages" in one["body"]]
    gateway.stop()
    gateway.process.stderr.close()
    assert [one["authorization"] for one in seen] == ["Bearer sk-ours"] * 2
    assert token not in json.dumps(seen)
    for path in (tmp_path / "lake").rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert b"sk-ours" not in content
        assert token.encode() not in content


@pytest.mark.slow
def test_what_a_gateway_cannot_do_is_one_line(tmp_path, run_gateway_command):
    lake = ["--lake", str(tmp_path / "lake"), "--dataset", "agents"]
    code, said = run_gateway_command("--upstream", "ftp://x", *lake)
    assert (code, "found 'ftp://x', expected a URL" in said) == (2, True)
    upstream = ["--upstream", "http://127.0.0.1:1"]
    code, said = run_gateway_command(*upstream, *lake, "--engine", "tgi")
    assert (code, "found 'tgi', expected one of auto, vllm" in said) == (2, True)
    for header in ("Authorization", "x-api-key", "Cookie"):
        code, said = run_gateway_command(*upstream, *lake, "--user-header", header)
        assert (code, "whose values are credentials" in said) == (2, True)
    code, said = run_gateway_command("--upstream", "http://u:secret@x", *lake)
    assert (code, "upstream_key_env" in said, "secret" in said) == (2, True, False)
    code, said = run_gateway_command(*upstream, *lake, "--redact", "no_such_module:x")
    assert (code, "found 'no_such_module:x'" in said) == (2, True)
    code, said = run_gateway_command(*upstream, *lake, "--host", "0.0.0.0")
    assert (code, "but no tokens" in said) == (2, True)
    assert not os.path.exists(tmp_path / "lake")


@pytest.mark.slow
def test_samples_of_one_answer_are_recorded_all_or_none(engines, kit, tmp_path):
    url = engines("vllm").url
    gateway = kit.start_gateway(url, tmp_path / "lake", preexec=limit_files)
    refused = post(gateway, "x" * 800, n=8)  # four of them would fit
    one = post(gateway, "small", n=2)
    gateway.stop()
    gateway.process.stderr.close()
    assert (refused.status_code, one.status_code) == (503, 200)
    assert [row["observation"] for row in gateway.steps()] == ["user: small"] * 2
