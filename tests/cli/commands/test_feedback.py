"""`feedback join --every` and `feedback status`, as commands."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from replaylake.cli.main import main
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.feedback.decision_id import DecisionSigner
from replaylake.datastore.feedback.decisions import (
    decisions_encoder,
    ensure_feedback_tables,
    rewards_encoder,
)
from replaylake.datastore.lake.lake import open_lake


class Served:
    """A lake that something was served into."""

    def __init__(self, path: Path) -> None:
        self.path, self.number = path, 0
        self.lake = open_lake(path, create=True)
        self.dataset = self.lake.dataset("live")

    def begin(self) -> None:
        ensure_feedback_tables(self.dataset, Box((2,)), Discrete(3))

    def decide(self, reward: float | None = 1.0) -> None:
        self.number += 1
        now = time.time_ns() // 1000 - 2_000_000
        (key,) = DecisionSigner(self.lake.signing_key(), "live").issue("bc", 1, now)
        decision = {"decision_id": key, "timestamp": now, "policy": "bc", "policy_version": 1,
                    "observation": [0, 0], "action": 1, "deterministic": True}  # fmt: skip
        self.dataset.decisions.append(
            decisions_encoder(self.dataset)([decision]), producer="t", sequence=self.number
        )
        if reward is not None:
            report = {"decision_id": key, "timestamp": now + 500_000, "reward": reward,
                      "terminated": True, "truncated": False}  # fmt: skip
            self.dataset.rewards.append(
                rewards_encoder(self.dataset)([report]), producer="t", sequence=self.number
            )


@pytest.fixture
def served(tmp_path: Path) -> Served:
    return Served(tmp_path / "lake")


def test_the_receipt_states_what_waits(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.begin()
    served.decide()
    for _ in range(2):
        served.decide(None)
    assert main(["feedback", "join", "live", "--lake", str(served.path), "--window", "1h"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "  3 decisions, 1 reward; 1 joined, 2 waiting"
    text = "  2 decisions wait for a reward of the episode, until "
    assert lines[2].startswith(text)
    first, *last = lines[2].removeprefix(text).split(" to ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", first)
    assert len(last) <= 1


def test_status(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.begin()
    served.decide()
    served.decide(None)
    command = ["feedback", "status", "live", "--lake", str(served.path)]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "live@0: 2 decisions, 1 reward"
    assert lines[1].split()[:5] == ["policy", "version", "decisions", "joined", "waiting"]
    assert lines[2].split()[:5] == ["bc", "1", "2", "1", "1"]
    assert lines[3].split()[-5:] == ["100.0%", "0.5", "s", "0.5", "s"]
    assert main([*command, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["total"]["join_rate"] == 1.0
    assert main(["feedback", "status", "nothing", "--lake", str(served.path)]) == 1


def line_of(process: subprocess.Popen[str], stream: Any) -> str:
    line: str = stream.readline()
    assert line, process.stderr and process.stderr.read()
    return line


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_every_goes_on_past_failures_until_a_signal(served: Served, number: int) -> None:
    code = "import sys; from replaylake.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = ["feedback", "join", "live", "--every", "0.2s", "--lake", str(served.path)]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    failed = line_of(process, process.stderr)
    assert "found no decisions" in failed
    assert failed.endswith("the next round tries again\n")
    served.begin()
    served.decide()
    assert "1 episodes, 1 steps added" in line_of(process, process.stdout)
    served.decide()
    # Nothing is said of the rounds between.
    assert "1 episodes, 1 steps added" in line_of(process, process.stdout)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "")
    assert err.endswith("stopped\n")
