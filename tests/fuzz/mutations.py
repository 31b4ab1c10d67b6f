"""Mutations: valid files of each kind changed in their lengths, types, nesting and counts.

Each takes a random.Random, so that a case is named by its seed file and a number.
"""

from __future__ import annotations

import base64
import bz2
import contextlib
import gzip
import io
import json
import pickle
import sqlite3
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from replaylake.datastore.errors import ReplayLakeError
from replaylake.datastore.interchange.formats.packed.packed import Unpacker, is_packed
from replaylake.datastore.interchange.formats.rlds.tfrecord import mask_crc

Mutate = Callable[[bytes, Random], bytes]
# How many places a case changes: mostly one, as a file with several faults is refused for the first
# of them, before the readers behind that check are reached.
_NUM_CHANGES = (1, 1, 1, 1, 2, 3)

# A file is small, whatever it decodes to: tables above this are packed.
_LARGE_BYTES = 1 << 20
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
    for _ in range(rng.choice(_NUM_CHANGES)):
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
    for _ in range(rng.choice(_NUM_CHANGES)):
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
    if isinstance(holder[key], str) and has_value(holder[key]) and rng.random() < 0.7:
        holder[key] = mutate_text(holder[key], rng)
    elif kind == 0:
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


def has_value(text: str) -> bool:
    """Whether a text holds a value of its own: a packed array, or JSON."""
    return is_packed(text) or text[:1] in ("{", "[")


def mutate_text(text: str, rng: Random) -> str:
    """Change a text; what it holds, where that is a packed array or JSON."""
    if is_packed(text):
        return mutate_packed(text, rng)
    try:
        return mutate_json(text.encode(), rng).decode("utf-8", "replace")
    except ValueError:
        return flip_bytes(text.encode(), rng).decode("utf-8", "replace")


def pack_value(value: Any, protocol: int = 5) -> str:
    """Return a value as RLlib packs it into a text: base64 of LZ4 of its pickle."""
    return _frame(pickle.dumps(value, protocol))


def _frame(pickled: bytes) -> str:
    import lz4.frame

    return base64.b64encode(lz4.frame.compress(pickled)).decode()


def mutate_packed(text: str, rng: Random) -> str:
    """Change a packed array: its dtype, order and nesting, or opcodes of its pickle."""
    import lz4.frame

    if rng.random() < 0.1:
        return base64.b64encode(flip_bytes(base64.b64decode(text), rng)).decode()
    value = None
    with contextlib.suppress(ReplayLakeError):  # a pickle of a seed may hold no array
        value = Unpacker()(text, "seed")
    if value is None:
        return _frame(_mutate_pickle(lz4.frame.decompress(base64.b64decode(text)), rng))
    while isinstance(value, dict):
        value = next(iter(value.values()))
    varied = rng.choice(_ARRAY_CHANGES)(value)
    pickled = pickle.dumps(varied, rng.randint(2, 5))
    return _frame(_mutate_pickle(pickled, rng) if rng.random() < 0.4 else pickled)


def _mutate_pickle(pickled: bytes, rng: Random) -> bytes:
    """Remove, repeat or replace an opcode, or a byte of its argument."""
    import pickletools

    with contextlib.suppress(ValueError):
        places = [at for _, _, at in pickletools.genops(pickled) if at is not None]
        i = rng.randrange(len(places))
        start, end = places[i], (*places, len(pickled))[i + 1]
        kind = rng.randrange(4)
        if kind == 0:
            return pickled[:start] + pickled[end:]
        if kind == 1:
            return pickled[:end] + pickled[start:end] + pickled[end:]
        at = start if kind == 2 else min(start + 1, len(pickled) - 1)
        new = rng.choice(_OPCODES) if kind == 2 else rng.randrange(256)
        return pickled[:at] + bytes([new]) + pickled[at + 1 :]
    return flip_bytes(pickled, rng)


_OPCODES = b"(.0)]}NaeustcRbQo\x81\x82\x85\x86\x87\x88\x8a\x8c\x93\x94\x96hjqrJKMGXBC"


def _nest(value: Any) -> Any:
    for _ in range(30):
        value = [value]
    return value


def _double(value: Any) -> Any:
    for _ in range(25):
        value = (value, value)
    return value


_ARRAY_CHANGES: tuple[Callable[[Any], Any], ...] = (
    np.asfortranarray,
    lambda array: array[..., None],
    lambda array: array[:-1] if array.ndim else array,
    lambda array: array[:0] if array.ndim else array,
    lambda array: array.astype(">f4"),
    lambda array: array.astype("f2"),
    lambda array: array.astype("c8"),
    lambda array: array.astype("O"),
    lambda array: array.astype("S3"),
    lambda array: array != 0,
    lambda array: np.zeros(3, [("a", "i4")]),
    lambda array: np.array(3.5),
    lambda array: np.float32(3.5),
    lambda array: array.tolist(),
    lambda array: [*array] if array.ndim else [array, array],
    lambda array: (array, array),
    lambda array: {"a": array, "b": {"c": array}},
    lambda array: {1: array},
    lambda array: [array, {"a": array}],
    lambda array: [1, 2.5],
    lambda array: [array] * 300,
    lambda array: None,
    lambda array: "x",
    lambda array: 10**30,
    lambda array: len,
    _nest,
    _double,
)


