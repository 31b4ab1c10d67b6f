"""The agents of an episode: the tree of its branches, and what each did at the same time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from replaylake.datastore.episodes import schema, tokens
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.serve.explorer.datasets.dataset_page import read_at
from replaylake.serve.explorer.visits.page import Panel
from replaylake.serve.explorer.visits.visit import Visit
from replaylake.serve.pages.markup import Child, Markup, tag
from replaylake.serve.pages.tables import Column, quiet_number, table, value_cell
from replaylake.serve.pages.texts import count, number_text

_MAX_AGENTS: Final = 200
_MAX_FORKS: Final = 1_000
_MAX_DEPTH: Final = 6
# Side by side: the agent that is shown, and those beside it in the tree.
_MAX_COLUMNS: Final = 6
_MAX_TIMES: Final = 200
_MAX_CHARACTERS: Final = 400
# What the addresses of an episode's page may have, which its links to other agents keep.
_KEPT: Final = ("id", "at", "where", "sort", "order", "queue", "shade")


@dataclass(frozen=True)
class _Fork:
    """A step that goes on from a step other than its agent's last one, or from none."""

    agent_id: str
    step: int
    parent: tuple[str, int] | None
    is_continuation: bool


def draw_branches(
    visit: Visit, snapshot: Snapshot, agents: Sequence[Mapping[str, Any]], shown: str
) -> Panel | None:
    """Show the agents of an episode as a tree, each below the one that its first step goes on from.

    agents: the rows of `episodes` of one episode. shown: the agent whose page it is. None for one
    agent without branches.
    """
    forks = _read_forks(visit, snapshot, str(agents[0]["episode_id"]))
    if len(agents) < 2 and not forks:
        return None
    by_agent: dict[str, list[_Fork]] = {}
    for fork in forks:
        by_agent.setdefault(fork.agent_id, []).append(fork)
    rows = []
    for agent, depth in _order_tree(agents, by_agent):
        name = agent["agent_id"]
        is_shown = name == shown
        link = tag(
            "a",
            name or "(no name)",
            href=_link_agent(visit, name),
            class_=f"depth-{min(depth, _MAX_DEPTH)}",
            aria_current="page" if is_shown else None,
        )
        end = "terminated" if agent["terminated"] else "truncated" if agent["truncated"] else "open"
        rows.append(
            [
                link,
                [_draw_fork(visit, fork) for fork in by_agent.get(name, ())],
                f"{agent['num_steps']:,}",
                quiet_number(agent["return"]),
                end,
            ]
        )
    has_forks = bool(forks)
    columns: list[Column | str] = [
        "Agent",
        "Goes on from",
        Column("Steps", is_number=True),
        Column("Return", is_number=True),
        "End",
    ]
    if not has_forks:
        rows = [[row[0], *row[2:]] for row in rows]
        del columns[1]
    words = count(len(agents), "agent")
    if len(rows) < len(agents):
        words += f", of which these are {len(rows):,}"
    if len(forks) == _MAX_FORKS:
        words += f"; of their branches, the first {_MAX_FORKS:,}"
    note: Child = words
    if len(agents) > 1:
        same = visit.link(
            "datasets", snapshot.dataset, "compare", id=agents[0]["episode_id"], at=read_at(visit)
        )
        note = [f"{words}. ", tag("a", "Their curves in the same plots", href=same)]
    title = "Branches" if has_forks else "Agents"
    return Panel(title, table(columns, rows, label=title, is_tall=len(rows) > 12), note=note)


def _read_forks(visit: Visit, snapshot: Snapshot, episode_id: str) -> list[_Fork]:
    names = snapshot.table.schema.names
    if tokens.PARENT_STEP not in names and tokens.IS_CONTINUATION not in names:
        return []
    parent_step = tokens.PARENT_STEP if tokens.PARENT_STEP in names else "NULL::INTEGER"
    parent_agent = tokens.PARENT_AGENT_ID if tokens.PARENT_AGENT_ID in names else "NULL"
    continues = tokens.IS_CONTINUATION if tokens.IS_CONTINUATION in names else "NULL::BOOLEAN"
    rows = visit.sql(
        f"""SELECT agent_id, step, coalesce(CAST({parent_agent} AS VARCHAR), agent_id)
            AS parent_agent, {parent_step} AS parent_step,
            coalesce({continues}, true) AS is_continuation
        FROM {snapshot.dataset}.steps WHERE episode_id = $id AND (
            coalesce(parent_step <> step - 1 OR parent_agent <> agent_id, false)
            OR (step > 0 AND NOT is_continuation))
        ORDER BY agent_id, step LIMIT {_MAX_FORKS}""",
        snapshot,
        id=episode_id,
    )
    return [
        _Fork(
            row["agent_id"],
            row["step"],
            None if row["parent_step"] is None else (row["parent_agent"], row["parent_step"]),
            row["is_continuation"],
        )
        for row in rows
    ]


