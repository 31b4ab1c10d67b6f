from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.replay.data_loader import LoaderPart, ReplayIterable
from replaylake.datastore.replay.to_torch import TorchSampler
from replaylake.datastore.replay.view import ReplayView

# Two workers on a machine of one CPU.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

Make = Callable[..., Episode]


@pytest.fixture
def view(lake: Lake, make_episode: Make) -> ReplayView:
    """100 transitions, of rewards 1 to 100."""
    lake.dataset("d").append([make_episode("e", 100)])
    return lake.dataset("d").snapshot().replay()


def uniform(view: ReplayView, part: LoaderPart) -> Any:
    return view.uniform(8, seed=part.seed)


def shuffled(view: ReplayView, part: LoaderPart) -> Any:
    return view.shuffled(8, seed=part.shared_seed, rank=part.index, num_ranks=part.num_parts)


def tensors(view: ReplayView, part: LoaderPart) -> Any:
    return TorchSampler(view.uniform(8, seed=part.seed))


def load(dataset: ReplayIterable, num_workers: int, **options: Any) -> list[Batch]:
    loader = DataLoader(dataset, batch_size=None, num_workers=num_workers, **options)
    return list(loader)


def rewards(batches: list[Batch]) -> list[float]:
    return [reward for batch in batches for reward in batch.rewards.tolist()]


def test_without_workers_it_gives_tensors_of_the_view(view: ReplayView) -> None:
    batches = load(ReplayIterable(view, uniform, seed=0, num_batches=5), 0)
    assert len(batches) == 5
    for batch in batches:
        assert isinstance(batch.observations, torch.Tensor)
        assert isinstance(batch.keys, np.ndarray)
        assert torch.equal(batch.observations[:, 0] + 1, batch.rewards)


def test_an_epoch_is_split_among_ranks_and_workers(view: ReplayView) -> None:
    for ranks, workers in ((1, 2), (2, 2)):
        seen: list[float] = []
        for rank in range(ranks):
            data = ReplayIterable(view, shuffled, seed=4, rank=rank, num_ranks=ranks)
            seen += rewards(load(data, workers))
        assert sorted(seen) == list(range(1, 101))


def test_an_epoch_of_tensors_ends_too(view: ReplayView) -> None:
    data = ReplayIterable(view, lambda view, part: TorchSampler(shuffled(view, part)), seed=4)
    assert sorted(rewards(load(data, 0))) == list(range(1, 101))


@pytest.mark.slow
def test_spawned_workers_get_the_view_and_their_parts(view: ReplayView) -> None:
    data = ReplayIterable(view, shuffled, seed=4)
    spawned = load(data, 2, multiprocessing_context="spawn")
    assert sorted(rewards(spawned)) == list(range(1, 101))
    assert rewards(spawned) == rewards(load(data, 2, multiprocessing_context="fork"))


def test_workers_draw_different_rows_and_share_the_batches(view: ReplayView) -> None:
    for make in (uniform, tensors):
        batches = load(ReplayIterable(view, make, seed=0, num_batches=7), 2)
        assert len(batches) == 7
        rows = {tuple(batch.rewards.tolist()) for batch in batches}
        assert len(rows) == 7, "each worker has a stream of its own"
        for batch in batches:
            assert torch.equal(batch.observations[:, 0] + 1, batch.rewards)
            assert [key.tobytes() for key in batch.keys] != []


@pytest.mark.slow
def test_epochs_differ_and_come_again(view: ReplayView) -> None:
    for make, num_batches in ((uniform, 6), (shuffled, None)):
        data = ReplayIterable(view, make, seed=0, num_batches=num_batches)
        loader = DataLoader(data, batch_size=None, num_workers=2, persistent_workers=True)
        found = []
        for epoch in (0, 1, 0):
            data.set_epoch(epoch)
            found.append(rewards(list(loader)))
        assert found[0] == found[2]
        assert found[0] != found[1]
        assert rewards(load(data, 2)) == found[0]
        del loader


def test_ranks_and_seeds_draw_differently(view: ReplayView) -> None:
    drawn = {
        tuple(rewards(load(ReplayIterable(view, uniform, num_batches=3, **options), 0)))
        for options in (
            {"seed": 0, "num_ranks": 2},
            {"seed": 0, "rank": 1, "num_ranks": 2},
            {"seed": 1, "num_ranks": 2},
        )
    }
    assert len(drawn) == 3


@pytest.mark.parametrize(("make", "num_batches"), [(uniform, 40), (shuffled, None)])
def test_a_position_can_be_saved_and_restored(
    view: ReplayView, make: Any, num_batches: int | None
) -> None:
    data = ReplayIterable(view, make, seed=0, num_batches=num_batches)
    iterator = iter(data)
    for _ in range(5):
        next(iterator)
    state = data.state_dict()
    other = ReplayIterable(view, make, seed=0, num_batches=num_batches)
    other.load_state_dict(state)
    rest = list(iterator)
    assert rewards(list(other)) == rewards(rest)
    assert len(rest) == (35 if num_batches else 8)
    fresh = ReplayIterable(view, make, seed=0, num_batches=num_batches)
    fresh.load_state_dict(pickle.loads(pickle.dumps(fresh.state_dict())))
    assert len(list(fresh)) == (num_batches or 13)


def test_a_rank_that_makes_no_sense_is_refused(view: ReplayView) -> None:
    with pytest.raises(ConfigInvalidError, match="found rank 2 of 2"):
        ReplayIterable(view, uniform, seed=0, rank=2, num_ranks=2)


def test_a_live_view_stays_in_its_process(lake: Lake, make_episode: Make) -> None:
    lake.dataset("live").append([make_episode("e", 20)])
    view = lake.dataset("live").follow()
    try:
        data = ReplayIterable(view, uniform, seed=0, num_batches=2)
        assert len(list(data)) == 2
        loader = DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="fork")
        iterator = iter(loader)
        with pytest.raises(
            ConfigInvalidError, match="a view that follows a dataset in a worker process"
        ):
            next(iterator)
        # Left to the garbage collector, its worker is waited for 5 s in some later test.
        iterator._shutdown_workers()
    finally:
        view.close()
