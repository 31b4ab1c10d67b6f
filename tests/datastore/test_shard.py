from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from replaylake.datastore.errors import ShardCorrupt
from replaylake.datastore.log.state import FileEntry
from replaylake.datastore.schema import NAMES_TYPE, vector_type
from replaylake.datastore.shard import read_shard, verify_shard, write_shard
from replaylake.datastore.storage import LocalStorage

ROWS = pa.table(
    {
        "id": pa.array(["a", "b", "a"] * 50).cast(NAMES_TYPE),
        "vector": pa.FixedSizeListArray.from_arrays(
            pa.array(np.arange(300, dtype=np.float32)), type=vector_type(pa.float32(), 2)
        ),
        "blob": pa.array([b"x", None, b"yz"] * 50),
    }
)


@pytest.fixture
def written(storage: LocalStorage) -> tuple[Path, FileEntry]:
    entry = write_shard(storage, "t", ROWS)
    return storage.local(f"t/{entry.path}"), entry


def test_a_shard_comes_back_as_it_was_written(written: tuple[Path, FileEntry]) -> None:
    path, entry = written
    assert read_shard(path, entry).equals(ROWS)
    assert (entry.num_rows, entry.size_bytes) == (150, path.stat().st_size)
    assert read_shard(path, entry, ["blob", "absent", "id"]).column_names == ["blob", "id"]


def test_floats_are_split_by_bytes_and_strings_have_dictionaries(
    written: tuple[Path, FileEntry],
) -> None:
    group = pq.ParquetFile(written[0]).metadata.row_group(0)
    encodings = {group.column(i).path_in_schema: group.column(i).encodings for i in range(3)}
    assert "BYTE_STREAM_SPLIT" in encodings["vector.list.element"]
    assert "RLE_DICTIONARY" in encodings["id"]
    assert "RLE_DICTIONARY" not in encodings["blob"]
    assert {group.column(i).compression for i in range(3)} == {"ZSTD"}


def test_every_flipped_bit_is_found(written: tuple[Path, FileEntry]) -> None:
    path, entry = written
    good = path.read_bytes()
    for position in range(0, len(good), 37):
        damaged = bytearray(good)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        with pytest.raises(ShardCorrupt, match=rf"{path.name}: found sha256 .*restore it"):
            read_shard(path, entry)
    path.write_bytes(good)
    verify_shard(path, entry)


def test_page_checksums_find_what_no_sha256_is_asked_about(
    written: tuple[Path, FileEntry],
) -> None:
    path, _ = written
    damaged = bytearray(path.read_bytes())
    offset = pq.ParquetFile(path).metadata.row_group(0).column(1).data_page_offset
    damaged[offset + 40] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(OSError, match=r"[Cc][Rr][Cc]"):
        pq.ParquetFile(path, page_checksum_verification=True).read()


@pytest.mark.parametrize("size", [0, 10, -1])
def test_a_truncated_shard_is_found(written: tuple[Path, FileEntry], size: int) -> None:
    path, entry = written
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ShardCorrupt, match="found sha256"):
        read_shard(path, entry)


def test_a_missing_shard_is_found(written: tuple[Path, FileEntry]) -> None:
    path, entry = written
    path.unlink()
    with pytest.raises(ShardCorrupt, match=rf"{path.name}: No such file.*the log names"):
        read_shard(path, entry)


def test_a_file_that_is_no_parquet_is_named(written: tuple[Path, FileEntry]) -> None:
    path, entry = written
    path.write_bytes(b"no parquet")
    hashed = replace(entry, sha256=hashlib.sha256(b"no parquet").hexdigest())
    with pytest.raises(ShardCorrupt, match=path.name):
        read_shard(path, hashed)


def test_a_file_without_a_sha256_in_the_log_is_refused(written: tuple[Path, FileEntry]) -> None:
    path, entry = written
    with pytest.raises(ShardCorrupt, match="found no sha256 in the log, expected one"):
        read_shard(path, replace(entry, sha256=""))
