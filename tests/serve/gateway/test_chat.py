"""Chat completions through a real gateway, before an engine on loopback."""

import base64
import json
import socket
import socketserver
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest

from replaylake.datastore.interchange.export.export import export
from replaylake.serve.gateway.openai_api import ChatApi

CLIENTS = []


@pytest.fixture(autouse=True)
def close_clients():
    """Closes the clients of a test: their sockets would be a warning in some later one."""
    yield
    while CLIENTS:
        CLIENTS.pop().close()


def make_client(gateway, prefix="", **options):
    options = {"api_key": "sk-of-the-caller", "max_retries": 0, **options}
    CLIENTS.append(openai.OpenAI(base_url=f"{gateway.url}{prefix}/v1", **options))
    return CLIENTS[-1]


SYSTEM = {"role": "system", "content": "Be brief."}


def converse(client, word, stream=False):
    """Hold a dialogue of a call of a tool, its answer and a last answer; return the two answers."""
    messages = [SYSTEM, {"role": "user", "content": f"use the tool for {word}"}]
    first = ask(client, messages, stream)
    call = {"role": "assistant", "content": None, "tool_calls": [first["call"]]}
    messages += [call, {"role": "tool", "tool_call_id": first["call"]["id"], "content": word}]
    return [first, ask(client, messages, stream)]


def ask(client, messages, stream=False, **options):
    options = {"model": "tiny", "messages": messages, "temperature": 0.5, **options}
    if not stream:
        answer = client.chat.completions.create(**options)
        message = answer.choices[0].message
        calls = [call.model_dump() for call in message.tool_calls or ()]
        return {"id": answer.id, "text": message.content, "call": calls[0] if calls else None}
    text, call, answer_id = "", None, None
    for chunk in client.chat.completions.create(**options, stream=True):
        answer_id = chunk.id
        delta = chunk.choices[0].delta
        text += delta.content or ""
        for part in delta.tool_calls or ():
            if part.id:
                call = {
                    "id": part.id,
                    "type": "function",
                    "function": {"name": "", "arguments": ""},
                }
            call["function"]["name"] += part.function.name or ""
            call["function"]["arguments"] += part.function.arguments or ""
    return {"id": answer_id, "text": text or None, "call": call}


@pytest.mark.parametrize("stream", [False, True])
def test_a_dialogue_is_an_episode_of_increments_and_one_sequence(gateway, kit, stream):
    word = f"amber {stream}"
    answers = converse(make_client(gateway), word, stream)
    ids = [one["id"] for one in answers]
    rows = kit.wait_for_rows(gateway, 2, f"completion_id in {tuple(ids)}")
    assert len({row["episode_id"] for row in rows}) == 1
    assert [row["step"] for row in rows] == [0, 1]
    assert [row["observation"] for row in rows] == [
        f"system: Be brief.\nuser: use the tool for {word}",
        f"tool: {word}",
    ]
    assert rows[0]["action"] == f"look({json.dumps({'word': f'use the tool for {word}'})})"
    assert rows[1]["action"] == word.upper()
    assert [row["tool_name"] for row in rows] == ["look", None]
    assert json.loads(rows[1]["prompt_messages"])[0]["role"] == "tool"
    assert json.loads(rows[0]["sampling"]) == {"temperature": 0.5}
    assert [row["finish_reason"] for row in rows] == ["tool_calls" if stream else "stop", "stop"]
    assert {row["call_status"] for row in rows} == {"completed"}
    assert {row["policy"] for row in rows} == {"tiny"}
    assert [row["reward"] for row in rows] == [None, None]
    assert not any(row["terminated"] or row["truncated"] for row in rows)
    (branch,) = gateway.lake.sql(
        "select token_ids, loss_mask, log_probs, num_turns from agents.sequences "
        f"where episode_id = '{rows[0]['episode_id']}'"
    ).to_pylist()
    assert branch["num_turns"] == 2
    acted = [text for row in rows for text in row["action_tokens"]]
    assert [t for t, m in zip(branch["token_ids"], branch["loss_mask"], strict=True) if m] == acted
    assert rows[1]["action_tokens"] == [ord(letter) + 10 for letter in word.upper()] + [5]
    assert rows[1]["action_log_probs"][:3] == [-0.125, -0.25, -0.375]
    assert rows[1]["behavior_log_prob"] == pytest.approx(sum(rows[1]["action_log_probs"]))


