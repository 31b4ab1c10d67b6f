"""A run's data: what is learned from, what is held out, and all that can be refused up front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.compatibility import find_spec_mismatch, join_specs
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.errors import ConfigInvalidError, SchemaMismatchError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.names import check_policy_name
from replaylake.datastore.replay.records import Packed
from replaylake.datastore.replay.view import ReplayView, concatenate
from replaylake.offline.algorithms.bandit_log import check_bandit_log
from replaylake.offline.algorithms.catalog import (
    Capability,
    check_algorithm,
    check_options,
    require,
)
from replaylake.offline.algorithms.info import AlgorithmInfo
from replaylake.offline.algorithms.suitability import find_data_needs
from replaylake.offline.callbacks import OnReading
from replaylake.offline.evaluation.evaluate import check_spaces
from replaylake.offline.running.training.config import TRAIN_OPTIONS, TrainConfig, TrainRequest
from replaylake.offline.running.training.policy_selection import (
    MeasureName,
    has_own_reward,
    measure_name,
)

_ROWS_AT_ONCE: Final = 1 << 16


@dataclass(frozen=True)
class TrainingData:
    """The opened views of a request.

    where: which episodes are learned from. held_out: those that are not, where the measure needs
    them. remarks: what a person should know of the data, a sentence each.
    """

    snapshots: tuple[Snapshot, ...]
    where: str | None
    view: ReplayView
    held_out: ReplayView | None
    algorithm: AlgorithmInfo
    measure: MeasureName
    remarks: tuple[str, ...]

    def lineage(self, request: TrainRequest) -> list[dict[str, Any]]:
        """Return what was selected of each dataset.

        A tag may move later: it is kept as it was given, beside the version that it meant.
        """
        return [
            {**asdict(selection), "named": text}
            for selection, text in zip(self.view.selections, request.named, strict=True)
        ]


def open_data(
    lake: Lake, request: TrainRequest, *, on_reading: OnReading | None = None
) -> TrainingData:
    """Check a pinned request and decode its episodes.

    Raises: NotFoundError, InvalidNameError, SchemaMismatchError, EmptyReplayError,
    SpaceUnsupportedError, ConfigInvalidError, QueryRefusedError, QueryError.
    """
    config = request.config
    check_policy_name(config.policy)
    snapshots = [lake.snapshot(text) for text in request.datasets]
    spec = _merge_specs(snapshots)
    needed = find_needs(config, snapshots)
    algorithm = check_algorithm(config.algorithm, spec.action_space, needed=needed)
    require(algorithm, "logs", needed=needed)
    check_options(config.algorithm, spec.action_space, config.options, others=TRAIN_OPTIONS)
    if config.prioritized:
        require(algorithm, "priorities", needed=needed)
    if config.learners > 1:
        require(algorithm, "gradients", needed=needed)
    if config.env is not None:
        check_spaces(config.env, spec.observation_space, spec.action_space, config.env_args)
    measure = measure_name(request, algorithm.uses_rewards)
    split = config.split()
    if split is not None:
        for snapshot in snapshots:
            split.check(snapshot, config.where)
    sides = [False, True] if measure in ("fqe", "loss") else [False]
    reading = _ReadProgress(snapshots, len(sides), on_reading)
    wheres = [
        config.where if split is None else split.within(config.where, held_out)
        for held_out in sides
    ]
    views = [_open_view(snapshots, request, where, reading) for where in wheres]
    view = views[0]
    if view.has_masked_actions:
        require(algorithm, "action masks", needed=needed)
    if num_unknown := view.num_unknown_rewards:
        num_steps = len(view.packed.steps)
        counts = {"num_unknown": num_unknown, "num_steps": num_steps}
        require(algorithm, "unknown rewards", needed=needed, **counts)
    if algorithm.kind == "bandit":
        check_bandit_log(config.algorithm, view)
    return TrainingData(
        snapshots=tuple(snapshots),
        where=wheres[0],
        view=view,
        held_out=views[1] if len(views) > 1 else None,
        algorithm=algorithm,
        measure=measure,
        remarks=(*_remarks(view), *_of_reward(request, measure)) if algorithm.uses_rewards else (),
    )


def find_needs(config: TrainConfig, snapshots: Sequence[Snapshot]) -> frozenset[Capability]:
    """Return what an algorithm needs for these data and options, before the data are decoded."""
    needed = set(find_data_needs(snapshots, config.reward))
    if config.prioritized:
        needed.add("priorities")
    if config.learners > 1:
        needed.add("gradients")
    return frozenset(needed)


def check_same_data(
    run_id: str, recorded: Sequence[Mapping[str, Any]], actual: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse to go on with other steps than a run began with. Raises: SchemaMismatchError."""
    for was, now in zip(recorded, actual, strict=True):
        if was["content_hash"] != now["content_hash"]:
            raise SchemaMismatchError(
                f"run {run_id}: {now['dataset']}@{now['version']}: found content hash "
                f"{now['content_hash'][:12]} of {now['num_steps']:,} steps, expected "
                f"{was['content_hash'][:12]} of {was['num_steps']:,}, which it began with: steps "
                "were purged or the files replaced. Train again."
            )


