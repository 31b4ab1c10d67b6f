"""Statistics of shards: what a profile needs to know of the steps, counted once for each shard.

Those of a version are the merge of those of its shards, so a new version costs its new shards. They
are kept in a derived file, `_derived/profile/`, whose rules storage/table/derived_file.py has.

Counts, least and greatest values and means are of all steps. Histograms are of an even sample: of a
shard, the steps whose number, counted from a start that its path determines, is a multiple of a
stride, a power of two. The sample of a version takes the largest stride of its shards, so that
every step is as likely to be in it, and a sample is thinned by taking a larger stride.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import Array, Discrete, to_json
from replaylake.datastore.lake.profile.column_statistics import NumberStatistics
from replaylake.datastore.lake.profile.vectors import SpaceNumbers
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.storage.arrow_values import is_list, numbers
from replaylake.datastore.storage.log.state import FileEntry
from replaylake.datastore.storage.storage import Storage
from replaylake.datastore.storage.table.column_ranges import ShardColumn, read_shard_columns
from replaylake.datastore.storage.table.delta_schema import plain_type
from replaylake.datastore.storage.table.derived_file import DerivedFile
from replaylake.datastore.storage.table.presence import check_shards_present
from replaylake.datastore.storage.table.shard import num_row_groups, row_group_batches
from replaylake.datastore.storage.table.table_schema import conform
from replaylake.datastore.storage.table.table_snapshot import TableSnapshot

OnProgress = Callable[[int, int], None]
FOLDER: Final = "_derived/profile"
# Parts of a shard's steps, in their order or in time, in which the steps of each policy version are
# counted: one fifth of a period where a dataset is one shard, and less where it has more.
_MAX_PARTS: Final = 200
_BATCH_ROWS: Final = 32_768
# Steps in the sample of a version, and the memory that they may take; a file has twice of it.
_SAMPLE_ROWS: Final = 50_000
_SAMPLE_BYTES: Final = 16 << 20
# Counting is kept every so often while it lasts, and at the end where doing it again would cost
# more than twice the writing: 0.5 us a step and 2 ms a shard; 5 ms and 20 ns a byte (2 cores,
# 2026-11).
_SAVED_STEPS: Final = 32_000_000
_STEP_US, _SHARD_US, _WRITE_US, _BYTE_US = 0.5, 2_000.0, 5_000.0, 0.02
_WORTH: Final = 2.0
# Maintenance counts what a first visitor would wait for longer than about half a second.
_MIN_REFRESHED_STEPS: Final = 1_000_000
_CACHE_BYTES: Final = 64 << 20

_METADATA_KEY: Final = b"replaylake.profile"
_VALUE: Final = pa.struct([("leaf", pa.int32()), ("value", pa.int64()), ("num", pa.int64())])
_POLICY_PART: Final = pa.struct(
    [("policy", pa.string()), ("version", pa.int64()), ("part", pa.int32()), ("num", pa.int64())]
)
# A row a shard. counts: num, num_zero, num_outside of each number; moments: least, greatest, mean,
# squares. columns: JSON, a column's [least, greatest, rows without a value]. by_time is null where
# some step has no timestamp. sample: rows of all numbers, one after the other.
_SCHEMA: Final = pa.schema(
    [
        ("shard", pa.string()),
        ("num_rows", pa.int64()),
        ("counts", pa.list_(pa.int64())),
        ("moments", pa.list_(pa.float64())),
        ("values", pa.list_(_VALUE)),
        ("by_row", pa.list_(_POLICY_PART)),
        ("by_time", pa.list_(_POLICY_PART)),
        ("first_us", pa.int64()),
        ("last_us", pa.int64()),
        ("columns", pa.string()),
        ("stride", pa.int64()),
        ("sample", pa.large_list(pa.float64())),
    ]
)
# (policy, version) of steps; None: not recorded.
PolicyVersion = tuple[str | None, int | None]


class StepNumbers:
    """The numbers of a step that are counted: observation's, action's, reward and propensity.

    low, high: float64 [W], their bounds. key: of all that the counts of a shard depend on.
    """

    def __init__(self, spec: DatasetSpec) -> None:
        encoding = spec.encoding
        names = () if encoding is None else encoding.names()
        self.observations = SpaceNumbers(spec.observation_space, schema.OBSERVATION, names)
        self.actions = SpaceNumbers(spec.action_space, schema.ACTION)
        # A density may be any number.
        top = 1.0 if isinstance(spec.action_space, Discrete) else np.inf
        self.low = np.concatenate([self.observations.low, self.actions.low, [-np.inf, 0.0]])
        self.high = np.concatenate([self.observations.high, self.actions.high, [np.inf, top]])
        end = self.observations.width
        self.of_observations = slice(0, end)
        self.of_actions = slice(end, end + self.actions.width)
        end += self.actions.width
        self.of_reward, self.of_propensity = slice(end, end + 1), slice(end + 1, end + 2)
        described = [1, to_json(spec.observation_space), to_json(spec.action_space)]
        self.key = hashlib.sha256(json.dumps(described).encode()).hexdigest()

    @property
    def width(self) -> int:
        """W, how many numbers a step has."""
        return len(self.low)

    @property
    def max_sample_rows(self) -> int:
        return min(_SAMPLE_ROWS, _SAMPLE_BYTES // (8 * self.width))


@dataclass(frozen=True)
class ShardStatistics:
    """Those of some shards. table: a row a shard; key: of StepNumbers; num_saved: in the file."""

    table: pa.Table
    key: str
    num_saved: int = 0

    @property
    def shards(self) -> tuple[str, ...]:
        return tuple(self.table["shard"].to_pylist())

    @property
    def num_bytes(self) -> int:
        return int(self.table.nbytes)

    def select_shards(self, places: Sequence[int]) -> ShardStatistics:
        table = self.table.take(pa.array(places, pa.int64()))
        return replace(self, table=table, num_saved=min(self.num_saved, len(places)))

    def merge_numbers(self) -> NumberStatistics:
        """Return the statistics of all numbers of all steps, arrays [W]."""
        counts = _stack(self.table["counts"], 3)
        moments = _stack(self.table["moments"], 4)
        return NumberStatistics(*counts, *moments).merge_first_axis()

    def merge_value_counts(self, spaces: Sequence[SpaceNumbers]) -> list[list[Array]]:
        """Return, of each space, how often each value of its discrete leaves occurs."""
        values = _flatten(self.table["values"])
        leaf, value, num = (_column(values, name) for name in ("leaf", "value", "num"))
        merged, place = [], 0
        for space in spaces:
            counts = []
            for _, _, n in space.discrete:
                mine = leaf == place
                total = np.bincount(value[mine], weights=num[mine], minlength=n)
                counts.append(total.astype(np.int64))
                place += 1
            merged.append(counts)
        return merged

    def count_policies(self, num_periods: int) -> tuple[dict[PolicyVersion, list[int]], bool]:
        """Return the steps of each policy version in each of equal periods.

        Periods are of time where every step has one, which the second value says, else of the order
        of the steps. A step counts in the period of the middle of its part of the shard.
        """
        is_timed = self.table["by_time"].null_count == 0
        parts = self.table["by_time" if is_timed else "by_row"]
        num_rows = self.table["num_rows"].to_numpy()
        if is_timed:
            starts = self.table["first_us"].to_numpy().astype(np.float64)
            ends = self.table["last_us"].to_numpy().astype(np.float64)
            num_parts = np.full(len(num_rows), _MAX_PARTS)
        else:
            ends = np.cumsum(num_rows).astype(np.float64)
            starts = ends - num_rows
            num_parts = np.minimum(num_rows, _MAX_PARTS)
        cells = _flatten(parts)
        shard = np.repeat(np.arange(len(num_rows)), _lengths(parts))
        share = (_column(cells, "part") + 0.5) / num_parts[shard]
        middles = starts[shard] + share * (ends - starts)[shard]
        first, last = starts.min(), ends.max()
        periods = (middles - first) / max(last - first, 1.0) * num_periods
        periods = np.clip(periods, 0, num_periods - 1).astype(np.int32)
        counted = (
            pa.table(
                {
                    "policy": cells.field("policy"),
                    "version": cells.field("version"),
                    "period": periods,
                    "num": cells.field("num"),
                }
            )
            .group_by(["policy", "version", "period"], use_threads=False)
            .aggregate([("num", "sum")])
        )
        counts: dict[PolicyVersion, list[int]] = {}
        for one in counted.to_pylist():
            by_period = counts.setdefault((one["policy"], one["version"]), [0] * num_periods)
            by_period[one["period"]] += one["num_sum"]
        return counts, is_timed

    def read_columns(self, fields: pa.Schema) -> list[dict[str, ShardColumn]]:
        """Return what is known of each column of each shard; `fields` are the table's columns."""
        return [
            {
                name: ShardColumn(
                    _parse_value(least, fields.field(name).type),
                    _parse_value(greatest, fields.field(name).type),
                    num_missing,
                )
                for name, (least, greatest, num_missing) in json.loads(text).items()
                if name in fields.names
            }
            for text in self.table["columns"].to_pylist()
        ]

    def sample(self, num_rows: int) -> Array:
        """Return at most so many steps, evenly spread over all: float64 [m, W], in order."""
        stride = max(self.table["stride"].to_pylist())
        while True:
            thinned = _thin(self.table, stride)
            parts = thinned["sample"]
            width = self._width
            if int(_lengths(parts).sum()) <= num_rows * width:
                return np.asarray(numbers(_flatten(parts))).reshape(-1, width)
            stride *= 2

    @property
    def _width(self) -> int:
        return len(self.table["counts"][0]) // 3


