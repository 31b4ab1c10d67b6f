"""Cells of digits that are names, such as 007: found as by the pattern that defines them."""

import re

import numpy as np
import pyarrow as pa

from replaylake.datastore.interchange.formats.generic.csv import _NOT_A_NUMBER, _has_names


def test_cells_are_names_where_the_pattern_says_so() -> None:
    cells = ["0", "-", "+", "-0", "+0", "00", "-00", "+07", "0x1", "0X", "10", "-10", "0.5", "-0.5"]
    cells += ["007", "1", "100", "", "0 ", "+1", "--0", "0-1"]
    pattern = re.compile(_NOT_A_NUMBER)
    for cell in cells:
        for column in ([cell], ["5", cell], [cell, "5"], [None, cell, "12"]):
            found = _has_names(pa.array(column, pa.string()))
            assert found == bool(pattern.search(cell)), column
    # Several, sliced, and beside numbers alone.
    rng = np.random.default_rng(0)
    for _ in range(200):
        some = rng.choice(cells, 6).tolist()
        array = pa.array(some, pa.string())[1:5]
        assert _has_names(array) == any(pattern.search(cell) for cell in some[1:5])
    assert not _has_names(pa.array([], pa.string()))
