"""`replaylake sessionise`: served decisions and their rewards into episodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from replaylake.cli.options import DEFAULT_LAKE, DebugOption, JsonOption, LakeOption
from replaylake.cli.report import Report, count

if TYPE_CHECKING:
    from replaylake.datastore.sessions.sessionise import SessionReceipt


def sessionise(
    dataset: Annotated[
        str,
        typer.Argument(
            metavar="DATASET", show_default=False, help="What `serve --log-to` was given."
        ),
    ],
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Join served decisions with their rewards.

    Appends the episodes they make to the dataset. Safe to run at any time and again: a
    decision is written once.

    Example:
      replaylake sessionise live
    """
    from replaylake.datastore.lake import open_lake
    from replaylake.datastore.sessions.sessionise import sessionise as run

    report = Report(as_json)
    with report.progress("built", "episodes") as progress:
        receipt = run(open_lake(lake), dataset, on_progress=progress)
    report.answer(receipt.to_json(), _summary(receipt))


def _summary(receipt: SessionReceipt) -> Iterator[str]:
    yield (
        f"{receipt.dataset}@{receipt.version}: {count(receipt.episodes, 'episode')}, "
        f"{count(receipt.steps, 'step')} added"
    )
    yield (
        f"  {count(receipt.decisions, 'decision')}, {count(receipt.rewards, 'reward')}; "
        f"{receipt.joined:,} joined, {receipt.waiting:,} waiting"
    )
    rest = {
        "unrewarded": receipt.unrewarded,
        "repeated": receipt.repeated,
        "late": receipt.late,
        "orphaned": receipt.orphaned,
        "recovered from killed servers": receipt.recovered,
        "damaged and kept in the journal": receipt.damaged,
    }
    said = [f"{number:,} {what}" for what, number in rest.items() if number]
    if said:
        yield f"  {', '.join(said)}"
