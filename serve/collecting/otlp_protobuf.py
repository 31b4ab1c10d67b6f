"""OTLP in protobuf: an export request of spans in the form that it has in OTLP JSON, and answers.

Of protobuf's wire format this is what opentelemetry-proto's trace messages use. The library would
be a dependency of 5 MB for these messages, which stay compatible by the rules of OTLP (fields that
are not known here are skipped).
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any, Final

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_DEPTH: Final = 100  # as protobuf's own parsers
_MAX_VARINT_BYTES: Final = 10

# By field number: its name in JSON, its kind, and whether it is repeated. A kind is a message, or
# one of the names in _SCALARS.
_Fields = Mapping[int, tuple[str, Any, bool]]
_ANY_VALUE: Final[dict[int, tuple[str, Any, bool]]] = {}
_KEY_VALUE: Final[_Fields] = {1: ("key", "text", False), 2: ("value", _ANY_VALUE, False)}
_ANY_VALUE.update(
    {
        1: ("stringValue", "text", False),
        2: ("boolValue", "flag", False),
        3: ("intValue", "int64", False),
        4: ("doubleValue", "double", False),
        5: ("arrayValue", {1: ("values", _ANY_VALUE, True)}, False),
        6: ("kvlistValue", {1: ("values", _KEY_VALUE, True)}, False),
        7: ("bytesValue", "bytes", False),
    }
)
_ATTRIBUTES: Final = ("attributes", _KEY_VALUE, True)
_RESOURCE: Final[_Fields] = {1: _ATTRIBUTES, 2: ("droppedAttributesCount", "uint32", False)}
_SCOPE: Final[_Fields] = {
    1: ("name", "text", False),
    2: ("version", "text", False),
    3: _ATTRIBUTES,
    4: ("droppedAttributesCount", "uint32", False),
}
_EVENT: Final[_Fields] = {
    1: ("timeUnixNano", "fixed64", False),
    2: ("name", "text", False),
    3: _ATTRIBUTES,
    4: ("droppedAttributesCount", "uint32", False),
}
_LINK: Final[_Fields] = {
    1: ("traceId", "hex", False),
    2: ("spanId", "hex", False),
    3: ("traceState", "text", False),
    4: _ATTRIBUTES,
    5: ("droppedAttributesCount", "uint32", False),
    6: ("flags", "fixed32", False),
}
_STATUS: Final[_Fields] = {2: ("message", "text", False), 3: ("code", "uint32", False)}
_SPAN: Final[_Fields] = {
    1: ("traceId", "hex", False),
    2: ("spanId", "hex", False),
    3: ("traceState", "text", False),
    4: ("parentSpanId", "hex", False),
    5: ("name", "text", False),
    6: ("kind", "uint32", False),
    7: ("startTimeUnixNano", "fixed64", False),
    8: ("endTimeUnixNano", "fixed64", False),
    9: _ATTRIBUTES,
    10: ("droppedAttributesCount", "uint32", False),
    11: ("events", _EVENT, True),
    12: ("droppedEventsCount", "uint32", False),
    13: ("links", _LINK, True),
    14: ("droppedLinksCount", "uint32", False),
    15: ("status", _STATUS, False),
    16: ("flags", "fixed32", False),
}
_SCOPE_SPANS: Final[_Fields] = {
    1: ("scope", _SCOPE, False),
    2: ("spans", _SPAN, True),
    3: ("schemaUrl", "text", False),
}
_RESOURCE_SPANS: Final[_Fields] = {
    1: ("resource", _RESOURCE, False),
    2: ("scopeSpans", _SCOPE_SPANS, True),
    3: ("schemaUrl", "text", False),
}
_REQUEST: Final[_Fields] = {1: ("resourceSpans", _RESOURCE_SPANS, True)}
# The wire type of each kind of scalar; messages are bytes.
_SCALARS: Final = {
    "text": _BYTES,
    "bytes": _BYTES,
    "hex": _BYTES,
    "flag": _VARINT,
    "uint32": _VARINT,
    "int64": _VARINT,
    "double": _FIXED64,
    "fixed64": _FIXED64,
    "fixed32": _FIXED32,
}


def decode_trace_request(data: bytes) -> dict[str, Any]:
    """Return an ExportTraceServiceRequest as OTLP JSON has it. Raises: ValueError if it is none."""
    try:
        request = _decode(memoryview(data), _REQUEST, 0)
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"not a protobuf message of OTLP ({error})") from error
    request.setdefault("resourceSpans", [])
    return request


def encode_trace_response(num_rejected: int, message: str) -> bytes:
    """Return an ExportTraceServiceResponse: empty where all spans were accepted."""
    if not num_rejected and not message:
        return b""
    partial = (b"\x08" + _encode_varint(num_rejected) if num_rejected else b"") + _encode_bytes(
        0x12, message.encode()
    )
    return _encode_bytes(0x0A, partial)


def encode_status(message: str) -> bytes:
    """Return a google.rpc.Status with a message, the body of OTLP's errors."""
    return _encode_bytes(0x12, message.encode())


