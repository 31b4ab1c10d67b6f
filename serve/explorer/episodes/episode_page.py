"""An episode's page: its curves with one cursor, its frames, its dialogue and its steps."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.spaces import Box, Discrete, Space, Text, leaves
from replaylake.datastore.errors import ConfigInvalidError, NotFoundError
from replaylake.datastore.feedback.decisions import DECISION_ID
from replaylake.datastore.interchange.formats.generations.rows import COMPLETION_MESSAGES
from replaylake.datastore.lake.profile.vectors import SpaceNumbers
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.maintenance.labels.episode_labels import (
    EpisodeLabel,
    read_episode_labels,
)
from replaylake.datastore.query.group_views import GROUP_ID
from replaylake.serve.explorer.datasets.dataset_page import find_snapshot, read_at
from replaylake.serve.explorer.episodes.agents_panel import draw_branches, draw_side_by_side
from replaylake.serve.explorer.episodes.conversation_panel import draw_conversation
from replaylake.serve.explorer.episodes.episode_labels import show_episode_labels, to_json_labels
from replaylake.serve.explorer.episodes.episodes_page import (
    EpisodeKey,
    EpisodeList,
    describe_end,
    link_episode,
    read_list,
)
from replaylake.serve.explorer.episodes.frames import encode_png
from replaylake.serve.explorer.episodes.group_page import link_group
from replaylake.serve.explorer.episodes.token_panel import draw_tokens
from replaylake.serve.explorer.visits.page import Download, Page, Panel, build_panels
from replaylake.serve.explorer.visits.visit import Visit
from replaylake.serve.pages.markup import Child, Markup, data_block, tag
from replaylake.serve.pages.tables import Column, quiet_number, table, time_tag, value_cell

# Of a longer episode, the first steps are drawn, and of a table so many.
_MAX_STEPS: Final = 20_000
_MAX_STEP_BYTES: Final = 64 << 20
_FIRST_STEPS: Final = 64
_MAX_ROWS: Final = 200
_MAX_SERIES: Final = 32
_NUMERIC: Final = re.compile("u?int(8|16|32|64)|halffloat|float|double")
_CURVE_COLUMNS: Final = (schema.REWARD, schema.BEHAVIOR_LOG_PROB)
# Columns whose values curves or other panels show, or that are the same in every step.
_NOT_FURTHER: Final = frozenset(
    (
        schema.EPISODE_ID,
        schema.AGENT_ID,
        schema.STEP,
        schema.ENV_STEP,
        schema.REWARD,
        schema.BEHAVIOR_LOG_PROB,
        schema.POLICY_VERSION,
        schema.OBSERVATION,
        schema.FINAL_OBSERVATION,
        schema.ACTION,
        schema.TERMINATED,
        schema.TRUNCATED,
    )
)


@dataclass(frozen=True)
class EpisodeContents:
    """What the panels share. summary: its row of `episodes`; steps: the first steps, in Arrow.

    agents: the rows of all agents of the episode, ordered by agent. numbers: by observation and
    action, the names of their numbers and these, float64 [T, D].
    labels: those of people, by name.
    """

    snapshot: Snapshot
    summary: Mapping[str, Any]
    agents: Sequence[Mapping[str, Any]]
    steps: Any
    numbers: Mapping[str, tuple[Sequence[str], NDArray[np.float64]]]
    labels: Mapping[str, EpisodeLabel]

    @property
    def episode_id(self) -> str:
        return str(self.summary["episode_id"])

    @property
    def agent_id(self) -> str:
        return str(self.summary["agent_id"])

    @property
    def key(self) -> EpisodeKey:
        """Its place in the list that its address names."""
        return EpisodeKey(self.summary["sort_key"], self.episode_id, self.agent_id)

    @property
    def step_numbers(self) -> list[int]:
        numbers: list[int] = self.steps.column(schema.STEP).to_pylist()
        return numbers

    @property
    def has_text(self) -> bool:
        spec = self.snapshot.spec
        names = self.snapshot.table.schema.names
        return isinstance(spec.action_space, Text) or COMPLETION_MESSAGES in names


class _Columns(Mapping[str, list[Any]]):
    """The columns of a table as lists, each made when it is read: only JSON reads all of them."""

    def __init__(self, steps: Any) -> None:
        self._steps = steps

    def __getitem__(self, name: str) -> list[Any]:
        values: list[Any] = self._steps.column(name).to_pylist()
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self._steps.column_names)

    def __len__(self) -> int:
        return int(self._steps.num_columns)


class _Rows(Sequence[Mapping[str, Any]]):
    """The rows of a table, each made when it is read: only CSV reads all of them."""

    def __init__(self, steps: Any) -> None:
        self._steps = steps

    def __getitem__(self, place: Any) -> Any:
        rows = self._steps.slice(place, 1).to_pylist()
        if not rows:
            raise IndexError(place)
        return rows[0]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for batch in self._steps.to_batches(max_chunksize=_FIRST_STEPS):
            yield from batch.to_pylist()

    def __len__(self) -> int:
        return int(self._steps.num_rows)


def show_episode(visit: Visit) -> Page:
    """Return the page of `/datasets/NAME/episode?id=ID&agent=AGENT`, within a list of episodes."""
    snapshot = find_snapshot(visit)
    listed = read_list(visit, snapshot)
    contents = _read_episode(visit, snapshot, listed)
    own_queries = visit.take_queries()
    neighbors = listed.find_neighbors(visit, contents.key)
    name, at = snapshot.dataset, read_at(visit)
    summary = contents.summary
    panels = build_panels(visit, contents, PANELS)
    if panels:
        first = panels[0]
        queries = (*own_queries, *first.queries)
        panels[0] = Panel(first.title, first.body, first.note, queries, first.is_wide)
    where = visit.link("datasets", name, "episodes", **listed.link_values(), at=at)
    facts: list[tuple[str, Child]] = [
        ("return", quiet_number(summary["return"])),
        ("steps", f"{summary['num_steps']:,}"),
        ("end", describe_end(summary)),
    ]
    if (measure := listed.measure) is not None:
        facts.append((measure.title.lower(), quiet_number(summary[measure.name])))
    if summary["agent_id"]:
        facts.append(("agent", summary["agent_id"]))
    if summary["policy"] is not None:
        version = summary["max_policy_version"]
        facts.append(("policy", summary["policy"] + ("" if version is None else f":{version}")))
    if summary["started_at"] is not None:
        facts.append(("started", time_tag(summary["started_at"])))
    if GROUP_ID in contents.steps.column_names:
        (group,) = contents.steps.column(GROUP_ID)[:1].to_pylist() or (None,)
        if group is not None:
            link = tag("a", str(group) or "(empty)", href=link_group(visit, name, group))
            facts.append(("group", link))
    if summary["source_episode_id"]:
        facts.append(("id in its source", summary["source_episode_id"]))
    return Page(
        summary["episode_id"] or "(empty)",
        section="datasets",
        crumbs=[
            ("Lake", visit.link()),
            (name, visit.link("datasets", name, at=at)),
            ("Episodes", where),
        ],
        lead=tag("span", "among those where ", tag("code", listed.where)) if listed.where else None,
        facts=facts,
        tools=_neighbor_links(visit, listed, neighbors, at),
        panels=panels,
        data={
            "dataset": name,
            "version": snapshot.version,
            "episode": summary,
            "labels": to_json_labels(contents.labels),
            "steps": _Columns(contents.steps),
            "previous": neighbors.get("previous"),
            "next": neighbors.get("next"),
        },
        rows=_Rows(contents.steps),
        plots=True,
    )


def _read_episode(visit: Visit, snapshot: Snapshot, listed: EpisodeList) -> EpisodeContents:
    episode_id = visit.values.get("id", "")
    agent_id = visit.values.get("agent")
    name = snapshot.dataset
    rows = _read_rows(visit, listed, episode_id)
    found = [row for row in rows if agent_id is None or row["agent_id"] == agent_id]
    if not found:
        of_agent = "" if agent_id is None else f" of agent {agent_id!r}"
        raise NotFoundError(
            f"episode {episode_id!r}{of_agent}: found none in {name}@{snapshot.version}. Its list "
            "of episodes has the ids."
        )
    summary = {
        **found[0],
        "agents": [row["agent_id"] for row in rows],
        "num_steps_of_agents": sum(row["num_steps"] for row in rows),
    }
    names = [
        field.name
        for field in snapshot.table.schema
        if field.name not in (schema.EPISODE_ID, schema.AGENT_ID, schema.FINAL_OBSERVATION)
        and not _has_frames(snapshot.spec, field.name)
    ]
    steps = _read_steps(visit, snapshot, names, summary)
    numbers = {}
    encoding = snapshot.spec.encoding
    for column, space, labels in (
        (
            schema.OBSERVATION,
            snapshot.spec.observation_space,
            () if encoding is None else encoding.names(),
        ),
        (schema.ACTION, snapshot.spec.action_space, ()),
    ):
        if column in names:
            numbers[column] = read_numbers(space, column, steps.column(column), labels)
    said = read_episode_labels(snapshot, summary["episode_id"], summary["agent_id"])
    return EpisodeContents(snapshot, summary, rows, steps, numbers, said)


def _read_rows(visit: Visit, listed: EpisodeList, episode_id: str) -> list[dict[str, Any]]:
    """Return the row of each agent, with its place in the list as `sort_key`."""
    ranking, measure = listed.read_ranking(visit), listed.measure
    if ranking is None or measure is None:
        return visit.sql(
            f"""SELECT *, CAST({listed.column} AS VARCHAR) AS sort_key FROM {listed.rows}
            WHERE episode_id = $id ORDER BY agent_id""",
            listed.snapshot,
            id=episode_id,
        )
    name = listed.snapshot.dataset
    rows = visit.sql(
        f"SELECT * FROM {name}.episodes WHERE episode_id = $id ORDER BY agent_id",
        listed.snapshot,
        id=episode_id,
    )
    found = []
    for row in rows:
        place = ranking.find(EpisodeKey(None, episode_id, row["agent_id"]))
        key = None if place is None else ranking.places[place].value
        value = None if key is None else float(key)
        found.append({**row, measure.name: value, "sort_key": key})
    return found


def _read_steps(
    visit: Visit, snapshot: Snapshot, names: Sequence[str], summary: Mapping[str, Any]
) -> Any:
    """Return an episode's first steps as Arrow: as many as the limits of number and bytes allow.

    The first ones say how large the others are: a step may be a few numbers, or a long prompt.
    """
    quoted = ", ".join(f'"{column}"' for column in names)
    parts: list[Any] = []
    num, num_bytes, limit = 0, 0, min(_FIRST_STEPS, _MAX_STEPS)
    while limit:
        after = "" if not parts else "AND step > $last "
        last = {} if not parts else {"last": parts[-1].column(schema.STEP)[-1].as_py()}
        part = visit.table(
            f"""SELECT {quoted} FROM {snapshot.dataset}.steps
            WHERE episode_id = $id AND agent_id = $agent {after}ORDER BY step LIMIT {limit}""",
            snapshot,
            id=summary["episode_id"],
            agent=summary["agent_id"],
            **last,
        )
        parts.append(part)
        num, num_bytes = num + part.num_rows, num_bytes + part.nbytes
        if part.num_rows < limit or num >= summary["num_steps"]:
            break
        fitting = (_MAX_STEP_BYTES - num_bytes) * part.num_rows // max(1, part.nbytes)
        # Steps may grow, as prompts do: not too many at once.
        limit = max(0, min(fitting, 16 * num, _MAX_STEPS - num))
    # Arrow itself is imported by the datastore alone.
    batches = [batch for part in parts for batch in part.to_batches()]
    return type(parts[0]).from_batches(batches, parts[0].schema)


def read_numbers(
    space: Space, name: str, column: Any, labels: Sequence[str]
) -> tuple[Sequence[str], NDArray[np.float64]]:
    """Return the names of the numbers of a column's values, and these, float64 [T, D].

    Texts and frames have none; of others, there are at most 32.
    """
    numbers = SpaceNumbers(space, name, labels)
    rows, _ = numbers.read(column)
    return numbers.names[:_MAX_SERIES], rows[:, :_MAX_SERIES]


def _has_frames(spec: schema.DatasetSpec, column: str) -> bool:
    return column == schema.OBSERVATION and any(
        isinstance(leaf, Box) and leaf.is_image for _, leaf in leaves(spec.observation_space)
    )


def _neighbor_links(
    visit: Visit,
    listed: EpisodeList,
    neighbors: Mapping[str, Mapping[str, Any]],
    at: str | None,
) -> Markup:
    links = []
    for place, text, rel, key in (
        ("previous", "Previous", "prev", "k"),
        ("next", "Next", "next", "j"),
    ):
        row = neighbors.get(place)
        if row is None:
            links.append(tag("span", text, class_="button", aria_disabled="true"))
            continue
        address = link_episode(visit, listed, row, at, queue=visit.values.get("queue"))
        links.append(
            tag(
                "a",
                text,
                href=address,
                rel=rel,
                accesskey=rel[0],
                data_key=key,
                class_="button",
            )
        )
    return tag("div", links, class_="tools")


def show_labels(visit: Visit, contents: EpisodeContents) -> Panel | None:
    """Show labels and scores, and the form that sets labels."""
    return show_episode_labels(visit, contents.snapshot, contents.key, contents.labels)


def show_frames(visit: Visit, contents: EpisodeContents) -> Panel | None:
    """Show the frame of the step that the cursor is at."""
    images = [
        (name, leaf)
        for name, leaf in leaves(contents.snapshot.spec.observation_space)
        if isinstance(leaf, Box) and leaf.is_image
    ]
    if not images:
        return None
    pictures = []
    first = contents.step_numbers[0] if contents.steps.num_rows else 0
    for name, leaf in images:
        address = visit.link(
            "datasets",
            contents.snapshot.dataset,
            "frame",
            id=contents.episode_id,
            agent=contents.agent_id,
            leaf=name,
            at=contents.snapshot.version,
        )
        text = f"{name or 'observation'} [{', '.join(map(str, leaf.shape))}]"
        pictures.append(
            tag(
                "figure",
                tag("figcaption", text),
                tag(
                    "img",
                    src=f"{address}&step={first}",
                    alt=f"{name or 'observation'} at step {first}",
                    data_frame=address,
                ),
                class_="chart",
            )
        )
    return Panel("Frames", [_scrub(contents), tag("div", pictures, class_="frames")])


def _scrub(contents: EpisodeContents) -> Markup:
    num = contents.steps.num_rows
    return tag(
        "div",
        tag("label", "Step", for_="scrub"),
        tag("input", id="scrub", type="range", min=0, max=max(0, num - 1), value=0),
        tag("output", "", for_="scrub", id="scrubbed"),
        class_="scrub",
    )


def draw_curves(visit: Visit, contents: EpisodeContents) -> Panel | None:
    """Draw rewards, return-to-go, log-probs, actions and observations over the steps."""
    steps = contents.step_numbers
    total = contents.summary["num_steps"]
    rest = _sum_rest(visit, contents) if steps and len(steps) < total else 0.0
    plots = list(_make_plots(contents, rest))
    if len(steps) < 2 or not plots:
        return None
    data = {"x": steps, "label": "step", "plots": plots}
    has_frames = _has_frames(contents.snapshot.spec, schema.OBSERVATION)
    note = "Move over a curve, or use the slider, to read the values of a step."
    if len(steps) < total:
        note += f" These are the first {len(steps):,} of {total:,} steps."
    body = [
        None if has_frames else _scrub(contents),
        tag("div", class_="plots two", data_plots="curves"),
        data_block("curves", data),
    ]
    return Panel("Curves", body, note=note)


def _sum_rest(visit: Visit, contents: EpisodeContents) -> float:
    """Return the sum of the rewards after the steps that are drawn; NaN if one is unknown."""
    (row,) = visit.sql(
        f"""SELECT sum(reward) AS total, count(*) = count(reward) AS is_known
        FROM {contents.snapshot.dataset}.steps
        WHERE episode_id = $id AND agent_id = $agent AND step > $last""",
        contents.snapshot,
        id=contents.episode_id,
        agent=contents.agent_id,
        last=contents.step_numbers[-1],
    )
    if not row["is_known"]:
        return math.nan
    return 0.0 if row["total"] is None else float(row["total"])


def _make_plots(contents: EpisodeContents, rest: float) -> Iterator[dict[str, Any]]:
    rewards = to_floats(contents.steps.column(schema.REWARD))
    if np.isfinite(rewards).any():
        yield _plot("Reward", [("reward", rewards)])
        # Unknown from the first unknown reward backwards: a sum of the others is no return.
        to_go = np.cumsum(rewards[::-1])[::-1] + rest
        if np.isfinite(to_go).any():
            yield _plot("Return to go", [("return to go", to_go)])
    for column, title in ((schema.ACTION, "Action"), (schema.OBSERVATION, "Observation")):
        names, values = contents.numbers.get(column, ((), np.zeros((0, 0))))
        if len(names):
            plot = _plot(title, [(name, values[:, i]) for i, name in enumerate(names)])
            is_discrete = column == schema.ACTION and isinstance(
                contents.snapshot.spec.action_space, Discrete
            )
            yield {**plot, "stepped": is_discrete}
    log_probs = to_floats(contents.steps.column(schema.BEHAVIOR_LOG_PROB))
    if np.isfinite(log_probs).any():
        yield _plot("Log-prob of the action, by its behavior policy", [("log-prob", log_probs)])
    further: list[tuple[str, NDArray[np.float64]]] = []
    for name in contents.steps.column_names:
        if name in _NOT_FURTHER or len(further) == _MAX_SERIES:
            continue
        column_values = contents.steps.column(name)
        if _is_numeric(column_values.type) or str(column_values.type) == "bool":
            known = to_floats(column_values)
            if np.isfinite(known).any():
                further.append((name, known))
    if further:
        yield _plot("Further columns", further)


def _plot(title: str, series: Sequence[tuple[str, NDArray[np.float64]]]) -> dict[str, Any]:
    return {
        "title": title,
        "series": [{"name": name, "values": round_values(values)} for name, values in series],
    }


def to_floats(column: Any) -> NDArray[np.float64]:
    """Return a column of numbers, NaN where it has none."""
    if str(column.type) == "bool":
        column = column.cast("int8")
    floats = column.cast("double", safe=False)
    numbers: NDArray[np.float64] = floats.fill_null(math.nan).to_numpy()
    return numbers


def round_values(values: NDArray[np.float64]) -> list[float | None]:
    """Return values with seven digits, which is more than a screen shows; whole numbers exactly."""
    return [
        None if not math.isfinite(one) else one if one.is_integer() else float(f"{one:.7g}")
        for one in values.tolist()
    ]


def show_conversation(visit: Visit, contents: EpisodeContents) -> Panel | None:
    """Show an episode of texts as a conversation."""
    if not contents.has_text:
        return None
    total = contents.summary["num_steps_of_agents"]
    return draw_conversation(visit, contents.snapshot, contents.episode_id, total)


def show_tokens(visit: Visit, contents: EpisodeContents) -> Panel | None:
    """Show a window of the tokens that were sampled."""
    return draw_tokens(visit, contents.snapshot, contents.episode_id, contents.agent_id)


def show_branches(visit: Visit, contents: EpisodeContents) -> Panel | None:
    """Show the tree of the episode's agents."""
    return draw_branches(visit, contents.snapshot, contents.agents, contents.agent_id)


