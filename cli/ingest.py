"""`replaylake ingest`: foreign files into a dataset."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replaylake.cli.options import (
    DEFAULT_LAKE,
    DebugOption,
    JsonOption,
    LakeOption,
    parse_pairs,
)
from replaylake.cli.report import Report, count, size

if TYPE_CHECKING:
    from replaylake.datastore.ingest.inspection import Progress
    from replaylake.datastore.ingest.receipt import Receipt
    from replaylake.datastore.lake import Lake
    from replaylake.datastore.spaces import Space


class OnInvalid(StrEnum):
    """What becomes of an episode that does not pass the checks."""

    abort = "abort"
    reject = "reject"


def ingest(
    source: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE", show_default=False, help="Files, or folders that are walked."
        ),
    ],
    dataset: Annotated[
        str,
        typer.Option(
            "--dataset", metavar="NAME", help="Made where it does not exist.", show_default=False
        ),
    ],
    form: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="auto, rllib, csv, jsonl or parquet.")
    ] = "auto",
    mapping: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            metavar="OURS=THEIRS",
            help="Where a column is: reward=payoff; observation=x,y,z makes a vector. Repeatable.",
        ),
    ] = None,
    env: Annotated[
        str | None,
        typer.Option("--env", metavar="ID", help="Check against this Gymnasium id's spaces."),
    ] = None,
    time_limit: Annotated[
        int | None,
        typer.Option(
            "--time-limit",
            metavar="N",
            min=1,
            help="Episodes of exactly N steps were truncated, whatever the log says.",
        ),
    ] = None,
    on_invalid: Annotated[
        OnInvalid,
        typer.Option(
            "--on-invalid", help="Refuse the source for one invalid episode, or leave it out."
        ),
    ] = OnInvalid.abort,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Read log files into a dataset.

    Each episode is checked, and the same content is committed only once. Makes the lake where there
    is none. --json prints the receipt: how many episodes and steps were read, committed, rejected
    and already present.

    Example:
      replaylake ingest logs/ --dataset cartpole --env CartPole-v1
      replaylake ingest log.csv --dataset ads --map observation=age,hour --map reward=click
    """
    from replaylake.datastore.ingest.ingest import ingest as run

    report = Report(as_json)
    columns = parse_pairs(mapping or [], "--map")
    observation_space, action_space = (None, None) if env is None else _spaces(env)
    with report.progress("read", "steps") as progress:

        def tell(done: Progress) -> None:
            progress.verb = {"commit": "committed"}.get(done.stage, done.stage)
            progress(done.num_steps, done.total_steps, count(done.num_episodes, "episode"))

        receipt = run(
            _lake(lake),
            source,
            dataset,
            format=form,
            mapping=columns,
            observation_space=observation_space,
            action_space=action_space,
            time_limit=time_limit,
            on_invalid=on_invalid.value,
            on_progress=tell,
        )
    report.answer(receipt.to_json(), _summary(receipt))


def _lake(url: str) -> Lake:
    """Open the lake, or return one that `ingest` makes once it has accepted the source."""
    from replaylake.datastore.lake import Lake
    from replaylake.datastore.locations import open_storage

    lake = Lake(open_storage(url))
    if lake.registry.exists():
        lake.registry.check()
    return lake


def _spaces(env: str) -> tuple[Space, Space]:
    from replaylake.offline.environments import spaces_of

    return spaces_of(env)


def _summary(receipt: Receipt) -> Iterator[str]:
    episodes, steps = receipt.episodes, receipt.steps
    if receipt.version is None:
        yield f"{receipt.dataset}: nothing added"
    else:
        yield (
            f"{receipt.dataset}@{receipt.version}: {count(episodes.committed, 'episode')}, "
            f"{count(steps.committed, 'step')} committed in {count(receipt.num_shards, 'shard')}, "
            f"{size(receipt.num_bytes)}"
        )
    yield (
        f"  read {count(receipt.num_files, 'file')} ({receipt.format}): "
        f"{count(episodes.read, 'episode')}, {count(steps.read, 'step')}; rejected "
        f"{episodes.rejected:,} and {steps.rejected:,}; already present "
        f"{episodes.already_present:,} and {steps.already_present:,}"
    )
    for reason in receipt.reasons:
        said = count(reason.num_episodes, "episode")
        yield f"  rejected {said} for {reason.check}, such as {reason.example}"
    for theirs, ours in receipt.renames.items():
        yield f"  column {theirs!r} is now {ours}"
    for note in receipt.notes:
        yield f"  note: {note}"
