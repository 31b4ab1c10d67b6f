"""Bandit logs: one row is one decision, of a context, an action, its propensity and a reward.

The Open Bandit Dataset (Saito et al. 2021, arXiv:2008.07146) is known by its columns; other logs
are mapped. Slates, several actions of one decision, are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.errors import ReplayLakeError, SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions, SourceReader
from replaylake.datastore.interchange.formats.generic.csv import (
    CsvTables,
    csv_columns,
    numeric_columns,
    text_columns,
)
from replaylake.datastore.interchange.formats.generic.jsonl import JsonTables, first_object
from replaylake.datastore.interchange.formats.generic.parquet import (
    ParquetTables,
    is_parquet,
    parquet_columns,
)
from replaylake.datastore.interchange.formats.tabular.fields import ALIASES
from replaylake.datastore.interchange.formats.tabular.reader import Declaration, TabularReader
from replaylake.datastore.interchange.formats.tabular.tables import CachedTables, TableSource
from replaylake.datastore.interchange.sources.source import SourceFile
from replaylake.datastore.storage.arrow_values import is_list

# The Open Bandit Dataset's; the propensity is of the item at its position, which is thus context.
_ACTION: Final = "item_id"
_REWARD: Final = "click"
_PROPENSITIES: Final = ("propensity_score", "pscore", "action_prob")
_CONTEXT: Final = ("user_feature_*", "position")
_ITEM_FEATURE: Final = "item_feature_"
# What other logs of this kind call theirs; mapped where `--format bandit` says that it is one.
_CONTEXTS: Final = ("context", "context_*", "position")
_PROPENSITY_NAMES: Final = ("prob", "probability")
# Files that are asked whether they are of this kind: an item table may come first.
_NUM_PROBED: Final = 16
# Several rows of one of these are several actions of one decision.
SLATE_COLUMNS: Final = ("impression_id", "slate_id", "request_id")


class BanditFormat:
    """One-step logs: the Open Bandit Dataset by itself, others by `--map`."""

    name = "bandit"
    about = "one decision per row: the Open Bandit Dataset, or a similar table with `mapping`"
    is_folder = False

    def recognizes(self, files: Sequence[SourceFile]) -> bool:
        return any(is_open_bandit(_columns(file)) for file in files[:_NUM_PROBED])

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> SourceReader:
        mark = options.delimiter
        items = [file for file in files if _is_item_table(_columns(file, mark))]
        decisions = [file for file in files if file not in items]
        if not decisions:
            raise SourceInvalidError(
                f"{items[0].name}: found a table of items and their features, expected one row per "
                "decision. Ingest the log of decisions that it belongs to."
            )
        names = _columns(decisions[0], mark)
        notes = [
            f"{file.name}: left out, as it is a table of items and not of decisions"
            for file in items
        ]
        declared = declare_decisions(names, notes)
        mapping = {**declared.fields, **options.mapping}
        tables = CachedTables(_tables(decisions, mapping, options))
        _refuse_slates(tables, names, options, mapping.get("action", "action"))
        return TabularReader(tables, options, decisions[0].name, declared)


def declare_decisions(names: Sequence[str], notes: Sequence[str] = ()) -> Declaration:
    """Return the declaration of a log of decisions, from the names of its columns."""
    fields = _open_bandit_fields(names) if is_open_bandit(names) else _common_fields(names)
    return Declaration(fields=fields, one_step=True, notes=notes)


def is_open_bandit(names: Sequence[str]) -> bool:
    """Whether columns are those of the Open Bandit Dataset."""
    return _ACTION in names and _REWARD in names and _propensity(names) is not None


def _is_item_table(names: Sequence[str]) -> bool:
    has_features = any(name.startswith(_ITEM_FEATURE) for name in names)
    return _ACTION in names and has_features and _REWARD not in names


def _propensity(names: Sequence[str]) -> str | None:
    return next((name for name in _PROPENSITIES if name in names), None)


def _open_bandit_fields(names: Sequence[str]) -> dict[str, str]:
    context = [part for part in _CONTEXT if any(fnmatchcase(name, part) for name in names)]
    fields = {"action": _ACTION, "reward": _REWARD, "behavior_prob": str(_propensity(names))}
    return {**fields, "observation": ",".join(context)} if context else fields


def _common_fields(names: Sequence[str]) -> dict[str, str]:
    """Return what names say by themselves: context and context_*, position, propensity."""
    fields = {}
    context = [part for part in _CONTEXTS if any(fnmatchcase(name, part) for name in names)]
    if context and context != ["position"] and not {*ALIASES["observation"]} & {*names}:
        fields["observation"] = ",".join(context)
    chance = next((name for name in _PROPENSITY_NAMES if name in names), None)
    known = {*ALIASES["behavior_prob"], *ALIASES["behavior_log_prob"]}
    if chance is not None and not known & {*names}:
        fields["behavior_prob"] = chance
    return fields


def _columns(file: SourceFile, delimiter: str | None = None) -> list[str]:
    """Return a file's columns, from its first rows; none where it is no table."""
    try:
        if is_parquet(file):
            return parquet_columns(file)
        if (first := first_object(file)) is not None:
            return list(first)
        return csv_columns(file, delimiter)
    except ReplayLakeError:
        return []  # another format's file, or a broken one: reading it says so


