"""ReAgent's logs: JSON lines of sparse features, and the Parquet that its workflows write.

One row is one decision of an episode (`mdp_id`). An id that a row lacks is absent, and ReAgent
would later put a value in its place (MISSING_VALUE, then the mean); here that takes a --fill.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import ConfigInvalidError, SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions, SourceReader
from replaylake.datastore.interchange.formats.generic.jsonl import JsonTables, first_object
from replaylake.datastore.interchange.formats.generic.parquet import (
    ParquetTables,
    is_parquet,
    parquet_columns,
)
from replaylake.datastore.interchange.formats.reagent.features import (
    Features,
    count_width,
    is_sparse,
    parse_features,
    sort_keys,
)
from replaylake.datastore.interchange.formats.tabular.arrays import is_text
from replaylake.datastore.interchange.formats.tabular.reader import Declaration, TabularReader
from replaylake.datastore.interchange.formats.tabular.tables import (
    CachedTables,
    Chunk,
    TableSource,
    check_fields,
)
from replaylake.datastore.interchange.sources.compression import refuse_bomb
from replaylake.datastore.interchange.sources.source import SourceFile

ACTION: Final = "action"
POSSIBLE, POSSIBLE_MASK = "possible_actions", "possible_actions_mask"
_MASK: Final = "action_mask"
# What says again what the following row says.
_RESTATED: Final = ("next_action", "possible_next_actions", "possible_next_actions_mask")
_PRESENCE: Final = "_presence"
_PIECE_VALUES: Final = 2 << 20


class SourceActions:
    """What the actions of a whole source are; `add` sees each chunk before anything is asked.

    Features of which each row has one 1 and else 0 are names: the ids. Others are a vector in the
    order of their ids. `known` are the names that a dataset has already, in its order.
    """

    def __init__(self, known: Sequence[str] | None, fill: float | None) -> None:
        self._known = known
        self._fill = fill
        self._ids: set[str] = set()
        self._columns: set[str] = set()
        self._possible: set[str] = set()
        self._is_one_hot = True

    @property
    def names(self) -> list[str]:
        """Return the names, in the order of a mask; none where actions are numbers."""
        columns = self._columns if self._is_one_hot else ()
        return [*self._known] if self._known is not None else sorted(columns)

    @property
    def never_taken(self) -> list[str]:
        """Return the names of actions that were possible, and are in no row."""
        return sorted(self._possible - set(self.names)) if self.names else []

    @property
    def is_unread(self) -> bool:
        """Whether rows say which actions were possible, but actions are numbers without names."""
        return bool(self._possible) and not self.names

    def add(self, chunk: Chunk) -> None:
        """Look at the actions of some rows. Raises: SourceInvalidError."""
        column = chunk.table.column(ACTION)
        if is_sparse(column.type):
            features = parse_features(column, _where(chunk, ACTION))
            is_flags = bool(((features.values == 0) | (features.values == 1)).all())
            self._is_one_hot &= is_flags and bool((features.values.sum(axis=1) == 1).all())
            self._ids |= set(features.keys)
            used = np.asarray(features.values.any(axis=0))
            self._columns |= {key for key, one in zip(features.keys, used, strict=True) if one}
        elif is_text(column.type):
            self._columns |= {name for name in pc.unique(column).to_pylist() if name}
        if POSSIBLE in chunk.table.schema.names:
            names, _ = _flatten_possible(chunk)
            self._possible |= {name for name in pc.unique(names).to_pylist() if name is not None}

    def column(self, chunk: Chunk) -> Any:
        """Return the rows' actions: text, or what the log has."""
        column = chunk.table.column(ACTION)
        if not is_sparse(column.type):
            return column
        features = parse_features(column, _where(chunk, ACTION))
        if not self._is_one_hot:
            return features.dense(sort_keys(self._ids)).column(self._fill)
        if not features.keys:
            return pa.nulls(chunk.table.num_rows, pa.string())
        return pa.array(features.keys).take(pa.array(features.values.argmax(axis=1)))

    def masks(self, chunk: Chunk) -> Array | None:
        """Return which actions were possible, bool [n, A]; None where the log does not say."""
        columns = chunk.table.schema.names
        if POSSIBLE_MASK in columns:
            flags = parse_features(chunk.table.column(POSSIBLE_MASK), _where(chunk, POSSIBLE_MASK))
            return flags.values.astype(np.bool_)
        if POSSIBLE not in columns or not self.names:
            return None
        masks = np.zeros((chunk.table.num_rows, len(self.names)), np.bool_)
        names, rows = _flatten_possible(chunk)
        places = pc.index_in(names, pa.array(self.names, pa.string()))
        known = np.asarray(places.is_valid())
        masks[rows[known], np.asarray(places.drop_null()).astype(np.int64)] = True
        return masks


