"""Tests of the start that servers of one process share."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass

import pytest

from replaylake.datastore.errors import ServeError
from replaylake.serve.http.listener import open_server


@dataclass(frozen=True)
class Config:
    """Where a server listens."""

    host: str = "127.0.0.1"
    port: int = 0


def test_a_server_announces_the_port_that_it_listens_on(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as a process begins
    ready = []
    with open_server("toy", Config(), ready.append, check_exposure=lambda address: None) as server:
        assert server.config.port == server.listener.getsockname()[1] > 0
        with socket.create_connection(("127.0.0.1", server.config.port), 60):
            assert ready == []
        server.announce("toy is here")
        assert ready == [server.config]
        logging.getLogger("replaylake.toy").warning("a line")
    first, second = capsys.readouterr().err.splitlines()
    assert first == "toy is here; stop with Ctrl-C"
    assert "[WARNING] [toy] a line" in second


def test_an_address_that_is_refused_is_never_listened_on(held_port):
    def refuse(address):
        raise ValueError(address)

    with (
        pytest.raises(ValueError, match=r"127\.0\.0\.1"),
        open_server("toy", Config(port=held_port), None, check_exposure=refuse),
    ):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", held_port), 60)


def test_a_host_without_an_address_is_named():
    config = Config(host="no-such-host.invalid")
    with (
        pytest.raises(ServeError, match=r"no-such-host\.invalid") as refused,
        open_server("toy", config, None, check_exposure=lambda address: None),
    ):
        pass
    assert refused.value.parameter == "host"
