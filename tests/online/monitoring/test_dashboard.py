"""The dashboard for Grafana of online runs shows metrics that a run exposes, and all of them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from replaylake.datastore.lake.runs.timings import Timings
from replaylake.online.monitoring.prometheus import METRIC_FAMILIES, MetricsServer

DASHBOARD = json.loads((Path(__file__).parents[3] / "docs" / "grafana" / "online.json").read_text())
# Names that a run logs.
NAMES = (
    "env_steps",
    "episodes",
    "return",
    "staleness",
    "samples_per_insert",
    "updates_per_s",
    "steps_per_s",
    "latency_ms",
    "evaluation/return",
    "selection/environment",
    "critic_loss",
    "q_mean",
)
PANELS: list[dict[str, Any]] = [one for one in DASHBOARD["panels"] if one["type"] != "row"]


@pytest.fixture(scope="module")
def samples() -> list[tuple[str, dict[str, str]]]:
    """What is exported of a run: names and labels."""
    timings = Timings("workers")
    timings.add("env_step", 1.0, 10, 100)
    with MetricsServer(0) as server:
        server.begin("01aa", policy="pole", env="CartPole-v1")
        server.set(7, {**dict.fromkeys(NAMES, 1.0), **timings.to_metrics()})
        with urllib.request.urlopen(server.url, timeout=60) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
    return [(one.name, one.labels) for family in families for one in family.samples]


def _matches(labels: dict[str, str], label: str, how: str, pattern: str) -> bool:
    pattern = pattern.replace("$run", ".+")
    is_match = re.fullmatch(pattern, labels.get(label, "")) is not None
    return is_match == (how == "=~")


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_panel_shows_something_that_is_exported(
    panel: dict[str, Any], samples: list[tuple[str, dict[str, str]]]
) -> None:
    assert panel["targets"]
    for target in panel["targets"]:
        ((name, selector),) = re.findall(r"(replaylake_\w+)\{(.*?)\}", target["expr"])
        conditions = re.findall(r'(\w+)(=~|!~)"([^"]*)"', selector)
        assert conditions[0] == ("run_id", "=~", "$run")
        found = [
            labels
            for one, labels in samples
            if one == name and all(_matches(labels, *condition) for condition in conditions)
        ]
        assert found, target["expr"]
        shown = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
        assert "run_id" in shown
        assert set(shown) <= set(found[0])
        # A count that only grows is shown as a rate, but where the count itself is.
        assert name.endswith("_total") or not target["expr"].startswith("rate(")


@pytest.mark.slow
def test_a_run_exposes_what_every_panel_shows_while_it_goes_on(tmp_path: Path) -> None:
    arguments = ("--env", "CartPole-v1", "--algorithm", "dqn", "--steps", "1000000")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "replaylake.cli.main", "train", "online", *arguments),
            *("--dataset", "pole", "--policy", "pole", "--lake", str(tmp_path / "lake")),
            *("--metrics-port", "0", "--set", "evaluate_steps=2000"),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    said = ""
    while "metrics at" not in said:
        said = process.stderr.readline()
        assert said, "the run ended"
    url = said.split()[-1]
    reader = threading.Thread(target=process.stderr.read)
    reader.start()
    expressions = " ".join(target["expr"] for one in PANELS for target in one["targets"])
    missing = set(re.findall(r"replaylake_\w+", expressions))
    # The run would go on for many minutes: what it exposes by then, it does not expose at its end.
    deadline = time.monotonic() + 240
    while missing and time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError, HTTPException), urllib.request.urlopen(url, timeout=60) as answer:
            families = text_string_to_metric_families(answer.read().decode())
            missing -= {sample.name for family in families for sample in family.samples}
        time.sleep(0.5)
    running = process.poll() is None
    process.send_signal(signal.SIGINT)
    process.wait(60)
    reader.join()
    process.stderr.close()
    assert running
    assert missing == set()


def test_every_metric_is_on_a_panel() -> None:
    expressions = " ".join(target["expr"] for one in PANELS for target in one["targets"])
    names = {f"{one.name}_total" if one.kind == "counter" else one.name for one in METRIC_FAMILIES}
    assert names == set(re.findall(r"replaylake_\w+", expressions))


def test_it_is_what_grafana_imports() -> None:
    assert DASHBOARD["schemaVersion"] >= 36
    source, run = DASHBOARD["templating"]["list"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    for one in [run, *PANELS, *(target for panel in PANELS for target in panel["targets"])]:
        assert one["datasource"] == {"type": "prometheus", "uid": f"${{{source['name']}}}"}
    assert run["query"]["query"] == "label_values(replaylake_run_updates_total, run_id)"
    ids = [one["id"] for one in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    # No import says of itself which dashboard of that Grafana it is.
    assert "id" not in DASHBOARD


def test_no_panel_lies_on_another() -> None:
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) == 23
