from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaylake.datastore.storage.log.persistent_map import PersistentMap

KEYS = st.text("abcdef", min_size=1, max_size=2)
CHANGES = st.lists(st.dictionaries(KEYS, st.one_of(st.none(), st.integers()), max_size=4))


@given(st.dictionaries(KEYS, st.integers()), CHANGES)
def test_it_says_what_a_dict_would(
    base: dict[str, int], steps: list[dict[str, int | None]]
) -> None:
    shared, plain = PersistentMap(base), dict(base)
    earlier = []
    for changes in steps:
        earlier.append((shared, dict(plain)))
        shared = shared.with_changes(changes)
        plain.update({key: value for key, value in changes.items() if value is not None})
        plain = {key: value for key, value in plain.items() if changes.get(key, value) is not None}
        for key in {*plain, *changes}:
            assert shared.get(key) == plain.get(key)
            assert (key in shared) == (key in plain)
    for one, other in [*earlier, (shared, plain)]:
        assert one == other, "copies change nothing in what they were made of"
        assert (len(one), set(one)) == (len(other), set(other))
        assert sorted(one.values()) == sorted(other.values())
        assert dict(one.items()) == other


def test_many_changes_one_by_one() -> None:
    shared = PersistentMap[int]()
    for number in range(500):
        shared = shared.with_changes({str(number): number, str(number - 10): None})
    assert dict(shared) == {str(number): number for number in range(490, 500)}
    assert 480 not in shared
    with pytest.raises(KeyError, match="480"):
        shared["480"]


def test_order_is_that_of_arrival() -> None:
    shared = PersistentMap({"b": 1}).with_changes({"c": 2}).with_changes({"a": 3, "b": None})
    assert list(shared) == ["c", "a"]


def test_one_that_is_shared_already_is_not_copied() -> None:
    shared = PersistentMap({"a": 1})
    assert PersistentMap.from_mapping(shared) is shared
    assert shared.with_changes({}) is shared
