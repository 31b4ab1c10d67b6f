"""`replaylake maintain vacuum`: files that nobody can need any more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from replaylake.cli.options import (
    DEFAULT_LAKE,
    NOTHING_CHANGED,
    DatasetsArgument,
    DebugOption,
    JsonOption,
    LakeOption,
    parse_duration,
)
from replaylake.cli.output.command_output import CommandOutput, count, size

if TYPE_CHECKING:
    from replaylake.datastore.maintenance.vacuum import VacuumReceipt

_MAX_SHOWN = 20


def vacuum(
    datasets: DatasetsArgument = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            "--older-than",
            metavar="AGE",
            show_default=False,
            help="Minimum age of replaced versions, at least 1h; by default that of each dataset's "
            "retention.",
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Allow an age below 1h; only while nothing writes to the lake or reads older "
            "versions.",
        ),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Delete the files; without it, only list them.")
    ] = False,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List or delete files that no retained version needs.

    The newest version, tagged versions, versions that policies were trained on, and versions
    replaced more recently than the age are retained.

    Example:
      replaylake maintain vacuum
      replaylake maintain vacuum cartpole --older-than 2d --yes
    """
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.datastore.maintenance.vacuum import vacuum as run

    report = CommandOutput(as_json)
    age_s = None if older_than is None else parse_duration(older_than, "--older-than")
    store = open_lake(lake)
    with report.progress("deleted", "files") as progress:
        receipt = run(
            store,
            datasets or (),
            older_than_s=age_s,
            delete=yes,
            force=force,
            on_progress=progress,
        )
    for text in receipt.skipped:
        report.print_message(f"skipped {text}")
    report.print_result(receipt.to_json(), _lines(receipt))


def _lines(receipt: VacuumReceipt) -> Iterator[str]:
    for file in receipt.garbage[:_MAX_SHOWN]:
        yield f"{file.path}  {size(file.size_bytes)}"
    if len(receipt.garbage) > _MAX_SHOWN:
        yield f"... and {len(receipt.garbage) - _MAX_SHOWN:,} more"
    kinds = Counter(file.kind for file in receipt.garbage)
    of = ", ".join(f"{kind} {num:,}" for kind, num in sorted(kinds.items()))
    what = count(len(receipt.garbage), "file") + (f" ({of})" if of else "")
    if receipt.deleted:
        yield f"deleted {what}, {size(receipt.num_bytes)}"
    else:
        yield f"{what}, {size(receipt.num_bytes)} to delete"
        if kinds:
            yield f"  {NOTHING_CHANGED}"
    for pin in receipt.pinned:
        yield f"  kept {pin}"
