import dataclasses

import numpy as np
import pytest
import torch

from replaylake.datastore.episodes.spaces import Box, Dict, Discrete, MultiDiscrete
from replaylake.datastore.errors import ConfigInvalidError, SpaceUnsupportedError
from replaylake.datastore.lake.policies.package import GraphSession
from replaylake.offline.algorithms.discrete_cql import DiscreteCQLConfig, discrete_cql
from replaylake.offline.algorithms.dqn import DQNConfig, dqn
from replaylake.offline.d3rlpy.library import load_d3rlpy
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.learning.export import export_onnx
from replaylake.offline.learning.learner import GradientLearner
from replaylake.offline.networks.graph import TorchPolicy, run_graph

SMALL = {"hidden_sizes": (16, 16)}
OBSERVATION = Box((4,))
ACTIONS = Discrete(3, 5)


def make(function=dqn, config=DQNConfig, space=ACTIONS, observation=OBSERVATION, seed=0, **options):
    algorithm = function(observation, space, config(**{**SMALL, **options}), DatasetStatistics())
    return GradientLearner(algorithm, seed=seed)


def q_values(learner, observations):
    return run_graph(learner.policy(), {"observations": observations})["q_values"]


def started(batch, seed=0, **changes):
    """A batch whose actions begin at 5, as the space's do."""
    made = batch(seed=seed, **changes)
    return dataclasses.replace(made, actions=made.actions + 5)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("loss", ["huber", "squared"])
def test_the_loss_and_the_priorities_by_hand(batch, double, dueling, loss):
    options = {"double": double, "dueling": dueling, "loss": loss, "target_update_period": 100}
    learner = make(learning_rate=1e-2, **options)
    of_target = {seed: q_values(learner, started(batch, seed).next_observations) for seed in (0, 1)}
    learner.update(started(batch, 0))
    made = started(batch, 1, weights=np.linspace(0, 2, 32, dtype=np.float32))
    q_t = of_target[1]
    chosen = (q_values(learner, made.next_observations) if double else q_t).argmax(axis=1)
    target = made.rewards + made.discounts * q_t[np.arange(32), chosen]
    errors = target - q_values(learner, made.observations)[np.arange(32), made.actions - 5]
    squares = 0.5 * errors**2
    expected = np.where(np.abs(errors) < 1, squares, np.abs(errors) - 0.5)
    expected = expected if loss == "huber" else squares
    update = learner.update(made)
    assert float(update.metrics["q_loss"]) == pytest.approx(
        float((made.weights * expected).mean()), rel=1e-5
    )
    np.testing.assert_allclose(update.priorities, np.abs(errors), rtol=1e-4, atol=1e-5)


def d3rlpys(name, batches, parameters, **options):
    """The parameters after d3rlpy's own updates from ours."""
    d3rlpy = load_d3rlpy()
    encoder = d3rlpy.models.VectorEncoderFactory(hidden_units=[16, 16])
    config = getattr(d3rlpy.algos, name)(encoder_factory=encoder, **options)
    algorithm = config.create(device="cpu:0")
    algorithm.create_impl((4,), 3)
    modules = algorithm.impl.modules
    for network in (modules.q_funcs, modules.targ_q_funcs):
        for theirs, ours in zip(network.parameters(), parameters, strict=True):
            theirs.data.copy_(ours)
    losses = []
    for made in batches:
        actions = (made.actions - 5).astype(np.float32)[:, None]
        theirs = d3rlpy.dataset.TransitionMiniBatch(
            observations=made.observations,
            actions=actions,
            rewards=made.rewards[:, None],
            next_observations=made.next_observations,
            next_actions=np.zeros_like(actions),
            terminals=(made.discounts[:, None] == 0).astype(np.float32),
            intervals=np.ones_like(actions),
            transitions=[],
        )
        losses.append(algorithm.update(theirs)["loss"])
    return losses, [p.detach() for p in modules.q_funcs.parameters()]


@pytest.mark.parametrize(
    ("function", "config", "options", "theirs"),
    [
        (dqn, DQNConfig, {}, "DQNConfig"),
        (dqn, DQNConfig, {"double": True}, "DoubleDQNConfig"),
        (discrete_cql, DiscreteCQLConfig, {}, "DiscreteCQLConfig"),
        (discrete_cql, DiscreteCQLConfig, {"alpha": 4.0}, "DiscreteCQLConfig"),
    ],
)
def test_updates_are_d3rlpys_from_the_same_parameters(batch, function, config, options, theirs):
    common = {"learning_rate": 1e-2}
    batches = [started(batch, seed) for seed in range(5)]
    learner = make(function, config, target_update_period=1, **common, **options)
    parameters = learner._networks["q"].parameters
    first = [p.detach().clone() for p in parameters()]
    losses = [float(learner.update(made).metrics["q_loss"]) for made in batches]
    said = {key: value for key, value in options.items() if key == "alpha"}
    their_losses, expected = d3rlpys(
        theirs, batches, first, target_update_interval=1, **common, **said
    )
    np.testing.assert_allclose(losses, their_losses, rtol=1e-5)
    for found, their in zip(parameters(), expected, strict=True):
        torch.testing.assert_close(found.detach(), their, rtol=0, atol=1e-5)


