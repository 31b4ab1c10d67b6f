"""Group views: what SQL sees as `groups`, the samples of one prompt taken together."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from replaylake.datastore.episodes import schema
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
           arg_max({schema.EPISODE_ID}, "return") AS best_episode_id,
           arg_min({schema.EPISODE_ID}, "return") AS worst_episode_id,
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


def groups_sql(steps: str, readable: Collection[str]) -> str:
    """Return `groups` over a FROM item of steps.

    Raises: NotFoundError if the columns that the query's author may read have no group_id.
    """
    if GROUP_ID not in readable:
        raise NotFoundError(
            f"groups: found no column {GROUP_ID}, expected a dataset whose steps have one: the "
            "prompt, or task, that an episode is a sample of."
        )
    return _GROUPS.format(steps=steps)
