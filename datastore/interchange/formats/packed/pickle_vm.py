"""A machine that runs the few pickle opcodes which numpy's arrays need, and no others.

Python's own unpickler calls what it is told to and allocates what a length field says (a memo index
of 2**31 takes 32 GB before a byte of it is used), also where `find_class` admits little. This one
knows six names. What they build is built here, never by numpy's own functions, from slices of the
bytes that are there. Opcodes: Python's Lib/pickletools.py. Layouts: numpy's array_reduce_ex, which
writes numpy.core.numeric._frombuffer with numpy.dtype (protocol 5, contiguous arrays: what RLlib's
files hold), or numpy.core.multiarray._reconstruct with numpy.ndarray and numpy.dtype. Protocol 2
has no bytes: Python writes a text of their code points and _codecs.encode, or bytes for none.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any, Final, Literal

import numpy as np

from replaylake.datastore.episodes.spaces import Array

_MARK: Final = object()
_FROMBUFFER, _RECONSTRUCT, _NDARRAY, _DTYPE = "_frombuffer", "_reconstruct", "ndarray", "dtype"
_ENCODE, _BYTES = "encode", "bytes"
# numpy 2 calls numpy.core numpy._core.
_ALLOWED_GLOBALS: Final = {
    ("numpy.core.numeric", "_frombuffer"): _FROMBUFFER,
    ("numpy._core.numeric", "_frombuffer"): _FROMBUFFER,
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _DTYPE,
    ("_codecs", "encode"): _ENCODE,
    ("__builtin__", "bytes"): _BYTES,
}
# Not admitted either, but no sign of anything but a number that stands by itself.
_SCALARS: Final = {("numpy.core.multiarray", "scalar"), ("numpy._core.multiarray", "scalar")}
# Flags, integers and floats; never O (Python objects).
NUMBERS: Final = re.compile(r"^[<>|=]?(b1|[iu][1248]|f[248])$")
_FIXED: Final[dict[int, Any]] = {ord("N"): None, 0x88: True, 0x89: False}
# Opcode to its argument: (struct format of a value).
_VALUES: Final = {
    ord("J"): struct.Struct("<i"),
    ord("K"): struct.Struct("<B"),
    ord("M"): struct.Struct("<H"),
    ord("G"): struct.Struct(">d"),
}
# Opcode to the width of the length that stands before its bytes, and whether they are text.
_COUNTED: Final = {
    0x8C: (1, True),
    ord("X"): (4, True),
    0x8D: (8, True),
    ord("C"): (1, False),
    ord("B"): (4, False),
    0x8E: (8, False),
    0x96: (8, False),
}
_TUPLES: Final = {0x85: 1, 0x86: 2, 0x87: 3}
_GETS: Final = {ord("h"): 1, ord("j"): 4}
_PUTS: Final = {ord("q"): 1, ord("r"): 4}
_NEWEST_PROTOCOL: Final = 5


class PickleRefusedError(ValueError):
    """Bytes that are no pickled array, or ask for more than one; the text says which."""


class NotAnArrayError(PickleRefusedError):
    """A pickle of something else than arrays, and not of anything that would be run."""


class _Global:
    """An admitted name."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Kind:
    """A dtype on its way: a code such as `f4`, then its byte order."""

    def __init__(self, code: str) -> None:
        self.code = code
        self.order: Literal["<", ">", "|", "="] = "="

    def dtype(self) -> Any:
        if not NUMBERS.match(self.code):
            what = "Python objects" if self.code.lstrip("<>|=").startswith("O") else "other types"
            raise NotAnArrayError(f"an array of {what} ({self.code[:20]!r})")
        return np.dtype(self.code).newbyteorder(self.order)


class PendingArray:
    """An array of the older layout, whose content comes with BUILD."""

    def __init__(self) -> None:
        self.array: Array | None = None


