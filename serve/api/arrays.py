"""Arrays as bytes in a body: `.npy` files, and maps {dtype, shape, data} inside msgpack.

Only numbers and booleans of fixed dtypes are taken: no objects, so no pickle, and no archives. What
a header claims is compared with the bytes that are there before anything is made of them.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from math import prod
from typing import Any, Final, Literal

import numpy as np

from replaylake.datastore.episodes.spaces import Array
from replaylake.serve.api.values import invalid_value_error, shorten
from replaylake.serve.messages import RequestRefusedError

_KINDS: Final = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64",
)  # fmt: skip
_ORDERS: Final[tuple[Literal["<", ">"], ...]] = ("<", ">")
# By name and as numpy abbreviates them, of either byte order: `float32`, `<f4`, `>f4`.
_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    text: dtype.newbyteorder(order)
    for dtype in map(np.dtype, _KINDS)
    for order in _ORDERS
    for text in (dtype.newbyteorder(order).str, *([dtype.name] if order == "<" else []))
}
_MAP_FIELDS: Final = frozenset({"dtype", "shape", "data"})
_MAX_DIMS: Final = 32  # as numpy 1 had; no space needs as many
# Numpy's own headers are 128 bytes; its parser takes longer over those made to hurt it.
_MAX_HEADER_BYTES: Final = 1024
_NPY_MAGIC: Final = b"\x93NUMPY"


def read_npy(body: bytes) -> Array:
    """Return the array of a `.npy` file.

    Raises: RequestRefusedError if it is none, or not whole.
    """
    if body[:4] == b"PK\x03\x04":
        message = "body is an archive (.npz); send one array as numpy.save writes it"
        raise RequestRefusedError(422, "body", message)
    if not body.startswith(_NPY_MAGIC):
        message = "body is not a .npy file; send one array as numpy.save writes it"
        raise RequestRefusedError(422, "body", message)
    file = io.BytesIO(body)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of headers that Python 2 wrote
            version = np.lib.format.read_magic(file)
            read = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[version]
            shape, is_fortran, dtype = read(file, max_header_size=_MAX_HEADER_BYTES)
    # The header is a Python literal: of bytes made for it its parser raises nearly anything.
    except Exception as error:
        cause = type(error).__name__
        message = f"unreadable .npy header ({cause}); send one array as numpy.save writes it"
        raise RequestRefusedError(422, "body", message) from None
    if dtype.str not in _DTYPES:
        found = f"an array of {shorten(str(dtype))}"
        expected = f"one of {', '.join(_KINDS)}"
        raise RequestRefusedError(422, "body", found=found, expected=expected)
    data = memoryview(body)[file.tell() :]
    return array_of_bytes(data, dtype, shape, "body", "F" if is_fortran else "C")


def read_map(fields: Mapping[str, Any]) -> Array:
    """Return the array of a map {dtype, shape, data}. Raises: RequestRefusedError."""
    name, shape, data = fields["dtype"], fields["shape"], fields["data"]
    dtype = _DTYPES.get(name) if type(name) is str else None
    if dtype is None:
        raise invalid_value_error("dtype", name, f"one of {', '.join(_KINDS)}")
    if type(shape) is not list:
        raise invalid_value_error("shape", shape, "a list of whole numbers")
    return array_of_bytes(data, dtype, tuple(shape), "data", "C")


def array_map(array: Array) -> dict[str, Any]:
    """Return an array as `read_map` reads it."""
    whole = np.ascontiguousarray(array)
    return {"dtype": whole.dtype.name, "shape": list(array.shape), "data": whole.tobytes()}


def is_array_map(fields: Mapping[str, Any]) -> bool:
    """Whether a map stands for an array; no observation in named fields has bytes."""
    return type(fields.get("data")) is bytes and fields.keys() == _MAP_FIELDS


def array_of_bytes(data: Any, dtype: np.dtype[Any], shape: Any, field: str, order: Any) -> Array:
    """Give bytes their shape, copying none; the caller's numbers count for nothing till then.

    Raises: RequestRefusedError naming `field` if the shape or the number of bytes is wrong.
    """
    if len(shape) > _MAX_DIMS or any(type(size) is not int or size < 1 for size in shape):
        found = f"shape {shorten(str(list(shape)))}"
        expected = f"at most {_MAX_DIMS} dimensions, each 1 or more"
        raise RequestRefusedError(422, field, found=found, expected=expected)
    num_bytes = prod(shape) * dtype.itemsize  # Python's integers: no product overflows
    if num_bytes != len(data):
        expected = shorten(f"{num_bytes} bytes for {dtype.name} {list(shape)}")
        raise RequestRefusedError(422, field, found=f"{len(data)} bytes", expected=expected)
    if dtype.kind == "b" and np.frombuffer(data, np.uint8).max() > 1:
        message = "bool array has bytes other than 0 and 1; send one of the two for each element"
        raise RequestRefusedError(422, field, message)
    array: Array = np.frombuffer(data, dtype).reshape(shape, order=order)
    return array.astype(dtype.newbyteorder("="), copy=False)
