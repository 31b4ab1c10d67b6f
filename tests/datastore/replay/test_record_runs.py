from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replaylake.datastore.replay.record_runs import Runs, returns_to_go

Pack = Callable[..., Any]


def of_steps(log: Any, discount: float, **options: int) -> dict[tuple[int, int], float]:
    rewards = log.packed.records.rows["reward"]
    returns = returns_to_go(rewards, log.packed.runs, discount, **options)
    return {step: float(returns[position]) for step, position in log.positions.items()}


def test_every_kind_of_end(pack_pieces: Pack) -> None:
    # Rewards of episode 0 are 1, 2, 3; of episode 1 they are 1.5, 2.5, 3.5; and so on.
    ends = ["terminated", "truncated", "cut", "open", "lost"]
    log = pack_pieces([(e, 0, 3, end) for e, end in enumerate(ends)])
    expected = {}
    for e in range(5):
        first, second, third = e / 2 + 1, e / 2 + 2, e / 2 + 3
        expected[e, 2] = third
        expected[e, 1] = second + 0.5 * third
        expected[e, 0] = first + 0.5 * second + 0.25 * third
    assert of_steps(log, 0.5) == expected


def test_an_episode_in_pieces_is_one_and_a_gap_ends_it(pack_pieces: Pack) -> None:
    # Episode 0: rewards 1, 2 | 3 | 4. Episode 1: 1.5, 2.5, then step 2 is missing, 4.5.
    pieces = [(0, 0, 2, "open"), (0, 2, 1, "open"), (0, 3, 1, "terminated")]
    log = pack_pieces([*pieces, (1, 0, 2, "open"), (1, 3, 1, "terminated")])
    assert of_steps(log, 1.0) == {
        (0, 0): 10,
        (0, 1): 9,
        (0, 2): 7,
        (0, 3): 4,
        (1, 0): 4,
        (1, 1): 2.5,
        (1, 3): 4.5,
    }
    assert of_steps(log, 0.0) == {
        (0, 0): 1,
        (0, 1): 2,
        (0, 2): 3,
        (0, 3): 4,
        (1, 0): 1.5,
        (1, 1): 2.5,
        (1, 3): 4.5,
    }


@pytest.mark.slow
@given(data=st.data())
@settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_any_pieces_are_summed_up_from_their_ends(
    pack_pieces: Pack, draw_pieces: Callable[[Any], Any], data: Any
) -> None:
    log = pack_pieces(draw_pieces(data), data.draw(st.integers(1, 3)))
    discount = data.draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    rewards = {step: step[0] / 2 + step[1] + 1 for step in log.positions}
    expected: dict[tuple[int, int], float] = {}
    for episode, step in sorted(log.positions, reverse=True):
        stop = log.chain(episode, step).end
        after = expected[episode, step + 1] if step + 1 < stop else 0.0
        expected[episode, step] = rewards[episode, step] + discount * after
    for piece_steps in (1, 3, 1 << 15):
        found = of_steps(log, discount, piece_steps=piece_steps)
        assert found == pytest.approx(expected, rel=1e-6)


def test_what_is_not_known_stays_with_its_episode() -> None:
    rewards = np.array([1, 2, np.nan, 4, 0, 1, 2, 0], np.float32)
    starts, lengths, zero = np.array([0, 5]), np.array([4, 2]), np.zeros(2, np.int64)
    returns = returns_to_go(rewards, Runs(starts, lengths, zero, zero, zero + 1), 0.5)
    np.testing.assert_array_equal(returns, [np.nan, np.nan, np.nan, 4, 0, 2, 2, 0])


def test_a_long_episode_is_as_exact_as_one_step_after_another() -> None:
    rewards = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    zero = np.zeros(1, np.int64)
    returns = returns_to_go(rewards, Runs(zero, zero + 100_000, zero, zero, zero + 1), 0.999)
    expected, following = np.zeros(100_000), 0.0
    for t in range(99_999, -1, -1):
        following = expected[t] = float(rewards[t]) + 0.999 * following
    np.testing.assert_allclose(returns, expected, rtol=1e-6, atol=1e-5)
