"""Joined views, and views that are sent to other processes."""

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

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import ConfigInvalidError, NotFoundError
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.replay.array_allocator import is_mapped
from replaylake.datastore.replay.items.transitions import Transitions
from replaylake.datastore.replay.view import ReplayView, concatenate

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
    with pytest.raises(NotFoundError, match="found it gone from the cache since it was sent here"):
        pickle.loads(data)
