"""What the server counts.

Counting is adding to numbers in memory (shared_counters.py); Prometheus text is made of them when
somebody asks. Several workers have their numbers in files of PROMETHEUS_MULTIPROC_DIR, and
whichever is asked adds them up; without it there is one worker.
"""

from __future__ import annotations

import asyncio
import os
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from replaylake.datastore.episodes.encoding import CATEGORY
from replaylake.datastore.episodes.spaces import Array, Values
from replaylake.datastore.feedback.journal import Journal
from replaylake.serve.monitoring.drift import training_moments
from replaylake.serve.monitoring.link_times import SERVER_LINKS, WALL, WIDTH, LinkTimes
from replaylake.serve.monitoring.metric_families import (
    COMMIT_FAILURES,
    DECISIONS,
    DRIFT,
    EXPLORATION,
    FEEDBACK,
    FEEDBACK_LAG,
    JOIN_FAILURES,
    JOINED,
    LATENCY,
    LINK_BYTES,
    LINK_ITEMS,
    LINK_SECONDS,
    LOG_FAILURES,
    LOG_LOST,
    LOG_PROB,
    METRIC_FAMILIES,
    ORPHANED,
    PENDING,
    POLICY,
    QUEUE,
    QUEUE_LIMIT,
    RECENT_DECISIONS,
    REFUSED,
    REFUSED_CONNECTIONS,
    REFUSED_HEADERS,
    RELOADS,
    REQUESTS,
    SET_ASIDE,
    SHIFT,
    UNKNOWN_CATEGORIES,
    UNREACHABLE,
    WEIGHT,
    WORKER_SECONDS,
    WORKER_STARTS,
    WORKERS,
    MetricFamily,
)
from replaylake.serve.monitoring.recent_statistics import (
    RECENT,
    RecentMeans,
    RecentStatistics,
    merge_sums,
)
from replaylake.serve.monitoring.shared_counters import CounterBlock, SharedCounters
from replaylake.serve.safety.limits import Limits
from replaylake.serve.serving_state import ServingState
from replaylake.serve.versions.alias_follower import FollowedAlias
from replaylake.serve.versions.router import ServedPolicy

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_REFRESH_S: Final = 1.0
_NUM_BUCKETS: Final = len(LATENCY.buckets) + 1
_NO_COUNTERS: Final = memoryview(bytearray(8)).cast("d")
# Each is a time series of every version.
_MAX_SHIFTS: Final = 64
# What clients post to: an alert watches what they are answered.
_ALERTED_ROUTES: Final = (
    "/act",
    "/decisions",
    "/feedback",
    "/episodes",
    "/v2/models/{name}/infer",
    "/v2/models/{name}/versions/{version}/infer",
)
# Means of fewer say nothing more.
_MIN_DECISIONS: Final = 0.01
# The key of the block with the times of a worker's links.
_LINKS: Final = "replaylake_link"
_Labels = tuple[str, ...]


class Worker(Protocol):
    """What a worker has, whether or not it serves a policy."""

    limits: Limits

    @property
    def journals(self) -> Mapping[str, Journal]:
        """What is being written to, by the table into which it is committed."""


