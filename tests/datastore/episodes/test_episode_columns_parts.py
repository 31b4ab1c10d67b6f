"""Parts of EpisodeColumns, and joined ones: as the episodes that they are, and as their rows."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.episode_columns import EpisodeColumns, TextColumn
from replaylake.datastore.episodes.rows import encode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.episodes.validation import validate_all
from replaylake.datastore.errors import EpisodeInvalidError

SPEC = DatasetSpec(Box((2,), "float32"), Discrete(3), mask_size=3)


def columns(name: str, *, optional: bool = True) -> EpisodeColumns:
    """Three episodes of 2, 1 and 3 steps; the second lacks what an episode may lack."""
    steps = Episode(
        episode_id="",
        observations=np.arange(12, dtype=np.float32).reshape(6, 2),
        actions=np.array([0, 1, 2, 0, 1, 2]),
        rewards=np.arange(6.0),
        action_masks=np.ones((6, 3), np.bool_) if optional else None,
        timestamps=np.arange(6) if optional else None,
        env_steps=np.arange(6) + 7 if optional else None,
        extras={"tag": pa.array([*"abcdef"])},
    )
    lacking = {
        n: np.array([False, True, False]) for n in ("action_masks", "timestamps", "env_steps")
    }
    ids = TextColumn(pa.array([f"{name}{i}" for i in range(3)]))
    return EpisodeColumns(
        steps,
        ids,
        np.array([2, 1, 3]),
        np.array([0, 4, 0]),
        np.array([True, False, True]),
        np.array([False, True, False]),
        np.array([[5.0, 5.0], [6.0, 6.0]], np.float32),
        source_ids=ids,
        has_final=np.array([True, False, True]),
        absent=lacking if optional else {},
    )


def rows_of(episodes: list[Episode] | EpisodeColumns) -> list[dict[str, object]]:
    ready = validate_all(episodes, SPEC.observation_space, SPEC.action_space)
    rows: list[dict[str, object]] = encode(ready, SPEC).to_pylist()
    return rows


def test_rows_are_those_of_the_episodes_one_by_one() -> None:
    whole = columns("e")
    assert (whole[1].timestamps, whole[1].final_observation) == (None, None)
    assert whole[2].final_observation.tolist() == [6.0, 6.0]
    rows = rows_of(whole)
    assert rows == rows_of(whole[:])
    assert [row["env_step"] for row in rows] == [7, 8, 4, 10, 11, 12]
    assert [row["timestamp"] is None for row in rows] == [False, False, True, False, False, False]


def test_parts_and_joined_columns_are_their_episodes() -> None:
    first, second = columns("a"), columns("b", optional=False)
    joined = first.concatenate([second])
    expected = rows_of([*first[:], *second[:]])
    assert rows_of(joined) == expected
    assert rows_of(joined.part(1, 5)) == expected[2:9]
    which = np.array([False, True, True, False, False, True])
    assert rows_of(joined.select(which)) == [*expected[2:6], *expected[9:]]
    with pytest.raises(ValueError, match="further columns"):
        first.concatenate([replace(second, steps=replace(second.steps, extras={}))])


def test_ids_that_are_there_twice_are_refused() -> None:
    once = columns("e")
    twice = once.part(0, 1).concatenate([once.part(0, 1)])
    with pytest.raises(EpisodeInvalidError, match="step 0 twice"):
        rows_of(twice)
