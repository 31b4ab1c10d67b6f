from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import ConfigInvalidError, EmptyReplayError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.replay.mixture import mixture
from replaylake.datastore.replay.prefetch import prefetch
from replaylake.datastore.replay.to_torch import TorchSampler
from replaylake.datastore.replay.view import ReplayView

Make = Callable[..., Episode]


@pytest.fixture
def view(lake: Lake, make_episode: Make) -> ReplayView:
    """100 transitions, of rewards 1 to 100."""
    lake.dataset("d").append([make_episode("e", 100)])
    return lake.dataset("d").snapshot().replay(cache=False)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Any:
    yield
    if _is_thread_left():
        gc.collect()
    until = time.monotonic() + 60
    while _is_thread_left():
        assert time.monotonic() < until, "a thread is left"
        time.sleep(0.001)


def _is_thread_left() -> bool:
    return any(thread.name == "prefetch" for thread in threading.enumerate())


def same(one: Batch, other: Batch) -> bool:
    pairs = [
        (np.asarray(v), np.asarray(getattr(other, n)))
        for n, v in vars(one).items()
        if v is not None
    ]
    return all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in pairs)


def makers(view: ReplayView) -> dict[str, Callable[[int], Any]]:
    return {
        "uniform": lambda seed: view.uniform(8, seed=seed),
        "shuffled": lambda seed: view.shuffled(8, seed=seed),
        "prioritized": lambda seed: view.prioritized(8, seed=seed),
        "tensors": lambda seed: TorchSampler(view.uniform(8, seed=seed), reuse=5),
        "mixture": lambda seed: mixture(
            [view.uniform(1, seed=seed), view.prioritized(1, seed=seed)],
            [1, 1],
            batch_size=8,
            seed=seed,
        ),
    }


@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize("kind", ["uniform", "shuffled", "prioritized", "tensors", "mixture"])
def test_batches_are_those_of_the_sampler(view: ReplayView, kind: str, num: int) -> None:
    make = makers(view)[kind]
    alone = make(3)
    with prefetch(make(3), num) as ahead:
        for _ in range(100):
            assert same(ahead.sample(), alone.sample())


def learn(sampler: Any, num: int) -> list[Batch]:
    """Draw, and give each row a priority that depends on it."""
    batches = []
    for _ in range(num):
        batch = sampler.sample()
        # A copy: some samplers write their batches' memory again.
        fields = {n: None if v is None else np.asarray(v).copy() for n, v in vars(batch).items()}
        batches.append(Batch(**fields))
        if "prioritized" in sampler.kind:
            sampler.update_priorities(batch.indices, 0.1 + np.asarray(batch.rewards) % 7)
    return batches


@pytest.mark.parametrize("num_before", [0, 1, 30])
@pytest.mark.parametrize("kind", ["uniform", "shuffled", "prioritized", "tensors", "mixture"])
def test_resumes_bit_for_bit(view: ReplayView, kind: str, num_before: int) -> None:
    """Also with priorities, though batches were drawn ahead of them."""
    make = makers(view)[kind]
    with prefetch(make(3)) as one, prefetch(make(99)) as other:
        one.kind = other.kind = kind  # type: ignore[attr-defined]
        learn(one, num_before)
        state = one.state_dict()
        expected = learn(one, 100)
        other.sample()
        other.load_state_dict(state)
        for batch, found in zip(expected, learn(other, 100), strict=True):
            assert same(batch, found)


def test_priorities_lag_by_as_many_batches_whatever_is_faster(view: ReplayView) -> None:
    for wait_s in (0.0, 0.02):
        with prefetch(view.prioritized(8, seed=0), 2) as ahead:
            batch = ahead.sample()
            time.sleep(wait_s)
            ahead.update_priorities(np.arange(100), [0.0] * 99 + [1.0])
            for _ in range(2):
                assert (ahead.sample().rewards != 100).any()
            assert (ahead.sample().rewards == 100).all()
            assert len(batch) == 8


def test_what_goes_wrong_surfaces_and_then_it_goes_on(view: ReplayView) -> None:
    with prefetch(view.in_order(40)) as ahead:
        assert [len(ahead.sample()) for _ in range(3)] == [40, 40, 20]
        for _ in range(3):
            with pytest.raises(EmptyReplayError, match="found nothing after item 100"):
                ahead.sample()
        assert ahead.state_dict()["ahead"] == []
    with prefetch(view.prioritized(8, seed=0)) as ahead:
        ahead.sample()
        ahead.update_priorities([0], [-1.0])
        ahead.sample()
        ahead.sample()
        with pytest.raises(ConfigInvalidError, match="-1"):
            ahead.sample()
        ahead.update_priorities(np.arange(100), [1.0] + [0.0] * 99)
        assert [ahead.sample() for _ in range(9)][-1].rewards.tolist() == [1.0] * 8


class Failing:
    """Fails at every third draw, and counts them."""

    def __init__(self) -> None:
        self.num = 0

    def sample(self) -> Any:
        self.num += 1
        if self.num % 3 == 0:
            raise OSError("a disk that is gone")
        return self.num

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


def test_after_an_error_nothing_is_drawn_until_asked() -> None:
    sampler = Failing()
    with prefetch(sampler, 4) as ahead:
        for first in (1, 4, 7):
            assert [ahead.sample(), ahead.sample()] == [first, first + 1]
            with pytest.raises(OSError, match="a disk that is gone"):
                ahead.sample()
            time.sleep(0.01)
            assert sampler.num == first + 2


def test_a_closed_one_is_refused_and_closing_twice_is_nothing(view: ReplayView) -> None:
    ahead = prefetch(view.uniform(8, seed=0))
    ahead.sample()
    ahead.close()
    ahead.close()
    for call in (ahead.sample, ahead.state_dict, lambda: ahead.update_priorities([0], [1.0])):
        with pytest.raises(ConfigInvalidError, match="prefetch: is closed"):
            call()


def test_the_thread_of_a_forgotten_one_ends(view: ReplayView) -> None:
    ahead = prefetch(view.uniform(8, seed=0))
    ahead.sample()
    del ahead
    # The fixture waits for it.


def test_what_makes_no_sense_is_refused(view: ReplayView) -> None:
    with pytest.raises(ConfigInvalidError, match="found num 0"):
        prefetch(view.uniform(8, seed=0), 0)
    with pytest.raises(ConfigInvalidError, match="expected reuse of at least 4, or 0"):
        prefetch(TorchSampler(view.uniform(8, seed=0), reuse=3))
    with (
        prefetch(view.uniform(8, seed=0)) as ahead,
        pytest.raises(ConfigInvalidError, match="a sampler that does not draw by priorities"),
    ):
        ahead.update_priorities([0], [1.0])
