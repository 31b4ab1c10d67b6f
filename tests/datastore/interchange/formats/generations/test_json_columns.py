"""JSON columns: rows of lines that hold column after column, found without reading a whole line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.generations import json_columns as module
from replaylake.datastore.interchange.formats.generations.json_columns import (
    ColumnFile,
    begins_with_columns,
    read_first_columns,
)
from replaylake.datastore.interchange.sources.source import SourceFile, find_source

# Characters that structure depends on, and one of several bytes.
_TEXT = st.text(st.sampled_from('a"\\{}[],:\n é'), max_size=12)
_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def _lines(draw: st.DrawFn) -> list[dict[str, list[Any]]]:
    names = draw(st.lists(_TEXT, min_size=1, max_size=3, unique=True))
    num = draw(st.integers(0, 3))
    column = st.lists(_VALUE, min_size=num, max_size=num)
    return draw(st.lists(st.fixed_dictionaries(dict.fromkeys(names, column)), max_size=3))


def _file(path: Path, text: str) -> SourceFile:
    path.write_text(text, encoding="utf-8", newline="")
    return find_source([path]).files[0]


@given(lines=_lines(), block=st.integers(1, 9), ascii_only=st.booleans(), ends=st.booleans())
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_rows_are_those_of_the_objects(
    tmp_path: Path,
    lines: list[dict[str, list[Any]]],
    block: int,
    ascii_only: bool,
    ends: bool,
) -> None:
    texts = [json.dumps(line, ensure_ascii=ascii_only) for line in lines]
    file = _file(tmp_path / "log.jsonl", "\n".join(texts) + ("\n" if ends or not lines else ""))
    with pytest.MonkeyPatch.context() as patch, ColumnFile(file) as columns:
        patch.setattr(module, "_BLOCK_BYTES", block)
        found = list(columns.lines())
        assert [line.fault for line in found] == [None] * len(lines)
        for line, expected in zip(found, lines, strict=True):
            num = len(next(iter(expected.values())))
            rows = [columns.read_row(line, i) for i in range(num)]
            assert rows == [{name: v[i] for name, v in expected.items()} for i in range(num)]


@pytest.mark.parametrize(
    "text",
    ["[1]", '{"a": [1}', '{"a": [1', '{"a": ["1', '{"a" [1]}', '{"a": [1]} 2', '{"a": [1] "b"}'],
)
def test_a_damaged_line_does_not_hide_the_next_one(tmp_path: Path, text: str) -> None:
    # A text that does not end in its line ends in a later one.
    lines = [text] if text.endswith('"1') else [text, '{"a": [7]}']
    with ColumnFile(_file(tmp_path / "log.jsonl", "\n".join(lines))) as columns:
        first, *rest = columns.lines()
        assert first.fault is not None
        assert "expected an object of columns" in first.fault
        assert [columns.read_row(line, 0) for line in rest] == [{"a": 7}] * (len(lines) - 1)


def test_a_row_that_is_too_long_is_refused_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_ROW_BYTES", 100)
    file = _file(tmp_path / "log.jsonl", json.dumps({"a": ["x" * 99, "y"], "b": [1, 2]}))
    with ColumnFile(file) as columns:
        (line,) = columns.lines()
        with pytest.raises(SourceInvalidError, match="found 102 bytes, expected at most 0 MiB"):
            columns.read_row(line, 0)
        assert columns.read_row(line, 1) == {"a": "y", "b": 2}


def test_the_first_line_alone_tells_the_columns(tmp_path: Path) -> None:
    file = _file(tmp_path / "log.jsonl", '{"a": ["x", "y"], "b": []}\n{"a": [')
    assert begins_with_columns(file, ("a", "z"))
    assert not begins_with_columns(file, ("b",))
    assert read_first_columns(file) == ("a", "b")
    messages = _file(tmp_path / "chat.jsonl", '{"messages": [{"role": "user"}]}')
    assert not begins_with_columns(messages, ("messages",))
