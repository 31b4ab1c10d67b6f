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


def test_values_for_each_token(run: Any, tmp_path: Path) -> None:
    steps = tmp_path / "steps.jsonl"
    steps.write_text(
        '{"episode_id": "e", "step": 0, "observation": "1 + 1?", "action": "2", "reward": 1, '
        '"terminated": true, "observation_tokens": [1, 2], "action_tokens": [3, 4]}\n'
    )
    assert run("ingest", steps, "--dataset", "math", "--format", "jsonl").code == 0
    labels = tmp_path / "labels.jsonl"
    key = ("--on", "source_episode_id=id", "--on", "step")
    labels.write_text('{"id": "e", "step": 0, "entropy": [0.5]}\n')
    refused = run("annotate", "math", labels, *key, "--add", "action_entropies=entropy")
    assert refused.code == 1
    assert "action_entropies at step 0 of episode " in refused.err
    assert "found 1 values, expected 2, one for each of its action_tokens" in refused.err
    labels.write_text('{"id": "e", "step": 0, "entropy": [0.5, 1]}\n')
    done = run("annotate", "math", labels, *key, "--add", "action_entropies=entropy")
    assert done.out.startswith("math@2: action_entropies of 1 step written")
    query = "select action_entropies from math.sequences"
    (row,) = run("sql", query, "--json").json["rows"]
    assert row["action_entropies"] == [None, None, 0.5, 1.0]
    wrong = run("annotate", "math", labels, *key, "--add", "action_log_probs=entropy")
    assert wrong.code == 2
    assert "--add: found action_log_probs, which is part of the log" in wrong.err
