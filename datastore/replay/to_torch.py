"""To torch: batches of tensors, one by one or straight from a sampler's blocks."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, overload

import numpy as np
import torch

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.replay.arguments import check_int
from replaylake.datastore.replay.batch_source import (
    BatchSource,
    PrioritizedSource,
    check_batch_source,
)
from replaylake.datastore.replay.protocols import Output
from replaylake.datastore.replay.sampler import Sampler, make_batches, split_field
from replaylake.datastore.replay.tokens.token_batch import TokenBatch

# They name rows, and nothing is computed from them: always numpy.
_NUMPY_FIELDS: Final = frozenset({"keys", "indices"})
_WORD_BYTES: Final = 8
_MANY_PARTS: Final = 8
_NAME: Final = "torch sampler"
# Memory, and the tensor that it was copied to.
_Copy = tuple[torch.Tensor, torch.Tensor]


@overload
def to_torch(batch: Batch[Array], device: torch.device | str = "cpu") -> Batch[torch.Tensor]: ...


@overload
def to_torch(
    batch: TokenBatch[Array], device: torch.device | str = "cpu"
) -> TokenBatch[torch.Tensor]: ...


def to_torch(
    batch: Batch[Array] | TokenBatch[Array], device: torch.device | str = "cpu"
) -> Batch[torch.Tensor] | TokenBatch[torch.Tensor]:
    """Return the batch with tensors of the same shapes and dtypes, on `device`.

    On the CPU, the tensors share the arrays' memory. To another device, each contiguous block of
    memory is transferred in one copy; packed records are one such block. `keys` and `indices` stay
    numpy arrays. Raises: ConfigInvalidError for a device that does not exist, or a batch of
    tensors.
    """
    target = _parse_device(device)
    if isinstance(batch, TokenBatch) and isinstance(batch.token_ids, np.ndarray):
        return _convert_tokens(batch, target)
    if not isinstance(batch, Batch) or not isinstance(batch.rewards, np.ndarray):
        inner = batch.rewards if isinstance(batch, Batch) else batch
        inner = inner.token_ids if isinstance(inner, TokenBatch) else inner
        found = type(inner).__name__
        raise ConfigInvalidError(
            f"to_torch: found {found}, expected a Batch of numpy arrays. Pass what a view's "
            "sampler returns; batches of a TorchSampler are tensors already."
        )
    if target.type == "cpu":
        return _map_arrays(batch, _tensor)
    return convert_sharing(batch, lambda memory: memory.to(target, non_blocking=True))


def _convert_tokens(
    batch: TokenBatch[Array],
    device: torch.device,
    stage: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> TokenBatch[torch.Tensor]:
    def convert(array: Array) -> torch.Tensor:
        tensor = stage(_tensor(array))
        # `to` takes 1 us even if the tensor is on the device already.
        return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)

    fields = {
        name: value if name in _NUMPY_FIELDS else _map_field(value, convert)
        for name, value in vars(batch).items()
    }
    return TokenBatch(**fields)


def _parse_device(device: torch.device | str) -> torch.device:
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigInvalidError(
            f"{_NAME}: found device {device!r}, expected one that torch knows. Pass, say, "
            '"cpu" or "cuda".'
        ) from error
    if parsed.type == "cuda" and not torch.cuda.is_available():
        raise ConfigInvalidError(
            f"{_NAME}: found device {device!r} and no CUDA device here, expected one. Leave device "
            "out, or install torch with CUDA."
        )
    return parsed


def convert_sharing(
    batch: Batch[Array], move: Callable[[torch.Tensor], torch.Tensor] = lambda memory: memory
) -> Batch[torch.Tensor]:
    """Return the batch with tensors that share memory with each other as the arrays do.

    move: is given each stretch of memory that holds fields, uint8 [bytes], once, and returns it
    where it is wanted. Cost: about 5 us a field.
    """
    stretches = _MemoryRegions(batch, move)
    return _map_arrays(stretches.batch, stretches.tensor)


class TorchSampler:
    """Draws batches of tensors from a sampler, or from another object with a `sample` method.

    It has no position of its own: batches that were drawn in advance and not returned are drawn
    again after a saved state is loaded.
    """

    def __init__(
        self,
        sampler: BatchSource,
        device: torch.device | str = "cpu",
        *,
        reuse: int = 0,
        pinned: bool = False,
    ) -> None:
        """Take where the tensors shall be.

        reuse: 0 gives each batch memory of its own. With n > 0 memory is written again: a batch is
        valid until n more were drawn, `keys` and `indices` too, and is not to be changed in place.
        pinned: batches lie in page-locked memory, from which copies to a GPU go on while the
        program does; where `device` is a GPU they go through such memory.

        Raises: ConfigInvalidError for reuse of what has no blocks to write into, such as a mixture,
        and for pinned without a CUDA device.
        """
        check_batch_source(_NAME, sampler)
        if isinstance(sampler, TorchSampler):
            raise ConfigInvalidError(
                "torch sampler: found a TorchSampler, whose batches are tensors already, expected "
                "another sampler. Use it as it is."
            )
        reuse = check_int(f"{_NAME}: reuse", reuse, advice="Leave reuse out.")
        if reuse and not isinstance(sampler, Sampler):
            raise ConfigInvalidError(
                f"torch sampler: found reuse {reuse} of a {type(sampler).__name__}, expected 0, or "
                "more of a view's own sampler. Leave reuse out."
            )
        if pinned and not torch.cuda.is_available():
            raise ConfigInvalidError(
                "torch sampler: found pinned=True without a CUDA device, expected one: only copies "
                "to it need page-locked memory. Leave pinned out."
            )
        self.sampler = sampler
        self.device = _parse_device(device)
        self.reuse = reuse
        self._pinned = pinned
        self._blocks = sampler if isinstance(sampler, Sampler) else None
        self._ready: deque[Batch[torch.Tensor]] = deque()
        self._slots: deque[_ReusedBlock] = deque()

    def sample(self) -> Batch[torch.Tensor]:
        """Draw one batch. Raises: the errors of the sampler."""
        if self._blocks is None:
            batch: Batch[torch.Tensor] = self._move_batch(self.sampler.sample())
            return batch
        if not self._ready:
            self._ready.extend(self._block(self._blocks)[self._blocks.num_taken :])
        self._blocks.mark_consumed()
        return self._ready.popleft()

    def update_priorities(self, indices: Any, priorities: Any) -> None:
        """Set the priorities of the rows `batch.indices` [B] to numbers or a tensor [B].

        Raises: ConfigInvalidError if the sampler is not prioritized.
        """
        if not isinstance(self.sampler, PrioritizedSource):
            raise ConfigInvalidError(
                f"torch sampler: found a {type(self.sampler).__name__}, expected one that draws by "
                "priorities. Make it with view.prioritized, or leave update_priorities out."
            )
        if isinstance(priorities, torch.Tensor):
            priorities = priorities.detach().cpu().numpy()
        self.sampler.update_priorities(indices, priorities)

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's position after the last batch that was returned."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position that was saved by a TorchSampler or by its sampler."""
        self.sampler.load_state_dict(state)
        self._ready.clear()
        self._slots.clear()

    def __iter__(self) -> Iterator[Batch[torch.Tensor]]:
        while True:
            yield self.sample()

    def _block(self, sampler: Sampler) -> Sequence[Batch[torch.Tensor]]:
        """Draw a block and return its batches, in memory that is written again if it may be."""
        size = sampler.batch_size
        if not self.reuse:
            return self._batches(sampler.block().batch, size)
        # The last batch of a block is valid while those of the other slots are handed out.
        num_slots = 1 - (1 - self.reuse) // sampler.num_ahead
        slot = self._slots.popleft() if len(self._slots) == num_slots else None
        output = sampler.block(None if slot is None else slot.output)
        if slot is None or output.batch is not slot.source_batch:
            if len(output.batch.keys) < sampler.num_ahead * size:
                # The last rows of an epoch: the next block is a whole one again.
                self._slots.extendleft([slot] if slot else [])
                return self._batches(output.batch, size)
            slot = _ReusedBlock(output, output.batch)
            slot.batches = self._batches(output.batch, size, slot.memory)
        else:
            for part, moved in slot.memory:
                moved.copy_(self._stage(part), non_blocking=True)
        self._slots.append(slot)
        return slot.batches

    def _move_batch(self, batch: Batch[Array] | TokenBatch[Array]) -> Any:
        if isinstance(batch, TokenBatch):
            return _convert_tokens(batch, self.device, self._stage)
        if self._shares_memory:
            return _map_arrays(batch, _tensor)
        return convert_sharing(batch, lambda part: self._move(part, None))

    def _batches(
        self, batch: Batch[Array], size: int, memory: list[_Copy] | None = None
    ) -> list[Batch[torch.Tensor]]:
        """Cut some rows into batches where they shall be; append to `memory` what was copied."""
        if self._shares_memory:
            return _split_and_map(batch, size)
        return _split_tensors(convert_sharing(batch, lambda part: self._move(part, memory)), size)

    @property
    def _shares_memory(self) -> bool:
        return self.device.type == "cpu" and not self._pinned

    def _move(self, part: torch.Tensor, memory: list[_Copy] | None) -> torch.Tensor:
        moved = self._stage(part).to(self.device, non_blocking=True)
        if memory is not None:
            memory.append((part, moved))
        return moved

    def _stage(self, part: torch.Tensor) -> torch.Tensor:
        """Return a copy in page-locked memory, if asked for.

        torch keeps such memory for the next one, once the copy to the GPU that it is for has ended.
        """
        if not self._pinned:
            return part
        return torch.empty_like(part, pin_memory=True).copy_(part)


