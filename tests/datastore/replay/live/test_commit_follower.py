"""What goes wrong while a dataset is followed is said once, by the next sample."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import (
    LogCorruptError,
    NotFoundError,
    ShardCorruptError,
    SpaceUnsupportedError,
    StorageError,
)
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.replay.live import commit_follower as follower
from replaylake.datastore.replay.live.live_view import LiveView
from replaylake.datastore.storage.log.expiry import expire

Make = Callable[..., Episode]


def raised(view: LiveView, kind: type[Exception]) -> str:
    """Sample until an error comes; return what it says."""
    sampler = view.uniform(4, seed=0)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            sampler.sample()
        except kind as error:
            return str(error)
        time.sleep(0.005)
    raise AssertionError("nothing was raised")


def numbers(view: LiveView) -> set[int]:
    sampler: Any = view.uniform(512, seed=0)
    return {int(n) for n in sampler.sample().observations[:, 0]}


def test_a_damaged_shard_is_passed_over(dataset: Dataset, make_told: Make) -> None:
    dataset.append([make_told(0)])
    with dataset.follow() as view:
        written = dataset.write([make_told(1)])
        path = dataset.path / written.rows.entries[0].path
        whole = path.read_bytes()
        path.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
        dataset.commit([written], producer="p", sequence=0)
        assert "found sha256" in raised(view, ShardCorruptError)
        assert numbers(view) == {0}
        assert view.wait_for(dataset.append([make_told(2)]).version)
        assert numbers(view) == {0, 2}


def test_a_number_that_a_record_cannot_hold(lake: Lake) -> None:
    dataset = lake.dataset("wide")
    dataset.create(Box((1,), dtype="float64"), Discrete(2))
    for reward in (1.0, 1e300, 2.0):
        episode = Episode(f"e{reward}", np.zeros((1, 1)), np.zeros(1, int), [reward], True)
        if reward == 1.0:
            dataset.append([episode])
            view = dataset.follow()
        else:
            version = dataset.append([episode]).version
    with view:
        assert "expected numbers that float32 holds" in raised(view, SpaceUnsupportedError)
        assert view.wait_for(version)
        assert view.num_steps == 2


def test_a_damaged_log_is_tried_again(dataset: Dataset, make_told: Make) -> None:
    dataset.append([make_told(0)])
    with dataset.follow() as view:
        path = dataset.path / "_delta_log" / f"{2:020d}.json"
        path.write_bytes(b"nothing")
        assert f"{2:020d}.json" in raised(view, LogCorruptError)
        # Once, though it is met again and again.
        time.sleep(0.3)
        assert numbers(view) == {0}
        path.unlink()
        version = dataset.append([make_told(1)]).version
        assert view.wait_for(version)
        assert numbers(view) == {0, 1}


def test_a_dataset_that_is_deleted(dataset: Dataset, make_told: Make) -> None:
    dataset.append([make_told(0)])
    dataset.append([make_told(1)])
    with dataset.follow() as view:
        # At once: file by file, it may be met half deleted, which looks like another one.
        dataset.path.rename(dataset.path.with_name("away"))
        assert "expected a table" in raised(view, NotFoundError)
        # What was there can still be sampled; nothing is followed any more.
        assert numbers(view) == {0, 1}
        assert not view.wait_for(99, timeout_s=60)


@pytest.fixture
def may_follow(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Views that follow read no commits until it is set."""
    allowed, follow = threading.Event(), follower.CommitFollower._follow

    def follow_late(self: follower.CommitFollower) -> bool:
        return allowed.wait(60) and follow(self)

    monkeypatch.setattr(follower.CommitFollower, "_follow", follow_late)
    return allowed


def test_a_dataset_that_is_made_anew(
    dataset: Dataset, make_told: Make, may_follow: threading.Event
) -> None:
    for number in range(2):
        dataset.append([make_told(number)])
    with dataset.follow() as view:
        shutil.rmtree(dataset.path)
        dataset.create(Box((2,)), Discrete(5))
        may_follow.set()
        assert raised(view, NotFoundError)


