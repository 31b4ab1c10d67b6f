"""`replaylake datasets merge` and `split`: one dataset of several, several of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from replaylake.cli.name_completion import complete_datasets
from replaylake.cli.options import (
    DEFAULT_LAKE,
    DebugOption,
    JsonOption,
    LakeOption,
)
from replaylake.cli.output.command_output import CommandOutput, count, size

if TYPE_CHECKING:
    from replaylake.datastore.maintenance.merge import MergeReceipt
    from replaylake.datastore.maintenance.split import SplitReceipt


def merge(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME[@VERSION]...",
            autocompletion=complete_datasets,
            show_default=False,
            help="Datasets to merge, two or more, each at a version, a tag, or its newest version.",
        ),
    ],
    into: Annotated[
        str,
        typer.Option(
            "--into", metavar="NAME", show_default=False, help="Dataset to make; it must be new."
        ),
    ],
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Make one dataset of several, in one commit that names them.

    A step that several of them have is taken from the first.

    Example:
      replaylake datasets merge monday tuesday@3 --into week
    """
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.datastore.maintenance.merge import merge as run

    report = CommandOutput(as_json)
    with report.waiting(f"merging {', '.join(names)}"):
        receipt = run(open_lake(lake), names, into)
    report.print_result(receipt.to_json(), _merge_lines(receipt))


def split(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME[@VERSION]",
            autocompletion=complete_datasets,
            show_default=False,
            help="Dataset, at a version, a tag, or its newest version.",
        ),
    ],
    into: Annotated[
        list[str],
        typer.Option(
            "--into",
            metavar="NAME[=FRACTION]",
            show_default=False,
            help="Dataset to make, with the fraction of the episodes that it gets, as in "
            "train=0.8; with --where without a fraction, the first for those selected. Repeatable.",
        ),
    ],
    where: Annotated[
        str | None,
        typer.Option(
            "--where",
            metavar="SQL",
            show_default=False,
            help="Condition over episodes; those selected go into the first dataset, the others "
            "into the second.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            metavar="N",
            show_default=False,
            help="Seed of the split by fractions; 0 by default.",
        ),
    ] = None,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Split a dataset into several new ones, whole episodes each.

    By fractions, an episode is assigned by a hash of the seed and its id.

    Example:
      replaylake datasets split play --into play_train=0.8 --into play_test=0.2 --seed 7
      replaylake datasets split live --where "any(segment = 'b')" --into live_b --into live_rest
    """
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.datastore.maintenance.split import split_by_condition, split_by_fraction

    report = CommandOutput(as_json)
    pairs = [text.partition("=") for text in into]
    has_fractions = [bool(equals) for _, equals, _ in pairs]
    if where is None and not all(has_fractions):
        raise typer.BadParameter(
            f"found {', '.join(into)}, expected NAME=FRACTION each, or --where.",
            param_hint="--into",
        )
    if where is not None and (any(has_fractions) or seed is not None):
        raise typer.BadParameter(
            "found a fraction or a seed beside it, expected one of the two ways to split.",
            param_hint="--where",
        )
    store = open_lake(lake)
    with report.waiting(f"splitting {name}"):
        if where is not None:
            receipt = split_by_condition(store, name, where, into)
        else:
            fractions = {part: _fraction(text) for part, _, text in pairs}
            if len(fractions) < len(pairs):
                raise typer.BadParameter("found a dataset twice.", param_hint="--into")
            receipt = split_by_fraction(store, name, fractions, seed=seed or 0)
    report.print_result(receipt.to_json(), _split_lines(receipt))


def _fraction(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise typer.BadParameter(
            f"found {text!r}, expected a fraction such as 0.8.", param_hint="--into"
        ) from error


def _merge_lines(receipt: MergeReceipt) -> Iterator[str]:
    if receipt.version is None:
        yield f"{receipt.dataset}: already merged of these versions; nothing was added"
        return
    yield (
        f"{receipt.dataset}@{receipt.version}: {count(receipt.num_episodes, 'episode')}, "
        f"{count(receipt.num_steps, 'step')} in {count(receipt.num_shards, 'shard')}, "
        f"{size(receipt.num_bytes)}"
    )
    for source in receipt.sources:
        line = f"  {source.source}: {count(source.num_steps, 'step')}"
        if source.num_already_present_steps:
            line += f"; {source.num_already_present_steps:,} that a source before it has left out"
        yield line


def _split_lines(receipt: SplitReceipt) -> Iterator[str]:
    for part in receipt.parts:
        if part.version is None:
            yield f"{part.dataset}: already split off {receipt.source}; nothing was added"
        else:
            yield (
                f"{part.dataset}@{part.version}: {count(part.num_episodes, 'episode')}, "
                f"{count(part.num_steps, 'step')} of {receipt.source}"
            )
