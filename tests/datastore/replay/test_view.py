from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import (
    ConfigInvalidError,
    EmptyReplayError,
    NotFoundError,
    SchemaMismatchError,
    ShardCorruptError,
    SpaceUnsupportedError,
)
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.replay.array_allocator import is_mapped
from replaylake.datastore.replay.items.transitions import Transitions
from replaylake.datastore.replay.view import ReplayView, concatenate

Make = Callable[..., Episode]
CLONING = Transitions(only_bootstrappable=False)


def transitions(view: ReplayView) -> set[tuple[float, ...]]:
    """(observation, action, reward, discount, next observation) of all that can be sampled."""
    found = set()
    sampler = view.uniform(256, Transitions(0.5), seed=0)
    for _ in range(20):
        batch = sampler.sample()
        assert isinstance(batch.observations, np.ndarray)
        assert isinstance(batch.next_observations, np.ndarray)
        rows = zip(
            batch.observations[:, 0].tolist(),
            batch.actions,
            batch.rewards.tolist(),
            batch.discounts.tolist(),
            batch.next_observations[:, 0].tolist(),
            strict=True,
        )
        found |= {tuple(float(x) for x in row) for row in rows}
    return found


def test_the_discount_and_successor_of_every_kind_of_end(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode("ended", 2, terminated=True)])
    assert transitions(dataset.snapshot().replay()) == {(0, 0, 1, 0.5, 1), (1, 1, 2, 0, 2)}
    lake.dataset("t").append([make_episode("cut", 2, truncated=True)])
    assert transitions(lake.dataset("t").snapshot().replay()) == {
        (0, 0, 1, 0.5, 1),
        (1, 1, 2, 0.5, 2),
    }
    unknown = {"final_observation": None}
    lake.dataset("u").append([make_episode("ended", 2, terminated=True, **unknown)])
    view = lake.dataset("u").snapshot().replay()
    # Its own observation stands in for the one that is missing; the discount of 0 hides it.
    assert transitions(view) == {(0, 0, 1, 0.5, 1), (1, 1, 2, 0, 1)}


def test_an_end_without_its_observation_cannot_be_bootstrapped(
    lake: Lake, make_episode: Make
) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode("cut", 2, truncated=True, final_observation=None)])
    dataset.append([make_episode("open", 3, final_observation=None)])
    view = dataset.snapshot().replay()
    assert (view.num_episodes, view.num_steps, view.num_transitions) == (2, 5, 3)
    assert transitions(view) == {(0, 0, 1, 0.5, 1), (1, 1, 2, 0.5, 2)}
    cloning = view.uniform(64, CLONING, seed=0)
    rewards = {reward for _ in range(5) for reward in cloning.sample().rewards.tolist()}
    assert rewards == {1, 2, 3}


def test_a_step_without_a_successor_is_marked(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode("cut", 2, truncated=True, final_observation=None)])
    dataset.append([make_episode("end", 2, terminated=True, final_observation=None)])
    view = dataset.snapshot().replay()
    batch = view.uniform(64, CLONING, seed=0).sample()
    # Of reward 2 there are two steps: the truncated one, and the terminated one of discount 0.
    found = set(zip(batch.rewards, batch.discounts > 0, batch.bootstrappable, strict=True))
    assert found == {(1, True, True), (2, True, False), (2, False, True)}
    assert view.uniform(64, seed=0).sample().bootstrappable.all()


def test_the_mask_after_a_piece_is_the_next_piece_s_first(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    dataset.create(Box((2,)), Discrete(2), mask_size=2)
    masks = np.array([[True, True], [True, True], [True, False], [False, True]])
    dataset.append([make_episode("e", 2, first_step=2, terminated=True, action_masks=masks[2:])])
    dataset.append([make_episode("e", 2, action_masks=masks[:2])])
    # Nothing follows a gap, an end, or another agent's piece.
    dataset.append([make_episode("gap", 2, action_masks=masks[:2])])
    dataset.append([make_episode("gap", 1, first_step=4, action_masks=masks[2:3])])
    batch = dataset.snapshot().replay("episode_id = 'e'").uniform(64, seed=0).sample()
    after = {r: m for r, m in zip(batch.rewards, batch.next_action_masks.tolist(), strict=True)}
    assert after == {1: [True, True], 2: [True, False], 3: [False, True], 4: [True, True]}
    batch = dataset.snapshot().replay("episode_id = 'gap'").uniform(64, seed=0).sample()
    assert batch.next_action_masks.all()


def test_a_dataset_named_twice(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode("a")])
    dataset.append([make_episode("b")])
    views = [dataset.snapshot(version).replay() for version in (1, 2)]
    with pytest.raises(
        ConfigInvalidError, match="replay of d, d: found d twice, expected each dataset"
    ):
        concatenate(views)


