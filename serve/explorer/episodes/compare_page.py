"""Several episodes in the same plots: rewards, returns, log-probs, actions and observations."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.spaces import Box, Discrete, Space, Text, leaves, value_shape
from replaylake.datastore.errors import ConfigInvalidError, NotFoundError
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.serve.explorer.datasets.dataset_page import find_snapshot, read_at
from replaylake.serve.explorer.episodes.episode_page import read_numbers, round_values, to_floats
from replaylake.serve.explorer.episodes.episodes_page import MAX_COMPARED, describe_end
from replaylake.serve.explorer.visits.page import Page, Panel, build_panels, draw_empty
from replaylake.serve.explorer.visits.visit import Visit
from replaylake.serve.pages.charts import swatch
from replaylake.serve.pages.markup import Child, data_block, tag
from replaylake.serve.pages.tables import Column, id_link, quiet_number, table, time_tag
from replaylake.serve.pages.texts import shorten_id

# A plot has so many points for an episode; of longer ones, every n-th step.
_MAX_POINTS: Final = 2_000
# Numbers of an action or an observation that have plots, and that are read for them.
_MAX_NUMBERS: Final = 6
_MAX_WIDTH: Final = 256


@dataclass(frozen=True)
class Comparison:
    """What the panels share. episodes: their rows of `episodes`; num_chosen: before the limit."""

    snapshot: Snapshot
    episodes: Sequence[Mapping[str, Any]]
    num_chosen: int

    @property
    def names(self) -> list[str]:
        """How the episodes are called in legends."""
        has_agents = any(row["agent_id"] for row in self.episodes)
        return [
            f"{shorten_id(row['episode_id'])} {row['agent_id'] or '(no name)'}"
            if has_agents
            else shorten_id(row["episode_id"]) or "(empty)"
            for row in self.episodes
        ]


def show_comparison(visit: Visit) -> Page:
    """Return the page of `/datasets/NAME/compare?id=ID&id=ID`.

    `of` names an episode and one of its agents, as a JSON list of both; `ids` several episodes,
    with commas between them. An episode stands for all its agents. At most `MAX_COMPARED` are
    shown. Raises: NotFoundError, ConfigInvalidError.
    """
    snapshot = find_snapshot(visit)
    name, at = snapshot.dataset, read_at(visit)
    chosen = _find_episodes(visit, snapshot)
    contents = Comparison(snapshot, chosen[:MAX_COMPARED], len(chosen))
    where = visit.link("datasets", name, "episodes", at=at)
    own_queries = visit.take_queries()
    panels = build_panels(visit, contents, PANELS) if chosen else [_ask(where)]
    panels[0] = replace(panels[0], queries=own_queries)
    return Page(
        f"Episodes of {name}@{snapshot.version}, compared",
        section="datasets",
        crumbs=[
            ("Lake", visit.link()),
            (name, visit.link("datasets", name, at=at)),
            ("Episodes", where),
        ],
        panels=panels,
        data={"dataset": name, "version": snapshot.version, "episodes": contents.episodes},
        rows=contents.episodes,
        plots=True,
    )


def _ask(where: str) -> Panel:
    hint = tag("a", "Select some in the list of episodes", href=where)
    return Panel("Episodes", draw_empty("No episode is selected.", hint=hint))


def _find_episodes(visit: Visit, snapshot: Snapshot) -> list[dict[str, Any]]:
    """Return the rows of the episodes in an address, in its order, each once."""
    wanted: list[tuple[str, str | None]] = [(one, None) for one in visit.lists.get("id", ())]
    wanted += [_read_pair(text) for text in visit.lists.get("of", ())]
    for text in visit.lists.get("ids", ()):
        wanted += [(one, None) for one in text.split(",") if one]
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for episode_id, agent_id in dict.fromkeys(wanted):
        rows = visit.sql(
            f"""SELECT * FROM {snapshot.dataset}.episodes WHERE episode_id = $id
            ORDER BY agent_id""",
            snapshot,
            id=episode_id,
        )
        own = [row for row in rows if agent_id is None or row["agent_id"] == agent_id]
        if not own:
            of_agent = "" if agent_id is None else f" of agent {agent_id!r}"
            raise NotFoundError(
                f"episode {episode_id!r}{of_agent}: found none in "
                f"{snapshot.dataset}@{snapshot.version}. Its list of episodes has the ids."
            )
        for row in own:
            found.setdefault((row["episode_id"], row["agent_id"]), row)
        if len(found) > MAX_COMPARED:
            break
    return list(found.values())


def _read_pair(text: str) -> tuple[str, str]:
    try:
        episode_id, agent_id = json.loads(text)
        if not (isinstance(episode_id, str) and isinstance(agent_id, str)):
            raise ValueError(text)
    except (ValueError, RecursionError, TypeError) as error:
        raise ConfigInvalidError(
            f"of: found {text[:80]!r}, expected a JSON list of an episode's id and an agent. "
            "Select episodes in their list.",
            parameter="of",
        ) from error
    return episode_id, agent_id


def list_compared(visit: Visit, contents: Comparison) -> Panel:
    """Show the episodes with the colors that they have in the plots."""
    has_agents = any(row["agent_id"] for row in contents.episodes)
    rows: list[list[Child]] = []
    for number, row in enumerate(contents.episodes):
        address = visit.link(
            "datasets",
            contents.snapshot.dataset,
            "episode",
            id=row["episode_id"],
            agent=row["agent_id"] or None,
            at=read_at(visit),
        )
        version = row["max_policy_version"]
        rows.append(
            [
                tag(
                    "span",
                    swatch(number),
                    " ",
                    id_link(row["episode_id"], address),
                    class_="selectable",
                ),
                *([row["agent_id"]] if has_agents else []),
                quiet_number(row["return"]),
                f"{row['num_steps']:,}",
                describe_end(row),
                row["policy"] or "",
                "" if version is None else f"{version:,}",
                time_tag(row["started_at"]),
            ]
        )
    columns: list[Column | str] = [
        "Episode",
        *(["Agent"] if has_agents else []),
        Column("Return", is_number=True),
        Column("Steps", is_number=True),
        "End",
        "Policy",
        Column("Version", is_number=True),
        "Started",
    ]
    note = None
    if contents.num_chosen > len(contents.episodes):
        note = f"At most {MAX_COMPARED} episodes are compared; these are the first of the selected."
    return Panel("Episodes", table(columns, rows, label="Episodes"), note=note)


def draw_comparison(visit: Visit, contents: Comparison) -> Panel:
    """Draw a line for each episode in each plot, over the steps."""
    longest = max(row["num_steps"] for row in contents.episodes)
    every = math.ceil(longest / _MAX_POINTS)
    lines = [_read_lines(visit, contents.snapshot, row, every) for row in contents.episodes]
    steps = sorted({step for one in lines for step in one.steps.tolist()})
    places = [np.searchsorted(steps, one.steps) for one in lines]
    plots = []
    for title in dict.fromkeys(title for one in lines for title in one.values):
        series = []
        for number, (name, one, place) in enumerate(
            zip(contents.names, lines, places, strict=True)
        ):
            values = np.full(len(steps), math.nan)
            values[place] = one.values.get(title, math.nan)
            if np.isfinite(values).any():
                series.append({"name": name, "color": number, "values": round_values(values)})
        if series:
            is_stepped = any(title in one.stepped for one in lines)
            plots.append({"title": title, "series": series, "stepped": is_stepped})
    if not plots:
        return Panel("Curves", draw_empty("These episodes have no numbers to draw."))
    note = "Move over a curve, or use the slider, to read the values of a step."
    if every > 1:
        note += f" One of {every:,} steps is drawn; the return so far is that of all steps."
    if any(one.is_cut for one in lines):
        note += f" Of actions and observations, the first {_MAX_NUMBERS} numbers are drawn"
        note += f", and none of those with more than {_MAX_WIDTH}."
    body = [
        tag(
            "div",
            tag("label", "Step", for_="scrub"),
            tag("input", id="scrub", type="range", min=0, max=len(steps) - 1, value=0),
            tag("output", "", for_="scrub", id="scrubbed"),
            class_="scrub",
        ),
        tag("div", class_="plots two", data_plots="curves"),
        data_block("curves", {"x": steps, "label": "step", "plots": plots, "shown": MAX_COMPARED}),
    ]
    return Panel("Curves", body, note=note)


@dataclass(frozen=True)
class _Lines:
    """An episode's numbers by the title of their plot, float64 [T], at `steps` int64 [T].

    stepped: titles of discrete values. is_cut: whether there are further numbers.
    """

    steps: NDArray[np.int64]
    values: Mapping[str, NDArray[np.float64]]
    stepped: frozenset[str]
    is_cut: bool


def _read_lines(visit: Visit, snapshot: Snapshot, row: Mapping[str, Any], every: int) -> _Lines:
    spec = snapshot.spec
    spaces = {schema.ACTION: spec.action_space, schema.OBSERVATION: spec.observation_space}
    drawn = {name: space for name, space in spaces.items() if 0 < _count(space) <= _MAX_WIDTH}
    columns = ", ".join((schema.STEP, schema.REWARD, schema.BEHAVIOR_LOG_PROB, *drawn))
    found = visit.table(
        f"""SELECT * FROM (
            SELECT {columns}, CASE WHEN count({schema.REWARD}) OVER steps_so_far
                = count(*) OVER steps_so_far THEN sum({schema.REWARD}) OVER steps_so_far END
                AS return_so_far
            FROM {snapshot.dataset}.steps WHERE episode_id = $id AND agent_id = $agent
            WINDOW steps_so_far AS (ORDER BY step)
        ) WHERE step % $every = 0 ORDER BY step LIMIT {_MAX_POINTS + 1}""",
        snapshot,
        id=row["episode_id"],
        agent=row["agent_id"],
        every=every,
    )
    values = {
        "Reward": to_floats(found.column(schema.REWARD)),
        "Return so far": to_floats(found.column("return_so_far")),
    }
    stepped: set[str] = set()
    is_cut = any(_count(space) > _MAX_NUMBERS for space in spaces.values())
    for name, space in drawn.items():
        labels: Sequence[str] = ()
        if name == schema.OBSERVATION and spec.encoding is not None:
            labels = spec.encoding.names()
        titles, numbers = read_numbers(space, name, found.column(name), labels)
        for place, title in enumerate(titles[:_MAX_NUMBERS]):
            values[title] = numbers[:, place]
            if isinstance(space, Discrete):
                stepped.add(title)
    values["Log-prob of the action, by its behavior policy"] = to_floats(
        found.column(schema.BEHAVIOR_LOG_PROB)
    )
    steps = np.asarray(found.column(schema.STEP).to_numpy(), np.int64)
    return _Lines(steps, values, frozenset(stepped), is_cut)


def _count(space: Space) -> int:
    """Return how many numbers a value has; 0 for texts, and for what has frames in it."""
    parts = [leaf for _, leaf in leaves(space) if not isinstance(leaf, Text)]
    if any(isinstance(leaf, Box) and leaf.is_image for leaf in parts):
        return 0
    return int(sum(np.prod(value_shape(leaf), dtype=np.int64) for leaf in parts))


PANELS: Final = (list_compared, draw_comparison)
