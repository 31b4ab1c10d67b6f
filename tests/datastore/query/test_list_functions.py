"""Functions over lists of tokens or of steps, with numbers that were worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import QueryError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.query.untrusted import QueryLimits

# Of three tokens, the second was not sampled.
BEHAVIOR = "[-1.0, NULL, -2.0]::FLOAT[]"
PROXIMAL = "[-0.5, NULL, -2.5]::FLOAT[]"
EXPECTED = [
    (f"log_ratios({PROXIMAL}, {BEHAVIOR})", [0.5, None, -0.5]),
    (f"importance_weights({PROXIMAL}, {BEHAVIOR})", [math.exp(0.5), None, math.exp(-0.5)]),
    (f"mismatch_kl({PROXIMAL}, {BEHAVIOR})", 0.0),
    # The mean of exp(r) - 1 - r is over the two that are known.
    (
        f"mismatch_kl_k3({PROXIMAL}, {BEHAVIOR})",
        (math.exp(0.5) - 1.5 + math.exp(-0.5) - 0.5) / 2,
    ),
    (f"mismatch_kl(mask_values({PROXIMAL}, [1, 1, 0]), {BEHAVIOR})", -0.5),
    ("mask_values([1.5, 2.5, 3.5]::DOUBLE[], [0, 1, NULL])", [None, 2.5, None]),
    ("staleness([{'start': 0, 'version': 5}, {'start': 3, 'version': 4}], 9)", 5),
    ('staleness([]::STRUCT("start" INTEGER, "version" BIGINT)[], 9)', None),
    (f"importance_weights(NULL::FLOAT[], {BEHAVIOR})", [None, None, None]),
    (f"MISMATCH_KL({BEHAVIOR}, {BEHAVIOR})", 0.0),
    # 8 at the last of three steps, half of it at the one before, a quarter at the first.
    ("discounted_credit(8, 3, 0.5)", [2.0, 4.0, 8.0]),
    ("discounted_credit(8, 0, 0.5)", []),
    ("discounted_credit(NULL::DOUBLE, 2, 0.5)", [None, None]),
    ("turn_credit(6.0, [true, false, NULL, true])", [3.0, 0.0, 0.0, 3.0]),
    ("turn_credit(6, [1, 1, 0]::TINYINT[])", [3.0, 3.0, 0.0]),
    ("turn_credit(1.0, [false])", [0.0]),
    # 4; 2 + 4 / 2 = 4; 1 + 4 / 2 = 3.
    ("returns_to_go([1, 2, 4], 0.5)", [3.0, 4.0, 4.0]),
    ("returns_to_go([1, NULL, 4]::DOUBLE[], 0.5)", [None, None, 4.0]),
    ("returns_to_go([]::DOUBLE[], 0.5)", []),
    # With values of 1 the TD errors are 1 + 0.5 - 1 = 0.5, 2 + 0.5 - 1 = 1.5 and 4 + 0 - 1 = 3, and
    # the advantages 3, 1.5 + 3 / 4 = 2.25 and 0.5 + 2.25 / 4 = 1.0625.
    ("gae([1, 2, 4], [1, 1, 1], 0.5, 0.5)", [1.0625, 2.25, 3.0]),
    # Truncated before a state of value 8: the last TD error is 4 + 4 - 1 = 7.
    ("gae([1, 2, 4]::DOUBLE[], [1, 1, 1, 8]::FLOAT[], 0.5, 0.5)", [1.3125, 3.25, 7.0]),
    # Without values and decay, the advantages are the returns; without the latter, the TD errors.
    ("gae([1, 2, 4], [0, 0, 0], 0.5, 1.0)", [3.0, 4.0, 4.0]),
    ("gae([1, 2, 4], [1, 1, 1], 0.5, 0.0)", [0.5, 1.5, 3.0]),
    ("gae(NULL::DOUBLE[], [1.0], 0.5, 0.5)", None),
]


@pytest.mark.parametrize(("expression", "expected"), EXPECTED)
def test_functions(lake: Lake, expression: str, expected: Any) -> None:
    (value,) = lake.sql(f"SELECT {expression} AS v").column("v").to_pylist()
    if isinstance(expected, list):
        assert [v is None for v in value] == [v is None for v in expected]
        value = [v for v in value if v is not None]
        expected = [v for v in expected if v is not None]
    assert value == (None if expected is None else pytest.approx(expected, abs=1e-12))


@pytest.mark.parametrize(
    "name",
    ["log_ratios", "importance_weights", "mismatch_kl", "mismatch_kl_k3", "mask_values"],
)
def test_lists_of_other_lengths_are_refused(lake: Lake, name: str) -> None:
    message = "found lists of 1 and 3 values, expected lists of one length"
    query = f"SELECT {name}([-0.1], [-0.1, -0.2, -0.5]) AS v"
    with pytest.raises(QueryError, match=message):
        lake.sql(query)
    with pytest.raises(QueryError, match="lists of 3 and 2 values"):
        lake.sql(f"SELECT {name}(a, b) FROM (VALUES ([1, 2], [1, 2]), ([1, 2, 3], [0, 1])) t(a, b)")
    with pytest.raises(QueryError, match=message):
        lake.sql_untrusted(query, limits=QueryLimits(wall_s=60))


@pytest.mark.parametrize("values", ["[]::DOUBLE[]", "[1.0]", "[1.0, 2.0, 3.0, 4.0]"])
def test_values_of_other_steps_are_refused(lake: Lake, values: str) -> None:
    with pytest.raises(QueryError, match=r"found 2 rewards and \d values, expected a value for"):
        lake.sql(f"SELECT gae([1.0, 2.0], {values}, 0.9, 0.95)")


def test_credit_of_an_outcome_over_stored_steps(
    lake: Lake, make_episode: Callable[..., Episode]
) -> None:
    lake.dataset("d").append([make_episode("a"), make_episode("b", num_steps=1)])
    rows = lake.sql(
        "SELECT episode_id, discounted_credit(max(reward), count(*), 0.5) AS discounted, "
        "turn_credit(max(reward), list(action = 0 ORDER BY step)) AS turns, "
        "gae(list(reward ORDER BY step), list(0.5 ORDER BY step), 1.0, 1.0) AS advantages "
        "FROM d.steps GROUP BY episode_id ORDER BY episode_id"
    ).to_pylist()
    # Rewards 1, 2, 3; actions 0, 1, 0. The advantages are the returns minus the values.
    assert rows == [
        {"episode_id": "a", "discounted": [0.75, 1.5, 3.0], "turns": [1.5, 0.0, 1.5],
         "advantages": [5.5, 4.5, 2.5]},
        {"episode_id": "b", "discounted": [1.0], "turns": [1.0], "advantages": [0.5]},
    ]  # fmt: skip


def test_numbers_of_many_digits_are_doubles(lake: Lake) -> None:
    digits = "0.99999999999999999999"
    query = (
        f"SELECT gae([1.0], [0.0], {digits}, {digits}) AS v, returns_to_go([1.0], {digits}) AS w"
    )
    assert lake.sql(query).to_pylist() == [{"v": [1.0], "w": [1.0]}]


def test_functions_are_of_each_query_alone(lake: Lake) -> None:
    query = f"SELECT mismatch_kl({PROXIMAL}, {BEHAVIOR}) AS v"
    for _ in range(2):
        assert lake.sql(query).column("v").to_pylist() == [0]
    with pytest.raises(QueryError, match="mismatch_kl_k4"):
        lake.sql("SELECT mismatch_kl_k4([1.0], [1.0])")


def test_functions_in_sql_from_others(lake: Lake) -> None:
    query = f"SELECT importance_weights({PROXIMAL}, {BEHAVIOR})[1] AS v"
    rows = lake.sql_untrusted(query, limits=QueryLimits(wall_s=60)).rows
    assert rows.column("v").to_pylist() == [pytest.approx(math.exp(0.5))]
