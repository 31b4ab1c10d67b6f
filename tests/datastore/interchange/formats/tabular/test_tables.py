from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import StorageError
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.formats.generic.jsonl import JsonTables
from replaylake.datastore.interchange.formats.tabular.reader import TabularReader
from replaylake.datastore.interchange.formats.tabular.tables import (
    CachedTables,
    Chunk,
    ChunkSchema,
    Spool,
    TableSource,
)
from replaylake.datastore.interchange.sources.source import find_source


def _log(folder: Path, num: int = 600) -> Path:
    path = folder / "log.jsonl"
    rows = [
        {
            "episode_id": f"e{i % 7}",
            "step": i // 7,
            "observation": [float(i), -float(i)],
            "action": i % 3,
            "reward": i / 3,
            "terminated": False,
            "note": None if i % 5 else f"note {i}",
        }
        for i in range(num)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class _Counting(TableSource):
    """Tables that count how often they are parsed, in small chunks."""

    def __init__(self, path: Path) -> None:
        self._tables = JsonTables(find_source([path]).files)
        self.num_parsed = 0

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        self.num_parsed += 1
        for chunk in self._tables.chunks():
            for start in range(0, chunk.table.num_rows, 50):
                damage = {3: "damaged"} if start == 50 else {}
                yield Chunk(chunk.file, start, chunk.table.slice(start, 50), damage)

    def schemas(self) -> Iterator[ChunkSchema]:
        raise AssertionError("what is parsed tells its schemas")


def _found(reading: TabularReader) -> list[Any]:
    return list(reading)


def test_a_source_too_large_for_memory_is_parsed_once_and_read_the_same(tmp_path: Path) -> None:
    path = _log(tmp_path)
    whole, counting = _Counting(path), _Counting(path)
    expected = _found(TabularReader(whole, ReadOptions()))
    reading = TabularReader(
        CachedTables(counting, keep_bytes=2_000), ReadOptions(), block_bytes=2_000
    )
    for _ in range(3):
        found = sorted(_found(reading), key=lambda one: one.source_episode_id)
        assert [type(one) for one in found] == [type(one) for one in expected]
        for one, other in zip(found, expected, strict=True):
            if isinstance(one, Episode):
                np.testing.assert_array_equal(one.observations, other.observations)
                np.testing.assert_array_equal(one.rewards, other.rewards)
                assert one.extras["note"].equals(other.extras["note"])
            else:
                assert one.findings[0].message == other.findings[0].message
    assert (whole.num_parsed, counting.num_parsed) == (1, 1)


def test_tables_come_back_under_their_own_schemas() -> None:
    spool = Spool()
    tensor = pa.FixedShapeTensorArray.from_numpy_ndarray(
        np.arange(8, dtype=np.uint8).reshape(2, 2, 2)
    )
    tables = [
        pa.table({"a": [1, 2]}),
        pa.table({"a": [1.5], "b": ["x"]}),
        pa.table({"image": tensor}),
        pa.table({"a": pa.array([], pa.int64())}),
    ]
    for table in tables:
        spool.append(table)
    assert [t.schema for t in spool.tables()] == [t.schema for t in tables]
    assert all(one.equals(other) for one, other in zip(spool.tables(), tables, strict=True))
    assert [t.schema.names for t in spool.tables(["b"])] == [[], ["b"], [], []]
    spool.close()


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool()

    class _Full:
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(spool, "_file", _Full())
    with pytest.raises(StorageError, match=r"No space left on device.*TMPDIR"):
        spool.append(pa.table({"a": [1]}))
