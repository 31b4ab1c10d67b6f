"""`replaylake maintain compact`: small shards into large ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from replaylake.cli.name_completion import complete_datasets
from replaylake.cli.options import (
    DEFAULT_LAKE,
    DebugOption,
    JsonOption,
    LakeOption,
    parse_size,
)
from replaylake.cli.output.command_output import CommandOutput, count, size

if TYPE_CHECKING:
    from replaylake.datastore.maintenance.compact import CompactReceipt


def compact(
    dataset: Annotated[
        str,
        typer.Argument(
            metavar="DATASET",
            autocompletion=complete_datasets,
            show_default=False,
            help="Name of the dataset.",
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            metavar="SIZE",
            show_default=False,
            help="Target size of a shard, 64MiB to 256MiB; by default that of the dataset's "
            "retention.",
        ),
    ] = None,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Rewrite small shards as large ones.

    Rows do not change, and earlier versions stay readable. Safe at any time.

    Example:
      replaylake maintain compact cartpole
    """
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.datastore.maintenance.compact import check_target
    from replaylake.datastore.maintenance.compact import compact as run
    from replaylake.datastore.maintenance.retention import read_retention

    report = CommandOutput(as_json)
    target_bytes = None if target is None else parse_size(target, "--target")
    if target_bytes is not None:
        check_target(target_bytes)
    store = open_lake(lake)
    if target_bytes is None:
        target_bytes = read_retention(store.dataset(dataset).snapshot().table).target_shard_bytes
    with report.progress("compacted", "shards") as progress:
        tables = run(store, dataset, target_bytes=target_bytes, on_progress=progress)
    report.print_result({"tables": [table.to_json() for table in tables]}, _lines(tables))


def _lines(tables: Sequence[CompactReceipt]) -> Iterator[str]:
    for table in tables:
        if not table.num_commits:
            yield f"{table.table}@{table.version}: {count(table.shards_after, 'shard')}, no change"
            continue
        yield (
            f"{table.table}@{table.version}: {count(table.shards_before, 'shard')} became "
            f"{table.shards_after:,}, {size(table.bytes_before)} became {size(table.bytes_after)}"
        )
        yield (
            f"  {count(table.num_rows, 'row')} of {count(table.num_rewritten, 'shard')} rewritten "
            f"in {count(table.num_commits, 'commit')}"
            + (
                f"; another writer was first {table.num_conflicts:,} times"
                * bool(table.num_conflicts)
            )
        )
