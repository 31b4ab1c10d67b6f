"""TorchRL's replay buffer: a TensorDict in memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from benchmarks.language.case import SAMPLE, Line, Sizes, time_batches
from benchmarks.language.source import BATCH, make_source

warnings.simplefilter("ignore")
_STORED_AT_ONCE = 5_000


def sample(folder: Path, sizes: Sizes) -> Iterator[Line]:
    num, length = sizes.sampled
    source = make_source(num, length)
    torch.set_num_threads(1)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(num), batch_size=BATCH)
    for start in range(0, num, _STORED_AT_ONCE):
        some = {
            name: torch.from_numpy(values[start : start + _STORED_AT_ONCE])
            for name, values in vars(source).items()
        }
        buffer.extend(TensorDict(some, [len(some["token_ids"])]))
    figure = time_batches(buffer.sample, source.check)
    yield SAMPLE.format(num=num, length=length), figure, "us a batch"


KINDS = {"sample": sample}
