"""Pauses of BentoML's workers: how long a worker's main thread runs for one answer.

    python -m benchmarks.serving.pauses --seconds 20 --rounds 2

One connection, a request after the other. Latency on a shared machine says little, as a thread may
wait for a core longer than it works. /proc/PID/schedstat tells the two apart (Linux): what is
reported is the processor time of the main thread during each answer. Python collects garbage in
the thread whose allocation sets it off, so a full collection is in there as one long answer.
`bentoml_api_frozen` is the minimal case: BentoML's own first page, but what was loaded before the
first request is frozen.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import numpy as np

from benchmarks.serving.__main__ import OURS, ours_command, register_policy
from benchmarks.serving.bentoml_api import FREEZE
from benchmarks.serving.case import ONE_BODY, graph_file
from benchmarks.serving.peers import ENVIRONMENT
from benchmarks.serving.servers import Running, free_port, list_processes, running

SYSTEMS: Final = ("bentoml_api", "bentoml_api_frozen", *OURS)
_NUM_WARM_UP: Final = 200
_PAUSE_MS: Final = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    for _ in range(options.rounds):
        for system in SYSTEMS:
            with tempfile.TemporaryDirectory() as scratch, _serve(system, Path(scratch)) as server:
                ran_ms, latency_ms = _measure(server, options.seconds)
            line = {
                "system": system,
                "answers": len(ran_ms),
                "main_thread_ms": {
                    "p50": round(float(np.median(ran_ms)), 2),
                    "p99": round(float(np.quantile(ran_ms, 0.99)), 2),
                    "longest": [round(float(one), 1) for one in np.sort(ran_ms)[:-4:-1]],
                },
                "pauses": int((ran_ms > _PAUSE_MS).sum()),
                "latency_p99_ms": round(float(np.quantile(latency_ms, 0.99)), 1),
                "load": round(os.getloadavg()[0], 1),
            }
            print(json.dumps(line), flush=True)


@contextmanager
def _serve(system: str, scratch: Path) -> Iterator[Running]:
    port = free_port()
    environment = {
        ENVIRONMENT: str(graph_file(scratch)),
        "BENTOML_HOME": str(scratch / "bentoml"),
        "BENTOML_DO_NOT_TRACK": "True",
        "OMP_NUM_THREADS": "1",
    }
    if system in OURS:
        register_policy(scratch / "lake", scratch / "package")
        command = ours_command(scratch / "lake", "live", port, OURS[system], 1)
    else:
        environment[FREEZE] = "1" if system.endswith("frozen") else ""
        service = ["benchmarks.serving.bentoml_api:Policy", "--port", str(port)]
        command = [sys.executable, "-m", "bentoml", "serve", *service, "--host", "127.0.0.1"]
    with running(command, port, ONE_BODY, environment) as server:
        yield server


def _measure(server: Running, seconds: float) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each answer, the milliseconds that the worker's main thread ran, and took."""
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port)

    def post() -> None:
        connection.request("POST", parts.path, ONE_BODY, {"content-type": "application/json"})
        connection.getresponse().read()

    processes = list_processes(server.pid)
    before = {pid: _main_thread_ms(pid) for pid in processes}
    for _ in range(_NUM_WARM_UP):
        post()
    worker = max(processes, key=lambda pid: _main_thread_ms(pid) - before[pid])
    ran_ms, latency_ms = [], []
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        ran_before = _main_thread_ms(worker)
        post()
        latency_ms.append((time.perf_counter() - began) * 1e3)
        ran_ms.append(_main_thread_ms(worker) - ran_before)
    connection.close()
    return np.array(ran_ms), np.array(latency_ms)


def _main_thread_ms(pid: int) -> float:
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e6


if __name__ == "__main__":
    main()
