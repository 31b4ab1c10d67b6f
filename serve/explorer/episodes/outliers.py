"""Measures by which episodes are ranked, so that the odd ones come first: each as SQL over steps.

A measure is a SELECT of one value for each episode and agent. It is part of the query of a list, so
that a reader's condition can name it, and rows are read page by page as in any other order. Each
page computes it again and begins after a value of the page before, so its last bit may not depend
on how DuckDB divides the work: sums of floats name their order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from replaylake.datastore.episodes import tokens
from replaylake.datastore.episodes.spaces import Box, Space, leaves, value_shape
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.serve.explorer.visits.visit import Visit

# A query holds so many numbers at once: of more, it takes a sample of the episodes.
_MAX_NUMBERS: Final = 32_000_000
_MAX_NGRAMS: Final = 2_000_000
_PROBED_STEPS: Final = 10_000
# Of an action, so many numbers count for its jerk.
_MAX_WIDTH: Final = 64
# Below this share of the mean distance between observations, one is still.
_STILL: Final = 0.01
_NGRAM: Final = 4
_STEPS: Final = "WINDOW steps AS (PARTITION BY episode_id, agent_id ORDER BY step)"


@dataclass(frozen=True)
class Measure:
    """A measure of episodes. sql: a SELECT of episode_id, agent_id and a column of its name.

    definition: what it is, for people. one_in: of how many episodes one is measured.
    """

    name: str
    title: str
    definition: str
    sql: str
    one_in: int = 1


# By their names in an address.
TITLES: Final[Mapping[str, str]] = {
    "stillness": "Stillness",
    "jerk": "Jerk",
    "repetition": "Repetition",
    "log_prob": "Log-prob",
}


def list_measures(snapshot: Snapshot) -> list[str]:
    """Return the names of the measures that a dataset's spaces allow."""
    spec = snapshot.spec
    names = []
    if not _has_frames(spec.observation_space):
        names.append("stillness")
    if _width(spec.action_space):
        names.append("jerk")
    names.append("repetition")
    names.append("log_prob")
    return names


def find_measure(visit: Visit, snapshot: Snapshot, name: str) -> Measure:
    """Return one of `list_measures`. Cost: for tokens, a query of the first steps."""
    builders = {
        "stillness": _measure_stillness,
        "jerk": _measure_jerk,
        "repetition": _measure_repetition,
        "log_prob": _measure_log_prob,
    }
    return builders[name](visit, snapshot)


def _measure_stillness(visit: Visit, snapshot: Snapshot) -> Measure:
    width = _width(snapshot.spec.observation_space)
    one_in = _choose_sample(snapshot.num_steps * max(1, width), _MAX_NUMBERS)
    source = _source(snapshot, one_in)
    if width:
        vector = _vector("observation", snapshot.spec.observation_space)
        moved = f"list_distance({vector}, lag({vector}) OVER steps)"
        mean = "(SELECT sum(total ORDER BY episode_id, agent_id) / sum(num) FROM sums)"
        # Where nothing moves at all, the mean is 0.
        still = f"avg(CAST(moved <= {_STILL} * {mean} AS INTEGER))"
        definition = (
            "the share of an episode's steps whose distance from the observation before is at most "
            f"{_STILL:.0%} of the mean of these distances; distances are Euclidean"
        )
    else:
        moved = "CAST(hash(observation) <> lag(hash(observation)) OVER steps AS INTEGER)"
        still = "1 - avg(moved)"
        definition = (
            "the share of an episode's steps whose observation is equal to the one before it"
        )
    sql = f"""
        WITH moves AS MATERIALIZED (
            SELECT episode_id, agent_id, step, {moved} AS moved {source} {_STEPS}
        ), sums AS (
            SELECT episode_id, agent_id, sum(moved ORDER BY step) AS total, count(moved) AS num
            FROM moves GROUP BY episode_id, agent_id
        ) SELECT episode_id, agent_id, {still} AS stillness FROM moves
        GROUP BY episode_id, agent_id"""
    return Measure("stillness", TITLES["stillness"], definition, _one_line(sql), one_in)


def _measure_jerk(visit: Visit, snapshot: Snapshot) -> Measure:
    width = _width(snapshot.spec.action_space)
    one_in = _choose_sample(4 * snapshot.num_steps * width, _MAX_NUMBERS)
    used = min(width, _MAX_WIDTH)
    terms = " + ".join(
        f"pow(a0[{place}] - 3 * a1[{place}] + 3 * a2[{place}] - a3[{place}], 2)"
        for place in range(1, used + 1)
    )
    vector = _vector("action", snapshot.spec.action_space)
    before = ", ".join(f"lag({vector}, {num}) OVER steps AS a{num}" for num in (1, 2, 3))
    sql = f"""
        SELECT episode_id, agent_id, avg(sqrt({terms}) ORDER BY step) AS jerk FROM (
            SELECT episode_id, agent_id, step, {vector} AS a0, {before}
            {_source(snapshot, one_in)} {_STEPS}
        ) GROUP BY ALL"""
    definition = (
        "the mean over an episode's steps of the norm of the third difference of its actions, "
        "a(t) - 3 a(t - 1) + 3 a(t - 2) - a(t - 3)"
    )
    if used < width:
        definition += f", over the first {used} of their {width:,} numbers"
    return Measure("jerk", TITLES["jerk"], definition, _one_line(sql), one_in)


