"""`replaylake score`: episodes rated by a function or a judge."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replaylake.cli.name_completion import complete_datasets
from replaylake.cli.options import (
    DEFAULT_LAKE,
    DebugOption,
    JsonOption,
    LakeOption,
    parse_duration,
    parse_pairs,
    user_name,
)
from replaylake.cli.output.command_output import (
    CommandOutput,
    count,
    data_lines,
    number_text,
    one_line,
    table_lines,
)

if TYPE_CHECKING:
    from replaylake.datastore.maintenance.scoring.compare import ScoreComparison
    from replaylake.datastore.maintenance.scoring.judge import JudgeScorer
    from replaylake.datastore.maintenance.scoring.score import ScoreReceipt
    from replaylake.datastore.maintenance.scoring.scorer import Scorer

_EXIT_NO = 3
_KEY_VARIABLE = "REPLAYLAKE_JUDGE_KEY"
_JUDGE = "Judge"
_NUM_FAILURES = 3
# Sums of float64 that cancel leave less than this.
_ROUNDING = 1e-12


def score(
    context: typer.Context,
    dataset: Annotated[
        str,
        typer.Argument(
            metavar="DATASET[@VERSION]",
            autocompletion=complete_datasets,
            show_default=False,
            help="Dataset to score, at a version, a tag, or its newest version.",
        ),
    ],
    function: Annotated[
        str | None,
        typer.Option(
            "--with",
            metavar="MODULE:FUNCTION",
            help="Reward function: verl's compute_score, TRL's, or a function of an episode.",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            metavar="PATH",
            help="Directory of a reward model: a sequence classifier of transformers, in "
            "safetensors.",
        ),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", metavar="DEVICE", help="Device of --model: cpu or cuda.")
    ] = "cpu",
    judge: Annotated[
        str | None,
        typer.Option(
            "--judge",
            metavar="URL",
            rich_help_panel=_JUDGE,
            help="Endpoint of OpenAI's chat completions, for example http://127.0.0.1:8000/v1; its "
            "model rates the episodes.",
        ),
    ] = None,
    judge_model: Annotated[
        str | None,
        typer.Option(
            "--judge-model",
            metavar="NAME",
            rich_help_panel=_JUDGE,
            help="Model, as the endpoint calls it.",
        ),
    ] = None,
    prompt: Annotated[
        Path | None,
        typer.Option(
            "--prompt",
            metavar="FILE",
            rich_help_panel=_JUDGE,
            help="Text with {episode}, {prompt}, {completion} or {ground_truth}; by default, the "
            "judge is asked for a score from 0 to 1.",
        ),
    ] = None,
    judge_option: Annotated[
        list[str] | None,
        typer.Option(
            "--judge-option",
            metavar="KEY=VALUE",
            rich_help_panel=_JUDGE,
            help="Member of each request's body, parsed as JSON, else as text; by default "
            "temperature=0. Repeatable.",
        ),
    ] = None,
    api_key_env: Annotated[
        str,
        typer.Option(
            "--api-key-env",
            metavar="VARIABLE",
            rich_help_panel=_JUDGE,
            help="Environment variable with the API key. It is sent, and neither stored nor "
            "printed.",
        ),
    ] = _KEY_VARIABLE,
    concurrency: Annotated[
        int,
        typer.Option(
            "--concurrency",
            metavar="N",
            min=1,
            rich_help_panel=_JUDGE,
            help="Number of requests at a time.",
        ),
    ] = 4,
    max_requests_per_second: Annotated[
        float | None,
        typer.Option(
            "--max-requests-per-second",
            metavar="F",
            rich_help_panel=_JUDGE,
            help="Maximum rate of requests; no limit by default.",
        ),
    ] = None,
    timeout: Annotated[
        str,
        typer.Option(
            "--timeout",
            metavar="TIME",
            rich_help_panel=_JUDGE,
            help="Time for one response.",
        ),
    ] = "120s",
    retry: Annotated[
        str,
        typer.Option(
            "--retry",
            metavar="TIME",
            rich_help_panel=_JUDGE,
            help="Time for which a request is repeated.",
        ),
    ] = "120s",
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="NAME",
            help="Column of the scores, and beginning of the names of the columns beside it; by "
            "default the function's name, reward_model or judge.",
        ),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(
            "--where",
            metavar="SQL",
            help="Condition over episodes and their steps that selects whole episodes.",
        ),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(
            "--label",
            metavar="NAME",
            help="Column, or key of the metadata, with the right answer; by default the first of "
            "ground_truth, label, answer, solution and gts.",
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="COLUMN",
            help="Column of numbers to compare the scores with; without a scorer, the existing "
            "column --name is compared.",
        ),
    ] = None,
    threshold: Annotated[
        float,
        typer.Option(
            "--threshold",
            metavar="F",
            help="For --against: a score above it passes; agreement is the share of values for "
            "which both scores pass or neither does.",
        ),
    ] = 0.0,
    limit: Annotated[
        int,
        typer.Option(
            "--limit", metavar="N", min=0, help="For --against: number of disagreements to list."
        ),
    ] = 10,
    revision: Annotated[
        str | None,
        typer.Option(
            "--revision",
            metavar="TEXT",
            help="Part of the scorer's version that its source does not determine, for example the "
            "version of modules or data that it uses.",
        ),
    ] = None,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Score episodes by a function, a reward model or a judge.

    All scores are written in one commit, which records the scorer and its version. Scores that the
    same version already computed for the same content are reused, so the same command resumes an
    interrupted run. The exit code is 3 if an episode has no score because of an error.

    Example:
      replaylake score math --with rewards:compute_score
      replaylake score math@3 --with rewards:format_reward --name format --where 'num_steps > 1'
      replaylake score math --judge http://127.0.0.1:8000/v1 --judge-model qwen --prompt judge.txt
      replaylake score math --name judge --against human --threshold 0.5
    """
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.datastore.maintenance.scoring.compare import compare_scores
    from replaylake.datastore.maintenance.scoring.score import ScoringInterrupted
    from replaylake.datastore.maintenance.scoring.score import score as run
    from replaylake.offline.running.training.interruption import interrupt_on_sigterm

    report = CommandOutput(as_json)
    if sum(one is not None for one in (function, model, judge)) > 1:
        raise typer.BadParameter(
            "expected one of --with, --model and --judge.", param_hint="--with"
        )
    _check_used(context, judge=judge, model=model, against=against)
    if function is None and model is None and judge is None:
        if against is None or name is None:
            raise typer.BadParameter(
                "expected --with, --model or --judge; or --name and --against, to compare two "
                "columns.",
                param_hint="--with",
            )
        comparison = compare_scores(
            open_lake(lake), dataset, name, against, where=where, threshold=threshold, limit=limit
        )
        report.print_result(comparison.to_json(), data_lines(_comparison_lines(comparison)))
        return
    if revision is not None and function is None:
        raise typer.BadParameter("is for --with.", param_hint="--revision")
    store = open_lake(lake)
    scorer: Scorer
    if judge is not None:
        scorer = _make_judge(
            judge,
            judge_model,
            api_key_env,
            prompt=prompt,
            options=judge_option or [],
            label=label,
            concurrency=concurrency,
            max_requests_per_second=max_requests_per_second,
            timeout_s=parse_duration(timeout, "--timeout"),
            retry_s=parse_duration(retry, "--retry"),
        )
    elif model is not None:
        from replaylake.offline.evaluation.reward_model import RewardModel

        with report.waiting(f"loading {model}"):
            scorer = RewardModel(model, device=device)
    else:
        scorer = _load_function(str(function), revision, label)
    try:
        with interrupt_on_sigterm(), report.progress("scored", "episodes") as progress:
            receipt = run(
                store,
                dataset,
                scorer,
                name=name,
                where=where,
                by=user_name(),
                on_progress=progress,
            )
    except ScoringInterrupted as interrupted:
        report.print_message(f"{interrupted}, and none written; the same command resumes")
        raise
    body, lines = receipt.to_json(), [*_summary(receipt)]
    if against is not None:
        comparison = compare_scores(
            store,
            receipt.dataset,
            receipt.name,
            against,
            where=where,
            threshold=threshold,
            limit=limit,
        )
        body["comparison"] = comparison.to_json()
        lines += _comparison_lines(comparison)
    report.print_result(body, data_lines(lines))
    if receipt.failed:
        raise typer.Exit(_EXIT_NO)


