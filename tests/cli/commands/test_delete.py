"""`replaylake datasets delete`: what it prints, and its exit codes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replaylake.datastore.lake.lake import open_lake


@pytest.fixture(autouse=True)
def filled(run: Any, log: Path) -> None:
    assert run("ingest", log, "--dataset", "d", "--map", "observation=x,y").code == 0


def test_without_yes_nothing_changes(run: Any, tree: Callable[[], dict[str, bytes]]) -> None:
    before = tree()
    for more in ((), ("--purge",)):
        done = run("datasets", "delete", "d", "--where", "terminated", *more)
        assert done.code == 0
        assert "would" in done.out.splitlines()[0]
        assert done.out.splitlines()[-1].strip() == "nothing was changed; use --yes to delete"
    assert tree() == before


def test_delete(run: Any) -> None:
    done = run("datasets", "delete", "d", "--where", "terminated", "--yes")
    assert done.out.splitlines()[0] == (
        "d@2: deleted 1 episode, 2 steps, 0 decisions, 0 rewards; 1 step left"
    )
    assert run("datasets", "delete", "d", "--where", "terminated").out == "d: nothing to delete\n"
    body = run("datasets", "delete", "d", "--where", "terminated", "--yes", "--json").json
    assert (body["version"], body["num_episodes"]) == (None, 0)
    assert run("show", "d", "--json").json["num_episodes"] == 1


def test_purge(run: Any) -> None:
    assert run("datasets", "tag", "d", "golden").code == 0
    lines = run(
        "datasets", "delete", "d", "--where", "terminated", "--purge", "--yes"
    ).out.splitlines()
    assert lines[0].startswith("d@2: purged 1 episode, 2 steps of the newest version, 0 decisions")
    assert lines[1].strip() == "version 1 can no longer be read"
    assert lines[2].strip() == "tags broken: golden"
    assert lines[-1].endswith("scanned: nothing is left")
    run("show", "d@golden").failed("purged")
    (tag,) = run("datasets", "tag", "--list", "d", "--json").json["tags"]
    assert (tag["tag"], tag["reproducible"]) == ("golden", False)
    body = run(
        "datasets", "delete", "d", "--where", "terminated", "--purge", "--yes", "--json"
    ).json
    assert (body["num_episodes"], body["is_proven"]) == (0, True)


def test_a_purge_that_is_not_proven_is_a_no(run: Any, lake: Path) -> None:
    table = open_lake(lake).dataset("d").table
    table.write(table.snapshot().read())  # and not committed yet
    done = run("datasets", "delete", "d", "--where", "terminated", "--purge", "--yes")
    assert done.code == 3
    assert done.out.splitlines()[-1].endswith("scanned: some of it is left")
    assert any("left: d/shards/" in line for line in done.out.splitlines())


@pytest.mark.slow
def test_what_a_condition_cannot_decide_is_a_no(run: Any, tmp_path: Path) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text("episode_id,step,x,y,action,reward,terminated\nz,0,1,2,0,nan,1\n")
    assert run("ingest", bad, "--dataset", "d", "--map", "observation=x,y").code == 0
    where = ("--where", "terminated")
    told = "1 episode in quarantine undecided"
    assert told in run("datasets", "delete", "d", *where).out
    done = run("datasets", "delete", "d", *where, "--purge", "--yes")
    assert done.code == 3
    assert told in done.out
    assert "nothing is left" not in done.out
    assert done.out.splitlines()[-1].endswith("scanned: nothing of the selection is left")
    again = run("datasets", "delete", "d", *where, "--purge", "--yes")
    assert again.code == 3
    assert again.out.splitlines()[0] == "d: nothing to purge"
    assert told in again.out
    body = run("datasets", "delete", "d", *where, "--purge", "--yes", "--json").json
    assert (body["num_undecided"], body["is_proven"]) == (1, False)
    assert (
        run(
            "datasets", "delete", "d", "--where", "source_episode_id = 'z'", "--purge", "--yes"
        ).code
        == 0
    )


def test_what_is_refused(run: Any) -> None:
    assert run("datasets", "delete", "d", "--yes").code == 2
    run("datasets", "delete", "d", "--where", "random() < 1", "--yes").failed("random")
    run("datasets", "delete", "nope", "--where", "true").failed("nope")


def test_ids_of_a_file(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "gone.txt"
    names = [row["e"] for row in run(
        "sql", "select distinct episode_id as e from d.episodes order by e", "--json"
    ).json["rows"]]  # fmt: skip
    file.write_text(f"{names[0]}\nnobody\n\n")
    done = run("datasets", "delete", "d", "--ids", file)
    assert "1 of 2 ids" in done.err
    assert "nobody" in done.err
    assert "would delete 1 episode" in done.out
    assert f"episodes {names[0]}" in done.out.splitlines()[1]
    assert "(about " in done.out.splitlines()[0]
    run("datasets", "delete", "d", "--ids", f"{file}:who").failed("no column 'who'")
    assert run("datasets", "delete", "d").code == 2
    assert run("datasets", "delete", "d", "--ids", tmp_path / "none.txt").code == 2
