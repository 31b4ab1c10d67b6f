from __future__ import annotations

import gzip
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from replaylake.datastore.errors import (
    ConfigInvalidError,
    ReplayLakeError,
    SourceInvalidError,
)
from replaylake.datastore.interchange.formats.detect import find_format
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.formats.generic import csv as csv_format
from replaylake.datastore.interchange.formats.generic.csv import CsvFormat, CsvTables
from replaylake.datastore.interchange.sources import compression
from replaylake.datastore.interchange.sources.source import find_source


def _table(path: Path, text: str | bytes, *as_text: str) -> pa.Table:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    files = find_source([path]).files
    return pa.concat_tables(
        [chunk.table for chunk in CsvTables(files, as_text).chunks()], promote_options="permissive"
    )


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("bom", ["", "\ufeff"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_delimiters_marks_and_newlines(
    tmp_path: Path, delimiter: str, bom: str, newline: str
) -> None:
    rows = [["id", "x", "note"], ["007", " 1.5", '"a\nb"'], ["7", "2", '"say ""hi"""']]
    text = bom + newline.join(delimiter.join(row) for row in rows) + newline
    table = _table(tmp_path / "log.csv", text)
    assert table.to_pydict() == {"id": ["007", "7"], "x": [1.5, 2.0], "note": ["a\nb", 'say "hi"']}


def test_types_are_those_of_all_cells(tmp_path: Path) -> None:
    text = 'i,f,b,t,n,l,o\n1,1,true,x,,[1],"{""a"": 1}"\n2,.5,false,2,,[2],"{""a"": 2}"\n'
    table = _table(tmp_path / "log.csv", text)
    kinds = [str(field.type) for field in table.schema]
    assert kinds[:5] == ["int64", "double", "bool", "string", "null"]
    assert table["l"].to_pylist() == [[1], [2]]
    assert table["o"].to_pylist() == [{"a": 1}, {"a": 2}]


# The first block is what a column is taken for; here it turns out otherwise in a later one.
@pytest.mark.parametrize(
    ("first", "later", "expected"),
    [
        ("0.5", "late", ["0.5", "late"]),
        ("1", "1.5", [1, 1.5]),
        ("1", "007", ["1", "007"]),
        ("", "0.5", [None, 0.5]),
        ("0.5", "", [0.5, None]),
        ("[1, 2]", "[3, 4.5]", [[1, 2], [3.0, 4.5]]),
        ("[[1], [2]]", "", [[[1], [2]], None]),
    ],
)
def test_a_column_may_change_in_a_later_block(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    first: str,
    later: str,
    expected: list[object],
) -> None:
    monkeypatch.setattr(csv_format, "_BLOCK_BYTES", 1 << 10)
    monkeypatch.setattr(csv_format, "_SAMPLE_BYTES", 1 << 10)
    num = 400
    rows = "".join(f'{i},"{first}",{i}.5\n' for i in range(num))
    rows = rows.replace('""', "")
    path = tmp_path / "log.csv"
    path.write_text(f"n,x,y\n{rows}{num},{'' if not later else chr(34) + later + chr(34)},1.5\n")
    tables = CsvTables(find_source([path]).files)
    chunks = list(tables.chunks())
    assert len(chunks) > 3
    assert [chunk.first_row for chunk in chunks] == np.cumsum(
        [0, *(chunk.table.num_rows for chunk in chunks[:-1])]
    ).tolist()
    assert [n for chunk in chunks for n in chunk.table["n"].to_pylist()] == list(range(num + 1))
    assert [y for chunk in chunks for y in chunk.table["y"].to_pylist()][5] == 5.5
    values = [chunks[0].table["x"][0].as_py(), chunks[-1].table["x"][-1].as_py()]
    assert [str(v) for v in values] == [str(v) for v in expected]
    # Read again, it is the same in each chunk.
    assert [c.table.schema for c in tables.chunks()] == [c.table.schema for c in tables.chunks()]


def test_a_packed_file_is_read_as_it_unpacks(tmp_path: Path) -> None:
    path = tmp_path / "log.csv.gz"
    path.write_bytes(gzip.compress(b"a,b\n1,2.5\n"))
    assert next(CsvTables(find_source([path]).files).chunks()).table.to_pydict() == {
        "a": [1],
        "b": [2.5],
    }


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_row_is_placed_by_its_line(tmp_path: Path, newline: str, is_packed: bool) -> None:
    lines = ['"a', 'b",c', "1,x", '2,"two', "", 'lines"', "", '3,5" of it', "4,y", '5,"z ""q"""']
    data = newline.join([*lines, ""]).encode()
    path = tmp_path / ("log.csv.gz" if is_packed else "log.csv")
    path.write_bytes(gzip.compress(data) if is_packed else data)
    (chunk,) = CsvTables(find_source([path]).files).chunks()
    name = chunk.file.name
    assert [chunk.place(i) for i in range(5)] == [f"{name} line {n}" for n in (3, 4, 8, 9, 10)]
    assert chunk.part(2, chunk.table.slice(2, 2)).place(1) == f"{name} line 9"


def test_lines_count_over_blocks_and_are_unknown_with_huge_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_format, "_BLOCK_BYTES", 1 << 10)
    path = tmp_path / "log.csv"
    path.write_text("n,x\n" + "".join(f'{i},"a\nb"\n' for i in range(500)))
    chunks = list(CsvTables(find_source([path]).files).chunks())
    assert len(chunks) > 2
    last = chunks[-1]
    assert last.place(last.table.num_rows - 1) == "log.csv line 1000"
    monkeypatch.setattr(csv_format, "_BLOCK_BYTES", 1 << 20)
    path.write_text(f"n,x\n1,y\n2,{'z' * 200_000}\n")
    (chunk,) = CsvTables(find_source([path]).files).chunks()
    assert chunk.place(1) == "log.csv row 1"


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_is_refused_by_name(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes("\ufeffa,b\n1,2\n".encode(encoding))
    files = find_source([path]).files
    assert find_format("auto", files).name == "csv"
    with pytest.raises(SourceInvalidError, match=r"UTF-16.*iconv"):
        CsvFormat().read(files, ReadOptions())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"a,b\n1,2,3\n", "could not be read"),
        (b"a,b\n\xff\xfe\x00,2\n", "UTF-?8"),
        (b"1,2\n3,4\n", "names of the columns"),
        (b"a,a\n3,4\n", "twice"),
        (b"a,b\xff\n3,4\n", "UTF-8"),
    ],
)
def test_what_is_no_table_is_one_clear_line(tmp_path: Path, text: bytes, message: str) -> None:
    with pytest.raises(SourceInvalidError, match=message):
        _table(tmp_path / "log.csv", text)