def test_commits_that_expired(
    lake: Lake, dataset: Dataset, make_told: Make, may_follow: threading.Event
) -> None:
    dataset.append([make_told(0), make_told(1)])
    with dataset.follow() as view:
        for number in range(2, 5):
            dataset.append([make_told(number)])
        expire(dataset.table.log, 4)
        may_follow.set()
        assert "it expired" in raised(view, NotFoundError)
        version = dataset.append([make_told(9)]).version
        assert view.wait_for(version)
        assert numbers(view) == {0, 1, 2, 3, 4, 9}
        assert view.num_steps == 60


def test_an_error_of_any_other_kind(
    dataset: Dataset, make_told: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset.append([make_told(0)])
    with dataset.follow() as view:
        monkeypatch.setattr(view._contents, "add", lambda block: 1 / 0)
        dataset.append([make_told(1)])
        assert "division" in raised(view, ZeroDivisionError)
        assert numbers(view) == {0}
        assert not view.wait_for(99, timeout_s=60)


def test_a_store_that_does_not_answer_at_first(
    dataset: Dataset, make_told: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was committed then comes later, all of it and once."""
    dataset.append([make_told(0)])
    with dataset.follow() as view:
        failing_once(monkeypatch, view._follower._reader, "read")
        dataset.append([make_told(1)])
        assert raised(view, StorageError) == "away"
        assert view.wait_for(dataset.append([make_told(2)]).version)
        assert numbers(view) == {0, 1, 2}
        assert view.num_steps == 30


def failing_once(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    whole = getattr(owner, name)

    def fails(*arguments: Any) -> Any:
        patch.setattr(owner, name, whole)
        raise StorageError("away")

    patch.setattr(owner, name, fails)


@pytest.mark.slow
def test_beginning_anew_goes_on_after_a_failure_and_past_damage(
    dataset: Dataset,
    make_told: Make,
    monkeypatch: pytest.MonkeyPatch,
    may_follow: threading.Event,
) -> None:
    dataset.append([make_told(0)])
    with dataset.follow() as view:
        for number in range(1, 5):
            dataset.append([make_told(number)])
        path = dataset.path / dataset.snapshot().files[2].path
        whole = path.read_bytes()
        path.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
        expire(dataset.table.log, 4)
        failing_once(monkeypatch, view._follower._reader, "change")
        may_follow.set()
        assert "it expired" in raised(view, NotFoundError)
        assert raised(view, StorageError) == "away"
        assert "found sha256" in raised(view, ShardCorruptError)
        assert view.wait_for(dataset.append([make_told(9)]).version)
        assert numbers(view) == {0, 1, 3, 4, 9}
        assert view.num_steps == 50


def test_each_failure_is_said_once(dataset: Dataset) -> None:
    with dataset.follow() as view:
        follows = view._follower
        for name in ("one", "two", "two"):
            follows._report_error(StorageError(name))
        for name in ("one", "two"):
            with pytest.raises(StorageError, match=name):
                follows.check()
        follows.check()


def test_what_is_left_half_done_is_said_before_it_is_seen(
    dataset: Dataset, make_told: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dataset.follow() as view:
        follows, locked = view._follower, []
        tell = follows._report_error

        def told(error: Exception) -> None:
            locked.append(follows.lock._is_owned())  # type: ignore[attr-defined]
            tell(error)

        monkeypatch.setattr(follows, "_report_error", told)
        monkeypatch.setattr(view._contents.items, "add_runs", lambda *_: 1 / 0)
        dataset.append([make_told(1)])
        with pytest.raises(ZeroDivisionError):
            view.wait_for(num_steps=1)
        assert locked[0]


def test_closing_ends_the_thread(dataset: Dataset, make_told: Make, tmp_path: Path) -> None:
    dataset.append([make_told(0)])
    view = dataset.follow()
    assert view._follower.is_running
    view.close()
    view.close()
    assert not view._follower.is_running
    assert numbers(view) == {0}