def test_a_screenshot_is_stored_once_for_the_calls_that_repeat_it(gateway, kit, tmp_path):
    url = f"data:image/png;base64,{base64.b64encode(bytes(range(256)) * 4).decode()}"
    image = {"type": "image_url", "image_url": {"url": url}}
    ids = []
    for words in (["a look"], ["a look", "shorter"], ["shorter"]):
        texts = [{"type": "text", "text": f"screen {word}"} for word in words]
        client = make_client(gateway, "/episode/screens")
        answer = ask(client, [SYSTEM, {"role": "user", "content": [*texts, image]}])
        ids.append(answer["id"])
        kit.wait_for_rows(gateway, 1, f"completion_id = '{answer['id']}'")
    columns = "episode_id, agent_id, prompt_messages, message_media"
    rows = kit.wait_for_rows(gateway, 3, f"completion_id in {tuple(ids)}", columns)
    assert all(url not in row["prompt_messages"] for row in rows)
    stored = [row["message_media"][0]["bytes"] for row in rows]
    owners = [(row["episode_id"], row["agent_id"]) for row in rows]
    assert len({owner[0] for owner in owners}) == 1
    # An agent that leaves messages out of its context is another branch of the episode.
    assert [owner[1] for owner in owners] == ["", "~1", "~2"]
    assert stored == [bytes(range(256)) * 4, None, None]
    exported = tmp_path / "screens.jsonl"
    export(gateway.lake, "agents", exported, format="jsonl", where=f"episode_id = '{owners[0][0]}'")
    assert exported.read_text().count(url) == 3


# What the gateway adds to a request, without and with `stream`.
ADDED_FIELDS = {
    "vllm": ({"return_token_ids", "logprobs"},) * 2,
    "sglang": (
        {"return_token_ids", "return_prompt_token_ids", "logprobs"},
        {"return_input_ids_in_sglext", "return_output_ids_in_sglext", "logprobs"},
    ),
    "llama.cpp": ({"logprobs", "top_logprobs"},) * 2,
    "openai": (set(),) * 2,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ADDED_FIELDS)
def test_a_client_gets_what_the_engine_would_have_sent(engines, gateways, tmp_path, kind):
    engine = engines(kind)
    gateway = gateways(engine.url, tmp_path / "lake", is_prompt=True)
    for stream in (False, True):
        messages = [{"role": "user", "content": "hello"}]
        body = {"model": "tiny", "stream": stream, "messages": messages}
        direct = httpx.post(f"{engine.url}/v1/chat/completions", json=body)
        passed = httpx.post(f"{gateway.url}/v1/chat/completions", json=body)
        assert direct.status_code == passed.status_code == 200
        assert direct.headers["content-type"] == passed.headers["content-type"]
        assert without_ids(direct.text, stream) == without_ids(passed.text, stream)
        asked = engine.requests()[-1]["body"]
        assert set(asked) - set(body) == ADDED_FIELDS[kind][stream]
    rows = gateway.steps(num=2)
    assert len(rows) == 2
    for stream, row in zip((False, True), rows, strict=True):
        assert row["action"] == "HELLO"
        prompt = [2, *(ord(letter) + 10 for letter in "hello"), 5, 3]
        if kind in ("vllm", "sglang"):
            assert row["observation_tokens"] == prompt
            assert row["action_tokens"] == [ord(letter) + 10 for letter in "HELLO"] + [5]
        else:  # without the ids of the prompt, a sequence would not be what the model saw
            assert row["observation_tokens"] is row["action_tokens"] is None
        total = -0.125 * (1 + 2 + 3 + 4 + 5 + 6)
        assert row["behavior_log_prob"] == (None if kind == "openai" else pytest.approx(total))
        assert row["policy_version"] == (7 if (kind, stream) == ("sglang", False) else None)


