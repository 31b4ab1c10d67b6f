"""The episodes of a dataset, as a table that is sorted, filtered by SQL and read page by page.

A page begins after the last row of the one before it (keyset): its cost does not grow with how far
it is down the table, as that of OFFSET does, and rows neither repeat nor go missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from replaylake.datastore.errors import ConfigInvalidError, QueryError, QueryRefusedError
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.maintenance.labels.episode_labels import list_label_names
from replaylake.datastore.query.episode_views import EPISODE_COLUMNS
from replaylake.serve.explorer.datasets.dataset_page import find_snapshot, read_at
from replaylake.serve.explorer.episodes.outliers import TITLES, Measure, find_measure, list_measures
from replaylake.serve.explorer.visits.page import Page, Panel, draw_empty
from replaylake.serve.explorer.visits.visit import Query, Visit
from replaylake.serve.pages.markup import Child, Markup, join, join_list, tag
from replaylake.serve.pages.tables import Column, id_link, quiet_number, table, time_tag
from replaylake.serve.pages.texts import cell_text, count

_PAGE_ROWS: Final = 100
# Of a longer list by a measure, neighbors are found by a query each time.
_MAX_RANKED: Final = 5000
# So many commits that only label are looked through at most.
_MAX_LABELINGS: Final = 200
_LABELING: Final = "LABEL"
# Plots have as many colors.
MAX_COMPARED: Final = 8
# By its name in an address: the column's title, its SQL and its type.
SORTS: Final[Mapping[str, tuple[str, str, str]]] = {
    "episode": ("Episode", "episode_id", "VARCHAR"),
    "return": ("Return", '"return"', "DOUBLE"),
    "steps": ("Steps", "num_steps", "BIGINT"),
    "version": ("Version", "max_policy_version", "BIGINT"),
    "started": ("Started", "started_at", "TIMESTAMPTZ"),
}
_COLUMNS: Final = (
    'episode_id, agent_id, num_steps, "return", terminated, truncated, complete, policy, '
    "max_policy_version, started_at"
)


@dataclass(frozen=True)
class EpisodeKey:
    """The place of an episode in an order: the text of what it is sorted by, None where unknown."""

    value: str | None
    episode_id: str
    agent_id: str

    def to_text(self) -> str:
        return json.dumps([self.value, self.episode_id, self.agent_id])


class Ranking:
    """Places of a list in its order."""

    def __init__(self, places: Sequence[EpisodeKey]) -> None:
        self.places = places
        self._at = {(one.episode_id, one.agent_id): at for at, one in enumerate(places)}

    def find(self, key: EpisodeKey) -> int | None:
        """Return where an episode and agent is; None if it is not there."""
        return self._at.get((key.episode_id, key.agent_id))


@dataclass(frozen=True)
class EpisodeList:
    """Which episodes, in which order: what an address says.

    where: SQL over the columns of `episodes` and the measure, empty for all. It is somebody else's,
    and so runs in the sandbox alone. measure: what it is sorted by, where that is no column.
    """

    snapshot: Snapshot
    where: str = ""
    sort: str = "episode"
    is_descending: bool = False
    measure: Measure | None = None

    @property
    def column(self) -> str:
        return SORTS[self.sort][1] if self.measure is None else self.measure.name

    @property
    def condition_names(self) -> list[str]:
        """The columns that its condition may name."""
        own = [] if self.measure is None else [self.measure.name]
        return sorted((*EPISODE_COLUMNS, *own))

    @property
    def rows(self) -> str:
        """The FROM item of all episodes, with the measure."""
        name = self.snapshot.dataset
        if self.measure is None:
            return f"{name}.episodes"
        value = self.measure.name
        return (
            f"(SELECT * REPLACE (CASE WHEN isfinite({value}) THEN {value} END AS {value}) "
            f"FROM {name}.episodes LEFT JOIN ({self.measure.sql}) USING (episode_id, agent_id))"
        )

    def page_query(self, after: EpisodeKey | None, limit: int) -> Query:
        """Return the query of the rows after a place; without one of the first, with the count."""
        num = f"(SELECT count(*) FROM {self.source()})" if after is None else "NULL"
        columns = _COLUMNS
        if self.measure is not None:
            columns += f", {self.measure.name}"
            # The measure is computed once.
            num = num if after is not None else "count(*) OVER ()"
        text = (
            f"SELECT {columns}, CAST({self.column} AS VARCHAR) AS sort_key, {num} AS num_matching "
            f"FROM {self.source(self._bound(after, is_forward=True))} "
            f"ORDER BY {self._order(is_forward=True)} LIMIT {limit}"
        )
        return self._query(text, after)

    def neighbor_query(self, key: EpisodeKey) -> Query:
        """Return the query of the episodes before and after one."""
        first = ""
        if self.measure is not None:
            # The measure is computed once for both neighbors.
            columns = f"episode_id, agent_id, {self.column}"
            first = f"WITH ranked AS MATERIALIZED (SELECT {columns} FROM {self.source()}) "

        def select_bounded(bound: str) -> str:
            return f"ranked WHERE {bound}" if first else self.source(bound)

        parts = [
            f"(SELECT '{name}' AS place, episode_id, agent_id "
            f"FROM {select_bounded(self._bound(key, is_forward=is_forward))} "
            f"ORDER BY {self._order(is_forward=is_forward)} LIMIT 1)"
            for name, is_forward in (("previous", False), ("next", True))
        ]
        return self._query(first + " UNION ALL ".join(parts), key)

    def unlabeled_query(self, label: str | None, after: EpisodeKey | None) -> Query:
        """Return the query of the first episode without a label, after a place or of all.

        label: a column of the dataset; None where no episode has the label.
        """
        bounds = [self._bound(after, is_forward=True)]
        if label is not None:
            labeled = f'FROM {self.snapshot.dataset}.steps WHERE "{label}" IS NOT NULL'
            key = "episode_id, agent_id"
            bounds.append(f"({key}) NOT IN (SELECT {key} {labeled})")
        text = (
            f"SELECT episode_id, agent_id FROM {self.source(*bounds)} "
            f"ORDER BY {self._order(is_forward=True)} LIMIT 1"
        )
        return self._query(text, after)

    def read_ranking(self, visit: Visit) -> Ranking | None:
        """Return all places of a list by a measure, if it has few and no condition; else None.

        A label changes no measure, but each label is a version: so a ranking is remembered by the
        last version that is more than labels, and labeling an episode computes none.
        """
        if self.measure is None or self.where:
            return None
        measured = _find_measured_version(visit, self.snapshot)
        key = ("ranking", self.snapshot.dataset, measured, self.measure.sql, self.is_descending)
        known: tuple[Ranking | None] | None = visit.memory.get(key)
        if known is None:
            rows = visit.sql(
                f"SELECT CAST({self.column} AS VARCHAR) AS value, episode_id, agent_id "
                f"FROM {self.source()} ORDER BY {self._order(is_forward=True)} "
                f"LIMIT {_MAX_RANKED + 1}",
                self.snapshot,
            )
            places = [EpisodeKey(*row.values()) for row in rows]
            known = (Ranking(places) if len(places) <= _MAX_RANKED else None,)
            visit.memory.put(key, known, 300 * (1 + len(places)))
        return known[0]

    def find_neighbors(self, visit: Visit, key: EpisodeKey) -> dict[str, dict[str, Any]]:
        """Return the episodes before and after one, as `previous` and `next`."""
        ranking = self.read_ranking(visit)
        if ranking is None or (place := ranking.find(key)) is None:
            rows = self.run(visit, self.neighbor_query(key))
            return {row["place"]: {k: row[k] for k in ("episode_id", "agent_id")} for row in rows}
        found = {"previous": place - 1, "next": place + 1}
        return {
            name: {"episode_id": one.episode_id, "agent_id": one.agent_id}
            for name, at in found.items()
            if 0 <= at < len(ranking.places)
            for one in [ranking.places[at]]
        }

    def find_unlabeled(
        self, visit: Visit, label: str | None, after: EpisodeKey | None
    ) -> list[dict[str, Any]]:
        """Return the first episode without a label, after a place or of all; none where all have.

        label: a column of the dataset; None where no episode has the label.
        """
        ranking = self.read_ranking(visit)
        start = None
        if ranking is not None:
            start = 0 if after is None else ranking.find(after)
        if ranking is None or start is None:
            return self.run(visit, self.unlabeled_query(label, after))
        labeled: set[tuple[str, str]] = set()
        if label is not None:
            rows = visit.sql(
                f"""SELECT DISTINCT episode_id, agent_id FROM {self.snapshot.dataset}.steps
                WHERE "{label}" IS NOT NULL""",
                self.snapshot,
            )
            labeled = {(row["episode_id"], row["agent_id"]) for row in rows}
        first = start if after is None else start + 1
        return [
            {"episode_id": one.episode_id, "agent_id": one.agent_id}
            for one in ranking.places[first:]
            if (one.episode_id, one.agent_id) not in labeled
        ][:1]

    def run(self, visit: Visit, query: Query) -> list[dict[str, Any]]:
        """Run one of these queries. Raises: QueryError, QueryRefusedError for the condition."""
        if not self.where:
            return visit.sql(query.text, self.snapshot, **query.parameters)
        visit.queries.append(query)
        result = visit.sql_of_reader(query)
        rows: list[dict[str, Any]] = result.rows.to_pylist()
        return rows

    def link_values(self) -> dict[str, object]:
        """Return what the addresses of its pages have after the question mark."""
        return {
            "where": self.where or None,
            "sort": None if self.sort == "episode" else self.sort,
            "order": "descending" if self.is_descending else None,
        }

    def source(self, *bounds: str) -> str:
        """Return the FROM item of its episodes, and the condition that they meet."""
        # A line of its own: the condition may end in a comment.
        conditions = [f"({self.where}\n)"] if self.where else []
        conditions += [bound for bound in bounds if bound]
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        return f"{self.rows}{where}"

    def _bound(self, key: EpisodeKey | None, *, is_forward: bool) -> str:
        """Return the condition of the rows that come after a place, or before it.

        Unknown values come last, in both orders.
        """
        if key is None:
            return ""
        sign = ">" if is_forward else "<"
        tie = f"(episode_id, agent_id) {sign} ($id, $agent)"
        if key.value is None:
            first = "false" if is_forward else f"{self.column} IS NOT NULL"
            return f"({first} OR ({self.column} IS NULL AND {tie}))"
        kind = SORTS[self.sort][2] if self.measure is None else "DOUBLE"
        value = f"CAST($value AS {kind})"
        further = ">" if is_forward != self.is_descending else "<"
        unknown = f"{self.column} IS NULL OR " if is_forward else ""
        return f"({unknown}{self.column} {further} {value} OR ({self.column} = {value} AND {tie}))"

    def _order(self, *, is_forward: bool) -> str:
        down = "DESC" if is_forward == self.is_descending else "ASC"
        last, ties = ("ASC", "ASC") if is_forward else ("DESC", "DESC")
        return (
            f"{self.column} IS NULL {last}, {self.column} {down}, "
            f"episode_id {ties}, agent_id {ties}"
        )

    def _query(self, text: str, key: EpisodeKey | None) -> Query:
        parameters: dict[str, object] = {}
        if key is not None:
            parameters = {"id": key.episode_id, "agent": key.agent_id}
            if key.value is not None:
                parameters["value"] = key.value
        return Query(text, parameters, {self.snapshot.dataset: self.snapshot.version})


def _find_measured_version(visit: Visit, snapshot: Snapshot) -> int:
    """Return the last version up to one whose commit did more than label an episode."""
    key = ("measured version", snapshot.dataset)
    known: tuple[int, int] | None = visit.memory.get(key)
    since = max(0, snapshot.version - _MAX_LABELINGS)
    measured = since
    if known is not None and since <= known[0] <= snapshot.version:
        since, measured = known
    for one in visit.lake.dataset(snapshot.dataset).history(since + 1):
        if one["version"] > snapshot.version:
            break
        if one.get("operation") != _LABELING:
            measured = one["version"]
    visit.memory.put(key, (snapshot.version, measured), 200)
    return measured


def read_list(visit: Visit, snapshot: Snapshot) -> EpisodeList:
    """Return the list that an address names. Raises: ConfigInvalidError."""
    sort = visit.values.get("sort") or "episode"
    measures = list_measures(snapshot)
    if sort not in SORTS and sort not in measures:
        expected = ", ".join((*SORTS, *measures))
        raise ConfigInvalidError(
            f"sort: found {sort!r}, expected one of {expected}.", parameter="sort"
        )
    return EpisodeList(
        snapshot,
        where=visit.values.get("where", "").strip(),
        sort=sort,
        is_descending=visit.values.get("order") == "descending",
        measure=find_measure(visit, snapshot, sort) if sort in measures else None,
    )


def show_episodes(visit: Visit) -> Page:
    """Return the page of `/datasets/NAME/episodes`."""
    snapshot = find_snapshot(visit)
    listed = read_list(visit, snapshot)
    after = read_key(visit.values.get("after"))
    name, at = snapshot.dataset, read_at(visit)
    page = Page(
        f"Episodes of {name}@{snapshot.version}",
        section="datasets",
        crumbs=[("Lake", visit.link()), (name, visit.link("datasets", name, at=at))],
    )
    form = _filter_form(visit, listed)
    try:
        rows = listed.run(visit, listed.page_query(after, _PAGE_ROWS + 1))
        found = [_make_row(listed, row) for row in rows]
    except (QueryError, QueryRefusedError, KeyError) as error:
        queries = visit.take_queries()
        said, message = explain_refusal(listed, error)
        panel = Panel("Episodes", [form, message], queries=queries, shows_title=False)
        return replace(page, panels=[panel], data={"error": {"message": said}}, status=400)
    is_last = len(found) <= _PAGE_ROWS
    shown = found[:_PAGE_ROWS]
    follows = None
    if not is_last:
        last = EpisodeKey(rows[_PAGE_ROWS - 1]["sort_key"], *_id_of(shown[-1]))
        # Of the same version: in a later one, rows could repeat or be missing.
        follows = visit.link(
            "datasets",
            name,
            "episodes",
            **listed.link_values(),
            at=snapshot.version,
            after=last.to_text(),
        )
    num = rows[0]["num_matching"] if rows and after is None else None
    body = [form, _rank_links(visit, listed, at)]
    body += _compare_form(visit, listed, shown, at) if shown else [_nothing(visit, listed)]
    if follows is not None or after is not None:
        first = visit.link("datasets", name, "episodes", **listed.link_values(), at=at)
        body.append(
            tag(
                "div",
                tag("a", "First", href=first, class_="button") if after is not None else None,
                tag("a", f"Next {_PAGE_ROWS}", href=follows, class_="button", data_next=True)
                if follows is not None
                else None,
                class_="more",
            )
        )
    note = None if num is None else count(num, "episode") + (" match" if listed.where else "")
    queries = visit.take_queries()
    panel = Panel("Episodes", body, note=note, queries=queries, shows_title=False)
    return replace(
        page,
        tools=tag(
            "div",
            tag("a", "Dataset", href=visit.link("datasets", name, at=at), class_="button"),
            tag(
                "a",
                "Label these",
                href=visit.link("datasets", name, "next", **listed.link_values()),
                class_="button",
            )
            if visit.form_token is not None and shown
            else None,
            tag(
                "a",
                "By day, source or column",
                href=visit.link("datasets", name, "breakdown", **listed.link_values(), at=at),
                class_="button",
            ),
            class_="tools",
        ),
        panels=[panel],
        data={
            "dataset": name,
            "version": snapshot.version,
            "num_matching": num if rows or after is not None else 0,
            "episodes": shown,
            "next": follows,
        },
        rows=shown,
    )


def explain_refusal(listed: EpisodeList, error: Exception) -> tuple[str, Markup]:
    """Return why a reader's condition could not be used: in words, and as a part of a panel."""
    said = str(error)
    if isinstance(error, KeyError):
        said = f"The condition ends the query early: its result has no column {error}."
    return said, tag(
        "div",
        tag("p", "The condition could not be used: ", tag("span", said, class_="wrong")),
        tag("p", "It is SQL over the columns ", _column_names(listed), "."),
        role="alert",
    )