def read_statistics(snapshot: Snapshot, on_progress: OnProgress | None = None) -> ShardStatistics:
    """Return those of a version's shards, in its order; shards that are not known are counted.

    on_progress: called with (steps known, steps) after each shard. What was counted is kept also
    where that ends with an error. Raises: ShardCorruptError; NotFoundError for a version whose
    shards were removed; what `on_progress` raises. Cost: a pass over the observations, actions and
    rewards of each shard that is counted, 0.5 us of a processor for a step of 8 numbers; memory:
    two batches of steps, and the statistics.
    """
    check_shards_present(snapshot.table)
    layout = StepNumbers(snapshot.spec)
    table = snapshot.table
    known = _load(table, layout)
    covered = set() if known is None else set(known.shards)
    rest = tuple(entry for entry in table.files if entry.path not in covered)
    num_known = snapshot.num_steps - sum(entry.num_rows for entry in rest)
    rows: list[pa.Table] = []
    num_unsaved = 0
    try:
        counted = _count_shards(table, rest, layout, snapshot.num_steps)
        for entry, row in zip(rest, counted, strict=True):
            rows.append(row)
            num_known += entry.num_rows
            num_unsaved += entry.num_rows
            if num_unsaved >= _SAVED_STEPS:
                known, rows, num_unsaved = _keep(table, layout, known, rows), [], 0
            if on_progress is not None:
                on_progress(num_known, snapshot.num_steps)
    finally:
        if rows:
            known = _keep(table, layout, known, rows)
    assert known is not None  # there is a shard, and it is counted
    places = {path: place for place, path in enumerate(known.shards)}
    return known.select_shards([places[entry.path] for entry in table.files])


