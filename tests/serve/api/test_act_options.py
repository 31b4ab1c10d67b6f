"""Options of POST /act: what is asked for is how it is drawn, and what is said of it."""

import math

import msgpack
import numpy as np
import orjson
import pytest

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.feedback.decision_id import DecisionSigner
from replaylake.datastore.lake.policies.exploration import Exploration
from replaylake.datastore.lake.policies.package import load_policy
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.serve.app import create_app
from replaylake.serve.serving_state import ServingState
from replaylake.serve.versions.router import Router, ServedPolicy

GOOD = [0.1, 0.2, 0.3, 0.4]
MSGPACK = {"content-type": "application/msgpack"}


def serving(policy, exploration=None, **more):
    router = Router(ServedPolicy("p", 2, policy, "p@champion"))
    signer = DecisionSigner(b"k" * 32, "d")
    return ServingState(router, signer, exploration=exploration or Exploration(), **more)


@pytest.fixture(scope="module")
def policy(package):
    return load_policy(package)


@pytest.fixture(scope="module")
def client(app_client, policy):
    with app_client(create_app(lambda: serving(policy))) as client:
        yield client


def refused(response, status, field):
    assert response.status_code == status, response.text
    assert response.json()["error"]["field"] == field


def test_sampling_states_its_probability(client):
    # The columns of the kit's WEIGHTS times 0.1, 0.2, 0.3, 0.4, by hand.
    logits = np.array([0.1 + 0.1 - 0.6 + 1.2, -0.1 + 0.05 + 0.6 - 1.2])
    expected = logits - np.log(np.exp(logits).sum())
    body = {"observations": [GOOD] * 16, "deterministic": False}
    seen = [client.post("/act", json=body).json() for _ in range(20)]
    actions = [a for answer in seen for a in answer["actions"]]
    log_probs = [p for answer in seen for p in answer["log_probs"]]
    assert set(actions) == {0, 1}
    assert np.allclose(log_probs, expected[actions], atol=1e-6)


def test_exploration_keeps_to_the_mask_and_states_its_probability(kit, app_client, tmp_path):
    weights = np.tile(np.array([3.0, 2.0, 1.0], np.float32), (4, 1))
    spec = PolicySpec(Box((4,)), Discrete(3), "categorical")
    folder = kit.save_policy(tmp_path / "p", spec, kit.linear_graph(weights, "logits", 4))
    # The mode is forbidden: of the two others the better one has 1 - 0.1 / 2.
    body = {"observation": GOOD, "action_mask": [False, True, True]}
    app = create_app(lambda: serving(load_policy(folder), exploration=Exploration(epsilon=0.1)))
    with app_client(app) as client:
        answers = [client.post("/act", json={**body, "seed": i}).json() for i in range(200)]
    found = {(one["action"], round(math.exp(one["log_prob"]), 6)) for one in answers}
    assert found == {(1, 0.95), (2, 0.05)}
    assert 180 <= sum(one["action"] == 1 for one in answers) < 200


def test_exploration_is_the_default_where_it_is_on(app_client, policy):
    logits = np.array([0.8, -0.65])
    app = create_app(lambda: serving(policy, exploration=Exploration(epsilon=0.5)))
    with app_client(app) as client:
        body = {"observations": [GOOD] * 200}
        answer = client.post("/act", json=body).json()
        assert {
            (a, round(p, 5)) for a, p in zip(answer["actions"], answer["log_probs"], strict=True)
        } == {(0, round(math.log(0.75), 5)), (1, round(math.log(0.25), 5))}
        greedy = client.post("/act", json={**body, "deterministic": True}).json()
        assert set(greedy["actions"]) == {0}
        assert set(greedy["log_probs"]) == {0.0}
        assert client.get("/policy").json()["explore"] == {"epsilon": 0.5, "temperature": None}
    app = create_app(lambda: serving(policy, exploration=Exploration(temperature=2.0)))
    with app_client(app) as client:
        answer = client.post("/act", json=body).json()
        expected = logits / 2 - np.log(np.exp(logits / 2).sum())
        assert np.allclose(answer["log_probs"], expected[answer["actions"]], atol=1e-6)


