"""Metrics of runs: numbers by update, in small Parquet files below `_lake/runs/<run_id>/metrics/`.

A run writes piece after piece. The newest is written again, whole, at each flush until it is full:
so a run of a million rows leaves some hundred files however often it was flushed, a reader sees
all of a flush or nothing, and a killed run loses what was added after its last one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from replaylake.datastore.errors import StorageError
from replaylake.datastore.storage.seals import (
    BrokenSealError,
    add_parquet_seal,
    check_parquet_seal,
    fill_parquet_seal,
)
from replaylake.datastore.storage.storage import Storage

RUNS: Final = "_lake/runs"
# A piece of so many rows takes some 50 kB, and a flush writes at most one.
PIECE_ROWS: Final = 8192
# Writing a piece takes two fsyncs, or a request to an object store; losing seconds costs little.
FLUSH_INTERVAL_S: Final = 5.0
# And never more than a fiftieth of the run's time, however far away the store is.
_WAIT_PER_FLUSH: Final = 50
_PIECE: Final = re.compile(rf"{RUNS}/([^/]+)/metrics/(\d{{6}})\.parquet")
_ROWS: Final = pa.schema(
    [
        pa.field("update", pa.int64(), nullable=False),
        pa.field("name", pa.string(), nullable=False),
        pa.field("value", pa.float64(), nullable=False),
        pa.field("measured_at", pa.timestamp("us", tz="UTC"), nullable=False),
    ]
)
_DICTIONARY_TYPE: Final = pa.dictionary(pa.int32(), pa.string())
METRICS: Final = pa.schema(
    [
        ("run_id", _DICTIONARY_TYPE),
        ("update", pa.int64()),
        ("name", _DICTIONARY_TYPE),
        ("value", pa.float64()),
        ("measured_at", pa.timestamp("us", tz="UTC")),
    ]
)
# By it, a file whose seal was damaged is told from one of an earlier release.
_SEALED_KEY: Final = b"replaylake.sealed"
_Row = tuple[int, str, float, int]


@dataclass(frozen=True)
class Curve:
    """One metric of a run: updates int64 [n] that only grow, and its values float64 [n] there."""

    updates: NDArray[np.int64]
    values: NDArray[np.float64]


@dataclass(frozen=True)
class LoggedMetrics:
    """What one `add` wrote: the update, seconds since 1970, and values by metric name."""

    update: int
    at_s: float
    values: Mapping[str, float]


class MetricsLog:
    """What a running run writes its metrics with; one process at a time.

    Rows are durable once `flush` has returned, at the latest a few seconds after `add`, if it goes
    on being called. Flush before a checkpoint is saved, so that a run resumed from there has all
    before it, and `truncate_after` its update when it is resumed: what came later comes again.
    """

    def __init__(
        self, storage: Storage, run_id: str, *, flush_interval_s: float = FLUSH_INTERVAL_S
    ) -> None:
        """Go on after the rows that are there. Raises: StorageError where one cannot be read."""
        self._storage = storage
        self._folder = f"{RUNS}/{run_id}/metrics"
        self._least_interval_s = self._flush_interval_s = flush_interval_s
        self._flushed_at = time.monotonic()
        self._is_dirty = False
        self._piece, self._rows = self._newest()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def add(self, update: int, values: Mapping[str, float], wall_time_s: float) -> None:
        """Add metrics of an update, by name; NaN and infinities are kept as they are.

        Args:
            update: after which they were measured; adding to an earlier one is fine.
            values: by name, such as `critic_loss` or `evaluation/return`.
            wall_time_s: when, in seconds since 1970 (`time.time()`).

        Raises: StorageError.
        """
        at_us = round(wall_time_s * 1e6)
        self._rows += [(int(update), name, float(value), at_us) for name, value in values.items()]
        self._is_dirty = self._is_dirty or bool(values)
        is_due = time.monotonic() - self._flushed_at >= self._flush_interval_s
        if is_due or len(self._rows) >= PIECE_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write what was added since the last flush, durably. Raises: StorageError."""
        start = time.monotonic()
        while self._is_dirty:
            rows = self._rows[:PIECE_ROWS]
            self._storage.put(self._path(self._piece), _encode(rows))
            if len(rows) == PIECE_ROWS:
                self._piece += 1
                del self._rows[:PIECE_ROWS]
            self._is_dirty = len(rows) == PIECE_ROWS and bool(self._rows)
        took_s = time.monotonic() - start
        self._flush_interval_s = max(self._least_interval_s, _WAIT_PER_FLUSH * took_s)
        self._flushed_at = time.monotonic()

    def truncate_after(self, update: int, *, without: Collection[str] = ()) -> None:
        """Remove the rows of later updates; killed in between, it can be called again.

        without: metrics of which all rows go, such as one that is measured at the end, of whichever
        update was the best. Raises: StorageError.
        """
        self.flush()
        paths = _piece_paths(self._storage, self._folder)
        # Backwards: until all of it is done, those that are left begin as they did.
        for path in reversed(paths):
            table = _decode(path, self._storage.get(path))
            is_kept = pc.less_equal(table["update"], update)
            for name in without:
                is_kept = pc.and_(is_kept, pc.not_equal(table["name"], name))
            rest = table.filter(is_kept)
            if rest.num_rows == 0:
                self._storage.delete([path])
            elif rest.num_rows < table.num_rows:
                self._storage.put(path, _encode(_rows_of(rest)))
        self._piece, self._rows = self._newest()

    def close(self) -> None:
        """Flush; may be called twice. Raises: StorageError."""
        self.flush()

    def _path(self, piece: int) -> str:
        return f"{self._folder}/{piece:06d}.parquet"

    def _newest(self) -> tuple[int, list[_Row]]:
        """Return the number of the piece to write next, and the rows that it has already."""
        paths = _piece_paths(self._storage, self._folder)
        if not paths:
            return 0, []
        number = _number(paths[-1])
        rows = _rows_of(_decode(paths[-1], self._storage.get(paths[-1])))
        return (number + 1, []) if len(rows) >= PIECE_ROWS else (number, rows)