def without_ids(text, stream):
    """The answer, without what differs from one call to the next."""
    lines = text.split("\n\n") if stream else [text]
    found = []
    for line in lines:
        body = line.removeprefix("data: ")
        if body.startswith("{"):
            body = json.loads(body)
            del body["id"]
        found.append(body)
    return found


CHAT_FIELDS = {
    "vllm": ["return_token_ids", "logprobs"],
    "sglang": [
        "return_token_ids",
        "return_prompt_token_ids",
        "return_input_ids_in_sglext",
        "return_output_ids_in_sglext",
        "logprobs",
    ],
    "llama.cpp": ["logprobs"],
}


def assert_passed_as_direct(engine, gateway, path, body):
    stream = bool(body.get("stream"))
    direct, passed = (httpx.post(f"{one.url}{path}", json=body) for one in (engine, gateway))
    assert direct.status_code == passed.status_code == 200, passed.text
    assert without_ids(direct.text, stream) == without_ids(passed.text, stream), body


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHAT_FIELDS)
def test_fields_that_a_client_requests_stay_in_its_answer(engines, gateways, tmp_path, kind):
    engine = engines(kind)
    gateway = gateways(engine.url, tmp_path / "lake", is_prompt=True)
    path = "/v1/chat/completions"
    messages = [{"role": "user", "content": "gather these"}]
    for stream in (False, True):
        for field in (None, *CHAT_FIELDS[kind]):
            own = {} if field is None else {field: True}
            body = {"model": "tiny", "messages": messages, "stream": stream, **own}
            assert_passed_as_direct(engine, gateway, path, body)
    for own in ({"logprobs": 0}, {"logprobs": 1}, {"return_token_ids": True}, {"echo": True}):
        body = {"model": "tiny", "prompt": "as asked", **own}
        assert_passed_as_direct(engine, gateway, "/v1/completions", body)
    rows = gateway.steps("*", num=2 * (1 + len(CHAT_FIELDS[kind])) + 4)
    chats = [row for row in rows if row["source_framework"] == "openai-chat"]
    assert {row["action"] for row in chats} == {"GATHER THESE"}
    if kind != "llama.cpp":
        assert {len(row["action_tokens"]) for row in chats} == {13}
    (echoed,) = [row for row in rows if "echo" in (row["sampling"] or "")]
    assert (echoed["action_tokens"], echoed["behavior_log_prob"]) == (None, None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama.cpp", "vllm --max-logprobs 0"])
def test_a_call_is_answered_where_the_engine_refuses_added_fields(
    engines, gateways, tmp_path, kind
):
    engine = engines(kind)
    options = ["--engine", kind.split()[0]]
    gateway = gateways(engine.url, tmp_path / "lake", *options, is_prompt=True)
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "tools": tools}
    for stream in (True, False, True, False):
        answer = httpx.post(f"{gateway.url}/v1/chat/completions", json={**body, "stream": stream})
        assert answer.status_code == 200, answer.text
    # llama.cpp is not even asked; of the other engine, it is remembered what it refuses.
    assert len(engine.requests()) == (4 if kind == "llama.cpp" else 6)
    assert [row["action"] for row in gateway.steps(num=4)] == ["HELLO"] * 4


