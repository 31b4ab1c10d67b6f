from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deltalake
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import ConfigInvalidError, LogCorruptError, NotFoundError
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.maintenance import vacuum as vacuum_module
from replaylake.datastore.maintenance.compact import compact
from replaylake.datastore.maintenance.retained_files import RetainedFiles
from replaylake.datastore.maintenance.retention import set_retention
from replaylake.datastore.maintenance.vacuum import vacuum
from replaylake.datastore.names import new_ulid

Make = Callable[..., Episode]
DAY_MS = 86_400_000


@pytest.fixture
def compacted(lake: Lake, make_episode: Make) -> Lake:
    for number in range(3):
        lake.dataset("d").append([make_episode(f"e{number}", terminated=True)])
    compact(lake, "d")
    return lake


def in_days(days: float) -> int:
    return time.time_ns() // 1_000_000 + int(days * DAY_MS)


def files_of(lake: Lake) -> set[str]:
    return {str(path.relative_to(lake.path)) for path in lake.path.rglob("*") if path.is_file()}


def shards(lake: Lake, version: int) -> set[str]:
    return {f"d/{entry.path}" for entry in lake.dataset("d").table.snapshot(version).files}


def test_it_only_says_what_it_would_delete(compacted: Lake) -> None:
    before, old = files_of(compacted), shards(compacted, 3)
    found = vacuum(compacted, now_ms=in_days(8))
    assert {file.path for file in found.garbage} == old
    assert found.num_bytes == sum((compacted.path / path).stat().st_size for path in old)
    assert not found.deleted
    assert files_of(compacted) == before


def test_replaced_shards_go_after_the_limit(compacted: Lake) -> None:
    old, live = shards(compacted, 3), shards(compacted, 4)
    rows = compacted.dataset("d").snapshot().table.read()
    assert vacuum(compacted, delete=True, now_ms=in_days(6.9)).garbage == ()
    vacuum(compacted, delete=True, now_ms=in_days(7.1))
    left = files_of(compacted)
    assert not old & left
    assert live <= left
    assert compacted.dataset("d").snapshot().table.read().equals(rows)
    theirs = deltalake.DeltaTable(str(compacted.path / "d"))
    assert theirs.to_pyarrow_table(columns=["step"]).num_rows == 9


def test_a_vacuumed_version_is_refused_by_name(compacted: Lake) -> None:
    vacuum(compacted, delete=True, now_ms=in_days(8))
    with pytest.raises(NotFoundError, match=r"d@2: found that 2 of its 2 shards are gone.*vacuum"):
        compacted.snapshot("d@2").sql("select count(*) from steps")
    with pytest.raises(NotFoundError, match=r"d@2: found that 2 of its 2 shards are gone"):
        compacted.snapshot("d@2").replay()


def test_a_tagged_version_stays_readable(compacted: Lake) -> None:
    compacted.tags.set("d", "paper", 2)
    found = vacuum(compacted, delete=True, now_ms=in_days(30))
    assert len(found.garbage) == 1
    assert [str(pin) for pin in found.pinned] == ["d@2 (tag paper)"]
    assert compacted.snapshot("d@paper").sql("select count(*) as n from steps")[
        "n"
    ].to_pylist() == [6]


@pytest.mark.parametrize("days", [-1.0, 1.0])
def test_a_fresh_uncommitted_shard_outlives_a_clock_that_is_a_day_off(
    compacted: Lake, make_episode: Make, days: float
) -> None:
    dataset = compacted.dataset("d")
    written = dataset.write([make_episode("late", terminated=True)])
    before = files_of(compacted)
    vacuum(compacted, delete=True, now_ms=in_days(days))
    assert files_of(compacted) == before
    dataset.commit([written], producer="p", sequence=0)
    assert dataset.snapshot().table.read().num_rows == 12
    # Nor is what a version of a moment ago had.
    assert dataset.snapshot(3).table.read().num_rows == 9


def test_an_uncommitted_shard_goes_in_the_end(compacted: Lake, make_episode: Make) -> None:
    written = compacted.dataset("d").write([make_episode("never", terminated=True)])
    orphan = f"d/{written.rows.entries[0].path}"
    found = vacuum(compacted, delete=True, now_ms=in_days(8))
    assert orphan in {file.path for file in found.garbage}
    assert orphan not in files_of(compacted)


