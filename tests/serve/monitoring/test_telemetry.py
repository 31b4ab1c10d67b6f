"""Traces and metrics reach a real OTLP receiver over a socket, and nothing is loaded when off."""

import json
import logging
import subprocess
import sys
import threading
import time

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from replaylake.datastore.feedback.decision_id import DecisionSigner
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.version import VERSION
from replaylake.serve.app import create_app
from replaylake.serve.monitoring.otlp_export import to_otlp_metric
from replaylake.serve.monitoring.telemetry import METRICS, TRACES, find_signals, open_telemetry
from replaylake.serve.recording.decision_log import DecisionLog

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
OBSERVATION = [0.0, 0.5, -0.25, 1.0]


@pytest.fixture
def reporting(app_client, kit, policy, tmp_path, otlp_receiver, monkeypatch):
    """An app in process that logs to the dataset `d` and reports to a receiver."""
    for name, value in otlp_receiver.environment.items():
        monkeypatch.setenv(name, value)
    lake = open_lake(tmp_path / "lake", create=True)
    signer = DecisionSigner(lake.signing_key(), "d")
    log = DecisionLog(lake.dataset("d"), policy.spec, signer.worker, window_s=60)
    serving = kit.make_serving(policy, log=log, signer=signer)
    with app_client(create_app(lambda: serving)) as client:
        client.serving = serving
        yield client


def test_a_request_is_a_span_of_the_clients_trace(reporting, otlp_receiver):
    headers = {
        "traceparent": TRACEPARENT,
        "user-agent": "probe/1",
        "authorization": "Bearer s3cret",
    }
    answer = reporting.post(
        "/act?seed=3", json={"observation": OBSERVATION}, headers=headers
    ).json()

    about, span, attributes = otlp_receiver.wait_for_span("POST /act")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert span.kind == span.SPAN_KIND_SERVER
    assert attributes["replaylake.decision.ids"] == [answer["decision_id"]]
    assert attributes["replaylake.policy.versions"] == ["p:2"]
    assert attributes["replaylake.dataset"] == "d"
    assert attributes["http.request.method"] == "POST"
    assert attributes["http.route"] == attributes["url.path"] == "/act"
    assert attributes["http.response.status_code"] == 200
    assert attributes["user_agent.original"] == "probe/1"
    assert "s3cret" not in str(span)
    assert 0 < span.end_time_unix_nano - span.start_time_unix_nano < 60e9
    assert abs(span.start_time_unix_nano / 1e9 - time.time()) < 60
    assert about["service.name"] == "replaylake-serve"
    assert about["service.version"] == VERSION
    assert about["service.instance.id"] == reporting.serving.worker


def test_spans_of_batches_of_feedback_and_of_inference_name_their_decisions(
    reporting, otlp_receiver
):
    answer = reporting.post("/act", json={"observations": [OBSERVATION] * 200}).json()
    ids = answer["decision_ids"]
    _, _, attributes = otlp_receiver.wait_for_span("POST /act")
    assert attributes["replaylake.decision.ids"] == ids[:128]
    assert attributes["replaylake.decision.count"] == 200

    reports = [{"decision_id": one, "reward": 1.0} for one in ids[:2]]
    reporting.post("/feedback", json={"feedback": reports})
    _, _, attributes = otlp_receiver.wait_for_span("POST /feedback")
    assert attributes["replaylake.decision.ids"] == ids[:2]
    assert attributes["replaylake.policy.versions"] == ["p:2"]

    tensor = {"name": "observation", "shape": [1, 4], "datatype": "FP32", "data": OBSERVATION}
    answer = reporting.post("/v2/models/p/infer", json={"inputs": [tensor]}).json()
    _, _, attributes = otlp_receiver.wait_for_span("POST /v2/models/{name}/infer")
    assert attributes["replaylake.decision.ids"] == [answer["parameters"]["decision_id"]]
    assert attributes["url.path"] == "/v2/models/p/infer"


def test_errors_and_unknown_paths_are_spans_and_probes_are_none(reporting, otlp_receiver):
    reporting.get("/livez")
    reporting.post("/act", json={"observation": "x"})
    reporting.get("/secret-name")
    _, span, attributes = otlp_receiver.wait_for_span("GET")
    assert attributes["http.response.status_code"] == 404
    assert "http.route" not in attributes
    _, span, attributes = otlp_receiver.wait_for_span("POST /act")
    assert attributes["http.response.status_code"] == 422
    # A request at fault is no error of the server's.
    assert span.status.code == span.status.STATUS_CODE_UNSET
    assert {span.name for _, span in otlp_receiver.spans} == {"GET", "POST /act"}


