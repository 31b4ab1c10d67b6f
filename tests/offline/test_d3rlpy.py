import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import torch

from replaylake.datastore.errors import ConfigInvalid, SpaceUnsupported
from replaylake.datastore.policies.package import (
    load_learner_weights,
    load_policy,
    save_package,
)
from replaylake.datastore.spaces import Box, Discrete
from replaylake.offline.algorithms.catalog import make_learner
from replaylake.offline.d3rlpy.learner import D3rlpyLearner
from replaylake.offline.d3rlpy.library import load_d3rlpy
from replaylake.offline.d3rlpy.table import TABLE
from replaylake.offline.export import export_onnx

OBSERVATION = Box((4,))
DISCRETE = Discrete(3)
CONTINUOUS = Box((2,), "float32", [-2.0, 0.0], [2.0, 10.0])
# Small networks: what is shown here does not depend on their size, and the default 256x256 is slow.
SMALL = {"hidden_sizes": [16, 16]}


def make(row, seed=0, space=None, **options):
    space = space or (DISCRETE if row.actions == "discrete" else CONTINUOUS)
    options = {**SMALL, **options}
    return D3rlpyLearner(row, OBSERVATION, space, options=options, seed=seed)


def row_of(name, actions):
    return next(row for row in TABLE if (row.name, row.actions) == (name, actions))


def run(learner, batch, updates, first=0):
    kind = "discrete" if learner.policy().spec.head in ("categorical", "q_values") else "box"
    for seed in range(first, first + updates):
        learner.update(batch(kind, seed=seed))
    return learner


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.name}-{row.actions}")
def test_each_learns_packages_and_acts_as_d3rlpy_does(row, batch, tmp_path):
    learner = run(make(row), batch, 3)
    metrics = learner.update(batch("discrete" if row.actions == "discrete" else "box")).metrics
    assert metrics
    assert all(np.isfinite(float(value)) for value in metrics.values())
    graph = learner.policy()
    assert graph.spec.head == row.head
    save_package(
        tmp_path / "p",
        onnx=export_onnx(graph),
        spec=graph.spec,
        manifest={"config": learner.config},
        learner_weights=learner.state_dict(),
    )
    observations = np.random.default_rng(0).standard_normal((1000, 4)).astype(np.float32)
    actions = load_policy(tmp_path / "p").act(observations).actions
    # d3rlpy's own greedy action, which for a Box is in [-1, 1].
    theirs = learner._d3rlpy.predict(observations)
    if row.actions == "discrete":
        np.testing.assert_array_equal(actions, theirs)
    else:
        np.testing.assert_allclose(actions, [0, 5] + theirs * [2, 5], atol=1e-5)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.name}-{row.actions}")
def test_each_continues_bit_for_bit_from_its_packaged_state(row, batch, tmp_path):
    whole = run(make(row), batch, 4).state_dict()
    half = run(make(row), batch, 2)
    graph = half.policy()
    save_package(
        tmp_path / "p", onnx=b"", spec=graph.spec, manifest={}, learner_weights=half.state_dict()
    )
    resumed = make(row, seed=1)
    resumed.load_state_dict(load_learner_weights(tmp_path / "p"))
    state = run(resumed, batch, 2, first=2).state_dict()
    assert state.keys() == whole.keys()
    for name in whole:
        np.testing.assert_array_equal(state[name], whole[name], err_msg=name)


DQN = ("dqn", "discrete")


@pytest.mark.parametrize("name", [DQN, ("bc", "discrete")])
@pytest.mark.parametrize("which", ["action_masks", "next_action_masks"])
def test_masks_are_refused_unless_all_true(name, which, batch):
    masks = np.ones((32, 3), bool)
    learner = make(row_of(*name))
    learner.update(batch(**{which: masks.copy()}))
    masks[5, 1] = False
    with pytest.raises(SpaceUnsupported, match=r"masks that are not all true.*such as bc"):
        learner.update(batch(**{which: masks}))


def test_importance_weights_are_refused(batch):
    weights = np.array([7] + [1] * 31, np.float32)
    with pytest.raises(ConfigInvalid, match="importance weights of 1 to 7"):
        make(row_of(*DQN)).update(batch(weights=weights))


