"""Logged decisions asked of a candidate: numbers worked out by hand, and what it cannot act on."""

import json

import numpy as np
import pytest
from torch import nn

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import (
    ConfigInvalidError,
    EmptyReplayError,
    NotFoundError,
    QueryRefusedError,
    SchemaMismatchError,
    SpaceUnsupportedError,
)
from replaylake.datastore.feedback.decisions import decisions_encoder, ensure_feedback_tables
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.exploration import Exploration
from replaylake.datastore.lake.policies.policy import PolicySpec
from replaylake.offline.evaluation.ope.decision_replay import (
    CandidateDecisions,
    Tally,
    replay_decisions,
)

# Takes action 1 in context 0, else 0.
ROWS = np.array([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]])


@pytest.fixture
def lake(tmp_path):
    return open_lake(tmp_path / "lake", create=True)


def steps(lake, contexts, actions, probs, name="log"):
    """A dataset of one-step episodes."""
    lake.dataset(name).create(Discrete(3), Discrete(2))
    lake.dataset(name).append(
        Episode(
            f"e/{i:03d}",
            observations=np.array([context]),
            actions=np.array([action]),
            rewards=np.zeros(1),
            terminated=True,
            behavior_log_probs=np.log([prob]).astype(np.float32),
        )
        for i, (context, action, prob) in enumerate(zip(contexts, actions, probs, strict=True))
    )


def served(lake, rows, name="log"):
    """Decisions of p:1: (context, action, log_prob or None)."""
    dataset = lake.dataset(name)
    ensure_feedback_tables(dataset, Discrete(3), Discrete(2))
    records = [
        {
            "decision_id": f"d{i}",
            "request_id": None,
            "episode_id": f"e{i % 2}",
            "timestamp": i,
            "policy": "p",
            "policy_version": 1,
            "observation": context,
            "action": action,
            "log_prob": log_prob,
            "deterministic": log_prob == 0,
        }
        for i, (context, action, log_prob) in enumerate(rows)
    ]
    dataset.decisions.append(
        decisions_encoder(dataset)(records), producer=f"test/{len(rows)}", sequence=0
    )


def test_numbers_by_hand(lake, register_table):
    register_table(lake, "p", ROWS)
    steps(lake, [0, 0, 1, 2], [1, 0, 0, 1], [0.5, 0.5, 0.8, 0.25])
    found = replay_decisions(lake, "p", "log", exploration=Exploration(epsilon=0.4))
    body = found.to_json()
    assert (body["table"], body["num_decisions"], body["policy_version"]) == ("steps", 4, 1)
    # Best actions 1, 1, 0, 0; the better one has probability 0.8, the other 0.2.
    assert body["agreement"] == 0.5
    assert body["mean_prob"] == pytest.approx((0.8 + 0.2 + 0.8 + 0.2) / 4)
    weights = np.array([0.8 / 0.5, 0.2 / 0.5, 0.8 / 0.8, 0.2 / 0.25])
    assert body["mean_log_ratio"] == pytest.approx(np.log(weights).mean(), rel=1e-6)
    assert body["kl"] == pytest.approx(-np.log(weights).mean(), rel=1e-6)
    size = weights.sum() ** 2 / (weights**2).sum()
    assert body["effective_sample_size"] == pytest.approx(size, rel=1e-6)
    assert body["max_weight"] == pytest.approx(1.6, rel=1e-6)
    assert body["total_variation"] == pytest.approx((0 + 0.6 + 0 + 0.2) / 4, rel=1e-6)
    assert (body["num_known"], body["num_impossible"], body["num_errors"]) == (4, 0, 0)
    assert 0 < body["latency_ms"]["p50"] <= body["latency_ms"]["p99"]


