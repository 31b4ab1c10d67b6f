"""A worker process: what both servers do in it, and the whole of the one that is uvicorn alone."""

from __future__ import annotations

import logging
import os
import socket
import sys
from typing import Final

import uvicorn

from replaylake.serve.app import create_app
from replaylake.serve.config import ServeConfig
from replaylake.serve.http.connections import limit_connections
from replaylake.serve.http.listener import BACKLOG, shorten_thread_turns
from replaylake.serve.loading import load_serving
from replaylake.serve.processes.launch import STOP_TIMEOUT_S
from replaylake.serve.safety.access_log import AccessLog
from replaylake.serve.serving_state import ServingState

_logger = logging.getLogger(__name__)
# As BentoML's lines look: when, how bad, and which of the workers says so.
_LOG_FORMAT: Final = "%(asctime)s [%(levelname)s] [worker %(process)d] %(message)s"


def load() -> ServingState:
    """Load what this worker's environment names. Raises: as load_serving, ConfigInvalidError."""
    config = ServeConfig.from_environment(os.environ)
    shorten_thread_turns()
    tokens = config.safety.tokens(config.log_to)
    target = config.safety.access_log
    access_log = None if target is None else AccessLog(target)
    serving = load_serving(config)
    if config.manifest_sha256 is None:
        _logger.warning(
            "package %s: served without a known sha256; it has %s. Set "
            "REPLAYLAKE_SERVE_MANIFEST_SHA256 to that to refuse any other",
            config.package,
            serving.router.one.sha256,
        )
    serving.limits, serving.tokens, serving.access_log = config.safety.limits, tokens, access_log
    serving.hosts = config.allowed_hosts
    return serving


def main() -> None:
    """Serve with uvicorn on the listening socket whose descriptor is the argument."""
    logging.basicConfig(format=_LOG_FORMAT, datefmt="%Y-%m-%dT%H:%M:%S%z")
    config = ServeConfig.from_environment(os.environ)
    limit_connections(config.safety.connection_limits)
    settings = uvicorn.Config(
        create_app(load),
        loop="uvloop",
        lifespan="on",
        ws="none",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=STOP_TIMEOUT_S,
    )
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        uvicorn.Server(settings).run(sockets=[listener])


if __name__ == "__main__":
    main()
