"""`replaylake serve`: a policy over HTTP."""

from __future__ import annotations

from typing import Annotated

import typer

from replaylake.cli.options import (
    DEFAULT_LAKE,
    DebugOption,
    JsonOption,
    LakeOption,
    PolicyArgument,
    usage_errors,
)
from replaylake.cli.report import Report, answer_stream


def serve(
    policy: PolicyArgument,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Where to listen.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", metavar="PORT", min=0, max=65535, help="0 takes any free one.")
    ] = 3000,
    log_to: Annotated[
        str | None,
        typer.Option(
            "--log-to", metavar="DATASET", help="Write decisions and rewards for this dataset."
        ),
    ] = None,
    explore: Annotated[
        str | None,
        typer.Option(
            "--explore",
            metavar="epsilon=E|temperature=T",
            help="Act at random with probability E, or sample at temperature T.",
        ),
    ] = None,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Serve a policy over HTTP.

    Runs until interrupted. With --log-to it logs what it decides and the rewards it is told.

    Example:
      replaylake serve clone --port 3000 --log-to live --explore epsilon=0.05
      curl -d '{"observation": [0, 0, 0, 0]}' http://127.0.0.1:3000/act
    """
    from replaylake.datastore.lake import open_lake
    from replaylake.datastore.policies.exploration import parse_exploration
    from replaylake.serve.server import ServeConfig
    from replaylake.serve.server import serve as run

    report = Report(as_json)
    with usage_errors("--explore"):
        exploration = parse_exploration(explore)
    ref = open_lake(lake).registry.resolve(policy)
    config = ServeConfig(
        package=ref.path,
        policy=ref.name,
        version=ref.version,
        lake=None if log_to is None else lake,
        log_to=log_to,
        explore=explore,
        host=host,
        port=port,
        reference=policy,
    )
    report.say(f"policy {ref} ({ref.selected_by})")
    if log_to is not None and not exploration.is_on:
        report.say(
            f"warning: {log_to} is logged without exploration: off-policy evaluation on it will be "
            "unsupported. --explore epsilon=0.05 makes it possible."
        )

    def answer(ready: ServeConfig) -> None:
        body = {
            "policy": ref.name,
            "version": ref.version,
            "selected_by": ref.selected_by,
            "host": ready.host,
            "port": ready.port,
            "url": ready.url,
            "log_to": log_to,
            "explore": explore,
        }
        report.answer(body, [])
        answer_stream().flush()

    raise typer.Exit(run(config, answer))