def refresh_statistics(snapshot: Snapshot, on_progress: OnProgress | None = None) -> bool:
    """Count what a visitor would wait for, and keep it; whether there was enough of that.

    Raises: as read_statistics.
    """
    known = _load(snapshot.table, StepNumbers(snapshot.spec))
    saved = set() if known is None else set(known.shards[: known.num_saved])
    rest = [entry for entry in snapshot.files if entry.path not in saved]
    if sum(entry.num_rows for entry in rest) < _MIN_REFRESHED_STEPS:
        return False
    read_statistics(snapshot, on_progress)
    return True


def delete_statistics(storage: Storage, root: str) -> None:
    """Delete a table's statistics, here and in this process's memory. Raises: StorageError."""
    _FILE.delete(storage, root)


def delete_gone_statistics(storage: Storage, root: str) -> None:
    """Delete a table's statistics where one may tell of shards that are gone.

    Raises: StorageError.
    """
    _FILE.delete_gone(storage, root)


def _load(table: TableSnapshot, layout: StepNumbers) -> ShardStatistics | None:
    known = _FILE.load(table.storage, table.root)
    return known if known is not None and known.key == layout.key else None


def _keep(
    table: TableSnapshot,
    layout: StepNumbers,
    known: ShardStatistics | None,
    rows: Sequence[pa.Table],
) -> ShardStatistics:
    """Add shards to what is known; write the file where that soon pays, else remember it."""
    before = [] if known is None else [known.table]
    joined = pa.concat_tables([*before, *rows])
    num_saved = 0 if known is None else known.num_saved
    stride = min(joined["stride"].to_pylist())
    while int(_lengths(joined["sample"]).sum()) > 2 * layout.max_sample_rows * layout.width:
        stride *= 2
        joined = _thin(joined, stride)
    joined = joined.combine_chunks()
    data = ShardStatistics(joined, layout.key, num_saved)
    unsaved = joined["num_rows"].to_numpy()[num_saved:]
    counting = unsaved.sum() * _STEP_US + len(unsaved) * _SHARD_US
    if counting > _WORTH * (_WRITE_US + joined.nbytes * _BYTE_US):
        data = replace(data, num_saved=joined.num_rows)
        _FILE.save(table.storage, table.root, data)
    else:
        _FILE.remember(table.storage, table.root, data)
    return data


