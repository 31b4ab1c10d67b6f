"""POST /episodes: what was acted elsewhere, taken once, or refused with its place."""

import asyncio
import copy
import json
import time

import hypothesis
import msgpack
import numpy as np
import pytest
from hypothesis import strategies as st

from replaylake.datastore.episodes.spaces import Box, Dict, Text
from replaylake.datastore.errors import StorageError
from replaylake.datastore.feedback.decision_id import DecisionSigner
from replaylake.datastore.feedback.join import join_feedback
from replaylake.datastore.feedback.journal import JournalConfig
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.serve.api.arrays import array_map
from replaylake.serve.app import create_app
from replaylake.serve.recording.decision_log import DecisionLog
from replaylake.serve.safety.limits import Limits
from replaylake.serve.serving_state import ServingState
from replaylake.serve.versions.router import Router, ServedPolicy

EPISODE = {
    "episode_id": "robot-1",
    "observations": [[0.1, 0.2, 0.3, 0.4], [1, 2, 3, 4], [5, 6, 7, 8]],
    "actions": [0, 1, 1],
    "rewards": [1, 0.5, -2.0],
    "terminated": True,
    "final_observation": [9, 9, 9, 9],
    "log_probs": [-0.1, None, 0.0],
    "policy": "arm",
    "policy_version": 3,
    "timestamps": [1_700_000_000_000_000, 1_700_000_000_000_001, 1_700_000_000_000_002],
    "action_masks": [[True, True], [True, True], [False, True]],
}


def changed(**changes):
    return {**copy.deepcopy(EPISODE), **changes}


class Server:
    """Workers of one lake, each an app in process."""

    def __init__(self, app_client, path, policy, window_s=60):
        self.lake = open_lake(path, create=True)
        self.policy, self._app_client = policy, app_client

    def app(self, limits=None):
        signer = DecisionSigner(self.lake.signing_key(), "d")
        log = DecisionLog(
            self.lake.dataset("d"),
            self.policy.spec,
            signer.worker,
            config=JournalConfig(flush_interval_s=0.02),
        )
        served = ServedPolicy("p", 2, self.policy, "p@champion", {})
        serving = ServingState(Router(served), signer, log, limits=limits or Limits())
        client = self._app_client(create_app(lambda: serving))
        client.serving = serving
        return client

    def join(self, num_rows=None):
        """Wait until so many rows are committed, then move them."""
        received = self.lake.dataset("d").received
        until = time.monotonic() + 60
        while num_rows is not None and received.snapshot().num_rows < num_rows:
            assert time.monotonic() < until
            time.sleep(0.01)
        return join_feedback(self.lake, "d").received

    def steps(self, columns="*"):
        return self.lake.sql(f"select {columns} from d.steps order by episode_id, step").to_pylist()


@pytest.fixture
def server(app_client, policy, tmp_path):
    return Server(app_client, tmp_path / "lake", policy)


@pytest.fixture
def client(server):
    with server.app() as client:
        yield client


def send(client, *episodes):
    return client.post("/episodes", json={"episodes": list(episodes)})


def test_an_episode_gets_into_the_dataset(server, client):
    answer = send(client, EPISODE)
    assert (answer.status_code, answer.json()) == (202, {"episodes": 1, "steps": 3})
    assert server.join(3).steps == 3
    rows = server.steps("*, epoch_us(timestamp) as us")
    assert [row["observation"] for row in rows][1:] == EPISODE["observations"][1:]
    assert [row["action"] for row in rows] == [0, 1, 1]
    assert [row["reward"] for row in rows] == [1.0, 0.5, -2.0]
    assert [row["behavior_log_prob"] for row in rows] == [pytest.approx(-0.1), None, 0.0]
    assert [row["us"] for row in rows] == EPISODE["timestamps"]
    assert [row["action_mask"] for row in rows] == EPISODE["action_masks"]
    last = rows[-1]
    assert (last["policy"], last["policy_version"]) == ("arm", 3)
    assert (last["terminated"], last["final_observation"]) == (True, [9.0] * 4)
    assert {row["source_episode_id"] for row in rows} == {"robot-1"}


