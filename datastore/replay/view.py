"""ReplayView: a snapshot's selected episodes, decoded once, from which samplers draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.compatibility import find_spec_mismatch, join_specs
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.errors import (
    ConfigInvalidError,
    EmptyReplayError,
    NotFoundError,
    SchemaMismatchError,
)
from replaylake.datastore.query.expressions import canonical_expression
from replaylake.datastore.replay.array_allocator import (
    BOOTSTRAPPABLE_STEPS,
    RECORDS,
    STEPS,
    ArrayAllocator,
    ScratchFiles,
    is_mapped,
    resolve_budget,
)
from replaylake.datastore.replay.cache.cache_writer import CacheWriter
from replaylake.datastore.replay.cache.cached_view import (
    open_cached,
    read_content_hash,
    write_content_hash,
)
from replaylake.datastore.replay.layout import KEY, STEPS_LEFT, RecordLayout
from replaylake.datastore.replay.protocols import Assembler, Item
from replaylake.datastore.replay.record_runs import Runs
from replaylake.datastore.replay.records import Packed, Records
from replaylake.datastore.replay.sampler import FixedCandidates, Sampler
from replaylake.datastore.replay.scans import has_masked_actions, num_unknown_rewards
from replaylake.datastore.replay.selection import Origin, Selection
from replaylake.datastore.replay.selectors.saved_priorities import PriorityFolder
from replaylake.datastore.replay.selectors.weighted import (
    WeightedSampler,
    WeightedSelector,
    step_weights,
)
from replaylake.datastore.replay.source import TRANSITIONS, SampleSource
from replaylake.datastore.replay.view_query import explain_sql_errors

# Records copied at once where their layout changes.
_PIECE = 1 << 14


@dataclass(frozen=True)
class CachedPart:
    """What maps a view, or a part of one, from the cache again, in another process too.

    place: its folder, or who writes it.
    """

    place: CacheWriter | Path
    layout: RecordLayout
    origins: tuple[Origin, ...]

    def wait_folder(self) -> Path | None:
        """Wait until it is written; None if it could not be."""
        return self.place if isinstance(self.place, Path) else self.place.wait_folder()

    def wait_written(self) -> CachedPart | None:
        """Wait until it is written, and return what can be sent; None if it could not be."""
        return None if (folder := self.wait_folder()) is None else replace(self, place=folder)

    def folder_now(self) -> Path | None:
        """Return the folder if it is written."""
        return self.wait_folder() if isinstance(self.place, Path) or self.place.is_done else None

    @property
    def failure(self) -> str:
        """Why it could not be kept; empty where that is not known."""
        return "" if isinstance(self.place, Path) else self.place.failure

    def open(self) -> ReplayView:
        """Map it. Raises: NotFoundError."""
        folder = self.wait_folder()
        words = None if folder is None else open_cached(folder, self.layout)
        if words is None:
            raise NotFoundError(
                f"replay view {folder}: was removed from the cache after it was sent here. "
                "Open the snapshot's replay again."
            )
        packed, about = words
        return ReplayView(
            packed, self.origins, cached=(self,), has_masked_actions=about.has_masked_actions
        )


class ReplayView(SampleSource):
    """The decoded episodes of one or several snapshots with the same spaces.

    A view never changes, whatever happens to the dataset. It can be pickled: another process on
    this machine maps the cached files. A view that is not in the cache is sent as a whole.
    """

    def __init__(
        self,
        packed: Packed,
        origins: tuple[Origin, ...] = (),
        *,
        cached: tuple[CachedPart, ...] = (),
        has_masked_actions: bool | None = None,
    ) -> None:
        """Take what was packed, what it comes from, and what the cache has of it."""
        self.packed = packed
        self.origins = origins
        self._cached = cached
        self._masked = has_masked_actions

    @property
    def spec(self) -> DatasetSpec:
        """Spaces, mask width and further columns of the steps."""
        return self.packed.records.layout.spec

    @property
    def num_steps(self) -> int:
        """Number of steps of the selected episodes.

        Steps at which `where_steps` allows no sample to start are included.
        """
        return self.packed.num_steps

    @property
    def num_transitions(self) -> int:
        """Number of steps at which a transition can start.

        A last step without a final observation is excluded, unless it is terminated.
        """
        return len(self.packed.bootstrappable)

    @property
    def num_episodes(self) -> int:
        """Number of selected episodes, one for each agent."""
        return self.packed.num_episodes

    @property
    def has_masked_actions(self) -> bool:
        """Whether some step has a forbidden action. Cost: one pass over the masks, once."""
        if self._masked is None:
            self._masked = has_masked_actions(self.packed)
        return self._masked

    @cached_property
    def num_unknown_rewards(self) -> int:
        """Steps that may be sampled and have no reward. Cost: a pass, where those are optional."""
        return num_unknown_rewards(self.packed)

    @cached_property
    def selections(self) -> tuple[Selection, ...]:
        """What was selected, of each dataset, for a policy's lineage.

        Cost: for the content hash a pass over the row keys (0.2 s a million), unless the cache has
        it from an earlier time.
        """
        if len(self.origins) != 1 or (folder := self._folder_now()) is None:
            return tuple(origin.selection(self.packed, None) for origin in self.origins)
        known = read_content_hash(folder)
        selection = self.origins[0].selection(self.packed, known)
        if known is None:
            write_content_hash(folder, selection.content_hash)
        return (selection,)

    @property
    def names(self) -> str:
        """The names of the snapshots, for example `cartpole@3, cartpole_old@7`."""
        return ", ".join(origin.name for origin in self.origins)

    def wait_cached(self) -> Path | None:
        """Wait until the view is in the cache. Return its directory, or None if it is not cached.

        A joined view is never cached, but its parts are.
        """
        return self._cached[0].wait_folder() if len(self._cached) == 1 else None

    @property
    def cache_failure(self) -> str:
        """The reason why the view could not be cached; empty if there was no failure."""
        return "; ".join(filter(None, (part.failure for part in self._cached)))

    def candidates(self, item: Item) -> FixedCandidates:
        """Return the items that can be drawn. Raises: EmptyReplayError."""
        starts = item.starts(self.packed)
        if not len(starts):
            raise EmptyReplayError(
                f"replay of {self.names}: found {self.num_steps} steps, none at which {item} may "
                "start, expected at least one. A transition needs a next observation or a "
                "termination (to clone it does not: only_bootstrappable=False), an episode its "
                "end (only_complete=False takes the others too)."
            )
        return FixedCandidates(starts)

    def assembler(self, item: Item) -> Assembler:
        """Return the object that copies drawn items from the records."""
        return item.assembler(self.packed.records)

    def weighted(
        self,
        batch_size: int,
        item: Item = TRANSITIONS,
        *,
        weight: str,
        seed: int,
        correct: bool = False,
    ) -> Sampler:
        """Return a sampler that draws each step in proportion to an SQL expression.

        `weight` is an expression over the columns of the step and of its episode (`return`,
        `num_steps`, ...). If both have a column of the same name, the name refers to the step's.
        With `correct`, batches have importance weights; see WeightedSelector.

        Raises: QueryRefusedError, QueryError, EmptyReplayError, NotFoundError; SchemaMismatchError
        for NULL, NaN, negative or infinite weights, or if none is above 0; ShardCorruptError;
        ConfigInvalidError if the view was sent from another process.
        """
        if not isinstance(weight, str):
            raise ConfigInvalidError(
                f"replay: found weight {weight!r}, expected SQL in a string. Write it as in "
                "weight='exp(reward)'."
            )
        candidates, assembler = self.items(item)
        starts = candidates.positions(np.arange(candidates.capacity))
        with explain_sql_errors("weight", weight):
            expression = canonical_expression(weight)
            weights = step_weights(self.packed, self.origins, starts, expression)
        selector = WeightedSelector(weights, expression, seed=seed, correct=correct)
        return WeightedSampler(candidates, selector, assembler, batch_size)

    def priority_folder(self) -> PriorityFolder | None:
        """Return the dataset's directory of saved priorities; None for several datasets."""
        if len(self.origins) != 1 or (snapshot := self.origins[0].snapshot) is None:
            return None
        return PriorityFolder(snapshot.storage, snapshot.root)

    def __reduce__(self) -> tuple[Any, ...]:
        written = [part.wait_written() for part in self._cached]
        if written and None not in written:
            return _reopen, (written,)
        if is_mapped(self.packed.records.words):
            raise ConfigInvalidError(
                f"replay of {self.names}: found a view that is larger than its memory budget and "
                "not in the cache, expected one that another process can map. Open it with "
                "cache=True in a lake that can be written to, or raise memory_budget_bytes."
            )
        return ReplayView, (
            self.packed,
            tuple(origin.without_snapshot() for origin in self.origins),
        )

    def _folder_now(self) -> Path | None:
        return self._cached[0].folder_now() if len(self._cached) == 1 else None


