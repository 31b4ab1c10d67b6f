"""`replaylake export`: a snapshot or selection as a file of another format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
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
    from replaylake.datastore.interchange.export.export import ExportReceipt


def export(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME[@VERSION]",
            autocompletion=complete_datasets,
            show_default=False,
            help="Dataset to export, at a version, a tag, or its newest version.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", show_default=False, help="File to write; for some formats a directory."
        ),
    ],
    form: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORMAT",
            show_default=False,
            help="Format to write, one that `replaylake formats` marks as written.",
        ),
    ],
    where: Annotated[
        str | None,
        typer.Option(
            "--where",
            metavar="SQL",
            help="Condition over episodes and their steps that selects whole episodes.",
        ),
    ] = None,
    where_steps: Annotated[
        str | None,
        typer.Option(
            "--where-steps",
            metavar="SQL",
            help="Condition over the columns of steps that selects steps.",
        ),
    ] = None,
    where_pairs: Annotated[
        str | None,
        typer.Option(
            "--where-pairs",
            metavar="SQL",
            help="Condition over the columns of preference_pairs, for formats of pairs; by "
            "default pair = 1, the best sample of each prompt against the worst.",
        ),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(
            "--label",
            metavar="COLUMN",
            help="Further column, or key of the metadata, that has the right answer, for formats "
            "of prompts.",
        ),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            "--threshold",
            metavar="RETURN",
            help="Return above which a sample is desirable (trl-kto, marti-kto); by default 0.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing export.")] = False,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Write a dataset, or a part of it, in another format.

    The file is written whole or not at all. Ingesting it gives equal rows, except for values that
    the format cannot store; notes list these. Formats for trainers of language models have
    dialogues, prompts, preference pairs or token sequences as rows.

    Example:
      replaylake export cartpole --to parquet cartpole.parquet
      replaylake export cartpole@3 --to csv good.csv --where '"return" >= 150'
      replaylake export math --to trl-dpo pairs.jsonl --where-pairs 'margin >= 0.5'
    """
    from replaylake.datastore.interchange.export.export import check_format
    from replaylake.datastore.interchange.export.export import export as run
    from replaylake.datastore.lake.lake import open_lake

    report = CommandOutput(as_json)
    check_format(form)
    with report.progress("wrote", "steps") as progress:
        receipt = run(
            open_lake(lake),
            name,
            out,
            format=form,
            where=where,
            where_steps=where_steps,
            where_pairs=where_pairs,
            label=label,
            threshold=threshold,
            force=force,
            on_progress=progress,
        )
    report.print_result(receipt.to_json(), _lines(receipt))


def _lines(receipt: ExportReceipt) -> Iterator[str]:
    rows = "" if receipt.num_rows is None else f"{count(receipt.num_rows, 'row')} from "
    yield (
        f"{receipt.dataset}@{receipt.version} -> {receipt.path} ({receipt.format}): {rows}"
        f"{count(receipt.num_episodes, 'episode')}, {count(receipt.num_steps, 'step')}, "
        f"{size(receipt.num_bytes)}"
    )
    for note in receipt.notes:
        yield f"  note: {note}"
