"""A model behind an engine: what is requested of each engine, read from it, and refused."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

import pytest

import replaylake as rl
from replaylake.datastore.errors import ConfigInvalidError, GenerationError, RolloutError
from replaylake.serve.gateway.engine_model import EngineModel

ENGINES = ["vllm", "sglang", "llama.cpp", "openai"]
# Of a dialogue of two turns: its ids are those of letters, with one before and after each message.
MASK = [*[0] * 5, *[1] * 3, *[0] * 5, *[1] * 3]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


@pytest.fixture(params=ENGINES)
def engine(request, engines):
    started = engines(request.param)
    started.kind = request.param
    return started


def generate(url, text, *, tools=None, sampling=None, seed=0, **options):
    options = {"name": "tiny", "retry_s": 0.0, **options}

    async def main():
        model = EngineModel(url, **options)
        try:
            messages = [{"role": "user", "content": text}]
            return await model.generate(messages, tools=tools, sampling=sampling, seed=seed)
        finally:
            model.close()

    return asyncio.run(main())


def test_ids_and_log_probs_are_those_that_the_engine_returns(engine):
    one = generate(engine.url, "ab", seed=5, sampling={"temperature": 0.5}, policy_version=2)
    assert one.message == {"role": "assistant", "content": "AB"}
    assert (one.finish_reason, one.policy) == ("stop", "tiny")
    *_, request = engine.requests()
    body = request["body"]
    assert body["temperature"] == 0.5
    assert ("seed" in body) == (engine.kind != "openai")
    has_ids = engine.kind in ("vllm", "sglang")
    assert one.policy_version == (7 if engine.kind == "sglang" else 2)
    assert (one.num_prompt_tokens, one.num_completion_tokens) == (5, 3)
    if has_ids:
        assert list(one.prompt_ids) == [2, ord("a") + 10, ord("b") + 10, 5, 3]
        assert list(one.completion_ids) == [ord("A") + 10, ord("B") + 10, 5]
        assert one.log_probs == [-0.125, -0.25, -0.375]
    else:
        assert (one.prompt_ids, one.completion_ids, one.log_probs) == (None, None, None)


def test_calls_of_tools_are_in_the_message(engine):
    one = generate(engine.url, "a tool please", tools=TOOLS)
    (call,) = one.message["tool_calls"]
    assert call["function"]["name"] == "look"
    assert json.loads(call["function"]["arguments"]) == {"word": "a tool please"}


def test_an_engine_that_refuses_added_fields_gets_the_request_without(engines):
    started = engines("vllm --max-logprobs 0")
    one = generate(started.url, "ab")
    assert one.message["content"] == "AB"
    added, plain = [request["body"] for request in started.requests()]
    assert "logprobs" in added
    assert "logprobs" not in plain


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("refuse", RolloutError, "status 429 .*rate limit.*, for 0 s, expected an answer"),
        ("abort", GenerationError, "an answer that the engine did not finish .abort"),
    ],
)
def test_what_is_no_answer_is_an_error(engine, text, error, message):
    with pytest.raises(error, match=message):
        generate(engine.url, text)


def serve(answers, **options):
    """Generate with an engine that gives these answers, one for each request."""

    async def main():
        left = list(answers)

        async def respond(reader, writer):
            while head := await reader.readline():
                while line := await reader.readline():
                    if line == b"\r\n":
                        break
                    if line.lower().startswith(b"content-length"):
                        length = int(line.split(b":")[1])
                if head.startswith(b"POST"):
                    await reader.readexactly(length)
                status, body, *headers = left.pop(0)
                lines = [f"HTTP/1.1 {status} x", f"content-length: {len(body)}", *headers]
                writer.write("\r\n".join([*lines, "", body]).encode())

        async def handle(reader, writer):
            with suppress(asyncio.CancelledError, ConnectionError):
                await respond(reader, writer)
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1")
        model = EngineModel(
            f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}",
            **{"name": "tiny", "engine": "openai", **options},
        )
        try:
            return await model.generate([{"role": "user", "content": "ab"}]), len(left)
        finally:
            model.close()
            server.close()

    return asyncio.run(main())


OK = {"choices": [{"message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}]}
MODELS = {"data": [{"id": "one", "owned_by": "vllm"}]}


def test_a_transient_refusal_is_sent_again(monkeypatch):
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    monkeypatch.setattr("replaylake.serve.gateway.engine_model.asyncio.sleep", sleep)
    answers = [(503, ""), (429, "", "retry-after: 3"), (200, json.dumps(OK))]
    one, num_left = serve(answers)
    assert (one.message["content"], num_left, waits) == ("x", 0, [0.5, 3.0])


def test_the_only_model_of_an_engine_needs_no_name():
    one, _ = serve([(200, json.dumps(MODELS)), (200, json.dumps(OK))], name=None, engine="auto")
    assert one.policy == "one"
    several = {"data": [*MODELS["data"], {"id": "two", "owned_by": "vllm"}]}
    with pytest.raises(ConfigInvalidError, match="the models one, two, expected one") as error:
        serve([(200, json.dumps(several))], name=None)
    assert error.value.parameter == "model"


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ((401, "no key"), RolloutError, r"status 401 \(no key\)\. Check the URL, the key"),
        ((404, "no model"), RolloutError, r"status 404 \(no model\)"),
        ((400, "too long"), GenerationError, r"status 400 \(too long\)"),
        ((200, "[]"), GenerationError, "an answer that is no chat completion"),
        ((200, "{}"), GenerationError, "did not finish"),
    ],
)
def test_refusals_of_a_request_are_told_from_those_of_all(answer, error, message):
    with pytest.raises(error, match=message) as raised:
        serve([answer])
    assert isinstance(raised.value, GenerationError) == (error is GenerationError)


def test_arguments_of_another_form_are_refused():
    for given, parameter in (
        ({"engine": "other"}, "engine"),
        ({"api_key": "a\nb"}, "api_key"),
        ({"url": "ftp://x"}, "upstream"),
    ):
        with pytest.raises(ConfigInvalidError) as error:
            EngineModel(**{"url": "http://127.0.0.1:1", **given})
        assert error.value.parameter == parameter
    with pytest.raises(ConfigInvalidError, match="sampling: found stream"):
        generate("http://127.0.0.1:1", "ab", sampling={"stream": True})


def test_rollouts_have_the_ids_and_the_version_of_the_engine(engine, tmp_path):
    async def play(task, chat):
        messages = [{"role": "user", "content": "ab"}]
        messages.append(await chat(messages))
        await chat([*messages, {"role": "user", "content": "cd"}])
        return 1.0

    lake = rl.open(tmp_path / "lake", create=True)
    model = EngineModel(engine.url, retry_s=0.0)
    config = rl.LanguageRolloutConfig(env=play, tasks=[{}], samples=2, seed=0)
    receipt = rl.rollout_language(lake, "talks", model, config)
    assert (receipt.num_rollouts, receipt.num_turns, receipt.num_failed) == (2, 4, 0)
    rows = lake.sql("select * from talks.steps order by episode_id, step").to_pylist()[:2]
    assert [row["action"] for row in rows] == ["AB", "CD"]
    assert [row["policy"] for row in rows] == ["tiny", "tiny"]
    if engine.kind in ("vllm", "sglang"):
        # The engine goes on where its answer ended, so the two turns are one sequence.
        sequences = lake.sql("select loss_mask from talks.sequences").to_pylist()
        assert [one["loss_mask"] for one in sequences] == [MASK] * 2
        assert rows[1]["policy_version"] == (7 if engine.kind == "sglang" else None)
    else:
        assert [row["action_tokens"] for row in rows] == [None, None]
