"""`replaylake rollout`: episodes from an environment, written into the lake."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replaylake.cli.config import parse_literal
from replaylake.cli.options import (
    DEFAULT_LAKE,
    DebugOption,
    EnvArgsOption,
    JsonOption,
    LakeOption,
    parse_env_args,
    parse_pairs,
)
from replaylake.cli.output.command_output import CommandOutput, count, number_text, size
from replaylake.cli.run_options import EnvRunner

if TYPE_CHECKING:
    from replaylake.datastore.lake.lake import Lake
    from replaylake.online.generating.chat import LanguageModel
    from replaylake.online.rollout import RolloutReceipt
    from replaylake.online.rollout_language import LanguageRolloutReceipt

_RANDOM = "random"
_EPISODES = 100
# The heading of the options for rollouts of a language model, in --help.
_LANGUAGE = "Language models"


def rollout(
    env: Annotated[
        str,
        typer.Option(
            "--env",
            metavar="ID",
            help="Environment to collect in: Gymnasium id or module:function.",
            show_default=False,
        ),
    ],
    dataset: Annotated[
        str,
        typer.Option(
            "--dataset",
            metavar="NAME",
            help="Dataset to append to; created if it does not exist.",
            show_default=False,
        ),
    ],
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            metavar="POLICY",
            help="Policy that acts: random, name, name:version or name@alias.",
        ),
    ] = _RANDOM,
    agent_policy: Annotated[
        list[str] | None,
        typer.Option(
            "--agent-policy",
            metavar="AGENT=POLICY",
            help="Policy of one agent of a multi-agent environment, instead of --policy. "
            "Repeatable.",
        ),
    ] = None,
    episodes: Annotated[
        int,
        typer.Option("--episodes", metavar="N", min=1, help="Number of whole episodes to collect."),
    ] = _EPISODES,
    workers: Annotated[
        int,
        typer.Option(
            "--workers",
            metavar="N",
            min=0,
            help="Number of Ray workers; 0 collects in this process.",
        ),
    ] = 0,
    envs_per_worker: Annotated[
        int,
        typer.Option(
            "--envs-per-worker",
            metavar="K",
            min=1,
            help="Number of environments that each worker steps together.",
        ),
    ] = 8,
    worker_cpus: Annotated[
        float,
        typer.Option("--worker-cpus", metavar="C", help="CPUs that Ray reserves for each worker."),
    ] = 1.0,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="RAY",
            help="Address of a running Ray cluster; without it, Ray is started on this machine.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            metavar="N",
            min=0,
            help="Random seed: episode i resets with seed + i. By default a new one, printed with "
            "the result.",
        ),
    ] = None,
    explore: Annotated[
        str | None,
        typer.Option(
            "--explore",
            metavar="epsilon=E|temperature=T",
            help="Exploration: a random action with probability E, or sampling at temperature T.",
            show_default="temperature=1",
        ),
    ] = None,
    env_args: EnvArgsOption = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            rich_help_panel=_LANGUAGE,
            metavar="DIR|POLICY|NAME",
            help="Language model that acts: a directory that transformers wrote, or a policy's "
            "version, as NAME:VERSION or NAME@ALIAS; with --upstream, the engine's name of it.",
            show_default=False,
        ),
    ] = None,
    upstream: Annotated[
        str | None,
        typer.Option(
            "--upstream",
            rich_help_panel=_LANGUAGE,
            metavar="URL",
            help="Engine of the language model, with OpenAI's chat completions: its base URL.",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            rich_help_panel=_LANGUAGE,
            metavar="NAME",
            help="Engine whose fields request token ids and log-probs: vllm, sglang, llama.cpp, or "
            "openai, which requests none.",
            show_default="auto",
        ),
    ] = None,
    upstream_key_env: Annotated[
        str | None,
        typer.Option(
            "--upstream-key-env",
            rich_help_panel=_LANGUAGE,
            metavar="VARIABLE",
            help="Environment variable with the engine's key.",
            show_default=False,
        ),
    ] = None,
    policy_version: Annotated[
        int | None,
        typer.Option(
            "--policy-version",
            rich_help_panel=_LANGUAGE,
            metavar="N",
            min=0,
            help="Version of the language model, recorded with each step; 0 for --model DIR.",
            show_default=False,
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            "--tasks",
            rich_help_panel=_LANGUAGE,
            metavar="FILE|MODULE:NAME",
            help="Tasks: a file of JSON lines, or a list or function in a module. By default "
            "`tasks` in the module of --env.",
            show_default=False,
        ),
    ] = None,
    num_tasks: Annotated[
        int | None,
        typer.Option(
            "--num-tasks",
            rich_help_panel=_LANGUAGE,
            metavar="N",
            min=1,
            help="Number of tasks, from the first; for a Gymnasium environment, number of seeds.",
            show_default=False,
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples",
            rich_help_panel=_LANGUAGE,
            metavar="N",
            min=1,
            help="Number of rollouts of each task; they form a group.",
            show_default="1",
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency",
            rich_help_panel=_LANGUAGE,
            metavar="N",
            min=1,
            help="Number of rollouts at a time.",
            show_default="16",
        ),
    ] = None,
    sampling: Annotated[
        list[str] | None,
        typer.Option(
            "--sampling",
            rich_help_panel=_LANGUAGE,
            metavar="KEY=VALUE",
            help="Sampling parameter: temperature, max_tokens, or one of the engine's. Repeatable.",
        ),
    ] = None,
    producer: Annotated[
        str | None,
        typer.Option(
            "--producer",
            rich_help_panel=_LANGUAGE,
            metavar="NAME",
            help="Name to record the rollouts under. A command with the same name makes those that "
            "are not recorded yet.",
            show_default=False,
        ),
    ] = None,
    env_runner: Annotated[
        EnvRunner,
        typer.Option(
            "--env-runner",
            help="Step environments in Ray workers, or locally in this process (as --workers 0).",
        ),
    ] = EnvRunner.ray,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Collect episodes with a policy.

    Each step is stored with the policy that acted and its log-probability. The same seed gives the
    same episodes, with any number of workers. Creates the lake if there is none. With --model or
    --upstream, a language model acts (docs/LANGUAGE_ROLLOUTS.md).

    Example:
      replaylake rollout --env CartPole-v1 --policy random --episodes 1000 --dataset cartpole
      replaylake rollout --env CartPole-v1 --policy clone --workers 2 --seed 0 --dataset cartpole
      replaylake rollout --env sums:play --tasks sums.jsonl --model base --samples 8 --dataset sums
    """
    language = {
        "--engine": engine,
        "--upstream-key-env": upstream_key_env,
        "--policy-version": policy_version,
        "--tasks": tasks,
        "--num-tasks": num_tasks,
        "--samples": samples,
        "--concurrency": concurrency,
        "--sampling": sampling or None,
        "--producer": producer,
    }
    if model is not None or upstream is not None:
        others = {
            "--policy": None if policy == _RANDOM else policy,
            "--agent-policy": agent_policy or None,
            "--episodes": None if episodes == _EPISODES else episodes,
            "--workers": workers or None,
            "--address": address,
            "--explore": explore,
        }
        _refuse_options(others, "found it beside a language model, expected neither")
        _rollout_language(
            CommandOutput(as_json),
            lake,
            dataset,
            (model, upstream, engine, upstream_key_env, policy_version),
            {
                "env": env,
                "env_args": parse_env_args(env_args),
                "tasks": tasks,
                "num_tasks": num_tasks,
                "samples": samples,
                "concurrency": concurrency,
                "seed": seed,
                "sampling": {
                    key: parse_literal(text, "--sampling", key)
                    for key, text in parse_pairs(sampling or [], "--sampling").items()
                },
                "producer": producer,
            },
        )
        return
    _refuse_options(language, "found it without a language model, expected --model or --upstream")

    from replaylake.datastore.lake.policies.exploration import parse_exploration
    from replaylake.offline.callbacks import Callbacks
    from replaylake.online.collecting.worker import RolloutConfig
    from replaylake.online.rollout import fresh_seed
    from replaylake.online.rollout import rollout as run

    report = CommandOutput(as_json)
    exploration = parse_exploration("temperature=1" if explore is None else explore)
    agent_policies = parse_pairs(agent_policy or [], "--agent-policy", "AGENT=POLICY")
    config = RolloutConfig(
        env,
        env_args=parse_env_args(env_args),
        episodes=episodes,
        seed=fresh_seed() if seed is None else seed,
        agent_policies=agent_policies,
        workers=0 if env_runner is EnvRunner.local else workers,
        envs_per_worker=envs_per_worker,
        worker_cpus=worker_cpus,
        address=address,
        temperature=exploration.temperature or 0.0,
        epsilon=exploration.epsilon,
    )
    with report.progress("collected", "episodes") as progress:
        receipt = run(
            _lake(lake, [policy, *agent_policies.values()]),
            dataset,
            policy,
            config,
            callbacks=Callbacks(
                on_progress=lambda done: progress(done.num_episodes, done.episodes),
                on_remark=lambda remark: report.print_message(f"note: {remark}"),
            ),
        )
    report.print_result(receipt.to_json(), _summary(receipt))