def show_side_by_side(visit: Visit, contents: EpisodeContents) -> Panel | None:
    """Show what the episode's agents did at the same time."""
    return draw_side_by_side(visit, contents.snapshot, contents.agents, contents.agent_id)


def list_steps(visit: Visit, contents: EpisodeContents) -> Panel:
    """Show the first steps as a table."""
    steps = contents.steps
    names = [one for one in steps.column_names if steps.column(one).null_count < len(steps)]
    columns: list[Column | str] = [
        Column(name, is_number=_is_numeric(steps.schema.field(name).type)) for name in names
    ]
    name = contents.snapshot.dataset
    is_served = DECISION_ID in names and visit.lake.dataset(name).decisions.exists()

    def draw_cell(column: str, value: object) -> Child:
        if is_served and column == DECISION_ID and value is not None:
            return tag("a", str(value), href=visit.link("decision", id=value), class_="ulid")
        return value_cell(value)

    cells: list[list[Child]] = [
        [draw_cell(column, row[column]) for column in names]
        for row in steps.select(names).slice(0, _MAX_ROWS).to_pylist()
    ]
    note = (
        None if len(steps) <= _MAX_ROWS else f"the first {_MAX_ROWS}; SQL, CSV and JSON have more"
    )
    visit.note_query(
        f"SELECT * EXCLUDE (episode_id, agent_id) FROM {name}.steps WHERE episode_id = $id "
        f"AND agent_id = $agent ORDER BY step LIMIT {_MAX_ROWS}",
        contents.snapshot,
        id=contents.episode_id,
        agent=contents.agent_id,
    )
    return Panel("Steps", table(columns, cells, label="Steps", is_tall=True), note=note)