def _find_unknown_masks(chunk: Chunk) -> Array:
    """Return which rows name no possible action: where one was taken, that says nothing of others.

    ReAgent's logs have such rows at the end of an episode. bool [n].
    """
    if POSSIBLE_MASK in chunk.table.schema.names:
        flags = parse_features(chunk.table.column(POSSIBLE_MASK), _where(chunk, POSSIBLE_MASK))
        return np.asarray(~flags.values.astype(np.bool_).any(axis=1))
    if POSSIBLE in chunk.table.schema.names:
        _, rows = _flatten_possible(chunk)
        return np.asarray(np.bincount(rows, minlength=chunk.table.num_rows) == 0)
    return np.zeros(chunk.table.num_rows, np.bool_)


def _flatten_possible(chunk: Chunk) -> tuple[pa.Array, Array]:
    """Return the names in lists of names, or of one-hot features, and the row of each."""
    lists = chunk.table.column(POSSIBLE).combine_chunks()
    if pa.types.is_null(lists.type):
        return pa.array([], pa.string()), np.zeros(0, np.int64)
    if not (pa.types.is_list(lists.type) or pa.types.is_large_list(lists.type)):
        raise SourceInvalidError(
            f"{_where(chunk, POSSIBLE)}: found {lists.type}, expected a list of actions a row. "
            "Write it as ReAgent does."
        )
    items = pc.list_flatten(lists)
    rows = np.asarray(pc.list_parent_indices(lists)).astype(np.int64)
    if is_sparse(items.type):
        features = parse_features(items, _where(chunk, POSSIBLE))
        if not features.keys:
            return pa.nulls(len(items), pa.string()), rows
        items = pa.array(features.keys).take(pa.array(features.values.argmax(axis=1)))
    elif not (is_text(items.type) or pa.types.is_integer(items.type)):
        return pa.nulls(len(items), pa.string()), rows
    return items.cast(pa.string()), rows


def _where(chunk: Chunk, name: str) -> str:
    return f"{chunk.file.name} from row {chunk.first_row}, column {name!r}"


_STATE, _NEXT = "state_features", "next_state_features"
_NOT_TERMINAL, _TERMINATED, _SPAN = "not_terminal", "terminated", "step"
_KNOWN_COLUMNS: Final = {"mdp_id", "sequence_number", _STATE, ACTION}
_FIELDS: Final = {
    "episode_id": "mdp_id",
    "step": "sequence_number",
    "observation": _STATE,
    "action": ACTION,
}