def test_what_it_never_takes(lake, register_table):
    register_table(lake, "p", ROWS)
    steps(lake, [0, 0, 1, 2], [1, 0, 0, 1], [0.5] * 4)
    body = replay_decisions(lake, "p", "log").to_json()
    assert (body["num_impossible"], body["kl"]) == (2, None)
    assert body["mean_log_ratio"] == pytest.approx(np.log(2), rel=1e-6)
    # Of 1 and 0 against a half each: total variation a half.
    assert body["total_variation"] == pytest.approx(0.5, rel=1e-6)
    assert body["effective_sample_size"] == pytest.approx(2)


def test_decisions_come_before_steps(lake, register_table):
    register_table(lake, "p", ROWS)
    steps(lake, [0], [1], [0.5])
    dataset = lake.dataset("log")
    assert replay_decisions(lake, "p", "log").table == "steps"
    served(lake, [(0, 1, 0.0), (0, 0, 0.0), (1, 0, None)])
    assert dataset.decisions.exists()
    found = replay_decisions(lake, "p", "log", by="episode_id")
    body = found.to_json()
    assert (found.table, body["num_decisions"], body["num_known"]) == ("decisions", 3, 2)
    # Certain decisions: the one of other action is wholly elsewhere.
    assert body["total_variation"] == pytest.approx(0.5)
    assert [(g["group"], g["num_decisions"], g["agreement"]) for g in body["groups"]] == [
        ("e1", 1, 0.0),
        ("e0", 2, 1.0),
    ]
    assert body["groups"][0]["total_variation"] == 1.0


def test_where_and_limit(lake, register_table):
    register_table(lake, "p", ROWS)
    steps(lake, [0, 0, 1, 2], [1, 0, 0, 1], [0.5] * 4)
    assert replay_decisions(lake, "p", "log", limit=3).total.num == 3
    found = replay_decisions(lake, "p", "log", where="observation > 0 OR action = 1")
    assert (found.total.num, found.total.num_agreeing) == (3, 2)
    assert replay_decisions(lake, "p", "log", where="observation > 0", limit=1).total.num == 1
    with pytest.raises(EmptyReplayError, match="found no decision where action > 1"):
        replay_decisions(lake, "p", "log", where="action > 1")
    with pytest.raises(QueryRefusedError):
        replay_decisions(lake, "p", "log", where="action = (SELECT 1)")
    with pytest.raises(NotFoundError, match="found no column nothing"):
        replay_decisions(lake, "p", "log", by="nothing")
    with pytest.raises(ConfigInvalidError, match="limit"):
        replay_decisions(lake, "p", "log", limit=0)
    with pytest.raises(NotFoundError, match="other"):
        replay_decisions(lake, "p", "other")


def test_many_batches_are_one(lake, register_table, monkeypatch):
    register_table(lake, "p", ROWS)
    rng = np.random.default_rng(0)
    steps(lake, rng.integers(0, 3, 200), rng.integers(0, 2, 200), rng.uniform(0.2, 0.9, 200))
    options = {"exploration": Exploration(epsilon=0.2), "by": "action"}
    whole = replay_decisions(lake, "p", "log", **options)
    monkeypatch.setattr("replaylake.datastore.feedback.logged_decisions._ROWS_AT_ONCE", 7)
    parts = replay_decisions(lake, "p", "log", **options)
    for name in ("total", "groups"):
        one, other = getattr(whole, name), getattr(parts, name)
        for a, b in zip(
            [one] if name == "total" else one.values(),
            [other] if name == "total" else other.values(),
            strict=True,
        ):
            assert vars(a) == pytest.approx(vars(b))


def test_too_many_groups(lake, register_table, monkeypatch):
    register_table(lake, "p", ROWS)
    steps(lake, [0] * 9, [1] * 9, [0.5] * 9)
    monkeypatch.setattr("replaylake.offline.evaluation.ope.decision_replay._MAX_GROUPS", 8)
    with pytest.raises(ConfigInvalidError, match="found more than 8 values"):
        replay_decisions(lake, "p", "log", by="episode_id")


