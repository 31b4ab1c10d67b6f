"""`replaylake serve` of a language policy: its options, and an engine that runs already."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from replaylake.cli.main import main
from replaylake.datastore.lake.lake import Lake

ENGINE = Path(__file__).with_name("engine.py")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "--log-to: found none with agent:1, a language model"),
        (("--log-to", "a", "--explore", "temperature=1"), "--explore: found it with agent:1"),
        (("--log-to", "a", "--workers", "2"), "--workers: found it with agent:1"),
        (("--log-to", "a", "--join-every", "60s"), "--join-every: found it with agent:1"),
        (("--log-to", "a", "--check"), "--check: found it with agent:1"),
        (
            ("--log-to", "a", "--engine-url", "http://x", "--canary", "agent:2=0.1"),
            "--canary: found it with --engine-url",
        ),
    ],
)
def test_options_that_it_cannot_have_are_wrong_usage(
    lake: Lake, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], text: str
) -> None:
    assert main(["serve", "agent@champion", *words, "--lake", str(lake.path)]) == 2
    assert text in " ".join(capsys.readouterr().err.replace("'", "").split())


def test_what_cannot_be_served_is_one_line(
    lake: Lake, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    base = ["--log-to", "a", "--port", "0", "--lake", str(lake.path)]
    assert main(["serve", "agent:1", *base, "--engine-url", "ftp://x"]) == 1
    assert "expected a URL such as" in capsys.readouterr().err
    ref = lake.registry.resolve("agent:1")
    (ref.path / "model.safetensors").write_text("others")
    assert main(["serve", "agent:1", *base, "--sha256", "0" * 64]) == 1
    assert "expected 000" in capsys.readouterr().err
    assert main(["serve", f"{ref.path}/", *base]) == 1
    assert "model.safetensors: found sha256" in capsys.readouterr().err


@pytest.mark.slow
def test_an_engine_that_runs_already_is_recorded_as_the_version(lake, kit, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        engine = subprocess.Popen(
            [sys.executable, str(ENGINE), "somebody", str(listener.fileno())],
            pass_fds=[listener.fileno()],
            stdout=subprocess.DEVNULL,
        )
    command = [str(Path(sys.executable).with_name("replaylake")), "serve", "agent@champion"]
    command += ["--log-to", "agents", "--engine-url", f"http://127.0.0.1:{port}", "--port", "0"]
    server = subprocess.Popen(
        [*command, "--json", "--lake", str(lake.path)], stdout=subprocess.PIPE, text=True
    )
    try:
        ready = json.loads(server.stdout.readline())
        assert ready["engine_url"] == f"http://127.0.0.1:{port}"
        asked = {"model": "agent", "messages": [{"role": "user", "content": "hello"}]}
        url = f"{ready['url']}/v1/chat/completions"
        assert httpx.post(url, json=asked, timeout=60).status_code == 200
    finally:
        server.terminate()
        assert server.wait(60) == 0
        server.stdout.close()
        engine.kill()
        engine.wait()
    (row,) = lake.sql("select policy, policy_version, action_tokens from agents.steps").to_pylist()
    # Ids are requested of an engine that says that it is one of ReplayLake's.
    assert row == {"policy": "agent", "policy_version": 1, "action_tokens": [1, 2]}


@pytest.mark.slow
def test_a_model_that_does_not_load_ends_the_server(lake: Lake) -> None:
    command = [str(Path(sys.executable).with_name("replaylake")), "serve", "agent:1", "--json"]
    done = subprocess.run(
        [*command, "--log-to", "agents", "--port", "0", "--lake", str(lake.path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    said = json.loads(done.stdout)["error"]
    assert said["kind"] == "ServeError"
    assert "engine of agent:1 ended with status 1 before it was ready" in said["message"]
    engine, server = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "config.json" in engine
    assert said["message"] in server
