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
    opened = open_lake(lake)
    if purge:
        _purge(report, opened, dataset, where, yes)
        return
    from replaylake.datastore.maintenance.delete import delete as run

    with report.waiting(f"deleting from {dataset}" if yes else f"looking through {dataset}"):
        done = run(opened, dataset, where, dry_run=not yes)
    report.print_result(done.to_json(), _delete_lines(done))


def _purge(report: CommandOutput, lake: Lake, dataset: str, where: str, yes: bool) -> None:
    from replaylake.datastore.maintenance.purge.purge import purge as run

    with report.waiting(f"purging {dataset}" if yes else f"looking through {dataset}"):
        done = run(lake, dataset, where, dry_run=not yes)
    report.print_result(done.to_json(), _purge_lines(done))
    if not done.dry_run and not done.is_proven:
        raise typer.Exit(_EXIT_NO)


def _delete_lines(done: DeleteReceipt) -> Iterator[str]:
    feedback = f"{count(done.num_decisions, 'decision')}, {count(done.num_rewards, 'reward')}"
    what = f"{count(done.num_episodes, 'episode')}, {count(done.num_steps, 'step')}, {feedback}"
    if done.num_rejected:
        what = f"{what}, {count(done.num_rejected, 'row')} in quarantine"
    if done.num_received:
        what = f"{what}, {count(done.num_received, 'received step')}"
    left = f"{count(done.steps_left, 'step')} left"
    if done.num_episodes == 0:
        yield f"{done.dataset}: nothing to delete"
        yield from _undecided(done)
    elif done.dry_run:
        yield f"{done.dataset}: would delete {what}; {left}"
        yield from _undecided(done)
        yield f"  {NOTHING_CHANGED}"
    else:
        at = "" if done.version is None else f"@{done.version}"
        yield f"{done.dataset}{at}: deleted {what}; {left}"
        yield "  earlier versions keep them until vacuum; --purge takes them out of those too"
        yield from _undecided(done)


def _undecided(done: DeleteReceipt | PurgeReceipt) -> Iterator[str]:
    if done.num_undecided:
        yield (
            f"  {count(done.num_undecided, 'episode')} in quarantine may be meant, too: the "
            f"condition asks what is not known of them. Look into {done.dataset}.quarantine, and "
            "name them by episode_id"
        )


def _purge_lines(done: PurgeReceipt) -> Iterator[str]:
    if done.num_episodes == 0:
        yield f"{done.dataset}: nothing to purge"
        yield from _undecided(done)
        return
    what = (
        f"{count(done.num_episodes, 'episode')}, {count(done.num_steps, 'step')} of the newest "
        f"version, {count(done.num_decisions, 'decision')}, {count(done.num_files, 'file')}"
    )
    if done.dry_run:
        yield f"{done.dataset}: would purge {what}"
    else:
        yield f"{done.dataset}@{done.version}: purged {what} (purge {done.id})"
    for one in done.resumed:
        yield f"  purge {one} had not come to its end: finished"
    would = "could no longer" if done.dry_run else "can no longer"
    if done.versions:
        yield f"  {_ranges(done.versions)} {would} be read"
    if done.tags:
        yield f"  tags broken: {', '.join(done.tags)}"
    for policy, num in done.policies.items():
        of = "some, perhaps: its version cannot be read" if num is None else count(num, "episode")
        yield f"  policy {policy} was trained on them: {of}"
    yield from _undecided(done)
    if done.dry_run:
        yield f"  {NOTHING_CHANGED}"
        return
    for trace in done.left:
        yield f"  left: {trace.path} ({trace.kind})"
    for path in done.named_in:
        yield f"  an id stands in {path}"
    scanned = f"{count(done.num_scanned, 'file')} scanned"
    if done.is_proven:
        yield f"  {scanned}: none is left"
    elif done.left or done.named_in:
        yield f"  {scanned}: not all is gone"
    else:
        yield f"  {scanned}: all that was selected is gone"


def _ranges(versions: tuple[tuple[int, int], ...]) -> str:
    ranges = ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in versions)
    is_one = len(versions) == 1 and versions[0][0] == versions[0][1]
    return f"{'version' if is_one else 'versions'} {ranges}"