@dataclass
class _ReusedBlock:
    """Memory that is written again: an Output, and the batches of tensors that show it.

    memory: each stretch of it, and its copy that the tensors are views of; empty where they are
    views of the Output itself.
    """

    output: Output
    source_batch: Batch[Array]
    batches: Sequence[Batch[torch.Tensor]] = ()
    memory: list[_Copy] = field(default_factory=list)


def _split_and_map(batch: Batch[Array], size: int) -> list[Batch[torch.Tensor]]:
    num = len(batch.keys)
    fields = {
        name: split_field(value, num, size) if name in _NUMPY_FIELDS else _tensors(value, num, size)
        for name, value in vars(batch).items()
    }
    return make_batches(fields)


def _tensors(value: Any, num: int, size: int) -> Sequence[Any]:
    """Cut a field along its first dimension, of `num`, into tensors of `size` that share memory.

    An array and its tensor take 0.6 us, a part of a tensor 0.35 where there are many (2 cores,
    2026-11-22). Nothing here has a gradient that unsafe_split could lose.
    """
    if isinstance(value, np.ndarray):
        try:
            if num >= _MANY_PARTS * size:
                return torch.unsafe_split(torch.from_numpy(value), size)
            return list(map(torch.from_numpy, split_field(value, num, size)))
        except ValueError:
            # Of strides that torch refuses.
            pass
    return [_map_field(part, _tensor) for part in split_field(value, num, size)]


