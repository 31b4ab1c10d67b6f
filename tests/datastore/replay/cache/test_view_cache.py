from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import NotFoundError, StorageError
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.maintenance.copy.copy import copy
from replaylake.datastore.maintenance.delete import delete
from replaylake.datastore.maintenance.fsck.fsck import fsck
from replaylake.datastore.maintenance.maintain import maintain
from replaylake.datastore.maintenance.purge.purge import purge
from replaylake.datastore.maintenance.retention import set_retention
from replaylake.datastore.maintenance.vacuum import vacuum
from replaylake.datastore.names import new_ulid
from replaylake.datastore.replay.array_allocator import is_mapped
from replaylake.datastore.replay.cache.cache_writer import CacheWriter
from replaylake.datastore.replay.cache.cached_view import collect_arrays, make_metadata, open_cached
from replaylake.datastore.replay.cache.draft import Draft, DraftStoppedError, find_abandoned_drafts
from replaylake.datastore.replay.cache.view_cache import ViewCache
from replaylake.datastore.replay.layout import RecordLayout
from replaylake.datastore.replay.records import Packed
from replaylake.datastore.replay.view import ReplayView

Make = Callable[..., Episode]
# An observation whose bytes are found nowhere by chance.
MARK = 12345.678


@pytest.fixture
def filled(lake: Lake, make_episode: Make) -> Lake:
    """Three episodes, each a shard; the second one has the mark in all of its observations."""
    for number, name in enumerate("abc"):
        fields: dict[str, Any] = {"terminated": True, "final_observation": None}
        if number == 1:
            fields["observations"] = [[MARK, MARK]] * 3
        lake.dataset("d").append([make_episode(name, 3, **fields)])
    return lake


def home_of(lake: Lake) -> Path:
    return ViewCache(lake.storage, "d").home


def views_of(lake: Lake) -> list[str]:
    home = home_of(lake)
    return sorted(path.name for path in home.iterdir() if len(path.name) == 64)


def kept(lake: Lake, name: str = "d", **options: Any) -> ReplayView:
    view = lake.snapshot(name).replay(**options)
    assert view.wait_cached() is not None, view.cache_failure
    return view


def holds_mark(folder: Path) -> bool:
    mark = np.float32(MARK).tobytes()
    return any(mark in path.read_bytes() for path in folder.rglob("*") if path.is_file())


def written(cache: ViewCache, packed: Packed, shards: list[str]) -> Draft:
    draft = cache.draft(0)
    arrays = collect_arrays(packed)
    draft.write_missing(arrays, threading.Event())
    about = make_metadata(packed, arrays, has_masked_actions=False)
    draft.complete(arrays, about, shards, threading.Event())
    return draft


def is_whole(view: ReplayView) -> Callable[[Path], bool]:
    return lambda folder: open_cached(folder, layout_of(view)) is not None


def layout_of(view: ReplayView) -> RecordLayout:
    return view.packed.records.layout


def test_a_damaged_view_is_named_and_decoded_again(filled: Lake) -> None:
    view = kept(filled, where="return > 0")
    words, selection = view.packed.records.words.copy(), view.selections
    (name,) = views_of(filled)
    paths = sorted(path for path in home_of(filled).rglob("*") if path.is_file())
    assert len(paths) >= 6
    for path in paths:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 2
        path.write_bytes(data)
        is_derived = path.parent.name == "spelt" or path.name == "content_hash"
        found = [finding.path for finding in fsck(filled).findings if "replay" in finding.check]
        assert found == ([] if is_derived else [f"d/_derived/replay/{name}"]), path
        again = kept(filled, where="return > 0")
        assert (again.packed.records.words == words).all(), path
        assert again.selections == selection
        if path.name == "shards":
            fsck(filled, repair=True)
            kept(filled, where="return > 0")
        assert fsck(filled).findings == (), path


# What leaves the disk, and when


@pytest.mark.parametrize("budget", [None, 0])
def test_a_purge_removes_every_cached_view(filled: Lake, budget: int | None) -> None:
    view = kept(filled, memory_budget_bytes=budget)
    kept(filled, "d@1"), kept(filled, where="num_steps > 2")
    lake_folder = home_of(filled).parents[2]
    assert holds_mark(home_of(filled))
    assert purge(filled, "d", "episode_id = 'b'", dry_run=True).num_steps == 3
    assert len(views_of(filled)) == 3, "asking removes nothing"
    done = purge(filled, "d", "episode_id = 'b'")
    assert done.is_proven
    assert not home_of(filled).exists()
    assert not holds_mark(lake_folder)
    assert view.uniform(64, seed=0).sample().observations.max() > 12345, "it is open all the same"
    again = kept(filled)
    assert (again.num_steps, again.uniform(64, seed=0).sample().observations.max()) == (6, 2)


