"""Accounting: what became of everything that a producer made, told in each commit's info.

In each commit, and so in any sum over them: produced = committed + rejected + already present.
Episodes count pieces where one is written in pieces; a piece of which only a part was new is
committed as an episode, and its steps are told apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from replaylake.datastore.episodes.episode import Episode


@dataclass(frozen=True)
class LeftOut:
    """What a producer made and did not commit, since the commit before: refused, or there already.

    Counts of episodes (or pieces) and of their steps.
    """

    num_rejected: int = 0
    num_rejected_steps: int = 0
    num_already_present: int = 0
    num_already_present_steps: int = 0

    def __add__(self, other: LeftOut) -> LeftOut:
        return LeftOut(
            self.num_rejected + other.num_rejected,
            self.num_rejected_steps + other.num_rejected_steps,
            self.num_already_present + other.num_already_present,
            self.num_already_present_steps + other.num_already_present_steps,
        )

    def __sub__(self, other: LeftOut) -> LeftOut:
        return LeftOut(
            self.num_rejected - other.num_rejected,
            self.num_rejected_steps - other.num_rejected_steps,
            self.num_already_present - other.num_already_present,
            self.num_already_present_steps - other.num_already_present_steps,
        )

    def __bool__(self) -> bool:
        return self != LeftOut()


def rejected(episodes: Iterable[Episode]) -> LeftOut:
    """Count episodes as rejected."""
    sizes = [_num_steps(episode) for episode in episodes]
    return LeftOut(num_rejected=len(sizes), num_rejected_steps=sum(sizes))


def commit_counts(num_episodes: int, num_steps: int, left_out: LeftOut) -> dict[str, int]:
    """Return the entries of a commit's info that account for what a producer made."""
    return {
        "num_episodes": num_episodes,
        "num_steps": num_steps,
        "num_produced": num_episodes + left_out.num_rejected + left_out.num_already_present,
        "num_rejected": left_out.num_rejected,
        "num_already_present": left_out.num_already_present,
        "num_produced_steps": num_steps
        + left_out.num_rejected_steps
        + left_out.num_already_present_steps,
        "num_rejected_steps": left_out.num_rejected_steps,
        "num_already_present_steps": left_out.num_already_present_steps,
    }


def _num_steps(episode: Episode) -> int:
    try:
        return len(episode)
    except TypeError:  # what was refused may not even have rewards
        return 0
