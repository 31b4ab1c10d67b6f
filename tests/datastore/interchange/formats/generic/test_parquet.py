from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import ReplayLakeError, SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions, RejectedEpisode
from replaylake.datastore.interchange.formats.generic.parquet import ParquetFormat, ParquetTables
from replaylake.datastore.interchange.sources.source import find_source


def _read(path: Path, **options: Any) -> list[Episode]:
    found = list(ParquetFormat().read(find_source([path]).files, ReadOptions(**options)))
    assert not [one for one in found if isinstance(one, RejectedEpisode)]
    return [one for one in found if isinstance(one, Episode)]


def _steps(num: int, **columns: Any) -> pa.Table:
    plain = {
        "episode_id": pa.array(["a"] * num),
        "observation": pa.array(np.arange(num, dtype=np.float32)),
        "action": pa.array(np.zeros(num, np.int64)),
        "reward": pa.array(np.ones(num)),
    }
    return pa.table({**plain, **columns})


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([["a"], ["b"]], pa.list_(pa.string())), [["a"], ["b"]]),
        (pa.array(["x", "y"]).dictionary_encode(), ["x", "y"]),
        (pa.array([{"u": 1, "v": [1.5]}, None]), [{"u": 1, "v": [1.5]}, None]),
        (pa.array([1, None], pa.uint8()), [1, None]),
        (pa.array([1, 2], pa.float16()), [1.0, 2.0]),
        (pa.array([b"ab", None], pa.large_binary()), [b"ab", None]),
    ],
)
def test_further_columns_of_any_type_are_kept(
    tmp_path: Path, column: Any, expected: list[Any]
) -> None:
    pq.write_table(_steps(2, more=column), tmp_path / "log.parquet")
    (episode,) = _read(tmp_path / "log.parquet")
    assert pa.array(episode.extras["more"]).to_pylist() == expected


def test_tensors_have_their_shape(tmp_path: Path) -> None:
    frames = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    column = pa.FixedShapeTensorArray.from_numpy_ndarray(frames)
    pq.write_table(_steps(2, observation=column), tmp_path / "log.parquet")
    (episode,) = _read(tmp_path / "log.parquet")
    assert np.array_equal(episode.observations, frames)


@pytest.mark.slow
def test_a_bomb_is_refused_by_rows_times_width(tmp_path: Path) -> None:
    """A file of a few kilobytes, whose rows of zeros would take 1.3 GB."""
    zeros = pa.table({"x": np.zeros(1 << 20)})
    path = tmp_path / "log.parquet"
    with pq.ParquetWriter(path, zeros.schema, compression="zstd") as writer:
        for _ in range(160):
            writer.write_table(zeros)
    assert path.stat().st_size < 1 << 20
    files = find_source([path]).files
    with pytest.raises(SourceInvalidError, match="unpack to"):
        list(ParquetTables(files).schemas())
    with pytest.raises(SourceInvalidError, match="unpack to"):
        next(ParquetTables(files).chunks())


def test_wide_rows_make_small_chunks(tmp_path: Path) -> None:
    wide = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(3000 * 4000, np.float32)), 4000)
    pq.write_table(pa.table({"x": wide}), tmp_path / "log.parquet")
    sizes = [c.table.nbytes for c in ParquetTables(find_source([tmp_path]).files).chunks()]
    assert len(sizes) > 2
    assert max(sizes) < 20 << 20


def _exported(path: Path) -> Path:
    spec = DatasetSpec(Box((2,), "float32", -1, 1), Discrete(7))
    episode = Episode("a", np.zeros((3, 2), np.float32), np.arange(3), np.ones(3), terminated=True)
    ParquetFormat().write(iter([episode]), spec, path)
    return path


def test_spaces_come_back_unless_the_options_change_the_values(tmp_path: Path) -> None:
    files = find_source([_exported(tmp_path / "o.parquet")]).files
    spaces = ParquetFormat().read(files, ReadOptions()).spaces
    assert spaces == (Box((2,), "float32", -1, 1), Discrete(7))
    for options in (
        ReadOptions(mapping={"action": "step", "old": "action"}),
        ReadOptions(action_scale=2.0),
    ):
        assert ParquetFormat().read(files, options).spaces is None


def test_spaces_that_cannot_be_read_are_one_clear_line(tmp_path: Path) -> None:
    table = pq.read_table(_exported(tmp_path / "o.parquet"))
    for text in (b"{", b"[]", b'{"type": "box"}', b'{"type": "moon"}', b"\xff", b"null"):
        said = {**(table.schema.metadata or {}), b"replaylake.action_space": text}
        pq.write_table(table.replace_schema_metadata(said), tmp_path / "p.parquet")
        with pytest.raises(SourceInvalidError, match="metadata"):
            ParquetFormat().read(find_source([tmp_path / "p.parquet"]).files, ReadOptions())


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = _steps(3)
    pq.write_table(table.append_column("reward", table["reward"]), tmp_path / "p.parquet")
    with pytest.raises(SourceInvalidError, match=r"p\.parquet: found the columns reward twice"):
        _read(tmp_path / "p.parquet")


def test_two_fields_of_one_name_are_refused(tmp_path: Path) -> None:
    table = _steps(3)
    twice = pa.StructArray.from_arrays([table["reward"].combine_chunks()] * 2, ["a", "a"])
    pq.write_table(table.append_column("infos", twice), tmp_path / "p.parquet")
    with pytest.raises(SourceInvalidError, match=r"column 'infos' has two fields .* a, a"):
        _read(tmp_path / "p.parquet")


def test_damaged_files_are_read_or_refused(tmp_path: Path) -> None:
    whole = _exported(tmp_path / "o.parquet").read_bytes()
    rng = np.random.default_rng(0)
    path = tmp_path / "p.parquet"
    for number in range(150):
        data = bytearray(whole)
        if number % 3 == 0:
            data = data[: rng.integers(8, len(data))]
        for at in rng.integers(4, len(data), 2):
            data[at] ^= 1 << rng.integers(0, 8)
        path.write_bytes(data)
        with suppress(ReplayLakeError):
            list(ParquetFormat().read(find_source([path]).files, ReadOptions()))
