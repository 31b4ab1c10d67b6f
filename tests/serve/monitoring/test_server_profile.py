"""The profile of a server: of a real one that answers, with and without tokens."""

import socket
import threading
from contextlib import contextmanager

import httpx
import pytest

from replaylake.cli.main import main
from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.lake.lake import open_lake
from replaylake.serve.monitoring.server_profile import measure_server
from replaylake.serve.safety.limits import Safety
from replaylake.serve.transport import RequestFailedError, ServerUnreachableError

NUM_REQUESTS = 500


@pytest.mark.slow
def test_a_server_accounts_for_its_time(kit, tmp_path, capsys):
    lake = open_lake(tmp_path / "lake", create=True)
    for role in ("act", "admin"):
        (tmp_path / role).write_text(f"a-long-secret-token-of-{role}\n")
    server = kit.start_server(
        package=kit.save_policy(tmp_path / "package"),
        policy="clone",
        version=1,
        lake=lake.path,
        log_to="live",
        server="uvicorn",
        safety=Safety(act_token_file=tmp_path / "act", admin_token_file=tmp_path / "admin"),
    )
    try:
        headers = {"Authorization": "Bearer a-long-secret-token-of-act"}
        with httpx.Client(base_url=server.url, headers=headers) as client:
            for _ in range(NUM_REQUESTS):
                body = {"observation": [0.1, 0.2, 0.3, 0.4]}
                assert client.post("/act", json=body).status_code == 200
        found = measure_server(server.url, token="a-long-secret-token-of-admin")
        with pytest.raises(RequestFailedError, match="HTTP 401"):
            measure_server(server.url)
        arguments = ["runs", "profile", server.url, "--token-file", str(tmp_path / "admin")]
        arguments.append("--bounds")
        assert main(arguments) == 0
    finally:
        server.stop()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"server {server.url}  ")
    assert lines[1].endswith("bound MB/s  bound/rate")
    assert {"receive", "send", "idle", "other"} <= {line.split()[0] for line in lines[2:]}
    links = {one.link: one for one in found.links if one.place == "process"}
    # Each request is two packets, head and body, or one; other requests came with them.
    assert links["receive"].items >= NUM_REQUESTS
    # One in 16 is measured: that none is has a chance of 1e-14.
    for link in ("check", "parse", "inference", "journal", "respond", "send"):
        assert links[link].seconds > 0, link
        assert links[link].items % 16 == 0, link
    assert links["idle"].seconds > 0
    assert sum(one.share for one in found.links if one.place == "process") >= 0.999


def test_what_is_no_server_is_named():
    with pytest.raises(ServerUnreachableError, match="no response"):
        measure_server("http://127.0.0.1:9")
    with pytest.raises(ConfigInvalidError, match="expected a URL"):
        measure_server("ftp://somewhere")
    with pytest.raises(ServerUnreachableError, match="no response"):
        measure_server("http://127.0.0.1:port")


@contextmanager
def answering(*answers):
    """Answer one connection after the other with these bytes; yields the URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            for data in answers:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(data)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(60)


def page(body):
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (
        len(body),
        body,
    )


@pytest.mark.parametrize("body", [b"<html>{'a b': 1}</html>", b"\xff\xfe", b"", b"up 1\n"])
def test_another_page_is_named(body):
    with (
        answering(page(body)) as url,
        pytest.raises(ConfigInvalidError, match="found no replaylake"),
    ):
        measure_server(url)


def test_what_speaks_no_http_is_named():
    with answering(b"SSH-2.0-x\r\n") as url, pytest.raises(ServerUnreachableError):
        measure_server(url)


def test_a_restart_meanwhile_is_named():
    head = b"# TYPE replaylake_worker_seconds_total counter\n"
    pages = [page(head + b"replaylake_worker_seconds_total %d.0\n" % s) for s in (9, 1)]
    with (
        answering(*pages) as url,
        pytest.raises(ServerUnreachableError, match="restarted while it was watched"),
    ):
        measure_server(url, seconds=0.01)
