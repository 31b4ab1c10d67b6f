from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.replay.items.transitions import Transitions
from replaylake.datastore.replay.protocols import SelectedItems

Pack = Callable[..., Any]


def rows_of(log: Any, item: Transitions, out: Any = None) -> Any:
    """All rows that the item can be, as a batch, and the (episode, step) of each."""
    starts = item.starts(log.packed)
    numbers = np.arange(len(starts))
    assembler = item.assembler(log.packed.records)
    batch = assembler.assemble(starts, SelectedItems(numbers), out).batch
    where = {position: step for step, position in log.positions.items()}
    return batch, [where[int(position)] for position in starts]


def test_two_steps_of_every_kind_of_end(pack_pieces: Pack) -> None:
    # Rewards of episode 0 are 1, 2, 3; of episode 1 they are 1.5, 2.5, 3.5; and so on.
    ends = ["terminated", "truncated", "cut"]
    log = pack_pieces([(e, 0, 3, end) for e, end in enumerate(ends)])
    batch, steps = rows_of(log, Transitions(0.5, n_step=2, only_bootstrappable=False))
    rows = {
        step: (reward, discount, *following)
        for step, reward, discount, following in zip(
            steps,
            batch.rewards.tolist(),
            batch.discounts.tolist(),
            batch.next_observations.tolist(),
            strict=True,
        )
    }
    assert rows == {
        (0, 0): (1 + 0.5 * 2, 0.25, 0, 2),
        (0, 1): (2 + 0.5 * 3, 0, 0, 3),
        (0, 2): (3, 0, 0, 3),
        (1, 0): (1.5 + 0.5 * 2.5, 0.25, 1, 2),
        (1, 1): (2.5 + 0.5 * 3.5, 0.25, 1, 3),
        (1, 2): (3.5, 0.5, 1, 3),
        (2, 0): (2 + 0.5 * 3, 0.25, 2, 2),
        # What followed step 2 is not known, but its own observation is.
        (2, 1): (3, 0.5, 2, 2),
        (2, 2): (4, 0.5, 2, 2),
    }
    assert [bool(known) for known in batch.bootstrappable] == [True] * 8 + [False]


def test_the_rest_is_the_first_step_s(pack_pieces: Pack) -> None:
    log = pack_pieces([(0, 0, 2, "open"), (0, 2, 3, "terminated")])
    batch, steps = rows_of(log, Transitions(0.5, n_step=3))
    assert steps == [(0, t) for t in range(5)]
    assert batch.observations.tolist() == [[0, t] for t in range(5)]
    assert batch.actions.tolist() == [0, 1, 2, 3, 4]
    assert batch.keys.tolist() == [[1, t + 1] for t in range(5)]
    assert batch.behavior_log_probs.tolist() == [-1, -2, -3, -4, -5]
    assert batch.columns["hidden"].tolist() == [[t] for t in range(5)]
    assert batch.action_masks.tolist() == [[True, t % 2 == 0] for t in range(5)]
    # Over a link, and the last ones up to the end, where all is allowed.
    assert batch.next_observations[:, 1].tolist() == [3, 4, 5, 5, 5]
    assert batch.next_action_masks[:, 1].tolist() == [False, True, True, True, True]
    assert batch.rewards.tolist() == [1 + 1 + 0.75, 2 + 1.5 + 1, 3 + 2 + 1.25, 4 + 2.5, 5]
    assert batch.discounts.tolist() == [0.125, 0.125, 0, 0, 0]
    assert batch.indices.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("frame_stack", "n_step"), [(1, 1), (1, 3), (3, 1), (3, 2), (2, 5)], ids=str
)
def test_memory_is_used_again(pack_pieces: Pack, frame_stack: int, n_step: int) -> None:
    log = pack_pieces([(0, 0, 4, "open"), (0, 4, 4, "cut"), (1, 0, 8, "truncated")], frame_stack)
    item = Transitions(0.5, n_step)
    assembler = item.assembler(log.packed.records)
    starts = item.starts(log.packed)
    out = assembler.assemble(starts[:6], SelectedItems(np.arange(6), np.full(6, 0.5, np.float32)))
    assert out.batch.weights.tolist() == [0.5] * 6
    other = assembler.assemble(starts[3:9], SelectedItems(np.arange(3, 9)))
    again = assembler.assemble(starts[3:9], SelectedItems(np.arange(3, 9)), out)
    assert again is out
    for name, value in vars(other.batch).items():
        if name not in ("weights", "columns"):
            np.testing.assert_array_equal(getattr(out.batch, name), value, name)


def test_stacks_share_their_frames(pack_pieces: Pack) -> None:
    log = pack_pieces([(0, 0, 3, "open")], 3)
    batch, _ = rows_of(log, Transitions())
    assert batch.observations[:, :, 1].tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 2]]
    assert batch.next_observations[:, :, 1].tolist() == [[0, 0, 1], [0, 1, 2], [1, 2, 3]]
    assert np.shares_memory(batch.observations[0, 1:], batch.next_observations[0, :2])


