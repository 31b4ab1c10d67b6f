"""`replaylake policies`: the registered policies, their origin, aliases, notes and history."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replaylake.cli.name_completion import complete_policies
from replaylake.cli.options import (
    DEFAULT_LAKE,
    NOTHING_CHANGED,
    ByOption,
    DebugOption,
    JsonOption,
    LakeOption,
    NoteOption,
    PolicyArgument,
    user_name,
)
from replaylake.cli.output.command_output import CommandOutput, cell_text, count, table_lines
from replaylake.cli.output.run_lines import record_lines

if TYPE_CHECKING:
    from replaylake.datastore.lake.policies.aliases import Move
    from replaylake.datastore.lake.policies.registry import PolicyRef, Registry

# Of what `policies show` prints, that which `policies diff` compares beside the manifest's part.
_COMPARED = ("aliases", "run_id", "created_at", "protected", "lineage")


def list_policies(
    lake: LakeOption = DEFAULT_LAKE, as_json: JsonOption = False, debug: DebugOption = False
) -> None:
    """List every version of every policy.

    Example:
      replaylake policies list
    """
    from replaylake.datastore.lake.lake import open_lake

    report = CommandOutput(as_json)
    registry = open_lake(lake).registry
    rows = [{**row, "created_at": _time(row["created_ms"])} for row in registry.list()]
    for row in rows:
        del row["created_ms"]
    if not rows:
        report.print_message(f"no policies in {lake}: `replaylake train offline` makes one")
    texts = [{**row, "aliases": ", ".join(row["aliases"])} for row in rows]
    columns = ("policy", "version", "aliases", "run_id", "created_at")
    report.print_result({"policies": rows}, table_lines(texts, columns) if rows else [])


def show_policy(
    policy: PolicyArgument,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show the origin of a policy.

    Prints its lineage, aliases, notes and saved evaluations, and of a name without a version to
    which version it refers, and all of its versions.

    Example:
      replaylake policies show clone
      replaylake policies show clone@champion --json
    """
    from replaylake.datastore.lake.lake import open_lake

    report = CommandOutput(as_json)
    registry = open_lake(lake).registry
    ref = registry.resolve(policy)
    evaluations = [
        {key: value for key, value in one.to_json().items() if key != "report"}
        for one in registry.evaluations.list(
            ref.name,
            ref.version,
            on_unreadable=lambda error: report.print_message(f"left out: {error}"),
        )
    ]
    body = {**_describe(registry, ref), "evaluations": evaluations}
    if policy == ref.name:
        body["versions"] = [
            {
                "version": row["version"],
                "aliases": row["aliases"],
                "run_id": row["run_id"],
                "created_at": _time(row["created_ms"]),
            }
            for row in registry.list()
            if row["policy"] == ref.name
        ]
    report.print_result(body, _policy_lines(str(ref), body))


