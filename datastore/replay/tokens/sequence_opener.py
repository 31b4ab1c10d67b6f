"""Opening: token sequences from the cache, or decoded from their shards and put there."""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import duckdb
import numpy as np
import pyarrow as pa

from replaylake.datastore.episodes import tokens
from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.episodes.token_sequences import NO_VERSION
from replaylake.datastore.errors import (
    ConfigInvalidError,
    EmptyReplayError,
    NotFoundError,
    StorageError,
)
from replaylake.datastore.query.expressions import canonical_condition, select_episode_keys
from replaylake.datastore.query.group_views import GROUP_ID
from replaylake.datastore.query.sequence_views import list_per_token
from replaylake.datastore.replay.cache.cache_writer import CacheWriter
from replaylake.datastore.replay.cache.cached_sequences import (
    EPISODE_RETURNS,
    GROUPS,
    LOG_PROBS,
    LOSS_MASK,
    OFFSETS,
    OLDEST_VERSIONS,
    RETURNS,
    TABLE,
    TOKEN_IDS,
    VERSION_ENDS,
    VERSION_OFFSETS,
    VERSION_STARTS,
    VERSIONS,
    SequenceFiles,
    SequenceWriter,
    column_file,
    open_sequence_files,
    write_checksums,
)
from replaylake.datastore.replay.cache.draft import Draft
from replaylake.datastore.replay.cache.view_cache import ViewCache
from replaylake.datastore.replay.packing.packing import OnProgress
from replaylake.datastore.replay.tokens.sequence_decoder import SequenceBlock, decode_sequences
from replaylake.datastore.replay.tokens.token_view import TokenSequences
from replaylake.datastore.replay.view_query import column_names, explain_sql_errors
from replaylake.datastore.storage.arrow_values import numbers
from replaylake.datastore.storage.table.table import TableSnapshot

# One more whenever the same shards and arguments would give other bytes.
_FORMAT: Final = 2


@dataclass(frozen=True)
class _SequenceQuery:
    """Which sequences are decoded, and their further columns; see Snapshot.token_sequences."""

    where: str | None
    columns: tuple[str, ...]

    def canonical(self) -> _SequenceQuery:
        """Return it with the condition in DuckDB's own spelling.

        Raises: QueryRefusedError, QueryError.
        """
        if self.where is None:
            return self
        with explain_sql_errors("where", self.where):
            return _SequenceQuery(canonical_condition(self.where), self.columns)


def open_token_sequences(
    dataset: str,
    snapshot: TableSnapshot,
    where: str | None,
    columns: Sequence[str],
    *,
    cache: bool = True,
    on_progress: OnProgress | None = None,
) -> TokenSequences:
    """Map sequences that were decoded before, or decode them; see Snapshot.token_sequences.

    Raises: NotFoundError, QueryRefusedError, QueryError, ShardCorruptError, EmptyReplayError,
    ConfigInvalidError, StorageError.
    """
    kinds = _find_columns(dataset, snapshot, column_names(columns))
    if where is not None and not isinstance(where, str):
        raise ConfigInvalidError(
            f"token sequences: found where {where!r}, expected SQL in a string, or None. Write it "
            "as in where='num_steps > 10'."
        )
    query = _SequenceQuery(where, tuple(kinds))
    opener = _Opener(dataset, snapshot, kinds)
    if not cache:
        return opener.decode(query.canonical(), None, on_progress)
    views = ViewCache(snapshot.storage, snapshot.root)
    # DuckDB takes longer to say how it spells a condition than sequences to be opened.
    written = opener.key(query)
    if (found := opener.open_cached(views, views.find_canonical(written))) is not None:
        return found
    query = query.canonical()
    key = opener.key(query)
    found = opener.open_cached(views, key) or opener.decode(query, views, on_progress)
    views.record_canonical(written, key)
    return found


def _find_columns(dataset: str, snapshot: TableSnapshot, names: Sequence[str]) -> dict[str, str]:
    """Return DuckDB's type of a value of each further column. Raises: NotFoundError."""
    name = f"{dataset}@{snapshot.version}"
    if not tokens.has_tokens(snapshot.schema.names):
        raise NotFoundError(
            f"token sequences of {name}: found no column {tokens.ACTION_TOKENS}, expected a "
            "dataset with token columns: generations of a language model as ids. docs/LANGUAGE.md."
        )
    known = list_per_token(snapshot.schema)
    if missing := [column for column in names if column not in known]:
        raise NotFoundError(
            f"token sequences of {name}: found no column {', '.join(missing)} with a value for "
            f"each token, expected some of {', '.join(known) or 'none: it has no such columns'}."
        )
    return {column: known[column] for column in names}


