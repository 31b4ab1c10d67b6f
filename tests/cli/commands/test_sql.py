"""`replaylake sql`: formats, parameters, files, refusals."""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from replaylake.datastore.query.views import DATASET_VIEWS, LAKE_VIEWS

QUERY = "select episode_id, step, observation, reward from d.steps order by reward"


@pytest.fixture(autouse=True)
def filled(run: Any, log: Path) -> None:
    assert run("ingest", log, "--dataset", "d", "--map", "observation=x,y").code == 0


def test_help_names_every_view(run: Any) -> None:
    text = run("sql", "--help").out.partition("Example:")[0]
    words = set(re.findall(r"[\w.]+", text.replace(". ", " ")))
    assert {f"NAME.{view}" for view in DATASET_VIEWS} == {w for w in words if w.startswith("NAME.")}
    assert set(LAKE_VIEWS) <= words


def test_a_table_for_people(run: Any) -> None:
    ran = run("sql", "select step, observation, reward from d.steps order by reward")
    assert ran.out.splitlines() == [
        "step  observation  reward",
        "   0  [0.5, 1]          1",
        "   1  [1.5, 2]          2",
        "   0  [2.5, 3]         10",
    ]
    assert ran.err == "3 rows\n"


def test_json_is_the_same_by_option_and_by_format(run: Any) -> None:
    ran = run("sql", QUERY, "--json")
    assert ran.json["columns"] == ["episode_id", "step", "observation", "reward"]
    assert ran.json["rows"][2]["observation"] == [2.5, 3.0]
    assert ran.err == ""
    assert run("sql", QUERY, "--format", "json").out == ran.out
    assert run("sql", QUERY, "--format", "json", "--json").out == ran.out


def test_jsonl_and_csv(run: Any) -> None:
    lines = run("sql", QUERY, "--format", "jsonl").out.splitlines()
    assert [json.loads(line)["reward"] for line in lines] == [1.0, 2.0, 10.0]
    rows = list(csv.DictReader(io.StringIO(run("sql", QUERY, "--format", "csv").out)))
    assert [row["observation"] for row in rows] == ["[0.5, 1.0]", "[1.5, 2.0]", "[2.5, 3.0]"]


def test_parquet_through_a_pipe(run: Any) -> None:
    out = run("sql", QUERY, "--format", "parquet").out
    table = pq.read_table(io.BytesIO(out.encode(errors="surrogateescape")))
    assert table.column("reward").to_pylist() == [1.0, 2.0, 10.0]


@pytest.mark.parametrize("suffix", ["csv", "json", "jsonl", "parquet"])
def test_a_file_takes_its_format_from_its_name(run: Any, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows.{suffix}"
    ran = run("sql", QUERY, "--output", path)
    assert (ran.code, ran.out) == (0, f"wrote 3 rows to {path}\n")
    receipt = run("sql", QUERY, "--output", path, "--json").json
    assert (receipt["format"], receipt["num_rows"]) == (suffix, 3)
    assert path.stat().st_size > 0
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_table_is_not_for_files(run: Any, tmp_path: Path) -> None:
    assert run("sql", QUERY, "--output", tmp_path / "rows.txt").code == 2
    assert not (tmp_path / "rows.txt").exists()


def test_an_output_that_cannot_be_written(run: Any, tmp_path: Path) -> None:
    run("sql", QUERY, "--output", tmp_path / "none" / "rows.csv").failed("rows.csv")


def test_parameters_have_types(run: Any) -> None:
    ran = run(
        "sql", "select $a + 1 as a, $b as b, $c as c", "--json",
        "--param", "a=2", "--param", "b=word", "--param", "c='2'",
    )  # fmt: skip
    assert ran.json["rows"] == [{"a": 3, "b": "word", "c": "2"}]


def test_a_query_in_a_file(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "query.sql"
    file.write_text("select count(*) as n\nfrom d.steps -- all of them\n")
    assert run("sql", "--file", file, "--json").json["rows"] == [{"n": 3}]
    run("sql", "--file", tmp_path / "none.sql").failed("none.sql")


def test_the_lake_is_there_to_be_queried(run: Any) -> None:
    rows = run("sql", "select dataset, num_steps from commits", "--json").json["rows"]
    assert {"dataset": "d", "num_steps": 3} in rows
    assert run("sql", "select * from policies", "--json").json["rows"] == []


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("selekt 1", "selekt"),
        ("select * from absent.steps", "absent"),
        ("select nothing from d.steps", "nothing"),
        ("drop table d.steps", "one SELECT"),
        ("select 1; select 2", "one SELECT"),
        ("select $n", "n"),
        ("select * from d@1.steps", "--at NAME=VERSION"),
    ],
)
def test_queries_refused(run: Any, query: str, said: str) -> None:
    run("sql", query).failed(said)
    ran = run("sql", query, "--json")
    assert said in ran.json["error"]["message"]


def test_an_empty_result(run: Any) -> None:
    ran = run("sql", "select step from d.steps where step > 9")
    assert (ran.out, ran.err) == ("step\n", "0 rows\n")
    assert run("sql", "select step from d.steps where step > 9", "--json").json["rows"] == []


def test_a_version(run: Any, log: Path) -> None:
    assert run("sql", "select count(*) as n from d.steps", "--at", "d=0", "--json").json[
        "rows"
    ] == [{"n": 0}]
    query = "select (select count(*) from d.steps) - (select count(*) from was.steps) as n"
    assert run("sql", query, "--at", "was=d@0", "--json").json["rows"] == [{"n": 3}]
    refused = run("sql", query, "--at", "was=d@9")
    assert refused.code == 1
    assert "found no version 9" in refused.err
    wrong = run("sql", query, "--at", "was@9")
    assert wrong.code == 2
    assert "found 'was@9', expected DATASET=VERSION" in wrong.err


def test_an_error_in_a_query_shows_where(run: Any) -> None:
    ran = run("sql", "select\n  reward,\n  nothing\nfrom d.steps", "--json")
    assert ran.err.splitlines()[1:] == ["LINE 3:   nothing", "          ^^^^^^^"]
    assert ran.json["error"]["excerpt"] == "LINE 3:   nothing\n          ^^^^^^^"
    # What only an execution finds has no place.
    assert len(run("sql", "select 'x'::int from d.steps").err.splitlines()) == 1


def test_no_hint_names_our_catalog(run: Any) -> None:
    ran = run("sql", "select elsewhere.steps.step from d.steps")
    assert ran.code == 1
    assert "session" not in ran.err


def test_a_limit_prints_so_many_rows_and_says_of_how_many(run: Any) -> None:
    total = run("sql", "select count(*) as n from d.steps", "--json").json["rows"][0]["n"]
    ran = run("sql", "select step from d.steps", "--limit", "1")
    assert len(ran.out.splitlines()) == 2
    assert ran.err == f"1 of {total} rows\n"
    ran = run("sql", "select step from d.steps", "--limit", "1", "--format", "csv")
    assert len(ran.out.splitlines()) == 2
    assert ran.err == f"1 of {total} rows\n"
    assert run("sql", "select step from d.steps", "--limit", "99").err == f"{total} rows\n"
