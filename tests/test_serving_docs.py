"""docs/SERVING.md goes from a registered policy to a better one and back, by its commands."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import pytest

from replaylake.cli.main import main
from replaylake.serve.client import Client

_COMMAND = Path(sys.executable).with_name("replaylake")
_ROOT = Path(__file__).parents[1]
_TEXT = (_ROOT / "docs" / "SERVING.md").read_text(encoding="utf-8")
_PLACEHOLDER = "d-F..."
# What the page leaves to the defaults, and would take minutes.
_SHORTER = {
    "train": ["--updates", "20", "--set", "hidden_sizes=[16]"],
    "ope": ["--updates", "20"],
}
# The answer of these may be no: a short log of long games does not tell what a policy is worth.
_MAY_SAY_NO = ("ope", "promote")


def _commands() -> Iterator[str]:
    for block in re.findall(r"(?m)(?:^(?: {4}.*)?\n)+", _TEXT):
        lines = [line[4:] for line in block.splitlines()]
        starts = [i for i, line in enumerate(lines) if line.startswith("$ ")]
        for start, end in itertools.pairwise([*starts, len(lines)]):
            yield "\n".join(lines[start:end]).strip().removeprefix("$ ")


class Page:
    """Runs the page's commands in this process, its servers and curl in others."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd
        self._server: subprocess.Popen[str] | None = None
        self.url = ""
        self.decision_id = ""

    def run(self, command: str) -> tuple[int, str, str]:
        words = shlex.split(command.replace(_PLACEHOLDER, self.decision_id))
        if words[0] == "curl":
            words = [word.replace("localhost:3000", self.url) for word in words]
            return self._curl(words)
        if words[1] == "serve" and "--check" not in words:
            self.serve(words[1:])
            return 0, "", ""
        if words[1] == "serve":
            words += ["--port", "0"]
        self._capfd.readouterr()
        verb = "ope" if "--gate" in words else words[1]
        code = main([*words[1:], *_SHORTER.get(verb, [])])
        return code, *self._capfd.readouterr()

    def serve(self, words: list[str]) -> None:
        self.stop()
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
        self.url = json.loads(self._server.stdout.readline())["url"].removeprefix("http://")

    def _curl(self, words: list[str]) -> tuple[int, str, str]:
        ran = subprocess.run([*words, "--fail-with-body"], capture_output=True, text=True)
        first = json.loads(ran.stdout).get("decision_id") if ran.returncode == 0 else None
        # What the page calls d-F... is the first decision, after which its episode is called.
        self.decision_id = self.decision_id or first or ""
        return ran.returncode, ran.stdout, ran.stderr

    def play(self, num_games: int, name: str) -> None:
        """Play CartPole against the server, 15 steps at most a game, reporting each reward."""
        env = gymnasium.make("CartPole-v1", max_episode_steps=15)
        with Client(f"http://{self.url}") as client:
            for seed in range(num_games):
                seen, _ = env.reset(seed=seed)
                ended, step = False, 0
                while not ended:
                    chosen = client.act(seen, episode_id=f"{name}-{seed}", step=step)
                    seen, reward, terminated, truncated, _ = env.step(int(chosen.action))
                    ended = terminated or truncated
                    client.feedback(
                        float(reward),
                        decision_id=chosen.decision_id,
                        terminated=terminated,
                        truncated=truncated,
                        final_observation=seen if ended else None,
                    )
                    step += 1
        env.close()

    def settle(self) -> None:
        """Wait until what the server took is in the lake's tables: about a second."""
        until, pending = time.monotonic() + 30, [""]
        while time.monotonic() < until:
            with urllib.request.urlopen(f"http://{self.url}/metrics", timeout=30) as answer:
                text = answer.read().decode()
            pending = re.findall(r"(?m)^replaylake_log_pending_rows\{.*\} (\S+)$", text)
            if pending and not any(map(float, pending)):
                return
            time.sleep(0.1)
        pytest.fail(f"still not in the lake: {pending}")

    def stop(self) -> None:
        if self._server is not None:
            self._server.terminate()
            self._server.wait(30)
            assert self._server.stdout is not None
            self._server.stdout.close()
            self._server = None


@pytest.fixture
def page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Page]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REPLAYLAKE_LAKE", str(tmp_path / "lake"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    log = _ROOT / "examples" / "data" / "rllib_cartpole" / "cartpole-v1_large"
    assert main(["ingest", str(log), "--dataset", "cartpole", "--env", "CartPole-v1"]) == 0
    trained = ["train", "offline", "cartpole", "--algorithm", "bc", "--policy", "clone"]
    assert main([*trained, "--where", "return >= 150", *_SHORTER["train"]]) == 0
    page = Page(capfd)
    yield page
    page.stop()


@pytest.mark.slow
def test_the_page_leads_from_a_policy_to_a_better_one_and_back(page: Page) -> None:
    commands = list(_commands())
    assert len(commands) > 18
    said: dict[str, list[str]] = {}
    joined = 0
    for command in commands:
        words = command.split()[1:]
        verb = " ".join(words[:2]) if words[0] == "feedback" else words[0]
        if verb in ("feedback join", "sql") and joined < 2:
            # What the page takes for granted: that somebody asks the server for a while.
            page.play(40, f"game-{joined}")
            page.settle()
            joined += 1
            if verb == "sql":
                assert page.run("replaylake feedback join live")[0] == 0
        if verb == "feedback status":
            page.settle()
        code, out, err = page.run(command)
        may_say_no = verb in _MAY_SAY_NO and ("--gate" in command or verb == "ope")
        assert code in ((0, 3) if may_say_no else (0,)), (command, out, err)
        said.setdefault(verb, []).append(out)
    _check_said(said)


def _check_said(said: dict[str, list[str]]) -> None:
    """Compare what the page promises in words with what was printed."""
    (status,) = said["feedback status"]
    assert status.splitlines()[0].startswith("live@")
    assert "2 decisions, 2 rewards" in status
    by_version, episode = said["sql"]
    assert [line.split()[:2] for line in by_version.splitlines()[1:]] == [
        ["clone", "1"],
        ["clone", "2"],
    ]
    assert re.fullmatch(r"served/d-F-\S+", episode.splitlines()[1])
    (moves,) = said["policies"]
    assert "rollback" in moves
    assert "to begin with" in moves
    assert said["rollback"] == ["clone@champion is clone:1, was clone:2\n"]
    down, up = said["lineage"]
    assert "dataset cartpole@1" in down
    episode_id = up.split()[1]
    assert episode_id.startswith("served/d-F-")
    # Its id is made by chance, and --holdout 0.2 keeps a fifth of them from the candidate.
    assert ("policy clone:2: learned from it" in up) != _is_held_out(episode_id, 0.2), up


def _is_held_out(episode_id: str, fraction: float) -> bool:
    digits = 13  # 52 bits
    hashed = hashlib.md5(f":{episode_id}".encode()).hexdigest()[:digits]
    return int(hashed, 16) < int(fraction * 16**digits)