def mutate_message(data: bytes, rng: Random) -> bytes:
    """Change msgpack, which holds arrays as maps of their bytes, in one place."""
    import msgpack

    value = msgpack.unpackb(data, raw=False, strict_map_key=False)
    if not isinstance(value, dict | list):
        return flip_bytes(data, rng)
    for _ in range(rng.choice(_NUM_CHANGES)):
        value = mutate_tree(value, rng)
    try:
        return bytes(msgpack.packb(value, unicode_errors="surrogatepass"))
    except (ValueError, OverflowError, RecursionError):
        return flip_bytes(data, rng)


def mutate_members(data: bytes, rng: Random) -> bytes:
    """Change the bytes of one member of a zip, whose checksum is then that of the changed bytes."""
    with zipfile.ZipFile(io.BytesIO(data)) as before:
        names = before.namelist()
        chosen = rng.choice(names)
        sink = io.BytesIO()
        with zipfile.ZipFile(sink, "w") as after:
            for name in names:
                member = before.read(name)
                if name == chosen:
                    is_pickle = name.endswith(".pkl") and rng.random() < 0.8
                    member = _mutate_pickle(member, rng) if is_pickle else flip_bytes(member, rng)
                after.writestr(name, member)
    return sink.getvalue()


def mutate_records(data: bytes, rng: Random) -> bytes:
    """Change the records of a TFRecord file, whose checksums are then those of the changed ones."""
    if rng.random() < 0.2:
        return flip_bytes(data, rng)
    records = [*_split_records(data)]
    at, kind = rng.randrange(len(records)), rng.randrange(6)
    if kind == 0:
        del records[at]
    elif kind == 1:
        records.insert(at, rng.choice((b"", records[at])))
    else:
        records[at] = _flip_image(records[at], rng) if kind == 2 else flip_bytes(records[at], rng)
    return b"".join(map(_write_record, records))


def _flip_image(record: bytes, rng: Random) -> bytes:
    """Overwrite bytes of a PNG in a record, whose lengths stay true."""
    at = record.find(b"\x89PNG")
    if at < 0:
        return flip_bytes(record, rng)
    start = at + rng.choice((0, 16, 20, 24, 25, 40))  # its sizes, depth, color type and data
    new = rng.choice((b"\0", b"\x03", b"\x00\x00\xff\xff", b"\x00\x04\x00\x00"))
    return record[:start] + new + record[start + len(new) :]


