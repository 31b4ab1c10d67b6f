"""Views that are decoded once, kept, and mapped the next time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import (
    ConfigInvalidError,
    EmptyReplayError,
    NotFoundError,
    QueryRefusedError,
)
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.replay.array_allocator import is_mapped
from replaylake.datastore.replay.view import ReplayView

Make = Callable[..., Episode]


@pytest.fixture
def snapshot(lake: Lake, make_episode: Make) -> Snapshot:
    """Two episodes of 3 and 5 steps in two shards, the second one without its last observation."""
    dataset = lake.dataset("d")
    dataset.append([make_episode("a", 3, terminated=True)])
    dataset.append([make_episode("b", 5, truncated=True, final_observation=None)])
    return dataset.snapshot()


@pytest.fixture
def home(lake: Lake) -> Path:
    return lake.dataset("d").path / "_derived" / "replay"


def opened(snapshot: Snapshot, **options: Any) -> ReplayView:
    """Open a view, and wait until it is kept."""
    view = snapshot.replay(**options)
    view.wait_cached()
    return view


def assert_same(one: ReplayView, other: ReplayView) -> None:
    assert one.packed.records.words.tobytes() == other.packed.records.words.tobytes()
    assert one.packed.records.has_links == other.packed.records.has_links
    for name, array in vars(one.packed.runs).items():
        assert np.array_equal(array, getattr(other.packed.runs, name))
    assert np.array_equal(one.packed.steps, other.packed.steps)
    assert np.array_equal(one.packed.bootstrappable, other.packed.bootstrappable)
    assert (one.num_steps, one.num_episodes) == (other.num_steps, other.num_episodes)
    assert one.selections == other.selections
    batches = [view.uniform(32, seed=3).sample() for view in (one, other)]
    assert np.array_equal(batches[0].observations, batches[1].observations)
    assert np.array_equal(batches[0].keys, batches[1].keys)


def test_the_second_opening_maps_what_the_first_one_decoded(snapshot: Snapshot) -> None:
    told: list[tuple[int, int]] = []
    first = opened(snapshot, on_progress=lambda done, of: told.append((done, of)))
    assert told == [(1, 2), (2, 2)]
    assert not is_mapped(first.packed.records.words)
    second = snapshot.replay(on_progress=lambda done, of: told.append((done, of)))
    assert len(told) == 2, "nothing was decoded"
    assert is_mapped(second.packed.records.words)
    assert not second.packed.records.words.flags.writeable
    assert_same(first, second)
    assert first.wait_cached() == second.wait_cached()


def test_one_array_serves_for_both_where_every_step_can_be_bootstrapped(
    lake: Lake, make_episode: Make
) -> None:
    lake.dataset("d").append([make_episode("a", 3, terminated=True)])
    first = opened(lake.snapshot("d"))
    folder = first.wait_cached()
    assert folder is not None
    assert not (folder / "bootstrappable").exists()
    assert_same(first, lake.snapshot("d").replay())


@pytest.mark.parametrize("budget", [0, 1])
def test_a_view_beyond_its_budget_is_decoded_to_disk(snapshot: Snapshot, budget: int) -> None:
    in_memory = snapshot.replay(cache=False)
    mapped = opened(snapshot, memory_budget_bytes=budget)
    assert is_mapped(mapped.packed.records.words)
    assert not mapped.packed.records.words.flags.writeable
    assert_same(in_memory, mapped)
    assert_same(in_memory, snapshot.replay())


def test_a_budget_below_nothing_is_refused(snapshot: Snapshot) -> None:
    with pytest.raises(
        ConfigInvalidError, match="found memory_budget_bytes -1, expected a whole number of 0"
    ):
        snapshot.replay(memory_budget_bytes=-1)


def test_without_the_cache_no_trace_is_left(snapshot: Snapshot, home: Path) -> None:
    for budget in (None, 0):
        view = snapshot.replay(cache=False, memory_budget_bytes=budget)
        assert view.wait_cached() is None
        assert is_mapped(view.packed.records.words) == (budget == 0)
        assert view.uniform(8, seed=0).sample().rewards.shape == (8,)
    assert not home.exists()


@pytest.mark.parametrize(
    "options",
    [
        {"where": "terminated"},
        {"where_steps": "step > 0"},
        {"reward": "-reward"},
        {"columns": ("env_step",)},
        {"columns": ("env_step", "step")},
        {"columns": ("step", "env_step")},
        {"frame_stack": 2},
        {"float64": True},
    ],
    ids=str,
)
def test_each_query_is_a_view_of_its_own(
    snapshot: Snapshot, home: Path, options: dict[str, Any]
) -> None:
    plain, other = opened(snapshot), opened(snapshot, **options)
    assert plain.wait_cached() != other.wait_cached()
    assert_same(other, snapshot.replay(**options))
    assert_same(plain, snapshot.replay())


def test_each_version_is_a_view_of_its_own(
    snapshot: Snapshot, lake: Lake, make_episode: Make
) -> None:
    first = opened(snapshot)
    lake.dataset("d").append([make_episode("c", 2, terminated=True)])
    second = opened(lake.snapshot("d"))
    assert (first.num_steps, second.num_steps) == (8, 10)
    assert lake.snapshot("d@2").replay().wait_cached() == first.wait_cached()


def test_other_spellings_of_a_query_share_a_view(snapshot: Snapshot, home: Path) -> None:
    one = opened(snapshot, where='"return" >  2 AND terminated')
    other = snapshot.replay('("return">2) and (terminated)')
    assert is_mapped(other.packed.records.words)
    assert one.wait_cached() == other.wait_cached()
    # Known by its spelling from now on, without asking DuckDB; lineage names DuckDB's own.
    again = snapshot.replay('("return">2) and (terminated)')
    assert again.selections == one.selections
    assert len(list((home / "spelt").iterdir())) == 2
    with pytest.raises(QueryRefusedError):
        snapshot.replay("random() > 0.5")


@pytest.mark.parametrize("name", ["records", "steps", "bootstrappable", "runs", "view.json"])
@pytest.mark.parametrize("change", ["cut", "longer", "gone"])
def test_a_cached_view_of_another_size_is_made_again(
    snapshot: Snapshot, name: str, change: str
) -> None:
    first = opened(snapshot)
    folder = first.wait_cached()
    assert folder is not None
    path = folder / name
    data = path.read_bytes()
    path.unlink()
    if change != "gone":
        path.write_bytes(data[:-1] if change == "cut" else data + b"x")
    second = opened(snapshot)
    assert not is_mapped(second.packed.records.words)
    assert_same(first, second)
    assert second.wait_cached() == folder
    assert is_mapped(snapshot.replay().packed.records.words), "it is whole again"


def test_an_open_view_outlives_its_files(snapshot: Snapshot, home: Path) -> None:
    expected = opened(snapshot)
    view = snapshot.replay()
    for path in sorted(home.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert_same(expected, view)


def test_a_lake_that_cannot_be_written_to_works_from_memory(snapshot: Snapshot, home: Path) -> None:
    home.parent.mkdir()
    home.write_text("in the way")
    view = snapshot.replay()
    assert view.wait_cached() is None
    assert "File exists" in view.cache_failure or "Not a directory" in view.cache_failure
    assert view.uniform(8, seed=0).sample().rewards.shape == (8,)
    mapped = snapshot.replay(memory_budget_bytes=0)
    assert is_mapped(mapped.packed.records.words)
    assert_same(view, mapped)


def test_shards_that_are_gone_are_not_replayed_from_the_cache(
    snapshot: Snapshot, lake: Lake
) -> None:
    opened(snapshot)
    lake.dataset("d").table.storage.delete([f"d/{snapshot.files[0].path}"])
    with pytest.raises(Exception, match="No such file or directory"):
        snapshot.replay()


@pytest.mark.slow
def test_where_steps_limits_starts_and_nothing_else(snapshot: Snapshot) -> None:
    view = snapshot.replay(where_steps="step % 2 = 1")
    assert (view.num_steps, view.num_transitions, len(view.packed.steps)) == (8, 3, 3)
    batch = view.uniform(64, seed=0).sample()
    assert set(batch.observations[:, 0]) == {1.0, 3.0}
    assert set(batch.next_observations[:, 0]) == {2.0, 4.0}
    with pytest.raises(EmptyReplayError, match="found no step where_steps"):
        snapshot.replay(where_steps="step > 99")
    with pytest.raises(EmptyReplayError, match=r"found no step where .* and where_steps"):
        snapshot.replay("terminated", where_steps="step > 99")
    with pytest.raises(NotFoundError, match="found no column nothing"):
        snapshot.replay(columns=["nothing"])


OPEN = """
import sys
import numpy as np
from replaylake.datastore.lake.lake import open_lake
options = eval(sys.argv[2])
view = open_lake(sys.argv[1]).snapshot("d").replay(**options)
print(len(view.packed.steps), view.selections[0].content_hash)
"""


def run(code: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def finished(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert not err
    return out


@pytest.mark.slow
def test_processes_that_open_at_once_agree_and_leave_one_whole_view(
    snapshot: Snapshot, lake: Lake, home: Path
) -> None:
    options = ["{}", "{}", "{'memory_budget_bytes': 0}", "{'memory_budget_bytes': 0}"]
    outs = [finished(p) for p in [run(OPEN, lake.url, text) for text in options]]
    assert len(set(outs)) == 1
    # Each ended right after it had opened the view, and was waited for.
    assert [path.name for path in (home / "tmp").iterdir()] == []
    assert is_mapped(snapshot.replay().packed.records.words)


KILLED = """
import os, signal, sys
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.replay.cache import draft
draft.write_metadata = lambda *a: os.kill(os.getpid(), signal.SIGKILL)
open_lake(sys.argv[1]).snapshot("d").replay(**eval(sys.argv[2])).wait_cached()
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", ["{}", "{'memory_budget_bytes': 0}"])
def test_a_kill_before_it_is_whole_leaves_nothing_that_opens(
    snapshot: Snapshot, lake: Lake, home: Path, options: str
) -> None:
    process = run(KILLED, lake.url, options)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    (left,) = (home / "tmp").iterdir()
    assert (left / "records").stat().st_size > 0
    view = opened(snapshot)
    assert not is_mapped(view.packed.records.words)
    # An hour later it is taken for what it is.
    os.utime(left, (0, 0))
    opened(snapshot, where="terminated")
    assert not left.exists()


FULL = """
import resource, signal, sys
import numpy as np
from replaylake.datastore.errors import StorageError
from replaylake.datastore.lake.lake import open_lake
snapshot = open_lake(sys.argv[1]).snapshot("d")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
view = snapshot.replay()
print(view.wait_cached(), "|", view.cache_failure, "|", len(view.uniform(8, seed=0).sample()))
try:
    snapshot.replay(memory_budget_bytes=0)
except StorageError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_disk_that_takes_no_more_is_told_apart_by_the_budget(
    snapshot: Snapshot, lake: Lake, home: Path
) -> None:
    first, second = finished(run(FULL, lake.url)).splitlines()
    assert first == "None | [Errno 27] File too large | 8"
    assert "found File too large, expected room for" in second
    assert "raise memory_budget_bytes" in second
    assert not list((home / "tmp").iterdir())