def test_nothing_to_bootstrap(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode("one", 1, final_observation=None)])
    view = dataset.snapshot().replay()
    with pytest.raises(EmptyReplayError, match="found 1 steps, none at which Transitions"):
        view.uniform(1, seed=0)
    assert len(view.uniform(4, CLONING, seed=0).sample()) == 4


def test_a_missing_step_is_never_crossed(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    unknown = {"final_observation": None}
    late = make_episode("e", 2, first_step=4, truncated=True)
    dataset.append([make_episode("e", 2, **unknown), late])
    view = dataset.snapshot().replay()
    assert (view.num_episodes, view.num_steps, view.num_transitions) == (1, 4, 3)
    assert transitions(view) == {(0, 0, 1, 0.5, 1), (4, 0, 5, 0.5, 5), (5, 1, 6, 0.5, 6)}


def test_pieces_in_any_order_over_any_shards_are_one_run(lake: Lake, make_episode: Make) -> None:
    whole, pieces = lake.dataset("whole"), lake.dataset("pieces")
    for dataset in (whole, pieces):
        dataset.create(Box((2,)), Discrete(2))
    whole.append([make_episode("a", 6, terminated=True), make_episode("b", 2, truncated=True)])
    unknown = {"final_observation": None}
    pieces.append([make_episode("a", 2, first_step=4, terminated=True)])
    pieces.append([make_episode("b", 2, truncated=True), make_episode("a", 2, **unknown)])
    pieces.append([make_episode("a", 2, first_step=2, **unknown)])
    one, other = (d.snapshot().replay() for d in (whole, pieces))
    assert np.sort(one.packed.records.rows["reward"]).tolist() == (
        np.sort(other.packed.records.rows["reward"]).tolist()
    )
    assert transitions(one) == transitions(other)
    assert one.num_transitions == other.num_transitions == 8


def test_agents_are_runs_of_their_own(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    names = ("left", "right")
    dataset.append([make_episode("g", 2, agent_id=name, terminated=True) for name in names])
    view = dataset.snapshot().replay()
    assert (view.num_episodes, view.num_transitions) == (2, 4)
    keys = view.packed.records.rows["key"][view.packed.steps]
    assert len({tuple(key) for key in keys.tolist()}) == 4


def test_keys_survive_another_layout(lake: Lake, make_episode: Make) -> None:
    one, other = lake.dataset("one"), lake.dataset("other")
    for dataset in (one, other):
        dataset.create(Box((2,)), Discrete(2))
    one.append([make_episode("a", 3), make_episode("b", 3)])
    other.append([make_episode("b", 3)])
    other.append([make_episode("a", 3)])

    def keys(dataset: Dataset) -> list[list[int]]:
        packed = dataset.snapshot().replay().packed
        return sorted(packed.records.rows["key"][packed.steps].tolist())

    assert keys(one) == keys(other)
    assert len({tuple(key) for key in keys(one)}) == 6


def test_where_selects_whole_episodes(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode("short", 1, terminated=True), make_episode("long", 4)])
    view = dataset.snapshot().replay('"return" >= 10')
    assert (view.num_episodes, view.num_steps) == (1, 4)
    assert transitions(view) == {(t, t % 2, t + 1, 0.5, t + 1) for t in range(4)}
    with pytest.raises(
        EmptyReplayError, match=r"replay of d@1: found no step where .*99.*expected"
    ):
        dataset.snapshot().replay("num_steps > 99")


def test_reward_replaces_the_logged_one(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode("b", 2, extras={"cost": [1.0, 3.0]}, terminated=True)])
    dataset.append([make_episode("a", 1, extras={"cost": [5.0]}, terminated=True)])
    view = dataset.snapshot().replay(reward="reward - 10 * cost")
    assert {row[2] for row in transitions(view)} == {1 - 10.0, 2 - 30.0, 1 - 50.0}
    selected = dataset.snapshot().replay("episode_id = 'a'", reward="-cost")
    assert transitions(selected) == {(0, 0, -5, 0, 1)}
    assert "cost" in (selected.selections[0].reward or "")


