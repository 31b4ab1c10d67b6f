"""For all tests: an S3 server on loopback, this machine's folders for remote lakes, real logs."""

import atexit
import gc
import importlib.util
import json
import os
import random
import select
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any

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

# How wide a command prints, and whether in color, would be the terminal's.
for _variable in ("COLUMNS", "LINES", "FORCE_COLOR"):
    os.environ.pop(_variable, None)

# What is collected stays: looking through it for garbage again and again took 5 of 17 s.
gc.disable()

# How long an example takes tells what else runs on the machine. And a run has the examples of the
# run before: what others would find is found by `--hypothesis-profile random`, and by tests/fuzz.
_TIMELESS: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow],
}
hypothesis.settings.register_profile("random", **_TIMELESS)
hypothesis.settings.register_profile("replaylake", **_TIMELESS, derandomize=True)
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
    in_browser = [item for item in items if item.get_closest_marker("browser")]
    if in_browser and not _runs_browser(config):
        config.hook.pytest_deselected(items=in_browser)
        items[:] = [item for item in items if item not in in_browser]
    if _SHARED_DATA.is_dir() or os.environ.get("CI"):
        return
    left_out = [item for item in items if "shared_data" in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Let each test draw the same numbers, whichever ran before it in its process."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file for `-m "slow and ..."` in which nothing is marked slow, and so on.

    That is more than half of them, and each process of a run would import them all.
    """
    words = config.option.markexpr.split()
    if not words or words[0] not in ("slow", "chaos", "bars", "gpu") or "or" in words:
        return None
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if is_test and f"mark.{words[0]}" not in collection_path.read_text(encoding="utf-8"):
        return True
    return None


def _runs_browser(config: pytest.Config) -> bool:
    """Whether the tests marked `browser` are asked for, and can run or have to (with CI)."""
    is_asked = "browser" in str(config.option.markexpr).replace("not browser", "")
    return is_asked and (_find_chromium() is not None or bool(os.environ.get("CI")))


def _find_chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


def pytest_report_header(config: pytest.Config) -> list[str]:
    there = "are" if _SHARED_DATA.is_dir() else "are NOT"
    lines = [f"other people's logs {there} in {_SHARED_DATA}"]
    if "browser" in str(config.option.markexpr) and _find_chromium() is None:
        lines.append("Chromium is NOT installed: no test of pages in a browser runs here")
    return lines


@pytest.fixture(scope="session")
def chromium_path() -> str:
    found = _find_chromium()
    assert found is not None, "expected chromium: apt-get install chromium"
    return found


@pytest.fixture
def held_port() -> Iterator[int]:
    """A port of loopback that none gets who wants any; a server may listen on it, and another."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


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
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), daemon=True
        )
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
        with urllib.request.urlopen(request, timeout=60):
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


class ChatEndpoint:
    """OpenAI's chat completions on a free port of loopback.

    `reply` returns a status, headers and the text of the answer to a prompt; is_raw: or the whole
    body of a 200.
    """

    def __init__(self) -> None:
        self.reply: Callable[[str], tuple[int, dict[str, str], str]] = lambda prompt: (200, {}, "1")
        self.is_raw = False
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.num_at_once = self.max_at_once = 0
        lock = threading.Lock()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    endpoint.times.append(time.monotonic())
                    endpoint.requests.append({"path": self.path, **body})
                    endpoint.headers.append(dict(self.headers))
                    endpoint.num_at_once += 1
                    endpoint.max_at_once = max(endpoint.max_at_once, endpoint.num_at_once)
                try:
                    status, headers, text = endpoint.reply(body["messages"][0]["content"])
                finally:
                    with lock:
                        endpoint.num_at_once -= 1
                message = {"role": "assistant", "content": text}
                answer: Any = {"model": "judge-2026", "choices": [{"message": message}]}
                is_completion = status == 200 and not endpoint.is_raw
                data = (json.dumps(answer) if is_completion else text).encode()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a client that went away

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def endpoint() -> Iterator[ChatEndpoint]:
    server = ChatEndpoint()
    yield server
    server.close()


