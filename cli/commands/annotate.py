"""`replaylake annotate`: labels that came after the fact, onto the steps that they are of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from replaylake.cli.name_completion import complete_datasets
from replaylake.cli.options import (
    DEFAULT_LAKE,
    DebugOption,
    JsonOption,
    LakeOption,
    parse_pairs,
)
from replaylake.cli.output.command_output import CommandOutput, count

if TYPE_CHECKING:
    from replaylake.datastore.maintenance.labels.annotate import AnnotationReceipt

_EXIT_NO = 3


class RewardTarget(StrEnum):
    """Which step of an episode gets a reward that is the episode's."""

    last = "last"
    each = "each"


def annotate(
    dataset: Annotated[
        str,
        typer.Argument(
            metavar="DATASET",
            autocompletion=complete_datasets,
            show_default=False,
            help="Name of the dataset.",
        ),
    ],
    labels: Annotated[
        str,
        typer.Argument(
            metavar="LABELS",
            show_default=False,
            help="CSV, Parquet, JSONL or JSON file with the labels, or a SELECT over the lake.",
        ),
    ],
    on: Annotated[
        list[str],
        typer.Option(
            "--on",
            metavar="KEY[=COLUMN]",
            show_default=False,
            help="Key that matches labels to steps: decision_id, request_id, episode_id or "
            "source_episode_id; with the last two also step and agent_id. COLUMN is its name "
            "in the labels. Repeatable.",
        ),
    ],
    assigned: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="reward=SQL",
            help="Expression for the reward, over the columns of the label and of its step "
            "(steps.NAME).",
        ),
    ] = None,
    add: Annotated[
        list[str] | None,
        typer.Option(
            "--add",
            metavar="NAME[=COLUMN]",
            help="Column to add to the dataset, from a column of the labels. Repeatable. A list "
            "named action_* must have one value for each token of the step's action.",
        ),
    ] = None,
    to: Annotated[
        RewardTarget,
        typer.Option("--to", help="Step that gets the reward, if the key is that of an episode."),
    ] = RewardTarget.last,
    again: Annotated[
        bool,
        typer.Option("--again", help="Apply the same labels also to steps that were added since."),
    ] = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Write nothing if a label is unmatched or ambiguous (exit code 3)."
        ),
    ] = False,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Write labels to steps or episodes.

    All labels are written in one commit. Writing the same labels again changes nothing. A NULL
    label leaves the value unchanged.

    Example:
      replaylake annotate live conversions.csv --on decision_id --set reward=value
      replaylake annotate chats scores.jsonl --on episode_id --set reward=score --add score
      replaylake annotate math entropies.parquet --on episode_id --on step --add action_entropies
    """
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.datastore.maintenance.labels.annotate import annotate as run
    from replaylake.datastore.maintenance.labels.labels import parse_key, read_labels

    report = CommandOutput(as_json)
    key = parse_key(_pairs(on, "--on"))
    expressions = parse_pairs(assigned or [], "--set")
    store = open_lake(lake)
    with report.waiting("reading the labels"):
        table = read_labels(store, labels, key)
    with report.progress("looked through", "shards") as progress:
        receipt = run(
            store,
            dataset,
            table,
            on=key.columns,
            set=expressions,
            add=_pairs(add or [], "--add"),
            to=to.value,
            again=again,
            strict=strict,
            on_progress=progress,
        )
    report.print_result(receipt.to_json(), _summary(receipt))
    if receipt.refused:
        raise typer.Exit(_EXIT_NO)


def _pairs(texts: Sequence[str], option: str) -> dict[str, str]:
    """Split `name=column`; a name alone is both."""
    return parse_pairs([text if "=" in text else f"{text}={text}" for text in texts], option)


def _summary(receipt: AnnotationReceipt) -> Iterator[str]:
    if receipt.refused:
        yield f"{receipt.dataset}: nothing written: some labels match no step or several (--strict)"
    elif receipt.version is None:
        yield f"{receipt.dataset}: nothing to change"
    elif receipt.already_present:
        yield f"{receipt.dataset}@{receipt.version} has these labels already: nothing changed"
    else:
        yield (
            f"{receipt.dataset}@{receipt.version}: {', '.join(receipt.columns)} of "
            f"{count(receipt.steps, 'step')} written, in {count(receipt.shards, 'shard')}"
        )
    yield (
        f"  {count(receipt.labels, 'label')}: {receipt.matched:,} matched, "
        f"{receipt.unmatched:,} unmatched, {receipt.ambiguous:,} ambiguous, "
        f"{receipt.repeated:,} repeated; {count(receipt.unchanged, 'step')} had the value already"
    )
    if receipt.open_episodes:
        yield f"  {count(receipt.open_episodes, 'episode')} still open: set on the last step so far"
    for what, keys in (
        ("unmatched", receipt.unmatched_keys),
        ("ambiguous", receipt.ambiguous_keys),
    ):
        if keys:
            yield f"  {what}, such as {', '.join(' '.join(map(str, key)) for key in keys[:3])}"