def test_an_empty_dataset(lake: Lake) -> None:
    lake.dataset("d").create(Box((2,)), Discrete(2))
    for where in (None, "terminated"):
        with pytest.raises(EmptyReplayError, match="replay of d@0: found no step"):
            lake.dataset("d").snapshot().replay(where, reward="reward * 2")


def test_a_damaged_shard_is_never_trained_on(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode()])
    snapshot = dataset.snapshot()
    (path,) = snapshot.table.paths()
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 3] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ShardCorruptError, match=path.name):
        snapshot.replay()


def test_progress_counts_shards(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    for i in range(3):
        dataset.append([make_episode(f"e{i}")])
    seen: list[tuple[int, int]] = []
    dataset.snapshot().replay(on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_text_cannot_be_packed(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode(observations=list("abc"), final_observation="d")])
    with pytest.raises(SpaceUnsupportedError, match="observation: found a Text space"):
        dataset.snapshot().replay()


def test_numbers_beyond_float32_are_refused(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode(rewards=[1.0, 1e300, 1.0])])
    with pytest.raises(
        SpaceUnsupportedError, match=r"reward: found 1e\+300, expected numbers that"
    ):
        dataset.snapshot().replay()
    assert dataset.snapshot().replay(reward="least(reward, 5)").num_steps == 3


def test_views_of_one_schema_join(lake: Lake, make_episode: Make) -> None:
    views = []
    for name in ("one", "two"):
        dataset = lake.dataset(name)
        dataset.append([make_episode(name, 2, terminated=True, rewards=[len(views), 7.0])])
        views.append(dataset.snapshot().replay())
    joined = concatenate(views)
    assert (joined.num_episodes, joined.num_steps, joined.num_transitions) == (2, 4, 4)
    assert [selection.dataset for selection in joined.selections] == ["one", "two"]
    assert transitions(joined) == transitions(views[0]) | transitions(views[1])
    assert concatenate(views[:1]) is views[0]
    with pytest.raises(EmptyReplayError, match="found no views"):
        concatenate([])


@pytest.mark.parametrize(
    "other",
    [{"actions": [0, 1, 2]}, {"observations": np.zeros((3, 2)), "final_observation": None}],
)
def test_views_of_other_spaces_do_not_join(
    lake: Lake, make_episode: Make, other: dict[str, Any]
) -> None:
    lake.dataset("one").append([make_episode()])
    lake.dataset("two").append([make_episode(**other)])
    one, two = (lake.dataset(name).snapshot().replay() for name in ("one", "two"))
    if "actions" in other:
        with pytest.raises(
            SchemaMismatchError, match="datasets one@1 and two@1: the action space is"
        ):
            concatenate([one, two])
    else:
        assert concatenate([one, two]).num_steps == 6, "both are decoded to float32"


@pytest.mark.parametrize(
    ("reward", "advice"),
    [("1 / 0", "nullif"), ("-1 / 0", "nullif"), ("NULL", "coalesce"), ("'nan'", "coalesce")],
)
def test_a_reward_that_is_not_finite_is_refused_with_what_helps(
    lake: Lake, make_episode: Make, reward: str, advice: str
) -> None:
    lake.dataset("one").append([make_episode()])
    with pytest.raises(SchemaMismatchError, match=advice):
        lake.dataset("one").snapshot().replay(reward=f"({reward})::DOUBLE")


