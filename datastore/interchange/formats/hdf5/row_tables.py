"""Row tables: HDF5 files of one row a step in order, as D4RL and d3rlpy 1 lay them out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from replaylake.datastore.episodes.schema import TIMESTAMP_TYPE
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.hdf5.files import (
    NUMBERS,
    TEXT,
    Hdf5Array,
    Hdf5File,
)
from replaylake.datastore.interchange.formats.tabular.episode_rows import (
    CHUNK_BYTES,
    EPISODE_ID,
    to_column,
)
from replaylake.datastore.interchange.formats.tabular.infos import (
    TIMESTAMP_INFO,
)
from replaylake.datastore.interchange.formats.tabular.tables import Chunk, ChunkSchema, TableSource
from replaylake.datastore.interchange.sources.source import SourceFile
from replaylake.datastore.interchange.sources.source_errors import format_names

REQUIRED: Final = ("observations", "actions", "rewards", "terminals")
_OUR_NAMES: Final = ("observation", "action", "reward", "terminated")
TIMEOUTS: Final = "timeouts"
NEXT: Final = "next_observations"
METADATA: Final = "metadata"
_BLOCK_ROWS: Final = 131_072
_LARGEST_BLOCK_BYTES: Final = 128 << 20


@dataclass(frozen=True)
class RowTableContents:
    """What a file holds: its columns by path, its number of rows, what is left out and why."""

    columns: Mapping[str, Hdf5Array]
    num_rows: int
    notes: tuple[str, ...]


class RowTables(TableSource):
    """Chunks of HDF5 files whose datasets have a row a step; schemas are those declared.

    by_file: rows are given the number of their file, so that one's last episode, which often has
    no end, does not go on in the next file.
    """

    reread_cheaply = True

    def __init__(
        self,
        files: Sequence[SourceFile],
        *,
        by_file: bool = False,
        mapping: Mapping[str, str] | None = None,
    ) -> None:
        self._files = files
        self._by_file = by_file
        mapping = mapping or {}
        self._required = required_datasets(mapping)
        self._ends = (self._required[-1], mapping.get("truncated", TIMEOUTS))
        # One value a step: some D4RL files keep them as [N, 1].
        self._scalars = (self._required[-2], *self._ends)

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
        first_id = 0
        for file in self._files:
            with Hdf5File(file) as hdf5:
                contents = open_contents(hdf5, file, self._required)
                step = _rows_at_once(contents)
                names = [n for n in contents.columns if columns is None or n in columns]
                for start in range(0, contents.num_rows, step):
                    stop = min(start + step, contents.num_rows)
                    rows = _columns(contents, names, start, stop, self._scalars)
                    if self._by_file:
                        rows[EPISODE_ID], first_id = _number_episodes(
                            contents, self._ends, start, stop, first_id
                        )
                    yield Chunk(file, start, pa.table(rows))
            first_id += 1

    def schemas(self) -> Iterator[ChunkSchema]:
        for file in self._files:
            with Hdf5File(file) as hdf5:
                contents = open_contents(hdf5, file, self._required)
                columns = _columns(contents, contents.columns, 0, 0, self._scalars)
                if self._by_file:
                    columns[EPISODE_ID] = pa.array([], pa.int64())
                yield ChunkSchema(file, 0, contents.num_rows, pa.table(columns).schema)


def required_datasets(mapping: Mapping[str, str]) -> tuple[str, ...]:
    """Return the datasets that a file needs, where some are mapped (ours=theirs)."""
    both = zip(_OUR_NAMES, REQUIRED, strict=True)
    return tuple(mapping.get(ours, theirs) for ours, theirs in both)


def open_contents(
    hdf5: Hdf5File, file: SourceFile, required: Sequence[str] = REQUIRED
) -> RowTableContents:
    """Open the datasets of one row a step; as many rows as the rewards have.

    Raises: SourceInvalidError if a required one is absent.
    """
    paths = [path for path in hdf5.arrays() if path.split("/")[0] != METADATA]
    for ours, name in zip(_OUR_NAMES, required, strict=True):
        # A vector of several datasets, or a pattern of their names, is found further on.
        is_vector = ours in ("observation", "action")
        if name not in paths and not (is_vector and {*",*?["} & {*name}):
            raise SourceInvalidError(
                f"{file.name}: found the datasets {format_names(paths)}, expected {name}. Name "
                f"it with "
                f"`mapping` {ours}=DATASET, or the format with `format` if the file has another "
                "one."
            )
    arrays = {path: hdf5.array(path) for path in paths}
    num_rows = len(arrays[required[_OUR_NAMES.index("reward")]])
    columns, lost = {}, []
    for path, array in arrays.items():
        stands = array.shape and array.kind in (NUMBERS, TEXT) and 0 not in array.shape[1:]
        if stands and len(array) == num_rows and (array.kind == NUMBERS or len(array.shape) == 1):
            columns[path] = array
        elif path in (*required, TIMEOUTS, NEXT):
            raise SourceInvalidError(
                f"{file.name}: {path} is {array.kind} of shape {list(array.shape)}, expected "
                f"numbers in {num_rows} rows, as many as the rewards. The file may be truncated: "
                "write it again."
            )
        else:
            lost.append(f"{path} {array.kind}{list(array.shape)}")
    notes = (f"left out, not one number or text a step: {format_names(lost)}",) if lost else ()
    return RowTableContents(columns, num_rows, notes)


def _rows_at_once(contents: RowTableContents) -> int:
    arrays = contents.columns.values()
    row_bytes = max(1, sum(array.row_bytes for array in arrays))
    # A chunk that is packed as one is read as one, unless it is too large for that.
    packed = min(max(array.chunk_rows for array in arrays), _LARGEST_BLOCK_BYTES // row_bytes)
    return max(1, min(_BLOCK_ROWS, CHUNK_BYTES // row_bytes), packed)


def _columns(
    contents: RowTableContents, names: Iterable[str], start: int, stop: int, scalars: Sequence[str]
) -> dict[str, Any]:
    arrays = {name: contents.columns[name] for name in names}
    return {n: _column(n, one, start, stop, n in scalars) for n, one in arrays.items()}


def _number_episodes(
    contents: RowTableContents, ends_in: Sequence[str], start: int, stop: int, first_id: int
) -> tuple[Array, int]:
    """Return an episode number for each row, and that of the row after the last."""
    ends = np.zeros(stop - start, bool)
    for name in ends_in:
        if name in contents.columns:
            flags = contents.columns[name].read(start, stop)
            ends |= (flags.reshape(len(ends), -1) != 0).any(axis=1)
    ids = first_id + np.cumsum(ends) - ends
    return ids, int(first_id + ends.sum())


def _column(name: str, array: Hdf5Array, start: int, stop: int, is_scalar: bool) -> Any:
    rows = array.read(start, stop)
    if array.kind == TEXT:
        return pa.array(rows, pa.string())
    if is_scalar and rows.ndim == 2 and rows.shape[1] == 1:
        rows = rows[:, 0]
    column = to_column(rows, name)
    return column.cast(TIMESTAMP_TYPE) if _is_time(name, array) else column


def _is_time(name: str, array: Hdf5Array) -> bool:
    return name == TIMESTAMP_INFO and array.dtype == np.int64 and len(array.shape) == 1
