"""`replaylake runs profile`: the time and bytes of each link of a run, of two, or of a server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from replaylake.cli.name_completion import complete_runs
from replaylake.cli.options import DEFAULT_LAKE, DebugOption, JsonOption, LakeOption
from replaylake.cli.output.command_output import CommandOutput, count, table_lines
from replaylake.cli.output.link_table import link_lines
from replaylake.cli.output.progress import time_left

if TYPE_CHECKING:
    from replaylake.datastore.lake.lake import Lake
    from replaylake.datastore.lake.runs.run_profile import LinkUse, RunProfile
    from replaylake.datastore.lake.runs.summary import RunSummary

_COMPARED_COLUMNS: Final = (
    *("link", "of", "A seconds", "B seconds", "A share %", "B share %"),
    *("A ms/item", "B ms/item", "B/A"),
)


def profile(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN [RUN]",
            autocompletion=complete_runs,
            show_default=False,
            help="Run, by its id, a unique prefix of it, or the policy that it trained; two are "
            "compared link by link. Or the URL of a server.",
        ),
    ],
    last: Annotated[
        bool,
        typer.Option(
            "--last", help="Use only the time between the last two totals that the run logged."
        ),
    ] = False,
    bounds: Annotated[
        bool,
        typer.Option(
            "--bounds",
            help="For each link that moves bytes, also measure the throughput of its limiting "
            "operation alone on this machine: a memory copy, a write with fsync, an append, a "
            "read, a socket, or Ray's object store. For one run or server.",
        ),
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds",
            metavar="N",
            min=0.1,
            help="Measure the server during the next N seconds; by default, the times are "
            "totals since its workers started.",
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help="File with a bearer token of role admin, for a server with tokens.",
        ),
    ] = None,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show the time and bytes of each link of a run, or of a server.

    Prints the seconds, rate and bytes of each link, and the bottleneck; of two runs, both beside
    each other. Works during the run. With a server's URL, prints the links of its workers.

    Example:
      replaylake runs profile 01m7xx
      replaylake runs profile 01m7xx --last
      replaylake runs profile 01m7xx --bounds
      replaylake runs profile dqn:1 dqn:2
      replaylake runs profile http://127.0.0.1:3000 --seconds 10
    """
    from replaylake.datastore.lake.lake import open_lake

    if any(_is_url(run) for run in runs):
        for flag, is_given in (("--last", last), ("RUN", len(runs) > 1)):
            if is_given:
                raise typer.BadParameter(
                    "cannot be used with the URL of a server.",
                    param_hint=flag,
                )
        _profile_server(CommandOutput(as_json), runs[0], seconds or 0.0, token_file, bounds)
        return
    for flag, is_missing in (("--seconds", seconds is None), ("--token-file", token_file is None)):
        if not is_missing:
            raise typer.BadParameter(
                "requires the URL of a server instead of a run.", param_hint=flag
            )
    if len(runs) > 2:
        raise typer.BadParameter(f"found {len(runs)} runs, expected one, or two to compare")
    if bounds and len(runs) > 1:
        raise typer.BadParameter("cannot be used with two runs.", param_hint="--bounds")
    report = CommandOutput(as_json)
    store = open_lake(lake)
    found = [_load(store, run, only_last=last) for run in runs]
    if bounds:
        with report.waiting("measuring the bounds"):
            found = [(one, _with_bounds(store, profile)) for one, profile in found]
    bodies = [
        {"run_id": one.run_id, "status": one.status, "only_last": last, **profile.to_json()}
        for one, profile in found
    ]
    if len(found) == 1:
        report.print_result(bodies[0], _lines(*found[0], only_last=last))
    else:
        report.print_result({"runs": bodies}, _list_comparison(found, only_last=last))


