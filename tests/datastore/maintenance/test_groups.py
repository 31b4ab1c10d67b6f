from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from replaylake.datastore.maintenance import compact as groups_module
from replaylake.datastore.maintenance.compact import plan_groups
from replaylake.datastore.storage.log.state import FileEntry
from replaylake.datastore.storage.storage import LocalStorage
from replaylake.datastore.storage.table.table import Table, TableSnapshot

MB = 1 << 20
NUMBERS = pa.schema([pa.field("x", pa.int64(), metadata={b"PARQUET:field_id": b"1"})])


def snapshot(tmp_path: Path, *sizes: float, rows: int = 10) -> TableSnapshot:
    """A version of shards of these sizes (MB), oldest first, of which no file exists."""
    files = tuple(
        FileEntry(f"shards/{number}", int(size * MB), rows, "", since=number)
        for number, size in enumerate(sizes)
    )
    return TableSnapshot(0, NUMBERS, files, {}, LocalStorage(tmp_path), "t")


def sizes(found: list[tuple[FileEntry, ...]]) -> list[list[float]]:
    return [[entry.size_bytes / MB for entry in group] for group in found]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], []),
        ([1], []),
        ([1, 1, 1], [[1, 1, 1]]),
        # A large one parts its neighbours: what replaces them would pass it in age.
        ([1, 1, 60, 1, 1], [[1, 1], [1, 1]]),
        ([1, 60, 1], []),
        # Full groups are closed.
        ([40, 40, 40, 40, 40], [[40, 40, 40], [40, 40]]),
        # Little is not worth writing much again, but what is little goes together.
        ([40, 1], []),
        ([40, 1, 1], [[1, 1]]),
        ([40, 10, 10], [[40, 10, 10]]),
        ([1, 40, 1, 2], [[1, 2]]),
        ([3, 0.25], [[3, 0.25]]),
    ],
)
def test_which_go_together(tmp_path: Path, given: list[float], expected: list[list[float]]) -> None:
    found = plan_groups(snapshot(tmp_path, *given), target_bytes=128 * MB, written_after_ms=0)
    assert sizes(found) == expected


def test_rows_count_as_well(tmp_path: Path) -> None:
    many = snapshot(tmp_path, 1, 1, 1, 1, rows=400_000)
    found = plan_groups(many, target_bytes=128 * MB, written_after_ms=0)
    assert sizes(found) == [[1, 1], [1, 1]]
    full = snapshot(tmp_path, 1, 1, rows=524_288)
    assert plan_groups(full, target_bytes=128 * MB, written_after_ms=0) == []


def test_what_decodes_to_much_counts_as_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames that are all black are small at rest, and large for whoever reads them."""
    monkeypatch.setattr(groups_module, "MAX_DECODED_BYTES", 256 << 10)
    table = Table(LocalStorage(tmp_path), "t")
    table.create(pa.schema([pa.field("frame", pa.large_binary())]))
    for sequence, size in enumerate([60, 60, 60, 120, 60]):
        rows = pa.table({"frame": pa.array([bytes(size << 10)], pa.large_binary())})
        table.append(rows, producer="p", sequence=sequence)
    found = table.snapshot()
    assert sum(entry.size_bytes for entry in found.files) < 60 << 10
    assert plan_groups(found, target_bytes=128 * MB, written_after_ms=0) == [found.files[:3]]
