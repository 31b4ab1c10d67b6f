"""`replaylake list` and `replaylake show`."""

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def filled(run: Any, log: Path) -> None:
    assert run("ingest", log, "--dataset", "d", "--map", "observation=x,y").code == 0


def test_list(run: Any) -> None:
    header, line = run("list").out.splitlines()
    assert header.split() == ["dataset", "version", "num_steps", "num_shards", "num_bytes"]
    assert line.split()[:4] == ["d", "1", "3", "1"]
    (row,) = run("list", "--json").json["datasets"]
    assert (row["dataset"], row["version"], row["num_steps"]) == ("d", 1, 3)


def test_show(run: Any) -> None:
    out = run("show", "d").out
    assert out.startswith("d@1\n  2 episodes, 3 steps, 1 shard, ")
    assert "mean 6.5, from 3 to 10; mean length 1.5" in out
    assert "1 terminated, 1 truncated, 0 open" in out
    assert "Discrete(2)" in out
    assert "    observation        double[2]\n" in out
    assert "<" not in out
    assert run("show", "d", "--json").json["mean_return"] == 6.5


def test_show_ranges(run: Any) -> None:
    lines = run("show", "d").out.split("  ranges\n")[1].splitlines()
    assert lines[0].split() == ["column", "min", "max", "missing"]
    cells = {line.split()[0]: line.split()[1:] for line in lines}
    assert cells["step"] == ["0", "1", "0%"]
    assert cells["policy"] == ["100%"]
    assert len({line.index(" 0%") for line in lines if line.endswith(" 0%")}) == 1
    body = run("show", "d", "--json").json["ranges"]
    assert body["reward"]["missing"] == 0
    assert body["timestamp"] == {"min": None, "max": None, "missing": 1.0}


def test_show_at_a_version(run: Any, tmp_path: Path) -> None:
    more = tmp_path / "more.csv"
    more.write_text(
        "episode_id,step,x,y,action,reward,terminated,truncated\nc,0,0,0,1,5,true,false\n"
    )
    assert run("ingest", more, "--dataset", "d", "--map", "observation=x,y").code == 0
    assert run("show", "d@1", "--json").json["num_steps"] == 3
    assert run("show", "d@2", "--json").json["num_steps"] == 4
    assert run("show", "d", "--json").json["version"] == 2


@pytest.mark.parametrize(
    ("name", "said"), [("absent", "absent"), ("d@99", "99"), ("d@last", "last"), ("D", "'D'")]
)
def test_what_is_not_there(run: Any, name: str, said: str) -> None:
    run("show", name).failed(said)


def test_merge_and_split(run: Any, tmp_path: Path) -> None:
    lines = run("datasets", "split", "d", "--where", "terminated", "--into", "x", "--into", "y").out
    assert lines.splitlines() == ["x@1: 1 episode, 2 steps of d@1", "y@1: 1 episode, 1 step of d@1"]
    merged = run("datasets", "merge", "x", "y", "--into", "z").out.splitlines()
    assert merged[0].startswith("z@1: 2 episodes, 3 steps in 2 shards, ")
    assert merged[1:] == ["  x@1: 2 steps", "  y@1: 1 step"]
    assert "already merged" in run("datasets", "merge", "x", "y", "--into", "z").out
    for wrong in (("--into", "p"), ("--into", "p=x", "--into", "q=0.5"), ("--into", "p=0.5")):
        assert run("datasets", "split", "d", *wrong).code == 2
    beside = ("--where", "true", "--into", "p=0.5", "--into", "q")
    assert run("datasets", "split", "d", *beside).code == 2


def test_columns(run: Any, tmp_path: Path) -> None:
    more = tmp_path / "more.csv"
    more.write_text("episode_id,step,x,y,action,reward,terminated,note\nc,0,0,0,1,5,true,hi\n")
    assert run("ingest", more, "--dataset", "d", "--map", "observation=x,y").code == 0
    done = run("datasets", "rename-column", "d", "note", "remark").out.splitlines()
    assert done[0] == "d@3: column note is now remark"
    assert done[1].startswith("  1 shard of 1 row, ")
    would = run("datasets", "drop-column", "d", "remark").out.splitlines()
    assert would[0].startswith("d: would drop column remark, writing 1 shard of 1 row, ")
    assert run("datasets", "drop-column", "d", "remark", "--yes").out.startswith("d@4: column rem")
    run("datasets", "drop-column", "d", "remark").failed("no column 'remark'")


def test_set_reference(run: Any) -> None:
    given = ("--random", "3", "--expert", "13", "--source", "by hand")
    assert run("datasets", "set-reference", "d", *given).out == (
        "d@2: normalized returns: 0 is 3, 100 is 13: by hand\n"
    )
    assert "  normalized   mean 35 (0 is 3, 100 is 13: by hand)\n" in run("show", "d").out
    assert run("show", "d", "--json").json["normalized_return"] == pytest.approx(35)
    assert run("datasets", "set-reference", "d", "--clear").out.endswith("are not normalized\n")
    assert "normalized" not in run("show", "d").out
    for wrong in (
        (),
        given[:4],
        (*given, "--clear"),
        ("--random", "3", *given[2:3], "3", *given[4:]),
    ):
        assert run("datasets", "set-reference", "d", *wrong).code == 2
