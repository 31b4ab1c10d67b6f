"""`replaylake explore`: what it refuses, and a server from its start to its end."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from replaylake.datastore.lake.lake import open_lake


def test_it_needs_a_lake(run: Any, tmp_path: Path) -> None:
    run("explore", tmp_path / "nowhere").failed("found none there")


def test_another_address_needs_a_token(run: Any, lake: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("REPLAYLAKE_ADMIN_TOKEN", raising=False)
    open_lake(lake, create=True)
    ran = run("explore", "--host", "0.0.0.0", "--port", "0")
    assert ran.code == 2
    assert "no tokens" in " ".join(ran.err.split())
    assert "--admin-token-file" in ran.err


def test_a_prefix_is_a_path(run: Any, lake: Path) -> None:
    open_lake(lake, create=True)
    ran = run("explore", "--path-prefix", "no path")
    assert ran.code == 2
    assert "--path-prefix" in ran.err


@pytest.mark.slow
def test_it_serves_until_it_is_interrupted(lake: Path) -> None:
    open_lake(lake, create=True)
    command = [sys.executable, "-m", "replaylake.cli.main", "explore", str(lake)]
    process = subprocess.Popen(
        [*command, "--port", "0", "--path-prefix", "/x", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready["url"] == f"http://127.0.0.1:{ready['port']}/x/"
        with urllib.request.urlopen(ready["url"], timeout=60) as answer:
            assert b"This lake has no dataset yet." in answer.read()
        nice = os.getpriority(os.PRIO_PROCESS, process.pid)
        assert nice == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert said == f"{lake} is at {ready['url']}; stop with Ctrl-C\n"
