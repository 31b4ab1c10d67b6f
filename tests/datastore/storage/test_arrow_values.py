"""Arrow values: the same numbers as pyarrow's own conversions give, without what those import."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from replaylake.datastore.errors import SchemaMismatchError
from replaylake.datastore.storage.arrow_values import hash_texts, numbers, row_numbers, scalar

KINDS = [pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.bool_()]


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_every_type(kind: pa.DataType) -> None:
    array = pa.array([0, 1, 0, 1, 1], pa.int16()).cast(kind)
    for column in (array, array[1:4], array[:0], pa.chunked_array([array[:2], array[3:]])):
        found = numbers(column)
        assert found.dtype == kind.to_pandas_dtype()
        assert found.tolist() == column.to_pylist()


def test_numbers_in_one_piece_are_no_copy() -> None:
    values = np.arange(5, dtype=np.float32)
    assert np.shares_memory(numbers(pa.array(values)), values)


@pytest.mark.parametrize(("kind", "unknown"), [(pa.float32(), np.nan), (pa.bool_(), False)])
def test_what_is_not_known(kind: pa.DataType, unknown: Any) -> None:
    column = pa.array([1, None, 0], pa.int16()).cast(kind)
    np.testing.assert_equal(numbers(column).tolist(), [1, unknown, 0])
    np.testing.assert_equal(numbers(pa.nulls(2, kind)).tolist(), [unknown] * 2)
    with pytest.raises(
        SchemaMismatchError, match="int64: found 1 nulls in 2 rows, expected a value"
    ):
        numbers(pa.array([1, None]))


def test_scalars_and_row_numbers() -> None:
    assert scalar(-1, np.int64).equals(pa.scalar(-1, pa.int64()))
    every_other = np.arange(10)[::2]
    assert row_numbers(every_other).to_pylist() == [0, 2, 4, 6, 8]
    assert row_numbers(every_other[:0]).to_pylist() == []


def test_equal_texts_alone_have_equal_hashes() -> None:
    rng = np.random.default_rng(0)
    texts = [
        bytes(rng.integers(33, 127, n, np.uint8)).decode() for n in range(40) for _ in range(50)
    ]
    # Of one word, and of one word more; the same but for the last byte, and but for the length.
    texts += ["", "\x01", "\x01" * 2, "a" * 8, "a" * 9, "a" * 7 + "b", "e/1", "e/10", "e/01"]
    texts = list(dict.fromkeys(texts))
    for kind in (pa.string(), pa.large_string()):
        array = pa.array(texts, kind)
        hashes = hash_texts(array)
        assert (hashes.dtype, hashes.shape) == (np.uint64, (len(texts),))
        assert len({*hashes.tolist()}) == len(texts)
        # Wherever a text is in memory, also behind others and at the end.
        np.testing.assert_array_equal(hash_texts(array[7:]), hashes[7:])
        order = rng.permutation(len(texts))
        np.testing.assert_array_equal(hash_texts(array.take(row_numbers(order))), hashes[order])
    assert hash_texts(pa.array(["", None, ""])).tolist() == hash_texts(pa.array([""] * 3)).tolist()
    assert len(hash_texts(pa.array([], pa.string()))) == 0


def test_pandas_is_not_imported() -> None:
    code = (
        "import sys, numpy as np, pyarrow as pa\n"
        "from replaylake.datastore.storage.arrow_values import numbers, row_numbers, scalar\n"
        "rows = row_numbers(np.arange(3))\n"
        "numbers(rows.take(rows).cast(pa.float32()).is_valid())\n"
        "scalar(1, np.int64)\n"
        "sys.exit('pandas' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_pandas_stays_unloaded_until_it_is_asked_for() -> None:
    code = (
        "import sys, numpy as np, pyarrow as pa\n"
        "from replaylake.datastore.storage.arrow_values import keep_pandas_unloaded\n"
        "keep_pandas_unloaded()\n"
        "assert 'Pandas' not in str([type(one) for one in sys.meta_path])\n"
        "texts = pa.array(['a', None])\n"
        "assert texts.to_numpy(zero_copy_only=False).tolist() == ['a', None]\n"
        "assert np.asarray(pa.array(np.ones(2))).tolist() == [1, 1]\n"
        "assert pa.array([np.nan], from_pandas=True).null_count == 1\n"
        "assert 'pandas' not in sys.modules\n"
        "assert texts.to_pandas().isna().tolist() == [False, True]\n"
        "import pandas\n"
        "assert pa.array(pandas.Series([1.5, None])).null_count == 1\n"
        "keep_pandas_unloaded()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_freed_memory_goes_back_to_the_system() -> None:
    code = (
        "import pyarrow as pa, pyarrow.parquet as pq\n"
        "from replaylake.datastore.storage.arrow_values import return_freed_memory\n"
        "return_freed_memory()\n"
        "assert pa.default_memory_pool().backend_name == 'system'\n"
        "values = pa.array(range(1000))\n"
        "assert pa.system_memory_pool().bytes_allocated() > 0\n"
        "del values\n"
        "assert pa.total_allocated_bytes() == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