def test_actions_that_are_vectors(lake, register_graph):
    class Mean(nn.Module):
        def forward(self, observations):
            return observations * 0 + 0.5, observations * 0

    spec = PolicySpec(Box((2,)), Box((2,)), "gaussian")
    register_graph(lake, "g", Mean(), spec)
    lake.dataset("log").create(Box((2,)), Box((2,)))
    lake.dataset("log").append(
        [
            Episode(
                "e",
                observations=np.zeros((2, 2), np.float32),
                actions=np.array([[0.5, 0.5], [0.5, 1.5]], np.float32),
                rewards=np.zeros(2),
                terminated=True,
                behavior_log_probs=np.array([-1.0, np.nan], np.float32),
            )
        ]
    )
    body = replay_decisions(lake, "g", "log").to_json()
    assert body["agreement"] == 0.5
    assert body["mean_distance"] == pytest.approx(np.sqrt(0.5) / 2, rel=1e-6)
    assert body["mean_prob"] is None
    assert "has no density" in body["no_density"]
    body = replay_decisions(lake, "g", "log", exploration=Exploration(temperature=1.0)).to_json()
    # Standard normals: ln of 1 / 2 pi at the mean.
    assert body["num_known"] == 1
    assert body["mean_log_ratio"] == pytest.approx(-np.log(2 * np.pi) + 1, rel=1e-5)


def test_what_it_cannot_act_on_is_counted(lake, register_graph):
    class Exponential(nn.Module):
        """Not finite where an element is large."""

        def forward(self, observations):
            return (observations.exp(),)

    register_graph(lake, "r", Exponential(), PolicySpec(Box((2,)), Discrete(2), "q_values"))
    lake.dataset("log").create(Box((2,)), Discrete(2))
    observations = np.tile(np.array([[1.0, 4.0]], np.float32), (50, 1))
    observations[[3, 17, 18]] = 1000.0
    lake.dataset("log").append(
        [
            Episode(
                "e",
                observations=observations,
                actions=np.ones(50, int),
                rewards=np.zeros(50),
                terminated=True,
            )
        ]
    )
    found = replay_decisions(lake, "r", "log", by="step")
    assert (found.num_errors, found.total.num, found.total.num_agreeing) == (3, 47, 47)
    assert len(found.errors) == 1
    assert "q_values" in found.errors[0]
    assert "17" not in found.groups
    assert found.to_json()["num_known"] == 0
    assert found.to_json()["total_variation"] is None


def test_policies_that_do_not_fit(lake, register_table, register_graph):
    steps(lake, [0], [1], [0.5])
    register_table(lake, "other", np.zeros((3, 4)))
    with pytest.raises(SchemaMismatchError, match="action space"):
        replay_decisions(lake, "other", "log")
    with pytest.raises(NotFoundError):
        replay_decisions(lake, "nobody", "log")


def test_a_policy_that_remembers(lake, register_graph):
    class Memory(nn.Module):
        def forward(self, observations, state):
            return observations * 0, state

    spec = PolicySpec(Box((2,)), Discrete(2), "q_values", state_size=3)
    register_graph(lake, "m", Memory(), spec)
    lake.dataset("log").create(Box((2,)), Discrete(2))
    with pytest.raises(SpaceUnsupportedError, match="with a state"):
        replay_decisions(lake, "m", "log")


def test_densities_that_are_worlds_apart_stay_numbers():
    """A narrow policy over many numbers, beside a broad one: exp(800) is none."""
    tally = Tally()
    log_probs, logged = np.array([400.0, -1.0]), np.array([-400.0, -1.0])
    tally.add(CandidateDecisions(np.array([True, True]), np.zeros(2), log_probs, logged))
    said = json.loads(json.dumps(tally.to_json(), allow_nan=False))
    assert said["effective_sample_size"] == pytest.approx(1.0)
    assert (said["mean_log_ratio"], said["num_impossible"]) == (400.0, 0)
    assert said["total_variation"] == 0.0
