"""Hugging Face's datasets: its own JSON reader and Arrow files; batches in its torch format."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset, load_dataset

from benchmarks.language.case import AT_REST, INGEST, SAMPLE, Line, Sizes, time_batches
from benchmarks.language.source import BATCH, Source, make_source, write_nemo_rl

_STORED_AT_ONCE = 2_000


def ingest(folder: Path, sizes: Sizes) -> Iterator[Line]:
    path = folder / f"train_data_step{sizes.jsonl[0]}.jsonl"
    num_tokens = write_nemo_rl(path, *sizes.jsonl)
    cache, seconds = folder / "hf-json", []
    for _ in range(2):
        shutil.rmtree(cache, ignore_errors=True)
        started = time.perf_counter()
        rows = load_dataset("json", data_files=str(path), cache_dir=str(cache), split="train")
        seconds.append(time.perf_counter() - started)
        if len(rows) != sizes.jsonl[0]:
            raise SystemExit(f"found {len(rows)} rows")
    yield INGEST, path.stat().st_size / 1e6 / min(seconds), "MB/s"
    size = sum(file.stat().st_size for file in cache.rglob("*.arrow"))
    yield AT_REST, size / num_tokens, "bytes a token"


def sample(folder: Path, sizes: Sizes) -> Iterator[Line]:
    num, length = sizes.sampled
    source = make_source(num, length)
    place = folder / f"hf-{num}-{length}"
    if not place.exists():
        made = Dataset(pa.concat_tables(list(make_tables(source))))
        made.save_to_disk(str(place))
    rows = Dataset.load_from_disk(str(place)).with_format("torch")
    rng = np.random.default_rng(0)
    torch.set_num_threads(1)
    figure = time_batches(lambda: rows[rng.integers(0, num, BATCH)], source.check)
    yield SAMPLE.format(num=num, length=length), figure, "us a batch"


def make_tables(source: Source) -> Iterator[pa.Table]:
    """Yield some sequences at a time, as lists of a fixed size."""
    num, length = source.token_ids.shape
    for start in range(0, num, _STORED_AT_ONCE):
        yield pa.table(
            {
                name: pa.FixedSizeListArray.from_arrays(
                    pa.array(values[start : start + _STORED_AT_ONCE].ravel()), length
                )
                for name, values in vars(source).items()
            }
        )


KINDS = {"ingest": ingest, "sample": sample}
