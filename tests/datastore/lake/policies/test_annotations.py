"""Notes, protection, and the deletion of versions, which leaves their lineage."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from replaylake.datastore.errors import ConfigInvalidError, NotFoundError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.policies.registry import Registry
from replaylake.datastore.maintenance.fsck.fsck import fsck
from replaylake.datastore.maintenance.purge.purge import find_trained_policies
from replaylake.datastore.maintenance.vacuum import vacuum


@pytest.fixture
def registry(lake: Lake, package: Path) -> Registry:
    """Versions 1 to 3 of `cql`."""
    for seed in range(3):
        lake.registry.register("cql", package, run_id="r", lineage={"seed": seed})
    return lake.registry


def test_notes_are_added_and_never_replaced(registry: Registry) -> None:
    registry.marks.add_note("cql", 2, " first ", by="ada")
    registry.marks.add_note("cql", 2, "second")
    notes = registry.entry("cql", 2)["notes"]
    assert [(note["text"], note["by"]) for note in notes] == [("first", "ada"), ("second", None)]
    assert registry.entry("cql", 1)["notes"] == []
    with pytest.raises(ConfigInvalidError, match="expected some words"):
        registry.marks.add_note("cql", 2, "  ")
    with pytest.raises(NotFoundError, match="cql:9"):
        registry.marks.add_note("cql", 9, "x")


def test_protection(registry: Registry) -> None:
    assert registry.marks.protect("cql", 2)
    assert not registry.marks.protect("cql", 2)
    assert registry.entry("cql", 2)["protected"]
    with pytest.raises(ConfigInvalidError, match="cql:2: is protected"):
        registry.marks.delete("cql", 2)
    assert registry.marks.protect("cql", 2, False)
    assert not registry.entry("cql", 2)["protected"]
    registry.marks.delete("cql", 2)
    with pytest.raises(NotFoundError):
        registry.marks.protect("cql", 2)


def test_what_an_alias_points_at_is_not_deleted(registry: Registry) -> None:
    registry.set_alias("cql", "champion", 1)
    with pytest.raises(ConfigInvalidError, match="cql:1: found champion pointing at it"):
        registry.marks.delete("cql", 1)
    registry.set_alias("cql", "champion", 2)
    registry.marks.delete("cql", 1)


def test_deletion_leaves_the_lineage_and_frees_no_number(
    lake: Lake, registry: Registry, package: Path
) -> None:
    registry.marks.delete("cql", 3, by="ada", note="too old")
    assert [row["version"] for row in registry.list()] == [1, 2]
    assert registry.resolve("cql").version == 2
    with pytest.raises(NotFoundError, match=r"found 1\.\.2, and that one was deleted"):
        registry.resolve("cql:3")
    entry = registry.entry("cql", 3)
    assert (entry["lineage"], entry["deleted_by"]) == ({"seed": 2}, "ada")
    assert entry["deleted_ms"] > entry["created_ms"] - 1
    assert ("cql", 3) not in registry.lineages()
    assert registry.lineages(deleted=True)["cql", 3] == {"seed": 2}
    assert registry.register("cql", package, run_id="r", lineage={}).version == 4
    with pytest.raises(NotFoundError, match="cql:3: not in this lake"):
        registry.marks.delete("cql", 3)
    assert fsck(lake).is_clean


def test_vacuum_takes_the_package_of_a_deleted_version(lake: Lake, registry: Registry) -> None:
    gone, kept = registry.resolve("cql:1").path, registry.resolve("cql:2").path
    for path in [*gone.iterdir(), *kept.iterdir()]:
        os.utime(path, (0, 0))
    assert not vacuum(lake, delete=True).garbage
    registry.marks.delete("cql", 1)
    found = vacuum(lake, delete=True).garbage
    assert {file.kind for file in found} == {"policy"}
    assert not list(gone.glob("*"))
    assert len(list(kept.iterdir())) == 3


def test_a_purge_names_deleted_versions_that_saw_the_episodes(
    lake: Lake, package: Path, make_episode: Any
) -> None:
    lake.dataset("d").append([make_episode("a"), make_episode("b")])
    body = {"datasets": [{"dataset": "d", "version": 1, "where": None}]}
    for _ in range(2):
        lake.registry.register("p", package, run_id="r", lineage=body)
    lake.registry.marks.delete("p", 1)
    assert find_trained_policies(lake, "d", pa.array(["a"])) == {"p:2": 1, "p:1": 1}
