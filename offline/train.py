"""Train offline: snapshots to batches, batches to a learner, its policy to the registry."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from replaylake.datastore.compatibility import difference, joined
from replaylake.datastore.encoding import Encoding
from replaylake.datastore.errors import ConfigInvalid, SchemaMismatch
from replaylake.datastore.lake import Lake
from replaylake.datastore.names import check_policy_name, new_ulid
from replaylake.datastore.policies.package import load_policy, save_package
from replaylake.datastore.policies.registry import PolicyRef
from replaylake.datastore.replay.items.transitions import Transitions
from replaylake.datastore.replay.sampler import Sampler
from replaylake.datastore.replay.view import ReplayView, concatenate
from replaylake.datastore.replay.view_query import ViewQuery
from replaylake.datastore.schema import DatasetSpec
from replaylake.datastore.snapshot import Snapshot
from replaylake.datastore.spaces import Array, Box
from replaylake.offline.algorithms.catalog import (
    check_algorithm,
    check_masks,
    check_options,
    check_rewards,
    make_learner,
)
from replaylake.offline.evaluate import Evaluation, check_spaces, evaluate
from replaylake.offline.export import export_onnx
from replaylake.offline.learner import Learner, torch_threads
from replaylake.offline.options import expect
from replaylake.offline.run_record import recorded_run
from replaylake.offline.trainer import GPU_CHECK_UPDATES, Progress, run_updates


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
    # wait for each other: BC at 256x256 made 382 updates/s with one and 37 with two on 2 busy cores
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


_ROWS_AT_ONCE: Final = 1 << 16
OWN_OPTIONS: Final = tuple(f.name for f in fields(TrainConfig) if f.name != "options")


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
    where_steps: str | None = None,
    reward: str | None = None,
    weight: str | None = None,
    env_id: str | None = None,
    on_reading: Callable[[int, int], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> TrainResult:
    """Learn a policy from the lake and register it as a new version.

    Args:
        lake: where the datasets are and the policy goes.
        datasets: `NAME` or `NAME@VERSION`, whose spaces are compatible.
        config: algorithm, its options, updates, seed.
        policy_name: what to register it as.
        where: SQL condition over `episodes`: which whole episodes to learn from.
        where_steps: SQL condition over `steps`: which of their steps.
        reward: SQL expression over `steps` in place of the logged reward.
        weight: SQL expression over the columns of a step and its episode: steps are drawn in
            proportion to it, instead of all alike.
        env_id: Gymnasium id to evaluate the result in, kept in the package.
        on_reading: called with (shards decoded, shards) as the episodes are read.
        on_progress: called about four times a second, and after the last update.

    Deterministic on the CPU: the same data, config and seed give the same weights.
    The run's record says `running` from the first update on, then `done` or `failed`.
    Raises: NotFound, NameRefused, SchemaMismatch, EmptyReplay, SpaceUnsupported, ConfigInvalid
    before anything is learned or recorded; TrainingFailed naming the update where a loss is not
    finite. No policy is registered then.
    """
    check_policy_name(policy_name)
    snapshots = [lake.snapshot(text) for text in datasets]
    spec = _joined_spec(snapshots)
    check_algorithm(config.algorithm, spec.action_space)
    check_options(config.algorithm, spec.action_space, config.options, others=OWN_OPTIONS)
    if env_id is not None:
        check_spaces(env_id, spec.observation_space, spec.action_space)
    query = ViewQuery(where, where_steps, reward)
    view = concatenate(_replayed(snapshots, query, on_reading))
    if view.has_masked_actions:
        check_masks(config.algorithm, spec.action_space)
    num_unknown, num_starts = view.num_unknown_rewards, len(view.packed.steps)
    check_rewards(config.algorithm, spec.action_space, num_unknown, num_starts)
    learner = _learner(view, config)
    sampler = _sampler(view, learner, config, weight)
    manifest = _manifest(learner, view, config, policy_name, datasets)
    manifest["sampling"] = sampler.describe()
    with (
        recorded_run(lake.registry, manifest, view) as record,
        tempfile.TemporaryDirectory(prefix="replaylake-train-") as scratch,
    ):
        with torch_threads(config.threads):
            manifest["metrics"], updates_per_s = run_updates(
                learner,
                sampler,
                config.updates,
                check_updates=1 if config.device == "cpu" else GPU_CHECK_UPDATES,
                on_progress=on_progress,
            )
        package, evaluation = _packaged(
            Path(scratch), learner, view.spec.encoding, config, manifest, env_id
        )
        # The policy and the end of its run are one commit: neither is there without the other.
        ref = lake.registry.register(
            policy_name,
            package,
            run_id=manifest["run_id"],
            lineage={key: manifest[key] for key in ("datasets", "algorithm", "seed", "run_id")},
            run={
                **record,
                "status": "done",
                "ended_ms": round(time.time() * 1000),
                "metrics": manifest["metrics"],
                "updates_per_s": updates_per_s,
                "evaluation": None if evaluation is None else evaluation.to_json(),
            },
        )
    return TrainResult(
        policy=ref,
        run_id=manifest["run_id"],
        datasets=tuple(manifest["datasets"]),
        num_steps=view.num_steps,
        num_episodes=view.num_episodes,
        metrics=manifest["metrics"],
        updates_per_s=updates_per_s,
        evaluation=evaluation,
    )


def _joined_spec(snapshots: Sequence[Snapshot]) -> DatasetSpec:
    """Return the spec of all datasets together, before any is read."""
    if not snapshots:
        raise ConfigInvalid("training: found no dataset, expected at least one.")
    first = snapshots[0]
    spec = first.spec
    for other in snapshots[1:]:
        if (differs := difference(spec, other.spec)) is not None:
            raise SchemaMismatch(
                f"datasets {first.dataset} and {other.dataset}: {differs}, expected one. Train on "
                "each alone, or ingest both with the same --env."
            )
        spec = joined(spec, other.spec)
    return spec


def _replayed(
    snapshots: Sequence[Snapshot],
    query: ViewQuery,
    on_reading: Callable[[int, int], None] | None,
) -> list[ReplayView]:
    num_shards = sum(len(snapshot.files) for snapshot in snapshots)
    views, num_before = [], 0
    for snapshot in snapshots:
        told = None
        if on_reading is not None:
            told = partial(_tell_all, on_reading, num_before, num_shards)
        views.append(
            snapshot.replay(
                query.where, where_steps=query.where_steps, reward=query.reward, on_progress=told
            )
        )
        num_before += len(snapshot.files)
    return views


def _tell_all(
    on_reading: Callable[[int, int], None], num_before: int, num_all: int, done: int, of: int
) -> None:
    on_reading(num_before + done, num_all)


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


def _sampler(
    view: ReplayView, learner: Learner, config: TrainConfig, weight: str | None
) -> Sampler:
    item = Transitions(learner.discount, only_bootstrappable=learner.needs_bootstrap)
    if weight is None:
        return view.uniform(config.batch_size, item, seed=config.seed)
    return view.weighted(config.batch_size, item, weight=weight, seed=config.seed)


def _logged_range(view: ReplayView) -> tuple[Array, Array] | None:
    """Return the least and greatest action of the selected steps, for Box actions."""
    space = view.spec.action_space
    if not isinstance(space, Box):
        return None
    records, steps = view.packed.records, view.packed.steps
    actions = np.asarray(records.layout.actions(records.rows))
    least, greatest = [], []
    # Some at a time: the view may be larger than memory.
    for start in range(0, len(steps), _ROWS_AT_ONCE):
        some = actions[steps[start : start + _ROWS_AT_ONCE]]
        least.append(some.min(axis=0))
        greatest.append(some.max(axis=0))
    return np.min(least, axis=0), np.max(greatest, axis=0)


def _packaged(
    scratch: Path,
    learner: Learner,
    encoding: Encoding | None,
    config: TrainConfig,
    manifest: Mapping[str, Any],
    env_id: str | None,
) -> tuple[Path, Evaluation | None]:
    """Export, evaluate what was exported rather than the learner, and write the package."""
    graph = learner.policy()
    spec = replace(graph.spec, encoding=encoding)
    onnx = export_onnx(graph)
    state = learner.state_dict()
    package = scratch / "policy"
    save_package(package, onnx=onnx, spec=spec, manifest=manifest, learner_weights=state)
    if env_id is None:
        return package, None
    evaluation = evaluate(
        load_policy(package), env_id, episodes=config.evaluation_episodes, seed=config.seed
    )
    package = scratch / "evaluated"
    with_evaluation = {**manifest, "evaluation": evaluation.to_json()}
    save_package(package, onnx=onnx, spec=spec, manifest=with_evaluation, learner_weights=state)
    return package, evaluation


def _manifest(
    learner: Learner,
    view: ReplayView,
    config: TrainConfig,
    policy_name: str,
    datasets: Sequence[str],
) -> dict[str, Any]:
    return {
        "name": policy_name,
        "run_id": new_ulid(),
        "algorithm": config.algorithm,
        "seed": config.seed,
        "config": {**asdict(config), "options": dict(learner.config)},
        "normalisation": dict(learner.normalisation),
        # A tag may move later: kept as it was given, beside the version that it meant.
        "datasets": [
            {**asdict(selection), "named": text}
            for selection, text in zip(view.selections, datasets, strict=True)
        ],
        "metrics": {},
        "evaluation": None,
    }
