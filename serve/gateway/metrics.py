"""Metrics of a gateway, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class GatewayMetrics:
    """One gateway's numbers."""

    def __init__(self, num_pending: Callable[[], int], num_episodes: Callable[[], int]) -> None:
        """Count nothing yet.

        num_pending: rows written to the journal and not committed. num_episodes: that calls may
        still be added to.
        """
        self._registry = CollectorRegistry()
        counter, registry = Counter, self._registry
        self.requests = counter(
            "replaylake_gateway_requests",
            "Requests answered, by API and status; 499 where the client was gone.",
            ("api", "status"),
            registry=registry,
        )
        self.calls = counter(
            "replaylake_gateway_calls",
            "Calls recorded, by API and how they ended: completed, aborted or failed.",
            ("api", "call_status"),
            registry=registry,
        )
        self.tokens = counter(
            "replaylake_gateway_tokens",
            "Tokens sampled in recorded calls, by whether their ids are known.",
            ("ids",),
            registry=registry,
        )
        self.not_recorded = counter(
            "replaylake_gateway_not_recorded",
            "Calls that could not be recorded, by what became of them: refused or passed.",
            ("result",),
            registry=registry,
        )
        self.upstream_failures = counter(
            "replaylake_gateway_upstream_failures",
            "Requests that the engine did not answer, or not to the end.",
            registry=registry,
        )
        self.first_byte = Histogram(
            "replaylake_gateway_first_byte_seconds",
            "Time from a call's arrival to the first byte of its answer.",
            ("api",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.engine = Gauge(
            "replaylake_gateway_engine",
            "1 for the engine whose fields are used to request token ids, or for unknown.",
            ("engine",),
            registry=registry,
        )
        pending = Gauge(
            "replaylake_gateway_pending_rows",
            "Rows written to the journal and not yet committed to the lake.",
            registry=registry,
        )
        pending.set_function(num_pending)
        episodes = Gauge(
            "replaylake_gateway_open_episodes",
            "Episodes that further calls may be added to.",
            registry=registry,
        )
        episodes.set_function(num_episodes)
        # `labels` takes several times as long as what it finds takes to count.
        self.find_requests = cache(self.requests.labels)
        self.find_calls = cache(self.calls.labels)
        self.find_tokens = cache(self.tokens.labels)
        self.find_first_byte = cache(self.first_byte.labels)
        # rate() needs a value before the first that is not 0.
        for result in ("refused", "passed"):
            self.not_recorded.labels(result)

    def collect(self) -> Iterable[Metric]:
        """Return the families."""
        return self._registry.collect()

    def render(self) -> bytes:
        """Return the exposition text."""
        return generate_latest(self._registry)