def test_msgpack_with_arrays_says_the_same(server, client):
    arrays = changed(
        observations=array_map(np.array(EPISODE["observations"], np.float32)),
        actions=array_map(np.array(EPISODE["actions"])),
        rewards=array_map(np.array(EPISODE["rewards"])),
        action_masks=array_map(np.array(EPISODE["action_masks"])),
    )
    headers = {"content-type": "application/msgpack"}
    for body in (arrays, EPISODE):
        packed = msgpack.packb({"episodes": [body]})
        answer = client.post("/episodes", content=packed, headers=headers)
        assert answer.status_code == 202, answer.text
    assert send(client, EPISODE).status_code == 202
    assert (server.join(3).steps, server.join().conflicting) == (3, 0)


def test_sent_again_anywhere_changes_nothing(server):
    with server.app() as first, server.app() as second:
        for client in (first, first, second):
            assert send(client, EPISODE).status_code == 202
    with server.app() as third:  # after the others are gone
        assert send(third, EPISODE).status_code == 202
    received = server.lake.dataset("d").received.snapshot()
    assert received.num_rows == 9  # what one worker got twice it wrote once
    moved = server.join()
    assert (moved.steps, moved.conflicting) == (3, 0)


def test_pieces_and_overlaps(server, client):
    def part(begin, end, **more):
        cut = {k: v[begin:end] if isinstance(v, list) else v for k, v in EPISODE.items()}
        del cut["final_observation"], cut["terminated"]
        return {**cut, "first_step": begin, **more}

    ended = {"terminated": True, "final_observation": [9] * 4}
    assert send(client, part(2, 3, **ended), part(0, 1)).json() == {"episodes": 2, "steps": 2}
    assert send(client, part(1, 3, **ended)).status_code == 202
    assert server.join(4).steps == 3
    assert [row["step"] for row in server.steps("step")] == [0, 1, 2]
    assert [row["terminated"] for row in server.steps("terminated")] == [False, False, True]


def test_a_contradiction_is_told_at_once_or_at_the_join(server, refused):
    other = changed(rewards=[1, 0.5, 2.0])
    with server.app() as first, server.app() as second:
        assert send(first, EPISODE).status_code == 202
        error = refused(send(first, other), 409, "episodes[0]")
        assert error["message"].startswith("step 2 was received before with other values; ")
        time.sleep(0.001)
        assert send(second, other).status_code == 202
    moved = server.join()
    assert (moved.steps, moved.conflicting) == (3, 1)
    assert server.steps("reward")[-1]["reward"] == -2.0


def test_nothing_comes_after_an_end(client, refused):
    assert send(client, EPISODE).status_code == 202
    later = changed(first_step=3)
    refused(send(client, later), 409, "episodes[0]")
    both = [changed(episode_id="x", first_step=3, terminated=False), changed(episode_id="x")]
    refused(send(client, *both), 409, "episodes[1]")
    # Nothing of it was taken.
    assert send(client, changed(episode_id="x", rewards=[0, 0, 0])).status_code == 202