def test_options_out_of_range() -> None:
    with pytest.raises(ConfigInvalidError, match=r"found discount 1.5, expected a number from 0"):
        Transitions(1.5)
    with pytest.raises(
        ConfigInvalidError, match="found n_step 0, expected a whole number from 1 to 1023"
    ):
        Transitions(n_step=0)
    with pytest.raises(
        ConfigInvalidError, match="found n_step 1024, expected a whole number from 1 to 1023"
    ):
        Transitions(n_step=1024)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(
    data=st.data(),
    n_step=st.sampled_from([1, 2, 3, 5, 40]),
    frame_stack=st.integers(1, 4),
    only_bootstrappable=st.booleans(),
)
def test_every_row_is_the_episode_s(
    pack_pieces: Pack,
    draw_pieces: Any,
    data: Any,
    n_step: int,
    frame_stack: int,
    only_bootstrappable: bool,
) -> None:
    pieces = data.draw(st.permutations(draw_pieces(data)))
    log = pack_pieces(pieces, frame_stack)
    item = Transitions(0.5, n_step, only_bootstrappable)
    batch, steps = rows_of(log, item)
    wanted = set(log.positions)
    if only_bootstrappable:
        lost = {(e, f + n - 1) for e, f, n, end in pieces if end in ("cut", "lost")}
        wanted -= lost
    assert set(steps) == wanted
    for i, (episode, step) in enumerate(steps):
        chain = log.chain(episode, step)
        num = min(n_step, chain.end - step)
        known = chain.has_successor or step + num < chain.end
        assert bool(batch.bootstrappable[i]) == (known or num > 1)
        num -= not known and num > 1
        rewards = [episode / 2 + step + k + 1 for k in range(num)]
        assert batch.rewards[i] == np.float32(sum(0.5**k * r for k, r in enumerate(rewards)))
        ended = chain.ends_as == "terminated" and step + num == chain.end
        assert batch.discounts[i] == (0 if ended else np.float32(0.5**num))
        for field, at in (("observations", step), ("next_observations", step + num)):
            frames = chain.frames(at, frame_stack)
            assert getattr(batch, field)[i].tolist() == (frames if frame_stack > 1 else frames[0])
        assert batch.actions[i] == 1000 * episode + step


def test_returns_and_next_actions_of_every_kind_of_end(pack_pieces: Pack) -> None:
    ends = ["terminated", "truncated", "cut"]
    log = pack_pieces([(e, 0, 3, end) for e, end in enumerate(ends)])
    item = Transitions(0.5, only_bootstrappable=False, returns=True, next_actions=True)
    batch, steps = rows_of(log, item)
    assert dict(zip(steps, batch.next_actions.tolist(), strict=True)) == {
        (0, 0): 1,
        (0, 1): 2,
        (0, 2): 2,
        (1, 0): 1001,
        (1, 1): 1002,
        (1, 2): 1002,
        (2, 0): 2001,
        (2, 1): 2002,
        (2, 2): 2002,
    }
    assert dict(zip(steps, batch.returns.tolist(), strict=True)) == {
        (0, 0): 1 + 1 + 0.75,
        (0, 1): 2 + 1.5,
        (0, 2): 3,
        (1, 0): 1.5 + 1.25 + 0.875,
        (1, 1): 2.5 + 1.75,
        (1, 2): 3.5,
        (2, 0): 2 + 1.5 + 1,
        (2, 1): 3 + 2,
        (2, 2): 4,
    }
    assert batch.returns.dtype == np.float32
    assert batch.next_actions.dtype == batch.actions.dtype
    # What stands in for a next action is nowhere else.
    plain, _ = rows_of(log, Transitions(0.5, only_bootstrappable=False))
    assert plain.returns is None
    assert plain.next_actions is None
    for name in ("observations", "actions", "next_observations", "next_action_masks"):
        assert getattr(batch, name).tolist() == getattr(plain, name).tolist()


@pytest.mark.parametrize("frame_stack", [1, 3])
def test_returns_and_next_actions_cross_from_piece_to_piece(
    pack_pieces: Pack, frame_stack: int
) -> None:
    log = pack_pieces([(0, 0, 2, "open"), (0, 2, 1, "open"), (0, 4, 2, "truncated")], frame_stack)
    batch, steps = rows_of(log, Transitions(1.0, returns=True, next_actions=True))
    assert steps == [(0, 0), (0, 1), (0, 2), (0, 4), (0, 5)]
    assert batch.returns.tolist() == [6, 5, 3, 11, 6]
    assert batch.next_actions.tolist() == [1, 2, 2, 5, 5]


def test_returns_do_not_depend_on_n_step(pack_pieces: Pack) -> None:
    log = pack_pieces([(0, 0, 3, "open"), (0, 3, 2, "terminated")])
    batch, _ = rows_of(log, Transitions(0.5, n_step=3, returns=True))
    single, _ = rows_of(log, Transitions(0.5, returns=True))
    assert batch.returns.tolist() == single.returns.tolist()


def test_returns_are_summed_up_once_a_discount(pack_pieces: Pack) -> None:
    records = pack_pieces([(0, 0, 3, "terminated")]).packed.records
    assert records.returns(0.5) is records.returns(0.5)
    assert records.returns(1.0)[0] == 6


def test_next_actions_of_several_steps_are_refused() -> None:
    with pytest.raises(ConfigInvalidError, match="next_actions with n_step 2, expected n_step 1"):
        Transitions(n_step=2, next_actions=True)
