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

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.manifest import GRAPH, MANIFEST, manifest_bytes
from replaylake.datastore.lake.policies.policy import PolicySpec


def test_it_needs_a_lake(run: Any, tmp_path: Path) -> None:
    run("explore", tmp_path / "nowhere").failed("found none there")


def test_another_address_needs_a_token(run: Any, lake: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("REPLAYLAKE_ADMIN_TOKEN", raising=False)
    open_lake(lake, create=True)
    ran = run("explore", "--host", "0.0.0.0", "--port", "0")
    assert ran.code == 2
    assert "no tokens" in " ".join(ran.err.split())
    assert "--admin-token-file" in ran.err


def test_without_a_token_other_machines_only_read(run: Any, lake: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("REPLAYLAKE_ADMIN_TOKEN", raising=False)
    open_lake(lake, create=True)
    ran = run("explore", "--host", "0.0.0.0", "--port", "0", "--insecure")
    assert ran.code == 2
    said = " ".join(ran.err.replace("│", " ").split())
    assert "--insecure" in said
    assert "expected --read-only beside it" in said


def test_reading_alone_and_promoting_exclude_each_other(run: Any, lake: Path) -> None:
    open_lake(lake, create=True)
    ran = run("explore", "--read-only", "--allow-promote")
    assert ran.code == 2
    assert "cannot be combined with --read-only" in " ".join(ran.err.split())


def test_a_prefix_is_a_path(run: Any, lake: Path) -> None:
    open_lake(lake, create=True)
    ran = run("explore", "--path-prefix", "no path")
    assert ran.code == 2
    assert "--path-prefix" in ran.err


def test_a_tokenizer_is_a_file_of_one(run: Any, lake: Path) -> None:
    open_lake(lake, create=True)
    ran = run("explore", "--tokenizer", lake / "nothing.json")
    assert ran.code == 2
    assert "--tokenizer" in ran.err


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--allow-promote", "--read-only"])
def test_it_serves_until_it_is_interrupted(lake: Path, tmp_path: Path, option: str) -> None:
    opened = open_lake(lake, create=True)
    package = tmp_path / "package"
    package.mkdir()
    spec, files = PolicySpec(Box((2,)), Discrete(2), "categorical"), {GRAPH: b"graph"}
    for name, data in {**files, MANIFEST: manifest_bytes(spec, {}, files)}.items():
        (package / name).write_bytes(data)
    opened.registry.register("p", package, run_id="r", lineage={"datasets": []})
    command = [sys.executable, "-m", "replaylake.cli.main", "explore", str(lake), option]
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
        with urllib.request.urlopen(f"{ready['url']}policies/p", timeout=60) as answer:
            has_form = b"Promote if the gate passes" in answer.read()
        nice = os.getpriority(os.PRIO_PROCESS, process.pid)
        assert nice == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert has_form == (option == "--allow-promote")
    assert process.returncode == 0
    assert said == f"{lake} is at {ready['url']}; stop with Ctrl-C\n"
