"""The HTTP API in process: what it answers, and every way in which it refuses."""

import json
import math
import time

import hypothesis
import numpy as np
import orjson
import pytest
from hypothesis import strategies as st

from replaylake.datastore.errors import StorageFailed
from replaylake.datastore.lake import open_lake
from replaylake.datastore.policies.exploration import Exploration
from replaylake.datastore.policies.package import load_policy
from replaylake.datastore.policies.policy import PolicySpec
from replaylake.datastore.policies.uniform import UniformPolicy
from replaylake.datastore.sessions.decision_id import DecisionSigner
from replaylake.datastore.sessions.sessionise import sessionise
from replaylake.datastore.spaces import Box, Dict, Discrete, MultiDiscrete, Text, Tuple
from replaylake.serve.app import create_app
from replaylake.serve.decision_log import DecisionLog
from replaylake.serve.router import Router, Served
from replaylake.serve.serving import Limits, Serving

GOOD = [0.1, 0.2, 0.3, 0.4]


def serving(policy, *, log=None, exploration=None, limits=None, signer=None):
    signer = signer or DecisionSigner(b"k" * 32, "d")
    return Serving(
        Router(Served("p", 2, policy, "p@champion", {"algorithm": "by_hand"})),
        signer,
        log,
        exploration or Exploration(),
        limits or Limits(),
    )


@pytest.fixture(scope="module")
def policy(package):
    return load_policy(package)


@pytest.fixture(scope="module")
def client(app_client, policy):
    limits = Limits(body_bytes=20_000, batch=16)
    with app_client(create_app(lambda: serving(policy, limits=limits))) as client:
        yield client


@pytest.fixture
def logged(app_client, policy, tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    signer = DecisionSigner(lake.signing_key(), "d")
    log = DecisionLog(lake.dataset("d"), policy.spec, signer.worker, window_s=60)
    with app_client(create_app(lambda: serving(policy, log=log, signer=signer))) as client:
        client.lake, client.log, client.signer = lake, log, signer
        yield client


def refused(response, status, field):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"field", "found", "expected"}
    assert error["field"] == field, error
    assert all(isinstance(text, str) and text for text in error.values())
    return error


def test_one_and_many(client, policy):
    one = client.post("/act", json={"observation": GOOD}).json()
    assert set(one) == {"policy", "version", "action", "log_prob", "decision_id"}
    assert (one["policy"], one["version"], one["log_prob"]) == ("p", 2, 0.0)
    many = client.post("/act", json={"observations": [GOOD, [4, 3, 2, 1]]}).json()
    assert set(many) == {"policy", "version", "actions", "log_probs", "decision_ids"}
    expected = policy.act(np.asarray([GOOD, [4, 3, 2, 1]], np.float32)).actions.tolist()
    assert many["actions"] == expected
    assert one["action"] == expected[0]
    assert len({one["decision_id"], *many["decision_ids"]}) == 3


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=20,
)
FIELDS = st.sampled_from(
    ["observation", "observations", "deterministic", "episode_id", "episode_ids", "request_id",
     "action_mask", "action_masks", "decision_id", "reward", "terminated", "final_observation"]
)  # fmt: skip
ROUTES = st.sampled_from(["/act", "/feedback"])


@hypothesis.settings(deadline=None, max_examples=300)
@hypothesis.given(body=st.dictionaries(FIELDS, JSON, max_size=4) | JSON, path=ROUTES)
def test_no_body_is_beyond_us(client, body, path):
    response = client.post(path, content=json.dumps(body).encode())
    assert response.status_code in (200, 404, 413, 422), response.text


@hypothesis.settings(deadline=None)
@hypothesis.given(body=st.binary(max_size=200), path=ROUTES)
def test_no_bytes_are_beyond_us(client, body, path):
    assert client.post(path, content=body).status_code in (404, 422)


