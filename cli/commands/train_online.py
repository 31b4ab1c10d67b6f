"""`replaylake train online`: a policy from an environment, through the lake."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from replaylake.cli.config import read_options
from replaylake.cli.options import (
    DEFAULT_LAKE,
    DebugOption,
    EnvArgsOption,
    JsonOption,
    LakeOption,
    parse_env_args,
)
from replaylake.cli.output.command_output import CommandOutput, count, interval_text, number_text
from replaylake.cli.run_options import (
    AssignmentsOption,
    ConfigOption,
    EnvRunner,
    ResumeOption,
    announce_start,
    check_no_other_options,
    check_project,
    print_resume_hint,
)

if TYPE_CHECKING:
    from replaylake.cli.output.watch import Watchers
    from replaylake.datastore.lake.lake import Lake
    from replaylake.offline.callbacks import Callbacks, RunStart
    from replaylake.online.monitoring.prometheus import MetricsServer
    from replaylake.online.training.progress import OnlineProgress
    from replaylake.online.training.result import OnlineResult

_COLLECTING: Final = "Collection options"
_LEARNING: Final = "Learning options"
_MONITORING: Final = "Monitoring options"
# The kind of runs of language models, and what is shown of a round, if it is known.
_LANGUAGE: Final = "train language online"
_LANGUAGE_SHOWN: Final = ("mean_reward", "group_pass_rate", "staleness", "kl_behavior", "entropy")
# With which a store refuses until there is room.
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class Agents(StrEnum):
    """Whose policy is learned, of several agents."""

    shared = "shared"
    each = "each"


def online(
    env: Annotated[
        str | None,
        typer.Option(
            "--env",
            metavar="ID",
            help="Environment to collect in: Gymnasium id or module:function; required unless "
            "--resume is given.",
            show_default=False,
        ),
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(
            "--algorithm",
            metavar="NAME",
            help="Algorithm: dqn, sac, td3, impala, ppo, ..., or module:function for your own. "
            "Required here or in --config, unless --start-from is given.",
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            "--dataset",
            metavar="NAME",
            help="Dataset to append steps to; created if it does not exist. Required unless "
            "--resume is given.",
            show_default=False,
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
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="DIR",
            help="Initial language model, a directory that transformers wrote; the algorithm is "
            "then grpo, rloo, ppo, ...",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            metavar="DIR",
            help="Directory to create for the versions of the language model; required with "
            "--model.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            metavar="N",
            help="Number of environment steps to collect.",
            rich_help_panel=_COLLECTING,
        ),
    ] = None,
    until_return: Annotated[
        float | None,
        typer.Option(
            "--until-return",
            metavar="R",
            help="Stop once an evaluation of the policy reaches this mean return.",
            rich_help_panel=_LEARNING,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", metavar="N", help="Number of Ray workers.", rich_help_panel=_COLLECTING
        ),
    ] = None,
    envs_per_worker: Annotated[
        int | None,
        typer.Option(
            "--envs-per-worker",
            metavar="K",
            help="Number of environments that each worker steps together.",
            rich_help_panel=_COLLECTING,
        ),
    ] = None,
    env_args: EnvArgsOption = None,
    env_runner: Annotated[
        EnvRunner | None,
        typer.Option(
            "--env-runner",
            help="Step environments in Ray workers, or locally in this process between updates.",
            rich_help_panel=_COLLECTING,
        ),
    ] = None,
    agents: Annotated[
        Agents | None,
        typer.Option(
            "--agents",
            help="Learn one policy that several agents share, or one for each.",
            rich_help_panel=_LEARNING,
        ),
    ] = None,
    worker_cpus: Annotated[
        float | None,
        typer.Option(
            "--worker-cpus",
            metavar="C",
            help="CPUs that Ray reserves for each worker.",
            rich_help_panel=_COLLECTING,
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="RAY",
            help="Address of a running Ray cluster; without it, Ray is started on this machine.",
            rich_help_panel=_COLLECTING,
        ),
    ] = None,
    sync: Annotated[
        bool,
        typer.Option(
            "--sync",
            help="Collect and learn in turns, instead of both at once.",
            rich_help_panel=_COLLECTING,
        ),
    ] = False,
    no_record: Annotated[
        bool,
        typer.Option(
            "--no-record",
            help="Write no steps to the lake, to measure the cost of recording.",
            rich_help_panel=_COLLECTING,
        ),
    ] = False,
    samples_per_insert: Annotated[
        float | None,
        typer.Option(
            "--samples-per-insert",
            metavar="S",
            help="Steps sampled per collected step; without it, one update per step.",
            rich_help_panel=_LEARNING,
        ),
    ] = None,
    max_staleness: Annotated[
        int | None,
        typer.Option(
            "--max-staleness",
            metavar="V",
            help="Maximum number of policy versions that a step may be behind (impala and ppo).",
            rich_help_panel=_LEARNING,
        ),
    ] = None,
    start_from: Annotated[
        str | None,
        typer.Option(
            "--start-from",
            metavar="POLICY",
            help="Registered policy to start from, as name:version, name@alias or name.",
            rich_help_panel=_LEARNING,
        ),
    ] = None,
    mix: Annotated[
        list[str] | None,
        typer.Option(
            "--mix",
            metavar="DATASET:SHARE",
            help="Share of each batch to draw from another dataset, or from an earlier version of "
            "this one. Repeatable.",
            rich_help_panel=_LEARNING,
        ),
    ] = None,
    learner_gpus: Annotated[
        float | None,
        typer.Option(
            "--learner-gpus",
            metavar="G",
            help="Number of GPUs of the Ray cluster for the learner.",
            rich_help_panel=_LEARNING,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", metavar="N", help="Random seed."),
    ] = None,
    resume: ResumeOption = None,
    config: ConfigOption = None,
    assignments: AssignmentsOption = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            "--metrics-port",
            metavar="PORT",
            help="Port on 127.0.0.1 to serve Prometheus metrics on; 0 takes a free one.",
            rich_help_panel=_MONITORING,
        ),
    ] = None,
    wandb: Annotated[
        str | None,
        typer.Option(
            "--wandb",
            metavar="PROJECT",
            help="Weights & Biases project to report metrics to.",
            rich_help_panel=_MONITORING,
        ),
    ] = None,
    mlflow: Annotated[
        str | None,
        typer.Option(
            "--mlflow",
            metavar="EXPERIMENT",
            help="MLflow experiment to report to, at the server of MLFLOW_TRACKING_URI.",
            rich_help_panel=_MONITORING,
        ),
    ] = None,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Train a policy while it collects steps.

    Workers append every step to the dataset, the learner samples from it, and the best policy is
    registered. --config and --set take options of the run (batch_size, min_size, patience, ...) and
    of the algorithm. Creates the lake if there is none. With --model, a language model is trained
    on its own rollouts (docs/LANGUAGE_ROLLOUTS.md).

    Example:
      replaylake train online --env CartPole-v1 --algorithm dqn --dataset cartpole --policy dqn
      replaylake train online --env Pendulum-v1 --algorithm sac --dataset pendulum --policy sac
      replaylake train online --env sums:play --algorithm grpo --model base --output new --dataset d
      replaylake train online --resume 01m7xx37q2a1tjwqb8trpt4zek
    """
    check_project(wandb, mlflow)
    flags: dict[str, Any] = {
        "algorithm": algorithm,
        "env": env,
        "env_args": parse_env_args(env_args) or None,
        "policy": policy,
        "address": address,
        "steps": steps,
        "until_return": until_return,
        "workers": workers,
        "envs_per_worker": envs_per_worker,
        "env_runner": None if env_runner is None else env_runner.value,
        "agents": None if agents is None else agents.value,
        "worker_cpus": worker_cpus,
        "mode": "sync" if sync else None,
        "record": False if no_record else None,
        "samples_per_insert": samples_per_insert,
        "max_staleness": max_staleness,
        "start_from": start_from,
        "learner_gpus": learner_gpus,
        "seed": seed,
        "mix": _shares(mix) if mix else None,
    }
    values = {key: value for key, value in flags.items() if value is not None}
    if resume is not None:
        check_no_other_options(dataset, config, assignments, model, output, *values.values())
    options = read_options(config, assignments or []) | values
    if model is not None or "model" in options:
        named = {"model": model, "output": output}
        options |= {key: value for key, value in named.items() if value is not None}
        _check_language(values, {**options, "dataset": dataset})
        _train_language(
            CommandOutput(as_json), lake, dataset, options, None, wandb, mlflow, metrics_port
        )
        return
    if output is not None:
        raise typer.BadParameter("found it without --model.", param_hint="--output")
    if resume is None:
        names = {key: options.get(key) for key in ("env", "policy")}
        _check_required({"--env": names["env"], "--dataset": dataset, "--policy": names["policy"]})

    # After the options are parsed: torch takes a second to import.
    from replaylake.cli.output.watch import watchers
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.datastore.lake.runs.summary import find_run
    from replaylake.online import train as training
    from replaylake.online.training.config import OnlineConfig, online_config

    report = CommandOutput(as_json)
    store = open_lake(lake, create=resume is None)
    if resume is not None and find_run(store.registry, resume).get("kind") == _LANGUAGE:
        _train_language(report, lake, None, {}, resume, wandb, mlflow, metrics_port)
        return
    settings: OnlineConfig | None = None
    if resume is None:
        if "algorithm" not in options and options.get("start_from"):
            options["algorithm"] = _algorithm_of(store, options["start_from"])
        _check_algorithm(options)
        settings = online_config(options)

    def run(callbacks: Callbacks) -> OnlineResult:
        if settings is None:
            run_id = find_run(store.registry, resume or "")["run_id"]
            return training.resume_online(store, run_id, callbacks=callbacks)
        return training.train_online(store, dataset or "", settings, callbacks=callbacks)

    with ExitStack() as stack:
        watch = stack.enter_context(
            watchers(report, store, wandb_project=wandb, mlflow_experiment=mlflow)
        )
        server = _metrics_server(report, stack, metrics_port)
        with print_resume_hint(report, "train online", without="from what was collected"):
            result = _run_with_progress(report, store, watch, server, run)
    report.print_result(result_body(result), iter_summary(result))


