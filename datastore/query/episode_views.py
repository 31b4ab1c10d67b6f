"""Episode views: what SQL sees as `episodes`, `games` and `transitions`, as SELECTs over steps.

An episode's numbers are made of its pieces: the rows of one episode and agent in one shard. Every
aggregate here is one that can be made from those of the pieces (summaries.py keeps them).
"""

from __future__ import annotations

from typing import Final

from replaylake.datastore.episodes import schema

# Columns of a piece, and of a whole episode: name, how rows make it, how pieces make it. The policy
# is that of the last row that names one.
_ROWS_AND_PIECES: Final = (
    ("num_steps", "count(*)", "CAST(sum(num_steps) AS BIGINT)"),
    # In the order of the pieces: a sum of floats depends on its order.
    # Unknown where one of its rewards is: a sum of the others would look like a return.
    (
        '"return"',
        f"CASE WHEN count({schema.REWARD}) = count(*) THEN sum({schema.REWARD}) END",
        'CASE WHEN count("return") = count(*) THEN sum("return" ORDER BY first_step) END',
    ),
    ("terminated", f"bool_or({schema.TERMINATED})", "bool_or(terminated)"),
    ("truncated", f"bool_or({schema.TRUNCATED})", "bool_or(truncated)"),
    ("complete", f"bool_or({schema.TERMINATED} OR {schema.TRUNCATED})", "bool_or(complete)"),
    ("first_step", f"min({schema.STEP})", "min(first_step)"),
    ("policy", f"arg_max({schema.POLICY}, {schema.STEP})", "arg_max(policy, policy_step)"),
    ("min_policy_version", f"min({schema.POLICY_VERSION})", "min(min_policy_version)"),
    ("max_policy_version", f"max({schema.POLICY_VERSION})", "max(max_policy_version)"),
    ("started_at", f"min({schema.TIMESTAMP})", "min(started_at)"),
    ("ended_at", f"max({schema.TIMESTAMP})", "max(ended_at)"),
    (
        schema.SOURCE_EPISODE_ID,
        f"any_value({schema.SOURCE_EPISODE_ID})",
        f"any_value({schema.SOURCE_EPISODE_ID})",
    ),
    (
        "policy_step",
        f"max({schema.STEP}) FILTER ({schema.POLICY} IS NOT NULL)",
        "max(policy_step)",
    ),
    ("first_env_step", f"min({schema.ENV_STEP})", "min(first_env_step)"),
    ("last_env_step", f"max({schema.ENV_STEP})", "max(last_env_step)"),
)
_KEY: Final = f"{schema.EPISODE_ID}, {schema.AGENT_ID}"
_HIDDEN_COLUMNS: Final = ("policy_step", "first_env_step", "last_env_step")

PIECE_COLUMNS: Final = (
    schema.EPISODE_ID,
    schema.AGENT_ID,
    *(name.strip('"') for name, _, _ in _ROWS_AND_PIECES),
)
# The names of the columns of `episodes`.
EPISODE_COLUMNS: Final = frozenset(PIECE_COLUMNS) - frozenset(_HIDDEN_COLUMNS)
FROM_ROWS: Final = ", ".join([_KEY, *(f"{rows} AS {name}" for name, rows, _ in _ROWS_AND_PIECES)])
_FROM_PIECES: Final = ", ".join([_KEY, *(f"{by} AS {name}" for name, _, by in _ROWS_AND_PIECES)])