class WebhookReceiver:
    """A receiver of webhooks on a free port of loopback; `reply` returns the answer as bytes."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.reply: Callable[[int], bytes] = lambda number: b"HTTP/1.1 204 No Content\r\n\r\n"
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.requests.append((self.path, dict(self.headers), body))
                with suppress(OSError):
                    self.wfile.write(receiver.reply(len(receiver.requests)))

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a client that did not trust it

        self._server = Server(("127.0.0.1", 0), Handler)
        if context is not None:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}/hooks?from=lake"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), daemon=True
        )
        self._thread.start()

    @property
    def events(self) -> list[str]:
        """What the requests say, as `entity.action`."""
        bodies = [json.loads(body) for _, _, body in self.requests]
        return [f"{body['entity']}.{body['action']}" for body in bodies]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def receiver() -> Iterator[WebhookReceiver]:
    server = WebhookReceiver()
    yield server
    server.close()


@pytest.fixture
def start_receiver() -> Iterator[Callable[..., WebhookReceiver]]:
    """Starts receivers, with a TLS context where one is given."""
    running: list[WebhookReceiver] = []

    def start(context: ssl.SSLContext | None = None) -> WebhookReceiver:
        running.append(WebhookReceiver(context))
        return running[-1]

    yield start
    for one in running:
        one.close()


_FORK_SERVER = Path(__file__).with_name("fork_server.py")
_spec = importlib.util.spec_from_file_location("replaylake_fork_server", _FORK_SERVER)
assert _spec is not None
assert _spec.loader is not None
_fork_server = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_fork_server)


class ForkedCommand:
    """A `replaylake` command in a process that has imported all of it; used as a Popen is.

    It leads a session, and so a process group, of its own.
    """

    def __init__(
        self, server: str, arguments: Sequence[str], environment: Mapping[str, str], *files: IO[Any]
    ) -> None:
        """files: its stdout and stderr."""
        with open(os.devnull) as nothing:
            streams = [file.fileno() for file in (nothing, *files)]
            self._connection, self.pid = _fork_server.connect(
                server, arguments, environment, streams
            )
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code, 128 + N where signal N ended it. Raises: TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("replaylake", timeout or 0.0)
            self.returncode = self._connection.recv(1)[0]
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it alone, not what it started."""
        self.send_signal(signal.SIGKILL)


@pytest.fixture(scope="session")
def fork_command() -> Iterator[Callable[..., ForkedCommand]]:
    """Starts commands as ForkedCommand does: an import of torch, 2 s of a processor, is spared.

    They find the modules of tests/online/environments.
    """
    with tempfile.TemporaryDirectory(prefix="rl-") as folder:
        path = f"{folder}/socket"
        environments = str(Path(__file__).parent / "online" / "environments")
        paths = os.pathsep.join(filter(None, [environments, os.environ.get("PYTHONPATH", "")]))
        server = subprocess.Popen(
            [sys.executable, str(_FORK_SERVER), "serve", path],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )
        assert server.stdout is not None
        with server.stdout as said:
            assert said.readline() == b"ready\n"

        def start(arguments: Sequence[str], *files: IO[Any], **environment: str) -> ForkedCommand:
            variables = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment}
            return ForkedCommand(path, arguments, variables, *files)

        yield start
        server.kill()
        server.wait()


@pytest.fixture
def answer_of(fork_command: Callable[..., ForkedCommand], tmp_path: Path) -> Callable[..., Any]:
    """Runs a command with `--json` in a process of its own, and returns what it answers."""

    def run(*arguments: str) -> Any:
        with (tmp_path / "answered").open("w+") as answered, (tmp_path / "said").open("w+") as said:
            code = fork_command([*arguments, "--json"], answered, said).wait(180)
            texts = [(file.seek(0), file.read())[1] for file in (answered, said)]
        assert code == 0, texts[1]
        return json.loads(texts[0])

    return run
