"""The groups of a dataset, and one of them: the samples of a prompt beside each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from replaylake.datastore.episodes import schema, tokens
from replaylake.datastore.errors import ConfigInvalidError, NotFoundError
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.query.group_views import GROUP_ID
from replaylake.serve.explorer.datasets.dataset_page import find_snapshot, read_at
from replaylake.serve.explorer.visits.page import Page, Panel, build_panels, draw_empty
from replaylake.serve.explorer.visits.visit import Visit
from replaylake.serve.pages.charts import column_chart
from replaylake.serve.pages.markup import Child, Markup, join_list, tag
from replaylake.serve.pages.tables import Column, id_link, quiet_number, table, value_cell
from replaylake.serve.pages.texts import count, number_text

_PAGE_GROUPS: Final = 100
_PAGE_SAMPLES: Final = 12
_MAX_SAMPLES: Final = 10_000
_MAX_BINS: Final = 12
_MAX_CHARACTERS: Final = 2_000
_SHOWN_CHARACTERS: Final = 600
_ADVANTAGES: Final = "action_advantages"
_ADVANTAGE: Final = "advantage"
# By its name in an address: the column's title and its SQL.
SORTS: Final[Mapping[str, tuple[str, str]]] = {
    "group": ("Group", GROUP_ID),
    "samples": ("Samples", "num_episodes"),
    "mean": ("Mean", "mean"),
    "std": ("Std", "std"),
    "best": ("Best", "best"),
    "worst": ("Worst", "worst"),
    "passed": ("Passed", "num_passed"),
}


def link_group(visit: Visit, name: str, group: object) -> str:
    """Return the address of a group's page."""
    return visit.link("datasets", name, "group", id=str(group), at=read_at(visit))


def show_groups(visit: Visit) -> Page:
    """Return the page of `/datasets/NAME/groups`. Raises: NotFoundError, ConfigInvalidError."""
    snapshot = find_snapshot(visit)
    name, at = snapshot.dataset, read_at(visit)
    sort = visit.values.get("sort") or "group"
    if sort not in SORTS:
        raise ConfigInvalidError(
            f"sort: found {sort!r}, expected one of {', '.join(SORTS)}.", parameter="sort"
        )
    is_descending = visit.values.get("order") == "descending"
    place = _read_place(visit)
    order = "DESC" if is_descending else "ASC"
    rows = visit.sql(
        f"""SELECT * EXCLUDE (pass_at_k), count(*) OVER () AS num_groups FROM {name}.groups
        ORDER BY {SORTS[sort][1]} {order} NULLS LAST, {GROUP_ID}
        LIMIT {_PAGE_GROUPS} OFFSET {place}""",
        snapshot,
    )
    num = rows[0]["num_groups"] if rows else 0
    shown = [{key: value for key, value in row.items() if key != "num_groups"} for row in rows]

    def link(**changed: object) -> str:
        values: dict[str, object] = {
            "sort": None if sort == "group" else sort,
            "order": "descending" if is_descending else None,
            "at": at,
        }
        return visit.link("datasets", name, "groups", **{**values, **changed})

    def head(key: str) -> Column:
        is_sorted = key == sort
        turned = not is_descending if is_sorted else key != "group"
        address = link(sort=key, order="descending" if turned else None)
        return Column(
            tag("a", SORTS[key][0], href=address),
            is_number=key != "group",
            sort=name_order(is_descending) if is_sorted else None,
        )

    cells: list[list[Child]] = [
        [
            tag("a", str(row[GROUP_ID]) or "(empty)", href=link_group(visit, name, row[GROUP_ID])),
            f"{row['num_episodes']:,}",
            *(quiet_number(row[key], is_short=True) for key in ("mean", "std", "best", "worst")),
            f"{row['num_passed']:,} of {row['n']:,}",
        ]
        for row in shown
    ]
    body: list[Child] = [table([head(key) for key in SORTS], cells, label="Groups")]
    if not shown:
        hint = "The first ones are on the first page." if place else None
        body = [draw_empty("There are no groups here.", hint=hint)]
    if place or place + len(shown) < num:
        body.append(
            _page_links(
                link(after=max(0, place - _PAGE_GROUPS) or None) if place else None,
                link(after=place + _PAGE_GROUPS) if place + len(shown) < num else None,
                _PAGE_GROUPS,
            )
        )
    note = count(num, "group")
    if len(shown) < num:
        note += f"; these are {place + 1:,} to {place + len(shown):,}"
    note += ". Where std is 0, all samples have the same return."
    return Page(
        f"Groups of {name}@{snapshot.version}",
        section="datasets",
        crumbs=[("Lake", visit.link()), (name, visit.link("datasets", name, at=at))],
        panels=[Panel("Groups", body, note=note, queries=visit.take_queries())],
        data={
            "dataset": name,
            "version": snapshot.version,
            "num_groups": num,
            "groups": shown,
        },
        rows=shown,
    )


