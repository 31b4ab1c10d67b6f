"""Comparison of scores: hand-worked statistics, and the units in which values are compared."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import ConfigInvalidError, EmptyReplayError, NotFoundError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.maintenance.labels.annotate import annotate
from replaylake.datastore.maintenance.scoring.compare import (
    compare_scores,
    compute_kappa,
    compute_kendall,
    compute_spearman,
)


def numbers(*values: float) -> Any:
    return np.array(values, np.float64)


def test_rank_correlations_by_hand() -> None:
    # Of the six pairs, (1, 2) and (2, 1) alone are discordant: (5 - 1) / 6.
    x, y = numbers(1, 2, 3, 4), numbers(20, 10, 30, 40)
    assert compute_kendall(x, y) == pytest.approx(4 / 6)
    # 1 - 6 (1 + 1) / (4 * 15).
    assert compute_spearman(x, y) == pytest.approx(0.8)
    # Ties: pairs (0, 1) in x and (2, 3) in y; of the other four pairs all are concordant.
    x, y = numbers(1, 1, 2, 3), numbers(1, 2, 3, 3)
    assert compute_kendall(x, y) == pytest.approx(4 / 5)
    # Ranks 1.5, 1.5, 3, 4 and 1, 2, 3.5, 3.5, less 2.5: (1.5 + 0.5 + 0.5 + 1.5) / 4.5.
    assert compute_spearman(x, y) == pytest.approx(4 / 4.5)
    assert compute_kendall(x, -x) == pytest.approx(-1)
    assert compute_spearman(x, -x) == pytest.approx(-1)


def test_what_is_constant_has_no_correlation() -> None:
    x = numbers(1, 2, 3)
    for constant in (numbers(5, 5, 5),):
        assert compute_kendall(x, constant) is None
        assert compute_spearman(constant, x) is None
    assert compute_kendall(numbers(1), numbers(1)) is None
    assert compute_kappa(np.array([True, True]), np.array([True, True])) is None


def test_kappa_by_hand() -> None:
    # Both pass 2, only the first 1, only the second 1, neither 4: they agree in 6 of 8. By chance
    # 3/8 * 3/8 + 5/8 * 5/8 = 34/64.
    one = np.array([1, 1, 1, 0, 0, 0, 0, 0], bool)
    other = np.array([1, 1, 0, 1, 0, 0, 0, 0], bool)
    assert compute_kappa(one, other) == pytest.approx((6 / 8 - 34 / 64) / (1 - 34 / 64))


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-40, 40)), min_size=2, max_size=60))
def test_kendall_is_that_of_all_pairs(pairs: list[tuple[int, int]]) -> None:
    x, y = (numbers(*values) for values in zip(*pairs, strict=True))
    products = [np.sign((a - c) * (b - d)) for (a, b), (c, d) in combinations(pairs, 2)]
    untied = [sum(v != w for v, w in combinations(values, 2)) for values in (x, y)]
    expected = sum(products) / np.sqrt(untied[0] * untied[1]) if all(untied) else None
    assert compute_kendall(x, y) == (None if expected is None else pytest.approx(expected))


@pytest.fixture
def scored(lake: Lake, make_episode: Callable[..., Episode]) -> Lake:
    """Five episodes of two steps; a has no human label."""
    lake.dataset("d").append([make_episode(name, num_steps=2) for name in "abcde"])
    labels = pa.table(
        {
            "episode_id": list("abcde"),
            "judge": [0.1, 0.2, 0.3, 0.9, 0.5],
            "human": [None, 1.0, 2.0, 0.0, 4.0],
            "note": list("vwxyz"),
        }
    )
    annotate(lake, "d", labels, on="episode_id", add=["judge", "human", "note"])
    return lake


def test_scores_of_episodes(scored: Lake) -> None:
    found = compare_scores(scored, "d", "judge", "human", threshold=0.4, limit=2)
    assert (found.by, found.n, found.only_first, found.only_second) == ("episode", 4, 1, 0)
    # Above 0.4: d and e; b, c and e.
    assert found.agreement == 0.25
    # Orders b c e d and d b c e: 3 concordant and 3 discordant pairs.
    assert found.kendall == 0
    assert found.spearman == pytest.approx(1 - 6 * (1 + 1 + 9 + 1) / 60)
    assert (found.first_mean, found.second_mean) == (pytest.approx(1.9 / 4), 7 / 4)
    assert found.mean_difference == pytest.approx(7 / 4 - 1.9 / 4)
    assert found.mean_absolute_difference == pytest.approx((0.8 + 1.7 + 0.9 + 3.5) / 4)
    first, second = found.disagreements
    assert (first.episode_id, first.agent_id, first.step) == ("d", None, None)
    assert (first.first, first.second, first.first_rank, first.second_rank) == (0.9, 0, 1, 0)
    # b, c and e are a rank apart; e differs most.
    assert second.episode_id == "e"
    selected = compare_scores(scored, "d", "judge", "human", where="judge < 0.5")
    assert (selected.n, selected.kendall) == (2, 1)


def test_scores_of_steps_and_agents(lake: Lake, make_episode: Callable[..., Episode]) -> None:
    rewards = {"rewards": np.array([1.0, 2.0])}
    lake.dataset("d").append(
        [make_episode("a", 2, agent_id=agent, **rewards) for agent in ("x", "y")]
    )
    labels = pa.table({"episode_id": ["a", "a"], "agent_id": ["x", "y"], "s": [1, 2]})
    annotate(lake, "d", labels, on=["episode_id", "agent_id"], add=["s"])
    by_agent = compare_scores(lake, "d", "s", "s")
    assert (by_agent.by, by_agent.n, by_agent.kendall) == ("agent", 2, 1)
    by_step = compare_scores(lake, "d", "s", "reward", limit=9)
    assert (by_step.by, by_step.n, by_step.kendall) == ("step", 4, 0)
    assert {(one.agent_id, one.step) for one in by_step.disagreements} == {("x", 1), ("y", 0)}


def test_what_is_refused(scored: Lake) -> None:
    with pytest.raises(NotFoundError, match=r"against: found no column 'absent'.*judge, human"):
        compare_scores(scored, "d", "judge", "absent")
    with pytest.raises(ConfigInvalidError, match="name: found note, a column of"):
        compare_scores(scored, "d", "note", "judge")
    with pytest.raises(EmptyReplayError, match="a value of both judge and human"):
        compare_scores(scored, "d", "judge", "human", where="judge < 0.15")
