"""Step trees of a source: what its steps go on from, within a batch and from the batch before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from replaylake.datastore.episodes.episode_columns import as_text_array
from replaylake.datastore.episodes.parents import StepTree
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.episodes.tokens import (
    PARENT_AGENT_ID,
    PARENT_STEP,
    has_tokens,
    to_arrow_columns,
)
from replaylake.datastore.interchange.formats.format import LoggedColumns
from replaylake.datastore.interchange.formats.tabular.arrays import Mask


def join_trees(parts: Sequence[LoggedColumns]) -> StepTree:
    """Return the steps of all parts, and what they go on from."""

    def texts(values: Sequence[str] | None, part: LoggedColumns) -> pa.Array:
        array = as_text_array([""] * len(part) if values is None else values)
        return array.take(pa.array(np.repeat(np.arange(len(part)), part.lengths)))

    steps = []
    for part in parts:
        starts = np.cumsum(part.lengths) - part.lengths
        steps.append(np.arange(part.num_steps) + np.repeat(part.first_steps - starts, part.lengths))
    tokens = [to_arrow_columns(part.steps.extras) for part in parts]
    nulls = [pa.nulls(part.num_steps, pa.string()) for part in parts]
    agents = [
        own.get(PARENT_AGENT_ID, null).cast(pa.string())
        for own, null in zip(tokens, nulls, strict=True)
    ]
    return StepTree(
        pa.concat_arrays([texts(part.episode_ids, part) for part in parts]),
        pa.concat_arrays([texts(part.agent_ids, part) for part in parts]),
        np.concatenate(steps),
        pa.concat_arrays(agents),
        pa.concat_arrays([own[PARENT_STEP].cast(pa.int32()) for own in tokens]),
    )


class AcceptedSteps:
    """The steps that were accepted of the last episode: a later batch may have more of its agents.

    Agents of one episode follow one another in a source.
    """

    def __init__(self) -> None:
        self._episode_id: str | None = None
        self._ranges: list[tuple[str, int, int]] = []

    def remember(self, parts: Iterable[LoggedColumns]) -> None:
        """Take the accepted episodes of a batch."""
        for part in parts:
            if not len(part) or not has_tokens(part.steps.extras):
                continue
            if (last := part.episode_ids[len(part) - 1]) != self._episode_id:
                self._episode_id, self._ranges = last, []
            for number in reversed(range(len(part))):
                if part.episode_ids[number] != last:
                    break
                first = int(part.first_steps[number])
                agent = "" if part.agent_ids is None else part.agent_ids[number]
                self._ranges.append((agent, first, first + int(part.lengths[number])))

    def find(self, episode_ids: pa.Array, agent_ids: pa.Array, steps: Array) -> Mask:
        """Return which of some steps are among them."""
        asked = zip(episode_ids.to_pylist(), agent_ids.to_pylist(), steps.tolist(), strict=True)
        found = [
            episode == self._episode_id
            and any(name == agent and first <= step < end for name, first, end in self._ranges)
            for episode, agent, step in asked
        ]
        return np.asarray(found, np.bool_)
