"""Exported: a run's metrics as Prometheus has them; the endpoint and the dashboard go by it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from replaylake.online.monitoring.timings import PROFILE

Kind = Literal["counter", "gauge"]
RUN_LABELS: Final = ("run_id", "policy", "env")


@dataclass(frozen=True)
class MetricFamily:
    """One family.

    name: without the `_total` that Prometheus adds to a counter. metric_name: the run's metric;
    empty where it is none, but goes with all. unit: Grafana's name of what one is. scale: of the
    exported number to the run's, as Prometheus has base units.
    """

    name: str
    kind: Kind
    metric_name: str
    description: str
    unit: str = "short"
    scale: float = 1.0
    label: str | None = None

    @property
    def sample(self) -> str:
        """The name that its samples have, and that a query asks for."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


UPDATES: Final = MetricFamily("replaylake_run_updates", "counter", "", "Updates of the learner.")
ENV_STEPS: Final = MetricFamily(
    "replaylake_run_env_steps", "counter", "env_steps", "Environment steps taken."
)
EPISODES: Final = MetricFamily("replaylake_run_episodes", "counter", "episodes", "Episodes ended.")
RETURN: Final = MetricFamily(
    "replaylake_run_return", "gauge", "return", "Mean return of the last 100 episodes."
)
EVALUATION: Final = MetricFamily(
    "replaylake_run_evaluation_return",
    "gauge",
    "evaluation/return",
    "Mean return of the policy that was chosen, on seeds of its own.",
)
SELECTION: Final = MetricFamily(
    "replaylake_run_selection_environment",
    "gauge",
    "selection/environment",
    "Mean return that the policy is chosen by.",
)
STALENESS: Final = MetricFamily(
    "replaylake_run_staleness_versions",
    "gauge",
    "staleness",
    "Mean number of policy versions that sampled steps are behind.",
)
SAMPLES_PER_INSERT: Final = MetricFamily(
    "replaylake_run_samples_per_insert",
    "gauge",
    "samples_per_insert",
    "Steps sampled for each step that came.",
)
LATENCY: Final = MetricFamily(
    "replaylake_run_latency_seconds",
    "gauge",
    "latency_ms",
    "Median time from a step taken to that step samplable.",
    "s",
    0.001,
)
UPDATE_RATE: Final = MetricFamily(
    "replaylake_run_updates_per_second",
    "gauge",
    "updates_per_s",
    "Updates a second, as the run measured them.",
    "ops",
)
STEP_RATE: Final = MetricFamily(
    "replaylake_run_env_steps_per_second",
    "gauge",
    "steps_per_s",
    "Environment steps a second, as the run measured them.",
    "ops",
)
LINK_SECONDS: Final = MetricFamily(
    "replaylake_run_link_seconds",
    "counter",
    f"{PROFILE}/*/seconds",
    "Seconds that a link took, of all processes together.",
    "s",
    label="link",
)
LINK_ITEMS: Final = MetricFamily(
    "replaylake_run_link_items",
    "counter",
    f"{PROFILE}/*/items",
    "Items (steps, shards, batches, ...) that passed a link.",
    label="link",
)
LINK_BYTES: Final = MetricFamily(
    "replaylake_run_link_bytes",
    "counter",
    f"{PROFILE}/*/bytes",
    "Bytes that passed a link.",
    "bytes",
    label="link",
)
OTHERS: Final = MetricFamily(
    "replaylake_run_metric",
    "gauge",
    "*",
    "Any other metric of the run, such as the learner's losses, by its name.",
    label="metric",
)
LAST_UPDATE_TIME: Final = MetricFamily(
    "replaylake_run_last_metrics_timestamp_seconds",
    "gauge",
    "",
    "When the run last had metrics, in seconds since 1970.",
    "dateTimeAsIso",
)
METRIC_FAMILIES: Final = (
    UPDATES,
    ENV_STEPS,
    EPISODES,
    RETURN,
    EVALUATION,
    SELECTION,
    STALENESS,
    SAMPLES_PER_INSERT,
    LATENCY,
    UPDATE_RATE,
    STEP_RATE,
    LINK_SECONDS,
    LINK_ITEMS,
    LINK_BYTES,
    OTHERS,
    LAST_UPDATE_TIME,
)
_BY_METRIC: Final = {
    one.metric_name: one for one in METRIC_FAMILIES if one.label is None and one.metric_name
}
_BY_LINK: Final = {one.metric_name: one for one in METRIC_FAMILIES if one.label == "link"}


def iter_samples(values: Mapping[str, float]) -> Iterator[tuple[MetricFamily, str | None, float]]:
    """Yield (family, its label's value, number) for each of a run's metrics, by name."""
    for name, value in values.items():
        if (family := _BY_METRIC.get(name)) is not None:
            yield family, None, value * family.scale
            continue
        first, _, rest = name.partition("/")
        link, _, what = rest.rpartition("/")
        family = _BY_LINK.get(f"{PROFILE}/*/{what}") if first == PROFILE and link else None
        if family is not None:
            yield family, link, value
        else:
            yield OTHERS, name, value


def labels_of(family: MetricFamily) -> Iterable[str]:
    """Return the names of a family's labels, in order."""
    return RUN_LABELS if family.label is None else (*RUN_LABELS, family.label)
