"""Standard tables: episodes as tables under our own column names, as generic formats hold them.

Columns are those of `steps` but for source_episode_id: episode_id is the source's own, which ingest
prefixes. Values have the dtypes of their spaces, also those that a dataset has to widen, and those
of two or more dims their shapes. What CSV and JSON cannot say of the spaces, Arrow's schema says in
its metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.rows import encode
from replaylake.datastore.episodes.schema import DatasetSpec, arrow_schema, to_numpy
from replaylake.datastore.episodes.spaces import (
    Array,
    Dict,
    Space,
    Tuple,
    children,
    num_bytes,
    value_dtype,
)
from replaylake.datastore.errors import ReplayLakeError, SourceInvalidError
from replaylake.datastore.interchange.formats.format import ReadOptions, WriteResult
from replaylake.datastore.interchange.formats.tabular.episode_rows import to_column
from replaylake.datastore.interchange.formats.tabular.reader import Declaration
from replaylake.datastore.storage.arrow_values import combine_chunks
from replaylake.datastore.storage.table.table_schema import conform

_TABLE_BYTES: Final = 16 << 20
# As text it is ten times as much, several times over while it is put together.
TEXT_TABLE_BYTES: Final = 2 << 20
_TABLE_STEPS: Final = 131_072
# Values of these are of the spaces, which say more of them than a dataset's own types.
_OF_SPACES: Final = (schema.OBSERVATION, schema.FINAL_OBSERVATION, schema.ACTION)
# What changes the meaning of the values, so that the spaces said of them hold no longer.
_RESHAPING: Final = ("observation", "action")
_PREFIX: Final = b"replaylake."

# Called with each table.
Write = Callable[[pa.Table], object]


def write_tables(
    episodes: Iterable[Episode],
    spec: DatasetSpec,
    write: Write,
    *,
    table_bytes: int = _TABLE_BYTES,
) -> WriteResult:
    """Pass all episodes to `write` as tables of one schema, of about so many bytes each."""
    num_episodes = num_steps = 0
    last: tuple[str, str] | None = None
    for batch in _batches(episodes, table_bytes):
        for episode in batch:
            # Pieces of one episode follow one another.
            key = (episode.episode_id, episode.agent_id)
            num_episodes += key != last
            last = key
            num_steps += len(episode)
        write(standard_table(batch, spec))
    return WriteResult(num_episodes, num_steps)


def standard_table(episodes: Sequence[Episode], spec: DatasetSpec) -> pa.Table:
    """Return checked episodes as rows. Raises: SchemaMismatchError, EpisodeInvalidError."""
    table = encode(episodes, spec).drop_columns([schema.SOURCE_EPISODE_ID])
    arrays = []
    for field, column in zip(table.schema, table.columns, strict=True):
        if field.name in _OF_SPACES:
            is_action = field.name == schema.ACTION
            space = spec.action_space if is_action else spec.observation_space
            arrays.append(_faithful(space, combine_chunks(column)))
        elif pa.types.is_dictionary(field.type):
            arrays.append(column.cast(field.type.value_type))
        else:
            arrays.append(column)
    return conform(
        pa.table(dict(zip(table.column_names, arrays, strict=True))), standard_schema(spec)
    )


def standard_names(spec: DatasetSpec) -> list[str]:
    """Return the columns that `standard_table` makes, in order."""
    return [name for name in arrow_schema(spec).names if name != schema.SOURCE_EPISODE_ID]


def standard_schema(spec: DatasetSpec) -> pa.Schema:
    """Return the schema of what `standard_table` makes, the spaces in its metadata."""
    kinds = arrow_schema(spec)
    fields = []
    for name in standard_names(spec):
        kind = kinds.field(name).type
        if name in _OF_SPACES:
            is_action = name == schema.ACTION
            space = spec.action_space if is_action else spec.observation_space
            kind = _faithful(space, pa.array([], kind)).type
        elif pa.types.is_dictionary(kind):
            kind = kind.value_type
        fields.append(pa.field(name, kind))
    return pa.schema(fields, metadata=spec.configuration())


def read_declaration(
    schemas: Iterable[pa.Schema], options: ReadOptions, where: str
) -> Declaration | None:
    """Return what the files' schemas say of the spaces, if they say the same.

    Where the options bring the values to another form, that is nothing. Raises: SourceInvalidError
    if a schema says it in a way that cannot be read.
    """
    first: dict[str, str] | None = None
    for one in schemas:
        metadata = _own_metadata(one.metadata or {})
        if not metadata or (first is not None and metadata != first):
            return None
        first = metadata
    is_changed = options.action_scale is not None or options.action_range is not None
    if first is None or is_changed or any(name in options.mapping for name in _RESHAPING):
        return None
    try:
        spec = DatasetSpec.from_table(first, pa.schema([]))
    except (
        ReplayLakeError,
        AttributeError,
        KeyError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise SourceInvalidError(
            f"{where}: found spaces in its metadata that cannot be read "
            f"({type(error).__name__}: {error}), expected them as `replaylake export` writes them. "
            "Drop the file's metadata, or write it again."
        ) from error
    return Declaration(
        spaces=(spec.observation_space, spec.action_space),
        rewards_optional=spec.rewards_optional,
        encoding=spec.encoding,
        tokenizer=spec.tokenizer,
    )


def _own_metadata(metadata: Mapping[bytes, bytes]) -> dict[str, str]:
    return {
        key.decode(errors="replace"): value.decode(errors="replace")
        for key, value in metadata.items()
        if key.startswith(_PREFIX)
    }


def _batches(episodes: Iterable[Episode], table_bytes: int) -> Iterator[list[Episode]]:
    batch: list[Episode] = []
    held_bytes = held_steps = 0
    for episode in episodes:
        batch.append(episode)
        held_bytes += num_bytes(episode.observations) + num_bytes(episode.actions)
        held_steps += len(episode)
        if held_bytes >= table_bytes or held_steps >= _TABLE_STEPS:
            yield batch
            batch, held_bytes, held_steps = [], 0, 0
    if batch:
        yield batch


def _faithful(space: Space, column: pa.Array, *, is_nested: bool = False) -> pa.Array:
    """Return a dataset's column with the dtypes and shapes of its space."""
    there = column.filter(column.is_valid()) if column.null_count else column
    if isinstance(space, Dict | Tuple):
        parts = [
            _faithful(sub, pc.struct_field(there, key), is_nested=True)
            for key, sub in children(space).items()
        ]
        array = pa.StructArray.from_arrays(parts, names=[*children(space)])
    elif value_dtype(space).kind == "O":
        return column
    else:
        values = np.asarray(to_numpy(space, there))
        # Readers look for tensors among the columns, not within structs.
        as_tensors = values.ndim > 2 and not is_nested
        array = _tensors(values) if as_tensors else to_column(values, "values")
    if not column.null_count:
        return array
    known = np.asarray(column.is_valid().to_numpy(zero_copy_only=False), bool)
    return _scatter(array, known)


def _scatter(values: pa.Array, known: Any) -> pa.Array:
    """Return the values at the rows where they are known, the others null."""
    rows = pa.array(np.cumsum(known) - 1, mask=~known)
    if isinstance(values, pa.ExtensionArray):
        return pa.ExtensionArray.from_storage(values.type, values.storage.take(rows))
    return values.take(rows)


def _tensors(values: Array) -> pa.Array:
    # One list a value and not lists of lists: a third of the time, and other libraries know it.
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    kind = pa.fixed_shape_tensor(flat.type, values.shape[1:])
    return pa.ExtensionArray.from_storage(
        kind, pa.FixedSizeListArray.from_arrays(flat, type=kind.storage_type)
    )
