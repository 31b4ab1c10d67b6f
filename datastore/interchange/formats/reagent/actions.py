"""ReAgent's actions: names, or the features of one; and which of them were possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import SourceInvalid
from replaylake.datastore.interchange.formats.reagent.features import (
    features_of,
    in_order,
    is_sparse,
)
from replaylake.datastore.interchange.formats.tabular.arrays import is_text
from replaylake.datastore.interchange.formats.tabular.tables import Chunk

ACTION: Final = "action"
POSSIBLE, POSSIBLE_MASK = "possible_actions", "possible_actions_mask"


class Actions:
    """What the actions of a whole source are; `add` sees each chunk before anything is asked.

    Features of which each row has one 1 and else 0 are names: the ids. Others are a vector in the
    order of their ids. `known` are the names that a dataset has already, in its order.
    """

    def __init__(self, known: Sequence[str] | None, fill: float | None) -> None:
        self._known = known
        self._fill = fill
        self._ids: set[str] = set()
        self._taken: set[str] = set()
        self._possible: set[str] = set()
        self._is_one_hot = True

    @property
    def names(self) -> list[str]:
        """Return the names, in the order of a mask; none where actions are numbers."""
        found = self._taken if self._is_one_hot else ()
        return [*self._known] if self._known is not None else sorted(found)

    @property
    def never_taken(self) -> list[str]:
        """Return the names of actions that were possible, and are in no row."""
        return sorted(self._possible - set(self.names)) if self.names else []

    @property
    def is_unread(self) -> bool:
        """Whether rows say which actions were possible, but actions are numbers without names."""
        return bool(self._possible) and not self.names

    def add(self, chunk: Chunk) -> None:
        """Look at the actions of some rows. Raises: SourceInvalid."""
        column = chunk.table.column(ACTION)
        if is_sparse(column.type):
            found = features_of(column, _where(chunk, ACTION))
            is_flags = bool(((found.values == 0) | (found.values == 1)).all())
            self._is_one_hot &= is_flags and bool((found.values.sum(axis=1) == 1).all())
            self._ids |= set(found.keys)
            used = np.asarray(found.values.any(axis=0))
            self._taken |= {key for key, one in zip(found.keys, used, strict=True) if one}
        elif is_text(column.type):
            self._taken |= {name for name in pc.unique(column).to_pylist() if name}
        if POSSIBLE in chunk.table.schema.names:
            names, _ = _listed(chunk)
            self._possible |= {name for name in pc.unique(names).to_pylist() if name is not None}

    def column(self, chunk: Chunk) -> Any:
        """Return the rows' actions: text, or what the log has."""
        column = chunk.table.column(ACTION)
        if not is_sparse(column.type):
            return column
        found = features_of(column, _where(chunk, ACTION))
        if not self._is_one_hot:
            return found.dense(in_order(self._ids)).column(self._fill)
        if not found.keys:
            return pa.nulls(chunk.table.num_rows, pa.string())
        return pa.array(found.keys).take(pa.array(found.values.argmax(axis=1)))

    def masks(self, chunk: Chunk) -> Array | None:
        """Return which actions were possible, bool [n, A]; None where the log does not say."""
        columns = chunk.table.schema.names
        if POSSIBLE_MASK in columns:
            flags = features_of(chunk.table.column(POSSIBLE_MASK), _where(chunk, POSSIBLE_MASK))
            return flags.values.astype(np.bool_)
        if POSSIBLE not in columns or not self.names:
            return None
        masks = np.zeros((chunk.table.num_rows, len(self.names)), np.bool_)
        names, rows = _listed(chunk)
        places = pc.index_in(names, pa.array(self.names, pa.string()))
        known = np.asarray(places.is_valid())
        masks[rows[known], np.asarray(places.drop_null()).astype(np.int64)] = True
        return masks


def _listed(chunk: Chunk) -> tuple[pa.Array, Array]:
    """Return the names in lists of names, or of one-hot features, and the row of each."""
    lists = chunk.table.column(POSSIBLE).combine_chunks()
    if pa.types.is_null(lists.type):
        return pa.array([], pa.string()), np.zeros(0, np.int64)
    if not (pa.types.is_list(lists.type) or pa.types.is_large_list(lists.type)):
        raise SourceInvalid(
            f"{_where(chunk, POSSIBLE)}: found {lists.type}, expected a list of actions a row. "
            "Write it as ReAgent does."
        )
    items = pc.list_flatten(lists)
    rows = np.asarray(pc.list_parent_indices(lists)).astype(np.int64)
    if is_sparse(items.type):
        found = features_of(items, _where(chunk, POSSIBLE))
        if not found.keys:
            return pa.nulls(len(items), pa.string()), rows
        items = pa.array(found.keys).take(pa.array(found.values.argmax(axis=1)))
    elif not (is_text(items.type) or pa.types.is_integer(items.type)):
        return pa.nulls(len(items), pa.string()), rows
    return items.cast(pa.string()), rows


def _where(chunk: Chunk, name: str) -> str:
    return f"{chunk.file.name} from row {chunk.first_row}, column {name!r}"