def _split_tensors(batch: Batch[torch.Tensor], size: int) -> list[Batch[torch.Tensor]]:
    num = len(batch.keys)
    return make_batches({name: _tensor_cuts(v, num, size) for name, v in vars(batch).items()})


def _tensor_cuts(value: Any, num: int, size: int) -> Sequence[Any]:
    if isinstance(value, torch.Tensor):
        tensors: Sequence[torch.Tensor] = torch.split(value, size)
        return tensors
    if isinstance(value, dict):
        parts = zip(*(_tensor_cuts(sub, num, size) for sub in value.values()), strict=True)
        return [dict(zip(value, part, strict=True)) for part in parts]
    return split_field(value, num, size)


def _map_arrays(batch: Batch[Array], convert: Callable[[Array], Any]) -> Batch[Any]:
    """Return the batch with every array converted that is to be a tensor."""
    fields = {
        name: value if name in _NUMPY_FIELDS else _map_field(value, convert)
        for name, value in vars(batch).items()
    }
    return Batch(**fields)


def _map_field(value: Any, convert: Callable[[Array], Any]) -> Any:
    if value is None:
        return None
    if isinstance(value, np.ndarray):
        return convert(value)
    return {key: _map_field(sub, convert) for key, sub in value.items()}


def _tensor(value: Array) -> torch.Tensor:
    try:
        return torch.from_numpy(value)
    except ValueError:
        # torch refuses strides that are no multiple of the item's size; those of records are.
        return torch.from_numpy(np.ascontiguousarray(value))


@functools.cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


class _MemoryRegions:
    """The memory that holds a batch's fields, by the array that owns it, each moved once."""

    def __init__(self, batch: Batch[Array], move: Callable[[torch.Tensor], torch.Tensor]) -> None:
        bounds: dict[int, tuple[Array, int, int]] = {}

        def note(value: Array) -> Array:
            owner = _owner(value)
            start = _address(value) - _address(owner)
            last = sum((n - 1) * step for n, step in zip(value.shape, value.strides, strict=True))
            stop = start + last + value.itemsize
            _, low, high = bounds.get(id(owner), (owner, start, stop))
            bounds[id(owner)] = owner, min(low, start), max(high, stop)
            return value

        self.batch = _map_arrays(batch, lambda value: note(_make_sharable(value)))
        self._moved = {}
        for key, (owner, low, high) in bounds.items():
            # Whole words, so that they can be viewed as any dtype.
            low, high = low // _WORD_BYTES * _WORD_BYTES, -(-high // _WORD_BYTES) * _WORD_BYTES
            memory = owner.reshape(-1).view(np.uint8)[low:high]
            self._moved[key] = _address(memory), move(torch.from_numpy(memory))

    def tensor(self, value: Array) -> torch.Tensor:
        """Return a tensor that lies in moved memory as an array of self.batch lies in its own."""
        address, moved = self._moved[id(_owner(value))]
        strides = [stride // value.itemsize for stride in value.strides]
        offset = (_address(value) - address) // value.itemsize
        return moved.view(_torch_dtype(value.dtype)).as_strided(value.shape, strides, offset)


def _make_sharable(value: Array) -> Array:
    """Return the array, or a copy where torch could not show it in the memory that it lies in."""
    size = value.itemsize
    owner = _owner(value)
    fits = isinstance(owner, np.ndarray) and owner.flags.c_contiguous and owner.flags.writeable
    if fits and value.size and not any(stride < 0 or stride % size for stride in value.strides):
        return value
    return np.array(value, order="C")


def _owner(value: Array) -> Any:
    return value if value.base is None else value.base


def _address(value: Array) -> int:
    address: int = value.__array_interface__["data"][0]
    return address