def test_a_fault_of_the_server_is_an_error(reporting, otlp_receiver, monkeypatch):
    monkeypatch.setattr(reporting.serving.log, "write_decisions", lambda decided: 1 / 0)
    assert reporting.post("/act", json={"observation": OBSERVATION}).status_code == 500
    _, span, attributes = otlp_receiver.wait_for_span("POST /act")
    assert span.status.code == span.status.STATUS_CODE_ERROR
    assert attributes["error.type"] == "500"


def test_metrics_are_those_of_the_page_and_the_durations_of_requests(kit, reporting, otlp_receiver):
    for _ in range(3):
        reporting.post("/act", json={"observation": OBSERVATION})
    reporting.get("/livez")

    def has_three(about, metric):
        points = metric.sum.data_points
        return sum(p.as_double for p in points if read(p)["route"] == "/act") == 3

    def read(point):
        return {pair.key: pair.value.string_value for pair in point.attributes}

    _, metric = otlp_receiver.wait_for_metric("replaylake_requests", has_three)
    assert metric.sum.is_monotonic
    assert metric.sum.aggregation_temporality == 2  # cumulative

    def counts(about, metric):
        return any(
            point.count == 3 and read(point)["http.route"] == "/act"
            for point in metric.histogram.data_points
        )

    _, metric = otlp_receiver.wait_for_metric("http.server.request.duration", counts)
    assert metric.unit == "s"
    otlp_receiver.wait_for_metric(
        "http.server.active_requests",
        lambda about, metric: metric.sum.data_points[0].as_int == 0,
    )
    pages = text_string_to_metric_families(reporting.get("/metrics").text)
    shown = {one.name for one in pages if one.samples}
    kit.wait_until(lambda: shown <= {metric.name for _, metric in otlp_receiver.metrics})


def test_a_metric_keeps_its_numbers():
    registry = CollectorRegistry()
    counter = Counter("replaylake_c", "c", ("kind",), registry=registry)
    counter.labels("a").inc(3)
    Gauge("replaylake_g", "g", registry=registry).set(0.5)
    histogram = Histogram("replaylake_h_seconds", "h", buckets=(1, 2), registry=registry)
    for value in (0.5, 1.5, 1.75, 9):
        histogram.observe(value)
    Counter("replaylake_empty", "none", ("kind",), registry=registry)
    found = {
        metric.name: metric for one in registry.collect() if (metric := to_otlp_metric(one, 1, 2))
    }
    assert found.keys() == {"replaylake_c", "replaylake_g", "replaylake_h_seconds"}
    (point,) = found["replaylake_c"].data.data_points
    assert (point.value, point.attributes) == (3, {"kind": "a"})
    assert (point.start_time_unix_nano, point.time_unix_nano) == (1, 2)
    (point,) = found["replaylake_g"].data.data_points
    assert point.value == 0.5
    (point,) = found["replaylake_h_seconds"].data.data_points
    assert (point.count, point.sum, point.bucket_counts) == (4, 12.75, [1, 2, 1])
    assert list(point.explicit_bounds) == [1, 2]
    assert found["replaylake_h_seconds"].unit == "s"


@pytest.mark.parametrize(
    ("environment", "signals"),
    [
        ({}, set()),
        ({"OTEL_SERVICE_NAME": "x", "OTEL_EXPORTER_OTLP_ENDPOINT": ""}, set()),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h"}, {TRACES, METRICS}),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://h/v1/traces"}, {TRACES}),
        ({"OTEL_METRICS_EXPORTER": "otlp"}, {METRICS}),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h", "OTEL_METRICS_EXPORTER": "none"}, {TRACES}),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h", "OTEL_SDK_DISABLED": "TRUE"}, set()),
        (
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://h",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            },
            {TRACES},
        ),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, set()),
    ],
)
def test_the_standard_variables_turn_signals_on_and_off(environment, signals):
    assert find_signals(environment) == signals


