from __future__ import annotations

import csv
import io
import random

import pytest

from replaylake.datastore.interchange.formats.generic import csv_blocks
from replaylake.datastore.interchange.formats.generic.csv_blocks import (
    RecordTooLongError,
    read_blocks,
)

_CELLS = ["1", "", "a b", '"x,y"', '"a\nb"', '"say ""no"" "', 'b"c', '"a"b"c', '""', '"\r\n"', "é"]


def _records(text: str) -> list[list[str]]:
    return [row for row in csv.reader(io.StringIO(text, newline="")) if row]


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("regular", [True, False])
def test_blocks_end_where_records_do(newline: str, regular: bool) -> None:
    rng = random.Random(7)
    cells = [cell for cell in _CELLS if not regular or cell.count('"') % 2 == 0]
    cells = [cell for cell in cells if not regular or cell != '"a"b"c']
    for _ in range(60):
        rows = [",".join(rng.choices(cells, k=3)) for _ in range(rng.randint(1, 12))]
        text = "p,q,r" + newline + newline.join(rows) + newline * rng.randint(0, 2)
        data = text.encode()
        blocks = list(read_blocks(io.BytesIO(data), ",", rng.choice([1, 7, 40])))
        assert b"".join(blocks) == data
        assert _records(blocks[0].decode()) == [["p", "q", "r"]]
        parsed = [row for block in blocks for row in _records(block.decode())]
        assert parsed == _records(text)


def test_a_mark_is_left_out_and_a_quoted_header_is_whole() -> None:
    data = b'\xef\xbb\xbf"a\nb",c\n1,2\n'
    assert list(read_blocks(io.BytesIO(data), ",", 100)) == [b'"a\nb",c\n', b"1,2\n"]


def test_a_quote_that_is_never_closed_does_not_fill_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(csv_blocks, "MAX_RECORD_BYTES", 1000)
    stream = io.BytesIO(b'a,b\n1,"' + b"2\n" * 10_000)
    with pytest.raises(RecordTooLongError, match="a record of more than 1,000 bytes"):
        list(read_blocks(stream, ",", 64))
    assert stream.tell() < 3000
