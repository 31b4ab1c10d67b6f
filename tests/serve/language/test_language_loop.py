"""A language policy from its registration to a promoted version, served by engines of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import pytest

from replaylake.datastore.lake.lake import open_lake

pytestmark = pytest.mark.slow
TOKEN = "a-token-of-this-test-0123456789"
COMMAND = Path(sys.executable).with_name("replaylake")


def test_the_loop_of_a_language_policy(byte_model, tmp_path, kit):
    lake = tmp_path / "lake"

    def run(*words):
        done = subprocess.run(
            [COMMAND, *map(str, words), "--lake", lake], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    for _ in range(2):
        run("policies", "register", byte_model, "--policy", "agent")
    run("promote", "agent:1", "--to", "champion")
    words = ["serve", "agent@champion", "--log-to", "agents", "--port", "0", "--follow", "0.1"]
    process = subprocess.Popen(
        [COMMAND, *words, "--json", "--lake", lake],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Tokens that callers need are no tokens of the engine.
        env={**os.environ, "REPLAYLAKE_ACT_TOKEN": TOKEN, "REPLAYLAKE_FEEDBACK_TOKEN": TOKEN},
    )
    try:
        ready = json.loads(process.stdout.readline())
        assert (ready["policy"], ready["version"], ready["log_to"]) == ("agent", 1, "agents")
        headers = {"X-ReplayLake-Token": TOKEN}
        client = openai.OpenAI(
            base_url=f"{ready['url']}/episode/e1/v1",
            api_key="none",
            max_retries=0,
            default_headers=headers,
        )
        create = client.chat.completions.create
        question = [{"role": "user", "content": "hé?"}]
        fields = {"model": "agent", "messages": question, "max_tokens": 9}

        # What a client leaves behind does not hold up the next call.
        endless = create(**{**fields, "max_tokens": 60_000}, stream=True)
        next(iter(endless))
        endless.close()
        chunks = list(create(**fields, stream=True, seed=4))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert chunks[-1].choices[0].finish_reason == "length"

        # A version that does not load is refused, and the one before stays.
        shutil.copytree(byte_model, tmp_path / "broken")
        config = json.loads((byte_model / "config.json").read_text())
        (tmp_path / "broken/config.json").write_text(
            json.dumps({**config, "architectures": ["NoSuchForCausalLM"], "model_type": "no_such"})
        )
        run("policies", "register", tmp_path / "broken", "--policy", "agent")
        run("promote", "agent:3", "--to", "champion")
        said = iter(process.stderr.readline, "")
        assert any("version 3 is refused" in line for line in said)
        answer = create(**{**fields, "max_tokens": 1})
        assert answer.metadata["weight_version"] == "1"

        report = {"completion_id": chunks[0].id, "reward": 1.5, "terminated": True}
        answer = httpx.post(f"{ready['url']}/v1/feedback", json=report, headers=headers)
        assert answer.status_code == 202

        run("promote", "agent:2", "--to", "champion")
        assert any("serving version 2 instead of 1" in line for line in said)
        answer = create(**fields, logprobs=True)
        assert answer.metadata["weight_version"] == "2"
        entries = answer.choices[0].logprobs.content
        steps = (
            "select policy, policy_version as version, action, action_tokens, action_log_probs, "
            "reward, episode_id, completion_id, call_status from agents.steps order by timestamp"
        )

        def read():
            found = open_lake(lake).sql(steps).to_pylist()
            rewards = [row["reward"] for row in found]
            return found if len(found) == 4 and 1.5 in rewards else None

        rows = {row["completion_id"]: row for row in kit.wait_until(read)}
        first, last = rows[chunks[0].id], rows[answer.id]
        assert [(row["policy"], row["version"]) for row in (first, last)] == [
            ("agent", 1), ("agent", 2),
        ]  # fmt: skip
        assert first["action"] == text
        assert len(first["action_tokens"]) == len(first["action_log_probs"]) == 9
        assert last["action_log_probs"] == pytest.approx([one.logprob for one in entries])
        assert {row["call_status"] for row in rows.values()} == {"aborted", "completed"}
        assert (first["reward"], last["reward"]) == (1.5, None)
        shown = run("show", "agents", "--episode", first["episode_id"])
        assert "hé?" in shown
        assert "terminated" in shown
    finally:
        process.terminate()
        assert process.wait(60) == 0
        process.stdout.close()
        process.stderr.close()
    history = json.loads(run("policies", "history", "agent", "--json"))
    assert [(one["version"], one["dataset"]) for one in history["served"]] == [
        (1, "agents"), (2, "agents"),
    ]  # fmt: skip
