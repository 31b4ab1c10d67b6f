"""Policies: versions, aliases and their moves, and what evaluations and gates say of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Final

from replaylake.datastore.errors import NotFoundError
from replaylake.datastore.lake.policies.evaluations import SavedEvaluation
from replaylake.datastore.names import parse_version
from replaylake.serve.explorer.policies.promotion_form import show_promotion
from replaylake.serve.explorer.policies.trial_panel import build_trial
from replaylake.serve.explorer.runs.runs_page import draw_tree, link_selection
from replaylake.serve.explorer.serving.lineage_panel import draw_lineage
from replaylake.serve.explorer.visits.forms import read_version
from replaylake.serve.explorer.visits.page import Page, Panel, draw_empty
from replaylake.serve.explorer.visits.visit import Query, Visit
from replaylake.serve.pages.charts import Interval, column_chart, interval_chart
from replaylake.serve.pages.markup import Child, Markup, join, tag
from replaylake.serve.pages.tables import Column, quiet_number, table, time_tag

_REFRESH_S: Final = 2
# Of versions, moves and evaluations, the newest are shown.
_MAX_ROWS: Final = 50
# Saved evaluations of the lake that one page looks at, of all policies: each is a file of its own.
_MAX_EVALUATIONS: Final = 500
# Titles of kinds of evaluations.
_KINDS: Final = {"tasks": "samples of tasks"}
_COMMAND: Final = "`replaylake train offline DATASET --algorithm bc --policy NAME`"


def list_policies(visit: Visit) -> Page:
    """Return the page of `/policies`."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in visit.lake.registry.list():
        by_name.setdefault(row["policy"], []).append(row)
    rows: list[list[Child]] = []
    data = []
    for name, versions in by_name.items():
        aliases = {alias: row["version"] for row in versions for alias in row["aliases"]}
        newest = versions[-1]
        data.append(
            {
                "policy": name,
                "num_versions": len(versions),
                "newest_version": newest["version"],
                "created_at": _time(newest["created_ms"]),
                "aliases": aliases,
            }
        )
        rows.append(
            [
                tag("a", name, href=visit.link("policies", name)),
                f"{len(versions):,}",
                f"{newest['version']:,}",
                join(time_tag(_time(newest["created_ms"]))),
                [tag("span", f"{a}: {v}", class_="pill good") for a, v in sorted(aliases.items())]
                or tag("span", "none", class_="quiet"),
            ]
        )
    visit.note_query("SELECT policy, version, aliases, algorithm, run_id, created_at FROM policies")
    columns: list[Column | str] = [
        "Policy",
        Column("Versions", is_number=True),
        Column("Newest", is_number=True),
        "Made",
        "Aliases",
    ]
    body: Child = table(columns, rows, label="Policies")
    if not rows:
        body = draw_empty("No policy is registered in this lake.", command=_COMMAND)
    return Page(
        "Policies",
        section="policies",
        panels=[Panel("Policies", body, queries=visit.take_queries(), shows_title=False)],
        data={"policies": data},
        rows=data,
    )