def _make_row(listed: EpisodeList, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row without what its query is asked for besides. Raises: KeyError."""
    names = _COLUMNS.replace('"', "").split(", ")
    names += [] if listed.measure is None else [listed.measure.name]
    return {name: row[name] for name in names}


def _id_of(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["episode_id"], row["agent_id"]


def read_key(text: str | None) -> EpisodeKey | None:
    """Return the place in an address. Raises: ConfigInvalidError."""
    if not text:
        return None
    try:
        value, episode_id, agent_id = json.loads(text)
        if not all(isinstance(one, str) for one in (value or "", episode_id, agent_id)):
            raise ValueError(text)
    except (ValueError, RecursionError, TypeError) as error:
        raise ConfigInvalidError(
            f"after: found {text[:80]!r}, expected what the link to the next page has. Begin with "
            "the first page.",
            parameter="after",
        ) from error
    return EpisodeKey(value, episode_id, agent_id)


def _filter_form(visit: Visit, listed: EpisodeList) -> Markup:
    name, at = listed.snapshot.dataset, read_at(visit)
    hidden = {**listed.link_values(), "at": at, "where": None}
    return tag(
        "form",
        tag(
            "div",
            tag("label", "Where (SQL over the columns of episodes)", for_="where"),
            tag(
                "input",
                id="where",
                name="where",
                value=listed.where,
                placeholder='"return" < 150 AND num_steps > 20',
                spellcheck="false",
                autocomplete="off",
                data_complete=" ".join(listed.condition_names),
            ),
            class_="grow",
        ),
        [
            tag("input", type="hidden", name=key, value=value)
            for key, value in hidden.items()
            if value is not None
        ],
        tag("button", "Filter", type="submit"),
        tag("a", "All", href=visit.link("datasets", name, "episodes", at=at), class_="button")
        if listed.where
        else None,
        action=visit.link("datasets", name, "episodes"),
        class_="filter",
        role="search",
    )


def _rank_links(visit: Visit, listed: EpisodeList, at: str | None) -> Markup:
    """Return links to the list by each measure, the odd episodes first, and what the measure is."""
    links = []
    orders = [("return", "Lowest return", False), ("steps", "Longest", True)]
    orders += [(name, TITLES[name], name != "log_prob") for name in list_measures(listed.snapshot)]
    for sort, title, is_descending in orders:
        is_chosen = (listed.sort, listed.is_descending) == (sort, is_descending)
        turned = replace(listed, sort=sort, is_descending=is_descending, measure=None)
        address = visit.link(
            "datasets", listed.snapshot.dataset, "episodes", **turned.link_values(), at=at
        )
        links.append(
            tag(
                "a",
                title,
                href=address,
                class_="pill good" if is_chosen else "pill",
                aria_current="true" if is_chosen else None,
            )
        )
    said: list[Markup] = [tag("p", "Outliers: ", links)]
    if (measure := listed.measure) is not None:
        words = f"{measure.title}: {measure.definition}."
        if measure.one_in > 1:
            words += (
                f" It is computed for a sample, about one of {measure.one_in:,} episodes; it is "
                "unknown for others, which come last."
            )
        said.append(tag("p", words, class_="note"))
    return join(said)


def _nothing(visit: Visit, listed: EpisodeList) -> Markup:
    if listed.where:
        return draw_empty("No episode matches.", hint=join("Columns: ", _column_names(listed), "."))
    command = f"`replaylake ingest LOG --dataset {listed.snapshot.dataset}`"
    return draw_empty("This version has no episodes.", command=command)


def _column_names(listed: EpisodeList) -> Markup:
    return join_list(
        [tag("code", f'"{name}"' if name == "return" else name) for name in listed.condition_names]
    )


def _compare_form(
    visit: Visit, listed: EpisodeList, rows: Sequence[Mapping[str, Any]], at: str | None
) -> list[Markup]:
    """Return the table in a form, whose button leads to the selected episodes in the same plots."""
    form = "compare"
    actions = tag(
        "div",
        tag(
            "button",
            f"Compare selected, at most {MAX_COMPARED}",
            type="submit",
            form=form,
            class_="plain",
        ),
        tag("span", "", id="selected", class_="quiet", role="status"),
        class_="more",
    )
    table_of_rows = tag(
        "form",
        tag("input", type="hidden", name="at", value=at) if at is not None else None,
        _episode_table(visit, listed, rows, at),
        action=visit.link("datasets", listed.snapshot.dataset, "compare"),
        id=form,
        data_least=1,
        data_most=MAX_COMPARED,
    )
    return [actions, table_of_rows]


def _select_box(row: Mapping[str, Any]) -> Markup:
    # An id alone stands for all agents of the episode.
    name, value = "id", row["episode_id"]
    if row["agent_id"]:
        name, value = "of", json.dumps([row["episode_id"], row["agent_id"]])
    label = f"Select {row['episode_id']} {row['agent_id']}".rstrip()
    return tag("input", type="checkbox", name=name, value=value, aria_label=label)


def _episode_table(
    visit: Visit, listed: EpisodeList, rows: Sequence[Mapping[str, Any]], at: str | None
) -> Markup:
    has_agents = any(row["agent_id"] for row in rows)
    labels = _read_labels(visit, listed.snapshot, rows)
    # On every page of a labeled dataset: rows that follow have the columns of the first.
    has_labels = bool(list_label_names(listed.snapshot.table.schema))

    measure = listed.measure

    def head(sort: str, *, is_number: bool = True) -> Column:
        is_sorted = listed.sort == sort
        order = "descending" if listed.is_descending else "ascending"
        # Numbers are first looked at from the greatest down.
        turned = replace(
            listed,
            sort=sort,
            is_descending=not listed.is_descending if is_sorted else is_number,
            measure=measure if is_sorted else None,
        )
        address = visit.link(
            "datasets", listed.snapshot.dataset, "episodes", **turned.link_values(), at=at
        )
        link = tag("a", SORTS[sort][0] if sort in SORTS else TITLES[sort], href=address)
        return Column(
            link, is_number=is_number and sort != "started", sort=order if is_sorted else None
        )

    columns: list[Column | str] = [
        head("episode", is_number=False),
        *(["Agent"] if has_agents else []),
        *([head(measure.name)] if measure is not None else []),
        head("return"),
        head("steps"),
        "End",
        "Policy",
        head("version"),
        head("started"),
        *(["Labels"] if has_labels else []),
    ]
    cells: list[list[Child]] = [
        [
            tag(
                "span",
                _select_box(row),
                id_link(row["episode_id"], link_episode(visit, listed, row, at)),
                class_="selectable",
            ),
            *([row["agent_id"]] if has_agents else []),
            *([quiet_number(row[measure.name])] if measure is not None else []),
            quiet_number(row["return"]),
            f"{row['num_steps']:,}",
            describe_end(row),
            row["policy"] or "",
            "" if row["max_policy_version"] is None else f"{row['max_policy_version']:,}",
            join(time_tag(row["started_at"])),
            *(
                [[tag("span", text, class_="pill") for text in labels.get(_id_of(row), ())]]
                if has_labels
                else []
            ),
        ]
        for row in rows
    ]
    return table(columns, cells, label="Episodes", identity="episodes")


def _read_labels(
    visit: Visit, snapshot: Snapshot, rows: Sequence[Mapping[str, Any]]
) -> dict[tuple[str, str], list[str]]:
    """Return the labels of some episodes as texts, by episode and agent."""
    names = list_label_names(snapshot.table.schema)
    if not names or not rows:
        return {}
    values = ", ".join(f'any_value("{name}") AS "{name}"' for name in names)
    is_set = " OR ".join(f'"{name}" IS NOT NULL' for name in names)
    # As JSON: a parameter that a reader can copy with the query.
    found = visit.sql(
        f"""SELECT episode_id, agent_id, {values} FROM {snapshot.dataset}.steps
        WHERE episode_id IN (SELECT unnest(from_json($ids, '["VARCHAR"]'))) AND ({is_set})
        GROUP BY episode_id, agent_id""",
        snapshot,
        ids=json.dumps([row["episode_id"] for row in rows]),
    )
    return {
        _id_of(row): [
            name if row[name] is True else f"{name}: {cell_text(row[name])}"
            for name in names
            if row[name] is not None
        ]
        for row in found
    }


def link_episode(
    visit: Visit,
    listed: EpisodeList,
    row: Mapping[str, Any],
    at: str | None = None,
    **further: object,
) -> str:
    """Return the address of an episode within its list, so that its page has the neighbors.

    further: what it has after the question mark besides.
    """
    return visit.link(
        "datasets",
        listed.snapshot.dataset,
        "episode",
        id=row["episode_id"],
        agent=row["agent_id"] or None,
        **listed.link_values(),
        at=at,
        **further,
    )


def describe_end(row: Mapping[str, Any]) -> str:
    """Return how an episode ended."""
    if row["terminated"]:
        return "terminated"
    return "truncated" if row["truncated"] else "open"