@pytest.mark.slow
def test_damaged_files_are_read_or_refused(tmp_path: Path) -> None:
    """No other error than ours, whatever bytes come."""
    rows = b"".join(b'%d,0.5,"[1, %d]","{""a"": 1}",true\n' % (i, i) for i in range(50))
    whole = b"episode_id,x,action,o,terminated\n" + rows
    rng = np.random.default_rng(0)
    path = tmp_path / "log.csv"
    for number in range(150):
        data = bytearray(whole)
        if number % 2:
            data = data[: rng.integers(1, len(data))]
        for at in rng.integers(0, len(data), 3):
            data[at] = rng.integers(0, 256)
        path.write_bytes(data)
        files = find_source([path]).files
        with suppress(ReplayLakeError):
            list(CsvFormat().read(files, ReadOptions(mapping={"observation": "x", "reward": "x"})))


def test_lists_of_flags_are_lists_of_flags(tmp_path: Path) -> None:
    table = _table(tmp_path / "a.csv", 'mask,x\n"[true,false]",1\n"[true,true]",2\n')
    assert table.column("mask").to_pylist() == [[True, False], [True, True]]


_BROKEN = """
import random, sys, threading
from pathlib import Path
from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.generic.csv import CsvTables
from replaylake.datastore.interchange.sources.source import find_source

files = find_source([Path(sys.argv[1])]).files
try:
    for _ in CsvTables(files).chunks():
        pass
except SourceInvalidError as error:
    print(error, file=sys.stderr)
"""


