"""Mutations: valid files of each kind changed in their lengths, types, nesting and counts.

Each takes a random.Random, so that a case is named by its seed file and a number.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Mutate = Callable[[bytes, Random], bytes]

INTEGERS = (0, 1, -1, 127, 255, 2**15, 2**16 - 1, 2**31 - 1, -(2**31), 2**32 - 1, 2**40, 2**63 - 1)
TEXTS = (
    "",
    " ",
    "nan",
    "1e999",
    "-0",
    "007",
    "\0",
    "é" * 40,
    "null",
    "true",
    "9" * 400,
    "x" * 5000,
)


def flip_bytes(data: bytes, rng: Random) -> bytes:
    """Cut, repeat, or overwrite some bytes, also with whole numbers that a length may be."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        if not changed:
            return b"\0"
        at, kind = rng.randrange(len(changed)), rng.randrange(6)
        if kind == 0:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del changed[at : at + rng.choice((1, 4, 100, len(changed)))]
        elif kind == 2:
            changed[at:at] = changed[at : at + rng.choice((1, 8, 64))]
        elif kind == 3:
            changed[at : at + 1] = bytes([rng.choice((0, 10, 34, 44, 91, 123, 255))])
        else:
            form = rng.choice(("<i", "<q", ">I"))
            number = struct.pack(form, rng.choice(INTEGERS) % 2**31)
            changed[at : at + len(number)] = number
    return bytes(changed)


def mutate_lines(data: bytes, rng: Random) -> bytes:
    """Change cells, names and rows of a text with a row a line."""
    kind = rng.randrange(9)
    mark = b","
    lines = data.split(b"\n")
    if kind == 0:
        return flip_bytes(data, rng)
    if kind == 1:  # many columns: a value for each row, or a name alone
        more = b"".join(b",c%d" % i for i in range(rng.choice((3, 5000, 20_000))))
        return b"\n".join(
            [lines[0] + more, *(line + b",1" * more.count(b",") for line in lines[1:])]
        )
    if kind == 2:
        lines[0] = lines[0].replace(b"a", b"a" * rng.choice((2, 1 << 21)), 1)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(lines))
        cells = lines[at].split(mark)
        cell = rng.randrange(len(cells))
        value = rng.choice((*TEXTS, *map(str, INTEGERS), "9" * 23, "[" * 100_000, '{"a":' * 2000))
        cells[cell] = value.encode()
        if kind == 3:
            cells.insert(cell, b'"')
        elif kind == 4:
            cells[cell] = b'"' + cells[cell] + b"\n" + b'"'
        elif kind == 5:
            cells *= 2
        elif kind == 6:
            cells[cell] = b"\xff\xfe\x00"
        lines[at] = mark.join(cells)
        if kind == 7:
            lines *= 2
    return rng.choice((b"\n", b"\n", b"\r\n")).join(lines)


def mutate_tree(value: Any, rng: Random) -> Any:
    """Change a JSON value in one place."""
    deep: Any = 1
    for _ in range(rng.choice((3, 70, 900))):
        deep = rng.choice(({"a": deep}, [deep], {"type": "dict", "spaces": {"a": deep}}))
    others = (
        None,
        True,
        1.5,
        float("nan"),
        "\ud800",
        [],
        {},
        [[]],
        deep,
        *INTEGERS,
        *TEXTS,
        10**400,
    )
    places: list[tuple[Any, Any]] = []
    stack = [value]
    while stack and len(places) < 5000:
        one = stack.pop()
        keys = (
            list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
        )
        for key in keys:
            places.append((one, key))
            stack.append(one[key])
    if not places or rng.random() < 0.05:
        return rng.choice(others)
    holder, key = rng.choice(places)
    kind = rng.randrange(6)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[str(rng.choice(TEXTS))] = holder.pop(key)
    elif kind == 2 and isinstance(holder[key], list):
        holder[key] = holder[key] * rng.choice((0, 2, 300))
    elif kind == 3:
        holder[key] = [holder[key]]
    else:
        holder[key] = rng.choice(others)
    return value


