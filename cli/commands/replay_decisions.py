"""`replaylake replay-decisions`: what a candidate would have done where another policy decided."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from replaylake.cli.name_completion import complete_datasets
from replaylake.cli.options import (
    DEFAULT_LAKE,
    DebugOption,
    JsonOption,
    LakeOption,
    PolicyArgument,
)
from replaylake.cli.output.command_output import CommandOutput, count, number_text, table_lines

if TYPE_CHECKING:
    from replaylake.offline.evaluation.ope.decision_replay import DecisionReplay

_NUM_GROUPS: Final = 10


def replay_decisions(
    policy: PolicyArgument,
    dataset: Annotated[
        str,
        typer.Argument(
            metavar="DATASET",
            autocompletion=complete_datasets,
            show_default=False,
            help="Dataset with the logged decisions; its steps are used if it has none.",
        ),
    ],
    explore: Annotated[
        str | None,
        typer.Option(
            "--explore",
            metavar="HOW",
            help="Exploration of the policy, as in serve: epsilon=E or temperature=T. By default "
            "it takes its best action.",
        ),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(
            "--where",
            metavar="SQL",
            help="Condition over the columns of decisions that selects decisions.",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", metavar="N", min=1, help="Maximum number of decisions to replay."),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            "--by",
            metavar="COLUMN",
            help="Column to group results by; the groups that agree least come first.",
        ),
    ] = None,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Compare a policy's decisions with logged ones.

    Prints how often they agree, how far their probabilities differ, which observations the policy
    cannot act on, and its latency. Use `evaluate` where there is an environment, `ope` to estimate
    the value from logged episodes alone, and `replay-decisions` to see where a policy decides
    differently from the log.

    Example:
      replaylake replay-decisions clone:3 live --explore epsilon=0.05
      replaylake replay-decisions clone:3 live --where 'policy_version = 2' --by action
    """
    from replaylake.datastore.lake.policies.exploration import parse_exploration

    exploration = parse_exploration(explore)
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.offline.evaluation.ope.decision_replay import replay_decisions as replay

    report = CommandOutput(as_json)
    with report.progress("replayed", "decisions") as progress:
        result = replay(
            open_lake(lake),
            policy,
            dataset,
            exploration=exploration,
            where=where,
            limit=limit,
            by=by,
            on_progress=progress,
        )
    report.print_result(result.to_json(), _lines(result))


def _lines(replay: DecisionReplay) -> Iterator[str]:
    body = replay.to_json()
    yield (
        f"policy {body['policy']}:{body['policy_version']} ({body['selected_by']}), acting "
        f"{body['acts']}, on {count(body['num_decisions'], 'decision')} of "
        f"{replay.dataset}.{replay.table}"
    )
    rows = list(_numbers(body))
    width = max(len(name) for name, _ in rows)
    yield from (f"  {name.ljust(width)}  {text}" for name, text in rows)
    if replay.no_density:
        yield f"  no probabilities: {replay.no_density}"
    if replay.num_errors:
        yield f"  cannot act on {count(replay.num_errors, 'observation')}:"
        yield from (f"    {error}" for error in replay.errors)
    if replay.by is not None and body["groups"]:
        yield ""
        yield from _groups(body["groups"], replay.by)


def _numbers(body: dict[str, Any]) -> Iterator[tuple[str, str]]:
    total = body["num_decisions"]
    if body["agreement"] is not None:
        yield "agreement of its best action", f"{body['agreement']:.2%}"
    # Of countable actions the distance is 0 or 1, and its mean only another word for disagreement.
    if body["mean_distance"] is not None and not math.isclose(
        body["mean_distance"], 1 - body["agreement"], abs_tol=1e-9
    ):
        yield "mean distance of its best action", f"{body['mean_distance']:.4g}"
    if body["mean_prob"] is not None:
        yield "mean probability of the logged action", f"{body['mean_prob']:.4g}"
    if not body["num_known"]:
        yield "logged probabilities", "none, so there are no ratios"
    else:
        yield "logged probabilities", f"of {body['num_known']:,} of {total:,}"
        ratio, never = body["mean_log_ratio"], body["num_impossible"]
        text = "none" if ratio is None else f"{ratio:.4g}"
        yield (
            "mean log ratio",
            text + (f", without {never:,} actions that it never takes" if never else ""),
        )
        yield (
            "effective sample size",
            (
                f"{number_text(round(body['effective_sample_size'], 1))} of {body['num_known']:,}, "
                f"largest weight {body['max_weight']:.4g}, mean {body['mean_weight']:.4g}"
            ),
        )
        yield "total variation", f"{body['total_variation']:.4g}"
        yield "KL(log || policy)", "infinite" if body["kl"] is None else f"{body['kl']:.4g}"
    if body["latency_ms"] is not None:
        p50, p99 = body["latency_ms"]["p50"], body["latency_ms"]["p99"]
        yield "latency of one decision", f"p50 {p50:.3g} ms, p99 {p99:.3g} ms"


def _groups(groups: list[dict[str, Any]], by: str) -> Iterator[str]:
    rows = [
        {
            by: one["group"],
            "decisions": one["num_decisions"],
            "agreement": _round_digits(one["agreement"]),
            "mean prob": _round_digits(one["mean_prob"]),
            "total variation": _round_digits(one["total_variation"]),
        }
        for one in groups[:_NUM_GROUPS]
    ]
    yield from table_lines(rows, list(rows[0]))
    if len(groups) > _NUM_GROUPS:
        more = count(len(groups) - _NUM_GROUPS, "group")
        yield f"and {more} more, with equal or better agreement: use --json"


def _round_digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
