"""The server of `replaylake explore`: one process, from its listening socket to its end."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Final

from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.query.connections import limit_threads
from replaylake.datastore.query.untrusted import keep_spare_sandbox
from replaylake.datastore.storage.arrow_values import keep_pandas_unloaded, return_freed_memory
from replaylake.serve.explorer.app import create_explorer
from replaylake.serve.explorer.config import ExplorerConfig
from replaylake.serve.explorer.visits.promotions import Promote
from replaylake.serve.explorer.visits.token_texts import TokenTexts
from replaylake.serve.http.listener import open_server, run_app

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

    The process has a low priority (nice 10) but for gates, and its queries use one thread. One line
    on stderr says where it is; `on_ready` is then called with the config and the port that it
    listens on. promote: moves an alias through the gate; without it, no page can.

    Raises: NotFoundError if there is no lake; ServeError if the port is in use;
    ConfigInvalidError if other machines could read or write it without a token, and for a
    tokenizer that is none.
    """
    # Before any thread starts. pandas would take 48 MiB, and 0.5 s of the first page.
    keep_pandas_unloaded()
    return_freed_memory()
    token_texts = TokenTexts(config.tokenizers)
    lake = open_lake(config.lake)
    tokens = config.read_tokens(os.environ)
    check = partial(config.check_exposure, tokens=tokens)
    with open_server("explorer", config, on_ready, check_exposure=check) as server:
        app = create_explorer(
            lake,
            tokens=tokens,
            allowed_hosts=config.hosts,
            path_prefix=config.path_prefix,
            read_only=config.read_only,
            token_texts=token_texts,
            promote=promote,
        )
        # Readers may wait; trainers and policy servers of this machine must not. The thread that
        # evaluates gates was started with the app, and keeps its priority.
        os.nice(_NICE)
        limit_threads(1)
        server.announce(f"{lake.url} is at {server.config.url}")
        with keep_spare_sandbox():
            run_app(
                app,
                server.listener,
                lifespan="off",
                drain_s=_DRAIN_S,
                stopping=app.live.stopping,
            )
    return 0
