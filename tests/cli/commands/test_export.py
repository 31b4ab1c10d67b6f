"""`replaylake export` and `replaylake formats`."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from replaylake.datastore.interchange.export.trainers.targets import TARGETS
from replaylake.datastore.interchange.formats.catalog import FORMATS
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import open_lake

_EXPORT = """
import sys, time
from replaylake.datastore.interchange.export.export import export
from replaylake.datastore.lake.lake import open_lake

def tell(done, total):
    print(done, flush=True)
    time.sleep(3600)

export(open_lake(sys.argv[1]), "d", sys.argv[2], format="csv", on_progress=tell)
"""


@pytest.fixture(autouse=True)
def filled(run: Any, log: Path, lake: Path) -> None:
    """Version 1 has an episode of 2 steps and one of 1."""
    options = ReadOptions(mapping={"observation": "x,y"})
    ingest(open_lake(lake, create=True), [log], "d", options=options)


def test_export_says_what_it_wrote_and_can_be_read_again(
    run: Any, lake: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.parquet"
    ran = run("export", "d@1", "--to", "parquet", out)
    assert ran.out.startswith(f"d@1 -> {out} (parquet): 2 episodes, 3 steps, ")
    ingest(open_lake(lake), [out], "again")
    query = "select observation, action, reward, terminated from {}.steps order by all"
    first = run("sql", query.format("d"), "--json").json["rows"]
    second = run("sql", query.format("again"), "--json").json["rows"]
    assert first == second
    run("export", "d", "--to", "parquet", out).failed("--force")
    body = run("export", "d", "--to", "jsonl", out, "--force", "--json").json
    assert (body["dataset"], body["version"], body["format"]) == ("d", 1, "jsonl")
    assert (body["num_episodes"], body["num_steps"]) == (2, 3)
    assert body["num_bytes"] == out.stat().st_size


def test_a_selection_is_exported(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    command = ("export", "d", "--to", "csv", out, "--force", "--json")
    one = run(*command, "--where", "source_episode_id = 'a'").json
    assert (one["num_episodes"], one["num_steps"]) == (1, 2)
    some = run(*command, "--where-steps", "step <> 1").json
    assert (some["num_episodes"], some["num_pieces"], some["num_steps"]) == (2, 2, 2)
    assert some["where_steps"] == "(step != 1)"
    run(*command, "--where", "num_steps > 9").failed("no step", "widen")
    run(*command, "--where", "random() > 0").failed("random")


def test_what_cannot_be_exported_is_refused(run: Any, tmp_path: Path) -> None:
    assert run("export", "d", "--to", "xls", tmp_path / "o").code == 2
    run("export", "nowhere", "--to", "csv", tmp_path / "o").failed("nowhere")
    run("export", "d@7", "--to", "csv", tmp_path / "o").failed("7")


def test_a_killed_export_leaves_no_output(run: Any, lake: Path, tmp_path: Path) -> None:
    out = tmp_path / "there" / "out.csv"
    out.parent.mkdir()
    command = [sys.executable, "-c", _EXPORT, str(lake), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "3\n"
        process.kill()
    assert [p.name for p in out.parent.iterdir() if not p.name.startswith(".")] == []
    assert run("export", "d", "--to", "csv", out).code == 0


def test_formats_lists_every_format(run: Any) -> None:
    rows = run("formats", "--json").json["formats"]
    assert [row["name"] for row in rows] == [
        *sorted(known.name for known in FORMATS),
        *sorted(TARGETS),
    ]
    assert {row["name"] for row in rows if not row["reads"]} == {*TARGETS}
    for row in rows:
        assert set(row) == {"name", "reads", "writes", "about"}
        assert row["about"]
    written = {row["name"] for row in rows if row["writes"]}
    assert written >= {"arrow", "csv", "jsonl", "parquet"}
    header, *lines = run("formats").out.splitlines()
    assert header.split() == ["name", "reads", "writes", "about"]
    assert len(lines) == len(rows)


def test_export_for_a_trainer(run: Any, lake: Path, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text(
        '{"prompt": "1 + 1?", "completion": "2", "reward": 1, "truth": "two"}\n'
        '{"prompt": "1 + 1?", "completion": "3", "reward": 0, "truth": "two"}\n'
    )
    run("ingest", chats, "--dataset", "chats")
    out = tmp_path / "pairs.jsonl"
    ran = run("export", "chats", "--to", "roll-dpo", out, "--where-pairs", "margin >= 1")
    assert f"{out} (roll-dpo): 1 row from 2 episodes, 2 steps, " in ran.out
    assert out.read_text() == '{"instruction":"1 + 1?","chosen":"2","rejected":"3"}\n'
    again = run(
        "export", "chats", "--to", "trl-kto", tmp_path / "kto", "--threshold", "2", "--json"
    )
    assert again.json["num_rows"] == 2
    named = run(
        "export", "chats", "--to", "trl-grpo", tmp_path / "rl", "--label", "truth", "--json"
    )
    assert '"ground_truth":"two"' in (tmp_path / "rl").read_text()
    assert named.json["notes"] == []
    wrong = run("export", "chats", "--to", "csv", tmp_path / "csv", "--label", "truth")
    assert wrong.code == 2
    assert "--label" in wrong.err
    empty = run("export", "chats", "--to", "slime", tmp_path / "slime")
    assert empty.code == 1
    assert "2 dialogues are left out, because their tokens are unknown" in empty.err
