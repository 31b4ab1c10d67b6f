"""What the server counts, as Prometheus text at /metrics.

With several workers, each writes its numbers to files of PROMETHEUS_MULTIPROC_DIR, which BentoML
sets, and whichever worker is asked adds them up; without it there is one process and one registry.
"""

from __future__ import annotations

import os

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# From a tiny policy on a quiet machine to one that is in trouble.
_LATENCY_BUCKETS_S = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    1.0,
    5.0,
)


class Metrics:
    """One worker's numbers."""

    def __init__(self) -> None:
        self._answered: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        self._registry = CollectorRegistry()
        self._is_shared = "PROMETHEUS_MULTIPROC_DIR" in os.environ
        self._requests = Counter(
            "replaylake_requests",
            "Requests answered, by route and status.",
            ["route", "status"],
            registry=self._registry,
        )
        self._latency = Histogram(
            "replaylake_request_seconds",
            "Time from the request's arrival to its answer, by route.",
            ["route"],
            buckets=_LATENCY_BUCKETS_S,
            registry=self._registry,
        )
        self._decisions = Counter(
            "replaylake_decisions",
            "Observations acted on, by policy version and whether the action was the mode.",
            ["policy", "version", "deterministic"],
            registry=self._registry,
        )
        self._feedback = Counter(
            "replaylake_feedback", "Rewards accepted.", registry=self._registry
        )
        self._lost = Counter(
            "replaylake_log_failures",
            "Requests refused because the decision log could not be written.",
            registry=self._registry,
        )
        self._pending = Gauge(
            "replaylake_log_pending_rows",
            "Rows written to a journal and not yet committed to the lake, by table.",
            ["table"],
            registry=self._registry,
            multiprocess_mode="livesum",
        )

    def count_request(self, route: str, status: int, seconds: float) -> None:
        """Count one answer."""
        answered = self._answered.get((route, status))
        if answered is None:  # label look-ups cost more than the counting
            answered = (self._requests.labels(route, status), self._latency.labels(route))
            self._answered[route, status] = answered
        answered[0].inc()
        answered[1].observe(seconds)

    def count_decisions(self, policy: str, version: int, deterministic: bool, num: int) -> None:
        """Count observations acted on."""
        self._decisions.labels(policy, version, str(deterministic).lower()).inc(num)

    def count_feedback(self) -> None:
        """Count one accepted reward."""
        self._feedback.inc()

    def count_log_failure(self) -> None:
        """Count a request that the log could not take."""
        self._lost.inc()

    def set_pending(self, table: str, num_rows: int) -> None:
        """Report how many rows of a table's journal wait for their commit."""
        self._pending.labels(table).set(num_rows)

    def render(self) -> bytes:
        """Return the exposition text."""
        if not self._is_shared:
            return generate_latest(self._registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)
