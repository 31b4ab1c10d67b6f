"""The result of an append, and the counts by which each commit accounts for its producer.

In each commit, and so in any sum over them: produced = committed + rejected + already present.
Episodes count pieces where one is written in pieces; a piece of which only a part was new is
committed as an episode, and its steps are counted apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.storage.table.table import WrittenRows


@dataclass(frozen=True)
class Commit:
    """Result of an append; the counts are 0 when (producer, sequence) was already present."""

    version: int
    already_present: bool
    num_episodes: int
    num_steps: int
    num_shards: int
    num_bytes: int


@dataclass(frozen=True)
class EncodedEpisodes:
    """Episodes that were checked, as the rows that a dataset has of them."""

    num_episodes: int
    rows: pa.Table


@dataclass(frozen=True)
class WrittenEpisodes:
    """Whole episodes in durable shards, not committed yet; may be sent to another process."""

    num_episodes: int
    rows: WrittenRows

    @property
    def num_steps(self) -> int:
        """Steps of all of them."""
        return self.rows.num_rows

    @property
    def num_bytes(self) -> int:
        """Bytes of the shards."""
        return sum(entry.size_bytes for entry in self.rows.entries)


@dataclass(frozen=True)
class DropCounts:
    """What a producer made and did not commit since its previous commit: rejected or present.

    Counts of episodes (or pieces) and of their steps.
    """

    num_rejected: int = 0
    num_rejected_steps: int = 0
    num_already_present: int = 0
    num_already_present_steps: int = 0

    def __add__(self, other: DropCounts) -> DropCounts:
        return DropCounts(
            self.num_rejected + other.num_rejected,
            self.num_rejected_steps + other.num_rejected_steps,
            self.num_already_present + other.num_already_present,
            self.num_already_present_steps + other.num_already_present_steps,
        )

    def __sub__(self, other: DropCounts) -> DropCounts:
        return DropCounts(
            self.num_rejected - other.num_rejected,
            self.num_rejected_steps - other.num_rejected_steps,
            self.num_already_present - other.num_already_present,
            self.num_already_present_steps - other.num_already_present_steps,
        )

    def __bool__(self) -> bool:
        return self != DropCounts()


class Appendable(Protocol):
    """The operations of a dataset that an EpisodeWriter needs."""

    @property
    def spec(self) -> DatasetSpec: ...

    def exists(self) -> bool: ...

    def check(self, episodes: Sequence[Episode]) -> None: ...

    def append(
        self,
        episodes: Iterable[Episode],
        *,
        producer: str | None = None,
        sequence: int | None = None,
        info: Mapping[str, Any] | None = None,
        drops: DropCounts | None = None,
    ) -> Commit: ...

    def account(
        self,
        *,
        producer: str,
        sequence: int,
        drops: DropCounts,
        info: Mapping[str, Any] | None = None,
    ) -> Commit: ...

    def snapshot(self) -> Snapshot: ...

    def next_sequence(self, producer: str) -> int: ...

    def commit_info(self, version: int) -> dict[str, Any]: ...


def count_rejected(episodes: Iterable[Episode]) -> DropCounts:
    """Count episodes as rejected."""
    sizes = [_count_steps(episode) for episode in episodes]
    return DropCounts(num_rejected=len(sizes), num_rejected_steps=sum(sizes))


def commit_counts(num_episodes: int, num_steps: int, drops: DropCounts) -> dict[str, int]:
    """Return the entries of a commit's info that account for what a producer made."""
    return {
        "num_episodes": num_episodes,
        "num_steps": num_steps,
        "num_produced": num_episodes + drops.num_rejected + drops.num_already_present,
        "num_rejected": drops.num_rejected,
        "num_already_present": drops.num_already_present,
        "num_produced_steps": num_steps
        + drops.num_rejected_steps
        + drops.num_already_present_steps,
        "num_rejected_steps": drops.num_rejected_steps,
        "num_already_present_steps": drops.num_already_present_steps,
    }


def _count_steps(episode: Episode) -> int:
    try:
        return len(episode)
    except TypeError:  # what was refused may not even have rewards
        return 0
