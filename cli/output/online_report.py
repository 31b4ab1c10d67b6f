"""Online report: how far a run of `train online` is, and what it made, in words."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from replaylake.cli.output.report import count, interval_text, number_text

if TYPE_CHECKING:
    from replaylake.online.training.progress import OnlineProgress
    from replaylake.online.training.result import OnlineResult

# With which a store refuses until there is room.
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def progress_text(done: OnlineProgress) -> str:
    """Return how far learning is beside the steps, or what the run waits for."""
    if done.trouble is not None:
        is_full = any(os.strerror(code) in done.trouble for code in _FULL)
        return "waiting for " + ("space" if is_full else "the store")
    said = [f"update {done.update:,}"]
    if done.mean_return is not None:
        said.append(f"return {done.mean_return:.4g}")
    said.append(f"{done.steps_per_s:,.0f} steps/s")
    said.append(f"{done.updates_per_s:,.0f} updates/s")
    return "  ".join(said)


def answer_of(result: OnlineResult) -> dict[str, Any]:
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
        "env_id": request.env_id,
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
        "was_done": result.was_done,
    }


def summary_of(result: OnlineResult) -> Iterator[str]:
    """Return what a run made, line by line."""
    if result.was_done:
        yield f"run {result.run_id} is done already: nothing was changed"
    rate = result.num_steps / max(result.wall_s, 1e-9)
    yield (
        f"collected {count(result.num_steps, 'step')}, {count(result.num_episodes, 'episode')} "
        f"into {result.request.dataset}@{result.dataset_version}, made "
        f"{count(result.num_updates, 'update')}, in {result.wall_s:,.1f} s ({rate:,.0f} steps/s)"
    )
    if result.request.config.until_return is not None:
        wanted = number_text(result.request.config.until_return)
        reached = "reached" if result.converged else "did not reach"
        yield f"{reached} a return of {wanted}"
    selection = result.selection
    if selection["value"] is not None:
        yield (
            f"took the policy of update {result.update:,}, the best of "
            f"{len(selection['history'])} by mean return: {number_text(selection['value'])}"
        )
    if result.evaluation is not None:
        done = result.evaluation
        yield (
            f"evaluated in {done.env_id}, on other seeds: mean return "
            f"{number_text(done.mean_return)} over {count(len(done.returns), 'episode')}"
            f"{interval_text(done.ci_low, done.ci_high)}"
        )
        if done.agent_returns:
            each = (f"{a} {number_text(value)}" for a, value in done.agent_returns.items())
            yield f"by agent: {', '.join(each)}"
    for agent, ref in result.policies.items():
        yield f"saved policy {ref}, which acts for {agent}"
    if not result.policies:
        yield f"saved policy {result.policy}"
