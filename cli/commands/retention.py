"""`replaylake maintain retention`: what a dataset keeps, and for how long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replaylake.cli.name_completion import complete_datasets
from replaylake.cli.options import (
    DEFAULT_LAKE,
    DebugOption,
    JsonOption,
    LakeOption,
    parse_duration,
    parse_size,
)
from replaylake.cli.output.command_output import CommandOutput, duration, size

if TYPE_CHECKING:
    from replaylake.datastore.maintenance.retention import Retention


def retention(
    dataset: Annotated[
        str,
        typer.Argument(
            metavar="DATASET",
            autocompletion=complete_datasets,
            show_default=False,
            help="Name of the dataset.",
        ),
    ],
    max_steps: Annotated[
        str | None,
        typer.Option(
            "--max-steps",
            metavar="N",
            show_default=False,
            help="Maximum number of steps to keep; the oldest whole episodes are removed.",
        ),
    ] = None,
    max_age: Annotated[
        str | None,
        typer.Option(
            "--max-age",
            metavar="AGE",
            show_default=False,
            help="Maximum age of episodes; older ones are removed.",
        ),
    ] = None,
    keep_versions: Annotated[
        str | None,
        typer.Option(
            "--keep-versions",
            metavar="AGE",
            show_default=False,
            help="Time that a replaced version stays readable; at least 1h, by default 7d.",
        ),
    ] = None,
    target_shard: Annotated[
        str | None,
        typer.Option(
            "--target-shard",
            metavar="SIZE",
            show_default=False,
            help="Target size of compacted shards, 64MiB to 256MiB; by default 128MiB.",
        ),
    ] = None,
    cache_max: Annotated[
        str | None,
        typer.Option(
            "--cache-max",
            metavar="SIZE",
            show_default=False,
            help="Maximum size of this machine's cache of remote shards.",
        ),
    ] = None,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show or set the retention limits of a dataset.

    `maintain run` applies them. The value `none` restores a default. The limits are stored with
    the dataset.

    Example:
      replaylake maintain retention play --max-steps 1000000 --keep-versions 2d
      replaylake maintain retention play
    """
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.datastore.maintenance.retention import (
        check_field,
        read_retention,
        set_retention,
    )

    stated: dict[str, int | float | None] = {}
    for field, option, text, parse in (
        ("max_steps", "--max-steps", max_steps, _number),
        ("max_age_s", "--max-age", max_age, parse_duration),
        ("keep_versions_s", "--keep-versions", keep_versions, parse_duration),
        ("target_shard_bytes", "--target-shard", target_shard, parse_size),
        ("cache_max_bytes", "--cache-max", cache_max, parse_size),
    ):
        if text is None:
            continue
        stated[field] = value = _value(text, option, parse)
        check_field(field, value)
    report = CommandOutput(as_json)
    store = open_lake(lake)
    now = read_retention(store.dataset(dataset).snapshot().table)
    if stated:
        now = set_retention(store, dataset, stated)
    report.print_result({"dataset": dataset, **now.to_json()}, _lines(dataset, now))


def _value(text: str, option: str, parse: Callable[[str, str], int | float]) -> int | float | None:
    return None if text.strip().lower() == "none" else parse(text, option)


def _number(text: str, option: str) -> int:
    digits = text.strip().replace("_", "").replace(",", "")
    if not (digits.isascii() and digits.isdecimal()):
        raise typer.BadParameter(f"found {text!r}, expected a number, or none.", param_hint=option)
    return int(digits)


def _lines(dataset: str, now: Retention) -> Iterator[str]:
    def format_limit(value: Any, text: Callable[[Any], str]) -> str:
        return "no limit" if value is None else text(value)

    yield dataset
    yield f"  max steps      {format_limit(now.max_steps, '{:,}'.format)}"
    yield f"  max age        {format_limit(now.max_age_s, duration)}"
    yield f"  keep versions  {duration(now.keep_versions_s)}"
    yield f"  target shard   {now.target_shard_bytes / (1 << 20):g} MiB"
    yield f"  cache max      {format_limit(now.cache_max_bytes, size)}"
