"""Items of episodes that were written to a dataset, against what SQL says of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Array, Box, Dict, Discrete
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.replay.items.episodes import Episodes
from replaylake.datastore.replay.items.hindsight import Hindsight
from replaylake.datastore.replay.items.sequences import Sequences
from replaylake.datastore.replay.items.transitions import Transitions
from replaylake.datastore.replay.to_torch import to_torch

Make = Callable[..., Episode]


@pytest.fixture
def pieces(lake: Lake, make_episode: Make) -> Lake:
    """Episodes of several pieces, written in any order, with gaps and each kind of end."""
    rng = np.random.default_rng(0)
    dataset = lake.dataset("d")
    parts = []
    for number in range(9):
        name, step = f"e{number:02}", 0
        for _ in range(rng.integers(1, 5)):
            num = int(rng.integers(1, 7))
            parts.append((name, step, num))
            step += num + int(rng.random() < 0.2)
        name, step, num = parts.pop()
        end = [{"terminated": True}, {"truncated": True}, {"final_observation": None}][number % 3]
        parts.append((name, step, num, end))
    for index in rng.permutation(len(parts)):
        name, first, num, *end = parts[index]
        # Told apart by what is not a number: rewards and observations repeat in each episode.
        log_probs = np.full(num, -int(name[1:]) - 1.0)
        fields = {"first_step": first, "behavior_log_probs": log_probs, **(end[0] if end else {})}
        hidden = np.stack([np.arange(first, first + num)] * 3, axis=1).astype(np.float32)
        dataset.append([make_episode(name, num, extras={"hidden": hidden}, **fields)])
    return lake


def transitions(lake: Lake) -> dict[tuple[int, int], Any]:
    """By (episode, step): reward, terminated, and the step that is observed next, or None."""
    rows = lake.sql(
        "select episode_id, step, reward, terminated, next_observation from d.transitions"
    ).to_pylist()
    return {
        (int(row["episode_id"][1:]), row["step"]): (
            row["reward"],
            row["terminated"],
            None if row["next_observation"] is None else int(row["next_observation"][0]),
        )
        for row in rows
    }


def rows_of(lake: Lake, sql: str) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in lake.sql(sql).to_pylist()]


@pytest.mark.parametrize("frame_stack", [1, 3])
@pytest.mark.parametrize("n_step", [1, 4])
def test_returns_of_n_steps(pieces: Lake, n_step: int, frame_stack: int) -> None:
    known = transitions(pieces)
    view = pieces.dataset("d").snapshot().replay(frame_stack=frame_stack)
    sampler = view.shuffled(64, Transitions(0.5, n_step), seed=0)
    seen = set()
    while sampler.epoch == 0 and len(seen) < view.num_transitions:
        batch = sampler.sample()
        observations = batch.observations.reshape(len(batch), frame_stack, 2)
        following = batch.next_observations.reshape(len(batch), frame_stack, 2)
        for i in range(len(batch)):
            episode, step = int(-batch.behavior_log_probs[i]) - 1, int(observations[i, -1, 0])
            at, reward, discount = step, 0.0, 1.0
            for _ in range(n_step):
                more, terminated, comes = known.get((episode, at), (0, False, None))
                if comes is None and not terminated:
                    break
                reward += discount * more
                discount *= 0.0 if terminated else 0.5
                at += 1
                if terminated:
                    break
            assert (batch.rewards[i], batch.discounts[i]) == (reward, discount)
            assert following[i, -1, 0] == at or discount == 0
            stack = observations[i, :, 0].tolist()
            assert stack == sorted(stack)
            seen.add((episode, step))
    assert seen == {key for key, (_, ended, comes) in known.items() if ended or comes is not None}


@pytest.mark.parametrize("frame_stack", [1, 2])
def test_sequences_with_a_stored_state(pieces: Lake, frame_stack: int) -> None:
    steps = {(int(e[1:]), t) for e, t in rows_of(pieces, "select episode_id, step from d.steps")}
    view = pieces.dataset("d").snapshot().replay(columns=("hidden",), frame_stack=frame_stack)
    sampler = view.shuffled(8, Sequences(4), seed=0)
    found = []
    for _ in range(100):
        batch = to_torch(sampler.sample())
        assert batch.mask is not None
        assert batch.columns is not None
        observations: Any = batch.observations
        newest = observations if frame_stack == 1 else observations[:, :, -1]
        assert (batch.columns["hidden"] == newest[..., :1])[batch.mask].all()
        episodes = -batch.behavior_log_probs.long() - 1
        # No row holds steps of two episodes.
        assert (episodes[batch.mask] == episodes[:, :1].expand_as(episodes)[batch.mask]).all()
        numbers = zip(episodes[batch.mask], newest[..., 0][batch.mask], strict=True)
        found += [(int(episode), int(step)) for episode, step in numbers]
        if len(found) >= len(steps):
            break
    assert sorted(found) == sorted(steps)


def test_whole_episodes(pieces: Lake) -> None:
    wanted = rows_of(
        pieces,
        "select episode_id, count(*), max(step) + 1, bool_or(terminated or truncated) "
        "from d.steps group by all",
    )
    view = pieces.dataset("d").snapshot().replay()
    sampler = view.shuffled(3, Episodes(), seed=0)
    lengths = {}
    while sampler.epoch == 0 and len(lengths) < 9:
        batch = sampler.sample()
        assert batch.mask is not None
        for i, num in enumerate(batch.mask.sum(axis=1)):
            lengths[int(-batch.behavior_log_probs[i, 0]) - 1] = int(num)
            assert batch.observations[i, :num, 0].tolist() == list(range(num))
    assert lengths == {int(e[1:]): n for e, n, end, done in wanted if n == end and done}


def test_goals_of_a_dataset(lake: Lake) -> None:
    goal = Box((2,))
    space = Dict({"observation": Box((1,)), "achieved_goal": goal, "desired_goal": goal})
    dataset = lake.dataset("g")
    dataset.create(space, Discrete(2))
    steps = np.arange(5, dtype=np.float32)
    goals = np.stack([steps, steps], axis=1)
    for name, offset in (("a", 0), ("b", 100)):
        values = {"observation": steps[:, None], "achieved_goal": goals + offset}
        values["desired_goal"] = np.full_like(goals, -1)
        dataset.append(
            [
                Episode(
                    episode_id=name,
                    observations={key: value[:4] for key, value in values.items()},
                    actions=np.zeros(4, np.int64),
                    rewards=np.full(4, -1.0),
                    truncated=True,
                    final_observation={key: value[4] for key, value in values.items()},
                )
            ]
        )

    def reward(achieved: Array, desired: Array, info: dict[str, Any]) -> Array:
        return np.where((achieved == desired).all(axis=1), 0.0, -1.0)

    item = Hindsight(compute_reward=reward, seed=0, fraction=1.0)
    batch = dataset.snapshot().replay().uniform(256, item, seed=0).sample()
    seen: Any = batch.observations
    following: Any = batch.next_observations
    wanted = following["desired_goal"]
    assert (wanted // 100 == following["achieved_goal"] // 100).all()
    assert (wanted >= following["achieved_goal"]).all()
    assert (wanted == seen["desired_goal"]).all()
    at_goal = (wanted == following["achieved_goal"]).all(axis=1)
    assert batch.rewards.tolist() == np.where(at_goal, 0, -1).tolist()
