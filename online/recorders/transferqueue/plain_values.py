"""Python values as JSON without loss, and without pickle: what is read back runs no code.

JSON has no tuples, bytes, tensors or keys that are no texts. Each of these becomes an object of one
member, whose name begins with `!` and says what it is.
"""

from __future__ import annotations

import base64
from typing import Any, Final

import numpy as np
import torch

from replaylake.datastore.errors import EpisodeInvalidError, LogCorruptError

_MARK: Final = "!"


def encode_plain(value: Any, name: str) -> Any:
    """Return what json.dumps can write, from which `decode_plain` makes an equal value.

    name: what the value is called in an error. Raises: EpisodeInvalidError for a type that is
    neither plain Python nor an array.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        return {
            "!tensor": [
                dtype_name(value.dtype),
                list(value.shape),
                _text(tensor_bytes(value, name)),
            ]
        }
    if isinstance(value, np.ndarray | np.generic):
        return _encode_array(value, name)
    if isinstance(value, torch.Size):
        return {"!size": list(value)}
    if isinstance(value, torch.dtype):
        return {"!dtype": dtype_name(value)}
    if kind is list:
        return [encode_plain(item, f"{name}[{i}]") for i, item in enumerate(value)]
    if kind is tuple:
        return {"!tuple": encode_plain(list(value), name)}
    if kind in (set, frozenset):
        return {f"!{kind.__name__}": encode_plain(list(value), name)}
    if isinstance(value, bytes | bytearray):
        return {"!bytes": _text(value)}
    if isinstance(value, dict):
        return _encode_dict(value, name)
    raise EpisodeInvalidError(
        f"{name}: {kind.__module__}.{kind.__qualname__} cannot be stored, expected a tensor, an "
        "array, or numbers, texts, bytes and lists, tuples, sets and dictionaries of them. Store "
        "its content as one of these."
    )


def decode_plain(value: Any) -> Any:
    """Return the value that was encoded. Raises: LogCorruptError."""
    if isinstance(value, list):
        return [decode_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((mark, content),) = value.items()
        if mark.startswith(_MARK):
            return _decode_marked(mark, content)
    return {key: decode_plain(item) for key, item in value.items()}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name. Raises: LogCorruptError."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise LogCorruptError(f"found the dtype {name!r}, which torch {torch.__version__} lacks.")
    return dtype


def tensor_bytes(tensor: torch.Tensor, name: str) -> memoryview:
    """Return a tensor's elements in C order: a view where it is contiguous and on the CPU.

    Raises: EpisodeInvalidError for one that is sparse, quantized or nested.
    """
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_quantized:
        what = "nested" if tensor.is_nested else str(tensor.layout)
        raise EpisodeInvalidError(
            f"{name}: a tensor that is {what} or quantized cannot be stored, expected a dense one. "
            "Store its parts as dense tensors."
        )
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return dense.view(torch.uint8).numpy().data if len(dense) else memoryview(b"")


def _encode_dict(value: dict[Any, Any], name: str) -> Any:
    if all(type(key) is str and not key.startswith(_MARK) for key in value):
        return {key: encode_plain(item, f"{name}[{key!r}]") for key, item in value.items()}
    return {
        "!dict": [
            [encode_plain(key, f"a key of {name}"), encode_plain(item, f"{name}[{key!r}]")]
            for key, item in value.items()
        ]
    }


def _encode_array(value: np.ndarray | np.generic, name: str) -> Any:
    if value.dtype == object:
        return {"!objects": [list(value.shape), encode_plain(list(np.ravel(value)), name)]}
    if value.dtype.hasobject or value.dtype.names:
        raise EpisodeInvalidError(
            f"{name}: an array of {value.dtype} cannot be stored, expected one dtype without "
            "fields. Store its fields as arrays."
        )
    mark = "!array" if isinstance(value, np.ndarray) else "!scalar"
    return {mark: [value.dtype.str, list(value.shape), _text(value.tobytes())]}


def _decode_marked(mark: str, content: Any) -> Any:
    if mark == "!tensor":
        name, shape, text = content
        data = bytearray(base64.b64decode(text))
        dtype = dtype_of(name)
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.reshape(shape)
    if mark in ("!array", "!scalar"):
        name, shape, text = content
        array = np.frombuffer(bytearray(base64.b64decode(text)), np.dtype(name)).reshape(shape)
        return array if mark == "!array" else array[()]
    if mark == "!objects":
        objects = np.empty(len(content[1]), object)
        objects[:] = [decode_plain(item) for item in content[1]]
        return objects.reshape(content[0])
    if mark == "!size":
        return torch.Size(content)
    if mark == "!dtype":
        return dtype_of(content)
    if mark == "!bytes":
        return base64.b64decode(content)
    if mark == "!dict":
        return {decode_plain(key): decode_plain(item) for key, item in content}
    if mark in ("!tuple", "!set", "!frozenset"):
        return {"!tuple": tuple, "!set": set, "!frozenset": frozenset}[mark](decode_plain(content))
    raise LogCorruptError(f"found a value marked {mark!r}, which this version does not read.")


def _text(data: bytes | bytearray | memoryview) -> str:
    return base64.b64encode(data).decode()