def show_policy(visit: Visit) -> Page:
    """Return the page of `/policies/NAME`."""
    registry = visit.lake.registry
    name = visit.path["name"]
    # Before anything that a promotion changes: what ends later is found by the next refresh.
    last, running = (None, None) if visit.promotions is None else visit.promotions.find(name)
    versions = [row for row in reversed(registry.list()) if row["policy"] == name]
    if not versions:
        raise NotFoundError(
            f"policy {name}: found none in this lake. The list of policies has all."
        )
    below = read_version(visit.values, "below") if visit.values.get("below") else None
    older = [row for row in versions if below is None or row["version"] < below]
    listed = older[:_MAX_ROWS]
    # The lineage includes all versions with an alias, and the form may act with any version.
    named = {row["version"] for row in listed} | {versions[0]["version"]}
    named.add(parse_version(visit.values.get("try", "")))
    used = [row for row in versions if row["aliases"] or row["version"] in named]
    entries = {row["version"]: registry.entry(name, row["version"]) for row in used}
    moves = [move.to_json() for move in reversed(registry.alias_history(name))]
    aliases = {alias: row["version"] for row in versions for alias in row["aliases"]}
    visit.note_query(
        f"SELECT * EXCLUDE (path) FROM policies WHERE policy = '{name}' ORDER BY version DESC"
    )
    queries = visit.take_queries()
    visit.note_query(f"SELECT * FROM promotions WHERE policy = '{name}' ORDER BY moved_at DESC")
    unreadable: list[str] = []
    evaluations, earlier = registry.evaluations.list_newest(
        name,
        _MAX_ROWS,
        before=visit.values.get("evaluated_before"),
        max_files=_MAX_EVALUATIONS,
        on_unreadable=lambda error: unreadable.append(str(error)),
    )
    shown = _select_evaluation(visit, evaluations)
    known_runs = {run["run_id"] for run in registry.runs()}
    numbers = [row["version"] for row in versions]
    promotion = show_promotion(visit, numbers, aliases, last, running)
    panels = [
        Panel(
            "Versions",
            [
                _version_table(visit, [entries[row["version"]] for row in listed], known_runs),
                _version_links(visit, versions, listed),
            ],
            queries=queries,
        ),
        *([] if promotion is None else [promotion]),
        _moves_panel(visit, moves),
        _evaluations_panel(visit, evaluations, earlier, shown, unreadable),
        *([] if shown is None else _evaluation_panels(visit, shown)),
        *_gate_panels(moves),
        draw_lineage(visit, list(entries.values()), known_runs),
    ]
    # What is followed is requested by this page, no longer by the other site.
    is_held_back = visit.is_cross_site and bool(visit.values.get("observation"))
    trial = build_trial(visit, list(entries.values()))
    panels.append(trial.panel)
    return Page(
        name,
        section="policies",
        crumbs=[("Policies", visit.link("policies"))],
        facts=[
            ("versions", f"{len(versions):,}"),
            *((alias, str(version)) for alias, version in sorted(aliases.items())),
        ],
        panels=panels,
        data={
            "policy": name,
            "versions": [entries[row["version"]] for row in listed],
            "moves": moves,
            "evaluations": [_summarize_evaluation(one) for one in evaluations],
            "older_evaluations_before": earlier,
            "shown_evaluation": None if shown is None else shown.to_json(),
            "unreadable_evaluations": unreadable,
            "promotion": None if last is None else last.to_json(),
            "trial": trial.data,
        },
        rows=versions,
        status=trial.status,
        refresh_s=None if running is None or is_held_back else _REFRESH_S,
    )


def _version_table(visit: Visit, entries: list[dict[str, Any]], known_runs: Set[str]) -> Child:
    """Return a row for each version, from its data over its run to itself."""
    rows: list[list[Child]] = []
    for entry in entries:
        lineage = entry["lineage"]
        run_id = entry["run_id"]
        run: Child = run_id or ""
        if run_id in known_runs:
            run = tag("a", run_id, href=visit.link("runs", run_id), class_="ulid")
        rows.append(
            [
                str(entry["version"]),
                [
                    *(tag("span", alias, class_="pill good") for alias in entry["aliases"]),
                    tag("span", "protected", class_="pill") if entry["protected"] else None,
                ],
                lineage.get("algorithm") or "",
                [tag("div", _data(visit, one)) for one in lineage.get("datasets") or ()],
                run,
                join(time_tag(_time(entry["created_ms"]))),
                [tag("div", note["text"]) for note in entry["notes"]],
            ]
        )
    columns: list[Column | str] = [
        Column("Version", is_number=True),
        "Aliases",
        "Algorithm",
        "Learned from",
        "Run",
        "Made",
        "Notes",
    ]
    return table(columns, rows, label="Versions")


def _version_links(
    visit: Visit, versions: Sequence[Mapping[str, Any]], listed: Sequence[Mapping[str, Any]]
) -> Markup | None:
    if len(listed) == len(versions):
        return None
    name = visit.path["name"]
    links = []
    if not listed or listed[0] is not versions[0]:
        links.append(tag("a", "Newest", href=visit.link("policies", name), class_="button"))
    if listed and listed[-1] is not versions[-1]:
        address = visit.link("policies", name, below=listed[-1]["version"])
        links.append(tag("a", f"Older than {listed[-1]['version']}", href=address, class_="button"))
    return tag("div", links, class_="more")


def _data(visit: Visit, used: Mapping[str, Any]) -> Child:
    name, version = str(used.get("dataset")), used.get("version")
    address = visit.link("datasets", name, at=version)
    return [
        tag("a", name if version is None else f"{name}@{version}", href=address),
        ", ",
        link_selection(visit, used),
    ]