@pytest.mark.parametrize(
    ("deltas", "message"),
    [
        (
            [
                {"tool_calls": [{"id": "a", "function": {"name": "f", "arguments": '{"x":'}}]},
                {"tool_calls": [{"function": {"arguments": "1}"}}]},
                {"tool_calls": [{"id": "b", "function": {"name": "g", "arguments": "{}"}}]},
            ],
            {"tool_calls": [("a", "f", '{"x":1}'), ("b", "g", "{}")]},
        ),
        (
            [
                {"function_call": {"name": "f", "arguments": ""}},
                {"function_call": {"arguments": "{}"}},
            ],
            {"function_call": {"name": "f", "arguments": "{}"}},
        ),
    ],
)
def test_calls_of_a_stream_without_index_and_of_functions_are_read(deltas, message):
    api = ChatApi()
    request = api.read_request({"messages": [{"role": "user", "content": "x"}]})
    reader = api.reader(request, frozenset(), "openai")
    for delta in deltas:
        choice = {"index": 0, "delta": delta, "finish_reason": None}
        reader.read_event(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
    (sample,) = reader.answer().samples
    found = {name: sample.message[name] for name in message}
    if "tool_calls" in found:
        found["tool_calls"] = [
            (one["id"], one["function"]["name"], one["function"]["arguments"])
            for one in found["tool_calls"]
        ]
    assert found == message


def test_events_arrive_as_the_engine_sends_them(gateway, engines):
    engine = engines("vllm")
    messages = [{"role": "user", "content": "hold"}]
    stream = make_client(gateway, timeout=60).chat.completions.create(
        model="tiny", messages=messages, stream=True
    )
    letters = []
    for chunk in stream:
        # The engine has sent no other event yet: a gateway that gathers them would never send it.
        letters.append(chunk.choices[0].delta.content)
        engine.release("hold", 1)
    assert letters == ["", *"HOLD", None]


def test_samples_and_retries_of_one_step_are_branches(gateway, kit):
    client = make_client(gateway)
    messages = [{"role": "user", "content": "branch me"}]
    first = client.chat.completions.create(model="tiny", messages=messages).choices[0].message
    messages += [first.model_dump(exclude_none=True), {"role": "user", "content": "go on"}]
    for _ in range(3):
        client.chat.completions.create(model="tiny", messages=messages)
    columns = "episode_id, agent_id, step, parent_agent_id, parent_step, is_continuation, env_step"
    where = "(select distinct episode_id from agents.steps where observation = 'user: branch me')"
    rows = kit.wait_for_rows(gateway, 4, f"episode_id in {where}", columns)
    assert [tuple(row.values())[1:] for row in rows] == [
        ("", 0, None, None, None, 0),
        ("", 1, None, None, True, 1),
        ("~1", 0, "", 0, True, 2),
        ("~2", 0, "", 0, True, 3),
    ]
    branches = gateway.lake.sql(
        f"select agent_id, num_turns, root_agent_id from agents.sequences "
        f"where episode_id in {where} order by agent_id"
    ).to_pylist()
    assert [tuple(one.values()) for one in branches] == [("", 2, ""), ("~1", 2, ""), ("~2", 2, "")]


def test_several_samples_of_a_prompt_are_episodes_of_a_group(gateway, kit):
    messages = [{"role": "user", "content": "three of these"}]
    make_client(gateway).chat.completions.create(model="tiny", messages=messages, n=3)
    where = "observation = 'user: three of these'"
    rows = kit.wait_for_rows(gateway, 3, where)
    assert len({row["episode_id"] for row in rows}) == 3
    assert len({row["group_id"] for row in rows}) == 1


def test_names_in_the_path_and_in_headers_decide_the_episode(gateway, kit):
    client = make_client(gateway, "/run/r1/iteration/3/group/5/episode/1")
    ask(client, [{"role": "user", "content": "named"}])
    headers = {"X-ReplayLake-Agent": "critic", "X-ReplayLake-Parent-Agent": ""}
    other = make_client(gateway, "/run/r1/iteration/3/group/5/episode/1", default_headers=headers)
    ask(other, [{"role": "user", "content": "judge it"}])
    # Its history is another one: a branch, with the whole prompt again.
    ask(client, [SYSTEM, {"role": "user", "content": "rewritten"}])
    twin = make_client(
        gateway,
        default_headers={
            "X-ReplayLake-Run": "r1",
            "X-ReplayLake-Iteration": "3",
            "X-ReplayLake-Group": "5",
            "X-ReplayLake-Episode": "2",
            "X-ReplayLake-Policy-Version": "12",
        },
    )
    ask(twin, [{"role": "user", "content": "named"}])
    columns = (
        "source_episode_id, agent_id, step, parent_agent_id, parent_step, is_continuation, "
        "observation, group_id, run_id, train_step, policy_version, episode_id"
    )
    rows = kit.wait_for_rows(gateway, 4, "run_id = 'r1'", columns)
    assert [tuple(row.values())[:7] for row in rows] == [
        ("r1/3/5/1", "", 0, None, None, None, "user: named"),
        ("r1/3/5/1", "critic", 0, "", 0, False, "user: judge it"),
        ("r1/3/5/1", "~1", 0, "", 0, False, "system: Be brief.\nuser: rewritten"),
        ("r1/3/5/2", "", 0, None, None, None, "user: named"),
    ]
    assert {(row["group_id"], row["run_id"], row["train_step"]) for row in rows} == {
        ("r1/3/5", "r1", 3)
    }
    assert [row["policy_version"] for row in rows] == [None, None, None, 12]
    assert len({row["episode_id"] for row in rows}) == 2


def test_an_error_of_the_engine_is_passed_on_and_is_no_step(gateway, kit):
    with pytest.raises(openai.RateLimitError, match="rate limit"):
        ask(make_client(gateway), [{"role": "user", "content": "refuse this"}])
    ask(make_client(gateway), [{"role": "user", "content": "allow this"}])
    # Calls are committed in their order.
    where = "observation in ('user: refuse this', 'user: allow this')"
    (row,) = kit.wait_for_rows(gateway, 1, where)
    assert row["observation"] == "user: allow this"


def test_other_paths_are_passed_on_unrecorded(gateway, engines):
    answer = httpx.post(f"{gateway.url}/echo/a%2Fb?x=1&y=%20", content=b"bytes")
    assert answer.content == b"bytes"
    assert answer.headers["x-path"] == "/echo/a%2Fb"
    assert answer.headers["x-query"] == "x=1&y=%20"
    answer = httpx.get(f"{gateway.url}/run/r%2F1/echo/a%2Fb")
    assert answer.headers["x-path"] == "/echo/a%2Fb"
    assert [one.id for one in make_client(gateway).models.list()] == ["tiny"]
    missing = httpx.get(f"{gateway.url}/nothing/here")
    assert missing.status_code == 404


@pytest.mark.slow
def test_the_callers_key_is_passed_on_and_is_nowhere_in_the_lake(gateways, engines, tmp_path):
    engine = engines("vllm")
    gateway = gateways(engine.url, tmp_path / "lake", is_prompt=True)
    ask(make_client(gateway), [{"role": "user", "content": "hi"}])
    (seen,) = [one for one in engine.requests() if "messages" in one["body"]]
    assert seen["headers"]["authorization"] == "Bearer sk-of-the-caller"
    assert not any(name.startswith("x-replaylake") for name in seen["headers"])
    gateway.steps(num=1)
    assert gateway.stop() == 0
    said = "".join(gateway.lines) + gateway.process.stderr.read()
    assert "sk-of-the-caller" not in said
    for path in (tmp_path / "lake").rglob("*"):
        if path.is_file():
            assert b"sk-of-the-caller" not in path.read_bytes(), path


def count(gateway, name, labels):
    text = httpx.get(f"{gateway.url}/metrics").text
    lines = [line for line in text.splitlines() if line.startswith(f"{name}{{{labels}}}")]
    return float(lines[0].split()[-1]) if lines else 0.0


def test_a_path_with_dot_segments_is_refused(gateway):
    host, port = gateway.url.removeprefix("http://").split(":")
    for path in ("/v1/%2e%2e/admin", "/v1/../admin", "/run/r/v1/%2E/models", "/v1/a%2F..%2Fb"):
        with socket.create_connection((host, int(port))) as one:
            one.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
            head = one.recv(1000)
        assert head.startswith(b"HTTP/1.1 400"), path


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("slash", "/v1/chat/completions/"),
        ("slash of a run", "/run/a%2Fb/v1/chat/completions/"),
        ("half", "/v1/chat/completions"),
        ("mark", "/v1/chat/completions"),
    ],
)
def test_calls_in_unusual_forms_are_recorded(gateway, kit, name, path):
    text = f"unusual {name}"
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": text}]})
    if name == "half":
        body = body.replace(name, "half \\ud83d")
    data = b"\xef\xbb\xbf" + body.encode() if name == "mark" else body.encode()
    answer = httpx.post(f"{gateway.url}{path}", content=data, follow_redirects=False)
    assert answer.status_code == 200
    text = text.replace("half", "half \ufffd")
    (row,) = kit.wait_for_rows(gateway, 1, f"observation = 'user: {text}'")
    assert row["run_id"] == ("a/b" if "a%2Fb" in path else None)


