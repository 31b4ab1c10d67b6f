"""`replaylake evaluate --dataset`: pass@k of stored samples, its table, JSON, plot and record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import replaylake as rl
from replaylake.datastore.lake.lake import open_lake


@pytest.fixture(autouse=True)
def samples(lake: Path) -> None:
    """agent:1 solves every fourth sample of 24 tasks, agent:2 every second."""
    episodes = [
        rl.Episode(
            f"t{task:02d}#{version}.{number}",
            observations=np.array(["?"], object),
            actions=np.array(["!"], object),
            rewards=np.array([float((task + number) % (6 - 2 * version) == 0)]),
            terminated=True,
            policies=["agent"],
            policy_versions=np.array([version]),
            extras={
                "group_id": [f"t{task:02d}"],
                "observation_tokens": [[1, 2, 3]],
                "action_tokens": [[4] * (version + 1)],
                "action_log_probs": [[-0.5] * (version + 1)],
            },
        )
        for version, num in ((1, 4), (2, 6))
        for task in range(24)
        for number in range(num)
    ]
    open_lake(lake, create=True).dataset("math").append(episodes)


def test_a_person_reads_a_table(run: Any) -> None:
    ran = run("evaluate", "agent:1", "agent:2", "--compare", "--dataset", "math")
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    assert lines[:3] == [
        "on math@1, by group_id; passed: return > 0",
        "agent:1: 24 tasks, 96 samples (4 each); tokens a sample: 3 prompt, 2 completion "
        "(8 a success)",
        "agent:2: 24 tasks, 144 samples (6 each); tokens a sample: 3 prompt, 3 completion "
        "(6 a success)",
    ]
    header = lines[4].split("  ")
    assert [name.strip() for name in header if name] == [
        "policy", "estimator", "value", "low", "high", "difference", "from", "to", "shared tasks",
    ]  # fmt: skip
    (best,) = [line.split() for line in lines if line.startswith("agent:2  pass@1 ")]
    assert (best[2], best[5], best[8]) == ("0.5", "0.25", "24")
    assert lines[-2:] == [
        "agent:1: supported: 24 tasks, drawn independently.",
        "agent:2: supported: 24 tasks, drawn independently.",
    ]


def test_json_is_what_the_lake_keeps(run: Any, lake: Path) -> None:
    ran = run(
        "evaluate", "agent:1", "even=policy_version = 2", "--compare", "--dataset", "math",
        "--k", "3", "--k", "1", "--success", "return > 0.5", "--where", "group_id < 't22'",
        "--json",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    body = ran.json
    assert (body["dataset"], body["version"], body["success"]) == ("math", 1, "return > 0.5")
    first, second = body["policies"]
    names = [one["estimator"] for one in first["estimates"]]
    assert names == ["pass@1", "pass@3", "mean reward"]
    assert first["estimates"][0]["ci_low"] < 0.25 < first["estimates"][0]["ci_high"]
    assert (first["policy"], first["policy_version"], first["num_tasks"]) == ("agent", 1, 22)
    assert (second["label"], second["policy"], second["against"]) == ("even", None, "agent:1")
    assert second["estimates"][0]["num_shared_tasks"] == 22
    saved = open_lake(lake).registry.evaluations.list()
    assert [one.evaluation_id for one in saved] == [
        first["evaluation_id"],
        second["evaluation_id"],
    ]
    assert [(one.kind, one.policy, one.policy_version, one.verdict) for one in saved] == [
        ("tasks", "agent", 1, "supported"),
        ("tasks", None, None, "supported"),
    ]
    assert saved[0].report["estimates"] == first["estimates"]
    assert saved[1].report["where"] == "policy_version = 2"
    listed = run("sql", "select policy_version from evaluations where kind = 'tasks'", "--json")
    assert [row["policy_version"] for row in listed.json["rows"]] == [1, None]


def test_one_policy_needs_no_comparison(run: Any) -> None:
    ran = run("evaluate", "agent:2", "--dataset", "math@1", "--task", "left(group_id, 2)")
    assert ran.code == 0, ran.err
    assert "agent:2: 3 tasks, 144 samples (24 to 60 each)" in ran.out
    assert "difference" not in ran.out
    assert ran.out.splitlines()[-1].startswith("agent:2: weak: 3 tasks are few")


@pytest.mark.parametrize("policies", [["agent:1"], ["agent:1", "agent:2", "all=true"]])
def test_a_plot_has_bands_and_differences(run: Any, tmp_path: Path, policies: list[str]) -> None:
    path = tmp_path / "rates.png"
    compare = ["--compare"] if len(policies) > 1 else []
    ran = run("evaluate", *policies, *compare, "--dataset", "math", "--plot", path)
    assert ran.code == 0, ran.err
    with Image.open(path) as image:
        # Differences are a second panel.
        assert (image.width > 1000) == bool(compare)
    svg = tmp_path / "rates.svg"
    run("evaluate", *policies, *compare, "--dataset", "math", "--k", "2", "--plot", svg)
    assert "agent:1" in svg.read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--env, --dataset: found neither"),
        (["--dataset", "math", "--env", "X-v0"], "--env, --dataset: found both"),
        (["--dataset", "math", "--seed", "1"], "--seed: requires --env"),
        (["--dataset", "math", "--env-arg", "a=1"], "--env-arg: requires --env"),
        (["--env", "X-v0", "--success", "true"], "--success: requires --dataset"),
        (["--dataset", "math", "--k", "0"], "--k: found 0, expected 1 or more"),
    ],
)
def test_options_that_mean_nothing_are_wrong_usage(run: Any, options: list[str], said: str) -> None:
    ran = run("evaluate", "agent:1", *options)
    assert ran.code == 2
    assert said in " ".join(ran.err.split())


def test_refusals_name_options_and_keep_nothing(run: Any, lake: Path) -> None:
    run("evaluate", "agent:3", "--dataset", "math").failed("expected one of agent:1, agent:2")
    run("evaluate", "agent:1", "--dataset", "math", "--success", "x").failed("success x")
    run("evaluate", "agent", "--dataset", "math").failed("policy 'agent': not in this lake")
    assert open_lake(lake).registry.evaluations.list() == []
