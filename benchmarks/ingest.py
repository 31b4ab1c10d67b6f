"""Foreign logs into a lake: D4RL-style HDF5, CSV, and RLlib's column JSON, one file each.

Ours is `ingest` whole: sha256 of the source, every check at the door, shards, fsync and commit.
Beside it what one would write by hand: read the file with its library into arrays, and write one
Parquet file with our settings and fsync; no checks. Files are warm in the page cache. The best of
several repeats in one process, and beside it the first, which has to get its memory.

    python -m benchmarks.ingest memory --gigabytes 20 --folder DIR

ingests a CSV of that size and prints the greatest memory of the process.

    python -m benchmarks.ingest beside_duckdb --folder DIR

ingests files of 1M short episodes (decisions, and steps in episodes of 100; CSV and JSON Lines),
and decisions with a unique key too, beside DuckDB's COPY of the same file to Parquet, which checks
nothing. Each runs in a process of its own, in turns; printed is the least of the rounds of each as
a multiple of DuckDB's, in processor time (user and system, all threads), wall time and memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import duckdb
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pyarrow.parquet as pq

from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.storage.arrow_values import keep_pandas_unloaded

EPISODE_STEPS = 1_000
CSV_COLUMNS = ReadOptions({"observation": "x,x_dot,theta,theta_dot"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=("ours", "by_hand", "memory", "beside_duckdb", "one"))
    parser.add_argument("--folder", type=Path, required=True, help="holds the files between runs")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gigabytes", type=float, default=20.0, help="of the CSV, for memory")
    parser.add_argument("--run", default="", help="for one: FILE:SYSTEM, as beside_duckdb runs it")
    options = parser.parse_args()
    if options.system == "one":
        print(json.dumps(run_one(options.folder, *options.run.split(":"))))
        return
    if options.system == "beside_duckdb":
        beside_duckdb(options.folder, options.steps, options.repeats)
        return
    if options.system == "memory":
        print(json.dumps(memory(options.folder, options.gigabytes)), flush=True)
        return
    measure = ours if options.system == "ours" else by_hand
    measure(options.folder, d4rl(options.folder, "warm", 2_000, 3, 2))  # loads the libraries
    for path, num_steps in (
        (d4rl(options.folder, "d4rl-17-6", options.steps, 17, 6), options.steps),
        (d4rl(options.folder, "d4rl-11-3", options.steps, 11, 3), options.steps),
        (csv(options.folder, "csv", options.steps), options.steps),
        (rllib(options.folder, "rllib-json", options.steps // 5), options.steps // 5),
    ):
        seconds = [measure(options.folder, path) for _ in range(options.repeats)]
        for name, figure in (("", min(seconds)), (" the first time", seconds[0])):
            line = {
                "workload": f"ingest {path.stem}, {num_steps:,} steps{name}",
                "system": options.system,
                "figure": num_steps / figure,
                "unit": "steps/s",
            }
            print(json.dumps(line), flush=True)


def ours(folder: Path, path: Path) -> float:
    """Ingest into a new lake, and return the seconds."""
    place = folder / "lake"
    shutil.rmtree(place, ignore_errors=True)
    lake = open_lake(place, create=True)
    read = CSV_COLUMNS if path.suffix == ".csv" else None
    started = time.perf_counter()
    receipt = ingest(lake, [path], "log", options=read)
    seconds = time.perf_counter() - started
    if receipt.steps.rejected or not receipt.steps.committed:
        raise SystemExit(f"{path.name}: {receipt.steps}")
    return seconds


def by_hand(folder: Path, path: Path) -> float:
    """Read with the format's library and write one Parquet file, and return the seconds."""
    started = time.perf_counter()
    table = READERS[path.suffix](path)
    target = folder / "by_hand.parquet"
    pq.write_table(table, target, compression="zstd", compression_level=1, row_group_size=131_072)
    with target.open("rb") as stream:
        os.fsync(stream.fileno())
    return time.perf_counter() - started


def read_hdf5(path: Path) -> pa.Table:
    with h5py.File(path) as file:
        arrays = {name: file[name][:] for name in file}
    columns = {
        name: pa.FixedSizeListArray.from_arrays(pa.array(array.reshape(-1)), array.shape[1])
        if array.ndim > 1
        else pa.array(array)
        for name, array in arrays.items()
    }
    return pa.table(columns)


