from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import deltalake
import numpy as np
import pyarrow as pa
import pytest

from replaylake.datastore.errors import (
    AlreadyExistsError,
    CommitConflictError,
    InvalidNameError,
    NotFoundError,
    ProducerEndedError,
    SchemaMismatchError,
    ShardCorruptError,
    StorageError,
)
from replaylake.datastore.storage.log.commit_file import Intent
from replaylake.datastore.storage.log.state import FileEntry
from replaylake.datastore.storage.storage import LocalStorage
from replaylake.datastore.storage.table import shard as shard_module
from replaylake.datastore.storage.table import table as table_module
from replaylake.datastore.storage.table.delta_schema import field_id
from replaylake.datastore.storage.table.table import Table, WrittenRows

SCHEMA = pa.schema([pa.field("id", pa.string(), nullable=False), pa.field("x", pa.int64())])


def rows(*ids: str, **columns: list[object] | pa.Array) -> pa.Table:
    return pa.table(
        {"id": pa.array(ids, pa.string()), "x": pa.array(range(len(ids)), pa.int64()), **columns}
    )


@pytest.fixture
def table(storage: LocalStorage) -> Table:
    table = Table(storage, "d/_decisions")
    table.create(SCHEMA, {"note": "kept"})
    return table


def delta_rows(table: Table) -> pa.Table:
    path = table.storage.local(table.root)
    return pa.table(deltalake.DeltaTable(str(path)).to_pyarrow_table()).sort_by("id")


def test_a_handle_on_nothing(storage: LocalStorage) -> None:
    table = Table(storage, "nothing")
    assert not table.exists()
    assert table.find_commit("p", 0) is None
    assert table.next_sequence("p") == 0
    for use in (table.snapshot, lambda: table.append(rows("a"), producer="p", sequence=0)):
        with pytest.raises(NotFoundError):
            use()
    assert storage.names("nothing") == []


def test_a_table_is_created_once(table: Table) -> None:
    with pytest.raises(AlreadyExistsError, match="exists at version 0"):
        table.create(SCHEMA)
    assert table.snapshot().configuration["note"] == "kept"
    assert table.snapshot().read().schema.names == ["id", "x"]
    assert table.snapshot().num_rows == 0


def test_appended_rows_are_read_back_by_version(table: Table) -> None:
    assert table.append(rows("a", "b"), producer="p", sequence=0).version == 1
    commit = table.append(rows("c"), producer="p", sequence=1)
    assert (commit.version, commit.num_rows, commit.num_shards) == (2, 1, 1)
    assert table.snapshot().read()["id"].to_pylist() == ["a", "b", "c"]
    assert table.snapshot(1).read(["id"]).to_pydict() == {"id": ["a", "b"]}
    assert table.snapshot(0).read().num_rows == 0
    assert [entry["version"] for entry in table.history()] == [0, 1, 2]


def test_a_snapshot_does_not_change_under_its_reader(table: Table) -> None:
    table.append(rows("a"), producer="p", sequence=0)
    pinned = table.snapshot()
    table.append(rows("b", y=[1.0]), producer="p", sequence=1)
    assert pinned.read().to_pydict() == {"id": ["a"], "x": [0]}


def test_an_append_is_repeated_without_effect(table: Table) -> None:
    first = table.append(rows("a"), producer="p", sequence=5)
    again = table.append(rows("other", z=[1]), producer="p", sequence=5)
    assert (again.version, again.already_present, again.num_rows) == (first.version, True, 0)
    assert table.find_commit("p", 5) == 1
    assert table.find_commit("p", 4) is None
    assert table.next_sequence("p") == 6
    assert table.next_sequence("p#5") == 0
    assert "z" not in table.snapshot().schema.names
    assert len(table.storage.names("d/_decisions/shards")) == 1


def test_columns_are_matched_by_name(table: Table) -> None:
    table.append(rows("a").select(["x", "id"]), producer="p", sequence=0)
    table.append(rows("b").select(["id"]), producer="p", sequence=1)
    assert table.snapshot().read().to_pydict() == {"id": ["a", "b"], "x": [0, None]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (rows("a").drop(["id"]), "'id': absent, expected string"),
        (pa.table({"id": pa.array([None], pa.string())}), "'id': found 1 nulls"),
        (rows("a").set_column(1, "x", pa.array([1.0])), "'x': found double, expected int64"),
        (rows("a").append_column("X", pa.array([1])), "'X': found beside 'x'"),
        (
            rows("a").append_column("y", pa.array([1], pa.uint8())),
            "'y': found uint8, expected a type",
        ),
        (rows("a").append_column("y", pa.array([None])), "'y': found null, expected a type"),
    ],
)
def test_drift_is_refused_by_the_name_of_its_column(
    table: Table, data: pa.Table, message: str
) -> None:
    with pytest.raises(SchemaMismatchError, match=message):
        table.append(data, producer="p", sequence=0)
    assert table.snapshot().version == 0


