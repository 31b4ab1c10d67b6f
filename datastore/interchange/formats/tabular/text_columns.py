"""Text columns: what those of a source hold, times or which texts; one pass over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes.schema import TIMESTAMP_TYPE
from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.tabular.tables import (
    CachedTables,
    Survey,
    uniform_chunks,
)

NAIVE_TYPE: Final = pa.timestamp("us")


@dataclass
class TextContents:
    """What one text column holds.

    has_zones and is_naive: every text is a time, with a zone or without. values: the distinct
    texts, as long as they are few enough. num_unknown: rows whose text is not in `known`.
    """

    known: pa.Array | None = None
    has_zones: bool = True
    is_naive: bool = True
    values: set[str] = field(default_factory=set)
    num_unknown: int = 0
    is_too_many: bool = False

    @property
    def is_time(self) -> bool:
        """Whether all texts are times of one kind."""
        return self.has_zones != self.is_naive

    def add(self, column: pa.ChunkedArray, max_values: int) -> None:
        """Take in some rows."""
        texts = blank_to_null(column).drop_null()
        if not len(texts):
            return
        self.has_zones = self.has_zones and _can_cast(texts, TIMESTAMP_TYPE)
        self.is_naive = self.is_naive and _can_cast(texts, NAIVE_TYPE)
        if self.known is not None:
            self.num_unknown += len(texts) - int(pc.sum(pc.is_in(texts, self.known)).as_py() or 0)
        elif not self.is_too_many:
            self.values.update(pc.unique(texts).to_pylist())
            self.is_too_many = len(self.values) > max_values


def read_contents(
    tables: CachedTables,
    survey: Survey,
    columns: Sequence[str],
    known: Mapping[str, Sequence[str]],
    max_values: int,
) -> dict[str, TextContents]:
    """Look through text columns; `known` are the vocabularies that a dataset has already."""
    found = {
        name: TextContents(pa.array(known[name], pa.string()) if name in known else None)
        for name in columns
    }
    if columns:
        for table in uniform_chunks(tables, survey, columns):
            for name, contents in found.items():
                contents.add(table.column(name), max_values)
    return found


def too_many_texts_error(name: str, what: str, max_values: int) -> SourceInvalidError:
    """Return the refusal of a column of too many texts."""
    return SourceInvalidError(
        f"column {name!r}: found more than {max_values} distinct texts, expected fewer to form "
        f"{what} of. Leave the column out, or raise `max_categories`."
    )


def time_text(fill: pa.Scalar, timezone: str | None) -> str | None:
    """Return a time as ISO text with a zone; None if it is no time, or has no zone."""
    for kind in (TIMESTAMP_TYPE, NAIVE_TYPE):
        try:
            moment = fill.cast(kind)
            if kind == NAIVE_TYPE and timezone is None:
                return None
            if kind == NAIVE_TYPE or (
                pa.types.is_timestamp(fill.type) and fill.type.tz is None and timezone
            ):
                moment = pc.assume_timezone(fill.cast(NAIVE_TYPE), timezone).cast(TIMESTAMP_TYPE)
        except pa.ArrowException:
            continue
        return str(moment.as_py().isoformat())
    return None


def blank_to_null(column: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
    """Return a text column with null for the empty text: nothing was given."""
    is_blank = pc.equal(column, "")
    if not pc.any(is_blank).as_py():
        return column
    return pc.if_else(is_blank, pa.scalar(None, column.type), column)


def _can_cast(texts: pa.ChunkedArray, kind: pa.DataType) -> bool:
    try:
        # One first: most columns are no times, and then the whole need not be tried.
        texts.slice(0, 1).cast(kind)
        texts.cast(kind)
    except pa.ArrowException:
        return False
    return True
