"""Aliases move by compare and set, every move is on record, and rolling back goes further back."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from replaylake.datastore.errors import CommitConflictError, NotFoundError
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.policies.aliases import Aliases
from replaylake.datastore.lake.policies.entries import alias_key, alias_text
from replaylake.datastore.lake.policies.registry import Registry
from replaylake.datastore.storage.log.commit_file import Intent
from replaylake.datastore.storage.log.commit_log import CommitLog
from replaylake.datastore.storage.storage import LocalStorage


@pytest.fixture
def registry(lake: Lake, package: Path) -> Registry:
    """Versions 1 to 4 of `cql`."""
    for _ in range(4):
        lake.registry.register("cql", package, run_id="r", lineage={})
    return lake.registry


def moves(registry: Registry) -> list[tuple[str, int | None, int, str]]:
    return [(m.alias, m.from_version, m.to_version, m.kind) for m in registry.alias_history("cql")]


def test_a_move_and_its_record_are_one_commit(lake: Lake, registry: Registry) -> None:
    log = CommitLog(LocalStorage(lake.path), "_lake")
    before = log.newest().version
    gate = {"passed": False}
    move = registry.aliases.move(
        "cql", "champion", 2, kind="promote", by="ada", note="why", forced=True, gate=gate
    )
    assert log.newest().version == before + 1
    assert (move.from_version, move.to_version, move.by) == (None, 2, "ada")
    assert open_lake(lake.path).registry.alias_history("cql") == [move]
    assert open_lake(lake.path).registry.alias_version("cql", "champion") == 2
    assert (move.note, move.forced, move.gate) == ("why", True, gate)
    assert registry.alias_history("other") == []


def test_a_moved_alias_is_seen_by_who_polls(lake: Lake, registry: Registry) -> None:
    polling = open_lake(lake.path).registry
    assert polling.alias_version("cql", "champion") is None
    for version in (1, 3):
        registry.set_alias("cql", "champion", version)
        assert polling.alias_version("cql", "champion") == version


def test_what_has_to_stand_still(registry: Registry) -> None:
    registry.set_alias("cql", "champion", 1)
    registry.aliases.move("cql", "challenger", 2, expected=0, unmoved={"champion": 1})
    with pytest.raises(CommitConflictError, match="cql@champion: found version 1, expected not "):
        registry.aliases.move("cql", "challenger", 3, unmoved={"champion": None})
    with pytest.raises(CommitConflictError, match="cql@challenger: found version 2, expected ver"):
        registry.aliases.move("cql", "challenger", 3, expected=1)
    assert registry.alias_version("cql", "challenger") == 2
    assert len(registry.alias_history()) == 2
    with pytest.raises(NotFoundError, match="cql:9"):
        registry.aliases.move("cql", "champion", 9)


def test_rolling_back_goes_further_back_each_time(registry: Registry) -> None:
    for version in (1, 2, 3, 4):
        registry.set_alias("cql", "champion", version)
    assert [registry.aliases.rollback("cql", "champion").to_version for _ in range(3)] == [3, 2, 1]
    with pytest.raises(
        NotFoundError, match="points at version 1, found no version that it pointed at"
    ):
        registry.aliases.rollback("cql", "champion")
    # What was undone is forgotten once somebody goes on from there.
    registry.set_alias("cql", "champion", 4)
    assert registry.aliases.rollback("cql", "champion").to_version == 1
    assert registry.aliases.rollback("cql", "champion", to_version=3).to_version == 3
    assert registry.aliases.rollback("cql", "champion").to_version == 1
    assert {kind for *_, kind in moves(registry)[4:7]} == {"rollback"}


def test_nobody_undoes_what_another_has_done(lake: Lake, registry: Registry) -> None:
    for version in (1, 2, 3):
        registry.set_alias("cql", "champion", version)
    assert registry.aliases.rollback("cql", "champion", expected=3).to_version == 2
    with pytest.raises(CommitConflictError, match="found version 2, expected version 3"):
        registry.aliases.rollback("cql", "champion", expected=3)
    assert registry.alias_version("cql", "champion") == 2


def test_two_at_once_roll_back_once(lake: Lake, registry: Registry) -> None:
    """Both have looked before either commits: one is refused, and says so."""
    for version in (1, 2, 3):
        registry.set_alias("cql", "champion", version)
    barrier, found = threading.Barrier(2), []

    class Waiting(Aliases):
        def move(self, *args, **options):  # type: ignore[no-untyped-def]
            barrier.wait(timeout=60)
            return super().move(*args, **options)

    def roll_back() -> None:
        log = CommitLog(LocalStorage(lake.path), "_lake")
        try:
            found.append(Waiting(log).rollback("cql", "champion").to_version)
        except CommitConflictError as error:
            found.append(str(error))

    threads = [threading.Thread(target=roll_back) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (done,) = [one for one in found if isinstance(one, int)]
    (refused,) = [one for one in found if isinstance(one, str)]
    assert (done, registry.alias_version("cql", "champion")) == (2, 2)
    assert "somebody else moved the alias" in refused


def test_a_deleted_version_is_not_gone_back_to(registry: Registry) -> None:
    for version in (1, 2, 3):
        registry.set_alias("cql", "champion", version)
    registry.marks.delete("cql", 2)
    assert registry.aliases.rollback("cql", "champion").to_version == 1


def test_moves_of_a_release_that_kept_no_records(lake: Lake, registry: Registry) -> None:
    log = CommitLog(LocalStorage(lake.path), "_lake")
    for number, version in enumerate((1, 2)):
        entries = {alias_key("cql", "champion"): alias_text(version)}
        intent = Intent(f"alias/old{number}", 0, "SET ALIAS", entries=entries)
        log.commit(lambda state, intent=intent: intent)  # type: ignore[misc]
    expected = [("champion", None, 1, "alias"), ("champion", 1, 2, "alias")]
    assert moves(registry) == expected
    assert all(move.at_ms > 1e12 and move.by is None for move in registry.alias_history("cql"))
    assert registry.aliases.rollback("cql", "champion").to_version == 1
    assert moves(registry) == [*expected, ("champion", 2, 1, "rollback")]


def test_an_alias_that_was_never_set(registry: Registry) -> None:
    with pytest.raises(NotFoundError, match="cql@champion: no such alias"):
        registry.aliases.rollback("cql", "champion")
