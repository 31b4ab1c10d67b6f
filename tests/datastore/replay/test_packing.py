"""Packing: every record against SQL, over layouts of rows that only a test would make."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Dict, Discrete, MultiDiscrete
from replaylake.datastore.errors import (
    SchemaMismatchError,
    ShardCorruptError,
    SpaceUnsupportedError,
)
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.query.expressions import (
    evaluate_rewards,
    select_episode_keys,
    select_steps,
)
from replaylake.datastore.replay.layout import make_layout
from replaylake.datastore.replay.packing import packing
from replaylake.datastore.replay.packing import record_filler as fill
from replaylake.datastore.replay.packing import row_ranges as stretches
from replaylake.datastore.replay.packing.packing import pack
from replaylake.datastore.replay.packing.row_keys import pair_name, row_keys
from replaylake.datastore.replay.records import PADDING, Packed
from replaylake.datastore.storage.table.shard import write_shard
from replaylake.datastore.storage.table.table import TableSnapshot

Make = Callable[..., Episode]
Key = tuple[str, str, int]
MASKS: Final = [[True, True], [True, False], [False, True]]
PIECES: Final = st.lists(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b"]),
            st.sampled_from(["", "left"]),
            st.integers(0, 8),
            st.integers(1, 3),
            st.sampled_from(["open", "terminated", "truncated"]),
            st.sampled_from(["none", "following", "other"]),
        ),
        min_size=1,
        max_size=5,
    ),
    min_size=1,
    max_size=4,
)


def packed(
    dataset: Dataset,
    table: TableSnapshot | None = None,
    *,
    columns: tuple[str, ...] = (),
    float64: bool = False,
    frame_stack: int = 1,
    **options: Any,
) -> Packed:
    snapshot = dataset.snapshot()
    table = table or snapshot.table
    layout = make_layout(
        snapshot.spec, table.schema, columns, float64=float64, frame_stack=frame_stack
    )
    return pack(table, layout, **options)


def appended(dataset: Dataset, commits: list[Any], make_episode: Make) -> None:
    """Append pieces of episodes; a step that is there twice is left out."""
    dataset.create(Box((2,)), Discrete(2), mask_size=2)
    taken: set[Key] = set()
    for pieces in commits:
        episodes = []
        for name, agent, first, num, end, final in pieces:
            steps = {(name, agent, step) for step in range(first, first + num)}
            if steps & taken:
                continue
            taken |= steps
            fields: dict[str, Any] = {"agent_id": agent, "first_step": first, end: True}
            fields.pop("open", None)
            if final != "following":
                fields["final_observation"] = None if final == "none" else np.full(2, 99, "f4")
            fields["action_masks"] = np.array([MASKS[(first + t) % 3] for t in range(num)])
            fields["actions"] = [int(not mask[0]) for mask in fields["action_masks"]]
            fields["behavior_log_probs"] = -np.arange(first, first + num, dtype=np.float32)
            episodes.append(make_episode(name, num, **fields))
        if episodes:
            dataset.append(episodes)


def by_key(dataset: Dataset) -> dict[Key, dict[str, Any]]:
    rows = dataset.snapshot().sql("SELECT * FROM transitions").to_pylist()
    return {(row["episode_id"], row["agent_id"], row["step"]): row for row in rows}


def stacked(rows: dict[Key, dict[str, Any]], key: Key, frame_stack: int) -> list[list[float]]:
    """Return the observations that lead to a step, told from SQL's rows alone."""
    name, agent, step = key
    frames = [rows[key]["observation"]]
    while len(frames) < frame_stack:
        before = rows.get((name, agent, step - 1))
        is_cut = before is None or before["terminated"] or before["truncated"]
        if not is_cut and before["final_observation"] is not None:
            is_cut = before["final_observation"] != rows[name, agent, step]["observation"]
        if not is_cut:
            step -= 1
        frames.insert(0, rows[name, agent, step]["observation"])
    return frames


