"""Encoder: what of a log becomes categories, flags and times, and the rows so encoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes.encoding import CATEGORY, FLAG, NUMBER, TIME, Encoding, Field
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.formats.tabular.arrays import Mask, decode, is_text
from replaylake.datastore.interchange.formats.tabular.fields import ColumnLayout
from replaylake.datastore.interchange.formats.tabular.text_columns import (
    TextContents,
    blank_to_null,
    time_text,
    too_many_texts_error,
)

# What holds observations, and is encoded alike.
OBSERVATIONS: Final = ("observation", "next_observation", "final_observation")


@dataclass(frozen=True)
class Encoder:
    """Encodes a source's columns.

    encoding: None if nothing is encoded. encodes: our fields that are made of encoded columns.
    num_unknown: how many rows a vocabulary lacks, by column. is_old: it is the dataset's.
    """

    encoding: Encoding | None = None
    encodes: frozenset[str] = frozenset()
    num_unknown: Mapping[str, int] = field(default_factory=dict)
    is_old: bool = False

    @property
    def names_actions(self) -> bool:
        """Whether actions are texts that stand for numbers."""
        return self.encoding is not None and self.encoding.action_names is not None

    def vectors(self, columns: Sequence[pa.Array]) -> tuple[Array, list[dict[str, Mask]]]:
        """Return float32 [n, D], and for each column the rows that fail a check."""
        fields = () if self.encoding is None else self.encoding.fields
        num = len(columns[0])
        vectors = np.zeros((num, sum(one.width for one in fields)), np.float32)
        faults, start = [], 0
        for one, column in zip(fields, columns, strict=True):
            values, wrong = _values(one, column)
            one.write(values, vectors[:, start : start + one.width])
            faults.append(wrong)
            start += one.width
        return vectors, faults

    def actions(self, column: pa.Array) -> tuple[Array, dict[str, Mask]]:
        """Return int64 [n], the places of texts among the action names."""
        names = (self.encoding.action_names if self.encoding else None) or ()
        texts = blank_to_null(column.cast(pa.string()))
        indices = pc.index_in(texts, pa.array(names, pa.string()))
        missing = np.asarray(texts.is_null())
        unknown = np.asarray(indices.is_null()) & ~missing
        faults = {"missing": missing, "unknown_action": unknown}
        codes = np.asarray(indices.fill_null(0)).astype(np.int64)
        return codes, {check: rows for check, rows in faults.items() if rows.any()}

    def notes(self) -> list[str]:
        """Say what became of the columns."""
        encoding = self.encoding
        if encoding is None:
            return []
        notes = []
        if self.encodes:
            fields = "; ".join(f"{one.name} {_describe_field(one)}" for one in encoding.fields)
            whose = " as the dataset has it" if self.is_old else ""
            notes.append(f"observation is {encoding.width} float32 numbers{whose}: {fields}")
        if encoding.action_names is not None and not self.is_old:
            notes.append(f"action is one of {len(encoding.action_names)} names, in their order")
        for name, num in self.num_unknown.items():
            if num:
                notes.append(
                    f"column {name!r}: {num} rows hold texts that the dataset's vocabulary lacks: "
                    "encoded as other"
                )
        return notes


def find_text_columns(
    layout: ColumnLayout, schema: pa.Schema, options: ReadOptions, *, encodes_lone: bool
) -> list[str]:
    """Return the text columns whose contents decide how they are read."""
    names = [*layout.order_by]
    observations = layout.fields.get("observation", ())
    for ours in OBSERVATIONS:
        theirs = layout.fields.get(ours, ())
        if len(observations) > 1 or encodes_lone:
            names += theirs if len(theirs) == len(observations) else ()
    if layout.one("action") is not None:
        names += layout.fields["action"] if len(layout.fields["action"]) == 1 else ()
    if options.timezone is not None and (timestamp := layout.one("timestamp")) is not None:
        names.append(timestamp)
    texts = [name for name in dict.fromkeys(names) if name in schema.names]
    return [name for name in texts if is_text(schema.field(name).type)]


def find_encoder(
    layout: ColumnLayout,
    schema: pa.Schema,
    contents: Mapping[str, TextContents],
    fills: Mapping[str, pa.Scalar],
    options: ReadOptions,
    *,
    encodes_lone: bool,
) -> Encoder:
    """Decide what is encoded; `schema` is that of the rows once they are ready.

    Raises: SourceInvalidError for columns that cannot be encoded, or not as the dataset has them.
    """
    known = options.encoding
    if known is not None:
        _check_known(known, layout, schema)
        unknown = {name: one.num_unknown for name, one in contents.items() if one.known is not None}
        return Encoder(
            known or None, _find_encoded_fields(known, layout, schema), unknown, is_old=True
        )
    observations = layout.fields["observation"]
    kinds = [schema.field(name).type for name in observations]
    is_one = len(observations) == 1 and not (encodes_lone and is_text(kinds[0]))
    fields: tuple[Field, ...] = ()
    dtype = "float32"
    if all(map(_kind_of, kinds)) and (not is_one or pa.types.is_timestamp(kinds[0])):
        parts = _parts(layout)
        fields = tuple(
            _field(parts[name], _kind_of(kind), contents, fills, options)
            for name, kind in zip(observations, kinds, strict=True)
        )
        if all(one.kind == NUMBER for one in fields):
            dtype = _common_dtype(kinds)
    action = layout.fields["action"]
    is_transcript = is_one and is_text(kinds[0])
    names = None
    if len(action) == 1 and is_text(schema.field(action[0]).type) and not is_transcript:
        names = _vocabulary(action, contents, fills, options, "action names")
    encoding = Encoding(fields, names, dtype)
    return Encoder(encoding or None, _find_encoded_fields(encoding, layout, schema))


def list_encoded_columns(encoder: Encoder, layout: ColumnLayout) -> list[str]:
    """Return the columns that are encoded, which are kept as they are beside it."""
    used: list[str] = []
    for ours in OBSERVATIONS:
        used += layout.fields[ours] if ours in encoder.encodes else ()
    return [*used, *(layout.fields["action"] if encoder.names_actions else ())]


def _find_encoded_fields(
    encoding: Encoding, layout: ColumnLayout, schema: pa.Schema
) -> frozenset[str]:
    """Return our fields that are made of encoded columns, not of vectors, nor of numbers alone."""
    fields = encoding.fields
    if all(one.kind == NUMBER for one in fields):
        return frozenset()
    return frozenset(
        ours
        for ours in OBSERVATIONS
        if len(theirs := layout.fields.get(ours, ())) == len(fields)
        and all(_kind_of(schema.field(name).type) for name in theirs)
    )


def _parts(layout: ColumnLayout) -> dict[str, list[str]]:
    """Return, for each observation column, the columns that hold the same thing."""
    observations = layout.fields["observation"]
    alike = [layout.fields.get(ours, ()) for ours in OBSERVATIONS]
    rows = [theirs for theirs in alike if len(theirs) == len(observations)]
    return {name: [theirs[i] for theirs in rows] for i, name in enumerate(observations)}


def _field(
    names: Sequence[str],
    kind: str | None,
    contents: Mapping[str, TextContents],
    fills: Mapping[str, pa.Scalar],
    options: ReadOptions,
) -> Field:
    name = names[0]
    fill: Any = fills[name].as_py() if name in fills else None
    if kind == TIME:
        shown = time_text(fills[name], options.timezone) if name in fills else None
        return Field(name, TIME, fill=shown, timezone=options.timezone or "UTC")
    if kind == CATEGORY:
        vocabulary = _vocabulary(names, contents, fills, options, "categories")
        return Field(name, CATEGORY, vocabulary, fill)
    return Field(name, str(kind), fill=fill if kind == FLAG or fill is None else float(fill))


def _vocabulary(
    names: Sequence[str],
    contents: Mapping[str, TextContents],
    fills: Mapping[str, pa.Scalar],
    options: ReadOptions,
    what: str,
) -> tuple[str, ...]:
    values: set[str] = set()
    for name in names:
        if name in contents:
            values |= contents[name].values
        if name in fills:
            values.add(str(fills[name].as_py()))
    if len(values) > options.max_categories:
        raise too_many_texts_error(names[0], what, options.max_categories)
    return tuple(sorted(values))


def _kind_of(kind: pa.DataType) -> str | None:
    """Return what becomes of a column of this type; None where it is no single value."""
    types = pa.types
    if types.is_boolean(kind):
        return FLAG
    if is_text(kind):
        return CATEGORY
    if types.is_timestamp(kind) or types.is_date(kind):
        return TIME
    is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    return NUMBER if is_number or types.is_null(kind) else None


def _common_dtype(kinds: Sequence[pa.DataType]) -> str:
    dtypes = [
        kind.to_pandas_dtype()
        if pa.types.is_integer(kind) or pa.types.is_floating(kind)
        else np.float64
        for kind in kinds
    ]
    common = np.result_type(*map(np.dtype, dtypes)).name
    return "float32" if common == "float16" else str(common)


def _check_known(known: Encoding, layout: ColumnLayout, schema: pa.Schema) -> None:
    observations = layout.fields["observation"]
    names = [one.name for one in known.fields]
    is_vector = len(observations) == 1 and _kind_of(schema.field(observations[0]).type) is None
    if names and not is_vector and list(observations) != names and not known.is_plain:
        raise SourceInvalidError(
            f"observation: found the columns {', '.join(observations)}, expected "
            f"{', '.join(names)}, which the dataset's observations are encoded from. Map those, or "
            "ingest into a new dataset."
        )
    if is_vector or known.is_plain:
        return
    for one in known.fields:
        kind = _kind_of(schema.field(one.name).type)
        fits = {NUMBER: (NUMBER, FLAG), CATEGORY: (CATEGORY, NUMBER)}.get(one.kind, (one.kind,))
        if kind not in fits and not pa.types.is_null(schema.field(one.name).type):
            raise SourceInvalidError(
                f"column {one.name!r}: found {schema.field(one.name).type}, expected a {one.kind} "
                "as in the dataset's encoding. Correct the column, or ingest into a new "
                "dataset."
            )


def _values(one: Field, column: pa.Array) -> tuple[Any, dict[str, Mask]]:
    """Return a column as `Field.write` takes it, and the rows that fail a check."""
    if one.kind == CATEGORY:
        texts = column if is_text(column.type) else column.cast(pa.string())
        coded = blank_to_null(texts).dictionary_encode()
        missing = np.asarray(coded.is_null())
        codes = one.codes(coded.dictionary.to_pylist())
        places = np.asarray(coded.indices.fill_null(0))
        values = codes[places] if len(codes) else np.zeros(len(column), np.int64)
        return values, {"missing": missing} if missing.any() else {}
    if one.kind == TIME:
        missing = np.asarray(column.is_null())
        times = column.cast(pa.timestamp("us", "UTC"), safe=False).cast(pa.int64())
        return np.asarray(times.fill_null(0)), {"missing": missing} if missing.any() else {}
    decoded = decode(column)
    faults = dict(decoded.faults)
    with np.errstate(over="ignore"):
        values = np.asarray(decoded.values).astype(np.float32)
    beyond = ~np.isfinite(values) & ~faults.get("not_finite", np.zeros(len(values), np.bool_))
    if beyond.any():
        faults["beyond_float32"] = beyond
    return np.where(np.isfinite(values), values, 0), faults


def _describe_field(one: Field) -> str:
    if one.kind == CATEGORY:
        return f"one of {len(one.vocabulary)} categories or other"
    if one.kind == TIME:
        return f"time of day and weekday in {one.timezone}"
    return {NUMBER: "as it is", FLAG: "0 or 1"}[one.kind]
