"""Misfits: values of another type than their column reject their row alone, wherever it stands."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import EpisodeInvalidError, SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions, RejectedEpisode
from replaylake.datastore.interchange.formats.generic import csv as csv_format
from replaylake.datastore.interchange.formats.generic import jsonl as jsonl_format
from replaylake.datastore.interchange.formats.generic.csv import (
    CsvTables,
    numeric_columns,
    text_columns,
)
from replaylake.datastore.interchange.formats.generic.jsonl import JsonTables, parse_rows
from replaylake.datastore.interchange.formats.tabular.reader import TabularReader
from replaylake.datastore.interchange.formats.tabular.tables import CachedTables
from replaylake.datastore.interchange.ingest.ingest import NothingValidError, ingest
from replaylake.datastore.interchange.sources.source import find_source
from replaylake.datastore.lake.lake import Lake, open_lake

_NUM = 60
_CHANGES = [
    pytest.param("reward", "NaN", id="text for a number"),
    pytest.param("reward", True, id="flag for a number"),
    pytest.param("reward", [1.0], id="list for a number"),
    pytest.param("terminated", "maybe", id="text for a flag"),
    pytest.param("observation", "none", id="text for a list"),
    pytest.param("observation", [0.5, "x"], id="text in a list"),
    pytest.param("observation", [0.5, None, [1]], id="list in a list"),
    pytest.param("info", {"speed": "fast", "name": "a"}, id="text in an object"),
    pytest.param("info", 3, id="number for an object"),
    pytest.param("action", 10**23, id="integer beyond int64"),
    pytest.param("action", -(2**63) - 1, id="integer below int64"),
    pytest.param("note", 7, id="number for a text"),
    pytest.param("note", "\ud800", id="half a character"),
    pytest.param("info", {"speed": 1.0, "\udc00": "a"}, id="half a character in a name"),
    pytest.param("\ud800", 1, id="half a character as a name"),
]
_PLACES = [[0, 1], [29, 31], [58, 59]]
# What is read of the logs without misfits, by the size of blocks: read once for all tests.
_CLEAN_JSONL: dict[int, tuple[Any, list[tuple[Any, dict[str, list[Any]]]]]] = {}
_CLEAN_CSV: dict[int, tuple[Any, list[tuple[Any, dict[str, list[Any]]]]]] = {}


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


def _steps(num: int = _NUM, length: int = 4) -> list[dict[str, Any]]:
    return [
        {
            "episode_id": f"e{i // length}",
            "step": i % length,
            "observation": [0.5 * i, 1.5],
            "action": i % 3,
            "reward": 0.25 * i,
            "terminated": i % length == length - 1,
            "note": f"n{i}",
            "info": {"speed": 1.5 * i, "name": "a"},
        }
        for i in range(num)
    ]


def _jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _changed(column: str, value: Any, rows: Sequence[int]) -> list[dict[str, Any]]:
    return [{**row, column: value} if i in rows else row for i, row in enumerate(_steps())]


def _quarantine(lake: Lake) -> list[dict[str, Any]]:
    return lake.sql("select * from log.quarantine order by file, file_row").to_pylist()


@pytest.mark.parametrize(("column", "value"), _CHANGES)
def test_a_line_of_another_type_rejects_its_episode(
    lake: Lake, tmp_path: Path, column: str, value: Any
) -> None:
    log = _jsonl(tmp_path / "log.jsonl", _changed(column, value, [29, 31, 41]))
    receipt = ingest(lake, [log], "log", format="jsonl")
    assert (receipt.episodes.rejected, receipt.steps.rejected) == (2, 8)
    assert receipt.steps.read == _NUM == receipt.steps.committed + receipt.steps.rejected
    assert {check.name for check in receipt.checks if check.outcome == "rejected"} == {"dtype"}
    rows = _quarantine(lake)
    assert [row["file_row"] for row in rows] == [28, 29, 30, 31, 40, 41, 42, 43]
    reasons = {reason for row in rows for reason in row["reasons"]}
    assert {reason.partition(",")[0] for reason in reasons} == {
        "log.jsonl line 30",
        "log.jsonl line 42",
    }
    sql = "select distinct json_valid(row) as ok from log.quarantine"
    assert lake.sql(sql).to_pylist() == [{"ok": True}]


@pytest.mark.parametrize("block_bytes", [500, 1 << 20])
@pytest.mark.parametrize("places", _PLACES)
@pytest.mark.parametrize(("column", "value"), _CHANGES)
def test_where_a_line_of_another_type_stands_does_not_matter(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    column: str,
    value: Any,
    places: list[int],
    block_bytes: int,
) -> None:
    monkeypatch.setattr(jsonl_format, "_BLOCK_BYTES", block_bytes)
    log = _jsonl(tmp_path / "log.jsonl", _changed(column, value, places))
    rejected = {f"e{place // 4}" for place in places}

    def read(path: Path) -> TabularReader:
        return TabularReader(JsonTables(find_source([path]).files), ReadOptions())

    if block_bytes not in _CLEAN_JSONL:
        clean = read(_jsonl(tmp_path / "clean.jsonl", _steps()))
        _CLEAN_JSONL[block_bytes] = (clean.extras, _with_lists(clean))
    _same_but_for(read(log), *_CLEAN_JSONL[block_bytes], rejected)


def _with_lists(reading: TabularReader) -> list[tuple[Any, dict[str, list[Any]]]]:
    return [(one, {n: c.to_pylist() for n, c in one.extras.items()}) for one in reading]


def _same_but_for(
    reading: TabularReader,
    extras: Any,
    expected: list[tuple[Any, dict[str, list[Any]]]],
    rejected: set[str],
) -> None:
    """Hold what is read of a log against what is read of it without its misfits."""
    assert reading.extras == extras
    found = {one.source_episode_id: one for one in reading}
    assert {name for name, one in found.items() if isinstance(one, RejectedEpisode)} == rejected
    assert len(expected) == _NUM // 4
    for episode, columns in expected:
        assert isinstance(episode, Episode)
        one = found[episode.source_episode_id]
        if isinstance(one, RejectedEpisode):
            assert one.findings[0].check == "dtype"
            continue
        for name in ("observations", "actions", "rewards"):
            assert getattr(one, name).dtype == getattr(episode, name).dtype
            assert (getattr(one, name) == getattr(episode, name)).all()
        assert {n: c.to_pylist() for n, c in one.extras.items()} == columns


@pytest.mark.parametrize(("column", "value"), _CHANGES[:10])
def test_quarantine_has_the_line_as_it_was(
    lake: Lake, tmp_path: Path, column: str, value: Any
) -> None:
    rows = _changed(column, value, [5])
    ingest(lake, [_jsonl(tmp_path / "log.jsonl", rows)], "log", format="jsonl")
    assert [json.loads(row["row"]) for row in _quarantine(lake)] == rows[4:8]


def test_half_a_character_is_kept_as_json(lake: Lake, tmp_path: Path) -> None:
    rows = _changed("note", "a\ud800", [5])
    ingest(lake, [_jsonl(tmp_path / "log.jsonl", rows)], "log", format="jsonl")
    (row,) = (json.loads(row["row"]) for row in _quarantine(lake) if row["file_row"] == 5)
    assert row["note"] == {"json": '"a\\ud800"'}
    assert json.loads(row["note"]["json"]) == "a\ud800"


def test_abort_names_the_line(lake: Lake, tmp_path: Path) -> None:
    log = _jsonl(tmp_path / "log.jsonl", _changed("reward", "NaN", [41]))
    with pytest.raises(
        EpisodeInvalidError, match=r"e10: log\.jsonl line 42, column 'reward'.*'NaN'"
    ):
        ingest(lake, [log], "log", format="jsonl", on_invalid="abort")
    assert not lake.dataset("log").exists()


def test_empty_lines_count(lake: Lake, tmp_path: Path) -> None:
    lines = "".join(f"\n{json.dumps(row)}\n" for row in _changed("reward", "NaN", [41]))
    (tmp_path / "log.jsonl").write_text(lines)
    ingest(lake, [tmp_path / "log.jsonl"], "log", format="jsonl")
    assert "line 84, column 'reward'" in _quarantine(lake)[0]["reasons"][0]


@pytest.mark.parametrize("keep_bytes", [100, 1 << 20])
def test_misfits_are_spooled_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_bytes: int
) -> None:
    monkeypatch.setattr(jsonl_format, "_BLOCK_BYTES", 500)
    log = _jsonl(tmp_path / "log.jsonl", _changed("reward", "NaN", [1, 41]))
    tables = CachedTables(JsonTables(find_source([log]).files), keep_bytes)
    reading = TabularReader(tables, ReadOptions(), block_bytes=500)
    for _ in range(2):
        found = [one for one in reading if isinstance(one, RejectedEpisode)]
        assert [one.source_episode_id for one in found] == ["e0", "e10"]
        assert ["line 2," in found[0].findings[0].message, found[0].findings[0].num_rows] == [
            True,
            1,
        ]


def test_what_is_a_misfit_in_its_block_alone_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the block, half and more are texts; in the source, few."""
    monkeypatch.setattr(jsonl_format, "_BLOCK_BYTES", 500)
    rows = _changed("reward", "NaN", [20, 21, 23])
    tables = JsonTables(find_source([_jsonl(tmp_path / "log.jsonl", rows)]).files)
    types = {chunk.table.schema.field("reward").type for chunk in tables.chunks()}
    assert types == {pa.float64(), pa.string()}
    found = list(TabularReader(tables, ReadOptions()))
    assert [one.source_episode_id for one in found if isinstance(one, RejectedEpisode)] == ["e5"]
    rewards = [r for one in found if not isinstance(one, RejectedEpisode) for r in one.rewards]
    assert rewards == [0.25 * i for i in range(_NUM) if i // 4 != 5]


def test_a_great_integer_among_floats_is_a_float(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl_format, "_BLOCK_BYTES", 500)
    rows = _steps()
    for row in rows[20:]:
        row["reward"] = 1
    rows[40]["reward"] = 10**23
    receipt = ingest(lake, [_jsonl(tmp_path / "log.jsonl", rows)], "log", format="jsonl")
    assert receipt.episodes.rejected == 0
    assert lake.sql("select max(reward) as most from log.steps").to_pylist() == [{"most": 1e23}]


def test_of_one_step_logs_the_row_alone_is_rejected(lake: Lake, tmp_path: Path) -> None:
    num, bad = 4000, range(7, 4000, 100)
    rows = [
        {"context": [0.5 * i, 1.0], "action": i % 3, "click": "NaN" if i in bad else i % 2}
        for i in range(num)
    ]
    log = _jsonl(tmp_path / "log.jsonl", rows)
    options = ReadOptions(mapping={"reward": "click"})
    receipt = ingest(lake, [log], "log", format="bandit", options=options)
    assert receipt.episodes == receipt.steps
    assert (receipt.steps.committed, receipt.steps.rejected) == (num - len(bad), len(bad))
    assert receipt.num_quarantined == len(bad)
    assert [row["reasons"][0] for row in _quarantine(lake)] == [
        f"log.jsonl line {i + 1}, column 'click': found 'NaN', expected a whole number of 64 bits "
        "at most as in most rows"
        for i in bad
    ]
    again = ingest(lake, [log], "log", format="bandit", options=options)
    assert (again.steps.already_present, again.num_quarantined) == (num - len(bad), 0)


@pytest.mark.parametrize("value", ["NaN", "abc"])
def test_a_whole_column_of_another_type_is_refused(lake: Lake, tmp_path: Path, value: str) -> None:
    log = _jsonl(tmp_path / "log.jsonl", _changed("reward", value, range(_NUM)))
    with pytest.raises(SourceInvalidError, match="column 'reward': found string"):
        ingest(lake, [log], "log", format="jsonl")
    log = _jsonl(tmp_path / "log.jsonl", _changed("action", 2**64, range(_NUM)))
    with pytest.raises(NothingValidError, match=f"found {2**64}, expected a whole number"):
        ingest(lake, [log], "log", format="jsonl")
    assert not lake.dataset("log").exists()


def test_equally_many_of_two_types_are_refused(lake: Lake, tmp_path: Path) -> None:
    log = _jsonl(tmp_path / "log.jsonl", _changed("note", 7, range(_NUM // 2)))
    with pytest.raises(
        SourceInvalidError,
        match=r"column 'note': found 30 values of type string and as many of type int64",
    ):
        ingest(lake, [log], "log", format="jsonl")


def _csv_of(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["episode_id,step,x,y,vector,action,reward,terminated,note,code"]
    for i, row in enumerate(rows):
        x, y = row["observation"] if "x" not in row else (row["x"], row["y"])
        cells = [
            row["episode_id"],
            row["step"],
            x,
            row.get("flag", "true" if i % 2 else "false") if y == 1.5 else y,
            row.get("vector", f'"[{i}, 2.5]"'),
            row["action"],
            row["reward"],
            str(row["terminated"]).lower(),
            row["note"],
            row.get("code", 100 + i),
        ]
        lines.append(",".join(map(str, cells)))
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("block_bytes", [600, 1 << 20])
@pytest.mark.parametrize("places", _PLACES)
@pytest.mark.parametrize(
    ("column", "cell"),
    [
        ("reward", "n/a"),
        ("reward", '"[1.0]"'),
        ("step", "007"),
        ("step", "second"),
        ("terminated", "maybe"),
        ("flag", "perhaps"),
        ("vector", "none"),
        ("vector", '"[1, ""a""]"'),
        ("vector", '"[1, 2"'),
        ("action", "100000000000000000000000"),
        ("action", "left"),
        ("code", "A7"),
        ("code", "99999999999999999999"),
    ],
)
def test_where_a_cell_of_another_type_stands_does_not_matter(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    column: str,
    cell: str,
    places: list[int],
    block_bytes: int,
) -> None:
    monkeypatch.setattr(csv_format, "_BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(csv_format, "_SAMPLE_BYTES", min(block_bytes, 1 << 18))
    log, clean = tmp_path / "log.csv", tmp_path / "clean.csv"
    log.write_text(_csv_of(_changed(column, cell, places)))
    options = ReadOptions(mapping={"observation": "vector"})
    rejected = {f"e{place // 4}" for place in places}

    def read(path: Path) -> TabularReader:
        files = find_source([path]).files
        return TabularReader(CsvTables(files, text_columns({}), numeric_columns({})), options)

    if block_bytes not in _CLEAN_CSV:
        clean.write_text(_csv_of(_steps()))
        reading = read(clean)
        _CLEAN_CSV[block_bytes] = (reading.extras, _with_lists(reading))
    _same_but_for(read(log), *_CLEAN_CSV[block_bytes], rejected)


def test_keys_with_a_dot_are_not_keys_of_an_object(tmp_path: Path) -> None:
    """{"a.b": 1} and {"a": {"b": "x"}} in one column are two places, each of one kind."""
    rows = [{"info": {"a.b": 1, "a": {"b": "x"}, "c[]": 1, "c": ["y"]}} for _ in range(3)]
    _, misfits = parse_rows(rows)
    assert misfits == {}
    _, misfits = parse_rows([*rows, {"info": {"a.b": "x"}}])
    assert [*misfits] == [3]


def test_a_cell_of_another_type_is_in_quarantine(lake: Lake, tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text(_csv_of(_changed("reward", "n/a", [29])))
    options = ReadOptions(mapping={"observation": "vector"})
    receipt = ingest(lake, [log], "log", format="csv", options=options)
    assert (receipt.steps.committed, receipt.steps.rejected) == (_NUM - 4, 4)
    rows = _quarantine(lake)
    assert [row["file_row"] for row in rows] == [28, 29, 30, 31]
    assert rows[0]["reasons"] == [
        "log.csv line 31, column 'reward': found 'n/a', expected a number as in most rows"
    ]
    assert json.loads(rows[1]["row"])["reward"] == "n/a"


def test_a_csv_column_of_text_stays_text(lake: Lake, tmp_path: Path) -> None:
    """One in ten and more is another thing than a slip; 007 is a name, and one is enough."""
    rows = [{**row, "code": f"A{i}" if i % 9 == 0 else i} for i, row in enumerate(_steps())]
    (tmp_path / "log.csv").write_text(_csv_of(rows))
    options = ReadOptions(mapping={"observation": "x"})
    assert ingest(lake, [tmp_path / "log.csv"], "log", options=options).steps.rejected == 0
    assert lake.dataset("log").spec.extras["code"] == pa.string()
    rows = [{**row, "code": "007" if i == 59 else 100 + i} for i, row in enumerate(_steps())]
    (tmp_path / "names.csv").write_text(_csv_of(rows))
    assert ingest(lake, [tmp_path / "names.csv"], "names", options=options).steps.rejected == 0
    codes = lake.sql("select code from names.steps order by reward desc limit 2").to_pylist()
    assert codes == [{"code": "007"}, {"code": "158"}]


@pytest.mark.parametrize(
    "texts",
    [
        ["abc", "def"],
        ["2026-01-31", "2026-02-28T12:00:00"],
        ["4ae385ff", "deadbeef"],
        ["", " "],
        ["n/a", "inf."],
    ],
)
def test_texts_are_seen_by_a_few_bytes(texts: list[str]) -> None:
    column = pa.array(texts * 50)
    assert not csv_format._may_be_typed(column)
    # Of a slice, the offsets are those of the whole.
    assert not csv_format._may_be_typed(pa.array(["1"] * 9 + texts).slice(9))


@pytest.mark.parametrize(
    "texts",
    [["1", "-2.5"], ["nan", "+Infinity"], ["true", "FALSE"], ["[1]", '{"a": 2}'], ["1e-05"]],
)
def test_what_may_be_typed_is_counted(texts: list[str]) -> None:
    assert csv_format._may_be_typed(pa.array([*texts * 9, "text"]))


def test_great_integers_of_csv_among_floats_are_floats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_format, "_BLOCK_BYTES", 600)
    monkeypatch.setattr(csv_format, "_SAMPLE_BYTES", 600)
    rows = _steps()
    for row in rows[:40]:
        row["reward"] = 1
    rows[3]["reward"] = 10**23
    (tmp_path / "log.csv").write_text(_csv_of(rows))
    tables = CsvTables(find_source([tmp_path / "log.csv"]).files)
    reading = TabularReader(tables, ReadOptions(mapping={"observation": "x"}))
    first = next(iter(reading))
    assert not isinstance(first, RejectedEpisode)
    assert first.rewards.tolist() == [1.0, 1.0, 1.0, 1e23]


def _parquet_columns(name: str, num: int = 12) -> dict[str, Any]:
    return {
        "episode_id": [f"{name}{i // 3}" for i in range(num)],
        "observation": [0.5 * i for i in range(num)],
        "action": [i % 2 for i in range(num)],
        "reward": [1.0] * num,
        "terminated": [i % 3 == 2 for i in range(num)],
        "note": [f"n{i}" for i in range(num)],
    }


@pytest.mark.parametrize("odd", ["a", "c"])
@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("reward", ["1.0"] * 12),
        ("note", list(range(12))),
        ("observation", [[0.5]] * 12),
        ("terminated", ["no"] * 12),
    ],
)
def test_a_file_of_another_type_than_its_neighbors_is_rejected(
    lake: Lake, tmp_path: Path, odd: str, column: str, values: list[Any]
) -> None:
    (tmp_path / "logs").mkdir()
    for name in "abc":
        columns = _parquet_columns(name)
        pq.write_table(
            pa.table({**columns, column: values} if name == odd else columns),
            tmp_path / "logs" / f"{name}.parquet",
        )
    receipt = ingest(lake, [tmp_path / "logs"], "log")
    assert (receipt.steps.committed, receipt.steps.rejected) == (24, 12)
    rows = _quarantine(lake)
    assert {row["file"] for row in rows} == {f"{odd}.parquet"}
    assert rows[0]["reasons"][0].startswith(f"{odd}.parquet row 0, column {column!r}: found ")
    assert [json.loads(row["row"])[column] for row in rows] == values


def test_nulls_of_another_type_are_no_misfits(lake: Lake, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for name, num in (("a", 30), ("b", 12)):
        columns = _parquet_columns(name, num)
        if name == "a":
            columns["note"] = pa.nulls(num, pa.float64())
        pq.write_table(pa.table(columns), tmp_path / "logs" / f"{name}.parquet")
    receipt = ingest(lake, [tmp_path / "logs"], "log")
    assert receipt.steps.rejected == 0
    assert lake.dataset("log").spec.extras["note"] == pa.string()


@pytest.mark.parametrize(
    ("column", "make"),
    [
        ("action", lambda numbers: pa.array(numbers)),
        ("reward", lambda numbers: pa.array(numbers)),
        ("observation", lambda numbers: pa.array([[n] for n in numbers], pa.list_(pa.uint64()))),
        ("further", lambda numbers: pa.array(numbers)),
        ("step", lambda numbers: pa.array(np.where(numbers == 2**63 + 5, numbers, numbers % 3))),
    ],
)
def test_an_unsigned_number_beyond_int64_rejects_its_episode(
    lake: Lake, tmp_path: Path, column: str, make: Callable[[Any], pa.Array]
) -> None:
    numbers = np.arange(12, dtype=np.uint64)
    numbers[7] = 2**63 + 5
    table = pa.table({**_parquet_columns("e"), column: make(numbers)})
    pq.write_table(table, tmp_path / "log.parquet")
    receipt = ingest(lake, [tmp_path / "log.parquet"], "log")
    assert (receipt.steps.committed, receipt.steps.rejected) == (9, 3)
    # Its number, which is not known, is compared with no other.
    assert [check.name for check in receipt.checks if check.outcome == "rejected"] == ["dtype"]
    assert f"row 7, column {column!r}: found" in _quarantine(lake)[0]["reasons"][0]
    kept = lake.sql("select episode_id from log.steps").column(0)
    assert len(kept) == 9


def test_integers_that_a_column_of_floats_does_not_hold_are_misfits(
    lake: Lake, tmp_path: Path
) -> None:
    (tmp_path / "logs").mkdir()
    columns = _parquet_columns("a")
    numbers = [*range(11), 2**53 + 1]
    pq.write_table(pa.table({**columns, "n": numbers}), tmp_path / "logs" / "a.parquet")
    columns = _parquet_columns("b")
    pq.write_table(pa.table({**columns, "n": [0.5] * 12}), tmp_path / "logs" / "b.parquet")
    receipt = ingest(lake, [tmp_path / "logs"], "log")
    assert (receipt.steps.committed, receipt.steps.rejected) == (21, 3)
    assert f"row 11, column 'n': found {2**53 + 1}" in _quarantine(lake)[0]["reasons"][0]


def test_a_fill_is_not_put_where_a_misfit_is(lake: Lake, tmp_path: Path) -> None:
    rows = _changed("reward", "NaN", [5])
    rows[20]["reward"] = None
    log = _jsonl(tmp_path / "log.jsonl", rows)
    receipt = ingest(lake, [log], "log", options=ReadOptions(fill={"reward": "0.5"}))
    assert receipt.episodes.rejected == 1
    assert "column 'reward': 1 empty cells are 0.5" in receipt.notes


def test_a_batch_of_another_type_names_its_line(lake: Lake, tmp_path: Path) -> None:
    batches = [
        {
            "type": "SampleBatch",
            "eps_id": [i] * 2,
            "obs": [[0.5], [1.5]],
            "actions": [0, 1],
            "rewards": [1.0, 1.0],
            "dones": [False, True],
        }
        for i in range(5)
    ]
    batches[3]["rewards"] = [1.0, "NaN"]
    log = _jsonl(tmp_path / "log.json", batches)
    with pytest.raises(SourceInvalidError, match=r"log\.json line 4, column 'rewards'.*'NaN'"):
        ingest(lake, [log], "log", format="rllib")


@pytest.mark.parametrize("form", ["jsonl", "csv"])
@pytest.mark.parametrize(
    "place",
    [pytest.param(3, marks=pytest.mark.chaos), pytest.param(300_000, marks=pytest.mark.slow)],
)
def test_a_bad_row_far_in_a_large_file_is_one_bad_row(
    lake: Lake, tmp_path: Path, form: str, place: int
) -> None:
    num = 320_000
    log = tmp_path / f"log.{form}"
    with log.open("w") as file:
        if form == "csv":
            file.write("context,shown,click,code\n")
        for i in range(num):
            click: Any = "NaN.." if i == place else i % 2
            row = {"context": [i * 0.5, 1.0], "shown": i % 5, "click": click, "code": i}
            if form == "jsonl":
                file.write(json.dumps(row) + "\n")
            else:
                file.write(f'"[{i * 0.5}, 1.0]",{i % 5},{click},{i}\n')
    options = ReadOptions(mapping={"action": "shown", "reward": "click"})
    receipt = ingest(lake, [log], "log", format="bandit", options=options)
    assert (receipt.steps.committed, receipt.steps.rejected) == (num - 1, 1)
    (row,) = _quarantine(lake)
    assert row["file_row"] == place
    line = place + (1 if form == "jsonl" else 2)
    assert row["reasons"][0].startswith(f"log.{form} line {line}, column 'click': found 'NaN..'")