def name_order(is_descending: bool) -> str:
    """Return how a column that rows are sorted by is described to those who hear it."""
    return "descending" if is_descending else "ascending"


@dataclass(frozen=True)
class GroupContents:
    """What the panels share. samples: ordered by return, the best first.

    low, high: the least and the greatest return of the samples that are shown; None for all.
    """

    snapshot: Snapshot
    group_id: str
    summary: Mapping[str, Any]
    samples: Sequence[Mapping[str, Any]]
    low: float | None
    high: float | None
    place: int

    @property
    def selected(self) -> list[Mapping[str, Any]]:
        """The samples whose return is between `low` and `high`."""
        if self.low is None and self.high is None:
            return list(self.samples)
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        return [
            one
            for one in self.samples
            if one["return"] is not None and low <= one["return"] <= high
        ]

    def link(self, visit: Visit, **changed: object) -> str:
        """Return the address of this page with other values; another bin begins at its first."""
        values: dict[str, object] = {"low": self.low, "high": self.high, "at": read_at(visit)}
        return visit.link(
            "datasets", self.snapshot.dataset, "group", id=self.group_id, **{**values, **changed}
        )


def show_group(visit: Visit) -> Page:
    """Return the page of `/datasets/NAME/group?id=GROUP`, of the returns from `low` to `high`.

    Raises: NotFoundError, ConfigInvalidError.
    """
    snapshot = find_snapshot(visit)
    name, at = snapshot.dataset, read_at(visit)
    group_id = visit.values.get("id", "")
    found = visit.sql(
        f"SELECT * FROM {name}.groups WHERE CAST({GROUP_ID} AS VARCHAR) = $group",
        snapshot,
        group=group_id,
    )
    if not found:
        raise NotFoundError(
            f"group {group_id!r}: found none in {name}@{snapshot.version}. The list of its groups "
            "has the ids."
        )
    low, high = _read_number(visit, "low"), _read_number(visit, "high")
    samples = _read_samples(visit, snapshot, group_id)
    contents = GroupContents(snapshot, group_id, found[0], samples, low, high, _read_place(visit))
    summary = contents.summary
    own_queries = visit.take_queries()
    panels = build_panels(visit, contents, PANELS)
    panels[0] = replace(panels[0], queries=(*own_queries, *panels[0].queries))
    pass_at_k = summary["pass_at_k"] or []
    facts: list[tuple[str, Child]] = [
        ("samples", f"{summary['num_episodes']:,}"),
        ("mean return", quiet_number(summary["mean"], is_short=True)),
        ("std", quiet_number(summary["std"], is_short=True)),
        ("best", quiet_number(summary["best"])),
        ("worst", quiet_number(summary["worst"])),
        ("passed", f"{summary['num_passed']:,} of {summary['n']:,}"),
    ]
    if pass_at_k:
        facts.append(("pass@1", number_text(float(pass_at_k[0]))))
    return Page(
        group_id or "(empty)",
        section="datasets",
        crumbs=[
            ("Lake", visit.link()),
            (name, visit.link("datasets", name, at=at)),
            ("Groups", visit.link("datasets", name, "groups", at=at)),
        ],
        facts=facts,
        panels=panels,
        data={
            "dataset": name,
            "version": snapshot.version,
            "group": summary,
            "samples": contents.selected,
        },
        rows=contents.selected,
    )


def _read_samples(visit: Visit, snapshot: Snapshot, group_id: str) -> list[dict[str, Any]]:
    names = snapshot.table.schema.names
    num_tokens = "NULL"
    advantage = f"avg({_ADVANTAGE})" if _is_number(snapshot, _ADVANTAGE) else "NULL"
    if tokens.has_tokens(names):
        num_tokens = f"CAST(sum(len({tokens.ACTION_TOKENS})) AS BIGINT)"
        if _ADVANTAGES in names:
            advantage = f"sum(list_sum({_ADVANTAGES})) / sum(len({_ADVANTAGES}))"
    return visit.sql(
        f"""SELECT episode_id,
            CASE WHEN count(reward) = count(*) THEN sum(reward ORDER BY agent_id, step) END
                AS "return",
            count(*) AS num_steps, {num_tokens} AS num_tokens,
            CAST({advantage} AS DOUBLE) AS advantage,
            min(policy_version) AS min_policy_version, max(policy_version) AS max_policy_version
        FROM {snapshot.dataset}.steps WHERE CAST({GROUP_ID} AS VARCHAR) = $group
        GROUP BY episode_id ORDER BY "return" DESC NULLS LAST, episode_id LIMIT {_MAX_SAMPLES}""",
        snapshot,
        group=group_id,
    )