NUMBERS = [
    ("nan", b"[NaN, 0, 0, 0]", "body"),
    ("infinity", b"[Infinity, 0, 0, 0]", "body"),
    ("huge exponent", b"[1e400, 0, 0, 0]", "body"),
    ("beyond float32", b"[1e39, 0, 0, 0]", "observation"),
    ("beyond float32, integer", b"[1" + b"0" * 60 + b", 0, 0, 0]", "observation"),
    ("boolean", b"[true, 0, 0, 0]", "observation[0]"),
    ("string", b'[0, "1", 0, 0]', "observation[1]"),
    ("null", b"[0, 0, null, 0]", "observation[2]"),
    ("object", b"[0, 0, 0, {}]", "observation[3]"),
    ("nested", b"[0, 0, 0, [0]]", "observation[3]"),
    ("short", b"[0, 0, 0]", "observation"),
    ("long", b"[0, 0, 0, 0, 0]", "observation"),
    ("empty", b"[]", "observation"),
    ("two rows", b"[[0, 0, 0, 0], [0, 0, 0, 0]]", "observation"),
    ("one row", b"[[0, 0, 0, 0]]", "observation"),
    ("scalar", b"0", "observation"),
    ("text", b'"0,0,0,0"', "observation"),
    ("none", b"null", "observation"),
    ("mapping", b'{"0": 0}', "observation"),
]


@pytest.mark.parametrize(
    ("raw", "field"), [case[1:] for case in NUMBERS], ids=[c[0] for c in NUMBERS]
)
def test_a_wrong_observation_is_422(client, raw, field):
    refused(client.post("/act", content=b'{"observation": ' + raw + b"}"), 422, field)


BODIES = [
    ("empty", b"", "body"),
    ("no json", b"{", "body"),
    ("list", b"[]", "body"),
    ("number", b"1", "body"),
    ("null", b"null", "body"),
    ("latin-1", b'{"observation": "\xe9"}', "body"),
    ("bom", b"\xef\xbb\xbf{}", "body"),
    ("lone surrogate", b'{"observation": "\\ud800"}', "body"),
    ("deep", b'{"observation": ' + b"[" * 5000 + b"]" * 5000 + b"}", "body"),
    ("nothing", b"{}", "observation"),
    ("both", b'{"observation": [0,0,0,0], "observations": [[0,0,0,0]]}', "observation"),
    ("unknown", b'{"observation": [0,0,0,0], "obs": 1}', "obs"),
    ("mask for many", b'{"observation": [0,0,0,0], "action_masks": [[true,true]]}', "action_masks"),
    ("ids for many", b'{"observation": [0,0,0,0], "episode_ids": ["a"]}', "episode_ids"),
    ("mask for one", b'{"observations": [[0,0,0,0]], "action_mask": [true,true]}', "action_mask"),
    ("requests twice", b'{"observations": [[0,0,0,0]], "request_ids": ["a"], "request_id": "b"}',
     "request_ids"),
    ("request empty", b'{"observations": [[0,0,0,0]], "request_id": ""}', "request_id"),
    ("empty batch", b'{"observations": []}', "observations"),
    ("flat batch", b'{"observations": [0,0,0,0]}', "observations[0]"),
    ("8 numbers", b'{"observations": [[0,0,0,0,0,0,0,0]]}', "observations[0]"),
    ("ragged", b'{"observations": [[0,0,0,0],[0,0,0]]}', "observations[1]"),
    ("bad second", b'{"observations": [[0,0,0,0],[0,0,0,true]]}', "observations[1][3]"),
    ("batch no list", b'{"observations": {"0": [0,0,0,0]}}', "observations"),
    ("deterministic 1", b'{"observation": [0,0,0,0], "deterministic": 1}', "deterministic"),
    ("deterministic text", b'{"observation": [0,0,0,0], "deterministic": "no"}', "deterministic"),
    ("episode number", b'{"observation": [0,0,0,0], "episode_id": 7}', "episode_id"),
    ("episode empty", b'{"observation": [0,0,0,0], "episode_id": ""}', "episode_id"),
    ("long id", b'{"observation": [0,0,0,0], "request_id": "%b"}' % (b"x" * 257), "request_id"),
    ("ids short", b'{"observations": [[0,0,0,0],[0,0,0,0]], "episode_ids": ["a"]}', "episode_ids"),
    ("ids twice", b'{"observations": [[0,0,0,0]], "episode_ids": ["a"], "episode_id": "b"}',
     "episode_ids"),
    ("mask short", b'{"observation": [0,0,0,0], "action_mask": [true]}', "action_mask"),
    ("mask numbers", b'{"observation": [0,0,0,0], "action_mask": [1, 0]}', "action_mask"),
    ("mask nothing", b'{"observation": [0,0,0,0], "action_mask": [false, false]}', "action_mask"),
    ("mask text", b'{"observation": [0,0,0,0], "action_mask": "10"}', "action_mask"),
    ("masks short", b'{"observations": [[0,0,0,0]], "action_masks": []}', "action_masks"),
    ("masks flat", b'{"observations": [[0,0,0,0]], "action_masks": [true]}', "action_masks[0]"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "field"), [case[1:] for case in BODIES], ids=[c[0] for c in BODIES]
)
def test_a_wrong_body_is_422(client, body, field):
    refused(client.post("/act", content=body), 422, field)


