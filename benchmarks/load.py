"""A snapshot's steps as contiguous numpy arrays in RAM, beside pyarrow reading the same files.

Both return step, observation, action, reward, terminated and truncated of every row; pyarrow reads
with its own threads, and checks nothing. Ours compares each shard with its sha256 first. The files
are warm in the page cache. Best of several repeats, the systems in processes of their own.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from benchmarks.append import as_episodes
from benchmarks.steps import episodes
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.replay.arrays import DEFAULT_COLUMNS

COMMIT_STEPS = 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--folder", type=Path, required=True, help="holds the lake between runs")
    parser.add_argument("--steps", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    snapshot = prepared(options.folder / f"load-{options.steps}", options.steps)
    seconds = []
    for _ in range(options.repeats):
        started = time.perf_counter()
        arrays = SYSTEMS[options.system](snapshot)
        seconds.append(time.perf_counter() - started)
        if arrays is not None and len(arrays["reward"]) != options.steps:
            raise SystemExit(f"{options.system}: found {len(arrays['reward'])} rows")
        del arrays
    figure = {"workload": f"load {options.steps:,} steps", "system": options.system}
    print(json.dumps({**figure, "figure": min(seconds), "unit": "s"}), flush=True)


def ours(snapshot: Snapshot) -> dict[str, np.ndarray]:
    return snapshot.arrays()


def pyarrow(snapshot: Snapshot) -> dict[str, np.ndarray]:
    table = pq.read_table([*map(str, snapshot.table.paths())], columns=list(DEFAULT_COLUMNS))
    arrays = {}
    for name in DEFAULT_COLUMNS:
        column = table[name].combine_chunks()
        if name in ("observation", "action"):
            arrays[name] = column.flatten().to_numpy().reshape(len(column), -1)
        else:
            arrays[name] = column.to_numpy(zero_copy_only=False)
    return arrays


def pyarrow_table(snapshot: Snapshot) -> None:
    """Read to an Arrow table alone, which is no array yet."""
    pq.read_table([*map(str, snapshot.table.paths())], columns=list(DEFAULT_COLUMNS))


SYSTEMS: dict[str, Callable[[Snapshot], dict[str, np.ndarray] | None]] = {
    "ours": ours,
    "pyarrow": pyarrow,
    "pyarrow-table": pyarrow_table,
}


def prepared(folder: Path, num_steps: int) -> Snapshot:
    """Return the lake's snapshot, filled the first time."""
    dataset = open_lake(folder, create=True).dataset("noise")
    for sequence in range(num_steps // COMMIT_STEPS):
        if dataset.find_commit("bench", sequence) is None:
            found = as_episodes(episodes(COMMIT_STEPS, seed=sequence))
            dataset.append(found, producer="bench", sequence=sequence)
    return dataset.snapshot()


if __name__ == "__main__":
    main()
