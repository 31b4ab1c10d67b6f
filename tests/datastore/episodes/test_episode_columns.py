from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.episode_columns import EpisodeColumns
from replaylake.datastore.episodes.rows import encode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import Box, Dict, Discrete, Text, take
from replaylake.datastore.episodes.validation import validate_all
from replaylake.datastore.errors import EpisodeInvalidError
from replaylake.datastore.lake.lake import open_lake

SPACE = Dict({"picture": Box((2, 3), "uint8", 0, 255), "at": Box((2,)), "said": Text()})
SPEC = DatasetSpec(SPACE, Discrete(3), mask_size=3)


def made(lengths: list[int], first_steps: list[int], seed: int, *, agents: bool) -> EpisodeColumns:
    """Return noise, as the columns of pieces."""
    rng = np.random.default_rng(seed)
    total, num = sum(lengths), len(lengths)

    def observations(count: int) -> dict[str, Any]:
        return {
            "picture": rng.integers(0, 256, (count, 2, 3)).astype(np.uint8),
            "at": rng.standard_normal((count, 2)).astype(np.float32),
            "said": np.array([str(value) for value in rng.integers(9, size=count)], dtype=object),
        }

    steps = Episode(
        "",
        observations(total),
        np.zeros(total, np.int64),
        rng.standard_normal(total),
        behavior_log_probs=np.where(rng.random(total) < 0.5, np.nan, -1).astype(np.float32),
        policies=np.array(["p", "q"], dtype=object)[rng.integers(2, size=total)],
        policy_versions=rng.integers(9, size=total),
        action_masks=np.ones((total, 3), np.bool_),
        extras={"worker": np.arange(total, dtype=np.int32), "state": rng.random((total, 2))},
    )
    ends = rng.integers(3, size=num)
    names = [f"agent_{i % 2}" for i in range(num)]
    return EpisodeColumns(
        steps,
        [f"test/{i // 2 if agents else i}" for i in range(num)],
        np.array(lengths),
        np.array(first_steps),
        ends == 1,
        ends == 2,
        observations(num),
        names if agents else None,
    )


pieces = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=8)


@settings(max_examples=40, deadline=None)
@given(pieces, st.integers(0, 99), st.booleans())
def test_the_rows_are_those_of_the_episodes_one_by_one(
    given_pieces: list[tuple[int, int]], seed: int, agents: bool
) -> None:
    lengths, first_steps = map(list, zip(*given_pieces, strict=True))
    joined = made(lengths, first_steps, seed, agents=agents)
    spaces = (SPEC.observation_space, SPEC.action_space)
    together = encode(validate_all(joined, *spaces), SPEC)
    assert together.equals(encode(validate_all(list(joined), *spaces), SPEC))
    assert together["step"].to_pylist() == [
        first + t for length, first in given_pieces for t in range(length)
    ]


def test_one_by_one_they_are_views() -> None:
    joined = made([2, 1, 3], [0, 4, 0], 0, agents=False)
    first, second, third = joined
    assert [len(first), len(second), len(third)] == [2, 1, 3] == [len(e) for e in joined[:]]
    assert joined[-1].episode_id == third.episode_id == "test/2"
    assert (second.first_step, second.agent_id) == (4, "")
    assert third.observations["at"].tolist() == joined.steps.observations["at"][3:].tolist()
    assert np.shares_memory(third.rewards, joined.steps.rewards)
    assert third.extras["worker"].tolist() == [3, 4, 5]
    assert first.final_observation["said"] == joined.final_observations["said"][0]
    with pytest.raises(IndexError):
        joined[3]


def test_the_door_names_the_one_that_does_not_fit(tmp_path: Any) -> None:
    dataset = open_lake(tmp_path, create=True).dataset("d")
    dataset.create(SPACE, Discrete(3), mask_size=3)
    joined = made([2, 1, 3], [0, 0, 0], 0, agents=False)
    joined.steps.observations["at"][4] = np.inf
    with pytest.raises(
        EpisodeInvalidError, match=r"episode test/2: observation.at at step 1: found"
    ):
        dataset.write(joined)
    joined.steps.observations["at"][4] = 0
    dataset.commit([dataset.write(joined)], producer="p", sequence=0)
    assert dataset.snapshot().num_steps == 6
    assert dataset.commit_info(1)["num_episodes"] == 3


def test_columns_that_do_not_go_together_are_refused() -> None:
    joined = made([2, 1], [0, 0], 0, agents=False)
    with pytest.raises(EpisodeInvalidError, match="2 episodes with 4 steps in 3 rows"):
        EpisodeColumns(**{**vars(joined), "lengths": np.array([2, 2])})
    with pytest.raises(EpisodeInvalidError, match=r"found \[1, 2, 2, 2, 2\] ids"):
        EpisodeColumns(**{**vars(joined), "episode_ids": ["a"]})


def test_a_step_that_is_there_twice_is_refused() -> None:
    joined = made([3, 2], [0, 2], 0, agents=False)
    twice = EpisodeColumns(**{**vars(joined), "episode_ids": ["test/0", "test/0"]})
    with pytest.raises(EpisodeInvalidError, match="episode test/0: found step 2 twice"):
        encode(twice, SPEC)


@pytest.mark.parametrize("space", [SPACE, SPACE.spaces["at"]])
def test_a_selection_may_lose_every_final_observation(space: Any) -> None:
    columns = made([2, 3], [0, 0], 0, agents=False)
    finals: Any = take(columns.final_observations, slice(0, 1))
    steps = columns.steps
    if space is not SPACE:
        steps = replace(steps, observations=steps.observations["at"])
        finals = finals["at"]
    columns = replace(
        columns, steps=steps, final_observations=finals, has_final=np.array([True, False])
    )
    spec = DatasetSpec(space, Discrete(3), mask_size=3)
    for selection in (columns.part(1, 2), columns.select(np.array([False, True]))):
        rows = encode(validate_all(selection, space, Discrete(3)), spec)
        assert rows["final_observation"].null_count == rows.num_rows == 3
