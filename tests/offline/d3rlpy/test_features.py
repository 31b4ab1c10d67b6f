import numpy as np
import pytest
import torch

from replaylake.datastore.episodes.spaces import Box, Dict, Discrete
from replaylake.datastore.errors import ConfigInvalidError, SpaceUnsupportedError
from replaylake.offline.d3rlpy.features import Frames
from replaylake.offline.d3rlpy.learner import D3rlpyLearner
from replaylake.offline.dataset_statistics import DatasetStatistics, Moments
from replaylake.offline.learning.export import export_onnx
from replaylake.offline.networks.graph import TorchPolicy

IMAGE = Box((2, 12, 12), "uint8", 0, 255)
TINY = {"type": "pixel", "params": {"filters": [[4, 4, 2]], "feature_size": 8}}


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((3, 8, 10), (3, 8, 10)),
        ((8, 10, 3), (3, 8, 10)),
        ((8, 10), (1, 8, 10)),
        # A stack of 4 grey frames that are 4 wide: the first dimension wins.
        ((4, 8, 4), (4, 8, 4)),
    ],
)
def test_frames_come_as_channels_height_width_in_0_to_1(shape, expected):
    frames = Frames(Box(shape, "uint8", 0, 255))
    assert frames.shape == expected
    images = torch.randint(0, 256, (5, *shape), dtype=torch.uint8)
    made = frames(images)
    assert made.shape == (5, *expected)
    assert made.dtype == torch.float32
    if expected == shape:
        found, first = made[:, 1, 2, 3], images[:, 1, 2, 3]
    elif len(shape) == 3:
        found, first = made[:, 1, 2, 3], images[:, 2, 3, 1]
    else:
        found, first = made[:, 0, 2, 3], images[:, 2, 3]
    torch.testing.assert_close(found, first / 255)


@pytest.mark.parametrize(
    ("name", "actions"), [("dqn", "discrete"), ("bcq", "continuous"), ("crr", "continuous")]
)
def test_images_train_act_and_export(name, actions, row_of, batch):
    encoders = {
        "dqn": ["encoder_factory"],
        "bcq": ["actor_encoder_factory", "critic_encoder_factory", "imitator_encoder_factory"],
        "crr": ["actor_encoder_factory", "critic_encoder_factory"],
    }[name]
    options = {key: TINY for key in encoders} | ({"n_action_samples": 3} if name == "bcq" else {})
    space = Discrete(3) if actions == "discrete" else Box((2,), "float32", -2, 2)
    learner = D3rlpyLearner(row_of(name, actions), IMAGE, space, options=options, seed=0)
    frames = np.random.default_rng(0).integers(0, 256, (32, *IMAGE.shape)).astype(np.uint8)
    kind = "discrete" if actions == "discrete" else "box"
    metrics = learner.update(batch(kind, observations=frames, next_observations=frames)).metrics
    assert all(np.isfinite(value) for value in metrics.values())
    graph = learner.policy()
    export_onnx(graph)
    assert len(TorchPolicy(graph).act(frames[:7], rng=np.random.default_rng(0)).actions) == 7


def test_images_that_it_cannot_take_are_refused(row_of):
    continuous = Box((2,), "float32", -2, 2)
    with pytest.raises(
        SpaceUnsupportedError, match=r"prdc: .*\(an image\).*that take it: awac, bc,"
    ):
        D3rlpyLearner(row_of("prdc", "continuous"), IMAGE, continuous, options={}, seed=0)
    row = row_of("dqn", "discrete")
    for space in (
        Dict({"camera": IMAGE, "speed": Box((2,))}),
        Box((2, 4, 8, 8), "uint8", 0, 255),
    ):
        with pytest.raises(
            SpaceUnsupportedError, match=r"dqn: found image .*a single image of 2 or 3 dims"
        ):
            D3rlpyLearner(row, space, Discrete(3), options={}, seed=0)
    with pytest.raises(ConfigInvalidError, match="hidden_sizes with image observations"):
        D3rlpyLearner(row, IMAGE, Discrete(3), options={"hidden_sizes": [8]}, seed=0)
    # 12 pixels are too few for the default filters.
    with pytest.raises(ConfigInvalidError, match=r"d3rlpy refuses .*\[2, 12, 12\].*[Kk]ernel size"):
        D3rlpyLearner(row, IMAGE, Discrete(3), options={}, seed=0)


@pytest.mark.parametrize("name", ["iql", "plas", "crr"])
def test_observations_are_normalized_in_training_and_in_the_graph(name, row_of, make, batch_for):
    moments = Moments(np.array([1, 2, 3, 4], np.float32), np.array([2, 1, 4, 0.5], np.float32))
    row = row_of(name, "continuous")
    learner = make(row, facts=DatasetStatistics(observations={"": moments}))
    plain = make(row)
    batch = batch_for(row)
    made, raw = (one._batches.convert(batch) for one in (learner, plain))
    for which in ("observations", "next_observations"):
        expected = (getattr(raw, which).numpy() - moments.mean) / moments.std
        np.testing.assert_allclose(getattr(made, which).numpy(), expected, rtol=1e-5, atol=1e-6)
    learner.update(batch)
    graph = learner.policy()
    export_onnx(graph)
    generators = [np.random.default_rng(0) for _ in range(2)]
    acted = TorchPolicy(graph).act(batch.observations, rng=generators[0]).actions
    plain.load_state_dict(learner.state_dict())
    normalized = made.observations.numpy()
    expected = TorchPolicy(plain.policy()).act(normalized, rng=generators[1]).actions
    np.testing.assert_allclose(acted, expected, atol=1e-4)
    assert learner.normalization["observations"] == {
        "": {"mean": [1, 2, 3, 4], "std": [2, 1, 4, 0.5]}
    }


@pytest.mark.parametrize(("name", "actions"), [("dqn", "discrete"), ("bear", "continuous")])
def test_implicit_quantile_networks_export(name, actions, row_of, make, run, assert_chosen_alike):
    """Their own forward fixes the number of rows that it was traced with."""
    iqn = {"type": "iqn", "params": {"n_quantiles": 4, "n_greedy_quantiles": 4, "embed_size": 8}}
    learner = run(make(row_of(name, actions), q_func_factory=iqn), 1)
    graph = learner.policy()
    export_onnx(graph)
    observations = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    if name == "dqn":
        act = TorchPolicy(graph).act(observations)
        assert_chosen_alike(act.actions, learner._d3rlpy.predict(observations), act.q_values)
