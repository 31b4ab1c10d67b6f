"""TransferQueue, as it is by default: two storage actors of Ray on this machine, rows by key."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# It warns at each call that it has fewer threads than it would like; in its actors too.
os.environ["TQ_LOGGING_LEVEL"] = "ERROR"

import numpy as np
import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict

from benchmarks.language.case import SAMPLE, Line, Sizes, time_batches
from benchmarks.language.source import BATCH, make_source

_STORED_AT_ONCE = 1_000
_PARTITION = "train"


def sample(folder: Path, sizes: Sizes) -> Iterator[Line]:
    num, length = sizes.sampled
    source = make_source(num, length)
    torch.set_num_threads(1)
    ray.init(num_cpus=4, include_dashboard=False, logging_level="error", namespace="bench")
    try:
        tq.init()
        for start in range(0, num, _STORED_AT_ONCE):
            some = {
                name: torch.from_numpy(values[start : start + _STORED_AT_ONCE])
                for name, values in vars(source).items()
            }
            stored = len(some["token_ids"])
            keys = [str(row) for row in range(start, start + stored)]
            tq.kv_batch_put(keys, _PARTITION, TensorDict(some, [stored]))
        rng = np.random.default_rng(0)

        def get() -> TensorDict:
            rows = rng.choice(num, BATCH, replace=False)
            return tq.kv_batch_get([str(row) for row in rows.tolist()], _PARTITION)

        def check(batch: TensorDict) -> None:
            # Rows come back as a nested tensor; making it dense is not timed.
            fields = batch.items()
            source.check(
                {name: v.values().view(BATCH, -1) if v.is_nested else v for name, v in fields}
            )

        figure = time_batches(get, check)
        yield SAMPLE.format(num=num, length=length), figure, "us a batch"
        tq.close()
    finally:
        ray.shutdown()


KINDS = {"sample": sample}
