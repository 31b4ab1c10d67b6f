"""`replaylake datasets tag`, `history` and `diff`, and NAME@TAG wherever a version is taken."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from replaylake.datastore.lake.lake import open_lake

MORE = "episode_id,step,x,y,action,reward,terminated,truncated\nc,0,0,0,1,5,true,false\n"


@pytest.fixture(autouse=True)
def filled(run: Any, log: Path, tmp_path: Path) -> None:
    """Version 1 has two episodes of 3 steps, version 2 a third of 1 step."""
    assert run("ingest", log, "--dataset", "d", "--map", "observation=x,y").code == 0
    more = tmp_path / "more.csv"
    more.write_text(MORE)
    assert run("ingest", more, "--dataset", "d", "--map", "observation=x,y").code == 0


def test_set_list_and_remove(run: Any) -> None:
    assert run("datasets", "tag", "--list").out == ""
    assert run("datasets", "tag", "d@1", "golden").out == "d@golden is d@1\n"
    assert run("datasets", "tag", "d@1", "golden").out == "d@golden is d@1\n"
    run("datasets", "tag", "d", "golden").failed("points at version 1", "--replace")
    moved = run("datasets", "tag", "d", "golden", "--replace", "--json").json
    assert moved == {"dataset": "d", "tag": "golden", "version": 2, "previous_version": 1}
    assert run("datasets", "tag", "d@golden", "same").out == "d@same is d@2\n"
    header, *lines = run("datasets", "tag", "--list", "d").out.splitlines()
    assert header.split() == ["dataset", "tag", "version", "created_at"]
    assert [line.split()[:3] for line in lines] == [["d", "golden", "2"], ["d", "same", "2"]]
    assert [row["tag"] for row in run("datasets", "tag", "--list", "--json").json["tags"]] == [
        "golden",
        "same",
    ]
    assert (
        run("datasets", "tag", "--remove", "d@golden").out
        == "removed the tag d@golden, which was d@2\n"
    )
    run("datasets", "tag", "--remove", "d@golden").failed("golden", "same")
    assert run("show", "d@golden").code == 1
    run("datasets", "tag", "--remove", "d@same")
    run("datasets", "tag", "--remove", "d@same").failed("expected a tag, and the dataset has none")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("d@9", "golden"), "9"),
        (("nowhere", "golden"), "nowhere"),
        (("d", "../x"), "../x"),
        (("d", "Golden"), "Golden"),
        (("d", "12"), "12"),
        (("--list", "nowhere"), "nowhere"),
        (("--remove", "d@none"), "none"),
    ],
)
def test_tags_refused(run: Any, arguments: tuple[str, ...], said: str) -> None:
    run("datasets", "tag", *arguments).failed(said)
    assert run("datasets", "tag", "--list", "--json").json["tags"] == []


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("d",),
        ("--remove",),
        ("--remove", "d"),
        ("--remove", "d@1"),
        ("--remove", "d@golden", "same"),
        ("--list", "d", "golden"),
        ("--list", "--remove", "d@golden"),
        ("--replace", "--list"),
    ],
)
def test_tags_in_another_form_are_wrong_usage(run: Any, arguments: tuple[str, ...]) -> None:
    ran = run("datasets", "tag", *arguments)
    assert (ran.code, ran.out) == (2, "")


def test_a_version_without_its_files_is_not_tagged(run: Any, lake: Path) -> None:
    opened = open_lake(lake)
    for path in opened.snapshot("d@1").table.paths():
        path.unlink()
    run("datasets", "tag", "d@1", "golden").failed("d")
    assert open_lake(lake).tags.list() == []


def test_a_tag_that_could_not_move_stays(run: Any, lake: Path) -> None:
    assert run("datasets", "tag", "d@1", "golden").code == 0
    opened = open_lake(lake)
    old = set(opened.snapshot("d@1").table.paths())
    (new,) = set(opened.snapshot("d@2").table.paths()) - old
    new.unlink()
    run("datasets", "tag", "d@2", "golden", "--replace").failed("d")
    assert open_lake(lake).tags.version("d", "golden") == 1


def test_history(run: Any) -> None:
    assert run("datasets", "tag", "d@1", "golden").code == 0
    header, *lines = run("history", "d").out.splitlines()
    assert header.split()[:3] == ["version", "committed_at", "operation"]
    assert [line.split()[0] for line in lines] == ["2", "1", "0"]
    assert "golden" in lines[1]
    assert "+1 -0" in lines[0]
    ran = run("history", "d", "--limit", "1", "--json")
    (newest,) = ran.json["versions"]
    assert (newest["version"], newest["num_episodes"], newest["num_steps"]) == (2, 1, 1)
    assert (newest["shards_added"], newest["tags"], ran.json["num_older"]) == (1, [], 2)
    assert "2 older not shown" in ran.err
    run("history", "nowhere").failed("nowhere")
    assert run("history", "d", "--limit", "0").code == 2


def test_diff(run: Any) -> None:
    out = run("diff", "d@1", "d").out.splitlines()
    assert out[0] == "d@1 to d@2"
    assert "  episodes  1 added, 0 removed, 0 changed" in out
    assert "  steps     1 added, 0 removed, 0 changed" in out
    assert out[-1].startswith("  added: ")
    assert out[-1].endswith("/c")
    body = run("diff", "d@2", "d@0", "--json", "--limit", "2").json
    assert body["episodes"] == {"added": 0, "removed": 3, "changed": 0}
    assert body["steps"] == {"added": 0, "removed": 4, "changed": 0}
    assert len(body["removed"]) == 2
    assert run("diff", "d@1", "d@1", "--json").json["shards"]["added"] == 0
    run("diff", "d@1", "d@9").failed("9")
    run("diff", "d@1", "nowhere").failed("nowhere")


def test_name_at_tag_wherever_a_version_is_taken(run: Any) -> None:
    assert run("datasets", "tag", "d@1", "golden").code == 0
    assert run("show", "d@golden", "--json").json["num_steps"] == 3
    assert run("diff", "d@golden", "d", "--json").json["from_version"] == 1
    ran = run("sql", "select count(*) as n from d.steps", "--at", "d=golden", "--json")
    assert ran.json["rows"] == [{"n": 3}]
    query = "select (select count(*) from d.steps) - (select count(*) from before.steps) as more"
    ran = run("sql", query, "--at", "before=d@golden", "--untrusted", "--json")
    assert ran.json["rows"] == [{"more": 1}]


@pytest.mark.slow
def test_sql_of_a_reader_of_some_columns(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REPLAYLAKE_SQL_TOKEN", raising=False)
    table, mine, other = tmp_path / "roles.toml", tmp_path / "mine", tmp_path / "other"
    mine.write_text("0123456789abcdef\n")
    other.write_text("fedcba9876543210\n")
    hashes = [hashlib.sha256(path.read_bytes().strip()).hexdigest() for path in (mine, other)]
    table.write_text(
        f'[[tokens]]\nname = "analyst"\nsha256 = "{hashes[0]}"\nreader = ["d"]\n'
        'columns.d = ["step", "reward"]\n'
        f'[[tokens]]\nname = "ranker"\nsha256 = "{hashes[1]}"\nwriter = ["d"]\n'
    )
    limited = ("--untrusted", "--access", table)
    query = ("sql", "select * from d.steps", "--json")
    ran = run(*query, *limited, "--token-file", mine)
    assert (ran.code, ran.json["columns"]) == (0, ["step", "reward"])
    run(*query, *limited, "--token-file", other).failed("'ranker'", "no role reader")
    other.write_text("unknown-unknown-unknown")
    run(*query, *limited, "--token-file", other).failed("not in the role table")
    monkeypatch.setenv("REPLAYLAKE_SQL_TOKEN", "0123456789abcdef")
    assert run(*query, *limited).json["columns"] == ["step", "reward"]
    run("sql", "select action from d.steps", *limited).failed("action")
    # The file named counts, not the variable beside it.
    run(*query, *limited, "--token-file", other).failed("not in the role table")
    monkeypatch.setenv("REPLAYLAKE_SQL_TOKEN", "  ")
    for arguments, said in (
        (limited, "found no token in REPLAYLAKE_SQL_TOKEN"),
        ((*limited, "--token-file", tmp_path / "none"), "No such file"),
        (("--access", table), "requires --untrusted"),
        (("--untrusted", "--token-file", mine), "requires --access"),
        (("--untrusted", "--access", mine), "--access"),
    ):
        ran = run(*query, *arguments)
        assert ran.code == 2
        assert said in ran.err


@pytest.mark.slow
def test_sql_of_others(run: Any, tmp_path: Path) -> None:
    ran = run("sql", "select count(*) as n from d.steps", "--untrusted", "--json")
    assert ran.json == {"columns": ["n"], "truncated": None, "rows": [{"n": 4}]}
    ran = run("sql", "select * from range(20000)", "--untrusted", "--json")
    assert (len(ran.json["rows"]), ran.json["truncated"]) == (10_000, "rows")
    assert "cut short" in ran.err
    path = tmp_path / "rows.csv"
    ran = run("sql", "select * from range(20000)", "--untrusted", "--output", path, "--json")
    assert (ran.json["truncated"], ran.json["num_rows"]) == ("rows", 10_000)
    run("sql", "select * from read_text('/etc/passwd')", "--untrusted").failed("read_text")
    run("sql", "copy (select 1) to 'x.csv'", "--untrusted").failed("COPY")
