"""OTLP export: spans of requests and the metrics of /metrics, sent by OpenTelemetry's SDK.

Spans and the duration of requests follow OpenTelemetry's semantic conventions for HTTP servers. The
SDK reads its own variables: endpoint, headers, sampler, intervals, batches, resource attributes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from opentelemetry import propagate
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    PeriodicExportingMetricReader,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Metric as OtlpMetric
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    INVALID_SPAN,
    NoOpTracerProvider,
    Span,
    SpanKind,
    Status,
    StatusCode,
    format_trace_id,
    set_span_in_context,
)
from prometheus_client.core import Metric

from replaylake.datastore.version import VERSION

_SCOPE: Final = "replaylake.serve"
# Differs from _SCOPE, because the SDK sends one group of metrics for each scope.
_FAMILY_SCOPE: Final = "replaylake.serve.monitoring"
_NANOSECONDS: Final = 1_000_000_000
_METHODS: Final = frozenset(
    ("CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE")
)
# The bounds that the semantic conventions advise, in seconds, and smaller ones, because an action
# takes a fraction of a millisecond.
_DURATION_BOUNDS: Final = (
    0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0,
)  # fmt: skip
# Probes and scrapes, which arrive every few seconds and need no spans.
_UNTRACED: Final = frozenset(
    ("/livez", "/readyz", "/metrics", "/v2/health/live", "/v2/health/ready", "/static")
)


class RequestSpan:
    """The span of one request, and the attributes of its duration metric."""

    __slots__ = ("_attributes", "_owner", "_span", "_start_s")

    def __init__(self, owner: OtlpExport, span: Span, attributes: dict[str, Any], start_s: float):
        self._owner, self._span, self._attributes = owner, span, attributes
        self._start_s = start_s

    @property
    def trace_id(self) -> str | None:
        """The trace id, 32 hexadecimal digits; None if the request is part of no trace."""
        context = self._span.get_span_context()
        return format_trace_id(context.trace_id) if context.is_valid else None

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Add attributes to the span."""
        if self._span.is_recording():
            self._span.set_attributes(attributes)

    def make_headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that propagate the trace to another server."""
        carrier: dict[str, str] = {}
        propagate.inject(carrier, set_span_in_context(self._span))
        return [(name.encode(), value.encode()) for name, value in carrier.items()]

    def end(
        self,
        status: int,
        num_bytes_in: int,
        num_bytes_out: int,
        describe: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        """End the span, and count the request. describe: returns additional attributes."""
        attributes = self._attributes
        attributes["http.response.status_code"] = status
        if status >= 500:
            attributes["error.type"] = str(status)
        span = self._span
        if span.is_recording():
            span.set_attributes(attributes)
            span.set_attribute("http.request.body.size", num_bytes_in)
            span.set_attribute("http.response.body.size", num_bytes_out)
            if describe is not None:
                span.set_attributes(describe())
            if status >= 500:
                span.set_status(Status(StatusCode.ERROR))
            span.end()
        self._owner.count_request(time.perf_counter() - self._start_s, attributes)


class OtlpExport:
    """Sends the spans and metrics of one process."""

    def __init__(
        self,
        service: str,
        instance: str,
        signals: frozenset[str],
        collect: Callable[[], Iterable[Metric]],
        attributes: Mapping[str, Any],
    ) -> None:
        """Start to send `signals`; for the arguments, see `open_telemetry`."""
        own = {
            "service.name": service,
            "service.version": VERSION,
            "service.instance.id": instance,
        }
        # Resource attributes of the environment take precedence.
        resource = Resource.create(own).merge(OTELResourceDetector().detect())
        self._attributes = dict(attributes)
        self._num_active = 0
        self._traces: TracerProvider | None = None
        self._metrics: MeterProvider | None = None
        if "traces" in signals:
            self._traces = TracerProvider(resource=resource, shutdown_on_exit=False)
            self._traces.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = (self._traces or NoOpTracerProvider()).get_tracer(_SCOPE, VERSION)
        if "metrics" in signals:
            reader = PeriodicExportingMetricReader(_FamilyExporter(collect))
            self._metrics = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
            meter = self._metrics.get_meter(_SCOPE, VERSION)
            self._duration = meter.create_histogram(
                "http.server.request.duration",
                "s",
                "Duration of HTTP server requests.",
                explicit_bucket_boundaries_advisory=_DURATION_BOUNDS,
            )
            meter.create_observable_up_down_counter(
                "http.server.active_requests",
                [self._observe_active],
                "{request}",
                "Number of active HTTP server requests.",
            )

    def start_span(self, scope: Mapping[str, Any], route: str, start_s: float) -> RequestSpan:
        """Start the span of a request. start_s: time.perf_counter() at its arrival."""
        method = scope["method"] if scope["method"] in _METHODS else "_OTHER"
        attributes = {"http.request.method": method, "url.scheme": scope.get("scheme", "http")}
        if route != "other":
            attributes["http.route"] = route
        self._num_active += 1
        if route in _UNTRACED:
            return RequestSpan(self, INVALID_SPAN, attributes, start_s)
        carrier: dict[str, str] = {}
        for name, value in scope["headers"]:
            carrier[name.decode("latin-1")] = value.decode("latin-1")
        since = int((time.perf_counter() - start_s) * _NANOSECONDS)
        span = self._tracer.start_span(
            method if route == "other" else f"{method} {route}",
            propagate.extract(carrier, Context()),
            SpanKind.SERVER,
            {**attributes, **self._attributes},
            start_time=time.time_ns() - since,
        )
        if span.is_recording():
            span.set_attributes(_describe_connection(scope, carrier))
        return RequestSpan(self, span, attributes, start_s)

    def count_request(self, seconds: float, attributes: Mapping[str, Any]) -> None:
        """Count a request that has ended."""
        self._num_active -= 1
        if self._metrics is not None:
            self._duration.record(seconds, attributes)

    def close(self, timeout_s: float = 2.0) -> None:
        """Send the rest for at most `timeout_s`: a missing receiver must not block a stop."""
        thread = threading.Thread(target=self._shut_down, name="telemetry-close", daemon=True)
        thread.start()
        thread.join(timeout_s)

    def _shut_down(self) -> None:
        if self._traces is not None:
            self._traces.shutdown()
        if self._metrics is not None:
            self._metrics.shutdown()

    def _observe_active(self, options: CallbackOptions) -> Iterable[Observation]:
        return [Observation(self._num_active)]


def _describe_connection(
    scope: Mapping[str, Any], headers: Mapping[str, str]
) -> Mapping[str, str | int]:
    """Return attributes of a request's connection and headers, without query and credentials."""
    found: dict[str, str | int] = {
        "url.path": scope["path"],
        "network.protocol.version": scope.get("http_version", "1.1"),
    }
    for name, key in (("server", "server"), ("client", "client")):
        if (address := scope.get(key)) is not None:
            found[f"{name}.address"] = address[0]
            if address[1] is not None:
                found[f"{name}.port"] = address[1]
    if agent := headers.get("user-agent"):
        found["user_agent.original"] = agent
    return found


