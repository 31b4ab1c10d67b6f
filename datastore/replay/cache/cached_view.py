"""Cached view: the files of one decoded view, how they are written and how they are read.

    records           the packed words uint64 with their padding, as they are in memory
    runs              int64 [4, num_runs]
    steps             int64
    bootstrappable    int64; not there where it is the same as steps
    shards            a line for each shard: its path below the dataset
    view.json         what else is known, with the arrays' shapes; written last
    content_hash      64 hex digits, once somebody asked for it

Nothing of it is verified when it is opened but that it is there and as long as it should be: it is
on disk before its folder gets its name, and named by what it was made from.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

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

_RUNS: Final = "runs"
_SHARDS: Final = "shards"
_METADATA_FILE: Final = "view.json"
_CONTENT_HASH: Final = "content_hash"
_SHA256: Final = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class ViewMetadata:
    """What view.json says. `shapes` are those of the arrays, by the names of their files."""

    shapes: Mapping[str, Sequence[int]]
    num_steps: int
    num_episodes: int
    has_links: bool
    has_masked_actions: bool


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
    )


def write_metadata(folder: Path, about: ViewMetadata, shards: Sequence[str]) -> None:
    """Write, durably, what is known of arrays that are on disk already. Raises: OSError."""
    write_durably(folder / _SHARDS, "".join(f"{path}\n" for path in shards).encode())
    write_durably(folder / _METADATA_FILE, json.dumps(asdict(about)).encode())


def write_durably(path: Path, data: bytes) -> None:
    """Write a small file and fsync it. Raises: OSError."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def open_cached(folder: Path, layout: RecordLayout) -> tuple[Packed, ViewMetadata] | None:
    """Map a view's arrays; None if they are not there, or not whole.

    They stay readable when the folder is removed. Marks the view as used now. Cost: under 1 ms,
    whatever its size.
    """
    try:
        about = ViewMetadata(**json.loads((folder / _METADATA_FILE).read_bytes()))
        packed = map_packed(folder, layout, about)
    except (OSError, ValueError, TypeError, KeyError):  # not there, cut, or of another release
        return None
    with suppress(OSError):  # one that we may only read
        os.utime(folder / _METADATA_FILE)
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


def last_use_s(folder: Path) -> float:
    """Return when a view was last opened (s since 1970); 0 if it is not whole."""
    with suppress(OSError):
        return (folder / _METADATA_FILE).stat().st_mtime
    return 0.0


def read_shards(folder: Path) -> list[str] | None:
    """Return the paths of the shards that a view was made from; None if it does not say."""
    with suppress(OSError, UnicodeDecodeError):
        return (folder / _SHARDS).read_text().splitlines()
    return None


def read_content_hash(folder: Path) -> str | None:
    """Return the selection's hash, if somebody asked for it before."""
    with suppress(OSError, UnicodeDecodeError):
        text = (folder / _CONTENT_HASH).read_text()
        return text if _SHA256.fullmatch(text) else None
    return None


def write_content_hash(folder: Path, sha256: str) -> None:
    """Keep the selection's hash, if the folder is there and may be written to."""
    temporary = folder / f"{_CONTENT_HASH}.{new_ulid()}"
    with suppress(OSError):
        write_durably(temporary, sha256.encode())
        os.replace(temporary, folder / _CONTENT_HASH)
