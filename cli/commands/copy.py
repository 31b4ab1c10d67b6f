"""`replaylake datasets copy`: a snapshot into another lake."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from replaylake.cli.name_completion import complete_datasets
from replaylake.cli.options import DEFAULT_LAKE, DebugOption, JsonOption, LakeOption
from replaylake.cli.output.command_output import CommandOutput, count, size

if TYPE_CHECKING:
    from replaylake.datastore.maintenance.copy.copy import CopyReceipt


def copy(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME[@VERSION]",
            autocompletion=complete_datasets,
            show_default=False,
            help="Dataset to copy, at a version, a tag, or its newest version.",
        ),
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="LAKE", show_default=False, help="Path or URL of the lake to copy into."
        ),
    ],
    as_name: Annotated[
        str | None,
        typer.Option(
            "--as", metavar="NAME", help="Name of the copy; by default that of the dataset."
        ),
    ] = None,
    readmit: Annotated[
        bool,
        typer.Option(
            "--readmit",
            help="Also copy what was deleted from either dataset; it counts as deleted no more.",
        ),
    ] = False,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Copy a dataset into another lake.

    Safe while others append. A repeated copy transfers only new steps; copies from several lakes
    into one are merged. No step is stored twice.

    Example:
      replaylake datasets copy cartpole /backup/lake
      replaylake datasets copy robots s3://center/lake --as fleet
    """
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.datastore.maintenance.copy.copy import copy as run

    report = CommandOutput(as_json)
    source = open_lake(lake)
    source.snapshot(name)  # before the target is made
    with report.progress("copied", "bytes") as progress:
        receipt = run(
            source,
            name,
            open_lake(target, create=True),
            as_name=as_name,
            on_progress=progress,
            readmit=readmit,
        )
    report.print_result(receipt.to_json(), _lines(receipt))


def _lines(receipt: CopyReceipt) -> Iterator[str]:
    where = f"{receipt.target}: {receipt.dataset}"
    if receipt.version is None:
        yield f"{receipt.source} -> {where}: nothing to add"
    else:
        added = f"{count(receipt.num_episodes, 'episode')}, {count(receipt.num_steps, 'step')}"
        shards = f"{count(receipt.num_shards, 'shard')}, {size(receipt.num_bytes)}"
        yield f"{receipt.source} -> {where}@{receipt.version}: {added} in {shards}"
    if receipt.num_already_present_steps:
        yield f"  already present: {count(receipt.num_already_present_steps, 'step')}"
    if receipt.num_deleted_before_steps:
        yield f"  deleted before: {count(receipt.num_deleted_before_steps, 'step')}"
    for note in receipt.notes:
        yield f"  note: {note}"
