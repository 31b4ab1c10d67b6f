"""Sealed files: each flipped bit is refused, or leaves what is read as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from replaylake.datastore.storage.seals import (
    BrokenSealError,
    add_parquet_seal,
    check_parquet_seal,
    fill_parquet_seal,
    read_bytes,
    read_json,
    seal_bytes,
    seal_json,
)

BODY = {"owner": "o", "pid": 7, "nested": {"a": [0.1, None]}}


def count_flips(data: bytes, read: Callable[[bytes], Any], whole: Any) -> int:
    """Flip each bit in turn; return how many were refused, the others being harmless."""
    num_refused = 0
    for place in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[place // 8] ^= 1 << place % 8
        try:
            found = read(bytes(damaged))
        except (ValueError, RecursionError):
            num_refused += 1
        else:
            # Another name of the checksum is all that may be different.
            kept = {key: found[key] for key in whole} if isinstance(whole, dict) else found
            assert kept == whole, place
    return num_refused


def test_json_says_what_was_written_or_is_refused() -> None:
    data = seal_json(BODY)
    assert read_json(data) == BODY
    assert json.loads(data) == {**BODY, "checksum": json.loads(data)["checksum"]}
    content = len(json.dumps(BODY)) - 1
    assert count_flips(data, read_json, BODY) >= 8 * content


def test_json_of_an_earlier_release_is_read() -> None:
    assert read_json(json.dumps(BODY).encode()) == BODY
    assert read_json(b"null") is None


def test_bytes_are_what_was_written_or_refused() -> None:
    content = b"PK\x03\x04 and more\n"
    data = seal_bytes(content)
    assert read_bytes(data) == content
    assert read_bytes(content) == content
    assert read_bytes(seal_bytes(b"")) == b""
    for place in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[place // 8] ^= 1 << place % 8
        with pytest.raises(BrokenSealError):
            read_bytes(bytes(damaged), is_required=True)
        if place < 8 * len(content):
            with pytest.raises(BrokenSealError, match=r"its sha256 is .* was written with it"):
                read_bytes(bytes(damaged))
    with pytest.raises(BrokenSealError, match="has no sha256"):
        read_bytes(content, is_required=True)


def test_a_parquet_file_is_what_was_written_or_refused() -> None:
    sink = pa.BufferOutputStream()
    table = pa.table({"a": [1.5, 2.5]})
    with pq.ParquetWriter(sink, table.schema) as writer:
        writer.write_table(table)
        add_parquet_seal(writer, {b"replaylake.test": "1"})
    data = bytes(fill_parquet_seal(sink.getvalue()))

    def read(damaged: bytes) -> None:
        check_parquet_seal(damaged, b"replaylake.test")

    read(data)
    assert pq.read_table(pa.BufferReader(data)).equals(table)
    assert count_flips(data, read, None) == 8 * len(data)
