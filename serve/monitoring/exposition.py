"""Exposition: the numbers of all workers as Prometheus text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from replaylake.datastore.episodes.spaces import Array
from replaylake.serve.monitoring.cells import Block
from replaylake.serve.monitoring.exported import (
    DRIFT,
    EXPLORATION,
    EXPORTED,
    LOG_PROB,
    POLICY,
    RECENT_DECISIONS,
    SHIFT,
    WEIGHT,
    Family,
)
from replaylake.serve.monitoring.recent import RECENT, Means, joined

# Each is a time series of every version.
_MAX_SHIFTS: Final = 64
# Means of fewer say nothing more.
_LEAST_DECISIONS: Final = 0.01
_Labels = tuple[str, ...]


def exposition(blocks: Sequence[Block], elements: Mapping[_Labels, _Labels], now_s: float) -> bytes:
    """Return the text. elements: by (policy, version), what those of its observation are called."""
    registry = CollectorRegistry()
    registry.register(_Collected(list(_families(blocks, elements, now_s))))
    return generate_latest(registry)


class _Collected(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _families(
    blocks: Sequence[Block], elements: Mapping[_Labels, _Labels], now_s: float
) -> Iterator[Metric]:
    found: dict[str, dict[_Labels, list[Block]]] = defaultdict(lambda: defaultdict(list))
    for block in blocks:
        name, labels = block.key
        found[name][labels].append(block)
    means: dict[_Labels, Means] = {}
    for labels, some in found.pop(RECENT, {}).items():
        if live := [block.values for block in some if block.is_live]:
            width = max(map(len, live))
            recent = Means(joined([sums for sums in live if len(sums) == width], now_s))
            if recent.num >= _LEAST_DECISIONS:
                means[labels] = recent
    for family in EXPORTED:
        if family.kind == "counter":
            yield _counter(family, found[family.name])
        elif family.kind == "histogram":
            yield _histogram(family, found[family.name])
        elif family in (EXPLORATION, LOG_PROB, RECENT_DECISIONS, DRIFT, SHIFT):
            yield _of_means(family, means, elements)
        else:
            yield _gauge(family, found[family.name])


def _counter(family: Family, found: Mapping[_Labels, list[Block]]) -> Metric:
    metric = CounterMetricFamily(family.name, family.text, labels=family.labels)
    for labels, blocks in _with_zero(family, found):
        metric.add_metric(labels, float(sum(block.values[0] for block in blocks)))
    return metric


def _histogram(family: Family, found: Mapping[_Labels, list[Block]]) -> Metric:
    metric = HistogramMetricFamily(family.name, family.text, labels=family.labels)
    bounds = [*(f"{bound!r}" for bound in family.buckets), "+Inf"]
    for labels, blocks in _with_zero(family, found):
        total = np.sum([block.values for block in blocks], axis=0) if blocks else np.zeros(0)
        total = np.resize(total, len(bounds) + 1) if total.size else np.zeros(len(bounds) + 1)
        counts = np.cumsum(total[:-1]).tolist()
        buckets = list(zip(bounds, counts, strict=True))
        metric.add_metric(labels, buckets=buckets, sum_value=float(total[-1]))
    return metric


def _gauge(family: Family, found: Mapping[_Labels, list[Block]]) -> Metric:
    metric = GaugeMetricFamily(family.name, family.text, labels=family.labels)
    for labels, blocks in found.items():
        values = [float(block.values[0]) for block in blocks if block.is_live]
        if family in (POLICY, WEIGHT):
            values = [value for value in values if value]  # no longer served there
        if values:
            metric.add_metric(labels, _joined(family, values))
    return metric


def _joined(family: Family, values: list[float]) -> float:
    if family.joined == "max":
        return max(values)
    return sum(values) / (len(values) if family.joined == "mean" else 1)


def _of_means(
    family: Family, means: Mapping[_Labels, Means], elements: Mapping[_Labels, _Labels]
) -> Metric:
    metric = GaugeMetricFamily(family.name, family.text, labels=family.labels)
    for labels, mean in means.items():
        for more, value in _values(family, mean, elements.get(labels, ())):
            metric.add_metric((*labels, *more), value)
    return metric


def _values(family: Family, mean: Means, elements: _Labels) -> Iterator[tuple[_Labels, float]]:
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
    family: Family, found: Mapping[_Labels, list[Block]]
) -> Iterable[tuple[_Labels, list[Block]]]:
    """Count from 0 what has no labels: a rate needs a number before the first."""
    return found.items() if found or family.labels else [((), [])]
