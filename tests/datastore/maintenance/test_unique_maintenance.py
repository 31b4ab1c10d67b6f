"""A dataset with a unique key under maintenance: the index follows what becomes of the shards."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec, UniqueKeys
from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import SchemaMismatchError
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.unique_keys import hash_rows
from replaylake.datastore.maintenance.columns import drop_column, rename_column
from replaylake.datastore.maintenance.compact import compact
from replaylake.datastore.maintenance.copy.copy import copy
from replaylake.datastore.maintenance.delete import delete
from replaylake.datastore.maintenance.fsck.fsck import fsck
from replaylake.datastore.maintenance.labels.annotate import annotate
from replaylake.datastore.maintenance.merge import merge
from replaylake.datastore.maintenance.purge.purge import purge
from replaylake.datastore.maintenance.split import split_by_fraction
from replaylake.datastore.maintenance.vacuum import vacuum
from replaylake.datastore.storage.table import key_index

SPEC = DatasetSpec(Box((1,)), Discrete(10), unique=UniqueKeys(("event",)))


def _decision(event: int, action: int = 0) -> Episode:
    return Episode(
        f"e{event}/{np.random.default_rng().integers(1 << 60)}",
        observations=np.array([[1.0]], np.float32),
        actions=np.array([action]),
        rewards=np.array([1.0]),
        terminated=True,
        extras={"event": pa.array([event])},
    )


def _duplicates(lake: Lake, *events: int) -> int:
    """Append events as another process would; return how many were duplicates."""
    dataset = open_lake(lake.url).dataset("d")
    return dataset.append([_decision(event) for event in events]).keys.duplicates


@pytest.fixture
def dataset(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    # Each shard is in a file at once, and files are merged.
    monkeypatch.setattr(key_index, "_MAX_HELD_SHARDS", 1)
    dataset = lake.dataset("d")
    for start in range(0, 12, 2):
        dataset.append([_decision(start), _decision(start + 1)], spec=None if start else SPEC)
    return dataset


def _files(dataset: Dataset) -> list[Path]:
    return sorted((dataset.path / key_index.FOLDER).iterdir())


@pytest.mark.slow
def test_the_index_follows_the_shards(lake: Lake, dataset: Dataset, tmp_path: Path) -> None:
    assert len(_files(dataset)) < 6
    compact(lake, "d")
    assert _duplicates(lake, 0, 5, 11) == 3
    labels = pa.table({"episode_id": _ids(dataset)[:1], "judge": [1]})
    annotate(lake, "d", labels, on="episode_id", add=["judge"])
    assert _duplicates(lake, 0, 5, 11) == 3  # `judge` is in no log, and not compared
    delete(lake, "d", "episode_id LIKE 'e5/%'")
    assert _duplicates(lake, 0, 5, 11) == 2  # deleted, and so new
    assert not fsck(lake, ["d"]).findings

    purge(lake, "d", "episode_id LIKE 'e7/%'")
    vacuum(lake, ["d"], delete=True, now_ms=time.time_ns() // 1_000_000 + 8 * 86_400_000)
    there = {f"shards/{path.name}" for path in (dataset.path / "shards").iterdir()}
    index = dataset.new_key_index(SPEC.unique or UniqueKeys(()))
    assert {path for one in index._list() for path, _, _ in one.header.shards} <= there
    assert _duplicates(lake, 7, 8) == 1

    target = open_lake(tmp_path / "target", create=True)
    target.dataset("d").append([_decision(1), _decision(100), _decision(3, 9)], spec=SPEC)
    receipt = copy(lake, "d", target)
    rows = target.snapshot("d").table.read(["event"])["event"].to_pylist()
    assert sorted(rows) == [*range(12), 100]
    assert receipt.num_already_present_steps == 1
    assert "1 steps have keys" in receipt.notes[0]


def _ids(dataset: Dataset) -> list[str]:
    ids: list[str] = dataset.snapshot().table.read(["episode_id"])["episode_id"].to_pylist()
    return ids


def test_fsck_finds_a_damaged_index_and_doubled_keys(lake: Lake, dataset: Dataset) -> None:
    path = _files(dataset)[0]
    data = bytearray(path.read_bytes())
    data[-13] ^= 1
    path.write_bytes(data)
    (finding,) = fsck(lake, ["d"]).findings
    assert (finding.check, finding.path) == ("key", f"d/{key_index.FOLDER}/{path.name}")
    fsck(lake, ["d"], repair=True)
    assert not path.exists()
    assert not fsck(lake, ["d"]).findings
    # A writer that knows nothing of keys.
    rows = dataset.snapshot().table.read()
    first = rows.slice(0, 1)
    twice = first.set_column(
        first.schema.get_field_index("episode_id"), first.schema.field("episode_id"),
        pa.array(["other"]),
    )  # fmt: skip
    dataset.table.append(twice, producer="old", sequence=0)
    (finding,) = fsck(lake, ["d"]).findings
    assert "several rows of one key, such as event 0" in finding.message


_WRITE = """
import sys
sys.path.insert(0, sys.argv[1])
from test_unique_maintenance import SPEC, _decision
from replaylake.datastore.lake.lake import open_lake
dataset = open_lake(sys.argv[2]).dataset("d")
duplicates = sum(
    dataset.append([_decision(n), _decision(n + 1)], spec=SPEC).keys.duplicates
    for n in range(0, 40, 2)
)
print(duplicates)
"""


@pytest.mark.slow
@pytest.mark.parametrize("on", ["folder", "s3"])
def test_two_processes_commit_one_row_a_key(
    lake: Lake, request: pytest.FixtureRequest, on: str
) -> None:
    url = lake.url
    if on == "s3":
        url = f"s3://{request.getfixturevalue('bucket')}/lake"
        open_lake(url, create=True)
    command = [sys.executable, "-c", textwrap.dedent(_WRITE), str(Path(__file__).parent), url]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    duplicates = [int(process.communicate()[0]) for process in processes]
    rows = open_lake(url).snapshot("d").table.read(["event"])["event"].to_pylist()
    assert sorted(rows) == list(range(40))
    assert sum(duplicates) == 40


def test_on_an_object_store(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_index, "_MAX_HELD_SHARDS", 1)
    url = f"s3://{bucket}/lake"
    dataset = open_lake(url, create=True).dataset("d")
    dataset.append([_decision(n) for n in range(5)], spec=SPEC)
    dataset.append([_decision(5)])
    assert open_lake(url).dataset("d").append([_decision(n) for n in range(7)]).keys.duplicates == 6


def _sums(lake: Lake, version: int) -> tuple[int, int]:
    """Return what is produced and not accounted for, in episodes and in steps."""
    info = lake.dataset("d").commit_info(version)
    left = info["num_produced"] - info["num_rejected"] - info["num_already_present"]
    steps = info["num_produced_steps"] - info["num_rejected_steps"]
    steps -= info["num_already_present_steps"]
    return left - info["num_episodes"], steps - info["num_steps"]


def test_deleted_rows_are_left_out_before_keys_are_compared(lake: Lake) -> None:
    dataset = lake.dataset("d")
    first = [_decision(event) for event in range(4)]
    dataset.append(first, spec=SPEC)
    delete(lake, "d", "event = 0")
    again = [first[0], _decision(1), _decision(2, action=5), _decision(9)]
    done = dataset.append(again)
    assert (done.num_episodes, done.num_steps) == (1, 1)
    assert (done.num_deleted_before, done.num_deleted_before_steps) == (1, 1)
    assert (done.keys.duplicates, done.keys.conflicts, done.num_quarantined) == (1, 1, 1)
    assert _sums(lake, done.version) == (0, 0)
    info = dataset.commit_info(done.version)
    assert (info["num_produced"], info["num_rejected"], info["num_already_present"]) == (4, 2, 1)
    # Readmitted, it is as new as any other; and then it is a duplicate.
    assert dataset.append(first[:1], readmit=True).num_episodes == 1
    assert dataset.append(first[:1]).keys.duplicates == 1


@pytest.mark.parametrize("spec", [SPEC, replace(SPEC, unique=None)])
def test_a_dataset_is_created_where_all_rows_were_left_out(lake: Lake, spec: DatasetSpec) -> None:
    dataset, episode = lake.dataset("d"), _decision(1)
    dataset.tombstones.add({"episode_id": [episode.episode_id]})
    done = dataset.append([episode], spec=spec)
    assert (done.num_episodes, done.num_steps, done.num_deleted_before) == (0, 0, 1)
    assert _sums(lake, done.version) == (0, 0)
    assert dataset.spec.unique == spec.unique
    assert dataset.append([_decision(1)]).num_episodes == 1


def test_purge_forgets_the_hashes_of_keys(lake: Lake, dataset: Dataset) -> None:
    unique = SPEC.unique
    assert unique is not None
    secret = hash_rows(pa.table({"event": pa.array([7])}), unique).astype("<u8").tobytes()
    (found,) = [name for name in _ids(dataset) if name.startswith("e7/")]
    assert any(secret in path.read_bytes() for path in _files(dataset))
    # An index of another key, and one that is damaged, may hold anyone's hashes.
    old = dataset.new_key_index(UniqueKeys(("step",)))
    old.find(dataset.table.snapshot(), np.array([1], np.uint64))
    names = {path.name for path in _files(dataset)}
    (dataset.path / key_index.FOLDER / "damaged.keys").write_bytes(secret)
    purge(lake, "d", f"episode_id = '{found}'")
    assert not any(secret in path.read_bytes() for path in _files(dataset))
    assert names - {path.name for path in _files(dataset)}

    same = replace(_decision(7), episode_id=found)
    assert dataset.append([same]).num_deleted_before == 1
    assert dataset.append([_decision(7)]).num_episodes == 1  # of another person
    assert dataset.append([same], readmit=True).keys.duplicates == 1


def test_columns_of_the_key_are_renamed_with_it(lake: Lake, dataset: Dataset) -> None:
    with pytest.raises(SchemaMismatchError, match="'event' cannot be dropped: the dataset is uni"):
        drop_column(lake, "d", "event")
    rename_column(lake, "d", "event", "request")
    assert dataset.spec.unique == UniqueKeys(("request",))
    again = _decision(3)
    again = replace(again, extras={"request": again.extras["event"]})
    assert dataset.append([again]).keys.duplicates == 1
    assert not fsck(lake, ["d"]).findings


def test_split_keeps_the_key_and_merge_obeys_it(lake: Lake, dataset: Dataset) -> None:
    split_by_fraction(lake, "d", {"one": 0.5, "two": 0.5})
    one, two = lake.dataset("one"), lake.dataset("two")
    assert one.spec.unique == two.spec.unique == SPEC.unique
    stored = [int(name[1 : name.index("/")]) for name in _ids(one)]
    assert one.append([_decision(event) for event in stored]).keys.duplicates == len(stored)
    two.append([_decision(stored[0]), _decision(stored[1], action=3), _decision(99)])

    done = merge(lake, ["one", "two"], "union_d")
    union = lake.dataset("union_d")
    assert union.spec.unique == SPEC.unique
    events = union.table.snapshot().read(["event"])["event"].to_pylist()
    assert sorted(events) == [*range(12), 99]
    assert done.num_steps == 13
    assert union.rejected.snapshot().read(["row"]).num_rows == 1
    assert merge(lake, ["one", "two"], "union_d").version is None
    lake.dataset("plain").append([_decision(1)], spec=replace(SPEC, unique=None))
    with pytest.raises(SchemaMismatchError, match="unique key is of event and no columns"):
        merge(lake, ["one", "plain"], "other")
