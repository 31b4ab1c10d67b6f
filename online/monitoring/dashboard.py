"""Dashboard: Grafana's view of online runs, made from what MetricsServer exports.

`python -m replaylake.online.monitoring.dashboard` prints it; docs/grafana/online.json is what that
printed.
"""

from __future__ import annotations

from typing import Any, Final

from replaylake.datastore.maintenance import grafana
from replaylake.datastore.maintenance.grafana import AGE, RATE, Choice, Panel, Query, Row
from replaylake.online.monitoring.metric_families import (
    ENV_STEPS,
    EPISODES,
    EVALUATION,
    LAST_UPDATE_TIME,
    LATENCY,
    LINK_BYTES,
    LINK_ITEMS,
    LINK_SECONDS,
    OTHERS,
    RETURN,
    SAMPLES_PER_INSERT,
    SELECTION,
    STALENESS,
    STEP_RATE,
    UPDATE_RATE,
    UPDATES,
    MetricFamily,
)

_RUN: Final = "{{run_id}}"
# Ids begin with the time, so the newest is first.
_CHOICE: Final = Choice("run", "Run", "run_id", UPDATES.sample, newest_first=True)


def _of(family: MetricFamily, legend: str, *, only: str = "", form: str = "{}") -> Query:
    return Query(family.sample, legend, only, form)


_ROWS: Final[tuple[Row, ...]] = (
    (
        "Now",
        tuple(
            Panel(
                one.description.rstrip("."), (_of(one, _RUN),), one.description, one.unit, 4, "stat"
            )
            for one in (ENV_STEPS, EPISODES, UPDATES, RETURN, STALENESS, LATENCY)
        ),
    ),
    (
        "Learning",
        (
            Panel(
                "Return",
                (
                    _of(RETURN, f"collected {_RUN}"),
                    _of(SELECTION, f"selection {_RUN}"),
                    _of(EVALUATION, f"evaluation {_RUN}"),
                ),
                "As it was collected, exploration included; and of the policy without it.",
            ),
            Panel(
                "Losses",
                (_of(OTHERS, "{{metric}} " + _RUN, only='metric=~".*loss.*"'),),
                "The learner's losses.",
            ),
            Panel(
                "Other metrics of the learner",
                (_of(OTHERS, "{{metric}} " + _RUN, only='metric!~".*loss.*"'),),
                "Whatever else the learner measures, by its name.",
            ),
        ),
    ),
    (
        "Collecting and learning",
        (
            Panel(
                "Rates",
                (
                    _of(STEP_RATE, f"env steps {_RUN}"),
                    _of(UPDATE_RATE, f"updates {_RUN}"),
                ),
                "Environment steps and updates a second.",
                "ops",
            ),
            Panel(
                "Samples per insert",
                (_of(SAMPLES_PER_INSERT, _RUN),),
                "The rate limiter keeps it near what was asked for.",
            ),
            Panel(
                "Staleness",
                (_of(STALENESS, _RUN),),
                "Mean number of policy versions that sampled steps are behind.",
            ),
            Panel(
                "Step taken to samplable",
                (_of(LATENCY, _RUN),),
                "Median.",
                "s",
            ),
            Panel(
                "Silent for",
                (_of(LAST_UPDATE_TIME, _RUN, form=AGE),),
                "Time since a run last had metrics. One whose line keeps rising hangs.",
                "s",
            ),
        ),
    ),
    (
        "Links",
        (
            Panel(
                "Seconds a second, by link",
                (_of(LINK_SECONDS, "{{link}} " + _RUN, form=RATE),),
                "Processes that are busy with a link, or wait, at any moment. The bottleneck is "
                "the busy link of the side that does not wait: `replaylake runs profile` names it.",
                "none",
                is_stacked=True,
            ),
            Panel(
                "Items a second, by link",
                (_of(LINK_ITEMS, "{{link}} " + _RUN, form=RATE),),
                "Steps, shards, batches, updates.",
                "ops",
            ),
            Panel(
                "Bytes a second, by link",
                (_of(LINK_BYTES, "{{link}} " + _RUN, form=RATE),),
                "Written, read, sampled, sent.",
                "Bps",
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    return grafana.dashboard(
        "replaylake-online",
        "ReplayLake: online runs",
        "Runs of `replaylake train online`, from their Prometheus endpoints.",
        _CHOICE,
        _ROWS,
    )


def dashboard_json() -> str:
    """Return the file's text."""
    return grafana.to_text(dashboard())


if __name__ == "__main__":
    print(dashboard_json(), end="")
