"""The explorer's pages: how long they take, how much memory, and what they cost a trainer.

Every page is requested 21 times over one connection, 0.3 s apart: its first visit by a server that
has just started, and the median and 95th percentile of 20 later ones, until the first byte of the
answer, which is written at once. Before that, the time until a dataset's steps are counted, at its
very first visit. Memory is the server's: now, and the most that it had.

The dataset has episodes of 100 steps, 500,000 steps a shard, one commit each. One shard is encoded
by the library from episodes of noise (observations of four float32 numbers, two actions,
propensity, policy version, time); each other one has its rows with other episode ids, versions and
times, and is written and committed by the library.

Of up to 2M steps, pages of the same rows are measured beside Datasette, in the same run: a page of
100 steps, and the first page of the episodes by descending return. Datasette reads a SQLite file of
both tables, with an index of the returns, and counts of its tables cached (`--inspect-file`): ours
has neither. It has the explorer's priority, nice 10. `datasette_nosuggest` is without the facets
that it looks for.

The other direction is what pages cost: batches/s of a sampler (256 transitions, one process), with
and without 20 clients that follow the page of a run as its script does, and one that requests the
pages above in turns, one every 2 s, all at nice 19. The server has nice 10 and one thread for
queries, as always.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import re
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from benchmarks.run import environment
from benchmarks.serving.servers import free_port
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.rows import encode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.episodes.validation import validate_all
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.runs.lease import RunLease
from replaylake.datastore.lake.runs.metrics import MetricsLog
from replaylake.datastore.names import new_ulid

EPISODE_STEPS: Final = 100
SHARD_STEPS: Final = 500_000
NUM_LATER: Final = 20
PAUSE_S: Final = 0.3
MAX_PEER_STEPS: Final = 2_000_000
NUM_FOLLOWERS: Final = 20
LOAD_EVERY_S: Final = 2.0
_START_TIMEOUT_S: Final = 60.0
_COUNT_TIMEOUT_S: Final = 1_800.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where the lake is made; a real disk")
    parser.add_argument("--lake", type=Path, help="a lake of an earlier run, which is kept")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=10.0, help="of sampling, each way")
    parser.add_argument("--rounds", type=int, default=5, help="of sampling, each way")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folder = options.lake or Path(scratch) / "lake"
        lake = make_lake(folder, options.steps)
        with running_run(lake) as run_id:
            paths = list_pages(lake, run_id)
            measure_pages(folder, paths, options.steps)
            if options.steps <= MAX_PEER_STEPS:
                measure_peer(lake, Path(scratch), paths)
            measure_trainer(lake, paths, run_id, options.seconds, options.rounds)


def report(workload: str, system: str, figure: float, unit: str) -> None:
    line = {"workload": f"explorer, {workload}", "system": system, "figure": figure, "unit": unit}
    print(json.dumps(line), flush=True)


# --- the lake -------------------------------------------------------------------------------------


def make_lake(folder: Path, num_steps: int) -> Lake:
    """Return a lake whose dataset `d` has so many steps; what there is already stays."""
    lake = open_lake(folder, create=True)
    dataset = lake.dataset("d")
    if not dataset.exists():
        dataset.create(Box((4,), "float32", -3.0, 3.0), Discrete(2))
    num_shards = math.ceil(num_steps / SHARD_STEPS)
    if dataset.find_commit("bench", num_shards - 1) is not None:
        return lake
    rows = make_rows(dataset)
    for number in range(num_shards):
        if dataset.find_commit("bench", number) is None:
            dataset.table.append(
                with_other_ids(rows, number),
                producer="bench",
                sequence=number,
                info={
                    "num_steps": rows.num_rows,
                    "num_episodes": rows.num_rows // EPISODE_STEPS,
                },
            )
    return lake


def make_rows(dataset: Dataset) -> pa.Table:
    """Return the rows of one shard."""
    rng = np.random.default_rng(0)
    spec = dataset.spec
    episodes = [
        Episode(
            f"bench/{number:05}",
            observations=rng.standard_normal((EPISODE_STEPS, 4), np.float32),
            actions=rng.integers(0, 2, EPISODE_STEPS),
            rewards=rng.integers(0, 8, EPISODE_STEPS) / 8,
            terminated=number % 3 > 0,
            truncated=number % 3 == 0,
            behavior_log_probs=np.log(rng.uniform(0.3, 0.9, EPISODE_STEPS)).astype(np.float32),
            policies=np.full(EPISODE_STEPS, "behavior", dtype=object),
            policy_versions=np.full(EPISODE_STEPS, 1),
            timestamps=1_700_000_000_000_000
            + (number * EPISODE_STEPS + np.arange(EPISODE_STEPS)) * 1_000,
        )
        for number in range(SHARD_STEPS // EPISODE_STEPS)
    ]
    return encode(validate_all(episodes, spec.observation_space, spec.action_space), spec)


def with_other_ids(rows: pa.Table, number: int) -> pa.Table:
    """Return the rows of the shard `number`."""
    num = rows.num_rows // EPISODE_STEPS
    ids = pa.array([f"bench/{number:05}-{place:05}" for place in range(num)])
    of_steps = ids.take(pa.array(np.repeat(np.arange(num), EPISODE_STEPS)))
    times = rows["timestamp"].cast(pa.int64()).to_numpy() + number * SHARD_STEPS * 1_000
    columns = {
        "episode_id": of_steps,
        "policy_version": pa.array(np.full(rows.num_rows, 1 + number // 10)),
        "timestamp": pa.array(times),
    }
    for name, values in columns.items():
        field = rows.schema.field(name)
        place = rows.schema.get_field_index(name)
        rows = rows.set_column(place, field, values.cast(field.type))
    return rows


@contextmanager
def running_run(lake: Lake) -> Iterator[str]:
    """Record a run that trains until the block ends, with 1,000 rows of metrics."""
    run_id = new_ulid()
    record = {
        "run_id": run_id,
        "kind": "offline",
        "status": "running",
        "algorithm": "bc",
        "config": {"updates": 1_000_000},
        "datasets": [{"dataset": "d", "version": 1, "where": None, "num_episodes": 5_000}],
        "started_ms": time.time_ns() // 1_000_000,
    }
    lake.registry.record_run(run_id, record)
    with MetricsLog(lake.storage, run_id) as metrics:
        for update in range(1_000):
            metrics.add(update * 100, {"loss": 1 / (1 + update), "q": update / 7}, time.time())
    with RunLease(lake.storage, run_id):
        yield run_id
    lake.registry.record_run(run_id, {**record, "status": "done"})


# --- pages ----------------------------------------------------------------------------------------


def list_pages(lake: Lake, run_id: str) -> dict[str, str]:
    """Return the address of each page, by its name."""
    newest = lake.snapshot("d").version
    last = f"bench/{len(lake.snapshot('d').files) - 1:05}-00042"
    text = "SELECT%20*%20FROM%20d.steps%20LIMIT%20100"
    return {
        "lake": "/",
        "dataset": "/datasets/d",
        "dataset, first version": "/datasets/d?at=1",
        "diff of the last commit": f"/datasets/d/diff?a={newest - 1}&b={newest}",
        "episodes": "/datasets/d/episodes",
        "episodes by return": "/datasets/d/episodes?sort=return&order=descending",
        "episodes, SQL condition": "/datasets/d/episodes?where=num_steps%20%3E%2050",
        "episode": f"/datasets/d/episode?id={last}",
        "runs": "/runs",
        "run": f"/runs/{run_id}",
        "policies": "/policies",
        "100 steps by SQL": f"/sql?q={text}",
    }


class Server:
    """A process that answers HTTP, and one connection to it."""

    def __init__(self, command: Sequence[str], port: int) -> None:
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.port = port
        self.pid = self._process.pid
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                self.connect()
                return
            except OSError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
                time.sleep(0.02)

    def connect(self) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        self.connection.connect()

    def get(self, path: str) -> tuple[float, bytes]:
        """Return the seconds until the first byte of an answer, and its body."""
        began = time.perf_counter()
        self.connection.request("GET", path)
        answer = self.connection.getresponse()
        seconds = time.perf_counter() - began
        body = answer.read()
        if answer.status != 200:
            raise SystemExit(f"{path}: found status {answer.status}: {body[:2000]!r}")
        return seconds, body

    def memory_mib(self) -> tuple[float, float]:
        """Return the resident memory of the process now, and at most."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        now, most = (re.search(rf"{name}:\s+(\d+) kB", text) for name in ("VmRSS", "VmHWM"))
        assert now is not None
        assert most is not None
        return int(now[1]) / 1024, int(most[1]) / 1024

    def processor_s(self) -> float:
        """Return the processor time of the process, and of those that it has waited for."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self.connection.close()
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()


@contextmanager
def explorer(folder: Path) -> Iterator[Server]:
    port = free_port()
    command = [str(Path(sys.executable).with_name("replaylake")), "explore", str(folder)]
    server = Server([*command, "--port", str(port)], port)
    try:
        yield server
    finally:
        server.close()


def measure_pages(folder: Path, paths: dict[str, str], num_steps: int) -> None:
    sized = f"{num_steps:,} steps"
    shutil.rmtree(folder / "d" / "_derived", ignore_errors=True)
    with explorer(folder) as server:
        began = time.perf_counter()
        first, _ = server.get("/datasets/d")
        report(f"{sized}: dataset, nothing counted: first byte", "ours", first, "s")
        while b'"progress": [' in server.get("/datasets/d.json")[1]:
            if time.perf_counter() - began > _COUNT_TIMEOUT_S:
                raise SystemExit("the dataset's steps were not counted in half an hour")
            time.sleep(0.2)
        report(f"{sized}: all steps counted", "ours", time.perf_counter() - began, "s")
        report(f"{sized}: memory, after counting", "ours", server.memory_mib()[0], "MiB")
        report(f"{sized}: memory, most while counting", "ours", server.memory_mib()[1], "MiB")
    # Another process: it knows what is on the disk.
    with explorer(folder) as server:
        for name, path in paths.items():
            measure_page(server, f"{sized}: {name}", "ours", path)
        report(f"{sized}: memory, after all pages", "ours", server.memory_mib()[0], "MiB")
        report(f"{sized}: memory, most", "ours", server.memory_mib()[1], "MiB")


def measure_page(server: Server, workload: str, system: str, path: str) -> None:
    server.connect()  # that of the page before may be closed by now
    first, _ = server.get(path)
    later = []
    for _ in range(NUM_LATER):
        time.sleep(PAUSE_S)
        later.append(server.get(path)[0])
    later.sort()
    report(f"{workload}, first visit", system, first * 1e3, "ms")
    report(f"{workload}, median", system, statistics.median(later) * 1e3, "ms")
    report(f"{workload}, p95", system, later[math.ceil(0.95 * NUM_LATER) - 1] * 1e3, "ms")


# --- Datasette ------------------------------------------------------------------------------------


def measure_peer(lake: Lake, folder: Path, paths: dict[str, str]) -> None:
    """Measure the two table pages of the same rows, in turns."""
    try:
        python = environment("datasette")
    except subprocess.CalledProcessError as error:
        print(f"# datasette: not installed ({error}), left out", file=sys.stderr)
        return
    database = folder / "bench.db"
    write_sqlite(lake, database)
    inspected = folder / "inspect.json"
    datasette = [str(python.with_name("datasette"))]
    subprocess.run(
        [*datasette, "inspect", str(database), "--inspect-file", str(inspected)], check=True
    )
    port = free_port()
    peer = Server(
        [
            *("nice", "-n", "10"),
            *datasette,
            "serve",
            "--immutable",
            str(database),
            "--inspect-file",
            str(inspected),
            "--port",
            str(port),
        ],
        port,
    )
    assert lake.path is not None
    try:
        with explorer(lake.path) as ours:
            pages = {
                "table of 100 steps": (paths["100 steps by SQL"], "/bench/steps?_size=100"),
                "table of episodes by return": (
                    paths["episodes by return"],
                    "/bench/episodes?_sort_desc=return&_size=100",
                ),
            }
            for name, (own, other) in pages.items():
                measure_page(ours, name, "ours", own)
                measure_page(peer, name, "datasette", other)
                measure_page(peer, name, "datasette_nosuggest", f"{other}&_nosuggest=1")
            report("memory, after table pages", "ours", ours.memory_mib()[0], "MiB")
            report("memory, after table pages", "datasette", peer.memory_mib()[0], "MiB")
    finally:
        peer.close()


def write_sqlite(lake: Lake, path: Path) -> None:
    """Write steps and episodes to a SQLite file; what is a list in a cell is JSON, as there."""
    with sqlite3.connect(path) as connection:
        for view in ("steps", "episodes"):
            rows = lake.sql(f"SELECT * FROM d.{view}")
            columns = {name: rows[name] for name in rows.column_names}
            names = ", ".join(f'"{name}"' for name in columns)
            connection.execute(f"CREATE TABLE {view} ({names})")
            marks = ", ".join("?" * len(columns))
            for batch in rows.to_batches(50_000):
                values = (map(to_sqlite, column.to_pylist()) for column in batch.columns)
                connection.executemany(
                    f"INSERT INTO {view} VALUES ({marks})", zip(*values, strict=True)
                )
        connection.execute('CREATE INDEX by_return ON episodes ("return")')


def to_sqlite(value: Any) -> Any:
    if isinstance(value, list):
        return json.dumps(value)
    return value.isoformat() if hasattr(value, "isoformat") else value


# --- beside a trainer -----------------------------------------------------------------------------


def measure_trainer(
    lake: Lake, paths: dict[str, str], run_id: str, seconds: float, rounds: int
) -> None:
    """Measure in turns, so that what else disturbs the machine meets both."""
    assert lake.path is not None
    sampler = lake.snapshot("d@2").replay().uniform(256, seed=0)
    count_batches(sampler, 2.0)
    alone: list[tuple[float, float]] = []
    beside: list[tuple[float, float]] = []
    busy: list[float] = []
    with explorer(lake.path) as server:
        server.get("/datasets/d")
        for _ in range(rounds):
            alone.append(count_batches(sampler, seconds))
            with visitors(server.port, paths, run_id):
                before = server.processor_s()
                beside.append(count_batches(sampler, seconds))
                busy.append((server.processor_s() - before) / seconds)
    for place, unit in enumerate(("batches/s", "batches/processor-s")):
        report("sampling alone", "ours", statistics.median(one[place] for one in alone), unit)
        with_pages = statistics.median(one[place] for one in beside)
        report("sampling beside 20 pages", "ours", with_pages, unit)
    report("server beside it, of a core", "ours", 100 * statistics.median(busy), "%")


def count_batches(sampler: Any, seconds: float) -> tuple[float, float]:
    """Return the batches in a second, and in a second of this process's own on a processor.

    Where others have most of the machine, only the second tells what the server costs.
    """
    num, began, own = 0, time.perf_counter(), time.process_time()
    while (elapsed := time.perf_counter() - began) < seconds:
        for _ in range(100):
            sampler.sample()
        num += 100
    return num / elapsed, num / (time.process_time() - own)


@contextmanager
def visitors(port: int, paths: dict[str, str], run_id: str) -> Iterator[None]:
    """Run the clients until the block ends, in a process of their own."""
    # They would be on other machines.
    command = [
        "nice",
        "-n",
        "19",
        sys.executable,
        "-c",
        _VISITORS,
        str(port),
        f"/runs/{run_id}",
        *paths.values(),
    ]
    process = subprocess.Popen([str(part) for part in command])
    time.sleep(1.0)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


# In a process of their own, without the interpreter lock of the sampler.
_VISITORS: Final = """
import http.client, itertools, sys, threading, time

port, run, paths = int(sys.argv[1]), sys.argv[2], sys.argv[3:]

def visit(paths, every_s, wait_s):
    time.sleep(wait_s)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    due = time.monotonic()
    for path in itertools.cycle(paths):
        try:
            connection.request("GET", path)
            connection.getresponse().read()
        except (http.client.HTTPException, OSError):
            connection.close()  # the server ends those that were idle for five seconds
            connection.request("GET", path)
            connection.getresponse().read()
        due = max(due + every_s, time.monotonic())
        time.sleep(due - time.monotonic() if due > time.monotonic() else 0)

clients = [([run], 5.0, 0.25 * number) for number in range(20)] + [(paths, 2.0, 0.1)]
for client in clients:
    threading.Thread(target=visit, args=client, daemon=True).start()
threading.Event().wait()
"""


if __name__ == "__main__":
    main()