def _moves_panel(visit: Visit, moves: list[dict[str, Any]]) -> Panel:
    if not moves:
        body: Child = draw_empty(
            "No alias of this policy was ever set.",
            command=f"`replaylake policies promote {visit.path['name']}:1 --to champion`",
        )
        return Panel("Moves of aliases", body, queries=visit.take_queries())
    rows: list[list[Child]] = [
        [
            join(time_tag(_time(move["at_ms"]))),
            move["alias"],
            "" if move["from_version"] is None else str(move["from_version"]),
            str(move["to_version"]),
            move["kind"],
            move["by"] or "",
            _verdict(move),
            move["note"] or "",
        ]
        for move in moves[:_MAX_ROWS]
    ]
    columns: list[Column | str] = [
        "When",
        "Alias",
        Column("From", is_number=True),
        Column("To", is_number=True),
        "Kind",
        "By",
        "Gate",
        "Note",
    ]
    body = table(columns, rows, label="Moves of aliases")
    note = _say_newest(len(moves))
    return Panel("Moves of aliases", body, note=note, queries=visit.take_queries())


def _say_newest(num: int) -> str | None:
    """Return a note for a table that does not show all rows, else None."""
    return f"the newest {_MAX_ROWS} of {num:,}; SQL and JSON have all" if num > _MAX_ROWS else None


def _verdict(move: Mapping[str, Any]) -> Child:
    if move["gate"] is None:
        return tag("span", "none", class_="quiet")
    passed = bool(move["gate"].get("passed"))
    text = "passed" if passed else "refused, forced" if move["forced"] else "refused"
    return tag("span", text, class_="pill good" if passed else "pill bad")


def _gate_panels(moves: list[dict[str, Any]]) -> list[Panel]:
    """Show what the newest gate compared."""
    found = next((move for move in moves if move["gate"] is not None), None)
    if found is None:
        return []
    title = f"Gate of {found['alias']} to version {found['to_version']}"
    return [Panel(title, draw_tree(found["gate"]))]


def _select_evaluation(
    visit: Visit, evaluations: Sequence[SavedEvaluation]
) -> SavedEvaluation | None:
    """Return the evaluation that the address names, or the newest.

    Raises: NotFoundError if the policy has none of that name.
    """
    asked = visit.values.get("evaluation")
    if not asked:
        return evaluations[0] if evaluations else None
    found = next((one for one in evaluations if one.evaluation_id == asked), None)
    found = found or visit.lake.registry.evaluations.read(asked)
    if found.policy != visit.path["name"]:
        raise NotFoundError(
            f"evaluation {asked}: found one of policy {found.policy}, expected one of policy "
            f"{visit.path['name']}, whose page lists them."
        )
    return found


def _summarize_evaluation(one: SavedEvaluation) -> dict[str, Any]:
    """Return what the list has of an evaluation: all but its report, and the report's core."""
    body = {key: value for key, value in one.to_json().items() if key != "report"}
    sizes = [
        size
        for report in _list_reports(one)
        if (size := _number(_weights(report).get("worst_step_size"))) is not None
    ]
    return {
        **body,
        "reasons": _list_reasons(one.report),
        "effective_sample_size": min(sizes, default=None),
    }


def _evaluations_panel(
    visit: Visit,
    evaluations: Sequence[SavedEvaluation],
    older: str | None,
    shown: SavedEvaluation | None,
    unreadable: Sequence[str],
) -> Panel:
    name = visit.path["name"]
    note = [tag("p", f"Left out: {text}", class_="wrong") for text in unreadable]
    links = _evaluation_links(visit, older)
    if not evaluations and links is not None:
        text = f"None of the {_MAX_EVALUATIONS} evaluations that this page looked at is of {name}."
        if older is None:
            text = f"No older evaluation is of {name}."
        return Panel("Evaluations", [note, draw_empty(text), links])
    if not evaluations:
        body: Child = draw_empty(
            "No evaluation of this policy was saved.",
            hint="A gate saves one too, whether it passes or refuses.",
            command=f"`replaylake promote {name} --to champion --gate --dataset DATASET`",
        )
        return Panel("Evaluations", [note, body])
    rows: list[list[Child]] = []
    for one in evaluations:
        summary = _summarize_evaluation(one)
        address = visit.link(
            "policies",
            name,
            evaluation=one.evaluation_id,
            evaluated_before=visit.values.get("evaluated_before"),
        )
        alias = one.report.get("alias")
        rows.append(
            [
                tag(
                    "a",
                    join(time_tag(one.evaluated_at)),
                    href=f"{address}#evaluation",
                    aria_current="true" if one is shown else None,
                ),
                f"gate of {alias}"
                if one.kind == "gate" and alias
                else _KINDS.get(one.kind, one.kind),
                "" if one.policy_version is None else str(one.policy_version),
                _data_link(visit, one),
                _verdict_pill(one.verdict),
                [tag("div", reason, class_="why") for reason in summary["reasons"]],
                quiet_number(_shorten(summary["effective_sample_size"])),
                one.evaluated_by or "",
            ]
        )
    columns: list[Column | str] = [
        "When",
        "Kind",
        Column("Version", is_number=True),
        "Evaluated on",
        "Verdict",
        "Why",
        Column("Effective episodes", is_number=True),
        "By",
    ]
    query = Query(
        """SELECT evaluated_at, kind, policy_version, dataset, dataset_version, verdict,
        report->'$.reason' AS reason, report->'$.reasons' AS reasons, evaluated_by FROM evaluations
        WHERE policy = $policy ORDER BY evaluation_id DESC""",
        {"policy": name},
    )
    body = table(columns, rows, label="Evaluations")
    return Panel("Evaluations", [note, body, links], queries=[query])


