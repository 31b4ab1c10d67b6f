"""`replaylake explore`: the lake in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replaylake.cli.options import (
    ACCESS_OPTIONS,
    DEFAULT_LAKE,
    AllowedHostOption,
    DebugOption,
    InsecureOption,
    JsonOption,
    LakeOption,
    RolesFileOption,
)
from replaylake.cli.output.command_output import CommandOutput, result_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from replaylake.datastore.lake.lake import Lake
    from replaylake.serve.explorer.config import ExplorerConfig
    from replaylake.serve.explorer.visits.promotions import Promote, PromotionRequest


def explore(
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="LAKE",
            show_default=False,
            help="Path or URL of the lake; by default that of --lake.",
        ),
    ] = None,
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
    ] = 8080,
    open_browser: Annotated[
        bool, typer.Option("--open", help="Open the lake's page in the browser.")
    ] = False,
    path_prefix: Annotated[
        str,
        typer.Option(
            "--path-prefix",
            metavar="PATH",
            show_default=False,
            help="Path prefix of the requests that a proxy forwards, for example /lake.",
        ),
    ] = "",
    tokenizer: Annotated[
        list[Path] | None,
        typer.Option(
            "--tokenizer",
            metavar="FILE",
            show_default=False,
            help="File tokenizer.json with the texts of tokens; without it, their ids are shown. "
            "Repeatable, for datasets with several tokenizers.",
        ),
    ] = None,
    admin_token_file: Annotated[
        Path | None,
        typer.Option(
            "--admin-token-file",
            rich_help_panel=ACCESS_OPTIONS,
            metavar="FILE",
            help="File with bearer tokens, one per line, that allow reading the whole lake, "
            "labeling its episodes, and with --allow-promote moving aliases.",
        ),
    ] = None,
    roles_file: RolesFileOption = None,
    insecure: InsecureOption = False,
    allowed_host: AllowedHostOption = None,
    read_only: Annotated[
        bool,
        typer.Option(
            "--read-only",
            rich_help_panel=ACCESS_OPTIONS,
            help="Show no forms, and write nothing to the lake. Required with --insecure for other "
            "machines.",
        ),
    ] = False,
    allow_promote: Annotated[
        bool,
        typer.Option(
            "--allow-promote",
            rich_help_panel=ACCESS_OPTIONS,
            help="Let readers move aliases of policies through the gate, as promote --gate does.",
        ),
    ] = False,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show the lake in a browser.

    Serves pages of datasets, episodes, runs and policies, and a SQL console, until interrupted.
    On the page of an episode, readers can label it, unless --read-only is given. With
    --allow-promote, they can also move aliases on the page of a policy.

    Example:
      replaylake explore --open
      replaylake explore s3://bucket/lake --port 0
      replaylake explore --tokenizer Qwen3-4B/tokenizer.json
    """
    if allow_promote and read_only:
        raise typer.BadParameter(
            "cannot be combined with --read-only.", param_hint="--allow-promote"
        )
    from replaylake.serve.explorer.config import ExplorerConfig
    from replaylake.serve.explorer.server import run_explorer

    report = CommandOutput(as_json)
    config = ExplorerConfig(
        lake=lake if path is None else path,
        host=host,
        port=port,
        path_prefix=path_prefix.rstrip("/"),
        admin_token_file=admin_token_file,
        roles_file=roles_file,
        insecure=insecure,
        allowed_hosts=tuple(allowed_host or ()),
        read_only=read_only,
        tokenizers=tuple(tokenizer or ()),
    )

    def answer(ready: ExplorerConfig) -> None:
        body = {"lake": ready.lake, "host": ready.host, "port": ready.port, "url": ready.url}
        report.print_result(body, [])
        result_stream().flush()
        if open_browser:
            import webbrowser

            if not webbrowser.open(ready.url):
                report.print_message(f"found no browser to open: the address is {ready.url}")

    promote = load_promote() if allow_promote else None
    raise typer.Exit(run_explorer(config, answer, promote=promote))


def load_promote() -> Promote:
    """Return the function that promotes; loading it needs the extra `offline`."""
    from replaylake.datastore.lake.holdout import Holdout
    from replaylake.datastore.lake.policies.exploration import parse_exploration
    from replaylake.offline.evaluation.ope.evaluation_request import (
        EvaluationRequest,
        ProgressCallbacks,
    )
    from replaylake.offline.evaluation.ope.promotion import promote_through_gate

    def promote(
        lake: Lake, asked: PromotionRequest, on_stage: Callable[[str | None], None]
    ) -> Mapping[str, Any]:
        candidate = lake.registry.resolve(f"{asked.policy}:{asked.version}")
        request = EvaluationRequest(
            dataset=asked.dataset,
            policy=str(candidate),
            discount=asked.gamma,
            holdout=None if asked.holdout is None else Holdout(asked.holdout),
            exploration=parse_exploration(asked.explore),
            estimators=asked.estimators or None,
            ignore_masks=asked.ignore_masks,
            unseen=asked.unseen,
        )
        done = promote_through_gate(
            lake,
            candidate,
            asked.alias,
            request,
            alpha=asked.alpha,
            margin=asked.margin,
            by=asked.by,
            note=asked.note,
            callbacks=ProgressCallbacks(on_stage, lambda done, total: on_stage(None)),
        )
        return {**done.to_json(), "unsaved": done.unsaved}

    return promote
