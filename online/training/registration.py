"""Registration: the policy that a run chose: packaged, evaluated, and registered."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.runs.lease import RunLease
from replaylake.datastore.lake.runs.summary import EVALUATION
from replaylake.offline.evaluation.evaluate import Evaluation, EvaluationConfig, evaluate
from replaylake.offline.evaluation.self_play import AgentPolicies
from replaylake.offline.running.training.lake_observer import LakeObserver
from replaylake.offline.running.training.packaging import build_package
from replaylake.offline.running.training.run_record import RunRecord
from replaylake.online.recording.committed_steps import read_collected
from replaylake.online.recording.storage_retry import StorageRetry
from replaylake.online.training.agent_packages import build_packages, register_packages
from replaylake.online.training.agents import AgentLearners, agent_steps_condition, policy_names
from replaylake.online.training.job import OnlineJob, manifest_of
from replaylake.online.training.result import OnlineResult, make_result
from replaylake.online.training.retrying_observer import RetryingObserver
from replaylake.online.training.trainer import OnlineTrainer


def register_policy(
    lake: Lake,
    job: OnlineJob,
    record: RunRecord,
    lease: RunLease,
    trainer: OnlineTrainer,
    run: LakeObserver,
    observer: RetryingObserver,
    storage_retry: StorageRetry,
) -> OnlineResult:
    """Package, evaluate and register the policy that was chosen; the checkpoints go."""
    config, selection = job.config, trainer.selection
    point = selection.chosen
    if point.update != trainer.update:
        job.learner.load_state_dict(run.checkpoints.load(point.update).arrays)
    collected = read_collected(job.dataset, record.run_id, since=job.since)
    manifest = manifest_of(job, record.run_id, collected) | {
        "selection": selection.to_json(),
        "metrics": dict(point.metrics),
    }

    def closing_evaluation(policy: AgentPolicies) -> Evaluation:
        measured = EvaluationConfig(
            config.env,
            env_args=config.env_args,
            episodes=config.evaluation_episodes,
            seed=config.seed,
        )
        return evaluate(policy, measured)

    with tempfile.TemporaryDirectory(prefix="replaylake-train-") as scratch:
        packages, evaluation = _packages(Path(scratch), job, manifest, closing_evaluation)
        observer.record_metrics(point.update, {EVALUATION: evaluation.mean_return})
        storage_retry.retry("metrics", run.flush)
        fields = {
            **_outcome(trainer),
            "metrics": manifest["metrics"],
            "selection": manifest["selection"],
            "evaluation": evaluation.to_json(),
            "datasets": manifest["datasets"],
        }
        lease.confirm()
        ref, finished = storage_retry.retry(
            "policy", lambda: register_packages(lake.registry, record, packages, fields)
        )
    run.checkpoints.remove()
    return make_result(lake, ref, {**finished, "run_id": record.run_id})


def _outcome(trainer: OnlineTrainer) -> dict[str, Any]:
    """Return what a record says of how far a run came."""
    collector = trainer.collector
    return {
        "update": trainer.selection.chosen.update,
        "num_updates": trainer.update,
        "num_steps": collector.num_steps,
        "num_episodes": collector.num_episodes,
        "mean_return": collector.mean_return,
        "staleness": collector.staleness,
        "converged": trainer.has_converged,
        "wall_s": trainer.wall_s,
    }


def _packages(
    scratch: Path,
    job: OnlineJob,
    manifest: Mapping[str, Any],
    evaluate: Callable[[AgentPolicies], Evaluation],
) -> tuple[Mapping[str, Path], Evaluation]:
    """Return each agent's package; of one policy for whoever acts, that of an unnamed one."""
    if not isinstance(job.learner, AgentLearners):
        package, evaluation = build_package(scratch, job.learner, manifest, evaluate=evaluate)
        assert evaluation is not None
        return {"": package}, evaluation
    names = policy_names(job.config.policy, job.agents)
    manifests = {}
    for agent, name in names.items():
        own, *rest = manifest["datasets"]
        datasets = [{**own, "where_steps": agent_steps_condition(agent)}, *rest]
        manifests[agent] = {**manifest, "name": name, "datasets": datasets}
    return build_packages(scratch, job.learner.by_agent, manifests, evaluate)
