"""`replaylake ope`: what a policy is worth, from episodes that others made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replaylake.cli.commands.set_reference import reference_text
from replaylake.cli.name_completion import complete_datasets
from replaylake.cli.options import (
    DEFAULT_LAKE,
    DebugOption,
    JsonOption,
    LakeOption,
    user_name,
)
from replaylake.cli.output.command_output import (
    CommandOutput,
    count,
    interval_text,
    number_text,
    table_lines,
)

if TYPE_CHECKING:
    from replaylake.datastore.lake.holdout import Holdout
    from replaylake.datastore.lake.lake import Lake
    from replaylake.datastore.lake.policies.evaluations import Kind
    from replaylake.offline.evaluation.ope.evaluation_request import PolicyReport
    from replaylake.offline.evaluation.ope.sequences import SequenceReport

_EXIT_NO = 3
_DIGITS = 4
# Those that --model takes.
_MODEL_OPTIONS = ("dataset", "model", "where", "lake", "as_json", "debug")


def ope(
    context: typer.Context,
    dataset: Annotated[
        str,
        typer.Argument(
            metavar="NAME[@VERSION]",
            autocompletion=complete_datasets,
            show_default=False,
            help="Dataset with the logged episodes, at a version, a tag, or its newest version.",
        ),
    ],
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="NAME",
            help="Policy to evaluate, as name:version, name@alias, name, or random.",
        ),
    ] = None,
    target_prob: Annotated[
        str | None,
        typer.Option(
            "--target-prob",
            metavar="SQL",
            help="Instead of a policy, an expression over the columns of steps: the probability of "
            "the logged action, or a list with that of each action.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="DIR",
            help="Instead of a policy, a causal language model, evaluated on token sequences: a "
            "directory that transformers wrote.",
        ),
    ] = None,
    explore: Annotated[
        str | None,
        typer.Option(
            "--explore",
            metavar="HOW",
            help="Exploration of the policy, as in serve: epsilon=E or temperature=T. By default "
            "it takes its best action.",
        ),
    ] = None,
    gamma: Annotated[
        float,
        typer.Option(
            "--gamma", metavar="G", help="Discount factor; with 1 the value is the mean return."
        ),
    ] = 1.0,
    estimator: Annotated[
        list[str] | None,
        typer.Option(
            "--estimator",
            metavar="NAME",
            help="Estimator to compute, for example ips, snips, dr, dm, wpdis or fqe. Repeatable; "
            "by default all that apply.",
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
    reward: Annotated[
        str | None,
        typer.Option(
            "--reward",
            metavar="SQL",
            help="Expression over the columns of steps for the reward; by default the one that the "
            "policy was trained with.",
        ),
    ] = None,
    behavior_prob: Annotated[
        str | None,
        typer.Option(
            "--behavior-prob",
            metavar="SQL",
            help="Expression over the columns of steps for the behavior policy's probability, "
            "instead of the logged one.",
        ),
    ] = None,
    holdout: Annotated[
        float | None,
        typer.Option(
            "--holdout",
            metavar="SHARE",
            help="Share of the episodes to evaluate on: those that train --holdout SHARE holds "
            "out. By default those that the policy's training held out or did not use.",
        ),
    ] = None,
    holdout_after: Annotated[
        str | None,
        typer.Option(
            "--holdout-after",
            metavar="TIME",
            help="Evaluate on the episodes that began at this time or later.",
        ),
    ] = None,
    incomplete: Annotated[
        bool, typer.Option("--incomplete", help="Include episodes whose end was not recorded.")
    ] = False,
    ignore_masks: Annotated[
        bool,
        typer.Option(
            "--ignore-masks",
            help="Let the policy also take actions that the log's action masks forbid.",
        ),
    ] = False,
    unseen: Annotated[
        bool,
        typer.Option(
            "--unseen",
            help="Assert that the policy was not trained on these episodes, where its lineage does "
            "not say.",
        ),
    ] = False,
    clip: Annotated[
        float | None,
        typer.Option(
            "--clip",
            metavar="W",
            help="Weight at which clipped_ips and clipped_is cut weights off, above which "
            "switch_dr uses its model alone, and that dr_os halves: its lambda is W squared. By "
            "default the square root of the number of episodes.",
        ),
    ] = None,
    updates: Annotated[
        int | None,
        typer.Option("--updates", metavar="N", help="FQE updates per fold."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Random seed.")] = 0,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE", help="File to plot the estimates to: a .png, .svg or .pdf."
        ),
    ] = None,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Estimate a policy's value from logged episodes.

    Reports whether the log supports the estimate: supported, weak, or not supported (exit code 3).
    The report is saved in the lake; `policies show` and the view `evaluations` in SQL list it.
    Use `evaluate` where there is an environment, `ope` to estimate the value from logged episodes
    alone, and `replay-decisions` to see where a policy decides differently from the log.

    Example:
      replaylake ope live --policy clone --explore epsilon=0.05
      replaylake ope obd --target-prob target_prob --unseen --json
      replaylake ope math --model agent-2
    """
    if model is not None:
        _check_model_options(context)
        _evaluate_model(CommandOutput(as_json), dataset, model, where, lake)
        return
    exploration = _exploration(explore)
    split = _holdout(holdout, holdout_after)
    if plot is not None:
        from replaylake.cli.output.curves import check_picture

        check_picture(plot)

    from replaylake.datastore.lake.lake import open_lake
    from replaylake.offline.evaluation.ope.evaluate_policy import evaluate_policy
    from replaylake.offline.evaluation.ope.evaluation_request import (
        EvaluationRequest,
        ProgressCallbacks,
    )
    from replaylake.offline.evaluation.ope.fqe_config import FQEConfig

    report, store = CommandOutput(as_json), open_lake(lake)
    request = EvaluationRequest(
        dataset=dataset,
        policy=policy,
        target_prob=target_prob,
        behavior_prob=behavior_prob,
        where=where,
        reward=reward,
        discount=gamma,
        holdout=split,
        exploration=exploration,
        estimators=None if not estimator else tuple(estimator),
        clip=clip,
        with_incomplete=incomplete,
        ignore_masks=ignore_masks,
        unseen=unseen,
        seed=seed,
        fqe=FQEConfig() if updates is None else FQEConfig(updates=updates),
    )
    with report.progress("reading the steps", "") as progress:
        callbacks = ProgressCallbacks(lambda stage: progress.stage(stage, ""), progress)
        policy_report = evaluate_policy(store, request, callbacks)
    if plot is not None:
        from replaylake.cli.output.forest import draw_estimates

        draw_estimates(plot, policy_report)
        report.print_message(f"drew {plot}")
    body = policy_report.to_json()
    saved = save_evaluation(report, store, "ope", body, of=body, verdict=body["verdict"])
    report.print_result({**body, "evaluation_id": saved}, _lines(policy_report))
    if policy_report.verdict == "not supported":
        raise typer.Exit(_EXIT_NO)


