from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import (
    ConfigInvalidError,
    FormatTooNewError,
    InvalidNameError,
    NotFoundError,
    StorageError,
)
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.maintenance.compact import compact
from replaylake.datastore.maintenance.purge.purge import purge
from replaylake.datastore.replay.layout import KEY
from replaylake.datastore.replay.selectors.prioritized import PrioritizedSampler
from replaylake.datastore.replay.view import ReplayView, concatenate

Make = Callable[..., Episode]


@pytest.fixture
def saved(lake: Lake, make_episode: Make) -> dict[tuple[int, ...], float]:
    """Priorities of the 9 transitions of dataset d in three shards, by row key, saved as `last`."""
    dataset = lake.dataset("d")
    for name in "cab":
        dataset.append([make_episode(name, 3)])
    view = dataset.snapshot().replay(cache=False)
    sampler = view.prioritized(8, seed=0)
    sampler.update_priorities(np.arange(9), np.arange(9) + 0.5)
    sampler.save_priorities()
    return leaves_by_key(view, sampler)


def leaves_by_key(view: ReplayView, sampler: PrioritizedSampler) -> dict[tuple[int, ...], float]:
    keys = view.packed.records.rows[KEY][view.packed.bootstrappable]
    leaves = sampler.state_dict()["priorities"]["leaves"]
    return {tuple(k): v for k, v in zip(keys.tolist(), leaves.tolist(), strict=True)}


def restored(view: ReplayView, **options: Any) -> dict[tuple[int, ...], float]:
    return leaves_by_key(view, view.prioritized(8, seed=0, restore="last", **options))


Saved = dict[tuple[int, ...], float]


@pytest.mark.parametrize("budget", [None, 0])
def test_another_view_of_the_data_has_the_same(
    lake: Lake, saved: Saved, budget: int | None
) -> None:
    """In memory, and mapped from a file."""
    view = lake.dataset("d").snapshot().replay(memory_budget_bytes=budget)
    assert restored(view) == saved
    assert len(set(saved.values())) == 9


def test_they_outlast_compaction(lake: Lake, saved: Saved) -> None:
    assert len(lake.dataset("d").snapshot().files) == 3
    compact(lake, "d", open_s=0)
    snapshot = lake.dataset("d").snapshot()
    assert len(snapshot.files) == 1
    assert restored(snapshot.replay(cache=False)) == saved


def test_other_rows_have_the_highest(lake: Lake, saved: Saved, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode("new", 2)])
    view = dataset.snapshot().replay("episode_id in ('a', 'new')", cache=False)
    found = restored(view)
    known = {key: value for key, value in found.items() if key in saved}
    assert len(known) == 3
    assert known.items() <= saved.items()
    assert [found[key] for key in found if key not in saved] == [8.5**0.6] * 2
    assert view.prioritized(8, seed=0).restore_priorities() == 3


def test_another_alpha(lake: Lake, saved: Saved) -> None:
    view = lake.dataset("d").snapshot().replay(cache=False)
    found = restored(view, alpha=0.3)
    assert found == pytest.approx({key: value**0.5 for key, value in saved.items()})


def test_priorities_by_name(lake: Lake, saved: Saved) -> None:
    view = lake.dataset("d").snapshot().replay(cache=False)
    other = view.prioritized(8, seed=0)
    other.update_priorities(np.arange(9), np.zeros(9))
    other.save_priorities("run.2")
    assert restored(view) == saved
    assert other.restore_priorities("run.2") == 9
    assert not any(leaves_by_key(view, other).values())
    with pytest.raises(
        NotFoundError, match=r"'none': found last, run.2 in .*/_derived/priorities, expect"
    ):
        other.restore_priorities("none")
    with pytest.raises(InvalidNameError, match=r"found name '../x'"):
        other.save_priorities("../x")


def test_saving_again_replaces_them(lake: Lake, saved: Saved) -> None:
    view = lake.dataset("d").snapshot().replay(cache=False)
    sampler = view.prioritized(8, seed=0, restore="last")
    sampler.update_priorities([0], [100.0])
    sampler.save_priorities()
    assert restored(view) == leaves_by_key(view, sampler) != saved


def only_file(lake: Lake) -> Path:
    (path,) = Path(lake.storage.url).glob("d/_derived/priorities/*")
    return path


@pytest.mark.parametrize("damage", ["cut", "flipped", "not a zip"])
def test_damaged_priorities(lake: Lake, saved: Saved, damage: str) -> None:
    path = only_file(lake)
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[len(data) // 3] ^= 1
    path.write_bytes({"cut": data[:-130], "flipped": data, "not a zip": b"?"}[damage])
    view = lake.dataset("d").snapshot().replay(cache=False)
    with pytest.raises(
        StorageError, match=r"last.npz: found .*, expected the priorities that were"
    ):
        restored(view)


def test_priorities_of_a_newer_format(lake: Lake, saved: Saved) -> None:
    np.savez(only_file(lake), format=2)
    with pytest.raises(FormatTooNewError, match="found format 2, expected 1 or less"):
        restored(lake.dataset("d").snapshot().replay(cache=False))


def test_a_purge_takes_them_along(lake: Lake, saved: Saved) -> None:
    purge(lake, "d", where="episode_id = 'a'")
    view = lake.dataset("d").snapshot().replay(cache=False)
    with pytest.raises(NotFoundError, match="found none"):
        restored(view)


def test_a_view_of_several_datasets(lake: Lake, saved: Saved, make_episode: Make) -> None:
    lake.dataset("other").append([make_episode("x", 3)])
    views = [lake.dataset(name).snapshot().replay(cache=False) for name in ("d", "other")]
    sampler = concatenate(views).prioritized(8, seed=0)
    with pytest.raises(ConfigInvalidError, match="found a view of several datasets"):
        sampler.save_priorities()


@pytest.mark.parametrize(
    "wrong",
    [
        {"keys": np.zeros(3, np.uint64)},
        {"keys": np.zeros((3, 2))},
        {"powered": np.ones(1)},
        {"powered": np.array([np.nan, 1.0, 1.0])},
        {"powered": np.array([-1.0, 1.0, 1.0])},
        {"highest": np.nan},
        {"alpha": 2.0},
        {"alpha": "x"},
    ],
)
def test_a_file_that_somebody_else_wrote(lake: Lake, saved: Saved, wrong: dict[str, Any]) -> None:
    right = {"keys": np.zeros((3, 2), np.uint64), "powered": np.ones(3), "alpha": 0.6}
    view = lake.dataset("d").snapshot().replay(cache=False)
    np.savez(only_file(lake), format=1, **{**right, "highest": 1.0})
    restored(view)
    np.savez(only_file(lake), format=1, **{**right, "highest": 1.0, **wrong})
    with pytest.raises(StorageError, match=r"expected the priorities that were saved there"):
        restored(view)