@pytest.mark.slow
@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    commits=st.lists(
        st.lists(
            st.tuples(
                st.sampled_from(["a", "b"]),
                st.sampled_from(["", "left"]),
                st.integers(0, 5),
                st.integers(1, 3),
                st.sampled_from(["open", "terminated", "truncated"]),
                st.booleans(),
            ),
            min_size=1,
            max_size=3,
        ),
        min_size=1,
        max_size=4,
    )
)
def test_what_can_be_sampled_is_what_sql_calls_a_transition(
    tmp_path_factory: pytest.TempPathFactory, make_episode: Make, commits: list[Any]
) -> None:
    """Over random pieces, gaps, ends and agents; a step that is there twice is left out."""
    dataset = open_lake(tmp_path_factory.mktemp("l"), create=True).dataset("d")
    dataset.create(Box((2,)), Discrete(2))
    taken: set[tuple[str, str, int]] = set()
    for pieces in commits:
        episodes = []
        for name, agent, first, num, end, has_final in pieces:
            steps = {(name, agent, step) for step in range(first, first + num)}
            if steps & taken:
                continue
            taken |= steps
            fields = {"agent_id": agent, "first_step": first, "terminated": end == "terminated"}
            fields["truncated"] = end == "truncated"
            if not has_final:
                fields["final_observation"] = None
            episodes.append(make_episode(name, num, **fields))
        if episodes:
            dataset.append(episodes)
    snapshot = dataset.snapshot()
    rows = snapshot.sql(
        "SELECT observation[1] AS o, action AS a, reward AS r, "
        "CASE WHEN terminated THEN 0 ELSE 0.5 END::DOUBLE AS d, "
        "coalesce(next_observation, observation)[1] AS n FROM transitions "
        "WHERE terminated OR next_observation IS NOT NULL"
    ).to_pylist()
    view = snapshot.replay()
    assert view.num_steps == snapshot.num_steps
    assert view.num_transitions == len(rows)
    if rows:
        assert transitions(view) == {tuple(float(x) for x in row.values()) for row in rows}


Make = Callable[..., Episode]


@pytest.fixture
def pieces(lake: Lake, make_episode: Make) -> Lake:
    """Two datasets of an episode in two pieces, and a step that cannot be bootstrapped in `b`."""
    for name in "ab":
        lake.dataset(name).append([make_episode(name, 3)])
        rest: dict[str, Any] = {"first_step": 3, "truncated": True}
        if name == "b":
            rest["final_observation"] = None
        lake.dataset(name).append([make_episode(name, 2, **rest)])
    return lake


def both(lake: Lake, **options: Any) -> list[ReplayView]:
    return [lake.snapshot(name).replay(**options) for name in "ab"]


def rows(view: ReplayView, item: Transitions) -> set[tuple[float, ...]]:
    batch = view.uniform(512, item, seed=0).sample()
    fields = (batch.observations, batch.next_observations, batch.rewards, batch.discounts)
    return {tuple(row) for row in np.column_stack([np.asarray(f) for f in fields]).tolist()}


def test_links_lead_to_the_part_s_own_records(pieces: Lake) -> None:
    views = both(pieces)
    joined = concatenate(views)
    item = Transitions(0.5, n_step=3)
    assert rows(joined, item) == rows(views[0], item) | rows(views[1], item)
    assert joined.packed.records.has_links
    assert (joined.num_steps, joined.num_transitions, joined.num_episodes) == (10, 9, 2)
    assert joined.selections == views[0].selections + views[1].selections


def test_a_join_beyond_its_budget_is_mapped(pieces: Lake) -> None:
    views = both(pieces)
    in_memory, mapped = concatenate(views), concatenate(views, memory_budget_bytes=0)
    assert not is_mapped(in_memory.packed.records.words)
    assert is_mapped(mapped.packed.records.words)
    assert in_memory.packed.records.words.tobytes() == mapped.packed.records.words.tobytes()
    assert in_memory.packed.steps.tolist() == mapped.packed.steps.tolist()
    assert in_memory.packed.bootstrappable.tolist() == mapped.packed.bootstrappable.tolist()


def test_one_view_is_not_copied(pieces: Lake) -> None:
    (view, _) = both(pieces)
    assert concatenate([view], memory_budget_bytes=0) is view


@pytest.mark.parametrize(
    ("options", "name"),
    [({"frame_stack": 2}, "frame_stack"), ({"columns": ("step",)}, "columns")],
)
def test_views_of_other_options_do_not_join(
    pieces: Lake, options: dict[str, Any], name: str
) -> None:
    views = [pieces.snapshot("a").replay(), pieces.snapshot("b").replay(**options)]
    with pytest.raises(ConfigInvalidError, match=f"replay of a@2 and b@2: found {name}"):
        concatenate(views)


