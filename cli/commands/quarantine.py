"""`replaylake quarantine`: the rows that `ingest` rejected are listed, shown and removed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replaylake.cli.name_completion import complete_datasets
from replaylake.cli.options import (
    DEFAULT_LAKE,
    NOTHING_CHANGED,
    DebugOption,
    JsonOption,
    LakeOption,
)
from replaylake.cli.output.command_output import CommandOutput, count, table_lines
from replaylake.cli.output.receipt import shorten_line

if TYPE_CHECKING:
    from replaylake.datastore.interchange.ingest.quarantine_rows import QuarantineSelection

_COLUMNS = ("reason", "episodes", "rows", "source", "first_row")

DatasetArgument = Annotated[
    str,
    typer.Argument(
        metavar="DATASET",
        autocompletion=complete_datasets,
        show_default=False,
        help="Name of the dataset.",
    ),
]
ReasonOption = Annotated[
    list[str] | None,
    typer.Option(
        "--reason",
        metavar="CHECK",
        help="Only episodes that failed this check, for example dtype. Repeatable.",
    ),
]
FileOption = Annotated[
    list[str] | None,
    typer.Option(
        "--file",
        metavar="NAME",
        help="Only episodes with a row of this file, by its name in the list. Repeatable.",
    ),
]
EpisodeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--episode",
        metavar="ID",
        help="Only this episode, by its id in the log or in the dataset. Repeatable.",
    ),
]


def list_rows(
    dataset: DatasetArgument,
    reason: ReasonOption = None,
    file: FileOption = None,
    episode: EpisodeOption = None,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List the reasons for which episodes are in a dataset's quarantine.

    Counts episodes and rows by reason and source, with the first row of each. An episode that
    failed two checks counts for both.

    Example:
      replaylake quarantine list clicks
    """
    from replaylake.datastore.interchange.ingest.quarantine_rows import list_quarantine
    from replaylake.datastore.lake.lake import open_lake

    report = CommandOutput(as_json)
    found = list_quarantine(open_lake(lake).dataset(dataset), selection(reason, file, episode))
    total = f"{count(found.num_episodes, 'episode')}, {count(found.num_rows, 'row')} in quarantine"
    lines = [f"{dataset}: {total}"]
    rows = [
        {
            "reason": one.reason,
            "episodes": one.num_episodes,
            "rows": one.num_rows,
            "source": one.source + (f" and {one.num_files - 1} more" if one.num_files > 1 else ""),
            "first_row": one.row,
        }
        for one in found.reasons
    ]
    if rows:
        header, *rest = table_lines(rows, _COLUMNS)
        lines.append(f"  {header}")
        for line, one in zip(rest, found.reasons, strict=True):
            lines += [f"  {line}", f"    such as {shorten_line(one.example)}"]
    report.print_result(found.to_json(), lines)


def show(
    dataset: DatasetArgument,
    reason: ReasonOption = None,
    file: FileOption = None,
    episode: EpisodeOption = None,
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", min=1, help="Maximum number of rows to print.")
    ] = 20,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show quarantined rows as the log has them, with the reasons.

    Each has its file and its row number in that file, from 0.

    Example:
      replaylake quarantine show clicks --reason dtype --limit 5
    """
    from replaylake.datastore.interchange.ingest.quarantine_rows import (
        list_quarantine,
        read_quarantine,
    )
    from replaylake.datastore.lake.lake import open_lake

    report = CommandOutput(as_json)
    handle, chosen = open_lake(lake).dataset(dataset), selection(reason, file, episode)
    rows = read_quarantine(handle, chosen, limit=limit)
    num_rows = list_quarantine(handle, chosen).num_rows
    lines: list[str] = []
    known: Any = None
    for one in rows:
        key = (one.episode_id, one.agent_id)
        if key != known:
            agent = f" agent {one.agent_id}" if one.agent_id else ""
            lines.append(f"episode {one.source_episode_id}{agent}")
            lines += [f"  {shorten_line(text)}" for text in one.reasons]
            known = key
        place = "" if one.file is None else f"{one.file} row {one.file_row}: "
        text = "could not be read" if one.row is None else json.dumps(one.row, ensure_ascii=False)
        lines.append(f"  {place}{text}")
    if num_rows > len(rows):
        lines.append(f"{len(rows):,} of {num_rows:,} rows shown; --limit shows more")
    body = {"dataset": dataset, "num_rows": num_rows, "rows": [one.to_json() for one in rows]}
    report.print_result(body, lines or [f"{dataset}: nothing in quarantine"])


def clear(
    dataset: DatasetArgument,
    reason: ReasonOption = None,
    file: FileOption = None,
    episode: EpisodeOption = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Remove; without it, only print what would be removed.")
    ] = False,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Remove episodes from a dataset's quarantine.

    Removes all of them, or those that are selected.
    Ingesting their files again does not bring them back. Earlier versions of the quarantine keep
    them until vacuum.

    Example:
      replaylake quarantine clear clicks --reason dtype --yes
    """
    from replaylake.datastore.interchange.ingest.quarantine_rows import clear_quarantine
    from replaylake.datastore.lake.lake import open_lake

    report = CommandOutput(as_json)
    handle = open_lake(lake).dataset(dataset)
    done = clear_quarantine(handle, selection(reason, file, episode), dry_run=not yes)
    what = f"{count(done.num_episodes, 'episode')}, {count(done.num_rows, 'row')}"
    verb = "would remove" if done.dry_run else "removed"
    lines = [f"{dataset}: {verb} {what} from quarantine; {count(done.num_left, 'row')} left"]
    if not done.num_rows:
        lines = [f"{dataset}: nothing in quarantine"]
    elif done.dry_run:
        lines.append(f"  {NOTHING_CHANGED}")
    report.print_result(done.to_json(), lines)


def selection(
    reason: list[str] | None, file: list[str] | None, episode: list[str] | None
) -> QuarantineSelection:
    """Return what the options select."""
    from replaylake.datastore.interchange.ingest.quarantine_rows import QuarantineSelection

    return QuarantineSelection(tuple(reason or ()), tuple(file or ()), tuple(episode or ()))
