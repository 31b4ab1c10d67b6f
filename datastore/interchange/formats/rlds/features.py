"""The feature spec of a TFDS dataset, features.json, and an episode's features as Arrow columns.

In a record the features are flat: `steps/observation/image` is a list with an entry a step, whose
shape and dtype only features.json knows (tensorflow_datasets/core/features/feature.proto).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.images import decode_images
from replaylake.datastore.interchange.formats.rlds.tfrecord import Feature
from replaylake.datastore.interchange.sources.compression import refuse_bomb

_RAGGED_VALUES: Final = "ragged_flat_values"
_RAGGED_LENGTHS: Final = "ragged_row_lengths_0"
_ENCODED: Final = ("bytes", "zlib")
_TEXT: Final = ("string", "object")
_INTEGERS: Final = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_DTYPES: Final = ("bool", *_INTEGERS, "float16", "float32", "float64")


@dataclass(frozen=True)
class Leaf:
    """One feature: `shape` and `dtype` of a value (numpy's name, or `string`), how it is encoded.

    encoding: none (a list of numbers or texts), bytes or zlib (of an array's memory), image (PNG or
    JPEG). is_ragged: a list of values a step, of any length. num_classes: of a class label.
    """

    shape: tuple[int, ...]
    dtype: str
    encoding: str = "none"
    is_ragged: bool = False
    num_classes: int | None = None


@dataclass(frozen=True)
class UnreadFeature:
    """A feature that is not read, and why."""

    reason: str


Spec = Leaf | UnreadFeature | dict[str, "Spec"]


@dataclass(frozen=True)
class Record:
    """One record's features, by flat name; `num_steps` rows; `where` begins messages."""

    features: Mapping[str, Feature]
    num_steps: int
    where: str

    def mismatch_error(self, found: str) -> SourceInvalidError:
        """Return the error for a feature that is not as features.json says."""
        return SourceInvalidError(
            f"{self.where}: found {found}, as features.json and the other features say. The two "
            "do not match, or the file was written incorrectly: leave it out."
        )


@dataclass(frozen=True)
class EpisodeSpec:
    """The features of a step and those of the whole episode, nested as in features.json."""

    steps: dict[str, Spec]
    metadata: dict[str, Spec]


def episode_spec(features: Any, where: str) -> EpisodeSpec:
    """Interpret the JSON of features.json. Raises: SourceInvalidError unless there are `steps`."""
    try:
        top = _members(features)
        steps = top.pop("steps")["sequence"]["feature"]
        return EpisodeSpec(
            {name: _spec(one) for name, one in _members(steps).items()},
            {name: _spec(one) for name, one in top.items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise SourceInvalidError(
            f"{where}: found no dataset feature `steps` ({type(error).__name__}: {error}), "
            "expected the features.json of RLDS episodes. Other TFDS datasets have no steps."
        ) from error


def column(spec: Leaf | dict[str, Spec], key: str, record: Record, num: int) -> pa.Array:
    """Return a feature's `num` values (one where it is the episode's) as a column.

    `key` is its flat name in the record. Numbers have the feature's dtype, dicts are structs, and
    texts that are no UTF-8 are null. Raises: SourceInvalidError.
    """
    if isinstance(spec, dict):
        parts = {
            name: column(one, f"{key}/{name}", record, num)
            for name, one in spec.items()
            if not isinstance(one, UnreadFeature)
        }
        return pa.StructArray.from_arrays(list(parts.values()), names=list(parts))
    if spec.is_ragged:
        return _decode_ragged(spec, key, record, num)
    values = record.features.get(key, [])
    if spec.encoding == "image":
        return _images(spec, values, key, record, num)
    if spec.encoding in _ENCODED:
        flat = _decode_bytes(spec, values, key, record, num)
    else:
        flat = _decode_flat(spec, values, key, record)
    if len(flat) != num * math.prod(spec.shape):
        shape = f" of the shape {list(spec.shape)}" if spec.shape else ""
        raise record.mismatch_error(f"{len(flat)} numbers or texts as {key}, expected {num}{shape}")
    return _nest(flat, spec.shape)


def drop_unread(specs: Mapping[str, Spec]) -> dict[str, Spec]:
    """Return the features without those that are not read."""
    result: dict[str, Spec] = {}
    for name, one in specs.items():
        if isinstance(one, dict):
            one = drop_unread(one)
        if one and not isinstance(one, UnreadFeature):
            result[name] = one
    return result


def has_images(spec: Spec) -> bool:
    """Whether a feature is, or holds, an image."""
    if isinstance(spec, dict):
        return any(map(has_images, spec.values()))
    return isinstance(spec, Leaf) and spec.encoding == "image"


def list_unread(specs: Mapping[str, Spec], above: str = "") -> list[tuple[str, str]]:
    """Return the names of all features that are not read, and why."""
    unread = []
    for name, one in specs.items():
        if isinstance(one, UnreadFeature):
            unread.append((f"{above}{name}", one.reason))
        elif isinstance(one, dict):
            unread += list_unread(one, f"{above}{name}/")
    return unread


def _members(feature: Any) -> dict[str, Any]:
    members = feature["featuresDict"]["features"]
    if not isinstance(members, dict):
        raise TypeError(f"features is a {type(members).__name__}")
    return dict(members)


def _spec(feature: Any) -> Spec:
    if "featuresDict" in feature:
        return {name: _spec(one) for name, one in _members(feature).items()} or UnreadFeature(
            "is empty"
        )
    if "sequence" in feature:
        return _sequence(feature["sequence"])
    if "tensor" in feature:
        one = feature["tensor"]
        return _leaf(one, _shape(one), str(one.get("encoding") or "none").lower())
    if "classLabel" in feature:
        num = int(feature["classLabel"].get("numClasses", 0))
        return Leaf((), "int64", num_classes=num or None)
    if "text" in feature:
        return Leaf((), "string")
    if "image" in feature:
        return _image(feature["image"])
    kind = str(feature.get("pythonClassName", "")).rpartition(".")[2]
    return UnreadFeature(f"a feature of the kind {kind or [*feature]} is not read")


def _leaf(one: Any, shape: tuple[int | None, ...], encoding: str) -> Spec:
    dtype = str(one["dtype"])
    if dtype in _TEXT:
        dtype = "string"
    elif dtype not in _DTYPES:
        return UnreadFeature(f"its dtype is {dtype}")
    known = tuple(size for size in shape if size is not None)
    if len(known) < len(shape) or 0 in known:
        return UnreadFeature(f"its shape is {list(shape)}")
    if encoding not in ("none", *_ENCODED) or (dtype == "string" and encoding != "none"):
        return UnreadFeature(f"its encoding is {encoding}")
    return Leaf(known, dtype, encoding)


def _sequence(sequence: Any) -> Spec:
    inner = _spec(sequence["feature"])
    length = int(sequence.get("length", -1))
    is_plain = isinstance(inner, Leaf) and inner.encoding == "none" and not inner.is_ragged
    if isinstance(inner, Leaf) and is_plain and length > 0:
        return Leaf((length, *inner.shape), inner.dtype)
    if isinstance(inner, Leaf) and is_plain and not inner.shape:
        return Leaf((), inner.dtype, is_ragged=True)
    return (
        inner
        if isinstance(inner, UnreadFeature)
        else UnreadFeature("it is a sequence of structured values")
    )


def _image(image: Any) -> Spec:
    shape, dtype = _shape(image), str(image.get("dtype") or "uint8")
    if dtype not in ("uint8", "uint16"):
        # TFDS packs floats into the colors of a PNG.
        return UnreadFeature(f"it is an image of {dtype}")
    known = tuple(size for size in shape if size is not None)
    return Leaf(known if len(known) == len(shape) else (), dtype, "image")


def _shape(feature: Any) -> tuple[int | None, ...]:
    sizes = [int(size) for size in (feature.get("shape") or {}).get("dimensions", [])]
    return tuple(size if size >= 0 else None for size in sizes)


def _decode_flat(spec: Leaf, feature: Feature, key: str, record: Record) -> pa.Array:
    """Return a list's values in the feature's dtype."""
    if spec.dtype == "string":
        if not isinstance(feature, list):
            raise record.mismatch_error(f"numbers as {key}, expected texts")
        return pa.array([_text(one) for one in feature], pa.string())
    if isinstance(feature, list) and feature:
        raise record.mismatch_error(f"bytes as {key}, expected {spec.dtype}")
    dtype, values = np.dtype(spec.dtype), np.asarray(feature)
    if dtype == np.uint64 and values.dtype == np.int64:
        return pa.array(values.view(np.uint64))
    with np.errstate(invalid="ignore", over="ignore"):
        cast = values.astype(dtype)
        # The file keeps floats as float32, whatever features.json says.
        if dtype.kind != "f" and (cast != values).any():
            raise record.mismatch_error(
                f"values of {key} that do not fit {dtype}, expected {dtype}"
            )
    return pa.array(cast)


def _text(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def _decode_ragged(spec: Leaf, key: str, record: Record, num: int) -> pa.Array:
    lengths: Array = np.asarray([len(record.features.get(key, []))])
    values = f"{key}/{_RAGGED_VALUES}"
    if values in record.features:
        lengths = np.asarray(record.features.get(f"{key}/{_RAGGED_LENGTHS}", []), np.int64)
    else:
        values = key
    flat = _decode_flat(spec, record.features.get(values, []), key, record)
    if len(lengths) != num or (lengths < 0).any() or lengths.sum() != len(flat):
        raise record.mismatch_error(
            f"{len(flat)} values of {key} in {len(lengths)} lists, expected {num}"
        )
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), flat)


def _decode_bytes(spec: Leaf, feature: Feature, key: str, record: Record, num: int) -> pa.Array:
    dtype = np.dtype(spec.dtype)
    num_bytes = math.prod(spec.shape) * dtype.itemsize
    if not isinstance(feature, list) or len(feature) != num:
        raise record.mismatch_error(f"{len(feature)} values of {key}, expected {num}")
    refuse_bomb(f"{record.where} {key}", num * num_bytes, sum(map(len, feature)))
    parts = []
    for data in feature:
        try:
            # Bounded by what features.json declares, whatever the stream would inflate to.
            one = data if spec.encoding == "bytes" else _inflate(data, num_bytes)
        except zlib.error as error:
            raise record.mismatch_error(f"{error} in {key}, expected a zlib stream") from error
        if len(one) != num_bytes:
            raise record.mismatch_error(f"{len(one):,} bytes of {key}, expected {num_bytes:,}")
        parts.append(np.frombuffer(one, dtype))
    return pa.array(np.concatenate(parts) if parts else np.empty(0, dtype))


def _inflate(data: bytes, num_bytes: int) -> bytes:
    return zlib.decompressobj().decompress(data, num_bytes + 1)


def _images(spec: Leaf, feature: Feature, key: str, record: Record, num: int) -> pa.Array:
    if not isinstance(feature, list) or len(feature) != num:
        raise record.mismatch_error(f"{len(feature)} images as {key}, expected {num}")
    pixels = decode_images(feature, f"{record.where} {key}")
    shape = pixels.shape[1:]
    if shape != (spec.shape or shape) or pixels.dtype != np.dtype(spec.dtype):
        raise record.mismatch_error(
            f"{pixels.dtype} images of {list(shape)} as {key}, expected {spec.dtype} of "
            f"{list(spec.shape)}"
        )
    return _nest(pa.array(pixels.reshape(-1)), shape)


def _nest(flat: pa.Array, shape: tuple[int, ...]) -> pa.Array:
    """Lay flat values out as fixed-size lists, one level a dim."""
    for size in reversed(shape):
        flat = pa.FixedSizeListArray.from_arrays(flat, size)
    return flat
