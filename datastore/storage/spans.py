"""Spans: named sections of work whose time a command can measure, in any thread.

Code marks a section by `with span("fsync"):`. Without a recorder that costs half a microsecond, so
spans are of blocks, files and commits, never of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol

from replaylake.datastore.errors import ConfigInvalidError

SpanName = Literal[
    "hash",
    "parse",
    "assemble",
    "validate",
    "encode",
    "compress",
    "shard_write",
    "write_wait",
    "fsync",
    "commit",
    "key_index",
    "quarantine",
]


@dataclass
class SpanWork:
    """The work of one span, which its block counts: items (rows, episodes, ...) and bytes."""

    items: int = 0
    num_bytes: int = 0


class SpanRecorder(Protocol):
    """Measures spans of any thread; the time of an inner span is not counted in the outer one."""

    def measure_span(self, name: SpanName) -> AbstractContextManager[SpanWork]: ...


_recorder: SpanRecorder | None = None


def span(name: SpanName) -> AbstractContextManager[SpanWork]:
    """Measure a block where a recorder is active; the block may count its work."""
    recorder = _recorder
    return nullcontext(SpanWork()) if recorder is None else recorder.measure_span(name)


@contextmanager
def record_spans(recorder: SpanRecorder) -> Iterator[None]:
    """Pass the spans of all threads of the process to a recorder during the block.

    Raises: ConfigInvalidError if another recorder is active.
    """
    global _recorder
    if _recorder is not None:
        raise ConfigInvalidError(
            "spans: found a recorder in this process, expected one at a time. Profile one "
            "operation after the other."
        )
    _recorder = recorder
    try:
        yield
    finally:
        _recorder = None
