"""`replaylake evaluate`: what policies return in an environment, and how often they solve tasks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replaylake.cli.commands.ope import save_evaluation
from replaylake.cli.commands.set_reference import reference_text
from replaylake.cli.name_completion import complete_policies
from replaylake.cli.options import (
    DEFAULT_LAKE,
    DebugOption,
    EnvArgsOption,
    JsonOption,
    LakeOption,
    parse_env_args,
)
from replaylake.cli.output.command_output import (
    CommandOutput,
    count,
    interval_text,
    number_text,
    table_lines,
)

if TYPE_CHECKING:
    from replaylake.datastore.lake.policies.policy import Policy
    from replaylake.offline.evaluation.comparison import PolicyComparison
    from replaylake.offline.evaluation.evaluate import Evaluation
    from replaylake.offline.evaluation.task_sets.task_set import (
        Measure,
        TaskSetReport,
        TaskSetRequest,
    )
    from replaylake.offline.evaluation.video import Video

RANDOM = "random"
_STORED = "reward"
_ENV = "Environment options"
_TASKS = "Task set options"
# By its label: a policy, and what the answer says of it.
_Acting = Mapping[str, tuple["Policy", dict[str, Any]]]


def evaluate(
    context: typer.Context,
    policies: Annotated[
        list[str],
        typer.Argument(
            metavar="POLICY",
            autocompletion=complete_policies,
            show_default=False,
            help="Policy, as name:version, name@alias, or name (its champion if set, else its "
            "newest version). With --env also random, for uniformly random actions; with --dataset "
            "also LABEL=SQL, for the samples that a condition over episodes selects.",
        ),
    ],
    env: Annotated[
        str | None,
        typer.Option(
            "--env",
            metavar="ID",
            help="Environment to run in: Gymnasium id or module:function.",
            show_default=False,
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            "--dataset",
            metavar="NAME[@VERSION]",
            help="Instead of an environment, dataset with samples of tasks that the policies have "
            "made, as NAME[@VERSION].",
        ),
    ] = None,
    comparing: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Evaluate several policies on the same seeds or tasks, and compare each with the "
            "first.",
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            help="File to plot the returns, or pass@k by k, to: a .png, .svg or .pdf.",
        ),
    ] = None,
    env_arg: EnvArgsOption = None,
    episodes: Annotated[
        int,
        typer.Option(
            "--episodes",
            metavar="N",
            min=1,
            rich_help_panel=_ENV,
            help="Number of whole episodes to run.",
        ),
    ] = 20,
    seed: Annotated[
        int,
        typer.Option(
            "--seed",
            metavar="N",
            min=0,
            rich_help_panel=_ENV,
            help="Random seed: episode i resets with seed + i.",
        ),
    ] = 0,
    sample: Annotated[
        bool,
        typer.Option(
            "--sample",
            rich_help_panel=_ENV,
            help="Sample actions from the policy, instead of taking the most likely one.",
        ),
    ] = False,
    video: Annotated[
        Path | None,
        typer.Option(
            "--video",
            metavar="FILE",
            rich_help_panel=_ENV,
            help="File to render the first episodes to: a .gif, .png or .mp4.",
        ),
    ] = None,
    video_episodes: Annotated[
        int,
        typer.Option(
            "--video-episodes",
            metavar="N",
            min=1,
            rich_help_panel=_ENV,
            help="Number of episodes to render.",
        ),
    ] = 1,
    task: Annotated[
        str,
        typer.Option(
            "--task",
            metavar="SQL",
            rich_help_panel=_TASKS,
            help="Expression over the columns of steps that names an episode's task.",
        ),
    ] = "group_id",
    success: Annotated[
        str,
        typer.Option(
            "--success",
            metavar="SQL",
            rich_help_panel=_TASKS,
            help="Condition over episodes and their steps; a sample passed if it holds.",
        ),
    ] = "return > 0",
    k: Annotated[
        list[int] | None,
        typer.Option(
            "--k",
            metavar="N",
            rich_help_panel=_TASKS,
            help="Number k of pass@k: one of k samples has to pass. Repeatable; by default powers "
            "of two up to the fewest samples of a task.",
        ),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(
            "--where",
            metavar="SQL",
            rich_help_panel=_TASKS,
            help="Condition over episodes and their steps that selects samples.",
        ),
    ] = None,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure policies in an environment or on stored samples.

    With --env, runs whole episodes and prints their mean return with its 95% interval. With
    --dataset, reads the samples of each task that the policies have made, for example those of
    language agents, and prints pass@k, mean reward and tokens; the report is saved in the lake.
    Use `evaluate` where there is an environment, `ope` to estimate the value from logged episodes
    alone, and `replay-decisions` to see where a policy decides differently from the log.

    Example:
      replaylake evaluate clone --env CartPole-v1 --episodes 20 --seed 0
      replaylake evaluate clone:1 clone:2 random --compare --env CartPole-v1
      replaylake evaluate agent:1 agent:2 --compare --dataset math --success 'return > 0.5'
    """
    _check_number(policies, comparing, video)
    _check_source(context, env, dataset)
    report = CommandOutput(as_json)
    if plot is not None:
        from replaylake.cli.output.curves import check_picture

        check_picture(plot)
    if dataset is not None:
        from replaylake.offline.evaluation.task_sets.task_set import TaskSetRequest

        is_default = context.get_parameter_source("success").name == "DEFAULT"  # type: ignore[union-attr]
        request = TaskSetRequest(
            dataset,
            task=task,
            success=None if is_default else success,
            where=where,
            ks=tuple(k) if k else None,
        )
        _evaluate_samples(report, policies, request, lake, plot)
        return
    assert env is not None, "one of the two is there"
    env_args = parse_env_args(env_arg)
    entries = _policies(policies, env, env_args, lake)
    if comparing:
        compared = _compare(report, entries, env, env_args, episodes, seed, not sample)
        returns = {one.policy: one.evaluation.returns for one in compared}
        body, lines = _body(compared, entries), list(_table(compared, seed))
        for one in compared:
            lines += _list_normalized_returns(
                entries[one.policy][1], one.evaluation, f"{one.policy}: "
            )
    else:
        ((label, (policy, about)),) = entries.items()
        film = None if video is None else _film(video, env, env_args)
        # A random policy draws whatever it is asked for.
        mode = not sample and policies != [RANDOM]
        result = _evaluate(
            report, policy, env, env_args, episodes, seed, mode, film, video_episodes
        )
        returns = {label: result.returns}
        body = {**about, **result.to_json(), **_normalize_return(about, result)}
        lines = [_sentence(label, result), *_list_normalized_returns(about, result)]
    if plot is not None:
        from replaylake.cli.output.curves import draw_returns

        draw_returns(plot, returns, env)
        report.print_message(f"wrote {plot}")
    report.print_result(body, [*lines, *_other_rewards(entries)])


