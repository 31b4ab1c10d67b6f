"""Row plan: what is known of a source's columns, and decided, before rows are read as steps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes.encoding import CATEGORY, Encoding, check_timezone
from replaylake.datastore.episodes.schema import TIMESTAMP_TYPE
from replaylake.datastore.errors import ConfigInvalidError, SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.formats.tabular.action_units import ActionUnits, parse_units
from replaylake.datastore.interchange.formats.tabular.arrays import decode_names, is_text
from replaylake.datastore.interchange.formats.tabular.encoder import (
    OBSERVATIONS,
    Encoder,
    find_encoder,
    find_text_columns,
    list_encoded_columns,
)
from replaylake.datastore.interchange.formats.tabular.fields import (
    ALIASES,
    EPISODE,
    ColumnLayout,
    retain_columns,
    suggest_name,
)
from replaylake.datastore.interchange.formats.tabular.tables import (
    HIDDEN,
    MISFITS,
    ORIGIN,
    CachedTables,
    Survey,
    uniform_chunks,
)
from replaylake.datastore.interchange.formats.tabular.text_columns import (
    NAIVE_TYPE,
    TextContents,
    blank_to_null,
    read_contents,
    time_text,
)


@dataclass(frozen=True)
class RowPlan:
    """How rows become steps: made ready first, then laid out, encoded and given units."""

    layout: ColumnLayout
    preparation: Preparation
    encoder: Encoder
    units: ActionUnits

    def notes(self) -> list[str]:
        """Say what was done to the rows read so far."""
        filled = self.preparation.num_filled()
        fills = self.preparation.fills
        return [
            *(
                f"column {n!r}: {num} empty cells are {fills[n].as_py()}"
                for n, num in filled.items()
            ),
            *self.encoder.notes(),
            *self.units.notes(has_densities=self._has_densities),
        ]

    @property
    def _has_densities(self) -> bool:
        return any(name in self.layout.fields for name in ("behavior_log_prob", "behavior_prob"))


def plan_rows(
    tables: CachedTables,
    survey: Survey,
    layout: ColumnLayout,
    options: ReadOptions,
    where: str,
    *,
    encodes_lone: bool,
    is_stated: bool,
) -> RowPlan:
    """Look at the columns and decide.

    encodes_lone: a text alone is encoded too, and is not the observation itself. is_stated: the
    files state their spaces, so nothing is encoded.
    Raises: SourceInvalidError, ConfigInvalidError.
    """
    if options.timezone is not None:
        check_timezone(options.timezone)
    units = parse_units(options)
    fills = parse_fills(_with_known_fills(options, survey), survey, where)
    if is_stated and options.encoding is None:
        options = replace(options, encoding=Encoding())
    looked_at = find_text_columns(layout, survey.schema, options, encodes_lone=encodes_lone)
    contents = read_contents(
        tables, survey, looked_at, _vocabularies(options.encoding), options.max_categories
    )
    preparation = Preparation(
        seen=survey,
        fills=fills,
        times=frozenset(_times(layout, contents, fills, options, survey)),
        timezone=options.timezone,
        episode_by=layout.episode_by,
    )
    schema = preparation.survey().schema
    encoder = find_encoder(layout, schema, contents, fills, options, encodes_lone=encodes_lone)
    _refuse_without_zone(layout, schema, encoder)
    layout = retain_columns(layout, list_encoded_columns(encoder, layout), survey.schema.names)
    return RowPlan(layout, preparation, encoder, units)


def find_known_columns(options: ReadOptions, names: list[str]) -> Mapping[str, str]:
    """Return a mapping to the columns that a dataset's observations are encoded from.

    Empty where the log lacks one, has vectors of its own, or the options name others.
    """
    if options.encoding is None or "observation" in options.mapping:
        return {}
    known = [one.name for one in options.encoding.fields]
    if not known or any(name in names for name in ALIASES["observation"]):
        return {}
    if any(name not in names or "," in name for name in known):
        return {}
    return {"observation": ",".join(known)}


def _with_known_fills(options: ReadOptions, survey: Survey) -> Mapping[str, str]:
    fields = () if options.encoding is None else options.encoding.fields
    known = {one.name: one.fill for one in fields if one.name in survey.schema.names}
    return {**{n: _text(fill) for n, fill in known.items() if fill is not None}, **options.fill}


def _text(fill: Any) -> str:
    if isinstance(fill, float) and fill.is_integer():
        return str(int(fill))  # a column of integers takes no 3.0
    return str(fill).lower() if isinstance(fill, bool) else str(fill)


def _vocabularies(encoding: Encoding | None) -> dict[str, tuple[str, ...]]:
    fields = () if encoding is None else encoding.fields
    return {one.name: one.vocabulary for one in fields if one.kind == CATEGORY}


def _times(
    layout: ColumnLayout,
    contents: Mapping[str, TextContents],
    fills: Mapping[str, pa.Scalar],
    options: ReadOptions,
    survey: Survey,
) -> list[str]:
    """Return the columns that are read as times. Raises: SourceInvalidError for want of a zone."""
    categories = _vocabularies(options.encoding)
    observed = {name for ours in OBSERVATIONS for name in layout.fields.get(ours, ())}
    times = [name for name in observed if options.timezone and _is_date(survey, name)]
    for name, content in contents.items():
        if not content.is_time or name in layout.fields["action"] or name in categories:
            continue
        if name in fills and time_text(fills[name], options.timezone or "UTC") is None:
            continue
        if content.has_zones or options.timezone is not None:
            times.append(name)
        elif name in observed:
            raise _missing_zone_error(name, "text")
    return times


def _is_date(survey: Survey, name: str) -> bool:
    return bool(pa.types.is_date(survey.schema.field(name).type))


def _refuse_without_zone(layout: ColumnLayout, schema: pa.Schema, encoder: Encoder) -> None:
    for ours in encoder.encodes:
        for name in layout.fields[ours]:
            kind = schema.field(name).type
            if pa.types.is_date(kind) or (pa.types.is_timestamp(kind) and kind.tz is None):
                raise _missing_zone_error(name, str(kind))


def _missing_zone_error(name: str, kind: str) -> SourceInvalidError:
    return SourceInvalidError(
        f"column {name!r}: found times without a zone ({kind}), expected times with one, such as "
        "2026-01-31T12:00:00Z. Say which with `timezone`, or leave the column out."
    )


@dataclass
class Preparation:
    """How rows are made ready; with nothing to do they stay as they are.

    fills: the value, of its column's type, that stands where there is none. times: text columns
    that hold times. timezone: of times without one. episode_by: the columns of EPISODE.
    """

    seen: Survey
    fills: Mapping[str, pa.Scalar] = field(default_factory=dict)
    times: frozenset[str] = frozenset()
    timezone: str | None = None
    episode_by: tuple[str, ...] = ()
    _filled: dict[tuple[str, int], int] = field(default_factory=dict)

    def survey(self) -> Survey:
        """Return the survey of the rows once they are ready."""
        fields = [pa.field(f.name, self._type_of(f.name)) for f in self.seen.schema]
        if self.episode_by:
            fields.append(pa.field(EPISODE, pa.string()))
        return replace(self.seen, schema=pa.schema(fields))

    def chunks(
        self, tables: CachedTables, columns: Sequence[str] | None = None
    ) -> Iterator[pa.Table]:
        """Read rows, or some columns of them, and make them ready; see `tables.uniform_chunks`.

        Raises: SourceInvalidError naming the row of a time that its zone has twice, or not at all.
        """
        for table in uniform_chunks(tables, self.seen, self._sources(columns)):
            yield self._prepare(table)

    def num_filled(self) -> dict[str, int]:
        """Return how many cells of each column were filled in the rows read so far."""
        counts: dict[str, int] = {}
        for (name, _), num in self._filled.items():
            counts[name] = counts.get(name, 0) + num
        return counts

    def _sources(self, columns: Sequence[str] | None) -> list[str] | None:
        if columns is None:
            return None
        names = [*(n for n in columns if n != EPISODE)]
        return list(dict.fromkeys([*names, *(self.episode_by if EPISODE in columns else ())]))

    def _prepare(self, table: pa.Table) -> pa.Table:
        if not (self.fills or self.times or self.timezone or self.episode_by):
            return table
        columns: dict[str, Any] = {}
        for name in table.column_names:
            column = table.column(name)
            if name not in HIDDEN:
                column = self._with_zone(self._with_fill(column, name, table), name, table)
            columns[name] = column
        if self.episode_by and all(name in columns for name in self.episode_by):
            columns[EPISODE] = join_ids(
                [columns[n].combine_chunks() for n in self.episode_by], self.episode_by
            )
        return pa.table(columns)

    def _with_fill(self, column: pa.ChunkedArray, name: str, table: pa.Table) -> pa.ChunkedArray:
        if (fill := self.fills.get(name)) is None:
            return column
        column = column.cast(fill.type)
        if is_text(fill.type):
            column = blank_to_null(column)
        if column.null_count:
            # A misfit is not filled: its row has a value, of another type.
            is_empty = pc.and_(column.is_null(), pc.invert(_misfits_in(table, name)))
            # Rows may be read more than once; each chunk is counted by its first row.
            num = int(pc.sum(is_empty).as_py())
            self._filled[(name, table.column(ORIGIN)[0].as_py())] = num
            column = pc.if_else(is_empty, fill, column)
        return column

    def _type_of(self, name: str) -> pa.DataType:
        kind = self.seen.schema.field(name).type
        if name in self.fills:
            kind = self.fills[name].type
        if name in self.times:
            return TIMESTAMP_TYPE
        is_naive = pa.types.is_timestamp(kind) and kind.tz is None
        return pa.timestamp(kind.unit, "UTC") if is_naive and self.timezone else kind

    def _with_zone(self, column: pa.ChunkedArray, name: str, table: pa.Table) -> pa.ChunkedArray:
        kind = self._type_of(name)
        if column.type == kind:
            return column
        if is_text(column.type):
            column = blank_to_null(column)
            try:
                return column.cast(kind)
            except pa.ArrowException:
                column = column.cast(NAIVE_TYPE)
        if pa.types.is_date(column.type):
            column = column.cast(NAIVE_TYPE)
        return in_zone(column, name, str(self.timezone), self._make_describer(table)).cast(kind)

    def _make_describer(self, table: pa.Table) -> Any:
        return lambda row: self.seen.place(table.column(ORIGIN)[row].as_py())


def _misfits_in(table: pa.Table, name: str) -> pa.Array:
    column = table.column(MISFITS)
    if column.null_count == len(column):
        return pa.repeat(pa.scalar(False), len(column))
    return pa.array([text is not None and name in json.loads(text) for text in column.to_pylist()])


def in_zone(column: pa.ChunkedArray, name: str, timezone: str, place: Any) -> pa.ChunkedArray:
    """Take times without a zone for local ones. Raises: SourceInvalidError naming the row.

    `place(row)` says where a row is.
    """
    try:
        return pc.assume_timezone(column, timezone)
    except pa.ArrowException:
        pass
    for option, what in (("ambiguous", "twice"), ("nonexistent", "not at all")):
        other = {"ambiguous": "nonexistent", "nonexistent": "ambiguous"}[option]
        first, last = (
            pc.assume_timezone(column, timezone, **{option: side, other: "earliest"})
            for side in ("earliest", "latest")
        )
        differs = np.flatnonzero(np.asarray(pc.not_equal(first, last).fill_null(False)))
        if len(differs):
            row = int(differs[0])
            raise SourceInvalidError(
                f"{place(row)}, column {name!r}: found {column[row].as_py()}, which {timezone} has "
                f"{what}: the clocks were changed. Expected unambiguous times. Write them "
                "with their offset, as in 2026-01-31T12:00:00+01:00."
            )
    raise SourceInvalidError(
        f"column {name!r}: found times that {timezone} has no rule for, expected others. Write "
        "them with their offset."
    )


def join_ids(parts: Sequence[pa.Array], names: Sequence[str]) -> pa.Array:
    """Join ids with `/`; a part's own `/` and `%` become %2F and %25, so no two ids fall together.

    Null where a part is. Raises: SourceInvalidError for columns that name nothing.
    """
    texts = []
    for part, name in zip(parts, names, strict=True):
        text = decode_names(part, name)
        text = pc.replace_substring(text, "%", "%25")
        texts.append(pc.replace_substring(text, "/", "%2F"))
    return pc.binary_join_element_wise(*texts, "/")


def parse_fills(fills: Mapping[str, str], survey: Survey, where: str) -> dict[str, pa.Scalar]:
    """Return each fill as its column's type. Raises: SourceInvalidError, ConfigInvalidError."""
    typed = {}
    for name, text in fills.items():
        if name not in survey.schema.names:
            listed = ", ".join(map(repr, survey.schema.names[:20]))
            raise SourceInvalidError(
                f"{where}: found the columns {listed}, expected {name!r}, which `fill` "
                f"{name}={text} names.{suggest_name(name, survey.schema.names)} Correct it."
            )
        typed[name] = _parse_fill(survey.schema.field(name).type, name, text)
    return typed


def _parse_fill(kind: pa.DataType, name: str, text: str) -> pa.Scalar:
    if pa.types.is_null(kind):
        for guess in (pa.int64(), pa.float64(), pa.bool_()):
            try:
                return pa.scalar(text).cast(guess)
            except pa.ArrowException:
                continue
        return pa.scalar(text)
    if pa.types.is_integer(kind):
        kind = pa.int64() if not pa.types.is_unsigned_integer(kind) else kind
    is_nested = pa.types.is_nested(kind)
    try:
        return pa.scalar(json.loads(text), kind) if is_nested else pa.scalar(text).cast(kind)
    except (pa.ArrowException, ValueError, TypeError) as error:
        example = " in JSON, such as [0, 0] for a list of two" if is_nested else ""
        raise ConfigInvalidError(
            f"fill {name}={text}: found {text!r}, expected a value of the column's type, {kind}"
            f"{example}. Correct it.",
            parameter="fill",
        ) from error
