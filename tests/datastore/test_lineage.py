"""Lineage: from a decision to the commits below it, and from a dataset to what was learned."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaylake.datastore import lineage
from replaylake.datastore.episode import Episode
from replaylake.datastore.errors import NotFound
from replaylake.datastore.lake import Lake, open_lake
from replaylake.datastore.sessions.decision_id import DecisionSigner

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
    body = lineage.of_policy(lake, "p")
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
    body = lineage.of_dataset(lake, "d")
    assert body["dataset"] == {"dataset": "d", "version": 3, "num_steps": 12, "num_shards": 3}
    assert [ingest["producer"] for ingest in body["ingests"]] == ["ingest/a", "ingest/b"]
    (policy,) = body["policies"]
    assert (policy["policy"], policy["version"], policy["run_id"]) == ("p", 1, RUN)
    assert policy["trained_on"]["version"] == 2


def test_a_dataset_that_trained_nothing(lake: Lake) -> None:
    lake.dataset("other").append([episode("o/0")])
    body = lineage.of_dataset(lake, "other")
    assert body["policies"] == []
    assert len(body["ingests"]) == 1


def test_a_decision_is_traced_by_its_signature_alone(lake: Lake) -> None:
    lake.dataset("other").append([episode("o/0")])
    (decision,) = DecisionSigner(lake.signing_key(), "other").issue("p", 1, 2_500_000)
    body = lineage.of_decision(lake, decision)
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
    with pytest.raises(NotFound, match="no dataset of this lake that signed it"):
        lineage.of_decision(lake, change(decision))


def test_asking_makes_no_key(lake: Lake) -> None:
    with pytest.raises(NotFound, match="no dataset of this lake that signed it"):
        lineage.of_decision(lake, "x")
    assert not (lake.path / "_lake" / "keys").exists()


def test_a_dataset_since_removed_has_no_ingests(lake: Lake, package: Path) -> None:
    body = {"algorithm": "bc", "datasets": [selection(1, dataset="gone")]}
    lake.registry.register("p", package, run_id="unrecorded", lineage=body)
    traced = lineage.of_policy(lake, "p:2")
    assert traced["datasets"][0]["ingests"] == []
    assert traced["run"]["run_id"] == "unrecorded"
    assert traced["run"]["kind"] is None


@pytest.mark.parametrize("trace", [lineage.of_policy, lineage.of_dataset])
def test_what_is_not_there(lake: Lake, trace: Any) -> None:
    with pytest.raises(NotFound):
        trace(lake, "absent")