def test_bodies_and_batches_have_a_limit(client):
    refused(client.post("/act", content=b" " * 20_001), 413, "body")
    refused(client.post("/act", json={"observations": [GOOD] * 17}), 413, "observations")
    assert client.post("/act", json={"observations": [GOOD] * 16}).status_code == 200


def test_wrong_paths_and_methods_answer_alike(client):
    refused(client.get("/act"), 405, "method")
    refused(client.request("DELETE", "/policy"), 405, "method")
    for path in ("/", "/acts", "/act/", "/docs.json"):
        refused(client.get(path), 404, "path")


def test_a_mask_decides(client):
    for allowed in (0, 1):
        mask = [i == allowed for i in range(2)]
        one = client.post("/act", json={"observation": GOOD, "action_mask": mask}).json()
        assert (one["action"], one["log_prob"]) == (allowed, 0.0)
    body = {"observations": [GOOD] * 2, "action_masks": [[True, False], [False, True]]}
    assert client.post("/act", json=body).json()["actions"] == [0, 1]


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


def test_policy_says_what_answers(client):
    said = client.get("/policy").json()
    assert (said["policy"], said["version"], said["head"]) == ("p", 2, "categorical")
    assert said["reference"] == "p@champion"
    assert said["observation_space"]["shape"] == [4]
    assert said["action_space"] == {"type": "discrete", "n": 2, "start": 0}
    assert said["manifest"] == {"algorithm": "by_hand"}
    assert said["explore"] is None


def test_health(app_client, policy):
    app = create_app(lambda: serving(policy))
    assert not app.state.is_ready()
    with app_client(app) as client:
        assert app.state.is_ready()
        assert client.get("/livez").status_code == 200
        assert client.get("/readyz").json() == {"ready": True}
    assert not app.state.is_ready()


def test_metrics_count_by_route_and_status(app_client, policy):
    with app_client(create_app(lambda: serving(policy))) as client:
        client.post("/act", json={"observations": [GOOD] * 3})
        client.post("/act", json={})
        client.get("/nowhere/at/all")
        text = client.get("/metrics").text
    assert 'replaylake_requests_total{route="/act",status="200"} 1.0' in text
    assert 'replaylake_requests_total{route="/act",status="422"} 1.0' in text
    assert 'replaylake_requests_total{route="other",status="404"} 1.0' in text
    assert 'replaylake_decisions_total{deterministic="true",policy="p",version="2"} 3.0' in text
    assert 'replaylake_request_seconds_count{route="/act"} 2.0' in text


