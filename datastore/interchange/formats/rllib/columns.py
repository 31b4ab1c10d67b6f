"""RLlib's column Parquet, written: one row a step, tensors as Ray Data keeps them.

Columns as ray/rllib/offline/offline_env_runner.py (2.60) writes them: eps_id, agent_id, module_id
(our policy), obs, actions, rewards, new_obs, terminateds, truncateds, action_logp; beside them t,
and what else an episode of ours has, under our names. A tensor column is a list with its shape in
the field's metadata (`ray.data.arrow_tensor_v2`), which Ray reads back as arrays.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.rows import encode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import Values, as_batch, concatenate, num_bytes, take
from replaylake.datastore.errors import StorageError
from replaylake.datastore.interchange.formats.format import WriteResult
from replaylake.datastore.interchange.formats.tabular.episode_rows import CHUNK_BYTES, to_column
from replaylake.datastore.storage.arrow_values import is_numeric

_TENSOR: Final = "ray.data.arrow_tensor_v2"
# Ours to RLlib's, in RLlib's order; further columns keep their names.
_RLLIB_NAMES: Final = {
    schema.EPISODE_ID: "eps_id",
    schema.AGENT_ID: "agent_id",
    schema.STEP: "t",
    schema.REWARD: "rewards",
    schema.TERMINATED: "terminateds",
    schema.TRUNCATED: "truncateds",
    schema.BEHAVIOR_LOG_PROB: "action_logp",
    schema.POLICY: "module_id",
}
_GROUP_STEPS: Final = 131_072
_ARRAYS: Final = ("obs", "actions", "new_obs")
_KNOWN: Final = {*_RLLIB_NAMES.values(), *_ARRAYS}
_OPTIONAL: Final = (
    "action_logp",
    "module_id",
    schema.POLICY_VERSION,
    schema.ACTION_MASK,
    schema.TIMESTAMP,
)
# RLlib's new_obs says the one; reading gives the other anew.
_EXCLUDED: Final = (schema.OBSERVATION, schema.ACTION, schema.FINAL_OBSERVATION)


def write_columns(episodes: Iterator[Episode], spec: DatasetSpec, path: Path) -> WriteResult:
    """Write episodes of `spec` to one Parquet file; a row group holds about 16 MiB.

    Raises: StorageError.
    """
    num_episodes = num_steps = num_unfollowed = 0
    last: tuple[str, str] | None = None
    file = _ColumnFile(path)
    try:
        for batch in _batches(episodes):
            for episode in batch:
                # Pieces of one episode follow one another.
                key = (episode.episode_id, episode.agent_id)
                num_episodes += key != last
                last = key
                num_steps += len(episode)
                num_unfollowed += episode.final_observation is None
            file.write(_table(batch, spec))
        if num_steps == 0:
            file.write(pa.table({"eps_id": pa.array([], pa.string())}))
    except OSError as error:
        raise StorageError(f"{path}: {error}. Free disk space or choose another folder.") from error
    finally:
        file.close()
    return WriteResult(num_episodes, num_steps, tuple(_notes(spec, file.schema, num_unfollowed)))


class _ColumnFile:
    """A Parquet file without the columns that say nothing.

    RLlib's learners make tensors of all columns that they do not know, and cannot of nulls. Where
    a column first says something in a later row group, the file is written again with it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: pq.ParquetWriter | None = None
        self.schema = pa.schema([])

    def write(self, table: pa.Table) -> None:
        names = [f.name for f in table.schema if not _is_empty_column(table, f.name)]
        missing = [name for name in names if name not in self.schema.names]
        if self._writer is None:
            self.schema = table.select(names).schema
            self._writer = self._open()
        elif missing:
            self._rewrite(pa.schema([*self.schema, *map(table.schema.field, missing)]))
        self._writer.write_table(table.select(self.schema.names).cast(self.schema))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> pq.ParquetWriter:
        # Checksums, as without them most flipped bits are read as other numbers.
        return pq.ParquetWriter(
            self._path, self.schema, compression="zstd", write_page_checksum=True
        )

    def _rewrite(self, fields: pa.Schema) -> None:
        self.close()
        narrow = self._path.with_name(self._path.name + ".narrow")
        self._path.rename(narrow)
        self.schema = fields.with_metadata(self.schema.metadata)
        self._writer = self._open()
        with pq.ParquetFile(narrow) as parquet:
            for group in range(parquet.num_row_groups):
                self._writer.write_table(_widen(parquet.read_row_group(group), self.schema))
        narrow.unlink()


def _is_empty_column(table: pa.Table, name: str) -> bool:
    column = table.column(name)
    if name == schema.ENV_STEP:
        return bool(pc.all(pc.equal(column, table.column("t"))).as_py())
    if name == schema.AGENT_ID:
        return bool(pc.all(pc.equal(column, "")).as_py())
    return name in _OPTIONAL and column.null_count == len(column)


