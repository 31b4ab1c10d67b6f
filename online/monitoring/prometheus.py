"""Prometheus: a run's metrics over HTTP, for as long as it goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.lake.runs.timings import PROFILE, WALL_SECONDS

_RUN_LABELS: Final = ("run_id", "policy", "env")


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
            reason = (getattr(error, "strerror", None) or str(error)).rstrip(".")
            raise ConfigInvalidError(
                f"metrics at {host}:{port}: {reason}, expected a free port on an address of this "
                "machine. Choose another port, or 0 for any free one."
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
        # By family and the values of its own labels.
        self._values: dict[MetricFamily, dict[tuple[str, ...], float]] = {
            one: {} for one in METRIC_FAMILIES
        }
        self._lock = threading.Lock()

    def set(self, update: int, values: Mapping[str, float]) -> None:
        with self._lock:
            for family, labels, value in _iter_samples(values):
                self._values[family][labels] = value
            # What is measured at the end is of whichever update was best: no step back.
            updates = self._values[_UPDATES]
            updates[()] = max(float(update), updates.get((), 0.0))
            self._values[_LAST_UPDATE_TIME][()] = time.time()

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        if self.labels is None:
            return
        with self._lock:
            values = {family: dict(samples) for family, samples in self._values.items() if samples}
        for family, samples in values.items():
            cls = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            metric = cls(family.name, family.description, labels=list(_labels_of(family)))
            for labels, value in samples.items():
                metric.add_metric([*self.labels, *labels], value)
            yield metric


_Kind = Literal["counter", "gauge"]


@dataclass(frozen=True)
class MetricFamily:
    """One family: its samples differ by their labels alone.

    name: without the `_total` that Prometheus adds to a counter. metric_name: the run's metric;
    empty where it is none and every metric sets it. scale: of the exported number to the run's, as
    Prometheus has base units. label: its own, beside _RUN_LABELS.
    """

    name: str
    kind: _Kind
    metric_name: str
    description: str
    scale: float = 1.0
    labels: tuple[str, ...] = ()


_UPDATES: Final = MetricFamily("replaylake_run_updates", "counter", "", "Updates of the learner.")
_OTHERS: Final = MetricFamily(
    "replaylake_run_metric",
    "gauge",
    "*",
    "Any other metric of the run, such as the learner's losses, by its name.",
    labels=("metric",),
)
_LAST_UPDATE_TIME: Final = MetricFamily(
    "replaylake_run_last_metrics_timestamp_seconds",
    "gauge",
    "",
    "When the run last had metrics, in seconds since 1970.",
)
METRIC_FAMILIES: Final = (
    _UPDATES,
    MetricFamily("replaylake_run_env_steps", "counter", "env_steps", "Environment steps taken."),
    MetricFamily("replaylake_run_episodes", "counter", "episodes", "Episodes ended."),
    MetricFamily(
        "replaylake_run_return", "gauge", "return", "Mean return of the last 100 episodes."
    ),
    MetricFamily(
        "replaylake_run_selection_environment",
        "gauge",
        "selection/environment",
        "Mean return that the policy is chosen by.",
    ),
    MetricFamily(
        "replaylake_run_staleness_versions",
        "gauge",
        "staleness",
        "Mean number of policy versions that sampled steps are behind.",
    ),
    MetricFamily(
        "replaylake_run_samples_per_insert",
        "gauge",
        "samples_per_insert",
        "Steps sampled for each step that came.",
    ),
    MetricFamily(
        "replaylake_run_latency_seconds",
        "gauge",
        "latency_ms",
        "Median time from a step taken to that step samplable.",
        0.001,
    ),
    MetricFamily(
        "replaylake_run_updates_per_second",
        "gauge",
        "updates_per_s",
        "Updates a second, as the run measured them.",
    ),
    MetricFamily(
        "replaylake_run_env_steps_per_second",
        "gauge",
        "steps_per_s",
        "Environment steps a second, as the run measured them.",
    ),
    MetricFamily(
        "replaylake_run_link_seconds",
        "counter",
        f"{PROFILE}/*/seconds",
        "Seconds that a link took, of all processes together.",
        labels=("place", "link"),
    ),
    MetricFamily(
        "replaylake_run_link_items",
        "counter",
        f"{PROFILE}/*/items",
        "Items (steps, shards, batches, ...) that passed a link.",
        labels=("place", "link"),
    ),
    MetricFamily(
        "replaylake_run_link_bytes",
        "counter",
        f"{PROFILE}/*/bytes",
        "Bytes that passed a link.",
        labels=("place", "link"),
    ),
    _OTHERS,
    _LAST_UPDATE_TIME,
)
_BY_METRIC: Final = {
    one.metric_name: one for one in METRIC_FAMILIES if not one.labels and one.metric_name
}
_BY_LINK: Final = {one.metric_name: one for one in METRIC_FAMILIES if "link" in one.labels}


def _iter_samples(
    values: Mapping[str, float],
) -> Iterator[tuple[MetricFamily, tuple[str, ...], float]]:
    """Yield (family, the values of its labels, number) for each of a run's metrics, by name."""
    for name, value in values.items():
        if (family := _BY_METRIC.get(name)) is not None:
            yield family, (), value * family.scale
            continue
        if name == WALL_SECONDS or (name.startswith(f"{PROFILE}/") and name.endswith("/calls")):
            # Of use to `runs profile` alone.
            continue
        parts = name.split("/")
        if len(parts) == 4 and parts[0] == PROFILE:
            family = _BY_LINK.get(f"{PROFILE}/*/{parts[3]}")
        if family is not None:
            yield family, (parts[1], parts[2]), value
        else:
            yield _OTHERS, (name,), value


def _labels_of(family: MetricFamily) -> Iterable[str]:
    """Return the names of a family's labels, in order."""
    return (*_RUN_LABELS, *family.labels)
