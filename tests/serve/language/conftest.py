"""A lake with versions of a language policy, and its server, with an engine made for tests."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.policies.manifest import describe_model

SERVE = Path(__file__).with_name("serve.py")
FILES = {
    "config.json": json.dumps({"architectures": ["Tiny"], "vocab_size": 8}),
    "tokenizer.json": "{}",
    "model.safetensors": "weights",
}


def wait_until(condition: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "not within the time"
        time.sleep(0.02)
    return found


def is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """Three versions of `agent`, the first of which is its champion."""
    model = tmp_path / "model"
    model.mkdir()
    for name, text in FILES.items():
        (model / name).write_text(text)
    sha256s = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in FILES.items()}
    lake = open_lake(tmp_path / "lake", create=True)
    for _ in range(3):
        manifest = describe_model(model, sha256s, {})
        lake.registry.register_model("agent", model, manifest, run_id="", lineage={})
    lake.registry.set_alias("agent", "champion", 1)
    return lake


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    lake: Lake
    num_calls: int = 0

    def ask(self, *texts: str, **names: str) -> str:
        """Return the answer to a dialogue: which version answered, and its process."""
        answer = self.post(*texts, **names)
        assert answer.status_code == 200, answer.text
        return self._read(answer)

    def ask_again(self, text: str) -> str:
        """Return the first answer that is none of a connection to an engine that has just ended."""

        def ask() -> str | None:
            answer = self.post(text)
            assert answer.status_code in (200, 502), answer.text
            return self._read(answer) if answer.status_code == 200 else None

        found: str = wait_until(ask)
        return found

    def post(self, *texts: str, **names: str) -> httpx.Response:
        roles = ("user", "assistant")
        messages = [
            {"role": roles[number % 2], "content": text} for number, text in enumerate(texts)
        ]
        path = "".join(f"/{name}/{value}" for name, value in names.items())
        url = f"{self.url}{path}/v1/chat/completions"
        return httpx.post(url, json={"model": "agent", "messages": messages}, timeout=60)

    def _read(self, answer: httpx.Response) -> str:
        self.num_calls += 1
        content: str = answer.json()["choices"][0]["message"]["content"]
        return content

    def steps(self, num: int) -> list[dict[str, Any]]:
        """Return the recorded steps, once there are as many as are expected."""
        query = (
            "select policy, policy_version as version, completion_messages->0->>'content' as "
            "answer, metadata->'served'->>'reference' as reference, source_episode_id as name, "
            "(metadata->'served'->>'share')::double as share, episode_id, step, reward, "
            "action_tokens, action_log_probs, behavior_log_prob from agents.steps "
            "order by timestamp"
        )

        def read() -> list[dict[str, Any]] | None:
            if not self.lake.dataset("agents").exists():
                return None
            rows: list[dict[str, Any]] = self.lake.sql(query).to_pylist()
            return rows if len(rows) >= num else None

        rows: list[dict[str, Any]] = wait_until(read)
        assert len(rows) == num
        return rows


@pytest.fixture
def serve(lake: Lake, tmp_path: Path):
    """Starts servers, and stops them at the end."""
    running: list[Server] = []

    def start(*arguments: str, **environment: str) -> Server:
        process = subprocess.Popen(
            [sys.executable, str(SERVE), str(lake.path), *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "HOLD": str(tmp_path / "hold"), **environment},
        )
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "ready after" in line:
                break
        assert "ready after" in lines[-1], "".join(lines)
        running.append(Server(process, lines[-1].split(" on ")[1].split(",")[0], lake))
        return running[-1]

    yield start
    for one in running:
        one.process.kill()
        one.process.wait()
        assert one.process.stderr is not None
        one.process.stderr.close()


@pytest.fixture(scope="session")
def kit():
    return sys.modules[__name__]
