"""The result of an append, and the counts by which each commit accounts for its producer.

In each commit, and so in any sum over them: produced = committed + rejected + already present.
Episodes count pieces where one is written in pieces; a piece of which only a part was new is
committed as an episode, and its steps are counted apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Protocol

import pyarrow as pa

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.storage.table.table import WrittenRows


@dataclass(frozen=True)
class KeyCounts:
    """What became of the steps of an append whose keys were in the dataset, or came twice.

    duplicates: left out, as they say nothing new. late_values: left out, and their rewards and late
    columns given to the stored steps. conflicts: in quarantine. replaced: put in the place of the
    stored steps. committed_episodes, present_episodes, conflicting_episodes: all episodes (or
    pieces) of the append, by what became of them; one of which a part was new was committed.
    """

    duplicates: int = 0
    late_values: int = 0
    conflicts: int = 0
    replaced: int = 0
    committed_episodes: int = 0
    present_episodes: int = 0
    conflicting_episodes: int = 0

    def __add__(self, other: KeyCounts) -> KeyCounts:
        return KeyCounts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def present(self) -> int:
        """Steps that were left out, or took the place of stored ones: none was added."""
        return self.duplicates + self.late_values + self.replaced

    def to_json(self) -> dict[str, int]:
        """Return the counts of steps."""
        return {
            "duplicates": self.duplicates,
            "late_values": self.late_values,
            "conflicts": self.conflicts,
            "replaced": self.replaced,
        }

    def __bool__(self) -> bool:
        return bool(self.present or self.conflicts)


@dataclass(frozen=True)
class Commit:
    """Result of an append; the counts are 0 when (producer, sequence) was already present.

    num_deleted_before: episodes that were deleted earlier and so were left out. keys: what became
    of steps whose keys were there. num_quarantined: rows that came into quarantine for it.
    """

    version: int
    already_present: bool
    num_episodes: int
    num_steps: int
    num_shards: int
    num_bytes: int
    num_deleted_before: int = 0
    num_deleted_before_steps: int = 0
    keys: KeyCounts = KeyCounts()
    num_quarantined: int = 0


@dataclass(frozen=True)
class EncodedEpisodes:
    """Episodes that were checked, as the rows that a dataset has of them."""

    num_episodes: int
    rows: pa.Table


@dataclass(frozen=True)
class WrittenEpisodes:
    """Whole episodes in durable shards, not committed yet; may be sent to another process.

    mark: of the tombstones that they were compared with.
    """

    num_episodes: int
    rows: WrittenRows
    mark: str = ""

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


def move_to_rejected(
    counts: Mapping[str, Any], num_episodes: int, num_steps: int
) -> dict[str, Any]:
    """Return a commit's info after some of its episodes turned out to have been deleted before."""
    return {
        **counts,
        "num_episodes": counts["num_episodes"] - num_episodes,
        "num_steps": counts["num_steps"] - num_steps,
        "num_rejected": counts["num_rejected"] + num_episodes,
        "num_rejected_steps": counts["num_rejected_steps"] + num_steps,
        "num_deleted_before": num_episodes,
    }


def _count_steps(episode: Episode) -> int:
    try:
        return len(episode)
    except TypeError:  # what was refused may not even have rewards
        return 0