def check_rows(found: Packed, rows: dict[Key, dict[str, Any]], frame_stack: int) -> None:
    records = found.records.rows
    names = sorted({key[:2] for key in rows})
    keys = row_keys(
        [pair_name(*name) for name in names],
        np.array([names.index(key[:2]) for key in rows], np.int64),
        np.array([key[2] for key in rows], np.int32),
    )
    positions = {
        tuple(key): at
        for at, key in zip(found.steps, records["key"][found.steps].tolist(), strict=True)
    }
    assert len(positions) == found.num_steps == len(rows)
    bootstrappable = set(found.bootstrappable.tolist())
    for (key, row), row_key in zip(rows.items(), keys.tolist(), strict=True):
        at = int(positions[tuple(row_key)])
        record = records[at]
        assert record["observation"].tolist() == row["observation"]
        assert (record["action"], record["reward"]) == (row["action"], row["reward"])
        assert record["terminated"] == row["terminated"]
        assert record["behavior_log_prob"] == row["behavior_log_prob"]
        assert record["action_mask"].tolist() == row["action_mask"]
        following = row["next_observation"]
        assert record["bootstrappable"] == (following is not None or row["terminated"])
        assert (at in bootstrappable) == record["bootstrappable"]
        assert records["observation"][at + 1].tolist() == (following or row["observation"])
        after = rows.get((*key[:2], key[2] + 1))
        has_ended = row["terminated"] or row["truncated"] or after is None
        if following is not None or not has_ended:
            mask = [True, True] if has_ended else after["action_mask"]
            assert records["action_mask"][at + 1].tolist() == mask
        window = records["observation"][at - frame_stack + 1 : at + 1]
        assert window.tolist() == stacked(rows, key, frame_stack)
        left = records["steps_left"][at - frame_stack + 1 : at + 1]
        assert left.tolist() == list(
            range(record["steps_left"] + frame_stack - 1, record["steps_left"] - 1, -1)
        )
        assert records["steps_left"][at + record["steps_left"]] == 0


def check_runs(found: Packed, rows: dict[Key, dict[str, Any]], frame_stack: int) -> None:
    runs, records = found.runs, found.records.rows
    assert runs.lengths.sum() == len(rows)
    assert len(records) == len(rows) + len(runs) * frame_stack + PADDING
    assert not found.records.words[-PADDING:].any()
    assert np.array_equal(records["steps_left"][runs.starts], runs.lengths)
    tails = runs.starts + runs.lengths
    links = records["key"][tails, 0]
    for run in range(len(runs)):
        is_linked = run + 1 < len(runs) and runs.offsets[run + 1] > 0
        assert links[run] == (runs.starts[run + 1] + 1 if is_linked else 0)
        if is_linked:
            assert runs.offsets[run + 1] == runs.offsets[run] + runs.lengths[run]
            assert runs.first_steps[run + 1] == runs.first_steps[run] + runs.lengths[run]
            heads = runs.starts[run + 1]
            assert np.array_equal(records["observation"][tails[run]], records["observation"][heads])
    assert found.records.has_links == bool(links.any())