def test_leftovers_of_crashes_go(compacted: Lake, package: Path) -> None:
    ref = compacted.registry.register("best", package, run_id="r", lineage={"datasets": []})
    unregistered = f"_lake/policies/best/{new_ulid()}/policy.onnx"
    leftovers = [f"_lake/tmp/{new_ulid()}", unregistered]
    for path in leftovers:
        (compacted.path / path).parent.mkdir(exist_ok=True)
        (compacted.path / path).write_bytes(b"half")
    found = vacuum(compacted, delete=True, now_ms=in_days(8))
    kinds = {file.path: file.kind for file in found.garbage if file.kind != "shard"}
    assert kinds == dict(zip(leftovers, ["temporary", "policy"], strict=True))
    assert not set(leftovers) & files_of(compacted)
    assert {path.name for path in ref.path.iterdir()} == {path.name for path in package.iterdir()}


def test_leftovers_younger_than_the_limit_stay(compacted: Lake) -> None:
    path = compacted.path / "_lake" / "tmp" / new_ulid()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"half")
    vacuum(compacted, delete=True, now_ms=in_days(6))
    assert path.exists()


def test_files_that_are_not_ours_stay(compacted: Lake) -> None:
    theirs = [
        "d/shards/notes.txt",
        f"d/shards/{new_ulid().upper()}.parquet",
        f"d/shards/sub/{new_ulid()}.parquet",
        f"d/{new_ulid()}.parquet",
        f"d/_quarantine/{new_ulid()}.parquet",
        "d/_decisions/_journal/w-0.jsonl",
        "_lake/tmp/mine",
        "_lake/policies/README",
    ]
    for path in theirs:
        (compacted.path / path).parent.mkdir(parents=True, exist_ok=True)
        (compacted.path / path).write_bytes(b"x")
    vacuum(compacted, delete=True, now_ms=in_days(8))
    assert set(theirs) <= files_of(compacted)


def test_links_are_not_followed(compacted: Lake, make_episode: Make, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    precious = outside / f"{new_ulid()}.parquet"
    precious.write_bytes(b"x")
    link = compacted.path / "d" / "shards" / f"{new_ulid()}.parquet"
    link.symlink_to(precious)
    (compacted.path / "d" / "shards" / "sub").symlink_to(outside)
    vacuum(compacted, delete=True, now_ms=in_days(8))
    assert link.is_symlink()
    assert precious.exists()


def test_another_datasets_shards_behind_a_link_stay(compacted: Lake, make_episode: Make) -> None:
    compacted.dataset("e").append([make_episode("e", terminated=True)])
    folder = compacted.path / "e" / "shards"
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.symlink_to(compacted.path / "d" / "shards")
    before = shards(compacted, 4)
    found = vacuum(compacted, ["e"], delete=True, now_ms=in_days(8))
    assert found.garbage == ()
    assert "e/shards is a link" in found.skipped[0]
    assert before <= files_of(compacted)


def test_an_age_below_an_hour_has_to_be_forced(compacted: Lake) -> None:
    with pytest.raises(ConfigInvalidError, match="expected at least 3600"):
        vacuum(compacted, older_than_s=60)
    found = vacuum(compacted, older_than_s=60, force=True, now_ms=in_days(0.01))
    assert len(found.garbage) == 3
    with pytest.raises(ConfigInvalidError):
        vacuum(compacted, older_than_s=-1, force=True)


def test_the_limit_is_the_datasets_own(compacted: Lake) -> None:
    set_retention(compacted, "d", {"keep_versions_s": 2 * 86_400.0})
    assert len(vacuum(compacted, now_ms=in_days(1.9)).garbage) == 0
    assert len(vacuum(compacted, now_ms=in_days(2.1)).garbage) == 3


def test_a_damaged_log_deletes_nothing(compacted: Lake) -> None:
    before = files_of(compacted)
    os.unlink(compacted.path / "d" / "_delta_log" / f"{2:020d}.json")
    with pytest.raises(LogCorruptError):
        vacuum(open_lake(compacted.path), delete=True, now_ms=in_days(8))
    assert len(files_of(compacted)) == len(before) - 1


def test_a_dataset_that_is_not_there(compacted: Lake) -> None:
    with pytest.raises(NotFoundError, match="nope"):
        vacuum(compacted, ["nope"])


def test_a_tag_that_is_set_while_it_deletes_keeps_its_version(
    compacted: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = shards(compacted, 2)
    looked = vacuum_module.find_retained_files

    def tag_meanwhile(*args: Any, **options: Any) -> RetainedFiles:
        kept = looked(*args, **options)
        compacted.tag("d@2", "paper")
        return kept

    monkeypatch.setattr(vacuum_module, "find_retained_files", tag_meanwhile)
    found = vacuum(compacted, delete=True, now_ms=in_days(8))
    assert {file.path for file in found.garbage} == shards(compacted, 3) - old
    assert compacted.snapshot("d@paper").table.read().num_rows == 6
