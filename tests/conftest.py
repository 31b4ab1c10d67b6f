"""For all tests: an S3 server on loopback, this machine's folders for remote lakes, real logs."""

import atexit
import os
import signal
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from replaylake.datastore.names import new_ulid

_S3_VARIABLES = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_REGION": "us-east-1",
    # Nobody answers there: without keys, nothing is asked outside of this machine.
    "AWS_METADATA_ENDPOINT": "http://127.0.0.1:9",
}

# Other people's logs, with what is known of them; too large to come with the code.
_SHARED_DATA = Path(__file__).parents[2] / "shared" / "data"

_WITHOUT_D3RLPY = "REPLAYLAKE_WITHOUT_D3RLPY"

# The tests run in several processes on few cores: more threads a process only wait for each other.
# Read by numpy and torch when they are first imported, which is after this.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes tells what else runs on the machine.
hypothesis.settings.register_profile("replaylake", deadline=None)
hypothesis.settings.load_profile("replaylake")


@atexit.register
def _silence_exit_output() -> None:
    """Hide what DuckDB's binding prints, some 40 lines, where Ray was used with torch."""
    if "ray" in sys.modules:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


# A shell's background jobs ignore Ctrl-C, and so would whatever the tests start there.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    assert _SHARED_DATA.is_dir(), f"expected other people's logs in {_SHARED_DATA}"
    return _SHARED_DATA


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs other people's logs where they are not; in CI that fails instead.

    And d3rlpy, where it is said not to be there, as .ci/newer-gymnasium does; nothing else skips.
    """
    if os.environ.get(_WITHOUT_D3RLPY):
        for item in items:
            if item.get_closest_marker("needs_d3rlpy"):
                item.add_marker(pytest.mark.skip(reason="d3rlpy is not there, on purpose"))
    if _SHARED_DATA.is_dir() or os.environ.get("CI"):
        return
    left_out = [item for item in items if "shared_data" in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_report_header() -> str:
    there = "are" if _SHARED_DATA.is_dir() else "are NOT"
    return f"other people's logs {there} in {_SHARED_DATA}"


class S3Server:
    """moto's S3 on a free port.

    One request at a time: moto looks whether a name is free and takes it in two steps. `fail` makes
    it answer 503, before or after it did what was asked.
    """

    def __init__(self) -> None:
        import logging

        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._app = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        self._faults: list[tuple[str, str, bool]] = []
        self.requests: list[tuple[str, str]] = []
        self._server = make_server("127.0.0.1", 0, self, threaded=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.environment = {**_S3_VARIABLES, "AWS_ENDPOINT_URL": self.url}
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def __call__(self, environ: dict[str, Any], start: Any) -> list[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        with self._lock:
            query = environ["QUERY_STRING"]
            self.requests.append((method, f"{path}?{query}" if "list-type" in query else path))
            fault = next((f for f in self._faults if f[0] == method and f[1] in path), None)
            if fault is not None:
                self._faults.remove(fault)
            if fault is None or fault[2]:
                answer = list(self._app(environ, start if fault is None else lambda *_: None))
            else:
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            if fault is not None:
                start("503 Service Unavailable", [("Content-Length", "0")])
                answer = []
        return answer

    def fail(self, method: str, path: str, *, done: bool, times: int = 1) -> None:
        """Answer 503 to the next requests whose path holds `path`; done: once they are done."""
        self._faults += [(method, path, done)] * times

    def heal(self) -> None:
        """Forget faults that did not happen yet."""
        self._faults.clear()

    def make_bucket(self) -> str:
        """Make a bucket of a new name."""
        name = f"b-{new_ulid()}"
        request = urllib.request.Request(f"{self.url}/{name}", method="PUT")
        with urllib.request.urlopen(request, timeout=10):
            return name

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the user's own cache and state out of it."""
    monkeypatch.setenv("REPLAYLAKE_CACHE", str(tmp_path / "own-cache"))
    monkeypatch.setenv("REPLAYLAKE_STATE", str(tmp_path / "own-state"))


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """The server, with the variables that make s3:// mean it."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    s3_server.heal()
    s3_server.requests.clear()
    yield s3_server
    s3_server.heal()


@pytest.fixture
def bucket(s3: S3Server) -> str:
    """A bucket of this test's own."""
    return s3.make_bucket()
