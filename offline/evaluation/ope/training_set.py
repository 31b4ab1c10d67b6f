"""The training set of a policy: which of the evaluated episodes it learned from."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.score_reference import ScoreReference
from replaylake.datastore.errors import NotFoundError
from replaylake.datastore.lake.holdout import Holdout
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.logged_steps import LoggedSteps
from replaylake.datastore.lake.policies.registry import PolicyRef
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.query.expressions import (
    canonical_condition,
    canonical_reward,
    select_episode_keys,
)


@dataclass(frozen=True)
class TrainingSet:
    """What a policy's lineage says that it was trained on.

    selections: one a dataset, with its version, `where` and `reward`. holdout: what was kept from
    it, or None. unknown: why it cannot be said what else the policy learned from; empty where it
    can.
    """

    selections: tuple[Mapping[str, Any], ...] = ()
    holdout: Holdout | None = None
    unknown: str = ""

    def rewards(self) -> tuple[str, ...]:
        """Return the distinct reward expressions that it was trained with, canonical_reward's.

        Empty where no dataset is named; lineage from before expressions were kept says the stored
        reward.
        """
        rewards = [canonical_reward(selection.get("reward")) for selection in self.selections]
        return tuple(dict.fromkeys(rewards))

    def of_dataset(self, name: str) -> tuple[Mapping[str, Any], ...]:
        """Return the selections of one dataset."""
        return tuple(selection for selection in self.selections if selection["dataset"] == name)

    def holdout_of(self, name: str) -> Holdout | None:
        """Return what was kept of a dataset; None of one that it was not trained on."""
        return self.holdout if self.of_dataset(name) else None

    def choices(self) -> tuple[str, ...]:
        """Return the conditions that chose training episodes by more than the holdout's hash."""
        rule = None if self.holdout is None else canonical_condition(self.holdout.condition(False))
        wheres = [selection.get("where") for selection in self.selections]
        return tuple(
            where for where in wheres if where is not None and canonical_condition(where) != rule
        )


@dataclass(frozen=True, eq=False)
class TrainingOverlap:
    """Which episodes a policy learned from, bool [E]; unknown: why there may be more of them."""

    episodes: NDArray[np.bool_]
    unknown: str = ""


def training_set(lake: Lake, ref: PolicyRef) -> TrainingSet:
    """Read a policy's training set from its lineage. Raises: NotFoundError, ConfigInvalidError."""
    lineage = lake.registry.show(ref)["lineage"]
    holdout = lineage.get("holdout")
    datasets = lineage.get("datasets")
    # An empty list says that it learned from none; nothing said is nothing known.
    unknown = "" if datasets is not None else f"{ref}: its lineage names no training episodes"
    return TrainingSet(
        selections=tuple(datasets or ()),
        holdout=None if holdout is None else Holdout.from_json(holdout),
        unknown=unknown,
    )


def find_score_reference(lake: Lake, training: TrainingSet) -> ScoreReference | None:
    """Return what the returns of a policy's training datasets are normalized by.

    That of their newest versions, if those that have one agree; else None.
    """
    references = set()
    for name in {selection["dataset"] for selection in training.selections}:
        handle = lake.dataset(name)
        if handle.exists():
            references.add(handle.spec.score_reference)
    references.discard(None)
    return references.pop() if len(references) == 1 else None


def find_training_episodes(
    lake: Lake, training: TrainingSet, snapshot: Snapshot, steps: LoggedSteps
) -> TrainingOverlap:
    """Return which episodes of `steps` the policy learned from, and what is not certain.

    Episodes are compared by id, in whatever dataset they were trained on: a copy keeps ids, and so
    does the same log ingested twice. Where one agent of an episode was trained on, all of it counts
    as seen. A version whose shards were removed since is stood in for by what is there now.
    Cost: a query over `episodes` a dataset.
    """
    is_known = np.zeros(steps.num_episodes, np.bool_)
    unknown = [training.unknown] if training.unknown else []
    for selection in training.selections:
        name, version = selection["dataset"], selection["version"]
        where = selection.get("where")
        if (name, version, where) == (snapshot.dataset, snapshot.version, None):
            return TrainingOverlap(np.ones(steps.num_episodes, np.bool_))
        pinned = _find_readable_snapshot(lake, name, version)
        if pinned is None:
            unknown.append(
                f"{name}@{version}, which the policy was trained on, is gone: whether it held "
                "evaluated episodes is not known"
            )
            continue
        if pinned.version != version:
            unknown.append(
                f"{name}@{version}, which the policy was trained on, is gone: its training "
                f"episodes were looked up in version {pinned.version}"
            )
        is_known |= steps.are_among(_episodes(pinned, where))
    return TrainingOverlap(is_known, "; ".join(unknown))


def _find_readable_snapshot(lake: Lake, name: str, version: int) -> Snapshot | None:
    """Return the version, else the newest, whose shards are all there."""
    for at in (f"{name}@{version}", name):
        with suppress(NotFoundError):
            snapshot = lake.snapshot(at)
            snapshot.sql("SELECT 1 FROM episodes LIMIT 1")
            return snapshot
    return None


def _episodes(snapshot: Snapshot, where: str | None) -> Any:
    """Return an Arrow table with the ids of the selected episodes."""
    if where is None:
        return snapshot.sql(f"SELECT DISTINCT {schema.EPISODE_ID} FROM episodes")
    # As training itself selected them.
    return select_episode_keys(snapshot.table, where)
