"""`replaylake policies`: the registered policies, their origin and their aliases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from replaylake.cli.options import (
    DEFAULT_LAKE,
    DebugOption,
    JsonOption,
    LakeOption,
    PolicyArgument,
)
from replaylake.cli.report import Report, table_lines, tree_lines


def list_policies(
    lake: LakeOption = DEFAULT_LAKE, as_json: JsonOption = False, debug: DebugOption = False
) -> None:
    """List every version of every policy.

    Example:
      replaylake policies list
    """
    from replaylake.datastore.lake import open_lake

    report = Report(as_json)
    registry = open_lake(lake).registry
    rows = [{**row, "created_at": _time(row["created_ms"])} for row in registry.list()]
    for row in rows:
        del row["created_ms"]
    if not rows:
        report.say(f"no policies in {lake}: `replaylake train offline` makes one")
    shown = [{**row, "aliases": ", ".join(row["aliases"])} for row in rows]
    columns = ("policy", "version", "aliases", "run_id", "created_at")
    report.answer({"policies": rows}, table_lines(shown, columns) if rows else [])


def show_policy(
    policy: PolicyArgument,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show where a policy comes from.

    Says which version answers, and what chose it.

    Example:
      replaylake policies show clone
      replaylake policies show clone@champion --json
    """
    from replaylake.datastore.lake import open_lake
    from replaylake.datastore.policies.package import check_package

    report = Report(as_json)
    registry = open_lake(lake).registry
    ref = registry.resolve(policy)
    entry = registry.show(ref)
    body = {
        **{key: value for key, value in entry.items() if key != "created_ms"},
        "created_at": _time(entry["created_ms"]),
        "selected_by": ref.selected_by,
        "manifest": check_package(ref.path).body,
    }
    report.answer(body, _shown(str(ref), body))


def alias_policy(
    policy: PolicyArgument,
    alias: Annotated[
        str,
        typer.Argument(metavar="ALIAS", show_default=False, help="A name such as champion."),
    ],
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Point an alias at a version.

    A policy's name alone means its alias champion, where there is one.

    Example:
      replaylake policies alias clone:2 champion
    """
    from replaylake.datastore.lake import open_lake

    report = Report(as_json)
    registry = open_lake(lake).registry
    ref = registry.resolve(policy)
    previous = registry.set_alias(ref.name, alias, ref.version)
    body = {
        "policy": ref.name,
        "alias": alias,
        "version": ref.version,
        "previous_version": previous,
        "selected_by": ref.selected_by,
    }
    before = "" if previous is None else f", was {ref.name}:{previous}"
    report.answer(body, [f"{ref.name}@{alias} is {ref}{before}"])


def _shown(ref: str, body: Mapping[str, Any]) -> Iterator[str]:
    yield f"{ref} ({body['selected_by']})"
    yield f"  aliases  {', '.join(body['aliases']) or 'none'}"
    yield f"  run      {body['run_id']}"
    yield f"  created  {body['created_at']}"
    yield f"  head     {body['manifest']['policy']['head']}"
    yield "  lineage"
    yield from tree_lines(body["lineage"], "    ")


def _time(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="seconds")