class _Opener:
    """Opens the sequences of one snapshot with the same further columns."""

    def __init__(self, dataset: str, snapshot: TableSnapshot, kinds: Mapping[str, str]) -> None:
        self._dataset, self._snapshot, self._kinds = dataset, snapshot, kinds

    def key(self, query: _SequenceQuery) -> str:
        """Return 64 hex digits: where they are equal, the arrays are equal byte for byte."""
        about = {
            "kind": "sequences",
            "format": _FORMAT,
            "byteorder": sys.byteorder,
            "shards": [entry.sha256 for entry in self._snapshot.files],
            "schema": self._snapshot.schema.to_string(
                show_field_metadata=False, show_schema_metadata=False
            ),
            "columns": self._kinds,
            "where": query.where,
            "duckdb": None if query.where is None else duckdb.__version__,
        }
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()

    def open_cached(self, views: ViewCache, key: str) -> TokenSequences | None:
        """Map the sequences of that key, if they are in the cache."""
        folder = views.folder(key)
        files = open_sequence_files(folder)
        return None if files is None else self._view(key, files, folder)

    def decode(
        self, query: _SequenceQuery, views: ViewCache | None, on_progress: OnProgress | None
    ) -> TokenSequences:
        """Decode the shards, and write the sequences to the cache if there is one."""
        key, draft, failure = self.key(query), None, ""
        if views is not None:
            # Where we may not write, or the disk of the lake is full, another disk may do.
            try:
                draft = views.draft(self._estimate_bytes())
            except (OSError, StorageError) as error:
                failure = str(error)
        if views is None or draft is None:
            with tempfile.TemporaryDirectory(prefix="replaylake-") as folder:
                # What is mapped stays readable without its name.
                files = self._write(Path(folder), query, on_progress)
                return self._view(key, files, None, failure)
        try:
            files = self._write(draft.folder, query, on_progress)
        except BaseException:
            draft.discard()
            raise
        shards = tuple(entry.path for entry in self._snapshot.files)
        write = partial(_publish, views, key, shards, files, draft)
        return self._view(key, files, CacheWriter(write))

    def _write(
        self, folder: Path, query: _SequenceQuery, on_progress: OnProgress | None
    ) -> SequenceFiles:
        selected = None
        if query.where is not None:
            with explain_sql_errors("where", query.where):
                selected = select_episode_keys(self._snapshot, query.where)
        writer = _Writer(folder, tuple(self._kinds))
        blocks = decode_sequences(self._snapshot, self._kinds, selected, on_progress)
        try:
            for block in _read_ahead(blocks):
                writer.append(block)
            files = writer.finish() if writer.num_sequences else None
        except OSError as error:
            raise StorageError(
                f"token sequences: {folder}: found {error.strerror or error}, expected room for "
                f"about {self._estimate_bytes() / 1e9:.2f} GB. Free disk space, name a larger disk "
                "with TMPDIR, or select less with `where`."
            ) from error
        if files is None:
            condition = f" where {query.where}" if query.where else ""
            raise EmptyReplayError(
                f"token sequences of {self._dataset}@{self._snapshot.version}: found none"
                f"{condition}, expected at least one. Look at what there is: replaylake sql "
                f"'select * from {self._dataset}.sequences limit 10'."
            )
        return files

    def _estimate_bytes(self) -> int:
        """Return about the bytes of all arrays: Parquet packs them to half and less."""
        return 3 * sum(entry.size_bytes for entry in self._snapshot.files)

    def _view(
        self,
        key: str,
        files: SequenceFiles,
        place: CacheWriter | Path | None,
        failure: str = "",
    ) -> TokenSequences:
        return TokenSequences(self._dataset, self._snapshot.version, key, files, place, failure)


def _read_ahead(blocks: Iterator[SequenceBlock]) -> Iterator[SequenceBlock]:
    """Yield what an iterator does, of which a thread takes the next one meanwhile."""
    with ThreadPoolExecutor(1, "replaylake-decode") as pool:
        ahead = pool.submit(next, blocks, None)
        while (block := ahead.result()) is not None:
            ahead = pool.submit(next, blocks, None)
            yield block


