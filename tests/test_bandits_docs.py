"""docs/BANDITS.md leads from a CSV to a served policy by its commands, as they are written."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from replaylake.cli.main import main

_COMMAND = Path(sys.executable).with_name("replaylake")
_TEXT = (Path(__file__).parents[1] / "docs" / "BANDITS.md").read_text(encoding="utf-8")
_PLACEHOLDER = "d-F..."


class Step(NamedTuple):
    """A command of the page, and what the page says that it prints."""

    command: str
    printed: str


def _steps() -> Iterator[Step]:
    for block in re.findall(r"(?m)(?:^(?: {4}.*)?\n)+", _TEXT):
        lines = [line[4:] for line in block.splitlines()]
        starts = [i for i, line in enumerate(lines) if line.startswith("$ ")]
        for start, end in itertools.pairwise([*starts, len(lines)]):
            yield Step(lines[start][2:], "\n".join(lines[start + 1 : end]).strip())


class Page:
    """Runs the commands of the page in this process: but for a server, until the next command."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd
        self._server: subprocess.Popen[str] | None = None
        self._url = ""
        self.decision_id = ""

    def run(self, command: str) -> tuple[int, str, str]:
        words = shlex.split(command.replace(_PLACEHOLDER, self.decision_id))
        if words[0] == "curl":
            return 0, self._post(words), ""
        self.stop()
        if words[1] == "serve":
            self.serve(words[1:])
            return 0, "", ""
        self._capfd.readouterr()
        code = main(words[1:])
        return code, *self._capfd.readouterr()

    def serve(self, words: list[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._server = subprocess.Popen(
            [_COMMAND, *words, "--port", str(port), "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._server.stdout is not None
        ready = json.loads(self._server.stdout.readline())
        self._url = ready["url"]

    def _post(self, words: list[str]) -> str:
        silent, url, header_flag, header, body_flag, body = words[1:]
        assert (silent, header_flag, body_flag) == ("-s", "-H", "-d")
        name, content_type = header.split(": ")
        path = url.removeprefix("localhost:3000")
        request = urllib.request.Request(self._url + path, body.encode(), {name: content_type})
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read().decode()
        self.decision_id = json.loads(text)["decision_id"]
        return str(text)

    def stop(self) -> None:
        if self._server is not None:
            self._server.terminate()
            self._server.wait(30)
            assert self._server.stdout is not None
            self._server.stdout.close()
            self._server = None


def _write_banners(path: Path) -> None:
    """More rows of the kind that the page shows: red pays, blue pays in segment a."""
    rng, names, lines = np.random.default_rng(0), ["blue", "green", "red"], []
    for _ in range(1500):
        mask = [True, True, bool(rng.random() < 0.5)]
        action, segment = int(rng.choice(np.flatnonzero(mask))), "ab"[int(rng.integers(2))]
        lines.append(
            json.dumps(
                {
                    "age": int(rng.integers(18, 70)),
                    "segment": segment,
                    "banner": names[action],
                    "paid": int(
                        names[action] == "red" or (names[action], segment) == ("blue", "a")
                    ),
                    "chance": round(1 / sum(mask), 6),
                    "action_mask": mask,
                }
            )
        )
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture
def page(
    tmp_path: Path,
    shared_data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Iterator[Page]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REPLAYLAKE_LAKE", str(tmp_path / "lake"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "obd").symlink_to(shared_data / "obd")
    _write_banners(tmp_path / "banners.jsonl")
    page = Page(capfd)
    yield page
    page.stop()


@pytest.mark.slow
def test_the_page_leads_from_a_csv_to_a_served_policy_and_back(page: Page) -> None:
    steps = list(_steps())
    assert len(steps) > 15
    found: dict[str, list[str]] = {}
    for step in steps:
        code, out, err = page.run(step.command)
        says_no = "not supported: " in step.printed
        assert code == (3 if says_no else 0), (step.command, out, err)
        _check_printed(step, out)
        verb = " ".join(step.command.split()[:2])
        found.setdefault(verb, []).append(out)
    # Each verdict that the page shows is the one that is given.
    assert len(found["replaylake ope"]) == 4
    decisions = [json.loads(text) for text in found["curl -s"]]
    assert decisions[0]["action"] in range(34)
    (lineage,) = found["replaylake lineage"]
    assert "dr_bandit" in lineage
    assert "ingest/" in lineage
    _check_masks_are_kept_to(page, next(s.command for s in steps if "action_mask" in s.command))


def _check_masks_are_kept_to(page: Page, command: str) -> None:
    """Ask many times: no forbidden action, and as many of each as the log-probabilities say."""
    answers = [json.loads(page.run(command)[1]) for _ in range(200)]
    assert {answer["action_name"] for answer in answers} <= {"blue", "green"}
    # Blue pays in segment a; with epsilon 0.1 over two allowed actions it has 0.95.
    blue = [answer for answer in answers if answer["action_name"] == "blue"]
    assert {round(float(np.exp(answer["log_prob"])), 6) for answer in blue} == {0.95}
    assert len(blue) > 170


def _check_printed(step: Step, out: str) -> None:
    """Compare what does not depend on the machine: tables of data, verdicts, names."""
    verb = step.command.split()[1]
    lines = out.splitlines()
    if verb in ("ingest", "feedback") or "group by" in step.command:
        assert lines[: len(step.printed.splitlines())] == step.printed.splitlines()
    if verb == "ope" and step.printed:
        verdict, said = lines[-1].partition(":")[0], step.printed.splitlines()
        assert verdict == said[-1].partition(":")[0]
        assert next(line for line in said if line.startswith("log mean ")) in lines
    if verb == "promote":
        assert out.strip() == step.printed
