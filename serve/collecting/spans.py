"""POST /v1/traces: OpenTelemetry's spans by OTLP/HTTP, in protobuf or JSON, plain or by gzip.

Answers and errors are those of the OTLP specification 1.9. Every span of a trace is stored, because
others are found by it; those that describe no call of a model, an agent or a tool are counted.
"""

from __future__ import annotations

import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson
from starlette.concurrency import run_in_threadpool

from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.feedback.journal import Journal, JournalConfig
from replaylake.datastore.feedback.segments import journal_folder, recover
from replaylake.datastore.interchange.formats.otlp.spans import OTHER
from replaylake.datastore.interchange.ingest.received_spans import (
    encode_spans,
    ensure_spans_table,
    make_span_record,
    split_request,
)
from replaylake.datastore.lake.dataset import Dataset
from replaylake.serve.collecting.otlp_protobuf import (
    decode_trace_request,
    encode_status,
    encode_trace_response,
)
from replaylake.serve.http.request_handler import GZIP, IDENTITY, RouteForm
from replaylake.serve.messages import (
    JSON,
    Request,
    RequestRefusedError,
    Response,
    json_response,
)
from replaylake.serve.recording.decision_log import Clock
from replaylake.serve.safety.limits import Limits

PROTOBUF: Final = "application/x-protobuf"
# Spans that are remembered, so that a batch that an exporter sends again is not stored twice.
_MAX_REMEMBERED: Final = 131_072
_MAX_MESSAGE_CHARS: Final = 500
# How many times the largest body the spans of one may be as they are stored: texts get longer by
# escapes, and each span has a copy of its resource.
_MAX_GROWTH: Final = 4
CountSpans = Callable[[str, int], None]
RESULTS: Final = ("accepted", "other", "repeated", "rejected")


class SpanLog:
    """One collector's way into a dataset's spans. Safe for threads."""

    def __init__(self, dataset: Dataset, worker: str, config: JournalConfig | None = None) -> None:
        """Create the table if it is absent, commit what killed servers left, open a journal."""
        ensure_spans_table(dataset)
        if journal_folder(dataset.spans).is_dir():
            recover(dataset.spans, encode_spans)
        self.journal = Journal(dataset.spans, encode_spans, worker=worker, config=config)
        self._recent: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._lock = threading.Lock()

    def write(self, records: Mapping[tuple[str, str], bytes]) -> int:
        """Write spans by their trace and id, all or none; return how many were new.

        On return a killed process does not lose them. Raises: StorageError.
        """
        with self._lock:
            new = {key: record for key, record in records.items() if key not in self._recent}
            if new:
                self.journal.append(list(new.values()))
            self._recent.update(dict.fromkeys(new))
            while len(self._recent) > _MAX_REMEMBERED:
                self._recent.popitem(last=False)
        return len(new)


class SpansEndpoint:
    """Writes spans down; sessions are made of them later."""

    def __init__(
        self, log: SpanLog, limits: Limits, takes_spans: bool, count: CountSpans, clock: Clock
    ) -> None:
        """Serve.

        takes_spans: whether the dataset's steps are texts with optional rewards, as those of
        sessions are, and without a unique key. count: is
        called with what became of spans, and of how many.
        """
        self._log, self._limits, self._takes_spans = log, limits, takes_spans
        self._count, self._clock = count, clock

    async def __call__(self, request: Request) -> Response:
        """Answer one request. Raises: RequestRefusedError, StorageError."""
        if not self._takes_spans:
            message = "the dataset is not one of dialogues; collect into another one"
            raise RequestRefusedError(409, "path", message)
        return await run_in_threadpool(self._answer, request)

    def _answer(self, request: Request) -> Response:
        body = request.body
        if request.content_encoding == GZIP:
            body = _decompress(body, self._limits.body_bytes)
        records: dict[tuple[str, str], bytes] = {}
        counts = {"accepted": 0, "other": 0, "rejected": 0}
        fault, at, num_bytes = "", self._clock.now(), 0
        try:
            for item in split_request(_decode(request.content_type, body)):
                if isinstance(item, str):
                    counts["rejected"] += 1
                    fault = fault or item
                    continue
                span, one = item
                counts["other" if span.kind == OTHER else "accepted"] += 1
                record = make_span_record(span, one, at)
                num_bytes += len(record)
                if num_bytes > _MAX_GROWTH * self._limits.body_bytes:
                    raise _too_large_error(_MAX_GROWTH * self._limits.body_bytes)
                records.setdefault((span.trace_id, span.span_id), record)
        except (SourceInvalidError, RecursionError, TypeError, ValueError) as error:
            raise RequestRefusedError(400, "body", str(error)[:_MAX_MESSAGE_CHARS]) from None
        num_new = self._log.write(records)
        for result, num in counts.items():
            self._count(result, num)
        self._count("repeated", counts["accepted"] + counts["other"] - num_new)
        fault = fault[:_MAX_MESSAGE_CHARS]
        if request.content_type == PROTOBUF:
            return Response(200, encode_trace_response(counts["rejected"], fault), PROTOBUF)
        if not fault:
            return json_response({})
        partial = {"rejectedSpans": str(counts["rejected"]), "errorMessage": fault}
        return json_response({"partialSuccess": partial})


def _encode_error(error: RequestRefusedError, content_type: str) -> Response:
    """Return an error as OTLP has it: a status, in the form of the request."""
    if content_type == PROTOBUF:
        return Response(error.status, encode_status(str(error)), PROTOBUF, error.headers)
    return Response(error.status, orjson.dumps({"message": str(error)}), JSON, error.headers)


SPANS_FORM: Final = RouteForm(frozenset((IDENTITY, GZIP)), _encode_error)


def _too_large_error(max_bytes: int) -> RequestRefusedError:
    message = (
        f"its spans are more than {max_bytes} bytes, each with the attributes of its resource; "
        "send smaller batches"
    )
    return RequestRefusedError(413, "body", message)


def _decode(content_type: str, body: bytes) -> Any:
    """Return a request as OTLP JSON has it. Raises: RequestRefusedError, ValueError."""
    readers: Mapping[str, Callable[[bytes], Any]] = {
        PROTOBUF: decode_trace_request,
        JSON: orjson.loads,
    }
    if (read := readers.get(content_type)) is None:
        expected = f"{PROTOBUF} or {JSON}"
        raise RequestRefusedError(415, "content-type", found=content_type, expected=expected)
    request = read(body)
    if not isinstance(request, dict):
        raise ValueError("found no object, expected an export request of spans")
    return request


def _decompress(body: bytes, max_bytes: int) -> bytes:
    """Return a body without gzip, of at most so many bytes. Raises: RequestRefusedError."""
    machine = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        data = machine.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise RequestRefusedError(400, "body", f"not gzip: {error}") from None
    if len(data) > max_bytes:
        message = f"more than {max_bytes} bytes without gzip; send smaller batches"
        raise RequestRefusedError(413, "body", message)
    if not machine.eof:
        raise RequestRefusedError(400, "body", "gzip: the body ends early")
    return data
