"""`replaylake maintain trim`: the oldest whole episodes go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from replaylake.cli.name_completion import complete_datasets
from replaylake.cli.options import (
    DEFAULT_LAKE,
    NOTHING_CHANGED,
    DebugOption,
    JsonOption,
    LakeOption,
    parse_duration,
)
from replaylake.cli.output.command_output import CommandOutput, count

if TYPE_CHECKING:
    from replaylake.datastore.maintenance.trim import TrimReceipt


def trim(
    dataset: Annotated[
        str,
        typer.Argument(
            metavar="DATASET",
            autocompletion=complete_datasets,
            show_default=False,
            help="Name of the dataset.",
        ),
    ],
    max_steps: Annotated[
        int | None,
        typer.Option(
            "--max-steps",
            metavar="N",
            min=0,
            show_default=False,
            help="Maximum number of steps to keep.",
        ),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            "--older-than",
            metavar="AGE",
            show_default=False,
            help="Remove episodes whose newest row is older than this, for example 15m or 30d.",
        ),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Remove; without it, only print what would be removed.")
    ] = False,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Remove the oldest whole episodes.

    Open episodes are not removed. Earlier versions retain the removed episodes until
    `maintain vacuum`.

    Example:
      replaylake maintain trim play --max-steps 1000000
      replaylake maintain trim live --older-than 30d --yes
    """
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.datastore.maintenance.trim import trim as run

    if max_steps is None and older_than is None:
        raise typer.BadParameter(
            "found neither, expected one or both.", param_hint="--max-steps / --older-than"
        )
    report = CommandOutput(as_json)
    age_s = None if older_than is None else parse_duration(older_than, "--older-than")
    with report.waiting(f"trimming {dataset}" if yes else f"looking through {dataset}"):
        receipt = run(
            open_lake(lake), dataset, max_steps=max_steps, older_than_s=age_s, dry_run=not yes
        )
    report.print_result(receipt.to_json(), _lines(receipt))


def _lines(trim: TrimReceipt) -> Iterator[str]:
    what = f"{count(trim.num_episodes, 'episode')}, {count(trim.num_steps, 'step')}"
    rest = f"{count(trim.steps_left, 'step')} left"
    if not trim.num_episodes:
        yield f"{trim.dataset}@{trim.version}: nothing to trim; {rest}"
    elif trim.dry_run:
        yield f"{trim.dataset}: would remove {what}; {rest}"
    else:
        yield f"{trim.dataset}@{trim.version}: {what} removed; {rest}"
        yield (
            f"  {count(trim.shards_dropped, 'shard')} dropped whole, {trim.shards_rewritten:,} "
            "rewritten"
        )
    if trim.num_decisions or trim.num_rewards:
        yield (
            f"  {count(trim.num_decisions, 'decision')} and {count(trim.num_rewards, 'reward')} "
            f"{'go' if trim.dry_run else 'removed'} with them"
        )
    if trim.num_received:
        verb = "go" if trim.dry_run else "removed"
        yield f"  {count(trim.num_received, 'received step')} {verb} with them"
    if trim.num_rejected:
        verb = "would leave" if trim.dry_run else "left"
        yield f"  {count(trim.num_rejected, 'row')} {verb} the quarantine"
    if trim.dry_run and (trim.num_episodes or trim.num_rejected):
        yield f"  {NOTHING_CHANGED}"
