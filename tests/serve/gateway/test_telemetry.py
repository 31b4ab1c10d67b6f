"""A gateway's spans and access log, with an engine and an OTLP receiver over sockets."""

import json

import httpx
import pytest

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
MESSAGES = [{"role": "user", "content": "secret word"}]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_a_span_that_the_engine_continues_and_a_line(
    gateways, engines, tmp_path, otlp_receiver, stream
):
    engine, log = engines("vllm"), tmp_path / "access.log"
    gateway = gateways(
        engine.url,
        tmp_path / "lake",
        "--access-log",
        str(log),
        environment=otlp_receiver.environment,
    )
    body = {"model": "m", "messages": MESSAGES, "stream": stream}
    headers = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01", "x-request-id": "mine-1"}
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200

    about, span, attributes = otlp_receiver.wait_for_span("POST /v1/chat/completions")
    assert about["service.name"] == "replaylake-gateway"
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, "00f067aa0ba902b7")
    assert attributes["replaylake.dataset"] == "agents"
    assert attributes["replaylake.call.status"] == "completed"
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.model"] == "m"
    (step,) = gateway.steps("completion_id", num=1)
    assert attributes["gen_ai.response.id"] == step["completion_id"]
    assert attributes["gen_ai.usage.output_tokens"] == len("SECRET WORD") + 1
    assert attributes["http.response.body.size"] == len(answer.content)
    (passed,) = engine.requests()
    assert passed["headers"]["traceparent"] == f"00-{TRACE}-{span.span_id.hex()}-01"
    otlp_receiver.wait_for_metric("replaylake_gateway_calls")
    gateway.stop()
    (line,) = map(json.loads, log.read_text().splitlines())
    assert line["route"] == "/v1/chat/completions"
    assert (line["method"], line["status"], line["client"]) == ("POST", 200, "127.0.0.1")
    assert (line["request_id"], line["trace_id"]) == ("mine-1", TRACE)
    assert line["bytes_out"] == len(answer.content)
    assert line["bytes_in"] == len(answer.request.content)
    assert "secret" not in log.read_text()


def test_paths_of_others_and_refusals_are_lines_without_their_path(gateways, engines, tmp_path):
    log = tmp_path / "access.log"
    gateway = gateways(engines("vllm").url, tmp_path / "lake", "--access-log", str(log))
    httpx.get(f"{gateway.url}/v1/models/some-name")
    httpx.get(f"{gateway.url}/livez", headers={"x-request-id": "x" * 200})
    httpx.post(f"{gateway.url}/v1/completions", headers={"host": "evil.example"})
    gateway.stop()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(one["route"], one["status"]) for one in lines] == [
        ("other", 404),
        ("/livez", 200),
        ("/v1/completions", 421),
    ]
    assert lines[1]["request_id"] == "x" * 128
    assert lines[0]["trace_id"] is None
