from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import typer

from replaylake.cli.options import parse_duration, parse_size
from replaylake.cli.output.command_output import duration
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.lake.lake import open_lake


@pytest.fixture
def shards(lake: Path) -> Path:
    """A dataset of five episodes of two steps, each a shard."""
    dataset = open_lake(lake, create=True).dataset("play")
    for number in range(5):
        observations = np.zeros((2, 2), np.float32)
        actions, rewards = np.array([0, 1]), np.ones(2)
        episode = Episode(f"e{number}", observations, actions, rewards, terminated=True)
        dataset.append([episode])
    return lake


def _age(lake: Path, days: float) -> None:
    """Let every file have been written some days ago."""
    then = time.time() - days * 86_400
    for path in lake.rglob("*"):
        os.utime(path, (then, then))


def test_compact(run: Callable, shards: Path) -> None:
    done = run("maintain", "compact", "play")
    assert done.code == 0
    assert done.out.startswith("play@6: 5 shards became 1, ")
    assert "10 rows of 5 shards rewritten in 1 commit\n" in done.out
    again = run("maintain", "compact", "play", "--json").json
    assert again["tables"][0]["num_commits"] == 0
    assert run("maintain", "compact", "play").out == "play@6: 1 shard, no change\n"


def test_compact_takes_a_size_in_range(run: Callable, shards: Path) -> None:
    refused = run("maintain", "compact", "play", "--target", "1MiB")
    assert refused.code == 2
    assert "expected 67,108,864 (64 MiB)" in " ".join(refused.err.split())
    assert run("maintain", "compact", "play", "--target", "100MB").code == 0
    run("maintain", "compact", "nope").failed("dataset 'nope': not in this lake")


def test_vacuum_lists_and_then_deletes(run: Callable, shards: Path, tree: Callable) -> None:
    run("maintain", "compact", "play")
    assert run("maintain", "vacuum").out == "0 files, 0 bytes to delete\n"
    _age(shards, 8)
    before = tree()
    listed = run("maintain", "vacuum")
    assert len(listed.out.splitlines()) == 7
    assert "5 files (shard 5), " in listed.out
    assert listed.out.endswith(" to delete\n  nothing was changed; use --yes to delete\n")
    assert tree() == before
    done = run("maintain", "vacuum", "play", "--yes", "--json").json
    assert (done["deleted"], done["num_files"]) == (True, 5)
    assert len(before) - len(tree()) == 5
    run("show", "play@2").failed("play@2: found that 2 of its 2 shards are gone", "vacuum")
    assert run("sql", "select count(*) as n from play.steps", "--json").json["rows"] == [{"n": 10}]


def test_vacuum_of_what_is_young_has_to_be_forced(run: Callable, shards: Path) -> None:
    run("maintain", "compact", "play")
    refused = run("maintain", "vacuum", "--older-than", "1m")
    assert refused.code == 2
    said = " ".join(refused.err.split())
    assert "Invalid value for --older-than: found 60, expected at least 3600" in said
    assert "force it" in said
    time.sleep(0.02)
    assert (
        run("maintain", "vacuum", "--older-than", "0s", "--force", "--json").json["num_files"] == 5
    )


def test_trim(run: Callable, shards: Path) -> None:
    assert run("maintain", "trim", "play", "--max-steps", 5).out == (
        "play: would remove 3 episodes, 6 steps; 4 steps left\n"
        "  nothing was changed; use --yes to delete\n"
    )
    done = run("maintain", "trim", "play", "--max-steps", 5, "--yes")
    assert done.out == (
        "play@6: 3 episodes, 6 steps removed; 4 steps left\n  3 shards dropped whole, 0 rewritten\n"
    )
    again = run("maintain", "trim", "play", "--older-than", "1d", "--yes")
    assert again.out == "play@6: nothing to trim; 4 steps left\n"
    assert run("maintain", "trim", "play", "--older-than", "1d", "--json").json["dry_run"] is True
    assert run("maintain", "trim", "play").code == 2
    assert run("maintain", "trim", "play", "--older-than", "soon").code == 2


def test_retention_is_shown_set_and_unset(run: Callable, shards: Path) -> None:
    assert run("maintain", "retention", "play").out == (
        "play\n  max steps      no limit\n  max age        no limit\n  keep versions  7d\n"
        "  target shard   128 MiB\n  cache max      no limit\n"
    )
    done = run(
        "maintain", "retention", "play", "--max-steps", "4", "--max-age", "30d", "--json"
    ).json
    assert (done["max_steps"], done["max_age_s"]) == (4, 30 * 86_400)
    done = run(
        "maintain", "retention", "play", "--max-age", "none", "--cache-max", "20GB", "--json"
    ).json
    assert (done["max_age_s"], done["cache_max_bytes"]) == (None, 20 * 10**9)
    assert "  max steps      4\n" in run("maintain", "retention", "play").out
    refused = run("maintain", "retention", "play", "--keep-versions", "1m")
    assert refused.code == 2
    assert "Invalid value for --keep-versions: found 60, expected" in refused.err
    assert run("maintain", "retention", "play", "--max-steps", "many").code == 2


def test_maintain_once(run: Callable, shards: Path) -> None:
    run("maintain", "retention", "play", "--max-steps", "6")
    done = run("maintain", "run")
    assert done.code == 0
    header, play, lake = done.out.splitlines()
    assert header.split()[:3] == ["dataset", "version", "trimmed"]
    assert play.split()[0] == "play"
    assert lake.split()[0] == "(lake)"
    body = run("maintain", "run", "play", "--json").json
    assert [one["dataset"] for one in body["datasets"]] == ["play"]
    assert body["datasets"][0]["trimmed"] == 0


def test_maintain_goes_on_after_a_failure_and_says_so(run: Callable, shards: Path) -> None:
    other = open_lake(shards).dataset("other")
    other.append([Episode("e", np.zeros((1, 2), np.float32), np.array([0]), np.ones(1))])
    path = next((shards / "other" / "_delta_log").glob("*1.json"))
    path.write_bytes(b"{")
    done = run("maintain", "run", "--json")
    assert done.code == 1
    assert "error: other: LogCorruptError" in done.err
    rows = {one["dataset"]: one for one in done.json["datasets"]}
    assert rows["play"]["compacted"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_maintain_every_ends_cleanly_mid_sleep(shards: Path, number: int) -> None:
    command = [
        sys.executable,
        "-m",
        "replaylake.cli.main",
        "maintain",
        "run",
        "--every",
        "1h",
        "--json",
    ]
    environment = {**os.environ, "REPLAYLAKE_LAKE": str(shards)}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert '"compacted": 4' in process.stdout.readline()
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert err.endswith("stopped\n")


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("15m", 900), ("1h", 3600), ("7d", 604_800), ("0.5h", 1800)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text, "--x") == seconds
    assert parse_duration(duration(seconds), "--x") == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "1w", "1h30m", "nan"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected a number and s, m, h or d"):
        parse_duration(text, "--x")


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1000", 1000), ("1kB", 1000), ("1 KiB", 1024), ("20GB", 20 * 10**9), ("1.5m", 1_500_000)],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text, "--x") == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "-1", "1XB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected a number of bytes"):
        parse_size(text, "--x")
