"""Copy: a snapshot elsewhere, each step once, whatever happens to either side in between."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import (
    ConfigInvalidError,
    NotFoundError,
    SchemaMismatchError,
    ShardCorruptError,
    StorageError,
)
from replaylake.datastore.lake.dataset import Dataset
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.maintenance.copy.copy import CopyReceipt, copy
from replaylake.datastore.maintenance.fsck.fsck import fsck
from replaylake.datastore.maintenance.vacuum import vacuum
from replaylake.datastore.storage.log.expiry import expire
from replaylake.datastore.storage.table.rewrite import RewritePlan, rewrite

Make = Callable[..., Episode]


@pytest.fixture
def dataset(lake: Lake, make_episode: Make) -> Dataset:
    dataset = lake.dataset("d")
    for name in "abc":
        dataset.append([make_episode(name, terminated=True)], producer=name, sequence=0)
    return dataset


@pytest.fixture
def centre(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "centre", create=True)


def rows(lake: Lake, name: str = "d") -> list[dict[str, Any]]:
    query = "SELECT * FROM steps ORDER BY episode_id, agent_id, step"
    return lake.snapshot(name).sql(query).to_pylist()


def episodes(lake: Lake, name: str = "d") -> list[str]:
    found = lake.snapshot(name).sql("SELECT episode_id AS e, num_steps FROM episodes ORDER BY e")
    assert set(found["num_steps"].to_pylist()) <= {3}, "each step once"
    return list(found["e"].to_pylist())


def compact(dataset: Dataset, *numbers: int, data_change: bool = False) -> None:
    """Write some shards again as one, as a compactor does."""
    snapshot = dataset.snapshot().table
    entries = [snapshot.files[number] for number in numbers]
    everything = snapshot.read()
    parts = dict(zip([e.path for e in snapshot.files], snapshot.batches(), strict=True))
    joined = everything.slice(0, 0)
    for entry in entries:
        joined = type(everything).from_batches(
            [*joined.to_batches(), *parts[entry.path].to_batches()], everything.schema
        )
    dataset.table.commit(
        [dataset.table.write(joined, since=min(entry.since for entry in entries))],
        producer=f"compact/{snapshot.version}",
        sequence=0,
        operation="COMPACT",
        removed=[entry.path for entry in entries],
        data_change=data_change,
    )


def delete(dataset: Dataset, episode: str) -> None:
    def plan(snapshot: Any) -> RewritePlan:
        def kept(table: Any) -> Any:
            ids = np.asarray(table.column("episode_id").to_pylist())
            return table.filter((ids != episode).tolist())

        return RewritePlan({entry: kept for entry in snapshot.files})

    rewrite(dataset.table, plan, producer=f"delete/{episode}", sequence=0, operation="DELETE")


def test_a_copy_is_the_snapshot(lake: Lake, centre: Lake, dataset: Dataset) -> None:
    seen: list[tuple[int, int]] = []
    receipt = copy(lake, "d@2", centre, on_progress=lambda *at: seen.append(at))
    assert rows(centre) == rows(lake, "d@2")
    assert centre.dataset("d").spec == dataset.spec
    assert (receipt.num_episodes, receipt.num_steps, receipt.num_shards) == (2, 6, 2)
    assert (receipt.source, receipt.version, receipt.notes) == ("d@2", 1, ())
    assert seen[-1][0] == seen[-1][1] == receipt.num_bytes
    last = centre.dataset("d").history()[-1]
    assert (last["operation"], last["num_steps"], last["num_produced_steps"]) == ("COPY", 6, 6)
    assert last["source"] == {"lake": lake.url, "dataset": "d", "version": 2}
    assert fsck(centre).findings == ()


def test_a_copy_again_adds_what_is_new(
    lake: Lake, centre: Lake, dataset: Dataset, make_episode: Make
) -> None:
    copy(lake, "d", centre)
    version = centre.snapshot("d").version
    again = copy(lake, "d", centre)
    assert (again.version, again.num_steps) == (None, 0)
    assert again.notes == ("already copied: nothing was added",)
    assert centre.snapshot("d").version == version
    dataset.append([make_episode("new", extras={"x": [1, 2, 3]})])
    assert copy(lake, "d", centre).num_shards == 1
    assert episodes(centre) == ["a", "b", "c", "new"]
    assert rows(centre) == rows(lake)
    older = copy(lake, "d@1", centre)
    assert (older.version, older.num_already_present_steps) == (None, 3)


@pytest.mark.parametrize("which", [(0, 1), (1, 2), (0, 3), (0, 1, 2, 3, 4), (3, 4)])
@pytest.mark.parametrize("data_change", [False, True])
def test_a_source_that_was_rewritten_in_between(
    lake: Lake,
    centre: Lake,
    dataset: Dataset,
    make_episode: Make,
    which: tuple[int, ...],
    data_change: bool,
) -> None:
    """Shards that were copied, that were not, and both together."""
    copy(lake, "d", centre)
    for name in "de":
        dataset.append([make_episode(name)])
    compact(dataset, *which, data_change=data_change)
    dataset.append([make_episode("f")])
    receipt = copy(lake, "d", centre)
    assert receipt.num_steps == 9
    assert episodes(centre) == list("abcdef")
    assert rows(centre) == rows(lake)
    compact(dataset, 0, 1)
    assert copy(lake, "d", centre).num_steps == 0
    assert fsck(centre).is_clean


def test_a_target_that_was_compacted_in_between(
    lake: Lake, centre: Lake, dataset: Dataset, make_episode: Make
) -> None:
    copy(lake, "d", centre)
    compact(centre.dataset("d"), 0, 1, 2)
    dataset.append([make_episode("new")])
    copy(lake, "d", centre)
    assert rows(centre) == rows(lake)


def test_what_was_deleted_is_kept_here_and_stays_away_there(
    lake: Lake, centre: Lake, dataset: Dataset, make_episode: Make
) -> None:
    copy(lake, "d", centre)
    delete(dataset, "a")  # an edge makes room
    delete(centre.dataset("d"), "b")  # the centre was asked to forget
    dataset.append([make_episode("d")])
    compact(dataset, 0, 1, 2)
    receipt = copy(lake, "d", centre)
    assert episodes(centre) == ["a", "c", "d"]
    assert "the source changed or removed rows since they were copied" in receipt.notes[0]


@pytest.mark.parametrize("operation", ["ANNOTATE", "DELETE", "LATE REWARDS", "PURGE", "TRIM"])
def test_a_rewrite_in_the_source_brings_nothing_back(
    lake: Lake, centre: Lake, dataset: Dataset, make_episode: Make, operation: str
) -> None:
    compact(dataset, 0, 1, 2)
    copy(lake, "d", centre)
    delete(centre.dataset("d"), "b")  # the centre was asked to forget
    (entry,) = dataset.snapshot().table.files
    keep = RewritePlan({entry: lambda rows: rows.slice(3)})
    rewrite(dataset.table, lambda _: keep, producer="x", sequence=0, operation=operation)
    (dataset.path / entry.path).unlink()  # as purge does, or vacuum later
    dataset.append([make_episode("d")])
    copy(lake, "d", centre)
    assert episodes(centre) == ["a", "c", "d"]


def test_a_source_that_forgot_the_version_copied_last_says_so(
    lake: Lake, centre: Lake, dataset: Dataset, make_episode: Make
) -> None:
    copy(lake, "d", centre)
    compact(dataset, 0, 1, 2)
    version = dataset.append([make_episode("d")]).version
    expire(dataset.table.log, version)
    receipt = copy(lake, "d", centre)
    assert episodes(centre) == ["a", "b", "c", "d"]
    assert "the source no longer retains version 3, the last one copied" in receipt.notes[0]
    dataset.append([make_episode("e")])
    assert copy(lake, "d", centre).notes == ()


def test_what_was_copied_is_vacuumed_like_all_else(
    lake: Lake, centre: Lake, dataset: Dataset
) -> None:
    copy(lake, "d", centre)
    copied = centre.dataset("d")
    compact(copied, 0, 1, 2)
    in_8_days_ms = time.time_ns() // 1_000_000 + 8 * 86_400_000
    assert len(vacuum(centre, ["d"], delete=True, now_ms=in_8_days_ms).garbage) == 3
    assert rows(centre) == rows(lake)
    assert len(list((copied.path / "shards").iterdir())) == 1


def test_shards_of_the_same_bytes(lake: Lake, centre: Lake, dataset: Dataset) -> None:
    """As where a writer without a producer sent its rows twice: fsck says so of both."""
    table = dataset.snapshot().table
    dataset.table.append(replace(table, files=table.files[:1]).read(), producer="x", sequence=0)
    assert len({entry.sha256 for entry in dataset.snapshot().table.files}) == 3
    copy(lake, "d", centre)
    assert centre.snapshot("d").num_steps == lake.snapshot("d").num_steps == 12
    assert fsck(centre).counts == fsck(lake).counts == {"duplicate": 1}


@pytest.mark.parametrize("days", [0, 2])
def test_rows_that_left_the_target_come_from_elsewhere(
    lake: Lake, centre: Lake, dataset: Dataset, tmp_path: Path, days: float
) -> None:
    other = open_lake(tmp_path / "other", create=True)
    copy(lake, "d", other)
    copy(lake, "d", centre)
    whole = rows(centre)
    target = centre.dataset("d").table
    (entry, *_) = target.snapshot().files
    target.commit([], producer="delete/a", sequence=0, removed=[entry.path])
    then = time.time() - days * 86_400
    os.utime(centre.path / "d" / entry.path, (then, then))
    copy(other, "d", centre)
    assert rows(centre) == whole
    reused = entry.path in {file.path for file in target.snapshot().files}
    assert reused == (days == 0), "vacuum may be about to delete the old one"
    assert fsck(centre, all_versions=True).findings == ()


@pytest.mark.slow
def test_several_lakes_come_together(
    lake: Lake, centre: Lake, dataset: Dataset, make_episode: Make, tmp_path: Path
) -> None:
    other = open_lake(tmp_path / "other", create=True)
    other.dataset("robot").append([make_episode("x"), make_episode("y")])
    copy(lake, "d", centre, as_name="fleet")
    copy(other, "robot", centre, as_name="fleet")
    assert episodes(centre, "fleet") == ["a", "b", "c", "x", "y"]
    # The same steps by another way: from here to there, and from there to the centre.
    copy(lake, "d", other, as_name="robot")
    receipt = copy(other, "robot", centre, as_name="fleet")
    assert (receipt.num_steps, receipt.num_already_present_steps) == (0, 9)
    # Half of what is new is known at the centre already.
    dataset.append([make_episode("n1")])
    copy(lake, "d", centre, as_name="fleet")
    other.dataset("robot").append([make_episode("n1"), make_episode("n2")])
    receipt = copy(other, "robot", centre, as_name="fleet")
    assert (receipt.num_steps, receipt.num_episodes) == (3, 1)
    assert episodes(centre, "fleet") == ["a", "b", "c", "n1", "n2", "x", "y"]
    assert fsck(centre).is_clean


def test_columns_of_both_are_kept(
    lake: Lake, centre: Lake, dataset: Dataset, make_episode: Make, tmp_path: Path
) -> None:
    """Their further columns have the same field ids and other names: shards are written anew."""
    dataset.append([make_episode("d", extras={"speed": [1.0, 2.0, 3.0]})])
    other = open_lake(tmp_path / "other", create=True)
    other.dataset("d").append([make_episode("x", extras={"note": list("uvw")})])
    copy(lake, "d", centre)
    copy(other, "d", centre)
    found = {(r["episode_id"], r["step"]): (r["speed"], r["note"]) for r in rows(centre)}
    assert found["d", 1] == (2.0, None)
    assert found["x", 1] == (None, "v")
    assert found["a", 1] == (None, None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"observations": np.zeros((3, 3), np.float32)}, r"observation space is Box.*\[3\]"),
        ({"actions": np.array([[0.5], [0.1], [0.2]])}, "the action space is"),
        ({"extras": {"x": ["a", "b", "c"]}}, "column 'x': found int64, expected string"),
        ({"observations": np.zeros((3, 2))}, "column 'observation': found fixed_size"),
    ],
)
def test_what_does_not_fit_is_refused(
    lake: Lake, centre: Lake, dataset: Dataset, make_episode: Make, fields: Any, message: str
) -> None:
    dataset.append([make_episode("n", extras={"x": [1, 2, 3]})])
    theirs = make_episode("t", final_observation=None, **fields)
    centre.dataset("d").append([theirs])
    before = centre.snapshot("d").version
    with pytest.raises(SchemaMismatchError, match=f"copy d into d: .*{message}"):
        copy(lake, "d", centre)
    assert centre.snapshot("d").version == before


def test_what_cannot_be_copied(lake: Lake, centre: Lake, dataset: Dataset) -> None:
    with pytest.raises(ConfigInvalidError, match="the source itself"):
        copy(lake, "d", open_lake(lake.path))
    with pytest.raises(NotFoundError):
        copy(lake, "e", centre)
    copy(lake, "d", lake, as_name="e")
    assert rows(lake, "e") == rows(lake, "d")
    path = dataset.snapshot().table.paths()[1]
    data = bytearray(path.read_bytes())
    data[80] ^= 1
    path.write_bytes(data)
    with pytest.raises(ShardCorruptError, match="another sha256 than the log has"):
        copy(lake, "d", centre)
    assert centre.snapshot("d").num_steps == 0
    path.unlink()
    with pytest.raises(NotFoundError, match="it was vacuumed meanwhile"):
        copy(lake, "d", centre)


def test_a_copy_that_was_killed_goes_on(
    lake: Lake, centre: Lake, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, done = centre.storage.put, []

    def failing(path: str, data: Any) -> None:
        if len(done) == 2 and "shards" in path:
            raise StorageError("the cable was pulled")
        put(path, data)
        done.append(path)

    with monkeypatch.context() as patched:
        patched.setattr(centre.storage, "put", failing)
        with pytest.raises(StorageError):
            copy(lake, "d", centre)
    assert centre.snapshot("d").num_steps == 0
    again = []
    monkeypatch.setattr(centre.storage, "put", lambda *at: again.append(at[0]) or put(*at))
    copy(lake, "d", centre)
    assert len([path for path in again if "shards" in path]) == 1
    assert rows(centre) == rows(lake)
    assert fsck(centre).findings == ()


def _append(root: Path, num: int) -> None:
    dataset = open_lake(root).dataset("d")
    for i in range(num):
        steps = np.arange(3)
        episode = Episode(
            f"w/{i:03}", np.stack([steps, -steps], 1).astype(np.float32), steps % 2, steps + 1.0
        )
        dataset.append([episode])
        if i % 7 == 5:
            compact(dataset, -3, -2, -1)


def _copy_until(source: Path, target: Path, num: int) -> None:
    lake, centre = open_lake(source), open_lake(target)
    while centre.dataset("d").snapshot().num_steps < num:
        copy(lake, "d", centre)


@pytest.mark.slow
def test_copies_while_writers_append_and_compact(
    lake: Lake, centre: Lake, dataset: Dataset
) -> None:
    """Two copies at once, of a source that grows and is compacted: each step once."""
    copy(lake, "d", centre)
    context = multiprocessing.get_context("spawn")
    jobs = [(_append, (lake.path, 30))] + [(_copy_until, (lake.path, centre.path, 99))] * 2
    processes = [context.Process(target=target, args=args) for target, args in jobs]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert episodes(centre) == ["a", "b", "c", *(f"w/{i:03}" for i in range(30))]
    assert rows(centre) == rows(lake)


def test_a_commit_between_looking_and_copying_is_seen(
    lake: Lake, centre: Lake, dataset: Dataset, make_episode: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another copy of a later version commits first; what both hold must not be there twice."""
    copy(lake, "d@1", centre)
    table = centre.dataset("d").table
    commit = table.commit

    def late(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(table, "commit", commit)
        copy(lake, "d@3", open_lake(centre.path))
        compact(open_lake(centre.path).dataset("d"), 0, 1, 2)  # their shards' names are gone
        return commit(*args, **kwargs)

    monkeypatch.setattr(table, "commit", late)
    receipt: CopyReceipt = copy(lake, "d@2", centre)
    assert receipt.num_steps == 0
    assert episodes(centre) == ["a", "b", "c"]


def test_to_an_object_store_and_back(
    lake: Lake, dataset: Dataset, make_episode: Make, tmp_path: Path
) -> None:
    remote = open_lake(f"memory://{tmp_path.name}", create=True)
    copy(lake, "d", remote)
    dataset.append([make_episode("new", extras={"x": [1, 2, 3]})])
    compact(dataset, 2, 3)
    assert copy(lake, "d", remote).num_steps == 3
    assert rows(remote) == rows(lake)
    assert fsck(remote).findings == ()
    back = open_lake(tmp_path / "back", create=True)
    copy(remote, "d", back)
    assert rows(back) == rows(lake)


def test_fsck_reads_the_object_store_and_not_its_cache(
    lake: Lake, dataset: Dataset, tmp_path: Path
) -> None:
    remote = open_lake(f"memory://{tmp_path.name}", create=True)
    copy(lake, "d", remote)
    assert remote.snapshot("d").replay().num_transitions == 9  # cached from here on
    handle = remote.dataset("d")
    path = f"d/{handle.snapshot().files[1].path}"
    data = bytearray(remote.storage.get(path) or b"")
    data[100] ^= 1
    remote.storage.put(path, bytes(data))
    assert [finding.path for finding in fsck(remote).findings] == [path]
    (repair,) = fsck(remote, repair=True).repairs
    assert remote.storage.get(repair.to) == data
    assert handle.snapshot().num_steps == 6
    assert fsck(remote).findings == ()