def test_one_row_group_is_packed_without_a_thread(
    lake: Lake, make_episode: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a commit that is followed is: starting threads would take most of the time."""
    dataset = lake.dataset("d")
    dataset.append([make_episode("a", 5)])
    snapshot = dataset.snapshot().table
    layout = make_layout(dataset.snapshot().spec, snapshot.schema, ())
    started: list[int] = []
    monkeypatch.setattr(threading.Thread, "start", lambda thread: started.append(1))
    told: list[tuple[int, int]] = []
    found = pack(snapshot, layout, on_progress=lambda *counts: told.append(counts))
    assert found.num_steps == 5
    assert found.records.rows["steps_left"][:6].tolist() == [5, 4, 3, 2, 1, 0]
    assert not started
    assert told == [(1, 1)]


@pytest.fixture(params=[1, 3, 8192])
def rows_at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Stretches and blocks that end after so many rows, as they do in large row groups."""
    monkeypatch.setattr(fill, "_ROWS_AT_ONCE", request.param)
    monkeypatch.setattr(stretches, "_ROWS_AT_ONCE", request.param + 1)
    monkeypatch.setattr(packing, "_POSITIONS_AT_ONCE", request.param)
    return request.param


@pytest.mark.slow
@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(commits=PIECES, frame_stack=st.sampled_from([1, 3]), random=st.randoms())
def test_every_record_is_what_sql_says(
    tmp_path_factory: pytest.TempPathFactory,
    make_episode: Make,
    rows_at_once: int,
    commits: list[Any],
    frame_stack: int,
    random: Any,
) -> None:
    """Over random pieces, gaps, ends and agents, and over the same rows in any order."""
    dataset = open_lake(tmp_path_factory.mktemp("l"), create=True).dataset("d")
    appended(dataset, commits, make_episode)
    table = dataset.snapshot().table
    rows = by_key(dataset)
    data = table.read()
    order = list(range(data.num_rows))
    random.shuffle(order)
    entry = write_shard(table.storage, table.root, data.take(order))
    for snapshot in (table, replace(table, files=(entry,))):
        found = packed(dataset, snapshot, frame_stack=frame_stack)
        check_rows(found, rows, frame_stack)
        check_runs(found, rows, frame_stack)
        assert found.num_episodes == len({key[:2] for key in rows})


@pytest.mark.slow
@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(commits=PIECES)
def test_filters_keep_and_start_what_sql_selects(
    tmp_path_factory: pytest.TempPathFactory,
    make_episode: Make,
    rows_at_once: int,
    commits: list[Any],
) -> None:
    dataset = open_lake(tmp_path_factory.mktemp("l"), create=True).dataset("d")
    appended(dataset, commits, make_episode)
    table = dataset.snapshot().table
    rows = {key: row for key, row in by_key(dataset).items() if key[0] == "a"}
    found = packed(
        dataset,
        selected=select_episode_keys(table, "episode_id = 'a'"),
        rewards=evaluate_rewards(table, "reward"),
    )
    check_rows(found, rows, 1)
    started = packed(
        dataset,
        selected=select_episode_keys(table, "episode_id = 'a'"),
        start_flags=select_steps(table, "step % 2 = 1"),
    )
    assert np.array_equal(started.records.words, found.records.words)
    assert started.num_steps == found.num_steps
    odd = {key for key in rows if key[2] % 2}
    assert len(started.steps) == len(odd)
    assert set(started.steps) <= set(found.steps)
    assert set(started.bootstrappable) == set(started.steps) & set(found.bootstrappable)


def test_episodes_come_in_order_of_their_first_appearance(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    open_ended = {"final_observation": None}
    dataset.append([make_episode("z", 2, first_step=2), make_episode("a", 1)])
    dataset.append([make_episode("z", 2, **open_ended), make_episode("m", 1)])
    found = packed(dataset)
    assert found.records.rows["reward"][found.steps].tolist() == [1, 2, 3, 4, 1, 1]
    assert found.runs.lengths.tolist() == [4, 1, 1]
    assert found.runs.first_steps.tolist() == [0, 0, 0]


def test_runs_know_how_they_end(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode("a", 2, terminated=True), make_episode("b", 1)])
    dataset.append([make_episode("c", 1, truncated=True, final_observation=None)])
    found = packed(dataset)
    assert found.runs.ended.tolist() == [1, 0, 1]
    assert found.bootstrappable.tolist() == [0, 1, 3]


def test_a_block_keeps_nothing_of_the_one_before(
    lake: Lake, make_episode: Make, rows_at_once: int
) -> None:
    dataset = lake.dataset("d")
    dataset.create(Box((2,)), Discrete(2), mask_size=2)
    ended = {"terminated": True, "action_masks": np.array([[True, False]])}
    first = [make_episode("a", 1, **ended), make_episode("b", 2, final_observation=None)]
    dataset.append([*first, make_episode("c", 2), make_episode("d", 1)])
    found = packed(dataset)
    rows = found.records.rows[found.steps]
    assert rows["terminated"].tolist() == [True] + [False] * 5
    assert rows["bootstrappable"].tolist() == [True, True, False, True, True, True]
    assert rows["action_mask"].all(axis=1).tolist() == [False] + [True] * 5


def test_a_step_that_is_there_twice_is_packed_twice(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode("a", 3, terminated=True)])
    table = dataset.snapshot().table
    found = packed(dataset, replace(table, files=table.files * 2))
    assert (found.num_steps, found.num_episodes) == (6, 1)
    assert found.runs.lengths.tolist() == [3, 3]
    assert not found.records.has_links