def read_metrics(storage: Storage, run_ids: Collection[str] | None = None) -> pa.Table:
    """Return the metrics of these runs, or of all: run_id, update, name, value, measured_at.

    run_id and name are dictionaries. In the order in which they were written, run by run. Cost:
    reads their pieces, about 6 bytes a row. Raises: StorageError naming a piece that is damaged.
    """
    pieces = list(_pieces(storage, run_ids))
    tables = []
    blobs = storage.get_many([path for _, path in pieces])
    for (run_id, path), data in zip(pieces, blobs, strict=True):
        # A run that is resumed in between removes some.
        if data is None:
            continue
        rows = _decode(path, data)
        codes = pa.array(np.zeros(rows.num_rows, np.int32))
        run = pa.DictionaryArray.from_arrays(codes, pa.array([run_id]))
        columns = [
            run,
            rows["update"],
            rows["name"].dictionary_encode(),
            rows["value"],
            rows["measured_at"],
        ]
        tables.append(pa.table(columns, schema=METRICS))
    if not tables:
        return METRICS.empty_table()
    return pa.concat_tables(tables).unify_dictionaries()


def read_curves(storage: Storage, run_id: str) -> dict[str, Curve]:
    """Return a run's metrics by name, in order of their first rows.

    Of an update that has a metric twice, the last counts. Raises: StorageError.
    """
    table = read_metrics(storage, [run_id])
    updates, values = table["update"].to_numpy(), table["value"].to_numpy()
    names = table["name"].to_numpy()
    # Python keeps the order in which keys come first.
    return {
        name: _curve(updates[names == name], values[names == name])
        for name in dict.fromkeys(names.tolist())
    }