def policy_text(identity: Mapping[str, Any]) -> str:
    """Return `clone:3 (newest)`: which version answered, and what chose it."""
    if identity["version"] is None:
        return str(identity["policy"])
    return f"{identity['policy']}:{identity['version']} ({identity['selected_by']})"


def _check_number(policies: Sequence[str], comparing: bool, video: Path | None) -> None:
    if comparing and len(policies) < 2:
        raise typer.BadParameter(
            f"found {len(policies)} policy, expected two or more.", param_hint="--compare"
        )
    if not comparing and len(policies) > 1:
        raise typer.BadParameter(
            f"found {len(policies)} policies, expected one, or --compare.", param_hint="POLICY"
        )
    if comparing and video is not None:
        raise typer.BadParameter("cannot be used with --compare.", param_hint="--video")


def _check_source(context: typer.Context, env: str | None, dataset: str | None) -> None:
    """Refuse neither or both sources, and options of the other. Raises: typer.BadParameter."""
    if (env is None) == (dataset is None):
        found = "neither" if env is None else "both"
        raise typer.BadParameter(
            f"found {found}, expected an environment or a dataset.", param_hint="--env, --dataset"
        )
    panel, other = (_TASKS, "--dataset") if dataset is None else (_ENV, "--env")
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        is_given = source is not None and source.name == "COMMANDLINE"
        is_other = getattr(parameter, "rich_help_panel", None) == panel
        if is_given and (is_other or (dataset is not None and parameter.name == "env_arg")):
            raise typer.BadParameter(f"requires {other}.", param_hint=parameter.opts[0])


