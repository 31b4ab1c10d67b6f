"""Requests to an MLflow server that answers what MLflow never does."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.serve.package.mlflow_api import MlflowError, MlflowServer


class RawServer(socketserver.ThreadingTCPServer):
    """Answers each request with the same bytes, and retains the heads of the requests."""

    def __init__(self, answer: bytes) -> None:
        self.heads: list[bytes] = []
        server = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                head = b""
                while line := self.rfile.readline().strip():
                    head += line + b"\n"
                server.heads.append(head)
                self.wfile.write(answer)

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self.thread.start()


@pytest.fixture
def serve() -> Iterator[Callable[[bytes], RawServer]]:
    servers: list[RawServer] = []

    def start(answer: bytes) -> RawServer:
        servers.append(RawServer(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.thread.join()
        server.server_close()


def reply(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("body", [None, {"name": "p"}])
def test_a_redirect_is_refused_and_sends_nothing_elsewhere(
    serve: Any, monkeypatch: pytest.MonkeyPatch, status: int, body: dict[str, str] | None
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    other = serve(reply(b"{}"))
    location = f"{other.url}/registered-models/alias"
    text = f"HTTP/1.1 {status} Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n"
    server = serve(text.encode())
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", server.url)
    with pytest.raises(MlflowError, match=f"a redirect to '{location}'.*MLFLOW_REGISTRY_URI") as at:
        MlflowServer.from_environment("MLFLOW_REGISTRY_URI").request("x", body)
    assert at.value.status == status
    assert b"secret" in server.heads[0]
    assert other.heads == []


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "SSH-2.0"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", "IncompleteRead"),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\n", "more than 100 headers"),
        (
            b"HTTP/1.1 500 no\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            "status 500, no",
        ),
        (reply(b"<html>"), "x: Expecting value"),
        (reply(b"[1]"), r"found \[1\], expected an object"),
    ],
)
def test_an_answer_that_is_not_mlflows(serve: Any, answer: bytes, message: str) -> None:
    with pytest.raises(MlflowError, match=message):
        MlflowServer(serve(answer).url).request("x")


@pytest.mark.parametrize("body", [b"{}", b'{"experiment": 1}', b'{"experiment": {}}'])
def test_an_answer_without_the_member_that_is_needed(serve: Any, body: bytes) -> None:
    server = MlflowServer(serve(reply(body)).url)
    message = "experiment.experiment_id of an answer: found None, expected a text"
    with pytest.raises(MlflowError, match=message):
        server.find_experiment("e")


def test_members_of_another_kind() -> None:
    server = MlflowServer("http://127.0.0.1:9")
    with pytest.raises(MlflowError, match=r"run\.info of an answer: found 'x', expected an object"):
        server.read_object({"run": {"info": "x"}}, "run", "info")
    for runs in (3, [3], {"a": 1}):
        with pytest.raises(MlflowError, match=r"runs of an answer: .* expected a list of objects"):
            server.read_objects({"runs": runs}, "runs")
    assert server.read_objects({}, "runs") == []


@pytest.mark.parametrize("url", ["http://host:abc", "http://host:99999", "http://[::1", "ftp://h"])
def test_a_url_that_no_request_can_use(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
    with pytest.raises(ConfigInvalidError, match="MLFLOW_TRACKING_URI: found"):
        MlflowServer.from_environment()
