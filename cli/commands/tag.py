"""`replaylake tag`: names for versions of datasets."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from replaylake.cli.options import DEFAULT_LAKE, DebugOption, JsonOption, LakeOption
from replaylake.cli.output.command_output import CommandOutput, table_lines

_COLUMNS = ("dataset", "tag", "version", "created_at")


def set_tag(
    snapshot: Annotated[
        str,
        typer.Argument(
            metavar="NAME[@VERSION]",
            show_default=False,
            help="What to tag: a dataset at a version, at another tag, or newest.",
        ),
    ],
    tag: Annotated[
        str, typer.Argument(metavar="TAG", show_default=False, help="A name such as v1 or golden.")
    ],
    replace: Annotated[
        bool, typer.Option("--replace", help="Move a tag that points at another version.")
    ] = False,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Tag a version of a dataset.

    From then on NAME@TAG means that version, and its files are kept.

    Example:
      replaylake tag set cartpole@12 golden
      replaylake tag set cartpole golden --replace
    """
    from replaylake.datastore.lake.lake import open_lake

    report = CommandOutput(as_json)
    opened = open_lake(lake)
    pinned = opened.snapshot(snapshot)
    name, version = pinned.dataset, pinned.version
    previous = opened.tag(f"{name}@{version}", tag, replace=replace)
    body = {"dataset": name, "tag": tag, "version": version, "previous_version": previous}
    before = "" if previous in (None, version) else f", was {name}@{previous}"
    report.print_result(body, [f"{name}@{tag} is {name}@{version}{before}"])


def list_tags(
    dataset: Annotated[
        str | None,
        typer.Argument(metavar="DATASET", show_default=False, help="Of one dataset; else all."),
    ] = None,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List tags.

    Example:
      replaylake tag list
      replaylake tag list cartpole --json
    """
    from replaylake.datastore.lake.lake import open_lake

    report = CommandOutput(as_json)
    opened = open_lake(lake)
    if dataset is not None:
        opened.dataset(dataset).snapshot()  # a dataset that is not there has no tags to list
    rows = [
        {
            "dataset": tag.dataset,
            "tag": tag.name,
            "version": tag.version,
            "created_at": datetime.fromtimestamp(tag.created_ms / 1000, UTC).isoformat(
                timespec="seconds"
            ),
            "reproducible": tag.reproducible,
        }
        for tag in opened.tags.list(dataset)
    ]
    if not rows:
        report.print_message("no tags: `replaylake tag set NAME[@VERSION] TAG` makes one")
    # Said only where a purge broke one.
    is_whole = all(row["reproducible"] for row in rows)
    columns = _COLUMNS if is_whole else (*_COLUMNS, "reproducible")
    report.print_result({"tags": rows}, table_lines(rows, columns) if rows else [])


def remove_tag(
    snapshot: Annotated[
        str, typer.Argument(metavar="NAME@TAG", show_default=False, help="The tag to remove.")
    ],
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Remove a tag.

    The version stays until vacuum finds that nothing else keeps it.

    Example:
      replaylake tag remove cartpole@golden
    """
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.datastore.names import parse_snapshot

    report = CommandOutput(as_json)
    opened = open_lake(lake)
    name, tag = parse_snapshot(snapshot)
    if not isinstance(tag, str):
        raise typer.BadParameter(
            f"found {snapshot!r}, expected a dataset and its tag, such as {name}@golden.",
            param_hint="NAME@TAG",
        )
    version = opened.tags.version(name, tag)
    opened.tags.remove(name, tag)
    body = {"dataset": name, "tag": tag, "version": version}
    report.print_result(body, [f"removed the tag {name}@{tag}, which was {name}@{version}"])
