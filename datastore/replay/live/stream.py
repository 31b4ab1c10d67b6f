"""Stream: steps of one episode that this process appends as it makes them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa

from replaylake.datastore.errors import ConfigInvalidError, EpisodeInvalidError
from replaylake.datastore.replay.live.live_contents import LiveContents
from replaylake.datastore.replay.live.runs import LiveRun
from replaylake.datastore.replay.live.step_block import PendingSteps, pack_steps
from replaylake.datastore.replay.packing.row_keys import pair_digests, pair_name

# Steps that are packed together, where nobody samples before.
_BLOCK_STEPS: Final = 256
_MIN_ROOM: Final = 16
_NO_COLUMNS: Final[Mapping[str, Any]] = {}


class Stream:
    """One episode and agent, from a step on; made by LiveView.stream. One thread appends to it.

    A step can be sampled once what follows it is known: the next step, an end, or an observation
    after it. The same steps in a commit are recognized, and are there once.
    """

    def __init__(
        self,
        intake: StreamIntake,
        episode_id: str,
        agent_id: str,
        first_step: int,
    ) -> None:
        """Take the episode's names; `first_step` is the number of the step appended first."""
        self._intake = intake
        self._name = pair_name(episode_id, agent_id)
        self._digest = pair_digests(pa.array([episode_id]), pa.array([agent_id]))
        self._next_step = first_step
        self._steps = PendingSteps()
        self._columns = frozenset(intake.contents.ring.layout.columns)
        self._run: LiveRun | None = None
        self._room = _MIN_ROOM
        self._has_ended = False
        # Who samples may do so in another thread, such as one that draws ahead, and puts what was
        # appended into the ring. Taken last, after the view's.
        self._lock = threading.Lock()

    def append(
        self,
        observation: Any,
        action: Any,
        reward: float,
        terminated: bool = False,
        truncated: bool = False,
        *,
        behavior_log_prob: float = math.nan,
        action_mask: Any = None,
        final_observation: Any = None,
        columns: Mapping[str, Any] = _NO_COLUMNS,
    ) -> None:
        """Append one step: what was observed, the action on it, and what that led to.

        Args:
            observation: [*obs], a mapping for Dict spaces; copied.
            action: [*act]; copied.
            reward: in the environment's units.
            terminated: the task ended with this step.
            truncated: something else cut the episode off after this step.
            behavior_log_prob: ln of the acting policy's probability (density) of the action.
            action_mask: bool [A], where the dataset has masks: the actions that were allowed.
            final_observation: what was observed after this step, where it is the last one.
            columns: further columns that the view keeps, by name.

        Shapes and dtypes are checked when a block is packed: at the next sample, or after 256
        steps. Raises: EpisodeInvalidError, naming the field and the step, which is then left out
        with all that was not packed; ConfigInvalidError after an end. Cost: about 1.5 us (obs 17,
        act 6).
        """
        if self._has_ended:
            raise ConfigInvalidError(
                f"stream of {self._name!r}: found a step after its end, expected none. Make a "
                "stream for the next episode."
            )
        observation, action = _copy_value(observation), _copy_value(action)
        with self._lock:
            steps = self._steps
            if columns or steps.columns:
                self._add_columns(columns)
            if action_mask is not None or steps.masks:
                self._add_mask(action_mask)
            steps.observations.append(observation)
            steps.actions.append(action)
            steps.rewards.append(reward)
            steps.log_probs.append(behavior_log_prob)
            if terminated or truncated or final_observation is not None:
                self._end(terminated, truncated, final_observation)
                is_full = True
            else:
                is_full = len(steps.actions) > _BLOCK_STEPS
        if is_full:
            self._intake.flush(self)
            if self._has_ended:
                self._intake.forget(self)

    def close(self) -> None:
        """Append no more: the last step stays without a successor, if it has none yet."""
        self._has_ended = True
        self._intake.flush(self, last=True)
        self._intake.forget(self)

    def put(self, contents: LiveContents, *, last: bool) -> None:
        """Pack what can be sampled now and put it into the ring. Raises: EpisodeInvalidError."""
        with self._lock:
            steps, first_step = self._take_ready(last=last)
        if not len(steps):
            return
        block = pack_steps(contents.ring.layout, steps, self._digest, first_step)
        if self._run is None or not contents.extend(self._run, block):
            if self._run is not None:
                contents.release_room(self._run)
            self._room = min(2 * self._room, _BLOCK_STEPS)
            self._run = contents.append(block, self._room)
        ends = last or steps.has_final or steps.terminated or steps.truncated
        if self._run is not None and ends:
            contents.release_room(self._run)
            self._run = None

    @property
    def has_pending(self) -> bool:
        """Whether some step can be sampled that is not yet in the ring."""
        return len(self._steps) > 1

    def _take_ready(self, *, last: bool) -> tuple[PendingSteps, int]:
        """Take out the steps whose successors are known, with `last` all; and the first's number.

        The one without a successor stays.
        """
        steps, first_step = self._steps, self._next_step
        open_end = not (steps.terminated or steps.truncated or steps.has_final)
        num = len(steps) - int(open_end and not last)
        self._steps = rest = PendingSteps()
        if open_end and not last:
            rest.observations = steps.observations[num:]
            for name in ("actions", "rewards", "log_probs", "masks", "columns"):
                values = getattr(steps, name)
                setattr(rest, name, values[num:])
                del values[num:]
        elif not steps.has_final:
            steps.observations.append(None)
        self._next_step = first_step + num
        return steps, first_step

    def _end(self, terminated: bool, truncated: bool, final_observation: Any) -> None:
        steps = self._steps
        steps.terminated, steps.truncated = bool(terminated), bool(truncated)
        if final_observation is not None:
            steps.observations.append(_copy_value(final_observation))
            steps.has_final = True
        self._has_ended = steps.terminated or steps.truncated

    def _add_mask(self, mask: Any) -> None:
        # Of the steps before, none had one.
        missing = len(self._steps) - len(self._steps.masks)
        self._steps.masks += [None] * missing
        self._steps.masks.append(None if mask is None else np.array(mask))

    def _add_columns(self, columns: Mapping[str, Any]) -> None:
        if not self._columns.issuperset(columns):
            raise EpisodeInvalidError(
                f"stream of {self._name!r}: found columns {', '.join(columns)}, expected some of "
                f"{', '.join(self._columns) or 'none'}. Follow with columns= that names them."
            )
        missing = len(self._steps) - len(self._steps.columns)
        self._steps.columns += [_NO_COLUMNS] * missing
        self._steps.columns.append(dict(columns))


