"""Lineage: from the data that policy versions learned from to the decisions they made."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence, Set
from typing import Any, Final

from replaylake.datastore.errors import ReplayLakeError
from replaylake.datastore.lake.holdout import describe_selection
from replaylake.serve.explorer.serving.serving_page import read_arms
from replaylake.serve.explorer.visits.page import Panel
from replaylake.serve.explorer.visits.visit import Visit
from replaylake.serve.pages.charts import FlowNode, flow_chart
from replaylake.serve.pages.markup import tag
from replaylake.serve.pages.texts import count

_MAX_VERSIONS: Final = 8
_RECENT_S: Final = 30.0
_STAGES: Final = ("Data", "Run", "Version", "Decisions")


def draw_lineage(
    visit: Visit,
    entries: Sequence[Mapping[str, Any]],
    known_runs: Set[str],
    *,
    title: str = "Lineage",
    max_versions: int = _MAX_VERSIONS,
) -> Panel:
    """Draw data, runs, versions and decision logs of policies, and what led to what.

    entries: policy versions, the newest first; so many of them are drawn, and those with an alias.
    known_runs: the runs that have a page.
    """
    aliased = [entry for entry in entries[max_versions:] if entry["aliases"]]
    shown = [*entries[:max_versions], *aliased]
    names = {entry["policy"] for entry in shown}
    logs: dict[str, dict[str, int]] = {}
    totals: dict[str, int] = {}
    unreadable = []
    for dataset in visit.lake.datasets():
        try:
            arms = _read_recent_arms(visit, dataset)
        except ReplayLakeError as error:
            unreadable.append(tag("p", f"Decisions of {dataset}: {error}", class_="wrong"))
            continue
        if own := {
            f"{arm['policy']}:{arm['policy_version']}": arm["num"]
            for arm in arms
            if arm["policy"] in names
        }:
            logs[dataset] = own
            totals[dataset] = sum(arm["num"] for arm in arms)
    stages: list[dict[str, FlowNode]] = [{} for _ in _STAGES]
    links: set[tuple[int, str, str]] = set()
    for entry in shown:
        name = entry["policy"]
        version = f"{name}:{entry['version']}"
        aliases = ", ".join(entry["aliases"])
        is_own_page = visit.path.get("name") == name
        page = None if is_own_page else visit.link("policies", name)
        stages[2][version] = FlowNode(version, aliases or "no alias", page)
        run_id = entry["run_id"] or ""
        address = visit.link("runs", run_id) if run_id in known_runs else None
        algorithm = str(entry["lineage"].get("algorithm") or "")
        data = _find_data(visit, entry)
        # Versions that learned from other data have a box of their own, also of the same run.
        run = json.dumps([run_id, sorted(data)])
        node = FlowNode(run_id or "not recorded", algorithm, address, is_id=bool(run_id))
        stages[1].setdefault(run, node)
        links.add((1, run, version))
        for key, source in data.items():
            stages[0].setdefault(key, source)
            links.add((0, key, run))
        for dataset, nums in logs.items():
            num = nums.get(version)
            if num is None:
                continue
            address = visit.link("serving", dataset)
            num_own, text = sum(nums.values()), count(totals[dataset], "decision")
            if num_own < totals[dataset]:
                text = f"{num_own:,} of {text}"
            stages[3].setdefault(dataset, FlowNode(dataset, text, address))
            links.add((2, version, dataset))
    note = "Each line leads from a source to a result. Each decision's page has its own lineage."
    if len(entries) > len(shown):
        note = f"The newest {max_versions} versions, and those with an alias. {note}"
    titled = list(zip(_STAGES, stages, strict=True))
    label = f"Lineage of {', '.join(sorted(names))}"
    chart = flow_chart(titled, sorted(links), label=label)
    visit.take_queries()
    return Panel(title, [chart, unreadable], note=note)


def _read_recent_arms(visit: Visit, dataset: str) -> list[dict[str, Any]]:
    """Return the decisions of each policy version, up to 30 s old.

    Servers commit all the time, and each new version of a log needs a scan.
    """
    key = ("recent arms", dataset)
    known: tuple[float, list[dict[str, Any]]] | None = visit.memory.get(key)
    if known is None or time.monotonic() - known[0] > _RECENT_S:
        known = (time.monotonic(), read_arms(visit, dataset))
        visit.memory.put(key, known, 1000 * (1 + len(known[1])))
    return known[1]


def _find_data(visit: Visit, entry: Mapping[str, Any]) -> dict[str, FlowNode]:
    """Return what a version learned from, by version and condition."""
    found = {}
    for used in entry["lineage"].get("datasets") or ():
        dataset, version = str(used.get("dataset")), used.get("version")
        text = dataset if version is None else f"{dataset}@{version}"
        where = str(used.get("where") or "")
        address = visit.link("datasets", dataset, at=version)
        found[f"{text} {where}"] = FlowNode(text, where and describe_selection(where), address)
    return found or {"": FlowNode("not recorded", "")}
