"""Fsck: what is wrong is named, with its file, and repair takes it out without deleting it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import (
    ConfigInvalidError,
    NotFoundError,
    ReplayLakeError,
    ShardCorruptError,
)
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.policies.entries import policy_key
from replaylake.datastore.lake.runs.checkpoints import Checkpoints
from replaylake.datastore.lake.runs.metrics import MetricsLog
from replaylake.datastore.maintenance.fsck.finding import NOTE, FsckFinding, FsckFindings
from replaylake.datastore.maintenance.fsck.fsck import FsckReport, fsck
from replaylake.datastore.query import summaries
from replaylake.datastore.storage.log.commit_file import Intent
from replaylake.datastore.storage.log.commit_log import CommitLog
from replaylake.datastore.storage.seals import seal_json
from replaylake.datastore.storage.table.table import WrittenRows

Make = Callable[..., Episode]


@pytest.fixture
def dataset(lake: Lake, make_episode: Make) -> Dataset:
    dataset = lake.dataset("d")
    for name in "abc":
        dataset.append([make_episode(name, terminated=True)], producer=name, sequence=0)
    return dataset


def shard(dataset: Dataset, number: int) -> Path:
    return dataset.snapshot().table.paths()[number]


def flip(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def refresh_all(dataset: Dataset) -> None:
    """Write a summary of all shards, however short their episodes are."""
    snapshot = dataset.snapshot().table
    summaries._extend(snapshot, None, snapshot.files)


def said(report: FsckReport) -> list[tuple[str, str]]:
    return [(finding.severity, finding.check) for finding in report.findings]


def age(path: Path, days: float) -> None:
    then = time.time() - days * 86_400
    os.utime(path, (then, then))


def add_rows(dataset: Dataset, rows: list[dict[str, Any]]) -> None:
    """Append rows past the door, as a fault of ours or another engine would."""
    table = dataset.snapshot().table.read()
    changed = [{**table.to_pylist()[0], "terminated": False, **row} for row in rows]
    dataset.table.append(
        pa.Table.from_pylist(changed, schema=table.schema), producer=str(rows), sequence=0
    )


def test_a_clean_lake(lake: Lake, dataset: Dataset, package: Path) -> None:
    lake.registry.register("p", package, run_id="r", lineage={})
    seen: list[tuple[int, int, str]] = []
    report = fsck(lake, on_progress=lambda *at: seen.append(at))
    assert report.is_clean
    assert report.findings == ()
    assert report.num_policies == 1
    (checked,) = report.datasets
    assert (checked.dataset, checked.version, checked.num_shards, checked.num_steps) == (
        "d",
        3,
        3,
        9,
    )
    assert seen == [(1, 3, "d"), (2, 3, "d"), (3, 3, "d")]
    assert json.loads(json.dumps(report.to_json()))["clean"] is True


def test_what_is_not_there(lake: Lake, dataset: Dataset) -> None:
    with pytest.raises(NotFoundError, match="dataset 'e': not in this lake"):
        fsck(lake, ["e"])
    with pytest.raises(ConfigInvalidError, match="at least 3600"):
        fsck(lake, orphan_age_s=60)


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "empty"])
def test_a_damaged_shard_is_named_and_quarantined(
    lake: Lake, dataset: Dataset, damage: str
) -> None:
    path = shard(dataset, 1)
    if damage == "flip":
        flip(path, 200)
    elif damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: 100 if damage == "cut" else 0])
    damaged = path.read_bytes() if path.exists() else None
    report = fsck(lake)
    assert not report.is_clean
    (finding,) = report.findings
    assert finding.check == ("missing" if damage == "gone" else "sha256")
    assert (finding.dataset, finding.version, finding.num_steps) == ("d", 2, 3)
    assert finding.path == f"d/shards/{path.name}"
    with pytest.raises(ShardCorruptError):
        dataset.snapshot().replay()

    repaired = fsck(lake, repair=True)
    (repair,) = repaired.repairs
    assert (repair.kind, repair.num_steps, repair.num_episodes) == ("quarantined", 3, 1)
    assert fsck(lake).is_clean
    rows = dataset.snapshot().sql("SELECT DISTINCT episode_id AS e FROM steps ORDER BY e")
    assert rows["e"].to_pylist() == ["a", "c"]
    assert dataset.snapshot().replay().num_transitions == 6
    last = dataset.history()[-1]
    assert (last["operation"], last["num_lost_steps"]) == ("REPAIR", 3)
    record = json.loads((dataset.path / "_quarantine" / f"{path.name}.json").read_text())
    assert record["path"] == f"d/shards/{path.name}"
    assert "Restore it from a copy" in record["why"]
    if damaged is None:
        assert repair.to == ""
    else:
        assert (lake.path / repair.to).read_bytes() == damaged
        assert path.exists(), "earlier versions still name it"
    assert fsck(lake, repair=True).repairs == ()


def test_what_was_derived_from_damaged_bytes_goes(lake: Lake, dataset: Dataset) -> None:
    def derived() -> list[str]:
        return lake.storage.names("d/_derived/episodes")

    path = shard(dataset, 1)
    whole = path.read_bytes()
    query = 'select episode_id, "return" from d.episodes order by 1'
    right = lake.sql(query).to_pylist()
    refresh_all(dataset)
    assert fsck(lake).is_clean
    assert derived(), "nothing is wrong with it"
    flip(path, 200)
    assert not fsck(lake).is_clean
    assert derived() == []
    with suppress(ReplayLakeError):
        refresh_all(dataset)  # DuckDB may read it all the same
    path.write_bytes(whole)
    assert fsck(lake, repair=True).repairs == ()
    assert derived() == []
    assert lake.sql(query).to_pylist() == right


def test_an_older_version_is_looked_at_when_asked(
    lake: Lake, dataset: Dataset, make_episode: Make
) -> None:
    path = shard(dataset, 0)
    entry = dataset.snapshot().files[0]
    dataset.table.commit([], producer="x", sequence=0, removed=[entry.path])
    flip(path, 50)
    assert fsck(lake).is_clean
    report = fsck(lake, all_versions=True)
    assert [(f.check, f.version) for f in report.findings] == [("sha256", 1)]


@pytest.mark.parametrize("what", ["rows", "page", "schema", "ids", "column", "nulls"])
def test_a_shard_that_was_committed_wrong(lake: Lake, dataset: Dataset, what: str) -> None:
    """Its sha256 is right, so only its content tells: written by a fault, or another engine."""
    table = dataset.snapshot().table
    rows = table.read()
    if what == "schema":
        rows = rows.set_column(rows.schema.get_field_index("reward"), "reward", [["x"] * 9])
    elif what == "ids":
        index = rows.schema.get_field_index("reward")
        field = rows.schema.field("reward").with_metadata({"PARQUET:field_id": "99"})
        rows = rows.set_column(index, field, rows.column("reward"))
    elif what == "column":
        rows = rows.append_column("surplus", [list(range(9))])
    elif what == "nulls":
        index = rows.schema.get_field_index("reward")
        field = rows.schema.field("reward").with_nullable(True)
        rows = rows.set_column(index, field, pa.nulls(9, field.type))
    path = dataset.path / "shards" / "made.parquet"
    pq.write_table(rows, path, write_page_checksum=True, compression="none")
    if what == "page":
        flip(path, 60)
    data = path.read_bytes()
    entry = replace(
        table.files[0],
        path="shards/made.parquet",
        size_bytes=len(data),
        num_rows=8 if what == "rows" else 9,
        sha256=sha256(data).hexdigest(),
    )
    removed = [file.path for file in table.files]
    dataset.table.commit(
        [WrittenRows(table.schema, (entry,))], producer="x", sequence=0, removed=removed
    )
    expected = {"rows": "num_rows", "page": "unreadable"}.get(what, "schema")
    assert said(fsck(lake)) == [("error", expected)]
    fsck(lake, repair=True)
    assert dataset.snapshot().num_steps == 0


# --- steps ----------------------------------------------------------------------------------


def test_gaps_are_named_and_no_error(lake: Lake, dataset: Dataset, make_episode: Make) -> None:
    dataset.append([make_episode("g"), make_episode("g", first_step=5, agent_id="other")])
    dataset.append([make_episode("g", first_step=6)])
    report = fsck(lake)
    assert report.is_clean
    assert report.counts == {"gap": 2}
    messages = sorted(finding.message for finding in report.findings)
    assert messages[0].startswith("episode g of agent 'other': begins at step 5, steps 0..4 are")
    assert messages[1].startswith("episode g: steps 3..5 are missing after step 2")
    assert fsck(lake, repair=True).repairs == ()


def test_doubled_steps_are_named_and_taken_out_once(
    lake: Lake, dataset: Dataset, make_episode: Make
) -> None:
    dataset.append([make_episode("x", 4, rewards=[1.0] * 4)], producer="p", sequence=0)
    # Another writer's: the same two steps, two more of the same episode, and another episode.
    dataset.append(
        [make_episode("x", 4, first_step=2, rewards=[2.0] * 4), make_episode("y")],
        producer="q",
        sequence=0,
    )
    report = fsck(lake)
    (finding,) = report.findings
    assert (finding.severity, finding.check, finding.version) == ("error", "duplicate", 5)
    assert "episode x: found steps 2..3 a second time" in finding.message
    doubled = shard(dataset, 4)
    (repair,) = fsck(lake, repair=True).repairs
    assert (repair.kind, repair.num_steps, repair.num_episodes) == ("doubled rows", 2, 0)
    assert (lake.path / repair.to).read_bytes() == doubled.read_bytes()
    rows = dataset.snapshot().sql(
        "SELECT step, reward FROM steps WHERE episode_id = 'x' ORDER BY 1"
    )
    assert rows["step"].to_pylist() == [0, 1, 2, 3, 4, 5]
    assert rows["reward"].to_pylist() == [1.0] * 4 + [2.0] * 2
    assert fsck(lake).is_clean
    assert dataset.snapshot().num_steps == 9 + 6 + 3


def test_a_step_twice_in_one_shard(lake: Lake, dataset: Dataset) -> None:
    add_rows(dataset, [{"episode_id": "z", "step": step} for step in (0, 1, 1, 0, 2)])
    assert said(fsck(lake))[0] == ("error", "duplicate")
    fsck(lake, repair=True)
    rows = dataset.snapshot().sql("SELECT step FROM steps WHERE episode_id = 'z' ORDER BY 1")
    assert rows["step"].to_pylist() == [0, 1, 2]
    assert fsck(lake).is_clean


def test_steps_after_the_end(lake: Lake, dataset: Dataset, make_episode: Make) -> None:
    dataset.append([make_episode("a", first_step=3)])
    report = fsck(lake)
    assert said(report) == [("error", "after_end")]
    assert "episode a: found steps 3..5 after step 2, the end" in report.findings[0].message
    add_rows(dataset, [{"episode_id": "w", "step": 0, "truncated": True}])
    add_rows(dataset, [{"episode_id": "w", "step": 1}])
    assert fsck(lake).counts == {"after_end": 2}


def test_a_repaired_episode_with_a_gap_is_not_bootstrapped_across_it(
    lake: Lake, dataset: Dataset, make_episode: Make
) -> None:
    for first in (0, 3, 6):
        last = first == 6
        dataset.append([make_episode("long", first_step=first, terminated=last)])
    flip(shard(dataset, 4), 100)
    fsck(lake, repair=True)
    report = fsck(lake)
    assert report.is_clean
    assert "episode long: steps 3..5 are missing after step 2" in report.findings[0].message
    rows = dataset.snapshot().sql(
        "SELECT step, next_observation[1] AS n FROM transitions "
        "WHERE episode_id = 'long' ORDER BY 1"
    )
    assert rows["step"].to_pylist() == [0, 1, 2, 6, 7, 8]
    # Its own final observation, not that of step 6.
    assert rows["n"].to_pylist() == [1, 2, 3, 7, 8, 9]


# --- what lies about ------------------------------------------------------------------------


def test_orphans_are_named_and_moved_once_they_are_old(
    lake: Lake, dataset: Dataset, make_episode: Make
) -> None:
    dataset.write([make_episode("never committed")])
    (orphan,) = set((dataset.path / "shards").iterdir()) - set(dataset.snapshot().table.paths())
    assert fsck(lake).findings == ()
    age(orphan, 0.5)
    assert fsck(lake, repair=True).repairs == ()
    age(orphan, 8)
    report = fsck(lake, orphan_age_s=3600 * 24)
    assert said(report) == [("note", "orphan")]
    assert "8.0 days old" in report.findings[0].message
    assert report.is_clean
    data = orphan.read_bytes()
    (repair,) = fsck(lake, repair=True).repairs
    assert (repair.kind, repair.num_steps) == ("orphan", 0)
    assert not orphan.exists()
    assert (lake.path / repair.to).read_bytes() == data
    assert fsck(lake).findings == ()
    assert dataset.snapshot().num_steps == 9


def test_a_file_of_an_old_version_is_no_orphan(lake: Lake, dataset: Dataset) -> None:
    path = shard(dataset, 0)
    removed = [dataset.snapshot().files[0].path]
    dataset.table.commit([], producer="x", sequence=0, removed=removed)
    age(path, 30)
    assert fsck(lake, repair=True).repairs == ()
    assert path.exists()


def test_temporaries_are_named(lake: Lake, dataset: Dataset) -> None:
    left = lake.path / "_lake" / "tmp" / "01left"
    left.write_bytes(b"half")
    assert fsck(lake).findings == ()
    age(left, 8)
    report = fsck(lake)
    assert said(report) == [("note", "temporary")]
    assert report.findings[0].path == "_lake/tmp/01left"


def test_policy_packages(lake: Lake, package: Path) -> None:
    ref = lake.registry.register("p", package, run_id="r", lineage={})
    lake.registry.register("p", package, run_id="r", lineage={})
    flip(ref.path / "policy.onnx", 2)
    report = fsck(lake)
    assert said(report) == [("error", "policy")]
    assert "policy p:1: " in report.findings[0].message
    assert report.num_policies == 2


def test_a_policys_manifest(lake: Lake, package: Path) -> None:
    ref = lake.registry.register("p", package, run_id="r", lineage={})
    path = ref.path / "manifest.json"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"start": 0', b'"start": 5'))
    assert path.read_bytes() != data
    report = fsck(lake, repair=True)
    assert said(report) == [("error", "policy")]
    assert report.findings[0].path == ref.folder
    assert "manifest was altered. Restore it from a copy" in report.findings[0].message
    assert report.repairs == ()
    path.write_bytes(data)
    assert fsck(lake).findings == ()


@pytest.mark.slow
def test_a_flipped_bit_in_any_byte_of_a_manifest(lake: Lake, package: Path) -> None:
    ref = lake.registry.register("p", package, run_id="r", lineage={})
    path = ref.path / "manifest.json"
    for position in range(len(path.read_bytes())):
        flip(path, position, position % 8)
        assert said(fsck(lake)) == [("error", "policy")], position
        flip(path, position, position % 8)
    assert fsck(lake).findings == ()


def test_a_manifest_that_has_no_hash_on_record(lake: Lake, package: Path) -> None:
    """As of policies that were registered before hashes were recorded."""
    ref = lake.registry.register("p", package, run_id="r", lineage={})
    log = CommitLog(lake.storage, "_lake")
    entry = json.loads(log.newest().entries[policy_key("p", 1)])
    assert entry.pop("manifest_sha256") == ref.manifest_sha256
    entries = {policy_key("p", 1): json.dumps(entry)}
    log.commit(lambda state: Intent("test", 0, "TEST", entries=entries))
    report = fsck(lake)
    assert report.is_clean
    assert said(report) == [("note", "unverified")]
    (finding,) = report.findings
    assert finding.path == f"{ref.folder}/manifest.json"
    assert "policies show p:1 --json`; `repair` records its current hash" in finding.message
    (repaired,) = fsck(lake, repair=True).repairs
    assert (repaired.kind, repaired.path) == ("recorded", finding.path)
    assert lake.registry.resolve("p").manifest_sha256 == ref.manifest_sha256
    assert fsck(lake).findings == ()


@pytest.mark.parametrize(
    ("check", "pattern"),
    [
        ("metrics", "_lake/runs/r/metrics/*.parquet"),
        ("run checkpoint", "_lake/runs/r/checkpoints/*.json"),
        ("run checkpoint", "_lake/runs/r/checkpoints/*.safetensors"),
        ("heartbeat", "_lake/runs/r/heartbeat.json"),
        ("signing key", "_lake/keys/signing"),
        ("signing key", "_lake/keys/signing.sha256"),
        ("purge", "_lake/purge/d/*.json"),
        ("priorities", "d/_derived/priorities/*.npz"),
    ],
)
def test_files_with_a_checksum_of_their_own(
    lake: Lake, dataset: Dataset, check: str, pattern: str
) -> None:
    lake.signing_key()
    with MetricsLog(lake.storage, "r") as metrics:
        metrics.add(1, {"loss": 1.0}, 0.0)
    Checkpoints(lake.storage, "r").save(1, {"w": np.ones(2)}, {"seed": 1})
    beat = {"owner": "o", "host": "h", "pid": 1, "lock": "l", "at_ms": 0}
    lake.storage.put("_lake/runs/r/heartbeat.json", seal_json(beat))
    work = {"id": "w", "started_ms": 0, "episodes": [], "decisions": [], "policies": {}}
    lake.storage.put("_lake/purge/d/w.json", seal_json(work))
    dataset.snapshot().replay(cache=False).prioritized(1, seed=0).save_priorities()
    before = said(fsck(lake))
    (path,) = lake.path.glob(pattern)
    flip(path, path.stat().st_size // 3, 1)
    report = fsck(lake)
    assert sorted(said(report)) == sorted([*before, ("error", check)])
    assert any(path.name in f.message or path.name in f.path for f in report.findings)


def test_a_remote_policy_is_read_where_it_is(tmp_path: Path, package: Path) -> None:
    """And not where this machine has a copy of it."""
    lake = open_lake(f"memory://fsck-{tmp_path.name}", create=True)
    for number, file in enumerate(("manifest.json", "policy.onnx"), 1):
        ref = lake.registry.register("p", package, run_id="r", lineage={})
        data = (ref.path / file).read_bytes()
        lake.storage.put(f"{ref.folder}/{file}", data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
        assert said(fsck(lake)) == [("error", "policy")] * number


def test_doubled_decisions(lake: Lake, dataset: Dataset) -> None:
    schema = pa.schema([pa.field("decision_id", pa.string(), nullable=False)])
    for table in (dataset.decisions, dataset.rewards):
        table.create(schema)
        for sequence in range(2):
            rows = pa.table({"decision_id": ["x", f"y{sequence}"]}, schema=schema)
            table.append(rows, producer="p", sequence=sequence)
    report = fsck(lake)
    assert said(report) == [("error", "decision")]
    assert "decision x: found 2 rows" in report.findings[0].message
    assert report.datasets[0].num_shards == 3 + 4


def test_only_so_many_findings_are_kept(lake: Lake) -> None:
    findings = FsckFindings()
    for i in range(250):
        findings.add(FsckFinding(NOTE, "gap", "d", "", str(i)))
    assert len(findings.shown) == 100
    assert findings.counts() == {"gap": 250}


# --- the log --------------------------------------------------------------------------------


@pytest.fixture
def long_log(dataset: Dataset) -> Path:
    """A log with checkpoints of two versions, the newest of them pointed at."""
    for version in (1, 3):
        dataset.table.log.checkpoint(version)
    return dataset.path / "_delta_log"


def reopened(lake: Lake) -> Lake:
    return open_lake(lake.path)


@pytest.mark.parametrize("name", [f"{v:020d}.checkpoint.parquet" for v in (1, 3)])
@pytest.mark.parametrize("damage", ["flip", "cut", "other"])
def test_a_damaged_checkpoint_is_written_again(
    lake: Lake, dataset: Dataset, long_log: Path, name: str, damage: str
) -> None:
    path = long_log / name
    whole = path.read_bytes()
    if damage == "flip":
        flip(path, len(whole) // 2)
    elif damage == "cut":
        path.write_bytes(whole[:-10])
    else:
        (other,) = set(long_log.glob("*.checkpoint.parquet")) - {path}
        path.write_bytes(other.read_bytes())
    report = fsck(reopened(lake))
    assert ("error", "checkpoint") in said(report)
    assert report.findings[0].path == f"d/_delta_log/{name}"
    repaired = fsck(reopened(lake), repair=True)
    assert {repair.kind for repair in repaired.repairs} == {"rewritten"}
    assert path.read_bytes() == whole
    assert fsck(reopened(lake)).findings == ()


@pytest.mark.parametrize("data", [b"", b"{", b'{"version":1,"size":4}', b'{"version":2,"size":8}'])
def test_a_pointer_that_is_wrong_is_written_again(
    lake: Lake, dataset: Dataset, long_log: Path, data: bytes
) -> None:
    pointer = long_log / "_last_checkpoint"
    whole = pointer.read_bytes()
    pointer.write_bytes(data)
    assert said(fsck(reopened(lake))) == [("error", "checkpoint")]
    fsck(reopened(lake), repair=True)
    assert pointer.read_bytes() == whole
    assert fsck(reopened(lake)).findings == ()


@pytest.mark.parametrize("version", [0, 2, 3])
@pytest.mark.parametrize("damage", ["flip", "head", "cut", "gone"])
def test_a_damaged_commit_is_named_and_left(
    lake: Lake, dataset: Dataset, version: int, damage: str
) -> None:
    path = dataset.path / "_delta_log" / f"{version:020d}.json"
    data = path.read_bytes()
    if damage == "flip":
        flip(path, len(data) // 2)
    elif damage == "head":
        path.write_bytes(data.replace(b'"sha256"', b'"sha257"', 1))
    elif damage == "cut":
        path.write_bytes(data[: data.rindex(b"\n", 0, -1) + 1])
    else:
        path.unlink()
    if damage == "gone" and version == 3:
        return  # the newest commit without a trace is an earlier version of the lake
    fresh = reopened(lake)
    report = fsck(fresh, ["d"], repair=True)
    assert ("error", "log") in said(report)
    assert report.findings[0].path.startswith("d/_delta_log")
    assert report.repairs == ()
    assert path.exists() == (damage != "gone")


def test_the_lakes_own_log(lake: Lake, dataset: Dataset, package: Path) -> None:
    lake.registry.register("p", package, run_id="r", lineage={})
    lake.registry.register("p", package, run_id="r", lineage={})
    CommitLog(lake.storage, "_lake").checkpoint(1)
    path = lake.path / "_lake/_delta_log" / f"{1:020d}.checkpoint.parquet"
    flip(path, 300)
    report = fsck(lake)
    assert said(report) == [("error", "checkpoint")]
    assert report.findings[0].dataset == ""
    fsck(lake, repair=True)
    assert fsck(reopened(lake)).is_clean


def test_a_log_that_contradicts_itself(lake: Lake, dataset: Dataset) -> None:
    """A commit that was put in from elsewhere is whole, but does not follow."""
    folder = dataset.path / "_delta_log"
    (folder / f"{4:020d}.json").write_bytes((folder / f"{3:020d}.json").read_bytes())
    report = fsck(reopened(lake))
    assert said(report)[0] == ("error", "log")
    assert "which was live before it" in report.findings[0].message


# --- chance ---------------------------------------------------------------------------------


def _targets(lake: Lake) -> list[Path]:
    return sorted(
        path
        for path in lake.path.rglob("*")
        if path.is_file() and ("shards" in path.parts or "_delta_log" in path.parts)
    )


def _damage(path: Path, rng: np.random.Generator) -> str:
    data = bytearray(path.read_bytes())
    position = int(rng.integers(len(data)))
    if rng.random() < 0.8:
        bit = int(rng.integers(8))
        data[position] ^= 1 << bit
        path.write_bytes(data)
        return f"{path.name}: bit {bit} of byte {position}"
    path.write_bytes(data[:position])
    return f"{path.name}: cut at {position} of {len(data)}"


def _chance(lake: Lake, seed: int, num: int) -> None:
    """Damage one file after the other: each is reported, and none is trained on unnoticed."""
    rng = np.random.default_rng(seed)
    snapshot = lake.dataset("d").snapshot()
    expected = snapshot.table.read().to_pylist()
    targets = _targets(lake)
    for _ in range(num):
        path = targets[int(rng.integers(len(targets)))]
        whole = path.read_bytes()
        what = _damage(path, rng)
        fresh = reopened_or_none(lake)
        if fresh is not None:
            assert not fsck(fresh).is_clean, what
            try:
                found = fresh.dataset("d").snapshot()
                replayed = found.replay().num_transitions
                rows = found.table.read().to_pylist()
            except ReplayLakeError:
                pass
            else:
                # Only where the damage is in what a checkpoint, or the commits, say as well.
                assert "_delta_log" in path.parts, what
                assert replayed == len(expected), what
                assert rows == expected, what
        path.write_bytes(whole)
    assert fsck(reopened(lake)).is_clean


def reopened_or_none(lake: Lake) -> Lake | None:
    try:
        return reopened(lake)
    except ReplayLakeError:
        return None  # its own log is damaged, and that was reported


@pytest.mark.slow
def test_every_bit_counts(lake: Lake, dataset: Dataset, long_log: Path) -> None:
    _chance(lake, seed=0, num=25)


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(1, 5))
def test_a_thousand_bits_count(lake: Lake, dataset: Dataset, long_log: Path, seed: int) -> None:
    _chance(lake, seed, num=250)