@pytest.mark.slow
def test_a_packed_file_that_cannot_be_parsed_ends_the_process_as_usual(tmp_path: Path) -> None:
    # A thread of Arrow's read on while the interpreter ended: of 12 runs 3 aborted, 2 never ended.
    rows = [f"e{i // 10},{i * 7919 % 100_003},{i % 2}" for i in range(600_000)]
    rows[300_000] = "e,1"
    path = tmp_path / "log.csv.gz"
    path.write_bytes(gzip.compress("\n".join(["a,b,c", *rows, ""]).encode(), 1))
    message = (
        "log.csv.gz line 300002: could not be read (found 2 cells, expected 3 as in the header). "
        "Correct the line, or leave the file out.\n"
    )
    for _ in range(2):
        ended = subprocess.run(
            [sys.executable, "-c", _BROKEN, str(path)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (ended.returncode, ended.stderr) == (0, message)


def test_no_thread_reads_what_python_unpacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.csv.gz"
    path.write_bytes(gzip.compress(b"a,b\n" + b"1,2.5\n" * 50_000 + b"1\n"))
    (file,) = find_source([path]).files
    threads = set()
    readinto = compression._GuardedStream.readinto

    def watched(stream: compression._GuardedStream, buffer: Any) -> int:
        threads.add(threading.get_ident())
        return readinto(stream, buffer)

    monkeypatch.setattr(compression._GuardedStream, "readinto", watched)
    with pytest.raises(SourceInvalidError, match="line 50002: could not be read"):
        list(CsvTables([file]).chunks())
    assert threads == {threading.get_ident()}


@pytest.mark.slow
def test_a_header_may_be_longer_than_a_block(tmp_path: Path) -> None:
    names = [f"{'x' * 2000}{i}" for i in range(3000)]
    path = tmp_path / "log.csv"
    path.write_text(",".join(names) + "\n" + ",".join(["1"] * 3000) + "\n")
    (chunk,) = CsvTables(find_source([path]).files).chunks()
    assert chunk.table.column_names == names


def test_a_header_beyond_the_limit_and_too_many_columns_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("x" * (17 << 20))
    with pytest.raises(SourceInvalidError, match="found a header of more than 16,777,216 bytes"):
        list(CsvTables(find_source([path]).files).chunks())
    wide = tmp_path / "wide.csv"
    wide.write_text(",".join(f"c{i}" for i in range(20_000)) + "\n" + "1," * 19_999 + "1\n")
    with pytest.raises(SourceInvalidError, match="found 20,000 columns, expected 4,096 at most"):
        find_format("auto", find_source([wide]).files).read(
            find_source([wide]).files, ReadOptions()
        )


@pytest.mark.parametrize("text", ["import os, sys\n\nprint(1)\n", "Dear all, this is\na text.\n"])
def test_text_with_a_comma_in_its_first_line_is_no_table(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tool.py"
    path.write_text(text)
    with pytest.raises(SourceInvalidError, match="of an unknown format"):
        find_format("auto", find_source([path]).files)
    # A table whose first row is cut says so itself.
    path.write_text("observation,action,reward\n1,2\n")
    assert find_format("auto", find_source([path]).files).name == "csv"


_DECIMALS = "id;x;n;flag\n1,5;0,5;1;true\n2;-1,25e2;,5;false\n3;;7;true\n"


def test_decimal_commas_are_numbers_where_that_is_stated(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(_DECIMALS)
    files = find_source([tmp_path / "log.csv"]).files
    tables = CsvTables(files, ["id"], decimal=",")
    tables.settle(["x"])
    (chunk,) = tables.chunks()
    assert chunk.table.to_pydict() == {
        "id": ["1,5", "2", "3"],
        "x": [0.5, -125.0, None],
        "n": [1.0, 0.5, 7.0],
        "flag": [True, False, True],
    }
    as_text = CsvTables(files, ["id"], decimal=".")
    assert next(as_text.chunks()).table["x"].to_pylist() == ["0,5", "-1,25e2", None]


@pytest.mark.parametrize("first", ["0,5", "1"])
def test_decimal_commas_are_refused_where_they_would_be_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Also where they begin in a later block."""
    monkeypatch.setattr(csv_format, "_BLOCK_BYTES", 64)
    rows = "".join(f"a{i};{first}\n" for i in range(40)) + "".join(f"b{i};2,5\n" for i in range(90))
    (tmp_path / "log.csv").write_text(f"name;x\n{rows}")
    files = find_source([tmp_path / "log.csv"]).files
    with pytest.raises(SourceInvalidError, match=r"column 'x': found .*'[02],5'.*`decimal` ','"):
        list(CsvTables(files).chunks())


def test_quoted_pairs_of_numbers_are_text_but_in_a_field_that_is_a_number(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text('place,reward\n"1,5","0,5"\n"2,7","1,5"\n')
    files = find_source([tmp_path / "log.csv"]).files
    table = next(CsvTables(files).chunks()).table
    assert table["place"].to_pylist() == ["1,5", "2,7"]
    with pytest.raises(SourceInvalidError, match="column 'reward': found numbers with a decimal"):
        next(CsvTables(files, numeric=["reward"]).chunks())


def test_another_delimiter_and_a_header_without_one(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text('a^b\n1^"x^y"\n')
    files = find_source([tmp_path / "log.csv"]).files
    (chunk,) = CsvTables(files, delimiter="^").chunks()
    assert chunk.table.to_pydict() == {"a": [1], "b": ["x^y"]}
    assert list(chunk.lines) == [2]
    with pytest.raises(SourceInvalidError, match="the `delimiter`") as unknown:
        find_format("auto", files)
    assert "name the format" in str(unknown.value)
    with pytest.raises(
        SourceInvalidError, match=r"found one column, 'a\^b'.* State the `delimiter`"
    ):
        CsvFormat().read(files, ReadOptions())


def test_bytes_that_are_no_utf_8_are_named_with_their_column(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_bytes("a,note\n1,caf\xe9\n".encode("latin-1"))
    files = find_source([tmp_path / "log.csv"]).files
    with pytest.raises(SourceInvalidError, match=r"column 'note': found bytes .* no UTF-8.*iconv"):
        list(CsvTables(files).chunks())


@pytest.mark.parametrize(
    "options", [{"decimal": ";"}, {"decimal": ",", "delimiter": ","}, {"delimiter": "ab"},
                {"delimiter": "a"}, {"delimiter": '"'}, {"delimiter": ""}]
)  # fmt: skip
def test_marks_that_cannot_be_told_apart_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(ConfigInvalidError) as caught:
        ReadOptions(**options)  # type: ignore[arg-type]
    assert caught.value.parameter in options
