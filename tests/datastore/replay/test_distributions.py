"""How often samplers draw what: chi-square against the distribution that each one states."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Dict, Discrete
from replaylake.datastore.errors import EmptyReplayError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.replay.items.episodes import Episodes
from replaylake.datastore.replay.items.hindsight import Hindsight
from replaylake.datastore.replay.items.sequences import Sequences
from replaylake.datastore.replay.items.transitions import Transitions
from replaylake.datastore.replay.mixture import mixture
from replaylake.datastore.replay.protocols import Item
from replaylake.datastore.replay.sampler import Sampler
from replaylake.datastore.replay.view import ReplayView

Make = Callable[..., Episode]


@pytest.fixture
def view(lake: Lake, make_episode: Make) -> ReplayView:
    """24 steps in 4 episodes of 3 to 9, in two pieces each; policy versions 0 to 3."""
    dataset = lake.dataset("d")
    dataset.create(Box((2,)), Discrete(2))
    for version, num in enumerate((3, 5, 7, 9)):
        for first, steps in ((2, num - 2), (0, 2)):
            fields = {"policy_versions": np.full(steps, version), "truncated": first == 2}
            dataset.append([make_episode(f"e{version}", steps, first_step=first, **fields)])
    return dataset.snapshot().replay(columns=("policy_version",), cache=False)


def items_of(view: ReplayView, item: Item) -> list[Batch]:
    """Each item by itself, in the order of their numbers."""
    sampler, found = view.in_order(1, item), []
    while True:
        try:
            found.append(sampler.sample())
        except EmptyReplayError:
            return found


def chi_square(counts: NDArray[np.float64], chances: NDArray[np.float64]) -> float:
    """Pearson's statistic, over that which one in ten thousand seeds exceeds.

    That is by Wilson and Hilferty (1931); cells of chance 0 have to be empty.
    """
    assert chances.sum() == pytest.approx(1)
    assert not counts[chances == 0].any()
    expected = (counts.sum() * chances)[chances > 0]
    assert expected.min() >= 5
    degrees = len(expected) - 1
    bound = degrees * (1 - 2 / (9 * degrees) + 3.72 * math.sqrt(2 / (9 * degrees))) ** 3
    return float(((counts[chances > 0] - expected) ** 2 / expected).sum() / bound)


def drawn(sampler: Any, num: int, num_batches: int) -> NDArray[np.float64]:
    counts = np.zeros(num)
    for _ in range(num_batches):
        counts += np.bincount(sampler.sample().indices, minlength=num)
    return counts


ITEMS: Final = [Transitions(0.9, 3), Sequences(2, burn_in=1), Episodes()]


SELECTORS: Final = ["uniform", "weighted", "recent", "prioritized"]
# Episodes of different lengths do not mix.
DRAWN: Final = [*itertools.product(SELECTORS, ITEMS), *(("mixture", item) for item in ITEMS[:2])]


@pytest.mark.parametrize(
    ("name", "item"), DRAWN, ids=[f"{name}-{type(item).__name__}" for name, item in DRAWN]
)
def test_every_sampler_follows_its_distribution(view: ReplayView, item: Any, name: str) -> None:
    columns: Any = [batch.columns for batch in items_of(view, item)]
    versions = np.array([np.ravel(column["policy_version"])[0] for column in columns])
    num = len(versions)
    even = np.full(num, 1 / num)
    sampler: Any
    if name == "uniform":
        sampler, chances = view.uniform(16, item, seed=3), even
    elif name == "weighted":
        sampler = view.weighted(16, item, weight="policy_version ** 2", seed=3)
        chances = versions**2 / (versions**2).sum()
    elif name == "recent":
        sampler = view.recent(16, item, max_staleness=1, seed=3)
        chances = (versions >= 2) / (versions >= 2).sum()
    elif name == "prioritized":
        # Batches of one row: in larger ones draws are stratified, and so more even than by chance.
        sampler = view.prioritized(1, item, seed=3, alpha=0.5, uniform_fraction=0.25)
        priorities = np.arange(num) ** 2.0
        sampler.update_priorities(np.arange(num), priorities)
        chances = 0.75 * np.arange(num) / np.arange(num).sum() + 0.25 / num
    else:
        # 16 rows: 11.2 of the first, and 4.8 of the second.
        sampler = mixture(
            [view.uniform(1, item, seed=3), view.weighted(1, item, weight="step + 1", seed=3)],
            [7, 3],
            batch_size=16,
            seed=3,
        )
        steps = np.array([np.ravel(batch.observations)[0] for batch in items_of(view, item)])
        weights = np.zeros(2 * num)
        weights[::2], weights[1::2] = 0.7 / num, 0.3 * (steps + 1) / (steps + 1).sum()
        chances = weights
    counts = drawn(sampler, len(chances), 6000 if name == "prioritized" else 400)
    assert chi_square(counts, chances) < 1
    if name != "uniform":
        # The bound is one that an even distribution exceeds.
        assert chi_square(counts, np.full(len(chances), 1 / len(chances))) > 2


def test_stratified_draws_are_right_on_average(view: ReplayView) -> None:
    num = view.num_transitions
    sampler = view.prioritized(64, seed=4, alpha=1.0, uniform_fraction=0.5)
    priorities = np.arange(num) % 5.0
    sampler.update_priorities(np.arange(num), priorities)
    chances = 0.5 * priorities / priorities.sum() + 0.5 / num
    counts = drawn(sampler, num, 2000)
    assert counts / counts.sum() == pytest.approx(chances, abs=2e-3)


def test_a_permutation_begins_and_ends_anywhere(view: ReplayView) -> None:
    num = view.num_transitions
    sampler = view.shuffled(5, seed=2)
    counts = np.zeros((3, num))
    for _ in range(3000):
        epoch = [batch.indices for batch in sampler.rest_of_epoch()]
        numbers = np.concatenate([indices for indices in epoch if indices is not None])
        assert sorted(numbers) == list(range(num))
        counts[[0, 1, 2], numbers[[0, num // 2, -1]]] += 1
    for place in counts:
        assert chi_square(place, np.full(num, 1 / num)) < 1


def test_hindsight_and_its_sampler_may_have_one_seed(lake: Lake) -> None:
    """Joint chances of row and goal, of the first rows of many seeds and of one seed's many."""
    num = 8
    at = np.arange(num, dtype=np.float32)[:, None]
    goal = Box((1,))
    spaces = {"observation": goal, "achieved_goal": goal, "desired_goal": goal}
    final = {"observation": [num], "achieved_goal": [num], "desired_goal": [-1]}
    observations = {"observation": at, "achieved_goal": at, "desired_goal": at * 0 - 1}
    dataset = lake.dataset("goals")
    dataset.create(Dict(spaces), Discrete(2))
    fields = {"truncated": True, "final_observation": final}
    dataset.append([Episode("e", observations, np.zeros(num, int), np.zeros(num), **fields)])
    view = dataset.snapshot().replay(cache=False)

    def sampler(seed: int) -> Sampler:
        item = Hindsight(compute_reward=lambda *goals: np.zeros(len(goals[0])), seed=seed)
        return view.uniform(64, item, seed=seed)

    # Of row t: not replaced in one of five; else one of t + 1 to num.
    chances = np.zeros((num, num + 2))
    chances[:, 0] = 0.2 / num
    for row in range(num):
        chances[row, row + 2 :] = 0.8 / num / (num - row)
    one = sampler(0)
    for batches in (
        [sampler(seed).sample() for seed in range(150)],
        [one.sample() for _ in range(150)],
    ):
        counts = np.zeros_like(chances)
        for batch in batches:
            found: Any = batch.observations
            np.add.at(counts, (batch.indices, found["desired_goal"][:, 0].astype(int) + 1), 1)
        assert chi_square(counts.ravel(), chances.ravel()) < 1


