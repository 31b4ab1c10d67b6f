"""Ordering: an episode's rows by columns of the log, such as an hour and an id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.errors import SourceInvalid
from replaylake.datastore.interchange.formats.tabular.arrays import is_text
from replaylake.datastore.interchange.formats.tabular.grouping import Groups


def in_order(table: pa.Table, groups: Groups, columns: Sequence[str]) -> tuple[pa.Table, Groups]:
    """Sort rows by group, then by each column, first to last: times, numbers, text or flags.

    Rows that are alike in all of them stay in the source's order. Raises: SourceInvalid for a
    column of another kind.
    """
    keys = {"group": pa.array(groups.codes)}
    for number, name in enumerate(columns):
        kind = table.schema.field(name).type
        if not _is_ordered(kind):
            raise SourceInvalid(
                f"column {name!r}: found {kind}, expected times, numbers or text to put rows in "
                "order by. Correct --order-by."
            )
        keys[str(number)] = table.column(name)
    order = pc.sort_indices(pa.table(keys), sort_keys=[(key, "ascending") for key in keys])
    rows = np.asarray(order).astype(np.int64)
    if (np.diff(rows) == 1).all():
        return table, groups
    return table.take(order), replace(groups, codes=groups.codes[rows])


def _is_ordered(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_temporal(kind)
        or types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_decimal(kind)
        or types.is_boolean(kind)
        or types.is_null(kind)
        or is_text(kind)
    )
