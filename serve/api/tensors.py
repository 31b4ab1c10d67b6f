"""Named tensors of the Open Inference Protocol in bodies: JSON, and bytes behind it.

https://github.com/kserve/open-inference-protocol, version 2, with the extension
`binary_tensor_data`: the header Inference-Header-Content-Length says how long the JSON is, and the
tensors with a `binary_data_size` follow it in their order. Nothing is allocated by a claimed shape
or size before the data that is there was compared with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any, Final

import numpy as np
import orjson

from replaylake.datastore.episodes.spaces import Array
from replaylake.serve.api.arrays import array_of_bytes
from replaylake.serve.api.bodies import optional, parse_json
from replaylake.serve.api.values import invalid_value_error, shorten
from replaylake.serve.messages import JSON, Request, RequestRefusedError, Response

HEADER_LENGTH: Final = b"inference-header-content-length"
OCTETS: Final = "application/octet-stream"
BYTES: Final = "BYTES"  # strings: 4 bytes of length, little endian, before the UTF-8 of each
_BINARY_OUTPUT: Final = "binary_data_output"
_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "BOOL": np.dtype("bool"),
    **{f"INT{bits}": np.dtype(f"<i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": np.dtype(f"<u{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": np.dtype(f"<f{bits // 8}") for bits in (16, 32, 64)},
}
_DATATYPES: Final = {dtype: name for name, dtype in _DTYPES.items()}
# What may be sent for a tensor of each kind of dtype; a cast that changes a number is refused.
_SENDABLE: Final[Mapping[str, str]] = {"f": "fiu", "i": "iu", "u": "iu", "b": "b"}
_JSON_KINDS: Final[Mapping[str, set[type]]] = {
    "f": {int, float},
    "i": {int},
    "u": {int},
    "b": {bool},
}
_LENGTH_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor [B, *shape] that a model takes or returns; dtype None stands for strings."""

    name: str
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...] = ()
    is_optional: bool = False

    @property
    def datatype(self) -> str:
        """The protocol's name of the dtype."""
        return BYTES if self.dtype is None else _DATATYPES[self.dtype.newbyteorder("<")]

    @property
    def sendable(self) -> tuple[str, ...]:
        """The datatypes that a request may send for it."""
        if self.dtype is None:
            return (BYTES,)
        kinds = _SENDABLE[self.dtype.kind]
        return tuple(name for name, dtype in _DTYPES.items() if dtype.kind in kinds)

    def to_json(self) -> dict[str, Any]:
        """Return it as model metadata has it."""
        content: dict[str, Any] = {
            "name": self.name,
            "datatype": self.datatype,
            "shape": [-1, *self.shape],
        }
        return content | ({"parameters": {"optional": True}} if self.is_optional else {})


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A request for inference. tensors: arrays [B, *shape], and lists of B strings, by name.

    model_name: the model that the body names, None where only the path does. parameters: those that
    this module does not read itself. is_binary: of each requested output, by name, in the order of
    the request.
    """

    request_id: str | None
    model_name: str | None
    parameters: Mapping[str, Any]
    tensors: Mapping[str, Array | list[str]]
    is_binary: Mapping[str, bool]


def read_infer_request(
    request: Request, inputs: Mapping[str, TensorSpec], outputs: Mapping[str, TensorSpec]
) -> InferRequest:
    """Read a request to a model with these inputs and outputs. Raises: RequestRefusedError."""
    header, data = _split_body(request)
    fields = parse_json(header)
    _check_keys(fields, ("id", "model_name", "inputs", "outputs", "parameters"), "")
    parameters = dict(optional(fields, "parameters", dict, "an object") or {})
    by_default = optional(parameters, _BINARY_OUTPUT, bool, "true or false") or False
    parameters.pop(_BINARY_OUTPUT, None)
    return InferRequest(
        optional(fields, "id", str, "a string"),
        optional(fields, "model_name", str, "a string"),
        parameters,
        _read_tensors(fields.get("inputs"), inputs, data),
        _read_outputs(fields.get("outputs"), outputs, by_default),
    )


def infer_response(
    head: Mapping[str, Any],
    outputs: Sequence[tuple[TensorSpec, Any]],
    is_binary: Mapping[str, bool],
) -> Response:
    """Return the response with these fields and tensors: arrays [B, *shape], or lists of strings.

    A NaN is null in JSON, which has none.
    """
    described, chunks = [], []
    for spec, values in outputs:
        one: dict[str, Any] = {
            "name": spec.name,
            "datatype": spec.datatype,
            "shape": [len(values), *spec.shape],
        }
        array = None
        if spec.dtype is not None:
            array = np.ascontiguousarray(values, spec.dtype.newbyteorder("<"))
        if is_binary[spec.name]:
            chunk = _join_strings(values) if array is None else array.tobytes()
            one["parameters"] = {"binary_data_size": len(chunk)}
            chunks.append(chunk)
        else:
            one["data"] = values if array is None else array.ravel().tolist()
        described.append(one)
    header = orjson.dumps({**head, "outputs": described})
    if not chunks:
        return Response(200, header)
    length = (HEADER_LENGTH, b"%d" % len(header))
    return Response(200, b"".join([header, *chunks]), OCTETS, (length,))


def _split_body(request: Request) -> tuple[bytes, memoryview]:
    """Return the JSON of a body and what is behind it. Raises: RequestRefusedError."""
    text = dict(request.headers).get(HEADER_LENGTH)
    body, kind = request.body, request.content_type
    if text is None:
        if kind != JSON:
            message = f"send {JSON}, or tensors as bytes with Inference-Header-Content-Length"
            found = f"found {shorten(kind)}" if kind else "content-type is missing"
            raise RequestRefusedError(415, "content-type", f"{found}; {message}")
        return body, memoryview(b"")
    # A page of another site cannot send this header without a CORS preflight, so a request with it
    # needs no content type: clients of Triton send none.
    if kind not in ("", JSON, OCTETS):
        raise RequestRefusedError(
            415, "content-type", found=shorten(kind), expected=f"{OCTETS} or none"
        )
    name = HEADER_LENGTH.decode()
    # Not isdigit alone: of thousands of digits Python makes no number.
    if not text.isdigit() or len(text) > 12 or int(text) > len(body):
        found = shorten(text.decode("latin-1"))
        expected = f"the length of the JSON, a number up to the {len(body)} bytes of the body"
        raise RequestRefusedError(400, name, found=found, expected=expected)
    return body[: int(text)], memoryview(body)[int(text) :]


def _check_keys(fields: Mapping[str, Any], allowed: Sequence[str], place: str) -> None:
    for name in fields:
        if name not in allowed:
            found = shorten(f"{place}.{name}" if place else name)
            raise RequestRefusedError(400, found, f"unknown field; use {', '.join(allowed)}")


def _read_tensors(
    raw: Any, inputs: Mapping[str, TensorSpec], data: memoryview
) -> dict[str, Array | list[str]]:
    if type(raw) is not list:
        raise invalid_value_error("inputs", raw, "a list of tensors")
    tensors: dict[str, Array | list[str]] = {}
    begin = 0
    for i, tensor in enumerate(raw):
        spec = _find_spec(tensor, inputs, f"inputs[{i}]", "input")
        if spec.name in tensors:
            raise RequestRefusedError(400, spec.name, "input is given twice; send it once")
        shape, dtype = _read_type(tensor, spec)
        num_bytes = _read_size(tensor, spec.name)
        if num_bytes is None:
            tensors[spec.name] = _read_json(tensor["data"], shape, dtype, spec)
            continue
        chunk = data[begin : begin + num_bytes]
        if len(chunk) < num_bytes:
            expected = f"at most the {len(chunk)} bytes that follow the JSON for it"
            field = f"{spec.name}.binary_data_size"
            raise RequestRefusedError(400, field, found=shorten(str(num_bytes)), expected=expected)
        begin += num_bytes
        if dtype is None:
            tensors[spec.name] = _split_strings(chunk, shape[0], spec.name)
        else:
            tensors[spec.name] = array_of_bytes(chunk, dtype, shape, spec.name, "C")
    if begin < len(data):
        found = f"{len(data)} bytes behind the JSON"
        expected = f"{begin}, the sum of binary_data_size"
        raise RequestRefusedError(400, "body", found=found, expected=expected)
    for name, spec in inputs.items():
        if name not in tensors and not spec.is_optional:
            expected = f"send {spec.datatype} {[-1, *spec.shape]}"
            raise RequestRefusedError(400, name, f"required input is missing; {expected}")
    for name, values in tensors.items():
        if isinstance(values, np.ndarray):
            _check_finite(values, name)
    return tensors


def _find_spec(tensor: Any, specs: Mapping[str, TensorSpec], place: str, kind: str) -> TensorSpec:
    if type(tensor) is not dict:
        raise invalid_value_error(place, tensor, f"an object that describes an {kind}")
    name = tensor.get("name")
    spec = specs.get(name) if type(name) is str else None
    if spec is None:
        expected = f"an {kind} of the model: {', '.join(specs)}"
        raise invalid_value_error(f"{place}.name", name, shorten(expected))
    return spec


def _read_type(
    tensor: Mapping[str, Any], spec: TensorSpec
) -> tuple[tuple[int, ...], np.dtype[Any] | None]:
    """Return the shape and dtype that a request gives an input. Raises: RequestRefusedError."""
    _check_keys(tensor, ("name", "shape", "datatype", "parameters", "data"), spec.name)
    datatype, shape = tensor.get("datatype"), tensor.get("shape")
    is_known = type(datatype) is str and (datatype == spec.datatype or datatype in spec.sendable)
    if not is_known:
        expected = f"{spec.datatype}, or a datatype that it represents exactly"
        if len(spec.sendable) == 1:
            expected = spec.datatype
        raise invalid_value_error(f"{spec.name}.datatype", datatype, expected)
    sizes = tuple(shape) if isinstance(shape, list) else ()
    is_counted = bool(sizes) and all(type(size) is int for size in sizes) and sizes[0] >= 1
    if not is_counted or sizes[1:] != spec.shape:
        expected = f"{[-1, *spec.shape]} with the number of rows in place of -1"
        raise RequestRefusedError(
            400,
            f"{spec.name}.shape",
            found=shorten(orjson.dumps(shape).decode()),
            expected=expected,
        )
    return sizes, _DTYPES.get(str(datatype))


def _read_size(tensor: Mapping[str, Any], name: str) -> int | None:
    """Return the binary_data_size of an input; None if its data is JSON."""
    parameters = optional(tensor, "parameters", dict, "an object") or {}
    _check_keys(parameters, ("binary_data_size",), f"{name}.parameters")
    num_bytes = parameters.get("binary_data_size")
    if (num_bytes is None) != ("data" in tensor):
        cause = "has neither data nor" if num_bytes is None else "has both data and"
        message = f"input {cause} the parameter binary_data_size; send one of the two"
        raise RequestRefusedError(400, name, message)
    if num_bytes is not None and (type(num_bytes) is not int or num_bytes < 0):
        expected = "a number of bytes"
        raise invalid_value_error(f"{name}.binary_data_size", num_bytes, expected)
    return num_bytes


def _read_json(
    data: Any, shape: tuple[int, ...], dtype: np.dtype[Any] | None, spec: TensorSpec
) -> Array | list[str]:
    """Read data in JSON: nested lists of the tensor's shape, or its elements in row-major order."""
    place = f"{spec.name}.data"
    if type(data) is not list:
        raise invalid_value_error(place, data, "a list")
    level: list[Any] = data
    if type(data[0] if data else None) is list:
        level = [data]
        for size in shape:
            if set(map(type, level)) != {list} or set(map(len, level)) != {size}:
                wrong = next(one for one in level if type(one) is not list or len(one) != size)
                lists = f"in nested lists of the shape {list(shape)}, or a flat list"
                raise invalid_value_error(place, wrong, shorten(f"a list of {size} {lists}"))
            level = list(chain.from_iterable(level))
    elif len(data) != prod(shape):
        found = f"a list of {len(data)}"
        expected = shorten(f"{prod(shape)} elements for the shape {list(shape)}")
        raise RequestRefusedError(400, place, found=found, expected=expected)
    kinds = {str} if dtype is None else _JSON_KINDS[dtype.kind]
    if not kinds.issuperset(map(type, level)):
        i = next(i for i, element in enumerate(level) if type(element) not in kinds)
        expected = "strings" if dtype is None else f"elements of {_DATATYPES[dtype]}"
        raise invalid_value_error(f"{place}[{i}]", level[i], expected)
    if dtype is None:
        return level
    # Of floats the widest: who reads the values checks that they fit, and reports them as they are.
    target = np.dtype(np.float64) if dtype.kind == "f" else dtype
    try:
        array: Array = np.array(level, target)
    except OverflowError:
        message = f"a number is out of the range of {_DATATYPES[dtype]}; send a wider datatype"
        raise RequestRefusedError(400, place, message) from None
    return array.reshape(shape)


