"""Data loader: replay as a torch IterableDataset, whose batches DataLoader workers assemble."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.replay.arguments import check_int, check_rank, check_seed
from replaylake.datastore.replay.batch_source import BatchSource, check_batch_source
from replaylake.datastore.replay.saved_state import KIND, read_state
from replaylake.datastore.replay.selectors.shuffled import ShuffledSampler
from replaylake.datastore.replay.source import SampleSource
from replaylake.datastore.replay.to_torch import convert_sharing
from replaylake.datastore.replay.view import ReplayView

_NAME: Final = "replay iterable"


@dataclass(frozen=True)
class LoaderPart:
    """One of all the workers of all ranks, which together make an epoch.

    index, num_parts: which one of how many. seed: its own stream of randomness, for samplers with
    replacement; shared_seed: that of all together, for a shuffled sampler that divides an epoch.
    Both are others in each epoch.
    """

    index: int
    num_parts: int
    seed: int
    shared_seed: int


class ReplayIterable(IterableDataset[Batch[torch.Tensor]]):
    """Batches of tensors for `DataLoader(ReplayIterable(...), batch_size=None, num_workers=n)`.

    Each worker creates its own sampler with `make_sampler(view, part)`. If workers are spawned,
    this has to be a function of a module, for example

        def shuffled(view, part):
            parts = {"rank": part.index, "num_ranks": part.num_parts}
            return view.shuffled(256, seed=part.shared_seed, **parts)

    An iteration ends with the epoch of a shuffled sampler, or after `num_batches` batches of all
    workers of a rank together; otherwise it never ends. `set_epoch` before an iteration gives it
    different batches; the same epoch gives the same batches, also with persistent workers.

    Batches are transferred between processes in shared memory, in the packed format of the records.
    A live view cannot be sent to another process.
    """

    def __init__(
        self,
        view: SampleSource,
        make_sampler: Callable[[Any, LoaderPart], BatchSource],
        *,
        seed: int,
        rank: int = 0,
        num_ranks: int = 1,
        num_batches: int | None = None,
    ) -> None:
        """Take what to draw from and how. Raises: ConfigInvalidError."""
        if not callable(make_sampler):
            raise ConfigInvalidError(
                f"{_NAME}: found make_sampler {make_sampler!r}, expected a function "
                "(view, part) -> sampler. Write one that calls, say, "
                "view.uniform(256, seed=part.seed)."
            )
        if num_batches is not None:
            num_batches = check_int(
                f"{_NAME}: num_batches", num_batches, advice="Leave it out for no end."
            )
        self._view = view
        self._make_sampler = make_sampler
        self._seed = check_seed(_NAME, seed)
        self._rank, self._num_ranks = check_rank(_NAME, rank, num_ranks)
        self._num_batches = num_batches
        # In shared memory, so that workers that stay see it change.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._sampler: BatchSource | None = None
        self._num_given = 0
        self._restored: tuple[Mapping[str, Any], int] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, like torch's DistributedSampler."""
        self._epoch.fill_(check_int(f"{_NAME}: epoch", epoch))

    def __iter__(self) -> Iterator[Batch[torch.Tensor]]:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        if info is not None and not isinstance(self._view, ReplayView):
            # A forked worker would draw what there was when it was forked, for ever.
            raise ConfigInvalidError(
                f"{_NAME}: found a view that follows a dataset in a worker process, expected it in "
                "the process that made it. Use num_workers=0, or a snapshot's view."
            )
        sampler = self._make_sampler(self._view, self._part(worker, num_workers))
        check_batch_source(f"{_NAME}: make_sampler", sampler)
        self._sampler, self._num_given = sampler, 0
        if self._restored is not None:
            position, self._num_given = self._restored
            self._restored = None
            sampler.load_state_dict(position)
        # What a TorchSampler draws from.
        drawing = getattr(sampler, "sampler", sampler)
        share = None
        if self._num_batches is not None:
            share = self._num_batches // num_workers + (worker < self._num_batches % num_workers)
        while self._num_given != share:
            if isinstance(drawing, ShuffledSampler) and share is None and drawing.epoch:
                return
            batch = sampler.sample()
            self._num_given += 1
            yield convert_sharing(batch) if isinstance(batch.rewards, np.ndarray) else batch

    def state_dict(self) -> dict[str, Any]:
        """Return this worker's position, for torchdata's StatefulDataLoader."""
        if self._sampler is None:
            return {KIND: _NAME, "sampler": None, "num_given": 0}
        position = self._sampler.state_dict()
        return {KIND: _NAME, "sampler": position, "num_given": self._num_given}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start this process's next iteration at a saved position. Raises: ConfigInvalidError."""
        with read_state(_NAME, state):
            position, num_given = state["sampler"], int(state["num_given"])
        self._restored = None if position is None else (position, num_given)

    def _part(self, worker: int, num_workers: int) -> LoaderPart:
        index, epoch = self._rank * num_workers + worker, int(self._epoch)
        shared = np.random.SeedSequence(self._seed, spawn_key=(epoch,))
        own = np.random.SeedSequence(self._seed, spawn_key=(epoch, index))
        return LoaderPart(
            index=index,
            num_parts=self._num_ranks * num_workers,
            seed=int(own.generate_state(1, np.uint64)[0]),
            shared_seed=int(shared.generate_state(1, np.uint64)[0]),
        )
