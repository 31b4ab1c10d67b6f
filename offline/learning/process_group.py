"""ProcessGroup: the processes that make each update of one learner together."""

from __future__ import annotations

from typing import Final, Protocol

import torch


class ProcessGroup(Protocol):
    """The processes of one learner; all call `all_reduce` and `broadcast` in the same order."""

    @property
    def rank(self) -> int:
        """Its number, from 0: who has number 0 leads."""
        ...

    @property
    def size(self) -> int:
        """How many they are."""
        ...

    def all_reduce(self, values: torch.Tensor) -> None:
        """Put the sum over all learners in place of each value. Raises: TrainingError."""
        ...

    def broadcast(self, value: float) -> float:
        """Return the leader's value. Raises: TrainingError."""
        ...


class SingleProcessGroup:
    """A group of one process."""

    rank: Final = 0
    size: Final = 1

    def all_reduce(self, values: torch.Tensor) -> None:
        """Leave them as they are."""

    def broadcast(self, value: float) -> float:
        return value


SINGLE_PROCESS: Final = SingleProcessGroup()
# Broadcast by the leader in place of an update if the run had ended before.
ALREADY_FINISHED: Final = -1
