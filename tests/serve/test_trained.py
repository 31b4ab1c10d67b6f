"""Training meets serving: over HTTP a policy acts as the learner that it was exported from."""

from pathlib import Path

import httpx
import numpy as np
import pytest

from replaylake.datastore.ingest.ingest import ingest
from replaylake.datastore.lake import open_lake
from replaylake.datastore.policies.package import load_learner_weights
from replaylake.offline.algorithms.catalog import make_learner
from replaylake.offline.facts import DatasetFacts
from replaylake.offline.graph import TorchPolicy
from replaylake.offline.learner import torch_threads
from replaylake.offline.train import TrainConfig, train

_LOG = Path(__file__).parents[2] / "examples" / "data" / "rllib_cartpole" / "cartpole-v1_large"


@pytest.mark.slow
def test_logged_observations_get_over_http_the_actions_of_the_learner(kit, tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    ingest(lake, [_LOG], "cartpole")
    config = TrainConfig(algorithm="bc", updates=20, threads=1, options={"hidden_sizes": [32]})
    trained = train(lake, ["cartpole"], config, policy_name="clone").policy
    spec = lake.dataset("cartpole").spec
    learner = make_learner(
        config.algorithm,
        spec.observation_space,
        spec.action_space,
        options=config.options,
        seed=config.seed + 1,  # other weights until the trained ones are loaded
        discount=config.discount,
        device="cpu",
        facts=DatasetFacts(),
    )
    observations = np.asarray(
        lake.sql("select observation from cartpole.steps order by episode_id, step limit 1000")
        .column(0)
        .to_pylist(),
        np.float32,
    )
    with torch_threads(1):
        untrained = TorchPolicy(learner.policy()).act(observations).actions
        learner.load_state_dict(load_learner_weights(trained.path))
        expected = TorchPolicy(learner.policy()).act(observations).actions
    assert set(expected) == {0, 1}
    assert (expected != untrained).any()
    server = kit.start_server(package=trained.path, policy=trained.name, version=trained.version)
    try:
        with httpx.Client(base_url=server.url) as client:
            rows = observations.tolist()
            singly = [client.post("/act", json={"observation": row}).json() for row in rows]
            batch = client.post("/act", json={"observations": rows}).json()
    finally:
        server.stop()
    assert len(rows) == 1000
    assert [answer["action"] for answer in singly] == expected.tolist()
    assert batch["actions"] == expected.tolist()
    assert {(answer["policy"], answer["version"]) for answer in singly} == {("clone", 1)}
