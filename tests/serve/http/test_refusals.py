"""Refusals on a socket: the same error body, counted, under uvicorn and under BentoML."""

import json
import re
import socket
import struct

import httpx
import msgpack
import pytest

from replaylake.datastore.lake.lake import open_lake
from replaylake.serve.client import Client
from replaylake.serve.safety.limits import Safety

_DEADLINE_S = 60.0
_HUGE = b"\xcf" + struct.pack(">Q", 2**64 - 1)
_NAN = struct.pack(">d", float("nan"))


@pytest.fixture(scope="module", params=["uvicorn", "bentoml"])
def url(request, package, tmp_path_factory, kit):
    lake = open_lake(tmp_path_factory.mktemp("refusals") / "lake", create=True)
    server = kit.start_server(
        package=package,
        policy="p",
        version=1,
        lake=lake.path,
        log_to="d",
        server=request.param,
        safety=Safety(deadline_s=_DEADLINE_S),
    )
    yield server.url
    server.stop()


def metric(url, name, **labels):
    """Return the sum of a family's samples that have these labels."""
    total = 0.0
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        found = re.fullmatch(rf"{name}{{(.*)}} (\S+)", line)
        if found and all(f'{key}="{value}"' in found[1] for key, value in labels.items()):
            total += float(found[2])
    return total


def check_error(answer, status):
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()["error"]) - {"found", "expected"} == {"field", "message"}


def post_json(url, route, text):
    headers = {"content-type": "application/json"}
    return httpx.post(f"{url}{route}", content=text, headers=headers, timeout=_DEADLINE_S)


_ODD = {
    "a key of bytes": b"\x81\xc4\x01a\x01",
    "a nested key of bytes": msgpack.packb({"observation": {b"a": 1}}),
    "a key of bytes in a list": msgpack.packb({"feedback": [{b"reward": 1}]}),
    "a key of bytes in an episode": msgpack.packb({"episodes": [{b"rewards": [1]}]}),
    "a number for a key": b"\x81\x01\x01",
    "a map for a key": b"\x81\x80\x01",
    "a key twice": b"\x82\xa1a\x01\xa1a\x02",
    "a timestamp": msgpack.packb({"observation": [msgpack.Timestamp(1), 1, 2, 3]}),
    "a timestamp for a reward": msgpack.packb({"request_id": "r", "reward": msgpack.Timestamp(1)}),
    "a timestamp for a body": msgpack.packb(msgpack.Timestamp(1)),
    "an extension": b"\x81\xa1a\xd4\x05\x01",
    "a timestamp of two bytes": b"\x81\xa1a\xd5\xff\x01\x01",
    "an integer beyond int64": b"\x82\xabobservation\x94\x01\x02\x03\x04\xa4step" + _HUGE,
    "a seed beyond int64": b"\x82\xabobservation\x94\x01\x02\x03\x04\xa4seed" + _HUGE,
    "NaN": b"\x81\xabobservation\x94\x01\x02\x03\xcb" + _NAN,
    "NaN for a reward": b"\x82\xaarequest_id\xa1r\xa6reward\xcb" + _NAN,
    "lists 900 deep": b"\x81\xabobservation" + b"\x91" * 900 + b"\x01",
    "maps 900 deep": b"\x81\xabobservation" + b"\x81\xa1a" * 900 + b"\x01",
    "half a surrogate": b"\x81\xaarequest_id\xa3\xed\xa0\x80",
    "bytes for a name": msgpack.packb({"request_id": b"r", "reward": 1.0}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", _ODD)
@pytest.mark.parametrize("route", ["/act", "/feedback", "/episodes"])
def test_odd_msgpack_is_a_422_that_is_counted(url, name, route):
    before = metric(url, "replaylake_requests_total", route=route, status="422")
    headers = {"content-type": "application/msgpack"}
    answer = httpx.post(f"{url}{route}", content=_ODD[name], headers=headers, timeout=_DEADLINE_S)
    check_error(answer, 422)
    assert metric(url, "replaylake_requests_total", route=route, status="422") == before + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        b'{"observation": [1e400, 1, 2, 3]}',
        b'{"observation": [1, 2, 3, 4], "step": 18446744073709551615}',
        b'{"observation": [1, 2, 3, 4], "step": 99999999999999999999999}',
        b'{"observation": [1, 2, 3, 4], "seed": 9223372036854775808}',
        b'{"observation": ' + b"[" * 900 + b"1" + b"]" * 900 + b"}",
        b'{"observation": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}",
        b'{"observation": [NaN, 1, 2, 3]}',
        b'{"observation": [1, 2, 3, 4], "\\udc80": 1}',
        b'{"": 1}',
    ],
)
def test_odd_json_is_a_422(url, body):
    headers = {"content-type": "application/json"}
    for route in ("/act", "/feedback", "/episodes"):
        answer = httpx.post(f"{url}{route}", content=body, headers=headers, timeout=_DEADLINE_S)
        check_error(answer, 422)


