"""From an episode to the versions that hold it, the policies that learned from it, and when."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import NotFoundError
from replaylake.datastore.feedback.decisions import decisions_encoder, ensure_feedback_tables
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.maintenance.compact import compact
from replaylake.datastore.maintenance.delete import delete
from replaylake.datastore.maintenance.lineage.episode_lineage import trace_episode
from replaylake.datastore.maintenance.vacuum import vacuum


def episode(name: str, num: int = 3) -> Episode:
    return Episode(
        name,
        observations=np.zeros((num, 2), np.float32),
        actions=np.arange(num) % 2,
        rewards=np.ones(num),
        terminated=True,
    )


def selection(version: int, **kwargs: Any) -> dict[str, Any]:
    return {"dataset": "d", "version": version, "where": None, "where_steps": None, **kwargs}


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """Version 1 has a and long, version 2 also b."""
    lake = open_lake(tmp_path / "lake", create=True)
    info = {"source": "5" * 64}
    dataset = lake.dataset("d")
    dataset.append([episode("a"), episode("long", 9)], producer="ingest/a", sequence=0, info=info)
    dataset.append([episode("b")], producer="ingest/b", sequence=0)
    return lake


@pytest.fixture
def register(lake: Lake, package: Path) -> Any:
    def register(name: str, *selections: dict[str, Any], **lineage: Any) -> None:
        body = {"datasets": list(selections), **lineage}
        lake.registry.register(name, package, run_id="r", lineage=body)

    return register


def spans(body: dict[str, Any]) -> list[tuple[int, int, str]]:
    return [(one["first"], one["last"], one["holds"]) for one in body["versions"]]


def trained(body: dict[str, Any]) -> dict[str, str]:
    return {f"{one['policy']}:{one['version']}": one["trained"] for one in body["policies"]}


def in_8_days_ms() -> int:
    return time.time_ns() // 1_000_000 + 8 * 86_400_000


def test_versions_tags_and_who_wrote_it(lake: Lake) -> None:
    lake.tag("d@1", "early")
    lake.tag("d@2", "late")
    body = trace_episode(lake, "d", "a")
    assert spans(body) == [(1, 2, "yes")]
    assert [tag["tag"] for tag in body["tags"]] == ["early", "late"]
    (ingest,) = body["ingests"]
    assert (ingest["producer"], ingest["source"]) == ("ingest/a", "5" * 64)
    body = trace_episode(lake, "d", "b")
    assert spans(body) == [(2, 2, "yes")]
    assert [tag["tag"] for tag in body["tags"]] == ["late"]
    assert body["ingests"][0]["producer"] == "ingest/b"
    with pytest.raises(NotFoundError, match="episode 'c': found in no version of it"):
        trace_episode(lake, "d", "c")
    with pytest.raises(NotFoundError):
        trace_episode(lake, "nothing", "a")


def test_rewriting_and_deletion(lake: Lake) -> None:
    compact(lake, "d", open_s=0.0)
    assert spans(trace_episode(lake, "d", "a")) == [(1, 3, "yes")]
    delete(lake, "d", "episode_id = 'a'")
    assert spans(trace_episode(lake, "d", "a")) == [(1, 3, "yes")]
    lake.dataset("d").append([episode("a")])
    assert spans(trace_episode(lake, "d", "a")) == [(1, 3, "yes"), (5, 5, "yes")]


def test_selections_are_evaluated_for_it(lake: Lake, register: Any) -> None:
    register("all", selection(1))
    register("short", selection(2, where="num_steps < 5"))
    register("ends", selection(2, where_steps="step > 5"))
    register("other", selection(2, dataset="elsewhere"))
    register("held", selection(2, where="episode_id <> 'a'"), holdout={"fraction": 0.5})
    assert trained(trace_episode(lake, "d", "a")) == {"all:1": "yes", "short:1": "yes"}
    assert trained(trace_episode(lake, "d", "b")) == {"short:1": "yes", "held:1": "yes"}
    found = trained(trace_episode(lake, "d", "long"))
    assert found == {"all:1": "yes", "ends:1": "yes", "held:1": "yes"}


def test_a_run_that_followed_the_dataset(lake: Lake, register: Any) -> None:
    register("early", selection(1, since=0))
    register("late", selection(2, since=1))
    register("mixed", selection(2, since=1), selection(1, where="num_steps < 5"))
    assert trained(trace_episode(lake, "d", "a")) == {"early:1": "yes", "mixed:1": "yes"}
    body = trace_episode(lake, "d", "b")
    assert trained(body) == {"late:1": "yes", "mixed:1": "yes"}
    assert body["policies"][0]["why"] == "came while the run followed d@1 to 2"


def test_what_cannot_be_told_is_unknown(lake: Lake, register: Any, package: Path) -> None:
    register("gone", selection(9))
    register("broken", selection(2, where="no_such_column > 1"))
    lake.registry.register("mute", package, run_id="r", lineage={})
    body = trace_episode(lake, "d", "a")
    assert trained(body) == {"gone:1": "unknown", "broken:1": "unknown", "mute:1": "unknown"}
    whys = {one["policy"]: one["why"] for one in body["policies"]}
    assert "d@9" in whys["gone"]
    assert whys["mute"] == "its lineage names no training episodes"


def test_shards_that_vacuum_took(lake: Lake, register: Any) -> None:
    register("old", selection(2))
    compact(lake, "d", open_s=0.0)
    lake.registry.marks.delete("old", 1)
    assert vacuum(lake, ["d"], delete=True, now_ms=in_8_days_ms()).garbage
    body = trace_episode(lake, "d", "a")
    assert spans(body) == [(1, 2, "unknown"), (3, 3, "yes")]
    (policy,) = body["policies"]
    assert (policy["trained"], policy["deleted"]) == ("unknown", True)
    delete(lake, "d", "episode_id = 'b'")
    vacuum(lake, ["d"], delete=True, now_ms=in_8_days_ms())
    with pytest.raises(NotFoundError, match="cannot be read any more"):
        trace_episode(lake, "d", "b")


def test_when_they_served(lake: Lake, register: Any) -> None:
    register("p", selection(1))
    register("p", selection(1))
    live = lake.dataset("live")
    ensure_feedback_tables(live, Box((2,)), Discrete(2))
    records = [
        {
            "decision_id": f"d{i}",
            "timestamp": i * 1_000_000,
            "policy": "p",
            "policy_version": version,
            "observation": [0.0, 0.0],
            "action": 1,
            "deterministic": True,
        }
        for i, version in enumerate([1, 2, 2])
    ]
    live.decisions.append(decisions_encoder(live)(records), producer="w", sequence=0)
    first, second = trace_episode(lake, "d", "a")["policies"]
    assert first["served"] == [
        {
            "policy": "p",
            "version": 1,
            "dataset": "live",
            "first_at": "1970-01-01T00:00:00.000+00:00",
            "last_at": "1970-01-01T00:00:00.000+00:00",
            "num_decisions": 1,
        }
    ]
    (served,) = second["served"]
    assert served["num_decisions"] == 2
    assert served["last_at"] == "1970-01-01T00:00:02.000+00:00"
