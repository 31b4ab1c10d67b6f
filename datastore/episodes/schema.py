"""The columns of a dataset: the only place where one is spelled, and how its values are stored."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylake.datastore.episodes.encoding import Encoding
from replaylake.datastore.episodes.encoding import from_json as encoding_from_json
from replaylake.datastore.episodes.score_reference import ScoreReference
from replaylake.datastore.episodes.spaces import (
    Array,
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    Text,
    Tuple,
    Values,
    children,
    parse,
    to_json,
    value_shape,
)
from replaylake.datastore.episodes.tokenizer import Tokenizer
from replaylake.datastore.episodes.tokens import token_type
from replaylake.datastore.errors import SchemaMismatchError
from replaylake.datastore.names import is_column_name
from replaylake.datastore.storage.arrow_values import numbers
from replaylake.datastore.storage.table.delta_schema import FIELD_ID, to_delta

EPISODE_ID: Final = "episode_id"
STEP: Final = "step"
ENV_STEP: Final = "env_step"
AGENT_ID: Final = "agent_id"
OBSERVATION: Final = "observation"
FINAL_OBSERVATION: Final = "final_observation"
ACTION: Final = "action"
REWARD: Final = "reward"
TERMINATED: Final = "terminated"
TRUNCATED: Final = "truncated"
BEHAVIOR_LOG_PROB: Final = "behavior_log_prob"
POLICY: Final = "policy"
POLICY_VERSION: Final = "policy_version"
ACTION_MASK: Final = "action_mask"
TIMESTAMP: Final = "timestamp"
SOURCE_EPISODE_ID: Final = "source_episode_id"

STANDARD_COLUMNS: Final = (
    EPISODE_ID,
    STEP,
    ENV_STEP,
    AGENT_ID,
    OBSERVATION,
    FINAL_OBSERVATION,
    ACTION,
    REWARD,
    TERMINATED,
    TRUNCATED,
    BEHAVIOR_LOG_PROB,
    POLICY,
    POLICY_VERSION,
    ACTION_MASK,
    TIMESTAMP,
    SOURCE_EPISODE_ID,
)
TIMESTAMP_TYPE: Final = pa.timestamp("us", tz="UTC")
NAMES_TYPE: Final = pa.dictionary(pa.int32(), pa.string())

_OBSERVATION_SPACE_KEY: Final = "replaylake.observation_space"
_ACTION_SPACE_KEY: Final = "replaylake.action_space"
_MASK_SIZE_KEY: Final = "replaylake.mask_size"
# Only where it is true: tables that were made before it have no such key.
_REWARDS_OPTIONAL_KEY: Final = "replaylake.rewards_optional"
# Likewise, only where a key is unique.
_UNIQUE_KEY: Final = "replaylake.unique_keys"
# Likewise, only where observations or actions were encoded.
_ENCODING_KEY: Final = "replaylake.encoding"
# Likewise, only where returns can be normalized.
SCORE_REFERENCE_KEY: Final = "replaylake.score_reference"
# Likewise, only where the log states its environment.
_ENV_SPEC_KEY: Final = "replaylake.env_spec"
# Likewise, only where the tokenizer is known.
_TOKENIZER_KEY: Final = "replaylake.tokenizer"

# Further columns of steps that were made of spans: the trace, and the ids of the spans that a step
# is within, its own first.
TRACE_ID: Final = "trace_id"
SPAN_IDS: Final = "span_ids"

# Further columns of steps whose candidate actions have features of their own: a JSON object for
# each, and the probability with which the event was dropped from the log.
ACTION_FEATURES: Final = "action_features"
PDROP: Final = "pdrop"

# Names that the SQL views add.
_VIEW_COLUMNS: Final = ("next_observation",)
# Delta has no unsigned integers and no float16: they are widened at the door.
_WIDER_TYPES: Final = {"uint8": "int16", "uint16": "int32", "uint32": "int64", "float16": "float32"}


# Columns that every step has and that may be of a key: one value a row that says what it is.
KEY_COLUMNS: Final = (
    EPISODE_ID,
    SOURCE_EPISODE_ID,
    AGENT_ID,
    STEP,
    ENV_STEP,
    TIMESTAMP,
    POLICY,
    POLICY_VERSION,
)


@dataclass(frozen=True)
class UniqueKeys:
    """The columns whose values no two rows of a dataset share, in this order.

    late: further columns that, like the reward, a row may get later, where they are NULL.
    """

    columns: tuple[str, ...]
    late: tuple[str, ...] = ()

    @property
    def late_columns(self) -> tuple[str, ...]:
        """The reward and `late`."""
        return tuple(dict.fromkeys((REWARD, *self.late)))

    def rename(self, column: str, to: str) -> UniqueKeys:
        """Return the key with another name for a column."""
        return UniqueKeys(
            tuple(to if name == column else name for name in self.columns),
            tuple(to if name == column else name for name in self.late),
        )

    def to_json(self) -> dict[str, list[str]]:
        return {"columns": list(self.columns), "late": list(self.late)}


@dataclass(frozen=True)
class DatasetSpec:
    """What every episode of a dataset has: spaces, mask width (None: no mask), further columns.

    rewards_optional: whether a step's reward may be unknown: NaN in an Episode, NULL in a row.
    encoding: what the elements of observations are and what actions are called, where the log had
    named columns; None if nothing was encoded. score_reference: what returns are normalized by; it
    is no property of the episodes, and may change. unique: the columns that no two rows have the
    same values in; None if there are none. env_spec: Gymnasium's JSON of the environment's
    specification (EnvSpec.to_json), as a log states it; None if none does. tokenizer: what the ids
    of token columns mean; None if that is not known.
    """

    observation_space: Space
    action_space: Space
    mask_size: int | None = None
    extras: Mapping[str, pa.DataType] = field(default_factory=dict)
    rewards_optional: bool = False
    encoding: Encoding | None = None
    score_reference: ScoreReference | None = None
    unique: UniqueKeys | None = None
    env_spec: str | None = None
    tokenizer: Tokenizer | None = None

    def configuration(self) -> dict[str, str]:
        """Return what the table keeps of it beside the Arrow schema."""
        return {
            _OBSERVATION_SPACE_KEY: json.dumps(to_json(self.observation_space)),
            _ACTION_SPACE_KEY: json.dumps(to_json(self.action_space)),
            _MASK_SIZE_KEY: json.dumps(self.mask_size),
            **({_REWARDS_OPTIONAL_KEY: "true"} if self.rewards_optional else {}),
            **({_ENCODING_KEY: json.dumps(self.encoding.to_json())} if self.encoding else {}),
            **(
                {SCORE_REFERENCE_KEY: json.dumps(self.score_reference.to_json())}
                if self.score_reference
                else {}
            ),
            **(unique_setting(self.unique) if self.unique else {}),
            **({_ENV_SPEC_KEY: self.env_spec} if self.env_spec else {}),
            **(tokenizer_setting(self.tokenizer) if self.tokenizer else {}),
        }

    @classmethod
    def from_table(cls, configuration: Mapping[str, str], schema: pa.Schema) -> DatasetSpec:
        """Read a table's spec."""
        return cls(
            observation_space=_space(configuration[_OBSERVATION_SPACE_KEY]),
            action_space=_space(configuration[_ACTION_SPACE_KEY]),
            mask_size=json.loads(configuration[_MASK_SIZE_KEY]),
            extras={f.name: f.type for f in schema if f.name not in STANDARD_COLUMNS},
            rewards_optional=configuration.get(_REWARDS_OPTIONAL_KEY) == "true",
            encoding=_encoding(configuration.get(_ENCODING_KEY)),
            score_reference=_score_reference(configuration.get(SCORE_REFERENCE_KEY)),
            unique=read_unique_keys(configuration),
            env_spec=configuration.get(_ENV_SPEC_KEY),
            tokenizer=read_tokenizer(configuration),
        )


