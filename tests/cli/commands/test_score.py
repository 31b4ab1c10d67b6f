"""`replaylake score`: what it prints, and its exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from replaylake.cli.commands.score import _statistic_text
from replaylake.serve.pages.texts import number_text

_REWARDS = """
def bonus(episode):
    return [2 * reward for reward in episode.rewards]

def fails(episode):
    if len(episode) == 1:
        raise ValueError("too short")
    return 1.0
"""


@pytest.fixture(autouse=True)
def filled(run: Any, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("ingest", log, "--dataset", "d", "--map", "observation=x,y").code == 0
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "cli_rewards", raising=False)
    Path("cli_rewards.py").write_text(_REWARDS)


def test_scores_are_written_and_described(run: Any) -> None:
    first, second, third, fourth = run("score", "d", "--with", "cli_rewards:bonus").out.splitlines()
    assert first == "d@2: bonus, bonus_scorer of 3 steps written, in 1 shard"
    assert second == "  2 episodes at version 1: 2 computed, 0 cached, 0 failed"
    assert third.startswith("  bonus: mean ")
    assert "cli_rewards:bonus (episode), source sha256 " in fourth
    body = run("score", "d", "--with", "cli_rewards:bonus", "--json").json
    assert (body["version"], body["cached"], body["computed"]) == (None, 2, 0)
    rows = run("sql", "select reward, bonus from d.steps", "--json").json["rows"]
    assert all(row["bonus"] == 2 * row["reward"] for row in rows)


def test_a_failure_is_a_no(run: Any) -> None:
    done = run("score", "d", "--with", "cli_rewards:fails", "--name", "whole")
    assert done.code == 3
    assert "1 computed, 0 cached, 1 failed" in done.out
    assert "ValueError: too short" in done.out.splitlines()[-1]
    selected = run(
        "score", "d", "--with", "cli_rewards:fails", "--where", "num_steps > 1", "--json"
    )
    assert (selected.code, selected.json["episodes"]) == (0, 1)


def test_what_is_refused(run: Any) -> None:
    run("score", "d", "--with", "cli_rewards:absent").failed("has no 'absent'")
    run("score", "other", "--with", "cli_rewards:bonus").failed("not in this lake")
    run("score", "d", "--with", "cli_rewards:bonus", "--where", "num_steps > 9").failed("--where")
    run("score", "d", "--model", "absent").failed("absent has no config.json")
    refused = run("score", "d", "--with", "builtins:len")
    assert refused.code == 2
    assert "--revision" in refused.err
    assert run("score", "d").code == 2
    wrong = run("score", "d", "--with", "cli_rewards:bonus", "--name", "step")
    assert wrong.code == 2
    assert "Invalid value for --name" in wrong.err


def test_a_judge_is_asked(
    run: Any, endpoint: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    endpoint.reply = lambda prompt: (200, {}, '{"score": 0.5, "reason": "half"}')
    judge = ("score", "d", "--judge", endpoint.url, "--judge-model", "qwen")
    monkeypatch.setenv("MY_KEY", "secret-key")
    done = run(*judge, "--api-key-env", "MY_KEY", "--judge-option", "max_tokens=9")
    assert done.code == 0
    first, *_, last = done.out.splitlines()
    written = "judge, judge_reason, judge_scorer, judge_prompt, judge_answer"
    assert sorted(first.removeprefix("d@2: ").partition(" of 3")[0].split(", ")) == sorted(
        written.split(", ")
    )
    assert last.endswith(f"judge {endpoint.url}/chat/completions, model qwen")
    assert endpoint.headers[0]["Authorization"] == "Bearer secret-key"
    assert endpoint.requests[0]["max_tokens"] == 9
    assert "temperature" not in endpoint.requests[0]
    assert "step 0: observation" in endpoint.requests[0]["messages"][0]["content"]
    assert "secret-key" not in done.out + done.err
    (tmp_path / "prompt.txt").write_text("Rate this: {episode}")
    named = run(*judge, "--prompt", "prompt.txt", "--name", "second", "--concurrency", "1")
    assert named.code == 0
    assert endpoint.requests[-1]["messages"][0]["content"].startswith("Rate this: step 0")
    assert "Authorization" not in endpoint.headers[-1]


def test_scores_are_compared(run: Any) -> None:
    scored = run("score", "d", "--with", "cli_rewards:bonus", "--against", "reward")
    lines = scored.out.splitlines()
    assert scored.code == 0
    assert lines[4].startswith("d@2: bonus and reward of 3 steps; 0 have bonus alone")
    assert lines[6] == "  rank correlation: Spearman 1, Kendall 1"
    only = run("score", "d", "--name", "bonus", "--against", "reward", "--json")
    assert (only.json["by"], only.json["n"], only.json["kendall"]) == ("step", 3, 1)
    opposite = "select episode_id, step, 1 - reward as opposite from d.steps"
    on = ("--on", "episode_id", "--on", "step")
    assert run("annotate", "d", opposite, *on, "--add", "opposite").code == 0
    options = ("--with", "cli_rewards:bonus", "--against", "opposite", "--limit", "1")
    table = run("score", "d", *options).out.splitlines()[-2:]
    assert table[0].split() == ["episode_id", "agent_id", "step", "bonus", "opposite", "ranks"]
    body = run("score", "d", *options, "--json").json
    assert (body["comparison"]["kendall"], body["cached"]) == (-1, 2)
    refused = run("score", "d", "--against", "reward")
    assert (refused.code, "--name and --against" in refused.err) == (2, True)


def test_wrong_usage_of_a_judge(run: Any, endpoint: Any) -> None:
    judge = ("score", "d", "--judge", endpoint.url)
    model = ("--judge-model", "qwen")
    wrong = [
        (judge, "--judge-model"),
        ((*judge, *model, "--with", "cli_rewards:bonus"), "--with"),
        ((*judge, *model, "--prompt", "absent.txt"), "--prompt"),
        ((*judge, *model, "--api-key-env", "ABSENT_KEY"), "--api-key-env"),
        ((*judge, *model, "--max-requests-per-second", "0"), "--max-requests-per-second"),
        ((*judge, *model, "--revision", "1"), "--revision"),
        ((*judge, *model, "--timeout", "0s"), "--timeout"),
        ((*judge, *model, "--judge-option", "stream=true"), "--judge-option"),
        ((*judge, *model, "--limit", "1"), "--limit"),
        (("score", "d", "--with", "cli_rewards:bonus", *model), "--judge-model"),
        (("score", "d", "--with", "cli_rewards:bonus", "--retry", "9s"), "--retry"),
        (("score", "d", "--with", "cli_rewards:bonus", "--device", "cpu"), "--device"),
        (("score", "d", "--judge", "ftp://x", *model), "--judge"),
    ]
    for arguments, option in wrong:
        done = run(*arguments)
        assert (done.code, f"Invalid value for {option}" in done.err) == (2, True), done
    assert endpoint.requests == []
    endpoint.reply = lambda prompt: (404, {}, "no such model")
    run(*judge, *model).failed("HTTP 404: no such model")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_that_the_same_command_resumes(
    run: Any, lake: Path, endpoint: Any, number: signal.Signals
) -> None:
    is_over = threading.Event()

    def reply(prompt: str) -> tuple[int, dict[str, str], str]:
        if len(endpoint.requests) > 1:
            assert is_over.wait(120)
        return 200, {}, "1"

    endpoint.reply = reply
    arguments = ["score", "d", "--judge", endpoint.url, "--judge-model", "qwen"]
    arguments += ["--concurrency", "1"]
    command = [sys.executable, "-m", "replaylake.cli.main", *arguments]
    environment = {**os.environ, "REPLAYLAKE_LAKE": str(lake)}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 60
    while len(endpoint.requests) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)  # before the response
    is_over.set()
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "interrupted"
    assert (
        "1 of 2 episodes have their scores stored; 1 of the judge's requests got no answer in "
        "time, and none written; the same command resumes"
    ) in err
    assert "Traceback" not in err
    endpoint.reply = lambda prompt: (200, {}, "1")
    body = run(*arguments, "--json").json
    assert (body["cached"], body["computed"]) == (1, 1)


def test_numbers_that_are_0_but_for_rounding_are_printed_as_0() -> None:
    assert number_text(-0.0) == "0"
    assert _statistic_text(-3e-16) == "0"
    assert _statistic_text(-0.25) == "-0.25"
    assert _statistic_text(None) == "unknown"
