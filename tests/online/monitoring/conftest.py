import socketserver

import pytest


@pytest.fixture(autouse=True)
def servers_that_close_at_once(monkeypatch):
    """A server looks each half second whether it is to end, and each test would wait for that."""
    monkeypatch.setattr(socketserver.BaseServer.serve_forever, "__defaults__", (0.01,))