def test_a_mixture_weighs_the_rows_of_a_batch_against_each_other(view: ReplayView) -> None:
    """Whatever the batch size of the sampler is that they are of."""
    for size in (1, 7, 500):
        weighted = view.weighted(size, weight="1 + step", seed=0, correct=True)
        # That it drew by itself before does not matter.
        weighted.sample()
        mixed = mixture([weighted, view.uniform(1, seed=0)], [3, 1], batch_size=16, seed=0)
        for _ in range(5):
            batch = mixed.sample()
            steps = batch.observations[:12, 0]
            assert batch.weights[:12] == pytest.approx((1 + steps).min() / (1 + steps))
            assert batch.weights[12:].tolist() == [1] * 4


def test_prioritized_sequences_by_hand(view: ReplayView) -> None:
    """Of R2D2: 4 sequences of priorities 1, 2, 2, 5, alpha = beta = 1, and a fifth of uniform.

    P = 0.8 * (0.1, 0.2, 0.2, 0.5) + 0.05 = 0.13, 0.21, 0.21, 0.45; (4 P)^-1 over the largest one is
    1, 13 / 21, 13 / 21, 13 / 45.
    """
    sampler = view.prioritized(
        200, Sequences(40), seed=0, alpha=1.0, beta=1.0, uniform_fraction=0.2
    )
    sampler.update_priorities(np.arange(4), np.array([1.0, 2.0, 2.0, 5.0]))
    batch = sampler.sample()
    assert batch.weights.shape == (200,)
    expected = np.array([1, 13 / 21, 13 / 21, 13 / 45])
    assert batch.weights == pytest.approx(expected[batch.indices])
    counts = np.bincount(batch.indices)
    assert np.abs(counts - 200 * np.array([0.13, 0.21, 0.21, 0.45])).max() <= 2


@pytest.mark.parametrize("uniform_fraction", [0.0, 0.3, 1.0])
def test_the_very_last_share_of_all(view: ReplayView, uniform_fraction: float) -> None:
    """Numbers so close to 1 that the last row's share is rounded up to 1."""

    class Largest:
        def random(self, num: int | None = None) -> Any:
            largest = math.nextafter(1.0, 0.0)
            return largest if num is None else np.full(num, largest)

    sampler = view.prioritized(64, seed=0, uniform_fraction=uniform_fraction)
    sampler._prioritized._rng = Largest()  # type: ignore[assignment]
    batch = sampler.sample()
    assert batch.indices is not None
    assert batch.indices.max() == view.num_transitions - 1
    mixed = mixture([view.uniform(1, seed=0)] * 2, [1, 1], batch_size=64, seed=0)
    mixed._rng = Largest()  # type: ignore[assignment]
    assert len(mixed.sample()) == 64