def test_the_unforeseen_is_500_without_internals(app_client, policy, caplog):
    class Broken:
        spec = policy.spec

        def act(self, *args, **kwargs):
            raise RuntimeError("secret/path")

    with app_client(create_app(lambda: serving(Broken()))) as client:
        response = client.post("/act", json={"observation": GOOD})
    refused(response, 500, "server")
    assert "secret" not in response.text
    assert "secret/path" in caplog.text


def test_feedback(logged):
    answer = logged.post("/act", json={"observation": GOOD, "episode_id": "e"}).json()
    key = answer["decision_id"]
    body = {"decision_id": key, "reward": 1, "terminated": True, "truncated": False}
    for _ in range(2):
        said = logged.post("/feedback", json=body)
        assert (said.status_code, said.json()) == (
            200,
            {"decision_id": key, "policy": "p", "version": 2},
        )
    assert logged.post("/feedback", json={"decision_id": key, "reward": 0.5}).status_code == 200
    final = {"decision_id": key, "reward": 1.5, "final_observation": [1, 2, 3, 4]}
    assert logged.post("/feedback", json=final).status_code == 200
    logged.log.rewards.flush()
    rows = logged.lake.sql("select * from d.rewards order by timestamp").to_pylist()
    assert [row["reward"] for row in rows] == [1.0, 1.0, 0.5, 1.5]
    assert [row["terminated"] for row in rows] == [True, True, False, False]
    assert rows[-1]["final_observation"] == [1.0, 2.0, 3.0, 4.0]
    assert {row["decision_id"] for row in rows} == {key}


FEEDBACK = [
    ("empty", {}, "decision_id"),
    ("no reward", {"decision_id": "x"}, "reward"),
    ("no id", {"reward": 1}, "decision_id"),
    ("id number", {"decision_id": 5, "reward": 1}, "decision_id"),
    ("reward text", {"decision_id": "x", "reward": "1"}, "reward"),
    ("reward true", {"decision_id": "x", "reward": True}, "reward"),
    ("reward null", {"decision_id": "x", "reward": None}, "reward"),
    ("reward list", {"decision_id": "x", "reward": [1]}, "reward"),
    ("terminated 1", {"decision_id": "x", "reward": 1, "terminated": 1}, "terminated"),
    ("truncated text", {"decision_id": "x", "reward": 1, "truncated": "no"}, "truncated"),
    ("done", {"decision_id": "x", "reward": 1, "done": True}, "done"),
    ("final short", {"decision_id": "x", "reward": 1, "final_observation": [1]},
     "final_observation"),
    ("final text", {"decision_id": "x", "reward": 1, "final_observation": [1, 2, 3, "4"]},
     "final_observation[3]"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "field"), [c[1:] for c in FEEDBACK], ids=[c[0] for c in FEEDBACK])
def test_wrong_feedback_is_422(client, body, field):
    refused(client.post("/feedback", json=body), 422, field)


def test_a_reward_of_nan_is_422(client):
    for number in (b"NaN", b"Infinity", b"1e400"):
        body = b'{"decision_id": "x", "reward": ' + number + b"}"
        refused(client.post("/feedback", content=body), 422, "body")


def test_a_strangers_decision_is_404_and_an_old_one_410(logged):
    (foreign,) = DecisionSigner(b"other" * 7, "d").issue("p", 2, 1)
    (elsewhere,) = DecisionSigner(logged.lake.signing_key(), "e").issue("p", 2, 1)
    for key in (foreign, elsewhere, "x", "", "é"):
        body = {"decision_id": key, "reward": 1}
        refused(logged.post("/feedback", json=body), 404, "decision_id")
    (old,) = logged.signer.issue("p", 2, 1)
    refused(logged.post("/feedback", json={"decision_id": old, "reward": 1}), 410, "decision_id")


