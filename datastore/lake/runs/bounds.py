"""Bounds: the throughput that this machine reaches for the limiting operation of a link alone.

The operation, such as a memory copy or a file write, is repeated with messages of the link's mean
size; the bound is the rate of the fastest repetition. It is measured on request, on the machine and
in the lake from which the profile is read, which may differ from the machine of the run.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, Literal

import numpy as np

from replaylake.datastore.errors import StorageError
from replaylake.datastore.lake.runs.run_profile import LinkUse
from replaylake.datastore.names import LAKE_ROOT, new_ulid
from replaylake.datastore.storage.storage import Storage, make_folder

BoundKind = Literal["copy", "read", "append", "write", "socket", "ray"]
# The bytes of `commit` are those of the shards, which it names and does not move.
BOUND_KINDS: Final[Mapping[str, BoundKind]] = {
    "encode": "copy",
    "compress": "copy",
    "parse": "copy",
    "respond": "copy",
    "sample": "copy",
    "to_device": "copy",
    "hash": "read",
    "tail": "read",
    "decode": "read",
    "shard_write": "write",
    "journal": "append",
    "receive": "socket",
    "send": "socket",
    "transfer": "ray",
    "broadcast": "ray",
}
# Beyond, the rate no longer depends on the size.
_MAX_BYTES: Final = 32 << 20
# Less than the buffer of a socket, which one thread fills and empties.
_SOCKET_BYTES: Final = 32 << 10
_MIN_REPEATS: Final = 3
_MEASURED_S: Final = 0.2


def measure_bounds(
    links: Sequence[LinkUse],
    storage: Storage,
    measure_ray: Callable[[int], float] | None = None,
) -> tuple[LinkUse, ...]:
    """Return the links with the bounds of those that move bytes.

    Args:
        links: of a profile.
        storage: of the lake, in whose folder files are written and removed again, at most 32 MiB
            at a time. On an object store, one blob is written for each kind but `copy` and `ray`.
        measure_ray: returns the bytes a second of messages of a given size in Ray's object store;
            None where the run had no Ray, and messages are copied.

    Cost: a fifth of a second for each kind and size. Raises: StorageError.
    """
    measured: dict[tuple[BoundKind, int], float] = {}

    def measure(one: LinkUse) -> LinkUse:
        kind = BOUND_KINDS.get(one.link)
        if kind is None or not one.num_bytes or not one.num_calls:
            return one
        if kind == "ray" and measure_ray is None:
            kind = "copy"
        size = max(1, min(_MAX_BYTES, round(one.num_bytes / one.num_calls)))
        if (kind, size) not in measured:
            if kind == "ray" and measure_ray is not None:
                measured[kind, size] = measure_ray(size)
            elif kind == "copy":
                measured[kind, size] = _measure_copies(size)
            elif kind == "socket":
                measured[kind, size] = _measure_sockets(size)
            else:
                measured[kind, size] = _measure_files(storage, size, kind)
        return replace(one, bound_mb_per_s=measured[kind, size] / 1e6)

    return tuple(map(measure, links))


def measure_rate(work: Callable[[], object], num_bytes: int) -> float:
    """Return the bytes a second of the fastest of several calls, which move `num_bytes` each."""
    best = float("inf")
    num_calls, ends_at = 0, time.perf_counter() + _MEASURED_S
    while num_calls < _MIN_REPEATS or time.perf_counter() < ends_at:
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
        num_calls += 1
    return num_bytes / max(best, 1e-9)


def _measure_copies(num_bytes: int) -> float:
    source, target = _make_bytes(num_bytes), np.empty(num_bytes, np.uint8)
    return measure_rate(lambda: np.copyto(target, source), num_bytes)


def _measure_sockets(num_bytes: int) -> float:
    """Measure messages between two ends of a socket in one thread, a buffer of it at a time."""
    source, target = _make_bytes(num_bytes).tobytes(), bytearray(_SOCKET_BYTES)
    left, right = socket.socketpair()

    def send() -> None:
        for start in range(0, num_bytes, _SOCKET_BYTES):
            piece = source[start : start + _SOCKET_BYTES]
            left.sendall(piece)
            num_left = len(piece)
            while num_left:
                num_left -= right.recv_into(target, num_left)

    with left, right:
        return measure_rate(send, num_bytes)


def _measure_files(storage: Storage, num_bytes: int, kind: BoundKind) -> float:
    """Measure files that are written and fsynced, appended to, or read from the page cache."""
    name = f"{LAKE_ROOT}/tmp/bound-{new_ulid()}"
    data = _make_bytes(num_bytes).tobytes()
    if (path := storage.local_folder(name)) is None:
        try:
            if kind != "read":
                return measure_rate(lambda: storage.put(name, data), num_bytes)
            storage.put(name, data)
            return measure_rate(lambda: storage.get(name), num_bytes)
        finally:
            storage.delete([name])

    def write() -> None:
        path.unlink(missing_ok=True)
        with path.open("xb", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())

    try:
        make_folder(path.parent)
        if kind == "write":
            return measure_rate(write, num_bytes)
        if kind == "append":
            with path.open("xb", buffering=0) as file:
                return measure_rate(lambda: os.pwrite(file.fileno(), data, 0), num_bytes)
        write()
        return measure_rate(path.read_bytes, num_bytes)
    except OSError as error:
        raise StorageError(
            f"{path}: {error.strerror or error} while measuring the bounds, expected a lake that "
            "can be written. Make it writable, or profile without bounds."
        ) from error
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _make_bytes(num_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    # Random: a file system may store equal bytes in no time.
    return np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