def _check_model_options(context: typer.Context) -> None:
    """Refuse options that mean nothing for a language model. Raises: typer.BadParameter."""
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        is_given = source is not None and source.name == "COMMANDLINE"
        if is_given and parameter.name not in _MODEL_OPTIONS:
            raise typer.BadParameter("cannot be used with --model.", param_hint=parameter.opts[0])


def _evaluate_model(
    output: CommandOutput, dataset: str, model: str, where: str | None, lake: str
) -> None:
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.offline.evaluation.ope.evaluation_request import ProgressCallbacks
    from replaylake.offline.evaluation.ope.sequences import evaluate_sequences

    store = open_lake(lake)
    with output.progress("reading the sequences", "sequences") as progress:
        callbacks = ProgressCallbacks(lambda stage: progress.stage(stage, "sequences"), progress)
        report = evaluate_sequences(store, dataset, model, where=where, callbacks=callbacks)
    body = report.to_json()
    saved = save_evaluation(output, store, "ope", body, of=body, verdict=report.verdict)
    output.print_result({**body, "evaluation_id": saved}, _list_sequences(report))
    if report.verdict == "not supported":
        raise typer.Exit(_EXIT_NO)


def _list_sequences(report: SequenceReport) -> Iterator[str]:
    one = report.estimate
    yield (
        f"model {report.model} on {report.dataset}@{report.version}, "
        f"{count(one.num_episodes, 'episode')} of {count(one.num_tasks, 'task')}, "
        f"{number_text(_round_digits(one.mean_tokens))} sampled tokens each on average"
    )
    if report.left_out:
        drops = ", ".join(f"{num:,} {reason}" for reason, num in report.left_out.items())
        yield f"  left out: {drops}"
    yield f"log mean {_round_digits(one.log_mean):,}"
    if one.value is not None:
        low, high = _round_digits(one.low), _round_digits(one.high)
        difference = number_text(_round_digits(one.difference))
        if one.difference_low is not None:
            difference += (
                f" ({number_text(_round_digits(one.difference_low))} to "
                f"{number_text(_round_digits(one.difference_high))})"
            )
        yield (
            f"sequence_snis {number_text(_round_digits(one.value))}"
            f"{interval_text(low, high)}; difference {difference}"
        )
    yield (
        f"weights of whole sequences: mean {number_text(_round_digits(one.mean_weight))} (1 "
        f"expected), largest {one.max_weight_share:.2%} of all, effective "
        f"{one.effective_size:,.1f} episodes; KL {one.kl:.4g} nats a token"
    )
    yield f"{report.verdict}: {one.assessment.reason}"