def test_a_purge_reaches_the_views_of_a_remote_lake(make_episode: Make) -> None:
    lake = open_lake(f"memory://{new_ulid()}", create=True)
    lake.dataset("d").append([make_episode("a", 3, observations=[[MARK, MARK]] * 3)])
    view = kept(lake)
    assert is_mapped(lake.snapshot("d").replay().packed.records.words)
    folder = view.wait_cached()
    assert folder is not None
    assert holds_mark(folder)
    assert list(lake.storage.files("d/_derived")) == []
    assert purge(lake, "d", "episode_id = 'a'").is_proven
    assert not folder.exists()


def test_a_view_that_is_finished_after_its_purge_does_not_stay(filled: Lake) -> None:
    snapshot = filled.snapshot("d")
    view = snapshot.replay(cache=False)
    cache = ViewCache(filled.storage, "d")
    shards = [entry.path for entry in snapshot.files]
    before, after = written(cache, view.packed, shards), written(cache, view.packed, shards)
    cache.publish(before, "a" * 64, shards, is_whole(view))
    filled.storage.delete([f"d/{shards[1]}"])
    with pytest.raises(NotFoundError, match="1 of its 3 shards were removed while it was written"):
        cache.publish(after, "b" * 64, shards, is_whole(view))
    assert views_of(filled) == ["a" * 64]
    cache.clear()
    with pytest.raises(FileNotFoundError):
        cache.publish(after, "b" * 64, shards, is_whole(view))
    assert not home_of(filled).exists()


def test_vacuum_removes_views_of_shards_that_it_deletes(filled: Lake) -> None:
    old = kept(filled)
    delete(filled, "d", "episode_id = 'b'")
    new = kept(filled)
    year_ms = time.time_ns() // 1_000_000 + 365 * 86_400_000
    listed = vacuum(filled, ["d"], now_ms=year_ms)
    folder = old.wait_cached()
    assert folder is not None
    expected = [("shard", 1), ("view", 1)]
    kinds = [file.kind for file in listed.garbage]
    assert [(kind, kinds.count(kind)) for kind in sorted(set(kinds))] == expected
    assert listed.garbage[-1].path == f"d/_derived/replay/{folder.name}"
    assert listed.garbage[-1].size_bytes > 0
    assert folder.exists()
    assert vacuum(filled, ["d"], now_ms=year_ms, delete=True).garbage == listed.garbage
    assert not folder.exists()
    assert new.wait_cached() == kept(filled).wait_cached(), "that of the newest version stays"
    assert vacuum(filled, ["d"], now_ms=year_ms).garbage == ()


