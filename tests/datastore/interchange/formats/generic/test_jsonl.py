from __future__ import annotations

import bz2
import csv
import io
import json
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from replaylake.datastore.errors import ReplayLakeError, SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.formats.generic import jsonl
from replaylake.datastore.interchange.formats.generic.jsonl import (
    JsonlFormat,
    is_shallow,
    json_chunks,
)
from replaylake.datastore.interchange.formats.generic.text_rows import csv_lines, json_lines
from replaylake.datastore.interchange.sources.source import find_source


def test_a_packed_file_is_read_as_it_unpacks(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl.bz2"
    path.write_bytes(bz2.compress(b'{"a": 1}\n{"a": 2}\n'))
    (chunk,) = json_chunks(find_source([path]).files[0])
    assert chunk.table.to_pydict() == {"a": [1, 2]}


@pytest.mark.parametrize("depth", [80, 1000, 100_000])
@pytest.mark.parametrize("text", ["[", '{"a": ', "[\n", '{"]]]]\\"]]]]": ['])
def test_deep_nesting_is_one_clear_line(tmp_path: Path, depth: int, text: str) -> None:
    """Of which Arrow's parser would overflow the stack, and end the process."""
    path = tmp_path / "log.jsonl"
    closing = "".join({"[": "]", "{": "}"}.get(c, "") for c in reversed(text.replace("]", "")))
    path.write_text('{"observation": ' + text * depth + "1" + closing * depth + "}\n")
    files = find_source([path]).files
    with pytest.raises(SourceInvalidError):
        list(JsonlFormat().read(files, ReadOptions()))


@pytest.mark.parametrize("text", ["null", "null\n", ' null\n{"a": 1}\n', "nullnull"])
def test_a_block_that_begins_with_null_is_refused_by_its_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    with pytest.raises(SourceInvalidError, match=r"log\.jsonl line 1: found"):
        list(json_chunks(find_source([path]).files[0]))


def test_brackets_within_texts_are_no_depth() -> None:
    assert is_shallow(b'{"a": "' + b"[" * 5000 + b'\\"[[["}')
    assert is_shallow(b'{"a": [[1]]}\n' * 3000)
    assert not is_shallow(b'{"a": ' + b"[" * 5000)


def test_damaged_files_are_read_or_refused(tmp_path: Path) -> None:
    row = (
        b'{"episode_id": "a", "observation": [1.5, 2], "action": 1, "reward": 0.5, "o": {"x": 1}}\n'
    )
    whole = row * 40
    rng = np.random.default_rng(0)
    path = tmp_path / "log.jsonl"
    for number in range(150):
        data = bytearray(whole)
        if number % 2:
            data = data[: rng.integers(1, len(data))]
        for at in rng.integers(0, len(data), 3):
            data[at] = rng.integers(0, 256)
        path.write_bytes(data)
        with suppress(ReplayLakeError):
            list(JsonlFormat().read(find_source([path]).files, ReadOptions()))


def test_written_lines_are_what_json_reads() -> None:
    """Against the standard library: numbers to the last bit, texts, nulls and nesting."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**64, 4000, dtype=np.uint64).view(np.float64)
    floats = bits[np.isfinite(bits)]
    num = len(floats)
    texts = ['a"b', "c\\d", "e\nf", "g\x00h", "ü", "", None, "x"]
    table = pa.table(
        {
            "float": floats,
            "whole": np.arange(num, dtype=np.float64),
            "single": rng.normal(size=num).astype(np.float32),
            "text": pa.array([texts[i % 8] for i in range(num)]),
            "list": pa.array([[float(i), None] if i % 3 else None for i in range(num)]),
            "object": pa.array(
                [{"u": i, "v": [{"w": "x"}]} if i % 2 else None for i in range(num)]
            ),
            "flag": pa.array([(True, False, None)[i % 3] for i in range(num)]),
        }
    )
    rows = [json.loads(line) for line in bytes(json_lines(table)).splitlines()]
    assert rows == table.to_pylist()
    assert isinstance(rows[1]["whole"], float)


def test_csv_lines_are_what_the_standard_library_reads() -> None:
    texts = ['a"b', "c,d", "e\nf", " g", "ü", "", "x"]
    table = pa.table({"t": texts, "v": [[0.1, i] for i in range(7)], "n": [None, 1, 2, 3, 4, 5, 6]})
    read = list(csv.reader(io.StringIO(bytes(csv_lines(table)).decode(), newline="")))
    assert [row[0] for row in read] == texts
    assert [json.loads(row[1]) for row in read] == table["v"].to_pylist()
    assert [row[2] for row in read] == ["", "1", "2", "3", "4", "5", "6"]


@pytest.mark.parametrize("line", ['{"a": 1, "a": 2}', '{"b": {"a": 1, "a": 2}}'])
def test_a_key_twice_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(SourceInvalidError, match=r"line 1.*the key .a. twice"):
        list(json_chunks(find_source([path]).files[0]))


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "_MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(jsonl, "_BLOCK_BYTES", 100)
    path = tmp_path / "log.jsonl"
    path.write_text('{"a": 1}\n' + '{"a": [' + "1, " * 1000 + "1]}\n")
    with pytest.raises(SourceInvalidError, match=r"line 2: found a line of more than 1,000 bytes"):
        list(json_chunks(find_source([path]).files[0]))
    path.write_text('{"a": 1}\n{"a": ' + " " * 800 + "2}")
    (chunk,) = json_chunks(find_source([path]).files[0])
    assert chunk.table.column("a").to_pylist() == [1, 2]
