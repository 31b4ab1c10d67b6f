"""Dataset: a named table of steps. Ingest, rollout and served sessions all write through it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa

from replaylake.datastore.episode import Episode, checked
from replaylake.datastore.errors import (
    AlreadyExists,
    EpisodeInvalid,
    NotFound,
    ReplayLakeError,
    SchemaMismatch,
)
from replaylake.datastore.inference import infer_spec as infer_spec
from replaylake.datastore.names import check_dataset_name, new_ulid
from replaylake.datastore.rows import encode
from replaylake.datastore.schema import (
    STANDARD_COLUMNS,
    DatasetSpec,
    arrow_schema,
    widened_type,
)
from replaylake.datastore.snapshot import Snapshot
from replaylake.datastore.spaces import Space, num_bytes
from replaylake.datastore.storage import Storage
from replaylake.datastore.table import Commit as TableCommit
from replaylake.datastore.table import Table, WrittenRows


@dataclass(frozen=True)
class Commit:
    """What an append did; the counts are 0 when (producer, sequence) was already present."""

    version: int
    already_present: bool
    num_episodes: int
    num_steps: int
    num_shards: int
    num_bytes: int


@dataclass(frozen=True)
class WrittenEpisodes:
    """Whole episodes in durable shards, not committed yet; may be sent to another process."""

    num_episodes: int
    rows: WrittenRows

    @property
    def num_steps(self) -> int:
        """Steps of all of them."""
        return self.rows.num_rows


class Dataset:
    """A handle on one dataset of a lake, which need not exist yet.

    Raises: NameRefused if SQL could not say the name unquoted.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        self.name = check_dataset_name(name)
        self._storage = storage
        self._table = Table(storage, name)
        self._decisions = Table(storage, f"{name}/_decisions")
        self._rewards = Table(storage, f"{name}/_rewards")

    @property
    def path(self) -> Path:
        """The folder of the Delta table."""
        return self._storage.local(self.name)

    @property
    def decisions(self) -> Table:
        """Decisions served with `--log-to` this dataset; a table that is only appended to."""
        return self._decisions

    @property
    def rewards(self) -> Table:
        """Rewards fed back for those decisions; a table that is only appended to."""
        return self._rewards

    @property
    def spec(self) -> DatasetSpec:
        """Spaces and further columns at the newest version. Raises: NotFound."""
        return self.snapshot().spec

    def exists(self) -> bool:
        """Whether the dataset has been created."""
        return self._table.exists()

    def create(
        self,
        observation_space: Space,
        action_space: Space,
        *,
        mask_size: int | None = None,
        extras: Mapping[str, pa.DataType] | None = None,
    ) -> None:
        """Fix the spaces and commit version 0. Raises: AlreadyExists, SchemaMismatch."""
        kept = {name: widened_type(kind, name) for name, kind in (extras or {}).items()}
        spec = DatasetSpec(observation_space, action_space, mask_size, kept)
        self._table.create(arrow_schema(spec), spec.configuration())

    def append(
        self,
        episodes: Iterable[Episode],
        *,
        producer: str | None = None,
        sequence: int | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> Commit:
        """Check and commit episodes as one version: all of them, durably, or none.

        Creates the dataset with spaces inferred from the episodes where it does not exist; say
        `create` first to state them. The same (producer, sequence) again adds nothing.

        Raises: EpisodeInvalid with the first episode that does not fit, SchemaMismatch,
        StorageFailed.
        """
        episodes = list(episodes)
        if not episodes:
            raise EpisodeInvalid("append: found no episodes, expected at least one.")
        if (producer is None) != (sequence is None):
            raise EpisodeInvalid(
                "append: found only one of producer and sequence, expected both or neither: "
                "together they make a repeated append add nothing."
            )
        producer, sequence = producer or f"append/{new_ulid()}", sequence or 0
        if (version := self.committed(producer, sequence)) is not None:
            return Commit(version, True, 0, 0, 0, 0)
        is_new = not self._table.exists()
        spec = infer_spec(episodes) if is_new else self.spec
        rows = self._rows(episodes, spec)
        if is_new:
            rows = self._created(spec, rows, episodes)
        done = self._table.append(
            rows,
            producer=producer,
            sequence=sequence,
            info={"num_episodes": len(episodes), "num_steps": rows.num_rows, **(info or {})},
        )
        return _counted(done, len(episodes))

    def write(self, episodes: Sequence[Episode]) -> WrittenEpisodes:
        """Check episodes and write them durably, for `commit` to make readable.

        Rollout workers write; their run's one committer commits. Raises: as append; NotFound if
        the dataset does not exist.
        """
        return WrittenEpisodes(len(episodes), self._table.write(self._rows(episodes, self.spec)))

    def commit(
        self,
        written: Sequence[WrittenEpisodes],
        *,
        producer: str,
        sequence: int,
        info: Mapping[str, Any] | None = None,
    ) -> Commit:
        """Commit written episodes as one version: all of them, durably, or none.

        The same (producer, sequence) again adds nothing. Raises: SchemaMismatch, StorageFailed.
        """
        num_episodes = sum(part.num_episodes for part in written)
        num_steps = sum(part.num_steps for part in written)
        done = self._table.commit(
            [part.rows for part in written],
            producer=producer,
            sequence=sequence,
            info={"num_episodes": num_episodes, "num_steps": num_steps, **(info or {})},
        )
        return _counted(done, num_episodes)

    def committed(self, producer: str, sequence: int) -> int | None:
        """Return the version that holds a (producer, sequence), or None."""
        return self._table.committed(producer, sequence)

    def next_sequence(self, producer: str) -> int:
        """Return the sequence after the highest that this producer has committed; 0 if none."""
        return self._table.next_sequence(producer)

    def writer(
        self,
        *,
        producer: str | None = None,
        flush_steps: int = 131_072,
        flush_bytes: int = 256 << 20,
        flush_interval_s: float | None = None,
    ) -> EpisodeWriter:
        """Return a buffering writer; use it as a context manager."""
        return EpisodeWriter(self, producer, flush_steps, flush_bytes, flush_interval_s)

    def snapshot(self, version: int | None = None) -> Snapshot:
        """Pin a version, the newest by default. Raises: NotFound."""
        if not self._table.exists():
            raise NotFound(
                f"dataset {self.name!r}: not in this lake. "
                "`replaylake list` names those that are; `replaylake ingest` makes one."
            )
        try:
            table = self._table.snapshot(version)
        except NotFound as error:
            raise NotFound(f"dataset {self.name!r}: {error}") from error
        spec = DatasetSpec.from_table(table.configuration, table.schema)
        return Snapshot(self.name, spec, table)

    def history(self) -> list[dict[str, Any]]:
        """Return each version's commit: version, timestamp (ms), operation, producer, counts."""
        return self._table.history()

    def _rows(self, episodes: Sequence[Episode], spec: DatasetSpec) -> pa.Table:
        if spec.mask_size is None and any(e.action_masks is not None for e in episodes):
            raise SchemaMismatch(
                f"{self.name}: found action masks, expected none: the dataset was created without. "
                "Ingest into a new dataset, or leave the masks out."
            )
        ready = [checked(e, spec.observation_space, spec.action_space) for e in episodes]
        return encode(ready, spec)

    def _created(self, spec: DatasetSpec, rows: pa.Table, episodes: Sequence[Episode]) -> pa.Table:
        """Create the dataset for rows that were checked, and return those that it takes."""
        extras = {f.name: f.type for f in rows.schema if f.name not in STANDARD_COLUMNS}
        try:
            self.create(
                spec.observation_space,
                spec.action_space,
                mask_size=spec.mask_size,
                extras=extras,
            )
        except AlreadyExists:
            # Another writer was first, perhaps with other spaces: what counts are its own.
            return self._rows(episodes, self.spec)
        return rows


class EpisodeWriter:
    """Buffers episodes and commits them by steps, by bytes of observations or by time.

    Every flush is one commit with the next sequence of this producer, and a flush that is repeated
    after an error adds nothing twice. Leaving the `with` block flushes, also on an exception: what
    was written before it is whole episodes.
    """

    def __init__(
        self,
        dataset: Dataset,
        producer: str | None,
        flush_steps: int,
        flush_bytes: int,
        flush_interval_s: float | None,
    ) -> None:
        self.producer = producer or f"writer/{new_ulid()}"
        self._dataset = dataset
        self._flush_steps = flush_steps
        self._flush_bytes = flush_bytes
        self._flush_interval_s = flush_interval_s
        self._buffer: list[Episode] = []
        self._num_buffered = 0
        self._num_bytes = 0
        self._spec: DatasetSpec | None = None
        self._sequence: int | None = None
        self._flushed_at = time.monotonic()

    def __enter__(self) -> EpisodeWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except ReplayLakeError as failure:
            if error is None:
                raise
            # The error that ended the block says more than what it left behind.
            error.add_note(f"The episodes written before it were not committed: {failure}")

    def write(self, episode: Episode) -> None:
        """Buffer an episode, checked now if the dataset exists. Raises: as Dataset.append."""
        if self._spec is None and self._dataset.exists():
            self._spec = self._dataset.spec
        if self._spec is not None:
            # Spaces are fixed at creation, so those read once hold for the writer's life.
            episode = checked(episode, self._spec.observation_space, self._spec.action_space)
        self._buffer.append(episode)
        self._num_buffered += len(episode)
        self._num_bytes += num_bytes(episode.observations)
        waited = time.monotonic() - self._flushed_at
        due = self._flush_interval_s is not None and waited >= self._flush_interval_s
        full = self._num_buffered >= self._flush_steps or self._num_bytes >= self._flush_bytes
        if due or full:
            self.flush()

    def flush(self) -> Commit | None:
        """Commit what is buffered; None if that is nothing. After an error the buffer is kept."""
        self._flushed_at = time.monotonic()
        if not self._buffer:
            return None
        while True:
            is_retry = self._sequence is not None
            if self._sequence is None:
                self._sequence = self._dataset.next_sequence(self.producer)
            commit = self._dataset.append(
                self._buffer, producer=self.producer, sequence=self._sequence
            )
            # Forgotten only now: an append that failed may have been committed all the same.
            self._sequence = None
            if is_retry or not commit.already_present:
                break
            # Another writer of this name took the sequence first: these rows need one of their own.
        self._buffer = []
        self._num_buffered = self._num_bytes = 0
        return commit

    def close(self) -> None:
        """Commit what is buffered."""
        self.flush()


def _counted(done: TableCommit, num_episodes: int) -> Commit:
    return Commit(
        done.version,
        done.already_present,
        0 if done.already_present else num_episodes,
        done.num_rows,
        done.num_shards,
        done.num_bytes,
    )


def new_episode_id(producer: str) -> str:
    """Return `<producer>/<ulid>`."""
    return f"{producer}/{new_ulid()}"
