"""Grafana: a dashboard as Grafana imports it, made from rows of panels.

Stages that never meet have dashboards of one kind, each from its own list of what it exports.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

# Of Grafana 10; newer ones bring it up to theirs when it is imported.
_SCHEMA_VERSION: Final = 38
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH: Final = 24

RATE: Final = "rate({}[$__rate_interval])"
AGE: Final = "time() - {}"


@dataclass(frozen=True)
class Choice:
    """What is chosen above the panels: some of the values of a label.

    name: of the variable. sample: of which the values are listed. newest_first: they begin with
    the time.
    """

    name: str
    title: str
    label: str
    sample: str
    newest_first: bool = False

    @property
    def condition(self) -> str:
        """PromQL, of what is chosen."""
        return f'{self.label}=~"${self.name}"'


@dataclass(frozen=True)
class Query:
    """Samples by their name, all that are chosen or `only` some, in a form such as RATE."""

    sample: str
    legend: str
    only: str = ""
    form: str = "{}"

    def expr(self, choice: Choice) -> str:
        """Return the PromQL."""
        conditions = ", ".join([choice.condition, *([self.only] if self.only else [])])
        return self.form.format(f"{self.sample}{{{conditions}}}")


@dataclass(frozen=True)
class Panel:
    """One panel. unit: Grafana's name of it. width: of 24."""

    title: str
    queries: tuple[Query, ...]
    text: str
    unit: str = "short"
    width: int = 8
    kind: Literal["timeseries", "stat"] = "timeseries"
    is_stacked: bool = False


Row = tuple[str, tuple[Panel, ...]]


def dashboard(
    uid: str, title: str, description: str, choice: Choice, rows: Sequence[Row]
) -> dict[str, Any]:
    return {
        "uid": uid,
        "title": title,
        "description": description,
        "tags": ["replaylake"],
        "schemaVersion": _SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,  # one cursor over all panels
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": list(_variables(choice))},
        "annotations": {"list": []},
        "links": [],
        "panels": list(_panels(rows, choice)),
    }


def to_text(dashboard: dict[str, Any]) -> str:
    return json.dumps(dashboard, indent=2) + "\n"


def _variables(choice: Choice) -> Iterator[dict[str, Any]]:
    yield {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
        "current": {},
    }
    query = f"label_values({choice.sample}, {choice.label})"
    yield {
        "name": choice.name,
        "label": choice.title,
        "type": "query",
        "datasource": _SOURCE,
        "definition": query,
        "query": {"query": query, "refId": f"{choice.name}s"},
        "refresh": 2,  # whenever the range of time changes: they come and go
        "sort": 2 if choice.newest_first else 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def _panels(rows: Sequence[Row], choice: Choice) -> Iterator[dict[str, Any]]:
    number, top = 0, 0
    for title, panels in rows:
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
            yield _panel(panel, number, place, choice)
            left += panel.width
        top += height


def _panel(panel: Panel, number: int, place: dict[str, int], choice: Choice) -> dict[str, Any]:
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
        "targets": [
            {
                "refId": letter,
                "datasource": _SOURCE,
                "expr": query.expr(choice),
                "legendFormat": query.legend,
                "editorMode": "code",
                "range": True,
            }
            for letter, query in zip("ABCDEFGH", panel.queries, strict=False)
        ],
    }
