"""The metric families that a server exposes at /metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["counter", "gauge", "histogram"]
# How a gauge of several workers is one: those of workers that are gone do not count.
MergeMode = Literal["sum", "mean", "max"]
_VERSION: Final = ("policy", "version")


@dataclass(frozen=True)
class MetricFamily:
    """One family: its samples differ by their labels alone.

    name: without the `_total` that Prometheus adds to a counter. buckets: the upper bounds of a
    histogram, ascending.
    """

    name: str
    kind: Kind
    description: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    merge_mode: MergeMode = "sum"


REQUESTS: Final = MetricFamily(
    "replaylake_requests",
    "counter",
    "Requests answered, by route and status.",
    ("route", "status"),
)
LATENCY: Final = MetricFamily(
    "replaylake_request_seconds",
    "histogram",
    "Time from the request's arrival to its answer, by route.",
    ("route",),
    # From a tiny policy on a quiet machine to one that is in trouble.
    (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0),
)
REFUSED_CONNECTIONS: Final = MetricFamily(
    "replaylake_refused_connections",
    "counter",
    "Connections closed before a complete request was received, by the status sent.",
    ("status",),
)
REFUSED_HEADERS: Final = MetricFamily(
    "replaylake_refused_headers",
    "counter",
    "Requests refused by their Host, Origin or Content-Type header, by that header.",
    ("header",),
)
QUEUE: Final = MetricFamily(
    "replaylake_queue_requests", "gauge", "Requests in progress, in all workers together."
)
QUEUE_LIMIT: Final = MetricFamily(
    "replaylake_queue_limit",
    "gauge",
    "Maximum number of requests in progress; more are refused with 503.",
)
DECISIONS: Final = MetricFamily(
    "replaylake_decisions",
    "counter",
    "Observations acted on, by policy version and whether the action was the mode.",
    (*_VERSION, "deterministic"),
)
POLICY: Final = MetricFamily(
    "replaylake_policy_info",
    "gauge",
    "Workers that serve this version, by the reference that selected it.",
    (*_VERSION, "reference"),
)
WEIGHT: Final = MetricFamily(
    "replaylake_policy_weight",
    "gauge",
    "Share of the episodes that this version serves.",
    (*_VERSION, "reference"),
    merge_mode="mean",
)
RELOADS: Final = MetricFamily(
    "replaylake_reloads",
    "counter",
    "Versions that an alias moved to, by result (served or refused); counted per worker.",
    ("policy", "alias", "result"),
)
REFUSED: Final = MetricFamily(
    "replaylake_refused_version",
    "gauge",
    "Version that an alias points to and that failed its checks; 0 if there is none.",
    ("policy", "alias"),
    merge_mode="max",
)
UNREACHABLE: Final = MetricFamily(
    "replaylake_follow_failing",
    "gauge",
    "Workers that cannot read which version an alias points to.",
    ("policy", "alias"),
)
EXPLORATION: Final = MetricFamily(
    "replaylake_exploration_rate",
    "gauge",
    "Share of recent decisions that were not the policy's best action.",
    _VERSION,
)
LOG_PROB: Final = MetricFamily(
    "replaylake_log_prob_mean",
    "gauge",
    "Mean log-probability of recent actions, in nats.",
    _VERSION,
)
DRIFT: Final = MetricFamily(
    "replaylake_observation_drift",
    "gauge",
    "Distance of the mean of recent observations from the mean of the training steps, in standard "
    "deviations of the training steps: the largest over elements, and the mean over elements.",
    (*_VERSION, "over"),
)
SHIFT: Final = MetricFamily(
    "replaylake_observation_shift",
    "gauge",
    "Signed distance of each element, for observations with at most 64 elements.",
    (*_VERSION, "element"),
)
RECENT_DECISIONS: Final = MetricFamily(
    "replaylake_recent_decisions",
    "gauge",
    "Number of decisions in the recent means; older decisions have less weight.",
    _VERSION,
)
UNKNOWN_CATEGORIES: Final = MetricFamily(
    "replaylake_unknown_categories",
    "counter",
    "Texts in named fields that the policy's vocabulary does not have, by field; encoded as other.",
    ("field",),
)
FEEDBACK: Final = MetricFamily("replaylake_feedback", "counter", "Rewards accepted.")
FEEDBACK_LAG: Final = MetricFamily(
    "replaylake_feedback_lag_seconds",
    "histogram",
    "Time from a decision to a reward for it.",
    (),
    (0.01, 0.1, 1.0, 10.0, 60.0, 600.0, 3600.0, 21600.0, 86400.0, 604800.0),
)
JOINED: Final = MetricFamily(
    "replaylake_joined_ratio",
    "gauge",
    "Share of all logged decisions that have a reward, as counted by the last `feedback join`.",
    (),
    merge_mode="max",
)
ORPHANED: Final = MetricFamily(
    "replaylake_orphaned_rewards",
    "gauge",
    "Rewards without a decision, as counted by the last `feedback join`.",
    merge_mode="max",
)
SET_ASIDE: Final = MetricFamily(
    "replaylake_set_aside_decisions",
    "gauge",
    "Decisions and received steps set aside as invalid steps by the last `feedback join`.",
    merge_mode="max",
)
JOIN_FAILURES: Final = MetricFamily(
    "replaylake_join_failures",
    "counter",
    "Rounds of the feedback join that failed, and joining processes that ended.",
)
LOG_FAILURES: Final = MetricFamily(
    "replaylake_log_failures",
    "counter",
    "Requests refused because the decision log could not be written.",
)
LOG_LOST: Final = MetricFamily(
    "replaylake_log_lost",
    "counter",
    "Decisions that were served although the log could not be written.",
)
PENDING: Final = MetricFamily(
    "replaylake_log_pending_rows",
    "gauge",
    "Rows written to a journal and not yet committed to the lake, by table.",
    ("table",),
)
COMMIT_FAILURES: Final = MetricFamily(
    "replaylake_commit_failures",
    "counter",
    "Commits of journals that failed and are tried again, by table.",
    ("table",),
)
WORKERS: Final = MetricFamily("replaylake_workers", "gauge", "Workers that are alive.")
WORKER_STARTS: Final = MetricFamily(
    "replaylake_worker_starts",
    "counter",
    "Workers that were started, including replacements of workers that ended.",
)
LINK_SECONDS: Final = MetricFamily(
    "replaylake_link_seconds",
    "counter",
    "Time of the workers' event loops by link; place background: other threads, waits for batches.",
    ("place", "link"),
)
LINK_ITEMS: Final = MetricFamily(
    "replaylake_link_items", "counter", "Items of each link: packets, requests, observations.",
    ("place", "link"),
)  # fmt: skip
LINK_BYTES: Final = MetricFamily(
    "replaylake_link_bytes", "counter", "Bytes that each link moved.", ("place", "link")
)
WORKER_SECONDS: Final = MetricFamily(
    "replaylake_worker_seconds", "counter", "Time since each worker began to serve, added up."
)
METRIC_FAMILIES: Final = (
    REQUESTS,
    LATENCY,
    REFUSED_CONNECTIONS,
    REFUSED_HEADERS,
    QUEUE,
    QUEUE_LIMIT,
    DECISIONS,
    POLICY,
    WEIGHT,
    RELOADS,
    REFUSED,
    UNREACHABLE,
    EXPLORATION,
    LOG_PROB,
    DRIFT,
    SHIFT,
    RECENT_DECISIONS,
    UNKNOWN_CATEGORIES,
    FEEDBACK,
    FEEDBACK_LAG,
    JOINED,
    ORPHANED,
    SET_ASIDE,
    JOIN_FAILURES,
    LOG_FAILURES,
    LOG_LOST,
    PENDING,
    COMMIT_FAILURES,
    WORKERS,
    WORKER_STARTS,
    LINK_SECONDS,
    LINK_ITEMS,
    LINK_BYTES,
    WORKER_SECONDS,
)
