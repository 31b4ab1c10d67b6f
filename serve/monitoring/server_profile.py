"""Server profile: the links of a server's workers, from what it exposes at /metrics."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.lake.runs.run_profile import ProcessProfile, build_process_profile
from replaylake.serve.monitoring.link_times import SERVER_LINKS, to_timings
from replaylake.serve.monitoring.metric_families import (
    LINK_BYTES,
    LINK_ITEMS,
    LINK_SECONDS,
    WORKER_SECONDS,
)
from replaylake.serve.transport import RequestFailedError, ServerUnreachableError

_TIMEOUT_S: Final = 10.0
_FAMILIES: Final = (LINK_SECONDS, LINK_ITEMS, LINK_BYTES)
# By family and (place, link).
Totals = Mapping[tuple[str, tuple[str, ...]], float]


def measure_server(url: str, *, token: str | None = None, seconds: float = 0.0) -> ProcessProfile:
    """Return where the time of a server's workers went.

    Args:
        url: of the server, such as http://127.0.0.1:3000.
        token: of role admin, where the server has tokens.
        seconds: how long to watch it; 0 for the time since its workers started.

    Raises: ServerUnreachableError; RequestFailedError for a refusal; ConfigInvalidError for another
    URL, or for a server without these metrics.
    """
    before: Totals = {}
    if seconds:
        before = _read_totals(url, token)
        time.sleep(seconds)
    after = _read_totals(url, token)
    grown = {key: value - before.get(key, 0.0) for key, value in after.items()}
    values = {
        labels: tuple(grown.get((family.name, labels), 0.0) for family in _FAMILIES)
        for labels in SERVER_LINKS
    }
    if min(grown.values()) < 0:
        raise ServerUnreachableError(
            f"{url}: restarted while it was watched. Run the command again."
        )
    # A rate over no time at all would say nothing.
    wall_s = max(1e-6, grown[WORKER_SECONDS.name, ()])
    return build_process_profile(to_timings(values), wall_s)


def _read_totals(url: str, token: str | None) -> Totals:
    text = _fetch(f"{url.rstrip('/')}/metrics", token)
    totals: dict[tuple[str, tuple[str, ...]], float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    labels = tuple(sample.labels.get(name, "") for name in ("place", "link"))
                    totals[family.name, labels if any(labels) else ()] = sample.value
    except ValueError:  # no page of Prometheus: it lacks what is looked for below
        totals.clear()
    if (WORKER_SECONDS.name, ()) not in totals:
        raise ConfigInvalidError(
            f"{url}: found no {WORKER_SECONDS.name}_total at /metrics, expected a server of this "
            "version of ReplayLake. Check the URL."
        )
    return totals


def _fetch(url: str, token: str | None) -> str:
    if not url.startswith(("http://", "https://")):
        raise ConfigInvalidError(f"server: found {url!r}, expected a URL of http or https.")
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            return str(response.read().decode(errors="replace"))
    except urllib.error.HTTPError as error:
        raise RequestFailedError(error.code, "metrics", f"{url} refused: {error.reason}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ServerUnreachableError(
            f"{url}: {error}, no response. Check that the server runs and that this is its URL."
        ) from error
