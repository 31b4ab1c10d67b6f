from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import (
    ConfigInvalidError,
    ReplayLakeError,
    SchemaMismatchError,
    SourceInvalidError,
)
from replaylake.datastore.interchange.formats.detect import find_format
from replaylake.datastore.interchange.formats.format import (
    ReadOptions,
    RejectedEpisode,
    SourceReader,
)
from replaylake.datastore.interchange.formats.generic.parquet import ParquetTables
from replaylake.datastore.interchange.formats.tabular.reader import TabularReader
from replaylake.datastore.interchange.formats.tabular.tables import CachedTables
from replaylake.datastore.interchange.sources.source import find_source

_HEADER = "episode_id,step,observation,action,reward,terminated\n"


def _open(*paths: Path, format: str = "auto", **options: Any) -> SourceReader:
    source = find_source(paths)
    return find_format(format, source.files).read(source.files, ReadOptions(**options))


def _episodes(reading: SourceReader) -> list[Episode]:
    found = list(reading)
    assert not [one for one in found if isinstance(one, RejectedEpisode)]
    return [one for one in found if isinstance(one, Episode)]


def _csv(folder: Path, text: str, name: str = "log.csv") -> Path:
    (folder / name).write_text(text)
    return folder / name


def _rows() -> list[dict[str, Any]]:
    """Two episodes of two steps; by hand."""
    return [
        {"who": "a", "n": 0, "x": 0.5, "y": 1.5, "act": 1, "gain": 1.0, "end": False},
        {"who": "a", "n": 1, "x": 1.0, "y": 2.0, "act": 0, "gain": 2.0, "end": True},
        {"who": "b", "n": 0, "x": 9.0, "y": 8.0, "act": 2, "gain": 3.0, "end": False},
        {"who": "b", "n": 1, "x": 7.0, "y": 6.0, "act": 1, "gain": 4.0, "end": True},
    ]


_MAPPING = {
    "episode_id": "who",
    "step": "n",
    "observation": "x,y",
    "action": "act",
    "reward": "gain",
    "terminated": "end",
}


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    table = pa.Table.from_pylist(list(rows))
    if path.suffix == ".csv":
        pa_csv.write_csv(table, path)
    elif path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl", "log.parquet"])
def test_a_mapped_table_is_read_in_every_format(tmp_path: Path, name: str) -> None:
    first, second = _episodes(_open(_write(tmp_path / name, _rows()), mapping=_MAPPING))
    assert first.source_episode_id == "a"
    assert first.observations.tolist() == [[0.5, 1.5], [1.0, 2.0]]
    assert first.actions.tolist() == [1, 0]
    assert first.rewards.tolist() == [1.0, 2.0]
    assert first.terminated
    assert first.final_observation is None
    assert second.observations.tolist() == [[9.0, 8.0], [7.0, 6.0]]


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl", "log.parquet"])
def test_rows_may_be_unordered_where_there_is_a_step(tmp_path: Path, name: str) -> None:
    rows = [_rows()[i] for i in (3, 0, 2, 1)]
    episodes = _episodes(_open(_write(tmp_path / name, rows), mapping=_MAPPING))
    # In the order of their first rows in the source.
    assert [e.source_episode_id for e in episodes] == ["b", "a"]
    assert episodes[1].rewards.tolist() == [1.0, 2.0]
    assert episodes[0].actions.tolist() == [2, 1]


def test_without_ids_the_flags_delimit_episodes(tmp_path: Path) -> None:
    rows = [{k: v for k, v in row.items() if k not in ("who", "n")} for row in _rows()]
    mapping = {k: v for k, v in _MAPPING.items() if k not in ("episode_id", "step")}
    rows.append({**rows[0], "gain": 5.0})
    reading = _open(_write(tmp_path / "log.jsonl", rows), mapping=mapping)
    episodes = _episodes(reading)
    assert [e.rewards.tolist() for e in episodes] == [[1.0, 2.0], [3.0, 4.0], [5.0]]
    assert [e.terminated for e in episodes] == [True, True, False]
    check, _ = reading.checks
    assert (check.name, check.outcome, check.num_episodes) == ("no_end", "noted", 1)
    assert "episode 2: log.jsonl row 4" in check.example


