"""`replaylake serve`: a policy over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replaylake.cli.options import (
    DEFAULT_LAKE,
    DebugOption,
    JsonOption,
    LakeOption,
    PolicyArgument,
    parse_duration,
)
from replaylake.cli.output.command_output import CommandOutput, result_stream

if TYPE_CHECKING:
    from replaylake.serve.config import ServeConfig


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
    canary: Annotated[
        list[str] | None,
        typer.Option(
            "--canary",
            metavar="POLICY=WEIGHT",
            help="Give a policy a share of the episodes; several times for several.",
        ),
    ] = None,
    follow: Annotated[
        float,
        typer.Option(
            "--follow", metavar="SECONDS", min=0, help="Look so often where aliases point; 0 never."
        ),
    ] = 0.5,
    on_log_failure: Annotated[
        str,
        typer.Option(
            "--on-log-failure",
            metavar="refuse|serve",
            help="Where decisions cannot be logged, refuse to act, or answer and count the loss.",
        ),
    ] = "refuse",
    sessionise_every: Annotated[
        str | None,
        typer.Option(
            "--sessionise-every",
            metavar="TIME",
            show_default=False,
            help="Join decisions with rewards so often, such as 60s, beside the server.",
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Say whether it could be served, and serve nothing.")
    ] = False,
    server: Annotated[
        str, typer.Option("--server", metavar="bentoml|uvicorn", help="What runs the workers.")
    ] = "bentoml",
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", min=1, help="Processes that answer.")
    ] = 1,
    act_token_file: Annotated[
        Path | None,
        typer.Option("--act-token-file", metavar="FILE", help="Tokens of who may act, one a line."),
    ] = None,
    feedback_token_file: Annotated[
        Path | None,
        typer.Option("--feedback-token-file", metavar="FILE", help="Of who may send rewards."),
    ] = None,
    admin_token_file: Annotated[
        Path | None,
        typer.Option("--admin-token-file", metavar="FILE", help="Of who may see all the rest."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Serve other machines without tokens.")
    ] = False,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            metavar="HOST",
            help="Answer to this name too, beside loopback and its address; several times.",
        ),
    ] = None,
    access_log: Annotated[
        str | None,
        typer.Option(
            "--access-log", metavar="FILE|-", help="Write a line of JSON for each request."
        ),
    ] = None,
    max_body: Annotated[
        int, typer.Option("--max-body", metavar="BYTES", min=1, help="Larger requests get 413.")
    ] = 8 << 20,
    body_timeout: Annotated[
        float, typer.Option("--body-timeout", metavar="SECONDS", help="Slower requests get 408.")
    ] = 10.0,
    deadline: Annotated[
        float, typer.Option("--deadline", metavar="SECONDS", help="Later answers become 504.")
    ] = 15.0,
    queue: Annotated[
        int, typer.Option("--queue", metavar="N", min=1, help="More at once in a worker get 503.")
    ] = 256,
    connections: Annotated[
        int, typer.Option("--connections", metavar="N", min=1, help="That a worker keeps open.")
    ] = 2048,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Serve a policy over HTTP.

    Runs until interrupted. With --log-to it logs what it decides and the rewards it is told. When
    an alias it was asked for moves, so does the server.

    Example:
      replaylake serve clone --port 3000 --log-to live --explore epsilon=0.05
      replaylake serve clone@champion --canary clone@challenger=0.1
      curl localhost:3000/act -H 'content-type: application/json' -d '{"observation": [0, 0]}'
    """
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.datastore.lake.policies.exploration import parse_exploration
    from replaylake.serve.config import SERVERS
    from replaylake.serve.processes.server import ServeConfig
    from replaylake.serve.processes.server import serve as run
    from replaylake.serve.recording.decision_log import ON_LOG_FAILURE
    from replaylake.serve.safety.limits import Safety
    from replaylake.serve.versions.router import parse_canaries

    report = CommandOutput(as_json)
    if on_log_failure not in ON_LOG_FAILURE:
        raise typer.BadParameter(
            f"found {on_log_failure!r}, expected refuse or serve", param_hint="--on-log-failure"
        )
    every_s = 0.0
    if sessionise_every is not None:
        every_s = parse_duration(sessionise_every, "--sessionise-every")
    exploration = parse_exploration(explore)
    parse_canaries(canary or ())
    if server not in SERVERS:
        raise typer.BadParameter(
            f"found {server!r}, expected bentoml or uvicorn", param_hint="--server"
        )
    safety = Safety(
        act_token_file=act_token_file,
        feedback_token_file=feedback_token_file,
        admin_token_file=admin_token_file,
        insecure=insecure,
        access_log=access_log,
        allowed_hosts=tuple(allowed_host or ()),
        body_bytes=max_body,
        body_timeout_s=body_timeout,
        deadline_s=deadline,
        queue=queue,
        connections=connections,
    )
    ref = open_lake(lake).registry.resolve(policy)
    config = ServeConfig(
        package=ref.path,
        policy=ref.name,
        version=ref.version,
        lake=lake,
        log_to=log_to,
        explore=explore,
        host=host,
        port=port,
        reference=policy,
        follow_s=follow,
        canary=tuple(canary or ()),
        workers=workers,
        on_log_failure=on_log_failure,
        sessionise_every_s=every_s,
        server=server,
        safety=safety,
        manifest_sha256=ref.manifest_sha256,
    )
    report.print_message(f"policy {ref} ({ref.selected_by})")
    if check:
        _check(config, report)
        return
    if log_to is not None and not exploration.is_on:
        report.print_message(
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
        report.print_result(body, [])
        result_stream().flush()

    raise typer.Exit(run(config, answer))


def _check(config: ServeConfig, report: CommandOutput) -> None:
    """Print what would keep it from being served. Raises: typer.Exit with 1 if anything would."""
    from replaylake.serve.processes.check import check_server

    checks = check_server(config)
    width = max(len(one.what) for one in checks)
    lines = (
        f"{one.what:{width}}  {'ok' if one.is_ok else 'failed':6}  {one.found}" for one in checks
    )
    is_ok = all(one.is_ok for one in checks)
    body = {"ok": is_ok, "checks": [one.to_json() for one in checks]}
    report.print_result(body, lines)
    if not is_ok:
        raise typer.Exit(1)