def _check_language(values: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Refuse options of other runs beside a language model. Raises: typer.BadParameter."""
    allowed = ("algorithm", "env", "env_args", "max_staleness", "seed")
    for name in values:
        if name not in allowed:
            raise typer.BadParameter(
                "found it beside a language model, expected neither.",
                param_hint=f"--{name.replace('_', '-')}",
            )
    for name in ("env", "dataset", "output"):
        if options.get(name) is None:
            raise typer.BadParameter("found none.", param_hint=f"--{name}")


def _train_language(
    report: CommandOutput,
    lake: str,
    dataset: str | None,
    options: Mapping[str, Any],
    resume: str | None,
    wandb: str | None,
    mlflow: str | None,
    metrics_port: int | None,
) -> None:
    """Train a language model on its own rollouts, or resume such a run."""
    from replaylake.cli.output.watch import watchers
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.datastore.lake.runs.summary import find_run
    from replaylake.offline.callbacks import Callbacks
    from replaylake.online import train_language_online as training

    settings = None if resume is not None else training.online_language_config(options)
    store = open_lake(lake, create=resume is None)
    with (
        ExitStack() as stack,
        watchers(report, store, wandb_project=wandb, mlflow_experiment=mlflow) as watch,
        print_resume_hint(report, "train online", without="from what was generated"),
    ):
        server = _metrics_server(report, stack, metrics_port)

        def tell_start(start: RunStart) -> None:
            announce_start(report, watch, start)
            if server is not None:
                request = find_run(store.registry, start.run_id)["request"]
                policy = request["training"]["policy"] or f"run:{start.run_id}"
                server.begin(start.run_id, policy=policy, env=request["rollout"]["env"])

        def tell(number: int, values: Mapping[str, float]) -> None:
            watch(number, values)
            if server is not None:
                server.set(number, values)
            shown = [f"{n} {number_text(values[n])}" for n in _LANGUAGE_SHOWN if n in values]
            report.print_message(f"round {number}  {'  '.join(shown)}")

        callbacks = Callbacks(
            on_start=tell_start,
            on_metrics=tell,
            on_remark=lambda text: report.print_message(f"note: {text}"),
        )
        if settings is None:
            run_id = find_run(store.registry, resume or "")["run_id"]
            result = training.resume_language_online(store, run_id, callbacks=callbacks)
        else:
            result = training.train_language_online(
                store, dataset or "", settings, callbacks=callbacks
            )
    body = {
        "run_id": result.run_id,
        "output": str(result.output),
        "rounds": [dict(one) for one in result.rounds],
        "was_done": result.already_finished,
    }
    lines = [f"{count(len(result.rounds), 'round')}; saved model {result.output}"]
    if result.already_finished:
        lines.insert(0, f"run {result.run_id} is done already: nothing was changed")
    report.print_result(body, lines)


def _shares(texts: Sequence[str]) -> dict[str, float]:
    shares: dict[str, float] = {}
    for text in texts:
        name, _, share = text.rpartition(":")
        try:
            shares[name] = float(share)
        except ValueError:
            name = ""
        if not name:
            raise typer.BadParameter(
                f"found {text!r}, expected DATASET:SHARE such as pendulum@3:0.5.",
                param_hint="--mix",
            )
    return shares


def _check_required(required: Mapping[str, str | None]) -> None:
    for option, value in required.items():
        if value is None:
            raise typer.BadParameter("found none, or --resume RUN.", param_hint=option)


def _check_algorithm(options: Mapping[str, Any]) -> None:
    if "algorithm" not in options:
        raise typer.BadParameter(
            "found none, expected one such as dqn, sac, impala or ppo, here or as `algorithm = "
            "...` in --config.",
            param_hint="--algorithm",
        )


def _algorithm_of(lake: Lake, policy: str) -> str:
    from replaylake.datastore.lake.policies.package import check_package

    return str(check_package(lake.registry.resolve(policy).path).body.get("algorithm"))


def _metrics_server(
    report: CommandOutput, stack: ExitStack, port: int | None
) -> MetricsServer | None:
    if port is None:
        return None
    from replaylake.online.monitoring.prometheus import MetricsServer

    server = stack.enter_context(MetricsServer(port))
    report.print_message(f"metrics at {server.url}")
    return server


def _run_with_progress(
    report: CommandOutput,
    lake: Lake,
    watch: Watchers,
    server: MetricsServer | None,
    run: Callable[[Callbacks], OnlineResult],
) -> OnlineResult:
    from replaylake.offline.callbacks import Callbacks

    with report.waiting("starting") as waiting, report.progress("step", "") as progress:

        def tell_begin(start: RunStart) -> None:
            waiting.end()
            announce_start(report, watch, start)
            if server is not None:
                row = next(r for r in lake.registry.runs() if r["run_id"] == start.run_id)
                server.begin(start.run_id, policy=row["policy"], env=row["env_id"])

        def tell(now: OnlineProgress) -> None:
            progress(now.num_steps, now.steps, progress_text(now))

        def tell_metrics(update: int, values: Mapping[str, float]) -> None:
            watch(update, values)
            if server is not None:
                server.set(update, values)

        return run(
            Callbacks(
                on_start=tell_begin,
                on_progress=tell,
                on_metrics=tell_metrics,
                on_remark=lambda text: report.print_message(f"note: {text}"),
            )
        )


def progress_text(progress: OnlineProgress) -> str:
    """Return how far learning is beside the steps, or what the run waits for."""
    if progress.blocked_reason is not None:
        is_full = any(os.strerror(code) in progress.blocked_reason for code in _FULL)
        return "waiting for " + ("space" if is_full else "the store")
    parts = [f"update {progress.update:,}"]
    if progress.mean_return is not None:
        parts.append(f"return {progress.mean_return:.4g}")
    parts.append(f"{progress.steps_per_s:,.0f} steps/s")
    parts.append(f"{progress.updates_per_s:,.0f} updates/s")
    return "  ".join(parts)


def result_body(result: OnlineResult) -> dict[str, Any]:
    """Return what a run made, for --json."""
    request = result.request
    return {
        "policy": result.policy.name,
        "version": result.policy.version,
        "policies": {
            agent: {"policy": ref.name, "version": ref.version}
            for agent, ref in result.policies.items()
        },
        "run_id": result.run_id,
        "algorithm": request.config.algorithm,
        "env_id": request.config.env,
        "dataset": request.dataset,
        "dataset_version": result.dataset_version,
        "num_steps": result.num_steps,
        "num_episodes": result.num_episodes,
        "num_updates": result.num_updates,
        "update": result.update,
        "seed": request.config.seed,
        "mean_return": result.mean_return,
        "metrics": result.metrics,
        "selection": result.selection,
        "evaluation": None if result.evaluation is None else result.evaluation.to_json(),
        "converged": result.converged,
        "wall_s": result.wall_s,
        "was_done": result.already_finished,
    }


def iter_summary(result: OnlineResult) -> Iterator[str]:
    """Return what a run made, line by line."""
    if result.already_finished:
        yield f"run {result.run_id} is done already: nothing was changed"
    rate = result.num_steps / max(result.wall_s, 1e-9)
    yield (
        f"collected {count(result.num_steps, 'step')}, {count(result.num_episodes, 'episode')} "
        f"into {result.request.dataset}@{result.dataset_version}, made "
        f"{count(result.num_updates, 'update')}, in {result.wall_s:,.1f} s ({rate:,.0f} steps/s)"
    )
    if result.request.config.until_return is not None:
        target = number_text(result.request.config.until_return)
        reached = "reached" if result.converged else "did not reach"
        yield f"{reached} a return of {target}"
    selection = result.selection
    if selection["value"] is not None:
        yield (
            f"took the policy of update {result.update:,}, the best of "
            f"{len(selection['history'])} by mean return: {number_text(selection['value'])}"
        )
    if result.evaluation is not None:
        score = result.evaluation
        yield (
            f"evaluated in {score.env_id}, on other seeds: mean return "
            f"{number_text(score.mean_return)} over {count(len(score.returns), 'episode')}"
            f"{interval_text(score.ci_low, score.ci_high)}"
        )
        if score.agent_returns:
            each = (f"{a} {number_text(value)}" for a, value in score.agent_returns.items())
            yield f"by agent: {', '.join(each)}"
    for agent, ref in result.policies.items():
        yield f"saved policy {ref}, which acts for {agent}"
    if not result.policies:
        yield f"saved policy {result.policy}"