def _exploration(text: str | None) -> Any:
    from replaylake.datastore.lake.policies.exploration import parse_exploration

    return parse_exploration(text)


def _holdout(share: float | None, after: str | None) -> Holdout | None:
    """Return the split that the options name. Raises: typer.BadParameter (exit 2)."""
    if share is None and after is None:
        return None
    from replaylake.datastore.lake.holdout import Holdout

    time = None
    if after is not None:
        try:
            time = datetime.fromisoformat(after)
        except ValueError as error:
            raise typer.BadParameter(
                f"found {after!r}, expected an ISO time such as 2026-11-01T12:00:00+01:00.",
                param_hint="--holdout-after",
            ) from error
        time = time if time.tzinfo is not None else time.replace(tzinfo=UTC)
    return Holdout(share, time)


def _lines(report: PolicyReport) -> Iterator[str]:
    yield f"{_policy(report)} on {report.dataset}@{report.version}, {_episodes(report)}"
    if report.left_out:
        drops = ", ".join(f"{num:,} {reason}" for reason, num in report.left_out.items())
        yield f"  left out: {drops}"
    yield f"  reward: {reward_text(report)}"
    yield f"  propensities: {_propensities(report)}"
    yield f"  model of values: {report.model}"
    yield from (f"  note: {note}" for note in report.notes)
    log = report.estimates.log_interval
    yield (
        f"log mean {_round_digits(report.estimates.log_mean):,}"
        f"{interval_text(_round_digits(log.low), _round_digits(log.high))}"
    )
    yield ""
    yield from _table(report)
    yield from _explain_impossible_values(report)
    yield from _list_normalized_returns(report)
    refusals = report.estimates.refused
    for why in dict.fromkeys(refusals.values()):
        yield f"no {', '.join(name for name in refusals if refusals[name] == why)}: {why}"
    yield from _diagnostics(report)
    yield f"{report.verdict}: {report.assessment.reason}"


def _explain_impossible_values(report: PolicyReport) -> Iterator[str]:
    """Yield a line for each value that its interval leaves out, as where weights are clipped."""
    for one in report.estimates.estimates:
        if one.ci_low is None or one.ci_high is None or one.ci_low <= one.value <= one.ci_high:
            continue
        yield (
            f"note: the value of {one.estimator}, {_round_digits(one.value):,}, is outside its "
            "interval: no policy can have it with the rewards of this log, and intervals hold only "
            "values that are possible."
        )


def _list_normalized_returns(report: PolicyReport) -> Iterator[str]:
    values = report.normalized()
    if values is not None and report.score_reference is not None:
        texts = (f"{name} {_round_digits(value):,}" for name, value in values.items())
        yield f"normalized: {', '.join(texts)}"
        yield f"  {reference_text(report.score_reference.to_json())}"


def save_evaluation(
    output: CommandOutput,
    lake: Lake,
    kind: Kind,
    body: Mapping[str, Any],
    *,
    of: Mapping[str, Any],
    verdict: str,
    by: str | None = None,
) -> str | None:
    """Save a report in the lake and return its id; where the lake cannot be written, say so.

    of: the record's policy, policy_version, dataset and version (of the dataset).
    """
    from replaylake.datastore.errors import StorageError

    try:
        return lake.registry.evaluations.save(
            kind,
            body,
            policy=of.get("policy"),
            policy_version=of.get("policy_version"),
            dataset=of["dataset"],
            dataset_version=of.get("version"),
            verdict=verdict,
            by=by or user_name(),
        )
    except StorageError as error:
        output.print_message(f"the report is not saved in the lake: {error}")
        return None


