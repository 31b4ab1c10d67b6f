import numpy as np
import torch

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.replay.to_torch import to_torch
from replaylake.offline.learning.minibatches import minibatches, take_rows


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def numbered(batch, size):
    """A batch whose actions are the numbers of its rows."""
    keys = np.stack([np.arange(size, dtype=np.uint64)] * 2, axis=1)
    return to_torch(batch(size=size, actions=np.arange(size), keys=keys))


def test_each_epoch_has_every_row_once_in_another_order(batch):
    rows = numbered(batch, 10)
    parts = list(minibatches(rows, rng(), epochs=2, num=3))
    assert [len(part.actions) for part in parts] == [4, 3, 3] * 2
    epochs = [torch.cat([part.actions for part in parts[i : i + 3]]).tolist() for i in (0, 3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10))
    assert epochs[0] != epochs[1] != list(range(10)) != epochs[0]
    for part in parts:
        assert torch.equal(part.observations, rows.observations[part.actions])
        assert part.keys[:, 0].tolist() == part.actions.tolist()


def test_the_order_is_the_generators(batch):
    rows = numbered(batch, 10)
    same, again = (next(minibatches(rows, rng(1), num=2)).actions for _ in range(2))
    assert torch.equal(same, again)
    assert not torch.equal(same, next(minibatches(rows, rng(2), num=2)).actions)


def test_no_part_is_empty(batch):
    assert [len(p.actions) for p in minibatches(numbered(batch, 2), rng(), num=5)] == [1, 1]
    assert list(minibatches(numbered(batch, 0), rng(), epochs=3)) == []


def test_one_part_is_the_batch(batch):
    rows, generator = numbered(batch, 4), rng()
    before = generator.get_state()
    assert [part is rows for part in minibatches(rows, generator, epochs=2)] == [True, True]
    assert torch.equal(generator.get_state(), before)


def test_a_mask_takes_steps_of_sequences():
    steps = torch.arange(6).view(2, 3)
    batch = Batch(
        observations={"a": steps[..., None].float()},
        actions=steps,
        rewards=steps.float(),
        discounts=steps.float(),
        next_observations={},
        behavior_log_probs=steps.float(),
        weights=steps.float(),
        keys=np.arange(12).reshape(2, 3, 2),
    )
    found = take_rows(batch, torch.tensor([[True, False, False], [True, True, False]]))
    assert found.actions.tolist() == [0, 3, 4]
    assert found.observations["a"].tolist() == [[0], [3], [4]]
    assert found.keys.tolist() == [[0, 1], [6, 7], [8, 9]]
    assert found.next_observations == {}
    assert found.action_masks is None
