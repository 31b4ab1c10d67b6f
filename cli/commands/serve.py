"""`replaylake serve`: a policy over HTTP."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from replaylake.cli.name_completion import complete_datasets, complete_policies
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
    name_options,
    parse_duration,
)
from replaylake.cli.output.command_output import CommandOutput, result_stream

if TYPE_CHECKING:
    from replaylake.serve.collecting.collector import CollectorConfig
    from replaylake.serve.config import ServeConfig
    from replaylake.serve.safety.limits import Safety

_LIMITS: Final = "Limit options"


def serve(
    policy: Annotated[
        str | None,
        typer.Argument(
            metavar="[POLICY]",
            autocompletion=complete_policies,
            show_default=False,
            help="Policy, as name:version, name@alias, or name (its champion if set, else its "
            "newest version); or the path of a package or Bento, with a slash (./clone). Not with "
            "--collect.",
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
    ] = 3000,
    log_to: Annotated[
        str | None,
        typer.Option(
            "--log-to",
            metavar="DATASET",
            autocompletion=complete_datasets,
            help="Dataset to log decisions and rewards to; created if it does not exist. Required "
            "for a language model, whose calls are recorded there.",
        ),
    ] = None,
    engine_url: Annotated[
        str | None,
        typer.Option(
            "--engine-url",
            metavar="URL",
            show_default=False,
            help="Base URL of an engine that runs this version of a language model, instead of one "
            "that is started.",
        ),
    ] = None,
    collect: Annotated[
        str | None,
        typer.Option(
            "--collect",
            metavar="DATASET",
            autocompletion=complete_datasets,
            show_default=False,
            help="Dataset to collect episodes and feedback into, instead of serving a policy. If "
            "it does not exist, a dataset of dialogues is created, as is the lake if absent.",
        ),
    ] = None,
    trace_timeout: Annotated[
        str,
        typer.Option(
            "--trace-timeout",
            metavar="TIME",
            help="With --collect: time without a new span after which a trace counts as complete "
            "although its root span has not arrived.",
        ),
    ] = "5m",
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
    sha256: Annotated[
        str | None,
        typer.Option(
            "--sha256",
            metavar="HEX",
            show_default=False,
            help="Required sha256 of the package's manifest.json; any other package is refused.",
        ),
    ] = None,
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
            rich_help_panel=ACCESS_OPTIONS,
            metavar="FILE",
            help="File with bearer tokens for acting, one per line.",
        ),
    ] = None,
    feedback_token_file: Annotated[
        Path | None,
        typer.Option(
            "--feedback-token-file",
            rich_help_panel=ACCESS_OPTIONS,
            metavar="FILE",
            help="File with bearer tokens for sending rewards and episodes, one per line.",
        ),
    ] = None,
    admin_token_file: Annotated[
        Path | None,
        typer.Option(
            "--admin-token-file",
            rich_help_panel=ACCESS_OPTIONS,
            metavar="FILE",
            help="File with bearer tokens for all other endpoints, one per line.",
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
    A language model is served behind OpenAI's API, by engines that the server starts; its calls are
    recorded in --log-to with the version that answered.
    With --collect, the server has no policy, and collects episodes, spans and rewards that other
    programs send.

    Example:
      replaylake serve clone --port 3000 --log-to live --explore epsilon=0.05
      replaylake serve clone@champion --canary clone@challenger=0.1
      replaylake serve agent@champion --log-to agents
      curl localhost:3000/act -H 'content-type: application/json' -d '{"observation": [0, 0]}'
      replaylake serve --collect agents
    """
    from replaylake.datastore.lake.policies.exploration import parse_exploration
    from replaylake.serve.config import SERVERS
    from replaylake.serve.processes.server import ServeConfig
    from replaylake.serve.processes.server import serve as run
    from replaylake.serve.recording.decision_log import ON_LOG_FAILURE
    from replaylake.serve.safety.limits import Safety
    from replaylake.serve.versions.router import parse_canaries

    report = CommandOutput(as_json)
    if (policy is None) == (collect is None):
        found = "both" if collect is not None else "neither"
        raise typer.BadParameter(
            f"found {found}, expected a policy to serve or a dataset to collect into",
            param_hint="POLICY or --collect",
        )
    if sha256 is not None and not re.fullmatch("[0-9a-fA-F]{64}", sha256):
        raise typer.BadParameter(
            f"found {sha256!r}, expected 64 hexadecimal digits", param_hint="--sha256"
        )
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
        roles_file=roles_file,
        insecure=insecure,
        access_log=access_log,
        allowed_hosts=tuple(allowed_host or ()),
        body_bytes=max_body,
        body_timeout_s=body_timeout,
        deadline_s=deadline,
        queue=queue,
        connections=connections,
    )
    if policy is None:
        assert collect is not None, "one of the two is given"
        of_policy = {
            "--canary": canary,
            "--check": check,
            "--engine-url": engine_url,
            "--explore": explore,
            "--join-every": join_every,
            "--log-to": log_to,
            "--sha256": sha256,
        }
        if wrong := [name for name, value in of_policy.items() if value]:
            raise typer.BadParameter("found it with --collect, expected a policy", param_hint=wrong)
        if workers > 1:
            raise typer.BadParameter(
                f"found {workers} with --collect, expected 1: a collector is one process",
                param_hint="--workers",
            )
        from replaylake.serve.collecting.collector import CollectorConfig

        idle_s = parse_duration(trace_timeout, "--trace-timeout")
        settle_s = min(CollectorConfig.settle_s, idle_s)
        collector = CollectorConfig(
            lake, collect, host, port, settle_s=settle_s, idle_s=idle_s, safety=safety
        )
        raise typer.Exit(_collect(collector, report))
    served = _find_package(policy, lake, sha256)
    if served.is_language:
        refused = {
            "--check": check,
            "--explore": explore,
            "--join-every": join_every,
            "--workers": workers > 1,
        }
        options = _LanguageOptions(
            engine_url, tuple(canary or ()), follow, log_to, on_log_failure, host, port, safety
        )
        raise typer.Exit(_serve_language(served, policy, lake, options, refused, report))
    if engine_url is not None:
        raise typer.BadParameter(
            f"found it with {served.name}:{served.version}, which is no language model",
            param_hint="--engine-url",
        )
    # A package from elsewhere needs a lake only for what it is logged to, or beside.
    is_in_lake = served.reference is not None
    config = ServeConfig(
        package=served.directory,
        policy=served.name,
        version=served.version,
        lake=lake if is_in_lake or log_to is not None or canary else None,
        log_to=log_to,
        explore=explore,
        host=host,
        port=port,
        reference=served.reference,
        follow_s=follow,
        canary=tuple(canary or ()),
        workers=workers,
        on_log_failure=on_log_failure,
        join_every_s=every_s,
        server=server,
        safety=safety,
        manifest_sha256=served.sha256,
    )
    report.print_message(f"policy {served.name}:{served.version} ({served.selected_by})")
    if served.warning:
        report.print_message(f"warning: {served.warning}")
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
            "policy": served.name,
            "version": served.version,
            "selected_by": served.selected_by,
            "package_sha256": served.sha256,
            "host": ready.host,
            "port": ready.port,
            "url": ready.url,
            "log_to": log_to,
            "explore": explore,
        }
        report.print_result(body, [])
        result_stream().flush()

    raise typer.Exit(run(config, answer))