def read_rllib(path: Path) -> pa.Table:
    lines = pa_json.read_json(path, pa_json.ReadOptions(block_size=16 << 20))
    columns = {n: lines[n].combine_chunks().flatten() for n in lines.schema.names if n != "type"}
    return pa.table(columns)


READERS: dict[str, Callable[[Path], pa.Table]] = {
    ".hdf5": read_hdf5,
    ".csv": pa_csv.read_csv,
    ".json": read_rllib,
}


def d4rl(folder: Path, name: str, num_steps: int, num_observed: int, num_acted: int) -> Path:
    """Write observations, actions, rewards, terminals, timeouts and next_observations, once."""
    path = folder / f"{name}.hdf5"
    if path.exists():
        return path
    rng = np.random.default_rng(0)
    states = rng.normal(size=(num_steps + 1, num_observed)).astype(np.float32)
    timeouts = np.arange(1, num_steps + 1) % EPISODE_STEPS == 0
    with h5py.File(path, "w") as file:
        file["observations"], file["next_observations"] = states[:-1], states[1:]
        file["actions"] = rng.uniform(-1, 1, (num_steps, num_acted)).astype(np.float32)
        file["rewards"] = rng.normal(size=num_steps).astype(np.float32)
        file["terminals"], file["timeouts"] = np.zeros(num_steps, bool), timeouts
    return path


def csv(folder: Path, name: str, num_steps: int) -> Path:
    """Write CartPole's columns with an episode id and a step, once."""
    path = folder / f"{name}.csv"
    if not path.exists():
        with path.open("wb") as stream:
            write_csv(stream, 0, num_steps, header=True)
    return path


def write_csv(stream: object, start: int, num_steps: int, *, header: bool) -> None:
    rng = np.random.default_rng(start)
    rows = np.arange(start, start + num_steps)
    names = ("x", "x_dot", "theta", "theta_dot")
    steps = rows % EPISODE_STEPS
    table = pa.table(
        {
            "episode_id": rows // EPISODE_STEPS,
            "step": steps,
            **{name: rng.normal(size=num_steps).astype(np.float32) for name in names},
            "action": rng.integers(0, 2, num_steps),
            "reward": np.ones(num_steps),
            "terminated": steps == EPISODE_STEPS - 1,
        }
    )
    pa_csv.write_csv(table, stream, pa_csv.WriteOptions(include_header=header))