@pytest.mark.parametrize("column", ["terminated", "truncated", "done"])
@pytest.mark.parametrize(
    "flags",
    [("0", "1"), ("0.0", "1.0"), ("false", "true"), ("False", "True"), ("FALSE", "TRUE")],
)
def test_without_ids_csv_flags_of_any_spelling_delimit_episodes(
    tmp_path: Path, column: str, flags: tuple[str, str]
) -> None:
    off, on = flags
    ends = "" if column != "truncated" else ",terminated"
    rest = "" if column != "truncated" else f",{off}"
    rows = "".join(f"{x}.5,0,1,{on if x in (1, 3) else off}{rest}\n" for x in range(5))
    episodes = _episodes(_open(_csv(tmp_path, f"observation,action,reward,{column}{ends}\n{rows}")))
    assert [len(episode) for episode in episodes] == [2, 2, 1]
    assert [e.terminated or e.truncated for e in episodes] == [True, True, False]


@pytest.mark.parametrize("flags", [(0, 1), (0.0, 1.0), (False, True), (None, 1)])
def test_without_ids_json_flags_of_any_spelling_delimit_episodes(
    tmp_path: Path, flags: tuple[Any, Any]
) -> None:
    rows = [
        {"observation": [float(x)], "action": 0, "reward": 1.0, "done": flags[x in (1, 3)]}
        for x in range(4)
    ]
    found = list(_open(_write(tmp_path / "log.jsonl", rows)))
    assert [isinstance(one, RejectedEpisode) for one in found] == [flags[0] is None] * 2


def test_without_ids_a_flag_that_is_none_is_named(tmp_path: Path) -> None:
    log = _csv(tmp_path, "observation,action,reward,done\n1.5,0,1,0\n2.5,0,1,2\n3.5,0,1,1\n")
    (found,) = _open(log)
    assert isinstance(found, RejectedEpisode)
    assert (found.num_steps, found.findings[0].check) == (3, "not_a_flag")


def test_without_ids_or_flags_the_source_is_refused(tmp_path: Path) -> None:
    log = _csv(tmp_path, "observation,action,reward\n0.5,1,1\n")
    with pytest.raises(SourceInvalidError, match="episode_id=COLUMN"):
        _open(log)


def test_json_list_cells_of_a_csv_are_arrays(tmp_path: Path) -> None:
    log = _csv(tmp_path, _HEADER + 'e,0,"[0.5, -1]",0,1,0\ne,1,"[2, 3.5]",1,1,1\n')
    (episode,) = _episodes(_open(log))
    assert episode.observations.tolist() == [[0.5, -1.0], [2.0, 3.5]]
    assert episode.terminated


def test_nested_list_cells_keep_their_shape(tmp_path: Path) -> None:
    log = _csv(tmp_path, _HEADER + 'e,0,"[[1, 2], [3, 4]]",0,1,1\n')
    (episode,) = _episodes(_open(log))
    assert episode.observations.shape == (1, 2, 2)


def test_ids_are_texts_also_where_they_look_like_numbers(tmp_path: Path) -> None:
    log = _csv(tmp_path, _HEADER + "7,0,0.5,0,1,1\n007,0,0.5,0,1,1\n")
    assert [e.source_episode_id for e in _episodes(_open(log))] == ["7", "007"]


def test_other_columns_are_kept_typed_and_renamed(tmp_path: Path) -> None:
    log = _csv(
        tmp_path,
        "episode_id,observation,action,reward,terminated,user name,1st,,zip,ok\n"
        "e,0.5,0,1,1,ann,3,4.5,007,true\n",
    )
    reading = _open(log)
    (episode,) = _episodes(reading)
    assert {name: array.to_pylist() for name, array in episode.extras.items()} == {
        "user_name": ["ann"],
        "_1st": [3],
        "column_7": [4.5],
        "zip": ["007"],
        "ok": [True],
    }
    assert reading.renames == {"user name": "user_name", "1st": "_1st", "": "column_7"}


def test_colliding_names_are_an_error_and_a_mapping_solves_it(tmp_path: Path) -> None:
    log = _csv(
        tmp_path, "episode_id,observation,action,reward,terminated,a b,a_B\ne,0.5,0,1,1,2,3\n"
    )
    with pytest.raises(SourceInvalidError, match="'a_B'"):
        _open(log)
    (episode,) = _episodes(_open(log, mapping={"other": "a_B"}))
    assert episode.extras["other"].to_pylist() == [3]
    assert episode.extras["a_b"].to_pylist() == [2]


