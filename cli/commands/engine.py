"""`replaylake engine`: a small engine for a language model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from replaylake.cli.name_completion import complete_policies
from replaylake.cli.options import (
    ACCESS_OPTIONS,
    DEFAULT_LAKE,
    AllowedHostOption,
    DebugOption,
    InsecureOption,
    JsonOption,
    LakeOption,
)
from replaylake.cli.output.command_output import CommandOutput, result_stream

if TYPE_CHECKING:
    from replaylake.serve.engine.server import EngineConfig

_LIMITS: Final = "Limit options"


def engine(
    policy: Annotated[
        str,
        typer.Argument(
            metavar="POLICY",
            autocompletion=complete_policies,
            show_default=False,
            help="Language model, as name:version, name@alias or name; or the path of a directory "
            "that transformers wrote or of a package, with a slash (./base).",
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
    ] = 8000,
    fd: Annotated[
        int | None,
        typer.Option(
            "--fd",
            metavar="N",
            min=0,
            show_default=False,
            help="Descriptor of a listening socket to use instead of --host and --port, for "
            "supervisors.",
        ),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", metavar="DEVICE", help="Device of torch to run on.")
    ] = "cpu",
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            metavar="N",
            min=1,
            show_default="one for each processor",
            help="Number of threads that the model computes with.",
        ),
    ] = None,
    act_token_file: Annotated[
        Path | None,
        typer.Option(
            "--act-token-file",
            rich_help_panel=ACCESS_OPTIONS,
            metavar="FILE",
            help="File with API keys to accept, one per line.",
        ),
    ] = None,
    insecure: InsecureOption = False,
    allowed_host: AllowedHostOption = None,
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
    queue: Annotated[
        int,
        typer.Option(
            "--queue",
            rich_help_panel=_LIMITS,
            metavar="N",
            min=1,
            help="Maximum number of requests that wait or run; others get 503.",
        ),
    ] = 64,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Run a small language model behind OpenAI's API.

    Runs until interrupted. Requests are answered one after the other, so this is for small models:
    for others, use an engine such as vLLM. `serve` starts engines itself, and records what they
    answer.

    Example:
      replaylake engine agent@champion --port 8000
      replaylake engine ./base
      curl localhost:8000/v1/completions -H 'content-type: application/json' -d '{"prompt": "1+1="}'
    """
    from replaylake.offline.language.served_model import ServedModel
    from replaylake.serve.engine.server import EngineConfig, run_engine
    from replaylake.serve.safety.limits import Safety

    report = CommandOutput(as_json)
    directory, name, version = _find_model(policy, lake)
    config = EngineConfig(
        name,
        version,
        host,
        port,
        fd,
        Safety(
            act_token_file=act_token_file,
            insecure=insecure,
            allowed_hosts=tuple(allowed_host or ()),
            body_bytes=max_body,
            queue=queue,
        ),
    )

    def load() -> ServedModel:
        return ServedModel(directory, device=device, threads=threads)

    def answer(ready: EngineConfig) -> None:
        body = {
            "policy": name,
            "version": version,
            "host": ready.host,
            "port": ready.port,
            "url": ready.url,
        }
        report.print_result(body, [])
        result_stream().flush()

    raise typer.Exit(run_engine(config, load, answer))


def _find_model(policy: str, lake: str) -> tuple[Path, str, int | None]:
    """Return directory, name and version of a model of the lake or at a path, every file checked.

    Raises: ReplayLakeError.
    """
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.datastore.lake.policies.manifest import MANIFEST
    from replaylake.datastore.lake.policies.package import check_package

    if "/" not in policy:
        ref = open_lake(lake).registry.resolve(policy)
        directory = ref.path
        _ = check_package(directory, ref.manifest_sha256).language
        return directory, ref.name, ref.version
    directory = Path(policy)
    if not (directory / MANIFEST).exists():
        return directory, directory.resolve().name, None
    manifest = check_package(directory)
    _ = manifest.language
    name, version = manifest.body.get("name"), manifest.body.get("version")
    if isinstance(name, str) and type(version) is int:
        return directory, name, version
    return directory, directory.resolve().name, None
