from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from replaylake.datastore.episodes.episode import Episode, validate
from replaylake.datastore.episodes.rows import encode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import Box, Dict, Discrete, Text
from replaylake.datastore.errors import EpisodeInvalidError, SchemaMismatchError

SPEC = DatasetSpec(Box((2,)), Discrete(2))
Make = Callable[..., Episode]


def columns(episodes: list[Episode], spec: DatasetSpec = SPEC) -> dict[str, list[Any]]:
    ready = [validate(e, spec.observation_space, spec.action_space) for e in episodes]
    table = encode(ready, spec)
    return {name: table[name].to_pylist() for name in table.column_names}


def test_the_row_rule(make_episode: Make) -> None:
    rows = columns(
        [
            make_episode("a", 2, terminated=True),
            make_episode("b", 1, first_step=5, agent_id="left", final_observation=None),
            make_episode("c", 2, truncated=True, source_episode_id="7"),
        ]
    )
    assert rows["episode_id"] == ["a", "a", "b", "c", "c"]
    assert rows["agent_id"] == ["", "", "left", "", ""]
    assert rows["step"] == [0, 1, 5, 0, 1]
    assert rows["env_step"] == [0, 1, 5, 0, 1]
    assert rows["observation"] == [[0, 0], [1, -1], [5, -5], [0, 0], [1, -1]]
    assert rows["final_observation"] == [None, [2, -2], None, None, [2, -2]]
    assert rows["action"] == [0, 1, 1, 0, 1]
    assert rows["reward"] == [1, 2, 6, 1, 2]
    assert rows["terminated"] == [False, True, False, False, False]
    assert rows["truncated"] == [False, False, False, False, True]
    assert rows["source_episode_id"] == [None, None, None, "7", "7"]
    for unknown in ("behavior_log_prob", "policy", "policy_version", "timestamp"):
        assert rows[unknown] == [None] * 5
    assert "action_mask" not in rows


def test_what_only_some_episodes_know(make_episode: Make) -> None:
    known = make_episode(
        "a",
        2,
        behavior_log_probs=[-0.5, np.nan],
        policies=["p", None],
        policy_versions=[3, 4],
        timestamps=[0, 1_000_000],
        env_steps=[10, 20],
    )
    rows = columns([make_episode("b", 1), known])
    assert rows["behavior_log_prob"] == [None, -0.5, None]
    assert rows["policy"] == [None, "p", None]
    assert rows["policy_version"] == [None, 3, 4]
    assert [time and time.timestamp() for time in rows["timestamp"]] == [None, 0.0, 1.0]
    assert rows["env_step"] == [0, 10, 20]


def test_masks(make_episode: Make) -> None:
    spec = DatasetSpec(Box((2,)), Discrete(2), mask_size=2)
    masked = make_episode("a", 2, action_masks=[[True, False], [True, True]])
    assert columns([masked, make_episode("b", 1)], spec)["action_mask"] == [
        [True, False],
        [True, True],
        None,
    ]
    wide = make_episode("wide", 1, action_masks=[[True] * 3])
    with pytest.raises(
        EpisodeInvalidError, match=r"episode wide: action_mask: found 3 .*expected 2"
    ):
        columns([wide], spec)
    with pytest.raises(SchemaMismatchError, match="found action masks, expected none"):
        columns([masked])


def test_a_step_that_is_there_twice(make_episode: Make) -> None:
    piece = make_episode("e", 3, first_step=2)
    columns([make_episode("e", 2), piece, make_episode("e", 2, agent_id="left")])
    with pytest.raises(EpisodeInvalidError, match="episode e: found step 2 twice"):
        columns([piece, make_episode("f", 3), make_episode("e", 3)])
    agents = [make_episode("e", 1, agent_id=name) for name in ("left", "left")]
    with pytest.raises(EpisodeInvalidError, match="found step 0 of agent 'left' twice"):
        columns(agents)


def test_a_mapping_is_null_as_a_whole_where_it_is_unknown(make_episode: Make) -> None:
    space = Dict({"camera": Box((1, 2), "uint8", 0, 255), "say": Text()})
    spec = DatasetSpec(space, Discrete(2))
    values = {"camera": np.zeros((2, 1, 2), np.uint8), "say": ["a", "b"]}
    final = {"camera": np.ones((1, 2), np.uint8), "say": "z"}
    known = make_episode("a", 2, observations=values, final_observation=final)
    unknown = make_episode("b", 2, observations=values, final_observation=None)
    rows = columns([unknown, known], spec)
    assert rows["final_observation"] == [None, None, None, {"camera": b"\1\1", "say": "z"}]
    assert rows["observation"][1] == {"camera": b"\0\0", "say": "b"}
    assert columns([unknown], spec)["final_observation"] == [None, None]


def test_further_columns(make_episode: Make) -> None:
    rows = columns(
        [
            make_episode("a", 2, extras={"note": ["x", None], "logits": np.zeros((2, 3))}),
            make_episode("b", 1, extras={"note": [None], "count": np.array([7], np.uint8)}),
        ]
    )
    assert rows["note"] == ["x", None, None]
    assert rows["logits"] == [[0, 0, 0], [0, 0, 0], None]
    assert rows["count"] == [None, None, 7]


def test_a_further_column_takes_the_type_that_holds_all_episodes(make_episode: Make) -> None:
    episodes = [make_episode("a", 1, extras={"n": [1]}), make_episode("b", 1, extras={"n": [0.5]})]
    assert columns(episodes)["n"] == [1.0, 0.5]
    mixed = [make_episode("a", 1, extras={"n": [1]}), make_episode("b", 1, extras={"n": ["x"]})]
    with pytest.raises(
        SchemaMismatchError, match="'n': found int64 and string in different episodes"
    ):
        columns(mixed)
    with pytest.raises(SchemaMismatchError, match="'n': found only nulls"):
        columns([make_episode("a", 1, extras={"n": [None]})])


def test_a_known_further_column_keeps_its_type(make_episode: Make) -> None:
    spec = DatasetSpec(Box((2,)), Discrete(2), None, {"n": pa.int64(), "s": pa.string()})
    rows = columns([make_episode("a", 1, extras={"n": [1.0], "s": [None]})], spec)
    assert (rows["n"], rows["s"]) == ([1], [None])
    with pytest.raises(SchemaMismatchError, match="'n': expected int64 as the dataset has it"):
        columns([make_episode("a", 1, extras={"n": [0.5]})], spec)
    with pytest.raises(SchemaMismatchError, match="'n': expected int64 as the dataset has it"):
        columns([make_episode("a", 1, extras={"n": ["x"]})], spec)


@pytest.mark.parametrize("name", ["reward", "Reward", "a-b", "next_observation"])
def test_names_of_further_columns(make_episode: Make, name: str) -> None:
    with pytest.raises(SchemaMismatchError, match=f"column '{name}': expected"):
        columns([make_episode("a", 1, extras={name: [1]})])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"episode_id": ""}, "episode_id: found ''"),
        ({"episode_id": "a\0b"}, "episode_id: found 'a.*without NUL"),
        ({"episode_id": 7}, "episode_id: found 7, expected a string"),
        ({"agent_id": None}, "agent_id: found None, expected a string"),
    ],
)
def test_ids_are_strings(make_episode: Make, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(EpisodeInvalidError, match=message):
        columns([make_episode("x", 1, **fields)])