def test_maintenance_removes_them_and_spellings_too(filled: Lake) -> None:
    set_retention(filled, "d", {"keep_versions_s": 3600.0})
    for _ in range(2):
        kept(filled, where="episode_id=   'b'")
    assert len(list((home_of(filled) / "spelt").iterdir())) == 1
    delete(filled, "d", "episode_id = 'b'")
    maintain(filled, ["d"])
    assert len(views_of(filled)) == 1, "versions that were just replaced can still be read"
    maintain(filled, ["d"], now_ms=time.time_ns() // 1_000_000 + 2 * 3_600_000)
    assert views_of(filled) == []
    assert list((home_of(filled) / "spelt").iterdir()) == []
    assert not holds_mark(home_of(filled).parents[2])


def test_a_copied_lake_takes_no_views_along(filled: Lake, tmp_path: Path) -> None:
    kept(filled)
    target = open_lake(tmp_path / "copy", create=True)
    copy(filled, "d", target)
    assert not home_of(target).exists()


# How many stay


def test_the_least_recently_used_views_go_beyond_the_limit(filled: Lake) -> None:
    view = filled.snapshot("d").replay(cache=False)
    size = sum(array.nbytes for array in collect_arrays(view.packed).values())
    cache = ViewCache(filled.storage, "d", max_bytes=2 * size + size // 2)
    for second, key in enumerate(["a" * 64, "b" * 64, "c" * 64]):
        folder = cache.publish(written(cache, view.packed, []), key, [], is_whole(view))
        os.utime(folder / "view.json", (second, second))
        if second == 1:
            assert cache.open("a" * 64, layout_of(view)) is not None, "and so it is used now"
    assert views_of(filled) == ["a" * 64, "c" * 64]
    one = ViewCache(filled.storage, "d", max_bytes=1)
    one.publish(written(one, view.packed, []), "d" * 64, [], is_whole(view))
    assert views_of(filled) == ["d" * 64], "the one just made stays in any case"


def test_older_views_make_room_on_a_full_disk(filled: Lake) -> None:
    kept(filled)
    cache = ViewCache(filled.storage, "d")
    with pytest.raises(StorageError, match=r"GB free, expected room for 1000000.00 GB"):
        cache.draft(10**15)
    assert views_of(filled) == []


# Drafts and the thread


def test_who_is_second_uses_what_is_there(filled: Lake) -> None:
    view = filled.snapshot("d").replay(cache=False)
    cache = ViewCache(filled.storage, "d")
    one, other = written(cache, view.packed, []), written(cache, view.packed, [])
    folder = cache.publish(one, "a" * 64, [], is_whole(view))
    made = (folder / "records").stat().st_ino
    assert cache.publish(other, "a" * 64, [], is_whole(view)) == folder
    assert (folder / "records").stat().st_ino == made
    assert not other.folder.exists()


def test_half_of_a_view_that_nobody_may_remove(
    filled: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of another user's process: the view is not kept, and nobody tries for ever."""
    view = filled.snapshot("d").replay()
    folder = view.wait_cached()
    assert folder is not None
    (folder / "view.json").unlink()

    def refuses(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(f"{path}: not yours")

    monkeypatch.setattr("replaylake.datastore.replay.cache.view_cache.shutil.rmtree", refuses)
    again = filled.snapshot("d").replay()
    assert again.wait_cached() is None
    assert "not yours" in again.cache_failure


def test_a_stopped_draft_is_removed(filled: Lake) -> None:
    stop = threading.Event()
    stop.set()
    view = filled.snapshot("d").replay(cache=False)
    draft = ViewCache(filled.storage, "d").draft(0)
    with pytest.raises(DraftStoppedError):
        draft.write_missing(collect_arrays(view.packed), stop)
    draft.discard()
    assert not draft.folder.exists()


def test_a_draft_in_use_is_not_abandoned(tmp_path: Path) -> None:
    draft = Draft(tmp_path)
    os.utime(draft.folder, (0, 0))
    assert find_abandoned_drafts(tmp_path) == []
    draft.close()
    assert find_abandoned_drafts(tmp_path) == [draft.folder]
    os.utime(draft.folder)
    assert find_abandoned_drafts(tmp_path) == [], "its owner may not have locked it yet"


def test_what_goes_on_for_long_is_stopped_when_the_process_ends() -> None:
    began = threading.Event()

    def write(stop: threading.Event) -> Path:
        began.set()
        assert stop.wait(60)
        raise DraftStoppedError

    keeping = CacheWriter(write)
    assert began.wait(60)
    keeping.end(time.monotonic() + 0.1)
    assert keeping.is_done
    assert keeping.wait_folder() is None
    assert keeping.failure == "the process ended before it was written"


def test_a_view_is_written_after_the_first_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    at: list[float] = []

    def write(stop: threading.Event) -> Path:
        at.append(time.monotonic())
        return Path("there")

    began = time.monotonic()
    keeping = CacheWriter(write)
    while not at:
        time.sleep(0.01)
    assert at[0] - began > 0.2
    assert keeping.wait_folder() == Path("there")
    # Unless somebody waits for it.
    monkeypatch.setattr("replaylake.datastore.replay.cache.cache_writer._DELAY_S", 60.0)
    began = time.monotonic()
    assert CacheWriter(write).wait_folder() == Path("there")
    assert time.monotonic() - began < 30


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # from Python 3.12 on
def test_a_forked_child_does_not_wait_for_its_parent_s_thread() -> None:
    release = threading.Event()

    def write(stop: threading.Event) -> Path:
        release.wait(60)
        return Path("there")

    keeping = CacheWriter(write)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=lambda: queue.put(keeping.wait_folder()))
    child.start()
    assert queue.get(timeout=60) is None
    child.join()
    release.set()
    assert keeping.wait_folder() == Path("there")
