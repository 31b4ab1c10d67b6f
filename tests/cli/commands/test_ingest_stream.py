"""`ingest --follow` as a process of its own: fed through a pipe, killed, interrupted, fed again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from replaylake.datastore.lake.lake import open_lake

_LENGTH = 20


def _lines(num_episodes: int) -> list[bytes]:
    return [
        json.dumps(
            {
                "episode_id": f"e{episode}",
                "step": step,
                "observation": [episode / 7, step / 3],
                "action": step % 3,
                "reward": 1.0,
                "terminated": step == _LENGTH - 1,
            }
        ).encode()
        + b"\n"
        for episode in range(num_episodes)
        for step in range(_LENGTH)
    ]


def _started(lake: Path, source: str, *flags: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "replaylake.cli.main", "ingest", source, "--dataset", "live"]
    command += ["--follow", "--lake", str(lake), "--json", *flags]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)


def _wait_for_steps(lake: Path, least: int) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        opened = open_lake(lake, create=True).dataset("live")
        if opened.exists() and opened.snapshot().num_steps >= least:
            return
        time.sleep(0.05)
    raise AssertionError(f"expected {least} steps in {lake}")


def _counts(lake: Path) -> dict[str, Any]:
    found: dict[str, Any] = (
        open_lake(lake)
        .sql(
            "SELECT count(*) AS steps, count(DISTINCT (episode_id, step)) AS distinct_steps, "
            "count(*) FILTER (terminated) AS ended FROM live.steps"
        )
        .to_pylist()[0]
    )
    return found


def _decision_lines(num: int) -> list[bytes]:
    return [
        json.dumps(
            {"event": n, "age": n % 50, "banner": n % 3, "paid": n % 2, "chance": 1 / 3}
        ).encode()
        + b"\n"
        for n in range(num)
    ]


def _dialogue_lines(num: int) -> list[bytes]:
    """Dialogues of two turns, every second without an id."""
    lines = []
    for n in range(num):
        said = [("user", f"question {n}"), ("assistant", "a"), ("user", "b"), ("assistant", "c")]
        messages = [{"role": role, "content": content} for role, content in said]
        record = {"messages": messages, "reward": 1.0} | ({"id": f"d{n}"} if n % 2 else {})
        lines.append(json.dumps(record).encode() + b"\n")
    return lines


_MAPPED = (
    *("--format", "bandit", "--map", "observation=age", "--map", "action=banner"),
    *("--map", "reward=paid", "--map", "behavior_prob=chance"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lines", "flags", "num_steps", "num_ended"),
    [
        pytest.param(_lines(30), (), 600, 30, id="steps"),
        pytest.param(
            _decision_lines(600), (*_MAPPED, "--map", "episode_id=event"), 600, 600, id="decisions"
        ),
        pytest.param(
            _decision_lines(600), (*_MAPPED, "--unique", "event"), 600, 600, id="keyed-decisions"
        ),
        pytest.param(_dialogue_lines(300), ("--format", "transcripts"), 600, 300, id="dialogues"),
    ],
)
def test_killed_and_fed_again_from_the_start_it_has_each_step_once(
    tmp_path: Path, lines: list[bytes], flags: tuple[str, ...], num_steps: int, num_ended: int
) -> None:
    lake = tmp_path / "lake"
    killed = _started(lake, "-", "--flush-every", "0.1s", *flags)
    assert killed.stdin is not None
    for start in range(0, len(lines) * 2 // 3, 50):
        killed.stdin.write(b"".join(lines[start : start + 50]))
        killed.stdin.flush()
        time.sleep(0.02)
    _wait_for_steps(lake, 50)
    killed.kill()
    killed.communicate()
    present = _counts(lake)["steps"]
    assert present >= 50
    again = _started(lake, "-", "--flush-every", "0.1s", *flags)
    out, err = again.communicate(b"".join(lines), timeout=60)
    assert again.returncode == 0, err
    receipt = json.loads(out)
    assert receipt["lines"] == {
        "read": num_steps,
        "committed": num_steps - present,
        "rejected": 0,
        "already_present": present,
    }
    counts = {"steps": num_steps, "distinct_steps": num_steps, "ended": num_ended}
    assert _counts(lake) == counts


def test_a_format_that_cannot_be_followed_is_wrong_usage(tmp_path: Path) -> None:
    running = _started(tmp_path / "lake", "-", "--format", "parquet")
    _, err = running.communicate(b"", timeout=60)
    assert running.returncode == 2
    found = b" ".join(err.split())
    assert b"'parquet', which cannot be followed, expected one of auto, bandit, dsjson" in found
    assert not (tmp_path / "lake").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_told_to_stop_it_commits_what_it_holds(tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "app.jsonl"
    lines = _lines(3)
    path.write_bytes(b"".join(lines[:10]))
    running = _started(tmp_path / "lake", str(path), "--flush-every", "0.2s", "--stream", "app")
    _wait_for_steps(tmp_path / "lake", 10)
    with path.open("ab") as stream:
        stream.write(b"".join(lines[10:]) + b"not json\n" + b'{"torn')
    _wait_for_steps(tmp_path / "lake", 60)
    running.send_signal(number)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 0, err
    assert json.loads(out)["lines"] == {
        "read": 61,
        "committed": 60,
        "rejected": 1,
        "already_present": 0,
    }
    assert b"rejected: malformed: app.jsonl line 61: found 'not json'" in err


@pytest.mark.slow
def test_lines_on_standard_input_without_follow_are_a_source(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "replaylake.cli.main",
        "ingest",
        "-",
        "--dataset",
        "live",
        "--json",
    ]
    command += ["--lake", str(tmp_path / "lake")]
    lines = b"".join(_lines(2))
    for expected in ("committed", "already_present"):
        ran = subprocess.run(command, input=lines, stdout=subprocess.PIPE, check=True, timeout=60)
        assert json.loads(ran.stdout)["steps"][expected] == 40
    ran = subprocess.run(
        [*command, "--flush-every", "1s"], input=lines, stderr=subprocess.PIPE, check=False
    )
    assert ran.returncode == 2
    assert b"requires --follow" in ran.stderr
