import dataclasses

import numpy as np
import pytest
import torch

from replaylake.datastore.episodes.spaces import Discrete
from replaylake.datastore.errors import ConfigInvalidError, SpaceUnsupportedError
from replaylake.datastore.replay.to_torch import to_torch
from replaylake.offline.d3rlpy.batches import D3rlpyBatches
from replaylake.offline.dataset_statistics import DatasetStatistics, RewardScaling

DQN = ("dqn", "discrete")
CLONING = ("bc", "discrete")


@pytest.mark.parametrize("name", [DQN, CLONING])
@pytest.mark.parametrize("which", ["action_masks", "next_action_masks"])
def test_masks_are_refused_unless_all_true(name, which, row_of, make, batch):
    masks = np.ones((32, 3), bool)
    learner = make(row_of(*name))
    learner.update(batch(**{which: masks.copy()}))
    masks[5, 1] = False
    with pytest.raises(SpaceUnsupportedError, match=r"masks that are not all true.*such as bc"):
        learner.update(batch(**{which: masks}))


@pytest.mark.parametrize("convert", [lambda made: made, to_torch])
def test_importance_weights_are_refused(convert, row_of, make, batch):
    weights = np.array([7] + [1] * 31, np.float32)
    with pytest.raises(ConfigInvalidError, match="importance weights of 1 to 7"):
        make(row_of(*DQN)).update(convert(batch(weights=weights)))


def test_steps_without_a_successor_are_refused_where_it_bootstraps(row_of, make, batch):
    known = np.array([False] + [True] * 31)
    with pytest.raises(ConfigInvalidError, match="without a next observation"):
        make(row_of(*DQN)).update(batch(bootstrappable=known))
    make(row_of(*CLONING)).update(batch(bootstrappable=known))


def test_discounts_are_gamma_or_zero(row_of, make, batch):
    half = np.full(32, 0.5, np.float32)
    with pytest.raises(ConfigInvalidError, match=r"a discount of 0\.5 .*expected 0 .*or 0\.99"):
        make(row_of(*DQN)).update(batch(discounts=half))
    # Cloning looks at no discount.
    make(row_of(*CLONING)).update(batch(discounts=half))
    make(row_of(*DQN), discount=0.5).update(batch(discounts=half))


def test_a_gamma_of_zero_learns_the_reward_alone(row_of, make, batch):
    """All discounts are 0 then: what comes next must not matter."""
    learners = [make(row_of(*DQN), discount=0.0) for _ in range(2)]
    made = batch(discounts=np.zeros(32, np.float32))
    other = dataclasses.replace(made, next_observations=made.next_observations + 100)
    first, second = (
        learner.update(one).metrics for learner, one in zip(learners, (made, other), strict=True)
    )
    assert first == second


def test_a_step_is_terminal_where_its_discount_is_zero(row_of, make, batch):
    discounts = np.array([0.99, 0, 0.99], np.float32)
    made = make(row_of(*DQN))._batches.convert(batch(size=3, discounts=discounts))
    assert made.terminals.tolist() == [[0.0], [1.0], [0.0]]
    assert made.rewards.shape == made.intervals.shape == (3, 1)


def test_actions_are_given_to_d3rlpy_from_minus_one_to_one(row_of, make, batch):
    actions = np.array([[-2.0, 0.0], [2.0, 10.0], [0.0, 5.0]], np.float32)
    learner = make(row_of("rebrac", "continuous"))
    made = learner._batches.convert(
        batch("box", size=3, actions=actions, next_actions=actions[::-1].copy())
    )
    assert made.actions.tolist() == [[-1.0, -1.0], [1.0, 1.0], [0.0, 0.0]]
    assert made.next_actions.tolist() == [[0.0, 0.0], [1.0, 1.0], [-1.0, -1.0]]


def test_discrete_actions_are_given_from_zero(row_of, make, batch):
    learner = make(row_of(*DQN), space=Discrete(3, start=7))
    made = learner._batches.convert(batch(size=3, actions=np.array([7, 8, 9])))
    assert made.actions.tolist() == [[0.0], [1.0], [2.0]]
    assert learner.policy().spec.action_space == Discrete(3, start=7)


def test_rewards_and_returns_are_scaled_before_a_batch_is_built(row_of, make, batch):
    scaled = DatasetStatistics(rewards=RewardScaling(scale=4.0))
    values = np.array([2.0, -4.0, 8.0], np.float32)
    learner = make(row_of("cal_ql", "continuous"), facts=scaled)
    made = learner._batches.convert(batch("box", size=3, rewards=values, returns=2 * values))
    assert made.rewards.tolist() == [[0.5], [-1.0], [2.0]]
    assert made.returns_to_go.tolist() == [[1.0], [-2.0], [4.0]]
    assert learner.normalization["rewards"] == {"shift": 0.0, "scale": 4.0}
    shifted = DatasetStatistics(rewards=RewardScaling(shift=2.0, scale=4.0))
    made = make(row_of(*DQN), facts=shifted)._batches.convert(batch(size=3, rewards=values))
    assert made.rewards.tolist() == [[0.0], [-1.5], [1.5]]
    with pytest.raises(ConfigInvalidError, match=r"cal_ql: found rewards shifted by 2"):
        make(row_of("cal_ql", "continuous"), facts=shifted)


def test_a_compiled_update_gets_memory_of_its_own(row_of, make, batch):
    """A captured graph writes every later batch into its first one's."""
    learner = make(row_of("iql", "continuous"))
    ours = to_torch(batch("box"))
    theirs = {}
    for is_compiled in (False, True):
        batches = D3rlpyBatches(
            learner._algorithm,
            learner._features,
            learner._action_space,
            learner._scaling,
            RewardScaling(),
            discount=0.99,
            device=torch.device("cpu"),
            is_compiled=is_compiled,
        )
        theirs[is_compiled] = batches.convert(ours).observations.data_ptr()
    assert theirs[False] == ours.observations.data_ptr()
    assert theirs[True] != ours.observations.data_ptr()
