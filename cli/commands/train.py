"""`replaylake train`: a policy from the lake."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from replaylake.cli.config import read_options
from replaylake.cli.name_completion import complete_datasets
from replaylake.cli.options import (
    DEFAULT_LAKE,
    DebugOption,
    EnvArgsOption,
    JsonOption,
    LakeOption,
    parse_env_args,
)
from replaylake.cli.output.command_output import CommandOutput, count, interval_text, number_text
from replaylake.cli.output.progress import time_left
from replaylake.cli.run_options import (
    AssignmentsOption,
    ConfigOption,
    ResumeOption,
    announce_start,
    check_no_other_options,
    check_project,
    print_resume_hint,
)
from replaylake.datastore.errors import ReplayLakeError

if TYPE_CHECKING:
    from replaylake.cli.output.watch import Watchers
    from replaylake.datastore.lake.lake import Lake
    from replaylake.offline.callbacks import Callbacks, RunStart
    from replaylake.offline.running.train import TrainResult
    from replaylake.offline.running.training.config import TrainConfig
    from replaylake.offline.running.training.trainer import TrainProgress

_METRICS_SHOWN: Final = 4
_MEASURES: Final = {
    "environment": "mean return in the environment",
    "fqe": "value on the held-out episodes (fitted Q evaluation)",
    "loss": "loss on the held-out episodes",
}


def offline(
    datasets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME[@VERSION]...",
            autocompletion=complete_datasets,
            show_default=False,
            help="Datasets to learn from, with equal spaces; required unless --resume is given.",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="NAME",
            help="Name to register the policy under, as its next version; required unless --resume "
            "is given.",
            show_default=False,
        ),
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(
            "--algorithm",
            metavar="NAME",
            help="Algorithm: bc, cql, iql, ...; d3rlpy:bc for that of d3rlpy if ReplayLake has one "
            "of this name; module:function for your own. Required here or in --config.",
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
    where_steps: Annotated[
        str | None,
        typer.Option(
            "--where-steps",
            metavar="SQL",
            help="Condition over the columns of steps that selects the steps to learn from.",
        ),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            "--reward",
            metavar="SQL",
            help="Expression over the columns of steps that replaces the logged reward.",
        ),
    ] = None,
    weight: Annotated[
        str | None,
        typer.Option(
            "--weight",
            metavar="SQL",
            help="Expression over the columns of a step and its episode; steps are sampled in "
            "proportion to it.",
        ),
    ] = None,
    holdout: Annotated[
        float | None,
        typer.Option(
            "--holdout",
            metavar="SHARE",
            help="Share of the episodes to hold out for evaluation, chosen by a hash of their ids.",
        ),
    ] = None,
    holdout_after: Annotated[
        str | None,
        typer.Option(
            "--holdout-after",
            metavar="TIME",
            help="Hold out the episodes that began at this time or later.",
        ),
    ] = None,
    updates: Annotated[
        int | None, typer.Option("--updates", metavar="N", help="Number of gradient updates.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Random seed.")] = None,
    learners: Annotated[
        int | None,
        typer.Option(
            "--learners",
            metavar="N",
            help="Number of processes that compute each update together, each on a part of the "
            "batch.",
        ),
    ] = None,
    env: Annotated[
        str | None,
        typer.Option(
            "--env",
            metavar="ID",
            help="Environment to select and evaluate the policy in: Gymnasium id or "
            "module:function.",
        ),
    ] = None,
    env_arg: EnvArgsOption = None,
    resume: ResumeOption = None,
    config: ConfigOption = None,
    assignments: AssignmentsOption = None,
    wandb: Annotated[
        str | None,
        typer.Option(
            "--wandb", metavar="PROJECT", help="Weights & Biases project to report metrics to."
        ),
    ] = None,
    mlflow: Annotated[
        str | None,
        typer.Option(
            "--mlflow",
            metavar="EXPERIMENT",
            help="MLflow experiment to report to, at the server of MLFLOW_TRACKING_URI.",
        ),
    ] = None,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Train a policy on stored datasets.

    Registers the best policy of the run as a new version, or the last one if there is neither an
    environment nor a holdout to select by (docs/TRAINING.md). --config and --set take options of
    training (batch_size, discount, patience, ...) and of the algorithm.

    Example:
      replaylake train offline cartpole --algorithm bc --policy clone --env CartPole-v1
      replaylake train offline cartpole@1 live --algorithm cql --policy cql --set alpha=2.0
      replaylake train offline pendulum --algorithm iql --policy iql --holdout 0.2
      replaylake train offline --resume 01m7xx37q2a1tjwqb8trpt4zek
    """
    has_env = env is not None or config is not None or bool(assignments)
    values: dict[str, Any] = {
        "algorithm": algorithm,
        "policy": policy,
        "where": where,
        "where_steps": where_steps,
        "reward": reward,
        "weight": weight,
        "env": env,
        "env_args": parse_env_args(env_arg, has_env=has_env) or None,
        "updates": updates,
        "seed": seed,
        "learners": learners,
        "holdout": holdout,
        "holdout_after": holdout_after,
    }
    values = {key: value for key, value in values.items() if value is not None}
    if resume is not None:
        check_no_other_options(datasets, config, assignments, *values.values())
    check_project(wandb, mlflow)
    options = read_options(config, assignments or []) | values
    if resume is None:
        _check_required(datasets, options.get("policy"))

    # After the options are parsed: torch takes a second to import.
    from replaylake.cli.output.watch import watchers
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.datastore.lake.runs.summary import find_run
    from replaylake.offline.running import train as training

    report = CommandOutput(as_json)
    store = open_lake(lake)

    def run(callbacks: Callbacks) -> TrainResult:
        if resume is not None:
            run_id = find_run(store.registry, resume)["run_id"]
            return training.resume(store, run_id, callbacks=callbacks)
        settings = _settings(options)
        pinned = [_pin_snapshot(report, store, text) for text in datasets or []]
        return training.train(store, pinned, settings, callbacks=callbacks)

    with (
        watchers(report, store, wandb_project=wandb, mlflow_experiment=mlflow) as watch,
        print_resume_hint(report, "train offline", without="from the beginning"),
    ):
        result = _run_with_progress(report, watch, run)
    logged = None if result.evaluation is None else _find_logged_returns(store, result)
    report.print_result({**_body(result), "logged": logged}, _summary(result, logged))
    if logged is not None and _is_worse(result, logged["mean_return"]):
        report.print_message(
            "note: the policy's mean return is below that of the episodes that it learned from. "
            "More updates, another algorithm (bc imitates the log), or another reward may help: "
            "docs/TRAINING.md"
        )


