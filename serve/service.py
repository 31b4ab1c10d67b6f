"""The BentoML service around the app: what BentoML's worker processes run.

BentoML's own metrics, tracing and access log are off: they cost seven times what a request does,
and its /metrics would hide ours.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from typing import Final

import bentoml

from replaylake.serve.app import create_app
from replaylake.serve.config import state_key
from replaylake.serve.http.connections import limit_connections
from replaylake.serve.processes.launch import SUPERVISOR, watch_parent
from replaylake.serve.processes.worker import load
from replaylake.serve.safety.limits import Safety

# Where `replaylake serve` has not set it: the process that watches the workers imports this first,
# and they have its environment.
os.environ["REPLAYLAKE_SERVE_STATE_KEY"] = state_key()
app = create_app(load)
# Here, because BentoML's uvicorn has chosen its protocol by the time it makes a PolicyService.
_SAFETY: Final = Safety.from_environment(os.environ)
limit_connections(_SAFETY.connection_limits)
# BentoML answers a request itself if the app has not by then; its default of 60 s would cut short
# a longer deadline.
_TIMEOUT_S: Final = math.ceil(_SAFETY.deadline_s) + 5


@bentoml.service(
    name="replaylake_policy",
    workers=int(os.environ.get("REPLAYLAKE_SERVE_WORKERS", "1")),
    metrics={"enabled": False},
    logging={"access": {"enabled": False}},
    tracing={"excluded_urls": ".*"},
    runner_probe={"enabled": False},
    traffic={"timeout": _TIMEOUT_S},
)
@bentoml.asgi_app(app, path="/")
class PolicyService:
    """A policy, its decisions and their rewards."""

    def __init__(self) -> None:
        _redirect_logs_to_stderr()
        if SUPERVISOR not in os.environ:  # under `bentoml serve`, where nothing watches yet
            watch_parent()

    async def __is_alive__(self) -> bool:
        return True

    async def __is_ready__(self) -> bool:
        return bool(app.state.is_ready())


def _redirect_logs_to_stderr() -> None:
    """Move BentoML's log lines off stdout, which is for data, and drop its narration."""
    logging.getLogger("bentoml").setLevel(logging.WARNING)
    for name in (None, "bentoml", "uvicorn.error", "circus"):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
                handler.setStream(sys.stderr)
