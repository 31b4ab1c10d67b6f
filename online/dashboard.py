"""Dashboard: Grafana's view of online runs, made from what MetricsServer exports.

`python -m replaylake.online.dashboard` prints it; docs/grafana/online.json is what it printed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from replaylake.online.exported import (
    ENV_STEPS,
    EPISODES,
    EVALUATION,
    LAST_HEARD,
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
    Exported,
)

# Of Grafana 10; newer ones bring it up to theirs when it is imported.
_SCHEMA_VERSION: Final = 38
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH: Final = 24
_RUN: Final = "{{run_id}}"
_AS_IT_IS: Final = "{}"
_RATE: Final = "rate({}[$__rate_interval])"
_AGE: Final = "time() - {}"


@dataclass(frozen=True)
class _Query:
    family: Exported
    legend: str
    only: str = ""
    form: str = _AS_IT_IS

    @property
    def expr(self) -> str:
        """PromQL, of the runs that are chosen above the panels."""
        chosen = ", ".join(['run_id=~"$run"', *([self.only] if self.only else [])])
        return self.form.format(f"{self.family.sample}{{{chosen}}}")


@dataclass(frozen=True)
class _Panel:
    title: str
    queries: tuple[_Query, ...]
    text: str
    unit: str = "short"
    width: int = 8
    kind: str = "timeseries"
    is_stacked: bool = False


_ROWS: Final[tuple[tuple[str, tuple[_Panel, ...]], ...]] = (
    (
        "Now",
        tuple(
            _Panel(one.text.rstrip("."), (_Query(one, _RUN),), one.text, one.unit, 4, "stat")
            for one in (ENV_STEPS, EPISODES, UPDATES, RETURN, STALENESS, LATENCY)
        ),
    ),
    (
        "Learning",
        (
            _Panel(
                "Return",
                (
                    _Query(RETURN, f"collected {_RUN}"),
                    _Query(SELECTION, f"selection {_RUN}"),
                    _Query(EVALUATION, f"evaluation {_RUN}"),
                ),
                "As it was collected, exploration included; and of the policy without it.",
            ),
            _Panel(
                "Losses",
                (_Query(OTHERS, "{{metric}} " + _RUN, only='metric=~".*loss.*"'),),
                "The learner's losses.",
            ),
            _Panel(
                "Other metrics of the learner",
                (_Query(OTHERS, "{{metric}} " + _RUN, only='metric!~".*loss.*"'),),
                "Whatever else the learner measures, by its name.",
            ),
        ),
    ),
    (
        "Collecting and learning",
        (
            _Panel(
                "Rates",
                (
                    _Query(STEP_RATE, f"env steps {_RUN}"),
                    _Query(UPDATE_RATE, f"updates {_RUN}"),
                ),
                "Environment steps and updates a second.",
                "ops",
            ),
            _Panel(
                "Samples per insert",
                (_Query(SAMPLES_PER_INSERT, _RUN),),
                "The rate limiter keeps it near what was asked for.",
            ),
            _Panel(
                "Staleness",
                (_Query(STALENESS, _RUN),),
                "Mean number of policy versions that sampled steps are behind.",
            ),
            _Panel(
                "Step taken to samplable",
                (_Query(LATENCY, _RUN),),
                "Median.",
                "s",
            ),
            _Panel(
                "Silent for",
                (_Query(LAST_HEARD, _RUN, form=_AGE),),
                "Time since a run last had metrics. One whose line keeps rising hangs.",
                "s",
            ),
        ),
    ),
    (
        "Links",
        (
            _Panel(
                "Seconds a second, by link",
                (_Query(LINK_SECONDS, "{{link}} " + _RUN, form=_RATE),),
                "Processes that are busy with a link, or wait, at any moment. The bottleneck is "
                "the busy link of the side that does not wait: `replaylake profile` names it.",
                "none",
                is_stacked=True,
            ),
            _Panel(
                "Items a second, by link",
                (_Query(LINK_ITEMS, "{{link}} " + _RUN, form=_RATE),),
                "Steps, shards, batches, updates.",
                "ops",
            ),
            _Panel(
                "Bytes a second, by link",
                (_Query(LINK_BYTES, "{{link}} " + _RUN, form=_RATE),),
                "Written, read, sampled, sent.",
                "Bps",
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    return {
        "uid": "replaylake-online",
        "title": "ReplayLake: online runs",
        "description": "Runs of `replaylake train online`, from their Prometheus endpoints.",
        "tags": ["replaylake"],
        "schemaVersion": _SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,  # one cursor over all panels
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": list(_variables())},
        "annotations": {"list": []},
        "links": [],
        "panels": list(_panels()),
    }


def dashboard_json() -> str:
    """Return the file's text."""
    return json.dumps(dashboard(), indent=2) + "\n"


def _variables() -> Iterator[dict[str, Any]]:
    yield {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
        "current": {},
    }
    query = f"label_values({UPDATES.sample}, run_id)"
    yield {
        "name": "run",
        "label": "Run",
        "type": "query",
        "datasource": _SOURCE,
        "definition": query,
        "query": {"query": query, "refId": "runs"},
        "refresh": 2,  # whenever the range of time changes: runs come and go
        "sort": 2,  # ids begin with the time, so the newest is first
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def _panels() -> Iterator[dict[str, Any]]:
    number, top = 0, 0
    for title, panels in _ROWS:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": top, "w": _WIDTH, "h": 1},
            "panels": [],
        }
        top, left = top + 1, 0
        height = 4 if all(panel.kind == "stat" for panel in panels) else 8
        for panel in panels:
            number += 1
            if left + panel.width > _WIDTH:
                top, left = top + height, 0
            place = {"x": left, "y": top, "w": panel.width, "h": height}
            yield _panel(panel, number, place)
            left += panel.width
        top += height


def _panel(panel: _Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    custom: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 30 if panel.is_stacked else 0}
    if panel.is_stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    options: dict[str, Any] = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    if panel.kind == "stat":
        custom = {}
        options = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "options": options,
        "targets": list(_targets(panel.queries)),
    }


def _targets(queries: Sequence[_Query]) -> Iterator[dict[str, Any]]:
    for letter, query in zip("ABCDEFGH", queries, strict=False):
        yield {
            "refId": letter,
            "datasource": _SOURCE,
            "expr": query.expr,
            "legendFormat": query.legend,
            "editorMode": "code",
            "range": True,
        }


if __name__ == "__main__":
    print(dashboard_json(), end="")
