"""Cloning actions of several elements, from the log to the packaged policy in an environment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, MultiBinary, MultiDiscrete
from replaylake.datastore.errors import SpaceUnsupportedError
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.package import load_policy
from replaylake.offline.algorithms.bc import BCConfig, bc
from replaylake.offline.algorithms.catalog import check_algorithm
from replaylake.offline.evaluation.evaluate import EvaluationConfig, evaluate
from replaylake.offline.learning.learner import GradientLearner
from replaylake.offline.losses.likelihood import multi_categorical_nll
from replaylake.offline.networks.graph import TorchPolicy
from replaylake.offline.running.train import TrainConfig, train

SPACE = MultiDiscrete((2, 3))


class Echo(gymnasium.Env[Any, Any]):
    """One step: the reward is how many elements of the action are those that were shown."""

    observation_space = gymnasium.spaces.Box(0, 1, (5,), np.float32)
    action_space = gymnasium.spaces.MultiDiscrete([2, 3])

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        self._shown = self.np_random.integers([2, 3])
        return shown(self._shown[None])[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Any]:
        assert self.action_space.contains(np.asarray(action))
        reward = float((np.asarray(action) == self._shown).sum())
        return shown(self._shown[None])[0], reward, True, False, {}


gymnasium.register("ReplayLakeTest/Echo-v0", Echo)


def shown(values: np.ndarray) -> np.ndarray:
    """Values [N, 2] as two one-hot vectors, float32 [N, 5]."""
    rows = np.zeros((len(values), 5), np.float32)
    rows[np.arange(len(values)), values[:, 0]] = 1
    rows[np.arange(len(values)), 2 + values[:, 1]] = 1
    return rows


def test_the_loss_by_hand() -> None:
    logits = torch.tensor([[0.25, 0.75, 0.5, 0.25, 0.25]]).log().repeat(2, 1)
    loss = multi_categorical_nll(logits, torch.tensor([[1, 0], [0, 2]]), SPACE.nvec)
    expected = -np.log([0.75 * 0.5, 0.25 * 0.25])
    torch.testing.assert_close(loss, torch.tensor(expected, dtype=torch.float32))


@pytest.mark.parametrize("space", [SPACE, MultiBinary(2)], ids=str)
def test_it_fits_the_shares_of_the_log(space: MultiDiscrete | MultiBinary) -> None:
    # Elements apart: the first is 1 in three of four rows, the second 1 in one of four.
    actions = np.array([[1, 0], [1, 1], [1, 0], [0, 0]])
    batch: Batch[Any] = Batch(
        observations=np.zeros((4, 1), np.float32),
        actions=actions,
        rewards=np.zeros(4, np.float32),
        discounts=np.zeros(4, np.float32),
        next_observations=np.zeros((4, 1), np.float32),
        behavior_log_probs=np.zeros(4, np.float32),
        weights=np.ones(4, np.float32),
        keys=np.zeros((4, 2), np.uint64),
    )
    learner = GradientLearner(bc(Box((1,)), space, BCConfig((8,), 3e-2)), seed=0)
    for _ in range(300):
        learner.update(batch)
    policy = TorchPolicy(learner.policy())
    likely = policy.log_probs(batch.observations, actions, deterministic=False)
    np.testing.assert_allclose(
        np.exp(likely), [0.75 * 0.75, 0.75 * 0.25, 0.75 * 0.75, 0.25 * 0.75], atol=0.02
    )


def test_from_the_log_to_the_environment(tmp_path: Path) -> None:
    lake = open_lake(tmp_path / "lake", create=True)
    rng = np.random.default_rng(0)
    values = rng.integers([2, 3], size=(600, 2))
    dataset = lake.dataset("echo")
    dataset.create(Box((5,), "float32", 0, 1), SPACE)
    dataset.append(
        [
            Episode(
                episode_id=f"e{i}",
                observations=shown(values[i : i + 1]),
                actions=values[i : i + 1],
                rewards=np.array([2.0]),
                terminated=True,
            )
            for i in range(600)
        ]
    )
    config = TrainConfig(updates=150, batch_size=64, options={"hidden_sizes": [32]})
    trained = train(lake, ["echo"], replace(config, policy="echo")).policy
    policy = load_policy(trained.path)
    assert policy.spec.head == "multi_categorical"
    assert policy.act(shown(values)).actions.tolist() == values.tolist()
    found = evaluate(policy, EvaluationConfig("ReplayLakeTest/Echo-v0", episodes=10, seed=0))
    assert found.mean_return == 2


def test_who_can_take_it_is_said() -> None:
    assert check_algorithm("bc", MultiBinary(3)).head == "multi_categorical"
    with pytest.raises(
        SpaceUnsupportedError, match=r"expected .*Algorithms that take it: bc, impala, ppo\."
    ):
        check_algorithm("d3rlpy:dqn", SPACE)