def _count_shards(
    table: TableSnapshot, entries: tuple[FileEntry, ...], layout: StepNumbers, num_steps: int
) -> Iterator[pa.Table]:
    stride = 1
    while num_steps > layout.max_sample_rows * stride:
        stride *= 2
    paths = replace(table, files=entries).iter_verified()
    for path, entry in zip(paths, entries, strict=True):
        yield _count_shard(path, entry, table, layout, stride)


def _count_shard(
    path: Path, entry: FileEntry, table: TableSnapshot, layout: StepNumbers, stride: int
) -> pa.Table:
    """Return the row of a shard whose sha256 was checked. Raises: ShardCorruptError."""
    columns = read_shard_columns(path, entry, table.schema)
    times = columns[schema.TIMESTAMP]
    is_timed = times.num_missing == 0 and times.least is not None
    first_us = _to_us(times.least) if is_timed else None
    last_us = _to_us(times.greatest) if is_timed else None
    # Of these the footer does not tell what is missing from what is empty, or null in a part.
    unclear = [field.name for field in table.schema if _is_unclear(field)]
    num_missing = dict.fromkeys(unclear, 0)
    names = [
        *([] if layout.observations.is_empty else [schema.OBSERVATION]),
        *([] if layout.actions.is_empty else [schema.ACTION]),
        schema.REWARD,
        schema.BEHAVIOR_LOG_PROB,
        schema.POLICY,
        schema.POLICY_VERSION,
        *([schema.TIMESTAMP] if is_timed else []),
    ]
    names += [name for name in unclear if name not in names]
    fields = table.select_fields(names)
    statistics: list[NumberStatistics] = []
    values: list[Array] = []
    cells: list[pa.Table] = []
    sample: list[Array] = []
    offset = zlib.crc32(entry.path.encode())
    start = 0
    for group in range(num_row_groups(path)):
        for batch in row_group_batches(path, group, names, _BATCH_ROWS):
            rows = conform(batch, fields)
            numbers_of, counts = _read_numbers(rows, layout)
            statistics.append(NumberStatistics.from_rows(numbers_of, layout.low, layout.high))
            values = [a + b for a, b in zip(values, counts, strict=True)] if values else counts
            cells.append(_count_cells(rows, start, entry.num_rows, first_us, last_us))
            sample.append(numbers_of[-(offset + start) % stride :: stride].copy())
            for name in unclear:
                num_missing[name] += rows.column(name).null_count
            start += rows.num_rows
    merged = NumberStatistics.merge(statistics)
    joint = pa.concat_tables(cells)
    known = {
        name: [
            _format_value(one.least),
            _format_value(one.greatest),
            num_missing.get(name, one.num_missing),
        ]
        for name, one in columns.items()
    }
    row = {
        "shard": entry.path,
        "num_rows": start,
        "counts": np.concatenate([merged.num, merged.num_zero, merged.num_outside]),
        "moments": np.concatenate([merged.least, merged.greatest, merged.mean, merged.squares]),
        "values": _to_values(values),
        "by_row": _sum_cells(joint, "row_part"),
        "by_time": _sum_cells(joint, "time_part") if is_timed else None,
        "first_us": first_us,
        "last_us": last_us,
        "columns": json.dumps(known),
        "stride": stride,
        "sample": np.concatenate(sample).reshape(-1),
    }
    return pa.table({name: [value] for name, value in row.items()}, schema=_SCHEMA)


