"""SQL over a lake beside DuckDB on the same files: returns, one-step logs, many shards.

Both answer the same query in turns; DuckDB reads the Parquet files by their names, and knows
nothing of versions, of columns that came later, or of files that are gone. The command over 50
datasets of 1,000 shards runs in processes of its own, timed without their imports. Run it alone
with `python benchmarks/sql.py`; it prints one JSON line per figure and system.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import duckdb
import numpy as np
import pyarrow as pa

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.query import summaries

EPISODE_STEPS: Final = 1_000
SHARD_STEPS: Final = 1_000_000
OF_STEPS: Final = 'SELECT episode_id, sum(reward) AS "return" FROM {} GROUP BY episode_id'
OF_EPISODES: Final = 'SELECT episode_id, "return" FROM {}'

# What a new process does for one command, its imports aside.
OURS: Final = """
import sys, time
import pyarrow.dataset, pyarrow.parquet
from replaylake.datastore.lake.lake import open_lake
start = time.perf_counter()
open_lake(sys.argv[1]).sql(sys.argv[2])
print(1000 * (time.perf_counter() - start))
"""
PEER: Final = """
import sys, time
import duckdb, pyarrow.dataset
paths = sys.stdin.read().split()
start = time.perf_counter()
connection = duckdb.connect()
connection.sql(sys.argv[1].format(f"read_parquet({paths})")).to_arrow_table()
print(1000 * (time.perf_counter() - start))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000_000, help="of 1,000-step episodes")
    parser.add_argument("--single", type=int, default=1_000_000, help="one-step episodes")
    parser.add_argument("--datasets", type=int, default=50)
    parser.add_argument("--shards", type=int, default=1_000, help="of each of these datasets")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="where to write")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for figures in (*returns(Path(folder), options), *many_shards(Path(folder), options)):
            report(*figures)


def returns(folder: Path, options: argparse.Namespace) -> list[tuple[str, float, float]]:
    """Return (workload, ours, DuckDB's), each in ms, for two datasets of one lake."""
    lake = open_lake(folder / "lake", create=True)
    fill(lake.dataset("long"), options.steps, EPISODE_STEPS, SHARD_STEPS)
    fill(lake.dataset("single"), options.single, 1, SHARD_STEPS)
    episodes = f"{options.steps:,} steps in episodes of {EPISODE_STEPS:,}"
    single = f"{options.single:,} one-step episodes"
    raw = OF_STEPS.format(files(lake, "long"))
    raw_single = OF_STEPS.format(files(lake, "single"))
    start = time.perf_counter()
    summaries.refresh(lake.dataset("long").snapshot().table)
    made = 1000 * (time.perf_counter() - start)
    over_steps = in_turns(lake, OF_STEPS.format("long.steps"), raw, options.turns)
    over_episodes = in_turns(lake, OF_EPISODES.format("long.episodes"), raw, options.turns)
    over_single = in_turns(lake, OF_EPISODES.format("single.episodes"), raw_single, options.turns)
    return [
        (f"returns over steps: {episodes}", *over_steps),
        (f"returns over episodes: {episodes}", *over_episodes),
        (f"the summary for it, written once: {episodes}", made, over_steps[1]),
        (f"returns over episodes: {single}", *over_single),
    ]


def many_shards(folder: Path, options: argparse.Namespace) -> list[tuple[str, float, float]]:
    """Return the same for one command in a lake of many datasets of many shards."""
    lake = open_lake(folder / "wide", create=True)
    first = lake.dataset("d0")
    fill(first, 100 * options.shards, 50, 100)
    for number in range(1, options.datasets):
        shutil.copytree(first.path, lake.path / f"d{number}", copy_function=os.link)
    about = f"{options.datasets} datasets of {options.shards:,} shards"
    paths = " ".join(map(str, first.snapshot().table.paths()))
    figures = []
    for name, ours, peer in (
        ("sum over steps", "SELECT sum(reward) FROM d0.steps", "SELECT sum(reward) FROM {}"),
        ("returns over episodes", OF_EPISODES.format("d0.episodes"), OF_STEPS),
    ):
        in_process(OURS, str(lake.path), ours)  # the summary is there afterwards
        times = [
            (in_process(OURS, str(lake.path), ours), in_process(PEER, peer, read=paths))
            for _ in range(options.turns)
        ]
        middles = (statistics.median(column) for column in zip(*times, strict=True))
        figures.append((f"one command, {name}: {about}", *middles))
    return figures