def test_a_column_that_came_later_is_null_before(table: Table) -> None:
    table.append(rows("a"), producer="p", sequence=0)
    table.append(rows("b", y=[[1.5]]), producer="p", sequence=1)
    table.append(rows("c", z=["text"]), producer="p", sequence=2)
    assert table.snapshot().read().to_pydict() == {
        "id": ["a", "b", "c"],
        "x": [0, 0, 0],
        "y": [None, [1.5], None],
        "z": [None, None, "text"],
    }
    assert table.snapshot(1).schema.names == ["id", "x"]
    assert [field_id(field) for field in table.snapshot().schema] == [1, 2, 3, 4]
    assert table.snapshot().read(["z"]).column_names == ["z"]
    with pytest.raises(NotFoundError, match="found no column w, expected some of id, x, y, z"):
        table.snapshot().read(["w"])


def test_delta_rs_sees_exactly_our_rows(table: Table) -> None:
    table.append(rows("a", "b"), producer="p", sequence=0)
    table.append(rows("c", y=[np.float32(0.5)]), producer="p", sequence=1)
    ours = table.snapshot().read()
    assert delta_rows(table).select(ours.column_names).to_pylist() == ours.to_pylist()
    table.log.checkpoint(2)
    assert delta_rows(table).select(ours.column_names).to_pylist() == ours.to_pylist()


