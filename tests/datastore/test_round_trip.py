"""Values of every space come back exactly: through SQL, the table, replay and another engine."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deltalake
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import to_numpy
from replaylake.datastore.episodes.spaces import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    Text,
    Tuple,
    children,
    take,
)
from replaylake.datastore.errors import EpisodeInvalidError, SchemaMismatchError
from replaylake.datastore.lake.lake import Lake, open_lake

_T = 4  # steps, and one value more for the final observation
_DTYPES = ("float32", "float64", "uint8", "int8", "int16", "int32", "int64")
_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6)


def boxes() -> st.SearchStrategy[Space]:
    shapes = st.lists(st.integers(1, 3), max_size=3).map(tuple)
    return st.builds(Box, shapes, st.sampled_from(_DTYPES))


def leaf_spaces() -> st.SearchStrategy[Space]:
    sizes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)
    return st.one_of(
        boxes(),
        st.builds(Discrete, st.integers(1, 9), start=st.integers(-3, 3)),
        st.builds(MultiDiscrete, sizes),
        st.builds(MultiBinary, st.integers(1, 4)),
        st.just(Text()),
    )


def spaces() -> st.SearchStrategy[Space]:
    keys = st.sampled_from(["camera", "Speed", "x_1", "select"])
    return st.recursive(
        leaf_spaces(),
        lambda inner: st.one_of(
            st.dictionaries(keys, inner, min_size=1, max_size=3).map(Dict),
            st.lists(inner, min_size=1, max_size=3).map(lambda parts: Tuple(tuple(parts))),
        ),
        max_leaves=4,
    )


def values(space: Space, num: int) -> st.SearchStrategy[Any]:
    """Draw `num` values, with the extremes of their dtype: -0.0, subnormals and greatest ints."""
    if isinstance(space, Dict | Tuple):
        return st.fixed_dictionaries({k: values(s, num) for k, s in children(space).items()})
    if isinstance(space, Text):
        return st.lists(_text, min_size=num, max_size=num).map(lambda t: np.array(t, dtype=object))
    if isinstance(space, Discrete):
        ints = st.integers(space.start, space.start + space.n - 1)
        return hnp.arrays(np.int64, (num,), elements=ints)
    if isinstance(space, MultiDiscrete):
        columns = [hnp.arrays(np.int64, (num,), elements=st.integers(0, n - 1)) for n in space.nvec]
        return st.tuples(*columns).map(lambda parts: np.stack(parts, axis=1))
    if isinstance(space, MultiBinary):
        return hnp.arrays(np.int8, (num, space.n), elements=st.integers(0, 1))
    assert isinstance(space, Box)
    dtype = np.dtype(space.dtype)
    elements: Any = hnp.from_dtype(dtype, allow_nan=False, allow_infinity=False)
    return hnp.arrays(dtype, (num, *space.shape), elements=elements)


def assert_same(found: Any, expected: Any) -> None:
    """Compare to the last bit: -0.0 is not 0.0."""
    if isinstance(expected, Mapping):
        assert set(found) == set(expected)
        for key, part in expected.items():
            assert_same(found[key], part)
    elif np.asarray(expected).dtype == object:
        assert list(found) == list(expected)
    else:
        found, expected = np.asarray(found), np.asarray(expected)
        assert found.shape == expected.shape
        assert found.tobytes() == expected.astype(found.dtype).tobytes()


@pytest.mark.slow
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_every_space_comes_back_exactly(data: Any) -> None:
    observation_space, action_space = data.draw(spaces()), data.draw(spaces())
    seen = data.draw(values(observation_space, _T + 1))
    actions = data.draw(values(action_space, _T))
    episode = Episode(
        "e/1",
        observations=take(seen, slice(0, _T)),
        actions=actions,
        rewards=data.draw(values(Box((), "float64"), _T)),
        truncated=True,
        final_observation=take(seen, _T),
        agent_id=data.draw(_text),
    )
    with tempfile.TemporaryDirectory() as folder:
        dataset = open_lake(Path(folder) / "lake", create=True).dataset("d")
        dataset.create(observation_space, action_space)
        dataset.append([episode])
        snapshot = dataset.snapshot()
        assert snapshot.spec.observation_space == observation_space
        assert snapshot.spec.action_space == action_space
        in_sql = snapshot.sql("SELECT * FROM steps ORDER BY step")
        for rows in (snapshot.table.read(), in_sql.cast(snapshot.table.schema)):
            assert_same(
                to_numpy(observation_space, rows.column("observation")), episode.observations
            )
            assert_same(to_numpy(action_space, rows.column("action")), episode.actions)
            final = rows.column("final_observation").slice(_T - 1)
            assert_same(take(to_numpy(observation_space, final), 0), episode.final_observation)
            assert_same(rows.column("reward").to_numpy(), episode.rewards)
            assert rows.column("agent_id").to_pylist() == [episode.agent_id] * _T
        followed = snapshot.sql("SELECT next_observation AS n FROM transitions ORDER BY step")
        column = followed.column("n").cast(snapshot.table.schema.field("observation").type)
        assert_same(to_numpy(observation_space, column), take(seen, slice(1, None)))
        theirs = deltalake.DeltaTable(str(dataset.path)).to_pyarrow_table()
        assert theirs.num_rows == _T


@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
def test_what_is_sampled_is_what_was_written(data: Any) -> None:
    """Replay decodes the kinds of spaces that networks take; float64 becomes float32."""
    shape = data.draw(st.lists(st.integers(1, 3), max_size=3).map(tuple))
    space = Box(shape, data.draw(st.sampled_from(["float32", "uint8"])))
    seen = data.draw(values(space, _T + 1))
    action_space = data.draw(st.sampled_from([Discrete(4), MultiDiscrete((2, 3)), Box((2,))]))
    actions = data.draw(values(action_space, _T))
    with tempfile.TemporaryDirectory() as folder:
        dataset = open_lake(Path(folder) / "lake", create=True).dataset("d")
        dataset.create(space, action_space)
        dataset.append(
            [Episode("e", seen[:_T], actions, np.arange(_T), True, False, seen[_T], "left")]
        )
        view = dataset.snapshot().replay()
        assert view.num_transitions == _T
        batch = view.uniform(32, seed=0).sample()
        steps = batch.rewards.astype(int)
        assert_same(batch.observations, seen[steps])
        assert_same(batch.next_observations, seen[steps + 1])
        assert_same(batch.actions, actions[steps])


def _wheeled(name: str, agent: str, *, first: float = 0.0) -> Episode:
    numbers = np.array([0.1, -0.0, 5e-324, 1.7976931348623157e308]) + 0.0 * first
    return Episode(
        name,
        observations=numbers[:, None],
        actions=np.array([0, 1, 1, 0]),
        rewards=np.array([0.1, 1 / 3, -0.0, 1e-300]),
        terminated=True,
        agent_id=agent,
        env_steps=np.array([0, 2, 4, 6]),
    )


def test_float64_and_several_agents(lake: Lake) -> None:
    dataset = lake.dataset("d")
    agents = ["left", "right", "", "rück"]
    dataset.append([_wheeled("e", agent) for agent in agents])
    rows = dataset.snapshot().sql("SELECT * FROM steps ORDER BY agent_id, step").to_pylist()
    keys = [(agent, step) for agent in sorted(agents) for step in range(4)]
    assert [(row["agent_id"], row["step"]) for row in rows] == keys
    assert [row["env_step"] for row in rows] == [0, 2, 4, 6] * 4
    expected = _wheeled("e", "")
    for row, t in zip(rows, itertools.cycle(range(4)), strict=False):
        assert np.float64(row["observation"][0]).tobytes() == expected.observations[t, 0].tobytes()
        assert np.float64(row["reward"]).tobytes() == expected.rewards[t].tobytes()
    found = dataset.snapshot().sql('SELECT count(*) AS n, min("return") AS r FROM episodes')
    assert found.to_pylist() == [{"n": 4, "r": float(np.sum(expected.rewards))}]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["observation", "action", "reward", "final_observation"])
def test_what_is_not_finite_is_refused_by_name(lake: Lake, value: float, where: str) -> None:
    arrays: dict[str, Any] = {
        "observation": np.zeros((3, 2)),
        "action": np.zeros((3, 1)),
        "reward": np.zeros(3),
        "final_observation": np.zeros(2),
    }
    arrays[where].flat[-1] = value
    episode = Episode(
        "e",
        arrays["observation"],
        arrays["action"],
        arrays["reward"],
        final_observation=arrays["final_observation"],
    )
    with pytest.raises(EpisodeInvalidError, match=f"episode e: {where}"):
        lake.dataset("d").append([episode])
    assert not lake.dataset("d").exists()


# --- drift ----------------------------------------------------------------------------------


def _plain(name: str, **fields: Any) -> Episode:
    given: dict[str, Any] = {
        "observations": {"camera": np.zeros((2, 4, 4), np.uint8), "speed": np.zeros((2, 3))},
        "actions": np.array([[0, 1], [1, 2]]),
        "rewards": np.ones(2),
        "extras": {"note": ["a", "b"], "logits": np.zeros((2, 3), np.float32)},
    }
    return Episode(name, **(given | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"observations": {"camera": np.zeros((2, 4, 5), np.uint8), "speed": np.zeros((2, 3))}},
            r"observation.camera: found shape \[4, 5\] a step, expected \[4, 4\]",
        ),
        (
            {"observations": {"camera": np.full((2, 4, 4), 300), "speed": np.zeros((2, 3))}},
            "observation.camera",
        ),
        (
            {"observations": {"camera": np.zeros((2, 4, 4), np.uint8)}},
            r"observation: found \['camera'\], expected the keys \['camera', 'speed'\]",
        ),
        (
            {"observations": {"camera": np.zeros((2, 4, 4), np.uint8), "speed": [["a"] * 3] * 2}},
            "observation.speed",
        ),
        ({"actions": np.array([[0, 1], [1, 9]])}, "action"),
        ({"actions": np.array([[0.5, 1], [1, 2]])}, "action"),
        ({"actions": np.array([0, 1])}, "action: found shape"),
        ({"extras": {"note": [1, 2], "logits": np.zeros((2, 3))}}, "column 'note'"),
        ({"extras": {"logits": np.zeros((2, 4), np.float32)}}, "column 'logits'"),
        ({"extras": {"logits": ["a", "b"]}}, "column 'logits'"),
        ({"extras": {"note": [b"a", b"b"]}}, "column 'note': expected string .*; found binary"),
        ({"extras": {"logits": [["1"] * 3] * 2}}, "column 'logits'"),
        ({"extras": {"Note": ["a", "b"]}}, "'Note'"),
        ({"action_masks": np.ones((2, 3), bool)}, "masks"),
    ],
)
def test_what_drifts_is_refused_with_its_name(lake: Lake, fields: Any, message: str) -> None:
    dataset = lake.dataset("d")
    dataset.append([_plain("a")])
    for write in (dataset.append, dataset.write):
        with pytest.raises((EpisodeInvalidError, SchemaMismatchError), match=message):
            write([_plain("b"), _plain("c", **fields)])
    with (
        dataset.writer() as writer,
        pytest.raises((EpisodeInvalidError, SchemaMismatchError), match=message),
    ):
        writer.write(_plain("c", **fields))
    assert dataset.snapshot().num_steps == 2


def test_new_columns_come_with_a_later_append(lake: Lake) -> None:
    dataset = lake.dataset("d")
    dataset.append([_plain("a")])
    first = dataset.snapshot()
    dataset.append([_plain("b", extras={"score": [0.5, None], "tags": [["x"], []]})])
    dataset.append([_plain("c", extras={"score": [1, 2], "when": np.array([1, 2], np.uint16)})])
    rows = dataset.snapshot().sql("SELECT * FROM steps WHERE step = 0 ORDER BY episode_id")
    assert rows["score"].to_pylist() == [None, 0.5, 1.0]
    assert rows["tags"].to_pylist() == [None, ["x"], None]
    assert rows["note"].to_pylist() == ["a", None, None]
    assert rows["when"].to_pylist() == [None, None, 1]
    assert "score" not in first.sql("SELECT * FROM steps").column_names
    theirs = deltalake.DeltaTable(str(dataset.path)).to_pyarrow_table()
    assert theirs.num_rows == 6
    assert set(rows.column_names) == set(theirs.column_names)
    assert json.dumps(dataset.snapshot().describe()["columns"])
