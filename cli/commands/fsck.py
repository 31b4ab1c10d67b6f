"""`replaylake fsck`: look at every byte of the lake, and take out what is damaged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from replaylake.cli.name_completion import complete_datasets
from replaylake.cli.options import DEFAULT_LAKE, DebugOption, JsonOption, LakeOption
from replaylake.cli.output.command_output import CommandOutput, count, size

if TYPE_CHECKING:
    from replaylake.datastore.maintenance.fsck.fsck import FsckReport

_EXIT_NO = 3


def fsck(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DATASET",
            autocompletion=complete_datasets,
            show_default=False,
            help="Datasets to check; by default all, and the log and policies of the lake.",
        ),
    ] = None,
    all_versions: Annotated[
        bool,
        typer.Option(
            "--all-versions",
            help="Check the shards of every retained version, not only of the newest one.",
        ),
    ] = False,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Move damaged, duplicated and orphaned files into <dataset>/_quarantine, and "
            "record the hashes of manifests that have none.",
        ),
    ] = False,
    orphan_hours: Annotated[
        float,
        typer.Option(
            metavar="H",
            min=1,
            help="Age from which a file that no version names is an orphan.",
        ),
    ] = 168,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Check every byte of datasets, and report errors.

    Checks shards (sha256, page checksums, row counts, schema), the log, the order and uniqueness of
    steps, policy packages, and orphaned files. Exit code 3 if there are errors.

    Example:
      replaylake fsck
      replaylake fsck cartpole --repair
    """
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.datastore.maintenance.fsck.fsck import fsck as check

    report = CommandOutput(as_json)
    store = open_lake(lake)
    with report.progress("checked", "shards") as progress:
        fsck_report = check(
            store,
            names or (),
            all_versions=all_versions,
            repair=repair,
            orphan_age_s=orphan_hours * 3600,
            on_progress=progress,
        )
    report.print_result(fsck_report.to_json(), _lines(fsck_report))
    if not fsck_report.is_clean:
        raise typer.Exit(_EXIT_NO)


def _lines(report: FsckReport) -> Iterator[str]:
    for one in report.datasets:
        at = one.dataset if one.version is None else f"{one.dataset}@{one.version}"
        yield f"{at}: {count(one.num_shards, 'shard')}, {size(one.num_bytes)}"
    for finding in report.findings:
        at = "" if finding.version is None else f" (version {finding.version})"
        where = finding.path or finding.dataset
        yield f"{finding.severity}: {finding.check}: {where}{at}: {finding.message}"
    hidden = report.num_errors + report.num_notes - len(report.findings)
    if hidden:
        yield f"and {hidden:,} more: {', '.join(f'{k} {n:,}' for k, n in report.counts.items())}"
    for repair in report.repairs:
        lost = f": {count(repair.num_steps, 'step')} left out" if repair.num_steps else ""
        if repair.num_episodes:
            lost += f", of {count(repair.num_episodes, 'episode')}"
        to = f" -> {repair.to}" if repair.to else ""
        yield f"repaired: {repair.kind}: {repair.path}{to}{lost}"
    if report.is_clean:
        notes = count(report.num_notes, "note") if report.num_notes else "no notes"
        yield f"clean: no error, {notes}"
    else:
        yield f"{count(report.num_errors, 'error')}, {count(report.num_notes, 'note')}"