def test_what_cannot_be_reported_is_a_warning_and_no_failure(caplog, monkeypatch):
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://h",
        "OTEL_TRACES_EXPORTER": "console",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
    }
    assert open_telemetry("s", "i", list, environment) is None
    assert "OTEL_TRACES_EXPORTER: found 'console', expected otlp or none" in caplog.text
    assert "OTEL_EXPORTER_OTLP_PROTOCOL: found 'grpc', expected http/protobuf" in caplog.text
    monkeypatch.setattr("replaylake.serve.monitoring.telemetry.find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert open_telemetry("s", "i", list, {"OTEL_TRACES_EXPORTER": "otlp"}) is None
    assert "pip install 'replaylake[otel]'" in caplog.text


@pytest.mark.parametrize(
    "variable",
    [
        "OTEL_BSP_SCHEDULE_DELAY=-1",
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE=100000",
        "OTEL_METRIC_EXPORT_INTERVAL=-5",
        "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT=x",
    ],
)
def test_a_variable_that_opentelemetry_refuses_keeps_no_server_from_starting(
    variable, caplog, monkeypatch
):
    name, _, value = variable.partition("=")
    monkeypatch.setenv(name, value)
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", name: value}
    assert open_telemetry("s", "i", list, environment) is None
    assert "no telemetry is reported" in caplog.text


def test_a_server_without_the_variables_does_not_import_opentelemetry():
    code = (
        "import sys, replaylake.serve.app, replaylake.serve.gateway.server;"
        "import replaylake.serve.collecting.collector;"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_the_environment_names_the_resource(otlp_receiver, monkeypatch):
    environment = otlp_receiver.environment | {
        "OTEL_SERVICE_NAME": "ads",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=prod",
        "OTEL_METRICS_EXPORTER": "none",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    telemetry = open_telemetry("replaylake-serve", "w", list, environment)
    scope = {"type": "http", "method": "BREW", "path": "/act", "headers": []}
    span = telemetry.start_span(scope, "/act", time.perf_counter())
    assert len(span.trace_id) == 32
    span.end(200, 0, 0)
    telemetry.close()
    about, _, attributes = otlp_receiver.wait_for_span("_OTHER /act")
    assert about["service.name"] == "ads"
    assert about["deployment.environment.name"] == "prod"
    assert attributes["http.request.method"] == "_OTHER"
    assert not otlp_receiver.metrics


def test_a_receiver_that_does_not_answer_holds_up_no_stop(otlp_receiver, monkeypatch):
    environment = otlp_receiver.environment | {"OTEL_EXPORTER_OTLP_TIMEOUT": "60"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    may_answer = threading.Event()
    monkeypatch.setattr(otlp_receiver, "keep", lambda path, body: may_answer.wait(60))
    telemetry = open_telemetry("s", "i", list, environment)
    scope = {"type": "http", "method": "GET", "path": "/act", "headers": []}
    telemetry.start_span(scope, "/act", time.perf_counter()).end(200, 0, 0)
    telemetry.close(timeout_s=0.05)
    (closing,) = [one for one in threading.enumerate() if one.name == "telemetry-close"]
    assert closing.daemon  # it still tries, and ends with the process
    may_answer.set()
    closing.join()


@pytest.mark.slow
@pytest.mark.parametrize("server", ["bentoml", "uvicorn"])
def test_workers_report_each_its_own_requests(
    kit, package, otlp_receiver, monkeypatch, tmp_path, server
):
    for name, value in otlp_receiver.environment.items():
        monkeypatch.setenv(name, value)
    running = kit.start_server(
        package=package,
        policy="p",
        version=1,
        workers=2,
        server=server,
        safety=kit.Safety(access_log=str(tmp_path / "log")),
    )
    try:
        for _ in range(20):  # each on a connection of its own, which either worker takes
            httpx.post(
                f"{running.url}/act",
                json={"observation": OBSERVATION},
                headers={"traceparent": TRACEPARENT},
            ).raise_for_status()

        def count():
            newest = {}
            for about, metric in otlp_receiver.metrics:
                if metric.name == "http.server.request.duration":
                    newest[about["service.instance.id"]] = sum(
                        point.count
                        for point in metric.histogram.data_points
                        if any(pair.value.string_value == "/act" for pair in point.attributes)
                    )
            return newest

        kit.wait_until(lambda: sum(count().values()) == 20)
        kit.wait_until(lambda: len(otlp_receiver.spans) == 20)

        def count_decisions():
            newest = {}
            for about, metric in otlp_receiver.metrics:
                if metric.name == "replaylake_decisions":
                    points = metric.sum.data_points
                    newest[about["service.instance.id"]] = sum(one.as_double for one in points)
            return sum(newest.values())

        # Read before the durations of the same export: the last of them may come with the next.
        kit.wait_until(lambda: count_decisions() == 20)
        assert {span.trace_id.hex() for _, span in otlp_receiver.spans} == {TRACE}
        kit.wait_until(lambda: len((tmp_path / "log").read_text().splitlines()) >= 20)
        lines = map(json.loads, (tmp_path / "log").read_text().splitlines())
        acts = [line for line in lines if line["route"] == "/act"]
        assert {line["trace_id"] for line in acts} == {TRACE}
        assert {line["client"] for line in acts} == {"127.0.0.1"}
    finally:
        running.stop()
