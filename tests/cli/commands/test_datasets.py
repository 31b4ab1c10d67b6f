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
