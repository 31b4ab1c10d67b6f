from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.replay.items.sequences import Sequences
from replaylake.datastore.replay.protocols import SelectedItems
from replaylake.datastore.replay.record_runs import Runs
from replaylake.datastore.replay.records import Packed

Pack = Callable[..., Any]


def starts_of(log: Any, item: Sequences) -> list[tuple[int, int]]:
    where = {position: step for step, position in log.positions.items()}
    return [where[int(position)] for position in item.starts(log.packed)]


def rows_at(log: Any, item: Sequences, steps: list[tuple[int, int]], out: Any = None) -> Any:
    positions = np.array([log.positions[step] for step in steps], np.int64)
    assembler = item.assembler(log.packed.records)
    return assembler.assemble(positions, SelectedItems(np.arange(len(steps))), out)


def test_a_padded_row_and_a_full_one(pack_pieces: Pack) -> None:
    log = pack_pieces([(0, 0, 2, "terminated"), (1, 0, 5, "open")])
    batch = rows_at(log, Sequences(3, discount=0.5), [(0, 0), (1, 1)]).batch
    assert batch.observations.tolist() == [[[0, 0], [0, 1], [0, 2]], [[1, 1], [1, 2], [1, 3]]]
    assert batch.next_observations[:, :, 1].tolist() == [[1, 2, 0], [2, 3, 4]]
    assert batch.actions.tolist() == [[0, 1, 0], [1001, 1002, 1003]]
    assert batch.rewards.tolist() == [[1, 2, 0], [2.5, 3.5, 4.5]]
    assert batch.discounts.tolist() == [[0.5, 0, 0], [0.5, 0.5, 0.5]]
    assert batch.mask.tolist() == [[True, True, False], [True, True, True]]
    assert batch.bootstrappable.tolist() == [[True, True, False], [True, True, True]]
    assert batch.keys[0].tolist() == [[1, 1], [1, 2], [0, 0]]
    assert batch.behavior_log_probs[0].tolist() == [-1, -2, 0]
    assert batch.columns["hidden"].tolist() == [[[0], [1], [0]], [[1], [2], [3]]]
    assert batch.action_masks[0].tolist() == [[True, True], [True, False], [True, True]]
    assert batch.next_action_masks[0].tolist() == [[True, False], [True, True], [True, True]]
    assert batch.weights.shape == batch.indices.shape == (2,)
    assert len(batch) == 2


def test_an_end_without_its_observation_is_learned_from(pack_pieces: Pack) -> None:
    log = pack_pieces([(0, 0, 2, "cut")])
    batch = rows_at(log, Sequences(3), [(0, 0)]).batch
    assert batch.mask.tolist() == [[True, True, False]]
    assert batch.bootstrappable.tolist() == [[True, False, False]]


def test_burn_in_but_at_an_episode_s_beginning(pack_pieces: Pack) -> None:
    log = pack_pieces([(0, 0, 12, "truncated"), (1, 3, 12, "truncated")])
    item = Sequences(4, burn_in=2)
    assert starts_of(log, item) == [(0, 0), (0, 4), (0, 8), (1, 3), (1, 7), (1, 11)]
    batch = rows_at(log, item, [(0, 0), (0, 8), (1, 3)]).batch
    assert batch.observations.shape == (3, 6, 2)
    assert batch.mask.astype(int).tolist() == [
        [1, 1, 1, 1, 1, 1],
        [0, 0, 1, 1, 0, 0],
        # The steps before its first one were not recorded, so its state is not known.
        [0, 0, 1, 1, 1, 1],
    ]


def test_every_step_is_learned_from_once_without_overlap(pack_pieces: Pack) -> None:
    log = pack_pieces([(0, 0, 7, "open"), (0, 7, 13, "open"), (1, 0, 4, "cut"), (2, 0, 1, "lost")])
    for item in (Sequences(3), Sequences(3, burn_in=2), Sequences(8, burn_in=5)):
        batch = rows_at(log, item, starts_of(log, item)).batch
        keys = batch.keys[batch.mask].tolist()
        assert sorted(keys) == sorted([e + 1, t + 1] for e, t in log.positions)


def test_overlapping_sequences(pack_pieces: Pack) -> None:
    log = pack_pieces([(0, 0, 6, "terminated"), (1, 0, 7, "terminated")])
    # At (0, 4) nothing would be new; at (1, 4) one step is.
    assert starts_of(log, Sequences(4, overlap=2)) == [(0, 0), (0, 2), (1, 0), (1, 2), (1, 4)]


def test_starts_go_on_along_links_and_stay_where_items_may_start(pack_pieces: Pack) -> None:
    log = pack_pieces([(0, 0, 2, "open"), (0, 2, 1, "open"), (0, 3, 5, "open"), (0, 9, 3, "open")])
    assert starts_of(log, Sequences(2)) == [(0, t) for t in (0, 2, 4, 6, 9, 11)]
    packed = log.packed
    allowed = np.array([log.positions[0, t] for t in (1, 4, 9, 10)])
    log.packed = Packed(packed.records, packed.runs, allowed, allowed, packed.num_steps, 1)
    assert starts_of(log, Sequences(2)) == [(0, 4), (0, 9)]


