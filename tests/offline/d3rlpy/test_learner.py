import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import torch

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import (
    ConfigInvalidError,
    PackageInvalidError,
    SpaceUnsupportedError,
)
from replaylake.datastore.lake.policies.heads import act_from_head
from replaylake.datastore.lake.policies.package import (
    GraphSession,
    load_learner_weights,
    load_policy,
    save_package,
)
from replaylake.datastore.replay.to_torch import TorchSampler
from replaylake.offline.algorithms.catalog import make_learner
from replaylake.offline.d3rlpy.algorithms import D3RLPY_ALGORITHMS
from replaylake.offline.d3rlpy.learner import D3rlpyLearner
from replaylake.offline.d3rlpy.library import load_d3rlpy
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.learning.export import export_onnx

NUM_ROWS = 1000
each_row = pytest.mark.parametrize(
    "row", D3RLPY_ALGORITHMS, ids=lambda row: f"{row.name}-{row.actions}"
)


def test_the_table_has_every_class_that_learns_from_transitions():
    made = {row.config_class for row in D3RLPY_ALGORITHMS}
    there = {name for name in dir(load_d3rlpy().algos) if name.endswith("Config")}
    assert there - made == {
        "RandomPolicyConfig",
        "DiscreteRandomPolicyConfig",
        "DecisionTransformerConfig",
        "DiscreteDecisionTransformerConfig",
        "TACRConfig",
        # Abstract.
        "TQLearningConfig",
        "TransformerConfig",
    }
    assert made <= there


def noise_for(row, num_drawn, num):
    """The noise of the draws that d3rlpy's greedy action makes next, whatever the seed was."""
    size = 2
    if row.name == "bcq":
        return torch.randn(num * num_drawn, 2 * size).reshape(num, -1)
    normals = torch.randn(num, num_drawn, size)
    if row.name == "bear":
        return normals.reshape(num, -1)
    # torch.multinomial divides by exponentials; half of a square and of nothing is one.
    exponentials = torch.empty(num, num_drawn).exponential_(1)
    pairs = torch.stack([(2 * exponentials).sqrt(), torch.zeros_like(exponentials)], dim=2)
    return torch.cat([normals.reshape(num, -1), pairs.reshape(num, -1)], dim=1)


@each_row
def test_each_learns_packages_and_acts_as_d3rlpy_does(
    row, make, run, batch_for, options_of, tmp_path, assert_chosen_alike
):
    learner = run(make(row), 3)
    metrics = learner.update(batch_for(row)).metrics
    assert metrics
    assert all(np.isfinite(float(value)) for value in metrics.values())
    graph = learner.policy()
    assert graph.spec.head == row.head
    assert (graph.spec.noise_size > 0) == (row.head == "sampled")
    save_package(
        tmp_path / "p",
        onnx=export_onnx(graph),
        spec=graph.spec,
        manifest={"config": learner.config},
        learner_weights=learner.state_dict(),
    )
    observations = np.random.default_rng(0).standard_normal((NUM_ROWS, 4)).astype(np.float32)
    torch.manual_seed(8)
    # d3rlpy's own greedy action, which for a Box is in [-1, 1].
    theirs = learner._d3rlpy.predict(observations)
    inputs = {"observations": observations}
    if row.head == "sampled":
        torch.manual_seed(8)
        num_drawn = options_of(row).get("n_action_samples", 4)
        inputs["noise"] = noise_for(row, num_drawn, NUM_ROWS).numpy()
    onnx = (tmp_path / "p" / "policy.onnx").read_bytes()
    outputs = GraphSession(onnx, graph.spec, "policy").run(inputs)
    actions = act_from_head(graph.spec, outputs).actions
    if row.actions == "discrete":
        (scores,) = outputs.values()
        assert_chosen_alike(actions, theirs, scores)
        return
    expected = np.clip([0, 5] + theirs * [2, 5], [-2, 0], [2, 10])
    same = np.isclose(actions, expected, atol=1e-4).all(axis=1)
    # Of two actions that are worth the same to the last bits either may be chosen.
    assert same.mean() >= (0.99 if row.head == "sampled" else 1)
    acted = load_policy(tmp_path / "p").act(observations, rng=np.random.default_rng(0)).actions
    assert acted.shape == (NUM_ROWS, 2)