def _find_logged_returns(lake: Lake, result: TrainResult) -> dict[str, Any] | None:
    """Return the mean return of the complete episodes of the datasets, of whoever acted in them.

    None if there is none, or if a version is gone meanwhile.
    """
    total, num = 0.0, 0
    with suppress(ReplayLakeError):
        for one in result.datasets:
            snapshot = lake.snapshot(f"{one['dataset']}@{one['version']}")
            row = snapshot.sql(
                'SELECT coalesce(sum("return"), 0.0) AS total, count("return") AS num '
                "FROM games WHERE complete"
            ).to_pylist()[0]
            total, num = total + row["total"], num + row["num"]
    return {"mean_return": total / num, "num_episodes": num} if num else None


def _is_worse(result: TrainResult, logged: float) -> bool:
    """Whether the policy's 95% interval of the mean return lies below the log's mean."""
    score = result.evaluation
    if score is None or _of_reward(result):
        return False
    return (score.mean_return if score.ci_high is None else score.ci_high) < logged


def _check_required(datasets: Sequence[str] | None, policy: str | None) -> None:
    if not datasets:
        raise typer.BadParameter(
            "found none, expected at least one dataset, or --resume RUN.",
            param_hint="NAME[@VERSION]...",
        )
    if policy is None:
        raise typer.BadParameter("found none, expected a name.", param_hint="--policy")


def _run_with_progress(
    report: CommandOutput, watch: Watchers, run: Callable[[Callbacks], TrainResult]
) -> TrainResult:
    from replaylake.offline.callbacks import Callbacks

    with (
        report.waiting("reading the episodes") as waiting,
        report.progress("read", "shards") as reading,
        report.progress("update", "") as progress,
    ):

        def tell_read(num: int, total: int) -> None:
            waiting.end()
            reading(num, total)

        def tell_begin(start: RunStart) -> None:
            waiting.end()
            announce_start(report, watch, start)

        def tell(now: TrainProgress) -> None:
            rest = f"  {time_left(now.remaining_s)} left" if now.update < now.updates else ""
            rate = f"{now.updates_per_s:,.0f} updates/s"
            progress(now.update, now.updates, f"{_metrics(now.metrics)}  {rate}{rest}")

        return run(
            Callbacks(on_reading=tell_read, on_start=tell_begin, on_progress=tell, on_metrics=watch)
        )


def _settings(options: Mapping[str, Any]) -> TrainConfig:
    """Sort options into the training's own and the algorithm's.

    Raises: ConfigInvalidError; typer.BadParameter (exit 2) where none is the algorithm.
    """
    from replaylake.offline.running.training.config import train_config

    if "algorithm" not in options:
        raise typer.BadParameter(
            "found none, expected one such as bc, cql or iql, here or as `algorithm = ...` in "
            "--config.",
            param_hint="--algorithm",
        )
    return train_config(options)