def test_narrow_types_are_widened_at_the_door(tmp_path: Path) -> None:
    table = pa.table(
        {
            "episode_id": ["e"],
            "observation": pa.array([0.5], pa.float16()),
            "action": pa.array([1], pa.uint8()),
            "reward": pa.array([1.0], pa.float32()),
            "terminated": [True],
            "u8": pa.array([200], pa.uint8()),
            "u32": pa.array([2**32 - 1], pa.uint32()),
            "f16": pa.array([0.5], pa.float16()),
            "ns": pa.array([1_000], pa.timestamp("ns", tz="UTC")),
            "nothing": pa.nulls(1),
            "nested": pa.array([[{"a.b": 1}]]),
        }
    )
    pq.write_table(table, tmp_path / "log.parquet")
    reading = _open(tmp_path / "log.parquet")
    (episode,) = _episodes(reading)
    kinds = {name: array.type for name, array in episode.extras.items()}
    assert kinds == {
        "u8": pa.int16(),
        "u32": pa.int64(),
        "f16": pa.float32(),
        "ns": pa.timestamp("us", tz="UTC"),
        "nested": pa.list_(pa.struct([("a_b", pa.int64())])),
    }
    assert dict(reading.extras) == kinds
    assert episode.extras["nested"].to_pylist() == [[{"a_b": 1}]]
    assert any("nothing" in note for note in reading.notes)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([1_001], pa.timestamp("ns", tz="UTC")), "exactly"),
        (pa.array([1_000], pa.timestamp("us")), "time zone"),
    ],
)
def test_types_that_no_table_holds_are_refused(
    tmp_path: Path, column: pa.Array, message: str
) -> None:
    table = pa.table({**_one_step(), "extra": column})
    pq.write_table(table, tmp_path / "log.parquet")
    with pytest.raises(SchemaMismatchError, match=message):
        list(_open(tmp_path / "log.parquet"))


def _one_step() -> dict[str, Any]:
    return {
        "episode_id": ["e"],
        "observation": [0.5],
        "action": [1],
        "reward": [1.0],
        "terminated": [True],
    }


def test_times_need_a_zone(tmp_path: Path) -> None:
    good = pa.table({**_one_step(), "timestamp": ["2026-01-31T12:00:00+02:00"]})
    pq.write_table(good, tmp_path / "good.parquet")
    (episode,) = _episodes(_open(tmp_path / "good.parquet"))
    assert episode.timestamps is not None
    assert episode.timestamps.tolist() == [1769853600_000_000]
    for bad in (["2026-01-31T12:00:00"], [0.25]):
        pq.write_table(pa.table({**_one_step(), "timestamp": bad}), tmp_path / "bad.parquet")
        with pytest.raises(SourceInvalidError, match="`mapping` NEW=timestamp"):
            list(_open(tmp_path / "bad.parquet"))


def test_json_texts_that_look_like_times_stay_texts(tmp_path: Path) -> None:
    row = {key: value[0] for key, value in _one_step().items()}
    row |= {"day": "2026-01-31 12:00:00", "timestamp": "2026-01-31T12:00:00Z"}
    (tmp_path / "log.jsonl").write_text(json.dumps(row) + "\n")
    (episode,) = _episodes(_open(tmp_path / "log.jsonl"))
    assert episode.extras["day"].to_pylist() == ["2026-01-31 12:00:00"]
    assert episode.timestamps is not None
    assert episode.timestamps.tolist() == [1769860800_000_000]


@pytest.mark.parametrize("name", ["pscore", "propensity"])
def test_propensities_become_log_probs(tmp_path: Path, name: str) -> None:
    header = f"{_HEADER.strip()},{name}\n"
    log = _csv(tmp_path, header + "a,0,0.5,0,1,1,0.5\nb,0,0.5,0,1,1,\nc,0,0.5,0,1,1,1.5\n")
    first, second, third = list(_open(log))
    assert isinstance(first, Episode)
    assert isinstance(second, Episode)
    assert first.behavior_log_probs == pytest.approx([np.log(0.5)])
    assert second.behavior_log_probs is not None
    assert np.isnan(second.behavior_log_probs).all()
    assert isinstance(third, RejectedEpisode)
    assert third.findings[0].check == "propensity"


