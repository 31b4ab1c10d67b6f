"""Opening: a view from the cache, or decoded from its shards and put there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.errors import EmptyReplayError, StorageError
from replaylake.datastore.query.expressions import (
    evaluate_rewards,
    select_episode_keys,
    select_steps,
)
from replaylake.datastore.replay.array_allocator import (
    ArrayAllocator,
    FileAllocator,
    ScratchFiles,
    resolve_budget,
)
from replaylake.datastore.replay.cache.cache_writer import CacheWriter
from replaylake.datastore.replay.cache.cached_view import (
    ViewMetadata,
    collect_arrays,
    make_metadata,
    map_packed,
    open_cached,
)
from replaylake.datastore.replay.cache.draft import Draft
from replaylake.datastore.replay.cache.view_cache import ViewCache
from replaylake.datastore.replay.layout import RecordLayout, make_layout
from replaylake.datastore.replay.packing.packing import OnProgress, pack
from replaylake.datastore.replay.records import Packed
from replaylake.datastore.replay.scans import check_finite, has_masked_actions
from replaylake.datastore.replay.selection import Origin
from replaylake.datastore.replay.view import CachedPart, ReplayView
from replaylake.datastore.replay.view_query import ViewQuery, explain_sql_errors, view_key
from replaylake.datastore.storage.table.table import TableSnapshot

_T = TypeVar("_T")


def open_view(
    dataset: str,
    snapshot: TableSnapshot,
    spec: DatasetSpec,
    query: ViewQuery,
    *,
    memory_budget_bytes: int | None = None,
    cache: bool = True,
    on_progress: OnProgress | None = None,
) -> ReplayView:
    """Map a view that was decoded before, or decode it; see Snapshot.replay.

    Raises: QueryRefusedError, QueryError, ShardCorruptError, EmptyReplayError,
    SpaceUnsupportedError, NotFoundError, SchemaMismatchError, ConfigInvalidError, StorageError.
    """
    budget = resolve_budget(memory_budget_bytes)
    layout = make_layout(
        spec,
        snapshot.schema,
        query.columns,
        float64=query.float64,
        frame_stack=query.frame_stack,
    )
    opening = _ViewOpener(dataset, snapshot, layout, budget)
    if not cache:
        return opening.decode(query.canonical(), None, "", on_progress)
    views = ViewCache(snapshot.storage, snapshot.root)
    # DuckDB takes longer to say how it spells a query than a view to be opened.
    written = view_key(snapshot, layout, query)
    if (view := opening.open_cached(query, views, views.find_canonical(written))) is not None:
        return view
    query = query.canonical()
    key = view_key(snapshot, layout, query)
    view = opening.open_cached(query, views, key) or opening.decode(query, views, key, on_progress)
    views.record_canonical(written, key)
    return view


class _ViewOpener:
    """What is the same wherever a view comes from."""

    def __init__(
        self, dataset: str, snapshot: TableSnapshot, layout: RecordLayout, budget: int
    ) -> None:
        self._dataset, self._snapshot, self._layout = dataset, snapshot, layout
        self._budget = budget

    def open_cached(self, query: ViewQuery, views: ViewCache, key: str) -> ReplayView | None:
        """Map the view of that key, if it is in the cache."""
        cached = views.open(key, self._layout)
        if cached is None:
            return None
        packed, about = cached
        return self._view(packed, query, views.folder(key), about)

    def decode(
        self, query: ViewQuery, views: ViewCache | None, key: str, on_progress: OnProgress | None
    ) -> ReplayView:
        """Decode the shards, and have the view kept if there is a cache."""
        room = ArrayAllocator(self._budget, partial(_files, views))
        about: ViewMetadata | None = None
        try:
            packed = self._pack(query, room, on_progress)
            self._check(packed, query)
            if isinstance(room.files, Draft):
                packed, about = _map_draft(room.files, packed)
        except BaseException:
            if isinstance(room.files, Draft):
                room.files.discard()
            raise
        place = None
        if views is not None and not isinstance(room.files, ScratchFiles):
            shards = tuple(entry.path for entry in self._snapshot.files)
            draft = room.files if isinstance(room.files, Draft) else None
            place = CacheWriter(partial(_write_to_cache, views, key, shards, packed, draft, about))
        return self._view(packed, query, place, about)

    def _pack(
        self, query: ViewQuery, room: ArrayAllocator, on_progress: OnProgress | None
    ) -> Packed:
        def compute(argument: str, evaluate: Callable[[TableSnapshot, str], _T]) -> _T | None:
            expression: str | None = getattr(query, argument)
            if expression is None:
                return None
            with explain_sql_errors(argument, expression):
                return evaluate(self._snapshot, expression)

        return pack(
            self._snapshot,
            self._layout,
            selected=compute("where", select_episode_keys),
            rewards=compute("reward", evaluate_rewards),
            start_flags=compute("where_steps", select_steps),
            allocate=room.allocate,
            on_progress=on_progress,
        )

    def _check(self, packed: Packed, query: ViewQuery) -> None:
        if not len(packed.steps):
            conditions = [f" {name} {text}" for name, text in query.conditions() if text]
            raise EmptyReplayError(
                f"replay of {self._dataset}@{self._snapshot.version}: found no step"
                f"{' and'.join(conditions)}, expected at least one. Look at what there is: "
                f"replaylake sql 'select * from {self._dataset}.episodes limit 10'."
            )
        if query.reward is not None:
            check_finite(packed, query.reward)

    def _view(
        self,
        packed: Packed,
        query: ViewQuery,
        place: CacheWriter | Path | None,
        about: ViewMetadata | None,
    ) -> ReplayView:
        snapshot = self._snapshot
        origin = Origin(
            dataset=self._dataset,
            version=snapshot.version,
            query=query,
            shard_hashes=tuple(entry.sha256 for entry in snapshot.files),
            snapshot=snapshot,
            num_episodes=packed.num_episodes,
            num_steps=packed.num_steps,
            first_start=0,
            last_start=len(packed.steps),
        )
        masked = None if about is None else about.has_masked_actions
        cached = (
            ()
            if place is None
            else (CachedPart(place, self._layout, (origin.without_snapshot(),)),)
        )
        return ReplayView(packed, (origin,), cached=cached, has_masked_actions=masked)


def _files(views: ViewCache | None, needed: int) -> FileAllocator:
    """Return files for a view that exceeds its budget: the cache's, or some that nobody keeps."""
    if views is not None:
        # Where we may not write, or the disk of the lake is full, another disk may do.
        with suppress(OSError, StorageError):
            return views.draft(needed)
    return ScratchFiles(needed)


def _map_draft(draft: Draft, packed: Packed) -> tuple[Packed, ViewMetadata]:
    """Return what was packed as it is from now on: read from the draft's files."""
    arrays = collect_arrays(packed)
    draft.write_missing(arrays, threading.Event())
    about = make_metadata(packed, arrays, has_masked_actions=has_masked_actions(packed))
    return map_packed(draft.folder, packed.records.layout, about), about


def _write_to_cache(
    views: ViewCache,
    key: str,
    shards: Sequence[str],
    packed: Packed,
    draft: Draft | None,
    about: ViewMetadata | None,
    stop: threading.Event,
) -> Path:
    """Put a view into the cache. Raises: OSError, StorageError, NotFoundError, Stopped."""
    arrays = collect_arrays(packed)
    if draft is None:
        draft = views.draft(sum(array.nbytes for array in arrays.values()))
    try:
        draft.write_missing(arrays, stop)
        if about is None:
            about = make_metadata(packed, arrays, has_masked_actions=has_masked_actions(packed))
        draft.complete(arrays, about, shards, stop)
        layout = packed.records.layout
        return views.publish(
            draft, key, shards, lambda folder: open_cached(folder, layout) is not None
        )
    except BaseException:
        draft.discard()
        raise
