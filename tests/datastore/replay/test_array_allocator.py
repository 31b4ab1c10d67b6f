from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaylake.datastore.replay import array_allocator as memory
from replaylake.datastore.replay.array_allocator import (
    ArrayAllocator,
    ScratchFiles,
    available_bytes,
    is_mapped,
    resolve_budget,
)
from replaylake.datastore.replay.mapped_arrays import create_array, map_array, scratch_array

WORDS = np.dtype(np.uint64)


def test_half_of_what_is_available_is_the_default() -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < available_bytes() <= total
    assert resolve_budget(None) <= total // 2
    assert resolve_budget(7) == 7


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"": "max", "pod": "max", "pod/own": "max"}, 64 << 30),
        ({"pod": "max", "pod/own": str(5 << 30)}, 4 << 30),
        ({"pod": str(3 << 30), "pod/own": str(5 << 30)}, 2 << 30),
        ({"pod/own": str(1 << 29)}, 0),
    ],
)
def test_a_control_group_s_limit_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, str], expected: int
) -> None:
    """Each group here holds 1 GiB of anonymous memory already."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 1 kB\nMemAvailable: 67108864 kB\n")
    own = tmp_path / "cgroup"
    own.write_text("0::/pod/own\n")
    groups = tmp_path / "groups"
    for name, limit in limits.items():
        (groups / name).mkdir(parents=True, exist_ok=True)
        (groups / name / "memory.max").write_text(f"{limit}\n")
        (groups / name / "memory.stat").write_text(f"anon {1 << 30}\nfile 12345\n")
    monkeypatch.setattr(memory, "_MEMINFO", meminfo)
    monkeypatch.setattr(memory, "_OWN_CGROUP", own)
    monkeypatch.setattr(memory, "_CGROUPS", groups)
    assert available_bytes() == expected


@pytest.mark.parametrize(("budget", "is_file"), [(8 * 30 + 16 * 10, False), (8 * 30 + 159, True)])
def test_what_exceeds_the_budget_goes_to_files(budget: int, is_file: bool) -> None:
    asked = []

    def open_files(needed: int) -> ScratchFiles:
        asked.append(needed)
        return ScratchFiles(needed)

    room = ArrayAllocator(budget, open_files)
    words = room.allocate("records", (10, 3), WORDS)
    steps = room.allocate("steps", (10,), np.dtype(np.int64))
    assert is_mapped(words) == is_mapped(steps) == (room.files is not None) == is_file
    assert asked == ([400] if is_file else [])
    assert words.shape == (10, 3)
    assert not words.any()
    words[:] = 5
    assert words.sum() == 150


def test_arrays_in_files(tmp_path: Path) -> None:
    array: Any = create_array(tmp_path / "a", np.int64, (4, 2))
    array[:] = np.arange(8).reshape(4, 2)
    found = map_array(tmp_path / "a", np.int64, (4, 2))
    assert found.tolist() == array.tolist()
    assert is_mapped(found[1:])
    assert not is_mapped(found + 1)
    with pytest.raises(ValueError, match="found 64 bytes"):
        map_array(tmp_path / "a", np.int64, (3, 2))
    with pytest.raises(FileExistsError):
        create_array(tmp_path / "a", np.int64, (4, 2))
    with pytest.raises(OSError, match=r"No space left|File too large"):
        create_array(tmp_path / "b", np.int64, (1 << 50,))
    assert create_array(tmp_path / "c", np.int64, (0,)).shape == (0,)
    assert map_array(tmp_path / "c", np.int64, (0,)).shape == (0,)
    scratch = scratch_array(tmp_path, np.int64, (3,))
    scratch[:] = 7
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]
