"""Purge: nothing of an episode is left in any file, and what broke by it is named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.errors import NotFoundError, ReplayLakeError
from replaylake.datastore.feedback.segments import frame_records, journal_folder
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.maintenance.compact import compact
from replaylake.datastore.maintenance.delete import delete
from replaylake.datastore.maintenance.fsck.fsck import fsck
from replaylake.datastore.maintenance.labels.annotate import annotate
from replaylake.datastore.maintenance.lineage import lineage
from replaylake.datastore.maintenance.purge import purge as purge_module
from replaylake.datastore.maintenance.purge.purge import purge
from replaylake.datastore.storage.storage import LocalStorage

SECRET = "person-4711-secret"


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(purge_module, "_PAUSE_S", 0.0)


@pytest.fixture
def filled(lake: Lake, make_episode: Callable[..., Any]) -> Lake:
    """Version 1 has another episode; 2 adds the secret one and a third; 3 a fourth."""
    dataset = lake.dataset("d")
    dataset.create(Box((2,)), Discrete(2))
    ids = {"decision_id": [f"{SECRET}-decision-{n}" for n in range(3)]}
    dataset.append([make_episode("plain-episode-1")])
    dataset.append([make_episode(SECRET, extras=ids), make_episode("plain-episode-2", 2)])
    dataset.append([make_episode("plain-episode-3", 1)])
    return lake


def holding(root: Path) -> list[str]:
    """Look for the secret in every file of the lake, in a way of its own."""
    found = []
    for path in sorted(root.rglob("*")):
        if not path.is_file():
            continue
        data = path.read_bytes()
        if data[:4] == b"PAR1":
            data += repr(pq.read_table(path).to_pylist()).encode()
        if SECRET.encode() in data:
            found.append(str(path.relative_to(root)))
    return found


def register(lake: Lake, package: Path, name: str, version: int, where: str | None) -> None:
    selection = {"dataset": "d", "version": version, "where": where, "reward": None}
    lake.registry.register(name, package, run_id=name, lineage={"datasets": [selection]})


def ids(lake: Lake) -> list[str]:
    rows = lake.sql("select distinct episode_id as e from d.steps order by e")
    return [row["e"] for row in rows.to_pylist()]


def test_no_file_of_the_lake_holds_it_afterwards(filled: Lake) -> None:
    assert holding(filled.path)
    done = purge(filled, "d", f"episode_id = '{SECRET}'")
    assert holding(filled.path) == []
    assert done.is_proven
    assert (done.num_episodes, done.num_steps, done.num_decisions) == (1, 3, 3)
    assert (done.num_files, done.versions, done.left) == (1, ((2, 3),), ())
    assert done.num_scanned > 5
    assert ids(filled) == ["plain-episode-1", "plain-episode-2", "plain-episode-3"]
    oracle = DeltaTable(str(filled.dataset("d").path)).to_pyarrow_table()
    assert sorted(set(oracle["episode_id"].to_pylist())) == ids(filled)


def test_each_stage_reports_the_files_that_it_has_to_look_into(filled: Lake) -> None:
    told: list[tuple[str, int, int | None]] = []
    done = purge(
        filled,
        "d",
        f"episode_id = '{SECRET}'",
        on_progress=lambda stage, done, total: told.append((stage, done, total)),
    )
    stages = list(dict.fromkeys(stage for stage, _, _ in told))
    assert stages == [
        "selecting episodes in all versions",
        "removing from the newest version",
        "looked for old rows in",
        "verified",
    ]
    counts = [(n, total) for stage, n, total in told if stage == "verified"]
    assert counts == [(n, done.num_scanned) for n in range(done.num_scanned + 1)]


def test_old_versions_say_why_they_are_gone(filled: Lake) -> None:
    done = purge(filled, "d", f"episode_id = '{SECRET}'")
    assert filled.dataset("d").snapshot(1).table.read().num_rows == 3
    for version in (2, 3):
        with pytest.raises(NotFoundError, match=rf"purged .*version {done.version}.*{done.id}"):
            filled.dataset("d").snapshot(version).sql("select * from steps")
        with pytest.raises(NotFoundError, match="purged"):
            filled.dataset("d").snapshot(version).replay()


def test_the_record_has_counts_and_no_ids(filled: Lake) -> None:
    done = purge(filled, "d", f"episode_id = '{SECRET}'")
    (record,) = filled.purges.list("d")
    assert (record.status, record.id, record.version) == ("done", done.id, done.version)
    assert (record.num_episodes, record.num_decisions, record.num_files) == (1, 3, 1)
    assert record.versions == ((2, 3),)
    assert record.ended_ms is not None
    assert filled.dataset("d").commit_info(record.version)["operation"] == "PURGE"
    assert not list((filled.path / "_lake" / "purge").rglob("*.json"))


@pytest.mark.slow
def test_tags_and_policies_that_it_broke_are_named(filled: Lake, package: Path) -> None:
    filled.tags.set("d", "before", 1)
    filled.tags.set("d", "golden", 3)
    register(filled, package, "untouched", 1, None)
    register(filled, package, "trained", 2, None)
    register(filled, package, "selective", 3, "num_steps < 3")
    seen = purge(filled, "d", f"episode_id = '{SECRET}'", dry_run=True)
    assert (seen.tags, seen.policies, seen.versions) == (("golden",), {"trained:1": 1}, ((2, 3),))
    done = purge(filled, "d", f"episode_id = '{SECRET}'")
    assert (done.tags, done.policies) == (("golden",), {"trained:1": 1})
    assert {tag.name: tag.reproducible for tag in filled.tags.list("d")} == {
        "before": True,
        "golden": False,
    }
    (trained,) = lineage.trace_policy(filled, "trained")["datasets"]
    assert (trained["reproducible"], trained["purged"]) == (False, [done.id])
    (other,) = lineage.trace_policy(filled, "selective")["datasets"]
    assert (other["reproducible"], other["purged"]) == (False, [])
    (kept,) = lineage.trace_policy(filled, "untouched")["datasets"]
    assert (kept["reproducible"], kept["purged"]) == (True, [])
    # A policy is its package: that it cannot be trained again does not keep it from acting.
    assert filled.registry.resolve("trained").path.joinpath("manifest.json").is_file()


def test_fsck_finds_no_fault_in_what_is_gone(filled: Lake) -> None:
    purge(filled, "d", f"episode_id = '{SECRET}'")
    assert fsck(filled, all_versions=True).is_clean


def test_a_dry_run_changes_nothing(filled: Lake) -> None:
    def tree() -> dict[Path, bytes]:
        return {p: p.read_bytes() for p in filled.path.rglob("*") if p.is_file()}

    before = tree()
    seen = purge(filled, "d", f"episode_id = '{SECRET}'", dry_run=True)
    assert (seen.dry_run, seen.id, seen.version) == (True, None, None)
    assert (seen.num_episodes, seen.num_steps, seen.num_decisions, seen.num_files) == (1, 3, 3, 1)
    assert tree() == before


@pytest.mark.slow
def test_what_was_deleted_before_is_purged_from_the_old_versions(filled: Lake) -> None:
    delete(filled, "d", f"episode_id = '{SECRET}'")
    assert holding(filled.path)
    done = purge(filled, "d", f"episode_id = '{SECRET}'")
    assert (done.num_episodes, done.num_steps, done.versions) == (1, 0, ((2, 3),))
    assert holding(filled.path) == []
    assert purge(filled, "d", f"episode_id = '{SECRET}'").id is None


@pytest.mark.slow
def test_the_condition_is_judged_by_the_last_version_that_has_the_episode(
    filled: Lake, make_episode: Any
) -> None:
    # Version 2 had a return of 6; annotated, it is 103, and then the episode is deleted.
    labels = pa.table({"episode_id": [SECRET], "score": [100.0]})
    annotate(filled, "d", labels, on=["episode_id"], set={"reward": "score"})
    delete(filled, "d", f"episode_id = '{SECRET}'")
    assert purge(filled, "d", '"return" = 6', dry_run=True).num_episodes == 1  # plain-episode-1
    assert purge(filled, "d", '"return" = 103').num_episodes == 1
    assert holding(filled.path) == []
    assert len(ids(filled)) == 3


def test_copies_that_compaction_and_annotation_left(filled: Lake) -> None:
    labels = pa.table({"episode_id": [SECRET, "plain-episode-1"], "x": [1, 2]})
    annotate(filled, "d", labels, on=["episode_id"], add=["x"])
    compact(filled, "d", open_s=0)
    done = purge(filled, "d", f"episode_id = '{SECRET}'")
    assert done.num_files == 3
    assert holding(filled.path) == []
    assert filled.dataset("d").snapshot().num_steps == 6


def test_quarantine_derived_files_and_what_crashes_left(filled: Lake) -> None:
    folder = filled.dataset("d").path
    (shard,) = [
        path
        for path in (folder / "shards").iterdir()
        if SECRET in repr(pq.read_table(path)["episode_id"].to_pylist())
    ]
    for place in ("_quarantine/x.parquet", "_derived/episodes/y.parquet", "shards/old.parquet"):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_bytes(shard.read_bytes())
    (folder / "_quarantine/x.parquet.json").write_text("{}")
    temporary = filled.path / "_lake" / "tmp" / "torn"
    temporary.write_bytes(shard.read_bytes())
    for path in (folder / "shards/old.parquet", temporary):
        os.utime(path, (1, 1))
    done = purge(filled, "d", f"episode_id = '{SECRET}'")
    assert done.is_proven
    assert holding(filled.path) == []
    assert not (folder / "_quarantine/x.parquet.json").exists()


def test_a_shard_that_may_be_about_to_be_committed_is_left_and_told(filled: Lake) -> None:
    dataset = filled.dataset("d")
    rows = dataset.table.snapshot().read()
    written = dataset.table.write(rows)  # by a writer that has not committed yet
    done = purge(filled, "d", f"episode_id = '{SECRET}'")
    assert not done.is_proven
    assert [trace.path for trace in done.left] == [f"d/{written.entries[0].path}"]
    assert filled.purges.list("d")[0].status == "running"
    dataset.table.commit([written], producer="slow", sequence=0)
    again = purge(filled, "d", "num_steps > 99")
    assert again.is_proven
    assert again.resumed == (done.id,)
    assert holding(filled.path) == []
    assert filled.purges.list("d")[0].status == "done"


def test_ids_in_what_a_policy_was_trained_with_are_named(filled: Lake, package: Path) -> None:
    register(filled, package, "nosy", 3, f"episode_id <> '{SECRET}'")
    done = purge(filled, "d", f"episode_id = '{SECRET}'")
    assert done.left == ()
    assert not done.is_proven
    assert done.named_in
    assert all(path.startswith("_lake/_delta_log/") for path in done.named_in)


@pytest.mark.slow
def test_what_was_served(served: Any) -> None:
    keys = {}
    for client in ("ada", "bob"):
        keys[client] = [served.decide(t, client) for t in (0, 1, 2)]
        served.reward(keys[client][0], 3)
        served.reward(keys[client][2], 3, ends=True)
    served.run(7200)
    folder = journal_folder(served.dataset.rewards)
    folder.mkdir()
    lines = frame_records(
        [json.dumps({"decision_id": keys[c][0]}).encode() for c in ("ada", "bob")]
    )
    (folder / "dead-0.damaged").write_bytes(b"".join(lines))
    done = purge(served.lake, "d", "source_episode_id = 'ada'")
    assert done.is_proven
    assert done.num_decisions == 3
    assert (folder / "dead-0.damaged").read_bytes() == lines[1]
    rows = served.lake.sql("select distinct source_episode_id as s from d.steps").to_pylist()
    assert rows == [{"s": "bob"}]
    assert (served.count("decisions"), served.count("rewards")) == (3, 2)
    for path in served.lake.path.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            if path.suffix == ".parquet":
                data += repr(pq.read_table(path).to_pylist()).encode()
            assert not any(key.encode() in data for key in keys["ada"]), path
    assert served.run(7300).steps == 0


def test_other_datasets_and_short_ids_stay(lake: Lake, make_episode: Any) -> None:
    for name in ("d", "e"):
        lake.dataset(name).append([make_episode("1"), make_episode("12"), make_episode("0-1")])
    done = purge(lake, "d", "episode_id = '1'")
    assert done.is_proven
    assert ids(lake) == ["0-1", "12"]
    assert lake.dataset("e").snapshot().num_steps == 9


class Killed(BaseException):
    """As the process would end here."""


def _mutations(monkeypatch: pytest.MonkeyPatch, fail_at: int) -> Callable[[], int]:
    """Let the process end just before, or just after, the k-th change that it makes to storage."""
    count = 0
    for name in ("put", "put_if_absent", "delete"):
        original = getattr(LocalStorage, name)

        def changed(self: Any, *args: Any, _original: Any = original, **more: Any) -> Any:
            nonlocal count
            count += 1
            if count == fail_at and fail_at % 2:
                raise Killed
            done = _original(self, *args, **more)
            if count == fail_at:
                raise Killed
            return done

        monkeypatch.setattr(LocalStorage, name, changed)
    return lambda: count


@pytest.mark.slow
def test_killed_at_any_moment_the_next_one_finishes_it(
    tmp_path: Path, make_episode: Any, package: Path
) -> None:
    for kill_at in _until_whole():
        lake = open_lake(tmp_path / f"lake{kill_at.number}", create=True)
        dataset = lake.dataset("d")
        dataset.create(Box((2,)), Discrete(2))
        dataset.append([make_episode("plain-episode-1")])
        dataset.append([make_episode(SECRET), make_episode("plain-episode-2", 2)])
        lake.tags.set("d", "golden", 2)
        register(lake, package, "trained", 2, None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(purge_module, "_PAUSE_S", 0.0)
            counted = _mutations(patch, kill_at.number)
            try:
                purge(lake, "d", '"return" = 6 and num_steps = 3 and episode_id > \'pa\' '
                      "and episode_id < 'pl'")  # fmt: skip
                kill_at.is_whole = counted() < kill_at.number
            except Killed:
                pass
        lake = open_lake(tmp_path / f"lake{kill_at.number}")
        again = purge(lake, "d", f"episode_id = '{SECRET}'")
        assert again.is_proven
        assert holding(lake.path) == [], kill_at.number
        (record,) = lake.purges.list("d")
        assert (record.status, record.tags, record.policies) == (
            "done", ("golden",), {"trained:1": 1}
        )  # fmt: skip
        assert record.versions == ((2, 2),)
        assert ids(lake) == ["plain-episode-1", "plain-episode-2"]
        with pytest.raises(ReplayLakeError, match="purged"):
            lake.snapshot("d@golden").replay()


class _Kill:
    def __init__(self, number: int) -> None:
        self.number = number
        self.is_whole = False


def _until_whole() -> Iterator[_Kill]:
    number = 1
    while True:
        kill = _Kill(number)
        yield kill
        if kill.is_whole:
            assert number > 10  # there was something to kill
            return
        number += 1
