"""Checkpoints: the whole state in one file, or a refusal that names the file."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from replaylake.datastore.errors import FormatTooNewError, LogCorruptError
from replaylake.datastore.storage.log.checkpoint import read_checkpoint, write_checkpoint
from replaylake.datastore.storage.log.state import FileEntry, LogState
from replaylake.datastore.storage.table.table_schema import new_metadata

METADATA = new_metadata(pa.schema([("x", pa.int64())]), {"key": "value"}, has_entries=True)
STATE = LogState(
    version=7,
    metadata=METADATA,
    protocol=METADATA.protocol(),
    files={"shards/a": FileEntry("shards/a", 10, 3, "ab" * 32, 5, since=3)},
    transactions={"p#0": 1, "p#1": 7},
    entries={"policy/p/1": "{}"},
    timestamp_ms=12345,
)


@pytest.mark.parametrize(
    "changes",
    [{}, {"files": {}}, {"transactions": {}}, {"entries": {}}, {"files": {}, "entries": {}}],
)
def test_what_is_written_is_read(changes: dict[str, dict[str, object]]) -> None:
    state = replace(STATE, **changes)  # type: ignore[arg-type]
    read = read_checkpoint(bytes(write_checkpoint(state)), "path", 7)
    assert read.metadata is not None
    assert read.metadata.configuration == METADATA.configuration
    assert read.metadata.schema_string == METADATA.schema_string
    assert (read.files, read.transactions, read.entries) == (
        state.files,
        state.transactions,
        state.entries,
    )
    assert (read.version, read.protocol, read.timestamp_ms) == (7, state.protocol, 12345)
    assert [entry.since for entry in read.files.values()] == [3] * len(state.files)


def test_a_state_before_the_table_exists() -> None:
    with pytest.raises(LogCorruptError, match="checkpoint of version -1: found no metaData"):
        write_checkpoint(LogState())


def test_damaged_bytes() -> None:
    whole = bytes(write_checkpoint(STATE))
    for data in (b"", whole[:-1], whole[: len(whole) // 2], whole[4:]):
        with pytest.raises(LogCorruptError, match=r"the/path: .*expected a Delta checkpoint"):
            read_checkpoint(data, "the/path", 7)
    flipped = bytearray(whole)
    flipped[60] ^= 1
    with pytest.raises(LogCorruptError, match="the/path"):
        read_checkpoint(bytes(flipped), "the/path", 7)


def test_a_file_that_is_no_checkpoint() -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"x": [1]}), sink)
    with pytest.raises(LogCorruptError, match="expected a Delta checkpoint"):
        read_checkpoint(sink.getvalue().to_pybytes(), "path", 7)


def test_a_newer_writer() -> None:
    newer = replace(
        METADATA,
        configuration={"replaylake.format_version": "9", "replaylake.written_by": "9.0"},
    )
    with pytest.raises(FormatTooNewError, match=r"format version 9.*ReplayLake 9\.0"):
        read_checkpoint(bytes(write_checkpoint(replace(STATE, metadata=newer))), "path", 7)
