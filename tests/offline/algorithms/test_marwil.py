import dataclasses

import numpy as np
import pytest
import torch

from replaylake.datastore.episodes.spaces import Box, Discrete, MultiDiscrete
from replaylake.datastore.errors import ConfigInvalidError, SpaceUnsupportedError
from replaylake.datastore.lake.policies.package import GraphSession
from replaylake.offline.algorithms.bc import BCConfig, bc
from replaylake.offline.algorithms.marwil import MARWILConfig, marwil
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.learning.export import export_onnx
from replaylake.offline.learning.learner import GradientLearner
from replaylake.offline.networks.graph import TorchPolicy, run_graph

OBSERVATION = Box((4,))
ACTIONS = {"discrete": Discrete(3), "box": Box((2,), "float32", -2.0, 2.0)}
SMALL = {"hidden_sizes": (32,), "learning_rate": 1e-2}


def make(kind="discrete", seed=0, **options):
    config = MARWILConfig(**{**SMALL, **options})
    return GradientLearner(
        marwil(OBSERVATION, ACTIONS[kind], config, DatasetStatistics()), seed=seed
    )


def with_returns(batch, kind="discrete", seed=0, size=64, **changes):
    returns = np.random.default_rng(seed).normal(5, 3, size).astype(np.float32)
    return batch(kind, seed=seed, size=size, **{"returns": returns, **changes})


def values(learner, made):
    with torch.no_grad():
        return learner._networks["value"](torch.from_numpy(made.observations)).numpy()


def log_probs(learner, made):
    logits = run_graph(learner.policy(), {"observations": made.observations})["logits"]
    logits = np.where(True if made.action_masks is None else made.action_masks, logits, -np.inf)
    return (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))[
        np.arange(len(made)), made.actions
    ]


def test_updates_by_hand(batch):
    learner = make(beta=2.0, norm_rate=0.25, max_weight=3.0)
    squares, clipped = [], 0
    for seed in range(6):
        weights = np.linspace(0, 2, 64, dtype=np.float32)
        masks = np.ones((64, 3), bool)
        masks[::2, 0] = False
        made = with_returns(batch, seed=seed, weights=weights, action_masks=masks)
        made = dataclasses.replace(made, actions=np.where(masks[:, 0], made.actions, 1))
        advantages = made.returns - values(learner, made)
        squares.append((advantages**2).mean())
        norm = np.mean(squares[:4])
        for square in squares[4:]:
            norm += 0.25 * (square - norm)
        exponentials = np.exp(2.0 * advantages / np.sqrt(norm))
        clipped += (exponentials > 3).sum()
        nll = -log_probs(learner, made) * np.minimum(exponentials, 3)
        metrics = {k: float(v) for k, v in learner.update(made).metrics.items()}
        assert metrics["policy_loss"] == pytest.approx((weights * nll).mean(), rel=1e-4)
        assert metrics["value_loss"] == pytest.approx(
            (weights * advantages**2 / 2).mean(), rel=1e-4
        )
        assert metrics["advantage_norm"] == pytest.approx(np.sqrt(norm), rel=1e-4)
    assert clipped


@pytest.mark.parametrize("kind", ACTIONS)
def test_beta_0_is_cloning_and_asks_for_no_returns(batch, kind):
    cloning = bc(OBSERVATION, ACTIONS[kind], BCConfig(**SMALL), DatasetStatistics())
    learners = [make(kind, beta=0.0), GradientLearner(cloning, seed=0)]
    for seed in range(3):
        losses = [
            float(learner.update(batch(kind, seed=seed)).metrics["policy_loss"])
            for learner in learners
        ]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    algorithm = marwil(OBSERVATION, ACTIONS[kind], MARWILConfig(beta=0.0), DatasetStatistics())
    assert not algorithm.needs_returns
    assert marwil(OBSERVATION, ACTIONS[kind], MARWILConfig(), DatasetStatistics()).needs_returns


def test_it_prefers_what_paid_to_what_was_common(batch):
    """Action 0 is logged three times in four; 2 pays more where o_0 > 0, and 1 where not."""
    learner = make(beta=3.0)
    for seed in range(300):
        rng = np.random.default_rng(seed)
        made = with_returns(batch, seed=seed)
        actions = np.where(rng.random(64) < 0.75, 0, rng.integers(1, 3, 64))
        best = np.where(made.observations[:, 0] > 0, 2, 1)
        returns = (20.0 * (actions == best)).astype(np.float32)
        learner.update(dataclasses.replace(made, actions=actions, returns=returns))
    observations = batch(seed=999, size=500).observations
    actions = TorchPolicy(learner.policy()).act(observations).actions
    assert (actions == np.where(observations[:, 0] > 0, 2, 1)).mean() > 0.95


@pytest.mark.slow
def test_a_box_action_moves_to_where_it_paid(batch):
    """Actions are spread over [-2, 2], and pay the more the nearer they are to 1."""
    learner = make("box", beta=3.0)
    for seed in range(300):
        made = with_returns(batch, "box", seed=seed)
        returns = -((made.actions - 1) ** 2).sum(axis=1).astype(np.float32)
        learner.update(dataclasses.replace(made, returns=returns))
    observations = batch(seed=999, size=200).observations
    actions = TorchPolicy(learner.policy()).act(observations).actions
    assert actions.mean() == pytest.approx(0.8, abs=0.3)


@pytest.mark.parametrize("kind", ACTIONS)
def test_it_continues_bit_for_bit_norm_included(batch, kind):
    def run(learner, seeds):
        for seed in seeds:
            learner.update(with_returns(batch, kind, seed=seed))
        return learner.state_dict()

    whole = run(make(kind), range(6))
    half = run(make(kind), range(3))
    resumed = make(kind, seed=9)
    resumed.load_state_dict(half)
    found = run(resumed, range(3, 6))
    assert found.keys() == whole.keys()
    for name, array in whole.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize("kind", ACTIONS)
def test_its_graph_is_the_network(batch, kind):
    learner = make(kind)
    learner.update(with_returns(batch, kind))
    graph = learner.policy()
    inputs = {"observations": batch(seed=3).observations}
    found, expected = (
        GraphSession(export_onnx(graph), graph.spec).run(inputs),
        run_graph(graph, inputs),
    )
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6)


def test_other_actions_are_refused():
    with pytest.raises(SpaceUnsupportedError, match="MultiDiscrete"):
        marwil(OBSERVATION, MultiDiscrete((2, 2)), MARWILConfig(), DatasetStatistics())


@pytest.mark.parametrize(
    "options",
    [
        {"learning_rate": 0.0},
        {"beta": -1.0},
        {"max_weight": 0.5},
        {"norm_rate": 0.0},
        {"variance_weight": 2.0},
        {"hidden_sizes": (0,)},
    ],
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigInvalidError, match=f"marwil: {next(iter(options))}"):
        MARWILConfig(**options)
