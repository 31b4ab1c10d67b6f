"""The episodes of a list by day, by source or by a column: what is odd about one of them shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from replaylake.datastore.episodes import schema, tokens
from replaylake.datastore.errors import ConfigInvalidError, QueryError, QueryRefusedError
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.query.statements import literal
from replaylake.serve.explorer.datasets.dataset_page import find_snapshot, read_at
from replaylake.serve.explorer.episodes.episodes_page import EpisodeList, explain_refusal, read_list
from replaylake.serve.explorer.visits.page import Page, Panel, draw_empty
from replaylake.serve.explorer.visits.visit import Query, Visit
from replaylake.serve.pages.charts import Interval, interval_chart
from replaylake.serve.pages.markup import Child, Markup, tag
from replaylake.serve.pages.tables import Column, quiet_number, table
from replaylake.serve.pages.texts import count, number_text

_MAX_ROWS: Final = 200
_MAX_DRAWN: Final = 60
# By their names in an address: title, and SQL over the columns of `episodes`. Times are UTC.
_OWN_KEYS: Final[Mapping[str, tuple[str, str]]] = {
    "day": ("day (UTC)", "CAST(CAST(started_at AS DATE) AS VARCHAR)"),
    "source": ("source", "split_part(episode_id, '/', 1)"),
    "policy": ("policy", "policy"),
    "version": ("policy version", "CAST(max_policy_version AS VARCHAR)"),
}
# Columns of steps that are no property of an episode.
_NO_KEYS: Final = frozenset(
    (
        schema.EPISODE_ID,
        schema.STEP,
        schema.ENV_STEP,
        schema.OBSERVATION,
        schema.FINAL_OBSERVATION,
        schema.ACTION,
        schema.REWARD,
        schema.TERMINATED,
        schema.TRUNCATED,
        schema.BEHAVIOR_LOG_PROB,
        schema.POLICY,
        schema.POLICY_VERSION,
        schema.TIMESTAMP,
        schema.SOURCE_EPISODE_ID,
        *tokens.TOKEN_TYPES,
    )
)
_KEY_TYPES: Final = frozenset(
    ("string", "bool", "int8", "int16", "int32", "int64", "float", "double", "date32[day]")
)


def list_keys(snapshot: Snapshot) -> dict[str, str]:
    """Return what episodes can be broken down by: names in an address, with their titles."""
    further = {
        field.name: field.name
        for field in snapshot.table.schema
        if field.name not in _NO_KEYS
        and (
            str(field.type) in _KEY_TYPES or str(field.type).startswith("dictionary<values=string")
        )
    }
    own = {name: title for name, (title, _) in _OWN_KEYS.items()}
    # A further column with a name of ours is not reachable.
    return own | {name: title for name, title in further.items() if name not in own}


def show_breakdown(visit: Visit) -> Page:
    """Return the page of `/datasets/NAME/breakdown?by=KEY`, of a list of episodes.

    Raises: NotFoundError, ConfigInvalidError.
    """
    snapshot = find_snapshot(visit)
    listed = read_list(visit, snapshot)
    name, at = snapshot.dataset, read_at(visit)
    keys = list_keys(snapshot)
    by = visit.values.get("by") or "day"
    if by not in keys:
        raise ConfigInvalidError(
            f"by: found {by!r}, expected one of {', '.join(keys)}.", parameter="by"
        )
    page = Page(
        f"Episodes of {name}@{snapshot.version} by {keys[by]}",
        section="datasets",
        crumbs=[
            ("Lake", visit.link()),
            (name, visit.link("datasets", name, at=at)),
            ("Episodes", visit.link("datasets", name, "episodes", **listed.link_values(), at=at)),
        ],
        lead=tag("span", "among those where ", tag("code", listed.where)) if listed.where else None,
    )
    links = link_keys(visit, listed, by)
    visit.take_queries()
    try:
        found = listed.run(visit, _query(listed, by))
        overall = found[0]["overall"] if found else None
        rows = [{key: row[key] for key in _COLUMNS} for row in found]
    except (QueryError, QueryRefusedError, KeyError) as error:
        said, message = explain_refusal(listed, error)
        panel = Panel("Breakdown", [links, message], queries=visit.take_queries())
        return replace(page, panels=[panel], data={"error": {"message": said}}, status=400)
    body: list[Child] = [links]
    value = _value_title(listed)
    if not rows:
        body.append(draw_empty("No episode matches." if listed.where else "There are none."))
    else:
        body += [
            _draw(rows, value, keys[by], overall),
            _tabulate(visit, listed, rows, by, value, keys[by]),
        ]
    note = count(len(rows), "row")
    if len(rows) == _MAX_ROWS:
        note = f"the {'last' if by == 'day' else 'largest'} {_MAX_ROWS}"
    if listed.measure is not None:
        note += f". {value}: {listed.measure.definition}."
        if listed.measure.one_in > 1:
            note += f" Of a sample, about one of {listed.measure.one_in:,} episodes."
    panel = Panel(f"{value} by {keys[by]}", body, note=note, queries=visit.take_queries())
    return replace(
        page,
        panels=[panel],
        data={
            "dataset": name,
            "version": snapshot.version,
            "by": by,
            "overall_mean": overall,
            "rows": rows,
        },
        rows=rows,
    )


_COLUMNS: Final = (
    "key",
    "num_episodes",
    "num_terminated",
    "num_known",
    "mean_return",
    "mean_num_steps",
    "mean",
    "low",
    "high",
)


def _query(listed: EpisodeList, by: str) -> Query:
    """Return the query of the rows: by day the last ones in their order, else the largest ones.

    num_known: the episodes whose value is known. overall: the mean of the finite values of all
    episodes, also of those in rows that are left out.
    """
    value = f"CAST({_value_sql(listed)} AS DOUBLE)"
    order = "key DESC NULLS LAST" if by == "day" else "num_episodes DESC, key"
    text = f"""
        SELECT {_key_sql(by)} AS key, count(*) AS num_episodes,
            count(*) FILTER (terminated) AS num_terminated, count({value}) AS num_known,
            avg("return") AS mean_return, avg(num_steps) AS mean_num_steps,
            avg({value}) AS mean, quantile_cont({value}, 0.25) AS low,
            quantile_cont({value}, 0.75) AS high,
            sum(sum({value}) FILTER (isfinite({value}))) OVER ()
                / nullif(sum(count({value}) FILTER (isfinite({value}))) OVER (), 0) AS overall
        FROM {_source(listed, by)} GROUP BY key ORDER BY {order} LIMIT {_MAX_ROWS}"""
    # Conditions may have comments to the ends of their lines: not one line.
    return Query(text.strip(), {}, {listed.snapshot.dataset: listed.snapshot.version})


def _key_sql(by: str) -> str:
    return _OWN_KEYS[by][1] if by in _OWN_KEYS else '"the key"'


def _source(listed: EpisodeList, by: str) -> str:
    selected = listed.source()
    if by in _OWN_KEYS:
        return selected
    return (
        f"(SELECT * FROM {selected}) LEFT JOIN ({_first_values(listed.snapshot, by)}) "
        "USING (episode_id, agent_id)"
    )


def _first_values(snapshot: Snapshot, column: str) -> str:
    """Return a SELECT of each episode's first known value of a column, as a text."""
    return (
        f'SELECT episode_id, agent_id, CAST(arg_min("{column}", step) AS VARCHAR) AS "the key" '
        f"FROM {snapshot.dataset}.steps GROUP BY episode_id, agent_id"
    )


