"""Policies that remember, acted with one request at a time: the client carries what they know."""

import msgpack
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.feedback.decision_id import DecisionSigner
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.package import load_policy
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.serve.app import create_app
from replaylake.serve.config import ServeConfig
from replaylake.serve.loading import check_servable, load_serving
from replaylake.serve.serving_state import ServingState
from replaylake.serve.versions.router import Router, ServedPolicy
from replaylake.serve.versions.state_tokens import StateSigner

STATE = 3
SPEC = PolicySpec(Box((4,)), Discrete(2), "categorical", state_size=STATE)
KEY = b"shared by the workers of a server"


def recurrent_graph(seed):
    """Return next_state = tanh(state / 2 + observations @ W), logits = next_state @ V."""
    rng = np.random.default_rng(seed)
    values = {
        "half": np.float32(0.5),
        "W": rng.standard_normal((4, STATE)).astype(np.float32),
        "V": rng.standard_normal((STATE, 2)).astype(np.float32),
    }
    nodes = [
        helper.make_node("MatMul", ["observations", "W"], ["seen"]),
        helper.make_node("Mul", ["state", "half"], ["kept"]),
        helper.make_node("Add", ["seen", "kept"], ["sum"]),
        helper.make_node("Tanh", ["sum"], ["next_state"]),
        helper.make_node("MatMul", ["next_state", "V"], ["logits"]),
    ]

    def info(name, size):
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size])

    graph = helper.make_graph(
        nodes,
        "recurrent",
        [info("observations", 4), info("state", STATE)],
        [info("logits", 2), info("next_state", STATE)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in values.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model.SerializeToString()


@pytest.fixture(scope="module")
def folders(kit, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recurrent")
    return [kit.save_policy(folder / str(i), SPEC, recurrent_graph(i)) for i in range(2)]


@pytest.fixture(scope="module")
def policies(folders):
    return [load_policy(folder) for folder in folders]


def app_of(router, key=KEY):
    signer = DecisionSigner(b"k" * 32, "d")
    return create_app(lambda: ServingState(router, signer, states=StateSigner(key)))


def router_of(policy, version=1):
    return Router(ServedPolicy("p", version, policy, "p@champion"))


def acted(policy, observations):
    """Act in process through one episode; returns actions and log-probabilities at seed t."""
    state, actions, log_probs = policy.initial_state(1), [], []
    for t, observation in enumerate(observations):
        rng = np.random.default_rng(t)
        act = policy.act(observation[None], state, rng=rng, deterministic=False)
        state = act.state
        actions.append(int(act.actions[0]))
        log_probs.append(float(act.log_probs[0]))
    return actions, log_probs


def test_any_worker_goes_on_as_one_process_would(app_client, policies):
    observations = np.random.default_rng(1).standard_normal((60, 4)).astype(np.float32)
    actions, log_probs = acted(policies[0], observations)
    assert set(actions) == {0, 1}
    found, stated, state = [], [], None
    with (
        app_client(app_of(router_of(policies[0]))) as one,
        app_client(app_of(router_of(policies[0]))) as other,
    ):
        for t, observation in enumerate(observations):
            body = {"observation": observation.tolist(), "temperature": 1, "seed": t}
            if state is not None:
                body["state"] = state
            answer = (one, other)[t % 2].post("/act", json=body).json()
            state = answer["state"]
            found.append(answer["action"])
            stated.append(answer["log_prob"])
    assert found == actions
    assert np.allclose(stated, log_probs, atol=1e-6)
    # It does remember: without states the same observations get other answers.
    fresh = [acted(policies[0], observations[t : t + 1])[1][0] for t in range(60)]
    assert not np.allclose(fresh, log_probs, atol=1e-3)


def test_a_batch_goes_on_row_by_row(app_client, policies):
    rng = np.random.default_rng(2)
    first, second = rng.standard_normal((2, 3, 4)).astype(np.float32)
    policy = policies[0]
    before = policy.act(first, policy.initial_state(3))
    state = before.state.copy()
    state[1] = 0  # its episode begins
    expected = policy.act(second, state)
    with app_client(app_of(router_of(policy))) as client:
        answer = client.post("/act", json={"observations": first.tolist()}).json()
        assert answer["actions"] == before.actions.tolist()
        states = [answer["states"][0], None, answer["states"][2]]
        for name in ("state", "states"):
            body = {"observation": second.tolist(), name: states}
            again = client.post("/act", json=body).json()
            assert again["actions"] == expected.actions.tolist()
        found = [StateSigner(KEY).read(token).numbers for token in again["states"]]
        assert np.array_equal(found, expected.state)
        packed = msgpack.packb({"observation": second.tolist(), "states": states})
        kind = {"content-type": "application/msgpack"}
        found = client.post("/act", content=packed, headers=kind).json()
        assert found["actions"] == expected.actions.tolist()


def test_a_state_goes_on_with_the_version_that_made_it(app_client, policies):
    router = router_of(policies[0], 1)
    observation = [1.0, 2.0, 3.0, 4.0]
    with app_client(app_of(router)) as client:
        first = client.post("/act", json={"observation": observation}).json()
        router.replace(0, ServedPolicy("p", 2, policies[1], "p@champion"))
        old = client.post("/act", json={"observation": observation, "state": first["state"]}).json()
        new = client.post("/act", json={"observation": observation}).json()
        assert (old["version"], new["version"]) == (1, 2)
        mixed = {"observations": [observation] * 3, "states": [None, first["state"], None]}
        answer = client.post("/act", json=mixed).json()
        assert answer["versions"] == [2, 1, 2]
        assert answer["actions"][1] == old["action"]
        assert answer["actions"][0] == answer["actions"][2] == new["action"]
        tokens = [StateSigner(KEY).read(token) for token in answer["states"]]
        assert [token.version for token in tokens] == [2, 1, 2]


def test_states_that_are_not_ours_are_refused(app_client, policies):
    ones = np.ones((1, STATE), np.float32)
    (gone,) = StateSigner(KEY).issue("p", 7, ones)
    (foreign,) = StateSigner(b"other").issue("p", 1, ones)
    (wide,) = StateSigner(KEY).issue("p", 1, np.ones((1, STATE + 1), np.float32))
    cases = [(gone, 410), (foreign, 422), (wide, 422), ("x", 422), (7, 422), ("", 422), ([], 422)]
    with app_client(app_of(router_of(policies[0]))) as client:
        for state, status in cases:
            body = {"observation": [0, 0, 0, 0], "state": state}
            error = client.post("/act", json=body)
            assert error.status_code == status, (state, error.text)
            assert error.json()["error"]["field"] == "state"
            body = {"observations": [[0, 0, 0, 0]] * 2, "states": [None, state]}
            error = client.post("/act", json=body)
            assert (error.status_code, error.json()["error"]["field"]) == (
                status,
                {410: "state[1]", 422: "states[1]" if not isinstance(state, str) or not state
                 else "state[1]"}[status],
            )  # fmt: skip
        short = {"observations": [[0, 0, 0, 0]] * 2, "states": [None]}
        assert client.post("/act", json=short).status_code == 422


def test_a_policy_without_a_state_takes_none(app_client, package):
    policy = load_policy(package)
    (token,) = StateSigner(KEY).issue("p", 1, np.ones((1, STATE), np.float32))
    with app_client(app_of(router_of(policy))) as client:
        answer = client.post("/act", json={"observation": [0, 0, 0, 0]}).json()
        assert "state" not in answer
        body = {"observation": [0, 0, 0, 0], "state": token}
        assert client.post("/act", json=body).status_code == 422


def test_workers_of_one_server_share_a_key(app_client, folders, tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    alone = ServeConfig(package=folders[0], policy="p", version=1)
    logged = ServeConfig(package=folders[0], policy="p", version=1, lake=lake.path, log_to="d")
    other = ServeConfig(package=folders[0], policy="p", version=1)
    for config in (alone, logged):
        check_servable(config)
        twin = ServeConfig.from_environment(config.to_environment())
        with (
            app_client(create_app(lambda: load_serving(config))) as one,  # noqa: B023
            app_client(create_app(lambda: load_serving(twin))) as two,  # noqa: B023
            app_client(create_app(lambda: load_serving(other))) as stranger,
        ):
            state = one.post("/act", json={"observation": [1, 0, 0, 0]}).json()["state"]
            body = {"observation": [1, 0, 0, 0], "state": state}
            assert two.post("/act", json=body).status_code == 200
            assert stranger.post("/act", json=body).status_code == 422
    assert alone.state_key not in repr(alone)


def test_servers_that_are_told_the_same_key_share_it(app_client, folders, monkeypatch):
    def told(key):
        monkeypatch.setenv("REPLAYLAKE_SERVE_STATE_KEY", key)
        return ServeConfig(package=folders[0], policy="p", version=1)

    configs = [told("a secret of ours"), told("a secret of ours"), told("another"), told("")]
    assert [config.state_key for config in configs[:3]] == 2 * ["a secret of ours"] + ["another"]
    # Empty is as not set: each server makes its own.
    assert configs[3].state_key != told("").state_key
    assert len(configs[3].state_key) == 64
    one, *others = (create_app(lambda c=c: load_serving(c)) for c in configs)
    with app_client(one) as client:
        state = client.post("/act", json={"observation": [1, 0, 0, 0]}).json()["state"]
    found = []
    for app in others:
        with app_client(app) as client:
            body = {"observation": [1, 0, 0, 0], "state": state}
            found.append(client.post("/act", json=body).status_code)
    assert found == [200, 422, 422]
