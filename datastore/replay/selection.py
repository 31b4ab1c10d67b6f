"""Selection: what a view was made from, as a policy's lineage keeps it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from replaylake.datastore.replay.records import Packed
from replaylake.datastore.replay.scans import content_hash
from replaylake.datastore.replay.view_query import ViewQuery
from replaylake.datastore.storage.table.table import TableSnapshot


@dataclass(frozen=True)
class Selection:
    """What some steps of a view were selected and decoded by: enough to do it again.

    where, reward and where_steps are SQL in DuckDB's own spelling, or None. num_steps: of the
    selected episodes, also where where_steps lets no sample start. content_hash: see
    `scans.content_hash`. The further fields came later: lineage of older policies lacks them, and
    they were then as they are by default here.
    """

    dataset: str
    version: int
    where: str | None
    reward: str | None
    num_episodes: int
    num_steps: int
    content_hash: str
    where_steps: str | None = None
    columns: tuple[str, ...] = ()
    float64: bool = False
    frame_stack: int = 1


@dataclass(frozen=True)
class Origin:
    """The snapshot and query behind some steps of a view: packed.steps[first_start:last_start].

    snapshot: None in a process that the view was sent to. shard_hashes: sha256 of each shard.
    """

    dataset: str
    version: int
    query: ViewQuery
    shard_hashes: tuple[str, ...]
    snapshot: TableSnapshot | None
    num_episodes: int
    num_steps: int
    first_start: int
    last_start: int

    @property
    def name(self) -> str:
        """Such as cartpole@3."""
        return f"{self.dataset}@{self.version}"

    def shift(self, num_before: int) -> Origin:
        """Return the origin of the same steps behind others."""
        first, last = self.first_start + num_before, self.last_start + num_before
        return replace(self, first_start=first, last_start=last)

    def without_snapshot(self) -> Origin:
        """Return it for another process: what reads the shards may hold connections."""
        return replace(self, snapshot=None)

    def selection(self, packed: Packed, known_hash: str | None) -> Selection:
        """Return what lineage keeps. Cost: a pass over the row keys where the hash is not known."""
        query = self.query.canonical()
        return Selection(
            dataset=self.dataset,
            version=self.version,
            where=query.where,
            reward=query.reward,
            num_episodes=self.num_episodes,
            num_steps=self.num_steps,
            content_hash=known_hash
            or content_hash(
                self.shard_hashes,
                query.where,
                query.reward,
                query.where_steps,
                packed.records,
                packed.steps[self.first_start : self.last_start],
            ),
            where_steps=query.where_steps,
            columns=query.columns,
            float64=query.float64,
            frame_stack=query.frame_stack,
        )
