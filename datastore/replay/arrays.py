"""Arrays: the columns of a snapshot decoded into numpy, shards side by side."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.schema import DatasetSpec, to_numpy
from replaylake.datastore.episodes.spaces import (
    Array,
    Space,
    Values,
    empty_values,
)
from replaylake.datastore.errors import SchemaMismatchError
from replaylake.datastore.storage.table.shard import decode_row_group, verify_row_groups
from replaylake.datastore.storage.table.table_schema import conform
from replaylake.datastore.storage.table.table_snapshot import TableSnapshot

# What every dataset has a value for in each row; a reward may be unknown where that is allowed.
DEFAULT_COLUMNS: Final = (
    schema.STEP,
    schema.OBSERVATION,
    schema.ACTION,
    schema.REWARD,
    schema.TERMINATED,
    schema.TRUNCATED,
)
READ_THREADS: Final = max(2, min(8, os.cpu_count() or 1))
# Shards hashed before it is their turn: keeps every thread busy between two shards.
_AHEAD: Final = 2

# A row group's rows, and where the first of them lies among all rows of the snapshot.
UseRows = Callable[[pa.Table, int], None]


@dataclass(frozen=True)
class RowGroup:
    """A row group: its number in a shard, and its first row among all rows of the snapshot."""

    path: Path
    number: int
    start: int
    num_rows: int


UseGroup = Callable[[RowGroup], None]


def read_arrays(
    snapshot: TableSnapshot, spec: DatasetSpec, columns: Sequence[str] | None = None
) -> dict[str, Values]:
    """Decode columns of all rows, in the snapshot's order.

    Observations and actions are arrays [N, *shape] of the space's own dtype, mappings of them for
    Dict and Tuple spaces; vectors [N, size]; numbers and flags [N]; times datetime64[us]; texts
    and names objects. Where a value is unknown, a float is NaN, a time NaT and a text None.
    Memory: the arrays and a few row groups.

    Raises: NotFoundError for a column that is absent; SchemaMismatchError for one that arrays
    cannot hold, by its type or because of nulls; ShardCorruptError.
    """
    names = list(DEFAULT_COLUMNS if columns is None else columns)
    fields = snapshot.select_fields(names)
    spaces: dict[str, Space] = {
        schema.OBSERVATION: spec.observation_space,
        schema.ACTION: spec.action_space,
    }
    num = snapshot.num_rows
    arrays: dict[str, Values] = {
        field.name: (
            empty_values(spaces[field.name], num)
            if field.name in spaces
            else _empty_column(field, num)
        )
        for field in fields
    }

    def fill(rows: pa.Table, start: int) -> None:
        for name in names:
            column = rows[name]
            # Combining copies also where there is nothing to combine.
            whole = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
            space = spaces.get(name)
            values = _decode(whole, name) if space is None else to_numpy(space, whole)
            _fill(arrays[name], values, start)

    for_each_row_group(snapshot, fields, fill)
    return arrays


def for_each_row_group(snapshot: TableSnapshot, fields: pa.Schema, use: UseRows) -> None:
    """Call `use` with the columns `fields` of every row group, from several threads at a time.

    Each shard's sha256 is checked before any of it is decoded, and files are read once as the page
    cache still holds what was hashed. Raises: ShardCorruptError, and what `use` raises.
    """
    texts = [field.name for field in fields if pa.types.is_string(field.type)]

    def decode(group: RowGroup) -> None:
        rows = decode_row_group(group.path, group.number, fields.names, as_dictionaries=texts)
        use(complete_columns(rows, fields), group.start)

    for_each_verified_group(snapshot, snapshot.paths(), decode)


def for_each_verified_group(
    snapshot: TableSnapshot, paths: Sequence[Path], use: UseGroup
) -> list[list[RowGroup]]:
    """Call `use` with every row group of the snapshot's files, from several threads at a time.

    paths: local copies of the files. Each one's sha256 is checked before any of its row groups is
    used. Returns the row groups of each file. Raises: ShardCorruptError, and what `use` raises. One
    row group alone is used in the caller's thread.
    """
    if len(snapshot.files) == 1:
        # As of a commit that is followed: threads of its own take longer than what they would do.
        sizes = verify_row_groups(paths[0], snapshot.files[0])
        groups = _row_groups(paths[0], sizes, 0)
        _use_all(use, groups)
        return [groups]
    with ThreadPoolExecutor(READ_THREADS, "replaylake-read") as pool:
        try:
            return _schedule(snapshot, paths, pool, use)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _use_all(use: UseGroup, groups: Sequence[RowGroup]) -> None:
    if len(groups) == 1:
        use(groups[0])
        return
    with ThreadPoolExecutor(READ_THREADS, "replaylake-read") as pool:
        for _ in pool.map(use, groups):
            pass


def _schedule(
    snapshot: TableSnapshot, paths: Sequence[Path], pool: ThreadPoolExecutor, use: UseGroup
) -> list[list[RowGroup]]:
    shards = list(zip(paths, snapshot.files, strict=True))
    checks = [pool.submit(verify_row_groups, *shard) for shard in shards[:_AHEAD]]
    using: list[list[Future[None]]] = []
    groups: list[list[RowGroup]] = []
    start = 0
    for number, (path, _) in enumerate(shards):
        sizes = checks[number].result()
        if number + _AHEAD < len(shards):
            checks.append(pool.submit(verify_row_groups, *shards[number + _AHEAD]))
        if number >= _AHEAD:
            # What was hashed long ago may have left the page cache: decoding keeps up.
            _finish(using.pop(0))
        found = _row_groups(path, sizes, start)
        start += sum(sizes)
        groups.append(found)
        using.append([pool.submit(use, group) for group in found])
    for futures in using:
        _finish(futures)
    return groups


def _row_groups(path: Path, sizes: Sequence[int], start: int) -> list[RowGroup]:
    """Return a file's row groups, of so many rows each; `start` is the first one's number."""
    starts = accumulate(sizes, initial=start)
    places = zip(starts, sizes, strict=False)
    return [RowGroup(path, number, *place) for number, place in enumerate(places)]


def _finish(futures: Sequence[Future[None]]) -> None:
    for future in futures:
        future.result()


def complete_columns(rows: pa.Table, fields: pa.Schema) -> pa.Table:
    """Return all the columns, texts as dictionaries, those that the shard is too old for null.

    Raises: SchemaMismatchError for nulls where the field has none.
    """
    names = [
        pa.field(field.name, schema.NAMES_TYPE, field.nullable)
        if pa.types.is_string(field.type)
        else field
        for field in fields
    ]
    return conform(rows, pa.schema(names))


def _empty_column(field: pa.Field, num: int) -> Array:
    types, kind = pa.types, field.type
    shape: tuple[int, ...] = (num,)
    if types.is_fixed_size_list(kind):
        kind, shape = kind.value_type, (num, kind.list_size)
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        return np.empty(shape, kind.to_pandas_dtype())
    if types.is_timestamp(kind) and len(shape) == 1:
        return np.empty(shape, "datetime64[us]")
    if (types.is_string(kind) or types.is_dictionary(kind)) and len(shape) == 1:
        return np.empty(shape, object)
    raise SchemaMismatchError(
        f"column {field.name!r}: found {field.type}, expected numbers, flags, times, texts or "
        "fixed-size lists of numbers. Read it as Arrow with `snapshot.table.read`, or with SQL."
    )


def _decode(column: pa.Array, name: str) -> Array:
    kind = column.type
    if pa.types.is_dictionary(kind):
        texts = np.asarray([*column.dictionary.to_pylist(), None], object)
        indices = column.indices.fill_null(len(texts) - 1).to_numpy(zero_copy_only=False)
        chosen: Array = texts[indices]
        return chosen
    is_list = pa.types.is_fixed_size_list(kind)
    values = column.flatten() if is_list and not column.null_count else column
    num_nulls = values.null_count
    if num_nulls and not (pa.types.is_floating(values.type) or pa.types.is_timestamp(kind)):
        raise SchemaMismatchError(
            f"column {name!r}: found {num_nulls} nulls in {len(values)} rows, expected a value in "
            "each. Read it as Arrow with `snapshot.table.read`, or with SQL."
        )
    array: Array = values.to_numpy(zero_copy_only=False)
    return array.reshape(len(column), kind.list_size) if is_list else array


def _fill(target: Values, values: Values, start: int) -> None:
    if isinstance(target, Mapping):
        parts: Any = values
        for key, sub in target.items():
            _fill(sub, parts[key], start)
    else:
        array: Any = target
        array[start : start + len(values)] = values
