"""Episode report: quantiles, extreme episodes, and returns by day, source and action of a version.

Computed by SQL over `episodes`; the explorer has a page for each part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.message_media import MESSAGE_COLUMNS
from replaylake.datastore.episodes.spaces import Discrete
from replaylake.datastore.lake.snapshot import Snapshot

QUANTILES: Final = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
_NUM_EXTREMES: Final = 5
_NUM_PARTS: Final = 30
_MAX_ACTIONS: Final = 100
# A column with more values tells episodes apart; of the others, the first ones are drawn.
_MAX_VALUES: Final = 200
_MAX_COLUMNS: Final = 8
_KEY_TYPES: Final = ("string", "bool", "int64", "int32", "dictionary<values=string")


@dataclass(frozen=True)
class EpisodePart:
    """Episodes of one day or source.

    mean, low, high: mean and quartiles of the known returns; None if no return is known.
    """

    name: str
    num_episodes: int
    mean: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class ActionReward:
    """Rewards of the steps that took an action: their number, mean and standard error.

    action: its name, or its number. error: None for fewer than two steps.
    """

    action: str
    num_steps: int
    mean: float
    error: float | None


@dataclass(frozen=True)
class EpisodeReport:
    """The report of a version's episodes.

    return_quantiles, length_quantiles: at QUANTILES; empty where no return is known. best, worst:
    rows of `episodes` with `episode_id`, `agent_id`, `return` and `num_steps`. days: by the UTC day
    of the first step, the newest ones; sources: by what precedes the first slash of an id, the
    largest ones. num_days, num_sources: all of them. columns: by the first known value of each
    further column of texts, whole numbers or flags that has 2 to 200 values. action_rewards: of
    episodes of one step with discrete actions, else empty.
    """

    return_quantiles: Sequence[float]
    length_quantiles: Sequence[float]
    best: Sequence[Mapping[str, Any]]
    worst: Sequence[Mapping[str, Any]]
    days: Sequence[EpisodePart]
    num_days: int
    sources: Sequence[EpisodePart]
    num_sources: int
    columns: Mapping[str, Sequence[EpisodePart]]
    action_rewards: Sequence[ActionReward]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self)


def report_episodes(snapshot: Snapshot) -> EpisodeReport:
    """Describe a version's episodes.

    Cost: queries of `episodes`, of each further column, and of the actions of bandit logs.
    """
    (row,) = snapshot.sql(
        f"""SELECT
        quantile_cont("return", {list(QUANTILES)}) FILTER (isfinite("return")) AS returns,
        quantile_cont(num_steps, {list(QUANTILES)}) AS lengths, max(num_steps) AS longest
        FROM episodes"""
    ).to_pylist()
    days, num_days = _read_parts(snapshot, "strftime(started_at, '%Y-%m-%d')", "name DESC")
    sources, num_sources = _read_parts(
        snapshot, "split_part(episode_id, '/', 1)", "num_episodes DESC, name"
    )
    return EpisodeReport(
        return_quantiles=tuple(row["returns"] or ()),
        length_quantiles=tuple(row["lengths"] or ()),
        best=_read_extremes(snapshot, "DESC"),
        worst=_read_extremes(snapshot, "ASC"),
        days=days[::-1],
        num_days=num_days,
        sources=sources,
        num_sources=num_sources,
        columns=_read_columns(snapshot),
        action_rewards=_read_action_rewards(snapshot) if row["longest"] == 1 else (),
    )


def _read_extremes(snapshot: Snapshot, order: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = snapshot.sql(
        f"""SELECT episode_id, agent_id, "return", num_steps FROM episodes
        WHERE isfinite("return") ORDER BY "return" {order}, episode_id, agent_id
        LIMIT {_NUM_EXTREMES}"""
    ).to_pylist()
    return rows


def _read_columns(snapshot: Snapshot) -> dict[str, list[EpisodePart]]:
    found: dict[str, list[EpisodePart]] = {}
    for name, kind in snapshot.spec.extras.items():
        is_key = str(kind).startswith(_KEY_TYPES) and name not in MESSAGE_COLUMNS
        if not is_key or len(found) == _MAX_COLUMNS:
            continue
        first = f"""SELECT episode_id, agent_id, CAST(arg_min("{name}", step) AS VARCHAR) AS value
            FROM steps WHERE "{name}" IS NOT NULL GROUP BY episode_id, agent_id"""
        rows = f"(SELECT * FROM episodes JOIN ({first}) USING (episode_id, agent_id))"
        parts, num = _read_parts(snapshot, "value", "num_episodes DESC, name", rows)
        if 2 <= num <= _MAX_VALUES:
            found[name] = parts
    return found


def _read_parts(
    snapshot: Snapshot, key: str, order: str, rows_of: str = "episodes"
) -> tuple[list[EpisodePart], int]:
    """Return the first parts in an order, and the number of all. key: SQL of a part's name."""
    known = """FILTER (isfinite("return"))"""
    rows = snapshot.sql(
        f"""SELECT {key} AS name, count(*) AS num_episodes, avg("return") {known} AS mean,
        quantile_cont("return", [0.25, 0.75]) {known} AS quartiles, count(*) OVER () AS num_parts
        FROM {rows_of} WHERE {key} IS NOT NULL GROUP BY name ORDER BY {order} LIMIT {_NUM_PARTS}"""
    ).to_pylist()
    parts = []
    for row in rows:
        low, high = row["quartiles"] or (None, None)
        parts.append(EpisodePart(row["name"], row["num_episodes"], row["mean"], low, high))
    return parts, rows[0]["num_parts"] if rows else 0


def _read_action_rewards(snapshot: Snapshot) -> list[ActionReward]:
    space, encoding = snapshot.spec.action_space, snapshot.spec.encoding
    if not isinstance(space, Discrete):
        return []
    names = (encoding and encoding.action_names) or ()
    rows = snapshot.sql(
        f"""SELECT {schema.ACTION} AS action, count(*) AS num, avg({schema.REWARD}) AS mean,
        stddev_samp({schema.REWARD}) / sqrt(count(*)) AS error
        FROM steps WHERE isfinite({schema.REWARD}) GROUP BY action ORDER BY num DESC, action
        LIMIT {_MAX_ACTIONS}"""
    ).to_pylist()
    found = []
    for row in sorted(rows, key=lambda one: one["action"]):
        place = row["action"] - space.start
        name = names[place] if 0 <= place < len(names) else f"{row['action']:,}"
        found.append(ActionReward(name, row["num"], row["mean"], row["error"]))
    return found
