"""Readings: the options, the spelling of a source and the sizes of blocks that a case is read with.

Much of a reader runs only for what its options ask, and for files larger than a block of memory.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from replaylake.datastore.interchange.formats.format import GAPS, OPEN_ENDS, ReadOptions
from replaylake.datastore.interchange.formats.tabular.fields import ALIASES
from replaylake.datastore.interchange.formats.tabular.reader import TabularReader
from replaylake.datastore.interchange.formats.tabular.tables import CachedTables

_FORMATS: Final = "replaylake.datastore.interchange.formats"
# What is read at a time, by module: a small file is then read as one of gigabytes is.
_BLOCKS: Final[Mapping[str, tuple[str, ...]]] = {
    "generations.json_values": ("_BLOCK_BYTES",),
    "generations.rows": ("_CHUNK_BYTES",),
    "generic.csv": ("_BLOCK_BYTES", "_SAMPLE_BYTES"),
    "generic.encoded_columns": ("_PART_BYTES", "_PART_ROWS"),
    "generic.jsonl": ("_BLOCK_BYTES",),
    "generic.parquet": ("_BATCH_ROWS", "_BATCH_BYTES"),
    "hdf5.row_tables": ("_BLOCK_ROWS", "_LARGEST_BLOCK_BYTES", "CHUNK_BYTES"),
    "lerobot": ("_CHUNK_BYTES", "_MIN_CHUNK_ROWS"),
    "npz.arrays": ("_READ_BYTES",),
    "npz.npz": ("CHUNK_BYTES",),
    "rlds.rlds": ("_CHUNK_BYTES",),
    "rlds.tfrecord": ("_PIECE_BYTES",),
    "rllib.unpacking": ("CHUNK_BYTES",),
    "tabular.episode_rows": ("CHUNK_BYTES",),
    "transcripts.transcripts": ("_CHUNK_CHARS",),
}
_KEY: Final = re.compile(rb'"([A-Za-z_][\w.]{0,40})"\s*:')
_FIELDS: Final = (*ALIASES, "lives", "x,y", "")
_FILLS: Final = ("0", "1.5", "true", "x", "", "[0, 0]", "[", "2026-01-01", "9" * 30, "nan")
_NUMBERS: Final = (0.0, -1.0, 2.0, 1e308, float("nan"), float("inf"))
_ZONES: Final = ("UTC", "Europe/Berlin", "+02:00", "Mars/Base", "")


@contextlib.contextmanager
def small_blocks(num_bytes: int, rng: Random) -> Iterator[None]:
    """Read so many bytes in blocks of some rows or bytes, and keep next to nothing in memory."""
    # In thousands of blocks, the open episodes would be looked through as often.
    size = max(rng.choice((2, 64, 600)), num_bytes // 50)
    changed: list[tuple[Any, str, Any]] = []
    for path, names in _BLOCKS.items():
        module = import_module(f"{_FORMATS}.{path}")
        changed += [(module, name, size) for name in names]
    # What has the size as a default took it when it was defined.
    defaults = (size, *(CachedTables.__init__.__defaults__ or ())[1:])
    changed.append((CachedTables.__init__, "__defaults__", defaults))
    changed.append((TabularReader.__init__, "__kwdefaults__", {"block_bytes": size}))
    before = [(holder, name, getattr(holder, name)) for holder, name, _ in changed]
    try:
        for holder, name, value in changed:
            setattr(holder, name, value)
        yield
    finally:
        for holder, name, value in before:
            setattr(holder, name, value)


def change_options(options: ReadOptions, names: list[str], rng: Random) -> ReadOptions:
    """Change some options. names: of columns in the source. Raises: ConfigInvalidError."""
    for _ in range(rng.choice((1, 1, 2))):
        name, kind = rng.choice(names or ["x"]), rng.randrange(13)
        changed: dict[str, Any] = {}
        if kind < 4:
            changed["mapping"] = _change_mapping(options.mapping, names, rng)
        elif kind == 4:
            changed["fill"] = {**options.fill, name: rng.choice(_FILLS)}
        elif kind == 5:
            changed["episode_by"] = tuple(rng.sample(names, min(len(names), rng.randint(1, 2))))
        elif kind == 6:
            changed["order_by"] = tuple(rng.sample(names, min(len(names), rng.randint(1, 2))))
        elif kind == 7:
            changed["open_ends"], changed["time_limit"] = rng.choice(OPEN_ENDS), rng.randint(1, 4)
            changed["gaps"] = rng.choice(GAPS)
        elif kind == 8:
            changed["action_scale"] = rng.choice(_NUMBERS)
        elif kind == 9:
            changed["action_range"] = (rng.choice(_NUMBERS), rng.choice(_NUMBERS))
        elif kind == 10:
            changed["timezone"] = rng.choice(_ZONES)
        elif kind == 11:
            changed["reward_scale"] = rng.choice(_NUMBERS)
        else:
            changed["max_categories"] = rng.randint(0, 2)
            changed["reward_unknown"] = True
        options = replace(options, **changed)
    return options


def _change_mapping(mapping: Mapping[str, str], names: list[str], rng: Random) -> dict[str, str]:
    changed, kind = dict(mapping), rng.randrange(4)
    if kind == 0 and changed:
        del changed[rng.choice(sorted(changed))]
        return changed
    theirs = rng.choice(names or ["x"])
    if kind == 1:
        theirs = ",".join(rng.sample(names, min(len(names), rng.randint(1, 3)))) or "x"
    elif kind == 2:
        theirs = rng.choice((f"{theirs[:2]}*", f"{theirs}.{rng.choice(names or ['x'])}", "absent"))
    changed[rng.choice((*_FIELDS, *names))] = theirs
    return changed


def find_names(files: Mapping[str, bytes]) -> list[str]:
    """Return names that columns of the files may have."""
    names: dict[str, None] = {}
    for path, data in sorted(files.items()):
        found: list[str] = []
        with contextlib.suppress(Exception):
            suffix = Path(path).suffix
            if suffix == ".parquet":
                found = pq.read_schema(io.BytesIO(data)).names
            elif suffix == ".arrow":
                with pa.ipc.open_file(data) as reader:
                    found = reader.schema.names
            elif suffix == ".npz":
                found = [*np.load(io.BytesIO(data))]
            elif suffix in (".h5", ".hdf5"):
                found = _visit(data)
            elif suffix == ".csv":
                found = data.partition(b"\n")[0].decode().split(",")
            else:
                found = [key.decode() for key in _KEY.findall(data[:20_000])]
        names |= dict.fromkeys(found)
    return list(names)[:200]


def _visit(data: bytes) -> list[str]:
    import h5py

    found: list[str] = []
    with h5py.File(io.BytesIO(data), "r") as file:
        file.visit(found.append)
    return found


def spell_source(case: Path, rng: Random) -> list[str]:
    """Return one of the ways to name a folder's files: it, each, a pattern, standard input."""
    paths = sorted(path for path in case.rglob("*") if path.is_file())
    kind = rng.randrange(40)
    if kind == 0:
        return [f"{case}/**"]
    if kind == 1:
        return [f"{case}/[!_]*"]
    if kind == 2:
        return [*map(str, paths)]
    if kind == 3:
        for name in (".hidden", "_SUCCESS", "README.md", "Thumbs.db", "video.mp4"):
            (case / name).write_bytes(b"x")
        return [str(case)]
    if kind == 4 and len(paths) == 1:
        sys.stdin = io.TextIOWrapper(io.BytesIO(paths[0].read_bytes()))
        return ["-"]
    if kind == 5:
        return [rng.choice((f"{case}/absent", f"{case}/*.absent"))]
    return [str(case)]


def archive_files(files: Mapping[str, bytes], rng: Random) -> bytes:
    """Return a zip of the files, some with members that nobody should write."""
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as out:
        folder = rng.choice(("", "folder/"))
        for name, data in files.items():
            kind, info = rng.randrange(20), zipfile.ZipInfo(folder + name)
            if kind == 0:
                info.filename = rng.choice(("../x", "/x", "C:x", "", "a/../b", "__MACOSX/x", "._x"))
            elif kind == 1:
                info.external_attr = 0o120777 << 16  # a symbolic link
            elif kind == 2:
                out.writestr(info, data)
            elif kind == 3:
                inner = io.BytesIO()
                with zipfile.ZipFile(inner, "w") as nested:
                    nested.writestr(Path(name).name, data)
                info.filename, data = f"{folder}{name}.zip", inner.getvalue()
            elif kind == 4:
                info.compress_type = zipfile.ZIP_BZIP2
            with contextlib.suppress(UserWarning):
                out.writestr(info, data)
    packed = bytearray(sink.getvalue())
    # The flag of an encrypted member, in its entry of the directory.
    if rng.random() < 0.05 and (at := packed.find(b"PK\x01\x02")) >= 0:
        packed[at + 8] |= 1
    return bytes(packed)
