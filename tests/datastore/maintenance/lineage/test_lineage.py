"""Lineage: from a decision to the commits below it, and from a dataset to what was learned."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import NotFoundError
from replaylake.datastore.feedback.decision_id import DecisionSigner
from replaylake.datastore.feedback.decisions import (
    decisions_encoder,
    ensure_feedback_tables,
    rewards_encoder,
)
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.maintenance.lineage import lineage

RUN = "01run"


def episode(name: str) -> Episode:
    return Episode(
        name,
        observations=np.zeros((3, 2), np.float32),
        actions=np.array([0, 1, 0]),
        rewards=np.ones(3),
        terminated=True,
    )


def selection(version: int, **kwargs: Any) -> dict[str, Any]:
    body = {"dataset": "d", "version": version, "where": None, "reward": None}
    return {**body, "content_hash": "c" * 64, "num_episodes": 3, "num_steps": 9, **kwargs}


@pytest.fixture
def lake(tmp_path: Path, package: Path) -> Lake:
    """Versions 1 and 2 by one producer, 3 by another; policy p:1 learned from version 2."""
    lake = open_lake(tmp_path / "lake", create=True)
    dataset = lake.dataset("d")
    info = {"source": "5" * 64, "read_as": {"format": "csv"}}
    dataset.append([episode("a/0")], producer="ingest/a", sequence=0, info=info)
    dataset.append([episode("a/1"), episode("a/2")], producer="ingest/a", sequence=1, info=info)
    dataset.append([episode("b/0")], producer="ingest/b", sequence=0)
    body = {"algorithm": "bc", "datasets": [selection(2, where='("return" > 1)')]}
    lake.registry.register("p", package, run_id=RUN, lineage=body)
    lake.registry.record_run(
        RUN, {"kind": "train offline", "algorithm": "bc", "seed": 7, "started_ms": 1000}
    )
    return lake


def test_a_policy_names_its_run_its_sql_and_the_ingests_up_to_its_version(lake: Lake) -> None:
    body = lineage.trace_policy(lake, "p")
    assert (body["policy"]["version"], body["policy"]["selected_by"]) == (1, "newest")
    assert (body["run"]["run_id"], body["run"]["seed"]) == (RUN, 7)
    assert body["run"]["started_at"] == "1970-01-01T00:00:01.000+00:00"
    assert body["run"]["ended_at"] is None
    (dataset,) = body["datasets"]
    assert dataset["where"] == '("return" > 1)'
    assert dataset["content_hash"] == "c" * 64
    (ingest,) = dataset["ingests"]
    assert ingest["producer"] == "ingest/a"
    assert ingest["source"] == "5" * 64
    assert ingest["versions"] == [1, 2]
    assert (ingest["num_episodes"], ingest["num_steps"]) == (3, 9)
    assert ingest["committed_at"].endswith("+00:00")


def test_a_dataset_names_every_ingest_and_its_policies(lake: Lake) -> None:
    body = lineage.trace_dataset(lake, "d")
    assert body["dataset"] == {"dataset": "d", "version": 3, "num_steps": 12, "num_shards": 3}
    assert [ingest["producer"] for ingest in body["ingests"]] == ["ingest/a", "ingest/b"]
    (policy,) = body["policies"]
    assert (policy["policy"], policy["version"], policy["run_id"]) == ("p", 1, RUN)
    assert policy["trained_on"]["version"] == 2


def test_a_dataset_that_trained_nothing(lake: Lake) -> None:
    lake.dataset("other").append([episode("o/0")])
    body = lineage.trace_dataset(lake, "other")
    assert body["policies"] == []
    assert len(body["ingests"]) == 1


def test_a_decision_is_traced_by_its_signature_alone(lake: Lake) -> None:
    lake.dataset("other").append([episode("o/0")])
    (decision,) = DecisionSigner(lake.signing_key(), "other").issue("p", 1, 2_500_000)
    body = lineage.trace_decision(lake, decision)
    assert body["decision"]["dataset"] == "other"
    assert body["decision"]["decided_at"] == "1970-01-01T00:00:02.500+00:00"
    assert body["decision"]["logged"] is False
    assert body["decision"]["rewards"] == []
    assert body["policy"]["version"] == 1
    assert body["datasets"][0]["dataset"] == "d"


@pytest.mark.parametrize(
    "change", [lambda text: text[:-1] + "0", lambda text: "x", lambda text: ""]
)
def test_an_id_that_the_lake_did_not_sign(lake: Lake, change: Any) -> None:
    (decision,) = DecisionSigner(lake.signing_key(), "d").issue("p", 1, 2_500_000)
    with pytest.raises(NotFoundError, match="no dataset of this lake that signed it"):
        lineage.trace_decision(lake, change(decision))


def test_asking_makes_no_key(lake: Lake) -> None:
    with pytest.raises(NotFoundError, match="no dataset of this lake that signed it"):
        lineage.trace_decision(lake, "x")
    assert not (lake.path / "_lake" / "keys").exists()


def test_a_dataset_since_removed_has_no_ingests(lake: Lake, package: Path) -> None:
    body = {"algorithm": "bc", "datasets": [selection(1, dataset="gone")]}
    lake.registry.register("p", package, run_id="unrecorded", lineage=body)
    traced = lineage.trace_policy(lake, "p:2")
    assert traced["datasets"][0]["ingests"] == []
    assert traced["run"]["run_id"] == "unrecorded"
    assert traced["run"]["kind"] is None


def test_a_policy_says_when_it_served_and_which_aliases_it_had(lake: Lake, package: Path) -> None:
    lake.registry.register("p", package, run_id=RUN, lineage={"datasets": []})
    lake.registry.aliases.move("p", "champion", 1, by="ada")
    lake.registry.aliases.move("p", "champion", 2)
    body = lineage.trace_policy(lake, "p:1")
    assert body["served"] == []
    moves = [(m["alias"], m["from_version"], m["to_version"], m["by"]) for m in body["moves"]]
    assert moves == [("champion", None, 1, "ada"), ("champion", 1, 2, None)]
    assert body["moves"][0]["at"].endswith("+00:00")
    assert len(lineage.trace_policy(lake, "p:2")["moves"]) == 1


def test_a_decision_of_a_version_that_was_deleted(lake: Lake, package: Path) -> None:
    lake.dataset("other").append([episode("o/0")])
    (decision,) = DecisionSigner(lake.signing_key(), "other").issue("p", 1, 2_500_000)
    lake.registry.marks.delete("p", 1)
    body = lineage.trace_decision(lake, decision)
    assert body["policy"]["deleted_at"].endswith("+00:00")
    assert body["datasets"][0]["where"] == '("return" > 1)'
    with pytest.raises(NotFoundError):
        lineage.trace_policy(lake, "p:1")


def test_rewards_by_every_name_of_a_decision(lake: Lake) -> None:
    live = lake.dataset("live")
    ensure_feedback_tables(live, Box((2,)), Discrete(2))
    ours, other = DecisionSigner(lake.signing_key(), "live").issue("p", 1, 2_500_000, 2)
    record = {"policy": "p", "policy_version": 1, "observation": [0.0, 0.0], "action": 1}
    record |= {"timestamp": 1, "deterministic": True, "episode_id": "e"}
    records = [
        {**record, "decision_id": ours, "request_id": "r0", "step": 0},
        {**record, "decision_id": other, "request_id": "r1", "step": 1},
    ]
    live.decisions.append(decisions_encoder(live)(records), producer="w", sequence=0)
    names = [
        {"decision_id": ours},
        {"request_id": "r0"},
        {"episode_id": "e", "step": 0},
        {"decision_id": other},
        {"request_id": "r1"},
        {"episode_id": "e", "step": 1},
    ]
    ends = {"terminated": False, "truncated": False}
    reports = [{**name, **ends, "timestamp": i, "reward": i} for i, name in enumerate(names)]
    live.rewards.append(rewards_encoder(live)(reports), producer="w", sequence=0)
    body = lineage.trace_decision(lake, ours)
    assert [reward["reward"] for reward in body["decision"]["rewards"]] == [0, 1, 2]


def test_a_run_that_followed_a_dataset(lake: Lake, package: Path) -> None:
    """What was there before it began is none of its ingests."""
    followed = selection(3, since=2, num_episodes=None, num_steps=None, content_hash=None)
    lake.registry.register("online", package, run_id=RUN, lineage={"datasets": [followed]})
    (dataset,) = lineage.trace_policy(lake, "online")["datasets"]
    assert (dataset["since"], dataset["num_steps"]) == (2, None)
    assert [ingest["producer"] for ingest in dataset["ingests"]] == ["ingest/b"]


@pytest.mark.parametrize("trace", [lineage.trace_policy, lineage.trace_dataset])
def test_what_is_not_there(lake: Lake, trace: Any) -> None:
    with pytest.raises(NotFoundError):
        trace(lake, "absent")
