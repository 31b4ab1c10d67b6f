"""Cached sequences: the arrays of all token sequences of a view, in files that are mapped.

    token_ids         int32 [N], of all sequences one after another
    loss_mask         bool [N]
    log_probs         float32 [N]; absent where the dataset has none
    column-<i>        float32 or bool [N]: the further columns, in the order of view.json
    offsets           int64 [S + 1]: where each sequence begins, and the end
    returns           float64 [S], NaN where unknown
    episode_returns   float64 [S], NaN where unknown
    version_offsets   int64 [S + 1]: of each sequence's runs of one policy version
    version_starts    int32 [R]: the first token of each run, within its sequence
    version_ends      int32 [R]: the token after the last one of each run
    versions          int64 [R]
    oldest_versions   int64 [S], -1 if the version of a sampled token is unknown
    groups            int64 [S]: the number of its group_id, -1 without one
    table             an Arrow stream with what SQL may name of each sequence
    checksums         uint32: the CRC-32 of each block of 64 KiB of each of these, one after another
    shards            a line for each shard: its path below the dataset
    view.json         the arrays' shapes and dtypes; written last

A block is compared with its checksum when a sequence in it is first read, so that opening takes no
time in proportion to the size: all blocks of 2.5 GB take a second.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import ShardCorruptError
from replaylake.datastore.replay.cache.cached_view import METADATA_FILE, SHARDS, write_durably
from replaylake.datastore.replay.cache.draft import Draft
from replaylake.datastore.replay.mapped_arrays import map_array
from replaylake.datastore.storage.seals import read_bytes, read_json, seal_bytes

TOKEN_IDS: Final = "token_ids"
LOSS_MASK: Final = "loss_mask"
LOG_PROBS: Final = "log_probs"
OFFSETS: Final = "offsets"
RETURNS: Final = "returns"
EPISODE_RETURNS: Final = "episode_returns"
VERSION_OFFSETS: Final = "version_offsets"
VERSION_STARTS: Final = "version_starts"
VERSION_ENDS: Final = "version_ends"
VERSIONS: Final = "versions"
OLDEST_VERSIONS: Final = "oldest_versions"
GROUPS: Final = "groups"
TABLE: Final = "table"
_CHECKSUMS: Final = "checksums"
_BLOCK_BYTES: Final = 1 << 16
_READ_BLOCKS: Final = 256


@dataclass(frozen=True)
class SequenceMetadata:
    """The content of view.json: the shape and dtype of each array, by its file, and the columns.

    columns: the names of the further columns; the i-th is in the file `column-<i>`.
    """

    shapes: Mapping[str, Sequence[int]]
    dtypes: Mapping[str, str]
    columns: Sequence[str]
    kind: str = "sequences"

    def num_blocks(self, name: str) -> int:
        size = int(np.prod(self.shapes[name])) * np.dtype(self.dtypes[name]).itemsize
        return -(-size // _BLOCK_BYTES)


def column_file(number: int) -> str:
    """Return the name of the file of a further column."""
    return f"column-{number}"


class CheckedArray:
    """A mapped array whose blocks are compared with their checksums when they are first read.

    array: the whole array; use it only after `check`. bytes: the same memory as uint8.
    """

    def __init__(self, path: Path, array: Array, checksums: NDArray[np.uint32] | None) -> None:
        """Take the CRC-32 of each block of 64 KiB; None for an array that was just written."""
        self.array, self.bytes = array, array.view(np.uint8)
        self._path = path
        self._checksums = checksums
        self._size = array.dtype.itemsize
        self._checked = np.zeros(0 if checksums is None else len(checksums), np.bool_)
        self._is_checked = checksums is None or not len(checksums)
        self._lock = threading.Lock()

    def check(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Compare the blocks that hold some ranges of items. Raises: ShardCorruptError."""
        if self._is_checked or not len(starts):
            return
        filled = ends > starts
        first = starts[filled] * self._size // _BLOCK_BYTES
        last = (ends[filled] * self._size - 1) // _BLOCK_BYTES
        nums = last - first + 1
        within = np.arange(int(nums.sum())) - np.repeat(np.cumsum(nums) - nums, nums)
        blocks = np.repeat(first, nums) + within
        self._check_blocks(np.unique(blocks[~self._checked[blocks]]))

    def read(self) -> Array:
        """Return all of it, checked. Raises: ShardCorruptError."""
        if not self._is_checked:
            self._check_blocks(np.flatnonzero(~self._checked))
        return self.array

    def _check_blocks(self, blocks: NDArray[np.int64]) -> None:
        data = self.array.data.cast("B")
        assert self._checksums is not None
        for block in blocks.tolist():
            found = zlib.crc32(data[block * _BLOCK_BYTES : (block + 1) * _BLOCK_BYTES])
            if found != self._checksums[block]:
                raise self._damage_error(block, found)
        with self._lock:
            self._checked[blocks] = True
            self._is_checked = bool(self._checked.all())

    def _damage_error(self, block: int, found: int) -> ShardCorruptError:
        # Without view.json nobody opens it: the next opening decodes the shards again.
        with suppress(OSError):
            (self._path.parent / METADATA_FILE).unlink()
        assert self._checksums is not None
        return ShardCorruptError(
            f"{self._path}: found CRC-32 {found:08x} of block {block}, expected "
            f"{self._checksums[block]:08x}: the cached sequences were damaged on the disk, and are "
            "no longer used. Open the snapshot's token_sequences again, which decodes them anew."
        )


