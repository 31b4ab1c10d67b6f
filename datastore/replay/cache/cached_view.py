"""Cached view: the files of one decoded view, how they are written and how they are read.

    records           the packed words uint64 with their padding, as they are in memory
    runs              int64 [4, num_runs]
    steps             int64
    bootstrappable    int64; not there where it is the same as steps
    shards            a line for each shard: its path below the dataset
    view.json         what else is known, with the arrays' shapes; written last
    content_hash      64 hex digits, once somebody asked for it

view.json has the CRC-32 of each block of the arrays, and it and the other files a sha256 of their
own (seals.py). All are compared when the view is opened; one that is damaged is decoded again.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.names import new_ulid
from replaylake.datastore.replay.array_allocator import (
    BOOTSTRAPPABLE_STEPS,
    RECORDS,
    STEPS,
    available_bytes,
)
from replaylake.datastore.replay.layout import RecordLayout
from replaylake.datastore.replay.mapped_arrays import map_array, num_bytes
from replaylake.datastore.replay.record_runs import Runs
from replaylake.datastore.replay.records import Packed, Records
from replaylake.datastore.storage.seals import read_bytes, read_json, seal_bytes, seal_json

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_RUNS: Final = "runs"
SHARDS: Final = "shards"
METADATA_FILE: Final = "view.json"
_CONTENT_HASH: Final = "content_hash"
# Each block has a checksum, so that threads can compare them at once.
_BLOCK_BYTES: Final = 16 << 20
_READ_BYTES: Final = 1 << 20
_THREADS: Final = 4
_T = TypeVar("_T")
_SHA256: Final = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class ViewMetadata:
    """What view.json says. `shapes` are those of the arrays, by the names of their files.

    checksums: the CRC-32 of each block of 16 MiB of each of these files.
    """

    shapes: Mapping[str, Sequence[int]]
    num_steps: int
    num_episodes: int
    has_links: bool
    has_masked_actions: bool
    checksums: Mapping[str, Sequence[int]]


def collect_arrays(packed: Packed) -> dict[str, NDArray[Any]]:
    """Return the arrays that are kept, by the names of their files."""
    runs = [getattr(packed.runs, field.name) for field in fields(Runs)]
    arrays: dict[str, NDArray[Any]] = {
        RECORDS: packed.records.words,
        _RUNS: np.stack(runs).astype(np.int64),
        STEPS: packed.steps,
    }
    if len(packed.bootstrappable) < len(packed.steps):
        arrays[BOOTSTRAPPABLE_STEPS] = packed.bootstrappable
    return arrays


def make_metadata(
    packed: Packed, arrays: Mapping[str, NDArray[Any]], *, has_masked_actions: bool
) -> ViewMetadata:
    """Return what view.json is to say."""
    return ViewMetadata(
        shapes={name: array.shape for name, array in arrays.items()},
        num_steps=packed.num_steps,
        num_episodes=packed.num_episodes,
        has_links=packed.records.has_links,
        has_masked_actions=has_masked_actions,
        checksums={name: _checksum_array(array) for name, array in arrays.items()},
    )


def write_metadata(folder: Path, about: DataclassInstance, shards: Sequence[str]) -> None:
    """Write, durably, what is known of arrays that are on disk already. Raises: OSError."""
    names = "".join(f"{path}\n" for path in shards).encode()
    write_durably(folder / SHARDS, seal_bytes(names))
    write_durably(folder / METADATA_FILE, seal_json(asdict(about)))


def write_durably(path: Path, data: bytes) -> None:
    """Write a small file and fsync it. Raises: OSError."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def open_cached(folder: Path, layout: RecordLayout) -> tuple[Packed, ViewMetadata] | None:
    """Map a view's arrays; None if they are not there, or not what was written.

    They stay readable when the folder is removed. Marks the view as used now. Cost: reads it once,
    0.3 s a GB of the page cache (2 cores, 2026-11).
    """
    try:
        about = ViewMetadata(**read_json((folder / METADATA_FILE).read_bytes()))
        packed = map_packed(folder, layout, about)
        _check_arrays(folder, about)
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        OverflowError,
        RecursionError,
    ):
        return None  # not there, cut, or of another release
    with suppress(OSError):  # one that we may only read
        os.utime(folder / METADATA_FILE)
    return packed, about


