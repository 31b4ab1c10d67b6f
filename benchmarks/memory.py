"""Peak resident memory of `replaylake ingest` on one large file, and of compacting many shards.

The limit is 1,024 MiB for 10M steps (obs 17, act 6). Each command runs in a process of its own; the
peak is the operating system's count. There is no peer: no other system here does either.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.append import as_episodes
from benchmarks.steps import EPISODE_STEPS, episodes
from replaylake.datastore.lake.lake import open_lake

BLOCK_STEPS = 100_000
COMMAND = "import sys; from replaylake.cli.main import main; main()"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=["ours"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10_000_000)
    options = parser.parse_args()
    source, lake = options.folder / "source.parquet", options.folder / "memory"
    shutil.rmtree(lake, ignore_errors=True)
    write_source(source, options.steps)
    report("ingest", options.steps, ["ingest", source, "--dataset", "large", "--lake", lake])
    small = open_lake(lake).dataset("small")
    for seed in range(options.steps // BLOCK_STEPS):
        small.append(as_episodes(episodes(BLOCK_STEPS, seed)), producer="bench", sequence=seed)
    report("compact", options.steps, ["maintain", "compact", "small", "--lake", lake])
    shutil.rmtree(lake)


def write_source(path: Path, num_steps: int) -> None:
    """Write a Parquet table of a row a step, as other tools would have it."""
    writer = None
    for seed in range(num_steps // BLOCK_STEPS):
        found = episodes(BLOCK_STEPS, seed)
        rows = np.arange(BLOCK_STEPS) + seed * BLOCK_STEPS
        columns = {
            "episode_id": rows // EPISODE_STEPS,
            "step": rows % EPISODE_STEPS,
            "observation": vectors([one.observations[:-1] for one in found]),
            "action": vectors([one.actions for one in found]),
            "reward": np.concatenate([one.rewards for one in found]),
            "terminated": np.zeros(BLOCK_STEPS, bool),
            "truncated": rows % EPISODE_STEPS == EPISODE_STEPS - 1,
        }
        table = pa.table(columns)
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    if writer is not None:
        writer.close()


def vectors(parts: list[np.ndarray]) -> pa.Array:
    joined = np.concatenate(parts)
    return pa.FixedSizeListArray.from_arrays(pa.array(joined.reshape(-1)), joined.shape[1])


def report(name: str, num_steps: int, command: list[str | Path]) -> None:
    """Run one command of ours to its end and print its peak."""
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *map(str, command)], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{name}: exit code {process.returncode}")
    line = {"workload": f"peak memory, {name} of {num_steps:,} steps", "system": "ours"}
    print(json.dumps({**line, "figure": usage.ru_maxrss / 1024, "unit": "MiB"}), flush=True)


if __name__ == "__main__":
    main()