def _read_numbers(rows: pa.Table, layout: StepNumbers) -> tuple[Array, list[Array]]:
    """Return all numbers of some steps, float64 [n, W], and the counts of discrete values."""
    numbers_of = np.empty((rows.num_rows, layout.width))
    counts: list[Array] = []
    spaces = (
        (layout.observations, schema.OBSERVATION, layout.of_observations),
        (layout.actions, schema.ACTION, layout.of_actions),
    )
    for space, name, part in spaces:
        if not space.is_empty:
            numbers_of[:, part], more = space.read(rows.column(name))
            counts += more
    numbers_of[:, layout.of_reward] = _floats(rows.column(schema.REWARD))[:, None]
    with np.errstate(over="ignore"):
        chances = np.exp(_floats(rows.column(schema.BEHAVIOR_LOG_PROB)))
    numbers_of[:, layout.of_propensity] = chances[:, None]
    return numbers_of, counts


def _count_cells(
    rows: pa.Table, start: int, num_rows: int, first_us: int | None, last_us: int | None
) -> pa.Table:
    """Count some steps by policy, version, and the parts of the shard that they are in.

    start: the number of the first within the shard, which has num_rows.
    """
    order = np.arange(start, start + rows.num_rows) * min(num_rows, _MAX_PARTS) // num_rows
    time_parts = np.zeros(rows.num_rows, np.int32)
    if first_us is not None and last_us is not None:
        times = rows.column(schema.TIMESTAMP).cast(pa.int64()).to_numpy()
        share = (times - first_us) / max(1, last_us - first_us)
        time_parts = np.minimum(share * _MAX_PARTS, _MAX_PARTS - 1).astype(np.int32)
    cells = pa.table(
        {
            "policy": rows.column(schema.POLICY).cast(pa.string()),
            "version": rows.column(schema.POLICY_VERSION),
            "row_part": order.astype(np.int32),
            "time_part": time_parts,
        }
    )
    keys = cells.column_names
    counted = cells.group_by(keys, use_threads=False).aggregate([([], "count_all")])
    return counted.rename_columns([*keys, "num"])


def _sum_cells(cells: pa.Table, part: str) -> pa.Array:
    """Return the counts by policy, version and one kind of part, as structs."""
    keys = ["policy", "version", part]
    summed = cells.group_by(keys, use_threads=False).aggregate([("num", "sum")])
    columns = [summed[name].combine_chunks() for name in (*keys, "num_sum")]
    return pa.StructArray.from_arrays(columns, fields=list(_POLICY_PART))


def _to_values(counts: Sequence[Array]) -> pa.Array:
    """Return the values that occur, as structs."""
    found = [np.flatnonzero(of) for of in counts]
    leaf = np.repeat(np.arange(len(counts), dtype=np.int32), [len(one) for one in found])
    empty = np.zeros(0, np.int64)
    value = np.concatenate([empty, *found])
    num = np.concatenate([empty, *(of[one] for of, one in zip(counts, found, strict=True))])
    return pa.StructArray.from_arrays(
        [pa.array(leaf), pa.array(value), pa.array(num)], fields=list(_VALUE)
    )