def _check_used(
    context: typer.Context, *, judge: str | None, model: Path | None, against: str | None
) -> None:
    """Refuse options that would have no effect."""
    needed: dict[str, tuple[str, object]] = {"device": ("--model", model)}
    needed |= {name: ("--against", against) for name in ("threshold", "limit")}
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if source is None or source.name != "COMMANDLINE":
            continue
        option, value = needed.get(str(parameter.name), ("", ""))
        if getattr(parameter, "rich_help_panel", None) == _JUDGE:
            option, value = "--judge", judge
        if value is None:
            raise typer.BadParameter(f"requires {option}.", param_hint=parameter.opts[0])


def _load_function(name: str, revision: str | None, label: str | None) -> Scorer:
    from replaylake.datastore.maintenance.scoring.function_scorer import FunctionScorer
    from replaylake.offline.learning.user_code import load_object

    loaded = load_object(name, "function", "my_rewards:compute_score")
    return FunctionScorer(loaded, revision=revision, label=label)


def _make_judge(
    url: str,
    model: str | None,
    key_variable: str,
    *,
    prompt: Path | None,
    options: Sequence[str],
    **others: Any,
) -> JudgeScorer:
    from replaylake.datastore.maintenance.scoring.judge import JudgeConfig, JudgeScorer

    if model is None:
        raise typer.BadParameter("is required with --judge.", param_hint="--judge-model")
    key = os.environ.get(key_variable) or None
    if key is None and key_variable != _KEY_VARIABLE:
        raise typer.BadParameter(
            f"found no environment variable {key_variable}, expected the key in it.",
            param_hint="--api-key-env",
        )
    if prompt is not None:
        try:
            others["prompt"] = prompt.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise typer.BadParameter(
                f"{prompt}: {error}, expected a text file in UTF-8.", param_hint="--prompt"
            ) from error
    if options:
        pairs = parse_pairs(options, "--judge-option", "KEY=VALUE")
        others["options"] = {name: _json_or_text(text) for name, text in pairs.items()}
    return JudgeScorer(url, model, JudgeConfig(**others), api_key=key)


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _summary(receipt: ScoreReceipt) -> Iterator[str]:
    if receipt.version is None:
        yield f"{receipt.dataset}: nothing to change: the steps have these scores already"
    else:
        yield (
            f"{receipt.dataset}@{receipt.version}: {', '.join(receipt.columns)} of "
            f"{count(receipt.steps, 'step')} written, in {count(receipt.shards, 'shard')}"
        )
    line = (
        f"  {count(receipt.episodes, 'episode')} at version {receipt.scored_version}: "
        f"{receipt.computed:,} computed, {receipt.cached:,} cached, {receipt.failed:,} failed"
    )
    if receipt.unscored:
        line += f", {receipt.unscored:,} without a score"
    yield line
    if receipt.unlabeled:
        verb = "has" if receipt.unlabeled == 1 else "have"
        yield (
            f"  {count(receipt.unlabeled, 'episode')} {verb} no right answer: ground_truth was None"
            " there (--label names its column)"
        )
    if receipt.mean is not None:
        yield (
            f"  {receipt.name}: mean {_statistic_text(receipt.mean)}, "
            f"{number_text(receipt.min)} to {number_text(receipt.max)}"
        )
    yield f"  scorer {receipt.scorer_id}: {_describe(receipt)}"
    for episode_id, reason in receipt.failures[:_NUM_FAILURES]:
        yield f"  failed: {one_line(episode_id)}: {reason}"
    if receipt.unmatched:
        yield f"  {count(receipt.unmatched, 'label')} of steps that were deleted meanwhile"