class Metrics:
    """One worker's numbers.

    Adding to a cell is one step to Python's threads: between its read and its write there is
    nothing at which another thread could come in.
    """

    def __init__(self) -> None:
        """Count nothing yet: no file is made before there is something to count."""
        self._cells: SharedCounters | None = None
        self._values = _NO_COUNTERS
        self._begins: dict[tuple[str, tuple[str, ...]], int] = {}
        self._answers: dict[tuple[str, int], tuple[int, int]] = {}
        self._decisions: dict[tuple[str, int, bool], int] = {}
        self._recents: dict[tuple[str, int], RecentStatistics] = {}
        self._labels: set[tuple[str, ...]] = set()
        self._serving: ServingState | None = None
        self._worker: Worker | None = None
        self._num_active: Callable[[], int] = lambda: 0
        self._refused: Mapping[int, int] = {}
        self._received: Callable[[], tuple[float, int, int]] = lambda: (0.0, 0, 0)
        self.links = LinkTimes()

    def count_request(self, route: str, status: int, seconds: float) -> None:
        """Count one answer. Cost: 0.6 us."""
        begins = self._answers.get((route, status))
        if begins is None:
            latency = self._begin(LATENCY, (route,), _NUM_BUCKETS + 1)
            begins = self._begin(REQUESTS, (route, str(status))), latency
            self._answers[route, status] = begins
        requests, latency = begins
        values = self._values
        values[requests] += 1
        values[latency + bisect_left(LATENCY.buckets, seconds)] += 1
        values[latency + _NUM_BUCKETS] += seconds

    def count_decisions(self, policy: str, version: int, deterministic: bool, num: int) -> None:
        """Count observations acted on."""
        begin = self._decisions.get((policy, version, deterministic))
        if begin is None:
            labels = (policy, str(version), str(deterministic).lower())
            begin = self._decisions[policy, version, deterministic] = self._begin(DECISIONS, labels)
        self._values[begin] += num

    def observe_acts(
        self,
        served: ServedPolicy,
        observations: Values,
        log_probs: Array | None,
        num: int,
        *,
        is_drawn: bool,
        epsilon: float = 0.0,
    ) -> None:
        """Take `num` observations [num, *obs] and their log_probs float32 [num] into the means.

        is_drawn: by temperature or epsilon, and not the mode. Cost: 1 us, with its share of the
        adding up.
        """
        recent = self._recents.get((served.name, served.version))
        if recent is None:
            recent = RecentStatistics(self._open_counters(), served)
            self._recents[served.name, served.version] = recent
        if recent.add(observations, log_probs, num, is_drawn, epsilon):
            recent.fold(time.monotonic())

    def count_feedback(self, lag_s: float | None = None) -> None:
        """Count one accepted reward, of a decision that was taken lag_s before."""
        self._add(FEEDBACK)
        if lag_s is not None:
            begin = self._begin(FEEDBACK_LAG, (), len(FEEDBACK_LAG.buckets) + 2)
            self._values[begin + bisect_left(FEEDBACK_LAG.buckets, lag_s)] += 1
            self._values[begin + len(FEEDBACK_LAG.buckets) + 1] += lag_s

    def count_unknown_category(self, field: str) -> None:
        """Count a text of an observation's field that the policy's vocabulary does not have."""
        self._add(UNKNOWN_CATEGORIES, (field,))

    def count_refused_header(self, header: str) -> None:
        """Count a request that its `host`, `origin` or `content-type` had refused."""
        self._add(REFUSED_HEADERS, (header,))

    def count_log_failure(self) -> None:
        """Count a request that the log could not take."""
        self._add(LOG_FAILURES)

    def count_log_lost(self, num: int = 1) -> None:
        """Count decisions or rewards that were answered and that the log could not take."""
        self._add(LOG_LOST, (), num)

    def set_pending(self, table: str, num_rows: int) -> None:
        """Report how many rows of a table's journal wait for their commit."""
        self._set(PENDING, (table,), num_rows)

    def set_failed_commits(self, table: str, num: int) -> None:
        """Report how many commits of a journal have failed so far."""
        self._set(COMMIT_FAILURES, (table,), num)

    def set_joined(self, decisions: int, joined: int, orphaned: int, set_aside: int) -> None:
        """Report what `feedback join` found: of all logged decisions, those that have a reward."""
        if decisions:
            self._set(JOINED, (), joined / decisions)
        self._set(ORPHANED, (), orphaned)
        self._set(SET_ASIDE, (), set_aside)

    def count_join_failure(self) -> None:
        """Count a round of the feedback join that failed."""
        self._add(JOIN_FAILURES)

    def count_start(self) -> None:
        """Count this worker, before it loads anything: it may end there."""
        self._add(WORKER_STARTS)

    def watch(
        self,
        serving: ServingState,
        num_active: Callable[[], int] = lambda: 0,
        refused: Mapping[int, int] | None = None,
        received: Callable[[], tuple[float, int, int]] = lambda: (0.0, 0, 0),
    ) -> None:
        """Report what is served, from now on; called in the event loop's thread.

        num_active: requests that are being worked on. refused: connections refused so far, by
        status; looked at again and again. received: seconds, packets and bytes that the
        connections took so far.
        """
        self.watch_worker(serving, num_active, refused, received)
        self._serving = serving
        serving.router.on_change = self._show_served
        if serving.follower is not None:
            serving.follower.on_look = self._show_following
            for following in serving.follower.followed:
                self._show_following(following)
        if serving.feedback_join is not None:
            serving.feedback_join.on_round = self.set_joined
            serving.feedback_join.on_failure = self.count_join_failure
            self._begin(JOIN_FAILURES)
        if serving.log is not None:
            self._begin(LOG_FAILURES)
            self._begin(LOG_LOST)
        encoding = serving.router.one.policy.spec.encoding
        for field in () if encoding is None else encoding.fields:
            if field.kind == CATEGORY:
                self._begin(UNKNOWN_CATEGORIES, (field.name,))
        self._show_served()
        self.refresh()

    def watch_worker(
        self,
        worker: Worker,
        num_active: Callable[[], int] = lambda: 0,
        refused: Mapping[int, int] | None = None,
        received: Callable[[], tuple[float, int, int]] = lambda: (0.0, 0, 0),
    ) -> None:
        """Report what any worker has, one without a policy too; arguments as those of `watch`."""
        self._worker, self._num_active = worker, num_active
        self._refused = {} if refused is None else refused
        self._received = received
        begin = self._open_counters().block((_LINKS, ()), WIDTH)
        self.links.start(self._values, begin)
        # rate() and increase() need two values: of a count that begins at one they miss that one.
        for route in _ALERTED_ROUTES:
            self._begin(REQUESTS, (route, "500"))
        for header in ("host", "origin", "content-type"):
            self._begin(REFUSED_HEADERS, (header,))
        self.refresh()

    async def keep_fresh(self) -> None:
        """Refresh every second, until cancelled."""
        while True:
            await asyncio.sleep(_REFRESH_S)
            self.refresh()

    def refresh(self) -> None:
        """Bring up to date what is not counted as it happens."""
        now = time.monotonic()
        for recent in list(self._recents.values()):
            recent.fold(now)
        self._set(WORKERS, (), 1)
        self.links.refresh(self._received())
        for status, num in list(self._refused.items()):
            self._set(REFUSED_CONNECTIONS, (str(status),), num)
        worker = self._worker
        if worker is None:
            return
        self._set(QUEUE, (), self._num_active())
        self._set(QUEUE_LIMIT, (), worker.limits.queue)
        for table, journal in worker.journals.items():
            self.set_pending(table, journal.num_pending)
            self.set_failed_commits(table, journal.num_commit_failures)

    def render(self) -> bytes:
        """Return the exposition text, of all workers."""
        self.refresh()
        blocks = list(self._open_counters().blocks())
        return exposition(blocks, self._find_elements(), time.monotonic())

    def collect_own(self) -> list[Metric]:
        """Return the metric families of this worker alone, up to 1 s old; thread-safe."""
        blocks = list(self._open_counters().own_blocks())
        return list(_families(blocks, self._find_elements(), time.monotonic()))

    def _find_elements(self) -> dict[_Labels, _Labels]:
        serving = self._serving
        elements: dict[_Labels, _Labels] = {}
        for served in () if serving is None else serving.router.held:
            moments = training_moments(served.about, served.policy.spec)
            if moments is not None:
                elements[served.name, str(served.version)] = moments.labels
        return elements

    def _show_served(self) -> None:
        """Report the arms; called in the thread that changed them."""
        serving = self._serving
        if serving is None:
            return
        labels: set[tuple[str, ...]] = set()
        for arm in serving.router.arms:
            served = arm.served
            now = (served.name, str(served.version), served.reference)
            labels.add(now)
            self._set(POLICY, now, 1)
            self._set(WEIGHT, now, arm.weight)
        for before in self._labels - labels:
            self._set(POLICY, before, 0)
            self._set(WEIGHT, before, 0)
        self._labels = labels
        versions = {(served.name, served.version) for served in serving.router.held}
        for known in [key for key in self._recents if key not in versions]:
            self._open_counters().release(self._recents.pop(known).key)

    def _show_following(self, following: FollowedAlias) -> None:
        labels = (following.name, following.alias)
        refusal = following.last_refusal
        self._set(REFUSED, labels, 0 if refusal is None else refusal.version)
        self._set(UNREACHABLE, labels, following.unreachable is not None)
        self._set(RELOADS, (*labels, "served"), following.num_moves)
        self._set(RELOADS, (*labels, "refused"), following.num_refusals)

    def _add(self, family: MetricFamily, labels: tuple[str, ...] = (), num: float = 1) -> None:
        begin = self._begin(family, labels)  # first: it may be what makes the cells
        self._values[begin] += num

    def _set(self, family: MetricFamily, labels: tuple[str, ...], value: float) -> None:
        begin = self._begin(family, labels)
        self._values[begin] = value

    def _begin(self, family: MetricFamily, labels: tuple[str, ...] = (), width: int = 1) -> int:
        begin = self._begins.get((family.name, labels))
        if begin is None:
            begin = self._open_counters().block((family.name, labels), width)
            self._begins[family.name, labels] = begin
            self._values = self._open_counters().values
        return begin

    def _open_counters(self) -> SharedCounters:
        if self._cells is None:
            folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
            self._cells = SharedCounters(Path(folder) if folder else None)
            self._values = self._cells.values
        return self._cells


