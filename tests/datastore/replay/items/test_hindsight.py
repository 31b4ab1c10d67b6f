from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import Array, Box, Dict, Discrete
from replaylake.datastore.errors import ConfigInvalidError, SpaceUnsupportedError
from replaylake.datastore.replay.items.hindsight import Hindsight
from replaylake.datastore.replay.items.transitions import Transitions
from replaylake.datastore.replay.layout import RecordLayout
from replaylake.datastore.replay.protocols import SelectedItems
from replaylake.datastore.replay.records import Packed, Records
from replaylake.datastore.replay.sampler import FixedCandidates, Sampler
from replaylake.datastore.replay.selectors.uniform import UniformSelector

Pack = Callable[..., Any]
GOAL = Box((2,))
SPEC = DatasetSpec(
    Dict({"observation": Box((1,)), "achieved_goal": GOAL, "desired_goal": GOAL}), Discrete(10**6)
)


def with_goals(log: Any) -> Packed:
    """The same runs, where step t of episode e achieves [e, t] and is asked for [-1, -1]."""
    layout = RecordLayout(SPEC, {})
    plain = log.packed.records
    words = np.zeros((len(plain.words), layout.num_words), np.uint64)
    rows: Any = layout.rows(words)[:, 0]
    for name in set(rows.dtype.names) & set(plain.rows.dtype.names):
        rows[name] = plain.rows[name]
    rows["observation.achieved_goal"] = plain.rows["observation"]
    rows["observation.desired_goal"] = -1
    return replace(log.packed, records=Records(layout, words, has_links=plain.has_links))


def reached(achieved: Array, desired: Array, info: dict[str, Any]) -> Array:
    """0 where the goal is reached, else -1; as gymnasium-robotics has it."""
    assert info == {}
    return -np.any(achieved != desired, axis=1).astype(np.float32)


def draw(packed: Packed, item: Hindsight, repeats: int = 1) -> Any:
    starts = np.repeat(item.starts(packed), repeats)
    assembler = item.assembler(packed.records)
    return assembler.assemble(starts, SelectedItems(np.arange(len(starts)))).batch


def goals_by_step(batch: Batch[Array]) -> dict[tuple[int, int], set[tuple[int, int]]]:
    found: dict[tuple[int, int], set[tuple[int, int]]] = {}
    observations: Any = batch.observations
    rows: Iterable[Any] = zip(batch.keys.tolist(), observations["desired_goal"], strict=True)
    for (episode, step), goal in rows:
        found.setdefault((episode - 1, step - 1), set()).add(tuple(goal.astype(int).tolist()))
    return found


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("future", {(0, 0): {1, 2, 3}, (0, 1): {2, 3}, (0, 2): {3}, (1, 0): {1, 2}, (1, 1): {2}}),
        ("final", {(0, 0): {3}, (0, 1): {3}, (0, 2): {3}, (1, 0): {2}, (1, 1): {2}}),
        ("episode", {(0, t): {1, 2, 3} for t in range(3)}),
    ],
)
def test_goals_of_each_strategy(
    pack_pieces: Pack, strategy: Any, expected: dict[tuple[int, int], set[int]]
) -> None:
    # The last step of episode 1 has no successor, so it is no row, and reaches nothing known.
    log = pack_pieces([(0, 0, 1, "open"), (0, 1, 2, "terminated"), (1, 0, 3, "cut")])
    item = Hindsight(compute_reward=reached, seed=0, fraction=1.0, strategy=strategy)
    found = goals_by_step(draw(with_goals(log), item, 60))
    for (episode, step), steps in expected.items():
        assert found[episode, step] == {(episode, t) for t in steps}


def test_the_reward_is_that_of_the_goal(pack_pieces: Pack) -> None:
    packed = with_goals(pack_pieces([(0, 0, 4, "terminated")]))
    batch = draw(packed, Hindsight(compute_reward=reached, seed=0, fraction=0.5, discount=0.9), 50)
    goals = batch.observations["desired_goal"]
    np.testing.assert_array_equal(batch.next_observations["desired_goal"], goals)
    replaced = goals[:, 0] >= 0
    assert 60 < replaced.sum() < 140
    logged = batch.keys[:, 1].astype(np.float32)
    at_goal = np.where(goals[:, 1] == logged, 0, -1)
    np.testing.assert_array_equal(batch.rewards, np.where(replaced, at_goal, logged))
    assert set(batch.discounts.tolist()) == {0.0, float(np.float32(0.9))}
    np.testing.assert_array_equal(batch.observations["achieved_goal"][:, 1] + 1, logged)
    # What was packed is as it was.
    assert (packed.records.rows["observation.desired_goal"] == -1).all()