def _collect(config: CollectorConfig, report: CommandOutput) -> int:
    """Collect into a dataset until interrupted; return the exit code. Raises: ReplayLakeError."""
    from replaylake.serve.collecting.collector import run_collector

    def answer(ready: CollectorConfig) -> None:
        body = {
            "dataset": ready.dataset,
            "host": ready.host,
            "port": ready.port,
            "url": ready.url,
        }
        report.print_result(body, [])
        result_stream().flush()

    return run_collector(config, answer)


@dataclass(frozen=True)
class _LanguageOptions:
    engine_url: str | None
    canary: tuple[str, ...]
    follow_s: float
    log_to: str | None
    on_log_failure: str
    host: str
    port: int
    safety: Safety


def _serve_language(
    served: _ServedPackage,
    policy: str,
    lake: str,
    options: _LanguageOptions,
    refused: Mapping[str, object],
    report: CommandOutput,
) -> int:
    """Serve a language model until interrupted; return the exit code. Raises: ReplayLakeError."""
    from replaylake.datastore.storage.arrow_values import keep_pandas_unloaded
    from replaylake.serve.gateway.config import GatewayConfig
    from replaylake.serve.gateway.openai_api import AUTO, VLLM
    from replaylake.serve.language.server import LanguageServeConfig, run_language_server

    keep_pandas_unloaded()
    name = f"{served.name}:{served.version}"
    if wrong := [option for option, value in refused.items() if value]:
        raise typer.BadParameter(
            f"found it with {name}, a language model, which is served without it", param_hint=wrong
        )
    if options.log_to is None:
        raise typer.BadParameter(
            f"found none with {name}, a language model, expected a dataset to record its calls to",
            param_hint="--log-to",
        )
    url = options.engine_url
    if url is not None and options.canary:
        raise typer.BadParameter(
            "found it with --engine-url, whose engine runs one version", param_hint="--canary"
        )
    report.print_message(f"policy {name} ({served.selected_by})")
    if served.warning:
        report.print_message(f"warning: {served.warning}")
    if url is not None and served.selected_by.startswith("alias"):
        report.print_message(
            f"note: the engine at {url} has to run {name}. Its calls are recorded as this version, "
            "also if the alias moves: start the server again with the new version then."
        )
    config = LanguageServeConfig(
        GatewayConfig(
            upstream=url or "",
            lake=lake,
            dataset=options.log_to,
            host=options.host,
            port=options.port,
            engine=VLLM if url is None else AUTO,
            on_record_failure="pass" if options.on_log_failure == "serve" else "refuse",
            safety=options.safety,
        ),
        policy,
        served.name,
        served.version,
        partial(_engine_command, lake),
        url,
        options.canary,
        options.follow_s,
    )

    def answer(ready: GatewayConfig) -> None:
        body = {
            "policy": served.name,
            "version": served.version,
            "selected_by": served.selected_by,
            "package_sha256": served.sha256,
            "host": ready.host,
            "port": ready.port,
            "url": ready.url,
            "log_to": ready.dataset,
            "engine_url": url,
        }
        report.print_result(body, [])
        result_stream().flush()

    return run_language_server(config, answer)