def test_policies_masks_and_versions_are_read(tmp_path: Path) -> None:
    table = pa.table(
        {**_one_step(), "policy": ["bc"], "policy_version": [3], "action_mask": [[True, False]]}
    )
    pq.write_table(table, tmp_path / "log.parquet")
    (episode,) = _episodes(_open(tmp_path / "log.parquet"))
    assert episode.policies is not None
    assert episode.policies.tolist() == ["bc"]
    assert episode.policy_versions is not None
    assert episode.policy_versions.tolist() == [3]
    assert episode.action_masks is not None
    assert episode.action_masks.tolist() == [[True, False]]


def test_dict_observations_stay_structs(tmp_path: Path) -> None:
    rows = [
        {"episode_id": 1, "obs": {"p": [1.0, 2.0], "q": 3.0}, "action": 0, "reward": 1.0},
        {"episode_id": 1, "obs": {"p": [3.0, 4.0], "q": 5.0}, "action": 1, "reward": 1.0},
    ]
    (episode,) = _episodes(_open(_write(tmp_path / "log.jsonl", rows)))
    assert isinstance(episode.observations, dict)
    assert episode.observations["p"].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert episode.observations["q"].tolist() == [3.0, 5.0]


@pytest.mark.parametrize(
    ("body", "check"),
    [
        ("e,0,1.0,0,1,0\ne,0,2.0,0,1,1\n", "step_twice"),
        ("e,0,1.0,0,1,0\ne,2,2.0,0,1,1\n", "gap"),
        ("e,0,1.0,0,nan,0\ne,1,2.0,0,1,1\n", "not_finite"),
        ("e,0,1.0,0,,0\ne,1,2.0,0,1,1\n", "missing"),
        ("e,0,inf,0,1,0\ne,1,2.0,0,1,1\n", "not_finite"),
        ("e,0,1.0,0,1,1\ne,1,2.0,0,1,1\n", "end_inside"),
        ("e,0.5,1.0,0,1,0\ne,1,2.0,0,1,1\n", "not_whole"),
        ("e,-1,1.0,0,1,0\ne,0,2.0,0,1,1\n", "negative_step"),
        ("e,0,1.0,0,1,2\ne,1,2.0,0,1,1\n", "not_a_flag"),
        (",0,1.0,0,1,0\n", "missing"),
    ],
)
def test_an_invalid_episode_is_rejected_and_the_others_are_not(
    tmp_path: Path, body: str, check: str
) -> None:
    log = _csv(tmp_path, _HEADER + "good,0,1.0,0,1,1\n" + body + "fine,3,1.0,0,1,1\n")
    first, second, third = list(_open(log))
    assert isinstance(first, Episode)
    assert isinstance(second, RejectedEpisode)
    assert second.num_steps == body.count("\n")
    assert [finding.check for finding in second.findings] == [check]
    assert "log.csv row " in second.findings[0].message
    # A first step above 0 is no gap.
    assert isinstance(third, Episode)
    assert third.first_step == 3


def test_observations_of_uneven_length_reject_their_episode(tmp_path: Path) -> None:
    rows = [
        {"episode_id": n, "obs": [0.0] * (2 if n == 1 else 3), "action": 0, "reward": 1.0}
        for n in range(3)
    ]
    first, second, third = list(_open(_write(tmp_path / "log.jsonl", rows)))
    assert isinstance(first, Episode)
    assert isinstance(second, RejectedEpisode)
    assert second.findings[0].check == "shape"
    assert isinstance(third, Episode)


def test_next_observations_give_the_final_one_and_check_the_order(tmp_path: Path) -> None:
    text = "episode_id,observation,next_observation,action,reward,truncated\n"
    log = _csv(tmp_path, text + "e,1.5,2.5,0,1,0\ne,2.5,3.5,0,1,1\nf,1,2,0,1,0\nf,3,4,0,1,1\n")
    first, second = list(_open(log))
    assert isinstance(first, Episode)
    assert first.truncated
    assert not first.terminated
    assert first.final_observation.tolist() == [3.5]
    assert isinstance(second, RejectedEpisode)
    assert "log.csv row 2" in second.findings[0].message


def test_dones_with_truncated_flags_are_told_apart(tmp_path: Path) -> None:
    text = "episode_id,observation,action,reward,dones,truncateds\n"
    log = _csv(tmp_path, text + "e,1.5,0,1,1,0\nf,1.5,0,1,1,1\n")
    reading = _open(log)
    assert [(e.terminated, e.truncated) for e in _episodes(reading)] == [
        (True, False),
        (False, True),
    ]
    assert any("terminated is dones and not truncateds" in note for note in reading.notes)


