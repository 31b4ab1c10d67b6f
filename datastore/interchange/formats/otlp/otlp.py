"""OTLP: spans of OpenTelemetry as JSON, of which the calls of language models become steps.

Spans of a trace may stand anywhere in the files, in any order: they are written to a temporary file
first, and then read session by session.
"""

from __future__ import annotations

import hashlib
import os
import re
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from replaylake.datastore.errors import SourceInvalidError, StorageError
from replaylake.datastore.interchange.formats.format import ReadOptions, SourceReader
from replaylake.datastore.interchange.formats.generations.json_values import (
    dump_metadata,
    json_values,
    load_json,
)
from replaylake.datastore.interchange.formats.generations.messages import clean_text
from replaylake.datastore.interchange.formats.generations.rows import (
    Record,
    RecordTables,
    empty_row,
    measure_row,
    read_generations,
)
from replaylake.datastore.interchange.formats.otlp.sessions import (
    SessionCounts,
    SpanHeader,
    make_header,
    make_rows,
)
from replaylake.datastore.interchange.formats.otlp.spans import (
    GENERATION,
    LOGS,
    METRICS,
    SPANS,
    Event,
    Span,
    is_metrics,
    is_request,
    read_spans,
)
from replaylake.datastore.interchange.sources.source import SourceFile
from replaylake.datastore.interchange.sources.temporary_files import new_file

_HEAD_BYTES: Final = 1 << 12
_HEAD: Final = re.compile(rf'\s*\[?\s*\{{\s*"(?:{SPANS}|{LOGS}|{METRICS})"\s*:\s*\['.encode())
# A request with other keys before these is read whole to be recognized.
_MAX_RECOGNIZED_CHARS: Final = 8 << 20
_CAPTURE: Final = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"


class OtlpFormat:
    """JSON with resourceSpans or resourceLogs: one request in a file, or one a line."""

    name = "otlp"
    about = "OpenTelemetry's GenAI spans as OTLP JSON: calls of models, tools and agents by trace"
    is_folder = False

    def recognizes(self, files: Sequence[SourceFile]) -> bool:
        head = files[0].head(_HEAD_BYTES).removeprefix(b"\xef\xbb\xbf")
        if _HEAD.match(head):
            return True
        if head.lstrip()[:1] not in (b"{", b"["):
            return False
        try:
            first = next(json_values(files[0], max_chars=_MAX_RECOGNIZED_CHARS), None)
        except SourceInvalidError:
            return False
        return first is not None and (is_request(first.value) or is_metrics(first.value))

    def read(self, files: Sequence[SourceFile], options: ReadOptions) -> SourceReader:
        tables = _SessionTables(files, options)
        return read_generations(tables, tables.notes, files, options)


class _SessionTables(RecordTables):
    """Rows of the sessions of some files."""

    noun = "sessions"

    def __init__(self, files: Sequence[SourceFile], options: ReadOptions) -> None:
        super().__init__(files, options)
        self._counts = SessionCounts()
        self._store = _SpanStore()
        self._num_metrics = 0

    def begin(self) -> None:
        super().begin()
        self._counts = SessionCounts()
        self._store.close()
        self._store = _SpanStore()
        self._num_metrics = 0
        for number, file in enumerate(self._files):
            file.check_unchanged()
            for value in json_values(file, resumes=True):
                if value.fault is not None:
                    self._store.add_fault(number, value.line, value.fault)
                    continue
                if is_metrics(value.value):
                    self._num_metrics += 1
                    continue
                for span in read_spans(value.value):
                    if isinstance(span, SourceInvalidError):
                        self._store.add_fault(number, value.line, str(span))
                    else:
                        self._store.add(span, number, value.line)
        self._store.group_sessions()

    def records(self, file: SourceFile, number: int) -> Iterator[Record]:
        for line, fault in self._store.iter_faults(number):
            yield Record([empty_row(self._ids.next(None))], line, 0, fault)
        for name, line, headers in self._store.iter_sessions(number):
            try:
                rows = make_rows(headers, self._store.load, self.paths, self._counts)
            # Also for texts that are not valid Unicode, and numbers that no column holds.
            except (OverflowError, RecursionError, SourceInvalidError, ValueError) as error:
                yield Record([empty_row(self._ids.next(None))], line, 0, str(error))
                continue
            if rows:
                episode_id = self._ids.next(clean_text(name))
                rows = [{**row, "episode_id": episode_id} for row in rows]
            yield Record(rows, line, sum(map(measure_row, rows)))

    def finish(self) -> Sequence[str]:
        counts, store = self._counts, self._store
        notes = list(self._ids.notes())
        for num, what in (
            (
                counts.num_without_content,
                f"calls of models have no messages: left out. {_CAPTURE} captures them",
            ),
            (counts.num_without_answer, "calls of models have no answer: left out"),
            (counts.num_wrappers, "calls contain the same call by another library: left out"),
            (counts.num_without_parent, "calls name a parent that is not in the source"),
            (store.num_repeated, "spans occur more than once: the first one is read"),
            (store.num_repeated_records, "log records occur more than once: the first one is read"),
            (self._num_metrics, "requests hold metrics: left out"),
            (store.num_without_calls, "traces have no call of a model: left out"),
        ):
            if num:
                notes.append(f"{num} {what}")
        store.close()
        return notes


