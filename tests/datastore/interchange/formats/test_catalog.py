"""Every format is in the documentation, and what is documented is there."""

import re
from pathlib import Path

import pytest

from replaylake.datastore.interchange.formats.catalog import FORMATS
from replaylake.datastore.interchange.formats.format import Format, WritableFormat

_DOCS = (Path(__file__).parents[4] / "docs" / "FORMATS.md").read_text(encoding="utf-8")
_ROW = r"^\| (\w+) \| (yes|no) \| (yes|no) \| (.+) \|$"


def test_the_table_has_every_format_and_no_other() -> None:
    rows = re.findall(_ROW, _DOCS, re.MULTILINE)
    writes = {known.name: isinstance(known, WritableFormat) for known in FORMATS}
    assert {row[0]: row[2] == "yes" for row in rows} == writes
    assert {row[1] for row in rows} == {"yes"}
    assert len(rows) == len(FORMATS)


@pytest.mark.parametrize("known", FORMATS, ids=lambda known: known.name)
def test_each_says_what_it_is(known: Format) -> None:
    (row,) = [row for row in re.findall(_ROW, _DOCS, re.MULTILINE) if row[0] == known.name]
    assert row[3] == known.about.replace("`mapping`", "--map")
    assert re.fullmatch(r"[a-z][a-z0-9]*", known.name)
    assert 10 < len(known.about) <= 90