def _pin_snapshot(report: CommandOutput, lake: Lake, text: str) -> str:
    """Say what a dataset holds; return it with that version, so that it is what is trained on.

    What has a version or a tag already stays as it is: the run's record keeps the tag's name.
    """
    snapshot = lake.snapshot(text)
    row = snapshot.sql(
        "SELECT count(DISTINCT (policy, policy_version)) FILTER (policy IS NOT NULL) AS n, "
        "count(behavior_log_prob) AS with_propensity FROM steps"
    ).to_pylist()[0]
    policies = "behavior policy unknown"
    if row["n"]:
        policies = f"{row['n']:,} behavior " + ("policy" if row["n"] == 1 else "policies")
    elif row["with_propensity"]:
        share = row["with_propensity"] / snapshot.num_steps
        of = "" if share == 1 else f" of {share:.1%} of the steps"
        policies = f"behavior policy not named, propensities{of} logged"
    report.print_message(
        f"snapshot {snapshot.dataset}@{snapshot.version}  {count(len(snapshot.files), 'shard')}  "
        f"{count(snapshot.num_steps, 'step')}  {policies}"
    )
    return text if "@" in text else f"{snapshot.dataset}@{snapshot.version}"


def _metrics(metrics: Mapping[str, float]) -> str:
    """Return the losses, and of the rest the values of actions first."""
    names = sorted(metrics, key=lambda name: (not name.endswith("loss"), not name.startswith("q")))
    # The sum makes 0 of -0, which says nothing more.
    return "  ".join(f"{name} {metrics[name] + 0.0:.4g}" for name in names[:_METRICS_SHOWN])


def _body(result: TrainResult) -> dict[str, Any]:
    return {
        "policy": result.policy.name,
        "version": result.policy.version,
        "run_id": result.run_id,
        "algorithm": result.config.algorithm,
        "datasets": result.datasets,
        "num_episodes": result.num_episodes,
        "num_steps": result.num_steps,
        "updates": result.config.updates,
        "update": result.update,
        "seed": result.config.seed,
        "metrics": result.metrics,
        "updates_per_s": result.updates_per_s,
        "selection": result.selection,
        "evaluation": None if result.evaluation is None else result.evaluation.to_json(),
        "was_done": result.already_finished,
    }


def _summary(result: TrainResult, logged: Mapping[str, Any] | None) -> Iterator[str]:
    if result.already_finished:
        yield f"run {result.run_id} is done already: nothing was changed"
    yield f"trained on {count(result.num_episodes, 'episode')}, {count(result.num_steps, 'step')}"
    selection, num_updates = result.selection, result.selection["history"][-1]["update"]
    early = f" of {result.config.updates:,}, stopped early" if selection["stopped_early"] else ""
    is_last = result.update == num_updates
    history = [point["update"] for point in selection["history"]]
    before = [0, *(update for update in history if update < result.update)][-1]
    num_averaged = result.update - before
    ours = f"  {_metrics(result.metrics)} (means of the last {num_averaged:,})" if is_last else ""
    yield f"{count(num_updates, 'update')}{early}{ours}  {result.updates_per_s:,.0f} updates/s"
    if selection["measure"] != "last":
        num_measured = len(selection["history"])
        yield (
            f"took the policy of update {result.update:,}, the best of {num_measured} by "
            f"{_MEASURES[selection['measure']]}: {number_text(selection['value'])}"
        )
        if selection["measure"] == "fqe":
            each = result.config.num_fqe_updates
            yield (
                f"selection by fitted Q evaluation made at most {each * num_measured:,} updates "
                f"({each:,} per evaluation); training made {num_updates:,}"
            )
    if not is_last:
        # They are of the policy that was taken, and not of the end.
        yield f"means of the {num_averaged:,} updates before it: {_metrics(result.metrics)}"
    if result.evaluation is not None:
        score = result.evaluation
        yield (
            f"evaluated in {score.env_id}, on other seeds: mean return "
            f"{number_text(score.mean_return)} over {count(len(score.returns), 'episode')}"
            f"{interval_text(score.ci_low, score.ci_high)}{_of_reward(result)}"
        )
    if logged is not None:
        yield (
            f"the log: mean return {number_text(logged['mean_return'])} over "
            f"{count(logged['num_episodes'], 'complete episode')}"
        )
    yield f"saved policy {result.policy}"


def _of_reward(result: TrainResult) -> str:
    """Say of returns in an environment that they are not of what was learned from."""
    learned = {str(one["reward"]) for one in result.datasets} - {"None", "reward"}
    if not learned:
        return ""
    return f", of the environment's own reward: trained with {', '.join(sorted(learned))}"
