"""`replaylake datasets delete`: whole episodes go, from now on or from every version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replaylake.cli.name_completion import complete_datasets
from replaylake.cli.options import (
    DEFAULT_LAKE,
    NOTHING_CHANGED,
    DebugOption,
    JsonOption,
    LakeOption,
)
from replaylake.cli.output.command_output import CommandOutput, count, size

if TYPE_CHECKING:
    from replaylake.datastore.lake.lake import Lake
    from replaylake.datastore.maintenance.delete import DeleteReceipt
    from replaylake.datastore.maintenance.episode_condition import EpisodeCondition
    from replaylake.datastore.maintenance.purge.purge import PurgeReceipt

_EXIT_NO = 3
_SELECTORS = "--where / --ids / --again"
# Unknown ids that a warning names.
_NUM_LISTED = 10


def delete(
    dataset: Annotated[
        str,
        typer.Argument(
            metavar="DATASET",
            autocompletion=complete_datasets,
            show_default=False,
            help="Name of the dataset.",
        ),
    ],
    where: Annotated[
        str | None,
        typer.Option(
            "--where",
            metavar="SQL",
            show_default=False,
            help="Condition over episodes that selects whole episodes, for example user_id = 7 "
            "or any(reward < 0); it may contain subqueries over the lake.",
        ),
    ] = None,
    ids: Annotated[
        str | None,
        typer.Option(
            "--ids",
            metavar="FILE[:COLUMN]",
            show_default=False,
            help="File with one id on each line, instead of --where: of episodes, or values of a "
            "column that at least one step of an episode has, as in users.txt:user_id.",
        ),
    ] = None,
    again: Annotated[
        bool,
        typer.Option(
            "--again",
            help="Delete, instead of --where, the episodes that were deleted before and are stored "
            "again, for example after a backup was restored.",
        ),
    ] = False,
    purge: Annotated[
        bool,
        typer.Option(
            "--purge",
            help="Delete from every version, tag, quarantine, cache and log, and verify that "
            "nothing is left.",
        ),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Delete; without it, only print what would be deleted.")
    ] = False,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Delete whole episodes, with their decisions and rewards.

    Deletes from the newest version on; with --purge from all versions, which can then no longer be
    read. What was purged, or deleted by its source_episode_id or agent_id, does not come back with
    a later source, unless with ingest --readmit. Exit code 3 if a purge cannot verify that nothing
    is left.

    Example:
      replaylake datasets delete live --where "source_episode_id = 'user-4711'"
      replaylake datasets delete live --where "source_episode_id = 'user-4711'" --purge --yes
      replaylake datasets delete live --ids users.txt:user_id
    """
    from replaylake.datastore.lake.lake import open_lake

    report = CommandOutput(as_json)
    num_given = (where is not None) + (ids is not None) + again
    if num_given != 1:
        raise typer.BadParameter(f"found {num_given} of them, expected one.", param_hint=_SELECTORS)
    store = open_lake(lake)
    condition: str | EpisodeCondition | None = where
    if ids is not None:
        condition = _read_ids(report, store, dataset, ids)
    if purge:
        _purge(report, store, dataset, condition, yes)
        return
    from replaylake.datastore.maintenance.delete import delete as run

    with report.waiting(f"deleting from {dataset}" if yes else f"looking through {dataset}"):
        answer = run(store, dataset, condition, dry_run=not yes)
    report.print_result(answer.to_json(), _delete_lines(answer))


def _read_ids(report: CommandOutput, lake: Lake, dataset: str, option: str) -> EpisodeCondition:
    """Return the condition of a file of ids, and warn about those that no step has."""
    from replaylake.datastore.episodes.schema import EPISODE_ID
    from replaylake.datastore.maintenance.episode_condition import (
        condition_of_ids,
        find_unknown_ids,
    )

    path, _, column = option.rpartition(":")
    if not path or Path(option).is_file():
        path, column = option, EPISODE_ID
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise typer.BadParameter(
            f"{path}: {error}. Name a UTF-8 text file with one id on each line.", param_hint="--ids"
        ) from error
    ids = list(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))
    condition = condition_of_ids(lake, dataset, ids, column)
    if unknown := find_unknown_ids(lake, dataset, ids, column):
        some = ", ".join(unknown[:_NUM_LISTED]) + (", ..." if len(unknown) > _NUM_LISTED else "")
        report.print_message(
            f"{len(unknown):,} of {count(len(ids), 'id')} in {path}: in {column} of no step of "
            f"{dataset}: {some}"
        )
    return condition