def _comparison_lines(comparison: ScoreComparison) -> Iterator[str]:
    first, second = comparison.first, comparison.second
    unit = {"agent": "agent's episode"}.get(comparison.by, comparison.by)
    yield (
        f"{comparison.dataset}@{comparison.version}: {first} and {second} of "
        f"{count(comparison.n, unit)}; {comparison.only_first:,} have {first} alone, "
        f"{comparison.only_second:,} {second} alone"
    )
    yield (
        f"  agreement {comparison.agreement:.1%} above or not above {comparison.threshold:g}, "
        f"kappa {_statistic_text(comparison.kappa)}"
    )
    yield (
        f"  rank correlation: Spearman {_statistic_text(comparison.spearman)}, "
        f"Kendall {_statistic_text(comparison.kendall)}"
    )
    yield (
        f"  mean {number_text(comparison.first_mean)} and {number_text(comparison.second_mean)}, "
        f"mean absolute difference {number_text(comparison.mean_absolute_difference)}"
    )
    if comparison.disagreements:
        keys = {"episode": [], "agent": ["agent_id"], "step": ["agent_id", "step"]}[comparison.by]
        rows = [
            {**asdict(one), first: one.first, second: one.second,
             "ranks": f"{one.first_rank:.2f} {one.second_rank:.2f}"}
            for one in comparison.disagreements
        ]  # fmt: skip
        yield "largest disagreements, by rank (0 lowest, 1 highest):"
        yield from table_lines(rows, ["episode_id", *keys, first, second, "ranks"])


def _statistic_text(value: float | None) -> str:
    """Return a mean or correlation as text; what is 0 but for rounding is 0."""
    return number_text(0.0 if value is not None and abs(value) < _ROUNDING else value)


def _describe(receipt: ScoreReceipt) -> str:
    scorer = receipt.scorer
    if scorer["kind"] == "judge":
        return f"judge {scorer['url']}, model {scorer['model']}"
    if scorer["kind"] == "model":
        return f"{scorer['architecture']} {scorer['model']}, sha256 {scorer['sha256'][:16]}"
    sha256 = scorer["source_sha256"] or scorer["module_sha256"]
    parts = [f"{scorer['function']} ({scorer['form']})"]
    parts += [f"source sha256 {sha256[:16]}"] if sha256 else []
    parts += [f"revision {scorer['revision']}"] if scorer["revision"] else []
    return ", ".join(parts)
