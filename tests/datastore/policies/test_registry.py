from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from replaylake.datastore.errors import CommitConflict, NameRefused, NotFound
from replaylake.datastore.lake import Lake, open_lake
from replaylake.datastore.policies.registry import PolicyRef, Registry


@pytest.fixture
def registry(lake: Lake) -> Registry:
    return lake.registry


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "package"
    (folder / "weights").mkdir(parents=True)
    (folder / "manifest.json").write_bytes(b"{}")
    (folder / "weights" / "learner.safetensors").write_bytes(b"w")
    return folder


def register(registry: Registry, package: Path, name: str = "cql", **lineage: Any) -> PolicyRef:
    return registry.register(name, package, run_id="r1", lineage=lineage)


def test_every_registration_is_a_new_version(registry: Registry, package: Path) -> None:
    first, second = register(registry, package, seed=0), register(registry, package, seed=1)
    assert [str(ref) for ref in (first, second)] == ["cql:1", "cql:2"]
    assert first.path != second.path
    assert str(register(registry, package, "bc-small")) == "bc-small:1"
    for ref in (first, second):
        files = sorted(p.relative_to(ref.path).as_posix() for p in ref.path.rglob("*.*"))
        assert files == ["manifest.json", "weights/learner.safetensors"]
    (package / "manifest.json").write_bytes(b"changed")
    for version, ref in ((1, first), (2, second)):
        manifest = json.loads((ref.path / "manifest.json").read_text())
        assert manifest == {"name": "cql", "version": version}


def test_a_package_that_is_not_there(registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="found no files, expected a policy package"):
        register(registry, tmp_path / "nothing")
    with pytest.raises(NotFound):
        registry.resolve("cql")


def test_the_forms_of_a_reference(registry: Registry, package: Path) -> None:
    for _ in range(3):
        register(registry, package)
    registry.set_alias("cql", "challenger", 1)
    chosen = {text: registry.resolve(text) for text in ("cql", "cql:2", "cql@challenger")}
    assert {text: (ref.version, ref.selected_by) for text, ref in chosen.items()} == {
        "cql": (3, "newest"),
        "cql:2": (2, "version"),
        "cql@challenger": (1, "alias challenger"),
    }
    registry.set_alias("cql", "champion", 2)
    ref = registry.resolve("cql")
    assert (ref.version, ref.selected_by) == (2, "alias champion")
    assert ref.path == registry.resolve("cql:2").path


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("nothing", NotFound, "policy 'nothing': not in this lake, which has cql"),
        ("cql:7", NotFound, r"version 7 is not there, found 1\.\.1"),
        ("cql:0", NotFound, "version 0 is not there"),
        ("cql@champion", NotFound, "cql@champion: no such alias"),
        ("cql:", NameRefused, "policy name: found 'cql:'"),
        ("cql:one", NameRefused, "policy name"),
        ("cql@a@b", NameRefused, "policy name"),
        ("run:7", NameRefused, "the reserved words run and random"),
        ("random", NameRefused, "reserved"),
        ("../cql", NameRefused, "policy name"),
        ("", NameRefused, "policy name"),
        ("cql@../x", NameRefused, "alias: found"),
    ],
)
def test_references_that_name_nothing(
    registry: Registry, package: Path, text: str, error: type[Exception], message: str
) -> None:
    register(registry, package)
    with pytest.raises(error, match=message):
        registry.resolve(text)


@pytest.mark.parametrize("name", ["run", "random", "..", "a/b", "Cql", "a b", ""])
def test_reserved_and_odd_names_are_refused(
    lake: Lake, registry: Registry, package: Path, name: str
) -> None:
    with pytest.raises(NameRefused):
        register(registry, package, name)
    assert not (lake.path / "_lake" / "policies").exists()


def test_aliases_are_compared_and_set(registry: Registry, package: Path) -> None:
    for _ in range(3):
        register(registry, package)
    assert registry.set_alias("cql", "champion", 1, expected=0) is None
    assert registry.set_alias("cql", "champion", 2, expected=1) == 1
    with pytest.raises(CommitConflict, match="SET ALIAS alias/cql/champion: found"):
        registry.set_alias("cql", "champion", 3, expected=1)
    with pytest.raises(CommitConflict):
        registry.set_alias("cql", "champion", 3, expected=0)
    assert registry.set_alias("cql", "champion", 3) == 2
    with pytest.raises(NotFound, match="version 9 is not there"):
        registry.set_alias("cql", "champion", 9)
    with pytest.raises(NameRefused):
        registry.set_alias("cql", "Champion", 1)
    assert registry.list()[2]["aliases"] == ["champion"]


def test_list_and_show(lake: Lake, registry: Registry, package: Path) -> None:
    register(registry, package, "zeta")
    ref = register(registry, package, datasets=[{"dataset": "d", "version": 1}])
    registry.set_alias("cql", "champion", 1)
    registry.set_alias("cql", "best", 1)
    rows = registry.list()
    assert [(row["policy"], row["version"]) for row in rows] == [("cql", 1), ("zeta", 1)]
    assert rows[0]["aliases"] == ["best", "champion"]
    assert lake.path / rows[0]["path"] == ref.path
    shown = registry.show(ref)
    assert shown["lineage"] == {"datasets": [{"dataset": "d", "version": 1}]}
    assert shown["run_id"] == "r1"
    with pytest.raises(NotFound, match="policy cql:5: not in this lake"):
        registry.show(PolicyRef("cql", 5, ref.path, "version"))


def test_runs(registry: Registry) -> None:
    registry.record_run("r9", {"status": "running", "started_ms": 1})
    registry.record_run("r1", {"status": "running", "started_ms": 2})
    registry.record_run("r9", {"status": "done", "started_ms": 1})
    assert [(run["run_id"], run["status"]) for run in registry.runs()] == [
        ("r9", "done"),
        ("r1", "running"),
    ]


def test_registrations_at_the_same_moment_lose_nothing(lake: Lake, package: Path) -> None:
    found: list[int] = []

    def run() -> None:
        registry = open_lake(lake.path).registry
        found.extend(register(registry, package).version for _ in range(5))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(1, 21))
    assert len({row["path"] for row in lake.registry.list()}) == 20
