"""`replaylake evaluate`: what a policy returns in an environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from replaylake.cli.options import (
    DEFAULT_LAKE,
    DebugOption,
    JsonOption,
    LakeOption,
    PolicyArgument,
)
from replaylake.cli.report import Report, count, interval_text, number_text

if TYPE_CHECKING:
    from replaylake.datastore.policies.policy import Policy

RANDOM = "random"


def evaluate(
    policy: PolicyArgument,
    env: Annotated[
        str, typer.Option("--env", metavar="ID", help="Gymnasium id.", show_default=False)
    ],
    episodes: Annotated[
        int, typer.Option("--episodes", metavar="N", min=1, help="Whole episodes to run.")
    ] = 20,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", min=0, help="Episode i resets with seed + i.")
    ] = 0,
    lake: LakeOption = DEFAULT_LAKE,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure the return of a policy in an environment.

    Prints the mean return of whole episodes with its 95% interval. The policy `random` draws every
    action uniformly.

    Example:
      replaylake evaluate clone --env CartPole-v1 --episodes 20 --seed 0
      replaylake evaluate random --env CartPole-v1 --json
    """
    from replaylake.offline.evaluate import evaluate as run

    report = Report(as_json)
    acting, named = _policy(policy, env, lake)
    with report.progress("ran", "episodes") as progress:
        # A random policy draws, so each episode needs its own generator: not deterministic.
        result = run(
            acting,
            env,
            episodes=episodes,
            seed=seed,
            deterministic=policy != RANDOM,
            on_progress=progress,
        )
    label = named["policy"] if named["version"] is None else f"{policy_text(named)}"
    report.answer(
        {**named, **result.to_json()},
        [
            f"{label} in {env}: mean return {number_text(result.mean_return)} over "
            f"{count(episodes, 'episode')}{interval_text(result.ci_low, result.ci_high)}"
        ],
    )


def policy_text(named: dict[str, Any]) -> str:
    """Return `clone:3 (newest)`: which version answered, and what chose it."""
    return f"{named['policy']}:{named['version']} ({named['selected_by']})"


def _policy(text: str, env: str, lake: str) -> tuple[Policy, dict[str, Any]]:
    from replaylake.datastore.lake import open_lake
    from replaylake.datastore.policies.package import load_policy
    from replaylake.datastore.policies.uniform import UniformPolicy
    from replaylake.offline.environments import spaces_of

    if text == RANDOM:
        named: dict[str, Any] = {"policy": RANDOM, "version": None, "selected_by": "reserved name"}
        return UniformPolicy(*spaces_of(env)), named
    ref = open_lake(lake).registry.resolve(text)
    named = {"policy": ref.name, "version": ref.version, "selected_by": ref.selected_by}
    return load_policy(ref.path), named