def test_masks_are_filled_in_along_with_links(lake: Lake, make_episode: Make) -> None:
    for first in (0, 2):
        lake.dataset("a").append([make_episode("a", 2, first_step=first)])
    masks = np.array([[True, False]] * 3)
    fields = {"actions": [0, 0, 0], "terminated": True, "action_masks": masks}
    lake.dataset("b").append([make_episode("b", 3, **fields)])
    views = both(lake)
    assert views[1].has_masked_actions
    for joined in (concatenate(views), concatenate(views[::-1], memory_budget_bytes=0)):
        batch = joined.uniform(64, seed=0).sample()
        assert batch.action_masks is not None
        assert np.unique(batch.action_masks, axis=0).tolist() == [[True, False], [True, True]]
        assert joined.has_masked_actions
        assert set(batch.next_observations[:, 0]) == {1, 2, 3, 4}


# Sent to other processes

SAMPLE = """
import pickle, sys
import numpy as np
with open(sys.argv[1], "rb") as file:
    view = pickle.load(file)
from replaylake.datastore.replay.array_allocator import is_mapped
batch = view.uniform(64, seed=5).sample()
print(is_mapped(view.packed.records.words), batch.keys.sum(), batch.rewards.sum())
print(view.num_steps, view.num_episodes, view.has_masked_actions, [o.name for o in view.origins])
print([s.content_hash for s in view.selections])
"""


def sent(view: ReplayView, folder: Path) -> list[str]:
    """Return what another process, which knows no lake, sees of a view."""
    (folder / "pickle").write_bytes(pickle.dumps(view))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SAMPLE, str(folder / "pickle")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def seen(view: ReplayView) -> list[str]:
    batch = view.uniform(64, seed=5).sample()
    counts = (view.num_steps, view.num_episodes, view.has_masked_actions)
    return [
        f"{batch.keys.sum()} {batch.rewards.sum()}",
        f"{' '.join(map(str, counts))} {[origin.name for origin in view.origins]}",
        str([selection.content_hash for selection in view.selections]),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "is_mapped_there", "is_small"),
    [
        ({}, True, True),
        ({"memory_budget_bytes": 0}, True, True),
        ({"where": "num_steps > 1", "reward": "-reward", "frame_stack": 2}, True, True),
        ({"cache": False}, False, False),
    ],
)
def test_a_view_can_be_sent(
    pieces: Lake, tmp_path: Path, options: dict[str, Any], is_mapped_there: bool, is_small: bool
) -> None:
    view = pieces.snapshot("a").replay(**options)
    first, *rest = sent(view, tmp_path)
    assert [first.partition(" ")[2], *rest] == seen(view)
    assert first.startswith(str(is_mapped_there))
    words = view.packed.records.words
    assert (len(pickle.dumps(view)) < words.nbytes) == is_small, "the records are not sent"


@pytest.mark.slow
def test_joined_views_are_sent_by_their_parts(pieces: Lake, tmp_path: Path) -> None:
    joined = concatenate(both(pieces))
    assert len(pickle.dumps(joined)) < joined.packed.records.words.nbytes
    first, *rest = sent(joined, tmp_path)
    assert [first.partition(" ")[2], *rest] == seen(joined)
    # Parts that are not in the cache are joined in what is sent.
    uncached = concatenate([*both(pieces)[:1], pieces.snapshot("b").replay(cache=False)])
    first, *rest = sent(uncached, tmp_path)
    assert [first.partition(" ")[2], *rest] == seen(joined)
    assert joined.wait_cached() is None


@pytest.mark.slow
def test_a_view_of_a_remote_lake_can_be_sent(make_episode: Make, tmp_path: Path) -> None:
    lake = open_lake("memory://sent", create=True)
    lake.dataset("a").append([make_episode("a", 3, terminated=True)])
    view = lake.snapshot("a").replay()
    first, *rest = sent(view, tmp_path)
    assert [first.partition(" ")[2], *rest] == seen(view)


def test_what_no_other_process_can_map_is_not_sent(pieces: Lake) -> None:
    view = pieces.snapshot("a").replay(cache=False, memory_budget_bytes=0)
    with pytest.raises(
        ConfigInvalidError, match="larger than its memory budget and not in the cache"
    ):
        pickle.dumps(view)


def test_a_view_that_left_the_cache_on_its_way(pieces: Lake) -> None:
    view = pieces.snapshot("a").replay()
    data = pickle.dumps(view)
    folder = view.wait_cached()
    assert folder is not None
    os.rename(folder, folder.with_name("elsewhere"))
    with pytest.raises(NotFoundError, match="was removed from the cache after it was sent"):
        pickle.loads(data)
