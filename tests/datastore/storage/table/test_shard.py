from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import deltalake
import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from replaylake.datastore.episodes.schema import NAMES_TYPE, vector_type
from replaylake.datastore.errors import ShardCorruptError
from replaylake.datastore.storage.log.state import FileEntry
from replaylake.datastore.storage.storage import LocalStorage
from replaylake.datastore.storage.table import shard as shard_module
from replaylake.datastore.storage.table.shard import (
    ROW_GROUP_ROWS,
    decode_row_group,
    read_shard,
    row_group_batches,
    smallest_leaf,
    verify_row_groups,
    verify_shard,
    write_shard,
)
from replaylake.datastore.storage.table.table import Table

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


INTEGERS = pa.table(
    {
        "step": pa.array(np.tile(np.arange(1000, dtype=np.int32), 20)),
        "wild": pa.array(np.random.default_rng(0).integers(-(2**62), 2**62, 20_000)),
        "when": pa.array(np.arange(20_000) * 17, pa.timestamp("us", tz="UTC")),
        "small": pa.array([None, 1, -128, 127] * 5_000, pa.int8()),
        "pair": pa.FixedSizeListArray.from_arrays(
            pa.array(np.arange(40_000)), type=vector_type(pa.int64(), 2)
        ),
    }
)


def test_integers_and_times_are_packed_and_other_engines_read_them(storage: LocalStorage) -> None:
    table = Table(storage, "t")
    table.create(INTEGERS.schema)
    commit = table.append(INTEGERS, producer="p", sequence=0)
    (path,) = table.snapshot().paths()
    group = pq.ParquetFile(path).metadata.row_group(0)
    assert {
        "DELTA_BINARY_PACKED" in group.column(i).encodings for i in range(group.num_columns)
    } == {True}
    assert commit.num_bytes < 20_000 * 8 * 4
    assert table.snapshot().read().equals(INTEGERS)
    expected = INTEGERS.to_pydict()
    folder = str(storage.local("t"))
    found = duckdb.sql(f"SELECT * FROM '{path}'").to_arrow_table().to_pydict()
    assert found == expected
    assert deltalake.DeltaTable(folder).to_pyarrow_table().to_pydict() == expected
    polars = pytest.importorskip("polars")
    assert polars.read_parquet(path).to_dict(as_series=False) == expected