def mutate_json(data: bytes, rng: Random) -> bytes:
    """Change a JSON text, as a tree or by its bytes."""
    if rng.random() < 0.15:
        return flip_bytes(data, rng)
    if rng.random() < 0.05:
        return b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    value = json.loads(data)
    for _ in range(rng.randint(1, 3)):
        value = mutate_tree(value, rng)
    try:
        return json.dumps(value).encode()
    except RecursionError:
        return flip_bytes(data, rng)


def mutate_json_lines(data: bytes, rng: Random) -> bytes:
    """Change some lines of JSON."""
    if rng.random() < 0.1:
        return mutate_lines(data, rng)
    lines = data.splitlines()
    if rng.random() < 0.05:
        more = {f"c{i}": 1 for i in range(20_000)}
        return b"\n".join(json.dumps({**json.loads(line), **more}).encode() for line in lines[:3])
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(lines))
        try:
            lines[at] = mutate_json(lines[at], rng)
        except ValueError:
            lines[at] = flip_bytes(lines[at], rng)
    return b"\n".join(lines)


def mutate_table(table: pa.Table, rng: Random) -> pa.Table:
    """Change a table's columns: their types and encodings, their names, how many there are."""
    for _ in range(rng.randint(1, 3)):
        if not table.num_columns:
            break
        at = rng.randrange(table.num_columns)
        name, column = table.column_names[at], table.column(at).combine_chunks()
        try:
            changed = rng.choice(_COLUMN_CHANGES)(column, rng)
            if changed is not None:
                table = table.set_column(at, name, changed)
        except (pa.ArrowException, ArithmeticError, TypeError, ValueError, NotImplementedError):
            pass
        kind = rng.randrange(14)
        if kind == 0:
            table = table.remove_column(at)
        elif kind == 1:
            table = table.append_column(rng.choice((name, "x\0y", "", "step")), table.column(0))
        elif kind == 2:
            table = table.slice(0, rng.randint(0, 2))
        elif kind == 3:
            deep = '{"type":"dict","spaces":{"a":' * 100_000 + "1" + "}}" * 100_000
            metadata = dict(table.schema.metadata or {})
            metadata[b"replaylake.observation_space"] = deep.encode()
            table = table.replace_schema_metadata(metadata)
        elif kind == 4:
            metadata = dict(table.schema.metadata or {})
            for key in metadata:
                metadata[key] = mutate_json(metadata[key], rng) if rng.random() < 0.5 else b"{"
            table = table.replace_schema_metadata(metadata)
        elif kind == 5 and rng.random() < 0.1:
            names = [f"c{i}" for i in range(20_000)]
            more = pa.table([table.column(0)] * len(names), names=names)
            table = pa.table([*table.columns, *more.columns], names=[*table.column_names, *names])
    return table


def _long_dictionary(column: pa.Array, rng: Random) -> pa.Array:
    text = "x" * rng.choice((10, 10_000, 1_000_000))
    return pa.DictionaryArray.from_arrays(np.zeros(len(column), np.int32), [text])


def _long_lists(column: pa.Array, rng: Random) -> pa.Array:
    size = rng.choice((0, 1, 1000, 12_000_000)) if len(column) < 1000 else 1
    ends = np.minimum(np.arange(len(column) + 1), 3).astype(np.int32) * size
    return pa.ListArray.from_arrays(ends, np.zeros(int(ends[-1]), np.float64))


def _with_nulls(column: pa.Array, rng: Random) -> pa.Array:
    mask = np.asarray([rng.random() < 0.3 for _ in range(len(column))])
    return pa.array(column.to_pylist(), column.type, mask=mask)


def _long_run(column: pa.Array, rng: Random) -> pa.Array:
    return pa.RunEndEncodedArray.from_arrays([len(column)], pa.array(["x" * 1000]))


