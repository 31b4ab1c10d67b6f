"""Values of samples: in files that only grow, each named by where it is and what its checksum is.

<folder>/values/<attempt>-<writer>-<k>.values    file k of one process: values one after another

A put is one append. A tensor is its elements in C order, any other value its JSON (plain_values);
each begins at a multiple of 64 bytes. The location of a value is kept by the controller's log.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from replaylake.datastore.errors import LogCorruptError, NotFoundError, ShardCorruptError
from replaylake.datastore.storage.storage import make_folder
from replaylake.online.recorders.transferqueue.attempts import Appender, Attempt
from replaylake.online.recorders.transferqueue.plain_values import (
    decode_plain,
    dtype_name,
    dtype_of,
    encode_plain,
    tensor_bytes,
)

SUFFIX: Final = ".values"
FILE_BYTES: Final = 256 << 20
_ALIGNMENT: Final = 64  # of a cache line, and of any dtype
_PLAIN: Final = "plain"
_NUM_OPEN: Final = 64


class Location(NamedTuple):
    """Where a value is. kind: a dtype, or `plain`; shape: a tensor's."""

    file: str
    offset: int
    num_bytes: int
    checksum: int
    kind: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f"{self.file}:{self.offset}:{self.num_bytes}:{self.checksum:08x}:{self.kind}:{shape}"


def parse_location(text: str) -> Location:
    """Return the location of its text. Raises: LogCorruptError."""
    try:
        file, offset, num_bytes, checksum, kind, shape = text.split(":")
        sizes = tuple(map(int, shape.split("x"))) if shape else ()
        return Location(file, int(offset), int(num_bytes), int(checksum, 16), kind, sizes)
    except (AttributeError, ValueError) as error:
        raise LogCorruptError(f"found the location {text!r} of a value, which is none.") from error


def values_folder(folder: Path) -> Path:
    return folder / "values"


class ValueWriter:
    """Writes the values that one process puts. Safe for threads."""

    def __init__(self, attempt: Attempt, *, sync_every: bool, file_bytes: int = FILE_BYTES) -> None:
        self._folder = values_folder(attempt.folder)
        self._prefix = f"{attempt.number:08d}-{secrets.token_hex(6)}"
        self._file_bytes = file_bytes
        self._num_files = 0
        self._mutex = threading.Lock()
        make_folder(self._folder)
        self._appender = Appender(attempt, sync_every=sync_every)

    def put(self, keys: Sequence[str], values: Sequence[Any]) -> list[str]:
        """Append values, all or none, and return the location of each.

        keys: what the values are called in an error. Raises: EpisodeInvalidError for a value that
        cannot be stored, and what `Appender.append` raises.
        Cost: one copy of the tensors, into the page cache, and one pass for the checksums.
        """
        encoded = [_encode(value, key) for key, value in zip(keys, values, strict=True)]
        buffers: list[bytes | memoryview] = []
        offsets: list[int] = []
        end = 0
        for data, _, _ in encoded:
            padding = -end % _ALIGNMENT
            buffers += [bytes(padding), data]
            offsets.append(end + padding)
            end += padding + len(data)
        buffers.append(bytes(-end % _ALIGNMENT))
        with self._mutex:
            if self._appender.path is None or self._appender.num_bytes >= self._file_bytes:
                name = f"{self._prefix}-{self._num_files:06d}{SUFFIX}"
                self._appender.start_file(self._folder / name)
                self._num_files += 1
            start = self._appender.append(buffers)
            path = self._appender.path
        assert path is not None
        return [
            str(Location(path.name, start + offset, len(data), zlib.crc32(data), kind, shape))
            for offset, (data, kind, shape) in zip(offsets, encoded, strict=True)
        ]

    def close(self) -> None:
        self._appender.close()


class ValueReader:
    """Reads values of any process's files in a folder. Safe for threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = values_folder(folder)
        self._open: OrderedDict[str, int] = OrderedDict()
        self._mutex = threading.Lock()

    def get(self, keys: Sequence[str], locations: Sequence[str]) -> list[Any]:
        """Return the values at locations; the tensors own their memory, in groups.

        Raises: ShardCorruptError, with the key and the file, if a value is not what was written;
        NotFoundError if its file is gone.
        """
        parsed = [parse_location(text) for text in locations]
        order = sorted(range(len(parsed)), key=lambda i: parsed[i][:2])
        values: list[Any] = [None] * len(parsed)
        for run in _runs(order, parsed):
            first, last = parsed[run[0]], parsed[run[-1]]
            data = self._read(keys[run[0]], first, last.offset + last.num_bytes - first.offset)
            for i in run:
                values[i] = _decode(data, parsed[i], parsed[i].offset - first.offset, keys[i])
        return values

    def close(self) -> None:
        with self._mutex:
            while self._open:
                os.close(self._open.popitem()[1])

    def _read(self, key: str, location: Location, num_bytes: int) -> np.ndarray[Any, Any]:
        data = np.empty(num_bytes, np.uint8)
        view, done = data.data, 0
        # The descriptor is not closed by another thread meanwhile.
        with self._mutex:
            file = self._descriptor(key, location.file)
            while done < num_bytes:
                count = os.preadv(file, [view[done:]], location.offset + done)
                if count == 0:
                    raise ShardCorruptError(
                        f"{self._folder / location.file}: ends at byte {location.offset + done}, "
                        f"expected {num_bytes - done} more for {key}. The disk lost what was "
                        "written; clear the sample, and generate it again."
                    )
                done += count
        return data

    def _descriptor(self, key: str, name: str) -> int:
        if name in self._open:
            self._open.move_to_end(name)
            return self._open[name]
        try:
            file = os.open(self._folder / name, os.O_RDONLY)
        except OSError as error:
            raise NotFoundError(
                f"{self._folder / name}: {error.strerror or error}; it had {key}. The sample has "
                "been cleared, or the file was removed."
            ) from error
        self._open[name] = file
        if len(self._open) > _NUM_OPEN:
            os.close(self._open.popitem(last=False)[1])
        return file


def _encode(value: Any, key: str) -> tuple[memoryview, str, tuple[int, ...]]:
    if isinstance(value, torch.Tensor):
        return tensor_bytes(value, key), dtype_name(value.dtype), tuple(value.shape)
    return memoryview(json.dumps(encode_plain(value, key)).encode()), _PLAIN, ()


def _decode(data: np.ndarray[Any, Any], location: Location, start: int, key: str) -> Any:
    part = data[start : start + location.num_bytes]
    if zlib.crc32(part.data) != location.checksum:
        raise ShardCorruptError(
            f"{location.file}: the {location.num_bytes} bytes of {key} at {location.offset} are "
            f"not what was written, expected the crc32 {location.checksum:08x}. Clear the sample, "
            "and generate it again."
        )
    if location.kind == _PLAIN:
        return decode_plain(json.loads(part.tobytes()))
    dtype = dtype_of(location.kind)
    flat = torch.from_numpy(part).view(dtype) if len(part) else torch.empty(0, dtype=dtype)
    return flat.reshape(location.shape)


def _runs(order: Sequence[int], locations: Sequence[Location]) -> list[list[int]]:
    """Group values that lie one after another in a file, up to the padding between them."""
    runs: list[list[int]] = []
    for i in order:
        if runs:
            last, here = locations[runs[-1][-1]], locations[i]
            gap = here.offset - last.offset - last.num_bytes
            if last.file == here.file and 0 <= gap < _ALIGNMENT:
                runs[-1].append(i)
                continue
        runs.append([i])
    return runs
