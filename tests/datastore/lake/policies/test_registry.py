from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from replaylake.datastore.errors import (
    CommitConflictError,
    InvalidNameError,
    NotFoundError,
    PackageInvalidError,
)
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.policies.entries import policy_key
from replaylake.datastore.lake.policies.manifest import GRAPH, LEARNER, MANIFEST, read_verified
from replaylake.datastore.lake.policies.package import check_package, load_policy
from replaylake.datastore.lake.policies.registry import PolicyRef, Registry
from replaylake.datastore.storage.log.commit_file import Intent
from replaylake.datastore.storage.log.commit_log import CommitLog
from replaylake.datastore.storage.storage import LocalStorage


@pytest.fixture
def registry(lake: Lake) -> Registry:
    return lake.registry


def register(registry: Registry, package: Path, name: str = "cql", **lineage: Any) -> PolicyRef:
    return registry.register(name, package, run_id="r1", lineage=lineage)


def test_every_registration_is_a_new_version(registry: Registry, package: Path) -> None:
    first, second = register(registry, package, seed=0), register(registry, package, seed=1)
    assert [str(ref) for ref in (first, second)] == ["cql:1", "cql:2"]
    assert first.path != second.path
    assert str(register(registry, package, "bc-small")) == "bc-small:1"
    for version, ref in ((1, first), (2, second)):
        assert sorted(path.name for path in ref.path.iterdir()) == sorted(
            [GRAPH, LEARNER, MANIFEST]
        )
        body = read_verified(ref.path)[0].body
        assert (body["name"], body["version"], body["seed"]) == ("cql", version, 7)
    (package / MANIFEST).write_bytes(b"changed")
    assert read_verified(first.path)[0].body["name"] == "cql"


def test_a_package_that_is_not_there(registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="expected a policy package"):
        register(registry, tmp_path / "nothing")
    with pytest.raises(NotFoundError):
        registry.resolve("cql")


@pytest.mark.parametrize(
    ("file", "data", "message"),
    [
        (MANIFEST, b"{}", "is no manifest of format 1"),
        (MANIFEST, b"[1]", "is no manifest of format 1"),
        (MANIFEST, b"{", "is no manifest of format 1"),
        (GRAPH, b"another", "found sha256 .* the file was altered"),
        (LEARNER, None, "No such file or directory, expected the file that the manifest lists"),
    ],
)
def test_a_package_that_is_not_whole(
    lake: Lake, registry: Registry, package: Path, file: str, data: bytes | None, message: str
) -> None:
    if data is None:
        (package / file).unlink()
    else:
        (package / file).write_bytes(data)
    with pytest.raises(PackageInvalidError, match=message):
        register(registry, package)
    assert registry.list() == []
    assert not (lake.path / "_lake" / "policies").exists()


def test_a_policy_and_its_run_are_one_commit(lake: Lake, registry: Registry, package: Path) -> None:
    register(registry, package)
    log = CommitLog(LocalStorage(lake.path), "_lake")
    before = log.newest().version
    run = {"kind": "train offline", "started_ms": 5}
    ref = registry.register("cql", package, run_id="r2", lineage={}, run=run)
    assert log.newest().version == before + 1
    made = {"policy": "cql", "policy_version": ref.version}
    assert registry.runs() == [{"run_id": "r2", **run, **made}]


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
        ("nothing", NotFoundError, "policy 'nothing': not in this lake, which has cql"),
        ("cql:7", NotFoundError, r"version 7 is not there, found 1\.\.1"),
        ("cql:0", NotFoundError, "version 0 is not there"),
        ("cql@champion", NotFoundError, "cql@champion: no such alias"),
        ("cql:", InvalidNameError, "policy name: found 'cql:'"),
        ("cql:one", InvalidNameError, "policy name"),
        ("cql@a@b", InvalidNameError, "policy name"),
        ("run:7", InvalidNameError, "the reserved words run and random"),
        ("random", InvalidNameError, "reserved"),
        ("../cql", InvalidNameError, "policy name"),
        ("", InvalidNameError, "policy name"),
        ("cql@../x", InvalidNameError, "alias: found"),
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
    with pytest.raises(InvalidNameError):
        register(registry, package, name)
    assert not (lake.path / "_lake" / "policies").exists()


def test_aliases_are_compared_and_set(registry: Registry, package: Path) -> None:
    for _ in range(3):
        register(registry, package)
    assert registry.set_alias("cql", "champion", 1, expected=0) is None
    assert registry.set_alias("cql", "champion", 2, expected=1) == 1
    with pytest.raises(
        CommitConflictError, match="cql@champion: found version 2, expected version 1"
    ):
        registry.set_alias("cql", "champion", 3, expected=1)
    with pytest.raises(CommitConflictError):
        registry.set_alias("cql", "champion", 3, expected=0)
    assert registry.set_alias("cql", "champion", 3) == 2
    with pytest.raises(NotFoundError, match="version 9 is not there"):
        registry.set_alias("cql", "champion", 9)
    with pytest.raises(InvalidNameError):
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
    with pytest.raises(NotFoundError, match="policy cql:5: not in this lake"):
        registry.entry("cql", 5)


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