@dataclass(frozen=True)
class SequenceFiles:
    """The mapped arrays of S sequences, by the names of their files."""

    metadata: SequenceMetadata
    arrays: Mapping[str, CheckedArray] = field(repr=False)

    @property
    def num_sequences(self) -> int:
        return int(self.metadata.shapes[RETURNS][0])

    @property
    def num_tokens(self) -> int:
        return int(self.metadata.shapes[TOKEN_IDS][0])

    def read_table(self) -> pa.Table:
        """Return what SQL may name of each sequence. Raises: ShardCorruptError."""
        return pa.ipc.open_stream(pa.py_buffer(self.arrays[TABLE].read())).read_all()


class SequenceWriter:
    """Appends to the files of a draft; the sizes need not be known before."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sizes: dict[str, int] = {}
        self._dtypes: dict[str, str] = {}

    def append(self, name: str, array: Array) -> None:
        """Append to an array's file. Raises: OSError."""
        if not array.flags.c_contiguous:
            array = np.ascontiguousarray(array)
        with (self.folder / name).open("ab", buffering=0) as file:
            data = array.data.cast("B") if array.size else memoryview(b"")
            while len(data):
                data = data[file.write(data) :]
        self._sizes[name] = self._sizes.get(name, 0) + len(array)
        assert self._dtypes.setdefault(name, array.dtype.str) == array.dtype.str, name

    def finish(self, columns: Sequence[str]) -> SequenceFiles:
        """Map what was written. Raises: OSError, ValueError."""
        shapes = {name: (size,) for name, size in self._sizes.items()}
        metadata = SequenceMetadata(shapes, self._dtypes, tuple(columns))
        return _map_files(self.folder, metadata, None)


def open_sequence_files(folder: Path) -> SequenceFiles | None:
    """Map the arrays of a folder; None if they are not there, or not what was written.

    They stay readable when the folder is removed. Marks it as used now. Cost: 1 ms a GB, for the
    checksums.
    """
    try:
        metadata = SequenceMetadata(**read_json((folder / METADATA_FILE).read_bytes()))
        data = read_bytes((folder / _CHECKSUMS).read_bytes(), is_required=True)
        files = _map_files(folder, metadata, np.frombuffer(data, np.uint32))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None  # not there, cut, or of another release
    with suppress(OSError):  # one that we may only read
        os.utime(folder / METADATA_FILE)
    return files


def _map_files(
    folder: Path, metadata: SequenceMetadata, checksums: NDArray[np.uint32] | None
) -> SequenceFiles:
    """Raises: OSError; ValueError for a file or checksums of another size."""
    arrays, num = {}, 0
    for name in metadata.shapes:
        path, dtype = folder / name, np.dtype(metadata.dtypes[name])
        array = map_array(path, dtype, tuple(metadata.shapes[name]))
        own = None
        if checksums is not None:
            own = checksums[num : num + metadata.num_blocks(name)]
            num += metadata.num_blocks(name)
        arrays[name] = CheckedArray(path, array, own)
    if checksums is not None and num != len(checksums):
        raise ValueError(f"{folder}: found {len(checksums)} checksums for {num} blocks.")
    return SequenceFiles(metadata, arrays)


def write_checksums(draft: Draft, metadata: SequenceMetadata) -> None:
    """Write, durably, the checksums of files that were just written. Raises: OSError."""
    parts = [_checksum_file(draft.folder / name) for name in metadata.shapes]
    checksums = np.array([value for part in parts for value in part], np.uint32)
    write_durably(draft.folder / _CHECKSUMS, seal_bytes(checksums.tobytes()))


def _checksum_file(path: Path) -> list[int]:
    checksums = []
    with path.open("rb") as file:
        while data := file.read(_BLOCK_BYTES * _READ_BLOCKS):
            view = memoryview(data)
            checksums += [
                zlib.crc32(view[start : start + _BLOCK_BYTES])
                for start in range(0, len(data), _BLOCK_BYTES)
            ]
    return checksums


def is_sequence_folder(folder: Path) -> bool:
    """Whether a folder of the cache holds sequences, or what is left of them."""
    return (folder / _CHECKSUMS).exists()


def find_sequence_damage(folder: Path) -> str:
    """Return what is wrong with cached sequences, by their checksums; empty if they are whole."""
    try:
        metadata = SequenceMetadata(**read_json((folder / METADATA_FILE).read_bytes()))
        read_bytes((folder / SHARDS).read_bytes(), is_required=True)
        data = read_bytes((folder / _CHECKSUMS).read_bytes(), is_required=True)
        expected = np.frombuffer(data, np.uint32)
        start = 0
        for name in metadata.shapes:
            found = _checksum_file(folder / name)
            if found != expected[start : start + metadata.num_blocks(name)].tolist():
                return f"found that {name} has other checksums than were written"
            start += metadata.num_blocks(name)
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return f"found that {error}" if str(error) else f"found {type(error).__name__}"
    return ""