_KINDS = (
    pa.string(),
    pa.large_string(),
    pa.binary(),
    pa.int8(),
    pa.uint64(),
    pa.float16(),
    pa.float32(),
    pa.bool_(),
    pa.decimal128(20, 3),
    pa.timestamp("ns"),
    pa.timestamp("us", "UTC"),
    pa.date32(),
    pa.duration("s"),
    pa.string_view(),
)
_COLUMN_CHANGES: tuple[Callable[[Any, Random], Any], ...] = (
    lambda column, rng: column.cast(rng.choice(_KINDS)),
    lambda column, rng: column.cast(rng.choice(_KINDS), safe=False),
    lambda column, rng: column.dictionary_encode(),
    lambda column, rng: pa.compute.run_end_encode(column),
    lambda column, rng: pa.nulls(len(column), rng.choice(_KINDS)),
    lambda column, rng: pa.nulls(len(column)),
    lambda column, rng: pa.StructArray.from_arrays([column, column], ["a", rng.choice("ab")]),
    lambda column, rng: pa.FixedSizeListArray.from_arrays(
        column, rng.choice((1, len(column) or 1))
    ),
    lambda column, rng: pa.array([abs(rng.choice(INTEGERS))] * len(column), pa.uint64()),
    lambda column, rng: pa.array([rng.choice((np.nan, np.inf, 1e308, -0.0))] * len(column)),
    lambda column, rng: pa.array([[]] * len(column), pa.list_(column.type)),
    lambda column, rng: pa.array([{"k": v} for v in column.to_pylist()]),
    lambda column, rng: pa.array([rng.choice(TEXTS) for _ in range(len(column))]),
    _long_dictionary,
    _long_lists,
    _with_nulls,
    _long_run,
)


def write_arrow(table: pa.Table, rng: Random) -> bytes:
    """Return a table as an Arrow file or stream."""
    sink = io.BytesIO()
    packing = rng.choice((None, "zstd", "lz4"))
    new = rng.choice((pa.ipc.new_file, pa.ipc.new_stream))
    with new(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=packing)) as writer:
        writer.write_table(table)
        if table.num_rows == 1 or rng.random() < 0.03:
            run = pa.RunEndEncodedArray.from_arrays(pa.array([2**31 - 2], pa.int32()), [1.0])
            if table.schema.types == [run.type]:
                writer.write_table(pa.table({table.column_names[0]: run}))
    return sink.getvalue()


def mutate_arrow(data: bytes, rng: Random) -> bytes:
    """Change an Arrow file: its table, or its bytes."""
    if rng.random() < 0.3:
        return flip_bytes(data, rng)
    if rng.random() < 0.03:
        run = pa.RunEndEncodedArray.from_arrays(pa.array([2**31 - 2], pa.int32()), [1.0])
        return write_arrow(pa.table({"observation": run}), rng)
    with pa.ipc.open_file(data) as reader:
        table = mutate_table(reader.read_all(), rng)
    packed = write_arrow(table, rng)
    return flip_bytes(packed, rng) if rng.random() < 0.2 else packed


def mutate_parquet(data: bytes, rng: Random) -> bytes:
    """Change a Parquet file: its table, or its bytes."""
    if rng.random() < 0.3:
        return flip_bytes(data, rng)
    table = mutate_table(pq.read_table(io.BytesIO(data)), rng)
    sink = io.BytesIO()
    try:
        pq.write_table(
            table,
            sink,
            compression=rng.choice(("none", "zstd", "snappy", "gzip")),
            store_schema=rng.random() < 0.7,
            use_dictionary=rng.random() < 0.7,
            row_group_size=rng.choice((1, 7, 100_000)),
            data_page_version=rng.choice(("1.0", "2.0")),
            write_page_checksum=rng.random() < 0.5,
        )
    except (pa.ArrowException, NotImplementedError):
        return flip_bytes(data, rng)
    return flip_bytes(sink.getvalue(), rng) if rng.random() < 0.2 else sink.getvalue()


