"""Query results as CSV, JSON, JSON lines and Parquet."""

import csv
import io
import json
import math
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from replaylake.datastore.errors import ConfigInvalidError, QueryError, StorageError
from replaylake.datastore.query.results import RESULT_FORMATS, write_result

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
TABLE = pa.table(
    {
        "n": pa.array([1, None], pa.int64()),
        "x": pa.array([0.5, math.nan], pa.float64()),
        "flag": pa.array([True, False]),
        "text": pa.array(['a "b", c\nd', "é"]),
        "kind": pa.array(["u", "v"]).dictionary_encode(),
        "vector": pa.array([[1.0, 2.0], None], pa.list_(pa.float32(), 2)),
        "struct": pa.array([{"a": 1, "b": [True]}, None]),
        "raw": pa.array([b"\x00\x01", b""]),
        "time": pa.array([NOON, None], pa.timestamp("us", tz="UTC")),
        "day": pa.array([date(2026, 1, 31), None]),
        "wait": pa.array([timedelta(seconds=1.5), None]),
        "big": pa.array([Decimal(2**70), Decimal("0")], pa.decimal128(38, 0)),
        "money": pa.array([Decimal("1.25"), None], pa.decimal128(10, 2)),
    }
)
FIRST = {
    "n": 1,
    "x": 0.5,
    "flag": True,
    "text": 'a "b", c\nd',
    "kind": "u",
    "vector": [1.0, 2.0],
    "struct": {"a": 1, "b": [True]},
    "raw": "AAE=",
    "time": "2026-01-31T12:00:00+00:00",
    "day": "2026-01-31",
    "wait": 1.5,
    "big": 2**70,
    "money": 1.25,
}


def written(table: pa.Table, form: str) -> bytes:
    stream = io.BytesIO()
    write_result(table, form, stream)
    return stream.getvalue()


def test_json_is_one_strict_object() -> None:
    body = json.loads(written(TABLE, "json"), parse_constant=pytest.fail)
    assert body["columns"] == TABLE.column_names
    assert body["rows"][0] == FIRST
    assert body["rows"][1]["x"] is None  # JSON has no NaN
    assert body["rows"][1]["text"] == "é"


def test_jsonl_is_a_line_a_row() -> None:
    lines = written(TABLE, "jsonl").decode().splitlines()
    assert len(lines) == 2
    assert json.loads(lines[0]) == FIRST


def test_csv_has_vectors_and_structs_as_json() -> None:
    first, second = csv.DictReader(io.StringIO(written(TABLE, "csv").decode(), newline=""))
    assert first["n"] == "1"
    assert second["n"] == ""
    assert first["text"] == 'a "b", c\nd'
    assert first["kind"] == "u"
    assert json.loads(first["vector"]) == [1.0, 2.0]
    assert json.loads(first["struct"]) == {"a": 1, "b": [True]}
    assert first["raw"] == "AAE="
    assert first["time"].startswith("2026-01-31 12:00:00")
    assert first["big"] == str(2**70)


def test_parquet_round_trips() -> None:
    table = pq.read_table(io.BytesIO(written(TABLE, "parquet")))
    assert table.column("vector").type == TABLE.column("vector").type
    plain = [name for name in TABLE.column_names if name != "x"]  # NaN differs from itself
    assert table.select(plain).to_pylist() == TABLE.select(plain).to_pylist()


@pytest.mark.parametrize("form", RESULT_FORMATS)
def test_an_empty_result_keeps_its_columns(form: str) -> None:
    data = written(TABLE.slice(0, 0), form)
    if form == "json":
        assert json.loads(data) == {"columns": TABLE.column_names, "rows": []}
    if form == "csv":
        assert next(csv.reader([data.decode()])) == TABLE.column_names
    if form == "parquet":
        assert pq.read_schema(io.BytesIO(data)).names == TABLE.column_names


def test_repeated_names_are_numbered() -> None:
    table = pa.Table.from_arrays([pa.array([i]) for i in range(3)], names=["a", "a", "a_1"])
    assert json.loads(written(table, "jsonl")) == {"a": 0, "a_1": 1, "a_1_1": 2}


def test_many_rows_come_in_chunks() -> None:
    table = pa.table({"n": range(10_000)})
    rows = json.loads(written(table, "json"))["rows"]
    assert [row["n"] for row in rows] == list(range(10_000))


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    write_result(TABLE, "csv", path)
    before = path.read_bytes()
    assert before == written(TABLE, "csv")
    with pytest.raises(ConfigInvalidError, match="found 'xml', expected one of csv, json"):
        write_result(TABLE, "xml", path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file"):
        write_result(TABLE, "csv", tmp_path / "none" / "rows.csv")


@pytest.mark.parametrize("form", ["json", "jsonl"])
def test_a_time_that_python_cannot_hold_is_named(form: str) -> None:
    table = pa.table({"t": pa.array([2**62], pa.timestamp("us"))})
    with pytest.raises(QueryError, match=r"column t: .* expected the years 1 to 9999"):
        written(table, form)


@pytest.mark.parametrize(("form", "expected"), [("csv", '"[[[1], 2]]"'), ("json", "[[[1], 2]]")])
def test_a_map_with_lists_as_keys_is_written_as_pairs(form: str, expected: str) -> None:
    kind = pa.map_(pa.list_(pa.int64()), pa.int64())
    out = io.BytesIO()
    write_result(pa.table({"m": pa.array([[([1], 2)]], kind)}), form, out)
    assert expected in out.getvalue().decode()


def test_a_type_that_parquet_lacks_is_named(tmp_path: Path) -> None:
    column = pa.array([(1, 2, 3)], pa.month_day_nano_interval())
    with pytest.raises(QueryError, match="whose type Parquet does not have"):
        write_result(pa.table({"i": column}), "parquet", tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()