def test_a_file_may_weigh_more_than_its_rows_in_memory(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dictionary is there once in memory, and once a row group in the file."""
    monkeypatch.setattr(shard_module, "ROW_GROUP_ROWS", 100)
    rng = np.random.default_rng(0)
    names = pa.array([rng.bytes(400).hex() for _ in range(100)])
    indices = pa.array(np.tile(np.arange(100, dtype=np.int32), 40))
    rows = pa.table({"name": pa.DictionaryArray.from_arrays(indices, names)})
    entry = write_shard(storage, "t", rows)
    assert entry.size_bytes > rows.nbytes + (1 << 18)
    assert read_shard(storage.local(f"t/{entry.path}"), entry).equals(rows)


def test_row_groups_are_of_equal_size(storage: LocalStorage) -> None:
    """A last one of a few rows would cost as many reads as a full one."""
    entry = write_shard(storage, "t", pa.table({"x": np.arange(ROW_GROUP_ROWS + 2)}))
    path = storage.local(f"t/{entry.path}")
    half = ROW_GROUP_ROWS // 2 + 1
    assert verify_row_groups(path, entry) == [half, half]
    groups = [decode_row_group(path, group) for group in range(2)]
    assert [group.num_rows for group in groups] == [half, half]
    assert pa.concat_tables(groups)["x"].to_pylist() == [*range(ROW_GROUP_ROWS + 2)]


def test_a_log_that_is_wrong_about_the_rows(written: tuple[Path, FileEntry]) -> None:
    path, entry = written
    with pytest.raises(ShardCorruptError, match="found 150 rows, expected 151 as committed"):
        verify_row_groups(path, replace(entry, num_rows=151))


def test_row_groups_of_a_damaged_shard_are_not_told(written: tuple[Path, FileEntry]) -> None:
    path, entry = written
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(ShardCorruptError, match="found sha256"):
        verify_row_groups(path, entry)


def test_every_flipped_bit_is_found(written: tuple[Path, FileEntry]) -> None:
    path, entry = written
    good = path.read_bytes()
    for position in range(0, len(good), 37):
        damaged = bytearray(good)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        with pytest.raises(ShardCorruptError, match=rf"{path.name}: found sha256 .*restore it"):
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
    with pytest.raises(ShardCorruptError, match="found sha256"):
        read_shard(path, entry)


def test_a_missing_shard_is_found(written: tuple[Path, FileEntry]) -> None:
    path, entry = written
    path.unlink()
    with pytest.raises(ShardCorruptError, match=rf"{path.name}: No such file.*the log names"):
        read_shard(path, entry)


def test_a_file_that_is_no_parquet_is_named(written: tuple[Path, FileEntry]) -> None:
    path, entry = written
    path.write_bytes(b"no parquet")
    hashed = replace(entry, sha256=hashlib.sha256(b"no parquet").hexdigest())
    with pytest.raises(ShardCorruptError, match=path.name):
        read_shard(path, hashed)


def test_a_file_without_a_sha256_in_the_log_is_refused(written: tuple[Path, FileEntry]) -> None:
    path, entry = written
    with pytest.raises(ShardCorruptError, match="found no sha256 in the log, expected one"):
        read_shard(path, replace(entry, sha256=""))


def test_a_row_group_comes_in_batches(storage: LocalStorage) -> None:
    texts = pa.table({"text": ["one", "two", "two"] * 50})
    rows = pa.concat_tables([ROWS, ROWS.slice(0, 7)]).append_column(
        "text", pa.concat_tables([texts, texts.slice(0, 7)])["text"]
    )
    path = storage.local(f"t/{write_shard(storage, 't', rows).path}")
    wanted = ["text", "vector", "absent"]
    batches = list(row_group_batches(path, 0, wanted, 64, as_dictionaries=["text", "absent"]))
    assert [batch.num_rows for batch in batches] == [64, 64, 29]
    assert all(pa.types.is_dictionary(batch["text"].type) for batch in batches)
    found = pa.concat_tables(batches)
    assert found["text"].to_pylist() == rows["text"].to_pylist()
    assert found["vector"].to_pylist() == rows["vector"].to_pylist()
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ShardCorruptError, match=path.name):
        list(row_group_batches(path, 0, wanted, 64))


@pytest.mark.parametrize("null", [[], [1], [0, 1, 2]])
def test_the_smallest_leaf_tells_where_a_column_is_null(
    storage: LocalStorage, null: list[int]
) -> None:
    kind = pa.struct({"image": pa.large_binary(), "at": vector_type(pa.float32(), 2)})
    value = {"image": b"x" * 999, "at": [1.0, 2.0]}
    values = [None if row in null else value for row in range(3)]
    rows = pa.table({"other": [1, 2, 3], "final": pa.array(values, kind)})
    path = storage.local(f"t/{write_shard(storage, 't', rows).path}")
    leaf, num_null = smallest_leaf(path, 0, "final")
    assert num_null == len(null)
    assert leaf == "final.at.list.element" or len(null) == 3
    (batch,) = row_group_batches(path, 0, [leaf], 64)
    assert batch["final"].is_null().to_pylist() == [row in null for row in range(3)]


def _filtered(column: pa.Array) -> pa.Table:
    rows = pa.table({"x": column, "n": pa.array(range(len(column)), pa.int64())})
    return rows.filter(pa.array([False, True, True, True]))


_NAMES = pa.array(["erased", "b", None, "c"]).dictionary_encode()
_OTHERS = pa.array(["erased", "x", "y", "z"]).dictionary_encode()
_ENDS = pa.array([0, 1, 2, 3, 4], pa.int32())


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(_filtered(_NAMES), id="filtered"),
        pytest.param(_filtered(_OTHERS), id="filtered-without-nulls"),
        pytest.param(_filtered(_NAMES).slice(1), id="slice"),
        pytest.param(
            pa.concat_tables([_filtered(_NAMES), _filtered(_OTHERS)]), id="of-two-dictionaries"
        ),
        pytest.param(pa.table({"x": _OTHERS}).take([2, 2, 1]), id="taken"),
        pytest.param(_filtered(pa.StructArray.from_arrays([_NAMES], ["name"])), id="struct"),
        pytest.param(
            _filtered(pa.StructArray.from_arrays([_NAMES], ["name"])).slice(1), id="struct-slice"
        ),
        pytest.param(_filtered(pa.ListArray.from_arrays(_ENDS, _NAMES)), id="list"),
        pytest.param(
            pa.table({"x": pa.ListArray.from_arrays(_ENDS, _OTHERS)}).slice(1), id="list-slice"
        ),
        pytest.param(
            pa.table({"x": pa.FixedSizeListArray.from_arrays(_OTHERS, 1)}).slice(1),
            id="fixed-size-list-slice",
        ),
        pytest.param(
            _filtered(
                pa.MapArray.from_arrays(_ENDS, pa.array(["k"] * 4).dictionary_encode(), _NAMES)
            ),
            id="map",
        ),
    ],
)
def test_a_shard_has_no_value_that_no_row_has(
    storage: LocalStorage, page_bytes: Callable[[Path], bytes], rows: pa.Table
) -> None:
    entry = write_shard(storage, "t", rows)
    path = storage.local(f"t/{entry.path}")
    assert read_shard(path, entry).to_pylist() == rows.to_pylist()
    assert read_shard(path, entry).schema.field("x").type == rows.schema.field("x").type
    assert b"erased" not in page_bytes(path) + path.read_bytes()
    column = pq.read_metadata(path).row_group(0).column(0)
    assert "RLE_DICTIONARY" in column.encodings


def test_a_row_group_has_the_values_and_statistics_of_its_own_rows(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_module, "ROW_GROUP_ROWS", 3)
    names = pa.array(["a", None, "b", "c", None, "d"]).dictionary_encode()
    entry = write_shard(storage, "t", pa.table({"x": names}))
    path = storage.local(f"t/{entry.path}")
    metadata = pq.read_metadata(path)
    found = [metadata.row_group(number).column(0).statistics for number in range(2)]
    assert [(one.min, one.max, one.null_count) for one in found] == [("a", "b", 1), ("c", "d", 1)]
    file = pq.ParquetFile(path, read_dictionary=["x"])
    second = file.read_row_group(1)["x"].combine_chunks()
    assert second.dictionary.to_pylist() == ["c", "d"]