def _measure_repetition(visit: Visit, snapshot: Snapshot) -> Measure:
    title = TITLES["repetition"]
    if not tokens.has_tokens(snapshot.table.schema.names):
        one_in = _choose_sample(snapshot.num_steps, _MAX_NUMBERS)
        sql = f"""
            SELECT episode_id, agent_id, avg(repeated) AS repetition FROM (
                SELECT episode_id, agent_id,
                    CAST(hash(action) = lag(hash(action)) OVER steps AS INTEGER) AS repeated
                {_source(snapshot, one_in)} {_STEPS}
            ) GROUP BY ALL"""
        definition = "the share of an episode's steps whose action is equal to the one before it"
        return Measure("repetition", title, definition, _one_line(sql), one_in)
    (row,) = visit.sql(
        f"""SELECT avg(len(action_tokens)) AS num FROM (
            SELECT action_tokens FROM {snapshot.dataset}.steps LIMIT {_PROBED_STEPS})""",
        snapshot,
    )
    one_in = _choose_sample(int(snapshot.num_steps * (row["num"] or 0)), _MAX_NGRAMS)
    lists = ", ".join(
        f"action_tokens[{place + 1} : len(action_tokens) - {_NGRAM - 1 - place}]"
        for place in range(_NGRAM)
    )
    sql = f"""
        SELECT episode_id, agent_id,
            1 - count(DISTINCT hash(ngram)) / count(*) AS repetition FROM (
            SELECT episode_id, agent_id, unnest(list_zip({lists})) AS ngram
            {_source(snapshot, one_in, f"len(action_tokens) >= {_NGRAM}")}
        ) GROUP BY ALL"""
    definition = (
        f"one minus the number of distinct {_NGRAM}-grams among the tokens of an episode's "
        f"actions, divided by the number of all of them"
    )
    return Measure("repetition", title, definition, _one_line(sql), one_in)


def _measure_log_prob(visit: Visit, snapshot: Snapshot) -> Measure:
    if tokens.has_tokens(snapshot.table.schema.names):
        known = "action_tokens IS NOT NULL AND behavior_log_prob IS NOT NULL"
        total = "sum(CAST(behavior_log_prob AS DOUBLE) ORDER BY step)"
        value = f"{total} / nullif(sum(len(action_tokens)), 0)"
        definition = (
            "the mean log-prob of a token of an episode's actions, under the behavior policy"
        )
    else:
        known = "behavior_log_prob IS NOT NULL"
        value = "avg(CAST(behavior_log_prob AS DOUBLE) ORDER BY step)"
        definition = "the mean log-prob of an episode's actions, under the behavior policy"
    sql = f"""SELECT episode_id, agent_id, {value} AS log_prob
        {_source(snapshot, 1, known)} GROUP BY ALL"""
    return Measure("log_prob", TITLES["log_prob"], definition, _one_line(sql))


def _source(snapshot: Snapshot, one_in: int, condition: str = "") -> str:
    conditions = [condition] if condition else []
    if one_in > 1:
        # Whole episodes. A smaller sample is a part of every larger one.
        conditions.append(f"hash(episode_id) % {one_in} = 0")
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    return f"FROM {snapshot.dataset}.steps{where}"


def _choose_sample(num: int, most: int) -> int:
    """Return the least power of 2 by which `num` has to be divided, so that samples are nested."""
    return 1 << max(0, math.ceil(num / most) - 1).bit_length()


def _has_frames(space: Space) -> bool:
    return any(isinstance(leaf, Box) and leaf.is_image for _, leaf in leaves(space))


def _width(space: Space) -> int:
    """Return how many numbers a vector has; 0 for spaces that are none."""
    if not isinstance(space, Box) or space.is_image:
        return 0
    return int(np.prod(value_shape(space), dtype=np.int64))


def _vector(column: str, space: Space) -> str:
    """Return a column of such a space as a list of numbers in SQL."""
    is_scalar = value_shape(space) == () if isinstance(space, Box) else False
    return f"[CAST({column} AS DOUBLE)]" if is_scalar else f"CAST({column} AS DOUBLE[])"


def _one_line(sql: str) -> str:
    return " ".join(sql.split())
