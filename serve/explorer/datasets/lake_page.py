"""The lake's page: its datasets, their way to decisions, growth, runs, and servers that log."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final

from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.runs.summary import RunSummary, summarize
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.serve.explorer.runs.runs_page import draw_status
from replaylake.serve.explorer.serving.lineage_panel import draw_lineage
from replaylake.serve.explorer.serving.serving_page import read_arms
from replaylake.serve.explorer.visits.page import Page, Panel, build_panels, draw_empty
from replaylake.serve.explorer.visits.visit import Visit
from replaylake.serve.pages.charts import sparkline, stacked_chart
from replaylake.serve.pages.markup import Child, join, tag
from replaylake.serve.pages.tables import Column, quiet_number, table, time_tag
from replaylake.serve.pages.texts import count, short_number, size

# Days that the growth is drawn over, up to the last one, and datasets with a color of their own.
_MIN_DAYS: Final = 14
_MAX_DAYS: Final = 60
_MAX_PARTS: Final = 7
_MAX_POLICIES: Final = 4
# Columns of the histograms of returns.
_RETURN_BINS: Final = 24
# The newest versions whose way is drawn, and the newest runs.
_MAX_VERSIONS: Final = 4
_MAX_RUNS: Final = 5
# Versions of one decision log, the newest ones; the page of serving has all.
_MAX_SERVED: Final = 20
# The page waits so long for the episodes of all datasets to be summarized, and comes again so soon.
_WAIT_S: Final = 0.7
_REFRESH_S: Final = 2
# Writers by the name in their commits, where that is an earlier one.
_WRITERS: Final = {"sessionise": "feedback join", "label": "explorer"}


@dataclass(frozen=True)
class _Commits:
    """The commits of a dataset up to a version: steps by day (UTC), and the last one's record."""

    version: int = -1
    steps_by_day: Mapping[date, int] = field(default_factory=dict)
    last: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LakeContents:
    """What the panels share: the newest version of each dataset, and what is known of it.

    running, newest: the runs in progress, and the last that were started. policies: all versions,
    the newest first. summarized: the snapshots whose episodes are counted.
    """

    lake: Lake
    snapshots: Mapping[str, Snapshot]
    datasets: Sequence[Mapping[str, Any]]
    commits: Mapping[str, _Commits]
    running: Sequence[RunSummary]
    newest: Sequence[RunSummary]
    known_runs: Set[str]
    policies: Sequence[Mapping[str, Any]]
    summarized: Sequence[Snapshot]


def show_lake(visit: Visit) -> Page:
    """Return the lake's page."""
    lake = visit.lake
    snapshots = {name: lake.snapshot(name) for name in lake.datasets()}
    runs = lake.registry.runs()
    records = [one for one in runs if one.get("status") == "running"]
    commits = {name: _read_commits(visit, one) for name, one in snapshots.items()}
    summarized = _find_summarized(visit, snapshots)
    contents = LakeContents(
        lake=lake,
        snapshots=snapshots,
        datasets=[
            _describe_dataset(visit, one, commits[name], is_summarized=name in summarized)
            for name, one in snapshots.items()
        ],
        commits=commits,
        running=[summarize(lake.storage, one) for one in records],
        newest=[summarize(lake.storage, one) for one in runs[: -_MAX_RUNS - 1 : -1]],
        known_runs={one["run_id"] for one in runs},
        policies=sorted(lake.registry.list(), key=lambda row: -row["created_ms"]),
        summarized=[snapshots[name] for name in summarized],
    )
    panels = build_panels(visit, contents, PANELS)
    is_complete = len(summarized) == len(snapshots)
    num_episodes = sum(one["num_episodes"] or 0 for one in contents.datasets)
    num_bytes = sum(one["num_bytes"] for one in contents.datasets)
    return Page(
        "Lake",
        facts=[
            ("datasets", f"{len(snapshots):,}"),
            ("episodes", f"{num_episodes:,}" if is_complete else "being counted"),
            ("steps", f"{sum(one['num_steps'] for one in contents.datasets):,}"),
            ("size", size(num_bytes)),
            ("runs", f"{len(runs):,}"),
            ("policies", f"{len({row['policy'] for row in contents.policies}):,}"),
        ],
        panels=panels,
        data={
            "lake": lake.url,
            "datasets": contents.datasets,
            "running": [one.to_json() for one in contents.running],
        },
        rows=contents.datasets,
        refresh_s=None if is_complete else _REFRESH_S,
    )