def rllib(folder: Path, name: str, num_steps: int) -> Path:
    """Write sample batches of 200 steps as JSON lines, once."""
    path = folder / f"{name}.json"
    if path.exists():
        return path
    rng = np.random.default_rng(0)
    with path.open("w") as stream:
        for number in range(num_steps // 200):
            states = rng.normal(size=(201, 4)).astype(np.float32).astype(float)
            batch = {
                "type": "SampleBatch",
                "obs": states[:-1].tolist(),
                "new_obs": states[1:].tolist(),
                "actions": rng.integers(0, 2, 200).tolist(),
                "rewards": [1.0] * 200,
                "terminateds": [False] * 199 + [True],
                "truncateds": [False] * 200,
                "eps_id": [number] * 200,
                "t": list(range(200)),
                "action_logp": np.log(rng.uniform(0.1, 1, 200)).tolist(),
            }
            stream.write(json.dumps(batch) + "\n")
    return path


def beside_duckdb(folder: Path, num_rows: int, rounds: int) -> None:
    """Print ratios of ingests to DuckDB's COPY of the same files."""
    files = write_short_episodes(folder, num_rows)
    runs = [f"{path.name}:{system}" for path in files for system in ("duckdb", "ours")]
    runs += [f"{path.name}:unique" for path in files if path.stem == "decisions"]
    figures: dict[str, list[list[float]]] = {run: [] for run in runs}
    for _ in range(rounds):
        for run in runs:
            command = [sys.executable, "-m", "benchmarks.ingest", "one", "--folder", str(folder)]
            found = subprocess.run(
                [*command, "--run", run], check=True, stdout=subprocess.PIPE, text=True
            )
            figures[run].append(json.loads(found.stdout.splitlines()[-1]))
    for run in runs:
        name, system = run.split(":")
        if system == "duckdb":
            continue
        theirs = np.min(figures[f"{name}:duckdb"], axis=0)
        ours = np.min(figures[run], axis=0)
        line = {
            "workload": f"ingest {name}, {num_rows:,} rows" + ", unique" * (system == "unique"),
            "system": "ours by DuckDB's COPY",
            "figure": round(ours[0] / theirs[0], 2),
            "unit": "times the processor time",
            "wall": round(ours[1] / theirs[1], 2),
            "cpu_s": [round(ours[0], 2), round(theirs[0], 2)],
            "peak_mib": round(max(figure[2] for figure in figures[run])),
        }
        print(json.dumps(line), flush=True)


def run_one(folder: Path, name: str, system: str) -> list[float]:
    """Read one file by one system; return processor and wall seconds, and the peak in MiB."""
    path = folder / name
    keep_pandas_unloaded()  # as the command does
    before, started = processor_s(), time.perf_counter()
    if system == "duckdb":
        read = "read_csv" if path.suffix == ".csv" else "read_json"
        query = f"SELECT * FROM {read}('{path}')"
        target = folder / "by_duckdb.parquet"
        duckdb.connect().execute(f"COPY ({query}) TO '{target}' (FORMAT parquet, COMPRESSION zstd)")
    else:
        place = folder / "lake"
        shutil.rmtree(place, ignore_errors=True)
        mapping = {"observation": "x0,x1,x2"}
        if path.stem == "decisions":
            mapping |= {"episode_id": "event_id", "event": "event_id"}
        receipt = ingest(
            open_lake(place, create=True),
            [path],
            "log",
            format="bandit" if path.stem == "decisions" else "auto",
            options=ReadOptions(mapping),
            unique=["event"] if system == "unique" else [],
        )
        if receipt.steps.rejected or not receipt.steps.committed:
            raise SystemExit(f"{name}: {receipt.steps}")
    seconds = processor_s() - before, time.perf_counter() - started
    return [*seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]


def processor_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def write_short_episodes(folder: Path, num: int) -> list[Path]:
    """Write decisions of seven columns and steps of eight, as CSV and as JSON Lines, once."""
    rng = np.random.default_rng(0)
    chances = np.array([0.4, 0.3, 0.2, 0.1])
    rows, actions = np.arange(num), rng.choice(4, num, p=chances)
    context = {f"x{i}": rng.normal(size=num).round(4) for i in range(3)}
    logs = {
        "decisions": {
            "event_id": rows + 10**9,
            **context,
            "action": actions,
            "reward": (rng.random(num) < 0.1).astype(int),
            "propensity": chances[actions],
        },
        "steps": {
            "episode_id": rows // 100,
            "step": rows % 100,
            **context,
            "action": actions,
            "reward": rng.normal(size=num).round(3),
            "terminated": rows % 100 == 99,
        },
    }
    paths = []
    for name, columns in logs.items():
        paths += [folder / f"{name}.csv", folder / f"{name}.jsonl"]
        if all(path.exists() for path in paths[-2:]):
            continue
        pa_csv.write_csv(pa.table(columns), paths[-2])
        with paths[-1].open("w") as file:
            for row in zip(*(column.tolist() for column in columns.values()), strict=True):
                file.write(json.dumps(dict(zip(columns, row, strict=True))) + "\n")
    return paths


def memory(folder: Path, gigabytes: float) -> dict[str, object]:
    """Ingest a CSV of so many GB and return the greatest resident memory of this process."""
    path, block = folder / "large.csv", 1_000_000
    with path.open("wb") as stream:
        start = 0
        while stream.tell() < gigabytes * 1e9:
            write_csv(stream, start, block, header=start == 0)
            start += block
    place = folder / "lake-memory"
    shutil.rmtree(place, ignore_errors=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    started = time.perf_counter()
    receipt = ingest(open_lake(place, create=True), [path], "log", options=CSV_COLUMNS)
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    path.unlink()
    return {
        "workload": f"ingest of {gigabytes:g} GB of CSV",
        "system": "ours",
        "figure": round(peak),
        "unit": "MiB",
        "before_mib": round(before),
        "steps": receipt.steps.committed,
        "steps_per_s": round(receipt.steps.committed / seconds),
    }


if __name__ == "__main__":
    main()