class _FamilyExporter(OTLPMetricExporter):
    """Sends the metric families of /metrics together with the SDK's own metrics.

    They are cumulative since the start of the process, whatever temporality is configured.
    """

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        super().__init__()
        self._collect, self._start_ns = collect, time.time_ns()

    def export(
        self, metrics_data: MetricsData, timeout_millis: float | None = 10_000, **options: Any
    ) -> MetricExportResult:
        now_ns = time.time_ns()
        families = [
            metric
            for family in self._collect()
            if (metric := to_otlp_metric(family, self._start_ns, now_ns)) is not None
        ]
        scope = ScopeMetrics(InstrumentationScope(_FAMILY_SCOPE, VERSION), families, "")
        resources = [
            ResourceMetrics(one.resource, [*one.scope_metrics, scope], one.schema_url)
            for one in metrics_data.resource_metrics
        ]
        return super().export(MetricsData(resources), timeout_millis, **options)


def to_otlp_metric(family: Metric, start_ns: int, now_ns: int) -> OtlpMetric | None:
    """Convert a metric family to OTLP, under the same name; None if it has no samples.

    A counter's name has no suffix `_total`.
    """
    data: Sum | Gauge | Histogram
    if family.type == "histogram":
        points = _to_histogram_points(family, start_ns, now_ns)
        data = Histogram(points, AggregationTemporality.CUMULATIVE)
    else:
        numbers = [
            NumberDataPoint(dict(sample.labels), start_ns, now_ns, sample.value)
            for sample in family.samples
            if not sample.name.endswith("_created")
        ]
        if family.type == "counter":
            data = Sum(numbers, AggregationTemporality.CUMULATIVE, is_monotonic=True)
        else:
            data = Gauge(numbers)
    if not data.data_points:
        return None
    unit = "s" if family.name.endswith("_seconds") else ""
    return OtlpMetric(family.name, family.documentation, unit, data)


def _to_histogram_points(
    family: Metric, start_ns: int, now_ns: int
) -> Sequence[HistogramDataPoint]:
    buckets: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
    sums: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        key = tuple(labels.items())
        if sample.name.endswith("_bucket"):
            buckets.setdefault(key, []).append((float(sample.labels["le"]), sample.value))
        elif sample.name.endswith("_sum"):
            sums[key] = sample.value
    points = []
    for key, cumulative in buckets.items():
        cumulative.sort()
        counts = [count for _, count in cumulative]
        below = [0.0, *counts[:-1]]
        points.append(
            HistogramDataPoint(
                attributes=dict(key),
                start_time_unix_nano=start_ns,
                time_unix_nano=now_ns,
                count=int(counts[-1]),
                sum=sums.get(key, 0.0),
                bucket_counts=[int(a - b) for a, b in zip(counts, below, strict=True)],
                explicit_bounds=[bound for bound, _ in cumulative[:-1]],
                # Prometheus histograms have no minimum and maximum.
                min=None,  # type: ignore[arg-type]
                max=None,  # type: ignore[arg-type]
            )
        )
    return points