def _policies(texts: Sequence[str], env: str, env_args: Mapping[str, Any], lake: str) -> _Acting:
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.datastore.lake.policies.package import load_policy
    from replaylake.datastore.lake.policies.uniform import UniformPolicy
    from replaylake.offline.environments.ids import spaces_of
    from replaylake.offline.evaluation.ope.training_set import find_score_reference, training_set

    entries: dict[str, tuple[Policy, dict[str, Any]]] = {}
    versions: list[tuple[Any, Any]] = []
    identity: dict[str, Any]
    for text in texts:
        if text == RANDOM:
            identity = {"policy": RANDOM, "version": None, "selected_by": "reserved name"}
            identity["training_reward"] = identity["score_reference"] = None
            policy: Policy = UniformPolicy(*spaces_of(env, env_args))
        else:
            store = open_lake(lake)
            ref = store.registry.resolve(text)
            identity = {"policy": ref.name, "version": ref.version, "selected_by": ref.selected_by}
            training = training_set(store, ref)
            identity["training_reward"] = " and ".join(training.rewards()) or None
            reference = find_score_reference(store, training)
            identity["score_reference"] = None if reference is None else reference.to_json()
            policy = load_policy(ref.path, ref.manifest_sha256)
        label = policy_text(identity)
        if any((identity["policy"], identity["version"]) == known for known in versions):
            raise typer.BadParameter(
                f"found {label} twice, expected different policies.", param_hint="POLICY"
            )
        versions.append((identity["policy"], identity["version"]))
        entries[label] = policy, identity
    return entries


def _other_rewards(entries: _Acting) -> Iterator[str]:
    """Say of which policies the environment's reward is not the one that they learned from."""
    for label, (_, identity) in entries.items():
        if identity["training_reward"] not in (None, _STORED):
            yield (
                f"note: {label} was trained with the reward {identity['training_reward']}; returns "
                "here are of the environment's own"
            )


def _film(path: Path, env: str, env_args: Mapping[str, Any]) -> Video:
    from replaylake.offline.environments.rendering import frames_per_second
    from replaylake.offline.evaluation.video import Video

    # It is drawn into an array. Without a screen SDL writes an error of its own otherwise.
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    return Video(path, frames_per_second(env, env_args))


def _evaluate(
    report: CommandOutput,
    policy: Policy,
    env: str,
    env_args: Mapping[str, Any],
    episodes: int,
    seed: int,
    deterministic: bool,
    film: Video | None,
    filmed_episodes: int,
) -> Evaluation:
    from replaylake.offline.callbacks import Callbacks
    from replaylake.offline.evaluation.evaluate import EvaluationConfig
    from replaylake.offline.evaluation.evaluate import evaluate as run

    with report.progress("ran", "episodes") as progress:
        config = EvaluationConfig(
            env,
            env_args=env_args,
            episodes=episodes,
            seed=seed,
            deterministic=deterministic,
            filmed_episodes=filmed_episodes,
        )
        callbacks = Callbacks(
            on_progress=lambda done: progress(done.num_episodes, done.episodes),
            on_frame=None if film is None else film.add,
        )
        result = run(policy, config, callbacks=callbacks)
    if film is not None:
        film.save()
        report.print_message(f"wrote {film.path}  {count(film.num_frames, 'frame')}")
    return result


def _compare(
    report: CommandOutput,
    entries: _Acting,
    env: str,
    env_args: Mapping[str, Any],
    episodes: int,
    seed: int,
    deterministic: bool,
) -> list[PolicyComparison]:
    from replaylake.offline.callbacks import Callbacks
    from replaylake.offline.evaluation.comparison import compare
    from replaylake.offline.evaluation.evaluate import EvaluationConfig

    with report.progress("ran", "episodes") as progress:
        config = EvaluationConfig(
            env, env_args=env_args, episodes=episodes, seed=seed, deterministic=deterministic
        )
        return compare(
            {label: policy for label, (policy, _) in entries.items()},
            config,
            callbacks=Callbacks(
                on_progress=lambda done: progress(done.num_episodes, done.episodes)
            ),
        )


def _normalize_return(about: Mapping[str, Any], result: Evaluation) -> dict[str, float | None]:
    """Return the mean return by the reference of the policy's training data, if there is one."""
    from replaylake.datastore.episodes.score_reference import ScoreReference

    reference = about["score_reference"]
    if reference is None:
        return {"normalized_return": None}
    return {"normalized_return": ScoreReference.from_json(reference).normalize(result.mean_return)}


def _list_normalized_returns(
    about: Mapping[str, Any], result: Evaluation, label: str = ""
) -> Iterator[str]:
    value = _normalize_return(about, result)["normalized_return"]
    if value is not None:
        yield (
            f"{label}normalized return {number_text(value)} "
            f"({reference_text(about['score_reference'])})"
        )


def _sentence(label: str, result: Evaluation) -> str:
    return (
        f"{label} in {result.env_id}: mean return {number_text(result.mean_return)} over "
        f"{count(len(result.returns), 'episode')}{interval_text(result.ci_low, result.ci_high)}"
    )


