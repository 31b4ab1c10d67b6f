"""`replaylake rollout`: episodes from an environment, written into the lake."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

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
    from replaylake.online.rollout import RolloutReceipt

_RANDOM = "random"


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
    ] = 100,
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
    same episodes, with any number of workers. Creates the lake if there is none.

    Example:
      replaylake rollout --env CartPole-v1 --policy random --episodes 1000 --dataset cartpole
      replaylake rollout --env CartPole-v1 --policy clone --workers 2 --seed 0 --dataset cartpole
    """
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