def diff_policies(
    first: Annotated[
        str,
        typer.Argument(
            metavar="POLICY_A",
            autocompletion=complete_policies,
            show_default=False,
            help="Policy, as name:version, name@alias or name.",
        ),
    ],
    second: Annotated[
        str,
        typer.Argument(
            metavar="POLICY_B",
            autocompletion=complete_policies,
            show_default=False,
            help="Policy to compare it with, as name:version, name@alias or name.",
        ),
    ],
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Compare two versions of policies.

    Prints the fields of `policies show` that differ, for example lineage, head and aliases.
    `evaluate --compare` and `promote --gate` compare returns.

    Example:
      replaylake policies diff clone:1 clone:2
      replaylake policies diff clone@champion clone@challenger --json
    """
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.datastore.lake.runs.summary import compare_fields

    report = CommandOutput(as_json)
    registry = open_lake(lake).registry
    refs = [registry.resolve(text) for text in (first, second)]
    bodies = [_describe(registry, ref) for ref in refs]
    fields = compare_fields(
        [
            {**{key: body[key] for key in _COMPARED}, "manifest": body["manifest"]["policy"]}
            for body in bodies
        ]
    )
    names = [{key: body[key] for key in ("policy", "version", "selected_by")} for body in bodies]
    columns = [str(ref) for ref in refs]
    rows = [
        {"field": name, **dict(zip(columns, map(cell_text, values), strict=True))}
        for name, values in fields.items()
    ]
    lines = table_lines(rows, ("field", *columns)) if rows else ["no difference"]
    report.print_result({"policies": names, "fields": fields}, lines)


def policy_history(
    policy: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            autocompletion=complete_policies,
            show_default=False,
            help="Name of the policy.",
        ),
    ],
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List the moves of aliases, and when versions served.

    Example:
      replaylake policies history clone
    """
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.datastore.maintenance.lineage.served_versions import list_served_versions

    report = CommandOutput(as_json)
    store = open_lake(lake)
    name = store.registry.resolve(policy).name
    moves = store.registry.alias_history(name)
    served = [one.to_json() for one in list_served_versions(store, name)]
    body = {
        "policy": name,
        "moves": [{**move.to_json(), "at": _time(move.at_ms)} for move in moves],
        "served": served,
    }
    report.print_result(body, _history(name, moves, served))


def note_policy(
    policy: PolicyArgument,
    text: Annotated[
        str, typer.Argument(metavar="TEXT", show_default=False, help="Text of the note.")
    ],
    by: ByOption = None,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Add a note to a version.

    `policies show` prints all notes of a version.

    Example:
      replaylake policies note clone:3 'trained without the logs of May'
    """
    from replaylake.datastore.lake.lake import open_lake

    report = CommandOutput(as_json)
    registry = open_lake(lake).registry
    ref = registry.resolve(policy)
    note = registry.marks.add_note(ref.name, ref.version, text, by=by or user_name())
    body = {"policy": ref.name, "version": ref.version, "text": note.text, "by": note.by}
    report.print_result({**body, "at_ms": note.at_ms}, [f"added a note to {ref}: {note.text}"])


def protect_policy(
    policy: PolicyArgument,
    by: ByOption = None,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Protect a version from deletion.

    Example:
      replaylake policies protect clone:3
    """
    _protect(policy, True, by, lake, as_json)


def unprotect_policy(
    policy: PolicyArgument,
    by: ByOption = None,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Allow a version to be deleted again.

    Example:
      replaylake policies unprotect clone:3
    """
    _protect(policy, False, by, lake, as_json)


def delete_policy(
    policy: Annotated[
        str,
        typer.Argument(
            metavar="NAME:VERSION",
            autocompletion=complete_policies,
            show_default=False,
            help="Version to delete.",
        ),
    ],
    yes: Annotated[
        bool, typer.Option("--yes", help="Delete; without it, only print what would be deleted.")
    ] = False,
    note: NoteOption = None,
    by: ByOption = None,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Delete a version of a policy.

    Refused while it is protected or an alias points at it. Its lineage is retained, and its number
    is not reused. `maintain vacuum` deletes its files once they are older than the retention limit.

    Example:
      replaylake policies delete clone:2
      replaylake policies delete clone:2 --yes
    """
    from replaylake.datastore.lake.lake import open_lake

    report = CommandOutput(as_json)
    registry = open_lake(lake).registry
    name, colon, version = policy.partition(":")
    if not colon or not version.isdecimal():
        raise typer.BadParameter(
            f"found {policy!r}, expected a version by its number, such as {name}:2.",
            param_hint="NAME:VERSION",
        )
    ref = registry.resolve(policy)
    registry.marks.check_deletable(ref.name, ref.version)
    if yes:
        registry.marks.delete(ref.name, ref.version, by=by or user_name(), note=note)
    else:
        report.print_message(NOTHING_CHANGED)
    body = {"policy": ref.name, "version": ref.version, "deleted": yes, "path": ref.folder}
    verb = "deleted" if yes else "would delete"
    fate = f"`maintain vacuum` removes its files in {ref.folder} once they are old enough"
    report.print_result(body, [f"{verb} {ref}; {fate}"])


def _describe(registry: Registry, ref: PolicyRef) -> dict[str, Any]:
    from replaylake.datastore.lake.policies.package import check_package

    entry = registry.show(ref)
    return {
        **{key: entry[key] for key in entry if not key.startswith(("created", "deleted"))},
        "created_at": _time(entry["created_ms"]),
        "selected_by": ref.selected_by,
        "manifest": check_package(ref.path, ref.manifest_sha256).body,
    }


def _protect(policy: str, is_on: bool, by: str | None, lake: str, as_json: bool) -> None:
    from replaylake.datastore.lake.lake import open_lake

    report = CommandOutput(as_json)
    registry = open_lake(lake).registry
    ref = registry.resolve(policy)
    changed = registry.marks.protect(ref.name, ref.version, is_on, by=by or user_name())
    body = {"policy": ref.name, "version": ref.version, "protected": is_on, "changed": changed}
    already = "" if changed else " already"
    state = "protected from deletion" if is_on else "not protected from deletion"
    report.print_result(body, [f"{ref} is {state}{already}"])


def _history(
    name: str, moves: Sequence[Move], served: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    if moves:
        rows = [_move_row(move) for move in moves]
        yield from table_lines(rows, list(rows[0]))
    else:
        yield f"no alias of {name} was ever set"
    yield ""
    if served:
        columns = ("version", "dataset", "num_decisions", "first_at", "last_at")
        yield from table_lines(served, columns)
    else:
        yield f"no decision of {name} is in this lake"


def _move_row(move: Move) -> dict[str, Any]:
    gate = "" if move.gate is None else ("passed" if move.gate["passed"] else "refused")
    return {
        "at": _time(move.at_ms),
        "alias": move.alias,
        "from": move.from_version,
        "to": move.to_version,
        "by": move.by,
        "how": move.kind,
        "gate": f"{gate}, forced" if move.forced else gate,
        "note": move.note,
    }


def _policy_lines(ref: str, body: Mapping[str, Any]) -> Iterator[str]:
    yield f"{ref} ({body['selected_by']})"
    yield f"  aliases  {', '.join(body['aliases']) or 'none'}"
    yield f"  run      {body['run_id']}"
    yield f"  created  {body['created_at']}"
    contents = body["manifest"]["policy"]
    if body["manifest"].get("kind") == "language":
        size = count(contents["vocabulary_size"], "token")
        yield f"  model    {contents['architecture']}, vocabulary of {size}"
    else:
        yield f"  head     {contents['head']}"
    if body["protected"]:
        yield "  protected from deletion"
    for note in body["notes"]:
        yield f"  note     {_time(note['at_ms'])} {note['by'] or ''}: {note['text']}"
    yield "  lineage"
    yield from record_lines(body["lineage"], "    ")
    if body["evaluations"]:
        yield "  evaluations"
        rows = [
            {
                "evaluated_at": one["evaluated_at"][:19] + "Z",
                "kind": one["kind"],
                "dataset": f"{one['dataset']}@{one['dataset_version']}"
                if one["dataset_version"] is not None
                else one["dataset"],
                "verdict": one["verdict"],
                "evaluation_id": one["evaluation_id"],
            }
            for one in body["evaluations"]
        ]
        yield from (f"    {line}" for line in table_lines(rows, list(rows[0])))
    if len(versions := body.get("versions", ())) > 1:
        yield f"  versions (`replaylake policies show {body['policy']}:VERSION` shows another one)"
        rows = [
            {
                **{key: row[key] for key in ("version", "run_id", "created_at")},
                "aliases": ", ".join(row["aliases"]),
            }
            for row in versions
        ]
        columns = ("version", "aliases", "run_id", "created_at")
        yield from (f"    {line}" for line in table_lines(rows, columns))


def _time(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="seconds")