def _order_tree(
    agents: Sequence[Mapping[str, Any]], forks: Mapping[str, Sequence[_Fork]]
) -> Iterator[tuple[Mapping[str, Any], int]]:
    """Yield the agents with their depth, each after the one that its first step goes on from."""
    known = {agent["agent_id"]: agent for agent in agents}
    below: dict[str | None, list[str]] = {}
    for name in known:
        first = next(iter(forks.get(name, ())), None)
        parent = None
        if first is not None and first.parent is not None:
            is_start = first.step == known[name]["first_step"]
            is_other = first.parent[0] != name and first.parent[0] in known
            parent = first.parent[0] if is_start and is_other else None
        below.setdefault(parent, []).append(name)
    waiting = [(name, 0) for name in reversed(below.pop(None, []))]
    num = 0
    while (waiting or below) and num < _MAX_AGENTS:
        if not waiting:
            # Agents that go on from each other have no first one.
            waiting = [(name, 0) for name in below.pop(next(iter(below)))]
        name, depth = waiting.pop()
        yield known[name], depth
        num += 1
        waiting += [(one, depth + 1) for one in reversed(below.pop(name, []))]


def _draw_fork(visit: Visit, fork: _Fork) -> Markup:
    if fork.parent is None:
        return tag("div", f"step {fork.step}: a rewritten history")
    agent, step = fork.parent
    own = agent == fork.agent_id
    where: Child = f"step {step}"
    if not own:
        link = tag("a", agent or "(no name)", href=_link_agent(visit, agent))
        where = [tag("bdi", link), f" step {step}"]
    said = " called by " if not fork.is_continuation else " from "
    return tag("div", f"step {fork.step}", said, where)


def draw_side_by_side(
    visit: Visit, snapshot: Snapshot, agents: Sequence[Mapping[str, Any]], shown: str
) -> Panel | None:
    """Show the actions of several agents beside each other, a row for each step of their time.

    None for one agent.
    """
    if len(agents) < 2:
        return None
    names = [str(agent["agent_id"]) for agent in agents]
    place = min(names.index(shown), max(0, len(names) - _MAX_COLUMNS))
    chosen = names[place : place + _MAX_COLUMNS]
    is_text = str(snapshot.table.schema.field(schema.ACTION).type) == "string"
    action = f"left(action, {_MAX_CHARACTERS + 1})" if is_text else "action"
    wanted = " OR ".join(f"agent_id = $agent_{number}" for number in range(len(chosen)))
    limit = _MAX_TIMES * len(chosen)
    rows = visit.sql(
        f"""SELECT env_step, agent_id, step, reward, {action} AS action
        FROM {snapshot.dataset}.steps WHERE episode_id = $id AND ({wanted})
        ORDER BY env_step, agent_id, step LIMIT {limit + 1}""",
        snapshot,
        id=agents[0]["episode_id"],
        **{f"agent_{number}": name for number, name in enumerate(chosen)},
    )
    times: dict[int, dict[str, list[Markup]]] = {}
    for row in rows[:limit]:
        cells = times.setdefault(row["env_step"], {})
        cells.setdefault(row["agent_id"], []).append(_draw_action(row))
    body = [
        [f"{time:,}", *(cells.get(name) for name in chosen)]
        for time, cells in list(times.items())[:_MAX_TIMES]
    ]
    heads: list[Column | str] = [
        Column("Step", is_number=True),
        *(
            Column(
                tag(
                    "a",
                    tag("bdi", name or "(no name)"),
                    href=_link_agent(visit, name),
                    aria_current="page" if name == shown else None,
                )
            )
            for name in chosen
        ),
    ]
    notes = []
    if len(chosen) < len(names):
        notes.append(f"{len(chosen)} of {len(names):,} agents, from the one that is shown")
    if len(rows) > limit or len(times) > _MAX_TIMES:
        notes.append(f"the first {len(body):,} steps; SQL has all of them")
    title = "Side by side"
    return Panel(
        title,
        tag("div", table(heads, body, label=title), class_="beside"),
        note="; ".join(notes) or None,
    )


def _draw_action(row: Mapping[str, Any]) -> Markup:
    action = row["action"]
    shown: Child = value_cell(action)
    if isinstance(action, str):
        is_cut = len(action) > _MAX_CHARACTERS
        shown = action[:_MAX_CHARACTERS] + ("\N{HORIZONTAL ELLIPSIS}" if is_cut else "")
    reward = row["reward"]
    facts = [f"step {row['step']}"] + ([f"reward {number_text(reward)}"] if reward else [])
    return tag(
        "div",
        tag("div", shown, class_="text"),
        tag("div", " \N{MIDDLE DOT} ".join(facts), class_="meta"),
    )


def _link_agent(visit: Visit, agent_id: str) -> str:
    kept = {name: visit.values.get(name) for name in _KEPT}
    # An agent without a name among others has to be named, too.
    address = visit.link("datasets", visit.path["name"], "episode", **kept, agent=agent_id or None)
    return address if agent_id else f"{address}{'&' if '?' in address else '?'}agent="