FAULTS = [
    ({"episode_id": None}, "episodes[0].episode_id"),
    ({"episode_id": ""}, "episodes[0].episode_id"),
    ({"episode_id": 7}, "episodes[0].episode_id"),
    ({"agent_id": "a" * 257}, "episodes[0].agent_id"),
    ({"first_step": -1}, "episodes[0].first_step"),
    ({"first_step": 2**31}, "episodes[0].first_step"),
    ({"first_step": 2**31 - 2}, "episodes[0]"),
    ({"observations": [[1, 2, 3, 4]] * 2}, "episodes[0].observations"),
    ({"observations": [[1, 2, 3, 4], [1, 2, 3], [1, 2, 3, 4]]}, "episodes[0].observations[1]"),
    ({"observations": [[1, 2, 3, 4], [1, 2, "3", 4], [1] * 4]}, "episodes[0].observations[1][2]"),
    ({"actions": [0, 2, 0]}, "episodes[0].actions[1]"),
    ({"actions": [0, 1.5, 0]}, "episodes[0].actions[1]"),
    ({"actions": [1, 1, 0]}, "episodes[0]"),  # which its mask forbids
    ({"rewards": []}, "episodes[0].rewards"),
    ({"rewards": [1, None, 1]}, "episodes[0].rewards[1]"),
    ({"rewards": [1, True, 1]}, "episodes[0].rewards[1]"),
    ({"rewards": [1, 10**400, 1]}, "body"),
    ({"rewards": "111"}, "episodes[0].rewards"),
    ({"terminated": 1}, "episodes[0].terminated"),
    ({"truncated": "no"}, "episodes[0].truncated"),
    ({"final_observation": [1, 2, 3]}, "episodes[0].final_observation"),
    ({"log_probs": [0, 0.5, 0]}, "episodes[0].log_probs[1]"),
    ({"log_probs": [0.5]}, "episodes[0].log_probs"),
    ({"policy": 3}, "episodes[0].policy"),
    ({"policy": None}, "episodes[0].policy_version"),
    ({"policy_version": -1}, "episodes[0].policy_version"),
    ({"policy_version": 2**63}, "episodes[0].policy_version"),
    ({"timestamps": [0, 1]}, "episodes[0].timestamps"),
    ({"timestamps": [0, 1, 1.5]}, "episodes[0].timestamps[2]"),
    ({"timestamps": [0, 1, 2**62]}, "episodes[0].timestamps[2]"),
    ({"action_masks": [[True, True]] * 2}, "episodes[0].action_masks"),
    ({"action_masks": [[True, True]] * 2 + [[True]]}, "episodes[0].action_masks[2]"),
    ({"action_masks": [[True, True]] * 2 + [[1, 1]]}, "episodes[0].action_masks[2]"),
    ({"color": "red"}, "episodes[0].color"),
]


@pytest.mark.parametrize(("changes", "field"), FAULTS, ids=[str(fault)[:60] for fault in FAULTS])
def test_a_fault_is_named_with_its_place(server, client, changes, field, refused):
    body = json.dumps({"episodes": [changed(**changes)]}).encode()
    response = client.post("/episodes", content=body)
    error = refused(response, 422, field)
    assert error["message"]
    assert client.serving.received is None  # nothing was opened for it


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "episodes"),
        ({"episodes": []}, "episodes"),
        ({"episodes": {}}, "episodes"),
        ({"episodes": [1]}, "episodes[0]"),
        ({"episodes": [EPISODE, {"episode_id": "e"}]}, "episodes[1].observations"),
        ({"episodes": [EPISODE], "more": 1}, "more"),
        ([], "body"),
    ],
)
def test_a_body_that_is_none(client, body, field, refused):
    refused(client.post("/episodes", json=body), 422, field)


def test_of_several_all_are_taken_or_none(server, client, refused):
    bad = changed(episode_id="b", rewards=[1, 2, None])
    refused(send(client, changed(episode_id="a"), bad), 422, "episodes[1].rewards[2]")
    assert not server.lake.dataset("d").received.exists()


def test_limits(server, refused):
    with server.app(Limits(steps=5, body_bytes=4000)) as client:
        assert send(client, EPISODE).status_code == 202
        refused(send(client, EPISODE, EPISODE), 413, "episodes[1].rewards")
        refused(send(client, *[EPISODE] * 20), 413, "body")
        refused(client.post("/episodes", content=b"x", headers={"content-type": "text/csv"}), 415,
                "content-type")  # fmt: skip


def test_without_a_log_there_is_nowhere_to_write(app_client, policy, refused):
    serving = ServingState(
        Router(ServedPolicy("p", 2, policy, "p", {})), DecisionSigner(b"k" * 32, "d")
    )
    with app_client(create_app(lambda: serving)) as client:
        refused(send(client, EPISODE), 404, "path")


