"""Train offline: snapshots to batches, batches to a learner, its policy to the registry."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from replaylake.datastore import schema
from replaylake.datastore.batch import Batch
from replaylake.datastore.errors import ConfigInvalid, NotFound, SchemaMismatch, TrainingFailed
from replaylake.datastore.lake import Lake
from replaylake.datastore.names import check_policy_name, new_ulid
from replaylake.datastore.policies.package import load_policy, save_package
from replaylake.datastore.policies.registry import PolicyRef
from replaylake.datastore.replay.packing import gather
from replaylake.datastore.replay.view import ReplayView, concatenate
from replaylake.datastore.snapshot import Snapshot
from replaylake.datastore.spaces import Array, Box, describe
from replaylake.offline.algorithms.catalog import check_algorithm, make_learner
from replaylake.offline.evaluate import Evaluation, check_spaces, evaluate
from replaylake.offline.export import export_onnx
from replaylake.offline.learner import Learner, torch_threads
from replaylake.offline.options import expect


@dataclass(frozen=True)
class TrainConfig:
    """How to train; what to train on is an argument of `train`."""

    algorithm: str = "bc"
    # Enough for cloning: RLlib's CartPole log of 4,137 steps gives 477 to 497 after 1,000 updates
    # and 477 to 490 after 2,000 (5 seeds each, 20 episodes, 2026-11), in seconds. Value learning on
    # larger logs wants more.
    updates: int = 2000
    batch_size: int = 256
    seed: int = 0
    discount: float = 0.99
    device: str = "cpu"
    # More than one pays on networks wider than 256 and an idle machine; beside other work threads
    # wait for each other: BC at 256x256 made 455 updates/s with one and 37 with two on 2 busy cores
    # (2026-11).
    threads: int = 1
    # Episodes of the closing evaluation, where an environment is named.
    evaluation_episodes: int = 20
    # The algorithm's own, by key; see `replaylake algorithms`.
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        expect(self.updates >= 1, "training: updates", self.updates, "1 or more")
        expect(self.threads >= 1, "training: threads", self.threads, "1 or more")
        expect(self.batch_size >= 1, "training: batch_size", self.batch_size, "1 or more")
        expect(0 <= self.seed < 2**63, "training: seed", self.seed, "0 or more")
        expect(0 <= self.discount <= 1, "training: discount", self.discount, "0 to 1")
        episodes = self.evaluation_episodes
        expect(episodes >= 1, "training: evaluation_episodes", episodes, "1 or more")


@dataclass(frozen=True)
class Progress:
    """Where a run is: updates done of all, the last update's metrics, updates a second so far."""

    update: int
    updates: int
    metrics: Mapping[str, float]
    updates_per_s: float


@dataclass(frozen=True)
class TrainResult:
    """What a run made. metrics are the mean of the last tenth of the updates."""

    policy: PolicyRef
    run_id: str
    datasets: tuple[Mapping[str, Any], ...]
    num_steps: int
    num_episodes: int
    metrics: Mapping[str, float]
    updates_per_s: float
    evaluation: Evaluation | None