def _find_summarized(visit: Visit, snapshots: Mapping[str, Snapshot]) -> list[str]:
    """Return the datasets whose episodes can be queried without reading all steps."""
    found = []
    deadline = time.monotonic() + _WAIT_S
    for name, snapshot in snapshots.items():
        wait_s = max(0.0, deadline - time.monotonic())
        if visit.profiles.find_unsummarized(visit.lake, snapshot, wait_s=wait_s) is None:
            found.append(name)
    return found


def _read_commits(visit: Visit, snapshot: Snapshot) -> _Commits:
    """Return what is known of the commits up to a version; no file is read a second time."""
    key = ("commits", snapshot.dataset)
    known: _Commits | None = visit.memory.get(key)
    if known is None or known.version > snapshot.version:
        # Later ones are remembered where a dataset was dropped and created again.
        known = _Commits()
    if known.version < snapshot.version:
        steps, last = dict(known.steps_by_day), known.last
        for one in visit.lake.dataset(snapshot.dataset).history(known.version + 1):
            if one["version"] > snapshot.version:
                break
            last, at = one, _time(one)
            if at is not None and (num_steps := one.get("num_steps") or 0) > 0:
                steps[at.date()] = steps.get(at.date(), 0) + num_steps
        known = _Commits(snapshot.version, steps, last)
        visit.memory.put(key, known, 2000 + 200 * len(steps))
    return known


def _time(commit: Mapping[str, Any]) -> datetime | None:
    return _to_time(commit.get("timestamp"))


def _to_time(milliseconds: int | None) -> datetime | None:
    return None if milliseconds is None else datetime.fromtimestamp(milliseconds / 1000, UTC)


def _describe_dataset(
    visit: Visit, snapshot: Snapshot, commits: _Commits, *, is_summarized: bool
) -> dict[str, Any]:
    name = snapshot.dataset
    acting = _list_policies(visit, snapshot) if is_summarized else []
    last = commits.last
    known = [(one["mean_return"], one["num_returns"]) for one in acting if one["num_returns"]]
    num_returns = sum(num for _, num in known)
    return {
        "dataset": name,
        "version": snapshot.version,
        "num_episodes": sum(one["num_episodes"] for one in acting) if is_summarized else None,
        "num_steps": snapshot.num_steps,
        "mean_return": sum(mean * num for mean, num in known) / num_returns if known else None,
        "num_bytes": sum(entry.size_bytes for entry in snapshot.files),
        "policies": [one["policy"] for one in acting if one["policy"] is not None],
        "last_operation": last.get("operation"),
        "last_writer": last.get("producer"),
        "last_write_at": _time(last),
    }


def _list_policies(visit: Visit, snapshot: Snapshot) -> list[dict[str, Any]]:
    return visit.sql(
        f"""SELECT policy, count(*) AS num_episodes, count("return") AS num_returns,
            avg("return") AS mean_return
        FROM {snapshot.dataset}.episodes GROUP BY policy ORDER BY num_episodes DESC, policy""",
        snapshot,
    )