@pytest.mark.slow
def test_rewards_that_may_not_be_summed_are_refused(url):
    for number in ("1e308", "-1e308", "1.01e100", "-1e101", "1" + "0" * 300):
        report = f'{{"request_id": "r", "reward": {number}, "mode": "sum", "feedback_id": "f"}}'
        answer = post_json(url, "/feedback", report)
        check_error(answer, 422)
        assert answer.json()["error"]["field"] == "reward"
        assert "1e+100" in answer.json()["error"]["expected"]
        episode = (
            f'{{"episodes": [{{"episode_id": "x", "observations": [[0, 0, 0, 0], [0, 0, 0, 0]], '
            f'"actions": [0, 1], "rewards": [1, {number}]}}]}}'
        )
        answer = post_json(url, "/episodes", episode)
        check_error(answer, 422)
        assert answer.json()["error"]["field"] == "episodes[0].rewards[1]"
    for number in ("1e100", "-1e100"):
        report = f'{{"request_id": "r", "reward": {number}}}'
        assert post_json(url, "/feedback", report).status_code == 202


@pytest.mark.slow
def test_nothing_of_it_was_a_500(url):
    for route in ("/act", "/feedback", "/episodes"):
        assert metric(url, "replaylake_requests_total", route=route, status="500") == 0


_SITES = {"host": (400, 421), "origin": (403,), "content-type": (415,)}


def exchange(url, head, body=b""):
    """Send a head as it is written; return the status and the error's field, if there is one."""
    name, _, port = url.removeprefix("http://").rpartition(":")
    with socket.create_connection((name, int(port)), timeout=_DEADLINE_S) as connection:
        length = f"content-length: {len(body)}\r\n" if body else ""
        connection.sendall(f"{head}connection: close\r\n{length}\r\n".encode() + body)
        came = b"".join(iter(lambda: connection.recv(65536), b""))
    status = int(came[9:12])
    if status < 400:
        return status, None
    error = json.loads(came.partition(b"\r\n\r\n")[2])["error"]
    assert set(error) - {"found", "expected"} == {"field", "message"}
    return status, error["field"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("text/plain", b'{"observation": [1, 2, 3, 4]}'),
        ("text/plain;application/json", b'{"observation": [1, 2, 3, 4]}'),
        ("application/x-www-form-urlencoded", b'{"observation": [1, 2, 3, 4]}'),
        ("multipart/form-data; boundary=x", b'{"observation": [1, 2, 3, 4]}'),
        ("", b'{"observation": [1, 2, 3, 4]}'),
        (None, b'{"observation": [1, 2, 3, 4]}'),
    ],
)
@pytest.mark.parametrize("route", ["/act", "/feedback", "/episodes"])
def test_what_any_page_may_send_is_415(url, kind, body, route):
    before = metric(url, "replaylake_refused_headers_total", header="content-type")
    given = "" if kind is None else f"content-type: {kind}\r\n"
    head = f"POST {route} HTTP/1.1\r\nhost: localhost\r\n{given}"
    assert exchange(url, head, body) == (415, "content-type")
    assert metric(url, "replaylake_refused_headers_total", header="content-type") == before + 1


@pytest.mark.parametrize("encoding", ["gzip", "br, gzip", "x"])
@pytest.mark.parametrize("route", ["/act", "/feedback", "/episodes"])
def test_a_compressed_body_is_415(url, encoding, route):
    headers = {"content-type": "application/json", "content-encoding": encoding}
    answer = httpx.post(f"{url}{route}", content=b"\x1f\x8b", headers=headers)
    check_error(answer, 415)
    assert answer.json()["error"]["field"] == "content-encoding"
    assert answer.headers["accept-encoding"] == "identity"


