"""TransitionArrays: all transitions of a log as arrays, for what passes over them many times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.batch import Batch
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import Array, Values, concatenate, take
from replaylake.datastore.errors import EmptyReplayError
from replaylake.datastore.lake.logged_steps import LoggedSteps
from replaylake.datastore.replay.items.transitions import Transitions
from replaylake.datastore.replay.view import ReplayView

_ROWS_AT_ONCE: Final = 1 << 14


@dataclass(frozen=True, eq=False)
class TransitionArrays:
    """N transitions that can be bootstrapped, and the I first observations of their episodes.

    observations, next_observations [N, *obs] and actions [N, *act] in the environment's units;
    rewards float64 [N]; discounts float64 [N]: gamma, or 0 where the step terminated; returns
    float64 [N]: the discounted sum of what is logged from the step on; action_masks and
    next_action_masks bool [N, A], None where the dataset has none.
    """

    spec: DatasetSpec
    observations: Values
    actions: Values
    rewards: NDArray[np.float64]
    discounts: NDArray[np.float64]
    next_observations: Values
    returns: NDArray[np.float64]
    initial_observations: Values
    action_masks: NDArray[np.bool_] | None = None
    next_action_masks: NDArray[np.bool_] | None = None
    initial_action_masks: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.rewards)


def from_view(view: ReplayView, discount: float) -> TransitionArrays:
    """Copy a view's transitions. Raises: EmptyReplayError. Memory: twice the observations."""
    sampler = view.in_order(_ROWS_AT_ONCE, Transitions(discount, returns=True))
    batches: list[Batch[Array]] = []
    while True:
        try:
            batches.append(sampler.sample())
        except EmptyReplayError:
            if not batches:
                raise
            break
    records, runs = view.packed.records, view.packed.runs
    firsts = runs.starts[runs.chain_heads()]
    rows = records.rows[firsts]
    masks = None
    if view.spec.mask_size is not None:
        masks = np.asarray(rows[schema.ACTION_MASK])
    return TransitionArrays(
        spec=view.spec,
        observations=_concatenate_field(batches, "observations"),
        actions=_concatenate_field(batches, "actions"),
        rewards=_concatenate_field(batches, "rewards").astype(np.float64),
        discounts=_concatenate_field(batches, "discounts").astype(np.float64),
        next_observations=_concatenate_field(batches, "next_observations"),
        returns=_concatenate_field(batches, "returns").astype(np.float64),
        initial_observations=records.layout.observations(rows),
        action_masks=_concatenate_field(batches, "action_masks"),
        next_action_masks=_concatenate_field(batches, "next_action_masks"),
        initial_action_masks=masks,
    )


def from_steps(
    steps: LoggedSteps, discount: float, keep: NDArray[np.bool_] | None = None
) -> TransitionArrays:
    """Copy the transitions of the episodes of which bool [E] is true, by default of all.

    Raises: EmptyReplayError where none can be bootstrapped.
    """
    steps = steps if keep is None else steps.select(keep)
    # They are read together.
    assert steps.observations is not None
    assert steps.final_observations is not None
    lasts = steps.offsets[1:] - 1
    discounts = np.full(steps.num_steps, discount)
    discounts[lasts[steps.terminated]] = 0.0
    known = np.ones(steps.num_steps, np.bool_)
    known[lasts] = steps.terminated | steps.has_final
    # What follows the last one is its final observation, which lies behind all steps here, or,
    # where it terminated without one, its own.
    following = np.arange(1, steps.num_steps + 1)
    following[lasts] = lasts
    following[lasts[steps.has_final]] = steps.num_steps + np.arange(steps.has_final.sum())
    rows = np.flatnonzero(known)
    if not len(rows):
        raise EmptyReplayError(
            f"fitted Q evaluation: found {steps.num_steps} steps, none with a next observation or "
            "a termination, expected at least one."
        )
    every = concatenate([steps.observations, steps.final_observations])
    masks = steps.action_masks
    next_masks = None
    if masks is not None:
        # Of a final observation none is logged: every action.
        of_final = np.ones((int(steps.has_final.sum()), masks.shape[1]), np.bool_)
        next_masks = np.concatenate([masks, of_final])[following[rows]]
    return TransitionArrays(
        spec=steps.spec,
        observations=take(steps.observations, rows),
        actions=take(steps.actions, rows),
        rewards=steps.rewards[rows],
        discounts=discounts[rows],
        next_observations=take(every, following[rows]),
        returns=returns_to_go(steps, discount)[rows],
        initial_observations=take(steps.observations, steps.offsets[:-1]),
        action_masks=None if masks is None else masks[rows],
        next_action_masks=next_masks,
        initial_action_masks=None if masks is None else masks[steps.offsets[:-1]],
    )


def from_decisions(steps: LoggedSteps) -> TransitionArrays:
    """Return one-step episodes as transitions that terminate, without copying arrays."""
    assert steps.observations is not None
    return TransitionArrays(
        spec=steps.spec,
        observations=steps.observations,
        actions=steps.actions,
        rewards=steps.rewards,
        discounts=np.zeros(steps.num_steps),
        next_observations=steps.observations,
        returns=steps.rewards,
        initial_observations=steps.observations,
        action_masks=steps.action_masks,
        next_action_masks=steps.action_masks,
        initial_action_masks=steps.action_masks,
    )


def returns_to_go(steps: LoggedSteps, discount: float) -> NDArray[np.float64]:
    """Return the discounted sum of rewards from each step to its episode's end, float64 [M].

    Cost: a pass over the episodes for each step of the longest one.
    """
    returns = steps.rewards.copy()
    remaining = np.repeat(steps.offsets[1:], steps.lengths) - np.arange(steps.num_steps)
    by_left = np.argsort(remaining, kind="stable")
    starts = np.searchsorted(remaining[by_left], np.arange(1, remaining.max() + 2))
    for first, last in pairwise(starts[1:]):
        rows = by_left[first:last]
        returns[rows] += discount * returns[rows + 1]
    return returns


def _concatenate_field(batches: Sequence[Batch[Array]], field: str) -> Any:
    parts: list[Any] = [getattr(batch, field) for batch in batches]
    return None if parts[0] is None else concatenate(parts)