def _value_sql(listed: EpisodeList) -> str:
    return listed.column if listed.measure or listed.sort == "steps" else '"return"'


def _value_title(listed: EpisodeList) -> str:
    if listed.measure is not None:
        return listed.measure.title
    return "Steps" if listed.sort == "steps" else "Return"


def link_keys(visit: Visit, listed: EpisodeList, chosen: str | None = None) -> Markup:
    """Return links to a list of episodes by each of its keys."""
    links = [
        tag(
            "a",
            title,
            href=visit.link(
                "datasets",
                listed.snapshot.dataset,
                "breakdown",
                by=name,
                **listed.link_values(),
                at=read_at(visit),
            ),
            class_="pill good" if name == chosen else "pill",
            aria_current="true" if name == chosen else None,
        )
        for name, title in list_keys(listed.snapshot).items()
    ]
    return tag("p", "By: ", links)


def _draw(rows: Sequence[Mapping[str, Any]], value: str, by: str, overall: float | None) -> Child:
    """Draw the mean of each row between its quartiles, and that of all episodes as a line."""
    known = [row for row in rows if _is_finite(row["mean"])]
    if not known:
        return None
    shown = known[:_MAX_DRAWN]
    intervals = [
        Interval(
            _name(row["key"]),
            row["mean"],
            row["low"] if _is_finite(row["low"]) else None,
            row["high"] if _is_finite(row["high"]) else None,
            number_text(float(f"{row['mean']:.4g}")),
        )
        for row in shown
    ]
    label = f"{value} by {by}: mean, and the quartiles of its episodes"
    is_known = overall is not None and math.isfinite(overall)
    reference = ("mean", float(f"{overall:.4g}")) if is_known else None
    return interval_chart(intervals, label=label, reference=reference)


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _name(key: str | None) -> str:
    return "unknown" if key is None else key or "(empty)"


