"""Actions of several elements over HTTP: answered as a list, logged and joined as one."""

import math

import numpy as np
import pytest

from replaylake.datastore.episodes.spaces import Box, MultiBinary, MultiDiscrete
from replaylake.datastore.feedback.decision_id import DecisionSigner
from replaylake.datastore.feedback.join import join_feedback
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.exploration import Exploration
from replaylake.datastore.lake.policies.package import load_policy
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.serve.app import create_app
from replaylake.serve.recording.decision_log import DecisionLog
from replaylake.serve.serving_state import Limits, ServingState
from replaylake.serve.versions.router import Router, ServedPolicy

# Logits of the first element (2) and of the second (3): the observation's, and more of them.
WEIGHTS = np.array([[1.0, 0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 2.0, 1.0, 0.0]], np.float32)


@pytest.fixture
def policy(kit, tmp_path):
    spec = PolicySpec(Box((2,)), MultiDiscrete((2, 3)), "multi_categorical")
    graph = kit.linear_graph(WEIGHTS, "logits", 2)
    return load_policy(kit.save_policy(tmp_path / "policy", spec, graph))


def served(policy, signer, log=None, exploration=None):
    named = ServedPolicy("p", 2, policy, "p@champion", {"algorithm": "by_hand"})
    return ServingState(Router(named), signer, log, exploration or Exploration(), Limits())


def test_an_action_is_a_list(app_client, policy):
    signer = DecisionSigner(b"k" * 32, "d")
    with app_client(create_app(lambda: served(policy, signer))) as client:
        one = client.post("/act", json={"observation": [1, 0]}).json()
        assert one["action"] == [0, 2]
        assert one["log_prob"] == 0
        many = client.post("/act", json={"observations": [[1, 0], [0, 1]]}).json()
        assert many["actions"] == [[0, 2], [1, 0]]
        drawn = client.post("/act", json={"observation": [0, 0], "deterministic": False}).json()
        assert drawn["log_prob"] == pytest.approx(-math.log(6))
        masked = client.post("/act", json={"observation": [0, 0], "action_mask": [True] * 5})
        assert masked.status_code == 422
        assert masked.json()["error"]["field"] == "action_mask"
        about = client.get("/policy").json()
        assert about["head"] == "multi_categorical"


def test_it_explores_with_epsilon(app_client, policy):
    signer = DecisionSigner(b"k" * 32, "d")
    exploration = Exploration(epsilon=0.6)
    with app_client(create_app(lambda: served(policy, signer, None, exploration))) as client:
        many = client.post("/act", json={"observations": [[1, 0]] * 200}).json()
    # The mode with 0.4 + 0.1, each other action with 0.1.
    for action, log_prob in zip(many["actions"], many["log_probs"], strict=True):
        assert log_prob == pytest.approx(math.log(0.5 if action == [0, 2] else 0.1), abs=1e-5)
    assert len({tuple(action) for action in many["actions"]}) == 6


def test_decisions_become_steps(app_client, policy, tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    signer = DecisionSigner(lake.signing_key(), "d")
    log = DecisionLog(lake.dataset("d"), policy.spec, signer.worker, window_s=60)
    with app_client(create_app(lambda: served(policy, signer, log))) as client:
        for observation in ([1, 0], [0, 1]):
            asked = {"observation": observation, "episode_id": "e"}
            answer = client.post("/act", json=asked).json()
            feedback = {"decision_id": answer["decision_id"], "reward": 1.0}
            if observation == [0, 1]:
                feedback["terminated"] = True
            assert client.post("/feedback", json=feedback).status_code == 200
    join_feedback(lake, "d")
    steps = lake.sql("select action, reward, behavior_log_prob from d.steps order by step")
    assert steps.to_pylist() == [
        {"action": [0, 2], "reward": 1.0, "behavior_log_prob": 0.0},
        {"action": [1, 0], "reward": 1.0, "behavior_log_prob": 0.0},
    ]


def test_binary_actions_are_lists_too(app_client, kit, tmp_path):
    spec = PolicySpec(Box((2,)), MultiBinary(2), "multi_categorical")
    graph = kit.linear_graph(WEIGHTS[:, :4], "logits", 2)
    policy = load_policy(kit.save_policy(tmp_path / "policy", spec, graph))
    signer = DecisionSigner(b"k" * 32, "d")
    with app_client(create_app(lambda: served(policy, signer))) as client:
        assert client.post("/act", json={"observation": [0, 1]}).json()["action"] == [1, 0]
