"""Lists of numbers as arrays: the same values as `json` reads, or the line is left to it."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from replaylake.datastore.interchange.formats.generations import number_lists
from replaylake.datastore.interchange.formats.generations.number_lists import (
    map_ahead,
    parse_lines,
)


def _is_same(value: Any, expected: Any) -> bool:
    """Whether a value is bit for bit what `json` reads, with some lists as arrays."""
    if isinstance(value, np.ndarray):
        known = np.asarray(expected)
        return value.dtype == known.dtype and value.tobytes() == known.tobytes()
    if isinstance(value, dict):
        return [*value] == [*expected] and all(_is_same(value[key], expected[key]) for key in value)
    if isinstance(value, list):
        return len(value) == len(expected) and all(map(_is_same, value, expected))
    return type(value) is type(expected) and repr(value) == repr(expected)


def _check(texts: list[bytes]) -> int:
    """Compare lines with `json`; return how many were not left to it."""
    values = parse_lines(texts)
    for value, text in zip(values, texts, strict=True):
        if value is not None:
            assert _is_same(value, json.loads(text))
    return sum(value is not None for value in values)


def _line(numbers: str, **fields: Any) -> bytes:
    """Return a line with a list of numbers, as text, and further fields after it."""
    rest = "".join(f", {json.dumps(key)}: {json.dumps(value)}" for key, value in fields.items())
    return f'{{"ids": [{numbers}]{rest}}}'.encode()


@pytest.mark.parametrize(
    "numbers",
    [
        ", ".join(map(str, range(40))),
        ",".join(map(str, range(40))),
        ", ".join(["0", "9", "12345678", "99999999", "1000000"] * 9),
        ",".join(["5", "12345678", "10"] * 9),
        ", ".join(["0", "99999999", "123456789"] * 9),
        ", ".join(["-0", "-1", str(2**63 - 1), str(-(2**63))] * 9),
        ", ".join(["-0.0", "0.0", "-1.1920928955078125e-07", "1e-07", "2E+5", "1e22"] * 9),
        ", ".join(["0.1", "5e-324", "1.7976931348623157e308", "123456789012345678.5"] * 9),
        ", ".join(["1.0", "0.0"] * 30),
        ",".join(["0.0", "1.0", "1.0"] * 20),
        ", ".join(["0", "1"] * 40),
        ",".join(["1", "0", "0"] * 40),
        " " + ", ".join(["1.5"] * 30),
    ],
)
def test_numbers_are_those_of_json(numbers: str) -> None:
    texts = [_line(numbers, text="[1, 2]"), _line("7"), _line(numbers, nested=[[1, 2], [3]])]
    assert _check(texts) == 3
    assert isinstance(parse_lines(texts)[0]["ids"], np.ndarray)


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            "007",
            "-01",
            "0x1F",
            "1.",
            "1 .0",
            ".5",
            "-.5",
            "1.e5",
            "+1",
            "1e",
            "--1",
            "1-2",
            "1 2",
            "",
            " ",
        ),
        *("nan", "inf", "NaN", "-Infinity", "1.2.3", "1e5e6", "1e5.2", "1_000", "true", "null"),
        *(
            '"1"',
            "[1]",
            "{}",
            str(2**63),
            str(2**64),
            "10" * 200,
            "0e",
            "00.5",
            "1e0.5",
            "\t",
        ),
    ],
)
@pytest.mark.parametrize("others", [("3", "4"), ("3.5", "0.25")])
def test_what_json_refuses_or_reads_otherwise_is_left_to_it(
    wrong: str, others: tuple[str, str]
) -> None:
    """Numbers of two kinds in one list, too; the lines beside it are read."""
    texts = [
        _line(", ".join([*others * 12, wrong, *others * 12])),
        _line(", ".join([wrong, *others * 12])),
        _line(", ".join([*others * 12, wrong])),
    ]
    beside = _line(", ".join(others * 20))
    for text in texts:
        first, value, last = parse_lines([beside, text, beside])
        assert isinstance(first["ids"], np.ndarray)
        assert isinstance(last["ids"], np.ndarray)
        assert value is None or isinstance(value["ids"], list)
        _check([text])


def test_lists_in_texts_are_texts() -> None:
    numbers = ", ".join(map(str, range(40)))
    texts = [
        _line("1", text=f"see [{numbers}] there"),
        _line(numbers, text=f"see [{numbers}] there"),
        _line(numbers, text=f'"[{numbers}]", \\'),
        _line(numbers, text="[1] Smith et al. [2] and others, of which nothing is a number here"),
        b'{"text": "\\[' + numbers.encode() + b']"}',
        b'{"text": "\\u00[' + numbers.encode() + b']41"}',
    ]
    assert [value is not None for value in parse_lines(texts)] == [False] * 3 + [True] + [False] * 2
    assert _check(texts) == 1


def test_lists_without_an_end_cost_one_pass() -> None:
    """Not one for each of them, which would take minutes."""
    text = b'{"ids": ' + (b"[" + b"1" * 60) * 200_000
    assert parse_lines([text]) == [None]


@pytest.mark.parametrize(
    ("text", "is_read"),
    [
        (b'{"a": "\\ud83d", "a": 1, "b": NUMBERS, "b": 2}', True),
        (b'{"a": "\xff", "b": NUMBERS}', False),
        (b'{"a": "NaN", "b": NUMBERS}', False),
        (b'{"a": NaN, "b": NUMBERS}', False),
        (b'{"a": -Infinity, "b": NUMBERS}', False),
        (b'{"a": -NUMBERS}', False),
        (b'{"a": NUMBERSNUMBERS}', False),
        (b'{"a": NUMBERS', False),
        (b"NUMBERS", True),
        (b"\xef\xbb\xbfNUMBERS", True),
        (b"N" + b"NUMBERS", False),
        (b"[" * 5_000 + b"NUMBERS" + b"]" * 5_000, False),
        (b'{"a": ' + str(10**30).encode() + b', "b": NUMBERS}', True),
        (b'{"a": "\x00", "b": NUMBERS}', False),
        ('{"b": NUMBERS}'.encode("utf-16"), True),
    ],
)
def test_the_rest_of_a_line_is_read_by_json(text: bytes, is_read: bool) -> None:
    line = text.replace(b"NUMBERS", b"[" + b", ".join(b"%d" % i for i in range(40)) + b"]")
    assert _check([line]) == is_read or text.startswith(b"\xff\xfe")


_NUMBERS = st.one_of(
    st.lists(st.integers(0, 10**8 - 1), max_size=60),
    st.lists(st.integers(-(2**65), 2**65), max_size=30),
    st.lists(st.floats(), max_size=30),
    st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=30),
    st.lists(st.sampled_from([0, 1]), max_size=60),
    st.lists(st.sampled_from([0.0, 1.0, -0.0]), max_size=60),
    st.lists(st.one_of(st.integers(0, 9), st.floats(0, 1)), max_size=30),
)
_VALUES = st.recursive(
    st.one_of(_NUMBERS, st.text(max_size=9), st.none(), st.booleans(), st.integers(), st.floats()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.lists(_VALUES, max_size=5), st.sampled_from([(", ", ": "), (",", ":")]), st.booleans())
def test_any_values_are_those_of_json(
    values: list[Any], separators: tuple[str, str], ascii_only: bool
) -> None:
    texts = [json.dumps(one, separators=separators, ensure_ascii=ascii_only) for one in values]
    _check([text.encode("utf-8", "surrogatepass") for text in texts])


@given(
    st.lists(st.integers(-(2**31), 2**31), min_size=12, max_size=40),
    st.lists(st.tuples(st.integers(0, 400), st.integers(32, 126)), max_size=3),
)
@example([10] * 30, [(9, ord("."))])
def test_damaged_lines_are_those_of_json(ids: list[int], damage: list[tuple[int, int]]) -> None:
    """A line is read only where `json` reads it, and then with the same values."""
    text = bytearray(
        json.dumps({"ids": [ids], "text": "[1, 2]", "flags": [[0.0, 1.0] * 20]}).encode()
    )
    for place, byte in damage:
        text[place % len(text)] = byte
    _check([bytes(text)])


def test_lists_of_many_lines_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(number_lists, "_CACHED_BYTES", 1 << 10)
    rng = np.random.default_rng(5)
    texts = []
    for _ in range(60):
        ids = rng.integers(0, 150_000, rng.integers(1, 90)).tolist()
        log_probs = rng.standard_normal(rng.integers(1, 90)).tolist()
        texts.append(
            json.dumps({"ids": ids, "flags": [[1.0] * len(ids)], "log": log_probs}).encode()
        )
    assert _check(texts) == 60


def test_results_come_in_order_and_few_are_held() -> None:
    """The blocks are read no further ahead than threads need."""
    read: list[int] = []

    def blocks() -> Iterator[int]:
        for number in range(20):
            read.append(number)
            yield number

    results = map_ahead(lambda number: number * number, blocks())
    assert [next(results), next(results)] == [0, 1]
    assert len(read) <= 5
    assert [*results] == [number * number for number in range(2, 20)]


def test_an_error_ends_the_threads() -> None:
    def fail(number: int) -> float:
        return math.sqrt(-number)

    with pytest.raises(ValueError, match=r"math domain error|nonnegative"):
        [*map_ahead(fail, range(5))]
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("replaylake-parse")]