def test_a_registration_whose_reply_was_lost_keeps_its_version(
    registry: Registry, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(registry, package)
    put_if_absent, lost = LocalStorage.put_if_absent, []

    def lose_a_reply(self: LocalStorage, path: str, data: bytes) -> bool:
        done = put_if_absent(self, path, data)
        if done and not lost:
            lost.append(path)
            return False
        return done

    monkeypatch.setattr(LocalStorage, "put_if_absent", lose_a_reply)
    ref = register(registry, package)
    assert lost
    assert str(ref) == "cql:2"
    assert [row["version"] for row in registry.list()] == [1, 2]
    assert json.loads((ref.path / "manifest.json").read_text())["version"] == 2


def test_a_run_that_is_done_does_not_fail_any_more(registry: Registry) -> None:
    registry.record_run("r9", {"status": "running"})
    registry.record_run("r9", {"status": "done"}, replaces={"status": "running"})
    with pytest.raises(CommitConflictError):
        registry.record_run("r9", {"status": "failed"}, replaces={"status": "running"})
    (run,) = registry.runs()
    assert run["status"] == "done"


def forget_hash(lake: Lake, name: str, version: int) -> None:
    """Make a version's entry as it was before the sha256 of manifests was recorded."""
    log = CommitLog(LocalStorage(lake.path), "_lake")
    entry = json.loads(log.newest().entries[policy_key(name, version)])
    del entry["manifest_sha256"]
    entries = {policy_key(name, version): json.dumps(entry)}
    log.commit(lambda state: Intent(f"test/{name}/{version}", 0, "TEST", entries=entries))


def test_a_registered_manifest_is_vouched_for(registry: Registry, package: Path) -> None:
    """Without that, an action space that starts at 5 in place of 0 changed every action."""
    ref = register(registry, package)
    assert ref.manifest_sha256 == read_verified(ref.path)[0].sha256
    assert registry.resolve("cql").manifest_sha256 == ref.manifest_sha256
    assert registry.show(ref)["manifest_sha256"] == ref.manifest_sha256
    path = ref.path / MANIFEST
    body = json.loads(path.read_bytes())
    body["policy"]["action_space"]["start"] = 5
    path.write_bytes(json.dumps(body, indent=2).encode() + b"\n")
    for damaged in (ref, registry.resolve("cql:1"), registry.newest("cql")):
        with pytest.raises(PackageInvalidError) as refused:
            _ = damaged.path
        said = str(refused.value)
        assert str(path) in said
        assert f"expected {str(ref.manifest_sha256)[:16]} as it was registered" in said
        assert "Restore it from a copy of the lake" in said
    with pytest.raises(PackageInvalidError, match="manifest was altered"):
        load_policy(path.parent, ref.manifest_sha256)
    path.unlink()
    with pytest.raises(NotFoundError, match=r"found no manifest\.json"):
        _ = ref.path


@pytest.mark.slow
def test_every_bit_of_a_manifest_counts(registry: Registry, package: Path) -> None:
    ref = register(registry, package)
    path = ref.path / MANIFEST
    data = path.read_bytes()
    for number in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[number // 8] ^= 1 << number % 8
        path.write_bytes(flipped)
        with pytest.raises(PackageInvalidError, match="manifest was altered"):
            _ = ref.path
    path.write_bytes(data)
    assert ref.path == path.parent


def test_a_version_without_a_recorded_hash_still_opens(
    lake: Lake, registry: Registry, package: Path
) -> None:
    register(registry, package)
    forget_hash(lake, "cql", 1)
    ref = registry.resolve("cql")
    assert ref.manifest_sha256 is None
    assert registry.show(ref)["manifest_sha256"] is None
    sha256 = check_package(ref.path).sha256
    registry.record_manifest(ref, sha256)
    assert registry.resolve("cql").manifest_sha256 == sha256
    assert registry.show(ref)["lineage"] == {}


def test_the_hash_is_of_the_number_that_was_given(lake: Lake, package: Path) -> None:
    """Of many that register at once, each manifest says its own version, and is hashed so."""
    registries = [open_lake(lake.path).registry for _ in range(8)]
    threads = [threading.Thread(target=register, args=(one, package)) for one in registries]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for version in range(1, 9):
        ref = lake.registry.resolve(f"cql:{version}")
        assert check_package(ref.path, ref.manifest_sha256).body["version"] == version


def test_a_copy_of_a_remote_manifest_is_checked_too(tmp_path: Path, package: Path) -> None:
    lake = open_lake(f"memory://manifest-{tmp_path.name}", create=True)
    ref = register(lake.registry, package)
    path = ref.path / MANIFEST
    data = path.read_bytes()
    # A copy of this machine's that went bad is made again; what was damaged at its place is not.
    path.write_bytes(data.replace(b"cql", b"sql"))
    assert (ref.path / MANIFEST).read_bytes() == data
    lake.storage.put(f"{ref.folder}/{MANIFEST}", data.replace(b"cql", b"sql"))
    lake.storage.forget([f"{ref.folder}/{MANIFEST}"])
    with pytest.raises(
        PackageInvalidError, match=r"manifest\.json: found .* as committed\. Restore"
    ):
        _ = ref.path
