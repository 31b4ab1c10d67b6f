"""Expressions: spelt one way, and refused where they could select other rows tomorrow."""

from __future__ import annotations

from collections.abc import Callable

import duckdb
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import QueryError, QueryRefusedError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.query.expressions import (
    bind_condition,
    canonical_expression,
    evaluate_rewards,
    select_episode_keys,
    select_steps,
)
from replaylake.datastore.storage.table.table import TableSnapshot


@pytest.fixture
def snapshot(lake: Lake, make_episode: Callable[..., Episode]) -> TableSnapshot:
    """Rewards 1, 2, 3 in episode `long`, and 1 in `short`."""
    episodes = [make_episode("long", 3, terminated=True), make_episode("short", 1)]
    lake.dataset("d").append(episodes)
    return lake.dataset("d").snapshot().table


def test_one_spelling() -> None:
    spelt = canonical_expression("num_steps>=3 and  terminated -- of them")
    assert spelt == canonical_expression("((num_steps >= 3) AND (terminated))")
    assert canonical_expression(spelt) == spelt


@pytest.mark.parametrize(
    "expression",
    ["random() > 0.5", "started_at > now()", "started_at > CURRENT_DATE", "age(started_at) > x"],
)
def test_what_changes_between_runs(expression: str) -> None:
    with pytest.raises(QueryRefusedError, match="whose value changes between runs"):
        canonical_expression(expression)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "found an empty one"),
        ("exists(select 1)", "found a subquery"),
        ("lead(reward) over () > 1", "found a window function"),
        ("true) UNION (SELECT 1", "more than an expression"),
        ("true); SELECT (1", "SELECT, SELECT, expected one"),
    ],
)
def test_what_is_more_than_an_expression(expression: str, message: str) -> None:
    with pytest.raises((QueryRefusedError, QueryError), match=message):
        canonical_expression(expression)


@pytest.mark.parametrize(
    ("condition", "surely", "maybe"),
    [
        ("true", True, True),
        ("num_steps = 3", True, True),
        ("num_steps = 4", False, False),
        ("terminated", False, True),
        ("NOT terminated", False, True),
        ("terminated IS NULL", False, True),
        ("num_steps = 3 AND terminated", False, True),
        ("num_steps = 4 AND terminated", False, False),
        ("num_steps = 3 OR terminated", True, True),
        ("NOT (num_steps = 3 OR terminated)", False, False),
        ("NOT (num_steps = 4 AND terminated) AND NOT NOT num_steps = 3", True, True),
        ("NUM_STEPS = 3 AND episodes.Terminated", False, True),
        ("policy = 'a'", None, None),
        ("policy IS NULL", True, True),
        ("NOT policy = 'a' AND terminated", False, None),
        ("CASE WHEN num_steps = 3 THEN terminated ELSE true END", False, True),
    ],
)
def test_a_condition_between_what_is_sure_and_what_may_be(
    condition: str, surely: bool | None, maybe: bool | None
) -> None:
    """Of an episode of 3 steps without a policy, of which the end is not known."""
    known = {"num_steps": "true", "policy": "has_policy"}
    row = "(SELECT 3 AS num_steps, NULL::VARCHAR AS policy, true AS has_policy, "
    row = f"{row} true AS terminated) AS episodes"
    lower, upper = bind_condition(canonical_expression(condition), known)
    (found,) = duckdb.execute(f"SELECT {lower}, {upper} FROM {row}").fetchall()
    assert found == (surely, maybe)


def test_a_condition_selects_episodes(snapshot: TableSnapshot) -> None:
    rows = select_episode_keys(snapshot, 'terminated AND "return" = 6').to_pylist()
    assert rows == [{"episode_id": "long", "agent_id": ""}]
    with pytest.raises(QueryError, match="nonsense"):
        select_episode_keys(snapshot, "nonsense > 1")
    with pytest.raises(QueryError, match="disabled"):
        select_episode_keys(
            snapshot, "num_steps > (SELECT count(*) FROM read_text('/etc/hostname'))"
        )


def test_a_reward_is_one_number_a_step(snapshot: TableSnapshot) -> None:
    rewards = evaluate_rewards(snapshot, "10 * reward - step")
    assert rewards["reward"].to_pylist() == [10, 19, 28, 10]
    with pytest.raises(
        QueryRefusedError, match="found 1 values for 4 steps, expected one per step"
    ):
        evaluate_rewards(snapshot, "sum(reward)")


def test_a_condition_selects_steps(snapshot: TableSnapshot) -> None:
    assert select_steps(snapshot, "reward >= 2").tolist() == [False, True, True, False]
    assert select_steps(snapshot, "NULL").tolist() == [False] * 4
    # The rows' order is that of the files.
    assert select_steps(snapshot, "episode_id = 'short'").tolist() == [False] * 3 + [True]
    with pytest.raises(
        QueryRefusedError, match=r"where_steps bool_or.* found 1 values for 4 steps"
    ):
        select_steps(snapshot, "bool_or(terminated)")
    with pytest.raises(QueryError, match="nonsense"):
        select_steps(snapshot, "nonsense")