def _purge(
    report: CommandOutput, lake: Lake, dataset: str, where: str | EpisodeCondition | None, yes: bool
) -> None:
    from replaylake.datastore.maintenance.purge.purge import purge as run

    what = f"purging {dataset}" if yes else f"looking through {dataset}"
    with report.waiting(what) as waiting, report.progress(what, "") as progress:

        def show(stage: str, done: int, total: int | None) -> None:
            if total is not None:
                waiting.end()
            progress.stage(stage, "" if total is None else "files")
            progress(done, total)

        answer = run(lake, dataset, where, dry_run=not yes, on_progress=show)
    report.print_result(answer.to_json(), _purge_lines(answer))
    if not answer.dry_run and not answer.is_proven:
        raise typer.Exit(_EXIT_NO)


def _delete_lines(answer: DeleteReceipt) -> Iterator[str]:
    feedback = f"{count(answer.num_decisions, 'decision')}, {count(answer.num_rewards, 'reward')}"
    what = f"{count(answer.num_episodes, 'episode')}, {count(answer.num_steps, 'step')}, {feedback}"
    if answer.num_rejected:
        what = f"{what}, {count(answer.num_rejected, 'row')} in quarantine"
    if answer.num_received:
        what = f"{what}, {count(answer.num_received, 'received step')}"
    rest = f"{count(answer.steps_left, 'step')} left"
    if not (answer.num_episodes or answer.num_decisions):
        yield f"{answer.dataset}: nothing to delete"
        yield from _list_undecided(answer)
    elif answer.dry_run:
        about = "" if answer.num_bytes is None else f" (about {size(answer.num_bytes)})"
        yield f"{answer.dataset}: would delete {what}{about}; {rest}"
        if answer.first_episodes:
            more = answer.num_episodes - len(answer.first_episodes)
            names = ", ".join(answer.first_episodes)
            yield f"  episodes {names}" + (f" and {more:,} more" if more else "")
        yield from _list_policies(answer)
        yield from _list_undecided(answer)
        yield f"  {NOTHING_CHANGED}"
    else:
        at = "" if answer.version is None else f"@{answer.version}"
        yield f"{answer.dataset}{at}: deleted {what}; {rest}"
        yield "  earlier versions retain them until vacuum; --purge deletes them from those too"
        yield from _list_policies(answer)
        yield from _list_tombstones(answer)
        yield from _list_undecided(answer)


def _list_tombstones(answer: DeleteReceipt | PurgeReceipt) -> Iterator[str]:
    if answer.num_tombstones:
        yield "  later sources do not bring them back, unless with ingest --readmit"


def _list_policies(answer: DeleteReceipt | PurgeReceipt) -> Iterator[str]:
    for policy, num in answer.policies.items():
        of = "unknown, its version cannot be read" if num is None else count(num, "episode")
        yield f"  policy {policy} was trained on them: {of}"


def _list_undecided(answer: DeleteReceipt | PurgeReceipt) -> Iterator[str]:
    if answer.num_undecided:
        yield (
            f"  {count(answer.num_undecided, 'episode')} in quarantine undecided: the condition "
            f"needs columns that they lack. See the view {answer.dataset}.quarantine, and select "
            "them by episode_id"
        )


def _purge_lines(answer: PurgeReceipt) -> Iterator[str]:
    if not (answer.num_episodes or answer.num_decisions):
        yield f"{answer.dataset}: nothing to purge"
        yield from _list_undecided(answer)
        return
    what = (
        f"{count(answer.num_episodes, 'episode')}, {count(answer.num_steps, 'step')} of the newest "
        f"version, {count(answer.num_decisions, 'decision')}, {count(answer.num_files, 'file')}"
    )
    if answer.dry_run:
        yield f"{answer.dataset}: would purge {what}"
    else:
        yield f"{answer.dataset}@{answer.version}: purged {what} (purge {answer.id})"
    for one in answer.resumed:
        yield f"  purge {one} was incomplete and is now finished"
    would = "could no longer" if answer.dry_run else "can no longer"
    if answer.versions:
        yield f"  {_ranges(answer.versions)} {would} be read"
    if answer.tags:
        yield f"  tags broken: {', '.join(answer.tags)}"
    yield from _list_policies(answer)
    yield from _list_undecided(answer)
    if answer.dry_run:
        yield f"  {NOTHING_CHANGED}"
        return
    yield from _list_tombstones(answer)
    for trace in answer.left:
        yield f"  left: {trace.path} ({trace.kind})"
    for path in answer.named_in:
        yield f"  an id is named in {path}"
    scanned = f"{count(answer.num_scanned, 'file')} scanned"
    if answer.is_proven:
        yield f"  {scanned}: nothing is left"
    elif answer.left or answer.named_in:
        yield f"  {scanned}: some of it is left"
    else:
        yield f"  {scanned}: nothing of the selection is left"


def _ranges(versions: tuple[tuple[int, int], ...]) -> str:
    ranges = ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in versions)
    is_one = len(versions) == 1 and versions[0][0] == versions[0][1]
    return f"{'version' if is_one else 'versions'} {ranges}"
