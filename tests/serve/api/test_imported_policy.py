"""A policy that another library trained answers as it does there, without that library."""

import json
from pathlib import Path

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.lake.lake import open_lake
from replaylake.serve.app import create_app
from replaylake.serve.config import ServeConfig
from replaylake.serve.loading import load_serving

import_policy = pytest.importorskip("replaylake.offline.importing.import_policy")
POLICIES = Path(__file__).parents[3] / "examples" / "data" / "policies"


def test_an_imported_policy_is_served_and_logged(app_client, tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    observations = np.load(POLICIES / "sb3_cartpole.observations.npy")[:20]
    expected = np.load(POLICIES / "sb3_cartpole.expect.npy")[:20]
    log = lake.dataset("log")
    log.create(Box((4,), "float32"), Discrete(2))
    log.append(
        [
            Episode(
                episode_id="log/0",
                observations=observations,
                actions=expected,
                rewards=np.ones(20),
                terminated=True,
            )
        ]
    )
    ref = import_policy.import_policy(
        lake, "log", "ppo", POLICIES / "sb3_cartpole.zip", expect=expected
    ).policy
    config = ServeConfig(ref.path, "ppo", ref.version, lake.path, reference="ppo", log_to="live")
    with app_client(create_app(lambda: load_serving(config))) as client:
        for observation, action in zip(observations, expected, strict=True):
            answer = client.post("/act", json={"observation": observation.tolist()})
            assert json.loads(answer.content)["action"] == action
