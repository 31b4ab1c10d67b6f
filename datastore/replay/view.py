"""ReplayView: a snapshot's selected episodes, decoded once, from which samplers draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore import schema
from replaylake.datastore.compatibility import difference, joined
from replaylake.datastore.errors import ConfigInvalid, EmptyReplay, SchemaMismatch
from replaylake.datastore.query.expressions import (
    canonical_expression,
    evaluated_rewards,
    selected_episodes,
)
from replaylake.datastore.replay.packing import (
    KEY,
    OnProgress,
    Packed,
    pack,
    record_dtype,
    selection_hash,
)
from replaylake.datastore.replay.uniform import UniformSampler
from replaylake.datastore.schema import REWARD, DatasetSpec
from replaylake.datastore.table import TableSnapshot


@dataclass(frozen=True)
class Selection:
    """What a view was made from: enough to make it again, kept in a policy's lineage.

    `where` and `reward` are SQL in DuckDB's own spelling, or None.
    """

    dataset: str
    version: int
    where: str | None
    reward: str | None
    num_episodes: int
    num_steps: int
    content_hash: str


class ReplayView:
    """Packed runs of one or several snapshots of the same spaces."""

    def __init__(
        self, spec: DatasetSpec, packed: Packed, selections: tuple[Selection, ...]
    ) -> None:
        self.spec = spec
        self.packed = packed
        self.selections = selections

    @property
    def num_steps(self) -> int:
        """Steps that can be sampled for cloning."""
        return len(self.packed.steps)

    @property
    def num_transitions(self) -> int:
        """Steps that can be bootstrapped: not an end that lacks its final observation."""
        return len(self.packed.bootstrappable)

    @property
    def has_masked_actions(self) -> bool:
        """Whether some step has an action that its mask forbids."""
        masked = self.spec.mask_size is not None
        return masked and not self.packed.records[schema.ACTION_MASK].all()

    @property
    def num_episodes(self) -> int:
        """Episodes (per agent) selected."""
        return self.packed.num_episodes

    def uniform(
        self,
        batch_size: int,
        *,
        seed: int,
        discount: float = 0.99,
        only_bootstrappable: bool = True,
    ) -> UniformSampler:
        """Return a sampler of transitions, uniform with replacement.

        `only_bootstrappable` leaves out steps without a successor; cloning does not need one.
        Raises: EmptyReplay.
        """
        starts = self.packed.bootstrappable if only_bootstrappable else self.packed.steps
        if not len(starts):
            raise EmptyReplay(
                f"replay of {self._names()}: found {self.num_steps} steps, none with a next "
                "observation or a termination, expected at least one. Use an algorithm that "
                "clones, or ingest a log that has next observations."
            )
        return UniformSampler(
            self.packed.records, starts, self.spec, batch_size, seed=seed, discount=discount
        )

    def _names(self) -> str:
        return ", ".join(f"{s.dataset}@{s.version}" for s in self.selections)


def open_view(
    dataset: str,
    snapshot: TableSnapshot,
    spec: DatasetSpec,
    *,
    where: str | None = None,
    reward: str | None = None,
    on_progress: OnProgress | None = None,
) -> ReplayView:
    """Decode the episodes that `where` selects, with `reward` in place of the logged one.

    Raises: QueryRefused, QueryFailed, ShardCorrupt, EmptyReplay, SpaceUnsupported.
    """
    where = None if where is None else canonical_expression(where)
    reward = None if reward is None else canonical_expression(reward)
    selected = None if where is None else selected_episodes(snapshot, where)
    rewards = None if reward is None else evaluated_rewards(snapshot, reward)
    packed = pack(snapshot, spec, selected=selected, rewards=rewards, on_progress=on_progress)
    if not len(packed.steps):
        raise EmptyReplay(
            f"replay of {dataset}@{snapshot.version}: found no step"
            f"{f' where {where}' if where else ''}, expected at least one. "
            f"Look at what there is: replaylake sql 'select * from {dataset}.episodes limit 10'."
        )
    if reward is not None:
        _check_finite(packed, reward)
    keys = packed.records[KEY][packed.steps]
    selection = Selection(
        dataset=dataset,
        version=snapshot.version,
        where=where,
        reward=reward,
        num_episodes=packed.num_episodes,
        num_steps=len(packed.steps),
        content_hash=selection_hash(snapshot, where, reward, keys),
    )
    return ReplayView(spec, packed, (selection,))


def concatenate(views: Sequence[ReplayView]) -> ReplayView:
    """Join views of compatible datasets; where only some have masks, the others' are all true.

    Raises: SchemaMismatch, EmptyReplay; ConfigInvalid if a dataset is there twice.
    """
    if not views:
        raise EmptyReplay("concatenate: found no views, expected at least one.")
    names = [selection.dataset for view in views for selection in view.selections]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigInvalid(
            f"replay of {', '.join(names)}: found {', '.join(twice)} twice, expected each dataset "
            "once: its steps would count double. Name it once, at one version."
        )
    first = views[0]
    if len(views) == 1:
        return first
    spec = first.spec
    for view in views[1:]:
        if (differs := difference(spec, view.spec)) is not None:
            raise SchemaMismatch(
                f"datasets {first._names()} and {view._names()}: {differs}, expected one. Train on "
                "each alone, or ingest them with the same --env."
            )
        spec = joined(spec, view.spec)
    offsets = np.cumsum([0, *(len(view.packed.records) for view in views[:-1])])
    packed = Packed(
        records=np.concatenate([_with_mask(view.packed.records, spec) for view in views]),
        steps=np.concatenate([v.packed.steps + o for v, o in zip(views, offsets, strict=True)]),
        bootstrappable=np.concatenate(
            [v.packed.bootstrappable + o for v, o in zip(views, offsets, strict=True)]
        ),
        num_episodes=sum(view.num_episodes for view in views),
    )
    return ReplayView(spec, packed, tuple(s for view in views for s in view.selections))


def _with_mask(records: NDArray[np.void], spec: DatasetSpec) -> NDArray[np.void]:
    """Return the records with an action mask, all true where they had none."""
    dtype = record_dtype(spec)
    if records.dtype == dtype:
        return records
    filled = np.zeros(len(records), dtype)
    filled[schema.ACTION_MASK] = True
    for name in records.dtype.names or ():
        filled[name] = records[name]
    return filled


def _check_finite(packed: Packed, expression: str) -> None:
    """Refuse NULL, NaN and infinities that a reward expression gave in the selected steps."""
    rewards = packed.records[REWARD][packed.steps]
    if not np.isfinite(rewards).all():
        found = "infinity" if np.isinf(rewards).any() else "NULL or NaN"
        num = int((~np.isfinite(rewards)).sum())
        raise SchemaMismatch(
            f"reward {expression}: found {found} in {num} of {len(rewards)} selected steps, "
            "expected finite numbers. Say what they count as, as in coalesce(x / nullif(y, 0), 0), "
            "or leave their episodes out with --where."
        )