def _widen(table: pa.Table, fields: pa.Schema) -> pa.Table:
    num = table.num_rows
    filled = {schema.AGENT_ID: pa.repeat("", num), schema.ENV_STEP: table.column("t")}
    columns = [
        table.column(f.name)
        if f.name in table.schema.names
        else filled.get(f.name, pa.nulls(num, f.type))
        for f in fields
    ]
    return pa.table(columns, schema=fields)


def _notes(spec: DatasetSpec, fields: pa.Schema, num_unfollowed: int) -> Iterator[str]:
    if num_unfollowed:
        yield (
            f"{num_unfollowed} episodes or pieces have no observation after their last step: its "
            "new_obs is null, where RLlib expects one"
        )
    if clashes := [name for name in spec.extras if _name(name) != name]:
        yield f"columns whose names RLlib has for its own, written as extra_*: {', '.join(clashes)}"
    others = [f.name for f in fields if f.name not in _KNOWN and not is_numeric(f.type)]
    if others:
        yield (
            f"columns of which RLlib's learners make no tensors: {', '.join(others)}; leave them "
            "out as you read the file"
        )
    yield "source_episode_id has no place in RLlib's columns, left out"


def _batches(episodes: Iterator[Episode]) -> Iterator[list[Episode]]:
    buffer: list[Episode] = []
    held_bytes = num_steps = 0
    for episode in episodes:
        buffer.append(episode)
        held_bytes += 2 * num_bytes(episode.observations) + num_bytes(episode.actions)
        num_steps += len(episode)
        if held_bytes >= CHUNK_BYTES or num_steps >= _GROUP_STEPS:
            yield buffer
            buffer, held_bytes, num_steps = [], 0, 0
    if buffer:
        yield buffer


def _table(episodes: Sequence[Episode], spec: DatasetSpec) -> pa.Table:
    # Frames are binary in our own rows: the arrays are laid out here.
    rows = encode(episodes, spec).drop_columns([*_EXCLUDED, schema.SOURCE_EPISODE_ID])
    following, unknown = _following(episodes)
    arrays: dict[str, tuple[Values, Any]] = {
        "obs": (concatenate([episode.observations for episode in episodes]), None),
        "actions": (concatenate([episode.actions for episode in episodes]), None),
        "new_obs": (following, unknown),
    }
    fields, columns = [], []
    for name, (values, absent) in arrays.items():
        field, column = _array_column(name, values, absent)
        fields.append(field)
        columns.append(column)
    for f, column in zip(rows.schema, rows.columns, strict=True):
        if pa.types.is_dictionary(f.type):
            column = column.cast(f.type.value_type)
        fields.append(pa.field(_name(f.name), column.type))
        columns.append(column)
    # What the columns cannot say of the spaces: read back by ours, passed over by others.
    return pa.table(columns, schema=pa.schema(fields, metadata=spec.configuration()))


def _name(ours: str) -> str:
    """Return RLlib's name for a column; one of another meaning there gets a name of its own."""
    return _RLLIB_NAMES.get(ours) or (f"extra_{ours}" if ours.lower() in _KNOWN else ours)


def _following(episodes: Sequence[Episode]) -> tuple[Values, Any]:
    """Return the observation after each step, and the rows bool [n] where it is unknown."""
    parts, unknown = [], []
    for episode in episodes:
        final = episode.final_observation
        # What stands where none is known is masked.
        last = take(episode.observations, slice(-1, None)) if final is None else as_batch(final)
        parts += [take(episode.observations, slice(1, None)), last]
        unknown.append(np.zeros(len(episode), np.bool_))
        unknown[-1][-1] = final is None
    return concatenate(parts), np.concatenate(unknown)


def _array_column(name: str, values: Values, absent: Any) -> tuple[pa.Field, pa.Array]:
    if isinstance(values, Mapping):
        column = to_column(values, name)
    elif values.ndim == 1:
        column = pa.array(values)
    else:
        return _tensor_column(name, values, absent)
    if absent is not None and absent.any():
        column = column.take(pa.array(np.arange(len(column)), mask=absent))
    return pa.field(name, column.type), column


def _tensor_column(name: str, values: Any, absent: Any) -> tuple[pa.Field, pa.Array]:
    width = int(np.prod(values.shape[1:]))
    offsets = pa.array(np.arange(len(values) + 1, dtype=np.int64) * width)
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    mask = pa.array(absent) if absent is not None and absent.any() else None
    column = pa.LargeListArray.from_arrays(offsets, flat, mask=mask)
    metadata = {
        "ARROW:extension:name": _TENSOR,
        "ARROW:extension:metadata": json.dumps(list(values.shape[1:])),
    }
    return pa.field(name, column.type, metadata=metadata), column
