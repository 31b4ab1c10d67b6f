"""JSON values of a file one by one: arrays, lines, values over many lines; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.generations import json_values as module
from replaylake.datastore.interchange.formats.generations.json_values import (
    dump_json,
    dump_metadata,
    json_values,
)
from replaylake.datastore.interchange.sources.source import SourceFile, find_source

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(), ANYTHING, max_size=3)


def a_file(path: Path, content: str | bytes) -> SourceFile:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return find_source([path]).files[0]


def values(file: SourceFile, **options: Any) -> list[Any]:
    return [found.value for found in json_values(file, **options)]


@pytest.mark.slow
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(objects=st.lists(OBJECTS, min_size=1, max_size=5), indent=st.sampled_from([None, 1]))
@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_arrays_lines_and_blocks_of_any_size_give_the_same(
    objects: list[Any],
    indent: int | None,
    block: int,
    tmp_path: Path,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK_BYTES", block)
        array = a_file(tmp_path / "a.json", json.dumps(objects, indent=indent))
        lines = "\n".join(json.dumps(value, indent=indent) for value in objects)
        assert values(array) == objects
        assert values(a_file(tmp_path / "l.jsonl", lines)) == objects


@given(value=ANYTHING)
def test_dumped_is_text_and_the_same_value(value: Any) -> None:
    text = dump_json(value)
    assert text.encode()
    assert json.loads(text) == value


def test_lines_are_counted(tmp_path: Path) -> None:
    file = a_file(tmp_path / "a.json", '[\n {"a": 1},\n\n {"a":\n 2}, {"a": 3}\n]\n')
    assert [(v.number, v.line) for v in json_values(file)] == [(0, 2), (1, 4), (2, 5)]


def test_a_mark_of_byte_order_and_no_elements(tmp_path: Path) -> None:
    assert values(a_file(tmp_path / "b.json", b'\xef\xbb\xbf{"a": 1}')) == [{"a": 1}]
    assert values(a_file(tmp_path / "e.json", " [ ] ")) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1}\n{"a": }', "line 2: found expecting value"),
        ('{"a": 1}\n{"a": "cut', "line 2: found unterminated string"),
        ('[{"a": 1}, {"a": 2}', "the end of the file inside its array"),
        ('[{"a": 1} {"a": 2}]', "found '{' after an element"),
        ('[{"a": 1}] {"a": 2}', "found '{' after the array"),
        ('{"a": 1, "a": 2}', "found the key 'a' twice in one object"),
        ('{"a": NaN}', "found NaN, which is not JSON"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "expected unambiguous JSON"),
        (b'{"a": "\xff\xfe"}', "bytes that are not UTF-8"),
        ('{"a": 1}\n\x00', "line 2: found expecting value"),
    ],
)
def test_what_is_refused(content: str | bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(
        SourceInvalidError, match=r"f\.json in the value that begins in line"
    ) as error:
        values(a_file(tmp_path / "f.json", content))
    assert message in str(error.value)


def test_a_value_without_end_is_not_read_whole(tmp_path: Path) -> None:
    file = a_file(tmp_path / "f.json", '{"a": "' + "x" * (4 << 20) + '"}')
    with pytest.raises(SourceInvalidError, match="more than 1,000,000 characters"):
        values(file, max_chars=1_000_000)
    assert len(values(file)[0]["a"]) == 4 << 20


def test_an_error_early_in_a_large_file_reads_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK_BYTES", 100)
    file = a_file(tmp_path / "f.json", '{"a": oops, "b": 1}' + " " * 100_000)
    reads = []
    monkeypatch.setattr(
        module._TextStream,
        "_read_more",
        lambda self, n=0, more=module._TextStream._read_more: reads.append(n) or more(self, n),
    )
    with pytest.raises(SourceInvalidError, match="expecting value"):
        values(file)
    assert len(reads) == 1


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_resumes_after_a_value_with_a_fault(tmp_path: Path, block: int) -> None:
    content = '{"a": 1}\n{"a": [2\n  {"b": 3}\n]\n{"a": 4}\nfive\n{"a": NaN}\r\n{"a": 6}\n{"a": 7'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK_BYTES", block)
        found = list(json_values(a_file(tmp_path / "l.jsonl", content), resumes=True))
    assert [(one.number, one.line, one.value, one.fault is None) for one in found] == [
        (0, 1, {"a": 1}, True),
        (1, 2, None, False),
        (2, 5, {"a": 4}, True),
        (3, 6, None, False),
        (4, 7, None, False),
        (5, 8, {"a": 6}, True),
        (6, 9, None, False),
    ]


def test_a_fault_in_an_array_is_the_last_value(tmp_path: Path) -> None:
    file = a_file(tmp_path / "a.json", '[{"a": 1},\n{"a": }, {"a": 2}]')
    found = list(json_values(file, resumes=True))
    assert [(one.line, one.value, one.fault is None) for one in found] == [
        (1, {"a": 1}, True),
        (2, None, False),
    ]


def test_metadata_has_text_for_numbers_that_json_lacks() -> None:
    value = {"a": [float("nan"), float("-inf")], "b": "\ud83d"}
    assert json.loads(dump_metadata(value)) == {"a": ["NaN", "-Infinity"], "b": "\ud83d"}
