"""Pool: the rollout workers of a run, as its driver sees them, in this process or in Ray's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from replaylake.datastore.lake.runs.timings import Timings
from replaylake.online.collecting.behavior_policy import BehaviorPolicies
from replaylake.online.collecting.rollout_batch import RolloutBatch

# What takes longer counts as hung, unless the caller knows better (OnlineConfig.answer_timeout_s):
# a worker that makes an environment or takes a step, a store that is asked to commit.
ANSWER_TIMEOUT_S: Final = 600.0


@dataclass(frozen=True)
class WorkerLost:
    """A worker whose process or node died; its replacement is there, and may be asked.

    reason: one line, for people. open_episodes: ids of episodes of which pieces were handed over
    and whose end never comes.
    """

    worker: int
    reason: str
    open_episodes: tuple[str, ...]


class WorkerPool(Protocol):
    """Rollout workers 0 to size - 1, each of which works for one answer at a time."""

    @property
    def size(self) -> int:
        """How many workers there are."""
        ...

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the user should know of how the workers run, one line each."""
        ...

    def request_steps(self, worker: int, num_steps: int) -> None:
        """Let a worker that owes no answer collect so many steps and hand them over."""
        ...

    def broadcast(self, behavior_policy: BehaviorPolicies) -> None:
        """Let whatever is asked from now on be collected with this policy."""
        ...

    def receive(self, timeout_s: float) -> RolloutBatch | WorkerLost | None:
        """Return the next answer, or None where none comes in time.

        A worker that was lost owes no answer any more: what it was asked for is not asked again.
        Raises: what a worker raised; RolloutError where one dies again and again.
        """
        ...

    def take_timings(self) -> Timings:
        """Return how long workers waited for requests, and messages took, since the last call."""
        ...

    def close(self) -> None:
        """End the workers; what they have not handed over is dropped."""
        ...