def _tables(
    files: Sequence[SourceFile], mapping: Mapping[str, str], options: ReadOptions
) -> TableSource:
    if is_parquet(files[0]):
        return ParquetTables(files)
    if first_object(files[0]) is not None:
        return JsonTables(files)
    return CsvTables(
        files,
        text_columns(mapping),
        numeric_columns(mapping),
        delimiter=options.delimiter,
        decimal=options.decimal,
    )


def _refuse_slates(
    tables: CachedTables, names: Sequence[str], options: ReadOptions, action: str
) -> None:
    """Refuse several actions of one decision: a list in one row, or rows of one impression."""
    kinds = {field.name: field.type for part in tables.schemas() for field in part.schema}
    kind = kinds.get(action)
    if kind is not None and _is_slate(kind):
        raise SourceInvalidError(
            f"column {action!r}: found {kind}, expected one action per row: a list of actions is "
            "a slate, and slates are not supported. Write one row for each position, with the "
            "position in the context and the propensity of the item at that position."
        )
    mapped = {*options.mapping.values()}  # kept under another name: the caller knows what it is
    for name in SLATE_COLUMNS:
        if (
            name in names
            and name not in mapped
            and (example := _find_repeated(tables, name)) is not None
        ):
            raise SourceInvalidError(
                f"column {name!r}: found {example!r} in several rows, expected one row per "
                "decision: "
                "several are a slate, and slates are not supported. Keep one row of each, or, if "
                "each row was decided by itself (as at a position of its own, which is in the "
                f"context), say so with `mapping` {name}_={name}."
            )


def _is_slate(kind: pa.DataType) -> bool:
    types = pa.types
    if is_list(kind):
        return not types.is_floating(kind.value_type)
    return False


def _find_repeated(tables: CachedTables, name: str) -> Any:
    """Return a value that stands in two rows, or None; memory: 8 bytes a value."""
    hashes = [np.zeros(0, np.int64)]
    is_repeated = False
    for values in _distinct_values(tables, name):
        is_repeated |= any(num > 1 for _, num in values)
        hashes.append(np.fromiter(map(hash, (value for value, _ in values)), np.int64))
    found = np.sort(np.concatenate(hashes))
    several = {*found[1:][found[1:] == found[:-1]].tolist()}
    if not several and not is_repeated:
        return None
    seen: set[Any] = set()
    for values in _distinct_values(tables, name):
        for value, num in values:
            if num > 1 or value in seen:
                return value
            if hash(value) in several:
                seen.add(value)
    return None


def _distinct_values(tables: CachedTables, name: str) -> Iterator[list[tuple[Any, int]]]:
    """Yield each value of a chunk's column with how often it is there, one chunk at a time."""
    for chunk in tables.chunks([name]):
        counts = pc.value_counts(chunk.table.column(name).combine_chunks().drop_null())
        values, nums = counts.field("values").to_pylist(), counts.field("counts").to_pylist()
        yield [*zip(values, nums, strict=True)]
