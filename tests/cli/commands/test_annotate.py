"""`replaylake annotate`: what it prints, and its exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def filled(run: Any, log: Path) -> None:
    assert run("ingest", log, "--dataset", "d", "--map", "observation=x,y").code == 0


@pytest.fixture
def scores(tmp_path: Path) -> Path:
    path = tmp_path / "scores.csv"
    path.write_text("episode,score\na,0.5\nz,1.0\n")
    return path


def rewards(run: Any) -> list[float]:
    rows = run("sql", "select reward from d.steps order by source_episode_id, step", "--json").json
    return [row["reward"] for row in rows["rows"]]


def test_scores_of_episodes(run: Any, scores: Path) -> None:
    arguments = ("annotate", "d", scores, "--on", "source_episode_id=episode", "--set",
                 "reward=10 * score", "--add", "score", "--add", "judged=score")  # fmt: skip
    first, second, *rest = run(*arguments).out.splitlines()
    assert first == "d@2: reward, score, judged of 2 steps written, in 1 shard"
    assert second.strip().startswith("2 labels: 1 matched, 1 unmatched, 0 ambiguous, 0 repeated")
    assert rest == ["  unmatched, such as z"]
    assert rewards(run) == [1.0, 5.0, 10.0]
    assert run(*arguments).out.splitlines()[0] == ("d@2 has these labels already: nothing changed")
    body = run(*arguments, "--json").json
    assert (body["version"], body["already_present"], body["steps"]) == (2, True, 2)


@pytest.mark.slow
def test_each_step_and_sql(run: Any) -> None:
    query = "select episode_id, num_steps as n from d.episodes"
    done = run("annotate", "d", query, "--on", "episode_id", "--set", "reward=n", "--to", "each")
    assert done.code == 0
    assert rewards(run) == [2.0, 2.0, 1.0]
    again = run("annotate", "d", query, "--on", "episode_id", "--set", "reward=n", "--to", "each",
                "--again")  # fmt: skip
    assert again.out.splitlines()[0] == "d: nothing to change"


def test_strict_is_a_no(run: Any, scores: Path) -> None:
    done = run("annotate", "d", scores, "--on", "source_episode_id=episode", "--add", "score",
               "--strict", "--json")  # fmt: skip
    assert (done.code, done.json["refused"], done.json["unmatched"]) == (3, True, 1)
    assert run("show", "d", "--json").json["version"] == 1


def test_what_is_refused(run: Any, scores: Path) -> None:
    on = ("--on", "source_episode_id=episode")
    run("annotate", "d", "absent.csv", *on, "--add", "score").failed("absent.csv")
    run("annotate", "d", scores, *on).failed("--set", "--add")
    run("annotate", "d", scores, *on, "--add", "none").failed("none")
    refused = run("annotate", "d", scores, *on, "--set", "step=score")
    assert refused.code == 2
    assert "found step" in refused.err
    assert run("annotate", "d", scores, *on, "--set", "score").code == 2
    assert run("annotate", "d", scores, "--add", "score").code == 2
