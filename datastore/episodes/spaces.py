"""Observation and action spaces: numpy only, stored as JSON with datasets and policy packages.

A space says what one value looks like (shape, dtype, bounds). Arrays of values have a leading
dim: a Box of shape [4] gives arrays [T, 4], a Discrete gives int64 [T], a Dict gives one array per
leaf. Nothing here imports pyarrow, torch or gymnasium, because a served policy needs spaces too.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.errors import EpisodeInvalidError, SchemaMismatchError
from replaylake.datastore.names import is_column_name

Array = NDArray[Any]
Values = Array | Mapping[str, Any]
"""An array with a leading dim, or for Dict and Tuple spaces a mapping from key to Values."""

# Spaces that are read may be nested so deep; those of environments have two or three levels.
MAX_DEPTH: Final = 64


@dataclass(frozen=True)
class Box:
    """Arrays of numbers of a shape; `low` and `high` are scalars or nested lists of that shape."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    low: Any = -math.inf
    high: Any = math.inf

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        object.__setattr__(self, "low", _compact_bound(self.low))
        object.__setattr__(self, "high", _compact_bound(self.high))
        try:
            kind = np.dtype(self.dtype).kind
        except (SyntaxError, TypeError, ValueError):  # numpy parses some texts as Python
            kind = "V"
        if kind not in "fiub":
            raise SchemaMismatchError(
                f"Box space: found dtype {self.dtype}, expected a float, integer or bool dtype. "
                "Use a Text or Dict space for anything else."
            )

    @property
    def is_image(self) -> bool:
        """Whether values are stored as raw frames (uint8, two or more dimensions)."""
        return self.dtype == "uint8" and len(self.shape) >= 2


@dataclass(frozen=True)
class Discrete:
    """The integers from start to start + n - 1, int64."""

    n: int
    start: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", operator.index(self.n))
        object.__setattr__(self, "start", operator.index(self.start))


@dataclass(frozen=True)
class MultiDiscrete:
    """Vectors of integers, int64; element i is in 0 .. nvec[i] - 1."""

    nvec: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "nvec", tuple(int(n) for n in self.nvec))


@dataclass(frozen=True)
class MultiBinary:
    """Vectors of n zeros and ones, int64."""

    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", operator.index(self.n))


@dataclass(frozen=True)
class Text:
    """Unicode strings."""


@dataclass(frozen=True)
class Dict:
    """A mapping of named spaces; names match `[A-Za-z_][A-Za-z0-9_]*`."""

    spaces: Mapping[str, Space]

    def __post_init__(self) -> None:
        object.__setattr__(self, "spaces", dict(self.spaces))
        keys = [str(key).lower() for key in self.spaces]
        if not keys or len({*keys}) < len(keys) or not all(map(is_column_name, keys)):
            raise SchemaMismatchError(
                f"Dict space: found the keys {list(self.spaces)}, expected [A-Za-z_][A-Za-z0-9_]*, "
                "at least one, and distinct without regard to case, as SQL sees them. Rename them."
            )

    def __hash__(self) -> int:
        return hash(tuple(self.spaces.items()))


@dataclass(frozen=True)
class Tuple:
    """A sequence of spaces; element i is stored under the name `_i`."""

    spaces: tuple[Space, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "spaces", tuple(self.spaces))
        if not self.spaces:
            raise SchemaMismatchError("Tuple space: found no sub-space, expected at least one.")


Space = Box | Discrete | MultiDiscrete | MultiBinary | Text | Dict | Tuple
Leaf = Box | Discrete | MultiDiscrete | MultiBinary | Text

_KINDS: Final[dict[str, type]] = {
    "box": Box,
    "discrete": Discrete,
    "multi_discrete": MultiDiscrete,
    "multi_binary": MultiBinary,
    "text": Text,
    "dict": Dict,
    "tuple": Tuple,
}
_KIND_OF: Final[dict[type, str]] = {kind: name for name, kind in _KINDS.items()}


def children(space: Dict | Tuple) -> dict[str, Space]:
    """Return the sub-spaces by the name that their column has."""
    if isinstance(space, Dict):
        return dict(space.spaces)
    return {f"_{i}": sub for i, sub in enumerate(space.spaces)}


