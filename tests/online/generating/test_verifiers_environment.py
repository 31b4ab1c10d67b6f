"""The endpoint between programs of verifiers and a chat; tests/compat plays a real taskset."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import httpx
import pytest

import replaylake as rl
from replaylake.datastore.errors import ConfigInvalidError, ExtraMissingError, GenerationError
from replaylake.online.generating import environments
from replaylake.online.generating.chat import Chat
from replaylake.online.generating.environments import load_environment
from replaylake.online.generating.verifiers_environment import ChatEndpoint, VerifiersEnvironment

CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def ask(model, *requests):
    """Send requests, pairs of a body and a session; return answers, and agents by session."""

    async def main():
        endpoint, answers = ChatEndpoint(), []
        async with endpoint.serve(), httpx.AsyncClient() as client:
            name = endpoint.add(Chat(model, {}, [0], 10))
            for body, session in requests:
                whole = {"model": name, "messages": [{"role": "user", "content": "ab"}], **body}
                headers = {"X-Session-ID": session}
                url = f"{endpoint.url}/chat/completions"
                answers.append(await client.post(url, json=whole, headers=headers))
            return answers, endpoint.remove(name)

    return asyncio.run(main())


def test_a_call_is_one_of_the_chat_and_a_session_an_agent(scripted):
    model = scripted(lambda messages: "xy")
    body = {"temperature": 0.5, "tools": [{"type": "function"}], "stream_options": {}}
    answers, agents = ask(model, (body, "one"), ({}, "two"), ({}, "one"))
    assert [one.status_code for one in answers] == [200] * 3
    (choice,) = answers[0].json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": "xy"}
    assert choice["finish_reason"] == "stop"
    assert agents == {"one": "", "two": "~1"}
    assert model.calls[0]["sampling"] == {"temperature": 0.5}
    assert model.calls[0]["tools"] == [{"type": "function"}]


def test_a_stream_has_the_whole_reply_and_its_end(scripted):
    from replaylake.datastore.interchange.rollout_rows import Generation

    message = {"role": "assistant", "content": "so", "tool_calls": [CALL]}
    answers, _ = ask(scripted(lambda messages: Generation(message)), ({"stream": True}, "one"))
    *events, last = answers[0].text.split("\n\n")[:-1]
    assert last == "data: [DONE]"
    first, end, usage = [json.loads(event.removeprefix("data: ")) for event in events]
    delta = first["choices"][0]["delta"]
    assert (delta["content"], delta["tool_calls"]) == ("so", [{"index": 0, **CALL}])
    assert end["choices"][0]["finish_reason"] == "tool_calls"
    assert usage["usage"]["total_tokens"] == 0


@pytest.mark.parametrize(
    ("body", "reply", "status"),
    [
        ({"model": "other"}, "xy", 400),
        ({"messages": [1]}, "xy", 400),
        ({}, GenerationError("messages: found too many"), 400),
        ({}, ConfigInvalidError("sampling: found top_p"), 500),
    ],
)
def test_what_cannot_be_answered_is_an_error(scripted, body, reply, status):
    answers, _ = ask(scripted(lambda messages: reply), (body, "one"))
    assert answers[0].status_code == status
    assert answers[0].json()["error"]["message"]


class PlayedEpisodes:
    """verifiers' environment: a task is its episode, whose program calls the model once."""

    def serving(self):
        return nullcontext()

    def slots(self, episode):
        return [episode]

    async def run_slot(self, episode, context):
        body = {"model": context.model, "messages": [{"role": "user", "content": "ab"}]}
        async with httpx.AsyncClient() as client:
            url = f"{context.client.base_url}/chat/completions"
            (await client.post(url, json=body)).raise_for_status()
        return episode


def test_an_error_of_a_trace_fails_its_rollout_and_no_other(tmp_path, scripted, monkeypatch):
    error = SimpleNamespace(type="TaskError", message="no such file")
    trace = SimpleNamespace(id="", reward=2.0, rewards={}, errors=[])
    episodes = [
        SimpleNamespace(errors=[error], traces=[]),
        SimpleNamespace(errors=[], traces=[SimpleNamespace(errors=[error])]),
        SimpleNamespace(errors=[], traces=[trace]),
    ]
    played = object.__new__(VerifiersEnvironment)
    played._vf = SimpleNamespace(EvalClientConfig=SimpleNamespace, ModelContext=SimpleNamespace)
    played._env, played._tasks, played._endpoint = PlayedEpisodes(), episodes, ChatEndpoint()
    played.tasks = [{"id": str(number), "number": number} for number in range(3)]
    played.digest = "three"
    monkeypatch.setattr(environments, "VerifiersEnvironment", lambda *_: played)
    lake = rl.open(tmp_path / "lake", create=True)
    config = rl.LanguageRolloutConfig(env="verifiers:played", producer="run", concurrency=1)
    receipt = rl.rollout_language(lake, "words", scripted(lambda messages: "xy"), config)
    assert (receipt.num_rollouts, receipt.num_failed, receipt.mean_reward) == (3, 2, 2.0)
    query = "select status, status_reason from words.steps order by episode_id"
    assert lake.sql(query).to_pylist() == [
        {"status": "failed", "status_reason": "TraceError: TaskError: no such file"},
        {"status": "failed", "status_reason": "TraceError: TaskError: no such file"},
        {"status": "completed", "status_reason": None},
    ]


def test_verifiers_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    given = {"env_args": {}, "num_tasks": None, "seed": 0, "executor": None}
    with pytest.raises(ExtraMissingError, match=r"pip install verifiers==0\.4\.0"):
        load_environment("verifiers:reverse", tasks=None, **given)
    with pytest.raises(ConfigInvalidError, match="tasks: found 'x' beside verifiers:reverse"):
        load_environment("verifiers:reverse", tasks="x", **given)
