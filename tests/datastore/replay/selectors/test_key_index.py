from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from replaylake.datastore.replay.selectors.key_index import find_keys

KEYS = st.lists(st.tuples(st.integers(0, 20), st.just(7)), unique=True)


def array(keys: list[tuple[int, int]]) -> np.ndarray:
    return np.array(keys, np.uint64).reshape(-1, 2)


@given(KEYS, KEYS)
def test_rows_are_found_where_they_are(
    wanted: list[tuple[int, int]], keys: list[tuple[int, int]]
) -> None:
    expected = [keys.index(key) if key in keys else -1 for key in wanted]
    assert find_keys(array(wanted), array(keys)).tolist() == expected


def test_half_a_key_is_not_enough() -> None:
    assert find_keys(array([(1, 2)]), array([(1, 3)])).tolist() == [-1]


def test_equal_keys_are_found_in_place() -> None:
    keys = array([(3, 1), (1, 1), (2, 1)])
    assert find_keys(keys, keys.copy()).tolist() == [0, 1, 2]