def leaves(space: Space, prefix: str = "") -> Iterator[tuple[str, Leaf]]:
    """Yield (dotted name, leaf space) depth first; a plain space yields itself once."""
    if isinstance(space, Dict | Tuple):
        for key, sub in children(space).items():
            yield from leaves(sub, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, space


def value_shape(space: Leaf) -> tuple[int, ...]:
    """Return the shape of one value."""
    if isinstance(space, Box):
        return space.shape
    if isinstance(space, MultiDiscrete):
        return (len(space.nvec),)
    if isinstance(space, MultiBinary):
        return (space.n,)
    return ()


def value_dtype(space: Leaf) -> np.dtype[Any]:
    """Return the dtype of one value: the Box's own, int64 for discrete kinds, object for Text."""
    if isinstance(space, Box):
        return np.dtype(space.dtype)
    return np.dtype(object if isinstance(space, Text) else np.int64)


def num_actions(space: Space) -> int | None:
    """Return n of a Discrete space, else None."""
    return space.n if isinstance(space, Discrete) else None


def num_elements(space: Space) -> int:
    """Return how many numbers or texts one value has, those of its sub-spaces together."""
    if isinstance(space, Dict | Tuple):
        return sum(map(num_elements, children(space).values()))
    return math.prod(value_shape(space))


def num_values(values: Values) -> int:
    """Return the leading dim of values."""
    if isinstance(values, Mapping):
        return num_values(next(iter(values.values())))
    return len(values)


def num_bytes(values: Values) -> int:
    """Return the bytes of all leaves."""
    if isinstance(values, Mapping):
        return sum(num_bytes(sub) for sub in values.values())
    return int(np.asarray(values).nbytes)


def empty_values(space: Space, num: int) -> Values:
    """Return uninitialized arrays [num, ...] of a space's dtypes."""
    if isinstance(space, Dict | Tuple):
        return {key: empty_values(sub, num) for key, sub in children(space).items()}
    return np.empty((num, *value_shape(space)), value_dtype(space))


def take(values: Values, index: Any) -> Any:
    """Index the leading dim of every leaf: an int gives one value, a slice or array Values."""
    if isinstance(values, Mapping):
        return {key: take(sub, index) for key, sub in values.items()}
    return values[index]


def as_batch(value: Any) -> Any:
    """Give one value a leading dim of 1."""
    if isinstance(value, Mapping):
        return {key: as_batch(sub) for key, sub in value.items()}
    if isinstance(value, tuple):
        return {f"_{i}": as_batch(sub) for i, sub in enumerate(value)}
    return np.asarray(value)[None]


def concatenate(parts: list[Values]) -> Values:
    """Join values along the leading dim.

    Raises: ValueError, KeyError if they are not all mappings with the same keys, or all arrays.
    """
    first = parts[0]
    if isinstance(first, Mapping):
        mappings = [part for part in parts if isinstance(part, Mapping)]
        if len(mappings) < len(parts):
            raise ValueError(f"found both structs (fields {', '.join(first)}) and arrays")
        return {key: concatenate([part[key] for part in mappings]) for key in first}
    arrays: list[Any] = parts
    return np.concatenate(arrays)


def gather(space: Space, values: Sequence[Any]) -> Any:
    """Turn single JSON values of a space into what as_values reads: one array-like a leaf.

    Float leaves become float64, so that integers and floats mix as JSON clients mix them.
    """
    if isinstance(space, Dict):
        return {
            key: gather(sub, [value[key] for value in values]) for key, sub in space.spaces.items()
        }
    if isinstance(space, Tuple):
        return [gather(sub, [value[i] for value in values]) for i, sub in enumerate(space.spaces)]
    if value_dtype(space).kind == "f":
        return np.array(values, dtype=np.float64)
    return values


def as_values(space: Space, raw: Any, what: str, num: int | None = None) -> Values:
    """Cast raw to this space's arrays when that is exact, else refuse.

    Args:
        space: what each value has to look like.
        raw: array-like with leading dim [T]; a mapping for Dict, a mapping or tuple for Tuple.
        what: the name for error messages, such as `observation`.
        num: the expected T, where known.

    Returns: arrays [T, *shape] of the space's dtype, contiguous.

    Raises: EpisodeInvalidError, naming the field, if the shape differs, a cast would change a value
    (1.5 to an integer, 300 to uint8), or a float is not finite.
    """
    if isinstance(space, Dict | Tuple):
        if isinstance(raw, tuple | list):
            raw = {f"_{i}": sub for i, sub in enumerate(raw)}
        names = children(space)
        if not isinstance(raw, Mapping) or set(raw) != set(names):
            found = sorted(raw) if isinstance(raw, Mapping) else type(raw).__name__
            raise EpisodeInvalidError(
                f"{what}: found {found}, expected the keys {sorted(names)}. "
                "Pass one array per key of the space."
            )
        return {key: as_values(sub, raw[key], f"{what}.{key}", num) for key, sub in names.items()}
    if isinstance(space, Text):
        texts = np.asarray(raw, dtype=object)
        if texts.ndim != 1 or not all(isinstance(text, str) for text in texts):
            raise EpisodeInvalidError(
                f"{what}: expected one string per step, found {_describe(texts)}."
            )
        _check_num(texts, what, num)
        return texts
    try:
        array = np.asarray(raw)
    except ValueError as error:
        raise EpisodeInvalidError(
            f"{what}: rows of unequal length, expected shape {value_shape(space)} at every step. "
            "Pad or drop the uneven rows."
        ) from error
    _check_num(array, what, num)
    if array.shape[1:] != value_shape(space):
        raise EpisodeInvalidError(
            f"{what}: found shape {list(array.shape[1:])} a step, "
            f"expected {list(value_shape(space))}. Check the mapping or ingest into a new dataset."
        )
    return _cast_exactly(array, value_dtype(space), what)


def check_bounds(space: Space, values: Values, what: str) -> None:
    """Refuse values outside the space. Raises: EpisodeInvalidError with the first one's row."""
    if isinstance(space, Dict | Tuple):
        parts: Any = values
        for key, sub in children(space).items():
            check_bounds(sub, parts[key], f"{what}.{key}")
        return
    if isinstance(space, Text):
        return
    array = np.asarray(values)
    low, high = bounds(space)
    with np.errstate(invalid="ignore"):
        outside = (array < low) | (array > high)
    if outside.any():
        row = int(np.argwhere(outside)[0][0])
        raise EpisodeInvalidError(
            f"{what} at step {row}: found {_short(array[row])}, expected values between "
            f"{_short(low)} and {_short(high)}. Check the units; where the values are right, make "
            "the dataset with wider spaces: `ingest --env`, or Dataset.create."
        )


def bounds(space: Leaf) -> tuple[Any, Any]:
    """Return inclusive (low, high), each a scalar or an array of the value's shape."""
    if isinstance(space, Box):
        return (
            np.asarray(space.low, dtype=np.float64),
            np.asarray(space.high, dtype=np.float64),
        )
    if isinstance(space, Discrete):
        return space.start, space.start + space.n - 1
    if isinstance(space, MultiDiscrete):
        return 0, np.asarray(space.nvec) - 1
    if isinstance(space, MultiBinary):
        return 0, 1
    raise SchemaMismatchError("Text has no bounds.")


def to_json(space: Space) -> dict[str, Any]:
    """Return a JSON object; infinities are the strings "inf" and "-inf", which JSON lacks."""
    kind = _KIND_OF[type(space)]
    if isinstance(space, Box):
        return {
            "type": kind,
            "shape": list(space.shape),
            "dtype": space.dtype,
            "low": _bound_to_json(space.low),
            "high": _bound_to_json(space.high),
        }
    if isinstance(space, Dict):
        return {"type": kind, "spaces": {key: to_json(sub) for key, sub in space.spaces.items()}}
    if isinstance(space, Tuple):
        return {"type": kind, "spaces": [to_json(sub) for sub in space.spaces]}
    fields = {key: list(v) if isinstance(v, tuple) else v for key, v in vars(space).items()}
    return {"type": kind, **fields}


def parse(text: str) -> Space:
    """Read the JSON text of what to_json wrote. Raises: SchemaMismatchError."""
    try:
        return from_json(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise SchemaMismatchError(
            f"space: found {text[:60]!r}, expected JSON, nested {MAX_DEPTH} levels deep at most "
            f"({type(error).__name__})."
        ) from error


def from_json(data: Mapping[str, Any], depth: int = 0) -> Space:
    """Read what to_json wrote; `depth` is in how many spaces it lies.

    Raises: SchemaMismatchError on an unknown type, an absent field or spaces nested too deep.
    """
    if not isinstance(data, Mapping):
        raise SchemaMismatchError(f"space: found {type(data).__name__}, expected a JSON object.")
    if depth > MAX_DEPTH:
        raise SchemaMismatchError(
            f"space: found spaces nested more than {MAX_DEPTH} levels deep, expected fewer. Write "
            "the inner ones as one Dict."
        )
    fields = dict(data)
    kind = _KINDS.get(fields.pop("type", ""))
    if kind is None:
        raise SchemaMismatchError(
            f"space: found type {data.get('type')!r}, expected one of {sorted(_KINDS)}."
        )
    try:
        if kind is Box:
            fields["low"] = _bound_from_json(fields.get("low", "-inf"))
            fields["high"] = _bound_from_json(fields.get("high", "inf"))
        elif kind is Dict:
            members = fields["spaces"].items()
            fields["spaces"] = {key: from_json(sub, depth + 1) for key, sub in members}
        elif kind is Tuple:
            fields["spaces"] = tuple(from_json(sub, depth + 1) for sub in fields["spaces"])
        return kind(**fields)  # type: ignore[no-any-return]
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise SchemaMismatchError(f"space {data!r}: {error}.") from error


def describe(space: Space) -> str:
    """Return a short form for people, such as `Box float32[4]` or `Discrete(2)`."""
    if isinstance(space, Box):
        return f"Box {space.dtype}{list(space.shape)}"
    if isinstance(space, Discrete):
        start = f", start={space.start}" if space.start else ""
        return f"Discrete({space.n}{start})"
    if isinstance(space, MultiDiscrete):
        return f"MultiDiscrete{list(space.nvec)}"
    if isinstance(space, MultiBinary):
        return f"MultiBinary({space.n})"
    if isinstance(space, Dict | Tuple):
        inner = ", ".join(f"{key}: {describe(sub)}" for key, sub in children(space).items())
        return f"{type(space).__name__}({inner})"
    return "Text"


def _cast_exactly(array: Array, dtype: np.dtype[Any], what: str) -> Array:
    if array.dtype.kind not in "fiub":
        raise EpisodeInvalidError(
            f"{what}: found {_describe(array)}, expected numbers of dtype {dtype}. "
            "Map another column, or convert this one first."
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        row = int(np.argwhere(~np.isfinite(array))[0][0])
        raise EpisodeInvalidError(
            f"{what} at step {row}: found {_short(array[row])}, expected finite numbers. "
            "Drop or fill the row before it is ingested."
        )
    if array.dtype == dtype:
        return np.ascontiguousarray(array)
    with np.errstate(invalid="ignore", over="ignore"):
        cast = array.astype(dtype)
        # Decimal text read as float64 rarely equals its float32 exactly, and every CSV of a float32
        # log has it: rounding between float widths is allowed, a change of magnitude is not.
        both_float = array.dtype.kind == "f" and dtype.kind == "f"
        same = np.isfinite(cast) if both_float else cast == array
    if not np.all(same):
        row = int(np.argwhere(~np.asarray(same))[0][0])
        raise EpisodeInvalidError(
            f"{what} at step {row}: found {_short(array[row])} ({array.dtype}), expected what "
            f"{dtype} holds exactly. Ingest into a dataset of a wider dtype."
        )
    return np.ascontiguousarray(cast)


def _check_num(array: Array, what: str, num: int | None) -> None:
    if array.ndim == 0:
        raise EpisodeInvalidError(
            f"{what}: found one value, expected an array with one row per step."
        )
    if num is not None and len(array) != num:
        one_more = what == "observation" and len(array) == num + 1
        raise EpisodeInvalidError(
            f"{what}: found {len(array)} rows, expected {num}, one per step. "
            + (
                "What was seen after the last step is the final_observation."
                if one_more
                else "Check the log for missing or repeated rows."
            )
        )


def _compact_bound(bound: Any) -> Any:
    """Return a float when all elements are equal, else nested tuples."""
    if isinstance(bound, int | float):
        return float(bound)
    array = np.asarray(bound, dtype=np.float64)
    if array.size and (array == array.flat[0]).all():
        return float(array.flat[0])
    return _as_tuples(array.tolist())


def _as_tuples(bound: Any) -> Any:
    return tuple(_as_tuples(sub) for sub in bound) if isinstance(bound, list) else bound


def _bound_to_json(bound: Any) -> Any:
    if isinstance(bound, tuple):
        return [_bound_to_json(sub) for sub in bound]
    return bound if math.isfinite(bound) else str(bound)


def _bound_from_json(bound: Any) -> Any:
    if isinstance(bound, list):
        return [_bound_from_json(sub) for sub in bound]
    return float(bound)


def _describe(array: Array) -> str:
    return f"{array.dtype} {list(array.shape)}"


def _short(value: Any) -> str:
    text = np.array2string(np.asarray(value), threshold=6, precision=6, separator=", ")
    return text.replace("\n", "")


def copy_value(value: Any) -> Any:
    """Copy an observation or action, since environments reuse their buffers."""
    if isinstance(value, Mapping):
        return {key: copy_value(sub) for key, sub in value.items()}
    if isinstance(value, tuple):
        return {f"_{i}": copy_value(sub) for i, sub in enumerate(value)}
    return value if isinstance(value, str) else np.array(value)
