"""Ours: ingest into a lake, batches of token_sequences, opening and one long trajectory."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import replaylake as rl
from benchmarks.language.case import (
    AT_REST,
    COLD,
    INGEST,
    REOPENED,
    SAMPLE,
    TRAJECTORY,
    Line,
    Sizes,
    time_batches,
)
from benchmarks.language.source import BATCH, Source, make_source, write_nemo_rl
from replaylake.cli.main import run as run_command
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.replay.kernels import kernels
from replaylake.datastore.replay.tokens.token_batch import TokenBatch
from replaylake.datastore.storage.arrow_values import keep_pandas_unloaded

_WRITTEN_AT_ONCE = 1 << 24  # tokens
_NUM_CALLS, _NUM_TOKENS = 300, 200_000


def ingest(folder: Path, sizes: Sizes) -> Iterator[Line]:
    keep_pandas_unloaded()  # as the command does
    path = folder / f"train_data_step{sizes.jsonl[0]}.jsonl"
    num_tokens = write_nemo_rl(path, *sizes.jsonl)
    place, seconds = folder / "lake-jsonl", []
    for _ in range(2):
        shutil.rmtree(place, ignore_errors=True)
        lake = open_lake(place, create=True)
        started = time.perf_counter()
        receipt = rl.ingest(lake, [path], "talks")
        seconds.append(time.perf_counter() - started)
        if receipt.episodes.committed != sizes.jsonl[0] or receipt.steps.rejected:
            raise SystemExit(f"{path.name}: {receipt.steps}")
    yield INGEST, path.stat().st_size / 1e6 / min(seconds), "MB/s"
    size = sum(entry.size_bytes for entry in lake.snapshot("talks").files)
    yield AT_REST, size / num_tokens, "bytes a token"
    yield f"{AT_REST}, the log itself", path.stat().st_size / num_tokens, "bytes a token"


def sample(folder: Path, sizes: Sizes) -> Iterator[Line]:
    num, length = sizes.sampled
    source = make_source(num, length)
    dataset = store(folder, source)
    size = sum(entry.size_bytes for entry in dataset.snapshot().files)
    yield f"{num:,} sequences of {length}, at rest", size / num / length, "bytes a token"
    torch.set_num_threads(1)
    kernels.load()
    sampler = dataset.snapshot().token_sequences().padded(BATCH, seed=0, reuse=2)

    def check(batch: TokenBatch[torch.Tensor]) -> None:
        source.check(vars(batch))

    def draw() -> TokenBatch[torch.Tensor]:
        return rl.to_torch(sampler.sample())

    # An epoch first: each page of the files is mapped once.
    for _ in range(-(-num // BATCH)):
        draw()
    yield SAMPLE.format(num=num, length=length), time_batches(draw, check), "us a batch"


def open_first(folder: Path, sizes: Sizes) -> Iterator[Line]:
    num, length = sizes.opened
    source = make_source(num, length)
    dataset = store(folder, source)
    place = folder / f"lake-{num}-{length}"
    cold, reopened, reopened_cold = [], [], []

    def start() -> tuple[float, Any]:
        started = time.perf_counter()
        snapshot = open_lake(place).snapshot("talks")
        sequences = snapshot.token_sequences()
        batch = rl.to_torch(sequences.padded(BATCH, seed=len(cold)).sample())
        seconds = time.perf_counter() - started
        source.check(vars(batch))
        return seconds, sequences

    start()  # loads the libraries
    for _ in range(2):
        shutil.rmtree(place / "talks" / "_derived" / "replay", ignore_errors=True)
        drop_pages(place)
        seconds, sequences = start()
        cold.append(seconds)
        if sequences.wait_cached() is None:
            raise SystemExit(sequences.cache_failure)
        reopened.append(start()[0])
        drop_pages(place)
        reopened_cold.append(start()[0])
    names = {"num": num, "length": length}
    yield COLD.format(**names), min(cold), "s"
    yield REOPENED.format(**names), min(reopened) * 1e3, "ms"
    yield f"{REOPENED.format(**names)}, cold", min(reopened_cold) * 1e3, "ms"
    del dataset


def trajectory(folder: Path, sizes: Sizes) -> Iterator[Line]:
    place = folder / "lake-trajectory"
    if not place.exists():
        open_lake(place, create=True).dataset("talks").append([make_trajectory()])
    for what, function in {"read by SQL": read_row, "sampled": draw_whole, "shown": show}.items():
        seconds, peak_mib = in_process(function, place)
        yield TRAJECTORY.format(what=what), seconds, "s"
        yield TRAJECTORY.format(what=what), peak_mib, "MiB"


def make_trajectory() -> rl.Episode:
    source = make_source(_NUM_CALLS, _NUM_TOKENS // _NUM_CALLS)
    answered = [row[: source.prompt] for row in source.token_ids]
    acted = [row[source.prompt :] for row in source.token_ids]
    log_probs = [row[source.prompt :] for row in source.log_probs]
    return rl.Episode(
        "long/0",
        observations=np.array([f"result of call {call}" for call in range(_NUM_CALLS)], object),
        actions=np.array([f"call {call}" for call in range(_NUM_CALLS)], object),
        rewards=np.zeros(_NUM_CALLS),
        terminated=True,
        policy_versions=np.arange(_NUM_CALLS) // 100,
        extras={
            "observation_tokens": answered,
            "action_tokens": acted,
            "action_log_probs": log_probs,
            "tool_name": ["search"] * _NUM_CALLS,
        },
    )


def read_row(place: Path) -> None:
    rows = open_lake(place).sql("select * from talks.sequences")
    assert rows["num_tokens"].to_pylist() == [_NUM_CALLS * (_NUM_TOKENS // _NUM_CALLS)]


def draw_whole(place: Path) -> None:
    sequences = open_lake(place).snapshot("talks").token_sequences(cache=False)
    batch = sequences.packed(1 << 18, seed=0, versions=True).sample()
    assert batch.num_tokens == _NUM_CALLS * (_NUM_TOKENS // _NUM_CALLS)


def in_process(function: Callable[[Path], None], place: Path) -> tuple[float, float]:
    """Run in a process of its own; return its seconds after its imports, and its peak in MiB."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (function, place))