def _thin(table: pa.Table, stride: int) -> pa.Table:
    """Return the table with samples of at least this stride."""
    strides = table["stride"].to_numpy()
    if (strides >= stride).all():
        return table
    width = len(table["counts"][0]) // 3
    samples = []
    for path, own, sample in zip(
        table["shard"].to_pylist(), strides.tolist(), table["sample"], strict=True
    ):
        rows = sample.values.to_numpy().reshape(-1, width)
        if own < stride:
            # Numbers of the sampled steps, in strides, from the start that the path determines.
            first = -(-zlib.crc32(path.encode()) // own)
            rows = rows[-first % (stride // own) :: stride // own]
        samples.append(rows.reshape(-1))
    lengths = np.cumsum([0, *(len(one) for one in samples)])
    thinned = pa.LargeListArray.from_arrays(lengths, np.concatenate(samples))
    raised = pa.array(np.maximum(strides, stride))
    names = table.schema.names
    table = table.set_column(names.index("stride"), "stride", raised)
    return table.set_column(names.index("sample"), "sample", thinned)


def _is_unclear(field: pa.Field) -> bool:
    kind = plain_type(field.type)
    if not field.nullable or field.name == schema.FINAL_OBSERVATION:
        return False
    if pa.types.is_fixed_size_list(kind):
        return bool(kind.value_field.nullable)
    return is_list(kind) or pa.types.is_map(kind) or pa.types.is_struct(kind)


def _to_us(at: datetime) -> int:
    return (at - datetime(1970, 1, 1, tzinfo=UTC)) // _MICROSECOND


_MICROSECOND: Final = datetime.resolution


def _format_value(value: Any) -> Any:
    if isinstance(value, datetime | date):
        return value.isoformat()
    return str(value) if isinstance(value, Decimal) else value


def _parse_value(value: Any, kind: pa.DataType) -> Any:
    kind = plain_type(kind)
    if is_list(kind):
        kind = kind.value_type
    if value is None:
        return None
    if pa.types.is_timestamp(kind):
        return datetime.fromisoformat(value)
    if pa.types.is_date(kind):
        return date.fromisoformat(value)
    return Decimal(value) if pa.types.is_decimal(kind) else value


def _floats(column: pa.ChunkedArray) -> Array:
    return np.asarray(numbers(column.cast(pa.float64())), np.float64)


def _flatten(column: pa.ChunkedArray) -> pa.Array:
    """Return the elements of all lists of a column, in one piece."""
    flat = column.combine_chunks().flatten()
    return flat.combine_chunks() if isinstance(flat, pa.ChunkedArray) else flat


def _lengths(column: pa.ChunkedArray) -> Array:
    return np.asarray(pc.fill_null(pc.list_value_length(column), 0).to_numpy())


def _column(structs: pa.Array, name: str) -> Array:
    return np.asarray(structs.field(name).to_numpy(zero_copy_only=False))


def _stack(column: pa.ChunkedArray, num: int) -> list[Array]:
    """Return `num` arrays [S, W] of lists of num * W numbers."""
    flat = np.asarray(_flatten(column).to_numpy()).reshape(len(column), num, -1)
    return [flat[:, place] for place in range(num)]


def _encode(data: ShardStatistics) -> bytes:
    about: Mapping[bytes, bytes] = {_METADATA_KEY: data.key.encode()}
    sink = pa.BufferOutputStream()
    pq.write_table(
        data.table.replace_schema_metadata(about), sink, compression="zstd", compression_level=1
    )
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _decode(content: bytes) -> ShardStatistics | None:
    with suppress(pa.ArrowException, KeyError):
        table = pq.read_table(pa.BufferReader(content))
        key = table.schema.metadata[_METADATA_KEY].decode()
        if table.column_names == _SCHEMA.names:  # else another release wrote it
            table = table.replace_schema_metadata(None).cast(_SCHEMA).combine_chunks()
            return ShardStatistics(table, key, table.num_rows)
    return None


_FILE: Final = DerivedFile(FOLDER, _encode, _decode, max_cached_bytes=_CACHE_BYTES)