def _draw_returns(visit: Visit, snapshot: Snapshot) -> Child:
    """Return a small histogram of a dataset's returns."""
    rows = visit.sql(
        f"""SELECT least(coalesce(try_cast(floor(("return" - low) / nullif(high - low, 0) * $bins)
            AS INTEGER), $bins // 2), $bins - 1) AS bin, count(*) AS num,
            any_value(low) AS low, any_value(high) AS high
        FROM {snapshot.dataset}.episodes, (SELECT min("return") AS low, max("return") AS high
            FROM {snapshot.dataset}.episodes WHERE isfinite("return"))
        WHERE isfinite("return") GROUP BY bin ORDER BY bin""",
        snapshot,
        bins=_RETURN_BINS,
    )
    if not rows:
        return ""
    counts = [0] * _RETURN_BINS
    for row in rows:
        counts[row["bin"]] = row["num"]
    low, high = rows[0]["low"], rows[0]["high"]
    values = short_number(low) if low == high else f"{short_number(low)} to {short_number(high)}"
    return sparkline(counts, label=f"Returns of {snapshot.dataset}: {values}")


def list_datasets(visit: Visit, contents: LakeContents) -> Panel:
    """Show a row for each dataset."""
    if not contents.datasets:
        body = draw_empty(
            "This lake has no dataset yet.",
            command=f"`replaylake ingest LOG --dataset NAME --lake {contents.lake.url}`",
        )
        return Panel("Datasets", body)
    returns = {}
    for snapshot in contents.summarized:
        _list_policies(visit, snapshot)
        returns[snapshot.dataset] = _draw_returns(visit, snapshot)
    rows: list[list[Child]] = []
    for one in contents.datasets:
        policies = one["policies"]
        more = f" and {len(policies) - _MAX_POLICIES} more" if len(policies) > _MAX_POLICIES else ""
        rows.append(
            [
                tag("a", one["dataset"], href=visit.link("datasets", one["dataset"])),
                tag("span", "being counted", class_="quiet")
                if one["num_episodes"] is None
                else f"{one['num_episodes']:,}",
                f"{one['num_steps']:,}",
                quiet_number(one["mean_return"], is_short=True),
                returns.get(one["dataset"], ""),
                size(one["num_bytes"]),
                join(time_tag(one["last_write_at"])),
                tag("span", describe_writer(one["last_writer"]), title=one["last_writer"]),
                ", ".join(policies[:_MAX_POLICIES]) + more
                or tag(
                    "span",
                    "being counted" if one["num_episodes"] is None else "not recorded",
                    class_="quiet",
                ),
            ]
        )
    columns: list[Column | str] = [
        "Dataset",
        Column("Episodes", is_number=True),
        Column("Steps", is_number=True),
        Column("Mean return", is_number=True),
        "Returns",
        Column("Size", is_number=True),
        "Last write",
        "Last writer",
        "Acting policies",
    ]
    return Panel("Datasets", table(columns, rows, label="Datasets"))


def draw_growth(visit: Visit, contents: LakeContents) -> Panel | None:
    """Draw the steps that were written each day, by dataset."""
    visit.note_query(
        """SELECT CAST(committed_at AS DATE) AS day, dataset, CAST(sum(num_steps) AS BIGINT) AS num
        FROM commits WHERE num_steps > 0 AND committed_at IS NOT NULL
        GROUP BY ALL ORDER BY day, dataset"""
    )
    days = [
        (day, name, num_steps)
        for name, commits in contents.commits.items()
        for day, num_steps in commits.steps_by_day.items()
    ]
    if not days:
        return None
    last: date = max(day for day, _, _ in days)
    first: date = max(min(day for day, _, _ in days), last - timedelta(days=_MAX_DAYS - 1))
    first = min(first, last - timedelta(days=_MIN_DAYS - 1))
    num = (last - first).days + 1
    counts: dict[str, list[int]] = {}
    for day, name, num_steps in days:
        if day >= first:
            counts.setdefault(name, [0] * num)[(day - first).days] += num_steps
    ordered = sorted(counts.items(), key=lambda item: -sum(item[1]))
    parts = [(name, by_day, f"{sum(by_day):,}") for name, by_day in ordered[:_MAX_PARTS]]
    if rest := ordered[_MAX_PARTS:]:
        summed = [sum(day) for day in zip(*(by_day for _, by_day in rest), strict=True)]
        parts.append((f"{len(rest)} others", summed, f"{sum(summed):,}"))
    axis = [f"{first:%Y-%m-%d}", f"{last:%Y-%m-%d}"]
    chart = stacked_chart(parts, label="Steps written a day (UTC)", axis=axis)
    return Panel("Growth", chart, is_wide=False)


