"""Dashboard: Grafana's view of servers, made from what /metrics exports.

`python -m replaylake.serve.monitoring.dashboard` prints it; docs/grafana/serving.json is what it
printed.
"""

from __future__ import annotations

from typing import Any, Final

from replaylake.datastore.maintenance import grafana
from replaylake.datastore.maintenance.grafana import RATE, Choice, Panel, Query, Row
from replaylake.serve.monitoring.metric_families import (
    DECISIONS,
    DRIFT,
    EXPLORATION,
    FEEDBACK,
    FEEDBACK_LAG,
    JOINED,
    LATENCY,
    LOG_FAILURES,
    LOG_LOST,
    LOG_PROB,
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
    UNREACHABLE,
    WEIGHT,
    WORKER_STARTS,
    WORKERS,
    MetricFamily,
)

# Prometheus names what it scraped; our own samples do not say where they are from.
_SERVER: Final = Choice("server", "Server", "instance", WORKERS.sample)
_AT: Final = "{{instance}}"
_VERSION: Final = "{{policy}}:{{version}} " + _AT
_ALIAS: Final = "{{policy}}@{{alias}} " + _AT
_COUNT: Final = "sum by (instance) ({})"
_SUM_RATE: Final = "sum by (instance) (rate({}[$__rate_interval]))"


def _quantile(share: float, *by: str) -> str:
    labels = ", ".join(("le", "instance", *by))
    return f"histogram_quantile({share}, sum by ({labels}) (rate({{}}[$__rate_interval])))"


def _one(family: MetricFamily, legend: str, *, only: str = "", form: str = "{}") -> Query:
    return Query(family.sample, legend, only, form)


def _stat(family: MetricFamily, form: str = "{}") -> Panel:
    text = family.description.rstrip(".")
    title = text if len(text) < 40 else family.name.removeprefix("replaylake_").replace("_", " ")
    return Panel(title, (_one(family, _AT, form=form),), family.description, family.unit, 4, "stat")


_ROWS: Final[tuple[Row, ...]] = (
    (
        "Now",
        (
            _stat(WORKERS),
            Panel(
                "Version served",
                (_one(POLICY, "{{policy}}:{{version}} ({{reference}}) " + _AT),),
                POLICY.description,
                width=8,
                kind="stat",
            ),
            _stat(QUEUE),
            _stat(JOINED),
            _stat(LOG_FAILURES, _COUNT),
        ),
    ),
    (
        "Requests",
        (
            Panel(
                "Requests a second",
                (_one(REQUESTS, "{{route}} {{status}} " + _AT, form=RATE),),
                "By route and status.",
                "reqps",
                is_stacked=True,
            ),
            Panel(
                "Time to the answer",
                (
                    _one(LATENCY, "{{route}} median " + _AT, form=_quantile(0.5, "route")),
                    _one(LATENCY, "{{route}} 99% " + _AT, form=_quantile(0.99, "route")),
                ),
                "Median and 99th percentile, of the buckets that /metrics has.",
                "s",
            ),
            Panel(
                "Queue",
                (_one(QUEUE, f"worked on {_AT}"), _one(QUEUE_LIMIT, f"limit {_AT}")),
                "At the limit one more request is answered 503.",
            ),
            Panel(
                "Connections refused a second",
                (
                    _one(
                        REFUSED_CONNECTIONS,
                        "{{status}} " + _AT,
                        form="sum by (instance, status) (rate({}[$__rate_interval]))",
                    ),
                ),
                REFUSED_CONNECTIONS.description,
                "ops",
            ),
            Panel(
                "Refused as another site's, a second",
                (
                    _one(
                        REFUSED_HEADERS,
                        "{{header}} " + _AT,
                        form="sum by (instance, header) (rate({}[$__rate_interval]))",
                    ),
                ),
                REFUSED_HEADERS.description,
                "ops",
            ),
            Panel("Workers started", (_one(WORKER_STARTS, _AT),), WORKER_STARTS.description),
        ),
    ),
    (
        "Versions",
        (
            Panel(
                "Decisions a second",
                (
                    _one(
                        DECISIONS,
                        _VERSION,
                        form="sum by (instance, policy, version) (rate({}[$__rate_interval]))",
                    ),
                ),
                "By the version that took them: a new version takes over in seconds.",
                "ops",
                is_stacked=True,
            ),
            Panel("Share of episodes", (_one(WEIGHT, _VERSION),), WEIGHT.description, WEIGHT.unit),
            Panel(
                "Reloads",
                (
                    _one(RELOADS, "{{result}} " + _ALIAS),
                    _one(REFUSED, f"refused version {_ALIAS}"),
                    _one(UNREACHABLE, f"unreachable {_ALIAS}"),
                ),
                "Versions that were served or refused; the log and /policy say why.",
            ),
        ),
    ),
    (
        "How it acts",
        (
            Panel(
                "Exploration",
                (_one(EXPLORATION, _VERSION),),
                EXPLORATION.description,
                EXPLORATION.unit,
            ),
            Panel(
                "Mean log-probability", (_one(LOG_PROB, _VERSION),), LOG_PROB.description, "none"
            ),
            Panel(
                "Observations, against those of training",
                (_one(DRIFT, "{{over}} " + _VERSION),),
                DRIFT.description,
                "none",
            ),
            Panel(
                "By element",
                (_one(SHIFT, "{{element}} " + _VERSION),),
                SHIFT.description,
                "none",
                16,
            ),
            Panel("Of how many decisions", (_one(RECENT_DECISIONS, _VERSION),), "Of the means."),
        ),
    ),
    (
        "Feedback and the log",
        (
            Panel(
                "Rewards a second",
                (_one(FEEDBACK, _AT, form=RATE),),
                FEEDBACK.description,
                "ops",
            ),
            Panel(
                "From decision to reward",
                (
                    _one(FEEDBACK_LAG, f"median {_AT}", form=_quantile(0.5)),
                    _one(FEEDBACK_LAG, f"90% {_AT}", form=_quantile(0.9)),
                ),
                FEEDBACK_LAG.description,
                "s",
            ),
            Panel(
                "Joined",
                (_one(JOINED, f"joined {_AT}"),),
                JOINED.description,
                JOINED.unit,
            ),
            Panel("Rewards without a decision", (_one(ORPHANED, _AT),), ORPHANED.description),
            Panel("Set aside", (_one(SET_ASIDE, _AT),), SET_ASIDE.description),
            Panel(
                "Waiting for their commit",
                (_one(PENDING, "{{table}} " + _AT),),
                PENDING.description,
            ),
            Panel(
                "Not logged",
                (
                    _one(LOG_FAILURES, f"refused {_AT}", form=_SUM_RATE),
                    _one(LOG_LOST, f"lost {_AT}", form=_SUM_RATE),
                ),
                "Requests refused, and decisions or rewards answered all the same, a second.",
                "ops",
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    return grafana.dashboard(
        "replaylake-serving",
        "ReplayLake: serving",
        "Servers of `replaylake serve`, from their /metrics.",
        _SERVER,
        _ROWS,
    )


if __name__ == "__main__":
    print(grafana.to_text(dashboard()), end="")
