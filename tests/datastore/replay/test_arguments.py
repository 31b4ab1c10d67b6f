"""What callers give wrongly is refused with an error of ours that says what it was."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import (
    ConfigInvalidError,
    InvalidNameError,
    QueryError,
    QueryRefusedError,
)
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.replay.arguments import check_fraction, check_int, check_positive
from replaylake.datastore.replay.data_loader import ReplayIterable
from replaylake.datastore.replay.items.episodes import Episodes
from replaylake.datastore.replay.items.hindsight import Hindsight
from replaylake.datastore.replay.items.transitions import Transitions
from replaylake.datastore.replay.mixture import mixture
from replaylake.datastore.replay.prefetch import prefetch
from replaylake.datastore.replay.to_torch import TorchSampler, to_torch
from replaylake.datastore.replay.view import ReplayView, concatenate

Make = Callable[..., Episode]

NO_COUNTS = [0, -1, 2.5, 2.0, True, "8", None, math.nan, np.float32(3), 10**12]
NO_SEEDS = [-1, 1.5, True, "0", None, math.nan, [1, 2]]
NO_SHARES = [-0.1, 1.1, math.nan, math.inf, True, "0.5", None, 1j]


@pytest.fixture
def snapshot(lake: Lake, make_episode: Make) -> Snapshot:
    lake.dataset("d").append([make_episode("e", 20, policy_versions=[1] * 20)])
    return lake.dataset("d").snapshot()


@pytest.fixture
def view(snapshot: Snapshot) -> ReplayView:
    return snapshot.replay(columns=["policy_version"], cache=False)


def _samplers(view: ReplayView) -> dict[str, Callable[..., Any]]:
    """Every way to a sampler, given batch_size and seed."""
    return {
        "uniform": view.uniform,
        "shuffled": view.shuffled,
        "prioritized": view.prioritized,
        "weighted": lambda batch_size, *, seed: view.weighted(batch_size, weight="1", seed=seed),
        "recent": lambda batch_size, *, seed: view.recent(batch_size, max_staleness=1, seed=seed),
        "mixture": lambda batch_size, *, seed: mixture(
            [view.uniform(1, seed=0)], [1], batch_size=batch_size, seed=seed
        ),
    }


@pytest.mark.parametrize(
    "kind", ["uniform", "shuffled", "prioritized", "weighted", "recent", "mixture", "in_order"]
)
def test_batch_sizes_and_seeds(view: ReplayView, kind: str) -> None:
    make = _samplers(view).get(kind, lambda batch_size, seed: view.in_order(batch_size))
    for batch_size in NO_COUNTS:
        with pytest.raises(
            ConfigInvalidError,
            match=r"found batch size .*, expected a whole number (of 1 or|from 1 to)",
        ):
            make(batch_size, seed=0)
    if kind != "in_order":
        for seed in NO_SEEDS:
            with pytest.raises(
                ConfigInvalidError, match=r"found seed .*, expected a whole number of 0"
            ):
                make(4, seed=seed)
    sampler = make(np.int64(4), seed=np.int32(3))
    assert len(sampler.sample()) == 4
    assert type(sampler.batch_size) is int


@pytest.mark.parametrize("option", ["alpha", "beta", "uniform_fraction"])
def test_shares(view: ReplayView, option: str) -> None:
    for value in NO_SHARES:
        with pytest.raises(
            ConfigInvalidError, match=f"found {option} .*, expected a number from 0 to"
        ):
            view.prioritized(4, seed=0, **{option: value})


def test_other_numbers(view: ReplayView) -> None:
    for value in [0, -1.0, math.nan, math.inf, "1", None, True]:
        with pytest.raises(ConfigInvalidError, match="found initial_priority"):
            view.prioritized(4, seed=0, initial_priority=value)
    for value in [0, -1, 2.5, "1", math.nan, True]:
        with pytest.raises(ConfigInvalidError, match="found beta_updates"):
            view.prioritized(4, seed=0, beta_updates=value)
    for value in [-1, 1.5, "1", None, math.nan, True]:
        with pytest.raises(ConfigInvalidError, match="found max_staleness"):
            view.recent(4, max_staleness=value, seed=0)
        if value is not None:
            with pytest.raises(ConfigInvalidError, match="found policy_version"):
                view.recent(4, max_staleness=1, policy_version=value, seed=0)
        with pytest.raises(ConfigInvalidError, match="found policy_version"):
            view.recent(4, max_staleness=1, policy_version=lambda said=value: said, seed=0).sample()
        if value is not None:
            with pytest.raises(ConfigInvalidError, match=r"found max_length|found num_batches"):
                Episodes(max_length=value)
            with pytest.raises(ConfigInvalidError, match="found num_batches"):
                ReplayIterable(view, lambda view, part: None, seed=0, num_batches=value)
    for ranks in [("0", 2), (0.5, 2), (0, 2.0), (0, "2"), (None, 1), (1, 1)]:
        with pytest.raises(ConfigInvalidError, match="found rank"):
            view.shuffled(4, seed=0, rank=ranks[0], num_ranks=ranks[1])
    for value in NO_COUNTS[:-1]:
        with pytest.raises(ConfigInvalidError, match="found num "):
            prefetch(view.uniform(4, seed=0), value)


def test_numbers_are_returned_as_pythons_own() -> None:
    assert type(check_int("a: b", np.int16(3))) is int
    assert type(check_fraction("a: b", np.float32(0.5))) is float
    assert check_positive("a: b", 2) == 2.0
    with pytest.raises(
        ConfigInvalidError, match=r"^a: found b 'x', expected a whole number from 1 to 4\. Do"
    ):
        check_int("a: b", "x", minimum=1, maximum=4, advice="Do.")


@pytest.mark.parametrize("item", [Transitions, "transitions", 0.99, None])
def test_items_that_are_none(view: ReplayView, item: Any) -> None:
    for kind in ("uniform", "shuffled", "prioritized"):
        with pytest.raises(
            ConfigInvalidError, match=r"found item .*, expected the kind of a sample"
        ):
            getattr(view, kind)(4, item, seed=0)
    with pytest.raises(ConfigInvalidError, match="found item"):
        view.in_order(4, item)
    with pytest.raises(ConfigInvalidError, match="found item"):
        view.weighted(4, item, weight="1", seed=0)


def test_hindsight() -> None:
    with pytest.raises(ConfigInvalidError, match="found compute_reward None, expected a function"):
        Hindsight(compute_reward=None, seed=0)  # type: ignore[arg-type]
    for value in NO_SHARES:
        with pytest.raises(ConfigInvalidError, match="hindsight: found fraction"):
            Hindsight(compute_reward=print, seed=0, fraction=value)


@pytest.mark.parametrize("argument", ["where", "where_steps", "reward", "weight"])
def test_sql_errors_name_their_argument(snapshot: Snapshot, argument: str) -> None:
    def opened(sql: Any) -> Any:
        if argument == "weight":
            return snapshot.replay(cache=False).weighted(4, weight=sql, seed=0)
        return snapshot.replay(cache=False, **{argument: sql})

    for sql in ("nothing > 1", "step >", "'a'"):
        with pytest.raises(
            QueryError, match=f"^{argument} .*: found .* Error.*, expected SQL over"
        ):
            opened(sql)
    with pytest.raises(QueryRefusedError, match=f"^{argument}: .*found random"):
        opened("random() > 0.5")
    for sql in (5, True, b"step", ["step"]):
        with pytest.raises(
            ConfigInvalidError, match=f"found {argument} .*, expected SQL in a string"
        ):
            opened(sql)


def test_views(snapshot: Snapshot, view: ReplayView) -> None:
    for columns in ("reward", None, 5, [None], ["reward", 1]):
        with pytest.raises(ConfigInvalidError, match=r"found columns .*, expected a list of names"):
            snapshot.replay(columns=columns)  # type: ignore[arg-type]
    twice = snapshot.replay(columns=["step", "step"], cache=False)
    assert list(twice.uniform(1, seed=0).sample().columns or ()) == ["step"]
    for frames in (0, -1, 1.5, 2.0, "2", True, None, 1025):
        with pytest.raises(ConfigInvalidError, match="found frame_stack"):
            snapshot.replay(frame_stack=frames)  # type: ignore[arg-type]
    # A view's key is made of JSON, which numpy's numbers are not.
    assert snapshot.replay(frame_stack=np.int64(2)).num_steps == 20  # type: ignore[arg-type]
    for budget in (-1, 1.5, "1G", True, math.nan):
        with pytest.raises(ConfigInvalidError, match="found memory_budget_bytes"):
            snapshot.replay(memory_budget_bytes=budget)  # type: ignore[arg-type]
    with pytest.raises(ConfigInvalidError, match="found float64 'no'"):
        snapshot.replay(float64="no")  # type: ignore[arg-type]
    for views in (view, ["d"], [view, view.uniform(1, seed=0)], None):
        with pytest.raises(ConfigInvalidError, match="expected a list of views of snapshots"):
            concatenate(views)  # type: ignore[arg-type]


def test_what_is_no_sampler(view: ReplayView) -> None:
    for source in (view, None, "uniform", TorchSampler):
        with pytest.raises(ConfigInvalidError, match=r"prefetch: found a .*, expected a sampler"):
            prefetch(source)  # type: ignore[arg-type]
        with pytest.raises(
            ConfigInvalidError, match=r"torch sampler: found a .*, expected a sampler"
        ):
            TorchSampler(source)  # type: ignore[arg-type]
        data = ReplayIterable(view, lambda view, part, source=source: source, seed=0)
        with pytest.raises(
            ConfigInvalidError, match=r"make_sampler: found a .*, expected a sampler"
        ):
            next(iter(data))
    uniform = view.uniform(4, seed=0)
    mixed = mixture([uniform], [1], batch_size=4, seed=0)
    for samplers in (uniform, [view], [TorchSampler(uniform)], [mixed], {"a": uniform}, None):
        with pytest.raises(ConfigInvalidError, match="expected a list of views' own samplers"):
            mixture(samplers, [1], batch_size=4, seed=0)  # type: ignore[arg-type]
    for ratios in (["a"], "a", [object()]):
        with pytest.raises(ConfigInvalidError, match=r"found ratios .*, expected numbers"):
            mixture([uniform], ratios, batch_size=4, seed=0)  # type: ignore[arg-type]
    with pytest.raises(ConfigInvalidError, match="found make_sampler None, expected a function"):
        ReplayIterable(view, None, seed=0)  # type: ignore[arg-type]
    for epoch in (-1, "x", 0.5, None):
        with pytest.raises(ConfigInvalidError, match="found epoch"):
            ReplayIterable(view, lambda view, part: uniform, seed=0).set_epoch(epoch)  # type: ignore[arg-type]


def test_tensors(view: ReplayView) -> None:
    sampler = view.uniform(4, seed=0)
    for reuse in (-1, 1.5, "2", True, None):
        with pytest.raises(ConfigInvalidError, match="found reuse"):
            TorchSampler(sampler, reuse=reuse)  # type: ignore[arg-type]
    for device in ("nope", 1.5, None):
        with pytest.raises(ConfigInvalidError, match="found device"):
            TorchSampler(sampler, device)  # type: ignore[arg-type]
        with pytest.raises(ConfigInvalidError, match="found device"):
            to_torch(sampler.sample(), device)  # type: ignore[arg-type]
    with pytest.raises(ConfigInvalidError, match="whose batches are tensors already"):
        TorchSampler(TorchSampler(sampler))
    for batch in (to_torch(sampler.sample()), 5, None):
        with pytest.raises(ConfigInvalidError, match="expected a Batch of numpy arrays"):
            to_torch(batch)  # type: ignore[arg-type]


def test_names_of_priorities(view: ReplayView) -> None:
    sampler = view.prioritized(4, seed=0)
    for name in (5, None, "A b", ""):
        with pytest.raises(InvalidNameError, match="priorities: found name"):
            sampler.save_priorities(name)  # type: ignore[arg-type]


def test_row_keys(view: ReplayView) -> None:
    for after in ("abc", 5, [-1, 2], [1, 2, 3], [[1, 2]], [0.5, "x"]):
        with pytest.raises(
            ConfigInvalidError, match=r"found row key .*, expected two whole numbers"
        ):
            view.in_order(4, after=after)  # type: ignore[arg-type]
    first = view.in_order(4).sample()
    assert view.in_order(4, after=first.keys[-1].tolist()).sample().indices is not None


@pytest.mark.parametrize(
    ("indices", "priorities"),
    [
        ([0, 1], [1.0]),
        ([0.0, 1.0], [1.0, 1.0]),
        ([True, False], [1.0, 1.0]),
        (["a", "b"], [1.0, 1.0]),
        ([0, 1], ["a", "b"]),
        ([0, 1], [1j, 1j]),
        ([0, 1], [1.0, -1.0]),
        ([0, 1], [math.nan, 1.0]),
        (None, [1.0, 1.0]),
        ([0, 1], None),
        ([[0, 1]], [[1.0, 1.0]]),
        ([0, 1], [[1.0], [1.0, 2.0]]),
        ([0, 1], torch.ones(2, requires_grad=True)),
        ([0, 20], [1.0, 1.0]),
        ([-1, 1], [1.0, 1.0]),
        (np.array([0, 2**63], np.uint64), [1.0, 1.0]),
    ],
)
def test_priorities_change_nothing_when_they_are_refused(
    view: ReplayView, indices: Any, priorities: Any
) -> None:
    sampler = view.prioritized(4, seed=0)
    other = view.prioritized(4, seed=1)
    mixed = mixture([other, sampler], [1, 1], batch_size=4, seed=0)
    before = [one.state_dict()["priorities"]["leaves"] for one in (sampler, other)]
    with pytest.raises(ConfigInvalidError, match="update_priorities: found"):
        sampler.update_priorities(indices, priorities)
    as_array = np.asarray(indices)
    if as_array.dtype == np.int64:
        # Of the first sampler's rows all are right; those of the second one are refused.
        with pytest.raises(ConfigInvalidError, match="update_priorities: found"):
            mixed.update_priorities(
                as_array.astype(np.int64) * 2 + [0, 1][: as_array.ndim], priorities
            )
    for one, leaves in zip((sampler, other), before, strict=True):
        assert np.array_equal(one.state_dict()["priorities"]["leaves"], leaves)
    assert sampler.state_dict()["selector"]["num_updates"] == 0


def test_a_mixture_changes_no_sampler_where_one_refuses(view: ReplayView) -> None:
    samplers = [view.prioritized(4, seed=seed) for seed in (0, 1)]
    mixed = mixture(samplers, [1, 1], batch_size=4, seed=0)
    before = samplers[0].state_dict()["priorities"]["leaves"]
    with pytest.raises(ConfigInvalidError, match="expected less than 20"):
        mixed.update_priorities([0, 2 * 20 + 1], [5.0, 5.0])
    assert np.array_equal(samplers[0].state_dict()["priorities"]["leaves"], before)
    assert samplers[0].state_dict()["selector"]["num_updates"] == 0
