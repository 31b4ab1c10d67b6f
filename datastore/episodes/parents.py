"""Parents: the steps that others go on from, where the agents of an episode form a tree.

A step's parent is the one that `parent_agent_id` and `parent_step` name; without a parent_step it
is the step before it of the same agent. Without a parent_agent_id it is one of the same agent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.episodes.tokens import PARENT_AGENT_ID, PARENT_STEP
from replaylake.datastore.storage.arrow_values import numbers

# Given episodes, agents and steps of the same length: which of them there are, besides those given.
FindSteps = Callable[[pa.Array, pa.Array, Array], NDArray[np.bool_]]


@dataclass(frozen=True)
class StepTree:
    """T steps, in any order, and what they go on from.

    episode_ids and agent_ids: texts [T]. steps int64 [T]. parent_agent_ids: texts [T], or None if
    no step names one. parent_steps: integers [T], null where a step names none.
    """

    episode_ids: pa.Array
    agent_ids: pa.Array
    steps: Array
    parent_agent_ids: pa.Array | None
    parent_steps: pa.Array


@dataclass(frozen=True)
class Orphan:
    """A step, by its row, whose parent is not there or does not precede it."""

    row: int
    message: str


def find_orphans(tree: StepTree, find_steps: FindSteps) -> list[Orphan]:
    """Return the steps whose parent is not there, or does not precede them, by row.

    A parent of the same agent has to be an earlier step; of one from before the agent's first step
    in `tree`, nothing more is known here, since an agent's steps are written in order. A parent of
    another agent has to be in `tree`, or among what `find_steps` finds. No step may go on from
    itself by way of others.

    Cost: where a step names a parent, a sort of the steps, and log2(T) gathers where one names
    another agent's.
    """
    refs = np.flatnonzero(numbers(tree.parent_steps.is_valid()))
    if not len(refs):
        return []
    episode_ids, agent_ids = _plain(tree.episode_ids), _plain(tree.agent_ids)
    coded = pc.binary_join_element_wise(episode_ids, agent_ids, "\0").dictionary_encode()
    codes = numbers(coded.indices).astype(np.int64)
    own = pa.array(refs)
    episodes, agents = episode_ids.take(own), agent_ids.take(own)
    if tree.parent_agent_ids is not None:
        agents = pc.coalesce(_plain(tree.parent_agent_ids).take(own), agents)
    names = pc.binary_join_element_wise(episodes, agents, "\0")
    parents = numbers(pc.fill_null(pc.index_in(names, coded.dictionary), -1)).astype(np.int64)
    parent_steps = numbers(tree.parent_steps.take(own)).astype(np.int64)

    keys = (codes << 32) + tree.steps
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    wanted = (parents << 32) + parent_steps
    places = np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)
    is_found = (parents >= 0) & (ordered[places] == wanted)
    is_same_agent = parents == codes[refs]
    is_late = is_same_agent & (parent_steps >= tree.steps[refs])
    firsts = np.searchsorted(ordered, parents << 32)
    is_earlier = is_same_agent & (wanted < ordered[np.minimum(firsts, len(ordered) - 1)])
    is_missing = ~is_found & ~is_earlier & ~is_late
    if is_missing.any():
        asked = np.flatnonzero(is_missing)
        which = pa.array(asked)
        found = find_steps(episodes.take(which), agents.take(which), parent_steps[asked])
        is_missing[asked[found]] = False

    in_cycle = np.zeros(len(refs), np.bool_)
    if (is_found & ~is_same_agent).any():
        above = np.full(len(keys), -1)
        follows = np.flatnonzero(np.diff(ordered) == 1) + 1
        above[order[follows]] = order[follows - 1]
        above[refs] = np.where(is_found & ~is_late, order[places], -1)
        in_cycle = _lead_nowhere(above)[refs]
    orphans = []
    for number in np.flatnonzero(is_late | is_missing | in_cycle).tolist():
        row, step, agent = int(refs[number]), int(parent_steps[number]), agents[number].as_py()
        what = f"{PARENT_STEP} at step {tree.steps[row]}: found step {step} of {_name(agent)}"
        if is_late[number]:
            expected = "expected a step before it."
        elif is_missing[number]:
            expected = "which the episode does not have, expected one of its steps."
        else:
            expected = "whose own parents form a cycle, expected parents that end at a first step."
        orphans.append(Orphan(row, f"{what}, {expected}"))
    return orphans


def _lead_nowhere(above: Array) -> NDArray[np.bool_]:
    """Return which nodes reach no root. above int64 [T]: each node's parent, -1 at a root."""
    jumps = np.append(above, -1)  # -1 is the last place, and leads to itself
    for _ in range(max(1, len(above).bit_length())):
        jumps = jumps[jumps]
    return np.asarray(jumps[:-1] >= 0)


def _plain(texts: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(texts.type):
        texts = texts.dictionary_decode()
    return texts.cast(pa.string())


def _name(agent: str) -> str:
    return f"agent {agent!r} ({PARENT_AGENT_ID})" if agent else "the agent ''"
