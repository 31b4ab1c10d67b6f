"""`replaylake datasets tag`: names for versions of datasets."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from replaylake.cli.name_completion import complete_datasets
from replaylake.cli.options import DEFAULT_LAKE, DebugOption, JsonOption, LakeOption
from replaylake.cli.output.command_output import CommandOutput, table_lines

_COLUMNS = ("dataset", "tag", "version", "created_at")


def tag(
    snapshot: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME[@VERSION]",
            autocompletion=complete_datasets,
            show_default=False,
            help="Dataset to tag, at a version, another tag, or its newest version. With --list: "
            "the dataset whose tags are listed. With --remove: NAME@TAG.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="TAG", show_default=False, help="Tag to set, for example v1 or golden."
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Move the tag if it is at another version.")
    ] = False,
    listing: Annotated[
        bool, typer.Option("--list", help="List the tags of a dataset, or of all datasets.")
    ] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the tag NAME@TAG.")] = False,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Tag a version of a dataset, or list or remove tags.

    NAME@TAG then refers to that version, and its files are retained. After the tag is removed,
    they remain until `maintain vacuum` finds that nothing else needs them.

    Example:
      replaylake datasets tag cartpole@12 golden
      replaylake datasets tag cartpole golden --replace
      replaylake datasets tag --list
      replaylake datasets tag --remove cartpole@golden
    """
    if replace + listing + remove > 1:
        raise typer.BadParameter(
            "found several, expected at most one.", param_hint="--replace / --list / --remove"
        )
    if listing or remove:
        if name is not None:
            option, form = ("--list", "a dataset") if listing else ("--remove", "NAME@TAG")
            raise typer.BadParameter(
                f"found {name!r} as a second name, expected {form} alone.", param_hint=option
            )
        if listing:
            _list_tags(CommandOutput(as_json), lake, snapshot)
        else:
            _remove_tag(CommandOutput(as_json), lake, snapshot)
    elif snapshot is None or name is None:
        raise typer.BadParameter(
            "expected a dataset and a tag, or --list or --remove.",
            param_hint="NAME[@VERSION] TAG",
        )
    else:
        _set_tag(CommandOutput(as_json), lake, snapshot, name, replace)


def _set_tag(report: CommandOutput, lake: str, snapshot: str, tag: str, replace: bool) -> None:
    from replaylake.datastore.lake.lake import open_lake

    store = open_lake(lake)
    pinned = store.snapshot(snapshot)
    name, version = pinned.dataset, pinned.version
    previous = store.tag(f"{name}@{version}", tag, replace=replace)
    body = {"dataset": name, "tag": tag, "version": version, "previous_version": previous}
    before = "" if previous in (None, version) else f", was {name}@{previous}"
    report.print_result(body, [f"{name}@{tag} is {name}@{version}{before}"])


def _list_tags(report: CommandOutput, lake: str, dataset: str | None) -> None:
    from replaylake.datastore.lake.lake import open_lake

    store = open_lake(lake)
    if dataset is not None:
        store.dataset(dataset).snapshot()  # a dataset that is not there has no tags to list
    rows = [
        {
            "dataset": one.dataset,
            "tag": one.name,
            "version": one.version,
            "created_at": datetime.fromtimestamp(one.created_ms / 1000, UTC).isoformat(
                timespec="seconds"
            ),
            "reproducible": one.reproducible,
        }
        for one in store.tags.list(dataset)
    ]
    if not rows:
        report.print_message("no tags: `replaylake datasets tag NAME[@VERSION] TAG` sets one")
    # The column is shown only where a purge broke a tag.
    is_whole = all(row["reproducible"] for row in rows)
    columns = _COLUMNS if is_whole else (*_COLUMNS, "reproducible")
    report.print_result({"tags": rows}, table_lines(rows, columns) if rows else [])


def _remove_tag(report: CommandOutput, lake: str, snapshot: str | None) -> None:
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.datastore.names import parse_snapshot

    if snapshot is None:
        raise typer.BadParameter("found no tag, expected NAME@TAG.", param_hint="--remove")
    store = open_lake(lake)
    name, tag = parse_snapshot(snapshot)
    if not isinstance(tag, str):
        raise typer.BadParameter(
            f"found {snapshot!r}, expected a dataset and its tag, for example {name}@golden.",
            param_hint="--remove",
        )
    version = store.tags.version(name, tag)
    store.tags.remove(name, tag)
    body = {"dataset": name, "tag": tag, "version": version}
    report.print_result(body, [f"removed the tag {name}@{tag}, which was {name}@{version}"])