def test_feedback_without_a_log_is_404(client):
    key = client.post("/act", json={"observation": GOOD}).json()["decision_id"]
    error = refused(
        client.post("/feedback", json={"decision_id": key, "reward": 1}), 404, "decision_id"
    )
    assert "--log-to" in error["expected"]


def test_decisions_are_rows(logged):
    mask = {"action_mask": [False, True]}
    one = {"observation": [0.1, 2, 3, 4], "episode_id": "e", "request_id": "r", **mask}
    first = logged.post("/act", json=one).json()
    many = {"observations": [GOOD] * 2, "episode_ids": ["a", None], "request_ids": ["x", "y"]}
    rest = logged.post("/act", json={**many, "deterministic": False}).json()
    logged.log.decisions.flush()
    rows = logged.lake.sql("select * from d.decisions order by decision_id").to_pylist()
    assert [r["decision_id"] for r in rows] == [first["decision_id"], *rest["decision_ids"]]
    assert [r["action"] for r in rows] == [first["action"], *rest["actions"]]
    assert np.array_equal(
        np.asarray([r["log_prob"] for r in rows], np.float32),
        np.asarray([first["log_prob"], *rest["log_probs"]], np.float32),
    )
    assert [r["deterministic"] for r in rows] == [True, False, False]
    assert [r["episode_id"] for r in rows] == ["e", "a", None]
    assert [r["request_id"] for r in rows] == ["r", "x", "y"]
    assert rows[0]["observation"] == np.asarray([0.1, 2, 3, 4], np.float32).tolist()
    assert [r["action_mask"] for r in rows] == [[False, True], None, None]
    assert {(r["policy"], r["policy_version"]) for r in rows} == {("p", 2)}


def test_one_episode_and_request_of_a_batch_name_each_row(logged):
    body = {"observations": [GOOD] * 3, "episode_id": "e", "request_id": "r"}
    first = logged.post("/act", json=body).json()["decision_ids"]
    again = logged.post("/act", json=body).json()["decision_ids"]  # its answer was lost
    logged.log.decisions.flush()
    rows = logged.lake.sql("select * from d.decisions order by decision_id").to_pylist()
    assert {row["episode_id"] for row in rows} == {"e"}
    assert [row["request_id"] for row in rows] == ["r/0", "r/1", "r/2"] * 2
    for number, key in enumerate(again, 1):
        logged.post("/feedback", json={"decision_id": key, "reward": number})
    ending = {"decision_id": again[-1], "reward": 3, "terminated": True}
    assert logged.post("/feedback", json=ending).status_code == 200
    logged.log.rewards.flush()
    receipt = sessionise(logged.lake, "d", now_s=time.time() + 1)
    assert (receipt.steps, receipt.repeated) == (3, 3)
    steps = logged.lake.sql("select decision_id, reward from d.steps order by step").to_pylist()
    assert [(row["decision_id"], row["reward"]) for row in steps] == [
        (again[0], 1.0), (again[1], 2.0), (again[2], 3.0)
    ]  # fmt: skip
    assert not set(first) & set(again)


@pytest.mark.parametrize("head", ["categorical", "deterministic"])
def test_an_observation_that_the_network_answers_with_nan_is_422(app_client, kit, tmp_path, head):
    # Finite in float32, but a sum of its products is not: inf - inf.
    weights = np.full((4, 2), 1e38, np.float32) * np.array([[1], [1], [-1], [-1]], np.float32)
    space = Discrete(2) if head == "categorical" else Box((2,), low=-1, high=1)
    spec = PolicySpec(Box((4,)), space, head)
    output = "logits" if head == "categorical" else "actions"
    graph = kit.linear_graph(weights, output, 4)
    policy = load_policy(kit.save_policy(tmp_path / "package", spec, graph))
    with app_client(create_app(lambda: serving(policy))) as client:
        error = refused(client.post("/act", json={"observation": [10] * 4}), 422, "observation")
        assert "not finite" in error["found"]
        many = {"observations": [[0, 0, 0, 0], [10] * 4]}
        error = refused(client.post("/act", json=many), 422, "observations")
        assert "observation 1" in error["found"]
        assert client.post("/act", json={"observation": [0, 0, 0, 0]}).status_code == 200


