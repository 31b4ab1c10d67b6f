"""`replaylake datasets delete`: whole episodes go, from now on or from every version."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from replaylake.cli.options import (
    DEFAULT_LAKE,
    NOTHING_CHANGED,
    DebugOption,
    JsonOption,
    LakeOption,
)
from replaylake.cli.output.command_output import CommandOutput, count

if TYPE_CHECKING:
    from replaylake.datastore.lake.lake import Lake
    from replaylake.datastore.maintenance.delete import DeleteReceipt
    from replaylake.datastore.maintenance.purge.purge import PurgeReceipt

_EXIT_NO = 3


def delete(
    dataset: Annotated[
        str, typer.Argument(metavar="DATASET", show_default=False, help="Name of the dataset.")
    ],
    where: Annotated[
        str,
        typer.Option(
            "--where",
            metavar="SQL",
            show_default=False,
            help="Condition over the columns of episodes that selects whole episodes.",
        ),
    ],
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
    read. Exit code 3 if a purge cannot verify that nothing is left.

    Example:
      replaylake datasets delete live --where "source_episode_id = 'user-4711'"
      replaylake datasets delete live --where "source_episode_id = 'user-4711'" --purge --yes
    """
    from replaylake.datastore.lake.lake import open_lake

    report = CommandOutput(as_json)
    store = open_lake(lake)
    if purge:
        _purge(report, store, dataset, where, yes)
        return
    from replaylake.datastore.maintenance.delete import delete as run

    with report.waiting(f"deleting from {dataset}" if yes else f"looking through {dataset}"):
        answer = run(store, dataset, where, dry_run=not yes)
    report.print_result(answer.to_json(), _delete_lines(answer))


def _purge(report: CommandOutput, lake: Lake, dataset: str, where: str, yes: bool) -> None:
    from replaylake.datastore.maintenance.purge.purge import purge as run

    with report.waiting(f"purging {dataset}" if yes else f"looking through {dataset}"):
        answer = run(lake, dataset, where, dry_run=not yes)
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
    if answer.num_episodes == 0:
        yield f"{answer.dataset}: nothing to delete"
        yield from _list_undecided(answer)
    elif answer.dry_run:
        yield f"{answer.dataset}: would delete {what}; {rest}"
        yield from _list_undecided(answer)
        yield f"  {NOTHING_CHANGED}"
    else:
        at = "" if answer.version is None else f"@{answer.version}"
        yield f"{answer.dataset}{at}: deleted {what}; {rest}"
        yield "  earlier versions keep them until vacuum; --purge takes them out of those too"
        yield from _list_undecided(answer)


def _list_undecided(answer: DeleteReceipt | PurgeReceipt) -> Iterator[str]:
    if answer.num_undecided:
        yield (
            f"  {count(answer.num_undecided, 'episode')} in quarantine may be meant, too: the "
            f"condition asks what is not known of them. Look into {answer.dataset}.quarantine, and "
            "name them by episode_id"
        )


def _purge_lines(answer: PurgeReceipt) -> Iterator[str]:
    if answer.num_episodes == 0:
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
        yield f"  purge {one} had not come to its end: finished"
    would = "could no longer" if answer.dry_run else "can no longer"
    if answer.versions:
        yield f"  {_ranges(answer.versions)} {would} be read"
    if answer.tags:
        yield f"  tags broken: {', '.join(answer.tags)}"
    for policy, num in answer.policies.items():
        of = "some, perhaps: its version cannot be read" if num is None else count(num, "episode")
        yield f"  policy {policy} was trained on them: {of}"
    yield from _list_undecided(answer)
    if answer.dry_run:
        yield f"  {NOTHING_CHANGED}"
        return
    for trace in answer.left:
        yield f"  left: {trace.path} ({trace.kind})"
    for path in answer.named_in:
        yield f"  an id stands in {path}"
    scanned = f"{count(answer.num_scanned, 'file')} scanned"
    if answer.is_proven:
        yield f"  {scanned}: none is left"
    elif answer.left or answer.named_in:
        yield f"  {scanned}: not all is gone"
    else:
        yield f"  {scanned}: all that was selected is gone"


def _ranges(versions: tuple[tuple[int, int], ...]) -> str:
    ranges = ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in versions)
    is_one = len(versions) == 1 and versions[0][0] == versions[0][1]
    return f"{'version' if is_one else 'versions'} {ranges}"
