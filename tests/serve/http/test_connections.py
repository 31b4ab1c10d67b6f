"""Connections of a real uvicorn: kept, closed and written to as HTTP says, by the quick way too."""

import socket
import threading
import time
from contextlib import ExitStack, contextmanager

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from replaylake.datastore.version import VERSION
from replaylake.serve.http import request_handler
from replaylake.serve.http.connections import NUM_REFUSED, LimitedProtocol
from replaylake.serve.http.request_handler import HandlerState, RequestHandler
from replaylake.serve.messages import RequestRefusedError, Response
from replaylake.serve.monitoring.metrics import Metrics
from replaylake.serve.safety.limits import ConnectionLimits
from replaylake.serve.serving_state import ServingState


async def echo(request):
    if request.body == b"refuse":
        raise RequestRefusedError(422, "body", "unknown word")
    return Response(200, request.body or b"nothing", "text/plain")


@contextmanager
def served(app, keep_alive_s=5):
    """Run an app under uvicorn with our protocol; yields where it listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        settings = uvicorn.Config(
            app,
            loop="uvloop",
            http=LimitedProtocol,
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            timeout_keep_alive=keep_alive_s,
        )
        server = uvicorn.Server(settings)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


def door():
    serving = ServingState(None, None)
    return RequestHandler("other", echo, HandlerState(lambda: serving, Metrics()))


@pytest.fixture(scope="module")
def address():
    with served(door()) as found:
        yield found


def post(body, *, method=b"POST", version=b"1.1", more=b""):
    length = b"content-length: %d\r\n" % len(body)
    return b"%s /x HTTP/%s\r\nhost: localhost\r\n%s%s\r\n%s" % (method, version, length, more, body)


def talk(address, data, num_answers=1, *, until_closed=False):
    """Send bytes; return what comes until so many bodies have come, or the connection closes."""
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(data)
        came = b""
        while until_closed or came.count(b"!") < num_answers:
            piece = connection.recv(65536)
            if not piece:
                break
            came += piece
        return came


def receive(connection):
    """Return one answer, as long as its head says."""
    came = b""
    while b"\r\n\r\n" not in came:
        came += _receive_some(connection)
    head, _, body = came.partition(b"\r\n\r\n")
    length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while len(body) < length:
        body += _receive_some(connection)
    return head + b"\r\n\r\n" + body


def _receive_some(connection):
    piece = connection.recv(65536)
    assert piece, "closed before the end of an answer"
    return piece


def test_an_answer_has_its_head_whole(address):
    head, _, body = talk(address, post(b"hello!")).partition(b"\r\n\r\n")
    status, *lines = head.split(b"\r\n")
    fields = dict(line.split(b": ") for line in lines)
    assert (status, body) == (b"HTTP/1.1 200 OK", b"hello!")
    assert fields.keys() == {b"date", b"server", b"content-type", b"content-length"}
    assert (fields[b"content-type"], fields[b"content-length"]) == (b"text/plain", b"6")


@pytest.mark.parametrize(
    "data", [post(b"hello!"), post(b"refuse", more=b"connection: close\r\n"), b"no HTTP\r\n\r\n"]
)
def test_every_answer_names_the_version(address, data):
    head = talk(address, data, until_closed=b"!" not in data).partition(b"\r\n\r\n")[0]
    names = [line for line in head.split(b"\r\n") if line.startswith(b"server: ")]
    assert names == [b"server: replaylake/" + VERSION.encode()]


def test_an_unknown_cycle_of_uvicorns_is_answered_by_messages(monkeypatch):
    assert request_handler.is_known_cycle(RequestResponseCycle)

    class Another:
        def __init__(self, transport):
            self.transport = transport

    assert not request_handler.is_known_cycle(Another)
    monkeypatch.setattr(request_handler, "_IS_KNOWN_CYCLE", False)
    with served(door()) as found:
        answer = talk(found, post(b"one!") + post(b"two!"), 2)
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert answer.endswith(b"two!")


@pytest.mark.slow
def test_the_date_moves_on(address):
    def date():
        return talk(address, post(b"!")).partition(b"date: ")[2].partition(b"\r\n")[0]

    first = date()
    until = time.monotonic() + 60
    while date() == first:  # uvicorn writes it once a second
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_connection_is_kept_for_the_next_request(address):
    with socket.create_connection(address, timeout=60) as connection:
        for word in (b"one!", b"refuse", b"three!"):
            connection.sendall(post(word))
            answer = receive(connection)
            assert answer.startswith(b"HTTP/1.1 422" if word == b"refuse" else b"HTTP/1.1 200")
            assert word == b"refuse" or answer.endswith(word)


def test_requests_sent_at_once_are_answered_in_order(address):
    came = talk(address, b"".join(post(b"%d!" % i) for i in range(20)), 20)
    bodies = [part.partition(b"\r\n\r\n")[2] for part in came.split(b"HTTP/1.1 200 OK")[1:]]
    assert bodies == [b"%d!" % i for i in range(20)]


def test_a_body_in_pieces(address):
    with socket.create_connection(address, timeout=60) as connection:
        data = post(b"a" * 1000 + b"!")
        for start in range(0, len(data), 300):
            connection.sendall(data[start : start + 300])
            time.sleep(0.01)
        assert receive(connection).endswith(b"a!")


def test_a_head_has_no_body(address):
    came = talk(
        address, post(b"", method=b"HEAD", more=b"connection: close\r\n"), until_closed=True
    )
    assert came.endswith(b"\r\n\r\n")
    assert b"content-length: 7\r\n" in came


@pytest.mark.parametrize("asked", [{"version": b"1.0"}, {"more": b"connection: close\r\n"}])
def test_a_connection_that_is_not_to_be_kept_is_closed_and_said_to_be(address, asked):
    came = talk(address, post(b"bye!", **asked), until_closed=True)
    assert came.endswith(b"bye!")
    assert b"connection: close\r\n" in came


def test_a_query_too_long_to_be_taken_apart_is_called_so(address):
    before = NUM_REFUSED[431]
    head = b"POST /act?state=%s HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n" % (
        b"s" * 70_000
    )
    answer = talk(address, head, until_closed=True)
    assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
    assert b"path and query of 70011 bytes exceed 65535; send long fields in the body" in answer
    assert NUM_REFUSED[431] == before + 1


def test_a_connection_that_idles_is_closed(monkeypatch):
    # uvicorn itself would wait for an hour.
    monkeypatch.setattr(LimitedProtocol, "limits", ConnectionLimits(idle_timeout_s=3600))
    with (
        served(door(), keep_alive_s=3600) as address,
        socket.create_connection(address, timeout=60) as connection,
    ):
        connection.sendall(post(b"hello!"))
        assert receive(connection).endswith(b"hello!")
        # Not before: it would idle until its request comes, too.
        monkeypatch.setattr(LimitedProtocol, "limits", ConnectionLimits(idle_timeout_s=0.2))
        assert connection.recv(1) == b""


def test_above_the_limit_the_connection_that_idled_longest_is_closed(monkeypatch):
    monkeypatch.setattr(LimitedProtocol, "limits", ConnectionLimits(num=2))
    with served(door()) as address, ExitStack() as stack:

        def connect():
            return stack.enter_context(socket.create_connection(address, timeout=60))

        first = connect()
        assert _answers(first)
        second = connect()
        assert _answers(second)
        assert _answers(first)  # so the second idles longest
        third = connect()
        assert _answers(third)
        assert second.recv(1) == b""
        assert _answers(first)
        assert _answers(third)


def _answers(connection):
    connection.sendall(post(b"hello!"))
    return receive(connection).endswith(b"hello!")


def test_above_the_limit_a_connection_is_refused_where_none_idles(monkeypatch):
    monkeypatch.setattr(LimitedProtocol, "limits", ConnectionLimits(num=1))
    before = NUM_REFUSED[503]
    with served(door()) as address, socket.create_connection(address, timeout=60) as busy:
        # A body that never ends: nobody closes a request that is being read.
        busy.sendall(post(b"hello!", more=b"expect: 100-continue\r\n")[: -len(b"hello!")])
        assert busy.recv(65536).startswith(b"HTTP/1.1 100")
        # It is answered before it sends anything: unread bytes would reset the connection.
        answer = talk(address, b"", until_closed=True)
        assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert NUM_REFUSED[503] == before + 1
        busy.sendall(b"hello!")
        assert receive(busy).endswith(b"hello!")


def test_a_server_that_stops_waits_for_no_connection_that_idles(monkeypatch):
    monkeypatch.setattr(LimitedProtocol, "limits", ConnectionLimits(idle_timeout_s=3600))
    with ExitStack() as stack:
        with served(door(), keep_alive_s=3600) as address:
            connection = stack.enter_context(socket.create_connection(address, timeout=60))
            connection.sendall(post(b"hello!"))
            assert receive(connection).endswith(b"hello!")
        # It has stopped, and the connection was still there.
        assert connection.recv(1) == b""


def test_a_middleware_sees_what_is_sent():
    seen, inner = [], door()

    async def middleware(scope, receive, send):
        async def watched(message):
            seen.append(message["type"])
            await send(message)

        await inner(scope, receive, watched)

    with served(middleware) as address:
        assert talk(address, post(b"hello!")).endswith(b"hello!")
    assert seen == ["http.response.start", "http.response.body"]