def in_turns(lake: Lake, ours: str, peer: str, turns: int) -> tuple[float, float]:
    """Return the medians of both, in ms; the first of each is not counted."""
    connection = duckdb.connect()
    times = []
    for _ in range(turns + 1):
        times.append(
            (
                milliseconds(lambda: lake.sql(ours)),
                milliseconds(lambda: connection.sql(peer).to_arrow_table()),
            )
        )
    a, b = zip(*times[1:], strict=True)
    return statistics.median(a), statistics.median(b)


def milliseconds(call: Callable[[], pa.Table]) -> float:
    start = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - start)


def in_process(code: str, *arguments: str, read: str = "") -> float:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, input=read, capture_output=True, text=True, check=True)
    return float(done.stdout)


def files(lake: Lake, dataset: str) -> str:
    return f"read_parquet({[str(path) for path in lake.dataset(dataset).snapshot().table.paths()]})"


def fill(dataset: Dataset, num_steps: int, episode_steps: int, shard_steps: int) -> None:
    """Append episodes of equal length, a shard a commit."""
    dataset.create(Box((4,)), Discrete(2))
    rng = np.random.default_rng(0)
    schema = dataset.snapshot().table.schema
    for start in range(0, num_steps, shard_steps):
        rows = made(schema, start, min(shard_steps, num_steps - start), episode_steps, rng)
        dataset.table.append(rows, producer="benchmark", sequence=start)


def made(
    schema: pa.Schema, start: int, num: int, episode_steps: int, rng: np.random.Generator
) -> pa.Table:
    """Return rows of whole episodes, the first of them number `start / episode_steps`."""
    numbers = np.arange(start, start + num) // episode_steps
    steps = (np.arange(num) % episode_steps).astype(np.int32)
    names = pa.array([f"benchmark/{n:09d}" for n in range(numbers[0], numbers[-1] + 1)])
    columns = {
        "episode_id": names.take(pa.array(numbers - numbers[0])),
        "step": steps,
        "env_step": steps,
        "agent_id": pa.array([""]).take(pa.array(np.zeros(num, np.int32))),
        "observation": pa.FixedSizeListArray.from_arrays(
            pa.array(rng.standard_normal(4 * num, np.float32)),
            type=schema.field("observation").type,
        ),
        "action": steps.astype(np.int64) % 2,
        "reward": rng.standard_normal(num),
        "terminated": steps == episode_steps - 1,
        "truncated": np.zeros(num, bool),
        "behavior_log_prob": np.full(num, -0.7, np.float32),
        "policy": pa.array(["ppo"]).take(pa.array(np.zeros(num, np.int32))),
        "policy_version": numbers // 1_000,
        "timestamp": pa.array(1_000_000 * np.arange(start, start + num), pa.timestamp("us", "UTC")),
    }
    arrays = []
    for field in schema:
        values = columns.get(field.name)
        array = pa.nulls(num, field.type) if values is None else pa.array(values)
        arrays.append(array if array.type == field.type else array.cast(field.type))
    return pa.table(arrays, schema=schema)


def report(workload: str, ours: float, peer: float) -> None:
    """Print a figure's two lines; a ratio above 1 is in favor of the line's system."""
    for system, figure, ratio in (("ours", ours, peer / ours), ("duckdb", peer, ours / peer)):
        line = {"workload": workload, "system": system, "figure": round(figure, 2), "unit": "ms"}
        print(json.dumps({**line, "ratio": round(ratio, 3)}), flush=True)


if __name__ == "__main__":
    main()
