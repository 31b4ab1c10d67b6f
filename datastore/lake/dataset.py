"""Dataset: a named table of steps. Ingest, rollout and served sessions all write through it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from replaylake.datastore.episodes.encoding import Encoding
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.inference import infer_spec
from replaylake.datastore.episodes.rows import encode
from replaylake.datastore.episodes.schema import (
    AGENT_ID,
    EPISODE_ID,
    SOURCE_EPISODE_ID,
    STANDARD_COLUMNS,
    TIMESTAMP_TYPE,
    DatasetSpec,
    arrow_schema,
    check_names,
    vector_type,
    widen_type,
)
from replaylake.datastore.episodes.spaces import Space
from replaylake.datastore.episodes.validation import validate_all
from replaylake.datastore.errors import (
    AlreadyExistsError,
    EpisodeInvalidError,
    NotFoundError,
    SchemaMismatchError,
)
from replaylake.datastore.lake.commit import (
    Commit,
    DropCounts,
    EncodedEpisodes,
    WrittenEpisodes,
    commit_counts,
)
from replaylake.datastore.lake.episode_writer import EpisodeWriter
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.names import check_dataset_name, new_ulid
from replaylake.datastore.replay.live.live_view import LiveView, Since
from replaylake.datastore.storage.log.commit_file import transaction_id
from replaylake.datastore.storage.log.state import LogState
from replaylake.datastore.storage.storage import Storage
from replaylake.datastore.storage.table.table import Table, TableCommit
from replaylake.datastore.storage.table.table_schema import read_configuration, table_schema

# Rows that the door of `ingest` refused: `<dataset>/_rejected`, which SQL sees as
# `<dataset>.quarantine`.
REJECTED_SCHEMA: Final = pa.schema(
    [
        pa.field(EPISODE_ID, pa.string(), nullable=False),
        pa.field(AGENT_ID, pa.string(), nullable=False),
        pa.field(SOURCE_EPISODE_ID, pa.string(), nullable=False),
        pa.field("row_number", pa.int64(), nullable=False),
        pa.field("file", pa.string()),
        pa.field("file_row", pa.int64()),
        pa.field("checks", pa.list_(pa.string()), nullable=False),
        pa.field("reasons", pa.list_(pa.string()), nullable=False),
        pa.field("row", pa.string()),
        # JSON of ours to theirs: the columns of `row` that are fields of ours, where that is known.
        pa.field("mapping", pa.string()),
        pa.field("producer", pa.string(), nullable=False),
        pa.field("ingested_at", TIMESTAMP_TYPE, nullable=False),
    ]
)


class Dataset:
    """A handle on one dataset of a lake, which need not exist yet.

    Raises: InvalidNameError if SQL could not say the name unquoted.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        self.name = check_dataset_name(name)
        self._storage = storage
        self.table = Table(storage, name)  # what maintenance works on
        self._decisions = Table(storage, f"{name}/_decisions")
        self._rewards = Table(storage, f"{name}/_rewards")
        self._received = Table(storage, f"{name}/_received")
        self._rejected = Table(storage, f"{name}/_rejected")

    def __repr__(self) -> str:
        return f"Dataset({self.url!r})"

    @property
    def path(self) -> Path:
        """The folder of the Delta table.

        Raises: NotFoundError where the lake is on an object store.
        """
        folder = self._storage.local_folder(self.name)
        if folder is None:
            raise NotFoundError(
                f"dataset {self.name!r}: found no folder of this machine, as the lake is at "
                f"{self._storage.url}, expected one. Use `url`."
            )
        return folder

    @property
    def url(self) -> str:
        """What other engines open as a Delta table: a folder, or such as s3://bucket/lake/name."""
        return f"{self._storage.url}/{self.name}"

    @property
    def decisions(self) -> Table:
        """Decisions served with `--log-to` this dataset; a table that is only appended to."""
        return self._decisions

    @property
    def rewards(self) -> Table:
        """Rewards fed back for those decisions; a table that is only appended to."""
        return self._rewards

    @property
    def received(self) -> Table:
        """Steps that were acted elsewhere and sent to a server; a table only appended to."""
        return self._received

    @property
    def rejected(self) -> Table:
        """Rows of logs that the door of `ingest` refused; SQL's `quarantine`."""
        return self._rejected

    def tables(self) -> list[Table]:
        """Return the tables of this dataset that there are, its steps first."""
        others = (self._decisions, self._rewards, self._received, self._rejected)
        return [self.table, *(table for table in others if table.exists())]

    @property
    def spec(self) -> DatasetSpec:
        """Spaces and further columns at the newest version. Raises: NotFoundError."""
        self._check_exists()
        return _read_spec(self.table.log.newest())

    def exists(self) -> bool:
        """Whether the dataset has been created."""
        return self.table.exists()

    def create(
        self,
        observation_space: Space,
        action_space: Space,
        *,
        mask_size: int | None = None,
        extras: Mapping[str, pa.DataType] | None = None,
        rewards_optional: bool = False,
        encoding: Encoding | None = None,
    ) -> None:
        """Fix the spaces and commit version 0.

        With `rewards_optional` a step's reward may be unknown: NaN in an episode, NULL in SQL.
        `encoding` says what observations' elements are and what actions are called.
        Raises: AlreadyExistsError, SchemaMismatchError.
        """
        columns = {name: widen_type(kind, name) for name, kind in (extras or {}).items()}
        spec = DatasetSpec(
            observation_space, action_space, mask_size, columns, rewards_optional, encoding
        )
        self.table.create(arrow_schema(spec), spec.configuration())

    def add_vectors(self, name: str, size: int) -> None:
        """Add a further column of float32 [size] a step, NULL in those that there are.

        For readers that ask for it before the first episode with it is written. Commits nothing
        where it is there. Raises: NotFoundError; SchemaMismatchError where it is there and is
        something else.
        """
        self._check_exists()
        check_names([name])
        self.table.extend(pa.schema({name: vector_type(pa.float32(), size)}))

    def append(
        self,
        episodes: Iterable[Episode],
        *,
        producer: str | None = None,
        sequence: int | None = None,
        info: Mapping[str, Any] | None = None,
        spec: DatasetSpec | None = None,
        drops: DropCounts | None = None,
    ) -> Commit:
        """Check and commit episodes as one version: all of them, durably, or none.

        Where the dataset does not exist it is created with `spec`, by default the spaces inferred
        from these episodes, and only once they all passed: episodes that are refused create
        nothing. The same (producer, sequence) again adds nothing. `drops` is what the producer
        made beside them since its last commit, for the commit's info.

        Raises: EpisodeInvalidError with the first episode that does not fit, SchemaMismatchError,
        StorageError.
        """
        episodes = list(episodes)
        if not episodes:
            raise EpisodeInvalidError("append: found no episodes, expected at least one.")
        if (producer is None) != (sequence is None):
            raise EpisodeInvalidError(
                "append: found only one of producer and sequence, expected both or neither: "
                "together they make a repeated append add nothing."
            )
        producer, sequence = producer or f"append/{new_ulid()}", sequence or 0
        # One look at the log for all that is asked of it: on an object store each is a round trip.
        state = self.table.log.newest() if self.table.exists() else LogState()
        if (version := state.transactions.get(transaction_id(producer, sequence))) is not None:
            return Commit(version, True, 0, 0, 0, 0)
        is_new = state.metadata is None
        known = (spec or infer_spec(episodes)) if is_new else _read_spec(state)
        rows = self._rows(episodes, known)
        if is_new:
            rows = self._create_for(known, rows, episodes)
        commit = self.table.commit(
            [self.table.write(rows)],
            producer=producer,
            sequence=sequence,
            info={
                **commit_counts(len(episodes), rows.num_rows, drops or DropCounts()),
                **(info or {}),
            },
        )
        return _to_commit(commit, len(episodes))

    def check(self, episodes: Sequence[Episode]) -> None:
        """Check episodes as `append` would, and write nothing. Raises: as append."""
        self._rows(episodes, self.spec if self.exists() else infer_spec(episodes))

    def encode(self, episodes: Sequence[Episode]) -> EncodedEpisodes:
        """Check episodes and lay them out as rows, for `write`.

        Raises: EpisodeInvalidError, SchemaMismatchError; NotFoundError if the dataset does not
        exist.
        """
        return EncodedEpisodes(len(episodes), self._rows(episodes, self.spec))

    def write(self, episodes: Sequence[Episode] | EncodedEpisodes) -> WrittenEpisodes:
        """Check episodes and write them durably, for `commit` to make readable.

        Rollout workers write; their run's one committer commits. Raises: as append; NotFoundError
        if the dataset does not exist.
        """
        ready = episodes if isinstance(episodes, EncodedEpisodes) else self.encode(episodes)
        return WrittenEpisodes(ready.num_episodes, self.table.write(ready.rows))

    def commit(
        self,
        written: Sequence[WrittenEpisodes],
        *,
        producer: str,
        sequence: int,
        info: Mapping[str, Any] | None = None,
    ) -> Commit:
        """Commit written episodes as one version: all of them, durably, or none.

        The same (producer, sequence) again adds nothing. Raises: SchemaMismatchError, StorageError.
        """
        num_episodes = sum(part.num_episodes for part in written)
        num_steps = sum(part.num_steps for part in written)
        commit = self.table.commit(
            [part.rows for part in written],
            producer=producer,
            sequence=sequence,
            info={**commit_counts(num_episodes, num_steps, DropCounts()), **(info or {})},
        )
        return _to_commit(commit, num_episodes)

    def account(
        self,
        *,
        producer: str,
        sequence: int,
        drops: DropCounts,
        info: Mapping[str, Any] | None = None,
    ) -> Commit:
        """Commit no rows, but what a producer made and did not commit. Raises: NotFoundError."""
        commit = self.table.commit(
            [],
            producer=producer,
            sequence=sequence,
            operation="ACCOUNT",
            info={**commit_counts(0, 0, drops), **(info or {})},
        )
        return _to_commit(commit, 0)

    def find_commit(self, producer: str, sequence: int) -> int | None:
        """Return the version that holds a (producer, sequence), or None."""
        return self.table.find_commit(producer, sequence)

    def next_sequence(self, producer: str) -> int:
        """Return the sequence after the highest that this producer has committed; 0 if none."""
        return self.table.next_sequence(producer)

    def writer(
        self,
        *,
        producer: str | None = None,
        flush_steps: int = 131_072,
        flush_bytes: int = 128 << 20,
        flush_interval_s: float | None = None,
    ) -> EpisodeWriter:
        """Return a buffering writer; use it as a context manager."""
        return EpisodeWriter(self, producer, flush_steps, flush_bytes, flush_interval_s)

    def snapshot(self, version: int | None = None) -> Snapshot:
        """Pin a version, the newest by default. Raises: NotFoundError."""
        self._check_exists()
        newest = self.table.snapshot()
        if version is not None and not 0 <= version <= newest.version:
            raise NotFoundError(
                f"dataset {self.name!r}: found no version {version}, expected "
                f"0..{newest.version}. `replaylake history {self.name}` lists them."
            )
        table = newest if version in (None, newest.version) else self.table.snapshot(version)
        spec = DatasetSpec.from_table(table.configuration, table.schema)
        return Snapshot(self.name, spec, table)

    def follow(
        self,
        *,
        max_steps: int = 1_000_000,
        columns: Sequence[str] = (),
        float64: bool = False,
        frame_stack: int = 1,
        where_steps: str | None = None,
        since: Since = "start",
        without_producers: Collection[str] = (),
    ) -> LiveView:
        """Return a replay view of the newest steps, which follows what is appended from now on.

        Args:
            max_steps: beyond these the oldest steps fall out. Memory: 1.4 records a step.
            columns: further columns to keep with each step.
            float64: keep what is stored as float64, instead of decoding it to float32.
            frame_stack: how many consecutive observations a sampled one is stacked of.
            where_steps: SQL condition over `steps`; items may start at these steps alone.
            since: "start" for the newest steps that there are, or a version: what it holds stays
                out, and later commits come in.
            without_producers: what these append from now on is not read, as it comes by the view's
                `put`; what others delete or label of it later shows all the same.

        Raises: NotFoundError, ShardCorruptError, SpaceUnsupportedError, QueryRefusedError,
        QueryError, ConfigInvalidError.
        """
        self._check_exists()
        return LiveView(
            self.table,
            max_steps=max_steps,
            columns=columns,
            float64=float64,
            frame_stack=frame_stack,
            where_steps=where_steps,
            since=since,
            without_producers=without_producers,
        )

    def history(self) -> list[dict[str, Any]]:
        """Return each version's commit: version, timestamp (ms), operation, producer, counts."""
        return self.table.history()

    def commit_info(self, version: int) -> dict[str, Any]:
        """Return one version's commit, as `history` has it. Raises: NotFoundError."""
        return self.table.commit_info(version)

    def _check_exists(self) -> None:
        if not self.table.exists():
            raise NotFoundError(
                f"dataset {self.name!r}: not in this lake. "
                "`replaylake list` names those that are; `replaylake ingest` makes one."
            )

    def _rows(self, episodes: Sequence[Episode], spec: DatasetSpec) -> pa.Table:
        try:
            ready = validate_all(
                episodes,
                spec.observation_space,
                spec.action_space,
                rewards_optional=spec.rewards_optional,
            )
            return encode(ready, spec)
        except SchemaMismatchError as error:
            raise SchemaMismatchError(f"dataset {self.name!r}: {error}") from error

    def _create_for(
        self, spec: DatasetSpec, rows: pa.Table, episodes: Sequence[Episode]
    ) -> pa.Table:
        """Create the dataset for rows that were checked, and return those that it takes."""
        extras = {f.name: f.type for f in rows.schema if f.name not in STANDARD_COLUMNS}
        try:
            self.create(
                spec.observation_space,
                spec.action_space,
                mask_size=spec.mask_size,
                extras=extras,
                rewards_optional=spec.rewards_optional,
                encoding=spec.encoding,
            )
        except AlreadyExistsError:
            # Another writer was first, perhaps with other spaces: what counts are its own.
            return self._rows(episodes, self.spec)
        return rows


def _read_spec(state: LogState) -> DatasetSpec:
    # Not through a snapshot: that sorts every file of the table.
    return DatasetSpec.from_table(read_configuration(state), table_schema(state))


def _to_commit(commit: TableCommit, num_episodes: int) -> Commit:
    return Commit(
        commit.version,
        commit.already_present,
        0 if commit.already_present else num_episodes,
        commit.num_rows,
        commit.num_shards,
        commit.num_bytes,
    )


def new_episode_id(producer: str) -> str:
    """Return `<producer>/<ulid>`."""
    return f"{producer}/{new_ulid()}"
