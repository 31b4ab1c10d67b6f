"""Collectors: in this process for most tests, in one of their own to be killed."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from replaylake.datastore.feedback.journal import JournalConfig
from replaylake.datastore.lake.lake import open_lake
from replaylake.serve.collecting import collector as collector_module
from replaylake.serve.collecting.collector import Collector, CollectorConfig, create_collector
from replaylake.serve.recording import outcome_log


def wait_until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "not within the time"
        time.sleep(0.05)
    return found


class Collecting:
    """The lake behind a collector."""

    def idle(self):
        """Let the collector work."""

    def work_until(self, condition):
        """Let the collector work until a condition holds."""
        wait_until(lambda: self.idle() or condition())

    def read(self, columns="*", num=0, where="true", order="episode_id, env_step"):
        """Return steps, once there are at least as many as expected."""
        text = f"select {columns} from {self.dataset}.steps where {where} order by {order}"

        def find():
            self.idle()
            rows = self.lake.sql(text).to_pylist()
            return rows if len(rows) >= num else None

        return wait_until(find) if num else find()


class InProcess(Collecting):
    """A collector whose app runs in this process."""

    def __init__(self, client, collector):
        self.client, self.collector = client, collector
        self.dataset, self.lake = collector.dataset.name, open_lake(collector.config.lake)

    def idle(self):
        self.client.idle(0.05)

    def post(self, path, body, **options):
        return self.client.post(path, json=body, **options)

    def get(self, path, **options):
        return self.client.get(path, **options)


@dataclass
class Server(Collecting):
    """A collector in a process of its own."""

    process: subprocess.Popen
    url: str
    lake_path: str
    dataset: str

    @property
    def lake(self):
        return open_lake(self.lake_path)

    def post(self, path, body, **options):
        return httpx.post(f"{self.url}{path}", json=body, **options)

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def kill(self):
        self.process.kill()
        self.process.wait()


def start_collector(lake, *arguments, dataset="agents", environment=None):
    command = [str(Path(sys.executable).with_name("replaylake")), "serve", "--collect", dataset]
    process = subprocess.Popen(
        [*command, "--lake", str(lake), "--port", "0", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "ready after" in line:
            break
    assert "ready after" in "".join(lines), "".join(lines)
    url = lines[-1].split(" on ")[1].split(",")[0]
    return Server(process, url, str(lake), dataset)


@pytest.fixture
def collectors():
    """Starts collectors in processes of their own, and ends them after the test."""
    running = []

    def start(*arguments, **options):
        running.append(start_collector(*arguments, **options))
        return running[-1]

    yield start
    for one in running:
        if one.process.poll() is None:
            one.kill()
        one.process.stderr.close()


@pytest.fixture(scope="session")
def collect_in(app_client):
    """Starts a collector in this process; a context that gives it."""

    @contextmanager
    def start(lake, dataset="agents", **options):
        journal = JournalConfig(flush_interval_s=0.05)
        collector = Collector(CollectorConfig(str(lake), dataset, journal=journal, **options))
        with pytest.MonkeyPatch.context() as patch:
            # Rows and reports are moved at once, as tests of what is stored would wait for it.
            patch.setattr(collector_module, "_ROUND_S", 0.02)
            patch.setattr(outcome_log, "_APPLY_S", 0.02)
            with app_client(create_collector(collector)) as client:
                yield InProcess(client, collector)

    return start


@pytest.fixture(scope="module")
def collector(collect_in, tmp_path_factory):
    """A collector that the tests of a module share."""
    with collect_in(tmp_path_factory.mktemp("collector") / "lake") as one:
        yield one
