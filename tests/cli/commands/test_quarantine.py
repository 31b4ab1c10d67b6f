"""`replaylake quarantine` and `ingest --from-quarantine`: listed, shown, repaired, cleared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

_FIX = "SELECT * REPLACE (0 AS click) FROM quarantine WHERE \"user\" = 'u3'"


@pytest.fixture
def clicks(run: Any, tmp_path: Path) -> Path:
    log = tmp_path / "clicks.jsonl"
    with log.open("w") as stream:
        for i in range(30):
            row = {"user": f"u{i}", "age": i, "shown": i % 2, "click": "NaN" if i < 6 else 1}
            stream.write(json.dumps(row) + "\n")
    arguments = ("--map", "observation=age", "--map", "action=shown", "--map", "reward=click")
    by = ("--map", "episode_id=user", "--open-ends", "truncated")
    assert run("ingest", str(log), "--dataset", "clicks", *arguments, *by).code == 0
    return log


def test_quarantine_is_listed_shown_repaired_and_cleared(run: Any, clicks: Path) -> None:
    lines = run("quarantine", "list", "clicks").out.splitlines()
    assert lines[0] == "clicks: 6 episodes, 6 rows in quarantine"
    assert lines[1].split() == ["reason", "episodes", "rows", "source", "first_row"]
    assert lines[2].split() == ["dtype", "6", "6", "clicks.jsonl", "0"]
    assert "clicks.jsonl line 1, column 'click': found 'NaN'" in lines[3]
    shown = run("quarantine", "show", "clicks", "--episode", "u3", "--json").json
    assert shown["rows"][0]["row"] == {"user": "u3", "age": 3, "shown": 1, "click": "NaN"}
    assert "2 of 6 rows shown" in run("quarantine", "show", "clicks", "--limit", "2").out

    failed = run("ingest", "--from-quarantine", "--dataset", "clicks")
    assert failed.code == 0
    assert failed.out.splitlines()[0] == (
        "clicks: 0 episodes, 0 rows repaired; 6 episodes, 6 rows failed; 6 rows left in quarantine"
    )
    done = run("ingest", "--from-quarantine", "--dataset", "clicks", "--fix", _FIX, "--json").json
    assert (done["num_repaired_episodes"], done["num_left_rows"], done["version"]) == (1, 5, 2)
    assert run("quarantine", "list", "clicks", "--json").json["num_episodes"] == 5

    would = run("quarantine", "clear", "clicks", "--reason", "dtype")
    assert would.out.splitlines() == [
        "clicks: would remove 5 episodes, 5 rows from quarantine; 0 rows left",
        "  nothing was changed; use --yes to delete",
    ]
    assert run("quarantine", "clear", "clicks", "--yes", "--json").json["num_rows"] == 5
    assert run("quarantine", "list", "clicks").out == "clicks: 0 episodes, 0 rows in quarantine\n"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("ingest", "--dataset", "clicks"), 2, "SOURCE"),
        (("ingest", "x.csv", "--dataset", "clicks", "--fix", "SELECT 1"), 2, "--fix"),
        (("ingest", "x.csv", "--dataset", "clicks", "--from-quarantine"), 2, "SOURCE"),
        (("ingest", "--dataset", "clicks", "--from-quarantine", "--fix", "SELECT 1"), 2, "--fix"),
        (("quarantine", "clear", "clicks", "--reason", "gap"), 2, "--reason"),
        (("quarantine", "show", "clicks", "--file", "other.csv"), 2, "--file"),
        (("quarantine", "list", "absent"), 1, "absent"),
    ],
)
def test_quarantine_refuses(
    run: Any, clicks: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    done = run(*arguments)
    assert (done.code, said in done.err) == (code, True), done.err
