"""`ingest --mapping FILE`, and the flags that win over it."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from replaylake.cli.mapping import KEYS
from replaylake.cli.options import name_options
from replaylake.datastore.interchange.formats.format import ReadOptions

LOG = """\
user,session,hour,age,device,item,paid
u1,1,2026-01-31 12:00:00,31,ios,hat,0
u1,1,2026-01-31 11:00:00,,web,shoes,1
u2,1,2026-01-31 13:00:00,45,ios,hat,2
"""
FILE = """\
format = "csv"
episode_by = ["user", "session"]
order_by = "hour"
timezone = "Europe/Berlin"
open_ends = "truncated"
max_categories = 50

[map]
observation = ["age", "device"]
action = "item"
reward = "paid"

[fill]
age = 40
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "clicks.csv"
    path.write_text(LOG)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "clicks.toml"
    path.write_text(FILE)
    return path


SQL = "select observation, reward, truncated from d.steps order by episode_id, step"


def test_a_file_keeps_how_a_log_is_read(run: Any, source: Path, file: Path) -> None:
    receipt = run("ingest", source, "--dataset", "d", "--mapping", file, "--json").json
    assert receipt["episodes"]["committed"] == 2
    assert receipt["steps"]["committed"] == 3
    rows = run("sql", SQL, "--json").json["rows"]
    # age, then device: other, ios, web. The first hour comes first, the fill in it.
    assert rows == [
        {"observation": [40, 0, 0, 1], "reward": 1, "truncated": False},
        {"observation": [31, 0, 1, 0], "reward": 0, "truncated": True},
        {"observation": [45, 0, 1, 0], "reward": 2, "truncated": True},
    ]
    assert any("'age': 1 empty cells are 40" in note for note in receipt["notes"])


def test_flags_win_over_the_file(run: Any, source: Path, file: Path) -> None:
    flags = ("--fill", "age=7", "--map", "observation=age", "--open-ends", "open")
    ran = run("ingest", source, "--dataset", "d", "--mapping", file, *flags)
    assert ran.code == 0, ran.err
    rows = run("sql", SQL, "--json").json["rows"]
    assert [row["observation"] for row in rows] == [7, 31, 45]
    assert not any(row["truncated"] for row in rows)


def test_flags_alone_do_the_same(run: Any, source: Path, file: Path) -> None:
    flags = ("--map", "observation=age,device", "--map", "action=item", "--map", "reward=paid",
             "--fill", "age=40", "--episode-by", "user,session", "--order-by", "hour",
             "--timezone", "Europe/Berlin", "--open-ends", "truncated",
             "--max-categories", "50")  # fmt: skip
    assert run("ingest", source, "--dataset", "d", "--mapping", file).code == 0
    rows = run("sql", SQL, "--json").json["rows"]
    assert run("ingest", source, "--dataset", "e", *flags).code == 0
    assert run("sql", SQL.replace("d.steps", "e.steps"), "--json").json["rows"] == rows


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("observation = 'age'", ["'observation'", "[map]"]),
        ("map = 'age'", ["map", "a table [map]"]),
        ("[map]\nobservation = 3.5e1\naction = {a = 1}", ["map.action", "one value"]),
        ("gaps = 'mend'", ["gaps", "'mend'", "reject, split"]),
        ("time_limit = 0", ["time_limit", "1 or more"]),
        ("time_limit = '9'", ["time_limit", "a number"]),
        ("action_scale = true", ["action_scale", "a number"]),
        ("no_reward = 1", ["no_reward", "true or false"]),
        ("episode_by = [1]", ["episode_by", "a list of columns"]),
        ("episode_by", ["not TOML"]),
        ("[fill]\nage = [1]", ["fill.age", "one value"]),
    ],
)
def test_a_file_that_makes_no_sense(
    run: Any, source: Path, tmp_path: Path, text: str, said: list[str]
) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    run("ingest", source, "--dataset", "d", "--mapping", path).failed("wrong.toml", *said)


def test_a_file_that_is_not_there(run: Any, source: Path) -> None:
    run("ingest", source, "--dataset", "d", "--mapping", "none.toml").failed("none.toml")


def test_each_option_of_reading_has_a_key_and_a_flag() -> None:
    names = {"mapping": "map", "reward_unknown": "no_reward", "action_range": "action_low"}
    of_the_library = {"encoding", "head_rows", "on_rows"}
    parameters = [f.name for f in fields(ReadOptions) if f.name not in of_the_library]
    assert [name for name in parameters if names.get(name, name) not in KEYS] == []
    # Messages name parameters; a flag that is missing from `_SAME_NAMES` would show as a parameter.
    assert [name for name in parameters if not name_options(f"`{name}`").startswith("--")] == []
    page = (Path(__file__).parents[2] / "docs" / "FORMATS.md").read_text()
    assert [key for key in KEYS if f"`{key}`" not in page] == []


def test_half_a_range_is_wrong_usage(run: Any, source: Path) -> None:
    ran = run("ingest", source, "--dataset", "d", "--action-low", "1")
    assert ran.code == 2
    assert "--action-high" in ran.err


def test_dialects_of_csv(run: Any, tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("session\tx\taction\treward\na\t0,5\tup\t1,5\na\t1,5\tdown\t2\n")
    arguments = (
        "ingest",
        log,
        "--dataset",
        "d",
        "--map",
        "observation=x",
        "--episode-by",
        "session",
    )
    run(*arguments).failed("State --decimal ',' to read them as numbers")
    file = tmp_path / "log.toml"
    file.write_text('delimiter = "tab"\n')
    assert run(*arguments, "--decimal", ",", "--mapping", file).code == 0
    rows = run("sql", "select observation, reward from d.steps order by step", "--json").json[
        "rows"
    ]
    assert rows == [{"observation": [0.5], "reward": 1.5}, {"observation": [1.5], "reward": 2}]
    refused = run(*arguments, "--decimal", "x")
    assert refused.code == 2
    assert "Invalid value for --decimal" in refused.err
