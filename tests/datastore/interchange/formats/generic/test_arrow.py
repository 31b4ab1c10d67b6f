from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import ReplayLakeError, SourceInvalidError
from replaylake.datastore.interchange.formats.detect import find_format
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.formats.generic.arrow import ArrowFormat, ArrowTables
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.interchange.sources.source import find_source
from replaylake.datastore.lake.lake import open_lake


def _steps(num: int) -> pa.Table:
    return pa.table(
        {
            "episode_id": pa.array(["a"] * num).dictionary_encode(),
            "observation": np.arange(num, dtype=np.float32),
            "action": np.zeros(num, np.int64),
            "reward": np.ones(num),
        }
    )


def _file(path: Path, table: pa.Table, **options: Any) -> None:
    settings = pa.ipc.IpcWriteOptions(**options)
    with pa.ipc.new_file(path, table.schema, options=settings) as writer:
        writer.write_table(table)


def _stream(path: Path, table: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


@pytest.mark.parametrize("write", [_file, _stream, lambda p, t: feather.write_feather(t, p)])
def test_files_streams_and_feather_are_read(tmp_path: Path, write: Any) -> None:
    path = tmp_path / "log.bin"
    write(path, _steps(5))
    files = find_source([path]).files
    assert find_format("auto", files).name == "arrow"
    (episode,) = list(ArrowFormat().read(files, ReadOptions()))
    assert isinstance(episode, Episode)
    assert np.asarray(episode.observations).ravel().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("suffix", ["arrow", "parquet"])
def test_views_of_texts_are_read_as_texts(tmp_path: Path, suffix: str) -> None:
    texts = pa.array(["a", None, "", "a text of more than twelve bytes", "b"], pa.string_view())
    lists = pa.ListArray.from_arrays([0, 1, 1, 2, 4, 5], texts)
    actions = pa.array([*"ababa"], pa.string_view())
    table = _steps(5).drop_columns("action").append_column("action", actions)
    table = (
        table.append_column("place", actions)
        .append_column("note", texts)
        .append_column("notes", lists)
    )
    table = table.append_column("info", pa.StructArray.from_arrays([texts], ["text"]))
    path = tmp_path / f"log.{suffix}"
    if suffix == "arrow":
        _file(path, table)
    else:
        pq.write_table(table, path)
    lake = open_lake(tmp_path / "lake", create=True)
    ingest(lake, [path], "d", options=ReadOptions(mapping={"observation": "observation,place"}))
    found = lake.sql("select note, notes, info from d.steps order by step").to_pylist()
    assert [row["note"] for row in found] == texts.to_pylist()
    assert [row["notes"] for row in found] == lists.to_pylist()
    assert [row["info"]["text"] for row in found] == texts.to_pylist()


def test_a_large_batch_comes_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "log.arrow"
    _file(path, pa.table({"x": np.zeros(5_000_000)}))
    chunks = list(ArrowTables(find_source([path]).files).chunks())
    assert max(chunk.table.nbytes for chunk in chunks) <= 17 << 20
    assert [chunk.first_row for chunk in chunks] == np.cumsum(
        [0, *(chunk.table.num_rows for chunk in chunks[:-1])]
    ).tolist()


def test_the_first_feather_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "old.feather"
    path.write_bytes(b"FEA1" + b"\0" * 60 + b"FEA1")
    files = find_source([path]).files
    with pytest.raises(SourceInvalidError, match="version 1"):
        find_format("auto", files).read(files, ReadOptions())


def test_a_bomb_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.arrow"
    zeros = pa.table({"x": np.zeros(8 << 20)})
    settings = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(path, zeros.schema, options=settings) as writer:
        for _ in range(20):
            writer.write_table(zeros)
    assert path.stat().st_size < 1 << 20
    with pytest.raises(SourceInvalidError, match="unpack to"):
        list(ArrowTables(find_source([path]).files).chunks())


@pytest.mark.parametrize("form", ["file", "stream"])
def test_damaged_files_are_read_or_refused(tmp_path: Path, form: str) -> None:
    spec = DatasetSpec(Box((2,), "float32"), Discrete(7))
    one = Episode("a", np.zeros((3, 2), np.float32), np.arange(3), np.ones(3), terminated=True)
    path = tmp_path / "log.arrow"
    ArrowFormat().write(iter([one]), spec, path)
    if form == "stream":
        table = pa.ipc.open_file(path).read_all()
        _stream(path, table)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for number in range(150):
        data = bytearray(whole)
        if number % 3 == 0:
            data = data[: rng.integers(8, len(data))]
        for at in rng.integers(8, len(data), 2):
            data[at] ^= 1 << rng.integers(0, 8)
        path.write_bytes(data)
        with suppress(ReplayLakeError):
            list(ArrowFormat().read(find_source([path]).files, ReadOptions()))
