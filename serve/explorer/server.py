"""The server of `replaylake explore`: one process, from its listening socket to its end."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.query.connections import limit_threads
from replaylake.datastore.query.untrusted import keep_spare_sandbox
from replaylake.datastore.storage.arrow_values import keep_pandas_unloaded, return_freed_memory
from replaylake.serve.explorer.app import create_explorer
from replaylake.serve.explorer.config import ExplorerConfig
from replaylake.serve.explorer.visits.promotions import Promote
from replaylake.serve.explorer.visits.token_texts import TokenTexts
from replaylake.serve.http.listener import open_listener, resolve_host, run_app

_LOG_FORMAT: Final = "%(asctime)s [%(levelname)s] [explorer] %(message)s"
# A page takes seconds at most; what is open longer is cut.
_DRAIN_S: Final = 3
_NICE: Final = 10


def run_explorer(
    config: ExplorerConfig,
    on_ready: Callable[[ExplorerConfig], None] | None = None,
    *,
    promote: Promote | None = None,
) -> int:
    """Show a lake's pages until SIGINT or SIGTERM, then return 0.

    The process has a low priority (nice 10), and its queries use one thread. One line on stderr
    says where it is; `on_ready` is then called with the config and the port that it listens on.
    promote: moves an alias through the gate; without it, no page can.

    Raises: NotFoundError if there is no lake; ServeError if the port is in use;
    ConfigInvalidError if other machines could read or write it without a token, and for a
    tokenizer that is none.
    """
    # Before anything starts a thread. pandas takes 48 MiB, and half a second of the first page.
    keep_pandas_unloaded()
    return_freed_memory()
    token_texts = TokenTexts(config.tokenizers)
    lake = open_lake(config.lake)
    address = resolve_host(config.host)
    tokens = config.read_tokens(os.environ)
    config.check_exposure(address, tokens)
    with open_listener(address, config.port) as listener:
        config = replace(config, port=listener.getsockname()[1])
        logging.basicConfig(format=_LOG_FORMAT, datefmt="%Y-%m-%dT%H:%M:%S%z")
        app = create_explorer(
            lake,
            tokens=tokens,
            allowed_hosts=config.hosts,
            path_prefix=config.path_prefix,
            read_only=config.read_only,
            token_texts=token_texts,
            promote=promote,
        )
        sys.stderr.write(f"{lake.url} is at {config.url}; stop with Ctrl-C\n")
        sys.stderr.flush()
        # Whoever looks may wait; trainers and policy servers of this machine must not.
        os.nice(_NICE)
        limit_threads(1)
        if on_ready is not None:
            on_ready(config)
        with keep_spare_sandbox():
            run_app(
                app,
                listener,
                lifespan="off",
                drain_s=_DRAIN_S,
                stopping=app.live.stopping,
            )
    return 0
