"""`replaylake datasets rename-column` and `drop-column`: the further columns of a dataset."""

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
)
from replaylake.cli.output.command_output import CommandOutput, count, size

if TYPE_CHECKING:
    from replaylake.datastore.maintenance.columns import ColumnReceipt


def rename_column(
    dataset: Annotated[
        str,
        typer.Argument(
            metavar="DATASET",
            autocompletion=complete_datasets,
            show_default=False,
            help="Name of the dataset.",
        ),
    ],
    column: Annotated[
        str, typer.Argument(metavar="COLUMN", show_default=False, help="Column to rename.")
    ],
    to: Annotated[str, typer.Argument(metavar="TO", show_default=False, help="Its new name.")],
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Rename a further column of a dataset.

    A new version has the new name; the shards that have the column are written again.

    Example:
      replaylake datasets rename-column live segment customer_segment
    """
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.datastore.maintenance.columns import rename_column as run

    report = CommandOutput(as_json)
    with report.waiting(f"renaming {column} of {dataset}"):
        receipt = run(open_lake(lake), dataset, column, to)
    report.print_result(receipt.to_json(), _lines(receipt))


def drop_column(
    dataset: Annotated[
        str,
        typer.Argument(
            metavar="DATASET",
            autocompletion=complete_datasets,
            show_default=False,
            help="Name of the dataset.",
        ),
    ],
    column: Annotated[
        str, typer.Argument(metavar="COLUMN", show_default=False, help="Column to drop.")
    ],
    yes: Annotated[
        bool, typer.Option("--yes", help="Drop it; without it, only print what would change.")
    ] = False,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Drop a further column of a dataset.

    The shards that have the column are written again; earlier versions retain it until
    `maintain vacuum`.

    Example:
      replaylake datasets drop-column live raw_prompt
      replaylake datasets drop-column live raw_prompt --yes
    """
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.datastore.maintenance.columns import drop_column as run

    report = CommandOutput(as_json)
    with report.waiting(f"dropping {column} of {dataset}" if yes else f"looking at {dataset}"):
        receipt = run(open_lake(lake), dataset, column, dry_run=not yes)
    report.print_result(receipt.to_json(), _lines(receipt))


def _lines(receipt: ColumnReceipt) -> Iterator[str]:
    rewritten = (
        f"{count(receipt.num_shards, 'shard')} of {count(receipt.num_rows, 'row')}, "
        f"{size(receipt.num_bytes)}"
    )
    if receipt.dry_run:
        yield f"{receipt.dataset}: would drop column {receipt.column}, writing {rewritten} again"
        yield f"  {NOTHING_CHANGED}"
        return
    is_drop = receipt.to is None
    change = f"{receipt.column} dropped" if is_drop else f"{receipt.column} is now {receipt.to}"
    yield f"{receipt.dataset}@{receipt.version}: column {change}"
    yield f"  {rewritten} written again; earlier versions keep the column as it was"
