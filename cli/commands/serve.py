"""`replaylake serve`: a policy over HTTP."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from replaylake.cli.options import (
    DEFAULT_LAKE,
    DebugOption,
    JsonOption,
    LakeOption,
    PolicyArgument,
    name_options,
    parse_duration,
)
from replaylake.cli.output.command_output import CommandOutput, result_stream

if TYPE_CHECKING:
    from replaylake.serve.config import ServeConfig

_ACCESS: Final = "Access options"
_LIMITS: Final = "Limit options"


def serve(
    policy: PolicyArgument,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            "--port",
            metavar="PORT",
            min=0,
            max=65535,
            help="Port to listen on; 0 takes a free one.",
        ),
    ] = 3000,
    log_to: Annotated[
        str | None,
        typer.Option(
            "--log-to",
            metavar="DATASET",
            help="Dataset to log decisions and rewards to; created if it does not exist.",
        ),
    ] = None,
    explore: Annotated[
        str | None,
        typer.Option(
            "--explore",
            metavar="epsilon=E|temperature=T",
            help="Exploration: a random action with probability E, or sampling at temperature T.",
        ),
    ] = None,
    canary: Annotated[
        list[str] | None,
        typer.Option(
            "--canary",
            metavar="POLICY=WEIGHT",
            help="Policy that gets a share of the episodes. Repeatable.",
        ),
    ] = None,
    follow: Annotated[
        float,
        typer.Option(
            "--follow",
            metavar="SECONDS",
            min=0,
            help="Interval between checks for moved aliases; 0 disables them.",
        ),
    ] = 0.5,
    on_log_failure: Annotated[
        str,
        typer.Option(
            "--on-log-failure",
            metavar="refuse|serve",
            help="Reaction to a decision that cannot be logged: refuse the request, or serve it "
            "and count the loss.",
        ),
    ] = "refuse",
    join_every: Annotated[
        str | None,
        typer.Option(
            "--join-every",
            metavar="TIME",
            show_default=False,
            help="Interval between joins of decisions with rewards, beside the server (for example "
            "60s).",
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check whether the policy can be served, and exit.")
    ] = False,
    server: Annotated[
        str,
        typer.Option("--server", metavar="bentoml|uvicorn", help="Server that runs the workers."),
    ] = "bentoml",
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", min=1, help="Number of worker processes.")
    ] = 1,
    act_token_file: Annotated[
        Path | None,
        typer.Option(
            "--act-token-file",
            rich_help_panel=_ACCESS,
            metavar="FILE",
            help="File with bearer tokens for acting, one per line.",
        ),
    ] = None,
    feedback_token_file: Annotated[
        Path | None,
        typer.Option(
            "--feedback-token-file",
            rich_help_panel=_ACCESS,
            metavar="FILE",
            help="File with bearer tokens for sending rewards and episodes, one per line.",
        ),
    ] = None,
    admin_token_file: Annotated[
        Path | None,
        typer.Option(
            "--admin-token-file",
            rich_help_panel=_ACCESS,
            metavar="FILE",
            help="File with bearer tokens for all other endpoints, one per line.",
        ),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            rich_help_panel=_ACCESS,
            help="Allow other machines to connect without tokens.",
        ),
    ] = False,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            rich_help_panel=_ACCESS,
            metavar="HOST",
            help="Host name to answer to, besides loopback and the listening address. Repeatable.",
        ),
    ] = None,
    access_log: Annotated[
        str | None,
        typer.Option(
            "--access-log",
            rich_help_panel=_ACCESS,
            metavar="FILE|-",
            help="File for one JSON line per request; - for standard output.",
        ),
    ] = None,
    max_body: Annotated[
        int,
        typer.Option(
            "--max-body",
            rich_help_panel=_LIMITS,
            metavar="BYTES",
            min=1,
            help="Maximum size of a request body; larger ones get 413.",
        ),
    ] = 8 << 20,
    body_timeout: Annotated[
        float,
        typer.Option(
            "--body-timeout",
            rich_help_panel=_LIMITS,
            metavar="SECONDS",
            help="Maximum time to receive a request body; slower ones get 408.",
        ),
    ] = 10.0,
    deadline: Annotated[
        float,
        typer.Option(
            "--deadline",
            rich_help_panel=_LIMITS,
            metavar="SECONDS",
            help="Maximum time to answer a request; slower ones get 504.",
        ),
    ] = 15.0,
    queue: Annotated[
        int,
        typer.Option(
            "--queue",
            rich_help_panel=_LIMITS,
            metavar="N",
            min=1,
            help="Maximum number of concurrent requests per worker; others get 503.",
        ),
    ] = 256,
    connections: Annotated[
        int,
        typer.Option(
            "--connections",
            rich_help_panel=_LIMITS,
            metavar="N",
            min=1,
            help="Maximum number of open connections per worker.",
        ),
    ] = 2048,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Serve a policy over HTTP.

    Runs until interrupted. With --log-to, decisions and the rewards reported for them are logged.
    If the policy is named by an alias, the server switches version when the alias moves.

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
    if join_every is not None:
        every_s = parse_duration(join_every, "--join-every")
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
        join_every_s=every_s,
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

    checks = [replace(one, found=name_options(one.found)) for one in check_server(config)]
    width = max(len(one.what) for one in checks)
    lines = (
        f"{one.what:{width}}  {'ok' if one.is_ok else 'failed':6}  {one.found}" for one in checks
    )
    is_ok = all(one.is_ok for one in checks)
    body = {"ok": is_ok, "checks": [one.to_json() for one in checks]}
    report.print_result(body, lines)
    if not is_ok:
        raise typer.Exit(1)
