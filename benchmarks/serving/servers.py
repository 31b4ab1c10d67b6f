"""A server in processes of its own: started, waited for, weighed and stopped."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_START_TIMEOUT_S: Final = 60.0
_STOP_TIMEOUT_S: Final = 15.0


@dataclass(frozen=True)
class Running:
    """Where it answers, and how long it took from its start to its first answer."""

    url: str
    ready_s: float
    pid: int

    def resident_mib(self) -> float:
        """Return the memory of all its processes; what they share counts once (PSS)."""
        return sum(_pss_mib(pid) for pid in list_processes(self.pid))


@contextmanager
def running(
    command: Sequence[str], port: int, body: str, environment: Mapping[str, str] | None = None
) -> Iterator[Running]:
    """Run a command until the block ends; ready is the first 200 that a POST to /act gets."""
    began = time.perf_counter()
    log = Path(f"/tmp/bench-serving-{port}.log")
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            env={**os.environ, **(environment or {})},
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
    try:
        while not _answers(port, body):
            if process.poll() is not None or time.perf_counter() - began > _START_TIMEOUT_S:
                raise RuntimeError(f"{command}: found it not ready:\n{log.read_text()[-2000:]}")
            time.sleep(0.01)
        yield Running(f"http://127.0.0.1:{port}/act", time.perf_counter() - began, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.unlink(missing_ok=True)


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(port: int, body: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("POST", "/act", body, {"content-type": "application/json"})
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def list_processes(root: int) -> list[int]:
    """Return a process and all that it started."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int(
                    (entry / "stat").read_text().rpartition(")")[2].split()[1]
                )
            except OSError:
                continue
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def _pss_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0