def test_many_runs_of_one_step(pack_pieces: Pack) -> None:
    num = 200_000
    positions, ones = 2 * np.arange(num), np.ones(num, np.int64)
    packed = Packed(
        records=pack_pieces([]).packed.records,
        runs=Runs(positions, ones, 0 * ones, 0 * ones, ones),
        steps=positions,
        bootstrappable=positions,
        num_steps=num,
        num_episodes=num,
    )
    starts = Sequences(8, overlap=2, burn_in=3).starts(packed)
    np.testing.assert_array_equal(starts, positions)


@pytest.mark.parametrize("frame_stack", [1, 3])
def test_memory_is_used_again(pack_pieces: Pack, frame_stack: int) -> None:
    log = pack_pieces([(0, 0, 4, "open"), (0, 4, 3, "cut"), (1, 0, 2, "terminated")], frame_stack)
    item = Sequences(4, burn_in=1)
    out = rows_at(log, item, [(0, 4), (1, 0)])
    other = rows_at(log, item, [(0, 1), (0, 6)])
    assert rows_at(log, item, [(0, 1), (0, 6)], out) is out
    for name, value in vars(other.batch).items():
        if name != "columns":
            np.testing.assert_array_equal(getattr(out.batch, name), value, name)


def test_stacks(pack_pieces: Pack) -> None:
    log = pack_pieces([(0, 0, 2, "open"), (0, 2, 2, "truncated")], 3)
    batch = rows_at(log, Sequences(3), [(0, 0), (0, 3)]).batch
    assert batch.observations.shape == (2, 3, 3, 2)
    assert batch.observations[0, :, :, 1].tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 2]]
    assert batch.next_observations[0, :, :, 1].tolist() == [[0, 0, 1], [0, 1, 2], [1, 2, 3]]
    # Past the end a stack still shows the last frames of the episode, and after them nothing.
    assert batch.observations[1, :, :, 1].tolist() == [[1, 2, 3], [2, 3, 4], [3, 4, 0]]
    assert batch.mask.tolist() == [[True, True, True], [True, False, False]]


@pytest.mark.parametrize(
    "options",
    [(0,), (4, 4), (4, -1), (4, 0, -1)],
    ids=str,
)
def test_options_out_of_range(options: tuple[int, ...]) -> None:
    with pytest.raises(
        ConfigInvalidError, match=r"sequences: found (length|overlap|burn_in) -?[0-9]+, expected"
    ):
        Sequences(*options)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(
    data=st.data(),
    length=st.integers(1, 9),
    overlap=st.integers(0, 8),
    burn_in=st.sampled_from([0, 0, 1, 4]),
    frame_stack=st.integers(1, 3),
)
def test_every_row_is_the_episode_s(
    pack_pieces: Pack,
    draw_pieces: Any,
    data: Any,
    length: int,
    overlap: int,
    burn_in: int,
    frame_stack: int,
) -> None:
    log = pack_pieces(draw_pieces(data), frame_stack)
    item = Sequences(length, min(overlap, length - 1), burn_in, 0.5)
    starts = starts_of(log, item)
    batch = rows_at(log, item, starts).batch
    learned = {tuple(key) for key in batch.keys[batch.mask].tolist()}
    learnable = {
        (e + 1, t + 1)
        for e, t in log.positions
        if (chain := log.chain(e, t)).first == 0 or t - chain.first >= burn_in
    }
    assert learned == learnable
    assert batch.mask.any(axis=1).all()
    for i, (episode, start) in enumerate(starts):
        chain = log.chain(episode, start)
        assert (start - chain.first) % (length - item.overlap) == 0
        for t in range(burn_in + length):
            step, own = start + t, start + t < chain.end
            known = chain.has_successor or step + 1 < chain.end
            first = start == 0
            assert batch.mask[i, t] == (own and (t >= burn_in or first))
            assert batch.bootstrappable[i, t] == (own and known)
            ended = chain.ends_as == "terminated" and step + 1 == chain.end
            assert batch.discounts[i, t] == (0.5 if own and not ended else 0)
            assert batch.rewards[i, t] == (episode / 2 + step + 1 if own else 0)
            assert batch.keys[i, t].tolist() == ([episode + 1, step + 1] if own else [0, 0])
            seen = batch.observations[i, t].reshape(frame_stack, 2).tolist()
            following = batch.next_observations[i, t].reshape(frame_stack, 2).tolist()
            if own:
                assert seen == chain.frames(step, frame_stack)
                assert following == chain.frames(step + 1, frame_stack)
            elif step >= chain.end + frame_stack:
                assert not np.any([seen, following])
            else:
                assert {frame[0] for frame in seen + following} <= {episode, 0}