def _tabulate(
    visit: Visit,
    listed: EpisodeList,
    rows: Sequence[Mapping[str, Any]],
    by: str,
    value: str,
    title: str,
) -> Markup:
    is_own = listed.measure is not None
    cells: list[list[Child]] = []
    for row in rows:
        selected = replace(listed, where=_narrow(listed, by, row["key"]))
        address = visit.link(
            "datasets",
            listed.snapshot.dataset,
            "episodes",
            **selected.link_values(),
            at=read_at(visit),
        )
        cells.append(
            [
                tag("a", tag("bdi", _name(row["key"])), href=address),
                f"{row['num_episodes']:,}",
                *(
                    [f"{row['num_known']:,}", quiet_number(row["mean"], is_short=True)]
                    if is_own
                    else []
                ),
                quiet_number(row["mean_return"], is_short=True),
                quiet_number(row["mean_num_steps"], is_short=True),
                f"{row['num_terminated'] / row['num_episodes']:.1%}",
            ]
        )
    columns: list[Column | str] = [
        title[0].upper() + title[1:] if by in _OWN_KEYS else title,
        Column("Episodes", is_number=True),
        *(
            [Column("Known", is_number=True), Column(f"Mean {value.lower()}", is_number=True)]
            if is_own
            else []
        ),
        Column("Mean return", is_number=True),
        Column("Mean steps", is_number=True),
        Column("Terminated", is_number=True),
    ]
    return table(columns, cells, label=f"{value} by {title}")


def _narrow(listed: EpisodeList, by: str, key: str | None) -> str:
    """Return the condition of the episodes of a row, within those of the list."""
    if by in _OWN_KEYS:
        text = _OWN_KEYS[by][1]
        condition = f"{text} IS NULL" if key is None else f"{text} = {literal(key)}"
    else:
        known = f'"the key" {"IS NULL" if key is None else "= " + literal(key)}'
        condition = (
            "(episode_id, agent_id) IN (SELECT (episode_id, agent_id) FROM "
            f"({_first_values(listed.snapshot, by)}) WHERE {known})"
        )
    # A line of its own: the condition may end in a comment.
    return f"({listed.where}\n) AND {condition}" if listed.where else condition