def test_mapping_errors_name_the_column(tmp_path: Path) -> None:
    log = _csv(tmp_path, "id,a,b\n1,2,3\n")
    with pytest.raises(SourceInvalidError, match="'gain'"):
        _open(log, mapping={"reward": "gain"})
    with pytest.raises(SourceInvalidError, match="`mapping` observation=COLUMN"):
        _open(log)
    with pytest.raises(ConfigInvalidError, match="expected one"):
        _open(log, mapping={"reward": "a,b"})
    with pytest.raises(ConfigInvalidError, match="my-name"):
        _open(log, mapping={"my-name": "a"})


def test_two_aliases_of_one_field_need_a_mapping(tmp_path: Path) -> None:
    log = _csv(tmp_path, "episode_id,obs,observation,action,reward\ne,1.5,2.5,0,1\n")
    with pytest.raises(SourceInvalidError, match="`mapping` observation="):
        _open(log)
    (episode,) = _episodes(_open(log, mapping={"observation": "obs", "seen": "observation"}))
    assert episode.observations.tolist() == [[1.5]]
    assert episode.extras["seen"].to_pylist() == [2.5]


def test_a_text_reward_names_the_cell(tmp_path: Path) -> None:
    log = _csv(tmp_path, _HEADER + "e,0,1.0,0,n/a,0\ne,1,1.0,0,,1\n")
    with pytest.raises(SourceInvalidError, match="'n/a' in row 0"):
        list(_open(log))


def test_a_column_that_one_file_lacks_names_the_file(tmp_path: Path) -> None:
    _csv(tmp_path, _HEADER + "e,0,1.0,0,1,1\n", "a.csv")
    _csv(tmp_path, _HEADER.replace("reward", "gain") + "f,0,1.0,0,1,1\n", "b.csv")
    with pytest.raises(SourceInvalidError, match=r"b\.csv.*'reward'"):
        _open(tmp_path)


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.9])
def test_a_torn_parquet_file_is_named(tmp_path: Path, keep: float) -> None:
    _write(tmp_path / "a.parquet", _rows())
    torn = _write(tmp_path / "b.parquet", _rows())
    data = torn.read_bytes()
    torn.write_bytes(data[: max(8, int(len(data) * keep))])
    with pytest.raises(SourceInvalidError, match=r"b\.parquet.*damaged"):
        list(_open(tmp_path, mapping=_MAPPING))


def test_a_flipped_bit_in_a_checksummed_page_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    table = pa.Table.from_pylist(_rows())
    pq.write_table(table, path, write_page_checksum=True, compression="none", use_dictionary=False)
    data = bytearray(path.read_bytes())
    # Neither the least nor the greatest value, which page headers repeat.
    data[data.index(np.float64(7.0).tobytes())] ^= 1
    path.write_bytes(data)
    with pytest.raises(SourceInvalidError, match=r"log\.parquet"):
        list(_open(path, mapping=_MAPPING))


def test_a_torn_json_line_is_named(tmp_path: Path) -> None:
    path = _write(tmp_path / "log.jsonl", _rows())
    path.write_text(path.read_text()[:-20])
    with pytest.raises(SourceInvalidError, match="line 4"):
        list(_open(path, mapping=_MAPPING))


def test_a_csv_row_of_another_width_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceInvalidError, match=r"log\.csv.*line 3.*found 3 cells, expected 6"):
        list(_open(_csv(tmp_path, _HEADER + "e,0,1.0,0,1,1\ne,1,2.0\n")))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"PK\x03\x04rest", "could not be read to its end"),
        (b"\x89HDF\r\n\x1a\n", "could not be read to its end"),
        (b"\x80\x04\x95pickle", "pickle"),
        (b"one column only\n1\n", "an unknown format"),
    ],
)
def test_unknown_content_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "log.bin").write_bytes(data)
    with pytest.raises(SourceInvalidError, match=message):
        _open(tmp_path / "log.bin")


def test_formats_are_told_by_content_not_by_name(tmp_path: Path) -> None:
    path = _write(tmp_path / "log.parquet", _rows())
    for name, expected in (("log.csv", "parquet"), ("data", "parquet")):
        (tmp_path / name).write_bytes(path.read_bytes())
        assert find_format("auto", find_source([tmp_path / name]).files).name == expected
    with pytest.raises(ConfigInvalidError, match="found 'xml'"):
        find_format("xml", find_source([path]).files)