def test_steps_without_a_successor_are_refused_where_it_bootstraps(batch):
    known = np.array([False] + [True] * 31)
    with pytest.raises(ConfigInvalid, match="without a next observation"):
        make(row_of(*DQN)).update(batch(bootstrappable=known))
    make(row_of("bc", "discrete")).update(batch(bootstrappable=known))


def test_discounts_are_gamma_or_zero(batch):
    half = np.full(32, 0.5, np.float32)
    with pytest.raises(ConfigInvalid, match=r"a discount of 0\.5 .*expected 0 .*or 0\.99"):
        make(row_of(*DQN)).update(batch(discounts=half))
    # Cloning looks at no discount.
    make(row_of("bc", "discrete")).update(batch(discounts=half))
    learner = D3rlpyLearner(
        row_of(*DQN), OBSERVATION, DISCRETE, options=SMALL, seed=0, discount=0.5
    )
    learner.update(batch(discounts=half))


def test_a_gamma_of_zero_learns_the_reward_alone(batch):
    """All discounts are 0 then: what comes next must not matter."""
    learners = [
        D3rlpyLearner(row_of(*DQN), OBSERVATION, DISCRETE, options=SMALL, seed=0, discount=0.0)
        for _ in range(2)
    ]
    made = batch(discounts=np.zeros(32, np.float32))
    other = dataclasses.replace(made, next_observations=made.next_observations + 100)
    first, second = (
        learner.update(one).metrics for learner, one in zip(learners, (made, other), strict=True)
    )
    assert {name: float(v) for name, v in first.items()} == {
        name: float(v) for name, v in second.items()
    }


def d3rlpys_own_updates(row, batches, seed=0):
    """The same updates by d3rlpy alone: its config, its scaler, its update."""
    d3rlpy = load_d3rlpy()
    config_class = getattr(d3rlpy.algos, row.config_class)
    encoder = d3rlpy.models.VectorEncoderFactory(hidden_units=[16, 16])
    options = {
        field.name: encoder
        for field in dataclasses.fields(config_class)
        if field.name.endswith("encoder_factory")
    }
    if row.actions == "continuous":
        options["action_scaler"] = d3rlpy.preprocessing.MinMaxActionScaler(
            minimum=np.array([-2.0, 0.0]), maximum=np.array([2.0, 10.0])
        )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        algorithm = config_class(gamma=0.99, **options).create(device="cpu:0")
        algorithm.create_impl((4,), 3 if row.actions == "discrete" else 2)
        for made in batches:
            actions = made.actions.reshape(len(made), -1).astype(np.float32)
            algorithm.update(
                d3rlpy.dataset.TransitionMiniBatch(
                    observations=made.observations,
                    actions=actions,
                    rewards=made.rewards[:, None],
                    next_observations=made.next_observations,
                    next_actions=np.zeros_like(actions),
                    terminals=(made.discounts[:, None] == 0).astype(np.float32),
                    intervals=np.ones((len(made), 1), np.float32),
                    transitions=[],
                )
            )
    return algorithm


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.name}-{row.actions}")
def test_each_update_is_d3rlpys_own(row, batch):
    kind = "discrete" if row.actions == "discrete" else "box"
    batches = [batch(kind, seed=seed) for seed in range(4)]
    learner = make(row)
    for made in batches:
        learner.update(made)
    theirs = d3rlpys_own_updates(row, batches)
    ours = learner._impl.modules.get_torch_modules()
    for name, module in theirs.impl.modules.get_torch_modules().items():
        for key, tensor in module.state_dict().items():
            torch.testing.assert_close(
                ours[name].state_dict()[key], tensor, rtol=1e-4, atol=1e-6, msg=f"{name}.{key}"
            )


def test_the_seed_decides_and_the_global_state_is_left_alone(batch):
    row = row_of("sac", "continuous")
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = run(make(row), batch, 2).state_dict()
    torch.testing.assert_close(torch.get_rng_state(), before)
    torch.manual_seed(4)
    second = run(make(row), batch, 2).state_dict()
    other = run(make(row, seed=1), batch, 2).state_dict()
    name = next(name for name in first if name.endswith("weight"))
    np.testing.assert_array_equal(first[name], second[name])
    assert (first[name] != other[name]).any()


