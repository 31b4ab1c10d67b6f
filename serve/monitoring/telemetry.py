"""Telemetry: export of traces and metrics over OTLP, configured by OpenTelemetry's variables.

Without these variables, OpenTelemetry is not imported, and requests have no overhead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from prometheus_client.core import Metric

if TYPE_CHECKING:
    from replaylake.serve.monitoring.otlp_export import OtlpExport

TRACES: Final = "traces"
METRICS: Final = "metrics"
_PROTOCOL: Final = "http/protobuf"
_EXPORTER_MODULE: Final = "opentelemetry.exporter.otlp.proto.http"
_logger = logging.getLogger(__name__)


def open_telemetry(
    service: str,
    instance: str,
    collect: Callable[[], Iterable[Metric]],
    environment: Mapping[str, str],
    attributes: Mapping[str, Any] | None = None,
) -> OtlpExport | None:
    """Start to export the signals that `environment` enables; None if there are none.

    service: `service.name`, unless the environment sets another; instance: `service.instance.id`.
    collect: returns the metric families of this process; called in another thread. attributes:
    attributes of every span. Invalid settings are logged and ignored: telemetry never prevents a
    server from starting.
    """
    signals = find_signals(environment)
    if not signals:
        return None
    if not _is_installed():
        _logger.warning(
            "environment variables enable telemetry (%s), but OpenTelemetry's OTLP exporter is "
            "not installed. Run: pip install 'replaylake[otel]', or set OTEL_SDK_DISABLED=true",
            ", ".join(sorted(signals)),
        )
        return None
    try:
        # Not on top: 0.3 s and 12 MB of each worker (2 cores, 2026-11), reported to or not.
        from replaylake.serve.monitoring.otlp_export import OtlpExport

        return OtlpExport(service, instance, signals, collect, attributes or {})
    except Exception as error:  # whatever OpenTelemetry makes of one of its many variables
        _logger.warning(
            "no telemetry is reported: OpenTelemetry refuses an OTEL_* variable: %s: %s",
            type(error).__name__,
            error,
        )
        return None


def find_signals(environment: Mapping[str, str]) -> frozenset[str]:
    """Return which of TRACES and METRICS the environment enables.

    A signal is enabled if an endpoint for it is set or its exporter is `otlp`, and disabled if its
    exporter is `none`. Exporters and protocols other than OTLP over HTTP are logged and ignored.
    """
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return frozenset()
    return frozenset(signal for signal in (TRACES, METRICS) if _is_on(signal, environment))


def _is_on(signal: str, environment: Mapping[str, str]) -> bool:
    name = signal.upper()
    exporter_variable = f"OTEL_{name}_EXPORTER"
    exporter = environment.get(exporter_variable, "").strip().lower()
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{name}_ENDPOINT")
    is_wanted = exporter not in ("", "none") or (
        not exporter and any(environment.get(one) for one in endpoints)
    )
    if not is_wanted:
        return False
    if exporter not in ("", "otlp"):
        _logger.warning(
            "%s: found %r, expected otlp or none; no %s are exported",
            exporter_variable,
            exporter,
            signal,
        )
        return False
    for variable in (f"OTEL_EXPORTER_OTLP_{name}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = environment.get(variable, "").strip()
        if protocol:
            if protocol == _PROTOCOL:
                return True
            _logger.warning(
                "%s: found %r, expected %s; no %s are exported",
                variable,
                protocol,
                _PROTOCOL,
                signal,
            )
            return False
    return True


def _is_installed() -> bool:
    try:
        return find_spec(_EXPORTER_MODULE) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False
