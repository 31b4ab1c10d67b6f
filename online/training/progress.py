"""Progress: where an online run is, as whoever watches it is told a few times a second."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OnlineProgress:
    """Where a run is: steps collected of all, updates, mean return of the last episodes, or None.

    blocked_reason: why it waits, if it does.
    """

    num_steps: int
    steps: int
    update: int
    num_episodes: int
    mean_return: float | None
    steps_per_s: float
    updates_per_s: float
    blocked_reason: str | None