@pytest.mark.parametrize(("num", "end"), [(3, "truncated"), (4, "cut")])
def test_goals_are_drawn_evenly(pack_pieces: Pack, num: int, end: str) -> None:
    packed = with_goals(pack_pieces([(0, 0, 2, "open"), (0, 2, num, end)]))
    item = Hindsight(compute_reward=reached, seed=3, fraction=1.0)
    batch = draw(packed, item, 6000)
    goals = batch.observations["desired_goal"][batch.keys[:, 1] == 1, 1].astype(int)
    counts = np.bincount(goals, minlength=6)
    assert counts[0] == 0
    # Chi-square of 4 degrees of freedom: 18.5 is exceeded once in 1,000 times.
    assert ((counts[1:] - 1200) ** 2 / 1200).sum() < 18.5


def test_without_any_goal_replaced_it_is_transitions(pack_pieces: Pack) -> None:
    packed = with_goals(pack_pieces([(0, 0, 4, "terminated")]))
    batch = draw(packed, Hindsight(compute_reward=reached, seed=0, fraction=0.0))
    plain: Any = draw(packed, Transitions())
    for name in ("rewards", "discounts", "keys", "actions"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(plain, name))
    assert (batch.observations["desired_goal"] == -1).all()


def test_a_saved_sampler_goes_on(pack_pieces: Pack) -> None:
    packed = with_goals(pack_pieces([(0, 0, 9, "open"), (0, 9, 30, "truncated")]))
    item = Hindsight(compute_reward=reached, seed=5)

    def sampler(seed: int) -> Sampler:
        candidates = FixedCandidates(item.starts(packed))
        return Sampler(candidates, UniformSelector(seed=seed), item.assembler(packed.records), 16)

    one = sampler(1)
    # Into the second block.
    for _ in range(one.num_ahead + 5):
        one.sample()
    state = json.loads(json.dumps(one.state_dict()))
    other = sampler(2)
    other.load_state_dict(state)
    for _ in range(100):
        a, b = one.sample(), other.sample()
        np.testing.assert_array_equal(a.keys, b.keys)
        np.testing.assert_array_equal(a.rewards, b.rewards)
        goals: list[Any] = [batch.observations["desired_goal"] for batch in (a, b)]
        np.testing.assert_array_equal(*goals)


def test_what_is_refused(pack_pieces: Pack) -> None:
    log = pack_pieces([(0, 0, 4, "terminated")])
    item = Hindsight(compute_reward=reached, seed=0)
    with pytest.raises(
        SpaceUnsupportedError, match="found observations of Box, expected a Dict with"
    ):
        item.assembler(log.packed.records)
    records = with_goals(log).records
    growing = Records(records.layout, records.words, has_links=False)
    episode = Hindsight(compute_reward=reached, seed=0, strategy="episode")
    with pytest.raises(ConfigInvalidError, match='found strategy "episode" in a view that grows'):
        episode.assembler(growing)
    one = Hindsight(compute_reward=lambda achieved, desired, info: np.zeros(1), seed=0, fraction=1)
    with pytest.raises(ConfigInvalidError, match=r"returned shape \(1,\), expected \(4,\)"):
        draw(with_goals(log), one)
    with pytest.raises(
        ConfigInvalidError, match=r"found fraction 1\.5, expected a number from 0 to 1"
    ):
        Hindsight(compute_reward=reached, seed=0, fraction=1.5)
    with pytest.raises(
        ConfigInvalidError, match="found strategy 'past', expected future or final or"
    ):
        Hindsight(compute_reward=reached, seed=0, strategy="past")  # type: ignore[arg-type]


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(data=st.data(), strategy=st.sampled_from(["future", "final", "episode"]))
def test_no_goal_is_another_episode_s(
    pack_pieces: Pack, draw_pieces: Any, data: Any, strategy: Any
) -> None:
    log = pack_pieces(draw_pieces(data))
    item = Hindsight(compute_reward=reached, seed=0, fraction=1.0, strategy=strategy)
    found = goals_by_step(draw(with_goals(log), item, 4))
    assert len(found) == len(log.packed.bootstrappable)
    for (episode, step), goals in found.items():
        chain = log.chain(episode, step)
        last = chain.end if chain.has_successor else chain.end - 1
        first = {"future": step + 1, "final": last, "episode": chain.first + 1}[strategy]
        assert goals <= {(episode, t) for t in range(first, last + 1)}
