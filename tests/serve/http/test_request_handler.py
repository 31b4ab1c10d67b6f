"""The door in process: what it refuses before, while and after a body comes, and what it costs."""

import asyncio
import json
import logging
from types import SimpleNamespace

import pytest

from replaylake.datastore.errors import StorageError
from replaylake.serve.http.request_handler import HandlerState, RequestHandler
from replaylake.serve.messages import RequestRefusedError, Response
from replaylake.serve.monitoring import rate_limited_log
from replaylake.serve.monitoring.metrics import Metrics
from replaylake.serve.safety.access_log import AccessLog, read_trace_id
from replaylake.serve.safety.limits import Limits
from replaylake.serve.safety.tokens import Tokens
from replaylake.serve.serving_state import ServingState

ACT, ADMIN = "a" * 32, "z" * 32
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


async def echo(request):
    return Response(200, b"%d" % len(request.body))


def run(coroutine):
    return _RUNNER.run(coroutine)


_RUNNER = asyncio.Runner()  # one event loop for all, as a worker has one


@pytest.fixture(scope="module", autouse=True)
def closed_at_the_end():
    yield
    _RUNNER.close()


class At:
    """A door and what its worker serves; `ask` sends it messages as a server would."""

    def __init__(self, endpoint=echo, route="/act", tokens=(), access_log=None, **limits):
        self.metrics = Metrics()
        serving = ServingState(None, None, limits=Limits(**limits), tokens=Tokens(tuple(tokens)))
        serving.access_log = access_log
        self.keeper = HandlerState(lambda: serving, self.metrics)
        self.door = RequestHandler(route, endpoint, self.keeper)
        self.num_read = 0

    async def ask(self, *pieces, headers=(), method="POST", door=None):
        """Send the pieces of a body; None is a client that says no more, HANG_UP one that goes.

        Returns status, headers and body of the answer, or None.
        """
        left = list(pieces or [b""])
        self.num_read = 0

        async def receive():
            piece = left.pop(0)
            if piece is None:
                await asyncio.sleep(60)
            if callable(piece):
                piece = await piece()
            if piece is HANG_UP:
                return {"type": "http.disconnect"}
            self.num_read += 1
            return {"type": "http.request", "body": piece, "more_body": bool(left)}

        sent = []

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http",
            "method": method,
            "path": "/act",
            "query_string": b"",
            "headers": [
                (name.encode(), value.encode())
                for name, value in (("host", "localhost:3000"), *headers)
            ],
        }
        await (door or self.door)(scope, receive, send)
        if not sent:
            return None
        start, end = sent
        return start["status"], dict(start["headers"]), end["body"]

    def run(self, *pieces, **options):
        answer = run(self.ask(*pieces, **options))
        assert not self.keeper.num_active
        assert not self.keeper.buffered_bytes
        return answer


HANG_UP = object()


def refused(answer, status, field):
    assert answer[0] == status, answer
    error = json.loads(answer[2])["error"]
    assert error["field"] == field
    assert set(error) - {"found", "expected"} == {"field", "message"}
    return answer[1]


def message(answer):
    return json.loads(answer[2])["error"]["message"]


def test_a_body_arrives_whole_in_one_piece_or_many():
    at = At()
    assert at.run(b"12345")[::2] == (200, b"5")
    assert at.run(b"123", b"", b"45", b"")[::2] == (200, b"5")


def test_a_declared_size_above_the_limit_is_refused_unread():
    at = At(body_bytes=10)
    refused(at.run(b"x" * 11, headers=[("content-length", "11")]), 413, "body")
    assert at.num_read == 0
    assert at.run(b"x" * 10, headers=[("content-length", "10")])[0] == 200


def test_an_undeclared_size_is_refused_as_soon_as_it_is_too_large():
    at = At(body_bytes=10)
    refused(at.run(b"x" * 11), 413, "body")
    refused(at.run(*[b"xxx"] * 100), 413, "body")
    assert at.num_read == 4


