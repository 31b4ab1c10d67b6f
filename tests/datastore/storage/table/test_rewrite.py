from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from replaylake.datastore.storage.storage import LocalStorage
from replaylake.datastore.storage.table.rewrite import RewritePlan, rewrite
from replaylake.datastore.storage.table.table import Table, TableSnapshot


@pytest.fixture
def table(tmp_path: Path) -> Table:
    table = Table(LocalStorage(tmp_path), "t")
    table.create(pa.schema([pa.field("x", pa.int64(), nullable=False)]))
    for sequence in range(3):
        rows = pa.table({"x": [10 * sequence, 10 * sequence + 1]})
        table.append(rows, producer="p", sequence=sequence)
    return table


def without_20(rows: pa.Table) -> pa.Table:
    return rows.filter(pc.not_equal(rows["x"], 20))


def everywhere(snapshot: TableSnapshot) -> RewritePlan:
    return RewritePlan({entry: without_20 for entry in snapshot.files}, {"why": "test"})


def test_the_changed_rows_keep_their_age_and_the_old_version_its_rows(table: Table) -> None:
    done = rewrite(table, everywhere, producer="d", sequence=0, operation="DELETE")
    assert done is not None
    assert done.version == 4
    snapshot = table.snapshot()
    assert snapshot.read()["x"].to_pylist() == [0, 1, 10, 11, 21]
    assert [entry.since for entry in snapshot.files] == [1, 2, 3]
    assert table.snapshot(3).read()["x"].to_pylist() == [0, 1, 10, 11, 20, 21]
    assert table.commit_info(4)["why"] == "test"


def test_a_shard_without_rows_goes(table: Table) -> None:
    def plan(snapshot: TableSnapshot) -> RewritePlan:
        return RewritePlan({snapshot.files[0]: lambda rows: rows.slice(0, 0)})

    rewrite(table, plan, producer="d", sequence=0, operation="DELETE")
    assert table.snapshot().read()["x"].to_pylist() == [10, 11, 20, 21]


def test_it_is_done_once(table: Table) -> None:
    rewrite(table, everywhere, producer="d", sequence=0, operation="DELETE")
    again = rewrite(table, everywhere, producer="d", sequence=0, operation="DELETE")
    assert again is not None
    assert (again.version, again.already_present) == (4, True)


def test_nothing_to_change_commits_nothing(table: Table) -> None:
    done = rewrite(table, lambda _: RewritePlan({}), producer="d", sequence=0, operation="DELETE")
    assert done is None
    assert table.snapshot().version == 3


def test_it_is_planned_again_when_a_compactor_was_first(table: Table) -> None:
    calls = 0

    def plan(snapshot: TableSnapshot) -> RewritePlan:
        nonlocal calls
        calls += 1
        if calls == 1:
            table.commit(
                [table.write(snapshot.read(), since=1)],
                producer="compact",
                sequence=0,
                removed=[entry.path for entry in snapshot.files],
                data_change=False,
            )
        return everywhere(snapshot)

    done = rewrite(table, plan, producer="d", sequence=0, operation="DELETE")
    assert done is not None
    assert done.version == 5
    assert calls == 2
    assert table.snapshot().read()["x"].to_pylist() == [0, 1, 10, 11, 21]