def test_a_body_that_says_it_is_not_compressed_is_taken(url):
    headers = {"content-type": "application/json", "content-encoding": "identity"}
    content = b'{"observation": [1, 2, 3, 4]}'
    assert httpx.post(f"{url}/act", content=content, headers=headers).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("headers", "refused"),
    [
        (["host: evil.example"], (421, "host")),
        (["host: 10.9.8.7:3000"], (421, "host")),
        (["host: localhost", "host: evil.example"], (400, "host")),
        (["host:"], (400, "host")),
        ([], (400, "host")),
        (["host: localhost", "origin: http://evil.example"], (403, "origin")),
        (["host: localhost", "origin: null"], (403, "origin")),
        (["host: localhost", "origin: http://localhost:8080"], None),
        (["host: localhost:9"], None),
        (["host: 127.0.0.1", "origin: http://127.0.0.1:3000"], None),
        (["host: [::1]:3000"], None),
    ],
)
def test_hosts_and_origins(url, headers, refused):
    lines = "".join(f"{line}\r\n" for line in headers)
    body = b'{"observation": [1, 2, 3, 4]}'
    posted = f"POST /act HTTP/1.1\r\n{lines}content-type: application/json\r\n"
    before = {name: metric(url, "replaylake_refused_headers_total", header=name) for name in _SITES}
    if refused is None:
        assert exchange(url, posted, body) == (200, None)
        return
    assert exchange(url, posted, body) == refused
    for path in ("/policy", "/docs.json", "/metrics", "/nothing"):
        assert exchange(url, f"GET {path} HTTP/1.1\r\n{lines}") == refused
    assert exchange(url, f"OPTIONS /act HTTP/1.1\r\n{lines}") == refused
    name = refused[1]
    after = metric(url, "replaylake_refused_headers_total", header=name)
    assert after == before[name] + 6


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/livez", "/readyz"])
def test_probes_come_by_any_host(url, path):
    for headers in ("host: 10.9.8.7:3000\r\n", "host: pod.example\r\norigin: null\r\n", ""):
        assert exchange(url, f"GET {path} HTTP/1.1\r\n{headers}") == (200, None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["uvicorn", "bentoml"])
def test_a_server_answers_to_what_it_was_told(kind, package, kit):
    server = kit.start_server(
        package=package,
        policy="p",
        version=1,
        host="0.0.0.0",
        server=kind,
        safety=Safety(insecure=True, allowed_hosts=("policy.example.com", "policy")),
    )
    try:
        url = f"http://127.0.0.1:{server.url.rpartition(':')[2]}"
        head = "GET /policy HTTP/1.1\r\nhost: {}\r\n"
        for host in ("policy.example.com", "POLICY:80", "localhost", "127.0.0.1:3000"):
            assert exchange(url, head.format(host)) == (200, None)
        assert exchange(url, head.format("other.example.com")) == (421, "host")
        # The address that the socket is reached at, as a scraper or a pod's neighbor has it.
        own = _own_address()
        if own is not None:
            assert exchange(f"http://{own}:{url.rpartition(':')[2]}", head.format(own)) == (
                200,
                None,
            )
            assert exchange(url, head.format(own)) == (421, "host")
        with Client(url) as client:
            assert client.act([1.0, 2.0, 3.0, 4.0]).action in (0, 1)
            assert client.ready()
    finally:
        server.stop()


def _own_address():
    """Return an address of this machine that is not loopback; None if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return None
        return probe.getsockname()[0]


def test_browsers_get_pages_under_both_servers(url):
    for path in ("/", "/docs"):
        answer = httpx.get(f"{url}{path}", headers={"accept": "text/html"})
        assert answer.status_code == 200
        assert "p:1" in answer.text
        assert "script-src 'self'" in answer.headers["content-security-policy"]
        check_error(httpx.get(f"{url}{path}"), 404)
    script = httpx.get(f"{url}/static/server.js")
    assert script.headers["content-type"].startswith("text/javascript")