def test_bodies_that_come_in_pieces_share_a_budget():
    at = At(body_bytes=100, buffered_bytes=150)

    async def two():
        release = asyncio.Event()

        async def last():
            await release.wait()
            return b""

        asked = [asyncio.create_task(at.ask(b"x" * 90, last)) for _ in range(2)]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        release.set()
        return await asyncio.gather(*asked)

    one, other = run(two())
    assert one[0] == 200
    assert b"retry-after" in refused(other, 503, "body")
    assert at.keeper.buffered_bytes == 0


def test_a_body_that_does_not_end_is_408_and_closes():
    at = At(body_timeout_s=0.1, deadline_s=5)
    answer = at.run(b"x", None)
    assert refused(answer, 408, "body")[b"connection"] == b"close"
    assert message(answer) == "request body not received within 0.1 s"
    refused(at.run(None), 408, "body")


def test_an_endpoint_that_takes_too_long_is_504():
    async def slow(request):
        await asyncio.sleep(60)

    answer = At(slow, deadline_s=0.1).run(b"x")
    refused(answer, 504, "server")
    assert message(answer) == "not answered within 0.1 s; retry, or send a smaller request"


def test_the_time_for_the_body_is_not_that_of_the_work():
    async def thinks(request):
        await asyncio.sleep(0.3)
        return Response(200, b"")

    assert At(thinks, body_timeout_s=0.1, deadline_s=5).run(b"x", b"y")[0] == 200


def test_the_deadline_leaves_no_cancellation_behind():
    at = At(body_timeout_s=0.1, deadline_s=5)

    async def ask_then_wait():
        await at.ask(b"x", None)
        await asyncio.sleep(0.2)
        return asyncio.current_task().cancelling()

    assert run(ask_then_wait()) == 0


def test_a_cancellation_that_is_not_ours_goes_through():
    async def slow(request):
        await asyncio.sleep(60)

    async def cancel():
        task = asyncio.create_task(At(slow).ask(b"x"))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(cancel())


def test_a_full_queue_is_503_with_retry_after_but_probes_get_through():
    release = asyncio.Event()

    async def slow(request):
        await release.wait()
        return Response(200, b"")

    at = At(slow, queue=2)

    async def fill():
        inside = [asyncio.create_task(at.ask(b"x")) for _ in range(2)]
        await asyncio.sleep(0)
        third = await at.ask(b"x")
        probe = await at.ask(b"", door=RequestHandler("/livez", echo, at.keeper))
        release.set()
        return third, probe, await asyncio.gather(*inside)

    third, probe, inside = run(fill())
    assert refused(third, 503, "server")[b"retry-after"] == b"1"
    assert message(third) == "2 requests in progress, the server's limit; retry in 1 s"
    assert [answer[0] for answer in (probe, *inside)] == [200] * 3
    assert at.run(b"x")[0] == 200


def test_a_client_that_hangs_up_gets_nothing_and_is_counted():
    at = At()
    assert at.run(HANG_UP) is None
    assert at.run(b"xx", HANG_UP) is None
    counted = 'replaylake_requests_total{route="/act",status="499"} 2.0'
    assert counted in at.metrics.render().decode()


def test_tokens_are_asked_for_before_the_body_is_read():
    at = At(tokens=[(ACT.encode(), "act"), (ADMIN.encode(), "admin")])
    headers = refused(at.run(b"x"), 401, "token")
    assert headers[b"www-authenticate"].startswith(b"Bearer")
    assert at.num_read == 0
    refused(at.run(b"x", headers=[("authorization", "Bearer " + "b" * 32)]), 401, "token")
    refused(at.run(b"x", headers=[("authorization", f"Basic {ACT}")]), 401, "token")
    other_role = at.run(b"x", headers=[("authorization", f"Bearer {ADMIN}")])
    refused(other_role, 403, "token")
    assert message(other_role) == "token lacks role act"
    assert at.run(b"x", headers=[("authorization", f"bearer {ACT}")])[0] == 200


@pytest.fixture
def still_clock(monkeypatch):
    """Lines are at most one a second: that passes when a test says so."""
    monkeypatch.setattr(rate_limited_log, "time", SimpleNamespace(monotonic=lambda: 7.0))