def _is_numeric(kind: Any) -> bool:
    """Whether an Arrow type is one of numbers."""
    return _NUMERIC.fullmatch(str(kind)) is not None


PANELS: Final = (
    show_labels,
    show_frames,
    show_branches,
    show_conversation,
    show_side_by_side,
    show_tokens,
    draw_curves,
    list_steps,
)


def send_frame(visit: Visit) -> Download:
    """Return the PNG of one step's frame. Raises: NotFoundError, ConfigInvalidError."""
    snapshot = find_snapshot(visit)
    text = visit.values.get("step", "")
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise ConfigInvalidError(
            f"step: found {text[:40]!r}, expected the number of a step.", parameter="step"
        )
    name = visit.values.get("leaf", "")
    known = dict(leaves(snapshot.spec.observation_space))
    leaf = known.get(name)
    if not isinstance(leaf, Box) or not leaf.is_image:
        raise NotFoundError(
            f"leaf {name!r}: found no such image in the observations of {snapshot.dataset}."
        )
    path = "".join(f'."{part}"' for part in name.split(".") if part)
    # Not remembered: a slider reads one after the other, and a browser keeps those that it has.
    found = visit.table(
        f"""SELECT observation{path} AS frame FROM {snapshot.dataset}.steps
        WHERE episode_id = $id AND agent_id = $agent AND step = $step""",
        snapshot,
        id=visit.values.get("id", ""),
        agent=visit.values.get("agent", ""),
        step=int(text),
    )
    content = found.column("frame")[0].as_py() if found.num_rows else None
    if content is None:
        raise NotFoundError(f"step {text}: found no frame of it.")
    frame = np.frombuffer(content, np.uint8).reshape(leaf.shape)
    return Download(encode_png(frame), "image/png", is_fixed=True)