def measure(function: Callable[[Path], None], place: Path) -> tuple[float, float]:
    started = time.perf_counter()
    function(place)
    seconds = time.perf_counter() - started
    # Not getrusage, which counts what the parent had before the process was another program.
    status = Path("/proc/self/status").read_text()
    return seconds, int(status.split("VmHWM:")[1].split()[0]) / 1024


def show(place: Path) -> None:
    """Run `replaylake show`, with its output to /dev/null."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.argv = ["replaylake", "show", "talks", "--lake", str(place)]
    try:
        run_command()
    except SystemExit as ended:
        if ended.code:
            raise RuntimeError(f"replaylake show: exit status {ended.code}") from ended


def store(folder: Path, source: Source) -> Dataset:
    """Ingest the sequences from Parquet, the first time."""
    num, length = source.token_ids.shape
    lake = open_lake(folder / f"lake-{num}-{length}", create=True)
    if "talks" not in lake.datasets():
        path, rows = folder / "source.parquet", max(1, _WRITTEN_AT_ONCE // length)
        with pq.ParquetWriter(path, make_table(source, 0, 1).schema) as writer:
            for start in range(0, num, rows):
                writer.write_table(make_table(source, start, min(start + rows, num)))
        receipt = rl.ingest(lake, [path], "talks")
        if receipt.steps.committed != num:
            raise SystemExit(f"{path.name}: {receipt.steps}")
        path.unlink()
    return lake.dataset("talks")


def make_table(source: Source, start: int, stop: int) -> pa.Table:
    """Return some sequences as steps: a sequence is one generation."""
    num, prompt = stop - start, source.prompt

    def lists(array: np.ndarray) -> pa.Array:
        offsets = np.arange(num + 1, dtype=np.int32) * array.shape[1]
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(array.ravel()))

    rows = np.arange(start, stop)
    return pa.table(
        {
            "episode_id": pa.array([f"sample/{row}" for row in rows.tolist()]),
            "step": pa.array(np.zeros(num, np.int32)),
            "observation": pa.array([""] * num),
            "action": pa.array([""] * num),
            "reward": pa.array((rows % 2).astype(np.float64)),
            "terminated": pa.array(np.ones(num, np.bool_)),
            "truncated": pa.array(np.zeros(num, np.bool_)),
            "policy_version": pa.array(rows // 1000),
            "group_id": pa.array([f"group {row // 8}" for row in rows.tolist()]),
            "observation_tokens": lists(source.token_ids[start:stop, :prompt]),
            "action_tokens": lists(source.token_ids[start:stop, prompt:]),
            "action_log_probs": lists(source.log_probs[start:stop, prompt:]),
        }
    )


def drop_pages(folder: Path) -> None:
    """Have the kernel forget what it holds of the files below a folder."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


KINDS = {"ingest": ingest, "sample": sample, "open": open_first, "trajectory": trajectory}