def _refuse_options(options: Mapping[str, object], reason: str) -> None:
    """Refuse options of the other kind of rollout. Raises: typer.BadParameter."""
    for name, value in options.items():
        if value is not None:
            raise typer.BadParameter(f"{reason}.", param_hint=name)


def _rollout_language(
    report: CommandOutput,
    lake: str,
    dataset: str,
    model: tuple[str | None, str | None, str | None, str | None, int | None],
    given: Mapping[str, Any],
) -> None:
    """Let a language model act. model: name, upstream, engine, key's variable, version."""
    from replaylake.cli.output.watch import watchers
    from replaylake.datastore.lake.lake import open_lake
    from replaylake.offline.callbacks import Callbacks, RunStart
    from replaylake.offline.running.training.interruption import RunInterrupted
    from replaylake.online.rollout_language import (
        LanguageRolloutConfig,
        LanguageRolloutProgress,
        rollout_language,
    )

    values = {key: value for key, value in given.items() if value is not None}
    config = LanguageRolloutConfig(**values)
    loaded = _load_model(lake, *model)
    store = open_lake(lake, create=True)
    with (
        watchers(report, store, wandb_project=None) as watch,
        report.progress("rollouts", "") as progress,
    ):

        def tell_start(start: RunStart) -> None:
            before = f", which has {count(start.update, 'rollout')}" if start.resumed else ""
            report.print_message(f"run {start.run_id}{before}")
            watch.begin(start.run_id, resumed_after=start.update if start.resumed else None)

        def tell(now: LanguageRolloutProgress) -> None:
            reward = "" if now.mean_reward is None else f"reward {number_text(now.mean_reward)}  "
            failed = f"{now.num_failed} failed  " if now.num_failed else ""
            note = f"{reward}{failed}{now.tokens_per_s:,.0f} tokens/s"
            progress(now.num_rollouts, now.rollouts, note)

        try:
            receipt = rollout_language(
                store,
                dataset,
                loaded,
                config,
                callbacks=Callbacks(on_start=tell_start, on_progress=tell, on_metrics=watch),
            )
        except RunInterrupted as interrupted:
            name = config.producer or f"rollout/{interrupted.run_id}"
            report.print_message(f"the same command with --producer {name} makes the others")
            raise
    report.print_result(receipt.to_json(), _summarize_language(receipt))


