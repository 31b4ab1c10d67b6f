"""The document turned into requests, good and bad, against a real server: no 500, no surprises."""

import http.client
import io

import msgpack
import numpy as np
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from replaylake.datastore.lake.lake import open_lake
from replaylake.serve.client import Client

pytestmark = pytest.mark.slow

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
OPERATIONS = [
    ("POST", "/act", 80),
    ("POST", "/feedback", 60),
    ("POST", "/episodes", 40),
    ("POST", "/decisions", 40),
    ("GET", "/policy", 5),
    ("GET", "/livez", 5),
    ("GET", "/readyz", 5),
    ("GET", "/metrics", 5),
    ("GET", "/docs.json", 5),
    ("POST", "/v2/models/{name}/infer", 60),
    ("POST", "/v2/models/{name}/versions/{version}/infer", 10),
    ("GET", "/v2", 5),
    ("GET", "/v2/health/live", 5),
    ("GET", "/v2/health/ready", 5),
    ("GET", "/v2/models/{name}", 5),
    ("GET", "/v2/models/{name}/ready", 5),
    ("GET", "/v2/models/{name}/versions/{version}", 5),
    ("GET", "/v2/models/{name}/versions/{version}/ready", 5),
]


@schemathesis.serializer("application/msgpack")
def _as_msgpack(context, value):
    try:
        return msgpack.packb(value)
    except (OverflowError, ValueError, TypeError):
        return b"\xc1"  # what msgpack never uses


@schemathesis.serializer("application/x-npy")
def _as_npy(context, value):
    if isinstance(value, bytes):
        return value
    return repr(value).encode("utf-8", "replace")


@pytest.fixture(scope="module")
def server(kit, package, tmp_path_factory):
    lake = open_lake(tmp_path_factory.mktemp("fuzz") / "lake", create=True)
    running = kit.start_server(
        package=package, policy="p", version=1, lake=lake.path, log_to="d", explore="epsilon=0.1"
    )
    yield running
    running.stop()


@pytest.fixture(scope="module")
def api(server):
    return schemathesis.openapi.from_url(f"{server.url}/docs.json")


@pytest.mark.parametrize(("method", "path", "num"), OPERATIONS, ids=lambda value: str(value))
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_requests_made_of_the_document(api, server, method, path, num, mode):
    operation = api[path][method]
    generation = schemathesis.GenerationMode(mode)

    @settings(
        max_examples=num,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=operation.as_strategy(generation_mode=generation))
    def fuzz(case):
        case.call_and_validate(base_url=server.url, checks=CHECKS, timeout=60)

    if mode == "negative" and method == "GET":
        return  # there is nothing of it that could be wrong
    fuzz()


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(
    array=st.sampled_from(["<f4", "<f8", "<i8", "|u1", "|b1", "<f2"]).flatmap(
        lambda dtype: st.lists(st.integers(0, 5), max_size=3).map(
            lambda shape: np.zeros(shape, dtype)
        )
    ),
    cut=st.integers(0, 200),
    query=st.sampled_from(["", "?q_values=true", "?seed=3", "?seed=x", "?step=1&step=2", "?%ff=1"]),
)
def test_arrays_whole_and_cut(server, api, array, cut, query):
    file = io.BytesIO()
    np.save(file, array)
    body = file.getvalue()[: None if cut > 100 else cut]
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    connection.request("POST", f"/act{query}", body, {"Content-Type": "application/x-npy"})
    status = connection.getresponse().status
    connection.close()
    assert status in (200, 413, 422)


def test_it_still_answers(server):
    with Client(server.url) as client:
        assert client.ready()
        assert client.act([0, 0, 0, 0]).action in (0, 1)
