"""Dataset: a named table of steps. Ingest, rollout and served sessions all write through it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from replaylake.datastore.episodes.compatibility import find_spec_mismatch
from replaylake.datastore.episodes.encoding import Encoding
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.episode_columns import EpisodeColumns, as_text_array
from replaylake.datastore.episodes.inference import infer_spec
from replaylake.datastore.episodes.message_media import move_media
from replaylake.datastore.episodes.parents import find_orphans
from replaylake.datastore.episodes.rows import encode
from replaylake.datastore.episodes.schema import (
    EPISODE_ID,
    SCORE_REFERENCE_KEY,
    STANDARD_COLUMNS,
    DatasetSpec,
    UniqueKeys,
    arrow_schema,
    check_names,
    read_unique_keys,
    tokenizer_setting,
    vector_type,
    widen_type,
)
from replaylake.datastore.episodes.score_reference import ScoreReference
from replaylake.datastore.episodes.spaces import Space
from replaylake.datastore.episodes.tokenizer import Tokenizer, find_tokenizer_mismatch
from replaylake.datastore.episodes.tokens import (
    PARENT_STEP,
    count_positive_log_probs,
    has_tokens,
)
from replaylake.datastore.episodes.validation import validate_all
from replaylake.datastore.errors import (
    AlreadyExistsError,
    CommitConflictError,
    ConfigInvalidError,
    EpisodeInvalidError,
    InvalidNameError,
    NotFoundError,
    SchemaMismatchError,
    StorageError,
)
from replaylake.datastore.lake.commit import (
    Commit,
    DropCounts,
    EncodedEpisodes,
    WrittenEpisodes,
    commit_counts,
    move_to_rejected,
)
from replaylake.datastore.lake.episode_writer import EpisodeWriter
from replaylake.datastore.lake.rejected import REJECTED_SCHEMA as REJECTED_SCHEMA
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.lake.stored_tokens import (
    check_vocabulary,
    find_stored_steps,
    read_step_tree,
)
from replaylake.datastore.lake.tombstones import open_tombstones
from replaylake.datastore.lake.unique_keys import (
    ON_CONFLICT,
    Locate,
    OnConflict,
    apply_changes,
    check_key_types,
    check_keys_known,
    find_doubled,
    find_episode_starts,
    find_null,
    hash_rows,
    parse_unique,
    quarantine_conflicts,
    resolve,
)
from replaylake.datastore.names import check_dataset_name, new_ulid
from replaylake.datastore.query.views import DATASET_VIEWS, LAKE_VIEWS
from replaylake.datastore.replay.live.live_view import LiveView, Since
from replaylake.datastore.storage.log.commit_file import Intent, transaction_id
from replaylake.datastore.storage.log.state import LogState
from replaylake.datastore.storage.spans import span
from replaylake.datastore.storage.storage import Storage
from replaylake.datastore.storage.table.delta_schema import with_field_ids
from replaylake.datastore.storage.table.key_index import KeyIndex
from replaylake.datastore.storage.table.shard import blob_of, read_shard
from replaylake.datastore.storage.table.table import (
    Table,
    TableCommit,
    TableSnapshot,
    WrittenRows,
)
from replaylake.datastore.storage.table.table_schema import (
    conform,
    read_configuration,
    table_schema,
)


class Dataset:
    """A handle on a dataset of a lake; the dataset may not exist yet.

    Raises: InvalidNameError if SQL would have to quote the name.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        self.name = check_dataset_name(name)
        self._storage = storage
        self.table = Table(storage, name)  # what maintenance works on
        self._decisions = Table(storage, f"{name}/_decisions")
        self._rewards = Table(storage, f"{name}/_rewards")
        self._received = Table(storage, f"{name}/_received")
        self._rejected = Table(storage, f"{name}/_rejected")
        self._spans = Table(storage, f"{name}/_spans")
        self.tombstones = open_tombstones(storage, name)  # whose rows were deleted
        self._index: KeyIndex | None = None

    def __repr__(self) -> str:
        return f"Dataset({self.url!r})"

    @property
    def path(self) -> Path:
        """The directory of the Delta table.

        Raises: NotFoundError if the lake is on an object store.
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
        """Path or URL of the Delta table for other engines, for example s3://bucket/lake/name."""
        return f"{self._storage.url}/{self.name}"

    @property
    def decisions(self) -> Table:
        """The append-only table of decisions that servers logged to this dataset."""
        return self._decisions

    @property
    def rewards(self) -> Table:
        """The append-only table of rewards reported for those decisions."""
        return self._rewards

    @property
    def received(self) -> Table:
        """The append-only table of steps that clients sent to a server."""
        return self._received

    @property
    def rejected(self) -> Table:
        """The table of log rows that `ingest` rejected; the view `quarantine` in SQL."""
        return self._rejected

    @property
    def spans(self) -> Table:
        """The append-only table of spans of OpenTelemetry that clients sent to a server."""
        return self._spans

    def tables(self) -> list[Table]:
        """Return the existing tables of this dataset, its steps first."""
        others = (self._decisions, self._rewards, self._received, self._rejected, self._spans)
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
        score_reference: ScoreReference | None = None,
        unique: UniqueKeys | Sequence[str] | None = None,
        env_spec: str | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Set the spaces and commit version 0.

        With `rewards_optional`, the reward of a step may be unknown: NaN in an episode, NULL in
        SQL. `encoding` defines the meaning of the observations' elements and the names of the
        actions, `score_reference` the returns by which scores are normalized. `unique` names the
        columns, among `extras` and `KEY_COLUMNS`, whose values no two rows share. `env_spec` is
        Gymnasium's JSON of the environment's specification. `tokenizer` defines the meaning of the
        ids in token columns.
        Raises: AlreadyExistsError, SchemaMismatchError, ConfigInvalidError.
        """
        columns = {name: widen_type(kind, name) for name, kind in (extras or {}).items()}
        keys = None if unique is None else parse_unique(unique)
        spec = DatasetSpec(
            observation_space,
            action_space,
            mask_size,
            columns,
            rewards_optional,
            encoding,
            score_reference,
            keys,
            env_spec,
            tokenizer,
        )
        if keys is not None:
            check_key_types(keys, arrow_schema(spec))
        self.create_table(arrow_schema(spec), spec.configuration())

    def create_table(self, schema: pa.Schema, configuration: Mapping[str, str]) -> None:
        """Commit version 0. Raises: InvalidNameError for the name of a view, AlreadyExistsError."""
        # Only here: a dataset that has such a name already stays open to its owner.
        if self.name in (*LAKE_VIEWS, *DATASET_VIEWS):
            raise InvalidNameError(
                f"dataset name: found {self.name!r}, which is a view's name in SQL, expected "
                f"another than {', '.join(sorted((*LAKE_VIEWS, *DATASET_VIEWS)))}. Choose another."
            )
        self.table.create(schema, configuration)

    def set_unique(
        self, columns: UniqueKeys | Sequence[str], *, late: Sequence[str] = ()
    ) -> UniqueKeys:
        """Let no two rows share the values of some columns, now and in whatever is written later.

        The rows that there are are checked first. Of a dataset that has a key only the late
        columns can change. Commits nothing where nothing differs. Raises: NotFoundError;
        ConfigInvalidError for columns that are no key, or not the dataset's; SchemaMismatchError
        naming keys that two rows have. Cost: a scan of the key's columns.
        """
        self._check_exists()
        given = parse_unique(columns, late)
        while True:
            snapshot = self.table.snapshot()
            unique = given
            if (known := read_unique_keys(snapshot.configuration)) is not None:
                if known.columns != given.columns:
                    raise ConfigInvalidError(
                        f"unique: found {', '.join(given.columns)}, expected "
                        f"{', '.join(known.columns)}, by which dataset {self.name!r} is unique "
                        "already. Ingest into a new dataset for another key.",
                        parameter="unique",
                    )
                unique = given if given.late else known
                if unique == known:
                    return known
            check_key_types(unique, snapshot.schema)
            if known is None:
                self._check_distinct(snapshot, unique)
            entry = {
                key: value
                for key, value in replace(self.spec, unique=unique).configuration().items()
                if snapshot.configuration.get(key) != value
            }

            def check(state: LogState, version: int = snapshot.version) -> None:
                if state.version != version:
                    raise _KeysOutdatedError

            try:
                self.table.configure(entry, operation="SET UNIQUE", check=check)
            except _KeysOutdatedError:
                continue
            return unique

    def _check_distinct(self, snapshot: TableSnapshot, unique: UniqueKeys) -> None:
        names = ", ".join(unique.columns)
        if num := find_null(snapshot, unique):
            raise SchemaMismatchError(
                f"dataset {self.name!r}: found {num:,} rows with NULL in {names}, expected a value "
                "in each. Delete them, or ingest into a new dataset."
            )
        if doubled := find_doubled(snapshot, self.key_index(unique), unique):
            raise SchemaMismatchError(
                f"dataset {self.name!r}: found keys that several rows have, such as "
                f"{'; '.join(doubled)}, expected each once to make it unique by {names}. Delete "
                "the episodes that are there twice, or ingest all into a new dataset."
            )

    def key_index(self, unique: UniqueKeys) -> KeyIndex:
        """Return the index of the dataset's keys."""
        if self._index is None or self._index.columns != unique.columns:
            self._index = self.new_key_index(unique)
        return self._index

    def new_key_index(self, unique: UniqueKeys) -> KeyIndex:
        """Return an index that has read nothing yet."""
        return KeyIndex(self._storage, self.name, unique.columns)

    def add_vectors(self, name: str, size: int) -> None:
        """Add a further column of float32 [size] per step, NULL in the existing steps.

        It is meant for readers that use the column before the first episode with it is written. If
        the column exists with the same type, nothing is committed. Raises: NotFoundError;
        SchemaMismatchError if the column exists with another type.
        """
        self._check_exists()
        check_names([name])
        self.table.extend(pa.schema({name: vector_type(pa.float32(), size)}))

    def set_score_reference(self, reference: ScoreReference | None) -> int:
        """Set what returns are normalized by, from a new version on; None for nothing.

        Returns the version; without a difference nothing is committed. Raises: NotFoundError.
        """
        self._check_exists()
        state = self.table.log.newest()
        if _read_spec(state).score_reference == reference:
            return state.version
        producer = f"reference/{new_ulid()}"

        def build(state: LogState) -> Intent:
            assert state.metadata is not None  # it exists
            kept = dict(read_configuration(state))
            kept.pop(SCORE_REFERENCE_KEY, None)
            if reference is not None:
                kept[SCORE_REFERENCE_KEY] = json.dumps(reference.to_json())
            metadata = replace(state.metadata, configuration=kept)
            return Intent(producer, 0, "SET SCORE REFERENCE", metadata=metadata)

        return self.table.log.commit(build).version

    def set_tokenizer(self, tokenizer: Tokenizer) -> int:
        """State the tokenizer of a dataset that states none yet, from a new version on.

        Facts that the dataset's own lacks are added to it. Returns the version; without a
        difference nothing is committed. Raises: NotFoundError; SchemaMismatchError for another
        tokenizer than the dataset's, and for stored ids that its vocabulary does not have. Cost:
        a scan of the token columns, where the size of the vocabulary becomes known.
        """
        self._check_exists()
        while True:
            snapshot = self.snapshot()
            known = snapshot.spec.tokenizer
            stated = tokenizer if known is None else self._join_tokenizer(known, tokenizer)
            if stated == known:
                return snapshot.version
            if known is None or known.vocabulary_size is None:
                check_vocabulary(snapshot, stated)

            def check(state: LogState, version: int = snapshot.version) -> None:
                if state.version != version:
                    raise _KeysOutdatedError

            with suppress(_KeysOutdatedError):
                entry = tokenizer_setting(stated)
                self.table.configure(entry, operation="SET TOKENIZER", check=check)
                return snapshot.version + 1

    def _join_tokenizer(self, known: Tokenizer, given: Tokenizer) -> Tokenizer:
        if (mismatch := find_tokenizer_mismatch(known, given)) is not None:
            raise SchemaMismatchError(
                f"dataset {self.name!r}: {mismatch}, expected its own. Ingest into a new dataset."
            )
        return known.with_facts_of(given)

    def append(
        self,
        episodes: Iterable[Episode],
        *,
        producer: str | None = None,
        sequence: int | None = None,
        info: Mapping[str, Any] | None = None,
        spec: DatasetSpec | None = None,
        drops: DropCounts | None = None,
        readmit: bool = False,
        on_conflict: OnConflict = "set_aside",
    ) -> Commit:
        """Check episodes and commit them as one version: either all of them, durably, or none.

        If the dataset does not exist, it is created with `spec`, by default with the spaces
        inferred from these episodes. It is created only after all of them passed the checks and are
        on the disk. A repeated (producer, sequence) adds nothing. `drops` are the counts of what
        the producer dropped since its last commit, for the commit's info.

        In a dataset with a unique key, rows that the dataset has already are left out, and a late
        value is given to the stored row; the commit counts both. `on_conflict` says what happens to
        other rows with the key of a stored one: `set_aside` puts their episodes into quarantine,
        `replace` puts them in the place of the stored rows, `refuse` raises EpisodeInvalidError and
        commits nothing.

        Episodes that were deleted before, by their id or the id of their subject, are left out and
        counted as rejected in the commit. With `readmit`, they are stored, and later commits may
        contain them too.

        Raises: EpisodeInvalidError with the first invalid episode, SchemaMismatchError,
        StorageError.
        """
        episodes = episodes if isinstance(episodes, EpisodeColumns) else list(episodes)
        if not len(episodes):
            raise EpisodeInvalidError("append: found no episodes, expected at least one.")
        if (producer is None) != (sequence is None):
            raise EpisodeInvalidError(
                "append: found only one of producer and sequence, expected both or neither: "
                "together they make a repeated append add nothing."
            )
        if on_conflict not in ON_CONFLICT:
            raise ConfigInvalidError(
                f"on_conflict: found {on_conflict!r}, expected {' or '.join(ON_CONFLICT)}.",
                parameter="on_conflict",
            )
        producer, sequence = producer or f"append/{new_ulid()}", sequence or 0
        # One look at the log for all that is asked of it: on an object store each is a round trip.
        state = self.table.log.newest() if self.table.exists() else LogState()
        if (version := state.transactions.get(transaction_id(producer, sequence))) is not None:
            return Commit(version, True, 0, 0, 0, 0)
        is_new = state.metadata is None
        known = (spec or infer_spec(episodes)) if is_new else _read_spec(state)
        stated = None if spec is None else spec.tokenizer
        if stated is not None and known.tokenizer is not None:
            self._join_tokenizer(known.tokenizer, stated)
        rows = self._rows(episodes, known)
        gone, mark = self._find_deleted(rows, readmit=readmit)
        rows = _without(rows, gone)
        parts: list[WrittenRows] | None = None
        if is_new and known.unique is None:
            schema = _new_schema(known, rows)
            parts = [self.table.write(rows, schema=schema)] if rows.num_rows else []
            if not self._create_for(known, rows, is_stated=spec is not None):
                # Another writer was first, perhaps with other spaces: what counts are its own.
                self._forget(parts)
                known, parts = self.spec, None
                rows = _without(self._rows(episodes, known), gone)
        num_deleted, num_pieces = _count_deleted(episodes, gone) if gone.any() else (0, 0)
        info = info or {}
        if num_positive := sum(count_positive_log_probs(one.extras) for one in _parts(episodes)):
            info = {**info, "num_positive_log_probs": num_positive}
        # Whoever counts the pieces of an episode as one says so in `info`, or gives columns.
        is_by_piece = "num_episodes" not in info
        if known.unique is not None and isinstance(episodes, EpisodeColumns):
            is_by_piece = False
        deleted = (num_pieces if is_by_piece else num_deleted, int(gone.sum()))
        try:
            if known.unique is not None:
                num_left = len(episodes) - num_pieces
                commit = self._commit_unique(
                    rows,
                    known,
                    num_left if is_by_piece else len(find_episode_starts(rows)),
                    producer=producer,
                    sequence=sequence,
                    info=info,
                    drops=drops,
                    deleted=deleted,
                    on_conflict=on_conflict,
                    locate=_make_locate(episodes, np.flatnonzero(~gone)),
                    is_stated=spec is not None,
                    check=self._check_mark(mark),
                )
            else:
                if parts is None:
                    parts = [self.table.write(rows)] if rows.num_rows else []
                counts: dict[str, Any] = {
                    **commit_counts(len(episodes), len(gone), drops or DropCounts()),
                    **info,
                }
                if gone.any():
                    counts = move_to_rejected(counts, *deleted)
                written = self.table.commit(
                    parts,
                    producer=producer,
                    sequence=sequence,
                    info=counts,
                    check=self._check_mark(mark, _check_without_key),
                )
                commit = _to_commit(written, len(episodes) - num_pieces)
        except (_KeysOutdatedError, _DeletedMeanwhileError):
            self._forget(parts or [])
            return self.append(
                episodes,
                producer=producer,
                sequence=sequence,
                info=info,
                drops=drops,
                readmit=readmit,
                on_conflict=on_conflict,
            )
        if commit.already_present:
            return commit
        return replace(commit, num_deleted_before=deleted[0], num_deleted_before_steps=deleted[1])

    def _commit_unique(
        self, rows: pa.Table, spec: DatasetSpec, num_episodes: int, **named: Any
    ) -> Commit:
        assert spec.unique is not None
        with self.key_index(spec.unique).lock:  # writers in threads take turns
            return self._commit_resolved(rows, spec, num_episodes, **named)

    def _commit_resolved(
        self,
        rows: pa.Table,
        spec: DatasetSpec,
        num_episodes: int,
        *,
        producer: str,
        sequence: int,
        info: Mapping[str, Any],
        drops: DropCounts | None = None,
        deleted: tuple[int, int] = (0, 0),
        on_conflict: OnConflict = "set_aside",
        locate: Locate | None = None,
        is_stated: bool = False,
        written: Sequence[WrittenRows] = (),
        operation: str = "WRITE",
        check: Callable[[LogState], None] | None = None,
    ) -> Commit:
        """Commit those of some rows whose keys are new, and in the same version what others change.

        `written` are the rows' shards, if they are on the disk already; `deleted` the episodes and
        steps that were left out because they were deleted before. What becomes of a row is
        decided on one version, and again where a later one has its key by the time of the commit:
        of two writers of a key the second finds the row of the first.
        """
        unique = spec.unique
        assert unique is not None
        index = self.key_index(unique)
        with span("key_index") as work:
            hashes = hash_rows(rows, unique)
            needles = np.sort(hashes)
            work.items, work.num_bytes = len(hashes), hashes.nbytes
        num_quarantined = 0
        whole = list(written)
        while True:
            snapshot = self._snapshot_or_new(spec, rows)
            with span("key_index"):
                found = resolve(snapshot, index, unique, rows, hashes, on_conflict)
            with span("quarantine"):
                num_quarantined += quarantine_conflicts(
                    self._rejected, rows, found.conflicts, producer=producer, locate=locate
                )
            schema = None if snapshot.version >= 0 else _new_schema(spec, rows)
            if found.is_whole:
                if rows.num_rows and not whole:
                    whole = [self.table.write(rows, schema=schema)]
                parts = whole
            else:
                new = [found.rows] if found.rows.num_rows else []
                parts = [self.table.write(one, schema=schema) for one in new]
            num_new = len(parts)
            for entry, changes in found.changes.items():
                stored = replace(snapshot, files=(entry,)).read()
                parts = [
                    *parts, self.table.write(apply_changes(stored, changes), since=entry.since)
                ]  # fmt: skip
            if snapshot.version < 0 and not self._create_for(spec, rows, is_stated=is_stated):
                if self.spec.unique != unique:
                    raise SchemaMismatchError(
                        f"dataset {self.name!r}: another writer made it meanwhile, and with "
                        "another unique key, expected one. Run this one again."
                    )
                continue
            counts = found.counts
            present = DropCounts(
                counts.conflicting_episodes + deleted[0],
                counts.conflicts + deleted[1],
                counts.present_episodes,
                counts.present,
            )
            committed = num_episodes if found.is_whole else counts.committed_episodes
            known = set(snapshot.files)

            def is_current(
                state: LogState,
                snapshot: TableSnapshot = snapshot,
                known: set[Any] = known,
            ) -> None:
                if check is not None:
                    check(state)
                if read_unique_keys(read_configuration(state)) != unique:
                    raise _KeysOutdatedError
                later = [entry for entry in state.files.values() if entry not in known]
                if index.has_any(snapshot, later, needles):
                    raise _KeysOutdatedError
                known.update(later)

            try:
                commit = self.table.commit(
                    parts,
                    producer=producer,
                    sequence=sequence,
                    operation=operation,
                    info={
                        **info,
                        **commit_counts(
                            committed, found.rows.num_rows, (drops or DropCounts()) + present
                        ),
                        **({"keys": counts.to_json()} if counts else {}),
                        **({"num_deleted_before": deleted[0]} if deleted[0] else {}),
                    },
                    removed=[entry.path for entry in found.changes],
                    check=is_current,
                )
            except _DeletedMeanwhileError:
                others = [part for part in whole if part not in parts]
                self._forget([part for part in (*parts, *others) if part not in written])
                raise
            except (_KeysOutdatedError, CommitConflictError):
                if not found.is_whole:
                    self._forget(parts)
                elif any(part not in whole for part in parts):
                    self._forget([part for part in parts if part not in whole])
                if self.spec.unique != unique:
                    raise SchemaMismatchError(
                        f"dataset {self.name!r}: its unique key changed meanwhile, expected "
                        f"{', '.join(unique.columns)}. Run this one again."
                    ) from None
                continue
            if commit.already_present:
                return Commit(commit.version, True, 0, 0, 0, 0)
            own = hashes if found.is_whole else hash_rows(found.rows, unique)
            self._save_index(index, parts[:num_new], own)
            return replace(
                _to_commit(commit, committed),
                num_steps=found.rows.num_rows,
                keys=counts,
                num_quarantined=num_quarantined,
            )

    def _save_index(self, index: KeyIndex, parts: Sequence[WrittenRows], hashes: Any) -> None:
        start = 0
        for entry in (entry for part in parts for entry in part.entries):
            index.hold(entry.path, hashes[start : start + entry.num_rows])
            start += entry.num_rows
        # It is derived: whoever needs it next makes it.
        with suppress(StorageError), span("key_index"):
            index.save(self.table.snapshot())

    def _forget(self, parts: Sequence[WrittenRows]) -> None:
        """Delete shards that will not be committed; vacuum finds those that stay."""
        paths = [f"{self.name}/{entry.path}" for part in parts for entry in part.entries]
        with suppress(StorageError):
            self._storage.delete(paths)

    def _snapshot_or_new(self, spec: DatasetSpec, rows: pa.Table) -> TableSnapshot:
        if self.table.exists():
            return self.table.snapshot()
        schema = _new_schema(spec, rows)
        return TableSnapshot(-1, schema, (), {}, self._storage, self.name)

    def check(self, episodes: Sequence[Episode]) -> None:
        """Check episodes like `append`, without writing anything. Raises: as append."""
        self._rows(episodes, self.spec if self.exists() else infer_spec(episodes))

    def find_conflicts(self, episodes: Sequence[Episode]) -> list[tuple[int, tuple[str, ...]]]:
        """Return which of some episodes differ from the stored rows of their keys, and how.

        They are numbered as `append` would take them one after the other. Writes nothing. Raises:
        as append; NotFoundError if the dataset does not exist.
        """
        spec = self.spec
        if spec.unique is None or not len(episodes):
            return []
        rows = self._rows(episodes, spec)
        index = self.key_index(spec.unique)
        with index.lock:
            found = resolve(
                self.table.snapshot(),
                index,
                spec.unique,
                rows,
                hash_rows(rows, spec.unique),
                "set_aside",
            )
        ends = np.cumsum([len(episode) for episode in episodes])
        return [
            (int(np.searchsorted(ends, one.rows[0], side="right")), one.reasons)
            for one in found.conflicts
        ]

    def encode(self, episodes: Sequence[Episode]) -> EncodedEpisodes:
        """Check episodes and encode them as rows for `write`.

        Raises: EpisodeInvalidError, SchemaMismatchError; NotFoundError if the dataset does not
        exist.
        """
        return EncodedEpisodes(len(episodes), self._rows(episodes, self.spec))

    def write(self, episodes: Sequence[Episode] | EncodedEpisodes) -> WrittenEpisodes:
        """Check episodes and write them durably; `commit` then makes them readable.

        Rollout workers call `write`, and the single committer of their run calls `commit`. Raises:
        as append; NotFoundError if the dataset does not exist; EpisodeInvalidError also for
        episodes that were deleted before, because a run of which nothing is stored would wait for
        its steps indefinitely.
        """
        ready = episodes if isinstance(episodes, EncodedEpisodes) else self.encode(episodes)
        mark = self.tombstones.mark
        self._refuse_deleted(ready.rows)
        return WrittenEpisodes(ready.num_episodes, self.table.write(ready.rows), mark)

    def commit(
        self,
        written: Sequence[WrittenEpisodes],
        *,
        producer: str,
        sequence: int,
        info: Mapping[str, Any] | None = None,
    ) -> Commit:
        """Commit written episodes as one version: either all of them, durably, or none.

        A repeated (producer, sequence) adds nothing. Raises: SchemaMismatchError, StorageError;
        EpisodeInvalidError as `write`, for episodes that were deleted since.
        """
        mark = self.tombstones.mark
        if later := [part.rows for part in written if part.mark != mark]:
            if (version := self.find_commit(producer, sequence)) is not None:
                return Commit(version, True, 0, 0, 0, 0)
            self._refuse_deleted(self._read_written(later))
        num_episodes = sum(part.num_episodes for part in written)
        num_steps = sum(part.num_steps for part in written)
        try:
            commit = self.table.commit(
                [part.rows for part in written],
                producer=producer,
                sequence=sequence,
                info={**commit_counts(num_episodes, num_steps, DropCounts()), **(info or {})},
                check=self._check_mark(mark, _check_without_key) if written else None,
            )
        except _DeletedMeanwhileError:
            return self.commit(written, producer=producer, sequence=sequence, info=info)
        except _KeysOutdatedError:
            try:
                return self.commit_shards(
                    [part.rows for part in written],
                    num_episodes,
                    producer=producer,
                    sequence=sequence,
                    info=info or {},
                    check=self._check_mark(mark),
                )
            except _DeletedMeanwhileError:
                return self.commit(written, producer=producer, sequence=sequence, info=info)
        return _to_commit(commit, num_episodes)

    def commit_shards(
        self,
        written: Sequence[WrittenRows],
        num_episodes: int,
        *,
        producer: str,
        sequence: int,
        info: Mapping[str, Any],
        drops: DropCounts | None = None,
        operation: str = "WRITE",
        check: Callable[[LogState], None] | None = None,
    ) -> Commit:
        """Commit shards to a dataset that has a unique key, as `append` does with their rows.

        Their rows are read; where all are new, the shards are committed as they are. Raises: as
        append.
        """
        if (version := self.find_commit(producer, sequence)) is not None:
            return Commit(version, True, 0, 0, 0, 0)
        spec = self.spec
        assert spec.unique is not None
        rows = self._read_written(written)
        check_keys_known(rows, spec.unique)
        return self._commit_unique(
            rows,
            spec,
            num_episodes,
            producer=producer,
            sequence=sequence,
            info=info,
            drops=drops,
            written=written,
            operation=operation,
            check=check,
        )

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
        """Return the version that was committed with (producer, sequence), or None."""
        return self.table.find_commit(producer, sequence)

    def next_sequence(self, producer: str) -> int:
        """Return the sequence after this producer's highest committed one; 0 if it has none."""
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
        """Return a snapshot of a version, by default the newest one. Raises: NotFoundError."""
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
        """Return a live view of the newest steps, which follows later commits.

        Args:
            max_steps: maximum number of steps in the view; the oldest ones are removed. Memory: 1.4
                records per step.
            columns: further columns to include with each step.
            float64: decode values that are stored as float64 as float64, not as float32.
            frame_stack: number of consecutive observations in a stacked observation.
            where_steps: SQL condition over the columns of `steps`; items may start only at steps
                that meet it.
            since: "start" includes the newest existing steps; a version excludes all steps that the
                dataset had at that version.
            without_producers: producers whose later appends are not read, because the caller adds
                the same steps with `put`. Deletions and labels by other producers still apply to
                them.

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

    def history(self, since: int = 0) -> list[dict[str, Any]]:
        """Return the commit of each version from `since` on, oldest first.

        A commit has its version, timestamp (ms), operation, producer and counts. Cost: one file a
        version.
        """
        return self.table.history(since)

    def commit_info(self, version: int) -> dict[str, Any]:
        """Return the commit of one version, in the form of `history`. Raises: NotFoundError."""
        return self.table.commit_info(version)

    def _check_exists(self) -> None:
        if not self.table.exists():
            raise NotFoundError(
                f"dataset {self.name!r}: not in this lake. "
                "`replaylake list` names those that are; `replaylake ingest` makes one."
            )

    def _rows(self, episodes: Sequence[Episode], spec: DatasetSpec) -> pa.Table:
        try:
            with span("validate"):
                ready = validate_all(
                    episodes,
                    spec.observation_space,
                    spec.action_space,
                    rewards_optional=spec.rewards_optional,
                    tokenizer=spec.tokenizer,
                )
            with span("encode") as work:
                rows = encode(ready, spec)
                work.items, work.num_bytes = rows.num_rows, rows.nbytes
            self._check_parents(rows)
            if spec.unique is not None:
                # Media stay in their messages: a row may go, and others need the bytes it has.
                check_keys_known(rows, spec.unique)
                return rows
            return move_media(rows, spec.extras)
        except SchemaMismatchError as error:
            raise SchemaMismatchError(f"dataset {self.name!r}: {error}") from error

    def _check_parents(self, rows: pa.Table) -> None:
        """Refuse steps whose parent is neither among these rows nor stored."""
        if not has_tokens(rows.column_names) or PARENT_STEP not in rows.column_names:
            return
        if orphans := find_orphans(read_step_tree(rows), self._find_steps):
            episode_id = rows[EPISODE_ID][orphans[0].row].as_py()
            raise EpisodeInvalidError(f"episode {episode_id}: {orphans[0].message}")

    def _find_steps(self, episode_ids: pa.Array, agents: pa.Array, steps: Any) -> NDArray[np.bool_]:
        if not self.exists():
            return np.zeros(len(steps), np.bool_)
        return find_stored_steps(self.snapshot(), episode_ids, agents, steps)

    def _read_written(self, written: Sequence[WrittenRows]) -> pa.Table:
        tables = []
        for part in written:
            for entry in part.entries:
                (path,) = self._storage.fetch([blob_of(self.name, entry)])
                tables.append(conform(read_shard(path, entry), part.schema))
                self._storage.release([blob_of(self.name, entry)])
        return pa.concat_tables(tables, promote_options="default")

    def _find_deleted(self, rows: pa.Table, *, readmit: bool) -> tuple[NDArray[np.bool_], str]:
        """Return which rows are of what was deleted before, and the mark that this is known at.

        With `readmit`, let them come again.
        """
        mark = self.tombstones.mark
        gone = self.tombstones.find(rows)
        if readmit and gone.any():
            self.tombstones.lift(self.tombstones.find_subjects(rows))
            return np.zeros_like(gone), self.tombstones.mark
        return gone, mark

    def _refuse_deleted(self, rows: pa.Table) -> None:
        if self.tombstones.find(rows).any():
            columns = ", ".join(sorted(self.tombstones.find_subjects(rows)))
            raise EpisodeInvalidError(
                f"dataset {self.name!r}: found steps of what was deleted by its {columns}, "
                "expected none: they would come back. Use another dataset or name, or readmit them."
            )

    def _check_mark(
        self, mark: str, check: Callable[[LogState], None] | None = None
    ) -> Callable[[LogState], None]:
        """Return a check at the moment of a commit that nothing was deleted since `mark`."""

        def check_mark(state: LogState) -> None:
            if check is not None:
                check(state)
            if self.tombstones.mark != mark:
                raise _DeletedMeanwhileError

        return check_mark

    def _create_for(self, spec: DatasetSpec, rows: pa.Table, *, is_stated: bool) -> bool:
        """Create the dataset for rows that were checked; False if another writer was first.

        Raises: SchemaMismatchError if that one has spaces other than those stated.
        """
        try:
            self.create(
                spec.observation_space,
                spec.action_space,
                mask_size=spec.mask_size,
                extras=_further_types(rows),
                rewards_optional=spec.rewards_optional,
                encoding=spec.encoding,
                score_reference=spec.score_reference,
                unique=spec.unique,
                env_spec=spec.env_spec,
                tokenizer=spec.tokenizer,
            )
        except AlreadyExistsError:
            # `append` checks against its spaces, not what they mean.
            if is_stated and (differs := find_spec_mismatch(self.spec, spec)) is not None:
                raise SchemaMismatchError(
                    f"dataset {self.name!r}: another writer made it meanwhile, and {differs}. Run "
                    "this one again."
                ) from None
            return False
        return True


class _KeysOutdatedError(Exception):
    """Another writer committed a key that was looked for before, or made the dataset unique."""


class _DeletedMeanwhileError(Exception):
    """Something was deleted, or readmitted, after the rows to commit were compared with that."""


def _check_without_key(state: LogState) -> None:
    """Raises: _KeysOutdatedError where the dataset has a unique key by now."""
    if read_unique_keys(read_configuration(state)) is not None:
        raise _KeysOutdatedError


def _further_types(rows: pa.Table) -> dict[str, pa.DataType]:
    return {f.name: f.type for f in rows.schema if f.name not in STANDARD_COLUMNS}


def _new_schema(spec: DatasetSpec, rows: pa.Table) -> pa.Schema:
    """Return the schema that a dataset made for some rows has."""
    types = {name: widen_type(kind, name) for name, kind in _further_types(rows).items()}
    return with_field_ids(arrow_schema(replace(spec, extras=types)))


def _parts(episodes: Sequence[Episode]) -> Sequence[Episode]:
    """Return the episodes, or the one that holds the steps of all of them."""
    return [episodes.steps] if isinstance(episodes, EpisodeColumns) else episodes


def _without(rows: pa.Table, gone: NDArray[np.bool_]) -> pa.Table:
    return rows.filter(pa.array(~gone)) if gone.any() else rows


def _make_locate(episodes: Sequence[Episode], kept: NDArray[np.int64]) -> Locate:
    """Return where in the source rows are, of episodes that know it; `kept` are their numbers."""
    if isinstance(episodes, EpisodeColumns):

        def locate_columns(rows: Sequence[int]) -> Sequence[tuple[str | None, int | None]]:
            return episodes.locate_rows(kept[np.asarray(rows, np.int64)])

        return locate_columns

    def locate(rows: Sequence[int]) -> Sequence[tuple[str | None, int | None]]:
        ends = np.cumsum([len(episode) for episode in episodes])
        places: list[tuple[str | None, int | None]] = []
        for row in kept[np.asarray(rows, np.int64)].tolist():
            number = int(np.searchsorted(ends, row, side="right"))
            known = getattr(episodes[number], "places", None)
            at = row - int(ends[number]) + len(episodes[number])
            if known is None:
                places.append((None, None))
            else:
                (name,), (file_row,) = known.locate_rows(at, at + 1)
                places.append((name, int(file_row)))
        return places

    return locate


def _count_deleted(episodes: Sequence[Episode], gone: NDArray[np.bool_]) -> tuple[int, int]:
    """Count the episodes and the pieces whose rows are gone: of an episode all are, or none."""
    if isinstance(episodes, EpisodeColumns):
        which = np.flatnonzero(gone[np.cumsum(episodes.lengths) - episodes.lengths])
        ids = pa.array(as_text_array(episodes.episode_ids)).take(pa.array(which)).to_pylist()
        agents = episodes.agent_ids
        names = [""] * len(which) if agents is None else [agents[n] for n in which.tolist()]
        return len(set(zip(ids, names, strict=True))), len(which)
    ends = np.cumsum([len(episode) for episode in episodes])
    keys = [
        (one.episode_id, one.agent_id)
        for one, end in zip(episodes, ends.tolist(), strict=True)
        if gone[end - 1]
    ]
    return len(set(keys)), len(keys)


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