class PickleVM:
    """One pickle, run from its first opcode to its last.

    `buffers` are the places (start, end) of the bytes that arrays may be made of.
    """

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._at = 0
        self.buffers: list[tuple[int, int]] = []
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._others: dict[int, Callable[[], None]] = {
            0x80: self._protocol,
            0x95: self._frame,
            ord("("): lambda: self._stack.append(_MARK),
            ord(")"): lambda: self._stack.append(()),
            ord("]"): lambda: self._stack.append([]),
            ord("}"): lambda: self._stack.append({}),
            ord("t"): lambda: self._stack.append(tuple(self._to_mark())),
            ord("a"): self._append,
            ord("e"): self._appends,
            ord("s"): self._set_item,
            ord("u"): self._set_items,
            ord("c"): self._global,
            0x93: self._stack_global,
            0x94: self._memoize,
            0x8A: self._long,
            ord("R"): self._reduce,
            ord("b"): self._build,
        }

    def run(self) -> Any:
        """Return what was pickled: arrays (or PendingArray), in dicts, lists and tuples.

        Raises: PickleRefusedError; IndexError, KeyError, TypeError, ValueError, OverflowError or
        struct.error for a pickle that is torn.
        """
        stack = self._stack
        while True:
            code = self._take(1)[0]
            if code in _COUNTED:
                width, is_text = _COUNTED[code]
                raw = self._take(self._number(width))
                if not is_text:
                    self.buffers.append((self._at - len(raw), self._at))
                stack.append(str(raw, "utf-8") if is_text else raw)
            elif code in _VALUES:
                fixed = _VALUES[code]
                stack.append(fixed.unpack(self._take(fixed.size))[0])
            elif code in _FIXED:
                stack.append(_FIXED[code])
            elif code in _TUPLES:
                num = _TUPLES[code]
                stack[-num:] = [tuple(self._top(num))]
            elif code in _GETS:
                stack.append(self._memo[self._number(_GETS[code])])
            elif code in _PUTS:
                self._memo[self._number(_PUTS[code])] = self._top(1)[0]
            elif code == ord("."):
                if len(stack) != 1 or self._at != len(self._data):
                    raise PickleRefusedError("a pickle with remaining values")
                return stack[0]
            elif code in self._others:
                self._others[code]()
            else:
                raise PickleRefusedError(
                    f"the pickle opcode {bytes([code])!r}, which no array needs"
                )

    def _take(self, num: int) -> memoryview:
        if num > len(self._data) - self._at:
            raise PickleRefusedError(
                f"a damaged pickle: {num} bytes are not there after byte {self._at}"
            )
        self._at += num
        return self._data[self._at - num : self._at]

    def _number(self, width: int) -> int:
        return int.from_bytes(self._take(width), "little")

    def _top(self, num: int) -> list[Any]:
        if len(self._stack) < num:
            raise PickleRefusedError("a damaged pickle: too few values")
        return self._stack[-num:]

    def _pop(self) -> Any:
        self._top(1)
        return self._stack.pop()

    def _to_mark(self) -> list[Any]:
        items = []
        while (item := self._pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    def _protocol(self) -> None:
        if (protocol := self._number(1)) > _NEWEST_PROTOCOL:
            raise PickleRefusedError(f"pickle protocol {protocol}")

    def _frame(self) -> None:
        self._take(8)

    def _append(self) -> None:
        item = self._pop()
        self._list().append(item)

    def _appends(self) -> None:
        items = self._to_mark()
        self._list().extend(items)

    def _list(self) -> list[Any]:
        (target,) = self._top(1)
        if not isinstance(target, list):
            raise PickleRefusedError("a damaged pickle: no list where one is expected")
        return target

    def _set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._fill([key, value])

    def _set_items(self) -> None:
        self._fill(self._to_mark())

    def _fill(self, items: list[Any]) -> None:
        (target,) = self._top(1)
        # Other keys could be nested deeper than Python can hash.
        if not isinstance(target, dict) or not all(isinstance(key, str) for key in items[::2]):
            raise PickleRefusedError("a dict whose keys are not names")
        target.update(zip(items[::2], items[1::2], strict=True))

    def _long(self) -> None:
        size = self._number(1)
        if size > 8:
            raise PickleRefusedError(f"a whole number of {size} bytes")
        self._stack.append(int.from_bytes(self._take(size), "little", signed=True))

    def _memoize(self) -> None:
        self._memo[len(self._memo)] = self._top(1)[0]

    def _global(self) -> None:
        parts = []
        for _ in range(2):
            end = bytes(self._data[self._at : self._at + 256]).find(b"\n")
            if end < 0:
                raise PickleRefusedError("a damaged pickle: no name where one is expected")
            parts.append(str(self._take(end), "utf-8"))
            self._take(1)
        self._stack.append(_resolve_global(parts[0], parts[1]))

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        self._stack.append(_resolve_global(module, name))

    def _reduce(self) -> None:
        arguments, called = self._pop(), self._pop()
        if not isinstance(called, _Global) or not isinstance(arguments, tuple):
            raise PickleRefusedError("a call that does not create an array, which is not executed")
        if called.name == _DTYPE:
            code, _, _ = arguments
            if not isinstance(code, str):
                raise PickleRefusedError("a dtype that is not text")
            self._stack.append(_Kind(code))
        elif called.name == _BYTES and not arguments:
            self._stack.append(memoryview(b""))
        elif called.name == _ENCODE:
            text, encoding = arguments
            if not isinstance(text, str) or encoding != "latin1":
                raise PickleRefusedError("bytes that are not text of their code points")
            self._stack.append(memoryview(text.encode("latin-1")))
        elif called.name == _FROMBUFFER:
            buffer, kind, shape, order = arguments
            self._stack.append(_array(buffer, kind, shape, order))
        elif called.name == _RECONSTRUCT and isinstance(arguments[0], _Global):
            self._stack.append(PendingArray())
        else:
            raise PickleRefusedError(f"a call of {called.name}, which is not executed")

    def _build(self) -> None:
        state = self._pop()
        (built,) = self._top(1)
        if isinstance(built, _Kind):
            order, *parts = state[1:5]
            if order not in ("<", ">", "|", "=") or parts != [None, None, None]:
                raise PickleRefusedError("an array of structures")
            built.order = order
        elif isinstance(built, PendingArray):
            _, shape, kind, is_fortran, raw = state
            if isinstance(raw, list):
                raise NotAnArrayError("an array of Python objects")
            built.array = _array(raw, kind, shape, "F" if is_fortran else "C")
        else:
            raise PickleRefusedError("a state for an object that is not an array, which is not set")


def _resolve_global(module: Any, name: Any) -> _Global:
    if not isinstance(module, str) or not isinstance(name, str):
        raise PickleRefusedError("a damaged pickle: no name where one is expected")
    known = _ALLOWED_GLOBALS.get((module, name))
    if known is None:
        refusal = NotAnArrayError if (module, name) in _SCALARS else PickleRefusedError
        raise refusal(f"a pickle that names {module[:60]}.{name[:60]} (none of it was executed)")
    return _Global(known)


def _array(raw: Any, kind: Any, shape: Any, order: Any) -> Array:
    if not isinstance(raw, memoryview) or not isinstance(kind, _Kind) or order not in ("C", "F"):
        raise PickleRefusedError("an array without its bytes, dtype and order")
    if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
        raise PickleRefusedError("an array whose shape is not a tuple of sizes")
    dtype = kind.dtype()
    # numpy takes no empty buffer.
    flat = np.frombuffer(raw, dtype) if len(raw) else np.empty(0, dtype)
    shaped: Array = flat.reshape(shape, order=order)
    return shaped
