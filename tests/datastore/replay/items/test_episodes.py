from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.replay.items.episodes import Episodes
from replaylake.datastore.replay.protocols import SelectedItems
from replaylake.datastore.replay.sampler import FixedCandidates, Sampler
from replaylake.datastore.replay.selectors.uniform import UniformSelector

Pack = Callable[..., Any]


def rows_of(log: Any, item: Episodes) -> Any:
    starts = item.starts(log.packed)
    assembler = item.assembler(log.packed.records)
    where = {position: step for step, position in log.positions.items()}
    batch = assembler.assemble(starts, SelectedItems(np.arange(len(starts)))).batch
    return batch, [where[int(position)] for position in starts]


def test_the_complete_ones(pack_pieces: Pack) -> None:
    log = pack_pieces(
        [
            (0, 0, 2, "open"),
            (0, 2, 2, "terminated"),
            (1, 0, 3, "open"),
            (2, 4, 2, "terminated"),
            (3, 0, 1, "cut"),
            (4, 0, 2, "open"),
            (4, 3, 1, "truncated"),
        ]
    )
    batch, steps = rows_of(log, Episodes(discount=0.5))
    assert steps == [(0, 0), (3, 0)]
    assert batch.observations[:, :, 1].tolist() == [[0, 1, 2, 3], [0, 0, 0, 0]]
    assert batch.next_observations[:, :, 1].tolist() == [[1, 2, 3, 4], [0, 0, 0, 0]]
    assert batch.mask.tolist() == [[True] * 4, [True, False, False, False]]
    assert batch.rewards.tolist() == [[1, 2, 3, 4], [2.5, 0, 0, 0]]
    assert batch.discounts.tolist() == [[0.5, 0.5, 0.5, 0], [0.5, 0, 0, 0]]
    assert batch.bootstrappable.tolist() == [[True] * 4, [False] * 4]
    _, steps = rows_of(log, Episodes(only_complete=False))
    assert steps == [(0, 0), (1, 0), (2, 4), (3, 0), (4, 0), (4, 3)]


def test_too_long_a_one_is_refused(pack_pieces: Pack) -> None:
    log = pack_pieces([(0, 0, 2, "open"), (0, 2, 2, "terminated"), (1, 0, 3, "truncated")])
    assert len(Episodes(max_length=4).starts(log.packed)) == 2
    message = "found 1 of 2 longer than max_length 3, the longest of 4 steps, expected none"
    with pytest.raises(ConfigInvalidError, match=message):
        Episodes(max_length=3).starts(log.packed)


def test_a_batch_is_as_long_as_its_longest(pack_pieces: Pack) -> None:
    log = pack_pieces([(e, 0, e + 1, "terminated") for e in range(6)])
    item = Episodes()
    starts = item.starts(log.packed)
    assembler = item.assembler(log.packed.records)
    sampler = Sampler(FixedCandidates(starts), UniformSelector(seed=0), assembler, 2)
    lengths = set()
    for _ in range(20):
        batch = sampler.sample()
        assert batch.mask is not None
        assert batch.mask.shape[1] == batch.mask.sum(axis=1).max()
        lengths.add(batch.mask.shape[1])
    assert len(lengths) > 2
    # Memory of other lengths is left alone.
    out = assembler.assemble(starts[:2], SelectedItems(np.arange(2)))
    assert assembler.assemble(starts[:2], SelectedItems(np.arange(2)), out) is out
    assert assembler.assemble(starts[1:3], SelectedItems(np.arange(2)), out) is not out


def test_options_out_of_range() -> None:
    with pytest.raises(
        ConfigInvalidError, match="found max_length 0, expected a whole number of 1 or more"
    ):
        Episodes(max_length=0)
    with pytest.raises(ConfigInvalidError, match="found discount -1, expected a number from 0"):
        Episodes(discount=-1)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(data=st.data(), only_complete=st.booleans(), frame_stack=st.integers(1, 3))
def test_every_row_is_the_episode_s(
    pack_pieces: Pack, draw_pieces: Any, data: Any, only_complete: bool, frame_stack: int
) -> None:
    log = pack_pieces(draw_pieces(data), frame_stack)
    chains = {log.chain(*step) for step in log.positions}
    if only_complete:
        ends = ("terminated", "truncated", "cut")
        chains = {chain for chain in chains if chain.first == 0 and chain.ends_as in ends}
    batch, steps = rows_of(log, Episodes(only_complete=only_complete))
    assert steps == sorted((chain.episode, chain.first) for chain in chains)
    for i, step in enumerate(steps):
        chain = log.chain(*step)
        num = chain.end - chain.first
        assert batch.mask[i].tolist() == [t < num for t in range(batch.mask.shape[1])]
        keys = [[chain.episode + 1, t + 1] for t in range(chain.first, chain.end)]
        assert batch.keys[i].tolist() == keys + [[0, 0]] * (batch.mask.shape[1] - num)
        for t in range(num):
            at = chain.first + t
            seen = batch.observations[i, t].reshape(frame_stack, 2).tolist()
            assert seen == chain.frames(at, frame_stack)
            seen = batch.next_observations[i, t].reshape(frame_stack, 2).tolist()
            assert seen == chain.frames(at + 1, frame_stack)