LOGITS = np.array([0.8, -0.65])  # of GOOD, by hand


def mixed(temperature, epsilon):
    """Log-probabilities of the softmax of LOGITS (the mode at 0), mixed with uniform."""
    if temperature:
        probs = np.exp(LOGITS / temperature)
        probs /= probs.sum()
    else:
        probs = np.array([1.0, 0.0])
    with np.errstate(divide="ignore"):
        return np.log((1 - epsilon) * probs + epsilon / 2)


ASKED = [
    ({}, (0, 0)),
    ({"deterministic": True}, (0, 0)),
    ({"deterministic": False}, (1, 0)),
    ({"temperature": 2.0}, (2, 0)),
    ({"temperature": 2, "epsilon": 0.5}, (2, 0.5)),
    ({"temperature": 0}, (0, 0)),
    ({"epsilon": 0.5}, (0, 0.5)),
    ({"epsilon": 0.5, "deterministic": True}, (0, 0.5)),
    ({"epsilon": 0.5, "deterministic": False}, (1, 0.5)),
    ({"epsilon": 0}, (0, 0)),
]


@pytest.mark.parametrize(("asked", "expected"), ASKED, ids=[str(c[0]) for c in ASKED])
def test_a_request_says_how_it_is_explored(app_client, policy, asked, expected):
    with app_client(create_app(lambda: serving(policy))) as client:
        fields = {"observations": [GOOD] * 300, "seed": 1, **asked}
        answer = client.post("/act", json=fields).json()
    log_probs = mixed(*expected)
    actions = np.asarray(answer["actions"])
    assert np.allclose(answer["log_probs"], log_probs[actions], atol=1e-6)
    # Drawn as said: within four standard deviations.
    share, p = (actions == 0).mean(), np.exp(log_probs[0])
    assert abs(share - p) <= 4 * np.sqrt(p * (1 - p) / 300)


def test_a_requests_exploration_replaces_the_servers(app_client, policy):
    app = create_app(lambda: serving(policy, exploration=Exploration(epsilon=0.5)))
    body = {"observations": [GOOD] * 50, "seed": 1}
    with app_client(app) as client:
        for asked, expected in [
            ({}, (0, 0.5)), ({"deterministic": False}, (0, 0.5)), ({"deterministic": True}, (0, 0)),
            ({"temperature": 2}, (2, 0)), ({"epsilon": 0.1}, (0, 0.1)), ({"epsilon": 0}, (0, 0)),
        ]:  # fmt: skip
            answer = client.post("/act", json={**body, **asked}).json()
            assert np.allclose(answer["log_probs"], mixed(*expected)[answer["actions"]], atol=1e-6)
    app = create_app(lambda: serving(policy, exploration=Exploration(epsilon=0.5),
                                     takes_options=False))  # fmt: skip
    with app_client(app) as client:
        for asked in ({"deterministic": True}, {"temperature": 1}, {"epsilon": 0}, {"seed": 1}):
            field = next(iter(asked))
            refused(client.post("/act", json={"observation": GOOD, **asked}), 422, field)
        assert client.post("/act", json={"observation": GOOD}).status_code == 200


def test_a_seed_gives_the_same_actions_again(client):
    body = {"observations": [GOOD] * 16, "deterministic": False}
    first, again = (client.post("/act", json={**body, "seed": 7}).json() for _ in range(2))
    assert first["actions"] == again["actions"]
    assert first["decision_ids"] != again["decision_ids"]
    seen = {
        tuple(client.post("/act", json={**body, "seed": s}).json()["actions"]) for s in range(9)
    }
    unseeded = {tuple(client.post("/act", json=body).json()["actions"]) for _ in range(9)}
    assert min(len(seen), len(unseeded)) > 5