def test_arrays_are_asked_for_when_their_size_is_known(
    lake: Lake, make_episode: Make, tmp_path: Path
) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode("a", 3, terminated=True), make_episode("b", 2)])
    asked = []

    def mapped(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        asked.append((name, shape, dtype))
        return np.lib.format.open_memmap(tmp_path / name, "w+", dtype, shape)

    found = packed(dataset, allocate=mapped, frame_stack=2)
    words = found.records.layout.num_words
    assert asked == [
        ("records", (9 + PADDING, words), np.dtype(np.uint64)),
        ("steps", (5,), np.dtype(np.int64)),
    ]
    assert found.bootstrappable is found.steps
    assert np.array_equal(found.records.words, packed(dataset, frame_stack=2).records.words)

    asked.clear()
    packed(dataset, allocate=mapped, start_flags=np.zeros(5, np.bool_))
    assert [name for name, _, _ in asked] == ["records"]
    asked.clear()
    packed(
        dataset, allocate=mapped, selected=select_episode_keys(dataset.snapshot().table, "false")
    )
    assert asked == []


def test_nothing_is_decoded_that_does_not_match_its_sha256(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode("a")])
    dataset.append([make_episode("b")])
    table = dataset.snapshot().table
    path = table.paths()[1]
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    asked: list[str] = []

    def allocate(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        asked.append(name)
        return np.zeros(shape, dtype)

    with pytest.raises(ShardCorruptError, match=path.name):
        packed(dataset, allocate=allocate)
    assert asked == []


def test_chains_of_short_runs_are_stacked(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    # Every piece ends in its final observation: a run each, and shorter than the stack.
    for first in (3, 1, 0, 2):
        dataset.append([make_episode("a", 1, first_step=first)])
    dataset.append([make_episode("a", 2, first_step=4, terminated=True)])
    found = packed(dataset, frame_stack=4)
    assert found.runs.lengths.tolist() == [1, 1, 1, 1, 2]
    assert found.runs.offsets.tolist() == [0, 1, 2, 3, 4]
    first, last = found.steps[0], found.steps[-1]
    observations = found.records.rows["observation"][..., 0]
    assert observations[first - 3 : first + 2].tolist() == [0, 0, 0, 0, 1]
    assert observations[last - 3 : last + 2].tolist() == [2, 3, 4, 5, 6]
    assert observations[found.steps[3] - 3 : found.steps[3] + 1].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 2)])
def test_frames(lake: Lake, make_episode: Make, rows_at_once: int, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (8, *shape)).astype(np.uint8)
    dataset = lake.dataset("d")
    one = {"observations": frames[:5], "final_observation": frames[5], "terminated": True}
    two = {"observations": frames[6:], "final_observation": None, "truncated": True}
    dataset.append([make_episode("a", 5, **one), make_episode("b", 2, **two)])
    found = packed(dataset, frame_stack=2)
    observations = found.records.rows["observation"]
    expected = [0, 0, 1, 2, 3, 4, 5, 6, 6, 7, 7]
    assert np.array_equal(observations[: len(expected)], frames[expected])
    assert found.records.layout.dtype["observation"].shape == shape


def test_nested_spaces(lake: Lake, make_episode: Make, rows_at_once: int) -> None:
    dataset = lake.dataset("d")
    cameras = np.arange(3 * 6, dtype=np.uint8).reshape(3, 2, 3)
    speeds = np.arange(3, dtype=np.float64)
    counts = np.arange(6).reshape(3, 2)

    def observation(at: Any) -> dict[str, Any]:
        return {"camera": cameras[at], "inner": {"speed": speeds[at], "counts": counts[at]}}

    inner = Dict({"speed": Box((), "float64"), "counts": MultiDiscrete((9, 9))})
    space = Dict({"camera": Box((2, 3), "uint8", 0, 255), "inner": inner})
    dataset.create(space, Discrete(2))
    fields = {"observations": observation(slice(0, 2)), "final_observation": observation(2)}
    dataset.append([make_episode("a", 2, **fields), make_episode("b", 2, **fields)])
    dataset.append([make_episode("c", 2, **(fields | {"final_observation": None}))])
    records = packed(dataset).records
    rows = records.rows
    for first in (0, 3):
        assert np.array_equal(rows["observation.camera"][first : first + 3], cameras)
        assert rows["observation.inner.speed"][first : first + 3].tolist() == [0, 1, 2]
        assert np.array_equal(rows["observation.inner.counts"][first : first + 3], counts)
    assert rows["observation.inner.speed"][6:9].tolist() == [0, 1, 1]
    assert records.layout.dtype["observation.inner.speed"] == np.float32