def test_a_full_disk_is_a_503_and_nothing_is_held(server, client, monkeypatch, refused):
    send(client, changed(episode_id="opens it"))
    journal = client.serving.received.journal

    def full(records):
        raise StorageError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(journal, "append", full)
        refused(send(client, EPISODE), 503, "log")
    assert send(client, changed(rewards=[3, 3, 3])).status_code == 202
    assert server.join(6).conflicting == 0


def test_a_worker_forgets_what_is_old(server, client, monkeypatch, refused):
    monkeypatch.setattr("replaylake.serve.recording.received_log._MAX_REMEMBERED_STEPS", 7)
    for name in "abc":
        assert send(client, changed(episode_id=name)).status_code == 202
    assert client.serving.received._num_held == 6
    assert send(client, changed(episode_id="a", rewards=[0, 0, 0])).status_code == 202
    refused(send(client, changed(episode_id="c", rewards=[0, 0, 0])), 409, "episodes[0]")


def test_two_at_once_agree(server, client):
    """One is first; the other says the same, or is refused."""

    async def all_at_once():
        bodies = [{"episodes": [changed(rewards=[i % 2] * 3)]} for i in range(8)]
        sent = [client._client.post("/episodes", json=body) for body in bodies]
        return [answer.status_code for answer in await asyncio.gather(*sent)]

    codes = client._runner.run(all_at_once())
    assert sorted(codes) == [202] * 4 + [409] * 4
    assert server.join(3).conflicting == 0


class _NoPolicy:
    """What only says what it would act on."""

    def __init__(self, spec):
        self.spec = spec


def test_other_spaces(app_client, tmp_path, refused):
    spec = PolicySpec(
        Dict({"camera": Box((2, 2), "uint8", 0, 255), "said": Text()}), Box((2,)), "deterministic"
    )
    policy = _NoPolicy(spec)
    server = Server(app_client, tmp_path / "lake", policy)
    seen = {"camera": [[0, 255], [1, 2]], "said": "hi"}
    episode = {
        "episode_id": "dialogue",
        "observations": [seen, seen],
        "actions": [[0.5, -0.5], [1, 2]],
        "rewards": [0, 1],
        "truncated": True,
        "final_observation": seen,
        "log_probs": [1.5, 2.5],  # a density may be above 1
    }
    with server.app() as client:
        assert send(client, episode).status_code == 202, send(client, episode).text
        bad = {**episode, "observations": [seen, {**seen, "camera": [[0, 256], [0, 0]]}]}
        refused(send(client, bad), 422, "episodes[0].observations[1].camera")
    assert server.join().steps == 2
    last = server.steps()[-1]
    assert last["observation"]["said"] == last["final_observation"]["said"] == "hi"
    assert (last["action"], last["behavior_log_prob"]) == ([1.0, 2.0], 2.5)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def hardened(app_client, policy, tmp_path_factory):
    server = Server(app_client, tmp_path_factory.mktemp("fuzz") / "lake", policy)
    with server.app(Limits(body_bytes=20_000)) as client:
        yield client


@pytest.mark.slow
@hypothesis.settings(deadline=None, max_examples=200)
@hypothesis.given(
    changes=st.dictionaries(st.sampled_from([*EPISODE, "agent_id", "first_step"]), JSON, max_size=3)
)
def test_no_field_is_beyond_us(hardened, changes):
    body = json.dumps({"episodes": [changed(**changes)]}).encode()
    response = hardened.post("/episodes", content=body)
    assert response.status_code in (202, 409, 422), response.text


@hypothesis.settings(deadline=None, max_examples=100)
@hypothesis.given(body=JSON | st.fixed_dictionaries({"episodes": JSON}), packed=st.booleans())
def test_no_body_is_beyond_us(hardened, body, packed):
    if packed:
        try:
            content = msgpack.packb(body)
        except (OverflowError, ValueError):
            return
        headers = {"content-type": "application/msgpack"}
    else:
        content, headers = json.dumps(body).encode(), {}
    response = hardened.post("/episodes", content=content, headers=headers)
    assert response.status_code in (413, 422), response.text
