"""Refusals on a socket: the same error body, counted, under uvicorn and under BentoML."""

import re
import struct

import httpx
import msgpack
import pytest

from replaylake.datastore.lake import open_lake
from replaylake.serve.safety.limits import Safety

_DEADLINE_S = 5.0
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
    assert set(answer.json()["error"]) == {"field", "found", "expected"}


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
