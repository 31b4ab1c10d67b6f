"""Delta v1 checkpoints: the whole LogState as one Parquet file, read column by column."""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from replaylake.datastore.errors import LogCorrupt
from replaylake.datastore.log.state import FileEntry, LogState

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


def write_checkpoint(state: LogState) -> memoryview:
    """Return the checkpoint's bytes. Raises: LogCorrupt if the state has no metadata."""
    if state.metadata is None:
        raise LogCorrupt(f"checkpoint of version {state.version}: found no metaData, expected one.")
    rows: list[dict[str, Any]] = [
        {"protocol": dict(state.protocol)},
        {"metaData": state.metadata.to_action()},
    ]
    rows += [
        {"txn": {"appId": app_id, "version": version}}
        for app_id, version in state.transactions.items()
    ]
    # dataChange is false in a checkpoint: its files are state, not news.
    rows += [{"add": entry.to_action(data_change=False)} for entry in state.files.values()]
    rows += [
        {"domainMetadata": {"domain": key, "configuration": text, "removed": False}}
        for key, text in state.entries.items()
    ]
    sink = pa.BufferOutputStream()
    try:
        pq.write_table(
            pa.Table.from_pylist(rows, schema=_SCHEMA),
            sink,
            compression="zstd",
            compression_level=1,
            write_page_checksum=True,
        )
    except pa.ArrowException as error:
        raise LogCorrupt(f"checkpoint of version {state.version}: {error}.") from error
    return memoryview(sink.getvalue())


def read_checkpoint(data: bytes, path: str) -> LogState:
    """Return the state, with version -1 for the caller to set. Raises: LogCorrupt, FormatTooNew."""
    try:
        table = pq.read_table(pa.BufferReader(data), page_checksum_verification=True)
        actions = _singletons(table, "protocol") + _singletons(table, "metaData")
        base = LogState().apply([actions])
        add = _present(table, "add")
        files = {
            path: FileEntry.from_action(
                {
                    "path": path,
                    "size": size,
                    "stats": stats,
                    "tags": tags,
                    "modificationTime": when,
                },
                0,  # of shards in checkpoints older than `since`
            )
            for path, size, stats, tags, when in zip(
                *(
                    add.field(name).to_pylist()
                    for name in ("path", "size", "stats", "tags", "modificationTime")
                ),
                strict=True,
            )
        }
        txn = _present(table, "txn")
        transactions = dict(
            zip(*(txn.field(n).to_pylist() for n in ("appId", "version")), strict=True)
        )
        domain = _present(table, "domainMetadata")
        entries = dict(
            zip(*(domain.field(n).to_pylist() for n in ("domain", "configuration")), strict=True)
        )
        if base.metadata is None or not base.protocol:
            raise KeyError("metaData and protocol")
    except _UNREADABLE as error:
        raise LogCorrupt(
            f"{path}: {error!r}, expected a Delta checkpoint, as the JSON commits are gone. "
            "Restore either from a copy of the lake."
        ) from error
    return LogState(-1, base.metadata, base.protocol, files, transactions, entries)


def _present(table: pa.Table, name: str) -> Any:
    column = table.column(name).combine_chunks()
    return column.filter(column.is_valid())


def _singletons(table: pa.Table, name: str) -> list[dict[str, Any]]:
    rows = []
    for row in _present(table, name).to_pylist():
        for key in ("configuration", "options"):
            if key in row:
                row[key] = dict(row[key] or [])
        rows.append({name: row})
    return rows