class _Writer:
    """Writes blocks of sequences to files, and in the end the arrays with a value a sequence."""

    def __init__(self, folder: Path, columns: tuple[str, ...]) -> None:
        self._files = SequenceWriter(folder)
        self._columns = columns
        self._parts: dict[str, list[Array]] = {}
        self._tables: list[pa.Table] = []
        self.num_sequences = 0

    def append(self, block: SequenceBlock) -> None:
        """Write one block. Raises: OSError."""
        self.num_sequences += len(block.lengths)
        self._files.append(TOKEN_IDS, block.token_ids)
        self._files.append(LOSS_MASK, block.loss_mask)
        if block.log_probs is not None:
            self._files.append(LOG_PROBS, block.log_probs)
        for number, name in enumerate(self._columns):
            self._files.append(column_file(number), block.columns[name])
        for name in (VERSION_STARTS, VERSION_ENDS, VERSIONS):
            self._files.append(name, getattr(block, name))
        oldest, newest = _find_version_range(block)
        self._tables.append(block.table)
        for name, values in (
            ("lengths", block.lengths),
            ("num_loss_tokens", _sum_each(block.loss_mask, block.lengths)),
            ("num_runs", block.num_runs),
            (RETURNS, block.returns),
            (EPISODE_RETURNS, block.episode_returns),
            (OLDEST_VERSIONS, oldest),
            ("newest_versions", newest),
        ):
            self._parts.setdefault(name, []).append(values)

    def finish(self) -> SequenceFiles:
        """Write the arrays with a value a sequence, and map all files. Raises: OSError."""
        parts = {name: np.concatenate(values) for name, values in self._parts.items()}
        table = pa.concat_tables(self._tables).combine_chunks()
        self._files.append(OFFSETS, np.append(0, np.cumsum(parts["lengths"])))
        self._files.append(VERSION_OFFSETS, np.append(0, np.cumsum(parts["num_runs"])))
        self._files.append(RETURNS, parts[RETURNS])
        self._files.append(EPISODE_RETURNS, parts[EPISODE_RETURNS])
        self._files.append(OLDEST_VERSIONS, parts[OLDEST_VERSIONS])
        groups = table[GROUP_ID].combine_chunks().dictionary_encode().indices
        self._files.append(GROUPS, numbers(groups.cast(pa.int64()).fill_null(-1)))
        for name, values, absent in (
            ("num_tokens", parts["lengths"], None),
            ("num_loss_tokens", parts["num_loss_tokens"], None),
            ("return", parts[RETURNS], np.isnan(parts[RETURNS])),
            ("episode_return", parts[EPISODE_RETURNS], np.isnan(parts[EPISODE_RETURNS])),
            ("min_policy_version", parts[OLDEST_VERSIONS], parts[OLDEST_VERSIONS] == NO_VERSION),
            (
                "max_policy_version",
                parts["newest_versions"],
                parts["newest_versions"] == NO_VERSION,
            ),
        ):
            table = table.append_column(name, pa.array(values, mask=absent))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        self._files.append(TABLE, np.frombuffer(sink.getvalue(), np.uint8))
        return self._files.finish(self._columns)


def _find_version_range(block: SequenceBlock) -> tuple[Array, Array]:
    """Return the oldest and the newest version of each sequence, -1 where unknown.

    The oldest is unknown if that of one sampled token is.
    """
    oldest = np.full(len(block.lengths), NO_VERSION, np.int64)
    newest = oldest.copy()
    has_runs = block.num_runs > 0
    if has_runs.any():
        starts = (np.cumsum(block.num_runs) - block.num_runs)[has_runs]
        oldest[has_runs] = np.minimum.reduceat(block.versions, starts)
        newest[has_runs] = np.maximum.reduceat(block.versions, starts)
    oldest[block.has_unversioned] = NO_VERSION
    return oldest, newest


def _sum_each(flags: Array, lengths: Array) -> Array:
    """Return how many flags of each sequence are true, int64 [S]."""
    sums = np.zeros(len(lengths), np.int64)
    is_filled = lengths > 0
    starts = (np.cumsum(lengths) - lengths)[is_filled]
    if len(starts):
        sums[is_filled] = np.add.reduceat(flags, starts, dtype=np.int64)
    return sums


def _publish(
    views: ViewCache,
    key: str,
    shards: Sequence[str],
    files: SequenceFiles,
    draft: Draft,
    stop: threading.Event,
) -> Path:
    """Give a draft its checksums and its name. Raises: OSError, StorageError, NotFoundError."""
    try:
        write_checksums(draft, files.metadata)
        draft.complete(files.metadata.shapes, files.metadata, shards, stop)
        return views.publish(draft, key, shards, lambda at: open_sequence_files(at) is not None)
    except BaseException:
        draft.discard()
        raise