def _is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def _profile_server(
    report: CommandOutput, url: str, seconds: float, token_file: Path | None, bounds: bool
) -> None:
    from replaylake.serve.monitoring.server_profile import measure_server

    token = None
    if token_file is not None:
        try:
            token = token_file.read_text().split("\n", 1)[0].strip()
        except (OSError, UnicodeDecodeError) as error:
            raise typer.BadParameter(
                f"{token_file}: {error}, expected a readable file with a token.",
                param_hint="--token-file",
            ) from error
    with report.waiting(f"watching {url}"):
        profile = measure_server(url, token=token, seconds=seconds)
    if bounds:
        from replaylake.datastore.lake.runs.bounds import measure_bounds
        from replaylake.datastore.storage.locations import open_storage

        with report.waiting("measuring the bounds"), TemporaryDirectory() as folder:
            links = measure_bounds(profile.links, open_storage(folder))
        profile = replace(profile, links=links)
    heading = f"server {url}  {time_left(profile.wall_s)} of its workers' time"
    lines = [heading, *link_lines(profile.links)]
    report.print_result({"url": url, **profile.to_json()}, lines)


def _load(store: Lake, text: str, *, only_last: bool) -> tuple[RunSummary, RunProfile]:
    from replaylake.datastore.lake.runs.metrics import read_logged_metrics
    from replaylake.datastore.lake.runs.run_profile import build_run_profile
    from replaylake.datastore.lake.runs.summary import find_run, summarize
    from replaylake.datastore.lake.runs.timings import PROFILE

    record = find_run(store.registry, text)
    logged = read_logged_metrics(store.storage, record["run_id"], f"{PROFILE}/")
    run_profile = build_run_profile(record, logged, only_last=only_last)
    return summarize(store.storage, record), run_profile


def _with_bounds(store: Lake, profile: RunProfile) -> RunProfile:
    from replaylake.datastore.lake.runs.bounds import BOUND_KINDS, measure_bounds

    measure_ray = None
    through_ray = {link for link, kind in BOUND_KINDS.items() if kind == "ray"}
    if profile.num_workers and any(one.link in through_ray for one in profile.links):
        from replaylake.online.pools.object_store import measure_object_store

        measure_ray = measure_object_store
    return replace(profile, links=measure_bounds(profile.links, store.storage, measure_ray))


def _lines(summary: RunSummary, profile: RunProfile, *, only_last: bool) -> Iterator[str]:
    yield _heading(summary, profile, only_last=only_last)
    yield from link_lines(profile.links)
    yield _bottleneck(profile)


def _list_comparison(
    found: Sequence[tuple[RunSummary, RunProfile]], *, only_last: bool
) -> Iterator[str]:
    """Yield both headings, a row for each link of either, and both bottlenecks."""
    from replaylake.datastore.lake.runs.run_profile import pair_links

    for name, (summary, profile) in zip("AB", found, strict=True):
        yield f"{name}: {_heading(summary, profile, only_last=only_last)}"
    rows = [_make_comparison_row(*pair) for pair in pair_links(*(profile for _, profile in found))]
    yield from table_lines(rows, _COMPARED_COLUMNS)
    for name, (_, profile) in zip("AB", found, strict=True):
        yield f"{name}: {_bottleneck(profile)}"


def _make_comparison_row(first: LinkUse | None, second: LinkUse | None) -> dict[str, Any]:
    of = first or second
    row: dict[str, Any] = {} if of is None else {"link": of.link, "of": of.place}
    for name, one in (("A", first), ("B", second)):
        if one is not None:
            row[f"{name} seconds"] = round(one.seconds, 2)
            row[f"{name} share %"] = round(100 * one.share, 1)
            row[f"{name} ms/item"] = _ms_per_item(one)
    if row.get("A ms/item") and row.get("B ms/item"):
        row["B/A"] = float(f"{row['B ms/item'] / row['A ms/item']:.3g}")
    return row


def _ms_per_item(one: LinkUse | None) -> float | None:
    rate = None if one is None else one.items_per_s
    return None if not rate else float(f"{1000 / rate:.3g}")


def _heading(summary: RunSummary, profile: RunProfile, *, only_last: bool) -> str:
    of = "the last " if only_last else ""
    who = "one process"
    if profile.num_workers:
        who = f"the trainer and {count(profile.num_workers, 'worker')}"
    return (
        f"run {summary.run_id}  {summary.status}  {of}{time_left(profile.wall_s)} of {who}, until "
        f"update {profile.until_update:,}"
    )


def _bottleneck(profile: RunProfile) -> str:
    return f"bottleneck: {profile.bottleneck.cause}: {profile.bottleneck.reason}"
