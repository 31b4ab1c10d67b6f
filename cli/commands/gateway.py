"""`replaylake gateway`: calls of language models, passed on and recorded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from replaylake.cli.name_completion import complete_datasets
from replaylake.cli.options import (
    ACCESS_OPTIONS,
    DEFAULT_LAKE,
    AccessLogOption,
    AllowedHostOption,
    DebugOption,
    InsecureOption,
    JsonOption,
    LakeOption,
    RolesFileOption,
    parse_duration,
)
from replaylake.cli.output.command_output import CommandOutput, result_stream

if TYPE_CHECKING:
    from replaylake.serve.gateway.config import GatewayConfig

_LIMITS: Final = "Limit options"


def gateway(
    upstream: Annotated[
        str,
        typer.Option(
            "--upstream",
            metavar="URL",
            show_default=False,
            help="Base URL of the engine or API that answers the calls.",
        ),
    ],
    dataset: Annotated[
        str,
        typer.Option(
            "--dataset",
            metavar="NAME",
            autocompletion=complete_datasets,
            show_default=False,
            help="Dataset to record to; created if it does not exist, as is the lake.",
        ),
    ],
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
    ] = 4000,
    engine: Annotated[
        str,
        typer.Option(
            "--engine",
            metavar="auto|vllm|sglang|llama.cpp|openai",
            help="Engine whose fields are used to ask for token ids and log-probabilities; auto "
            "detects it.",
        ),
    ] = "auto",
    on_record_failure: Annotated[
        str,
        typer.Option(
            "--on-record-failure",
            metavar="refuse|pass",
            help="Reaction to a call that cannot be recorded: refuse it with 503, or pass on the "
            "answer and count the loss.",
        ),
    ] = "refuse",
    episode_timeout: Annotated[
        str,
        typer.Option(
            "--episode-timeout",
            metavar="TIME",
            help="Time without a call after which an episode gets no further steps.",
        ),
    ] = "1d",
    user_header: Annotated[
        str | None,
        typer.Option(
            "--user-header",
            metavar="HEADER",
            show_default=False,
            help="Request header whose value is recorded as user_id.",
        ),
    ] = None,
    redact: Annotated[
        str | None,
        typer.Option(
            "--redact",
            metavar="MODULE:FUNCTION",
            show_default=False,
            help="Function that changes or drops each call before it is written.",
        ),
    ] = None,
    upstream_key_env: Annotated[
        str | None,
        typer.Option(
            "--upstream-key-env",
            metavar="VARIABLE",
            show_default=False,
            help="Environment variable with an API key to send instead of the caller's.",
        ),
    ] = None,
    act_token_file: Annotated[
        Path | None,
        typer.Option(
            "--act-token-file",
            rich_help_panel=ACCESS_OPTIONS,
            metavar="FILE",
            help="File with tokens for calls, one per line.",
        ),
    ] = None,
    feedback_token_file: Annotated[
        Path | None,
        typer.Option(
            "--feedback-token-file",
            rich_help_panel=ACCESS_OPTIONS,
            metavar="FILE",
            help="File with tokens for sending rewards, one per line.",
        ),
    ] = None,
    admin_token_file: Annotated[
        Path | None,
        typer.Option(
            "--admin-token-file",
            rich_help_panel=ACCESS_OPTIONS,
            metavar="FILE",
            help="File with tokens for /metrics, one per line.",
        ),
    ] = None,
    roles_file: RolesFileOption = None,
    insecure: InsecureOption = False,
    allowed_host: AllowedHostOption = None,
    access_log: AccessLogOption = None,
    max_body: Annotated[
        int,
        typer.Option(
            "--max-body",
            rich_help_panel=_LIMITS,
            metavar="BYTES",
            min=1,
            help="Maximum size of a request body; larger ones get 413.",
        ),
    ] = 64 << 20,
    body_timeout: Annotated[
        float,
        typer.Option(
            "--body-timeout",
            rich_help_panel=_LIMITS,
            metavar="SECONDS",
            help="Maximum time to receive a request body; slower ones get 408.",
        ),
    ] = 60.0,
    upstream_timeout: Annotated[
        float,
        typer.Option(
            "--upstream-timeout",
            rich_help_panel=_LIMITS,
            metavar="SECONDS",
            min=0.001,
            help="Maximum time to the engine's first byte, and between two parts of its answer.",
        ),
    ] = 600.0,
    queue: Annotated[
        int,
        typer.Option(
            "--queue",
            rich_help_panel=_LIMITS,
            metavar="N",
            min=1,
            help="Maximum number of concurrent calls; others get 503.",
        ),
    ] = 1024,
    connections: Annotated[
        int,
        typer.Option(
            "--connections",
            rich_help_panel=_LIMITS,
            metavar="N",
            min=1,
            help="Maximum number of open connections.",
        ),
    ] = 2048,
    sync_every_call: Annotated[
        bool,
        typer.Option(
            "--sync-every-call",
            help="Fsync each call before its answer ends, not all of the last 5 ms together.",
        ),
    ] = False,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Record calls of language models as steps.

    Forwards each call to an engine, until interrupted. Clients need no change but their
    base URL, which is that of the gateway.

    Example:
      replaylake gateway --upstream http://localhost:8000 --dataset agents
      OPENAI_BASE_URL=http://localhost:4000/v1 python agent.py
    """
    from replaylake.datastore.storage.arrow_values import keep_pandas_unloaded
    from replaylake.serve.gateway.config import GatewayConfig
    from replaylake.serve.gateway.server import run_gateway
    from replaylake.serve.safety.limits import Safety

    if redact is None:  # whose code may need pandas
        # Else the first commit imports it, and all calls wait for the interpreter meanwhile.
        keep_pandas_unloaded()
    report = CommandOutput(as_json)
    safety = Safety(
        act_token_file=act_token_file,
        feedback_token_file=feedback_token_file,
        admin_token_file=admin_token_file,
        roles_file=roles_file,
        insecure=insecure,
        allowed_hosts=tuple(allowed_host or ()),
        access_log=access_log,
        body_bytes=max_body,
        body_timeout_s=body_timeout,
        queue=queue,
        connections=connections,
    )
    config = GatewayConfig(
        upstream=upstream,
        lake=lake,
        dataset=dataset,
        host=host,
        port=port,
        engine=engine,
        on_record_failure=on_record_failure,
        idle_s=parse_duration(episode_timeout, "--episode-timeout"),
        user_header=user_header,
        redact=redact,
        upstream_key_env=upstream_key_env,
        silence_s=upstream_timeout,
        sync_every=sync_every_call,
        safety=safety,
    )

    def answer(ready: GatewayConfig) -> None:
        body = {
            "dataset": ready.dataset,
            "host": ready.host,
            "port": ready.port,
            "url": ready.url,
            "upstream": ready.upstream,
            "engine": ready.engine,
        }
        report.print_result(body, [])
        result_stream().flush()

    raise typer.Exit(run_gateway(config, answer))
