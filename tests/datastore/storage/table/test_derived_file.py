"""DerivedFile: what it says is right or not there, whoever writes, deletes or damages files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from replaylake.datastore.storage.storage import LocalStorage
from replaylake.datastore.storage.table.derived_file import DerivedFile


@dataclass(frozen=True)
class Sizes:
    """Something of each shard."""

    sizes: dict[str, int]

    @property
    def shards(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    @property
    def num_bytes(self) -> int:
        return 100 * len(self.sizes)

    def select_shards(self, places: Sequence[int]) -> Sizes:
        return Sizes({self.shards[place]: self.sizes[self.shards[place]] for place in places})


def make_file(max_cached_bytes: int = 1 << 20) -> DerivedFile[Sizes]:
    return DerivedFile(
        "_derived/sizes",
        lambda data: json.dumps(data.sizes).encode(),
        lambda content: None if content == b"{}" else Sizes(json.loads(content)),
        max_cached_bytes=max_cached_bytes,
    )


BOTH = Sizes({"shards/a": 1, "shards/b": 2})


@pytest.fixture
def stored(storage: LocalStorage) -> LocalStorage:
    for path in BOTH.shards:
        storage.put(f"d/{path}", b"rows")
    return storage


def names(storage: LocalStorage) -> list[str]:
    return storage.names("d/_derived/sizes")


def test_what_was_saved_is_loaded_by_any_process(stored: LocalStorage) -> None:
    file = make_file()
    assert file.load(stored, "d") is None
    assert file.save(stored, "d", BOTH)
    (first,) = names(stored)
    for reader in (file, make_file(), make_file(max_cached_bytes=0)):
        assert reader.load(stored, "d") == BOTH
    assert make_file().save(stored, "d", Sizes({"shards/b": 3}))
    (second,) = names(stored)
    assert second > first, "the earlier file went"
    assert file.load(stored, "d") == Sizes({"shards/b": 3}), "what another process wrote counts"


def test_what_is_remembered_counts_until_another_writes(stored: LocalStorage) -> None:
    file = make_file()
    file.remember(stored, "d", BOTH)
    assert file.load(stored, "d") == BOTH
    assert names(stored) == []
    make_file().save(stored, "d", Sizes({"shards/a": 7}))
    assert file.load(stored, "d") == Sizes({"shards/a": 7})


def test_a_damaged_file_gives_way_to_the_one_before(stored: LocalStorage) -> None:
    make_file().save(stored, "d", BOTH)
    stored.put("d/_derived/sizes/z-damaged.parquet", b"garbage")
    file = make_file()
    assert file.load(stored, "d") == BOTH
    file.delete(stored, "d")
    assert names(stored) == []
    assert file.load(stored, "d") is None


def test_nothing_is_kept_of_shards_that_are_gone(
    stored: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make_file()
    file.save(stored, "d", BOTH)
    file.delete_gone(stored, "d")
    assert make_file().load(stored, "d") == BOTH
    stored.delete(["d/shards/a"])
    file.delete_gone(stored, "d")
    assert make_file().load(stored, "d") == file.load(stored, "d") == Sizes({"shards/b": 2})
    # Where it cannot be written without them, it goes.
    stored.put("d/shards/a", b"rows")
    file.save(stored, "d", BOTH)
    stored.delete(["d/shards/a"])

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "put", refuse)
        file.delete_gone(stored, "d")
    assert names(stored) == []
    stored.delete(["d/shards/b"])
    file.save(stored, "d", BOTH)
    file.delete_gone(stored, "d")
    assert file.load(stored, "d") is None