def exposition(
    blocks: Sequence[CounterBlock], elements: Mapping[_Labels, _Labels], now_s: float
) -> bytes:
    """Return the text. elements: by (policy, version), what those of its observation are called."""
    registry = CollectorRegistry()
    registry.register(_BlockCollector(list(_families(blocks, elements, now_s))))
    return generate_latest(registry)


class _BlockCollector(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _families(
    blocks: Sequence[CounterBlock], elements: Mapping[_Labels, _Labels], now_s: float
) -> Iterator[Metric]:
    by_name: dict[str, dict[_Labels, list[CounterBlock]]] = defaultdict(lambda: defaultdict(list))
    for block in blocks:
        name, labels = block.key
        by_name[name][labels].append(block)
    means: dict[_Labels, RecentMeans] = {}
    for labels, some in by_name.pop(RECENT, {}).items():
        if live := [block.values for block in some if block.is_live]:
            width = max(map(len, live))
            recent = RecentMeans(merge_sums([sums for sums in live if len(sums) == width], now_s))
            if recent.num >= _MIN_DECISIONS:
                means[labels] = recent
    links = by_name.pop(_LINKS, {}).get((), [])
    for family in METRIC_FAMILIES:
        if family in (LINK_SECONDS, LINK_ITEMS, LINK_BYTES, WORKER_SECONDS):
            yield _make_link_metric(family, links)
        elif family.kind == "counter":
            yield _counter(family, by_name[family.name])
        elif family.kind == "histogram":
            yield _histogram(family, by_name[family.name])
        elif family in (EXPLORATION, LOG_PROB, RECENT_DECISIONS, DRIFT, SHIFT):
            yield _of_means(family, means, elements)
        else:
            yield _gauge(family, by_name[family.name])


def _counter(family: MetricFamily, by_labels: Mapping[_Labels, list[CounterBlock]]) -> Metric:
    metric = CounterMetricFamily(family.name, family.description, labels=family.labels)
    for labels, blocks in _with_zero(family, by_labels):
        metric.add_metric(labels, float(sum(block.values[0] for block in blocks)))
    return metric


def _make_link_metric(family: MetricFamily, blocks: Sequence[CounterBlock]) -> Metric:
    metric = CounterMetricFamily(family.name, family.description, labels=family.labels)
    whole = [block.values for block in blocks if len(block.values) == WIDTH]
    total = np.sum(whole, axis=0) if whole else np.zeros(WIDTH)
    if family is WORKER_SECONDS:
        metric.add_metric((), float(total[WALL]))
        return metric
    offset = (LINK_SECONDS, LINK_ITEMS, LINK_BYTES).index(family)
    for number, labels in enumerate(SERVER_LINKS):
        metric.add_metric(labels, float(total[3 * number + offset]))
    return metric


def _histogram(family: MetricFamily, by_labels: Mapping[_Labels, list[CounterBlock]]) -> Metric:
    metric = HistogramMetricFamily(family.name, family.description, labels=family.labels)
    bounds = [*(f"{bound!r}" for bound in family.buckets), "+Inf"]
    for labels, blocks in _with_zero(family, by_labels):
        total = np.sum([block.values for block in blocks], axis=0) if blocks else np.zeros(0)
        total = np.resize(total, len(bounds) + 1) if total.size else np.zeros(len(bounds) + 1)
        counts = np.cumsum(total[:-1]).tolist()
        buckets = list(zip(bounds, counts, strict=True))
        metric.add_metric(labels, buckets=buckets, sum_value=float(total[-1]))
    return metric


def _gauge(family: MetricFamily, by_labels: Mapping[_Labels, list[CounterBlock]]) -> Metric:
    metric = GaugeMetricFamily(family.name, family.description, labels=family.labels)
    for labels, blocks in by_labels.items():
        values = [float(block.values[0]) for block in blocks if block.is_live]
        if family in (POLICY, WEIGHT):
            values = [value for value in values if value]  # no longer served there
        if values:
            metric.add_metric(labels, _merge(family, values))
    return metric


def _merge(family: MetricFamily, values: list[float]) -> float:
    if family.merge_mode == "max":
        return max(values)
    return sum(values) / (len(values) if family.merge_mode == "mean" else 1)


def _of_means(
    family: MetricFamily, means: Mapping[_Labels, RecentMeans], elements: Mapping[_Labels, _Labels]
) -> Metric:
    metric = GaugeMetricFamily(family.name, family.description, labels=family.labels)
    for labels, mean in means.items():
        for more, value in _values(family, mean, elements.get(labels, ())):
            metric.add_metric((*labels, *more), value)
    return metric


def _values(
    family: MetricFamily, mean: RecentMeans, elements: _Labels
) -> Iterator[tuple[_Labels, float]]:
    shifts: Array = mean.shifts
    if family is RECENT_DECISIONS:
        yield (), mean.num
    elif family is EXPLORATION and mean.exploration_rate is not None:
        yield (), mean.exploration_rate
    elif family is LOG_PROB and mean.log_prob is not None:
        yield (), mean.log_prob
    elif family is DRIFT and shifts.size:
        yield ("max",), float(np.abs(shifts).max())
        yield ("mean",), float(np.abs(shifts).mean())
    elif family is SHIFT and len(elements) == shifts.size <= _MAX_SHIFTS:
        yield from (((name,), shift) for name, shift in zip(elements, shifts.tolist(), strict=True))


def _with_zero(
    family: MetricFamily, by_labels: Mapping[_Labels, list[CounterBlock]]
) -> Iterable[tuple[_Labels, list[CounterBlock]]]:
    """Count from 0 what has no labels: a rate needs a number before the first."""
    return by_labels.items() if by_labels or family.labels else [((), [])]