class ReagentTables(TableSource):
    """Chunks with dense vectors for features, and names for actions that are features.

    All ids are found in a pass before the first chunk.
    """

    # What costs time, the parsing, is kept below.
    reread_cheaply = True

    def __init__(
        self, rows: TableSource, fill: Mapping[str, float], actions: SourceActions
    ) -> None:
        self._rows = CachedTables(rows)
        self._fill = fill.get(_STATE)
        self._actions = actions
        self._keys: list[str] = []
        self.columns: set[str] = set()
        self.notes: list[str] = []
        self._has_masks = True
        self._survey()

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        for piece in self._pieces():
            yield replace(piece, table=self._table(piece))

    def _pieces(self) -> Iterator[Chunk]:
        """Cut the chunks so that the vectors of one, laid out, are small."""
        for chunk in self._rows.chunks():
            _check_columns(chunk)
            names = [name for name in (_STATE, _NEXT, ACTION) if name in chunk.table.schema.names]
            widest = max(count_width(chunk.table.column(name)) for name in names)
            num = max(_PIECE_VALUES // max(widest, len(self._keys), 1), 1)
            for start in range(0, chunk.table.num_rows, num):
                yield chunk.part(start, chunk.table.slice(start, num))

    def _survey(self) -> None:
        keys: set[str] = set()
        num_present: Counter[int] = Counter()
        stored = num_empty_masks = num_unknown = num_ends = 0
        for chunk in self._pieces():
            state, following = _features(chunk, _STATE), _next_features(chunk)
            keys |= set(state.keys) | set(following.keys if following else ())
            num_present.update(state.present.sum(axis=1).tolist())
            stored += chunk.table.nbytes
            refuse_bomb(chunk.file.name, 8 * num_present.total() * len(keys), stored)
            self._actions.add(chunk)
            self.columns |= set(chunk.table.schema.names)
            ended = _find_terminal(chunk, following)
            num_ends += int(ended.sum()) if _NOT_TERMINAL not in chunk.table.schema.names else 0
            unknown = _find_unknown_masks(chunk)
            num_unknown += int(unknown.sum())
            if POSSIBLE_MASK in self.columns:
                num_empty_masks += int((ended & unknown).sum())
        self._keys = sort_keys(keys)
        self._has_masks = num_unknown < num_present.total()
        num_lacking = sum(n for present, n in num_present.items() if present < len(keys))
        has_others = self._has_masks and (self._actions.names or POSSIBLE_MASK in self.columns)
        num_others = num_unknown - num_empty_masks if has_others else 0
        self._note(num_lacking, num_ends, num_empty_masks, num_others)

    def _note(
        self, num_lacking: int, num_ends: int, num_empty_masks: int, num_unknown: int
    ) -> None:
        if num_lacking:
            filled = (
                f"`fill` put {self._fill} there"
                if self._fill is not None
                else ("give what should stand there with `fill` state_features=VALUE")
            )
            self.notes.append(
                f"{num_lacking} rows lack some of {len(self._keys)} features: {filled}"
            )
        if num_ends:
            self.notes.append(
                f"{num_ends} rows have no next state: taken as terminal, as ReAgent does"
            )
        if num_empty_masks:
            self.notes.append(
                f"{num_empty_masks} terminal rows have an empty {POSSIBLE_MASK}, though an action "
                "was taken: read as all possible"
            )
        if num_unknown:
            self.notes.append(
                f"{num_unknown} rows name no possible action, though one was taken: what was "
                "possible is unknown, and read as all possible"
            )
        if never := self._actions.never_taken:
            self.notes.append(f"actions possible but never taken, left out: {', '.join(never)}")
        if self._actions.is_unread and POSSIBLE_MASK not in self.columns:
            self.notes.append(
                f"{POSSIBLE} left out: the actions are numbers and not names, which a mask follows"
            )
        if _SPAN in self.columns:
            self.notes.append(f"column {_SPAN!r} left out: it is 1 in each row, a row a step")
        if restated := sorted(self.columns & {*_RESTATED}):
            self.notes.append(
                f"columns that restate the following row, left out: {', '.join(restated)}"
            )

    def _table(self, chunk: Chunk) -> pa.Table:
        names = chunk.table.schema.names
        for field in chunk.table.schema:
            check_fields(chunk.file, field.name, field.type)
        omitted = {*_RESTATED, POSSIBLE, POSSIBLE_MASK, _NOT_TERMINAL, _SPAN}
        omitted |= {name for name in names if name.endswith(f"features{_PRESENCE}")}
        columns = {n: _to_storable(chunk.table.column(n)) for n in names if n not in omitted}
        if _SPAN in names:
            _refuse_spans(chunk)
        state, following = _features(chunk, _STATE), _next_features(chunk)
        ended = _find_terminal(chunk, following)
        columns[_STATE] = state.dense(self._keys).column(self._fill)
        if following is not None:
            has_next = following.present.any(axis=1) & ~ended
            columns[_NEXT] = following.dense(self._keys).column(self._fill, has_next)
        if following is not None or _NOT_TERMINAL in names:
            columns[_TERMINATED] = pa.array(ended)
        columns[ACTION] = self._actions.column(chunk)
        masks = self._actions.masks(chunk) if self._has_masks else None
        if masks is not None and masks.shape[1]:
            masks |= (_find_unknown_masks(chunk) | (ended & ~masks.any(axis=1)))[:, None]
            flat = pa.array(masks.reshape(-1))
            columns[_MASK] = pa.FixedSizeListArray.from_arrays(flat, masks.shape[1])
        return pa.table(columns)


class ReagentFormat:
    """ReAgent's JSON lines, and the Parquet files of its workflows."""

    name = "reagent"
    about = "ReAgent's logs: JSON lines of sparse features, Parquet of its workflows"
    is_folder = False

    def recognizes(self, files: Sequence[SourceFile]) -> bool:
        if is_parquet(files[0]):
            return _KNOWN_COLUMNS.issubset(parquet_columns(files[0]))
        return _KNOWN_COLUMNS.issubset(first_object(files[0]) or ())

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> SourceReader:
        rows: TableSource = ParquetTables(files) if is_parquet(files[0]) else JsonTables(files)
        fill = {n: _number(n, text) for n, text in options.fill.items() if n in (_STATE, ACTION)}
        known = options.encoding.action_names if options.encoding is not None else None
        tables = ReagentTables(rows, fill, SourceActions(known, fill.get(ACTION)))
        rest = {name: text for name, text in options.fill.items() if name not in fill}
        fields = _FIELDS | ({"next_observation": _NEXT} if _NEXT in tables.columns else {})
        declared = Declaration(fields, notes=tables.notes, observed=_STATE)
        return TabularReader(tables, replace(options, fill=rest), files[0].name, declared)


def _next_features(chunk: Chunk) -> Features | None:
    return _features(chunk, _NEXT) if _NEXT in chunk.table.schema.names else None


def _features(chunk: Chunk, name: str) -> Features:
    table, presence = chunk.table, f"{name}{_PRESENCE}"
    flags = table.column(presence) if presence in table.schema.names else None
    where = f"{chunk.file.name} from row {chunk.first_row}, column {name!r}"
    return parse_features(table.column(name), where, flags)


def _find_terminal(chunk: Chunk, following: Features | None) -> Array:
    """Return which rows are terminal: by their flag, or because they have no next state."""
    if _NOT_TERMINAL not in chunk.table.schema.names:
        none = np.zeros(chunk.table.num_rows, np.bool_)
        return none if following is None else np.asarray(~following.present.any(axis=1))
    flags = chunk.table.column(_NOT_TERMINAL)
    if not pa.types.is_boolean(flags.type) or flags.null_count:
        raise SourceInvalidError(
            f"{chunk.file.name} from row {chunk.first_row}: column {_NOT_TERMINAL!r} is "
            f"{flags.type} with {flags.null_count} nulls, expected true or false in each row. "
            "Correct the log."
        )
    return ~np.asarray(flags)


def _check_columns(chunk: Chunk) -> None:
    for name in sorted(_KNOWN_COLUMNS):
        if name not in chunk.table.schema.names:
            raise SourceInvalidError(
                f"{chunk.file.name} from row {chunk.first_row}: found no {name}, expected it as "
                "ReAgent writes it. Name another format with `format`."
            )


def _refuse_spans(chunk: Chunk) -> None:
    if others := [one for one in chunk.table.column(_SPAN).to_pylist() if one not in (1, None)]:
        raise SourceInvalidError(
            f"{chunk.file.name}: column {_SPAN!r} holds {others[0]}, expected 1: a row over "
            "several steps is not a transition. Write the log with one step per row."
        )


def _to_storable(column: Any) -> Any:
    """Return a column as it is, but values by id, as of metrics, as JSON text."""
    if not is_sparse(column.type):
        return column

    def text(value: Any) -> str | None:
        if value is None:
            return None
        items = value.items() if isinstance(value, dict) else value
        return json.dumps({key: one for key, one in items if one is not None}, default=str)

    return pa.array([text(value) for value in column.to_pylist()], pa.string())


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigInvalidError(
            f"fill {name}={text}: found {text!r}, expected a number for absent features.",
            parameter="fill",
        ) from error
