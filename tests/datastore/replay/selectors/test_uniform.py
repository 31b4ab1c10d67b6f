from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.replay.items.transitions import Transitions
from replaylake.datastore.replay.view import ReplayView

Make = Callable[..., Episode]


@pytest.fixture
def view(lake: Lake, make_episode: Make) -> ReplayView:
    """20 transitions: rewards 1..10 in each of two episodes, told apart by their log-probs."""
    dataset = lake.dataset("d")
    dataset.append(
        [make_episode(f"e{i}", 10, behavior_log_probs=np.full(10, -i - 1.0)) for i in range(2)]
    )
    return dataset.snapshot().replay()


def test_shapes_and_dtypes(view: ReplayView) -> None:
    batch = view.uniform(7, Transitions(0.9), seed=0).sample()
    assert len(batch) == 7
    arrays = {n: (v.dtype.name, v.shape) for n, v in vars(batch).items() if v is not None}
    assert arrays == {
        "observations": ("float32", (7, 2)),
        "actions": ("int64", (7,)),
        "rewards": ("float32", (7,)),
        "discounts": ("float32", (7,)),
        "next_observations": ("float32", (7, 2)),
        "behavior_log_probs": ("float32", (7,)),
        "weights": ("float32", (7,)),
        "keys": ("uint64", (7, 2)),
        "bootstrappable": ("bool", (7,)),
        "indices": ("int64", (7,)),
    }
    assert batch.weights.tolist() == [1.0] * 7
    assert (batch.discounts == np.float32(0.9)).all()


def test_every_transition_is_drawn_equally_often(view: ReplayView) -> None:
    """Chi-square over 20 transitions: 43.8 is exceeded by one in a thousand seeds."""
    sampler = view.uniform(256, seed=3)
    counts: dict[tuple[float, float], int] = {}
    num = 0
    for _ in range(200):
        batch = sampler.sample()
        for pair in zip(batch.rewards.tolist(), batch.behavior_log_probs.tolist(), strict=True):
            counts[pair] = counts.get(pair, 0) + 1
            num += 1
    assert len(counts) == 20
    expected = num / 20
    assert sum((count - expected) ** 2 / expected for count in counts.values()) < 43.8


def test_a_seed_says_what_is_drawn(view: ReplayView, same: Callable[[Batch, Batch], bool]) -> None:
    one, again, other = (view.uniform(32, seed=seed) for seed in (1, 1, 2))
    first = one.sample()
    assert same(first, again.sample())
    assert not same(first, other.sample())


def test_a_saved_sampler_goes_on_bit_for_bit(
    view: ReplayView, same: Callable[[Batch, Batch], bool]
) -> None:
    sampler = view.uniform(16, seed=0)
    sampler.sample()
    saved = json.loads(json.dumps(sampler.state_dict()))
    expected = [sampler.sample() for _ in range(100)]
    resumed = view.uniform(16, seed=99)
    resumed.load_state_dict(saved)
    assert all(same(batch, resumed.sample()) for batch in expected)


@pytest.mark.parametrize(("batch_size", "discount"), [(0, 0.9), (-1, 0.9), (1, 1.1), (1, -0.1)])
def test_options_out_of_range(view: ReplayView, batch_size: int, discount: float) -> None:
    with pytest.raises(
        ConfigInvalidError, match=f"found (batch size {batch_size}|discount {discount}), expected"
    ):
        view.uniform(batch_size, Transitions(discount), seed=0)


def test_unknown_log_probs_are_nan(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    dataset.append([make_episode(num_steps=2, behavior_log_probs=[-0.5, None])])
    batch = dataset.snapshot().replay().uniform(64, seed=0).sample()
    assert set(batch.behavior_log_probs[batch.rewards == 1].tolist()) == {-0.5}
    assert np.isnan(batch.behavior_log_probs[batch.rewards == 2]).all()


def test_masks_of_this_step_and_the_next(lake: Lake, make_episode: Make) -> None:
    dataset = lake.dataset("d")
    dataset.create(Box((2,)), Discrete(2), mask_size=2)
    masks = [[True, False], [False, True]]
    dataset.append([make_episode("a", 2, action_masks=masks), make_episode("b", 1)])
    batch = dataset.snapshot().replay().uniform(256, seed=0).sample()
    found = {
        (reward, tuple(mask), tuple(following))
        for reward, mask, following in zip(
            batch.rewards.tolist(),
            batch.action_masks.tolist(),
            batch.next_action_masks.tolist(),
            strict=True,
        )
    }
    # What is unknown is allowed: after the last step, and in an episode without masks.
    assert found == {
        (1.0, (True, False), (False, True)),
        (2.0, (False, True), (True, True)),
        (1.0, (True, True), (True, True)),
    }


def test_mappings_frames_and_wide_floats(lake: Lake, make_episode: Make) -> None:
    frames = np.arange(3 * 4, dtype=np.uint8).reshape(3, 2, 2)
    observations: dict[str, Any] = {
        "camera": frames,
        "pair": (np.arange(3.0), [7, 8, 9]),
    }
    final = {"camera": np.full((2, 2), 99, np.uint8), "pair": (3.0, 10)}
    actions = np.arange(6, dtype=np.float64).reshape(3, 2) / 3
    dataset = lake.dataset("d")
    dataset.append(
        [
            make_episode(
                observations=observations, final_observation=final, actions=actions, truncated=True
            )
        ]
    )
    batch: Any = dataset.snapshot().replay().uniform(128, seed=0).sample()
    camera = batch.observations["camera"]
    assert (camera.dtype, camera.shape) == (np.uint8, (128, 2, 2))
    assert batch.observations["pair"]["_0"].dtype == np.float32
    assert batch.actions.dtype == np.float32
    step = batch.rewards.astype(int) - 1
    assert (camera == frames[step]).all()
    assert (batch.actions == actions.astype(np.float32)[step]).all()
    following = np.concatenate([frames[1:], final["camera"][None]])
    assert (batch.next_observations["camera"] == following[step]).all()
    assert (batch.next_observations["pair"]["_1"] == step + 8).all()