def reward_text(report: PolicyReport) -> str:
    """Return which reward and discount the returns are of, and what the policy was trained with."""
    reward, gamma = report.reward, report.request.discount
    text = "as stored" if reward.is_stored else reward.expression
    if reward.source == "asked":
        text += ", as asked"
    if reward.training is not None:
        same = reward.training == reward.expression
        text += f"; the policy was trained with {'it' if same else reward.training}"
    elif report.policy.get("policy_version") is not None:
        text += "; the policy's lineage names none that it was trained with"
    trained = report.training_discount
    was = "" if trained in (None, gamma) else f", {trained:g} in training"
    return f"{text}; gamma {gamma:g}{was}"


def _policy(report: PolicyReport) -> str:
    identity = report.policy
    if identity["policy"] is None:
        return f"target policy of probability {identity['target_prob']}"
    if identity["policy_version"] is None:
        return f"policy {identity['policy']}"
    return (
        f"policy {identity['policy']}:{identity['policy_version']} ({identity['selected_by']}), "
        f"acting {identity['acts']}"
    )


def _episodes(report: PolicyReport) -> str:
    numbers = f"{count(report.num_episodes, 'episode')}, {count(report.num_steps, 'step')}"
    if report.holdout is None:
        return numbers
    if "after" in report.holdout:
        return f"{numbers} (held out: those from {report.holdout['after']} on)"
    return f"{numbers} (held out: {report.holdout['fraction']:g} of them by their ids)"


def _propensities(report: PolicyReport) -> str:
    about = report.propensities
    text = str(about["source"])
    if about.get("why"):
        return f"{text}: {about['why']}"
    if not about["fitted_steps"]:
        return text
    text += f" ({about['fitted_steps']:,} steps, cross-fitted over {about['folds']} folds); "
    text += f"log-likelihood {about['log_likelihood']:.4g} a step"
    if about["marginal_log_likelihood"] is not None:
        text += f", {about['marginal_log_likelihood']:.4g} without observations"
    if about["calibration_error"] is not None:
        text += f"; calibration error {about['calibration_error']:.4g}"
    return text


def _table(report: PolicyReport) -> list[str]:
    is_fitted = report.diagnostics.behavior_fitted
    is_lacking = any(one.no_interval for one in report.estimates.estimates)
    rows = [
        {
            "estimator": one.estimator,
            "value": _round_digits(one.value),
            "low": _round_digits(one.ci_low),
            "high": _round_digits(one.ci_high),
            "difference": _round_digits(one.difference),
            "from": _round_digits(one.difference_low),
            "to": _round_digits(one.difference_high),
            "effective episodes": _round_digits(one.effective_sample_size),
            "max weight": _round_digits(one.max_weight),
            **({"interval": "no interval" if one.no_interval else ""} if is_lacking else {}),
            **({"propensities": one.propensities} if is_fitted else {}),
        }
        for one in report.estimates.estimates
    ]
    return table_lines(rows, list(rows[0])) if rows else []


def _diagnostics(report: PolicyReport) -> Iterator[str]:
    values = report.diagnostics
    if (weights := values.weights) is not None:
        yield (
            f"weights: mean {weights.mean_weight:.4g} (1 expected), largest "
            f"{weights.max_weight_share:.2%} of all, effective "
            f"{number_text(round(weights.worst_step_size, 1))} episodes at the worst step; the "
            f"policy could have taken the logged action in {weights.matching:.1%} of steps"
        )
    if values.overlap is not None:
        yield f"overlap of the two policies: {values.overlap:.3g} (1 if they are equal)"
    if values.unsupported_mass:
        yield f"probability of actions that were never logged: {values.unsupported_mass:.2%}"


def _round_digits(value: float | None) -> float | None:
    """Return so many significant digits, for a table whose columns align."""
    return None if value is None else float(f"{value:.{_DIGITS}g}")