class StreamIntake:
    """The streams of a view, and when their steps go into the ring."""

    def __init__(
        self, contents: LiveContents, lock: threading.RLock, check: Callable[[], None]
    ) -> None:
        """Take where steps go and who else puts them there; `check` raises what went wrong."""
        self.contents = contents
        self._lock = lock
        self._check = check
        self._streams: dict[Stream, None] = {}

    def add(self, stream: Stream) -> None:
        """Keep a stream, until it ends."""
        self._streams[stream] = None

    def forget(self, stream: Stream) -> None:
        """Keep it no longer."""
        self._streams.pop(stream, None)

    def refresh(self, *, wait: bool = False) -> None:
        """Put the appended steps into the ring, unless another thread is writing to it.

        They then come with the next draw; `wait` for that thread where there is nothing else to
        draw. Raises: EpisodeInvalidError, and what the thread that follows has met.
        """
        self._check()
        if not self._streams or not self._lock.acquire(blocking=wait):
            return
        try:
            for stream in list(self._streams):
                if stream.has_pending:
                    stream.put(self.contents, last=False)
        finally:
            self._lock.release()

    def flush(self, stream: Stream, *, last: bool = False) -> None:
        """Put a stream's steps into the ring now."""
        with self._lock:
            stream.put(self.contents, last=last)


def _copy_value(value: Any) -> Any:
    """Return what no environment writes to any more."""
    if type(value) is np.ndarray:
        return value.copy()
    if isinstance(value, Mapping):
        return {key: _copy_value(sub) for key, sub in value.items()}
    if isinstance(value, tuple | list):
        return [_copy_value(sub) for sub in value]
    return value
