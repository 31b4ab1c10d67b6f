from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.detect import find_format
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.formats.generic.arrow import ArrowTables
from replaylake.datastore.interchange.formats.generic.encoded_columns import ColumnDecoder
from replaylake.datastore.interchange.formats.generic.parquet import ParquetTables
from replaylake.datastore.interchange.sources.source import Source, find_source

_STEPS: dict[str, Any] = {
    "episode_id": ["a", "a", "b"],
    "observation": [0.5, 1.5, 2.5],
    "action": [0, 1, 0],
    "reward": [1.0, 2.0, 3.0],
    "terminated": [False, True, True],
}


def _write(table: pa.Table, path: Path, batch_rows: int | None = None) -> Source:
    packed = pa.ipc.IpcWriteOptions(compression="zstd")
    if path.suffix == ".parquet":
        pq.write_table(table, path, compression="zstd")
    elif path.suffix == ".arrows":
        with pa.ipc.new_stream(path, table.schema, options=packed) as writer:
            writer.write_table(table, batch_rows)
    else:
        with pa.ipc.new_file(path, table.schema, options=packed) as writer:
            writer.write_table(table, batch_rows)
    return find_source([path])


def _refusal(source: Source) -> str:
    allocated = pa.total_allocated_bytes()
    with pytest.raises(SourceInvalidError) as refusal:
        list(find_format("auto", source.files).read(source.files, ReadOptions()))
    assert pa.default_memory_pool().max_memory() < allocated + (512 << 20)
    return str(refusal.value)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".arrows"])
def test_a_dictionary_that_decodes_to_100_gb_is_refused(tmp_path: Path, suffix: str) -> None:
    num = 30_000
    note = pa.DictionaryArray.from_arrays(np.zeros(num, np.int32), ["x" * 3_500_000])
    columns = {name: (values * (num // 3)) for name, values in _STEPS.items()}
    message = _refusal(_write(pa.table({**columns, "note": note}), tmp_path / f"log{suffix}"))
    assert "unpack to 105,00" in message
    assert "expected at most 1000 times as many" in message


def test_a_dictionary_of_texts_that_parquet_alone_has_is_refused(tmp_path: Path) -> None:
    # Without Arrow's schema, the column is one of plain texts.
    num = 30_000
    note = pa.DictionaryArray.from_arrays(np.zeros(num, np.int32), ["x" * 3_500_000])
    pq.write_table(
        pa.table({"note": note, "texts": pa.FixedSizeListArray.from_arrays(note, 1)}),
        tmp_path / "log.parquet",
        store_schema=False,
        compression="zstd",
    )
    tables = ParquetTables(find_source([tmp_path / "log.parquet"]).files)
    with pytest.raises(SourceInvalidError, match="expected at most 1000 times as many"):
        list(tables.chunks())


def test_runs_that_decode_to_16_gib_are_refused(tmp_path: Path) -> None:
    run = pa.RunEndEncodedArray.from_arrays(pa.array([2**31 - 2], pa.int32()), pa.array([1.0]))
    table = pa.table({"observation": run})
    assert "unpack to 17,179,869,168" in _refusal(_write(table, tmp_path / "log.arrow"))
    inside = pa.table({"observation": pa.StructArray.from_arrays([run], ["x"])})
    assert "unpack to" in _refusal(_write(inside, tmp_path / "inside.arrow"))


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".arrows"])
def test_long_lists_of_equal_items_are_refused(tmp_path: Path, suffix: str) -> None:
    lists = pa.ListArray.from_arrays(
        pa.array([0, 12_000_000, 24_000_000, 36_000_000], pa.int32()), np.zeros(36_000_000)
    )
    table = pa.table({**_STEPS, "observation": lists})
    source = _write(table, tmp_path / f"log{suffix}", batch_rows=1)
    del table, lists
    assert re.search(r"unpack to (192|288),000,\d+ or more", _refusal(source))


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".arrows"])
def test_encoded_columns_are_decoded_in_parts(tmp_path: Path, suffix: str) -> None:
    num = 600
    texts = [None if i % 7 == 0 else i % 3 for i in range(num)]
    note = pa.DictionaryArray.from_arrays(
        pa.array(texts, pa.int32()), ["x" * 90_000, "", "y" * 200_000]
    )
    runs = pa.RunEndEncodedArray.from_arrays(
        pa.array([100, num], pa.int32()), pa.array(["p", None])
    )
    lists = pa.ListArray.from_arrays(
        np.arange(0, 2 * num + 1, 2, np.int32), pa.concat_arrays([note] * 2)
    )
    columns: dict[str, Any] = {"note": note, "lists": lists, "n": np.arange(num)}
    if suffix != ".parquet":
        columns["runs"] = runs
    source = _write(pa.table(columns), tmp_path / f"log{suffix}")
    tables = ParquetTables if suffix == ".parquet" else ArrowTables
    chunks = [chunk.table for chunk in tables(source.files).chunks()]
    assert len(chunks) > 5
    assert max(chunk.num_rows for chunk in chunks) < num
    read = pa.concat_tables(chunks)
    assert read.column("note").to_pylist() == note.to_pylist()
    assert read.column("lists").to_pylist() == lists.to_pylist()
    assert read.column("n").to_pylist() == list(range(num))
    if suffix != ".parquet":
        assert read.column("runs").to_pylist() == runs.to_pylist()


def test_sliced_runs_are_decoded_from_where_they_begin(tmp_path: Path) -> None:
    source = _write(pa.table(_STEPS), tmp_path / "log.arrow")
    runs = pa.RunEndEncodedArray.from_arrays(
        pa.array([2, 5, 9], pa.int32()), pa.array(["a", "bb", "c"])
    )
    batch = pa.record_batch({"runs": runs}).slice(1, 6)
    parts = list(ColumnDecoder(source.files[0]).parts(batch))
    assert [part.to_pydict() for part in parts] == [{"runs": ["a", "bb", "bb", "bb", "c", "c"]}]


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_spaces_nested_without_end_are_refused(tmp_path: Path, suffix: str) -> None:
    for depth in (100, 100_000):
        space = '{"type":"dict","spaces":{"a":' * depth + '{"type":"text"}' + "}}" * depth
        metadata = {"replaylake.observation_space": space, "replaylake.action_space": space}
        table = pa.table(_STEPS).replace_schema_metadata(metadata)
        message = _refusal(_write(table, tmp_path / f"{depth}{suffix}"))
        assert "found spaces in its metadata that cannot be read" in message
        assert "64 levels deep" in message


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_too_many_columns_are_refused(tmp_path: Path, suffix: str) -> None:
    table = pa.table({**_STEPS, **{f"c{i}": [1, 2, 3] for i in range(5000)}})
    message = _refusal(_write(table, tmp_path / f"log{suffix}"))
    assert message.startswith(f"log{suffix}: found 5,005 columns, expected 4,096 at most.")
    # Looking each name up among all others would take as many times as long.
    twice = pa.table([*table.columns] * 2, names=table.column_names * 2)
    message = _refusal(_write(twice, tmp_path / f"twice{suffix}"))
    assert message.startswith(f"twice{suffix}: found 10,010 columns, expected 4,096 at most.")
