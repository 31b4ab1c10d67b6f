"""Result: what an online run made, as its record says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.policies.registry import PolicyRef
from replaylake.offline.evaluation.evaluate import Evaluation
from replaylake.online.training.agent_packages import load_registered_policies
from replaylake.online.training.config import OnlineRequest


@dataclass(frozen=True)
class OnlineResult:
    """What a run made.

    num_steps, num_episodes: collected, those of workers that were lost included as far as they were
    handed over. update: of the policy that was registered, of num_updates. converged: whether
    `until_return` was reached. policies: by agent, where each has its own; `policy` is the last one
    of them then. already_finished: the run had ended already, and nothing was done.
    """

    policy: PolicyRef
    run_id: str
    request: OnlineRequest
    dataset_version: int
    num_steps: int
    num_episodes: int
    num_updates: int
    update: int
    metrics: Mapping[str, float]
    mean_return: float | None
    selection: Mapping[str, Any]
    evaluation: Evaluation | None
    converged: bool
    wall_s: float
    policies: Mapping[str, PolicyRef] = field(default_factory=dict)
    already_finished: bool = False


def load_finished_result(lake: Lake, record: Mapping[str, Any]) -> OnlineResult:
    ref = lake.registry.resolve(f"{record['policy']}:{record['policy_version']}")
    return make_result(lake, ref, record)


def make_result(lake: Lake, ref: PolicyRef, record: Mapping[str, Any]) -> OnlineResult:
    evaluation = None
    if (score := record["evaluation"]) is not None:
        # As JSON has it: lists.
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in score.items()
        }
        evaluation = Evaluation(**fields)
    return OnlineResult(
        policy=ref,
        run_id=record["run_id"],
        request=OnlineRequest.from_json(record["request"]),
        dataset_version=record["datasets"][0]["version"],
        num_steps=record["num_steps"],
        num_episodes=record["num_episodes"],
        num_updates=record["num_updates"],
        update=record["update"],
        metrics=record["metrics"],
        mean_return=record["mean_return"],
        selection=record["selection"],
        evaluation=evaluation,
        converged=record["converged"],
        wall_s=record["wall_s"],
        policies=load_registered_policies(lake.registry, ref, record),
    )
