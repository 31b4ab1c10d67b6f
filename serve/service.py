"""The BentoML service around the app: what each worker process runs.

The process that watches the workers imports this too, for the service's definition; the policy is
loaded only where the app starts. BentoML's own metrics, tracing and access log are off: they cost
seven times what a request does, and its /metrics would hide ours.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time

import bentoml

from replaylake.serve.app import create_app
from replaylake.serve.config import ServeConfig
from replaylake.serve.loading import load_serving

_ORPHAN_CHECK_S = 0.5

app = create_app(lambda: load_serving(ServeConfig.from_environment(os.environ)))


@bentoml.service(
    name="replaylake_policy",
    workers=int(os.environ.get("REPLAYLAKE_SERVE_WORKERS", "1")),
    metrics={"enabled": False},
    logging={"access": {"enabled": False}},
    tracing={"excluded_urls": ".*"},
    runner_probe={"enabled": False},
)
@bentoml.asgi_app(app, path="/")
class PolicyService:
    """A policy, its decisions and their rewards."""

    def __init__(self) -> None:
        _talk_on_stderr()
        threading.Thread(target=_stop_when_orphaned, name="orphan-watch", daemon=True).start()

    async def __is_alive__(self) -> bool:
        return True

    async def __is_ready__(self) -> bool:
        return bool(app.state.is_ready())


def _stop_when_orphaned() -> None:
    """Stop when the process that watches us is gone: nobody else would, and we hold its port."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(_ORPHAN_CHECK_S)
    os.kill(os.getpid(), signal.SIGTERM)


def _talk_on_stderr() -> None:
    """Move BentoML's log lines off stdout, which is for data, and drop its narration."""
    logging.getLogger("bentoml").setLevel(logging.WARNING)
    for name in (None, "bentoml", "uvicorn.error", "circus"):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
                handler.setStream(sys.stderr)