def concatenate(
    views: Sequence[ReplayView], *, memory_budget_bytes: int | None = None
) -> ReplayView:
    """Join views of compatible datasets.

    If only some datasets have action masks, the masks of the others are all true. A single view is
    returned unchanged. The records of several views are copied: into memory if they fit the budget
    (by default half of the available memory), else into a temporary file (TMPDIR), which is mapped
    and deleted with the view. A mixture draws from several views without copying.

    Raises: SchemaMismatchError, EmptyReplayError; ConfigInvalidError if a dataset occurs twice, or
    if the views have different columns or options; StorageError if the disk has too little space.
    """
    views = _check_views(views)
    names = [origin.dataset for view in views for origin in view.origins]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigInvalidError(
            f"replay of {', '.join(names)}: found {', '.join(twice)} twice, expected each dataset "
            "once: its steps would count double. Name it once, at one version."
        )
    if len(views) == 1:
        return views[0]
    layout = _join_layouts(views)
    room = ArrayAllocator(resolve_budget(memory_budget_bytes), ScratchFiles)
    packed = join_packed([view.packed for view in views], layout, room)
    origins, num_before = [], 0
    for view in views:
        origins += [origin.shift(num_before) for origin in view.origins]
        num_before += len(view.packed.steps)
    is_cached = all(view._cached for view in views)
    cached = tuple(part for view in views for part in view._cached) if is_cached else ()
    known = [view._masked for view in views]
    masked = None if None in known else any(known)
    return ReplayView(packed, tuple(origins), cached=cached, has_masked_actions=masked)