def test_masks_that_the_dataset_cannot_keep_are_refused(app_client, policy, tmp_path):
    lake = open_lake(tmp_path / "lake", create=True)
    lake.dataset("d").create(policy.spec.observation_space, policy.spec.action_space)
    log = DecisionLog(lake.dataset("d"), policy.spec, "ab" * 6)
    with app_client(create_app(lambda: serving(policy, log=log))) as client:
        body = {"observation": GOOD, "action_mask": [True, True]}
        refused(client.post("/act", json=body), 422, "action_mask")


def test_a_log_that_cannot_be_written_is_503(logged, monkeypatch):
    def full(records):
        raise StorageFailed("disk full")

    monkeypatch.setattr(logged.log.decisions, "append", full)
    refused(logged.post("/act", json={"observation": GOOD}), 503, "log")
    assert "replaylake_log_failures_total 1.0" in logged.get("/metrics").text


def test_continuous_actions_have_their_shape_and_no_log_prob_when_deterministic(
    app_client, kit, tmp_path
):
    spec = PolicySpec(Box((4,)), Box((2,), low=-1, high=1), "deterministic")
    graph = kit.linear_graph(np.full((4, 2), 0.25, np.float32), "actions", 4)
    policy = load_policy(kit.save_policy(tmp_path / "package", spec, graph))
    with app_client(create_app(lambda: serving(policy))) as client:
        answer = client.post("/act", json={"observation": [1, 1, 1, 0]}).json()
        assert (answer["action"], answer["log_prob"]) == ([0.75, 0.75], None)
        refused(
            client.post("/act", json={"observation": GOOD, "action_mask": [True]}),
            422,
            "action_mask",
        )


def test_structured_observations(app_client):
    space = Dict(
        {
            "image": Box((2, 2), "uint8", 0, 255),
            "gear": Discrete(3, start=1),
            "on": MultiDiscrete((2, 2)),
            "note": Text(),
            "pair": Tuple((Box(()), Discrete(2))),
            "flag": Box((1,), "bool", 0, 1),
        }
    )
    good = {"image": [[0, 255], [1, 2]], "gear": 3, "on": [0, 1], "note": "hé", "pair": [0.5, 1],
            "flag": [True]}  # fmt: skip
    wrong = [
        ("image", [[0, 256], [1, 2]], "observation.image"),
        ("image", [[0, -1], [1, 2]], "observation.image"),
        ("image", [[0, 1.0], [1, 2]], "observation.image[0][1]"),
        ("image", [0, 1, 2, 3], "observation.image"),
        ("image", [0, 1], "observation.image[0]"),
        ("gear", 0, "observation.gear"),
        ("gear", 4, "observation.gear"),
        ("gear", 2**63, "observation.gear"),
        ("gear", 1.0, "observation.gear"),
        ("on", [0, 2], "observation.on"),
        ("note", 5, "observation.note"),
        ("pair", [0.5], "observation.pair"),
        ("pair", [0.5, 2], "observation.pair[1]"),
        ("flag", [1], "observation.flag[0]"),
    ]
    app = create_app(lambda: serving(UniformPolicy(space, Discrete(2))))
    with app_client(app) as client:
        body = {"observation": good, "deterministic": False}
        assert client.post("/act", json=body).status_code == 200
        assert client.post("/act", json={"observations": [good] * 3}).status_code == 200
        for key, value, field in wrong:
            body = {"observation": {**good, key: value}}
            response = client.post("/act", content=orjson.dumps(body))
            error = refused(response, 422, field)
            assert len(json.dumps(error)) < 600
        without = {key: value for key, value in good.items() if key != "gear"}
        refused(client.post("/act", json={"observation": without}), 422, "observation")