def _split_records(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        yield data[at + 12 : at + 12 + size]
        at += 12 + size + 4


def _write_record(record: bytes) -> bytes:
    import google_crc32c

    header = struct.pack("<Q", len(record))
    sums = [struct.pack("<I", mask_crc(google_crc32c.value(part))) for part in (header, record)]
    return header + sums[0] + record + sums[1]


def mutate_database(data: bytes, rng: Random) -> bytes:
    """Change an SQLite file: a cell, a column or a table, or its bytes."""
    if rng.random() < 0.2:
        return flip_bytes(data, rng)
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        database.deserialize(data)
        tables = [
            row[0]
            for row in database.execute("select name from sqlite_master where type = 'table'")
        ]
        table = rng.choice(sorted(tables))
        columns = [row[1] for row in database.execute(f"pragma table_info({table})")]
        column, kind = rng.choice(columns), rng.randrange(8)
        if kind == 0:
            database.execute(f"alter table {table} rename column {column} to renamed")
        elif kind == 1:
            database.execute(f"delete from {table} where rowid % 2")
        elif kind == 2:
            database.execute(f"alter table {table} rename to renamed")
        else:
            known = database.execute(f"select {column} from {table} limit 1").fetchone()
            others = (None, 1.5, b"\xff", *TEXTS, *INTEGERS)
            value = rng.choice(others)
            if known and isinstance(known[0], str) and has_value(known[0]) and kind < 6:
                value = mutate_text(known[0], rng)
            one = rng.choice(("", " where rowid = (select min(rowid) from TABLE)"))
            where = one.replace("TABLE", table)
            with contextlib.suppress(sqlite3.IntegrityError):
                database.execute(f"update {table} set {column} = ?{where}", (value,))
        database.commit()
        return bytes(database.serialize())


def mutate_json(data: bytes, rng: Random) -> bytes:
    """Change a JSON text, as a tree or by its bytes."""
    if rng.random() < 0.15:
        return flip_bytes(data, rng)
    if rng.random() < 0.05:
        return b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    value = json.loads(data)
    for _ in range(rng.choice(_NUM_CHANGES)):
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
    for _ in range(rng.choice(_NUM_CHANGES)):
        at = rng.randrange(len(lines))
        try:
            lines[at] = mutate_json(lines[at], rng)
        except ValueError:
            lines[at] = flip_bytes(lines[at], rng)
    return b"\n".join(lines)


def mutate_table(table: pa.Table, rng: Random) -> pa.Table:
    """Change a table's columns: their types and encodings, their names, how many there are."""
    for _ in range(rng.choice(_NUM_CHANGES)):
        if not table.num_columns or table.nbytes > 64 << 20:
            break  # one column of long lists is enough
        at = rng.randrange(table.num_columns)
        name, column = table.column_names[at], table.column(at).combine_chunks()
        # What holds whole messages is nothing but them.
        is_messages = table.num_columns == 1 and rng.random() < 0.8
        change = _change_cell if is_messages else rng.choice(_COLUMN_CHANGES)
        try:
            changed = change(column, rng)
            if changed is not None:
                table = table.set_column(at, name, changed)
        except (pa.ArrowException, ArithmeticError, TypeError, ValueError, NotImplementedError):
            pass
        kind = 14 if is_messages else rng.randrange(14)
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
    # Offsets of 32 bits hold 3,000 texts of 600,000 characters, and not of 1,000,000.
    text = "x" * rng.choice((10, 10_000, 600_000, 1_000_000))
    values = pa.array([text], rng.choice((pa.string(), pa.large_string())))
    return pa.DictionaryArray.from_arrays(np.zeros(len(column), np.int32), values)


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


def _change_cell(column: pa.Array, rng: Random) -> pa.Array:
    """Change one value; what it holds, where it is msgpack, a packed array or JSON."""
    values = column.to_pylist()
    at = rng.randrange(len(values))
    value = values[at]
    if isinstance(value, bytes):
        values[at] = mutate_message(value, rng) if rng.random() < 0.8 else flip_bytes(value, rng)
    elif isinstance(value, str) and has_value(value):
        values[at] = mutate_text(value, rng)
    else:
        values[at] = mutate_tree([value], rng)[0]
        if rng.random() < 0.3:
            return pa.array(values)
    return pa.array(values, column.type)


_COLUMN_CHANGES: tuple[Callable[[Any, Random], Any], ...] = (
    _change_cell,
    _change_cell,
    _change_cell,
    lambda column, rng: column.cast(rng.choice(_KINDS)),
    lambda column, rng: column.cast(rng.choice(_KINDS), safe=False),
    lambda column, rng: column.dictionary_encode(),
    lambda column, rng: pc.run_end_encode(column),
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


def _repeat_rows(table: pa.Table, rng: Random) -> pa.Table:
    """Repeat the first row, which takes no more bytes as runs than it does once."""
    num = rng.choice((10, 100_000, 2**31 - 2))
    ends = pa.array([num], pa.int32())
    columns = [
        pa.RunEndEncodedArray.from_arrays(ends, column.slice(0, 1).combine_chunks())
        for column in table.columns
    ]
    return pa.table(columns, names=table.column_names)


def write_arrow(table: pa.Table, rng: Random) -> bytes:
    """Return a table as an Arrow file or stream."""
    sink = io.BytesIO()
    packing = "zstd" if table.nbytes > _LARGE_BYTES else rng.choice((None, "zstd", "lz4"))
    new = rng.choice((pa.ipc.new_file, pa.ipc.new_stream))
    with new(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=packing)) as writer:
        writer.write_table(table)
    return sink.getvalue()


def mutate_arrow(data: bytes, rng: Random) -> bytes:
    """Change an Arrow file: its table, or its bytes."""
    if rng.random() < 0.3:
        return flip_bytes(data, rng)
    with pa.ipc.open_file(data) as reader:
        table = reader.read_all()
    table = _repeat_rows(table, rng) if rng.random() < 0.05 else mutate_table(table, rng)
    packed = write_arrow(table, rng)
    return flip_bytes(packed, rng) if rng.random() < 0.2 else packed


def mutate_parquet(data: bytes, rng: Random) -> bytes:
    """Change a Parquet file: its table, or its bytes."""
    if rng.random() < 0.3:
        return flip_bytes(data, rng)
    table = mutate_table(pq.read_table(io.BytesIO(data)), rng)
    sink, is_large = io.BytesIO(), table.nbytes > _LARGE_BYTES
    try:
        pq.write_table(
            table,
            sink,
            compression="zstd" if is_large else rng.choice(("none", "zstd", "snappy", "gzip")),
            store_schema=rng.random() < 0.7,
            use_dictionary=rng.random() < 0.7,
            row_group_size=100_000 if table.num_columns > 1000 else rng.choice((1, 7, 100_000)),
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
        for _ in range(rng.choice(_NUM_CHANGES)):
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
        return mutate_members(data, rng) if rng.random() < 0.7 else flip_bytes(data, rng)
    arrays = dict(np.load(io.BytesIO(data), allow_pickle=True))  # a seed's own
    name = rng.choice(list(arrays))
    array, kind = arrays[name], rng.randrange(7)
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
    elif kind == 5:
        arrays[name] = np.asfortranarray(array)
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
    ".pt": mutate_members,
    ".db": mutate_database,
}


def mutate_file(name: str, data: bytes, rng: Random) -> bytes:
    """Change a file by what its name says that it is."""
    suffix = Path(name).suffix
    if suffix.startswith(".tfrecord"):
        return mutate_records(data, rng)
    return BY_SUFFIX.get(suffix, flip_bytes)(data, rng)