def _check_views(views: object) -> Sequence[ReplayView]:
    if not isinstance(views, Sequence) or not all(isinstance(view, ReplayView) for view in views):
        raise ConfigInvalidError(
            f"concatenate: found {views!r}, expected a list of views of snapshots. Make each with "
            "snapshot.replay(...)."
        )
    if not views:
        raise EmptyReplayError(
            "concatenate: found no views, expected at least one. Make them with "
            "snapshot.replay(...)."
        )
    return views


def _join_layouts(views: Sequence[ReplayView]) -> RecordLayout:
    """Return the layout that holds all of them. Raises: SchemaMismatchError, ConfigInvalidError."""
    first = views[0]
    layout, spec = first.packed.records.layout, first.spec
    for view in views[1:]:
        if (differs := find_spec_mismatch(spec, view.spec)) is not None:
            raise SchemaMismatchError(
                f"datasets {first.names} and {view.names}: {differs}, expected one. Train on "
                "each alone, or ingest them with the same `env`."
            )
        spec = join_specs(spec, view.spec)
        other = view.packed.records.layout
        for option in ("columns", "float64", "frame_stack"):
            mine, its = getattr(layout, option), getattr(other, option)
            if mine != its:
                raise ConfigInvalidError(
                    f"replay of {first.names} and {view.names}: found {option} {mine} and {its}, "
                    "expected one. Open them with the same."
                )
    return replace(layout, spec=spec)


def _reopen(parts: Sequence[CachedPart]) -> ReplayView:
    """Map a view that another process sent. Raises: NotFoundError if it left the cache since."""
    return concatenate([part.open() for part in parts])


def join_packed(parts: Sequence[Packed], layout: RecordLayout, room: ArrayAllocator) -> Packed:
    """Copy the parts into `room`; where `layout` has action masks and a part none, all are true.

    Each brings its padding along, so that a window never reaches into the next part's records.
    Raises: StorageError.
    """
    lengths = [len(part.records.words) for part in parts]
    offsets = [sum(lengths[:number]) for number in range(len(parts))]
    shape = (sum(lengths), layout.num_words)
    words = room.allocate(RECORDS, shape, np.dtype(np.uint64))
    for part, offset, length in zip(parts, offsets, lengths, strict=True):
        _copy(part.records, layout, words[offset : offset + length], offset)
    steps = _shift_arrays([part.steps for part in parts], offsets, STEPS, room)
    bootstrappable = steps
    if any(len(part.bootstrappable) < len(part.steps) for part in parts):
        masks = [part.bootstrappable for part in parts]
        bootstrappable = _shift_arrays(masks, offsets, BOOTSTRAPPABLE_STEPS, room)
    return Packed(
        records=Records(layout, words, has_links=any(part.records.has_links for part in parts)),
        runs=_join_runs([part.runs for part in parts], offsets),
        steps=steps,
        bootstrappable=bootstrappable,
        num_steps=sum(part.num_steps for part in parts),
        num_episodes=sum(part.num_episodes for part in parts),
    )


def _copy(records: Records, layout: RecordLayout, words: NDArray[np.uint64], offset: int) -> None:
    """Copy records to their place, `offset` records from the beginning, a piece at a time."""
    is_same = records.layout.dtype == layout.dtype
    for start in range(0, len(words), _PIECE):
        piece = words[start : start + _PIECE]
        source = records.words[start : start + _PIECE]
        rows = layout.rows(piece)[:, 0]
        if is_same:
            piece[:] = source
        else:
            found = records.layout.rows(source)[:, 0]
            rows[schema.ACTION_MASK] = True
            for name in found.dtype.names or ():
                rows[name] = found[name]
        if records.has_links:
            links = np.flatnonzero((rows[STEPS_LEFT] == 0) & (rows[KEY][:, 0] > 0))
            rows[KEY][links, 0] += np.uint64(offset)


def _shift_arrays(
    arrays: Sequence[NDArray[np.int64]], offsets: Sequence[int], name: str, room: ArrayAllocator
) -> NDArray[np.int64]:
    joined: NDArray[np.int64] = room.allocate(
        name, (sum(len(array) for array in arrays),), np.dtype(np.int64)
    )
    start = 0
    for array, offset in zip(arrays, offsets, strict=True):
        np.add(array, offset, out=joined[start : start + len(array)])
        start += len(array)
    return joined


def _join_runs(parts: Sequence[Runs], offsets: Sequence[int]) -> Runs:
    moved = [
        replace(runs, starts=runs.starts + offset)
        for runs, offset in zip(parts, offsets, strict=True)
    ]
    return Runs(
        *(np.concatenate([getattr(runs, field.name) for runs in moved]) for field in fields(Runs))
    )
