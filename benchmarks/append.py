"""Recording steps that are in memory: transitions/s until they are durable, and bytes of each.

Every system writes 1,000 episodes of 1,000 steps (obs 17, act 6, float32 noise) and fsyncs each
file it made, and the folders, before the clock stops. Ours also checks every episode, lays out the
rows, hashes and commits; `pyarrow` is one `write_table` of rows laid out beforehand, in the same
settings, to one file, by one thread. Best of several repeats, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from benchmarks.steps import ACTION_SIZE, OBSERVATION_SIZE, Steps, episodes

# Records the steps below a new folder. A system's libraries are imported by its own function: each
# runs in its own environment, which has no other's.
Record = Callable[[Path], None]


def ours(steps: list[Steps]) -> Record:
    from replaylake.datastore.lake.lake import open_lake

    found = as_episodes(steps)

    def record(folder: Path) -> None:
        open_lake(folder / "lake", create=True).dataset("noise").append(found)

    return record


def pyarrow(steps: list[Steps]) -> Record:
    import pyarrow.parquet as pq

    from replaylake.datastore.episodes.rows import encode
    from replaylake.datastore.episodes.validation import validate_all
    from replaylake.datastore.lake.dataset import infer_spec
    from replaylake.datastore.storage.table.shard import ROW_GROUP_ROWS, write_settings

    found = as_episodes(steps)
    spec = infer_spec(found)
    rows = encode(validate_all(found, spec.observation_space, spec.action_space), spec)
    settings = {**write_settings(rows.schema), "row_group_size": ROW_GROUP_ROWS}

    def record(folder: Path) -> None:
        pq.write_table(rows, folder / "noise.parquet", **settings)
        sync(folder)

    return record


def minari(steps: list[Steps]) -> Record:
    import gymnasium
    import minari
    import numpy as np
    from minari.data_collector.episode_buffer import EpisodeBuffer

    def box(size: int) -> gymnasium.Space:
        return gymnasium.spaces.Box(-np.inf, np.inf, (size,), np.float32)

    warnings.simplefilter("ignore")  # it asks for an author and a description
    flags = np.zeros(len(steps[0].rewards), bool)
    ends = flags.copy()
    ends[-1] = True
    buffers = [
        EpisodeBuffer(
            id=number,
            observations=one.observations,
            actions=one.actions,
            rewards=one.rewards,
            terminations=flags,
            truncations=ends,
        )
        for number, one in enumerate(steps)
    ]

    def record(folder: Path) -> None:
        os.environ["MINARI_DATASETS_PATH"] = str(folder)
        minari.create_dataset_from_buffers(
            "bench/noise-v0",
            buffers,
            action_space=box(ACTION_SIZE),
            observation_space=box(OBSERVATION_SIZE),
            data_format="hdf5",
        )
        sync(folder)

    return record


SYSTEMS = {"ours": ours, "pyarrow": pyarrow, "minari": minari}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--folder", type=Path, help="where to write; must be a real disk")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=4)
    options = parser.parse_args()
    record = SYSTEMS[options.system](episodes(options.steps))
    seconds, size = [], 0
    for _ in range(options.repeats):
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        started = time.perf_counter()
        record(folder)
        seconds.append(time.perf_counter() - started)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        shutil.rmtree(folder)
    rate = options.steps / min(seconds)
    for workload, figure, unit in (
        ("append with fsync", rate, "transitions/s"),
        ("bytes on disk", size / options.steps, "B/transition"),
    ):
        line = {"workload": workload, "system": options.system, "figure": figure, "unit": unit}
        json.dump(line, sys.stdout)
        print(flush=True)


def sync(folder: Path) -> None:
    """Make everything below a folder durable."""
    for path in [folder, *folder.rglob("*")]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def as_episodes(steps: list[Steps]) -> list:
    """Return the steps as our episodes."""
    from replaylake.datastore.episodes.episode import Episode

    return [
        Episode(
            f"noise/{number:06d}",
            one.observations[:-1],
            one.actions,
            one.rewards,
            truncated=True,
            final_observation=one.observations[-1],
        )
        for number, one in enumerate(steps)
    ]


if __name__ == "__main__":
    main()