def mutate_hdf5(data: bytes, rng: Random) -> bytes:
    """Change an HDF5 file: one of its arrays, its groups, its attributes, or its bytes."""
    import h5py

    if rng.random() < 0.3:
        return flip_bytes(data, rng)
    image = io.BytesIO(data)
    with h5py.File(image, "r+") as file:
        names: list[str] = []
        file.visit(names.append)
        for _ in range(rng.randint(1, 3)):
            name = rng.choice(names)
            if name not in file:
                continue
            item, kind = file[name], rng.randrange(8)
            if kind == 0:
                del file[name]
            elif kind == 1:
                file[rng.choice(("observations", "x/y", "episode_0"))] = h5py.SoftLink(f"/{name}")
            elif kind == 2:
                for key in list(item.attrs):
                    item.attrs[key] = rng.choice((*INTEGERS[:9], "x" * 100, "[" * 5000, 1.5))
            elif isinstance(item, h5py.Dataset):
                shape, dtype = item.shape, item.dtype
                values = item[()] if item.size is not None and item.size < 1_000_000 else None
                del file[name]
                if kind == 3:
                    file[name] = np.zeros(rng.choice((0, 1, 3)), rng.choice("fib"))
                elif kind == 4:
                    size = (rng.choice((10, 10**9)), *shape[1:])
                    file.create_dataset(name, size, dtype, chunks=True, compression="gzip")
                elif kind == 5 and values is not None:
                    file[name] = np.asarray([rng.choice(TEXTS).replace("\0", "")], "S20")
                elif values is not None and np.ndim(values):
                    file[name] = rng.choice((values[:-1], values[..., None], values[:0]))
    return image.getvalue()


def mutate_npz(data: bytes, rng: Random) -> bytes:
    """Change an npz: an array, or the header of one, or its bytes."""
    if rng.random() < 0.3:
        return flip_bytes(data, rng)
    arrays = dict(np.load(io.BytesIO(data)))
    name = rng.choice(list(arrays))
    array, kind = arrays[name], rng.randrange(6)
    if kind == 0:
        del arrays[name]
    elif kind == 1:
        arrays[name] = array[:-1] if array.ndim else array
    elif kind == 2:
        arrays[name] = array.astype(rng.choice(("U5", "c8", "M8[s]", "f2", "u8", "?")))
    elif kind == 3:
        arrays[name] = np.zeros((rng.choice((0, 1, 7)), rng.choice((0, 3))), rng.choice("fiS"))
    elif kind == 4:
        arrays[rng.choice(("obs", "x", "episode_starts", "terminals"))] = array
    else:
        arrays[name] = np.full(array.shape, rng.choice((np.nan, np.inf, 1e300)))
    sink = io.BytesIO()
    rng.choice((np.savez, np.savez_compressed))(sink, **arrays)
    return flip_bytes(sink.getvalue(), rng) if rng.random() < 0.2 else sink.getvalue()


def pack(data: bytes, rng: Random) -> bytes:
    """Return the bytes as they are, or packed, or packed and damaged."""
    kind = rng.randrange(8)
    if kind > 2:
        return data
    packed = (
        gzip.compress(data, 1)
        if kind == 0
        else bz2.compress(data, 1)
        if kind == 1
        else pa.compress(data, "zstd", asbytes=True)
    )
    return flip_bytes(packed, rng) if rng.random() < 0.3 else packed


BY_SUFFIX: dict[str, Mutate] = {
    ".csv": mutate_lines,
    ".jsonl": mutate_json_lines,
    ".json": mutate_json,
    ".arrow": mutate_arrow,
    ".parquet": mutate_parquet,
    ".hdf5": mutate_hdf5,
    ".h5": mutate_hdf5,
    ".npz": mutate_npz,
}


def mutate_file(name: str, data: bytes, rng: Random) -> bytes:
    """Change a file by what its name says that it is."""
    return BY_SUFFIX.get(Path(name).suffix, flip_bytes)(data, rng)
