"""Serving: what servers decided, as their log in the lake has it, and what became of it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import numpy as np

from replaylake.datastore.episodes.schema import OBSERVATION, to_numpy
from replaylake.datastore.episodes.spaces import (
    Array,
    Space,
    num_elements,
)
from replaylake.datastore.errors import NotFoundError, ReplayLakeError
from replaylake.datastore.feedback.decisions import (
    DECISION_ID,
    DEFAULT_WINDOW_S,
    REWARD_LATE,
    REWARDED_AT,
)
from replaylake.datastore.lake.policies.manifest import read_manifest
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.serve.explorer.visits.page import (
    Page,
    Panel,
    build_panels,
    draw_empty,
    plain_value,
)
from replaylake.serve.explorer.visits.visit import Visit
from replaylake.serve.monitoring.drift import training_moments
from replaylake.serve.pages.charts import bar_list, column_chart, stacked_chart
from replaylake.serve.pages.frame import write_facts
from replaylake.serve.pages.markup import Child, Markup, join, tag
from replaylake.serve.pages.tables import Column, quiet_number, table, time_tag
from replaylake.serve.pages.texts import cell_text, duration_text

# The requests are drawn in so many columns at most, of one of these widths.
_MAX_COLUMNS: Final = 60
_WIDTHS_S: Final = (1, 5, 15, 60, 300, 900, 3600, 6 * 3600, 86_400, 7 * 86_400, 28 * 86_400)
_MAX_ARMS: Final = 7
# Upper ends of the delays' columns, in seconds; what took longer has the last one.
_DELAYS_S: Final = (0.01, 0.1, 1, 10, 60, 600, 3600, 21_600, 86_400)
# Seconds from a step's decision to the report that its reward is from.
_DELAY: Final = """epoch_us(rewarded_at) / 1e6 - epoch_us("timestamp") / 1e6"""
# Drift is that of the newest decisions of so many versions: what acts now.
_DRIFT_ROWS: Final = 10_000
_DRIFT_VERSIONS: Final = 4
_DRIFT_SHOWN: Final = 12
_NEWEST: Final = 10


@dataclass(frozen=True)
class ServedLog:
    """A dataset that servers log to: its newest snapshot, and what is known of its decisions.

    arms: of all decisions, by version; versions: of the dataset and of its decisions.
    """

    name: str
    snapshot: Snapshot
    versions: tuple[int, int]
    arms: Sequence[Mapping[str, Any]]

    @property
    def first(self) -> datetime:
        """When the first decision was made."""
        at: datetime = min(arm["first"] for arm in self.arms)
        return at

    @property
    def last(self) -> datetime:
        """When the newest decision was made."""
        at: datetime = max(arm["last"] for arm in self.arms)
        return at


def list_serving(visit: Visit) -> Page:
    """Return the page of `/serving`: the datasets that servers log to."""
    rows: list[list[Child]] = []
    data = []
    for name in visit.lake.datasets():
        arms = read_arms(visit, name)
        if not arms:
            continue
        known = {f"{arm['policy']}:{arm['policy_version']}": arm["num"] for arm in arms}
        last = max(arm["last"] for arm in arms)
        data.append({"dataset": name, "last_decision_at": last, "decisions": known})
        rows.append(
            [
                tag("a", name, href=visit.link("serving", name)),
                f"{sum(known.values()):,}",
                [tag("span", f"{one}: {num:,}", class_="pill") for one, num in known.items()],
                join(time_tag(last)),
            ]
        )
    columns: list[Column | str] = [
        "Logs to",
        Column("Decisions", is_number=True),
        "By version",
        "Newest decision",
    ]
    body: Child = table(columns, rows, label="Decision logs")
    if not rows:
        body = draw_empty(
            "No server has logged decisions to this lake.",
            command="`replaylake serve POLICY --log-to DATASET`",
        )
    return Page(
        "Serving",
        section="serving",
        tools=draw_decision_form(visit) if rows else None,
        panels=[Panel("Decision logs", body, queries=visit.take_queries())],
        data={"logs": data},
        rows=[
            {"dataset": one["dataset"], "last_decision_at": one["last_decision_at"]} for one in data
        ],
    )


def show_serving(visit: Visit) -> Page:
    """Return the page of `/serving/DATASET`."""
    name = visit.path["name"]
    handle = visit.lake.dataset(name)
    arms = read_arms(visit, name) if handle.exists() else []
    if not arms:
        raise NotFoundError(
            f"serving {name}: found no decisions. The page of serving has all logs."
        )
    snapshot = handle.snapshot()
    versions = (snapshot.version, handle.decisions.snapshot().version)
    log = ServedLog(
        name,
        snapshot,
        versions,
        arms,
    )
    panels = build_panels(visit, log, PANELS)
    joined, rest = _read_joined(visit, log), _read_open(visit, log)
    num = _sum(arms)
    facts: list[tuple[str, Child]] = [
        ("decisions", f"{num:,}"),
        ("joined", _share(_sum(joined.values()), num)),
        ("waiting", f"{_sum(rest.values(), 'num_waiting'):,}"),
        ("newest decision", time_tag(log.last)),
    ]
    return Page(
        name,
        section="serving",
        crumbs=[("Serving", visit.link("serving"))],
        facts=facts,
        tools=draw_decision_form(visit),
        panels=panels,
        data={
            "dataset": name,
            "dataset_version": snapshot.version,
            "arms": [
                {
                    **arm,
                    "joined": joined.get(_arm_name(arm)),
                    "not_joined": rest.get(_arm_name(arm)),
                }
                for arm in arms
            ],
        },
        rows=[{**one} for one in arms],
    )


def draw_decision_form(visit: Visit) -> Markup:
    """Return the form that opens a decision by its id."""
    return tag(
        "form",
        tag("label", "Decision", for_="decision"),
        tag(
            "input",
            id="decision",
            name="id",
            type="search",
            placeholder="decision_id",
            required=True,
            autocomplete="off",
        ),
        tag("button", "Open", type="submit"),
        action=visit.link("decision"),
        class_="tools",
    )


def read_arms(visit: Visit, name: str) -> list[dict[str, Any]]:
    """Return what each policy version decided, the newest first: read once a version of the log."""
    log = visit.lake.dataset(name).decisions
    if not log.exists():
        return []
    text = f"""SELECT policy, policy_version, count(*) AS num,
        count(*) FILTER (deterministic) AS num_deterministic, avg(log_prob) AS mean_log_prob,
        min("timestamp") AS first, max("timestamp") AS last
        FROM {name}.decisions GROUP BY ALL ORDER BY last DESC, policy, policy_version"""
    return _remember(visit, ("arms", name, log.snapshot().version), text)


def _remember(
    visit: Visit, key: tuple[Any, ...], text: str, **parameters: object
) -> list[dict[str, Any]]:
    """Run a query of a log, whose versions are in its key: no name of SQL has them."""
    known: list[dict[str, Any]] | None = visit.memory.get((*key, *parameters.items()))
    if known is not None:
        visit.note_query(text, None, **parameters)
        return known
    rows = visit.sql(text, (), **parameters)
    visit.memory.put((*key, *parameters.items()), rows, 1000 * (1 + len(rows)))
    return rows


def _read_joined(visit: Visit, log: ServedLog) -> dict[str, dict[str, Any]]:
    """Return what the decisions that are steps earned, by version."""
    extras = log.snapshot.spec.extras
    if DECISION_ID not in extras:
        return {}
    late = "count(*) FILTER (reward_late)" if REWARD_LATE in extras else "0"
    delay = f"quantile_cont({_DELAY}, [0.5, 0.95])" if REWARDED_AT in extras else "NULL"
    rows = visit.sql(
        f"""SELECT policy, policy_version, count(*) AS num, count(reward) AS num_rewards,
        avg(reward) AS mean_reward, {late} AS num_late, {delay} AS delays_s,
        max("timestamp") AS last
        FROM {log.name}.steps WHERE decision_id IS NOT NULL
        GROUP BY ALL ORDER BY policy, policy_version""",
        log.snapshot,
    )
    return {_arm_name(row): row for row in rows}


def _read_open(visit: Visit, log: ServedLog) -> dict[str, dict[str, Any]]:
    """Return the decisions that are no steps, by version, and how many of them may become some."""
    steps = ""
    if DECISION_ID in log.snapshot.spec.extras:
        steps = f"ANTI JOIN (SELECT decision_id FROM {log.name}.steps) USING (decision_id)"
    # To a minute: the result is remembered.
    now_s = time.time() // 60 * 60
    since = datetime.fromtimestamp(now_s - DEFAULT_WINDOW_S, UTC)
    rows = _remember(
        visit,
        ("open", log.name, log.versions),
        f"""SELECT policy, policy_version, count(*) AS num,
        count(*) FILTER ("timestamp" >= $since) AS num_waiting
        FROM {log.name}.decisions {steps} GROUP BY ALL ORDER BY ALL""",
        since=since,
    )
    return {_arm_name(row): row for row in rows}


def draw_requests(visit: Visit, log: ServedLog) -> Panel:
    """Draw decisions over time, by policy version."""
    span_s = (log.last - log.first).total_seconds()
    width = next((one for one in _WIDTHS_S if span_s / one < _MAX_COLUMNS), _WIDTHS_S[-1])
    # The newest columns, where even the widest are too many.
    since = max(_epoch(log.first), _epoch(log.last) - (_MAX_COLUMNS - 1) * width) // width
    rows = _remember(
        visit,
        ("requests", log.name, log.versions[1]),
        f"""SELECT CAST(floor(epoch("timestamp") / $width) AS BIGINT) AS place, policy,
        policy_version, count(*) AS num FROM {log.name}.decisions
        WHERE epoch("timestamp") >= $since GROUP BY ALL ORDER BY ALL""",
        width=width,
        since=since * width,
    )
    num = int(_epoch(log.last) // width - since) + 1
    counts: dict[str, list[int]] = {}
    for row in rows:
        values = counts.setdefault(_arm_name(row), [0] * num)
        values[row["place"] - int(since)] = row["num"]
    ordered = sorted(counts.items(), key=lambda item: -sum(item[1]))
    parts = [(name, values, f"{sum(values):,}") for name, values in ordered[:_MAX_ARMS]]
    if rest := ordered[_MAX_ARMS:]:
        summed = [sum(column) for column in zip(*(values for _, values in rest), strict=True)]
        parts.append((f"{len(rest)} others", summed, f"{sum(summed):,}"))
    start = datetime.fromtimestamp(since * width, UTC)
    end = start + timedelta(seconds=num * width)
    form = "%Y-%m-%d %H:%M:%S" if width < 60 else "%Y-%m-%d %H:%M"
    if width >= 86_400:
        form = "%Y-%m-%d"
    chart = stacked_chart(
        parts,
        label=f"Decisions in {duration_text(width)} each (UTC)",
        axis=[f"{start:{form}}", f"{end:{form}}"],
    )
    note = (
        "An observation that is acted on is a decision. How long requests took is not logged: "
        "/metrics of the server has it."
    )
    return Panel("Decisions", chart, note=note)


def compare_arms(visit: Visit, log: ServedLog) -> Panel:
    """Show what each version decided and earned."""
    read_arms(visit, log.name)
    newest = _remember(
        visit,
        ("shares", log.name, log.versions[1]),
        f"""SELECT policy, policy_version, count(*) AS num FROM {log.name}.decisions
        WHERE "timestamp" > $since GROUP BY ALL""",
        since=log.last - timedelta(days=1),
    )
    day = {_arm_name(row): row["num"] for row in newest}
    joined = _read_joined(visit, log)
    returns = _read_returns(visit, log) if joined else {}
    known = _registered(visit)
    rows: list[list[Child]] = []
    for arm in log.arms:
        name = _arm_name(arm)
        reward, episode = joined.get(name, {}), returns.get(name, {})
        policy: Child = name
        if arm["policy"] in known:
            policy = tag("a", name, href=visit.link("policies", arm["policy"]))
        rows.append(
            [
                policy,
                f"{arm['num']:,}",
                _share(day.get(name, 0), sum(day.values())),
                _share(arm["num_deterministic"], arm["num"]),
                quiet_number(arm["mean_log_prob"], is_short=True),
                f"{reward.get('num_rewards', 0):,}",
                quiet_number(reward.get("mean_reward"), is_short=True),
                f"{episode.get('num', 0):,}",
                quiet_number(episode.get("mean_return"), is_short=True),
                join(time_tag(arm["last"])),
            ]
        )
    columns: list[Column | str] = [
        "Policy",
        Column("Decisions", is_number=True),
        Column("Share of the last day", is_number=True),
        Column("Deterministic", is_number=True),
        Column("Mean log-prob", is_number=True),
        Column("Steps with a reward", is_number=True),
        Column("Mean reward", is_number=True),
        Column("Episodes", is_number=True),
        Column("Mean return", is_number=True),
        "Newest",
    ]
    note = (
        "Rewards and returns are those of the steps that the feedback join has written. Means have "
        "no interval here: a difference of two arms may be chance."
    )
    return Panel("Arms", table(columns, rows, label="Arms"), note=note)


def _read_returns(visit: Visit, log: ServedLog) -> dict[str, dict[str, Any]]:
    rows = visit.sql(
        f"""SELECT policy, max_policy_version AS policy_version, count(*) AS num,
        avg("return") AS mean_return FROM {log.name}.episodes
        WHERE starts_with(episode_id, 'served/') GROUP BY ALL ORDER BY ALL""",
        log.snapshot,
    )
    return {_arm_name(row): row for row in rows}


def draw_delays(visit: Visit, log: ServedLog) -> Panel:
    """Draw how long rewards took from their decisions."""
    rows: list[dict[str, Any]] = []
    if REWARDED_AT in log.snapshot.spec.extras:
        place = " + ".join(f"CAST(delay >= {end} AS INTEGER)" for end in _DELAYS_S)
        rows = visit.sql(
            f"""SELECT {place} AS place, count(*) AS num FROM (SELECT {_DELAY} AS delay
            FROM {log.name}.steps WHERE rewarded_at IS NOT NULL AND decision_id IS NOT NULL)
            GROUP BY place ORDER BY place""",
            log.snapshot,
        )
    if not rows:
        hint = "The delay of a reward is known once its decision is a step."
        body: Child = draw_empty("No reward has been joined.", hint=hint, command=_join(log))
        return Panel("Delay of rewards", body, is_wide=False)
    counts = [0] * (len(_DELAYS_S) + 1)
    for row in rows:
        counts[row["place"]] = row["num"]
    names = [*(f"up to {duration_text(one)}" for one in _DELAYS_S), "longer"]
    titles = [f"{name}: {num:,} rewards" for name, num in zip(names, counts, strict=True)]
    # A short word: on a phone, a column is as wide as four letters.
    axis = [*(name.removeprefix("up to ") for name in names[:-1]), "more"]
    chart = column_chart(counts, titles, label="Time from decision to reward, up to", axis=axis)
    delays: list[list[Child]] = []
    for name, row in _read_joined(visit, log).items():
        if row["delays_s"] is not None and None not in row["delays_s"]:
            delays.append([name, *map(duration_text, row["delays_s"])])
    titled: list[Column | str] = [
        "Policy",
        Column("Half within", is_number=True),
        Column("95% within", is_number=True),
    ]
    body = [chart, table(titled, delays, label="Delays by version")]
    return Panel("Delay of rewards", body, is_wide=False)


def list_unjoined(visit: Visit, log: ServedLog) -> Panel:
    """Show how many decisions became steps, and how far the join is behind."""
    all_joined, all_open = _read_joined(visit, log), _read_open(visit, log)
    rows: list[list[Child]] = []
    for arm in log.arms:
        name = _arm_name(arm)
        joined, rest = all_joined.get(name, {}), all_open.get(name, {})
        waiting = rest.get("num_waiting", 0)
        numbers = (
            joined.get("num", 0),
            joined.get("num", 0) - joined.get("num_rewards", 0),
            waiting,
            rest.get("num", 0) - waiting,
            joined.get("num_late", 0),
        )
        rows.append([name, *(f"{number:,}" for number in numbers)])
    names = ("Joined", "Joined without a reward", "Waiting", "Not joined", "Rewarded late")
    columns: list[Column | str] = ["Policy", *(Column(name, is_number=True) for name in names)]
    drawn = table(columns, rows, label="Decisions by what became of them")
    newest = max((row["last"] for row in all_joined.values()), default=None)
    if newest is None:
        lag: Child = tag("p", "No decision has been joined into an episode.")
    else:
        behind_s = max(0.0, (log.last - newest).total_seconds())
        facts: list[tuple[str, Child]] = [
            ("joined up to", time_tag(newest)),
            ("behind the newest decision", duration_text(behind_s)),
        ]
        lag = write_facts(facts, is_small=True)
    commands = tag("pre", tag("code", f"replaylake feedback status {log.name}\n{_join(log)[1:-1]}"))
    note = (
        "Waiting decisions are younger than the reward window of a day; later than that, a join "
        "writes what is known of an episode. The first command also counts repeated requests and "
        "reports of no decision."
    )
    return Panel("Feedback join", [drawn, lag, commands], note=note)


def draw_drift(visit: Visit, log: ServedLog) -> Panel:
    """Draw how far observations are from those that each version was trained on."""
    body: list[Child] = []
    known = _registered(visit)
    drawn: list[tuple[str, list[tuple[str, float, str]]]] = []
    for arm in log.arms[:_DRIFT_VERSIONS]:
        name = _arm_name(arm)
        if arm["policy"] not in known:
            why = f"{name}: not in this lake."
            body.append(tag("p", why, class_="quiet"))
            continue
        try:
            found = _read_drift(visit, log, arm)
        except ReplayLakeError as error:
            body.append(tag("p", f"{name}: {error}", class_="quiet"))
            continue
        if found is None:
            why = f"{name}: its package has no statistics of its training observations."
            body.append(tag("p", why, class_="quiet"))
            continue
        labels, shifts = found
        order = np.argsort(-np.abs(shifts), kind="stable")[:_DRIFT_SHOWN]
        rows = [
            (_name_number(labels[i]), abs(float(shifts[i])), f"{float(shifts[i]):+.3g}")
            for i in order.tolist()
        ]
        most = f", the {_DRIFT_SHOWN} largest of {len(labels)}" if len(labels) > len(rows) else ""
        drawn.append((f"{name}{most}", rows))
    # One scale for all versions.
    top = max((size for _, rows in drawn for _, size, _ in rows), default=0.0)
    charts = [
        [tag("h3", name), bar_list(rows, label=f"Drift of {name}", top=top)] for name, rows in drawn
    ]
    note = (
        "Mean of the newest observations, 10,000 at most, minus that of the training steps, in "
        "standard deviations of the latter: observation shift in /metrics. Above 0.5 "
        "is worth a look."
    )
    return Panel("Drift of observations", [charts, body], note=note, is_wide=False)


def _name_number(label: str) -> str:
    """Return the name of an observed number, which a vector without names has only by its place."""
    return f"observation[{label}]" if label.isdigit() else label


def _read_drift(
    visit: Visit, log: ServedLog, arm: Mapping[str, Any]
) -> tuple[tuple[str, ...], Array] | None:
    """Return what the elements are called, and their shifts float64 [D].

    None where the package says nothing of its training observations. Raises: ReplayLakeError.
    """
    key = ("drift", log.name, log.versions[1], _arm_name(arm))
    known: tuple[tuple[tuple[str, ...], Array] | None] | None = visit.memory.get(key)
    if known is not None:
        return known[0]
    ref = visit.lake.registry.resolve(_arm_name(arm))
    manifest = read_manifest(ref.path, ref.manifest_sha256)
    moments = training_moments(manifest.body, manifest.spec)
    found = None
    if moments is not None:
        rows = visit.lake.sql(
            f"""SELECT observation FROM {log.name}.decisions
            WHERE policy = $policy AND policy_version = $version AND "timestamp" >= $since
            ORDER BY "timestamp" DESC LIMIT {_drift_rows(log.snapshot.spec.observation_space)}""",
            {
                "policy": arm["policy"],
                "version": arm["policy_version"],
                "since": arm["last"] - timedelta(days=1),
            },
        )
        observations = to_numpy(log.snapshot.spec.observation_space, rows.column(OBSERVATION))
        found = moments.labels, moments.standardize(observations).mean(axis=0)
    visit.memory.put(key, (found,), 40_000)
    return found


def _drift_rows(space: Space) -> int:
    """Return how many observations are read: fewer of large ones, for 32 MB of float64 at most."""
    return max(1, min(_DRIFT_ROWS, 4_000_000 // max(1, num_elements(space))))


def list_newest(visit: Visit, log: ServedLog) -> Panel:
    """Show the newest decisions, each with a link to its page."""
    rows = _remember(
        visit,
        ("newest", log.name, log.versions[1]),
        f"""SELECT "timestamp", policy, policy_version, decision_id, action, log_prob
        FROM {log.name}.decisions ORDER BY "timestamp" DESC LIMIT {_NEWEST}""",
    )
    rewards: dict[str, float | None] = {}
    if DECISION_ID in log.snapshot.spec.extras:
        joined = visit.sql(
            f"""SELECT decision_id, reward FROM {log.name}.steps WHERE decision_id IN
            (SELECT unnest(json_extract_string($ids, '$[*]')))""",
            log.snapshot,
            ids=json.dumps([row[DECISION_ID] for row in rows]),
        )
        rewards = {row[DECISION_ID]: row["reward"] for row in joined}
    cells: list[list[Child]] = []
    for row in rows:
        key = row[DECISION_ID]
        reward: Child = tag("span", "not joined", class_="quiet")
        if key in rewards:
            reward = quiet_number(rewards[key])
        cells.append(
            [
                tag(
                    "a",
                    time_tag(row["timestamp"], has_seconds=True),
                    href=visit.link("decision", id=key),
                ),
                _arm_name(row),
                cell_text(plain_value(row["action"])),
                quiet_number(row["log_prob"]),
                reward,
            ]
        )
    columns: list[Column | str] = [
        "Decided",
        "Policy",
        "Action",
        Column("Log-prob", is_number=True),
        Column("Reward", is_number=True),
    ]
    note = "The page of a decision has the run and the training data of its policy version."
    body = table(columns, cells, label="Newest decisions")
    return Panel("Newest decisions", body, note=note)


def _sum(rows: Iterable[Mapping[str, Any]], name: str = "num") -> int:
    return sum(row[name] for row in rows)


def _registered(visit: Visit) -> frozenset[str]:
    return frozenset(row["policy"] for row in visit.lake.registry.list())


def _arm_name(row: Mapping[str, Any]) -> str:
    return f"{row['policy']}:{row['policy_version']}"


def _join(log: ServedLog) -> str:
    return f"`replaylake feedback join {log.name}`"


def _share(num: int, total: int) -> str:
    return f"{num / total:.1%}" if total else "unknown"


def _epoch(at: datetime) -> float:
    return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()


PANELS: Final = (
    draw_requests,
    compare_arms,
    list_newest,
    draw_delays,
    draw_drift,
    list_unjoined,
)
