"""Training meets serving: over HTTP a policy acts as the learner that it was exported from."""

import functools
import io
from dataclasses import replace
from pathlib import Path

import httpx
import msgpack
import numpy as np
import pytest

from replaylake.datastore.interchange.ingest.ingest import ingest
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.package import load_learner_weights
from replaylake.offline.algorithms.catalog import make_learner
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.learning.learner import torch_threads
from replaylake.offline.networks.graph import TorchPolicy
from replaylake.offline.running.train import TrainConfig, train

_LOG = Path(__file__).parents[2] / "examples" / "data" / "rllib_cartpole" / "cartpole-v1_large"


@pytest.mark.slow
def test_logged_observations_get_over_http_the_actions_of_the_learner(kit, tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    ingest(lake, [_LOG], "cartpole")
    config = TrainConfig(algorithm="bc", updates=20, threads=1, options={"hidden_sizes": [32]})
    trained = train(lake, ["cartpole"], replace(config, policy="clone")).policy
    spec = lake.dataset("cartpole").spec
    learner = make_learner(
        config.algorithm,
        spec.observation_space,
        spec.action_space,
        options=config.options,
        seed=config.seed + 1,  # other weights until the trained ones are loaded
        discount=config.discount,
        device="cpu",
        facts=DatasetStatistics(),
    )
    observations = np.asarray(
        lake.sql("select observation from cartpole.steps order by episode_id, step limit 250")
        .column(0)
        .to_pylist(),
        np.float32,
    )
    with torch_threads(1):
        untrained = TorchPolicy(learner.policy()).act(observations).actions
        learner.load_state_dict(load_learner_weights(trained.path))
        acting = TorchPolicy(learner.policy())
        expected = acting.act(observations).actions
        # Of the actions that follow, at the temperature that is asked for.
        of_actions = functools.partial(
            acting.log_probs, observations, deterministic=False, temperature=2.0
        )
        stated = np.stack([of_actions(np.full(len(observations), action)) for action in (0, 1)], 1)
    # Nearer together than float32's rounding, either may be the greater by how a library sums.
    is_clear = np.abs(stated[:, 1] - stated[:, 0]) > 1e-5
    assert is_clear.mean() > 0.98
    assert set(expected) == {0, 1}
    assert (expected != untrained).any()
    server = kit.start_server(package=trained.path, policy=trained.name, version=trained.version)
    try:
        with httpx.Client(base_url=server.url) as client:
            singly, together = _every_way(client, observations, {})
            drawn_singly, drawn_together = _every_way(client, observations, {"temperature": 2.0})
    finally:
        server.stop()
    assert len(observations) == 250
    for answers in singly:
        found = np.asarray([answer["action"] for answer in answers])
        assert np.array_equal(found[is_clear], expected[is_clear])
        assert {answer["log_prob"] for answer in answers} == {0.0}
        assert {(answer["policy"], answer["version"]) for answer in answers} == {("clone", 1)}
    for answer in together:
        found = np.asarray(answer["actions"])
        assert np.array_equal(found[is_clear], expected[is_clear])
    rows = np.arange(len(observations))
    for answers in drawn_singly:
        actions = np.asarray([answer["action"] for answer in answers])
        found = np.asarray([answer["log_prob"] for answer in answers])
        assert np.allclose(found, stated[rows, actions], atol=1e-5, rtol=0)
        _check_as_likely(actions, np.exp(stated))
    for answer in drawn_together:
        actions = np.asarray(answer["actions"])
        assert np.allclose(answer["log_probs"], stated[rows, actions], atol=1e-5, rtol=0)
        _check_as_likely(actions, np.exp(stated))


def _every_way(client, observations, options):
    """Ask by JSON, msgpack (lists, array) and npy; one at a time, and all together."""
    ways = [
        lambda of: {"json": {"observation": of.tolist(), **options}},
        lambda of: _packed({"observation": of.tolist(), **options}),
        lambda of: _packed({"observation": _map(of), **options}),
        lambda of: {"content": _npy(of), "headers": {"content-type": "application/x-npy"},
                    "params": options},
    ]  # fmt: skip
    singly = [[client.post("/act", **way(row)).json() for row in observations] for way in ways]
    return singly, [client.post("/act", **way(observations)).json() for way in ways]


def _packed(fields):
    return {
        "content": msgpack.packb(fields),
        "headers": {"content-type": "application/msgpack"},
    }


def _map(array):
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": array.tobytes()}


def _npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def _check_as_likely(actions, probs):
    """Compare how often action 1 was drawn with the sum of its probabilities."""
    p = probs[:, 1]
    deviations = (actions.sum() - p.sum()) / np.sqrt((p * (1 - p)).sum())
    assert abs(deviations) < 4.0  # one time in 16,000 by chance