def _is_number(snapshot: Snapshot, column: str) -> bool:
    columns = snapshot.table.schema
    return column in columns.names and str(columns.field(column).type) in ("float", "double")


def draw_returns(visit: Visit, contents: GroupContents) -> Panel | None:
    """Draw the returns of the samples as a histogram, whose bars select samples."""
    returns = sorted(
        one["return"]
        for one in contents.samples
        if one["return"] is not None and math.isfinite(one["return"])
    )
    if not returns:
        return Panel("Returns", draw_empty("No sample has a known return."))
    bins = _make_bins(returns)
    names = [
        number_text(values[0])
        if values[0] == values[-1]
        else f"{number_text(values[0])} to {number_text(values[-1])}"
        for values in bins
    ]
    chart = column_chart(
        [len(values) for values in bins],
        [
            f"{name}: {count(len(values), 'sample')}"
            for name, values in zip(names, bins, strict=True)
        ],
        label="Return",
        axis=names,
        links=[contents.link(visit, low=values[0], high=values[-1]) for values in bins],
    )
    body: list[Child] = [chart]
    if contents.low is not None or contents.high is not None:
        everything = contents.link(visit, low=None, high=None)
        body.append(
            tag(
                "p",
                f"Shown are returns from {_bound_text(contents.low)} ",
                f"to {_bound_text(contents.high)}. ",
                tag("a", "Show all", href=everything),
            )
        )
    note = "A bar selects its samples."
    if len(contents.samples) == _MAX_SAMPLES:
        note += f" These are the best {_MAX_SAMPLES:,} samples."
    return Panel("Returns", body, note=note)


def _bound_text(value: float | None) -> str:
    return "any" if value is None else number_text(value)


def _make_bins(returns: Sequence[float]) -> list[list[float]]:
    """Return ascending values by bin, without empty bins: each value, or equal parts of the range.

    A bin's first and last value bound it, so that a filter by these selects it alone.
    """
    distinct = sorted(set(returns))
    if len(distinct) <= _MAX_BINS:
        places = {value: place for place, value in enumerate(distinct)}
    else:
        # Halves first: the difference of two finite numbers may overflow.
        low, half = returns[0], returns[-1] / 2 - returns[0] / 2
        places = {
            value: min(_MAX_BINS - 1, int((value / 2 - low / 2) / half * _MAX_BINS))
            for value in distinct
        }
    bins: dict[int, list[float]] = {}
    for value in returns:
        bins.setdefault(places[value], []).append(value)
    return list(bins.values())


def draw_prompt(visit: Visit, contents: GroupContents) -> Panel | None:
    """Show what came first in the samples, where that is a text."""
    if not _is_text(contents.snapshot, schema.OBSERVATION) or not contents.samples:
        return None
    rows = visit.sql(
        f"""SELECT left(observation, {_MAX_CHARACTERS + 1}) AS prompt
        FROM {contents.snapshot.dataset}.steps WHERE episode_id = $id
        ORDER BY step, agent_id LIMIT 1""",
        contents.snapshot,
        id=contents.samples[0]["episode_id"],
    )
    if not rows or not rows[0]["prompt"]:
        return None
    return Panel("Prompt", _cut_text(rows[0]["prompt"]), note="as the best sample has it")


def draw_samples(visit: Visit, contents: GroupContents) -> Panel:
    """Show samples beside each other, each with its last action."""
    selected = contents.selected
    place = contents.place
    shown = selected[place : place + _PAGE_SAMPLES]
    if not shown:
        return Panel("Samples", draw_empty("No sample has such a return, or this page is empty."))
    answers = _read_answers(visit, contents.snapshot, [one["episode_id"] for one in shown])
    has_own = any(one["advantage"] is not None for one in contents.samples)
    cards = []
    for one in shown:
        answer = answers.get(one["episode_id"])
        cards.append(
            tag(
                "article",
                tag("h3", _link_sample(visit, contents, one)),
                tag(
                    "p",
                    join_list(_describe(contents, one, has_own), " \N{MIDDLE DOT} "),
                    class_="meta",
                ),
                _cut_text(answer) if isinstance(answer, str) else tag("p", value_cell(answer)),
                class_="sample",
            )
        )
    body: list[Child] = [tag("div", cards, class_="samples")]
    if len(selected) > _PAGE_SAMPLES:
        previous = max(0, place - _PAGE_SAMPLES)
        following = place + _PAGE_SAMPLES
        body.append(
            _page_links(
                contents.link(visit, after=previous or None) if place else None,
                contents.link(visit, after=following) if following < len(selected) else None,
                _PAGE_SAMPLES,
            )
        )
    note = f"{count(len(selected), 'sample')}, the best first"
    if len(shown) < len(selected):
        note += f"; these are {place + 1:,} to {place + len(shown):,}"
    note += ". Each with its last action"
    note += (
        ", and the mean of its stored advantages."
        if has_own
        else ", and its return minus the group's mean, divided by the group's std (GRPO)."
    )
    return Panel("Samples", body, note=note)


