"""Preview: the first rows of a source as they would be stored, without reading the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.interchange.ingest.preview import preview
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.storage.locations import open_storage

_MAPPING = {"episode_id": "user", "observation": "age,hour", "action": "item", "reward": "click"}


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Good rows, in small blocks, and at the end a line that no reader gets past."""
    monkeypatch.setattr("replaylake.datastore.interchange.formats.generic.jsonl._BLOCK_BYTES", 4096)
    with (tmp_path / "log.jsonl").open("w") as stream:
        for i in range(1000):
            row = {"user": f"u{i}", "age": 20 + i % 50, "hour": 9.5, "item": i % 3, "click": -i}
            row |= {"note": None if i % 4 else "x", "last": True}
            stream.write(json.dumps(row | ({"age": -1.5, "click": None} if i == 7 else {})) + "\n")
        stream.write("{torn")
    return tmp_path / "log.jsonl"


def _lake(tmp_path: Path) -> Lake:
    return Lake(open_storage(str(tmp_path / "lake")))


def test_the_first_rows_are_shown_and_the_rest_is_not_read(log: Path, tmp_path: Path) -> None:
    options = ReadOptions(mapping={**_MAPPING, "terminated": "last"})
    seen = preview(_lake(tmp_path), [log], "log", options=options, num_rows=100)
    assert (seen.format, seen.num_rows, seen.num_episodes, seen.is_whole) == (
        "jsonl",
        100,
        99,
        False,
    )
    columns = {one.column: one for one in seen.columns}
    assert (columns["age"].least, columns["age"].greatest) == (-1.5, 69)
    assert columns["click"].missing == pytest.approx(0.01)
    assert columns["note"].missing == pytest.approx(0.75)
    assert columns["hour"].stored_as == ("observation",)
    assert columns["note"].stored_as == ("note",)
    assert len(seen.rows) == 5
    assert (seen.rows[1]["observation"], seen.rows[1]["reward"]) == ([21.0, 9.5], -1.0)
    (refused,) = [check for check in seen.checks if check.outcome == "rejected"]
    assert (refused.name, refused.num_rows) == ("missing", 1)
    assert "(line 8)" in refused.example
    assert not (tmp_path / "lake").exists()
    assert json.loads(json.dumps(seen.to_json()))["mapping"]["action"] == "item"
    with pytest.raises(SourceInvalidError, match="torn"):
        ingest(_lake(tmp_path), [log], "log", options=options)


def test_times_in_an_unknown_zone_are_shown_in_utc(tmp_path: Path) -> None:
    times = pa.array([0, 1_000_000], pa.timestamp("us", "UTD"))
    columns = {"observation": [0.5, 1.5], "action": [0, 1], "reward": [1.0, 1.0]}
    table = pa.table({"episode_id": ["a", "a"], **columns, "sent": times})
    pq.write_table(table, tmp_path / "log.parquet", store_schema=True)
    seen = preview(_lake(tmp_path), [tmp_path / "log.parquet"], "log")
    (sent,) = [one for one in seen.columns if one.column == "sent"]
    assert (sent.least, sent.greatest) == (
        "1970-01-01 00:00:00.000000Z",
        "1970-01-01 00:00:01.000000Z",
    )


def test_a_wrong_mapping_is_found_at_once(log: Path, tmp_path: Path) -> None:
    for mapping, said in (
        ({**_MAPPING, "reward": "clik"}, "Did you mean 'click'"),
        ({"episode_id": "user"}, "one that is the observation"),
    ):
        with pytest.raises(SourceInvalidError, match=said):
            preview(
                _lake(tmp_path),
                [log],
                "log",
                options=ReadOptions(mapping=mapping),
                num_rows=100,
            )


def test_a_dataset_that_is_there_says_what_fits(tmp_path: Path) -> None:
    lake = _lake(tmp_path)
    for name, action in (("a.csv", 1), ("b.csv", 5)):
        text = f"episode_id,step,obs,action,reward\na,0,1,{action},1.5\n"
        (tmp_path / name).write_text(text)
    ingest(lake, [tmp_path / "a.csv"], "log")
    before = lake.dataset("log").snapshot().version
    seen = preview(lake, [tmp_path / "b.csv"], "log")
    assert (seen.num_episodes, seen.is_whole, seen.rows) == (0, True, ())
    assert [check.name for check in seen.checks if check.outcome == "rejected"] == ["space"]
    assert lake.dataset("log").snapshot().version == before