def test_a_step_is_terminal_where_its_discount_is_zero(batch):
    made = make(row_of("dqn", "discrete"))._d3rlpy_batch(
        batch(size=3, discounts=np.array([0.99, 0, 0.99], np.float32))
    )
    assert made.terminals.tolist() == [[0.0], [1.0], [0.0]]
    assert made.rewards.shape == made.intervals.shape == (3, 1)


def test_actions_are_given_to_d3rlpy_from_minus_one_to_one(batch):
    actions = np.array([[-2.0, 0.0], [2.0, 10.0], [0.0, 5.0]], np.float32)
    made = make(row_of("iql", "continuous"))._d3rlpy_batch(batch("box", size=3, actions=actions))
    assert made.actions.tolist() == [[-1.0, -1.0], [1.0, 1.0], [0.0, 0.0]]


def test_discrete_actions_are_given_from_zero(batch):
    learner = make(row_of("dqn", "discrete"), space=Discrete(3, start=7))
    made = learner._d3rlpy_batch(batch(size=3, actions=np.array([7, 8, 9])))
    assert made.actions.tolist() == [[0.0], [1.0], [2.0]]
    assert set(learner.policy().spec.action_space.__dict__.values()) == {3, 7}


def test_cloning_alone_needs_no_next_observation():
    assert not make(row_of("bc", "discrete")).needs_bootstrap
    assert make(row_of("cql", "discrete")).needs_bootstrap


def test_an_open_box_takes_the_logged_range_as_the_bounds_of_a_squashed_head():
    row = row_of("sac", "continuous")
    space = Box((1,))
    with pytest.raises(SpaceUnsupported, match="finite bounds"):
        make(row, space=space)
    learner = D3rlpyLearner(
        row,
        OBSERVATION,
        space,
        options=SMALL,
        seed=0,
        logged_actions=(np.array([-3.0]), np.array([5.0])),
    )
    assert learner.policy().spec.action_space == Box((1,), "float32", -3.0, 5.0)


def test_options_are_d3rlpys_own_by_key():
    learner = make(
        row_of("cql", "discrete"),
        learning_rate=1e-2,
        alpha=2,
        n_critics=3,
        q_func_factory={"type": "qr", "params": {"n_quantiles": 8}},
        optim_factory={"type": "adam", "params": {"clip_grad_norm": 1.0}},
    )
    config = learner.config
    assert (config["learning_rate"], config["alpha"], config["n_critics"]) == (1e-2, 2.0, 3)
    assert config["q_func_factory"]["params"]["n_quantiles"] == 8
    assert config["encoder_factory"]["params"]["hidden_units"] == [16, 16]
    assert "gamma" not in config
    export_onnx(learner.policy())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rat": 1.0}, "d3rlpy:cql: found option 'learning_rat', expected learning_rate"),
        ({"alpha": "high"}, "alpha: found 'high'"),
        ({"n_critics": 1.5}, "n_critics: found 1.5"),
        ({"gamma": 0.9}, "gamma.*discount"),
        ({"batch_size": 3}, "batch_size.*training option"),
        ({"action_scaler": {}}, "action_scaler.*always normalised"),
        ({"q_func_factory": {"type": "quantum"}}, "q_func_factory: found.*quantum"),
        ({"q_func_factory": "qr"}, "q_func_factory: found 'qr'"),
        ({"compile_graph": True}, "CUDA"),
    ],
)
def test_options_it_does_not_have_are_refused_by_name(options, message):
    with pytest.raises(ConfigInvalid, match=message):
        make(row_of("cql", "discrete"), **options)


def test_a_value_that_d3rlpy_refuses_is_named():
    with pytest.raises(ConfigInvalid, match=r"policy_type.*magic"):
        make(row_of("bc", "continuous"), policy_type="magic")


def test_the_discount_reaches_d3rlpy():
    learner = make_learner("dqn", OBSERVATION, DISCRETE, options=SMALL, seed=0, discount=0.5)
    assert learner.discount == 0.5
    assert learner._d3rlpy.gamma == 0.5


def test_it_prints_nothing():
    code = (
        "from replaylake.datastore.spaces import Box, Discrete\n"
        "from replaylake.offline.algorithms.catalog import make_learner\n"
        "learner = make_learner('dqn', Box((4,)), Discrete(2), options={}, seed=0)\n"
        "import d3rlpy\n"
        "d3rlpy.logging.LOG.warning('this is talk')\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "this is talk" in done.stderr
