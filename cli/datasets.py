"""`replaylake list` and `replaylake show`: what is in the lake."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from replaylake.cli.options import (
    DEFAULT_LAKE,
    DebugOption,
    JsonOption,
    LakeOption,
)
from replaylake.cli.report import Report, count, number_text, size, table_lines

_COLUMNS = ("dataset", "version", "num_steps", "num_shards", "num_bytes")


def list_datasets(
    lake: LakeOption = DEFAULT_LAKE, as_json: JsonOption = False, debug: DebugOption = False
) -> None:
    """List the datasets of the lake.

    Example:
      replaylake list
      replaylake list --json
    """
    from replaylake.datastore.lake import open_lake

    report = Report(as_json)
    opened = open_lake(lake)
    rows = opened.sql(f"SELECT {', '.join(_COLUMNS)} FROM datasets ORDER BY dataset").to_pylist()
    if not rows:
        report.say(f"no datasets in {lake}: `replaylake ingest SOURCE --dataset NAME` makes one")
    report.answer({"datasets": rows}, table_lines(rows, _COLUMNS) if rows else [])


def show(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME[@VERSION]", show_default=False, help="A dataset, at a version or newest."
        ),
    ],
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show what a dataset holds.

    Its episodes, steps, returns, how episodes end, spaces and columns, at a version or the newest.

    Example:
      replaylake show cartpole
      replaylake show cartpole@3 --json
    """
    from replaylake.datastore.lake import open_lake

    report = Report(as_json)
    with report.waiting(f"reading {name}"):
        body = open_lake(lake).snapshot(name).describe()
    report.answer(body, _shown(body))


def _shown(body: Mapping[str, Any]) -> Iterator[str]:
    yield f"{body['dataset']}@{body['version']}"
    yield (
        f"  {count(body['num_episodes'], 'episode')}, {count(body['num_steps'], 'step')}, "
        f"{count(body['num_shards'], 'shard')}, {size(body['num_bytes'])}"
    )
    if body["num_episodes"]:
        yield (
            f"  return       mean {number_text(body['mean_return'])}, "
            f"from {number_text(body['min_return'])} to {number_text(body['max_return'])}; "
            f"mean length {number_text(body['mean_num_steps'])}"
        )
        yield (
            f"  ends         {body['num_terminated']:,} terminated, {body['num_truncated']:,} "
            f"truncated, {body['num_incomplete']:,} open"
        )
        steps = count(body["num_steps"], "step")
        yield f"  log-probs    known for {body['num_log_probs']:,} of {steps}"
    yield f"  observation  {body['observation_space']}"
    yield f"  action       {body['action_space']}"
    width = max(len(column) for column in body["columns"])
    yield "  columns"
    for column, kind in body["columns"].items():
        yield f"    {column.ljust(width)}  {_short_type(kind)}"


def _short_type(kind: str) -> str:
    """Return an Arrow type as a person would say it: `float[4]` for a fixed-size list of them."""
    kind = re.sub(r"dictionary<values=(\w+),[^>]*>", r"\1", kind)
    kind = re.sub(r"fixed_size_list<\w+: ([\w ]+?)(?: not null)?>\[(\d+)\]", r"\1[\2]", kind)
    return re.sub(r"list<\w+: (\w+)(?: not null)?>", r"\1[]", kind)