def test_two_writers_add_columns_at_the_same_moment(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one's shards hold a field id that the first one took: they are written again."""
    other = Table(table.storage, table.root)
    write_shard = shard_module.write_shard
    written: list[str] = []

    def interrupted(storage: LocalStorage, root: str, data: pa.Table) -> object:
        written.append(",".join(data.column_names))
        if len(written) == 1:
            other.append(rows("theirs", theirs=[1]), producer="other", sequence=0)
        return write_shard(storage, root, data)

    monkeypatch.setattr(shard_module, "write_shard", interrupted)
    assert table.append(rows("ours", ours=["text"]), producer="p", sequence=0).version == 2
    assert written == ["id,x,ours", "id,x,theirs", "id,x,theirs,ours"]
    for reader in (table, other, Table(table.storage, table.root)):
        assert reader.snapshot().read().to_pydict() == {
            "id": ["theirs", "ours"],
            "x": [0, 0],
            "theirs": [1, None],
            "ours": [None, "text"],
        }
    assert [field_id(field) for field in table.snapshot().schema] == [1, 2, 3, 4]


def test_the_same_new_column_from_many_threads(table: Table) -> None:
    def append(name: str) -> None:
        own = Table(table.storage, table.root)
        own.append(rows(name, extra=[name], **{name: [1]}), producer=name, sequence=0)

    threads = [threading.Thread(target=append, args=(f"t{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    read = table.snapshot().read()
    assert sorted(read["extra"].to_pylist()) == ["t0", "t1", "t2", "t3"]
    assert {f"t{i}" for i in range(4)} < set(read.column_names)
    assert sorted(delta_rows(table)["extra"].to_pylist()) == ["t0", "t1", "t2", "t3"]


def test_rows_written_for_another_to_commit(table: Table) -> None:
    parts = [Table(table.storage, table.root).write(rows(name)) for name in ("a", "b")]
    assert table.snapshot().num_rows == 0
    commit = table.commit(parts, producer="committer", sequence=0)
    assert (commit.version, commit.num_rows, commit.num_shards) == (1, 2, 2)
    assert table.commit(parts, producer="committer", sequence=0).already_present
    late = table.write(rows("c", mine=[1]))
    table.append(rows("d", theirs=[1]), producer="p", sequence=0)
    late_too = table.write(rows("e"))
    # The field id that `late` was written with is that of `theirs` by now.
    commit = table.commit([late, late_too], producer="committer", sequence=1)
    assert (commit.version, commit.num_rows, commit.num_shards) == (3, 2, 2)
    assert table.commit([late, late_too], producer="committer", sequence=1).already_present
    read = Table(table.storage, table.root).snapshot().read()
    assert read["id"].to_pylist() == list("abdce")
    assert read["mine"].to_pylist() == [None, None, None, 1, None]
    assert read["theirs"].to_pylist() == [None, None, 1, None, None]
    assert delta_rows(table).sort_by("id")["mine"].to_pylist() == [None, None, 1, None, None]
    other_type = table.write(rows("f", more=[1]))
    table.append(rows("g", more=["text"]), producer="p", sequence=1)
    with pytest.raises(SchemaMismatchError, match="column 'more': found int64, expected string"):
        table.commit([other_type], producer="committer", sequence=2)


def test_large_appends_become_several_shards(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "_SHARD_ROWS", 4)
    commit = table.append(rows(*"abcdefghij"), producer="p", sequence=0)
    assert (commit.version, commit.num_shards) == (1, 3)
    monkeypatch.setattr(table_module, "_SHARD_BYTES", 1)
    assert table.append(rows(*"kl"), producer="p", sequence=1).num_shards == 2
    assert "".join(table.snapshot().read()["id"].to_pylist()) == "abcdefghijkl"


def test_an_append_without_rows_is_a_version_without_files(table: Table) -> None:
    commit = table.append(rows(), producer="p", sequence=0)
    assert (commit.version, commit.num_shards) == (1, 0)
    assert table.find_commit("p", 0) == 1


def test_a_damaged_shard_is_never_read(table: Table) -> None:
    table.append(rows("a"), producer="p", sequence=0)
    (path,) = table.snapshot().paths()
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(ShardCorruptError, match=path.name):
        table.snapshot().read()


def test_a_log_that_names_files_outside_is_refused(table: Table, tmp_path: Path) -> None:
    planted = FileEntry("../../../outside.parquet", 1, 1, "0" * 64)
    table.log.commit(lambda _: Intent("p", 0, "WRITE", add=(planted,)))
    with pytest.raises(InvalidNameError, match="inside of the lake"):
        table.snapshot().read()


HOUR_MS = 3_600_000


def aged(written: WrittenRows, age_ms: int) -> WrittenRows:
    entries = [replace(e, modified_ms=e.modified_ms - age_ms) for e in written.entries]
    return replace(written, entries=tuple(entries))


@pytest.mark.parametrize("age_ms", [2 * HOUR_MS, -24 * HOUR_MS])
def test_shards_that_waited_long_are_looked_for_before_their_commit(
    table: Table, age_ms: int
) -> None:
    """Vacuum takes what no version names for left behind; or the clock was moved."""
    kept, gone = table.write(rows("a")), table.write(rows("b", "c"))
    table.storage.delete([f"{table.root}/{gone.entries[0].path}"])
    with pytest.raises(CommitConflictError, match=r"found no shards/.* \(1 of 2 shards\).*Write"):
        table.commit([aged(kept, age_ms), aged(gone, age_ms)], producer="p", sequence=0)
    assert table.snapshot().version == 0
    assert table.commit([aged(kept, age_ms)], producer="p", sequence=0).version == 1
    assert table.snapshot().read()["id"].to_pylist() == ["a"]


def test_a_commit_sent_again_after_its_shards_were_replaced(table: Table) -> None:
    written = aged(table.write(rows("a")), 2 * HOUR_MS)
    table.commit([written], producer="p", sequence=0)
    table.storage.delete([f"{table.root}/{written.entries[0].path}"])
    assert table.commit([written], producer="p", sequence=0).already_present


def test_a_large_append_that_fails_leaves_no_shard(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_module, "_SHARD_ROWS", 1)
    put = table.storage.put
    calls: list[str] = []

    def failing(path: str, data: bytes | memoryview) -> None:
        calls.append(path)
        if len(calls) == 3:
            raise StorageError("disk full")
        put(path, data)

    monkeypatch.setattr(table.storage, "put", failing)
    with pytest.raises(StorageError, match="disk full"):
        table.append(rows(*"abcdefgh"), producer="p", sequence=0)
    assert table.storage.names(f"{table.root}/shards") == []
    assert table.append(rows(*"abcdefgh"), producer="p", sequence=0).num_shards == 8
    assert "".join(table.snapshot().read()["id"].to_pylist()) == "abcdefgh"


def test_rows_in_the_place_of_others_make_fewer_shards(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What compaction writes is twice as large as what it leaves alone."""
    monkeypatch.setattr(table_module, "_SHARD_ROWS", 4)
    assert len(table.write(rows(*"abcdefgh")).entries) == 2
    assert len(table.write(rows(*"abcdefgh"), since=0).entries) == 1


def test_reading_stops_at_a_damaged_shard_in_the_middle(table: Table) -> None:
    for sequence, name in enumerate("abcd"):
        table.append(rows(name), producer="p", sequence=sequence)
    path = table.snapshot().paths()[2]
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    batches = table.snapshot().batches(["id"])
    assert [next(batches)["id"].to_pylist() for _ in range(2)] == [["a"], ["b"]]
    with pytest.raises(ShardCorruptError, match=path.name):
        next(batches)


def test_a_producer_that_was_ended_commits_nothing_more(table: Table) -> None:
    first = table.append(rows("a"), producer="w", sequence=0)
    written = table.write(rows("b"))
    for _ in range(2):
        table.end_producer("w")
    with pytest.raises(ProducerEndedError, match=f"version {first.version + 1} ended the prod"):
        table.append(rows("b"), producer="w", sequence=1)
    with pytest.raises(ProducerEndedError):
        table.commit([written], producer="w", sequence=2)
    again = table.append(rows("a"), producer="w", sequence=0)
    assert (again.version, again.already_present) == (first.version, True)
    table.append(rows("c"), producer="v", sequence=0)
    assert table.snapshot().read().column("id").to_pylist() == ["a", "c"]
    assert table.next_sequence("w") == 1
    opened = deltalake.DeltaTable(str(table.storage.local(table.root)))
    assert opened.to_pyarrow_table().num_rows == 2