def read_logged_metrics(storage: Storage, run_id: str, prefix: str) -> list[LoggedMetrics]:
    """Return what a run logged, time by time, of the metrics whose names begin with `prefix`.

    In the order in which it was logged. Rows of one update and time are one entry.
    Raises: StorageError.
    """
    table = read_metrics(storage, [run_id])
    table = table.filter(pc.starts_with(table["name"].cast(pa.string()), prefix))
    rows: dict[tuple[int, int], dict[str, float]] = {}
    columns = (
        table["measured_at"].cast(pa.int64()),
        table["update"],
        table["name"],
        table["value"],
    )
    for at_us, update, name, value in zip(*(column.to_pylist() for column in columns), strict=True):
        rows.setdefault((at_us, update), {})[name] = value
    return [LoggedMetrics(update, at_us / 1e6, values) for (at_us, update), values in rows.items()]


def find_damaged_pieces(storage: Storage) -> Iterator[tuple[str, str]]:
    """Yield (path, what is wrong) for each piece of any run that cannot be read."""
    for _, path in _pieces(storage, None):
        try:
            if (data := storage.get(path)) is not None:
                _decode(path, data)
        except StorageError as error:
            yield path, str(error)


def _curve(updates: NDArray[np.int64], values: NDArray[np.float64]) -> Curve:
    # From the back, so that the first of equal updates that unique finds is the last written.
    unique, places = np.unique(updates[::-1], return_index=True)
    return Curve(unique, values[::-1][places])


def _pieces(storage: Storage, run_ids: Collection[str] | None) -> Iterator[tuple[str, str]]:
    """Yield (run id, path) in order. Of all runs it takes one listing."""
    if run_ids is not None:
        for run_id in run_ids:
            for path in _piece_paths(storage, f"{RUNS}/{run_id}/metrics"):
                yield run_id, path
        return
    matches = (_PIECE.fullmatch(file.path) for file in storage.files(RUNS))
    yield from sorted((match.group(1), match.group()) for match in matches if match)


def _piece_paths(storage: Storage, folder: str) -> list[str]:
    paths = (f"{folder}/{name}" for name in storage.names(folder))
    return [path for path in paths if _PIECE.fullmatch(path)]


def _number(path: str) -> int:
    match = _PIECE.fullmatch(path)
    assert match is not None
    return int(match.group(2))


def _encode(rows: Sequence[_Row]) -> memoryview:
    updates, names, values, times = zip(*rows, strict=True)
    columns = [
        pa.array(updates, pa.int64()),
        pa.array(names, pa.string()),
        pa.array(values, pa.float64()),
        pa.array(times, pa.int64()).cast(_ROWS.field("measured_at").type),
    ]
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink,
        _ROWS,
        compression="zstd",
        compression_level=1,
        use_dictionary=["name"],
        column_encoding={
            "update": "DELTA_BINARY_PACKED",
            "measured_at": "DELTA_BINARY_PACKED",
            "value": "BYTE_STREAM_SPLIT",
        },
        write_page_checksum=True,
    ) as writer:
        writer.write_table(pa.table(columns, schema=_ROWS))
        add_parquet_seal(writer, {_SEALED_KEY: "1"})
    return fill_parquet_seal(sink.getvalue())


def _decode(path: str, data: bytes | None) -> pa.Table:
    try:
        if data is None:
            raise pa.ArrowInvalid("it is gone")
        check_parquet_seal(data, _SEALED_KEY)
        # Without threads, which so small a file does not need: of processes that end soon after one
        # of them worked, 2 in 480 aborted at their exit (pyarrow 26.0.1, apache/arrow issue 34314).
        file = pq.ParquetFile(
            pa.BufferReader(data), page_checksum_verification=True, pre_buffer=False
        )
        table = file.read(use_threads=False)
        return table.select(_ROWS.names).cast(_ROWS)
    except (pa.ArrowException, BrokenSealError, OSError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise StorageError(
            f"{path}: found a file that cannot be read ({reason}), expected metrics of a run. "
            "Restore it from a copy of the lake, or remove it: the metrics in it are lost then, "
            "and nothing else."
        ) from error


def _rows_of(table: pa.Table) -> list[_Row]:
    columns = [
        table["update"].to_pylist(),
        table["name"].to_pylist(),
        table["value"].to_pylist(),
        table["measured_at"].cast(pa.int64()).to_pylist(),
    ]
    return list(zip(*columns, strict=True))
