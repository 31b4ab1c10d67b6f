"""Where a Bento listens, whoever says so: checked before it does.

`bentoml serve --host`, BENTOML_HOST and BentoML's own configuration go before what the Bento says
of itself, and BentoML tells the service of none of them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

import click

from replaylake.serve.http.listener import resolve_host
from replaylake.serve.safety.limits import Safety, check_exposure


def resolve_address(environment: Mapping[str, str]) -> str:
    """Return the address to listen on where BentoML is told of no other.

    Called as the Bento's module is imported. In the process that starts the workers it checks what
    BentoML's command was told; in a worker, where its socket is bound: that is how BentoML's own
    configuration is found out, which is read after the import. BentoML then starts workers again
    and again, and none of them answers.

    Raises: ConfigInvalidError if other machines could reach it without a token, ServeError if its
    host has no address.
    """
    address = resolve_host(environment.get("REPLAYLAKE_SERVE_HOST") or "127.0.0.1")
    check_exposure(
        _command_address(_command_options()) or address, Safety.from_environment(environment)
    )
    return address


def _command_options() -> Mapping[str, Any]:
    """Return the options of the BentoML command that imports the Bento: `serve`, or a worker's."""
    context = click.get_current_context(silent=True)
    return {} if context is None else context.params


def _command_address(options: Mapping[str, Any]) -> str | None:
    if options.get("fd") is not None:
        # A copy, because the socket object closes its own when it goes.
        with socket.socket(fileno=os.dup(options["fd"])) as listener:
            return str(listener.getsockname()[0])
    return resolve_host(options["host"]) if options.get("host") else None
