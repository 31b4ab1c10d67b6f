"""`replaylake datasets set-reference`: what the returns of a dataset are normalized by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from replaylake.cli.name_completion import complete_datasets
from replaylake.cli.options import (
    DEFAULT_LAKE,
    DebugOption,
    JsonOption,
    LakeOption,
)
from replaylake.cli.output.command_output import CommandOutput, number_text


def set_reference(
    dataset: Annotated[
        str,
        typer.Argument(
            metavar="DATASET",
            autocompletion=complete_datasets,
            show_default=False,
            help="Name of the dataset.",
        ),
    ],
    random: Annotated[
        float | None,
        typer.Option(
            "--random",
            metavar="RETURN",
            show_default=False,
            help="Mean return of a random policy, which counts as 0.",
        ),
    ] = None,
    expert: Annotated[
        float | None,
        typer.Option(
            "--expert",
            metavar="RETURN",
            show_default=False,
            help="Mean return of an expert, which counts as 100.",
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--source",
            metavar="TEXT",
            show_default=False,
            help="Origin of the two returns; printed with each normalized return.",
        ),
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove the reference.")] = False,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Set which returns count as 0 and 100 in normalized scores.

    `show`, `ope` and `evaluate` then also print 100 * (return - random) / (expert - random).

    Example:
      replaylake datasets set-reference play --random 22 --expert 500 --source "20 runs of PPO"
      replaylake datasets set-reference play --clear
    """
    from replaylake.datastore.episodes.score_reference import ScoreReference
    from replaylake.datastore.lake.lake import open_lake

    given = {"--random": random, "--expert": expert, "--source": source}
    there = [name for name, value in given.items() if value is not None]
    if clear == bool(there) or (there and len(there) < len(given)):
        raise typer.BadParameter(
            f"found {', '.join([*there, *(['--clear'] if clear else [])]) or 'none'}, expected all "
            "of --random, --expert and --source, or --clear.",
            param_hint=" / ".join(given),
        )
    reference = None
    if random is not None and expert is not None and source is not None:
        reference = ScoreReference(random, expert, source)
    version = open_lake(lake).dataset(dataset).set_score_reference(reference)
    body = {
        "dataset": dataset,
        "version": version,
        "score_reference": None if reference is None else reference.to_json(),
    }
    CommandOutput(as_json).print_result(body, _lines(body))


def reference_text(reference: Mapping[str, Any]) -> str:
    """Return what counts as 0 and as 100, and where the two are from."""
    low, high = number_text(reference["random"]), number_text(reference["expert"])
    return f"0 is {low}, 100 is {high}: {reference['source']}"


def _lines(body: Mapping[str, Any]) -> Iterator[str]:
    name, reference = f"{body['dataset']}@{body['version']}", body["score_reference"]
    if reference is None:
        yield f"{name}: returns are not normalized"
    else:
        yield f"{name}: normalized returns: {reference_text(reference)}"