@each_row
def test_each_continues_bit_for_bit_from_its_packaged_state(row, make, run, tmp_path):
    whole = run(make(row), 4).state_dict()
    half = run(make(row), 2)
    save_package(
        tmp_path / "p",
        onnx=b"",
        spec=half.policy().spec,
        manifest={},
        learner_weights=half.state_dict(),
    )
    resumed = make(row, seed=1)
    resumed.load_state_dict(load_learner_weights(tmp_path / "p"))
    state = run(resumed, 2, first=2).state_dict()
    assert state.keys() == whole.keys()
    for name in whole:
        np.testing.assert_array_equal(state[name], whole[name], err_msg=name)


@each_row
def test_each_refuses_an_unknown_option_with_the_near_ones(row, make):
    with pytest.raises(
        ConfigInvalidError, match=f"d3rlpy:{row.name}: .*'compile_grap'.*compile_graph"
    ):
        make(row, compile_grap=True)


def d3rlpys_own_updates(row, batches, options, neighbors):
    """The same updates by d3rlpy alone: its config, its scalers, its update."""
    d3rlpy = load_d3rlpy()
    config_class = getattr(d3rlpy.algos, row.config_class)
    encoder = d3rlpy.models.VectorEncoderFactory(hidden_units=[16, 16])
    options = options | {
        field.name: encoder
        for field in dataclasses.fields(config_class)
        if field.name.endswith("encoder_factory")
    }
    if row.actions == "continuous":
        options["action_scaler"] = d3rlpy.preprocessing.MinMaxActionScaler(
            minimum=np.array([-2.0, 0.0]), maximum=np.array([2.0, 10.0])
        )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        algorithm = config_class(gamma=0.99, **options).create(device="cpu:0")
        algorithm.create_impl((4,), 3 if row.actions == "discrete" else 2)
        algorithm.impl._nbsr = neighbors
        for made in batches:
            algorithm.update(d3rlpys_batch(made))
    return algorithm


def d3rlpys_batch(made):
    dataset = load_d3rlpy().dataset
    actions = made.actions.reshape(len(made), -1).astype(np.float32)
    nothing = np.zeros_like(actions) if made.next_actions is None else made.next_actions
    columns = {
        "observation": made.observations,
        "action": actions,
        "reward": made.rewards[:, None],
        "next_observation": made.next_observations,
        "next_action": nothing,
        "terminal": (made.discounts[:, None] == 0).astype(np.float32),
        "interval": np.ones((len(made), 1), np.float32),
    }
    transitions = [
        dataset.Transition(
            **{name: column[i] for name, column in columns.items()},
            # It sums those that follow; one that is the whole return has the same sum.
            rewards_to_go=np.zeros((1, 1)) if made.returns is None else made.returns[i, None, None],
        )
        for i in range(len(made))
    ]
    return dataset.TransitionMiniBatch.from_transitions(transitions)


@each_row
def test_each_update_is_d3rlpys_own(row, make, batch_for, options_of):
    batches = [batch_for(row, seed=seed) for seed in range(4)]
    learner = make(row)
    for made in batches:
        learner.update(made)
    theirs = d3rlpys_own_updates(row, batches, options_of(row), learner._neighbors)
    ours = learner._impl.modules.get_torch_modules()
    for name, module in theirs.impl.modules.get_torch_modules().items():
        for key, tensor in module.state_dict().items():
            torch.testing.assert_close(
                ours[name].state_dict()[key], tensor, rtol=1e-4, atol=1e-5, msg=f"{name}.{key}"
            )


def test_prdc_learns_only_after_it_saw_the_data_and_keeps_it_to_itself(
    row_of, make, batch_for, view
):
    row = row_of("prdc", "continuous")
    learner = make(row)
    # Both episodes whole: the truncated one's last step too, which d3rlpy would leave out.
    rows = learner._neighbors._fit_X
    assert rows.shape == (20, 6)
    records = view.packed.records
    step = records.rows[view.packed.steps[3]]
    observations, actions = records.layout.observations(step), records.layout.actions(step)
    np.testing.assert_allclose(rows[3, :4], 2.0 * observations, rtol=1e-6)
    np.testing.assert_allclose(rows[3, 4:], (actions - [0, 5]) / [2, 5], rtol=1e-6)
    fresh = D3rlpyLearner(
        row,
        Box((4,)),
        Box((2,), "float32", [-2.0, 0.0], [2.0, 10.0]),
        options={"hidden_sizes": [16]},
        seed=0,
    )
    with pytest.raises(ConfigInvalidError, match=r"before the data was indexed.*learner\.prepare"):
        fresh.update(batch_for(row))