def read_unique_keys(configuration: Mapping[str, str]) -> UniqueKeys | None:
    """Return the unique key that a table's configuration names."""
    return _unique(configuration.get(_UNIQUE_KEY))


def unique_setting(unique: UniqueKeys) -> dict[str, str]:
    """Return the entry of a table's configuration that names a unique key."""
    return {_UNIQUE_KEY: json.dumps(unique.to_json())}


def read_tokenizer(configuration: Mapping[str, str]) -> Tokenizer | None:
    """Return the tokenizer that a table's configuration states."""
    return _tokenizer(configuration.get(_TOKENIZER_KEY))


def tokenizer_setting(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the entry of a table's configuration that states a tokenizer."""
    return {_TOKENIZER_KEY: json.dumps(tokenizer.to_json())}


@lru_cache(maxsize=256)
def _tokenizer(text: str | None) -> Tokenizer | None:
    return None if text is None else Tokenizer.from_json(json.loads(text))


@lru_cache(maxsize=256)
def _space(text: str) -> Space:
    return parse(text)


@lru_cache(maxsize=256)
def _encoding(text: str | None) -> Encoding | None:
    return None if text is None else encoding_from_json(json.loads(text))


def _score_reference(text: str | None) -> ScoreReference | None:
    return None if text is None else ScoreReference.from_json(json.loads(text))


@lru_cache(maxsize=256)
def _unique(text: str | None) -> UniqueKeys | None:
    if text is None:
        return None
    body = json.loads(text)
    return UniqueKeys(tuple(body["columns"]), tuple(body["late"]))


def arrow_schema(spec: DatasetSpec) -> pa.Schema:
    """Return the dataset's columns; standard ones keep their field id in every dataset.

    Raises: SchemaMismatchError if a further column's name or type cannot be kept.
    """
    check_names(spec.extras)
    observation = arrow_type(spec.observation_space)
    kinds: dict[str, tuple[pa.DataType, bool]] = {
        EPISODE_ID: (pa.string(), False),
        STEP: (pa.int32(), False),
        ENV_STEP: (pa.int32(), False),
        AGENT_ID: (NAMES_TYPE, False),
        OBSERVATION: (observation, False),
        FINAL_OBSERVATION: (observation, True),
        ACTION: (arrow_type(spec.action_space), False),
        REWARD: (pa.float64(), spec.rewards_optional),
        TERMINATED: (pa.bool_(), False),
        TRUNCATED: (pa.bool_(), False),
        BEHAVIOR_LOG_PROB: (pa.float32(), True),
        POLICY: (NAMES_TYPE, True),
        POLICY_VERSION: (pa.int64(), True),
        TIMESTAMP: (TIMESTAMP_TYPE, True),
        SOURCE_EPISODE_ID: (pa.string(), True),
    }
    if spec.mask_size is not None:
        kinds[ACTION_MASK] = (vector_type(pa.bool_(), spec.mask_size), True)
    fields = [
        pa.field(name, kind, nullable, {FIELD_ID: str(STANDARD_COLUMNS.index(name) + 1).encode()})
        for name, (kind, nullable) in kinds.items()
    ]
    first_extra = len(STANDARD_COLUMNS) + 1
    for number, (name, kind) in enumerate(spec.extras.items(), first_extra):
        fields.append(pa.field(name, kind, True, {FIELD_ID: str(number).encode()}))
    return pa.schema(fields)


def check_names(extras: Iterable[str]) -> None:
    """Refuse further columns that SQL or Delta could not tell apart.

    Raises: SchemaMismatchError.
    """
    reserved = {*STANDARD_COLUMNS, *_VIEW_COLUMNS}
    for name in extras:
        if not is_column_name(name) or name.lower() in reserved:
            raise SchemaMismatchError(
                f"column {name!r}: expected [A-Za-z_][A-Za-z0-9_]*, unlike every other column "
                "without regard to case. Rename it."
            )
        reserved.add(name.lower())


def has_steps(names: Iterable[str]) -> bool:
    """Whether a table of these columns holds steps: others have a step or an agent, not both."""
    return {EPISODE_ID, AGENT_ID, STEP, TERMINATED} <= {*names}


def arrow_type(space: Space) -> pa.DataType:
    """Return the column type of a space's values, as docs/DATA_MODEL.md has it.

    Raises: SchemaMismatchError for a uint64 Box, which no Delta type holds.
    """
    if isinstance(space, Dict | Tuple):
        # Nullable within: a whole final_observation may be null, and Parquet writers then take the
        # values below it for nulls as well.
        return pa.struct([pa.field(key, arrow_type(sub)) for key, sub in children(space).items()])
    if isinstance(space, Text):
        return pa.string()
    if isinstance(space, Discrete):
        return pa.int64()
    if isinstance(space, MultiDiscrete | MultiBinary):
        return vector_type(pa.int64(), value_shape(space)[0])
    if space.is_image:
        # With 64-bit offsets: frames of one append may pass 2 GiB.
        return pa.large_binary()
    if space.dtype == "uint64":
        raise SchemaMismatchError("Box dtype uint64: no Delta type holds it. Use int64.")
    element = pa.from_numpy_dtype(np.dtype(_WIDER_TYPES.get(space.dtype, space.dtype)))
    return vector_type(element, int(np.prod(space.shape))) if space.shape else element


def to_arrow(space: Space, values: Values) -> pa.Array:
    """Encode values [T, ...] of a space, already checked, as a column without nulls."""
    if isinstance(space, Dict | Tuple):
        parts: Any = values
        arrays = [to_arrow(sub, parts[key]) for key, sub in children(space).items()]
        return pa.StructArray.from_arrays(arrays, fields=list(arrow_type(space)))
    array = np.asarray(values)
    kind = arrow_type(space)
    if isinstance(space, Text):
        return pa.array(array, kind)
    if isinstance(space, Box) and space.is_image:
        return _frames(array)
    if not value_shape(space):
        return pa.array(array).cast(kind)
    flat = pa.array(np.ascontiguousarray(array).reshape(-1)).cast(kind.value_type)
    return pa.FixedSizeListArray.from_arrays(flat, type=kind)


def to_numpy(space: Space, column: pa.Array | pa.ChunkedArray) -> Values:
    """Decode a column without nulls to values [T, ...] of the space's dtype."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if isinstance(space, Dict | Tuple):
        return {
            key: to_numpy(sub, pc.struct_field(column, key)) for key, sub in children(space).items()
        }
    if isinstance(space, Text):
        texts: Array = column.to_numpy(zero_copy_only=False)
        return texts
    shape = (len(column), *value_shape(space))
    if isinstance(space, Box) and space.is_image:
        return _from_frames(column, shape)
    flat = column.flatten() if value_shape(space) else column
    dtype = np.dtype(space.dtype if isinstance(space, Box) else np.int64)
    decoded: Array = numbers(flat).reshape(shape).astype(dtype, copy=False)
    return decoded


def widen(array: Any, name: str) -> pa.Array:
    """Give a further column a type that Delta, DuckDB and numpy share, or refuse it.

    An array [T, ...] of numpy becomes a fixed-size list a row.
    Raises: SchemaMismatchError on nulls only, naive or finer timestamps, and types no table holds.
    """
    column = as_column(array, name)
    return _cast(column, widen_type(column.type, name), name)


def as_column(array: Any, name: str) -> pa.Array:
    """Return what a caller gave as a further column in Arrow's own type for it.

    Raises: SchemaMismatchError if it has none.
    """
    if isinstance(array, pa.ChunkedArray):
        return array.combine_chunks()
    if isinstance(array, pa.Array):
        return array
    try:
        if isinstance(array, np.ndarray) and array.ndim > 1:
            flat = pa.array(np.ascontiguousarray(array).reshape(-1))
            return pa.FixedSizeListArray.from_arrays(
                flat, type=vector_type(flat.type, int(np.prod(array.shape[1:])))
            )
        return pa.array(array)
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise SchemaMismatchError(
            f"column {name!r}: {error}, expected one value of one type per step. Convert it first."
        ) from error


def widen_type(kind: pa.DataType, name: str) -> pa.DataType:
    """Return the type that a further column is kept in; a token column has one of its own.

    Raises: SchemaMismatchError if there is none.
    """
    if (own := token_type(name, kind)) is not None:
        return own
    types = pa.types
    if types.is_null(kind):
        raise SchemaMismatchError(
            f"column {name!r}: found only nulls, expected typed values. Drop it."
        )
    if types.is_unsigned_integer(kind) or types.is_float16(kind):
        numpy_name = "float16" if types.is_float16(kind) else str(kind)
        return pa.from_numpy_dtype(np.dtype(_WIDER_TYPES.get(numpy_name, "int64")))
    if types.is_timestamp(kind):
        if kind.tz is None:
            raise SchemaMismatchError(
                f"column {name!r}: found timestamps without a time zone, expected UTC or an "
                "offset. Give them one."
            )
        return TIMESTAMP_TYPE
    if types.is_large_string(kind) or types.is_string_view(kind):
        return pa.string()
    if types.is_large_binary(kind) or types.is_binary_view(kind):
        return pa.binary()
    if types.is_fixed_size_binary(kind):
        return pa.binary()
    if types.is_dictionary(kind):
        plain = widen_type(kind.value_type, name)
        return NAMES_TYPE if types.is_string(plain) else plain
    if types.is_fixed_size_list(kind):
        element = pa.field("element", widen_type(kind.value_type, name), kind.value_field.nullable)
        return pa.list_(element, kind.list_size)
    if types.is_list(kind) or types.is_large_list(kind):
        return pa.list_(pa.field("element", widen_type(kind.value_type, name)))
    if types.is_map(kind):
        return pa.map_(widen_type(kind.key_type, name), widen_type(kind.item_type, name))
    if types.is_struct(kind):
        return pa.struct([pa.field(f.name, widen_type(f.type, name)) for f in kind])
    to_delta(pa.schema([pa.field(name, kind)]))
    return kind


def _cast(column: pa.Array, kind: pa.DataType, name: str) -> pa.Array:
    try:
        return column if column.type.equals(kind) else column.cast(kind)
    except pa.ArrowException as error:
        raise SchemaMismatchError(
            f"column {name!r}: found {column.type}, expected values that {kind} holds exactly: "
            f"{error}. Convert it first."
        ) from error


def vector_type(element: pa.DataType, size: int) -> pa.DataType:
    """Return fixed_size_list<element not null>[size]."""
    return pa.list_(pa.field("element", element, False), size)


def _frames(array: Array) -> pa.Array:
    """One binary value a frame, without a Python object for each."""
    num = len(array)
    size = array[0].nbytes if num else 0
    offsets = np.arange(num + 1, dtype=np.int64) * size
    data = pa.py_buffer(np.ascontiguousarray(array))
    return pa.Array.from_buffers(pa.large_binary(), num, [None, pa.py_buffer(offsets), data])


def _from_frames(column: pa.Array, shape: tuple[int, ...]) -> Array:
    _, offsets, data = column.buffers()
    if not len(column) or data is None:
        return np.zeros(shape, np.uint8)
    start = int(np.frombuffer(offsets, np.int64)[column.offset])
    return np.frombuffer(data, np.uint8, int(np.prod(shape)), start).reshape(shape)