def _link_sample(visit: Visit, contents: GroupContents, sample: Mapping[str, Any]) -> Markup:
    address = visit.link(
        "datasets",
        contents.snapshot.dataset,
        "episode",
        id=sample["episode_id"],
        at=read_at(visit),
    )
    return id_link(sample["episode_id"], address)


def _describe(contents: GroupContents, sample: Mapping[str, Any], has_own: bool) -> list[Child]:
    facts: list[Child] = [["return ", quiet_number(sample["return"])]]
    advantage = sample["advantage"] if has_own else _normalize(contents.summary, sample["return"])
    if advantage is not None:
        facts.append(f"advantage {advantage:+.4g}")
    facts.append(count(sample["num_steps"], "step"))
    if sample["num_tokens"] is not None:
        facts.append(count(sample["num_tokens"], "token"))
    low, high = sample["min_policy_version"], sample["max_policy_version"]
    if low is not None:
        facts.append(f"version {low}" if low == high else f"versions {low} to {high}")
    return facts


def _normalize(summary: Mapping[str, Any], value: float | None) -> float | None:
    """Return a return's advantage in its group: 0 where all samples have the same return."""
    if value is None or summary["mean"] is None or summary["std"] is None:
        return None
    return 0.0 if summary["std"] == 0 else float((value - summary["mean"]) / summary["std"])


def _read_answers(visit: Visit, snapshot: Snapshot, episode_ids: Sequence[str]) -> dict[str, Any]:
    """Return the last action of each episode; of a text, as much as is shown."""
    action = schema.ACTION
    if _is_text(snapshot, schema.ACTION):
        action = f"left({schema.ACTION}, {_MAX_CHARACTERS + 1})"
    wanted = ", ".join(f"$id_{number}" for number in range(len(episode_ids)))
    rows = visit.sql(
        f"""SELECT episode_id, arg_max({action}, (env_step, step)) AS answer
        FROM {snapshot.dataset}.steps WHERE episode_id IN ({wanted}) GROUP BY episode_id""",
        snapshot,
        **{f"id_{number}": one for number, one in enumerate(episode_ids)},
    )
    return {row["episode_id"]: row["answer"] for row in rows}


def _is_text(snapshot: Snapshot, column: str) -> bool:
    return str(snapshot.table.schema.field(column).type) == "string"


def _cut_text(text: str) -> Markup:
    """Return a text; of a longer one the beginning, which opens to the rest."""
    is_cut = len(text) > _MAX_CHARACTERS
    whole = text[:_MAX_CHARACTERS] + ("\N{HORIZONTAL ELLIPSIS}" if is_cut else "")
    if len(whole) <= _SHOWN_CHARACTERS:
        return tag("div", whole, class_="text")
    return tag(
        "details",
        tag("summary", f"{whole[:_SHOWN_CHARACTERS]}\N{HORIZONTAL ELLIPSIS}", class_="text"),
        tag("div", f"\N{HORIZONTAL ELLIPSIS}{whole[_SHOWN_CHARACTERS:]}", class_="text"),
    )


def _page_links(previous: str | None, following: str | None, num: int) -> Markup:
    places = ((f"Previous {num}", previous), (f"Next {num}", following))
    links = [
        tag("span", words, class_="button", aria_disabled="true")
        if address is None
        else tag("a", words, href=address, class_="button")
        for words, address in places
    ]
    return tag("div", links, class_="more")


def _read_place(visit: Visit) -> int:
    text = visit.values.get("after") or "0"
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise ConfigInvalidError(
            f"after: found {text[:80]!r}, expected what the link to the next page has. Begin with "
            "the first page.",
            parameter="after",
        )
    return int(text)


def _read_number(visit: Visit, name: str) -> float | None:
    text = visit.values.get(name)
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigInvalidError(
            f"{name}: found {text[:80]!r}, expected a finite number: a bound of returns.",
            parameter=name,
        )
    return number


PANELS: Final = (draw_returns, draw_prompt, draw_samples)