def train(
    lake: Lake,
    datasets: Sequence[str],
    config: TrainConfig,
    *,
    policy_name: str,
    where: str | None = None,
    reward: str | None = None,
    env_id: str | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> TrainResult:
    """Learn a policy from the lake and register it as a new version.

    Args:
        lake: where the datasets are and the policy goes.
        datasets: `NAME` or `NAME@VERSION`, of one schema.
        config: algorithm, its options, updates, seed.
        policy_name: what to register it as.
        where: SQL condition over `episodes`: which whole episodes to learn from.
        reward: SQL expression over `steps` in place of the logged reward.
        env_id: Gymnasium id to evaluate the result in, kept in the package.
        on_progress: called about four times a second, and after the last update.

    Deterministic on the CPU: the same data, config and seed give the same weights.
    Raises: NotFound, NameRefused, SchemaMismatch, EmptyReplay, SpaceUnsupported, ConfigInvalid
    before anything is learned; TrainingFailed naming the update where a loss is not finite. Nothing
    is registered then.
    """
    check_policy_name(policy_name)
    snapshots = [_snapshot(lake, text) for text in datasets]
    _check_same_spaces(snapshots)
    spec = snapshots[0].spec
    check_algorithm(config.algorithm, spec.action_space)
    if env_id is not None:
        check_spaces(env_id, spec.observation_space, spec.action_space)
    view = concatenate([snapshot.replay(where, reward=reward) for snapshot in snapshots])
    learner = _learner(view, config)
    run_id = new_ulid()
    started = time.time()
    with torch_threads(config.threads):
        metrics, updates_per_s = _learn(learner, view, config, on_progress)
    manifest = _manifest(learner, view, config, run_id, policy_name, metrics)
    with tempfile.TemporaryDirectory(prefix="replaylake-train-") as scratch:
        package, evaluation = _packaged(Path(scratch), learner, config, manifest, env_id)
        lineage = {key: manifest[key] for key in ("datasets", "algorithm", "seed", "run_id")}
        ref = lake.registry.register(policy_name, package, run_id=run_id, lineage=lineage)
    result = TrainResult(
        policy=ref,
        run_id=run_id,
        datasets=tuple(manifest["datasets"]),
        num_steps=view.num_steps,
        num_episodes=view.num_episodes,
        metrics=metrics,
        updates_per_s=updates_per_s,
        evaluation=evaluation,
    )
    lake.registry.record_run(run_id, _run_record(result, manifest, started))
    return result


def _snapshot(lake: Lake, text: str) -> Snapshot:
    """Pin `NAME` or `NAME@VERSION`."""
    name, at, version = text.partition("@")
    if at and not version.isdecimal():
        raise NotFound(
            f"dataset {text!r}: found version {version!r}, expected NAME or NAME@VERSION with a "
            "whole number. `replaylake show NAME` lists the versions."
        )
    return lake.dataset(name).snapshot(int(version) if at else None)


def _check_same_spaces(snapshots: Sequence[Snapshot]) -> None:
    if not snapshots:
        raise ConfigInvalid("training: found no dataset, expected at least one.")
    first = snapshots[0]
    for other in snapshots[1:]:
        for what in ("observation_space", "action_space", "mask_size"):
            ours, theirs = getattr(first.spec, what), getattr(other.spec, what)
            if ours != theirs:
                found, expected = (
                    (str(theirs), str(ours))
                    if what == "mask_size"
                    else (describe(theirs), describe(ours))
                )
                raise SchemaMismatch(
                    f"datasets {first.dataset} and {other.dataset}: found {what} {found} in the "
                    f"second, expected {expected} as in the first. Train on each alone, or ingest "
                    "both with the same --env."
                )


def _learner(view: ReplayView, config: TrainConfig) -> Learner:
    spec = view.spec
    return make_learner(
        config.algorithm,
        spec.observation_space,
        spec.action_space,
        options=config.options,
        seed=config.seed,
        discount=config.discount,
        device=config.device,
        logged_actions=_logged_range(view),
    )


def _logged_range(view: ReplayView) -> tuple[Array, Array] | None:
    """Return the least and greatest action of the selected steps, for Box actions."""
    space = view.spec.action_space
    if not isinstance(space, Box):
        return None
    rows = view.packed.records[view.packed.steps]
    actions = np.asarray(gather(rows, schema.ACTION, space))
    return actions.min(axis=0), actions.max(axis=0)


def _learn(
    learner: Learner,
    view: ReplayView,
    config: TrainConfig,
    on_progress: Callable[[Progress], None] | None,
) -> tuple[dict[str, float], float]:
    """Run the updates; returns the mean metrics of the last tenth, and updates a second."""
    sampler = view.uniform(
        config.batch_size,
        seed=config.seed,
        discount=learner.discount,
        only_bootstrappable=learner.needs_bootstrap,
    )
    num_averaged = max(1, config.updates // 10)
    sums: dict[str, float] = {}
    began = reported = time.perf_counter()
    for update in range(1, config.updates + 1):
        batch = sampler.sample()
        metrics = {name: float(value) for name, value in learner.update(batch).metrics.items()}
        _check_finite(metrics, update, batch)
        if update > config.updates - num_averaged:
            sums = {name: sums.get(name, 0.0) + value for name, value in metrics.items()}
        now = time.perf_counter()
        if on_progress is not None and (now - reported > 0.25 or update == config.updates):
            reported = now
            on_progress(Progress(update, config.updates, metrics, update / (now - began)))
    updates_per_s = config.updates / (time.perf_counter() - began)
    return {name: total / num_averaged for name, total in sums.items()}, updates_per_s


def _check_finite(metrics: Mapping[str, float], update: int, batch: Batch) -> None:
    for name, value in metrics.items():
        if not math.isfinite(value):
            keys = ", ".join(bytes(key).hex() for key in batch.keys[:3])
            raise TrainingFailed(
                f"training: {name} is {value} at update {update}, expected a finite number (batch "
                f"of {len(batch)} rows, first keys {keys}). Nothing was registered. Lower the "
                "learning rate, or look for outliers and, with action masks, logged actions that "
                "are masked."
            )


def _packaged(
    scratch: Path,
    learner: Learner,
    config: TrainConfig,
    manifest: Mapping[str, Any],
    env_id: str | None,
) -> tuple[Path, Evaluation | None]:
    """Export, evaluate what was exported rather than the learner, and write the package."""
    graph = learner.policy()
    onnx = export_onnx(graph)
    state = learner.state_dict()
    package = scratch / "policy"
    save_package(package, onnx=onnx, spec=graph.spec, manifest=manifest, learner_weights=state)
    if env_id is None:
        return package, None
    evaluation = evaluate(
        load_policy(package), env_id, episodes=config.evaluation_episodes, seed=config.seed
    )
    package = scratch / "evaluated"
    with_evaluation = {**manifest, "evaluation": evaluation.to_json()}
    save_package(
        package, onnx=onnx, spec=graph.spec, manifest=with_evaluation, learner_weights=state
    )
    return package, evaluation


def _manifest(
    learner: Learner,
    view: ReplayView,
    config: TrainConfig,
    run_id: str,
    policy_name: str,
    metrics: Mapping[str, float],
) -> dict[str, Any]:
    return {
        "name": policy_name,
        "run_id": run_id,
        "algorithm": config.algorithm,
        "seed": config.seed,
        "config": {**asdict(config), "options": dict(learner.config)},
        "normalisation": dict(learner.normalisation),
        "datasets": [asdict(selection) for selection in view.selections],
        "metrics": dict(metrics),
        "evaluation": None,
    }


def _run_record(result: TrainResult, manifest: Mapping[str, Any], started: float) -> dict[str, Any]:
    return {
        "kind": "train offline",
        "status": "done",
        "policy": result.policy.name,
        "policy_version": result.policy.version,
        "started_ms": round(started * 1000),
        "ended_ms": round(time.time() * 1000),
        "updates_per_s": result.updates_per_s,
        "num_steps": result.num_steps,
        "num_episodes": result.num_episodes,
        **{key: manifest[key] for key in ("algorithm", "seed", "config", "datasets", "metrics")},
        "evaluation": None if result.evaluation is None else result.evaluation.to_json(),
    }
