"""Suitability: which algorithms can learn from a dataset, and why the others cannot.

By the checks that training makes before its first update, so that both say the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from replaylake.datastore.episodes.schema import REWARD
from replaylake.datastore.episodes.spaces import Space
from replaylake.datastore.errors import ConfigInvalidError, ReplayLakeError, SpaceUnsupportedError
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.replay.view import ReplayView
from replaylake.datastore.storage.table.column_ranges import column_ranges
from replaylake.offline.algorithms.bandit_log import check_bandit_log
from replaylake.offline.algorithms.catalog import (
    Capability,
    algorithms,
    builtin_row,
    check_algorithm,
    d3rlpy_row,
    reference,
    require,
)
from replaylake.offline.algorithms.description import needs
from replaylake.offline.algorithms.info import AlgorithmInfo
from replaylake.offline.d3rlpy.features import observation_features
from replaylake.offline.dataset_statistics import DatasetStatistics
from replaylake.offline.learning.normalization import fit_statistics


@dataclass(frozen=True)
class Suitability:
    """refusal: why the algorithm cannot learn from the dataset, None if it can."""

    algorithm: AlgorithmInfo
    refusal: str | None


def list_suitability(snapshot: Snapshot) -> list[Suitability]:
    """Return each algorithm for the dataset's actions or, where it has none for them, its refusal.

    The dataset is taken whole, with default options and logged rewards: `where`, `reward` and the
    like may make more algorithms fit. Cost: as opening it to train.
    """
    data = _TrainingSteps(snapshot)
    return [
        Suitability(info, _refusal(info, data))
        for info in algorithms()
        if not _is_superseded(info, snapshot.spec.action_space)
    ]


def find_data_needs(
    snapshots: Sequence[Snapshot], reward: str | None = None
) -> frozenset[Capability]:
    """Return what an algorithm needs for these data, before they are decoded.

    The result may include too much: masks may be all true, and a condition may exclude the steps
    without a reward. reward: the SQL expression that replaces the logged one. Cost: reads the
    footers of the shards if rewards are optional. Raises: ShardCorruptError.
    """
    needed: set[Capability] = {"logs"}
    if any(snapshot.spec.mask_size is not None for snapshot in snapshots):
        needed.add("action masks")
    optional = [s for s in snapshots if s.spec.rewards_optional and reward is None]
    if any(column_ranges(snapshot.table)[REWARD].missing for snapshot in optional):
        needed.add("unknown rewards")
    return frozenset(needed)


class _TrainingSteps:
    """What training looks at; only read for algorithms that take the actions."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.spec = snapshot.spec
        self._snapshot = snapshot

    @cached_property
    def view(self) -> ReplayView:
        """All steps. Raises: EmptyReplayError, SpaceUnsupportedError."""
        return self._snapshot.replay()

    @cached_property
    def needs(self) -> frozenset[Capability]:
        """What an algorithm needs for it."""
        return find_data_needs([self._snapshot])

    @cached_property
    def statistics(self) -> DatasetStatistics:
        return fit_statistics([self._snapshot])


def _is_superseded(info: AlgorithmInfo, action_space: Space) -> bool:
    """Return whether its name is another algorithm's for these actions."""
    try:
        return check_algorithm(reference(info), action_space) != info
    except SpaceUnsupportedError:
        return False


def _refusal(info: AlgorithmInfo, data: _TrainingSteps) -> str | None:
    try:
        check_algorithm(reference(info), data.spec.action_space, needed=data.needs)
        require(info, "logs", needed=data.needs)
        view = data.view
        if view.has_masked_actions:
            require(info, "action masks", needed=data.needs)
        if num_unknown := view.num_unknown_rewards:
            num_steps = len(view.packed.steps)
            counts = {"num_unknown": num_unknown, "num_steps": num_steps}
            require(info, "unknown rewards", needed=data.needs, **counts)
        if info.kind == "bandit":
            check_bandit_log(reference(info), view)
        _check_successors(info, view)
        _check_observations(info, data)
    except ReplayLakeError as error:
        return str(error)
    return None


def _check_successors(info: AlgorithmInfo, view: ReplayView) -> None:
    if "next_observations" in needs(info) and not view.num_transitions:
        raise ConfigInvalidError(
            f"algorithm {reference(info)}: found {len(view.packed.steps):,} steps without a next "
            "observation, expected some with one. Clone behavior with bc, or log final "
            "observations."
        )


def _check_observations(info: AlgorithmInfo, data: _TrainingSteps) -> None:
    """Make what takes the observations. Raises: SpaceUnsupportedError."""
    observations, actions = data.spec.observation_space, data.spec.action_space
    if info.provider == "d3rlpy":
        observation_features(d3rlpy_row(info), observations, data.statistics)
        return
    ours = builtin_row(info)
    ours.function(observations, actions, ours.config_class(), data.statistics).networks()
