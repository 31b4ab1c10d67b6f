"""The HTTP API in process: what it answers, and every way in which it refuses."""

import json
import shutil

import hypothesis
import pytest
from hypothesis import strategies as st

from replaylake.datastore.feedback.decision_id import DecisionSigner
from replaylake.datastore.lake.lake import open_lake
from replaylake.serve.app import create_app
from replaylake.serve.recording.decision_log import DecisionLog

GOOD = [0.1, 0.2, 0.3, 0.4]


@pytest.fixture(scope="module")
def client(limited_client):
    return limited_client


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


@pytest.mark.slow
@hypothesis.settings(deadline=None, max_examples=300)
@hypothesis.given(body=st.dictionaries(FIELDS, JSON, max_size=4) | JSON, path=ROUTES)
def test_no_body_is_beyond_us(client, body, path):
    response = client.post(path, content=json.dumps(body).encode())
    assert response.status_code in (200, 404, 413, 422), response.text


@hypothesis.settings(deadline=None)
@hypothesis.given(body=st.binary(max_size=200), path=ROUTES)
def test_no_bytes_are_beyond_us(client, body, path):
    assert client.post(path, content=body).status_code in (404, 422)


def test_bodies_and_batches_have_a_limit(client, refused):
    refused(client.post("/act", content=b" " * 20_001), 413, "body")
    refused(client.post("/act", json={"observations": [GOOD] * 17}), 413, "observations")
    assert client.post("/act", json={"observations": [GOOD] * 16}).status_code == 200


def test_wrong_paths_and_methods_answer_alike(client, refused):
    refused(client.get("/act"), 405, "method")
    refused(client.request("DELETE", "/policy"), 405, "method")
    for path in ("/", "/acts", "/act/", "/docs"):
        refused(client.get(path), 404, "path")


def test_policy_says_what_answers(client):
    said = client.get("/policy").json()
    assert (said["policy"], said["version"], said["head"]) == ("p", 2, "categorical")
    assert said["reference"] == "p@champion"
    assert said["observation_space"]["shape"] == [4]
    assert said["action_space"] == {"type": "discrete", "n": 2, "start": 0}
    assert said["manifest"] == {"algorithm": "by_hand"}
    assert said["explore"] is None


def test_health(app_client, policy, serving):
    app = create_app(lambda: serving(policy))
    assert not app.state.is_ready()
    with app_client(app) as client:
        assert app.state.is_ready()
        assert client.get("/livez").status_code == 200
        assert client.get("/readyz").json() == {"ready": True, "degraded": []}
    assert not app.state.is_ready()


def test_metrics_count_by_route_and_status(app_client, policy, serving):
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


def test_the_unforeseen_is_500_without_internals(app_client, policy, caplog, serving, refused):
    class Broken:
        spec = policy.spec

        def act(self, *args, **kwargs):
            raise RuntimeError("secret/path")

    with app_client(create_app(lambda: serving(Broken()))) as client:
        response = client.post("/act", json={"observation": GOOD})
    refused(response, 500, "server")
    assert "secret" not in response.text
    assert "secret/path" in caplog.text


def test_a_dataset_that_is_removed_under_a_server(
    app_client, policy, serving, refused, tmp_path, caplog
):
    """Nothing more is acknowledged, probes report it, and the end is one line for each journal."""
    lake = open_lake(tmp_path / "lake", create=True)
    signer = DecisionSigner(lake.signing_key(), "d")
    log = DecisionLog(lake.dataset("d"), policy.spec, signer.worker)
    with app_client(create_app(lambda: serving(policy, log=log, signer=signer))) as client:
        assert client.post("/act", json={"observation": GOOD}).status_code == 200
        shutil.rmtree(tmp_path / "lake" / "d")
        refused(client.post("/act", json={"observation": GOOD}), 503, "log")
        report = {"request_id": "r", "reward": 1.0}
        refused(client.post("/feedback", json=report), 503, "log")
        assert client.get("/readyz").status_code == 503
        assert client.get("/livez").status_code == 200
        assert "replaylake_log_failures_total 2.0" in client.get("/metrics").text
    at_end = [record for record in caplog.records if "not committed at the end" in record.message]
    assert [record.message.split()[0] for record in at_end] == ["decisions", "rewards"]
    assert all("Restore the dataset" in record.message for record in at_end)
    assert not any(record.exc_info for record in caplog.records)
