"""Prometheus: a run's metrics over HTTP, for as long as it goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from types import TracebackType

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.online.monitoring.metric_families import (
    LAST_UPDATE_TIME,
    METRIC_FAMILIES,
    UPDATES,
    MetricFamily,
    iter_samples,
    labels_of,
)


class MetricsServer:
    """Answers at http://HOST:PORT/metrics with the newest value of each of a run's metrics.

    It listens from the moment it is made, so that a port in use ends a run before it begins, and
    has something to say once `begin` has named the run. Who can reach the port can read it: there
    is no password, which is why it is on loopback unless another address is given.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        """Listen. port: 0 takes any that is free; `port` says which.

        Raises: ConfigInvalidError where the port is in use, or the address is none of this
        machine's.
        """
        self._values = _RunValues()
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._values)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            found = (getattr(error, "strerror", None) or str(error)).rstrip(".")
            raise ConfigInvalidError(
                f"metrics at {host}:{port}: {found}, expected a free port of an address of this "
                "machine. Give another, or port 0 for any that is free."
            ) from error
        self.host, self.port = host, int(self._server.server_port)

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/metrics"

    def begin(self, run_id: str, *, policy: str, env: str) -> None:
        """Name the run whose metrics come."""
        self._values.labels = (run_id, policy, env)

    def set(self, update: int, values: Mapping[str, float]) -> None:
        """Take metrics of an update, by name; those that are not among them stay as they were."""
        self._values.set(update, values)

    def close(self) -> None:
        """Stop answering, and free the port; may be called twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _RunValues(Collector):
    """The newest values, as the client library collects them: set here, read by its threads."""

    def __init__(self) -> None:
        self.labels: tuple[str, ...] | None = None
        # By family and the value of its own label, None where it has none.
        self._values: dict[MetricFamily, dict[str | None, float]] = {
            one: {} for one in METRIC_FAMILIES
        }
        self._lock = threading.Lock()

    def set(self, update: int, values: Mapping[str, float]) -> None:
        with self._lock:
            for family, label, value in iter_samples(values):
                self._values[family][label] = value
            # What is measured at the end is of whichever update was best: no step back.
            updates = self._values[UPDATES]
            updates[None] = max(float(update), updates.get(None, 0.0))
            self._values[LAST_UPDATE_TIME][None] = time.time()

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        if self.labels is None:
            return
        with self._lock:
            values = {family: dict(found) for family, found in self._values.items() if found}
        for family, found in values.items():
            cls = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            made = cls(family.name, family.description, labels=list(labels_of(family)))
            for label, value in found.items():
                made.add_metric([*self.labels, *([] if label is None else [label])], value)
            yield made