def test_mixed_folders_are_refused(tmp_path: Path) -> None:
    _write(tmp_path / "a.parquet", _rows())
    _write(tmp_path / "b.csv", _rows())
    with pytest.raises(SourceInvalidError, match=r"a\.parquet is Parquet and b\.csv is text"):
        _open(tmp_path, mapping=_MAPPING)


def test_a_container_anywhere_in_a_folder_is_named(tmp_path: Path) -> None:
    _write(tmp_path / "a.jsonl", _rows())
    (tmp_path / "b.arrow").write_bytes(b"ARROW1\0\0")
    with pytest.raises(SourceInvalidError, match=r"a\.jsonl is text and b\.arrow is Arrow"):
        _open(tmp_path, mapping=_MAPPING)


def test_blocks_carry_open_episodes_along(tmp_path: Path) -> None:
    """Interleaved episodes over files and blocks give what one block gives."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 30, 2_000)
    steps = np.zeros(2_000, np.int64)
    for one in range(30):
        steps[ids == one] = np.arange((ids == one).sum())
    table = pa.table(
        {
            "episode_id": ids,
            "step": steps,
            "observation": rng.normal(size=2_000),
            "action": rng.integers(0, 3, 2_000),
            "reward": rng.normal(size=2_000),
            "terminated": np.zeros(2_000, bool),
        }
    )
    for i in range(10):
        pq.write_table(table.slice(i * 200, 200), tmp_path / f"part-{i}.parquet")
    source = find_source([tmp_path])
    tables = ParquetTables(source.files)
    whole = _episodes(TabularReader(tables, ReadOptions()))
    kept = CachedTables(tables, keep_bytes=10_000)
    streamed = TabularReader(kept, ReadOptions(), block_bytes=10_000)
    assert not kept.fill()
    for _ in range(2):
        by_id = {e.episode_id: e for e in _episodes(streamed)}
        assert len(by_id) == len(whole) == 30
        for episode in whole:
            other = by_id[episode.episode_id]
            np.testing.assert_array_equal(episode.observations, other.observations)
            np.testing.assert_array_equal(episode.rewards, other.rewards)


def test_blocks_carry_the_rows_after_the_last_flag_along(tmp_path: Path) -> None:
    ends = np.zeros(1_000, bool)
    ends[[99, 100, 450, 980]] = True
    table = pa.table(
        {
            "observation": np.arange(1_000.0),
            "action": np.zeros(1_000, np.int64),
            "reward": np.ones(1_000),
            "terminated": ends,
        }
    )
    for i in range(10):
        pq.write_table(table.slice(i * 100, 100), tmp_path / f"part-{i}.parquet")
    tables = ParquetTables(find_source([tmp_path]).files)
    streamed = TabularReader(CachedTables(tables, keep_bytes=100), ReadOptions(), block_bytes=100)
    episodes = _episodes(streamed)
    assert [len(e) for e in episodes] == [100, 1, 350, 530, 19]
    assert [e.episode_id for e in episodes] == ["0", "1", "2", "3", "4"]
    assert [e.terminated for e in episodes] == [True, True, True, True, False]


def test_a_csv_column_that_turns_to_text_is_text_throughout(tmp_path: Path) -> None:
    header = _HEADER.strip() + ",note\n"
    _csv(tmp_path, header + "e,0,1.0,0,1,1,12\n", "a.csv")
    _csv(tmp_path, header + "f,0,1.0,0,1,1,twelve\n", "b.csv")
    notes = [e.extras["note"].to_pylist() for e in _episodes(_open(tmp_path))]
    assert notes == [["12"], ["twelve"]]


def test_a_parquet_column_of_two_types_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({**_one_step(), "note": [12]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({**_one_step(), "note": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(
        SourceInvalidError, match=r"b\.parquet: column 'note': found 1 values of type string and"
    ):
        _open(tmp_path)


def test_ids_beyond_int64_are_refused(tmp_path: Path) -> None:
    row = {key: value[0] for key, value in _one_step().items()}
    # pyarrow reads an integer over 2**63 as a float, and two ids would become one.
    (tmp_path / "log.jsonl").write_text(json.dumps({**row, "episode_id": 2**63 + 1}) + "\n")
    (rejected,) = _open(tmp_path / "log.jsonl")
    assert isinstance(rejected, RejectedEpisode)
    assert [finding.message for finding in rejected.findings] == [
        f"log.jsonl line 1, column 'episode_id': found {2**63 + 1}, expected a whole number of 64 "
        "bits at most as in most rows"
    ]
    pq.write_table(pa.table({**_one_step(), "episode_id": [2.0**63]}), tmp_path / "l.parquet")
    with pytest.raises(SourceInvalidError, match="ids as text"):
        list(_open(tmp_path / "l.parquet"))


def test_every_refusal_is_one_of_ours(tmp_path: Path) -> None:
    for text in ("", "\n", "[1, 2]\n", '{"a": 1}\n{"a": "x"}\n', "a,a\n1,2\n", "1,2\n3,4\n", "{\n"):
        log = _csv(tmp_path, text)
        with pytest.raises(ReplayLakeError) as caught:
            list(_open(log))
        assert "log.csv" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_empty_structs_are_pruned_and_the_rest_is_kept(tmp_path: Path) -> None:
    row = {key: value[0] for key, value in _one_step().items()}
    row["info"] = {"TimeLimit.truncated": True, "empty": {}, "none": None}
    (tmp_path / "log.jsonl").write_text(json.dumps(row) + "\n")
    (episode,) = _episodes(_open(tmp_path / "log.jsonl"))
    assert episode.extras["info"].to_pylist() == [{"TimeLimit_truncated": True}]


@pytest.mark.parametrize("choice", [{"gaps": "spilt"}, {"open_ends": "terminated"}])
def test_a_choice_that_is_none_is_refused(choice: dict[str, Any]) -> None:
    with pytest.raises(ConfigInvalidError, match=r"found '(spilt|terminated)', expected"):
        ReadOptions(**choice)


def test_rewards_are_scaled_and_ends_follow_from_a_time_limit(tmp_path: Path) -> None:
    """A log of costs without ends: what did not reach the limit ended by itself."""
    rows = [f"{e},{t},0.5,1,{t}.5" for e, num in (("a", 3), ("b", 2), ("c", 4)) for t in range(num)]
    (tmp_path / "log.csv").write_text("episode_id,step,obs,action,reward\n" + "\n".join(rows))
    files = find_source([tmp_path / "log.csv"]).files
    options = ReadOptions(reward_scale=-2.0, time_limit=3, open_ends="time-limit")
    reading = find_format("csv", files).read(files, options)
    found = [one for one in reading if isinstance(one, Episode)]
    assert [one.rewards.tolist() for one in found][:2] == [[-1.0, -3.0, -5.0], [-1.0, -3.0]]
    assert [(one.terminated, one.truncated) for one in found] == [
        (False, True),
        (True, False),
        (False, False),
    ]
    counts = {(c.name, c.outcome): c.num_episodes for c in reading.checks}
    assert counts[("no_end", "corrected")] == 2
    assert counts[("no_end", "noted")] == 1
    assert "rewards are -2 times those logged" in reading.notes
    for wrong in ({"reward_scale": 0.0}, {"open_ends": "time-limit"}):
        with pytest.raises(ConfigInvalidError) as error:
            ReadOptions(**wrong)
        assert error.value.parameter == next(iter(wrong))


@pytest.mark.parametrize("nested", [False, True])
def test_ends_may_be_a_field_of_a_struct(
    tmp_path: Path, nested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Gym's infos have it, whose key has a dot; rows without it do not end."""
    rows = []
    for i in range(6):
        row: dict[str, Any] = {"obs": 0.5, "action": 1, "info": {"r": i / 2}, "done": i % 3 == 2}
        if i == 2:
            row["info"] |= (
                {"TimeLimit": {"truncated": True}} if nested else {"TimeLimit.truncated": True}
            )
        rows.append(row)
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
    mapping = {"truncated": "info.TimeLimit.truncated", "reward": "info.r", "terminated": "done"}
    for keep_bytes in (1 << 20, 0):  # kept, and read again
        monkeypatch.setattr(
            "replaylake.datastore.interchange.formats.tabular.tables._KEEP_BYTES", keep_bytes
        )
        found = _episodes(_open(tmp_path / "log.jsonl", mapping=mapping))
        assert [one.rewards.tolist() for one in found] == [[0, 0.5, 1], [1.5, 2, 2.5]]
        assert [one.truncated for one in found] == [True, False]
    with pytest.raises(SourceInvalidError, match=r"'info\.TimeLimt'"):
        _open(tmp_path / "log.jsonl", mapping={**mapping, "truncated": "info.TimeLimt"})