@pytest.mark.usefixtures("still_clock")
def test_what_was_not_foreseen_is_logged_once_a_second_and_not_told(caplog):
    async def broken(request):
        raise KeyError("a secret")

    at = At(broken)
    with caplog.at_level(logging.ERROR):
        for _ in range(100):
            answer = at.run(b"x")
            refused(answer, 500, "server")
            assert b"secret" not in answer[2]
        assert len(caplog.records) == 1
        assert "Traceback" in caplog.text
        at.door._complaints._next = 0.0
        at.run(b"x")
        assert "99 more" in caplog.records[1].getMessage()


def test_a_refusal_that_cannot_be_worded_is_a_500_like_any_other(caplog):
    async def broken(request):
        raise RequestRefusedError(422, b"not a text", "x")

    at = At(broken)
    with caplog.at_level(logging.ERROR):
        refused(at.run(b"x"), 500, "server")
    assert "Traceback" in caplog.text
    assert (
        'replaylake_requests_total{route="/act",status="500"} 1.0' in at.metrics.render().decode()
    )


@pytest.mark.usefixtures("still_clock")
def test_a_disk_that_refuses_is_503_and_no_flood(caplog):
    async def full(request):
        raise StorageError("no space")

    at = At(full)
    with caplog.at_level(logging.ERROR):
        for _ in range(20):
            assert b"retry-after" in refused(at.run(b"x"), 503, "log")
    assert len(caplog.records) == 1


def test_head_gets_the_length_and_no_body():
    status, headers, body = At().run(b"123", method="HEAD")
    assert (status, headers[b"content-length"], body) == (200, b"1", b"")


def test_the_access_log_has_a_line_a_request_and_no_token_or_body(tmp_path, kit):
    path = tmp_path / "access.log"

    async def refuse(request):
        raise RequestRefusedError(422, "observation", "x")

    async def ask():
        log = AccessLog(str(path))
        given = [
            ("authorization", f"Bearer {ACT}"),
            ("x-request-id", "mine-1"),
            ("traceparent", f"00-{TRACE}-00f067aa0ba902b7-00"),
        ]
        at = At(refuse, tokens=[(ACT.encode(), "act")], access_log=log)
        answer = await at.ask(b"secret body", headers=given)
        assert answer[1][b"x-request-id"] == b"mine-1"
        log.close()

    run(ask())
    text = path.read_text()
    (line,) = map(json.loads, text.splitlines())
    assert line["route"] == "/act"
    assert (line["status"], line["method"], line["bytes_in"]) == (422, "POST", 11)
    assert (line["request_id"], line["trace_id"]) == ("mine-1", TRACE)
    assert line["client"] is None  # of a request without a connection
    assert {"time", "seconds", "bytes_out", "worker"} <= set(line)
    assert ACT not in text
    assert "secret" not in text


def test_the_access_log_takes_no_control_characters_for_an_id(tmp_path):
    async def ask():
        log = AccessLog(str(tmp_path / "log"))
        at = At(access_log=log)
        at.keeper.serving().signer = type("Signer", (), {"worker": "w"})()
        for given in ("a\tb", "x" * 200, "é"):
            answer = await at.ask(b"", headers=[("x-request-id", given)])
            assert answer[1][b"x-request-id"].startswith(b"w-")
        log.close()

    run(ask())


@pytest.mark.parametrize(
    ("traceparent", "trace_id"),
    [
        (None, None),
        (f"00-{TRACE}-00f067aa0ba902b7-01", TRACE),
        (f"01-{TRACE}-00f067aa0ba902b7-01-more", TRACE),
        (f"ff-{TRACE}-00f067aa0ba902b7-01", None),
        (f"00-{'0' * 32}-00f067aa0ba902b7-01", None),
        (f"00-{TRACE.upper()}-00f067aa0ba902b7-01", None),
        ('00-x"\n', None),
    ],
)
def test_a_trace_id_is_that_of_w3c_trace_context(traceparent, trace_id):
    assert read_trace_id(None if traceparent is None else traceparent.encode()) == trace_id


def test_the_access_log_flushes_itself(tmp_path):
    async def ask():
        log = AccessLog(str(tmp_path / "log"))
        log.write(route="/act", status=200)
        assert (tmp_path / "log").read_text() == ""
        await asyncio.sleep(0.7)
        assert json.loads((tmp_path / "log").read_text())["status"] == 200
        log.close()

    run(ask())