def _decode(data: memoryview, fields: _Fields, depth: int) -> dict[str, Any]:
    if depth > _MAX_DEPTH:
        raise ValueError(f"not a protobuf message of OTLP (more than {_MAX_DEPTH} levels)")
    found: dict[str, Any] = {}
    for number, wire_type, value in _iter_fields(data):
        field = fields.get(number)
        if field is None:
            continue
        name, kind, is_repeated = field
        is_message = not isinstance(kind, str)
        if wire_type != (_BYTES if is_message else _SCALARS[kind]):
            raise ValueError(f"not a protobuf message of OTLP ({name} has wire type {wire_type})")
        read = _decode(value, kind, depth + 1) if is_message else _read_scalar(kind, value)
        if is_repeated:
            found.setdefault(name, []).append(read)
        elif is_message and name in found and fields is not _ANY_VALUE:
            found[name] = {**found[name], **read}
        else:
            if fields is _ANY_VALUE:
                found.clear()  # of a oneof the last field counts
            found[name] = read
    return found


def _iter_fields(data: memoryview) -> Iterator[tuple[int, int, Any]]:
    """Yield the number, wire type and value of each field of a message."""
    at, end = 0, len(data)
    while at < end:
        tag, at = _read_varint(data, at)
        number, wire_type = tag >> 3, tag & 7
        if not number:
            raise ValueError("not a protobuf message of OTLP (a field 0)")
        if wire_type == _VARINT:
            value, at = _read_varint(data, at)
            yield number, wire_type, value
            continue
        if wire_type == _BYTES:
            size, at = _read_varint(data, at)
        elif wire_type in (_FIXED64, _FIXED32):
            size = 8 if wire_type == _FIXED64 else 4
        else:
            raise ValueError(f"not a protobuf message of OTLP (wire type {wire_type})")
        if at + size > end:
            raise ValueError("not a protobuf message of OTLP (it ends within a field)")
        yield number, wire_type, data[at : at + size]
        at += size


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for place in range(_MAX_VARINT_BYTES):
        byte = data[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value & (2**64 - 1), at + place + 1
    raise ValueError("not a protobuf message of OTLP (a number of more than 10 bytes)")


def _read_scalar(kind: str, value: Any) -> Any:
    """Return a value as protobuf's JSON has it; ids as OTLP's JSON has them."""
    if kind == "text":
        return str(value, "utf-8")
    if kind == "hex":
        return value.hex()
    if kind == "bytes":
        return base64.b64encode(value).decode()
    if kind == "flag":
        return value != 0
    if kind == "uint32":
        return value & 0xFFFFFFFF
    if kind == "int64":
        return str(value - 2**64 if value >= 2**63 else value)
    if kind == "double":
        (number,) = struct.unpack("<d", value)
        if math.isnan(number):
            return "NaN"
        if math.isinf(number):
            return "Infinity" if number > 0 else "-Infinity"
        return number
    (whole,) = struct.unpack("<Q" if kind == "fixed64" else "<I", value)
    return str(whole) if kind == "fixed64" else whole


def _encode_varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def _encode_bytes(tag: int, data: bytes) -> bytes:
    return bytes([tag]) + _encode_varint(len(data)) + data
