"""States that are not what the sampler saved are refused, and nothing of it has changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import ConfigInvalidError, NotFoundError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.replay.data_loader import ReplayIterable
from replaylake.datastore.replay.mixture import mixture
from replaylake.datastore.replay.prefetch import prefetch
from replaylake.datastore.replay.to_torch import TorchSampler
from replaylake.datastore.replay.view import ReplayView

Make = Callable[..., Episode]
KINDS: dict[str, Callable[[ReplayView], Any]] = {
    "uniform": lambda view: view.uniform(8, seed=0),
    "shuffled": lambda view: view.shuffled(8, seed=0),
    "in_order": lambda view: view.in_order(8),
    "prioritized": lambda view: view.prioritized(8, seed=0),
    "weighted": lambda view: view.weighted(8, weight="step + 1", seed=0),
    "recent": lambda view: view.recent(8, max_staleness=9, seed=0),
    "mixture": lambda view: mixture(
        [view.uniform(1, seed=0), view.prioritized(1, seed=0)], [1, 1], batch_size=8, seed=0
    ),
    "prefetch": lambda view: prefetch(view.uniform(8, seed=0)),
    "tensors": lambda view: TorchSampler(view.shuffled(8, seed=0), reuse=2),
}


@pytest.fixture
def view(lake: Lake, make_episode: Make) -> ReplayView:
    lake.dataset("d").append([make_episode("e", 50, policy_versions=np.arange(50) // 10)])
    return lake.dataset("d").snapshot().replay(columns=["policy_version"], cache=False)


@pytest.fixture
def make(view: ReplayView) -> Iterator[Callable[[str], Any]]:
    """Samplers that have given two batches; threads end with the test."""
    with ExitStack() as stack:

        def made(kind: str) -> Any:
            sampler = KINDS[kind](view)
            if kind == "prefetch":
                stack.enter_context(sampler)
            sampler.sample()
            sampler.sample()
            return sampler

        yield made


def rows(sampler: Any, num: int = 3) -> list[list[int]]:
    return [np.asarray(sampler.sample().indices).tolist() for _ in range(num)]


@pytest.mark.parametrize("kind", list(KINDS))
def test_states_of_other_kinds(make: Callable[[str], Any], kind: str) -> None:
    expected = rows(make(kind))
    sampler = make(kind)
    for other in KINDS:
        if other != kind and {kind, other} != {"tensors", "shuffled"}:
            with pytest.raises(
                ConfigInvalidError, match=r"found a saved state that is one of a \w+ sam"
            ):
                sampler.load_state_dict(make(other).state_dict())
    assert rows(sampler) == expected


def broken(state: Any) -> Iterator[Any]:
    """Yield what is wrong with one entry after another, at any depth."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield {name: other for name, other in state.items() if name != key}
            for wrong in (*broken(value), "x", None, -5, []):
                if not (wrong is None and value is None):
                    yield {**state, key: wrong}
    elif isinstance(state, list) and state:
        for wrong in broken(state[-1]):
            yield [*state[:-1], wrong]


@pytest.mark.parametrize("kind", list(KINDS))
def test_garbage(make: Callable[[str], Any], kind: str) -> None:
    expected = rows(make(kind))
    state = make(kind).state_dict()
    sampler = make(kind)
    num_refused = 0
    for wrong in (None, [], "x", 5, {}, *broken(state)):
        try:
            sampler.load_state_dict(wrong)
        except (ConfigInvalidError, NotFoundError):
            num_refused += 1
        else:
            # Some changes make another position, such as fewer rows consumed.
            sampler.load_state_dict(copy.deepcopy(state))
    assert num_refused > 8
    assert rows(sampler) == expected


def test_a_data_loaders_state(view: ReplayView) -> None:
    data = ReplayIterable(view, lambda view, part: view.uniform(8, seed=part.seed), seed=0)
    batches = iter(data)
    next(batches)
    state = data.state_dict()
    expected = next(batches).indices.tolist()  # type: ignore[union-attr]
    for wrong in (None, {}, "x", {**state, "num_given": "x"}, view.uniform(8, seed=0).state_dict()):
        with pytest.raises(ConfigInvalidError, match="found a saved state"):
            data.load_state_dict(wrong)  # type: ignore[arg-type]
    data.load_state_dict(state)
    assert next(iter(data)).indices.tolist() == expected  # type: ignore[union-attr]