def _evaluation_links(visit: Visit, older: str | None) -> Markup | None:
    """Return links to older and to the newest evaluations; None where the page has all."""
    name = visit.path["name"]
    links = []
    if visit.values.get("evaluated_before"):
        address = f"{visit.link('policies', name)}#evaluations"
        links.append(tag("a", "Newest", href=address, class_="button"))
    if older is not None:
        address = f"{visit.link('policies', name, evaluated_before=older)}#evaluations"
        links.append(tag("a", "Older evaluations", href=address, class_="button"))
    return tag("div", links, class_="more", id="evaluations") if links else None


def _evaluation_panels(visit: Visit, one: SavedEvaluation) -> list[Panel]:
    """Show why an evaluation ended as it did: reasons, estimates, and weights of each policy."""
    reports = _list_reports(one)
    what = "Gate" if one.kind == "gate" else "Evaluation"
    alias = one.report.get("alias")
    title = f"{what} of version {one.policy_version}" + (f" as {alias}" if alias else "")
    reasons = [tag("li", reason) for reason in _list_reasons(one.report)]
    body: list[Child] = [
        tag("p", _verdict_pill(one.verdict), " on ", _data_link(visit, one)),
        tag("ul", reasons, class_="reasons") if reasons else None,
        _comparison_chart(one.report),
    ]
    if one.kind != "gate" and reports:
        body += [_estimate_chart(reports[0]), _difference_chart(reports[0])]
    refused = _mapping(one.report.get("refused"))
    if refused:
        body.append(tag("h3", "Estimators without a value"))
        body.append(
            tag("ul", [tag("li", f"{name}: {why}") for name, why in refused.items()], class_="tree")
        )
    panels = [Panel(title, tag("div", body, id="evaluation"))]
    names = ("Candidate", "Champion") if one.kind == "gate" else ("Policy",)
    for name, report in zip(names, reports, strict=False):
        charts = [] if one.kind != "gate" else [_estimate_chart(report)]
        charts.append(_weight_chart(report))
        who = f"{report.get('policy')}:{report.get('policy_version')}"
        facts = [tag("div", tag("dt", k), tag("dd", v)) for k, v in _iter_diagnostics(report)]
        verdict = report.get("verdict")
        lead: Child = None
        if one.kind == "gate" and verdict:
            lead = tag("p", _verdict_pill(str(verdict)), " ", str(report.get("reason") or ""))
        content = [lead, charts, tag("dl", facts, class_="facts small")]
        where = "on the tasks" if "task" in report else "in the log"
        panels.append(Panel(f"{name} {who} {where}", content, is_wide=len(reports) == 1))
    return panels


def _comparison_chart(report: Mapping[str, Any]) -> Markup | None:
    """Draw the differences that a gate compared, against its margin."""
    rows = []
    for one in _mappings(report.get("comparisons")):
        row = _interval(one, ("difference", "low", "high"))
        if row is not None:
            rows.append(row)
    if not rows:
        return None
    margin = _number(report.get("margin")) or 0.0
    against = report.get("against") or "the champion"
    label = f"Difference from {against}: passes where every interval is above the line"
    return interval_chart(rows, label=label, reference=("margin", margin))


def _estimate_chart(report: Mapping[str, Any]) -> Markup | None:
    rows = []
    for one in _mappings(report.get("estimates")):
        row = _interval(one, ("value", "ci_low", "ci_high"))
        if row is not None:
            rows.append(row)
    if not rows:
        return None
    mean = _number(report.get("log_mean"))
    reference = None if mean is None else ("the log's own mean", mean)
    label = "Mean over the tasks" if "task" in report else "Estimated return"
    return interval_chart(rows, label=label, reference=reference)


def _difference_chart(report: Mapping[str, Any]) -> Markup | None:
    """Draw estimates minus the log's own mean, or another policy's, against 0."""
    keys = ("difference", "difference_low", "difference_high")
    rows = [row for one in _mappings(report.get("estimates")) if (row := _interval(one, keys))]
    if not rows:
        return None
    label = "Difference from the log's own mean, paired by episode"
    if "task" in report:
        if not rows:
            return None
        label = f"Difference from {report.get('against')}, paired by task"
    return interval_chart(rows, label=label, reference=("no difference", 0.0))


