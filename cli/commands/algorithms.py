"""`replaylake algorithms`: what `train offline --algorithm` takes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from replaylake.cli.options import DEFAULT_LAKE, DebugOption, JsonOption, LakeOption
from replaylake.cli.output.command_output import CommandOutput, count, table_lines

if TYPE_CHECKING:
    from replaylake.offline.algorithms.info import AlgorithmInfo

_COLUMNS: Final = ("name", "actions", "kind", "head", "provider", "paper", "needs")


def list_algorithms(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            show_default=False,
            help="Algorithm to describe, with its options and defaults.",
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="DATASET",
            help="Dataset (NAME[@VERSION]) that the listed algorithms can learn from.",
        ),
    ] = None,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List the algorithms, or show the options of one.

    Without --for the list is the same for every lake.

    Example:
      replaylake algorithms
      replaylake algorithms --for cartpole
      replaylake algorithms iql
    """
    if name is not None and dataset is not None:
        raise typer.BadParameter(f"cannot be used with a name ({name}).", param_hint="--for")
    report = CommandOutput(as_json)
    if name is not None:
        rows = _with_options(name)
        report.print_result({"algorithms": rows}, _option_lines(rows))
        return
    if dataset is None:
        from replaylake.offline.algorithms.catalog import algorithms

        rows = [_row(info) for info in algorithms()]
        report.print_result({"algorithms": rows}, _table(rows))
        return
    body = _for_dataset(report, lake, dataset)
    report.print_result(body, _table(body["algorithms"]))


def _row(info: AlgorithmInfo) -> dict[str, Any]:
    from replaylake.offline.algorithms.catalog import reference
    from replaylake.offline.algorithms.description import needs

    return {**asdict(info), "name": reference(info), "needs": list(needs(info))}


def _with_options(name: str) -> list[dict[str, Any]]:
    from replaylake.offline.algorithms.catalog import find_algorithms, reference
    from replaylake.offline.algorithms.description import options

    matches = find_algorithms(name)
    # A bare name is ours where there are both, as `train` takes it.
    meant = [info for info in matches if reference(info) == name] or matches
    return [{**_row(info), "options": [asdict(one) for one in options(info)]} for info in meant]


def _for_dataset(report: CommandOutput, lake: str, dataset: str) -> dict[str, Any]:
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.offline.algorithms.suitability import list_suitability

    snapshot = open_lake(lake).snapshot(dataset)
    with report.waiting(f"reading {dataset}"):
        suitability = list_suitability(snapshot)
    refusals = [{**_row(one.algorithm), "why": one.refusal} for one in suitability if one.refusal]
    rows = [_row(one.algorithm) for one in suitability if one.refusal is None]
    report.print_message(
        f"{snapshot.dataset}@{snapshot.version}: {count(len(rows), 'algorithm')} can learn from it "
        f"as it is, {len(refusals):,} cannot"
    )
    actions = Counter(row["actions"] for row in rows).keys()
    # Why those of other actions cannot needs no saying.
    for row in refusals:
        if row["actions"] in actions:
            report.print_message(f"not {row['name']}: {row['why']}")
    return {
        "dataset": snapshot.dataset,
        "version": snapshot.version,
        "algorithms": rows,
        "refused": refusals,
    }


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    texts = [{**row, "needs": ", ".join(row["needs"]).replace("_", " ")} for row in rows]
    return table_lines(texts, _COLUMNS)


def _option_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for i, row in enumerate(rows):
        if i:
            yield ""
        needed = ", ".join(row["needs"]).replace("_", " ") or "nothing else"
        yield f"{row['name']}: {row['actions']} actions, {row['kind']}, {row['provider']}'s"
        yield f"  needs observations and actions, {needed}; head {row['head']}; {row['paper']}"
        options = [
            {"option": one["name"], "default": _toml(one["default"]), "type": one["type"]}
            for one in row["options"]
        ]
        yield from (f"  {line}" for line in table_lines(options, ("option", "default", "type")))
    yield ""
    yield "Set an option with --set NAME=VALUE. The options are described:"
    if any(row["provider"] == "replaylake" for row in rows):
        yield "  for replaylake's algorithms, in docs/CONFIG.md"
    if any(row["provider"] == "d3rlpy" for row in rows):
        yield "  for d3rlpy's algorithms, in d3rlpy's documentation of the algorithm's config class"
    if any(row["provider"] == "module" for row in rows):
        yield "  for your own algorithm, in its module"


def _toml(value: Any) -> str:
    """Return a value as `--set` takes it; `none` where there is none."""
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        items = {key: item for key, item in value.items() if item is not None and item != {}}
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in items.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(value)