def test_defaults_are_d3rlpys():
    algos = load_d3rlpy().algos
    for ours, theirs in (
        (DQNConfig(), algos.DoubleDQNConfig()),
        (DiscreteCQLConfig(), algos.DiscreteCQLConfig()),
    ):
        assert ours.learning_rate == theirs.learning_rate
        # Ours copies its targets more often: see the default.
        assert ours.target_update_period == 500
        assert getattr(ours, "alpha", None) == getattr(theirs, "alpha", None)


@pytest.mark.parametrize("double", [False, True])
def test_a_forbidden_next_action_is_never_bootstrapped_from(batch, double):
    learners = [make(double=double) for _ in range(2)]
    made = started(batch)
    q_t = q_values(learners[0], made.next_observations)
    best = q_t.argmax(axis=1)
    masks = np.ones((32, 3), bool)
    masks[np.arange(32), best] = False
    second = np.where(masks, q_t, -np.inf).max(axis=1)
    # The same targets, spelled as rewards of steps that end.
    ended = dataclasses.replace(
        made,
        rewards=(made.rewards + made.discounts * second).astype(np.float32),
        discounts=np.zeros(32, np.float32),
    )
    found = learners[0].update(dataclasses.replace(made, next_action_masks=masks))
    expected = learners[1].update(ended)
    np.testing.assert_allclose(found.priorities, expected.priorities, rtol=1e-5, atol=1e-6)


def test_n_steps_bootstrap_with_the_batches_own_discounts(batch):
    learner = make(n_step=3)
    assert learner.item.n_step == 3
    made = started(batch, discounts=np.full(32, 0.99**3, np.float32))
    q_t = q_values(learner, made.next_observations).max(axis=1)
    q_tm1 = q_values(learner, made.observations)[np.arange(32), made.actions - 5]
    errors = made.rewards + 0.99**3 * q_t - q_tm1
    np.testing.assert_allclose(
        learner.update(made).priorities, np.abs(errors), rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
def test_it_learns_the_values_of_a_chain(batch):
    """Five states in a row, left or right, 1 at the right end: Q is gamma to the steps left."""
    learner = make(
        space=Discrete(2),
        observation=Discrete(5),
        learning_rate=1e-2,
        tau=0.1,
        target_update_period=1,
        double=True,
    )
    rng = np.random.default_rng(0)
    for _ in range(500):
        states, actions = rng.integers(0, 5, 64), rng.integers(0, 2, 64)
        ended = (states == 4) & (actions == 1)
        following = np.clip(states + 2 * actions - 1, 0, 4)
        learner.update(
            batch(
                size=64,
                observations=states,
                next_observations=following,
                actions=actions,
                rewards=ended.astype(np.float32),
                discounts=np.where(ended, 0, 0.9).astype(np.float32),
            )
        )
    values = q_values(learner, np.arange(5))
    np.testing.assert_allclose(values[:, 1], 0.9 ** np.arange(4, -1, -1), atol=0.05)
    acted = TorchPolicy(learner.policy()).act(np.arange(5))
    assert acted.actions.tolist() == [1] * 5


@pytest.mark.parametrize(
    ("function", "config"), [(dqn, DQNConfig), (discrete_cql, DiscreteCQLConfig)]
)
def test_it_continues_bit_for_bit(batch, function, config):
    def run(learner, seeds):
        for seed in seeds:
            learner.update(started(batch, seed))
        return learner.state_dict()

    options = {"target_update_period": 3, "dueling": True, "double": True}
    whole = run(make(function, config, **options), range(8))
    half = run(make(function, config, **options), range(4))
    resumed = make(function, config, seed=9, **options)
    resumed.load_state_dict(half)
    found = run(resumed, range(4, 8))
    assert found.keys() == whole.keys()
    for name, array in whole.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize("dueling", [False, True])
def test_its_graph_is_the_network(batch, dueling):
    learner = make(dueling=dueling)
    learner.update(started(batch))
    graph = learner.policy()
    assert graph.spec.head == "q_values"
    inputs = {"observations": batch(seed=3).observations}
    found = GraphSession(export_onnx(graph), graph.spec).run(inputs)["q_values"]
    np.testing.assert_allclose(found, run_graph(graph, inputs)["q_values"], rtol=1e-5, atol=1e-6)


def test_dict_observations(batch):
    space = Dict({"a": Box((2,)), "room": Discrete(3)})
    learner = make(observation=space, double=True)
    rooms = np.arange(32) % 3
    observations = {"a": np.ones((32, 2), np.float32), "room": rooms}
    made = started(batch, observations=observations, next_observations=observations)
    assert np.isfinite(float(learner.update(made).metrics["q_loss"]))


@pytest.mark.parametrize("space", [Box((2,)), MultiDiscrete((2, 2))])
def test_other_actions_are_refused(space):
    with pytest.raises(SpaceUnsupportedError, match="expected Discrete"):
        make(space=space)


@pytest.mark.parametrize(
    "options",
    [
        {"learning_rate": 0.0},
        {"hidden_sizes": (0,)},
        {"n_step": 0},
        {"tau": 0.0},
        {"target_update_period": 0},
    ],
)
@pytest.mark.parametrize(("config", "name"), [(DQNConfig, "dqn"), (DiscreteCQLConfig, "cql")])
def test_options_out_of_range_are_refused(options, config, name):
    with pytest.raises(ConfigInvalidError, match=f"{name}: {next(iter(options))}"):
        config(**options)