class _SpanStore:
    """Spans in a temporary file, by trace; memory holds their headers."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._close: weakref.finalize[Any, Any] | None = None
        self._size = 0
        self._headers: dict[str, dict[str, SpanHeader]] = {}
        self._events: dict[tuple[str, str], list[int]] = {}
        self._conversations: dict[str, set[str]] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self._faults: list[tuple[int, int, str]] = []
        self._ends: dict[int, int] = {}
        self._sessions: dict[int, list[tuple[str, int, list[str]]]] = {}
        self._digests: set[bytes] = set()
        self.num_repeated = 0
        self.num_repeated_records = 0
        self.num_without_calls = 0

    def add(self, span: Span, file: int, line: int) -> None:
        """Write a span. Raises: StorageError if the disk is full."""
        own = self._headers.setdefault(span.trace_id, {})
        self._places.setdefault(span.trace_id, (file, line))
        if span.span_id in own and not span.is_logged and not self._is_logged(span):
            self.num_repeated += 1
            return
        if span.is_logged and self._is_repeated(span):
            self.num_repeated_records += 1
            return
        place = self._write(span)
        if span.conversation_id is not None:
            self._conversations.setdefault(span.trace_id, set()).add(span.conversation_id)
        key = (span.trace_id, span.span_id)
        if span.is_logged:
            self._events.setdefault(key, []).append(place)
            if span.span_id not in own:
                own[span.span_id] = make_header(span, -1)
        else:
            own[span.span_id] = make_header(span, place)

    def add_fault(self, file: int, line: int, fault: str) -> None:
        """Store what is wrong with a line, or with a span in it."""
        self._faults.append((file, line, fault))

    def iter_faults(self, file: int) -> Iterator[tuple[int, str]]:
        """Yield the faults of a file, with their lines."""
        for number, line, fault in self._faults:
            if number == file:
                yield line, fault

    def group_sessions(self) -> None:
        """Group the traces by session, once all spans were added.

        A session is a trace, or all traces that name the same conversation and no other.
        """
        traces: dict[str, list[str]] = {}
        for trace_id in self._headers:
            named = self._conversations.get(trace_id, set())
            name = next(iter(named)) if len(named) == 1 else trace_id
            traces.setdefault(name, []).append(trace_id)
        for name, several in traces.items():
            number, line = self._places[several[0]]
            self._sessions.setdefault(number, []).append((name, line, several))

    def iter_sessions(self, file: int) -> Iterator[tuple[str, int, list[SpanHeader]]]:
        """Yield the sessions whose first span is in a file: name, line, and headers."""
        for name, line, several in self._sessions.get(file, []):
            headers = [
                self._complete(header)
                for trace_id in several
                for header in self._headers[trace_id].values()
            ]
            if any(header.kind == GENERATION for header in headers):
                yield name, line, headers
            else:
                self.num_without_calls += len(several)

    def load(self, header: SpanHeader) -> Span:
        """Return a span with the events that log records have of it."""
        logged = [self._read(p) for p in self._events.get((header.trace_id, header.span_id), [])]
        if header.place >= 0:
            span = self._read(header.place)
            events = [*span.events, *(event for one in logged for event in one.events)]
            return replace(span, events=events) if logged else span
        times = [one.start_ns for one in logged]
        attributes = {name: value for one in logged for name, value in one.attributes.items()}
        events = [event for one in logged for event in one.events]
        return replace(
            logged[0], start_ns=min(times), end_ns=max(times), attributes=attributes, events=events
        )

    def close(self) -> None:
        """Remove the file."""
        if self._close is not None:
            self._close()

    def _is_repeated(self, record: Span) -> bool:
        """Whether a log record was already read: an exporter sends a batch again on a timeout."""
        (event,) = record.events
        if not event.time_ns:
            return False  # nothing tells such a record from another one with its text
        own = [record.trace_id, record.span_id, vars(event)]
        digest = hashlib.sha256(dump_metadata(own).encode()).digest()[:16]
        is_repeated = digest in self._digests
        self._digests.add(digest)
        return is_repeated

    def _is_logged(self, span: Span) -> bool:
        """Whether of this span only log records were read so far."""
        header = self._headers[span.trace_id].get(span.span_id)
        return header is not None and header.place < 0

    def _complete(self, header: SpanHeader) -> SpanHeader:
        """Return the header of a span with its log records, which may show that it is a call."""
        if (header.trace_id, header.span_id) not in self._events:
            return header
        return make_header(self.load(header), header.place)

    def _write(self, span: Span) -> int:
        fields = {**vars(span), "events": [vars(event) for event in span.events]}
        data = dump_metadata(fields).encode()
        try:
            if self._descriptor is None:
                self._descriptor, path = new_file(".spans")
                self._close = weakref.finalize(self, os.close, self._descriptor)
                path.unlink()
            os.pwrite(self._descriptor, data, self._size)
        except OSError as error:
            raise StorageError(
                f"TMPDIR: spans could not be written ({error.strerror}). Free disk space, or set "
                "TMPDIR to a directory on another disk."
            ) from error
        place = self._size
        self._size += len(data)
        self._ends[place] = self._size
        return place

    def _read(self, place: int) -> Span:
        assert self._descriptor is not None, "a place is that of a span that was written"
        body = load_json(os.pread(self._descriptor, self._ends[place] - place, place))
        return Span(**{**body, "events": [Event(**event) for event in body["events"]]})
