"""A gateway in a process of its own, before an engine in another."""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from replaylake.datastore.lake.lake import open_lake

ENGINE = Path(__file__).parent / "engine.py"


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "not within the time"
        time.sleep(0.02)
    return found


def is_listening(port):
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@dataclass
class Engine:
    process: subprocess.Popen
    url: str

    def requests(self):
        return httpx.get(f"{self.url}/requests").json()

    def release(self, text, num):
        """Allow events to the answer to a message that holds the word `hold`."""
        httpx.post(f"{self.url}/release", json={"text": text, "num": num}).raise_for_status()

    def stop(self):
        self.process.kill()
        self.process.wait()


def bind_port():
    """Return a socket that has a free port of loopback, and refuses connections until it listens.

    Nobody else can take the port between now and then.
    """
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    return bound


def start_engine(kind, bound=None):
    with bound or bind_port() as one:
        port = one.getsockname()[1]
        command = [sys.executable, str(ENGINE), kind, "--fd", str(one.fileno())]
        process = subprocess.Popen(command, pass_fds=[one.fileno()])
    wait_until(lambda: is_listening(port))
    return Engine(process, f"http://127.0.0.1:{port}")


@dataclass
class Gateway:
    process: subprocess.Popen
    url: str
    lake_path: Path
    dataset: str
    lines: list

    @property
    def lake(self):
        return open_lake(self.lake_path)

    def steps(self, columns="*", order="timestamp", num=None):
        """Return the recorded steps, once there are as many as are expected."""

        def read():
            text = f"select {columns} from {self.dataset}.steps order by {order}"
            rows = self.lake.sql(text).to_pylist()
            return rows if num is None or len(rows) >= num else None

        return wait_until(read) if num else read()

    def stop(self, sig=signal.SIGTERM):
        self.process.send_signal(sig)
        return self.process.wait(120)

    def kill(self):
        self.process.kill()
        self.process.wait()


# As `replaylake`, but for how long a call waits for its commit.
PROMPT_COMMAND = """
import functools
from replaylake.cli.main import run
from replaylake.serve.gateway import server
from replaylake.serve.recording import outcome_log
server.JournalConfig = functools.partial(server.JournalConfig, flush_interval_s=0.05)
outcome_log._APPLY_S = 0.02
run()
"""


def start_gateway(
    upstream, lake, *arguments, dataset="agents", environment=None, preexec=None, is_prompt=False
):
    """is_prompt: it commits calls within 50 ms, as tests of what is recorded would wait for it."""
    command = [str(Path(sys.executable).with_name("replaylake"))]
    if is_prompt:
        command = [sys.executable, "-c", PROMPT_COMMAND]
    command += ["gateway"]
    command += ["--upstream", upstream, "--dataset", dataset, "--lake", str(lake), "--port", "0"]
    process = subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
        preexec_fn=preexec,
    )
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "ready after" in line:
            break
    assert "ready after" in "".join(lines), "".join(lines)
    url = lines[-1].split(" on ")[1].split(",")[0]
    return Gateway(process, url, Path(lake), dataset, lines)


def wait_for_rows(gateway, num, where, columns="*"):
    """Return the recorded steps that meet a condition, once there are as many as expected."""
    text = f"select {columns} from agents.steps where {where} order by timestamp"
    deadline = time.monotonic() + 60
    while len(rows := gateway.lake.sql(text).to_pylist()) < num:
        assert time.monotonic() < deadline, rows
        time.sleep(0.05)
    assert len(rows) == num
    return rows


@pytest.fixture(scope="session")
def engines():
    """Engines by kind, started when they are asked for."""
    running = {}

    def get(kind):
        if kind not in running:
            running[kind] = start_engine(kind)
        running[kind].requests()
        return running[kind]

    yield get
    for engine in running.values():
        engine.stop()


@pytest.fixture(scope="session")
def gateway(engines, tmp_path_factory):
    """A gateway before an engine that answers as vLLM does; tests share its lake."""
    lake = tmp_path_factory.mktemp("gateway") / "lake"
    one = start_gateway(engines("vllm").url, lake, is_prompt=True)
    yield one
    one.kill()
    one.process.stderr.close()


@pytest.fixture
def gateways():
    """Starts gateways, and stops them at the end."""
    running = []

    def start(*arguments, **options):
        running.append(start_gateway(*arguments, **options))
        return running[-1]

    yield start
    for one in running:
        if one.process.poll() is None:
            one.kill()
        one.process.stderr.close()


@pytest.fixture
def run_gateway_command():
    """Runs a gateway that does not start; returns its exit code and what it wrote to stderr."""

    def run(*arguments):
        command = [str(Path(sys.executable).with_name("replaylake")), "gateway", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, " ".join(done.stderr.split())

    return run


@pytest.fixture(scope="session")
def kit():
    return sys.modules[__name__]
