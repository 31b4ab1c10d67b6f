"""`replaylake history`: the versions of a dataset, newest first."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from replaylake.cli.name_completion import complete_datasets
from replaylake.cli.options import DEFAULT_LAKE, DebugOption, JsonOption, LakeOption
from replaylake.cli.output.command_output import CommandOutput, table_lines

_COLUMNS = (
    "version",
    "committed_at",
    "operation",
    "num_episodes",
    "num_steps",
    "shards",
    "tags",
    "producer",
)


def history(
    dataset: Annotated[
        str,
        typer.Argument(
            metavar="DATASET",
            autocompletion=complete_datasets,
            show_default=False,
            help="Name of the dataset.",
        ),
    ],
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", min=1, help="Maximum number of versions to list.")
    ] = 20,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List the versions of a dataset, newest first.

    Prints for each version its producer and tags, the episodes and steps that it added, and the
    shards that it added and removed.

    Example:
      replaylake history cartpole
      replaylake history cartpole --limit 5 --json
    """
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.datastore.lake.versions.history import read_history as history_of

    report = CommandOutput(as_json)
    with report.waiting(f"reading the log of {dataset}"):
        store = open_lake(lake)
        versions = history_of(store.dataset(dataset), store.tags, limit=limit)
    rows: list[dict[str, Any]] = []
    for version in versions.versions:
        body = asdict(version)
        committed_ms = body.pop("committed_ms")
        rows.append({**body, "committed_at": _time(committed_ms), "tags": list(version.tags)})
    texts = [
        {
            **row,
            "shards": f"+{row['shards_added']} -{row['shards_removed']}",
            "tags": ", ".join(row["tags"]),
        }
        for row in rows
    ]
    body = {"dataset": versions.dataset, "versions": rows, "num_older": versions.num_older}
    report.print_result(body, table_lines(texts, _COLUMNS))
    if versions.num_older:
        report.print_message(f"{versions.num_older:,} older not shown: --limit N shows more")


def _time(milliseconds: int | None) -> str | None:
    if milliseconds is None:
        return None
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="milliseconds")
