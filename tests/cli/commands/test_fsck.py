"""`replaylake fsck` and `replaylake datasets copy`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def filled(run: Any, log: Path) -> None:
    assert run("ingest", log, "--dataset", "d", "--map", "observation=x,y").code == 0


def shard(lake: Path) -> Path:
    (path,) = (lake / "d" / "shards").iterdir()
    return path


def test_a_clean_lake(run: Any) -> None:
    ran = run("fsck")
    assert ran.code == 0
    first, last = ran.out.splitlines()
    assert first.startswith("d@1: 1 shard, ")
    assert last == "clean: no error, no notes"
    body = run("fsck", "d", "--json").json
    assert (body["clean"], body["num_errors"], body["findings"]) == (True, 0, [])


def test_what_is_wrong_is_the_answer_no(run: Any, lake: Path) -> None:
    path = shard(lake)
    path.write_bytes(path.read_bytes()[:-1])
    ran = run("fsck", "d")
    assert ran.code == 3
    assert f"error: sha256: d/shards/{path.name} (version 1): found sha256 " in ran.out
    assert ran.out.splitlines()[-1] == "1 error, 0 notes"
    assert run("fsck", "--all-versions", "--json").json["counts"] == {"sha256": 1}
    repaired = run("fsck", "--repair")
    assert repaired.code == 3, "it was wrong"
    assert f"repaired: quarantined: d/shards/{path.name} -> d/_quarantine/" in repaired.out
    assert "3 steps left out, of 2 episodes" in repaired.out
    assert run("fsck").code == 0
    rows = run("sql", "select count(*) as n from d.steps", "--json").json["rows"]
    assert rows == [{"n": 0}]


def test_what_fsck_does_not_take(run: Any) -> None:
    run("fsck", "e").failed("dataset 'e': not in this lake")
    assert run("fsck", "--orphan-hours", "0.5").code == 2


def test_copy(run: Any, lake: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    ran = run("datasets", "copy", "d", there)
    assert ran.code == 0
    assert ran.out.startswith(f"d@1 -> {there}: d@1: 2 episodes, 3 steps in 1 shard, ")
    again = run("datasets", "copy", "d", there, "--json").json
    assert (again["version"], again["num_steps"]) == (None, 0)
    assert "nothing to add" in run("datasets", "copy", "d@1", there).out
    other = run("datasets", "copy", "d", there, "--as", "e", "--json").json
    assert (other["dataset"], other["num_steps"], other["num_episodes"]) == ("e", 3, 2)
    assert run("fsck", "--lake", there).code == 0
    path = shard(lake)
    path.write_bytes(b"")
    run("datasets", "copy", "d", tmp_path / "third").failed("another sha256 than the log has")


def test_what_copy_does_not_take(run: Any, lake: Path, tmp_path: Path) -> None:
    run("datasets", "copy", "e", tmp_path / "there").failed("dataset 'e': not in this lake")
    assert not (tmp_path / "there").exists()
    run("datasets", "copy", "d", lake).failed("the source itself")
