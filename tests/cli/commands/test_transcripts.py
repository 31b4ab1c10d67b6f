"""Transcripts and unknown rewards at the command line; preference pairs by one SQL file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

_EXAMPLES = Path(__file__).parents[3] / "examples"
_RESULTS = _EXAMPLES / "data" / "transcripts" / "results.json"


def pairs_of(run: Any, path: Path, *arguments: str) -> list[dict[str, Any]]:
    done = run("sql", "--file", _EXAMPLES / "preferences.sql", "--output", path, *arguments)
    assert done.code == 0, done
    return [json.loads(line) for line in path.read_text().splitlines()]


def said(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages without the keys that are null."""
    return [{k: v for k, v in message.items() if v is not None} for message in messages]


def test_preference_pairs_from_results(run: Any, tmp_path: Path) -> None:
    done = run("ingest", _RESULTS, "--dataset", "chats")
    assert done.code == 0, done
    assert "(transcripts): 7 episodes, 16 steps" in done.out
    assert "1 transcripts have no turn of an assistant" in done.out
    pairs = pairs_of(run, tmp_path / "pairs.jsonl")
    records = {(r["task_id"], r["trial"]): r for r in json.loads(_RESULTS.read_text())}
    # Of task 1 both trials are as good as each other; of task 2 one trial failed before a turn.
    assert [(p["group_id"], p["chosen_id"], p["rejected_id"]) for p in pairs] == [
        ("0", "0-0", "0-1"),
        ("2", "2-1", "2-0"),
    ]
    assert [(p["chosen_reward"], p["rejected_reward"]) for p in pairs] == [(1, 0)] * 2
    for pair in pairs:
        for side in ("chosen", "rejected"):
            task, trial = map(int, pair[f"{side}_id"].split("-"))
            # Without what the guest says after the last turn.
            whole = [
                {k: v for k, v in message.items() if v is not None}
                for message in records[task, trial]["traj"][:-1]
            ]
            assert [*said(pair["prompt"]), *said(pair[side])] == whole


def test_pairs_are_of_one_prompt_and_of_known_rewards(run: Any, tmp_path: Path) -> None:
    def record(question: str, answer: str, reward: float | None, **given: Any) -> str:
        talk = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return json.dumps({"messages": talk, "reward": reward, **given}) + "\n"

    log = tmp_path / "samples.jsonl"
    log.write_text(
        record("a", "fine", 0.5)
        + record("a", "best", 0.9)
        + record("a", "worst", -1.0)
        + record("a", "unknown", None)
        # One group, but two prompts.
        + record("b", "x", 1.0, group_id="g")
        + record("c", "y", 0.0, group_id="g")
    )
    assert run("ingest", log, "--dataset", "mine").code == 0
    (pair,) = pairs_of(run, tmp_path / "pairs.jsonl", "--at", "chats=mine@1")
    assert said(pair["chosen"]) == [{"role": "assistant", "content": "best"}]
    assert said(pair["rejected"]) == [{"role": "assistant", "content": "worst"}]
    assert said(pair["prompt"]) == [{"role": "user", "content": "a"}]


@pytest.mark.slow
def test_unknown_rewards_at_the_command_line(run: Any, tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("episode_id,x,action,terminated\na,0.5,1,0\na,0.6,0,1\n")
    arguments = ("ingest", log, "--dataset", "d", "--map", "observation=x")
    run(*arguments).failed("is the reward", "--no-reward")
    assert run(*arguments, "--no-reward").code == 0
    assert "  return       unknown; mean length 2\n" in run("show", "d").out
    about = run("show", "d", "--json").json
    assert (about["num_returns"], about["mean_return"]) == (0, None)
    learn = ("train", "offline", "d", "--updates", "2", "--policy", "p")
    refused = run(*learn, "--algorithm", "dqn")
    assert refused.code == 1
    assert "algorithm dqn: 2 of 2 steps have no reward" in refused.err
    assert "Or clone behavior, which needs no rewards, with bc" in refused.err
    assert run(*learn, "--algorithm", "bc").code == 0
    labels = tmp_path / "labels.csv"
    labels.write_text("source_episode_id,step,score\na,0,1.5\n")
    given = ("--on", "source_episode_id", "--on", "step", "--set", "reward=score")
    done = run("annotate", "d", labels, *given)
    assert done.code == 0, done
    assert "1 of 2 steps have no reward" in run(*learn, "--algorithm", "dqn").err
