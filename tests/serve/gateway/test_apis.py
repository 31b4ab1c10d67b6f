"""Completions, messages and responses through a real gateway, with the real clients."""

import json

import httpx
import openai
import pytest

CLIENTS = []


@pytest.fixture(autouse=True)
def close_clients():
    """Closes the clients of a test: their sockets would be a warning in some later one."""
    yield
    while CLIENTS:
        CLIENTS.pop().close()


def make_openai(gateway):
    CLIENTS.append(openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0))
    return CLIENTS[-1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_dialogue_of_messages_is_an_episode(gateway, kit, stream):
    import anthropic  # 3 s, which every collection would wait for

    client = anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0)
    CLIENTS.append(client)
    word = f"use the tool {stream}"
    messages = [{"role": "user", "content": word}]
    options = {"model": "tiny", "max_tokens": 50, "system": "Be brief."}
    ids = []
    for _ in range(2):
        if stream:
            with client.messages.stream(messages=messages, **options) as events:
                answer = events.get_final_message()
        else:
            answer = client.messages.create(messages=messages, **options)
        ids.append(answer.id)
        content = [block.model_dump(exclude_none=True) for block in answer.content]
        # As agents do, the reasoning is left out of the history.
        said = [block for block in content if block["type"] != "thinking"]
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "found"}
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
    assert [block.text for block in answer.content] == ["FOUND"]
    rows = kit.wait_for_rows(gateway, 2, f"completion_id in {tuple(ids)}")
    assert len({row["episode_id"] for row in rows}) == 1
    assert [row["step"] for row in rows] == [0, 1]
    assert [row["observation"] for row in rows] == [
        f"system: Be brief.\nuser: {word}",
        "user: found",
    ]
    assert rows[0]["action"].endswith(f'look({{"word":"{word}"}})')
    assert json.loads(rows[0]["completion_messages"])[0]["content"][0] == {
        "type": "thinking",
        "thinking": "hm",
        "signature": "sig",
    }
    assert [row["tool_name"] for row in rows] == ["look", None]
    assert [row["finish_reason"] for row in rows] == ["tool_use", "end_turn"]
    assert json.loads(rows[0]["metadata"])["usage"]["output_tokens"] == 5
    assert json.loads(rows[0]["sampling"]) == {"max_tokens": 50}


@pytest.mark.parametrize("by_id", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_dialogue_of_responses_is_an_episode(gateway, kit, stream, by_id):
    client = make_openai(gateway)
    word = f"use the tool {stream} {by_id}"
    items = [{"role": "user", "content": word}]
    options = {"model": "tiny", "instructions": "Be brief."}
    ids, previous = [], {}
    for _ in range(2):
        answer = client.responses.create(input=items, stream=stream, **options, **previous)
        if stream:
            answer = list(answer)[-1].response
        ids.append(answer.id)
        result = {"type": "function_call_output", "call_id": "call_1", "output": "found"}
        if by_id:
            items, previous = [result], {"previous_response_id": answer.id}
        else:
            said = [item.model_dump(exclude_none=True) for item in answer.output]
            items = [*items, *said, result]
    assert answer.output_text == "FOUND"
    rows = kit.wait_for_rows(gateway, 2, f"completion_id in {tuple(ids)}")
    assert len({row["episode_id"] for row in rows}) == 1
    assert [row["step"] for row in rows] == [0, 1]
    assert [row["observation"] for row in rows] == [
        f"system: Be brief.\nuser: {word}",
        "tool: found",
    ]
    assert rows[0]["tool_name"] == "look"
    assert rows[1]["action"].endswith("FOUND")


@pytest.mark.parametrize("stream", [False, True])
def test_completions_have_the_ids_of_prompt_and_answer(gateway, engines, kit, stream):
    body = {"model": "tiny", "prompt": f"abc {stream}", "stream": stream, "n": 2}
    direct = httpx.post(f"{engines('vllm').url}/v1/completions", json=body).text
    passed = httpx.post(f"{gateway.url}/v1/completions", json=body).text
    assert _without_ids(direct) == _without_ids(passed)
    rows = kit.wait_for_rows(gateway, 2, f"observation = 'user: abc {stream}'")
    assert len({row["episode_id"] for row in rows}) == 2
    assert len({row["group_id"] for row in rows}) == 1
    for row in rows:
        assert row["action"] == f"ABC {stream}".upper()
        assert row["observation_tokens"] == [ord(one) + 10 for one in f"abc {stream}"]
        assert row["action_tokens"] == [ord(one) + 10 for one in row["action"]]
        assert row["action_log_probs"][:2] == [-0.125, -0.25]
        assert row["finish_reason"] == "length"


def _without_ids(text):
    parts = [part.removeprefix("data: ") for part in text.split("\n\n")]
    bodies = [json.loads(part) if part.startswith("{") else part for part in parts]
    return [{**one, "id": None} if isinstance(one, dict) else one for one in bodies]


def test_several_prompts_of_one_request_are_episodes(gateway, kit):
    answer = make_openai(gateway).completions.create(model="tiny", prompt=["one", "two"])
    assert [choice.text for choice in answer.choices] == ["ONE", "TWO"]
    rows = kit.wait_for_rows(gateway, 2, "observation in ('user: one', 'user: two')")
    assert sorted((row["observation"], row["action"]) for row in rows) == [
        ("user: one", "ONE"),
        ("user: two", "TWO"),
    ]


PATHS = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}


@pytest.mark.parametrize(
    ("api", "word", "stream", "status"),
    [
        ("chat", "fault", True, "failed"),
        ("chat", "quit", True, "failed"),
        ("chat", "abort", True, "failed"),
        ("chat", "abort", False, "failed"),
        ("messages", "fault", True, "failed"),
        ("messages", "quit", True, "failed"),
        ("responses", "fault", True, "failed"),
        ("responses", "fault", False, "failed"),
        ("responses", "quit", True, "failed"),
        ("responses", "limit", True, "completed"),
    ],
)
def test_an_answer_that_the_model_did_not_finish_is_not_trained_on(
    gateway, engines, kit, api, word, stream, status
):
    text = f"{word} {api} {stream}"
    dialogue = [{"role": "user", "content": text}]
    body = {"model": "tiny", "stream": stream, "max_tokens": 50}
    body |= {"input": text} if api == "responses" else {"messages": dialogue}
    direct = httpx.post(f"{engines('vllm').url}{PATHS[api]}", json=body)
    passed = httpx.post(f"{gateway.url}{PATHS[api]}", json=body)
    assert direct.status_code == passed.status_code == 200
    assert len(direct.text.split("\n\n")) == len(passed.text.split("\n\n"))
    (row,) = kit.wait_for_rows(gateway, 1, f"observation = 'user: {text}'")
    assert row["call_status"] == status
    assert row["is_trainable"] is (None if status == "completed" else False)
    assert text[:3].upper() in row["action"]
