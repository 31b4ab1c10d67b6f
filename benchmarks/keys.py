"""Ingest into a dataset with a unique key that has many stored keys, beside one without.

    python -m benchmarks.keys --stored 100000000 --rows 1000000 [--texts]

The index of the stored keys is built directly, from random hashes under the names of shards that
are not there: none of them is a candidate, as is the rule for new rows. Each side is a process of
its own; they take turns. Reported: processor time (user and system) and peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.storage.log.state import FileEntry
from replaylake.datastore.storage.table.key_index import KeyIndex, count_bytes
from replaylake.datastore.storage.table.table_snapshot import TableSnapshot

_SHARD_ROWS = 524_288
_OPTIONS = ReadOptions(mapping={"observation": "x0,x1,x2,x3"})


def _write_rows(path: Path, first: int, num: int, texts: bool) -> None:
    rng = np.random.default_rng(first)
    ids = range(first, first + num)
    keys = [str(uuid.UUID(int=i * 7919 << 60)) for i in ids] if texts else list(ids)
    columns = {f"x{i}": pa.array(rng.random(num)) for i in range(4)}
    columns |= {
        "event_id": pa.array(keys),
        "action": pa.array(rng.integers(0, 4, num)),
        "reward": pa.array(rng.random(num)),
        "terminated": pa.array(np.ones(num, np.bool_)),
    }
    pq.write_table(pa.table(columns), path)


def _build_index(root: Path, num: int) -> float:
    """Write the files of `num` keys; return their bytes a key."""
    lake = open_lake(root)
    snapshot = lake.dataset("d").table.snapshot()
    index = KeyIndex(lake.storage, "d", ("event_id",))
    rng = np.random.default_rng(0)
    entries: list[FileEntry] = list(snapshot.files)
    for start in range(0, num, _SHARD_ROWS):
        size = min(_SHARD_ROWS, num - start)
        entries.append(FileEntry(f"shards/{start}.parquet", 1, size, "-"))
        index.hold(entries[-1].path, rng.integers(0, 1 << 64, size, dtype=np.uint64))
        index.save(replace(snapshot, files=tuple(entries)))
    return count_bytes(lake.storage, "d") / num


def _stand_in_shards(root: Path, num: int) -> None:
    """Let each version name the shards of the stored keys too, for the index alone."""
    plain = KeyIndex._search_all
    names = [f"shards/{start}.parquet" for start in range(0, num, _SHARD_ROWS)]
    others = tuple(FileEntry(name, 1, _SHARD_ROWS, "-") for name in names)

    def search(self: KeyIndex, snapshot: TableSnapshot, needles: np.ndarray) -> list:  # type: ignore[type-arg]
        return plain(self, replace(snapshot, files=(*snapshot.files, *others)), needles)

    KeyIndex._search_all = search  # type: ignore[method-assign]
    save = KeyIndex.save

    def save_all(self: KeyIndex, snapshot: TableSnapshot) -> None:
        save(self, replace(snapshot, files=(*snapshot.files, *others)))

    KeyIndex.save = save_all  # type: ignore[method-assign]


def _run_side(root: Path, source: Path, num: int) -> None:
    if num:
        _stand_in_shards(root, num)
    before = resource.getrusage(resource.RUSAGE_SELF)
    started = time.perf_counter()
    receipt = ingest(open_lake(root), [source], "d", options=_OPTIONS)
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_SELF)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    result = {
        "cpu_s": used,
        "wall_s": seconds,
        "steps": receipt.steps.committed,
        "peak_mib": after.ru_maxrss / 1024,
    }
    print(json.dumps(result))


def main() -> None:
    """Run both sides by turns, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stored", type=int, default=100_000_000)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--texts", action="store_true")
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--side", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        root, source, num = arguments.side
        _run_side(Path(root), Path(source), int(num))
        return
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    first = folder / "first.parquet"
    _write_rows(first, 0, 1000, arguments.texts)
    for name, keys in (("with", ["event_id"]), ("without", [])):
        lake = open_lake(folder / name, create=True)
        ingest(lake, [first], "d", options=_OPTIONS, unique=keys)
    started = time.process_time()
    num_bytes = _build_index(folder / "with", arguments.stored)
    print(f"index: {num_bytes:.1f} bytes a key, {time.process_time() - started:.0f} s to build")
    for turn in range(arguments.turns):
        source = folder / f"{turn}.parquet"
        _write_rows(source, 10_000 + turn * arguments.rows, arguments.rows, arguments.texts)
        for name, num in (("without", 0), ("with", arguments.stored)):
            command = [sys.executable, "-m", "benchmarks.keys", "--side"]
            command += [str(folder / name), str(source), str(num)]
            done = subprocess.run(
                command, capture_output=True, text=True, check=True, env={**os.environ}
            )
            result = json.loads(done.stdout.splitlines()[-1])
            rate = result["steps"] / result["cpu_s"]
            print(
                f"{name}: {result['steps']:,} rows, {result['cpu_s']:.2f} s of processor time, "
                f"{rate:,.0f} rows/s of it, peak {result['peak_mib']:.0f} MiB",
                flush=True,
            )
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