@pytest.mark.parametrize(
    ("name", "field"), [("rebrac", "next_actions"), ("cal_ql", "returns"), ("iql", None)]
)
def test_what_a_row_needs_of_its_batches_is_what_the_view_gives(name, field, row_of, make, view):
    learner = make(row_of(name, "continuous"))
    for sampler in (
        view.uniform(8, learner.item, seed=0),
        TorchSampler(view.uniform(8, learner.item, seed=0), reuse=2),
    ):
        batch = sampler.sample()
        learner.update(batch)
        if field is not None:
            with pytest.raises(ConfigInvalidError, match=f"a batch without {field}"):
                learner.update(dataclasses.replace(batch, **{field: None}))


def test_arrays_and_tensors_are_the_same_batch(row_of, make, view):
    row = row_of("td3_plus_bc", "continuous")
    learners = [make(row), make(row)]
    arrays = view.uniform(8, learners[0].item, seed=0)
    tensors = TorchSampler(view.uniform(8, learners[0].item, seed=0), reuse=2)
    for _ in range(5):
        learners[0].update(arrays.sample())
        learners[1].update(tensors.sample())
    first, second = (learner.state_dict() for learner in learners)
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def test_the_seed_decides_and_the_global_state_is_left_alone(row_of, make, run):
    row = row_of("sac", "continuous")
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = run(make(row), 2).state_dict()
    torch.testing.assert_close(torch.get_rng_state(), before)
    torch.manual_seed(4)
    second = run(make(row), 2).state_dict()
    other = run(make(row, seed=1), 2).state_dict()
    name = next(name for name in first if name.endswith("weight"))
    np.testing.assert_array_equal(first[name], second[name])
    assert (first[name] != other[name]).any()


def test_cloning_alone_needs_no_next_observation(row_of, make):
    assert not make(row_of("bc", "discrete")).item.only_bootstrappable
    assert make(row_of("cql", "discrete")).item.only_bootstrappable


def test_an_open_box_takes_the_logged_range_as_the_bounds_of_a_squashed_head(row_of):
    row, space = row_of("sac", "continuous"), Box((1,))
    small = {"hidden_sizes": [8]}
    with pytest.raises(SpaceUnsupportedError, match="finite bounds"):
        D3rlpyLearner(row, Box((4,)), space, options=small, seed=0)
    facts = DatasetStatistics(action_range=(np.array([-3.0]), np.array([5.0])))
    learner = D3rlpyLearner(row, Box((4,)), space, options=small, seed=0, facts=facts)
    assert learner.policy().spec.action_space == Box((1,), "float32", -3.0, 5.0)


def test_the_discount_reaches_d3rlpy():
    learner = make_learner("nfq", Box((4,)), Discrete(3), options={}, seed=0, discount=0.5)
    assert learner.discount == learner.item.discount == 0.5
    assert learner._d3rlpy.gamma == 0.5


@pytest.mark.slow
def test_it_prints_nothing():
    code = (
        "from replaylake.datastore.episodes.spaces import Box, Discrete\n"
        "from replaylake.offline.algorithms.catalog import make_learner\n"
        "learner = make_learner('nfq', Box((4,)), Discrete(2), options={}, seed=0)\n"
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


def test_the_state_of_other_networks_is_refused():
    def of_size(name, size):
        options = {"hidden_sizes": [size]}
        return make_learner(name, Box((4,)), Discrete(2), options=options, seed=0)

    learner = of_size("d3rlpy:dqn", 8)
    with pytest.raises(
        PackageInvalidError, match=r"d3rlpy:dqn: found size mismatch.*expected what"
    ):
        learner.load_state_dict(of_size("d3rlpy:dqn", 16).state_dict())
    with pytest.raises(PackageInvalidError, match="d3rlpy:dqn: found"):
        learner.load_state_dict(of_size("d3rlpy:bc", 8).state_dict())