# The columns of steps that each column of a view depends on, also by which rows are in the view.
_KEYS: Final = frozenset({schema.EPISODE_ID, schema.AGENT_ID})
_ENDS: Final = frozenset({schema.TERMINATED, schema.TRUNCATED})
_VERSIONS: Final = _KEYS | {schema.POLICY_VERSION}
_TIMES: Final = _KEYS | {schema.TIMESTAMP}
EPISODE_SOURCES: Final = {
    schema.EPISODE_ID: _KEYS,
    schema.AGENT_ID: _KEYS,
    "num_steps": _KEYS,
    "return": _KEYS | {schema.REWARD},
    "terminated": _KEYS | {schema.TERMINATED},
    "truncated": _KEYS | {schema.TRUNCATED},
    "complete": _KEYS | _ENDS,
    "first_step": _KEYS | {schema.STEP},
    "policy": _KEYS | {schema.POLICY, schema.STEP},
    "min_policy_version": _VERSIONS,
    "max_policy_version": _VERSIONS,
    "started_at": _TIMES,
    "ended_at": _TIMES,
    schema.SOURCE_EPISODE_ID: _KEYS | {schema.SOURCE_EPISODE_ID},
}
GAME_SOURCES: Final = {
    schema.EPISODE_ID: _KEYS,
    "num_agents": _KEYS,
    "num_steps": _KEYS,
    "num_env_steps": _KEYS | {schema.ENV_STEP},
    "return": _KEYS | {schema.REWARD},
    "agent_returns": _KEYS | {schema.REWARD},
    "terminated": _KEYS | {schema.TERMINATED},
    "truncated": _KEYS | {schema.TRUNCATED},
    "complete": _KEYS | _ENDS,
    "policies": _KEYS | {schema.POLICY, schema.STEP},
    "min_policy_version": _VERSIONS,
    "max_policy_version": _VERSIONS,
    "started_at": _TIMES,
    "ended_at": _TIMES,
    schema.SOURCE_EPISODE_ID: _KEYS | {schema.SOURCE_EPISODE_ID},
}
# Its other columns are those of steps.
TRANSITION_SOURCES: Final = {
    "next_observation": _KEYS | _ENDS | {schema.STEP, schema.OBSERVATION, schema.FINAL_OBSERVATION},
}

# The rule of docs/DATA_MODEL.md: the following row counts only if it is the next
# step of the same episode and agent, and this row has not ended.
# The names with spaces are of no dataset's columns. Not step + 1: the highest has no successor.
_TRANSITIONS: Final = f"""
SELECT * EXCLUDE ("next step", "following observation"),
       CASE WHEN {schema.FINAL_OBSERVATION} IS NOT NULL THEN {schema.FINAL_OBSERVATION}
            WHEN NOT {schema.TERMINATED} AND NOT {schema.TRUNCATED}
                 AND "next step" - 1 = {schema.STEP} THEN "following observation"
       END AS next_observation
FROM (
    SELECT *,
           lead({schema.STEP}) OVER following AS "next step",
           lead({schema.OBSERVATION}) OVER following AS "following observation"
    FROM {{steps}}
    WINDOW following AS (PARTITION BY {_KEY} ORDER BY {schema.STEP})
)
"""

# A game has ended when all its agents have; it was cut off if one of them was.
_GAMES: Final = f"""
SELECT {schema.EPISODE_ID},
       count(*) AS num_agents,
       CAST(sum(num_steps) AS BIGINT) AS num_steps,
       CAST(max(last_env_step) AS BIGINT) - min(first_env_step) + 1 AS num_env_steps,
       CASE WHEN count("return") = count(*) THEN sum("return" ORDER BY {schema.AGENT_ID}) END
           AS "return",
       map_from_entries(list(({schema.AGENT_ID}, "return") ORDER BY {schema.AGENT_ID}))
           AS agent_returns,
       bool_and(terminated) AS terminated,
       bool_or(truncated) AS truncated,
       bool_and(complete) AS complete,
       coalesce(list_sort(list(DISTINCT policy) FILTER (policy IS NOT NULL)), []) AS policies,
       min(min_policy_version) AS min_policy_version,
       max(max_policy_version) AS max_policy_version,
       min(started_at) AS started_at,
       max(ended_at) AS ended_at,
       min({schema.SOURCE_EPISODE_ID}) AS {schema.SOURCE_EPISODE_ID}
FROM ({{groups}})
GROUP BY {schema.EPISODE_ID}
"""


def transitions_sql(steps: str) -> str:
    """Return `transitions` over a FROM item of steps."""
    return _TRANSITIONS.format(steps=steps)


def group_rows_sql(steps: str) -> str:
    """Return one row per episode and agent, made from steps."""
    return f"SELECT {FROM_ROWS} FROM {steps} GROUP BY {_KEY}"


def group_pieces_sql(pieces: str) -> str:
    """Return one row per episode and agent, made from a SELECT of pieces."""
    return f"SELECT {_FROM_PIECES} FROM ({pieces}) GROUP BY {_KEY}"


def episodes_sql(groups: str) -> str:
    """Return `episodes` over either of these."""
    return f"SELECT * EXCLUDE ({', '.join(_HIDDEN_COLUMNS)}) FROM ({groups})"


def games_sql(groups: str) -> str:
    """Return `games` over either of these."""
    return _GAMES.format(groups=groups)
