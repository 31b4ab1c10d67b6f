"""Delta v1 checkpoints: the whole LogState as one Parquet file, built and read by column.

By column because a checkpoint is written beside commits: as rows of Python dicts, 10,000 shards
held the interpreter for 0.2 s (2 cores, 2026-11).

The file's footer holds its sha256 (seals.py). Parquet has checksums for pages but none for the
footer, where one bit can move a column.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from replaylake.datastore.errors import LogCorruptError
from replaylake.datastore.storage.log.persistent_map import PersistentMap
from replaylake.datastore.storage.log.state import Change, FileEntry, LogState
from replaylake.datastore.storage.seals import (
    BrokenSealError,
    add_parquet_seal,
    check_parquet_seal,
    fill_parquet_seal,
)

# What Arrow and the code below raise on damaged bytes, or on a file that another engine laid out.
_UNREADABLE: Final = (
    pa.ArrowException,
    AttributeError,
    KeyError,
    OSError,
    TypeError,
    ValueError,
)
_STRINGS: Final = pa.map_(pa.string(), pa.string())
_SCHEMA: Final = pa.schema(
    [
        (
            "txn",
            pa.struct(
                [("appId", pa.string()), ("version", pa.int64()), ("lastUpdated", pa.int64())]
            ),
        ),
        (
            "add",
            pa.struct(
                [
                    ("path", pa.string()),
                    ("partitionValues", _STRINGS),
                    ("size", pa.int64()),
                    ("modificationTime", pa.int64()),
                    ("dataChange", pa.bool_()),
                    ("stats", pa.string()),
                    ("tags", _STRINGS),
                ]
            ),
        ),
        (
            "metaData",
            pa.struct(
                [
                    ("id", pa.string()),
                    ("name", pa.string()),
                    ("description", pa.string()),
                    ("format", pa.struct([("provider", pa.string()), ("options", _STRINGS)])),
                    ("schemaString", pa.string()),
                    ("partitionColumns", pa.list_(pa.string())),
                    ("configuration", _STRINGS),
                    ("createdTime", pa.int64()),
                ]
            ),
        ),
        (
            "protocol",
            pa.struct(
                [
                    ("minReaderVersion", pa.int32()),
                    ("minWriterVersion", pa.int32()),
                    ("writerFeatures", pa.list_(pa.string())),
                ]
            ),
        ),
        (
            "domainMetadata",
            pa.struct(
                [("domain", pa.string()), ("configuration", pa.string()), ("removed", pa.bool_())]
            ),
        ),
    ]
)


_TIMESTAMP_KEY: Final = b"replaylake.timestamp_ms"
_STATS: Final = r'^\{"numRecords": ?(?P<num_rows>\d{1,18})\}$'


def write_checkpoint(state: LogState) -> memoryview:
    """Return the checkpoint's bytes. Raises: LogCorruptError if the state has no metadata."""
    if state.metadata is None:
        raise LogCorruptError(
            f"checkpoint of version {state.version}: found no metaData, expected one."
        )
    sink = pa.BufferOutputStream()
    try:
        singles = [{"protocol": dict(state.protocol)}, {"metaData": state.metadata.to_action()}]
        parts = [
            pa.Table.from_pylist(singles, schema=_SCHEMA),
            _rows("txn", _transactions(state)),
            _rows("add", _files(state)),
            _rows("domainMetadata", _entries(state)),
        ]
        with pq.ParquetWriter(
            sink,
            _SCHEMA,
            compression="zstd",
            compression_level=1,
            write_page_checksum=True,
            store_schema=False,
        ) as writer:
            writer.write_table(pa.concat_tables(parts))
            add_parquet_seal(writer, {_TIMESTAMP_KEY: str(state.timestamp_ms)})
    except pa.ArrowException as error:
        raise LogCorruptError(f"checkpoint of version {state.version}: {error}.") from error
    return fill_parquet_seal(sink.getvalue())


def prepare() -> None:
    """Do what a first checkpoint needs the interpreter for, and cannot do while that is ending.

    pyarrow imports pandas, where it is installed, for the first array that it makes.
    """
    pa.array([], pa.string())


def read_checkpoint(data: bytes, path: str, version: int) -> LogState:
    """Return the state of a version. Raises: LogCorruptError, FormatTooNewError."""
    _check_sha256(data, path)
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        table = file.read()
        singles = _singles(table, "protocol") + _singles(table, "metaData")
        base = LogState().apply([Change.from_actions(0, singles)])
        if base.metadata is None or not base.protocol:
            raise KeyError("metaData and protocol")
        add, txn, domain = (_present(table, name) for name in ("add", "txn", "domainMetadata"))
        return LogState(
            version,
            base.metadata,
            base.protocol,
            PersistentMap({entry.path: entry for entry in _read_files(add)}),
            PersistentMap(dict(zip(_values(txn, "appId"), _values(txn, "version"), strict=True))),
            PersistentMap(
                dict(zip(_values(domain, "domain"), _values(domain, "configuration"), strict=True))
            ),
            int((file.metadata.metadata or {}).get(_TIMESTAMP_KEY, 0)),
        )
    except _UNREADABLE as error:
        raise _corrupt_checkpoint_error(path, repr(error)) from error