def test_further_columns(lake: Lake, make_episode: Make, rows_at_once: int) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode("a", 1, actions=[1])])
    extras: dict[str, Any] = {
        "hidden": np.array([[1.0, 2.0], [3.0, 4.0]]),
        "cost": pa.array([0.5, None]),
        "count": np.array([7, 8]),
        "ids": pa.array([[1, None], [2, 3]], pa.list_(pa.int32(), 2)),
        "logits": pa.array([[1.0, None], None], pa.list_(pa.float32(), 2)),
    }
    dataset.append([make_episode("b", 2, extras=extras, policy_versions=np.full(2, 3))])
    known = select_episode_keys(dataset.snapshot().table, "episode_id = 'b'")
    columns = ("hidden", "cost", "policy_version", "logits", "reward", "final_observation")
    found = packed(dataset, columns=columns)
    rows = found.records.rows[found.steps]
    assert found.records.layout.dtype["column.hidden"].base == np.float32
    values = {name: rows[f"column.{name}"].tolist() for name in columns}
    nan = math.nan
    np.testing.assert_equal(values["hidden"], [[nan, nan], [1, 2], [3, 4]])
    np.testing.assert_equal(values["cost"], [nan, 0.5, nan])
    np.testing.assert_equal(values["logits"], [[nan, nan], [1, nan], [nan, nan]])
    assert values["policy_version"] == [-1, 3, 3]
    assert values["reward"] == [1, 1, 2]
    np.testing.assert_equal(values["final_observation"], [[1, -1], [nan, nan], [2, -2]])
    exact = packed(dataset, columns=("hidden",), float64=True)
    assert exact.records.layout.dtype["column.hidden"].base == np.float64
    with pytest.raises(
        SchemaMismatchError, match="column 'count': found 1 nulls in 1 steps, expected"
    ):
        packed(dataset, columns=("count",))
    with pytest.raises(
        SchemaMismatchError, match=r"column 'ids': found 1 nulls in [12] steps, expected"
    ):
        packed(dataset, columns=("ids",), selected=known)
    rows = packed(dataset, columns=("count",), selected=known).records.rows
    assert rows["column.count"][:2].tolist() == [7, 8]


def test_further_columns_beside_rewards_that_replace_the_logged(
    lake: Lake, make_episode: Make
) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode("a", 2), make_episode("b", 1)])
    table = dataset.snapshot().table
    found = packed(
        dataset,
        columns=("reward",),
        rewards=evaluate_rewards(table, "10 * reward"),
        selected=select_episode_keys(table, "num_steps = 2"),
    )
    rows = found.records.rows[found.steps]
    assert rows["reward"].tolist() == [10, 20]
    assert rows["column.reward"].tolist() == [1, 2]


def test_numbers_beyond_float32(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    large = {"observations": np.array([[1e300], [1.0], [0.0]]), "final_observation": None}
    dataset.append(
        [
            make_episode("a", 3, **large),
            make_episode("b", 3, **(large | {"observations": np.zeros((3, 1))})),
        ]
    )
    with pytest.raises(
        SpaceUnsupportedError, match=r"observation: found 1e\+300, expected numbers"
    ):
        packed(dataset)
    kept = packed(dataset, float64=True).records.rows["observation"]
    assert kept[:3].tolist() == [[1e300], [1.0], [0.0]]
    without = select_episode_keys(dataset.snapshot().table, "episode_id = 'b'")
    assert packed(dataset, selected=without).num_steps == 3


def test_log_probs_that_are_not_known(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    known = make_episode("b", 1, behavior_log_probs=np.array([-0.5], np.float32))
    dataset.append([make_episode("a", 2), known])
    found = packed(dataset)
    np.testing.assert_equal(
        found.records.rows["behavior_log_prob"][found.steps], [math.nan, math.nan, -0.5]
    )


def test_one_step_episodes_in_several_shards(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    num = 4_000
    one = make_episode("e", 1, terminated=True)
    every = [replace(one, episode_id=f"e/{i}", rewards=np.array([float(i)])) for i in range(num)]
    dataset.append(every[:3_000])
    dataset.append(every[3_000:])
    found = packed(dataset)
    assert (found.num_episodes, found.num_steps, len(found.runs)) == (num, num, num)
    rows = found.records.rows[found.steps]
    assert rows["reward"].tolist() == list(range(num))
    names = [pair_name(f"e/{i}", "") for i in range(num)]
    keys = row_keys(names, np.arange(num), np.zeros(num, np.int32))
    assert np.array_equal(rows["key"], keys)
