"""Serving one observation a request over loopback: ours, every decision logged, beside its peers.

A compiled client (wrk, one thread) posts over 16 connections, then over one; ours also batches of
256, and with two workers. Requests/s, p50 and p99 as the client sees them; seconds from the start
of the command to its first answer; memory of all processes (PSS). After each load on ours, the
rows of the decisions table are counted: as many as there were answers, or there is no figure.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from benchmarks.serving.case import BATCH, BATCH_BODY, ONE_BODY, graph, graph_file
from benchmarks.serving.peers import ENVIRONMENT
from benchmarks.serving.servers import Running, free_port, running
from benchmarks.serving.wrk import run_wrk

OURS: Final = {"ours": "uvicorn", "ours_bentoml": "bentoml"}
SYSTEMS: Final = (*OURS, "starlette", "starlette_act", "fastapi", "bentoml_api")
ONE: Final = "one observation a request"
SETTLE_S: Final = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seconds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        measure = _ours if options.system in OURS else _peer
        for workload, figure, unit in measure(options.system, Path(scratch), options.seconds):
            line = {"workload": workload, "system": options.system, "figure": figure, "unit": unit}
            print(json.dumps(line), flush=True)


def _peer(system: str, scratch: Path, seconds: int) -> Iterator[tuple[str, float, str]]:
    port = free_port()
    environment = {
        ENVIRONMENT: str(graph_file(scratch)),
        "BENTOML_HOME": str(scratch / "bentoml"),
        "BENTOML_DO_NOT_TRACK": "True",
        "OMP_NUM_THREADS": "1",
    }
    if system == "bentoml_api":
        service = ["benchmarks.serving.bentoml_api:Policy", "--port", str(port)]
        command = [sys.executable, "-m", "bentoml", "serve", *service, "--host", "127.0.0.1"]
    else:
        module = "benchmarks.serving.peers"
        command = [sys.executable, "-m", module, system, "--port", str(port)]
    with running(command, port, ONE_BODY, environment) as server:
        yield from _one_at_a_time(server, seconds)


def _ours(system: str, scratch: Path, seconds: int) -> Iterator[tuple[str, float, str]]:
    lake = scratch / "lake"
    register_policy(lake, scratch / "package")
    for workers in (1, 2):
        dataset = f"live_{workers}"
        port = free_port()
        command = ours_command(lake, dataset, port, OURS[system], workers)
        with running(command, port, ONE_BODY, {"OMP_NUM_THREADS": "1"}) as server:
            if workers == 2:
                load = run_wrk(server.url, ONE_BODY, connections=16, seconds=seconds)
                yield f"{ONE}, 2 workers", load.requests_per_s, "requests/s"
                continue
            yield from _one_at_a_time(server, seconds, expect=(lake, dataset))
            load = run_wrk(server.url, BATCH_BODY, connections=4, seconds=seconds)
            yield f"batches of {BATCH}", load.requests_per_s * BATCH, "actions/s"


def _one_at_a_time(
    server: Running, seconds: int, expect: tuple[Path, str] | None = None
) -> Iterator[tuple[str, float, str]]:
    yield "from start to the first answer", server.ready_s, "s"
    run_wrk(server.url, ONE_BODY, connections=16, seconds=1)
    before = 0 if expect is None else _settled(*expect)
    load = run_wrk(server.url, ONE_BODY, connections=16, seconds=seconds)
    if expect is not None:
        logged = _settled(*expect) - before
        # wrk leaves with up to 16 requests answered that it did not count.
        if not load.num_answers <= logged <= load.num_answers + 16:
            raise RuntimeError(f"found {logged} decisions of {load.num_answers} answers")
    yield f"{ONE}, 16 connections", load.requests_per_s, "requests/s"
    yield f"{ONE}, 16 connections, p50", load.p50_ms, "ms"
    yield f"{ONE}, 16 connections, p99", load.p99_ms, "ms"
    alone = run_wrk(server.url, ONE_BODY, connections=1, seconds=seconds)
    yield f"{ONE}, 1 connection, p50", alone.p50_ms, "ms"
    yield f"{ONE}, 1 connection, p99", alone.p99_ms, "ms"
    yield "memory of all processes", server.resident_mib(), "MiB"


def ours_command(lake: Path, dataset: str, port: int, server: str, workers: int) -> Sequence[str]:
    command = [str(Path(sys.executable).with_name("replaylake")), "serve", "bench"]
    command += ["--lake", str(lake), "--log-to", dataset, "--explore", "epsilon=0.05"]
    return [*command, "--port", str(port), "--server", server, "--workers", str(workers)]


def register_policy(lake_folder: Path, package: Path) -> None:
    from replaylake.datastore.episodes.spaces import Box, Discrete
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.datastore.lake.policies.package import save_package
    from replaylake.datastore.lake.policies.policy import PolicySpec

    spec = PolicySpec(Box((4,)), Discrete(2), "categorical")
    manifest = {"algorithm": "benchmark"}
    save_package(package, onnx=graph(), spec=spec, manifest=manifest, learner_weights=None)
    lake = open_lake(lake_folder, create=True)
    lake.registry.register("bench", package, run_id="none", lineage={})


def _settled(lake: Path, dataset: str) -> int:
    """Return the rows of the decisions table once no more come."""
    from replaylake.datastore.lake.lake import open_lake

    handle = open_lake(lake).dataset(dataset)
    before, until = -1, time.monotonic() + SETTLE_S
    while time.monotonic() < until:
        time.sleep(1.5)
        now = handle.decisions.snapshot().num_rows
        if now == before:
            break
        before = now
    return before


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
