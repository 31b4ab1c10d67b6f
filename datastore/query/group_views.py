"""Group views: the SQL views `groups` and `preference_pairs`, over the samples of one prompt."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import pyarrow as pa

from replaylake.datastore.episodes import schema, tokens
from replaylake.datastore.errors import NotFoundError

GROUP_ID: Final = "group_id"

# pass@k of n samples of which c are right is 1 - C(n - c, k) / C(n, k), as the product that Chen et
# al. (2021), "Evaluating Large Language Models Trained on Code", section 2.1, compute it by.
_GROUPS: Final = f"""
WITH samples AS (
    SELECT {GROUP_ID}, {schema.EPISODE_ID},
           CASE WHEN count({schema.REWARD}) = count(*)
                THEN sum({schema.REWARD} ORDER BY {schema.AGENT_ID}, {schema.STEP}) END AS "return"
    FROM {{steps}}
    WHERE {GROUP_ID} IS NOT NULL
    GROUP BY ALL
), counted AS (
    SELECT {GROUP_ID},
           count(*) AS num_episodes,
           count("return") AS n,
           avg("return") AS mean,
           stddev_samp("return") AS std,
           max("return") AS best,
           min("return") AS worst,
           arg_min({schema.EPISODE_ID}, {{{{'r': -"return", 'id': {schema.EPISODE_ID}}}}}
           ) FILTER ("return" IS NOT NULL) AS best_episode_id,
           arg_min({schema.EPISODE_ID}, {{{{'r': "return", 'id': {schema.EPISODE_ID}}}}}
           ) FILTER ("return" IS NOT NULL) AS worst_episode_id,
           count(*) FILTER ("return" > 0) AS num_passed
    FROM samples
    GROUP BY ALL
)
SELECT *,
       list_transform(range(1, n + 1), lambda k:
           CASE WHEN n - num_passed < k THEN 1.0::DOUBLE
                ELSE 1.0::DOUBLE - coalesce(list_product(list_transform(
                    range(n - num_passed + 1, n + 1), lambda i: 1.0::DOUBLE - k / i
                )), 1.0::DOUBLE) END
       ) AS pass_at_k
FROM counted
"""

# The samples of a group are ordered by return. The first is paired with the last, the second with
# the second to last, and so on while the chosen return is above the rejected one. Episodes with
# equal returns are ordered by id from both ends, so the pairs are the same in every run, and an
# episode is in at most one pair: it is chosen only if more episodes are below it than
# above it, and rejected only if fewer are.
_PAIRS: Final = f"""
WITH samples AS (
    SELECT {GROUP_ID}, {schema.EPISODE_ID},
           CASE WHEN count({schema.REWARD}) = count(*)
                THEN sum({schema.REWARD} ORDER BY {schema.AGENT_ID}, {schema.STEP}) END AS "return",
           CAST({{num_tokens}} AS BIGINT) AS num_tokens,
           CAST({{num_chars}} AS BIGINT) AS num_chars
    FROM {{steps}}
    WHERE {GROUP_ID} IS NOT NULL
    GROUP BY {GROUP_ID}, {schema.EPISODE_ID}
), ranked AS (
    SELECT *,
           row_number() OVER (
               PARTITION BY {GROUP_ID} ORDER BY "return" DESC, {schema.EPISODE_ID}
           ) AS from_best,
           row_number() OVER (
               PARTITION BY {GROUP_ID} ORDER BY "return", {schema.EPISODE_ID}
           ) AS from_worst
    FROM samples
    WHERE "return" IS NOT NULL
)
SELECT {GROUP_ID}, CAST(chosen.from_best AS INTEGER) AS pair,
       chosen.{schema.EPISODE_ID} AS chosen_episode_id,
       rejected.{schema.EPISODE_ID} AS rejected_episode_id,
       chosen."return" AS chosen_return, rejected."return" AS rejected_return,
       chosen."return" - rejected."return" AS margin,
       chosen.num_tokens AS chosen_num_tokens, rejected.num_tokens AS rejected_num_tokens,
       chosen.num_chars AS chosen_num_chars, rejected.num_chars AS rejected_num_chars
FROM ranked AS chosen
JOIN ranked AS rejected USING ({GROUP_ID})
WHERE chosen.from_best = rejected.from_worst AND chosen."return" > rejected."return"
"""

# The columns of steps that each column depends on, also by which rows are in the view.
_SAMPLES: Final = frozenset({GROUP_ID, schema.EPISODE_ID})
_RETURNS: Final = _SAMPLES | {schema.REWARD}
GROUP_SOURCES: Final = {
    GROUP_ID: _SAMPLES,
    "num_episodes": _SAMPLES,
    "n": _RETURNS,
    "mean": _RETURNS,
    "std": _RETURNS,
    "best": _RETURNS,
    "worst": _RETURNS,
    "best_episode_id": _RETURNS,
    "worst_episode_id": _RETURNS,
    "num_passed": _RETURNS,
    "pass_at_k": _RETURNS,
}
_TOKEN_COUNTS: Final = _RETURNS | {tokens.ACTION_TOKENS}
_CHAR_COUNTS: Final = _RETURNS | {schema.ACTION}
PAIR_SOURCES: Final = {
    GROUP_ID: _RETURNS,
    "pair": _RETURNS,
    "chosen_episode_id": _RETURNS,
    "rejected_episode_id": _RETURNS,
    "chosen_return": _RETURNS,
    "rejected_return": _RETURNS,
    "margin": _RETURNS,
    "chosen_num_tokens": _TOKEN_COUNTS,
    "rejected_num_tokens": _TOKEN_COUNTS,
    "chosen_num_chars": _CHAR_COUNTS,
    "rejected_num_chars": _CHAR_COUNTS,
}


def groups_sql(steps: str, readable: Collection[str]) -> str:
    """Return `groups` over a FROM item of steps.

    Raises: NotFoundError if the columns that the query's author may read have no group_id.
    """
    _check_groups("groups", readable)
    return _GROUPS.format(steps=steps)


def preference_pairs_sql(steps: str, columns: pa.Schema, readable: Collection[str]) -> str:
    """Return `preference_pairs` over a FROM item of steps with these columns.

    Raises: NotFoundError if the columns that the query's author may read have no group_id.
    """
    _check_groups("preference_pairs", readable)
    num_tokens = num_chars = "NULL"
    if tokens.has_tokens(columns.names):
        num_tokens = f"sum(len({tokens.ACTION_TOKENS}))"
    if pa.types.is_string(columns.field(schema.ACTION).type):
        num_chars = f"sum(length({schema.ACTION}))"
    return _PAIRS.format(steps=steps, num_tokens=num_tokens, num_chars=num_chars)


def _check_groups(view: str, readable: Collection[str]) -> None:
    if GROUP_ID not in readable:
        raise NotFoundError(
            f"{view}: found no column {GROUP_ID}, expected a dataset whose steps have one: the "
            "prompt, or task, that an episode is a sample of."
        )
