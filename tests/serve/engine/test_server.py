"""The engine with a real model, called by OpenAI's client."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
from starlette.testclient import TestClient

from replaylake.serve.engine.server import EngineConfig, create_engine
from replaylake.serve.safety.limits import Safety

pytestmark = pytest.mark.slow
QUESTION = [{"role": "user", "content": "hé?"}]


@pytest.fixture(scope="module")
def model(byte_model):
    from replaylake.offline.language.served_model import ServedModel

    return ServedModel(byte_model)


@contextmanager
def client_of(model, **safety):
    config = EngineConfig("agent", 3, safety=Safety(**safety))
    with TestClient(create_engine(config, model), base_url="http://localhost") as client:
        yield client


@pytest.fixture(scope="module")
def client(model):
    with client_of(model) as one:
        yield one


def chat(client, **fields):
    body = {"messages": QUESTION, "max_tokens": 12, "seed": 5, **fields}
    return client.post("/v1/chat/completions", json=body)


def events_of(response):
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_an_answer_has_the_ids_and_log_probs_of_what_was_sampled(client, model):
    import torch

    body = chat(client, return_token_ids=True, logprobs=True, temperature=0.7).json()
    (choice,) = body["choices"]
    assert (body["model"], body["metadata"]) == ("agent", {"weight_version": "3"})
    prompt = "<user>hé?<end><assistant>"
    assert model.decode(body["prompt_token_ids"], keeps_special=True) == prompt
    ids = choice["token_ids"]
    assert model.decode(ids) == choice["message"]["content"]
    assert len(ids) == 12 or ids[-1] in model.stop_ids
    assert choice["finish_reason"] == ("stop" if ids[-1] in model.stop_ids else "length")
    entries = choice["logprobs"]["content"]
    whole = torch.tensor([[*body["prompt_token_ids"], *ids]])
    with torch.no_grad():
        logits = model._model(whole).logits[0] / 0.7
    expected = logits.log_softmax(-1)[len(body["prompt_token_ids"]) - 1 : -1]
    expected = expected.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
    assert [entry["logprob"] for entry in entries] == pytest.approx(expected, abs=1e-4)
    texts = [model.decode([one], keeps_special=True) for one in ids]
    assert [entry["token"] for entry in entries] == texts
    assert body["usage"]["completion_tokens"] == len(ids)


def test_a_stream_has_the_parts_of_the_same_answer(client):
    fields = {"return_token_ids": True, "logprobs": True, "n": 2}
    whole = chat(client, **fields).json()
    options = {"include_usage": True}
    events = events_of(chat(client, **fields, stream=True, stream_options=options))
    assert events[-1]["usage"] == whole["usage"]
    assert [event["metadata"] for event in events if "metadata" in event] == [whole["metadata"]]
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    for index, choice in enumerate(whole["choices"]):
        parts = [one for event in events for one in event["choices"] if one["index"] == index]
        assert parts[0]["delta"]["role"] == "assistant"
        text = "".join(part["delta"].get("content", "") for part in parts)
        assert text == choice["message"]["content"]
        assert [one for part in parts for one in part.get("token_ids", ())] == choice["token_ids"]
        shown = [one for part in parts for one in (part["logprobs"] or {}).get("content", ())]
        assert shown == choice["logprobs"]["content"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
    contents = [choice["message"]["content"] for choice in whole["choices"]]
    assert contents[0] != contents[1]


def test_completions_take_texts_and_ids(client, model):
    ids = model.encode_text("ab")
    fields = {"max_tokens": 6, "seed": 1, "temperature": 0, "logprobs": 1}
    fields["return_token_ids"] = True
    body = client.post("/v1/completions", json={"prompt": ["ab", ids], "n": 2, **fields}).json()
    assert len(body["choices"]) == 4
    first = body["choices"][0]
    assert first["prompt_token_ids"] == ids
    assert {choice["text"] for choice in body["choices"]} == {first["text"]}  # greedy
    assert first["logprobs"]["token_logprobs"] == [0.0] * 6
    assert first["logprobs"]["text_offset"][:2] == [0, len(first["logprobs"]["tokens"][0])]
    assert body["usage"]["prompt_tokens"] == 4
    streamed = events_of(
        client.post("/v1/completions", json={"prompt": "ab", "stream": True, **fields})
    )
    assert "".join(one["choices"][0]["text"] for one in streamed) == first["text"]
    assert streamed[0]["choices"][0]["prompt_token_ids"] == ids


def test_top_p_and_top_k_limit_what_is_sampled(client, model):
    greedy = chat(client, temperature=0).json()["choices"][0]["message"]["content"]
    for fields in ({"top_k": 1}, {"top_p": 1e-6}):
        body = chat(client, **fields, seed=9, logprobs=True).json()["choices"][0]
        assert body["message"]["content"] == greedy
        assert [one["logprob"] for one in body["logprobs"]["content"]] == [0.0] * 12


def test_defaults_are_those_of_the_model(kit, tmp_path):
    from replaylake.offline.language.served_model import ServedModel

    path = kit.save_byte_model(tmp_path / "m", temperature=0.25, top_k=2, max_new_tokens=7)
    model = ServedModel(path)
    with client_of(model) as client:
        answer = client.post("/v1/chat/completions", json={"messages": QUESTION, "seed": 3}).json()
        same = chat(client, temperature=0.25, top_k=2, top_p=1, max_tokens=7, seed=3).json()
        assert answer["usage"]["completion_tokens"] <= 7
        assert answer["choices"] == same["choices"]


def test_defaults_that_are_not_applied_are_in_the_log(model, caplog):
    class Penalized:
        spec = replace(model.spec, generation={"repetition_penalty": 1.3, "min_p": 0, "top_k": 3})

    with client_of(Penalized()):
        (record,) = [one for one in caplog.records if "not applied" in one.message]
    assert record.message.endswith("not applied: repetition_penalty 1.3")


def test_a_model_that_fails_is_an_error_and_not_an_answer(model, monkeypatch):
    def fail(*arguments, **options):
        yield from ()
        raise RuntimeError("no memory")

    monkeypatch.setattr(model, "iter_tokens", fail)
    with client_of(model) as client:
        answer = chat(client)
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "engine: RuntimeError: no memory"
        events = chat(client, stream=True).text.split("\n\n")
        assert "no memory" in events[-2]
        assert "[DONE]" not in "".join(events)


@pytest.mark.parametrize(
    ("fields", "status", "text"),
    [
        ({"messages": []}, 400, "messages: found [], expected a list of one message"),
        ({"messages": [{"content": "x"}]}, 400, "objects with a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "no text"),
        ({"model": "other"}, 404, "model: found 'other', expected agent or agent:3"),
        ({"max_tokens": 0}, 400, "max_tokens: found 0"),
        ({"max_tokens": 65_536}, 400, "expected at most 65,5"),
        ({"temperature": -1}, 400, "temperature: found -1, expected a number 0 or more"),
        ({"temperature": "hot"}, 400, "temperature: found 'hot'"),
        ({"top_p": 0}, 400, "top_p: found 0"),
        ({"n": 129}, 400, "n: found 129"),
        ({"seed": 0.5}, 400, "seed: found 0.5"),
        ({"stop": [""]}, 400, "stop: found"),
        ({"stream": "yes"}, 400, "stream: found 'yes'"),
        ({"top_logprobs": 5}, 400, "top_logprobs: found 5, expected 0, the only value here"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty: found 0.5"),
        ({"min_p": 0.1}, 400, "min_p: found an unknown field"),
    ],
)
def test_what_cannot_be_sampled_is_refused_by_name(client, fields, status, text):
    answer = chat(client, **fields)
    assert answer.status_code == status
    assert text in answer.json()["error"]["message"]


def test_bodies_hosts_and_tokens_are_checked(client, model, tmp_path):
    assert client.post("/v1/completions", content=b"{").status_code == 400
    assert client.post("/v1/completions", content=b"[]").status_code == 400
    other = client.get("/v1/models", headers={"host": "example.com"})
    assert other.status_code == 421
    assert client.get("/health", headers={"host": "example.com"}).status_code == 200
    (tmp_path / "keys").write_text("secret-of-sixteen-letters\n")
    with client_of(model, act_token_file=tmp_path / "keys", body_bytes=100) as guarded:
        assert guarded.get("/v1/models").status_code == 401
        key = {"authorization": "Bearer secret-of-sixteen-letters"}
        models = guarded.get("/v1/models", headers=key).json()["data"]
        assert [(one["id"], one["owned_by"]) for one in models] == [("agent", "replaylake")]
        large = guarded.post("/v1/completions", content=b"x" * 101, headers=key)
        assert large.status_code == 413
