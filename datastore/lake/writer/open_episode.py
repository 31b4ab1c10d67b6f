"""OpenEpisode: an episode that is being lived, handed to its writer step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import (
    ACTION_MASK,
    BEHAVIOR_LOG_PROB,
    ENV_STEP,
    POLICY,
    POLICY_VERSION,
    TIMESTAMP,
)
from replaylake.datastore.episodes.spaces import (
    Array,
    Dict,
    Space,
    Text,
    Tuple,
    children,
    num_bytes,
)
from replaylake.datastore.errors import EpisodeInvalid

if TYPE_CHECKING:
    from replaylake.datastore.lake.writer.episode_writer import EpisodeWriter

# The columns that `step` takes, and what Episode calls a piece's worth of each.
_FIELDS: Final = {
    BEHAVIOR_LOG_PROB: "behavior_log_probs",
    POLICY: "policies",
    POLICY_VERSION: "policy_versions",
    ACTION_MASK: "action_masks",
    TIMESTAMP: "timestamps",
    ENV_STEP: "env_steps",
}


@dataclass
class _Steps:
    """What was stepped and not yet written: one entry a step in each list."""

    observations: list[Any] = field(default_factory=list)
    actions: list[Any] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    further: list[Mapping[str, Any]] = field(default_factory=list)
    final_observation: Any = None


class OpenEpisode:
    """Steps of one episode and agent; each flush of the writer commits those it has as a piece.

    Made by `EpisodeWriter.begin`. In `episodes` it has complete = false until a step ends it.
    """

    def __init__(
        self,
        writer: EpisodeWriter,
        spaces: tuple[Space, Space],
        episode_id: str,
        agent_id: str,
    ) -> None:
        self.episode_id = episode_id
        self.agent_id = agent_id
        self.ended = False
        self._writer = writer
        self._spaces = spaces
        self._first_step = 0
        self._steps = _Steps()

    def __len__(self) -> int:
        return len(self._steps.rewards)

    def step(
        self,
        observation: Any,
        action: Any,
        reward: float,
        next_observation: Any,
        *,
        terminated: bool = False,
        truncated: bool = False,
        **further: Any,
    ) -> None:
        """Add a step: what was seen, done and received, and what was seen then.

        `further` are `behavior_log_prob`, `policy`, `policy_version`, `action_mask`, `timestamp`
        (us since 1970), `env_step`, and columns of one's own; the same at every step. With
        `terminated` or `truncated` the episode is handed over for the next flush.

        Raises: EpisodeInvalid, SchemaMismatch for the steps that were not written yet, which are
        then left out; as `EpisodeWriter.flush` where the buffer is full.
        """
        if self.ended:
            raise EpisodeInvalid(
                f"episode {self.episode_id}: found a step after its end, expected none. Begin "
                "another episode."
            )
        try:
            # Before any of it is kept: half a step would shift all that follow.
            observed, acted, following = map(copied, (observation, action, next_observation))
        except ValueError as error:
            raise EpisodeInvalid(
                f"episode {self.episode_id}: step {self._first_step + len(self)}: found {error}, "
                "expected an observation and an action of the dataset's spaces. The step is left "
                "out."
            ) from error
        with self._writer.lock:
            steps = self._steps
            steps.observations.append(observed)
            steps.actions.append(acted)
            steps.rewards.append(reward)
            steps.further.append(further)
            steps.final_observation = following
            self.ended = terminated or truncated
            # The last values stand for the size of every step.
            size = num_bytes(steps.final_observation) if len(self) > 1 else 0
            if self.ended:
                self._writer.end(self, self.taken(terminated=terminated, truncated=truncated))
            else:
                self._writer.note_step(size)

    def taken(self, *, terminated: bool = False, truncated: bool = False) -> Episode:
        """Return the steps since the last piece as the next one, and forget them."""
        steps, self._steps = self._steps, _Steps()
        first, self._first_step = self._first_step, self._first_step + len(steps.rewards)
        columns = _columns(steps.further)
        known: dict[str, Any] = {
            name: columns.pop(column) for column, name in _FIELDS.items() if column in columns
        }
        return Episode(
            self.episode_id,
            observations=_stacked(self._spaces[0], steps.observations),
            actions=_stacked(self._spaces[1], steps.actions),
            rewards=_array(steps.rewards),
            terminated=terminated,
            truncated=truncated,
            final_observation=steps.final_observation,
            agent_id=self.agent_id,
            first_step=first,
            extras=columns,
            **known,
        )


def _columns(further: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name in dict.fromkeys(name for step in further for name in step):
        values = [step.get(name) for step in further]
        if name == POLICY:
            columns[name] = np.array(values, dtype=object)
        elif name in _FIELDS or isinstance(values[0], np.ndarray):
            columns[name] = _array(values)
        else:
            columns[name] = values  # the type is pyarrow's to find
    return columns


def _array(values: Sequence[Any]) -> Array:
    try:
        return np.asarray(values)
    except ValueError:  # of several shapes, for the door to refuse
        return np.fromiter(values, object, len(values))


def _stacked(space: Space, values: Sequence[Any]) -> Any:
    """Stack single values to arrays [T, ...]; what does not stack is for the door to refuse."""
    if isinstance(space, Dict | Tuple):
        if not all(isinstance(value, Mapping) for value in values):
            return {}
        return {
            key: _stacked(sub, [value.get(key) for value in values])
            for key, sub in children(space).items()
        }
    if isinstance(space, Text):
        return np.array(values, dtype=object)
    try:
        stacked: Array = np.stack([np.asarray(value) for value in values])
    except ValueError:
        return values
    return stacked


def copied(value: Any) -> Any:
    """Copy an observation or action: environments reuse their buffers."""
    if isinstance(value, Mapping):
        return {key: copied(sub) for key, sub in value.items()}
    if isinstance(value, tuple):
        return {f"_{i}": copied(sub) for i, sub in enumerate(value)}
    return value if isinstance(value, str) else np.array(value)