def _interval(one: Mapping[str, Any], keys: tuple[str, str, str]) -> Interval | None:
    value, low, high = (_number(one.get(key)) for key in keys)
    if value is None:
        return None
    text = f"{value:,.4g}"
    if low is None or high is None:
        low = high = None
        text += ", no interval"
    else:
        text += f" ({low:,.4g} to {high:,.4g})"
    return Interval(str(one.get("estimator")), value, low, high, text)


def _weight_chart(report: Mapping[str, Any]) -> Markup | None:
    """Draw the histogram of the episodes' importance weights, whose axis is logarithmic."""
    weights = _mapping(report.get("weights"))
    counts = [int(_number(one) or 0) for one in _list(weights.get("counts"))]
    edges = [_number(one) or 0.0 for one in _list(weights.get("edges"))]
    if not counts or len(edges) != len(counts) + 1:
        return None
    titles = [
        f"{low:,.3g} to {high:,.3g}: {num:,} episodes"
        for (low, high), num in zip(pairwise(edges), counts, strict=True)
    ]
    label = "Importance weights of the episodes, logarithmic"
    if num_zero := _number(weights.get("num_zero")):
        label += f"; {num_zero:,.0f} more are 0"
    axis = [f"{edge:,.3g}" for edge in (edges[0], edges[len(counts) // 2], edges[-1])]
    return column_chart(counts, titles, label=label, axis=axis)


def _iter_diagnostics(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the numbers behind a verdict, those that are known."""
    for key in ("num_tasks", "num_samples"):
        number = _number(report.get(key))
        if number is not None:
            yield key.removeprefix("num_"), f"{number:,.0f}"
    cost = _mapping(report.get("tokens"))
    for name, key in (
        ("prompt tokens a sample", "prompt"),
        ("sampled tokens a sample", "completion"),
    ):
        number = _number(cost.get(key))
        if number is not None:
            yield name, f"{number:,.4g}"
    weights, diagnostics = _weights(report), _mapping(report.get("diagnostics"))
    episodes = _number(report.get("num_episodes"))
    size = _number(weights.get("worst_step_size"))
    if episodes is not None:
        yield "episodes", f"{episodes:,.0f}"
    if size is not None:
        yield "effective episodes", f"{size:,.1f}"
    for name, key in (("largest weight", "max_weight"), ("mean weight", "mean_weight")):
        number = _number(weights.get(key))
        if number is not None:
            yield name, f"{number:,.3g}"
    shares = (
        ("logged actions it could take", weights.get("matching")),
        ("overlap with the log", diagnostics.get("overlap")),
        ("probability on unlogged actions", diagnostics.get("unsupported_mass")),
    )
    for name, value in shares:
        share = _number(value)
        if share is not None:
            yield name, f"{share:.1%}"


def _list_reports(one: SavedEvaluation) -> list[Mapping[str, Any]]:
    """Return the reports of off-policy evaluation in it: a gate has the candidate's first."""
    if one.kind == "gate":
        return _mappings(one.report.get("reports"))
    return [_mapping(one.report)]


def _list_reasons(report: Mapping[str, Any]) -> list[str]:
    reasons = [str(one) for one in _list(report.get("reasons"))]
    return reasons or ([str(report["reason"])] if report.get("reason") else [])


def _data_link(visit: Visit, one: SavedEvaluation) -> Markup:
    text = one.dataset if one.dataset_version is None else f"{one.dataset}@{one.dataset_version}"
    return tag("a", text, href=visit.link("datasets", one.dataset, at=one.dataset_version))


def _verdict_pill(verdict: str) -> Markup:
    kinds = {"passed": "pill good", "supported": "pill good", "weak": "pill"}
    return tag("span", verdict, class_=kinds.get(verdict, "pill bad"))


def _shorten(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _weights(report: Mapping[str, Any]) -> Mapping[str, Any]:
    return _mapping(_mapping(report.get("diagnostics")).get("weights"))


# A report is saved as it comes, also from Python and by other releases: what is missing or has
# another form is not shown.
def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _mappings(value: object) -> list[Mapping[str, Any]]:
    return [one for one in _list(value) if isinstance(one, Mapping)]


def _number(value: object) -> float | None:
    is_known = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_known and math.isfinite(value) else None  # type: ignore[arg-type]


def _time(milliseconds: int | None) -> datetime | None:
    return None if milliseconds is None else datetime.fromtimestamp(milliseconds / 1000, UTC)