def draw_loop(visit: Visit, contents: LakeContents) -> Panel | None:
    """Draw how data became policies, and policies decisions."""
    if not contents.policies:
        return None
    registry = visit.lake.registry
    places = [
        place
        for place, row in enumerate(contents.policies)
        if place < _MAX_VERSIONS or row["aliases"]
    ]
    chosen = [contents.policies[place] for place in places[: 2 * _MAX_VERSIONS]]
    entries = [registry.entry(row["policy"], row["version"]) for row in chosen]
    panel = draw_lineage(
        visit,
        entries,
        contents.known_runs,
        title="From data to decisions",
        max_versions=len(entries),
    )
    visit.note_query(
        "SELECT policy, version, aliases, run_id, lineage FROM policies ORDER BY created_at DESC"
    )
    num_left = len(contents.policies) - len(entries)
    rest = tag("a", f"{count(num_left, 'other version')}", href=visit.link("policies"))
    return replace(panel, note=["Not shown: ", rest, "."] if num_left else None)


def list_runs(visit: Visit, contents: LakeContents) -> Panel:
    """Show the runs that train now, and the last ones."""
    active = [one for one in contents.running if one.status == "running"]
    shown = {one.run_id: one for one in (*active, *contents.newest)}
    if not shown:
        body = draw_empty(
            "No run has trained in this lake.",
            command="`replaylake train offline DATASET --algorithm bc --policy NAME`",
        )
        return Panel("Runs", body, is_wide=False)
    visit.note_query(
        "SELECT run_id, kind, status, started_at, ended_at FROM runs ORDER BY started_at DESC"
    )
    rows: list[list[Child]] = [
        [
            tag("a", one.run_id, href=visit.link("runs", one.run_id), class_="ulid"),
            one.algorithm or one.kind or "",
            draw_status(one.status),
            one.policy or "",
            join(time_tag(_to_time(one.started_ms))),
        ]
        for one in shown.values()
    ]
    columns: list[Column | str] = ["Run", "Algorithm", "Status", "Policy", "Started"]
    note = None if not active else f"{count(len(active), 'run')} in progress"
    return Panel("Runs", table(columns, rows, label="Runs"), note=note, is_wide=False)


def list_served(visit: Visit, contents: LakeContents) -> Panel:
    """Show the policy versions whose decisions servers log into the lake."""
    rows: list[list[Child]] = []
    known = {row["policy"] for row in contents.policies}
    for name in contents.snapshots:
        for one in read_arms(visit, name)[:_MAX_SERVED]:
            policy = f"{one['policy']}:{one['policy_version']}"
            rows.append(
                [
                    tag("a", policy, href=visit.link("policies", one["policy"]))
                    if one["policy"] in known
                    else policy,
                    tag("a", name, href=visit.link("serving", name)),
                    f"{one['num']:,}",
                    join(time_tag(one["first"])),
                    join(time_tag(one["last"])),
                ]
            )
    if not rows:
        body = draw_empty(
            "No server has logged decisions to this lake.",
            command="`replaylake serve POLICY --log-to DATASET`",
        )
        return Panel("Served policies", body)
    columns: list[Column | str] = [
        "Policy",
        "Logs to",
        Column("Decisions", is_number=True),
        "First",
        "Last",
    ]
    return Panel("Served policies", table(columns, rows, label="Served policies"))


def describe_writer(producer: str | None) -> str:
    """Return who wrote a commit, by the kind that its producer's name begins with."""
    kind = re.split("[/:]", producer or "")[0]
    return _WRITERS.get(kind, kind) or "unknown"


PANELS: Final = (list_datasets, draw_loop, draw_growth, list_runs, list_served)