def _check_finite(array: Array, name: str) -> None:
    if array.dtype.kind != "f" or np.isfinite(array).all():
        return
    place = tuple(int(index) for index in np.argwhere(~np.isfinite(array))[0])
    index = ", ".join(map(str, place))
    found = str(array[place])
    raise RequestRefusedError(400, f"{name}[{index}]", found=found, expected="finite numbers")


def _read_outputs(raw: Any, outputs: Mapping[str, TensorSpec], by_default: bool) -> dict[str, bool]:
    if raw is None or raw == []:
        return dict.fromkeys(outputs, by_default)
    if type(raw) is not list:
        raise invalid_value_error("outputs", raw, "a list of outputs")
    is_binary: dict[str, bool] = {}
    for i, output in enumerate(raw):
        name = _find_spec(output, outputs, f"outputs[{i}]", "output").name
        if name in is_binary:
            raise RequestRefusedError(400, name, "output is given twice; name it once")
        _check_keys(output, ("name", "parameters"), f"outputs[{i}]")
        parameters = optional(output, "parameters", dict, "an object") or {}
        _check_keys(parameters, ("binary_data",), f"outputs[{i}].parameters")
        wanted = optional(parameters, "binary_data", bool, "true or false")
        is_binary[name] = by_default if wanted is None else wanted
    return is_binary