def map_packed(folder: Path, layout: RecordLayout, about: ViewMetadata) -> Packed:
    """Map the arrays that `about` tells of, for reading.

    Raises: OSError, KeyError for one that is not there; ValueError for one of another size.
    """
    shapes = {name: tuple(shape) for name, shape in about.shapes.items()}
    if shapes[RECORDS][1:] != (layout.num_words,):
        raise ValueError(f"{folder}: found records of {shapes[RECORDS]} words.")
    # A file that memory cannot hold is read by the page: around each row of a cold one of 6 GB this
    # machine read 1.2 MB, and a batch of 256 took 224 ms in place of 20. One that memory holds is
    # all read ahead after a few batches, which is worth their wait (1 core, 2026-11).
    fits = num_bytes(np.uint64, shapes[RECORDS]) < available_bytes()
    words = map_array(folder / RECORDS, np.uint64, shapes[RECORDS], read_ahead=fits)
    runs, steps = (map_array(folder / name, np.int64, shapes[name]) for name in (_RUNS, STEPS))
    bootstrappable = steps
    if BOOTSTRAPPABLE_STEPS in shapes:
        path = folder / BOOTSTRAPPABLE_STEPS
        bootstrappable = map_array(path, np.int64, shapes[BOOTSTRAPPABLE_STEPS])
    return Packed(
        records=Records(layout, words, has_links=about.has_links),
        runs=Runs(*runs),
        steps=steps,
        bootstrappable=bootstrappable,
        num_steps=about.num_steps,
        num_episodes=about.num_episodes,
    )


def find_damage(folder: Path) -> str:
    """Return what is wrong with a view, by its checksums; empty for one that is whole.

    Half of a view, and one of an earlier release, are no damage: nobody opens them.
    """
    try:
        data = (folder / METADATA_FILE).read_bytes()
        if b"checksum" not in data:  # it is there twice
            return ""
        _check_arrays(folder, ViewMetadata(**read_json(data)))
        read_bytes((folder / SHARDS).read_bytes(), is_required=True)
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return f"found that {error}" if str(error) else f"found {type(error).__name__}"
    return ""


def _check_arrays(folder: Path, about: ViewMetadata) -> None:
    """Compare the arrays with their checksums. Raises: OSError, KeyError, ValueError."""
    # By reading, not by mapping: of a file that memory cannot hold, pages would come one by one.
    blocks = [
        (name, number, checksum)
        for name in about.shapes
        for number, checksum in enumerate(about.checksums[name])
    ]
    found = _map_in_threads(lambda block: _checksum_block(folder / block[0], block[1]), blocks)
    for (name, number, expected), checksum in zip(blocks, found, strict=True):
        if checksum != expected:
            raise ValueError(
                f"block {number} of {name} has CRC-32 {checksum:08x}, and {expected:08x} was "
                "written"
            )


def _checksum_block(path: Path, number: int) -> int:
    # In pieces: whole blocks in each thread would exceed a small memory budget.
    checksum = 0
    with path.open("rb") as file:
        file.seek(number * _BLOCK_BYTES)
        for _ in range(_BLOCK_BYTES // _READ_BYTES):
            checksum = zlib.crc32(file.read(_READ_BYTES), checksum)
    return checksum


def _checksum_array(array: NDArray[Any]) -> list[int]:
    if not array.size:
        return []
    data = np.ascontiguousarray(array).data.cast("B")
    starts = range(0, len(data), _BLOCK_BYTES)
    return _map_in_threads(lambda at: zlib.crc32(data[at : at + _BLOCK_BYTES]), starts)


def _map_in_threads(function: Callable[[_T], int], values: Sequence[_T]) -> list[int]:
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(function, values))
    except RuntimeError:
        # The interpreter is about to end, and starts no more threads.
        return [function(value) for value in values]


def last_use_s(folder: Path) -> float:
    """Return when a view was last opened (s since 1970); 0 if it is not whole."""
    with suppress(OSError):
        return (folder / METADATA_FILE).stat().st_mtime
    return 0.0


def read_shards(folder: Path) -> list[str] | None:
    """Return the paths of the shards that a view was made from; None if it does not say."""
    with suppress(OSError, ValueError):
        data = read_bytes((folder / SHARDS).read_bytes(), is_required=True)
        return data.decode().splitlines()
    return None


def read_content_hash(folder: Path) -> str | None:
    """Return the selection's hash, if somebody asked for it before."""
    with suppress(OSError, ValueError):
        text = read_bytes((folder / _CONTENT_HASH).read_bytes(), is_required=True).decode()
        return text if _SHA256.fullmatch(text) else None
    return None


def write_content_hash(folder: Path, sha256: str) -> None:
    """Keep the selection's hash, if the folder is there and may be written to."""
    temporary = folder / f"{_CONTENT_HASH}.{new_ulid()}"
    with suppress(OSError):
        write_durably(temporary, seal_bytes(sha256.encode()))
        os.replace(temporary, folder / _CONTENT_HASH)