def _engine_command(lake: str, policy: str, descriptor: int) -> list[str]:
    """Return the command line of an engine that ends with this process."""
    launch = [sys.executable, "-m", "replaylake.serve.processes.launch"]
    words = ["replaylake.cli.main", "engine", policy, "--fd", str(descriptor), "--json"]
    return [*launch, *words, "--lake", lake]


@dataclass(frozen=True)
class _ServedPackage:
    """The package to serve; `reference` is None for one outside a lake."""

    directory: Path
    name: str
    version: int
    selected_by: str
    reference: str | None
    sha256: str
    warning: str
    is_language: bool = False


def _find_package(policy: str, lake: str, sha256: str | None) -> _ServedPackage:
    """Resolve POLICY in the lake, or as a path. Raises: ReplayLakeError."""
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.datastore.lake.policies.manifest import LANGUAGE
    from replaylake.datastore.lake.policies.package import find_package

    if "/" not in policy:
        registry = open_lake(lake).registry
        ref = registry.resolve(policy)
        directory, expected, warning = ref.path, ref.manifest_sha256, ""
        if sha256 is not None or expected is None:
            expected = find_package(directory, sha256)[1].sha256
            warning = (
                f"{ref} was registered before the sha256 of packages was recorded; its package has "
                f"sha256 {expected}. `replaylake fsck --repair` records it."
            )
        return _ServedPackage(
            directory,
            ref.name,
            ref.version,
            ref.selected_by,
            policy,
            expected,
            "" if sha256 else warning,
            registry.show(ref)["kind"] == LANGUAGE,
        )
    directory, manifest = find_package(Path(policy), sha256)
    name, version = _name_package(Path(policy), manifest.body)
    warning = (
        f"{policy} is outside a lake, and nothing says what it has to contain; its sha256 is "
        f"{manifest.sha256}. Give --sha256 {manifest.sha256} to refuse any other."
    )
    return _ServedPackage(
        directory,
        name,
        version,
        "path",
        None,
        manifest.sha256,
        "" if sha256 else warning,
        manifest.is_language,
    )


def _name_package(path: Path, body: Mapping[str, object]) -> tuple[str, int]:
    """Return the policy and version that a manifest names, else the directory's name and 0.

    No registered version has the number 0.
    """
    from replaylake.datastore.errors import InvalidNameError
    from replaylake.datastore.names import check_policy_name

    name, version = body.get("name"), body.get("version")
    if isinstance(name, str) and type(version) is int:
        return name, version
    try:
        return check_policy_name(path.resolve().name), 0
    except InvalidNameError:
        return "package", 0


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