def _split_strings(chunk: memoryview, num: int, name: str) -> list[str]:
    strings: list[str] = []
    begin = 0
    while begin < len(chunk) and len(strings) < num:
        end = begin + _LENGTH_BYTES
        size = int.from_bytes(chunk[begin:end], "little")
        begin, end = end, end + size
        if end > len(chunk):
            place = f"{name}[{len(strings)}]"
            expected = f"at most the {max(len(chunk) - begin, 0)} bytes that are left of the tensor"
            raise RequestRefusedError(400, place, found=f"{size} bytes", expected=expected)
        try:
            strings.append(str(chunk[begin:end], "utf-8"))
        except UnicodeDecodeError as error:
            place = f"{name}[{len(strings)}]"
            raise RequestRefusedError(400, place, f"not UTF-8: {error}; send UTF-8") from None
        begin = end
    if begin < len(chunk) or len(strings) < num:
        found = f"{len(chunk)} bytes that hold {len(strings)} strings" + (
            " and more" if begin < len(chunk) else ""
        )
        raise RequestRefusedError(400, name, found=found, expected=shorten(f"{num} strings"))
    return strings


def _join_strings(values: Sequence[str]) -> bytes:
    encoded = [value.encode() for value in values]
    return b"".join(
        part for one in encoded for part in (len(one).to_bytes(_LENGTH_BYTES, "little"), one)
    )
