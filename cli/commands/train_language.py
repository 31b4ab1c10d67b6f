"""`replaylake train language`: train a language model on token sequences of the lake."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from replaylake.cli.config import read_options
from replaylake.cli.name_completion import complete_datasets, complete_policies
from replaylake.cli.options import DEFAULT_LAKE, DebugOption, JsonOption, LakeOption
from replaylake.cli.output.command_output import CommandOutput, count, number_text
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

if TYPE_CHECKING:
    from replaylake.offline.callbacks import Callbacks, RunStart
    from replaylake.offline.running.train_language import LanguageResult
    from replaylake.offline.running.training.trainer import TrainProgress

# Shown in this order, if the method has them.
_METRICS_SHOWN: Final = ("loss", "return", "kl_behavior", "effective_share", "entropy")


def language(
    dataset: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME[@VERSION]",
            autocompletion=complete_datasets,
            show_default=False,
            help="Dataset with token columns; required unless --resume is given.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="DIR|POLICY",
            help="Initial causal language model: a directory that transformers wrote, or a "
            "policy's version, as NAME:VERSION or NAME@ALIAS. Required unless --resume is given.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            metavar="DIR",
            help="Directory to create for the trained model. Required unless --resume is given.",
            show_default=False,
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="NAME",
            autocompletion=complete_policies,
            show_default=False,
            help="Name to register the model under, as its next version.",
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            metavar="NAME",
            help="Method: sft, dpo, ipo, kto, reward, grpo, dr-grpo, rloo, reinforce++, gspo or "
            "ppo.",
            show_default="grpo",
        ),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(
            "--where", metavar="SQL", help="Condition over episodes that selects whole episodes."
        ),
    ] = None,
    where_sequences: Annotated[
        str | None,
        typer.Option(
            "--where-sequences",
            metavar="SQL",
            help="Condition over the columns of the view `sequences`.",
        ),
    ] = None,
    updates: Annotated[
        int | None, typer.Option("--updates", metavar="N", help="Number of batches to learn from.")
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size",
            metavar="N",
            help="Sequences in a batch, or groups of sequences if the method compares samples of "
            "one prompt.",
        ),
    ] = None,
    max_staleness: Annotated[
        int | None,
        typer.Option(
            "--max-staleness",
            metavar="N",
            help="Largest difference between --policy-version and the version that sampled a "
            "token.",
        ),
    ] = None,
    policy_version: Annotated[
        int | None,
        typer.Option("--policy-version", metavar="N", help="Version of the policy to be trained."),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Random seed.")] = None,
    learners: Annotated[
        int | None,
        typer.Option(
            "--learners",
            metavar="N",
            help="Number of processes that compute each update together, each on a part of the "
            "sequences.",
        ),
    ] = None,
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
            help="MLflow experiment to report metrics to, at MLFLOW_TRACKING_URI.",
        ),
    ] = None,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Train a language model on stored token sequences.

    Tokens that other policies sampled get importance weights from their recorded log-probs. Writes
    the model to --output, with its lineage in replaylake.json; with --policy, it is also registered
    as a policy version, which `serve` serves. --config and --set take options of
    the training and of the method (learning_rate, correction, kl_coef, ...):
    docs/LANGUAGE_TRAINING.md.

    Example:
      replaylake train language agents --model base --output agent-1 --policy agent
      replaylake train language agents@3 --model base --output cloned --method sft --updates 200
      replaylake train language --resume 01m7xx37q2a1tjwqb8trpt4zek
    """
    given: dict[str, Any] = {
        "model": model,
        "output": output,
        "policy": policy,
        "method": method,
        "where": where,
        "where_sequences": where_sequences,
        "updates": updates,
        "batch_size": batch_size,
        "max_staleness": max_staleness,
        "policy_version": policy_version,
        "seed": seed,
        "learners": learners,
    }
    values = {key: value for key, value in given.items() if value is not None}
    if resume is not None:
        check_no_other_options(dataset, config, assignments, *values.values())
    check_project(wandb, mlflow)
    options = read_options(config, assignments or []) | values
    if resume is None:
        if dataset is None:
            raise typer.BadParameter(
                "found none, expected a dataset, or --resume RUN.", param_hint="NAME[@VERSION]"
            )
        for name in ("model", "output"):
            if name not in options:
                raise typer.BadParameter(
                    "found none, expected a directory.", param_hint=f"--{name}"
                )

    # After the options are parsed: torch takes a second to import.
    from replaylake.cli.output.watch import watchers
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.datastore.lake.runs.summary import find_run
    from replaylake.offline.callbacks import Callbacks
    from replaylake.offline.running import train_language as training

    report = CommandOutput(as_json)
    store = open_lake(lake)

    def run(callbacks: Callbacks) -> LanguageResult:
        if resume is not None:
            run_id = find_run(store.registry, resume)["run_id"]
            return training.resume_language(store, run_id, callbacks=callbacks)
        settings = training.language_config(options)
        return training.train_language(store, dataset or "", settings, callbacks=callbacks)

    with (
        watchers(report, store, wandb_project=wandb, mlflow_experiment=mlflow) as watch,
        print_resume_hint(report, "train language", without="from the beginning"),
        report.waiting("reading the sequences") as waiting,
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
            rate = f"{now.updates_per_s:,.1f} updates/s"
            progress(now.update, now.updates, f"{_show_metrics(now.metrics)}  {rate}{rest}")

        result = run(
            Callbacks(on_reading=tell_read, on_start=tell_begin, on_progress=tell, on_metrics=watch)
        )
    data, is_adapter = result.dataset, result.config.method_options().writes_adapter
    lines = [
        f"trained on {data['dataset']}@{data['version']}: "
        f"{count(data['num_sequences'], 'sequence')}, {count(data['num_tokens'], 'token')}",
        f"{count(result.config.updates, 'update')}  {_show_metrics(result.metrics)}  "
        f"{result.updates_per_s:,.1f} updates/s",
        f"saved {'adapter' if is_adapter else 'model'} {result.output}",
    ]
    if result.policy is not None:
        lines.append(f"saved policy {result.policy}")
    if result.already_finished:
        lines.insert(0, f"run {result.run_id} is done already: nothing was changed")
    body = {
        "run_id": result.run_id,
        "method": result.config.method,
        "dataset": dict(data),
        "updates": result.config.updates,
        "seed": result.config.seed,
        "metrics": dict(result.metrics),
        "updates_per_s": result.updates_per_s,
        "output": str(result.output),
        "sha256": result.sha256,
        "policy": None if result.policy is None else result.policy.name,
        "version": None if result.policy is None else result.policy.version,
        "is_adapter": is_adapter,
        "was_done": result.already_finished,
    }
    report.print_result(body, lines)


def _show_metrics(metrics: Mapping[str, float]) -> str:
    return "  ".join(
        f"{name} {number_text(metrics[name])}" for name in _METRICS_SHOWN if name in metrics
    )