def _body(compared: Sequence[PolicyComparison], entries: _Acting) -> dict[str, Any]:
    policies = [
        {
            **entries[one.policy][1],
            **one.evaluation.to_json(),
            **_normalize_return(entries[one.policy][1], one.evaluation),
            "difference": one.difference,
            "difference_ci_low": one.ci_low,
            "difference_ci_high": one.ci_high,
            "share_better": one.share_better,
            "share_equal": one.share_equal,
        }
        for one in compared
    ]
    return {"env_id": compared[0].evaluation.env_id, "policies": policies}


def _table(compared: Sequence[PolicyComparison], seed: int) -> Iterator[str]:
    first = compared[0].evaluation
    episodes = len(first.returns)
    yield (
        f"in {first.env_id}, {count(episodes, 'episode')} each on seeds {seed} to "
        f"{seed + episodes - 1}; differences from {compared[0].policy}, seed by seed"
    )
    rows = [
        {
            "policy": one.policy,
            "mean return": one.evaluation.mean_return,
            "95% interval": _range(one.evaluation.ci_low, one.evaluation.ci_high),
            "difference": one.difference,
            "its 95% interval": _range(one.ci_low, one.ci_high),
            "better": None if one.share_better is None else f"{one.share_better:.0%}",
            "equal": None if one.share_equal is None else f"{one.share_equal:.0%}",
        }
        for one in compared
    ]
    yield from table_lines(rows, list(rows[0]))


def _range(low: float | None, high: float | None) -> str | None:
    if low is None or high is None:
        return None
    return f"{number_text(low)} to {number_text(high)}"


def _evaluate_samples(
    output: CommandOutput,
    policies: Sequence[str],
    request: TaskSetRequest,
    lake: str,
    plot: Path | None,
) -> None:
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.offline.evaluation.task_sets.task_set import (
        evaluate_task_set,
        select_sampled_policy,
    )

    store = open_lake(lake)
    selected = [select_sampled_policy(store, text) for text in policies]
    with output.waiting("reading the samples"):
        report = evaluate_task_set(store, selected, request)
    if plot is not None:
        from replaylake.cli.output.forest import draw_task_set

        draw_task_set(plot, report)
        output.print_message(f"wrote {plot}")
    body = report.to_json()
    about = {key: value for key, value in body.items() if key != "policies"}
    for one in body["policies"]:
        saved = {**about, **one}
        verdict = one["verdict"]
        one["evaluation_id"] = save_evaluation(
            output, store, "tasks", saved, of=saved, verdict=verdict
        )
    output.print_result(body, _list_samples(report))


def _list_samples(report: TaskSetReport) -> Iterator[str]:
    request = report.request
    success = "return > 0" if request.success is None else request.success
    yield f"on {report.dataset}@{report.version}, by {request.task}; passed: {success}"
    for one in report.policies:
        samples = one.samples
        fewest, most = int(samples.num_samples.min()), int(samples.num_samples.max())
        each = f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"
        text = (
            f"{samples.policy}: {count(len(samples.tasks), 'task')}, "
            f"{count(int(samples.num_samples.sum()), 'sample')} ({each} each)"
        )
        if samples.tokens is not None:
            text += (
                f"; tokens a sample: {number_text(_round_digits(samples.tokens.prompt))} prompt, "
                f"{number_text(_round_digits(samples.tokens.completion))} completion"
            )
            per_success = samples.tokens.completion_per_success
            if per_success is not None:
                text += f" ({number_text(_round_digits(per_success))} a success)"
        yield text
        if samples.left_out:
            drops = ", ".join(f"{num:,} {reason}" for reason, num in samples.left_out.items())
            yield f"  left out: {drops}"
    yield ""
    has_others = len(report.policies) > 1
    rows = [
        {
            "policy": str(one.samples.policy),
            "estimator": measure.name,
            "value": _round_digits(measure.estimate.value),
            "low": _round_digits(measure.estimate.low),
            "high": _round_digits(measure.estimate.high),
            **(_difference_cells(measure) if has_others else {}),
        }
        for one in report.policies
        for measure in one.measures
    ]
    yield from table_lines(rows, list(rows[0]))
    if has_others:
        yield f"differences from {report.policies[0].samples.policy}, task by task"
    for one in report.policies:
        yield f"{one.samples.policy}: {one.verdict}: {one.reason}"


def _difference_cells(measure: Measure) -> dict[str, float | int | None]:
    other = measure.difference
    return {
        "difference": None if other is None else _round_digits(other.value),
        "from": None if other is None else _round_digits(other.low),
        "to": None if other is None else _round_digits(other.high),
        "shared tasks": None if other is None else other.num_tasks,
    }


def _round_digits(value: float) -> float:
    """Return four significant digits, for a table whose columns align."""
    return float(f"{value:.4g}")
