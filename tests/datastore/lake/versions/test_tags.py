from __future__ import annotations

from pathlib import Path

import pytest

from replaylake.datastore.errors import AlreadyExistsError, InvalidNameError, NotFoundError
from replaylake.datastore.lake.lake import Lake, open_lake


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


def test_a_tag_points_at_a_version_until_it_is_moved(lake: Lake) -> None:
    assert lake.tags.set("d", "paper", 3) is None
    assert lake.tags.set("d", "paper", 3) == 3
    with pytest.raises(AlreadyExistsError, match="points at version 3, found 4 to tag"):
        lake.tags.set("d", "paper", 4)
    assert lake.tags.set("d", "paper", 4, replace=True) == 3
    assert open_lake(lake.path).tags.version("d", "paper") == 4


def test_tags_are_listed_and_removed(lake: Lake) -> None:
    lake.tags.set("e", "b", 1)
    lake.tags.set("d", "v1.0", 2)
    lake.tags.set("d", "a", 1)
    listed = [(tag.dataset, tag.name, tag.version) for tag in lake.tags.list()]
    assert listed == [("d", "a", 1), ("d", "v1.0", 2), ("e", "b", 1)]
    lake.tags.remove("d", "a")
    assert [tag.name for tag in lake.tags.list("d")] == ["v1.0"]
    with pytest.raises(NotFoundError, match=r"expected one of v1\.0"):
        lake.tags.remove("d", "a")


@pytest.mark.parametrize(
    "name", ["", "12", "A", "../x", "a..b", "a/b", "a@b", "a\0", "é", "a" * 64]
)
def test_a_tag_s_name_is_refused(lake: Lake, name: str) -> None:
    with pytest.raises(InvalidNameError, match="tag: found"):
        lake.tags.set("d", name, 1)
