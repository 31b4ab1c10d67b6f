"""LoggedSamples: one row for each episode, as a sample of a task, with its policy and outcome."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from replaylake.datastore.episodes import schema, tokens
from replaylake.datastore.errors import NotFoundError, QueryError
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.query.expressions import (
    canonical_condition,
    canonical_expression,
    select_episode_keys,
)
from replaylake.datastore.query.group_views import GROUP_ID


@dataclass(frozen=True, eq=False)
class LoggedSamples:
    """E episodes, in the order of their ids.

    tasks               texts [E], None where unknown
    policies            texts [E], the policy that acted; None where unknown or several
    versions            float64 [E], its version; NaN where unknown or several
    first_versions      float64 [E], the smallest version of a step; last_versions the largest
    rewards             float64 [E], sum over all agents; NaN where one is unknown
    observation_tokens  float64 [E], number of ids; NaN where unknown; None without token columns
    action_tokens       likewise
    flags               bool [E] by condition: whether it holds, for one of the agents at least
    """

    tasks: NDArray[np.object_]
    policies: NDArray[np.object_]
    versions: NDArray[np.float64]
    first_versions: NDArray[np.float64]
    last_versions: NDArray[np.float64]
    rewards: NDArray[np.float64]
    observation_tokens: NDArray[np.float64] | None
    action_tokens: NDArray[np.float64] | None
    flags: Mapping[str, NDArray[np.bool_]]


def read_logged_samples(
    snapshot: Snapshot, task: str = GROUP_ID, conditions: Mapping[str, str] | None = None
) -> LoggedSamples:
    """Read all episodes of a snapshot as samples.

    Args:
        snapshot: the dataset's version.
        task: SQL expression over the columns of `steps`; the first value in an episode that is not
            NULL names its task.
        conditions: conditions over episodes by name, which errors quote; `flags` has for which
            episodes they hold.

    Raises: NotFoundError without a column group_id, if that is the task; QueryError,
    QueryRefusedError. Cost: one query over all steps, another one for each condition.
    """
    columns = snapshot.table.schema.names
    expression = canonical_expression(task)
    if expression == GROUP_ID and GROUP_ID not in columns:
        raise NotFoundError(
            f"task: {snapshot.dataset} has no column {GROUP_ID}, expected one that names the task "
            "of each episode. Name another column or expression with `task`.",
            parameter="task",
        )
    counts = (tokens.OBSERVATION_TOKENS, tokens.ACTION_TOKENS)
    has_tokens = all(name in columns for name in counts)
    sums = ""
    if has_tokens:
        # A step without ids would count as one without tokens.
        sums = "".join(
            f", CASE WHEN count({name}) = count(*) THEN sum(len({name})) END AS {name}"
            for name in counts
        )
    try:
        table = snapshot.sql(
            f"""
            SELECT {schema.EPISODE_ID},
                   arg_min(CAST(({expression}) AS VARCHAR),
                           {{'a': {schema.AGENT_ID}, 's': {schema.STEP}}}) AS task,
                   min({schema.POLICY}) AS policy, max({schema.POLICY}) AS last_policy,
                   min({schema.POLICY_VERSION}) AS low, max({schema.POLICY_VERSION}) AS high,
                   CASE WHEN count({schema.REWARD}) = count(*)
                        THEN sum({schema.REWARD} ORDER BY {schema.AGENT_ID}, {schema.STEP})
                   END AS reward{sums}
            FROM steps GROUP BY {schema.EPISODE_ID} ORDER BY {schema.EPISODE_ID}
            """
        )
    except QueryError as error:
        raise QueryError(f"task {task}: {error}", parameter="task") from error
    low, high = _numbers(table["low"]), _numbers(table["high"])
    is_one = np.asarray(pc.equal(table["policy"], table["last_policy"]).fill_null(False))
    policies = _texts(table["policy"])
    policies[~is_one] = None
    ids = table[schema.EPISODE_ID].combine_chunks()
    return LoggedSamples(
        tasks=_texts(table["task"]),
        policies=policies,
        versions=np.where(is_one & (low == high), low, np.nan),
        first_versions=low,
        last_versions=high,
        rewards=_numbers(table["reward"]),
        observation_tokens=_numbers(table[counts[0]]) if has_tokens else None,
        action_tokens=_numbers(table[counts[1]]) if has_tokens else None,
        flags={
            name: _find_selected(snapshot, ids, name, text)
            for name, text in (conditions or {}).items()
        },
    )


def _numbers(column: pa.ChunkedArray) -> NDArray[np.float64]:
    """Return numbers as float64, NaN where NULL."""
    values: NDArray[np.float64] = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    return values.copy()


def _texts(column: pa.ChunkedArray) -> NDArray[np.object_]:
    values: NDArray[Any] = np.empty(len(column), object)
    values[:] = column.to_pylist()
    return values


def _find_selected(
    snapshot: Snapshot, ids: pa.Array, name: str, condition: str
) -> NDArray[np.bool_]:
    try:
        keys = select_episode_keys(snapshot.table, canonical_condition(condition))
    except QueryError as error:
        raise QueryError(f"{name} {condition}: {error}", parameter=error.parameter) from error
    selected = keys[schema.EPISODE_ID].combine_chunks()
    flags: NDArray[np.bool_] = np.asarray(pc.is_in(ids, value_set=selected))
    return flags
