from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import SchemaMismatchError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.replay import scans
from replaylake.datastore.replay.layout import KEY
from replaylake.datastore.replay.view import ReplayView

Make = Callable[..., Episode]


@pytest.fixture
def view(lake: Lake, make_episode: Make) -> ReplayView:
    """100 episodes of 7 steps."""
    episodes = [make_episode(f"e{number}", 7, terminated=True) for number in range(100)]
    lake.dataset("d").append(episodes)
    return lake.snapshot("d").replay(cache=False)


@pytest.mark.parametrize("at_once", [1 << 22, 256, 8])
def test_the_content_hash_is_that_of_all_keys_sorted(
    view: ReplayView, lake: Lake, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """In however many ranges they are sorted: lineage of every release holds this value."""
    monkeypatch.setattr(scans, "_SORTED_AT_ONCE", at_once)
    monkeypatch.setattr(scans, "_PIECE", 64)
    keys = view.packed.records.rows[KEY][view.packed.steps]
    (file,) = lake.snapshot("d").files
    expected = hashlib.sha256(file.sha256.encode() + b"\0\0\0")
    expected.update(keys[np.argsort(keys[:, 0])].tobytes())
    assert view.selections[0].content_hash == expected.hexdigest()


def test_the_hash_tells_selections_apart(lake: Lake, view: ReplayView) -> None:
    def content(**options: str) -> str:
        return lake.snapshot("d").replay(cache=False, **options).selections[0].content_hash

    hashes = [
        content(),
        content(where="true"),
        content(where_steps="true"),
        content(where_steps="step > 0"),
        content(reward="reward"),
    ]
    assert len(set(hashes)) == len(hashes)
    assert hashes[0] == view.selections[0].content_hash


def test_an_infinite_reward_is_found_in_any_step(
    lake: Lake, view: ReplayView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scans, "_PIECE", 64)
    with pytest.raises(SchemaMismatchError, match="found infinity in 100 of 700 selected steps"):
        # Also where no sample starts: those of n steps take its reward.
        lake.snapshot("d").replay(reward="1 / (6 - step)", where_steps="step = 0")
    with pytest.raises(SchemaMismatchError, match="found NULL or NaN in 1 of 700"):
        lake.snapshot("d").replay(
            reward="CASE WHEN episode_id = 'e7' THEN nullif(step, 3) ELSE 1 END"
        )


def test_masks_are_looked_at_where_samples_start(
    lake: Lake, make_episode: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scans, "_PIECE", 2)
    masks = np.ones((5, 2), np.bool_)
    masks[4, 1] = False
    lake.dataset("m").append([make_episode("e", 5, terminated=True, action_masks=masks)])
    snapshot = lake.snapshot("m")
    for options, expected in (({}, True), ({"where_steps": "step < 4"}, False)):
        view = snapshot.replay(**options)
        assert view.has_masked_actions == expected
        view.wait_cached()
        assert snapshot.replay(**options).has_masked_actions == expected