def _check_sha256(data: bytes, path: str) -> None:
    """Compare the bytes with the sha256 among them; checkpoints of other engines have none."""
    try:
        check_parquet_seal(data, _TIMESTAMP_KEY)
    except BrokenSealError as error:
        raise _corrupt_checkpoint_error(path, str(error)) from error


def _corrupt_checkpoint_error(path: str, found: str) -> LogCorruptError:
    return LogCorruptError(
        f"{path}: {found}, expected a Delta checkpoint, as the JSON commits are gone. "
        "Restore either from a copy of the lake."
    )


def _rows(kind: str, actions: pa.StructArray) -> pa.Table:
    """Return rows that hold one kind of action each."""
    columns = [
        actions if field.name == kind else pa.nulls(len(actions), field.type) for field in _SCHEMA
    ]
    return pa.Table.from_arrays(columns, schema=_SCHEMA)


def _structs(kind: str, columns: Iterable[Any]) -> pa.StructArray:
    fields = list(_SCHEMA.field(kind).type)
    arrays = [
        pa.array(column, field.type) if isinstance(column, list) else column.cast(field.type)
        for field, column in zip(fields, columns, strict=True)
    ]
    return pa.StructArray.from_arrays(arrays, fields=fields)


def _transactions(state: LogState) -> pa.StructArray:
    num = len(state.transactions)
    columns = list(state.transactions.keys()), list(state.transactions.values()), pa.nulls(num)
    return _structs("txn", columns)


def _entries(state: LogState) -> pa.StructArray:
    num = len(state.entries)
    columns = list(state.entries.keys()), list(state.entries.values()), [False] * num
    return _structs("domainMetadata", columns)


def _files(state: LogState) -> pa.StructArray:
    """Return the bodies of `add`, as FileEntry.to_action has them."""
    entries = state.files.values()

    def column(name: str, kind: pa.DataType) -> pa.Array:
        return pa.array(list(map(operator.attrgetter(name), entries)), kind)

    num = len(entries)
    num_rows = column("num_rows", pa.int64()).cast(pa.string())
    tags = {"sha256": column("sha256", pa.string()), "since": column("since", pa.int64())}
    no_texts = pa.array([], pa.string())
    none_each = pa.array(np.zeros(num + 1, np.int32))
    two_each = pa.array(np.arange(0, 2 * num + 1, 2, dtype=np.int32))
    # One after the other for each file: tag 0 of file 0, tag 1 of file 0, tag 0 of file 1, ...
    order = pa.array(np.arange(2 * num).reshape(2, num).T.ravel())
    values = pa.concat_arrays([array.cast(pa.string()) for array in tags.values()]).take(order)
    return _structs(
        "add",
        [
            column("path", pa.string()),
            pa.MapArray.from_arrays(none_each, no_texts, no_texts),
            column("size_bytes", pa.int64()),
            column("modified_ms", pa.int64()),
            # A checkpoint's files are state, not news.
            [False] * num,
            pc.binary_join_element_wise('{"numRecords": ', num_rows, "}", ""),
            pa.MapArray.from_arrays(two_each, [*tags] * num, values),
        ],
    )


def _read_files(add: pa.StructArray) -> Iterable[FileEntry]:
    tags, stats = add.field("tags"), add.field("stats")
    sha256 = pc.fill_null(pc.map_lookup(tags, "sha256", "first"), "")
    since = pc.fill_null(pc.map_lookup(tags, "since", "first"), "0")
    return map(
        FileEntry,
        _values(add, "path"),
        _values(add, "size"),
        _num_rows(stats),
        sha256.to_pylist(),
        pc.fill_null(add.field("modificationTime"), 0).to_pylist(),
        since.cast(pa.int64()).to_pylist(),
    )


def _num_rows(stats: pa.Array) -> list[int]:
    """Return numRecords of each text; in those of other engines it stands among other numbers."""
    ours = pc.struct_field(pc.extract_regex(stats, _STATS), "num_rows").cast(pa.int64()).to_pylist()
    return [
        int(json.loads(stats[i].as_py() or "{}").get("numRecords", 0)) if value is None else value
        for i, value in enumerate(ours)
    ]


def _present(table: pa.Table, name: str) -> Any:
    column = table.column(name).combine_chunks()
    return column.filter(column.is_valid())


def _values(actions: pa.StructArray, name: str) -> list[Any]:
    return list(actions.field(name).to_pylist())


def _singles(table: pa.Table, name: str) -> list[dict[str, Any]]:
    rows = []
    for row in _present(table, name).to_pylist():
        for key in ("configuration", "options"):
            if key in row:
                row[key] = dict(row[key] or [])
        # What is absent comes as null; the JSON commits leave it out.
        rows.append({name: {key: value for key, value in row.items() if value is not None}})
    return rows