def test_an_answered_call_that_cannot_be_read_counts_as_not_recorded(gateway):
    name = "replaylake_gateway_not_recorded_total"
    refused, passed = (count(gateway, name, f'result="{one}"') for one in ("refused", "passed"))
    body = {"model": "tiny", "prompt_embeds": "AAAA"}
    answer = httpx.post(f"{gateway.url}/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["field"]) == (503, "record")
    assert count(gateway, name, 'result="refused"') == refused + 1
    body = {"model": "tiny", "messages": [{"role": "user", "content": "past the record"}]}
    assert httpx.post(f"{gateway.url}/chat/completions", json=body).status_code == 200
    assert count(gateway, name, 'result="passed"') == passed + 1


def test_fields_of_the_client_reach_the_engine_as_they_are(gateway, engines):
    engine = engines("vllm")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "exact"}], "seed": 2**70}
    for more in ({}, {"logprobs": None}):
        assert httpx.post(f"{gateway.url}/v1/chat/completions", json={**body, **more}).is_success
        (seen,) = engine.requests()
        assert seen["body"]["seed"] == 2**70
        assert seen["body"]["logprobs"] is True


def test_a_request_that_is_no_call_is_answered_by_the_engine(gateway):
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", content=b"{not json")
    assert answer.status_code == 500  # as the engine answers it


def test_bad_names_are_refused(gateway):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    url = f"{gateway.url}/iteration/three/v1/chat/completions"
    answer = httpx.post(url, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        "found 'three', expected a whole number of 0 or more"
    )
    answer = httpx.post(f"{gateway.url}/run/a/run/b/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, "path")


@pytest.mark.parametrize("asked", [True, False])
def test_the_usage_of_a_stream_is_passed_on_and_recorded_if_it_was_asked_for(
    gateway, engines, kit, asked
):
    engine, text = engines("vllm"), f"usage {asked}"
    options = {"stream_options": {"include_usage": True}} if asked else {}
    chunks = list(
        make_client(gateway).chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": text}], stream=True, **options
        )
    )
    told = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert told == ([len(text) + 1] if asked else [])
    (request,) = engine.requests()
    assert request["body"].get("stream_options") == options.get("stream_options")
    (row,) = kit.wait_for_rows(gateway, 1, f"observation = 'user: {text}'")
    usage = json.loads(row["metadata"] or "{}").get("usage")
    assert (usage or {}).get("completion_tokens") == (len(text) + 1 if asked else None)


def make_events():
    chunks = [{"index": 0, "delta": {"content": text}} for text in ("one", " two")]
    chunks.append({"index": 0, "delta": {}, "finish_reason": "stop"})
    events = [
        b"data: %b\n\n" % json.dumps({"id": "s", "choices": [one]}).encode() for one in chunks
    ]
    return [*events, b"data: [DONE]\n\n"]


class PacketEngine(socketserver.BaseRequestHandler):
    """Streams the same events in few packets or in many, as the question says."""

    def handle(self):
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-engine: packets\r\n"
        head += b"connection: close\r\n\r\n"
        asked = self.request.recv(65536)
        pieces = [head, *make_events()]
        if b"at once" in asked:
            pieces = [b"".join(pieces)]
        elif b"with half" in asked:
            pieces = [head + pieces[1][:20], pieces[1][20:], *pieces[2:]]
        for piece in pieces:
            self.request.sendall(piece)
            time.sleep(0.01)


def test_a_stream_is_the_same_in_whatever_packets_it_comes(gateways, tmp_path):
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), PacketEngine) as engine:
        threading.Thread(target=engine.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{engine.server_address[1]}"
        gateway = gateways(url, tmp_path / "lake", "--engine", "openai", is_prompt=True)
        with httpx.Client() as client:
            for how in ("at once", "with half", "one by one") * 2:  # on one connection
                messages = [{"role": "user", "content": how}]
                body = {"model": "m", "stream": True, "messages": messages}
                answer = client.post(f"{gateway.url}/v1/chat/completions", json=body)
                assert answer.content == b"".join(make_events())
                assert answer.headers["content-type"] == "text/event-stream"
                assert answer.headers["x-engine"] == "packets"
                assert answer.headers["transfer-encoding"] == "chunked"
                assert "server" in answer.headers
                assert "date" in answer.headers
        messages[0]["content"] = "at once"
        answer = httpx.post(  # as messages of ASGI
            f"{gateway.url}/v1/chat/completions", json=body, headers={"Connection": "close"}
        )
        assert answer.content == b"".join(make_events())
        engine.shutdown()
    rows = gateway.steps("action", num=7)
    assert [row["action"] for row in rows] == ["one two"] * 7


class ChunkEngine(socketserver.BaseRequestHandler):
    """Streams all events and the end of the body at once."""

    def handle(self):
        self.request.recv(65536)
        chunks = [b"%x\r\n%b\r\n" % (len(one), one) for one in [*make_events(), b""]]
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
        self.request.sendall(head + b"transfer-encoding: chunked\r\n\r\n" + b"".join(chunks))


def test_what_comes_with_the_end_of_a_stream_is_sent_with_it(gateways, tmp_path):
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), ChunkEngine) as engine:
        threading.Thread(target=engine.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{engine.server_address[1]}"
        gateway = gateways(url, tmp_path / "lake", "--engine", "openai")
        message = {"role": "user", "content": "hello"}
        body = json.dumps({"model": "m", "stream": True, "messages": [message]}).encode()
        request = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n"
        received = b""
        with socket.create_connection(("127.0.0.1", int(gateway.url.rpartition(":")[2]))) as client:
            client.sendall(request % len(body) + b"\r\n" + body)
            while not received.endswith(b"\r\n0\r\n\r\n"):
                received += client.recv(65536)
        engine.shutdown()
    first, *others = make_events()
    chunks = received.partition(b"\r\n\r\n")[2]
    sent = [first, b"".join(others), b""]
    assert chunks == b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in sent)
    assert [row["action"] for row in gateway.steps("action", num=1)] == ["one two"]


def test_a_chunk_with_more_than_a_choice_is_read_whole():
    api = ChatApi()
    reader = api.reader(
        api.read_request({"messages": [{"role": "user", "content": "x"}]}), frozenset(), "openai"
    )
    head = {"id": "a", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    for more in ({}, {}, {"usage": {"completion_tokens": 2}, "model": "m2"}, {"error": {"x": 1}}):
        choice = {"index": 0, "delta": {"content": "y"}}
        event = json.dumps({**head, "choices": [choice], **more}).encode()
        assert reader.read_event(b"data: " + event + b"\n\n")[1] is False
    assert reader.read_event(b"data: [DONE]\n\n") == (b"data: [DONE]\n\n", True)
    answer = reader.answer()
    assert (answer.completion_id, answer.usage) == ("a", {"completion_tokens": 2})
    assert (answer.samples[0].message["content"], answer.is_complete) == ("yyyy", False)


def test_the_gateway_does_not_load_pandas(gateway, kit):
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "no frames"}]}
    httpx.post(f"{gateway.url}/v1/chat/completions", json=chat)
    kit.wait_for_rows(gateway, 1, "observation = 'user: no frames'")  # it has committed
    assert "pandas" not in Path(f"/proc/{gateway.process.pid}/maps").read_text()
