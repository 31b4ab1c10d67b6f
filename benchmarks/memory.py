"""Peak resident memory of `replaylake` on much data: ingest, compact and ope.

The limit is 1,024 MiB: for ingest of one file of 10M steps (obs 17, act 6), for compacting as many
in small shards, and for off-policy evaluation of 1M decisions (four numbers, five actions) by all
estimators. Each command runs in a process of its own; the peak is the operating system's count.
There is no peer: no other system here does either.
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
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from benchmarks.append import as_episodes
from benchmarks.steps import EPISODE_STEPS, episodes
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import open_lake

BLOCK_STEPS = 100_000
COMMAND = "import sys; from replaylake.cli.main import main; main()"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=["ours"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10_000_000)
    parser.add_argument("--decisions", type=int, default=1_000_000, help="for ope")
    parser.add_argument("--only-ope", action="store_true", help="measure that alone")
    options = parser.parse_args()
    measure_ope(options.folder, options.decisions)
    if options.only_ope:
        return
    source, lake = options.folder / "source.parquet", options.folder / "memory"
    shutil.rmtree(lake, ignore_errors=True)
    write_source(source, options.steps)
    report("ingest", options.steps, ["ingest", source, "--dataset", "large", "--lake", lake])
    small = open_lake(lake).dataset("small")
    for seed in range(options.steps // BLOCK_STEPS):
        small.append(as_episodes(episodes(BLOCK_STEPS, seed)), producer="bench", sequence=seed)
    report("compact", options.steps, ["maintain", "compact", "small", "--lake", lake])
    shutil.rmtree(lake)


def measure_ope(folder: Path, num: int) -> None:
    """Write a log of decisions, ingest it, and evaluate the uniform policy on it."""
    source, lake = folder / "decisions.csv", folder / "memory-ope"
    shutil.rmtree(lake, ignore_errors=True)
    write_decisions(source, num)
    options = ReadOptions({"observation": "x0,x1,x2,x3"})
    ingest(open_lake(lake, create=True), [source], "log", format="bandit", options=options)
    command = ["ope", "log", "--policy", "random", "--unseen", "--lake", lake]
    report("ope", num, command, "decisions")
    source.unlink()
    shutil.rmtree(lake)


def write_decisions(path: Path, num: int) -> None:
    """Write decisions of four numbers by a policy of five actions that looks at none of them."""
    rng = np.random.default_rng(0)
    chances = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
    actions = rng.choice(5, num, p=chances)
    columns = {f"x{i}": rng.normal(size=num).round(4) for i in range(4)}
    columns |= {"action": actions, "propensity": chances[actions]}
    columns["reward"] = (rng.random(num) < 0.05 + 0.1 * (actions == 2)).astype(int)
    pa_csv.write_csv(pa.table(columns), path)


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


def report(name: str, num: int, command: list[str | Path], unit: str = "steps") -> None:
    """Run one command of ours to its end and print its peak."""
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *map(str, command)], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{name}: exit code {process.returncode}")
    line = {"workload": f"peak memory, {name} of {num:,} {unit}", "system": "ours"}
    print(json.dumps({**line, "figure": usage.ru_maxrss / 1024, "unit": "MiB"}), flush=True)


if __name__ == "__main__":
    main()