def _load_model(
    lake: str,
    name: str | None,
    upstream: str | None,
    engine: str | None,
    key_env: str | None,
    policy_version: int | None,
) -> LanguageModel:
    if upstream is None:
        _refuse_options(
            {"--engine": engine, "--upstream-key-env": key_env},
            "found it without an engine, expected --upstream",
        )
        from replaylake.offline.language.local_model import LocalModel
        from replaylake.offline.language.registration import find_version, is_version_name

        if not is_version_name(name or ""):
            return LocalModel(name or "", policy_version=policy_version or 0)
        from replaylake.datastore.lake.lake import open_lake

        ref = find_version(open_lake(lake), name or "")
        _refuse_options(
            {"--policy-version": policy_version}, "found it beside a version, expected one of both"
        )
        return LocalModel(ref.path, policy=ref.name, policy_version=ref.version)
    from replaylake.serve.gateway.engine_model import EngineModel

    key = None
    if key_env is not None and not (key := os.environ.get(key_env, "").strip()):
        raise typer.BadParameter(
            f"found no key in the variable {key_env}, expected the engine's key.",
            param_hint="--upstream-key-env",
        )
    return EngineModel(
        upstream,
        name=name,
        engine=engine or "auto",
        api_key=key,
        policy_version=policy_version,
    )


