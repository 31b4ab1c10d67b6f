"""`replaylake diff`: what differs between two versions of a dataset."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from replaylake.cli.name_completion import complete_datasets
from replaylake.cli.options import DEFAULT_LAKE, DebugOption, JsonOption, LakeOption
from replaylake.cli.output.command_output import CommandOutput, count

if TYPE_CHECKING:
    from replaylake.datastore.lake.versions.diff import ChangeCounts, EpisodeKey, VersionDiff

_MAX_SHOWN = 2


def diff(
    first: Annotated[
        str,
        typer.Argument(
            metavar="NAME@A",
            autocompletion=complete_datasets,
            show_default=False,
            help="Version or tag of a dataset to compare from.",
        ),
    ],
    second: Annotated[
        str,
        typer.Argument(
            metavar="NAME@B",
            autocompletion=complete_datasets,
            show_default=False,
            help="Version or tag of the same dataset to compare to; NAME alone is its newest "
            "version.",
        ),
    ],
    limit: Annotated[
        int,
        typer.Option(
            "--limit",
            metavar="N",
            min=0,
            help="Maximum number of episodes of each kind that --json lists.",
        ),
    ] = 1000,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Compare two versions of a dataset.

    Prints the episodes and steps that were added, removed and changed. Rows that compaction moved
    do not count as a difference.

    Example:
      replaylake diff cartpole@3 cartpole
      replaylake diff cartpole@golden cartpole@12 --json
    """
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.datastore.lake.versions.diff import diff as difference_of

    report = CommandOutput(as_json)
    store = open_lake(lake)
    with report.waiting(f"comparing {first} and {second}"):
        difference = difference_of(store.snapshot(first), store.snapshot(second), limit=limit)
    report.print_result(asdict(difference), _diff_lines(difference))


def _diff_lines(diff: VersionDiff) -> Iterator[str]:
    yield f"{diff.dataset}@{diff.from_version} to {diff.dataset}@{diff.to_version}"
    for noun, changes in (("episode", diff.episodes), ("step", diff.steps)):
        yield f"  {noun + 's':<9} {_counts(changes)}"
    yield f"  shards    {diff.shards.added:,} added, {diff.shards.removed:,} removed"
    for verb, columns in (("added", diff.columns_added), ("removed", diff.columns_removed)):
        if columns:
            yield f"  columns {verb}: {', '.join(columns)}"
    if diff.columns_changed:
        texts = [f"{name} in {count(n, 'step')}" for name, n in diff.columns_changed.items()]
        yield f"  columns changed: {', '.join(texts)}"
    for verb, keys in (
        ("added", diff.added),
        ("removed", diff.removed),
        ("changed", diff.changed),
    ):
        if keys:
            yield f"  {verb}: {_names(keys, getattr(diff.episodes, verb))}"


def _counts(changes: ChangeCounts) -> str:
    return f"{changes.added:,} added, {changes.removed:,} removed, {changes.changed:,} changed"


def _names(keys: tuple[EpisodeKey, ...], num_all: int) -> str:
    texts = [f"{k.episode_id}{f' ({k.agent_id})' if k.agent_id else ''}" for k in keys[:_MAX_SHOWN]]
    more = num_all - len(texts)
    return ", ".join(texts) + (f" and {more:,} more" if more else "")
