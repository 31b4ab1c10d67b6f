from __future__ import annotations

import contextlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.rlds.tfrecord import parse_example, records
from replaylake.datastore.interchange.sources.source import SourceFile, find_source


def written(folder: Path, data: bytes, name: str = "x.tfrecord") -> SourceFile:
    (folder / name).write_bytes(data)
    return find_source([folder / name]).files[0]


def test_records_come_in_order(tf: Any, tmp_path: Path) -> None:
    file = written(tmp_path, tf.frame(b"one") + tf.frame(b"") + tf.frame(b"three" * 1000))
    assert list(records(file)) == [b"one", b"", b"three" * 1000]


@pytest.mark.parametrize("packed", [True, False])
def test_an_example_is_read_packed_and_unpacked(tf: Any, tmp_path: Path, packed: bool) -> None:
    file = written(tmp_path, b"any")
    integers = [0, 1, 127, 128, 300, -1, 2**63 - 1, -(2**63)]
    data = tf.example(
        {
            "texts": tf.feature([b"a", b"", "\u00e9".encode()]),
            "floats": tf.feature([0.5, -1.25, 3e38], packed=packed),
            "integers": tf.feature(integers, packed=packed),
            "none": b"",
        }
    )
    found = parse_example(data, file, 0)
    assert found["texts"] == [b"a", b"", "\u00e9".encode()]
    np.testing.assert_array_equal(found["floats"], np.asarray([0.5, -1.25, 3e38], np.float32))
    assert np.asarray(found["integers"]).tolist() == integers
    assert np.asarray(found["integers"]).dtype == np.int64
    assert found["none"] == []


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_any_integers_survive(tf: Any, values: list[int]) -> None:
    file = SourceFile.__new__(SourceFile)
    found = parse_example(tf.example({"x": tf.feature(values)}), file, 0)["x"]
    assert np.asarray(found).tolist() == values


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda d: d[:-1], "data whose checksum differs"),
        (lambda d: d[:-6], "6 of 8 bytes"),
        (lambda d: d[: 12 + 8 + 4 + 5], "5 bytes of a header of 12"),
        (lambda d: d[:24] + b"\1" + d[25:], "a length whose checksum differs"),
        (lambda d: d[:36] + b"X" + d[37:], "data whose checksum differs"),
    ],
)
def test_a_torn_record_is_named(tf: Any, tmp_path: Path, damage: Any, found: str) -> None:
    file = written(tmp_path, damage(tf.frame(b"12345678") + tf.frame(b"abcdefgh")))
    with pytest.raises(SourceInvalidError, match=rf"x\.tfrecord record 1: found {found}"):
        list(records(file))


def test_a_declared_length_takes_no_memory(tf: Any, tmp_path: Path) -> None:
    length = struct.pack("<Q", 1 << 62)
    file = written(tmp_path, length + tf.masked(length) + b"few bytes")
    with pytest.raises(
        SourceInvalidError, match="record 0: found 9 of 4,611,686,018,427,387,904 bytes"
    ):
        list(records(file))


@pytest.mark.parametrize(
    "build",
    [
        lambda tf: b"\xff" * 12,  # a tag without an end
        lambda tf: tf.field(
            1, tf.field(1, tf.field(1, b"k") + b"\x12\x7f")
        ),  # longer than the rest
        lambda tf: b"\x0b",  # a group
        lambda tf: tf.example({"x": tf.field(2, tf.field(1, b"abc"))}),  # floats of three bytes
        lambda tf: tf.example(
            {"x": tf.field(3, tf.field(1, b"\x80"))}
        ),  # an integer without an end
        lambda tf: tf.example({"x": tf.field(3, tf.field(1, b"\xff" * 11 + b"\0"))}),
        lambda tf: tf.field(1, tf.field(1, tf.field(1, b"\xff\xfe"))),  # a name that is no text
    ],
)
def test_what_is_no_example_is_refused(tf: Any, tmp_path: Path, build: Any) -> None:
    data = build(tf)
    file = written(tmp_path, tf.frame(data))
    with pytest.raises(
        SourceInvalidError,
        match=r"x\.tfrecord record 7: found data that is not a tf\.train\.Example",
    ):
        parse_example(data, file, 7)


@given(st.binary(max_size=200))
def test_any_bytes_are_an_example_or_refused(data: bytes) -> None:
    file = SourceFile.__new__(SourceFile)
    object.__setattr__(file, "name", "x.tfrecord")
    with contextlib.suppress(SourceInvalidError):
        parse_example(data, file, 0)