def _summarize_language(receipt: LanguageRolloutReceipt) -> Iterator[str]:
    before = receipt.num_recorded_before
    yield (
        f"{receipt.dataset}@{receipt.version}: {count(receipt.num_rollouts, 'rollout')} of "
        f"{count(receipt.num_tasks, 'task')}, {count(receipt.num_turns, 'generation')}, "
        f"{count(receipt.num_completion_tokens, 'token')} generated"
        + (f"; {before:,} rollouts recorded before" if before else "")
    )
    rates = {
        "mean reward": receipt.mean_reward,
        "pass rate": receipt.pass_rate,
        "of groups": receipt.group_pass_rate,
    }
    known = [f"{name} {number_text(rate)}" for name, rate in rates.items() if rate is not None]
    counts = {
        "failed": receipt.num_failed,
        "filtered": receipt.num_filtered,
        "truncated": receipt.num_truncated,
    }
    known += [f"{num:,} {name}" for name, num in counts.items() if num]
    yield (
        f"  {', '.join([*known, f'{receipt.tokens_per_s:,.0f} tokens/s'])}; "
        f"producer {receipt.producer}, seed {receipt.seed}"
    )


def _lake(url: str, policies: Sequence[str]) -> Lake:
    """Open the lake; for `random` it may be one that the rollout makes once it can begin."""
    from replaylake.datastore.lake.lake import Lake, open_lake
    from replaylake.datastore.storage.locations import open_storage

    lake = Lake(open_storage(url))
    is_free = all(policy == _RANDOM for policy in policies)
    return lake if is_free and not lake.registry.exists() else open_lake(url)


def _summary(receipt: RolloutReceipt) -> Iterator[str]:
    yield (
        f"{receipt.dataset}@{receipt.version}: {count(receipt.num_episodes, 'episode')}, "
        f"{count(receipt.num_steps, 'step')} committed in {count(receipt.num_shards, 'shard')}, "
        f"{size(receipt.num_bytes)}"
    )
    has_version = receipt.policy != _RANDOM and receipt.policy_version is not None
    policy = receipt.policy + (f":{receipt.policy_version}" if has_version else "")
    by = count(receipt.num_workers, "worker") if receipt.num_workers else "this process"
    yield (
        f"  {policy} in {receipt.env_id}: mean return {number_text(receipt.mean_return)}; "
        f"{receipt.steps_per_s:,.0f} steps/s by {by}; seed {receipt.seed}"
    )
    if receipt.agent_returns:
        returns = [f"{a} {number_text(value)}" for a, value in receipt.agent_returns.items()]
        yield f"  {count(receipt.num_games, 'game')}; mean returns: {', '.join(returns)}"
