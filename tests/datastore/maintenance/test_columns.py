"""A column's new name, or its end, is one commit; earlier versions stay as they were."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from deltalake import DeltaTable

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import NotFoundError, SchemaMismatchError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.maintenance.columns import drop_column, rename_column
from replaylake.datastore.maintenance.delete import delete
from replaylake.datastore.maintenance.fsck.fsck import fsck
from replaylake.datastore.storage.table.delta_schema import field_id
from replaylake.datastore.storage.table.table import Table


@pytest.fixture
def filled(lake: Lake, make_episode: Callable[..., Episode]) -> Lake:
    """Episode a, older than the columns; b and c with `segment` and `note`."""
    lake.dataset("d").append([make_episode("a", 2)])
    for name, segment in (("b", 5), ("c", 6)):
        extras = {"segment": np.array([segment, 0]), "note": np.array(["x", "y"], object)}
        lake.dataset("d").append([make_episode(name, 2, extras=extras)])
    return lake


def rows(lake: Lake, columns: str, at: int | None = None) -> list[tuple[Any, ...]]:
    text = f"select {columns} from d.steps order by episode_id, step"
    table = lake.sql(text, at={} if at is None else {"d": at})
    return [tuple(row.values()) for row in table.to_pylist()]


def test_a_rename_is_seen_by_every_reader(filled: Lake) -> None:
    before = rows(filled, "segment, note, reward")
    number = field_id(filled.snapshot("d").table.schema.field("segment"))
    receipt = rename_column(filled, "d", "segment", "group_id")
    assert (receipt.version, receipt.num_shards, receipt.num_rows) == (4, 2, 4)
    assert rows(filled, "group_id, note, reward") == before
    snapshot = filled.snapshot("d")
    assert "segment" not in snapshot.table.schema.names
    assert field_id(snapshot.table.schema.field("group_id")) == number
    held = snapshot.table.read(["group_id"])["group_id"].to_pylist()
    oracle = DeltaTable(str(filled.dataset("d").path)).to_pyarrow_table()
    assert sorted(held, key=str) == sorted(oracle["group_id"].to_pylist(), key=str)
    assert snapshot.replay("any(group_id = 6)", columns=["group_id"]).num_steps == 2
    assert rows(filled, "segment, note, reward", at=3) == before
    assert fsck(filled, ["d"]).is_clean
    info = filled.dataset("d").commit_info(4)
    assert (info["operation"], info["column"], info["to"]) == (
        "RENAME COLUMN", "segment", "group_id",
    )  # fmt: skip


def test_a_dropped_column_leaves_and_its_number_is_not_confused(
    filled: Lake, make_episode: Callable[..., Episode]
) -> None:
    seen = drop_column(filled, "d", "note", dry_run=True)
    assert (seen.version, seen.num_shards) == (None, 2)
    assert filled.dataset("d").snapshot().version == 3
    assert drop_column(filled, "d", "note").version == 4
    assert "note" not in filled.snapshot("d").table.schema.names
    extras = {"other": np.array(["z"], object)}
    filled.dataset("d").append([make_episode("e", 1, extras=extras)])
    assert rows(filled, "other")[-1] == ("z",)
    assert rows(filled, "other")[:-1] == [(None,)] * 6
    assert rows(filled, "note", at=3)[2:4] == [("x",), ("y",)]
    oracle = DeltaTable(str(filled.dataset("d").path)).to_pyarrow_table()
    assert "note" not in oracle.column_names


def test_what_another_writer_appends_meanwhile_follows(
    filled: Lake, make_episode: Callable[..., Episode], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Table.commit
    waiting = ["late"]

    def commit_late(self: Table, *args: Any, **options: Any) -> Any:
        if options.get("operation") == "RENAME COLUMN" and waiting:
            extras = {"segment": np.array([7])}
            filled.dataset("d").append([make_episode(waiting.pop(), 1, extras=extras)])
        return commit(self, *args, **options)

    monkeypatch.setattr(Table, "commit", commit_late)
    receipt = rename_column(filled, "d", "segment", "group_id")
    assert (receipt.version, receipt.num_shards) == (5, 3)
    assert rows(filled, "group_id")[-1] == (7,)
    assert "segment" not in filled.snapshot("d").table.schema.names


def test_a_column_that_another_writer_adds_meanwhile_stays(
    filled: Lake, make_episode: Callable[..., Episode], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Table.commit
    waiting = [True]

    def commit_late(self: Table, *args: Any, **options: Any) -> Any:
        if options.get("operation") == "RENAME COLUMN" and waiting:
            waiting.clear()
            # Its shards are gone again, and its column is still in the schema.
            extras = {"other": np.array([7])}
            filled.dataset("d").append([make_episode("late", 1, extras=extras)])
            delete(filled, "d", "episode_id = 'late'")
        return commit(self, *args, **options)

    monkeypatch.setattr(Table, "commit", commit_late)
    rename_column(filled, "d", "segment", "group_id")
    assert {"group_id", "other"} <= set(filled.snapshot("d").table.schema.names)


@pytest.mark.parametrize(
    ("column", "to", "error", "message"),
    [
        ("absent", "x", NotFoundError, "segment, note"),
        ("reward", "x", SchemaMismatchError, "read it by this name"),
        ("segment", "Note", SchemaMismatchError, "found a column 'note'"),
        ("segment", "reward", SchemaMismatchError, "unlike every other"),
        ("segment", "a b", SchemaMismatchError, "expected"),
    ],
)
def test_what_is_refused(
    filled: Lake, column: str, to: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        rename_column(filled, "d", column, to)
    assert filled.dataset("d").snapshot().version == 3


def test_a_column_that_a_setting_names_stays(filled: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    configuration = Table.snapshot

    def snapshot(self: Table, version: int | None = None) -> Any:
        found = configuration(self, version)
        return replace(
            found, configuration={**found.configuration, "replaylake.unique": '{"by": ["segment"]}'}
        )

    monkeypatch.setattr(Table, "snapshot", snapshot)
    with pytest.raises(SchemaMismatchError, match="setting unique names it"):
        drop_column(filled, "d", "segment")
    assert drop_column(filled, "d", "note", dry_run=True).num_shards == 2