def _merge_specs(snapshots: Sequence[Snapshot]) -> DatasetSpec:
    """Return the spec of all datasets together, before any is read."""
    if not snapshots:
        raise ConfigInvalidError("training: found no dataset, expected at least one.")
    first = snapshots[0]
    spec = first.spec
    for other in snapshots[1:]:
        if (differs := find_spec_mismatch(spec, other.spec)) is not None:
            raise SchemaMismatchError(
                f"datasets {first.dataset} and {other.dataset}: {differs}, expected the same. "
                "Train on each separately, or ingest both with the same `env`."
            )
        spec = join_specs(spec, other.spec)
    return spec


class _ReadProgress:
    """Counts the shards of all snapshots as they are decoded, once for each side of the split."""

    def __init__(
        self, snapshots: Sequence[Snapshot], num_sides: int, on_reading: OnReading | None
    ) -> None:
        self._num_all = sum(len(snapshot.files) for snapshot in snapshots) * num_sides
        self._num_before = 0
        self._on_reading = on_reading

    def tell(self, done: int, of: int) -> None:
        if self._on_reading is not None:
            self._on_reading(self._num_before + done, self._num_all)

    def read(self, snapshot: Snapshot) -> None:
        self._num_before += len(snapshot.files)


def _open_view(
    snapshots: Sequence[Snapshot],
    request: TrainRequest,
    where: str | None,
    reading: _ReadProgress,
) -> ReplayView:
    views = []
    for snapshot in snapshots:
        views.append(
            snapshot.replay(
                where,
                where_steps=request.config.where_steps,
                reward=request.config.reward,
                frame_stack=request.config.frame_stack,
                on_progress=reading.tell,
            )
        )
        reading.read(snapshot)
    return concatenate(views)


def _remarks(view: ReplayView) -> Sequence[str]:
    """Return what learning from rewards does with ends that are not what it would like."""
    remarks = []
    num_steps = len(view.packed.steps)
    num_lost = num_steps - view.num_transitions
    if num_lost:
        remarks.append(
            f"{num_lost:,} of {num_steps:,} steps are left out by algorithms that bootstrap: they "
            "do not terminate, and what followed them was not logged"
        )
    if not _any_terminates(view.packed):
        remarks.append(
            "no step terminates: values count what would have come after each episode's end; log "
            "terminations if the task has an end"
        )
    return remarks


def _of_reward(request: TrainRequest, measure: MeasureName) -> Sequence[str]:
    """Say of an environment that its reward is not the one that is learned from."""
    env, reward = request.config.env, request.config.reward
    if env is None or not has_own_reward(request):
        return ()
    if measure == "environment":
        return (f"the policy is chosen by the reward of {env}, and learns from {reward}",)
    rule = "the last one is taken" if measure == "last" else f"it is chosen by {measure}"
    return (
        f"the policy learns from {reward}, which {env} does not reward: {rule}"
        "; select = 'environment' chooses by the environment's own reward",
    )


def _any_terminates(packed: Packed) -> bool:
    """Return whether a step that may be sampled ended its episode. Cost: at most a pass."""
    terminated = packed.records.rows[schema.TERMINATED]
    # Some at a time: the view may be larger than memory.
    return any(
        bool(np.any(terminated[packed.steps[start : start + _ROWS_AT_ONCE]]))
        for start in range(0, len(packed.steps), _ROWS_AT_ONCE)
    )
