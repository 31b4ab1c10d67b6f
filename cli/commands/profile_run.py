"""`replaylake runs profile`: where the time and the bytes of an online run go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from replaylake.cli.options import DEFAULT_LAKE, DebugOption, JsonOption, LakeOption
from replaylake.cli.output.command_output import CommandOutput, count, table_lines
from replaylake.cli.output.progress import time_left

if TYPE_CHECKING:
    from replaylake.datastore.lake.runs.summary import RunSummary
    from replaylake.online.monitoring.profile import LinkUse, RunProfile

_COLUMNS: Final = ("link", "of", "seconds", "share %", "items", "items/s", "MB", "MB/s")


def profile(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", show_default=False, help="Run, by its id or a unique prefix."
        ),
    ],
    last: Annotated[
        bool,
        typer.Option(
            "--last", help="Use only the time between the last two totals that the run logged."
        ),
    ] = False,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show the time and bytes of each link of an online run.

    Prints the seconds, rate and bytes of each link, and the bottleneck. Works during the run.

    Example:
      replaylake runs profile 01m7xx
      replaylake runs profile 01m7xx --last
    """
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.datastore.lake.runs.metrics import read_logged_metrics
    from replaylake.datastore.lake.runs.summary import find_run, summarize
    from replaylake.online.monitoring.profile import build_run_profile
    from replaylake.online.monitoring.timings import PROFILE

    report = CommandOutput(as_json)
    store = open_lake(lake)
    record = find_run(store.registry.runs(), run)
    logged = read_logged_metrics(store.storage, record["run_id"], f"{PROFILE}/")
    run_profile = build_run_profile(record, logged, only_last=last)
    summary = summarize(store.storage, record)
    body = {
        "run_id": summary.run_id,
        "status": summary.status,
        "only_last": last,
        **run_profile.to_json(),
    }
    report.print_result(body, _lines(summary, run_profile, only_last=last))


def _lines(summary: RunSummary, profile: RunProfile, *, only_last: bool) -> Iterator[str]:
    of = "the last " if only_last else ""
    who = "one process"
    if profile.num_workers:
        who = f"the trainer and {count(profile.num_workers, 'worker')}"
    yield (
        f"run {summary.run_id}  {summary.status}  {of}{time_left(profile.wall_s)} of {who}, until "
        f"update {profile.until_update:,}"
    )
    yield from table_lines([_row(one) for one in profile.links], _COLUMNS)
    yield f"bottleneck: {profile.bottleneck.cause}: {profile.bottleneck.reason}"


def _row(one: LinkUse) -> dict[str, Any]:
    rate, mb_rate = one.items_per_s, one.mb_per_s
    return {
        "link": one.link,
        "of": one.place,
        "seconds": round(one.seconds, 2),
        "share %": round(100 * one.share, 1),
        "items": one.items or None,
        "items/s": None if rate is None else round(rate),
        "MB": round(one.num_bytes / 1e6, 1) if one.num_bytes else None,
        "MB/s": None if mb_rate is None else round(mb_rate, 1),
    }
