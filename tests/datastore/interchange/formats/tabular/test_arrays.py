from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from replaylake.datastore.interchange.formats.tabular.arrays import decode

_LISTS = pa.list_(pa.list_(pa.float64()))


@pytest.mark.parametrize(
    ("rows", "shape", "uneven"),
    [
        ([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], (2, 2, 2), [False, False]),
        # No row has a list inside, so nothing says how long these are.
        ([[], []], (2, 0, 0), [False, False]),
        ([[], [], [[1.0]]], (3, 0, 0), [False, False, True]),
    ],
)
def test_lists_of_lists_are_arrays(
    rows: list[list[list[float]]], shape: tuple[int, ...], uneven: list[bool]
) -> None:
    decoded = decode(pa.array(rows, _LISTS))
    assert isinstance(decoded.values, np.ndarray)
    assert decoded.values.shape == shape
    assert decoded.faults.get("shape", np.zeros(len(rows), bool)).tolist() == uneven