WRONG_OPTIONS = [
    ("temperature", -1), ("temperature", 1e7), ("temperature", 1e-9), ("temperature", "1"),
    ("temperature", True), ("epsilon", -0.1), ("epsilon", 1.1), ("epsilon", []), ("seed", -1),
    ("seed", 2**63), ("seed", 1.0), ("seed", True), ("q_values", 1), ("q_values", True),
    ("step", -1), ("step", 2**31), ("step", 1.5), ("step", True), ("state", "x"), ("state", 1),
    ("steps", [1]), ("states", ["x"]),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), WRONG_OPTIONS)
def test_a_wrong_option_is_422(client, field, value):
    body = {"observation": GOOD, field: value}
    refused(client.post("/act", content=orjson.dumps(body)), 422, field)


def test_temperature_beside_the_mode_is_422(client):
    body = {"observation": GOOD, "deterministic": True, "temperature": 1}
    refused(client.post("/act", json=body), 422, "temperature")


def test_options_that_a_head_lacks_are_422(app_client, kit, tmp_path):
    spec = PolicySpec(Box((4,)), Box((2,), low=-1, high=1), "deterministic")
    graph = kit.linear_graph(np.full((4, 2), 0.25, np.float32), "actions", 4)
    policy = load_policy(kit.save_policy(tmp_path / "package", spec, graph))
    with app_client(create_app(lambda: serving(policy))) as client:
        for field in ("temperature", "epsilon"):
            refused(client.post("/act", json={"observation": GOOD, field: 0.5}), 422, field)


def test_q_values_come_with_the_action(app_client, kit, tmp_path):
    spec = PolicySpec(Box((4,)), Discrete(2), "q_values")
    graph = kit.linear_graph(kit.WEIGHTS, "q_values", 4)
    policy = load_policy(kit.save_policy(tmp_path / "package", spec, graph))
    with app_client(create_app(lambda: serving(policy))) as client:
        one = client.post("/act", json={"observation": GOOD, "q_values": True}).json()
        assert np.allclose(one["q_values"], LOGITS, atol=1e-6)
        many = {"observation": [GOOD] * 2, "q_values": True}
        assert np.allclose(client.post("/act", json=many).json()["q_values"], [LOGITS] * 2)
        headers = {**MSGPACK, "accept": "application/msgpack"}
        packed = client.post("/act", content=msgpack.packb(many), headers=headers).content
        assert msgpack.unpackb(packed)["q_values"]["shape"] == [2, 2]
        assert "q_values" not in client.post("/act", json={"observation": GOOD}).json()


@pytest.mark.parametrize("asked", [{"temperature": 1}, {"temperature": 3, "epsilon": 0.2},
                                   {"epsilon": 0.3}], ids=str)  # fmt: skip
def test_sampled_actions_are_as_likely_as_they_say(app_client, kit, tmp_path, asked):
    """Pearson's chi-square of 20,000 draws against the probabilities that were stated."""
    weights = np.random.default_rng(5).standard_normal((4, 5)).astype(np.float32)
    spec = PolicySpec(Box((4,)), Discrete(5), "categorical")
    graph = kit.linear_graph(weights, "logits", 4)
    policy = load_policy(kit.save_policy(tmp_path / "package", spec, graph))
    counts, stated = np.zeros(5), np.full(5, np.nan)
    with app_client(create_app(lambda: serving(policy))) as client:
        for seed in range(5):
            body = {"observations": [GOOD] * 4000, "seed": seed, **asked}
            answer = client.post("/act", json=body).json()
            actions = np.asarray(answer["actions"])
            counts += np.bincount(actions, minlength=5)
            stated[actions] = np.exp(answer["log_probs"])
    assert abs(stated.sum() - 1) < 1e-5
    expected = stated * counts.sum()
    # 18.47 is chi-square's 99.9% point at 4 degrees of freedom.
    assert ((counts - expected) ** 2 / expected).sum() < 18.47
