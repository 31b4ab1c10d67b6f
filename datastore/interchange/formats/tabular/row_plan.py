"""Row plan: what is known of a source's columns, and decided, before rows are read as steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from replaylake.datastore.episodes.encoding import CATEGORY, Encoding, check_timezone
from replaylake.datastore.errors import SourceInvalid
from replaylake.datastore.interchange.formats.format import ReadOptions
from replaylake.datastore.interchange.formats.tabular.action_units import ActionUnits, units_of
from replaylake.datastore.interchange.formats.tabular.encoder import (
    OBSERVATIONS,
    Encoder,
    columns_to_look_at,
    find_encoder,
    used_by,
)
from replaylake.datastore.interchange.formats.tabular.fields import ALIASES, Layout, keeping
from replaylake.datastore.interchange.formats.tabular.preparation import Preparation, typed_fills
from replaylake.datastore.interchange.formats.tabular.tables import Kept, Survey
from replaylake.datastore.interchange.formats.tabular.text_columns import (
    Contents,
    contents_of,
    time_text,
)


@dataclass(frozen=True)
class RowPlan:
    """How rows become steps: made ready first, then laid out, encoded and given units."""

    layout: Layout
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
    tables: Kept,
    seen: Survey,
    layout: Layout,
    options: ReadOptions,
    where: str,
    *,
    encodes_lone: bool,
    is_stated: bool,
) -> RowPlan:
    """Look at the columns and decide.

    encodes_lone: a text alone is encoded too, and is not the observation itself. is_stated: the
    files state their spaces, so nothing is encoded.
    Raises: SourceInvalid, ConfigInvalid.
    """
    if options.timezone is not None:
        check_timezone(options.timezone)
    units = units_of(options)
    fills = typed_fills(_with_known_fills(options, seen), seen, where)
    if is_stated and options.encoding is None:
        options = replace(options, encoding=Encoding())
    looked_at = columns_to_look_at(layout, seen.schema, options, encodes_lone=encodes_lone)
    contents = contents_of(
        tables, seen, looked_at, _vocabularies(options.encoding), options.max_categories
    )
    preparation = Preparation(
        seen=seen,
        fills=fills,
        times=frozenset(_times(layout, contents, fills, options, seen)),
        timezone=options.timezone,
        episode_by=layout.episode_by,
    )
    schema = preparation.survey().schema
    encoder = find_encoder(layout, schema, contents, fills, options, encodes_lone=encodes_lone)
    _refuse_without_zone(layout, schema, encoder)
    layout = keeping(layout, used_by(encoder, layout), seen.schema.names)
    return RowPlan(layout, preparation, encoder, units)


def known_columns(options: ReadOptions, names: list[str]) -> Mapping[str, str]:
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


def _with_known_fills(options: ReadOptions, seen: Survey) -> Mapping[str, str]:
    fields = () if options.encoding is None else options.encoding.fields
    known = {one.name: one.fill for one in fields if one.name in seen.schema.names}
    return {**{n: _text(fill) for n, fill in known.items() if fill is not None}, **options.fill}


def _text(fill: Any) -> str:
    if isinstance(fill, float) and fill.is_integer():
        return str(int(fill))  # a column of integers takes no 3.0
    return str(fill).lower() if isinstance(fill, bool) else str(fill)


def _vocabularies(encoding: Encoding | None) -> dict[str, tuple[str, ...]]:
    fields = () if encoding is None else encoding.fields
    return {one.name: one.vocabulary for one in fields if one.kind == CATEGORY}


def _times(
    layout: Layout,
    contents: Mapping[str, Contents],
    fills: Mapping[str, pa.Scalar],
    options: ReadOptions,
    seen: Survey,
) -> list[str]:
    """Return the columns that are read as times. Raises: SourceInvalid for want of a zone."""
    categories = _vocabularies(options.encoding)
    observed = {name for ours in OBSERVATIONS for name in layout.fields.get(ours, ())}
    times = [name for name in observed if options.timezone and _is_date(seen, name)]
    for name, found in contents.items():
        if not found.is_time or name in layout.fields["action"] or name in categories:
            continue
        if name in fills and time_text(fills[name], options.timezone or "UTC") is None:
            continue
        if found.has_zones or options.timezone is not None:
            times.append(name)
        elif name in observed:
            raise _no_zone(name, "text")
    return times


def _is_date(seen: Survey, name: str) -> bool:
    return bool(pa.types.is_date(seen.schema.field(name).type))


def _refuse_without_zone(layout: Layout, schema: pa.Schema, encoder: Encoder) -> None:
    for ours in encoder.encodes:
        for name in layout.fields[ours]:
            kind = schema.field(name).type
            if pa.types.is_date(kind) or (pa.types.is_timestamp(kind) and kind.tz is None):
                raise _no_zone(name, str(kind))


def _no_zone(name: str, kind: str) -> SourceInvalid:
    return SourceInvalid(
        f"column {name!r}: found times without a zone ({kind}), expected times with one, such as "
        "2026-01-31T12:00:00Z. Say which with --timezone, or leave the column out."
    )
