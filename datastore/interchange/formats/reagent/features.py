"""ReAgent's features: sparse ids and values of a row, laid out as dense vectors.

They come as a JSON object or a map (id to value), or, once ReAgent has laid them out itself, as a
list and a second list of which are present.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.sources.compression import refuse_bomb
from replaylake.datastore.storage.arrow_values import combine_chunks


@dataclass(frozen=True)
class Features:
    """n rows of features: `values` [n, k] (0 where absent), `present` bool [n, k], k ids `keys`."""

    keys: tuple[str, ...]
    values: Array
    present: Array

    def dense(self, keys: Sequence[str]) -> Features:
        """Return the features of these ids, in their order; ids that are not here are absent."""
        if tuple(keys) == self.keys:
            return self
        shape = (len(self.values), len(keys))
        values, present = np.zeros(shape, self.values.dtype), np.zeros(shape, bool)
        places = {key: place for place, key in enumerate(keys)}
        ours = [i for i, key in enumerate(self.keys) if key in places]
        theirs = [places[self.keys[i]] for i in ours]
        values[:, theirs], present[:, theirs] = self.values[:, ours], self.present[:, ours]
        return Features(tuple(keys), values, present)

    def column(self, fill: float | None, known: Array | None = None) -> pa.Array:
        """Return them as a list a row; null where absent, unless filled, and where not `known`."""
        values, absent = self.values, ~self.present.reshape(-1)
        if fill is not None:
            values = np.where(self.present, values, fill).astype(values.dtype)
        is_whole = fill is not None or not absent.any()
        flat = pa.array(values.reshape(-1), mask=None if is_whole else absent)
        mask = None if known is None or known.all() else pa.array(~known)
        return pa.FixedSizeListArray.from_arrays(flat, len(self.keys), mask=mask)


def sort_keys(keys: set[str]) -> list[str]:
    """Sort ids: as numbers where all are, else as texts."""
    if all(key.lstrip("-").isdecimal() for key in keys):
        return sorted(keys, key=lambda key: (int(key), key))
    return sorted(keys)


def is_sparse(kind: pa.DataType) -> bool:
    """Whether a column holds features by id."""
    return bool(pa.types.is_struct(kind) or pa.types.is_map(kind))


def count_width(column: Any) -> int:
    """Return how many values a row of features can take; nothing is laid out for it."""
    kind = column.type
    if pa.types.is_struct(kind):
        return int(kind.num_fields)
    if pa.types.is_map(kind):
        return len(pc.unique(_keys(combine_chunks(column))))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return int(pc.max(pc.list_value_length(column)).as_py() or 0)
    return 1


def parse_features(column: Any, where: str, presence: Any = None) -> Features:
    """Read a column of features.

    Raises: SourceInvalidError if they are no numbers by id, or a list.
    """
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    kind = column.type
    refuse_bomb(where, 8 * len(column) * count_width(column), column.nbytes)
    try:
        if pa.types.is_struct(kind):
            return _from_struct(column)
        if pa.types.is_map(kind):
            return _from_map(column)
        if pa.types.is_null(kind):
            return Features((), np.zeros((len(column), 0)), np.zeros((len(column), 0), bool))
        return _from_lists(column, presence)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise SourceInvalidError(
            f"{where}: found {kind}, expected numbers by feature id, or a list of numbers "
            f"({error}). Write the features as numbers."
        ) from error


def _from_struct(column: pa.Array) -> Features:
    parts = [pc.struct_field(column, [i]) for i in range(column.type.num_fields)]
    # A key that no row here has a value of is not a feature yet.
    used = [i for i, part in enumerate(parts) if not pa.types.is_null(part.type)]
    values = np.zeros((len(column), len(used)))
    present = np.zeros((len(column), len(used)), bool)
    for place, i in enumerate(used):
        values[:, place] = _numbers(parts[i])
        present[:, place] = np.asarray(parts[i].is_valid())
    return Features(tuple(column.type.field(i).name for i in used), values, present)


def _from_map(column: pa.Array) -> Features:
    offsets = np.asarray(column.offsets)
    first, last = int(offsets[0]), int(offsets[-1])
    keys = _keys(column).cast(pa.string()).dictionary_encode()
    items = column.items.slice(first, last - first)
    rows = np.repeat(np.arange(len(column)), np.diff(offsets))
    names = keys.dictionary.to_pylist()
    codes = np.asarray(keys.indices).astype(np.int64)
    values = np.zeros((len(column), len(names)), _dtype(items.type))
    present = np.zeros(values.shape, bool)
    values[rows, codes], present[rows, codes] = _numbers(items), np.asarray(items.is_valid())
    return Features(tuple(names), values, present)


def _keys(column: pa.Array) -> pa.Array:
    first, last = column.offsets[0].as_py(), column.offsets[-1].as_py()
    return column.keys.slice(first, last - first)


def _from_lists(column: pa.Array, presence: Any) -> Features:
    lengths = np.asarray(pc.list_value_length(column).fill_null(0)).astype(np.int64)
    items = pc.list_flatten(column)
    width = int(lengths.max(initial=0))
    values = np.zeros((len(column), width), _dtype(items.type))
    is_there = np.arange(width) < lengths[:, None]
    values[is_there] = _numbers(items)
    present = np.zeros(values.shape, bool)
    present[is_there] = np.asarray(items.is_valid())
    if presence is not None:
        flags = _from_lists(combine_chunks(presence), None)
        present &= flags.dense([str(i) for i in range(width)]).values.astype(bool)
    return Features(tuple(str(i) for i in range(width)), values, present)


def _numbers(column: pa.Array) -> Array:
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
        raise TypeError(f"values are {column.type}")
    return np.asarray(column.fill_null(0) if column.null_count else column)


def _dtype(kind: pa.DataType) -> Any:
    return np.float32 if kind == pa.float32() else np.float64
